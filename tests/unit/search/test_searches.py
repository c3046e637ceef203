"""In spaces of a million or a billion configs, nothing is listed and only needed configs are read."""

from __future__ import annotations

import functools
import json
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python

import quarantune
from quarantune import Outcome, Trial
from quarantune.search import searches
from quarantune.values.configs import Config
from quarantune.values.space import Space, WatchedConfig

BILLION = {"a": list(range(1000)), "b": list(range(1000)), "c": list(range(1000))}


def kernel() -> Any:
    """Returns a jitted function whose tunables do not change its result."""

    def f(x: Any, a: int = 0, b: int = 0, c: int = 0) -> Any:
        return x * 2

    return functools.partial(jax.jit, static_argnames=["a", "b", "c"])(f)


def many(count: int, read: list[int]) -> Iterator[Config]:
    for index in range(count):
        read.append(index)
        yield {"a": index % 100, "b": index // 100 % 100, "c": index // 10_000}


def test_a_grid_of_a_billion_is_tuned_by_reading_few_configs(cache_dir: Path) -> None:
    looked_at: list[Config] = []

    def prune(config: Config, x: Any) -> bool:
        looked_at.append(dict(config))
        return bool(config["a"] % 5 == 2 and config["b"] % 3 == 1)

    decorate = quarantune.autotune(BILLION, search="surrogate", max_trials=4, rep=1, prune_fn=prune)
    tuned = decorate(kernel())
    result = tuned.tune(jnp.ones(8))
    assert (len(result.trials), result.space_size) == (4, 10**9)
    assert all(trial.config["a"] % 5 == 2 and trial.config["b"] % 3 == 1 for trial in result.trials)
    assert len(looked_at) < 5000
    assert len(looked_at) == len({json.dumps(config, sort_keys=True) for config in looked_at}), (
        "no config is seen twice"
    )
    looked_at.clear()
    assert decorate(kernel()).lookup(jnp.ones(8)) == result.best_config
    assert not looked_at


def test_trying_a_billion_configs_is_refused_before_any_process(cache_dir: Path, no_process: None) -> None:
    tuned = quarantune.autotune(BILLION, search="exhaustive")(kernel())
    with pytest.raises(ValueError, match="at most 1,000,000 are all tried: let a search choose"):
        tuned.tune(jnp.ones(8))


def test_the_first_config_runs_before_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "_READ_FIRST_S", 0.01)
    read: list[int] = []
    space = Space(many(200_000, read))
    made = searches.make("surrogate", space)
    (first,) = made.ask(8)
    assert len(read) < 200_000
    assert made.ask(8) == []
    made.tell(first, Trial(config=first, outcome=Outcome.OK, time_ms=1.0))
    more = made.ask(8)
    assert (len(more), len(read)) == (8, 200_000)
    assert first not in more
    assert space.find({"a": 99, "b": 99, "c": 19}) == 199_999


@pytest.mark.parametrize("wide", [1, 10**9])
def test_configs_a_function_repeats_count_once(wide: int) -> None:
    configs = [{f"n{at}": (index * 7 + at) % 997 * wide for at in range(9)} for index in range(2000)]
    space = Space(iter(configs))
    assert space.whole() == 997
    assert [space.find(config) for config in configs[:997]] == list(range(997))
    assert space.find(configs[0] | {"n0": configs[1]["n0"]}) is None
    assert list(space) == configs[:997]


def test_a_saved_function_space_is_found_without_the_function(cache_dir: Path, tmp_path: Path) -> None:
    counts, notes = [700], tmp_path / "notes"

    def space(x: Any) -> Iterator[Config]:
        notes.write_text("it was called")
        return many(counts[0], [])

    def tuned(space: Any) -> Any:
        return quarantune.autotune(space, search="random", max_trials=2, rep=1, name="long")(kernel())

    result = tuned(space).tune(jnp.ones(8))
    notes.unlink()
    assert tuned(space).lookup(jnp.ones(8)) == result.best_config
    np.testing.assert_array_equal(tuned(space)(jnp.ones(8)), 2 * np.ones(8))
    assert not notes.exists()
    counts[0] = 20  # values that the function reaches belong to its fingerprint
    assert tuned(space).lookup(jnp.ones(8)) is None
    assert tuned(lambda x: many(700, [])).lookup(jnp.ones(8)) is None, "its code also belongs to it"


def test_a_file_gives_no_config_its_function_cannot_make(cache_dir: Path) -> None:
    def space(x: Any) -> Iterator[Config]:
        return many(20, [])

    def tuned() -> Any:
        return quarantune.autotune(space, max_trials=2, rep=1, name="edited")(kernel())

    tuned().tune(jnp.ones(8))
    (path,) = cache_dir.glob("edited.json")
    data = json.loads(path.read_text())
    (entry,) = (entry for entries in data.values() if isinstance(entries, dict) for entry in entries.values())
    for config in ({"zz": 3}, {"a": {"$type": "Plan"}}, {"x": 1}):
        entry["config"] = config
        path.write_text(json.dumps(data))
        with pytest.warns(quarantune.CacheWarning, match="is no longer in the config space"):
            assert tuned().lookup(jnp.ones(8)) is None


def test_configs_are_found_even_if_one_in_a_million_is_kept() -> None:
    asked = 0

    def keep(config: Config) -> bool:
        nonlocal asked
        asked += 1
        if config["bx"] * config["by"] not in (128, 256) or config["tx"] * config["bx"] % 64:
            return False
        return config["k"] * config["tx"] <= 96 and config["k"] % 7 == 3

    sizes = list(range(1, 101))
    space = Space({"bx": sizes, "by": sizes, "tx": sizes, "ty": sizes, "k": list(range(1, 33))}).where(keep)
    made = searches.make("surrogate", space)
    found = []
    for _ in range(20):
        (config,) = made.ask(1)
        assert keep(config)
        found.append(config)
        made.tell(config, Trial(config=config, outcome=Outcome.OK, time_ms=float(config["tx"])))
    assert len({json.dumps(config) for config in found}) == 20
    assert asked < 1_000_000, "fewer looks than one random find"


def test_reading_configs_singly_takes_little_longer() -> None:
    def time_of(read: Callable[[Space], object]) -> float:
        made = ({"A": number, "B": number % 7} for number in range(20_000))
        space = Space(made, reads_all=False).where(lambda config: False)
        start = time.process_time()
        read(space)
        return time.process_time() - start

    def all_at_once(space: Space) -> None:
        space.whole()
        assert not space.has_more_than(300)

    assert time_of(lambda space: space.has_more_than(300)) < 4 * time_of(all_at_once)


def test_a_watched_config_is_a_dict_that_notes_its_reads() -> None:
    def looked_at(look: Any) -> list[str]:
        config = WatchedConfig({"a": 1, "b": 2, "c": 3})
        look(config)
        return config.looked_at

    def all_of(a: int, b: int, c: int) -> int:
        return a + b + c

    assert looked_at(lambda config: config["b"] > 5 and config["a"]) == ["b"]
    assert looked_at(lambda config: config.get("c") and config["a"]) == ["c", "a"]
    assert looked_at(lambda config: "a" in config and len(config)) == []
    whole = [dict, json.dumps, repr, lambda config: {**config}, lambda config: all_of(**config)]
    for look in [*whole, lambda config: config.values(), lambda config: config == {}, lambda config: config | {}]:
        assert sorted(looked_at(look)) == ["a", "b", "c"]
    assert (WatchedConfig({"a": 1}) == {"a": 1}, repr(WatchedConfig({"a": 1})), dict(WatchedConfig({"a": 1}))) == (
        True,
        "{'a': 1}",
        {"a": 1},
    )


PROGRAM = """
import functools, resource, sys, time
import jax, jax.numpy as jnp
import quarantune
from quarantune.api.tuner import Tuner
from quarantune.calls.call import TunedFunction

def million(x):
    for i in range(1_000_000):
        yield {"a": i % 100, "b": i // 100 % 100, "c": i // 10_000}

def ten(x):
    for i in range(10):
        yield {"a": i, "b": 0, "c": 0}

grid = {name: list(range(1000)) for name in "abc"}
space = {"million": million, "ten": ten, "grid": grid}[sys.argv[1]]
options = {"prune_fn": lambda c, x: c["a"] % 7 == 3 and c["b"] % 5 == 1} if sys.argv[1] == "grid" else {}

@quarantune.autotune(space, search="surrogate", max_trials=4, rep=1, name=sys.argv[1], **options)
@functools.partial(jax.jit, static_argnames=["a", "b", "c"])
def double(x, a=0, b=0, c=0):
    return x * 2

x = jax.block_until_ready(jnp.ones(8))
started_s = time.process_time()
double(x)
print(time.process_time() - started_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_first_call_costs_the_same_for_any_number_of_configs(cache_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "double.py"
    script.write_text(textwrap.dedent(PROGRAM))

    def run(name: str) -> tuple[float, float]:
        cpu_s, peak_mb = python(script, name).split()
        return float(cpu_s), float(peak_mb)

    tuning = {name: run(name) for name in ("ten", "million", "grid")}
    assert max(peak_mb for _, peak_mb in tuning.values()) < tuning["ten"][1] + 150
    cached = {name: min(run(name)[0] for _ in range(3)) for name in tuning}
    assert max(cached.values()) < cached["ten"] + 0.1
