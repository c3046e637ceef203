"""A sweep ends with its budget, continues with a larger one, and starts from earlier results."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from aftermath import MARK, eventually, nothing_is_left, quiet_place  # noqa: F401
from helpers import SUPPORT, child_environ

import quarantune
from quarantune.values.configs import Config
from quarantune.values.trial import Outcome, Trial

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_slots")]

LARGE = {"a": list(range(100)), "b": list(range(100))}
SMALL = [{"a": a} for a in range(12)]


def pause(x: Any, *, a: int = 0, b: int = 0) -> Any:
    time.sleep(3e-3 * (1 + min(abs(a - 7), 12)) + 0.06 * (a != 7))  # more than a busy machine adds
    return x


def tuner(configs: Any = SMALL, **options: Any) -> quarantune.AutoTuner:
    return quarantune.AutoTuner(pause, configs, **{"rep": 1, "warmup": 0, "search": "exhaustive", **options})


def journalled(cache_dir: Path) -> list[Config]:
    """Returns the config of each record in all journals of trials."""
    lines = [line for file in cache_dir.glob("*.trials/*.jsonl") for line in file.read_text().splitlines()]
    records = [json.loads(line.split(" ", 1)[1]) for line in lines]
    return [record["trial"]["config"] for record in records if "limits" in record]


def entry(cache_dir: Path) -> dict[str, Any]:
    (file,) = cache_dir.glob("*.json")
    ((found,),) = [entries.values() for entries in json.loads(file.read_text()).values()]
    return dict(found)


@pytest.mark.usefixtures("quiet_place")
def test_a_time_budget_ends_a_search_of_10_000_configs_in_time() -> None:
    started_s = time.monotonic()
    result = tuner(LARGE, search="auto", time_budget=5, compile_timeout=60, timeout=60).run(1.0)
    took_s = time.monotonic() - started_s
    assert took_s < 5 + 120, "the budget and one trial"
    assert result.stopped == "time_budget"
    assert result.space_size == 10_000
    assert result.seen is not None
    assert 1 <= result.seen < 5000
    outcomes = {trial.outcome for trial in result.trials}
    assert Outcome.OK in outcomes
    assert outcomes <= {Outcome.OK, Outcome.SLOW, Outcome.NOT_RUN}
    assert result.seen == sum(trial.outcome is not Outcome.NOT_RUN for trial in result.trials)


@functools.partial(jax.jit, static_argnames=["a", "b"])
def half_of_its_space_fails(x: Any, a: int = 0, b: int = 0) -> Any:
    if a + b > 20:
        raise ValueError("this tile is too large")
    turns = 3000 * (1 + (a - 7) ** 2 + (b - 5) ** 2)
    return jax.lax.fori_loop(0, turns, lambda turn, y: 1.0001 * y + 0.5, x)


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize("isolation", ["process", "compile"])
@pytest.mark.long
def test_auto_leaves_out_the_half_of_a_space_that_fails(isolation: str) -> None:
    space = {"a": list(range(21)), "b": list(range(21))}
    kernel = quarantune.AutoTuner(half_of_its_space_fails, space, ref_fn=None, rep=3)
    with quarantune.settings(isolation=isolation):
        result = kernel.run(jnp.ones(64))
    assert result.stopped == "no_gain"
    assert result.space_size == 441
    assert result.seen is not None
    assert result.seen <= 220, "a half of the space at most"
    assert sum(result.counts[outcome] for outcome in ("ok", "slow")) <= 150
    assert abs(result.best_config["a"] - 7) + abs(result.best_config["b"] - 5) <= 1
    assert kernel.run(jnp.ones(64)).from_cache, "the budget is not larger"


def test_a_larger_budget_continues_from_the_journal(cache_dir: Path, sweeps: list[str]) -> None:
    first = tuner(max_trials=4).run(1.0)
    assert (first.stopped, first.seen, first.space_size, len(first.trials)) == ("max_trials", 4, 12, 4)
    assert entry(cache_dir)["search"]["seen"] == 4

    again = tuner(max_trials=4).run(1.0)
    assert (again.from_cache, again.stopped, again.seen, again.space_size) == (True, "max_trials", 4, 12)
    assert tuner().run(1.0).from_cache, "a result suffices unless the budget is larger"
    assert len(sweeps) == 1

    larger = tuner(max_trials=9).run(1.0)
    assert not larger.from_cache
    assert (larger.seen, larger.best_config["a"]) == (9, 7)
    assert len(journalled(cache_dir)) == 9, "four configs are known"

    assert tuner(max_trials=6).run(1.0).from_cache, "the entry is from a larger budget"
    with quarantune.settings(max_trials=12):
        assert tuner(max_trials=2).run(1.0).stopped == "exhausted"
    assert len(journalled(cache_dir)) == 12
    assert entry(cache_dir)["search"] == {
        "name": "exhaustive",
        "seed": 0,
        "stopped": "exhausted",
        "seen": 12,
        "space_size": 12,
        "budget": None,
    }


@pytest.mark.long
def test_tune_spends_the_rest_of_a_budget_or_starts_over(cache_dir: Path) -> None:
    def kernel(**options: Any) -> quarantune.AutoTuner:
        return tuner(LARGE, search="random", **options)

    kernel(max_trials=3).run(1.0)
    with quarantune.settings(always_tune=True):
        assert kernel(max_trials=5).run(1.0).seen == 5
        assert len(journalled(cache_dir)) == 5
        assert kernel(max_trials=5).run(1.0).seen == 5
    assert len(journalled(cache_dir)) == 5, "a new journal holds new measurements of all"
    with quarantune.settings(always_tune=True, max_trials=2):
        worse = kernel().run(1.0)
    assert worse.seen == 2
    assert entry(cache_dir)["search"]["seen"] == 5 or entry(cache_dir)["time_ms"] == worse.time_ms


PROGRAM = """
import logging, sys
from pathlib import Path
sys.path[:0] = {tests!r}
import quarantune
from test_budgets import LARGE, pause

if __name__ == "__main__":
    logging.getLogger("quarantune").addHandler(logging.FileHandler({log!r}))
    logging.getLogger("quarantune").setLevel(logging.INFO)
    tuner = quarantune.AutoTuner(pause, LARGE, rep=1, warmup=0, search="random", seed=5, max_trials={most})
    result = tuner.run(1.0)
    Path({log!r} + ".seen").write_text(f"{{result.seen}} {{result.stopped}}")
"""


@pytest.mark.long
@pytest.mark.usefixtures("quiet_place")
def test_a_killed_search_continues_and_measures_nothing_twice(tmp_path: Path, cache_dir: Path) -> None:
    log, program = tmp_path / "log", tmp_path / "program.py"

    def start(most: int) -> subprocess.Popen[bytes]:
        text = PROGRAM.format(tests=[str(SUPPORT), str(Path(__file__).parent)], log=str(log), most=most)
        program.write_text(text, encoding="utf-8")
        return subprocess.Popen([sys.executable, str(program)], env=child_environ())

    process = start(5000)
    assert eventually(lambda: len(journalled(cache_dir)) >= 6, timeout_s=200)
    process.send_signal(signal.SIGKILL)
    process.wait()
    most = len(journalled(cache_dir)) + 6
    assert start(most).wait() == 0
    assert (tmp_path / "log.seen").read_text() == f"{most} max_trials"
    measured = [tuple(config.items()) for config in journalled(cache_dir)]
    assert len(measured) == len(set(measured)) == most


def test_a_second_shape_starts_from_the_winner_of_the_first() -> None:
    small, other, large = np.ones(256, np.float32), np.ones(16, np.float32), np.ones(512, np.float32)
    configs = [{"a": a, "b": b} for a in range(12) for b in range(2)]

    def searched(x: Any, **options: Any) -> quarantune.TuningResult:
        return tuner(configs, search="random", **options).run(x)

    best = searched(small, max_trials=24).best_config
    assert best["a"] == 7
    searched(other, max_trials=1)
    second = searched(large, max_trials=2)
    assert {"a": 0, "b": 0} in [trial.config for trial in second.trials], "the function's own defaults"
    assert second.best_config["a"] == 7
    assert second.seen == 2


@pytest.mark.long
def test_in_this_process_searches_have_the_same_budgets(recwarn: pytest.WarningsRecorder) -> None:
    with quarantune.settings(isolation="none", disable_cache=True):
        result = tuner(LARGE, search="random", max_trials=5).run(1.0)
        assert (result.stopped, result.seen, len(result.trials)) == ("max_trials", 5, 5)
        timed = tuner(LARGE, search="random", time_budget=1.0).run(1.0)
        assert timed.stopped == "time_budget"
        assert timed.seen == len(timed.trials) < 5000


@pytest.mark.long
def test_searches_measured_here_have_the_same_budgets() -> None:
    @functools.partial(jax.jit, static_argnames=["a", "b"])
    def kernel(x: Any, a: int = 0, b: int = 0) -> Any:
        return x + a * b - a * b

    with quarantune.settings(isolation="compile", disable_cache=True):
        search = quarantune.AutoTuner(kernel, LARGE, rep=1, search="random", max_trials=11, time_budget=1000)
        result = search.run(jnp.ones(4))
        assert (result.stopped, result.seen, len(result.trials)) == ("max_trials", 11, 11)
        assert result.trials[0].config == {"a": 0, "b": 0}
        short = quarantune.AutoTuner(kernel, LARGE, rep=1, search="random", time_budget=1.5).run(jnp.ones(4))
        assert short.stopped == "time_budget"
        assert short.seen is not None
        assert short.seen < 5000


def test_each_kernel_of_a_function_gets_its_share_of_the_trials() -> None:
    def kernel(name: str) -> Any:
        @quarantune.autotune([{"n": n} for n in range(6)], name=name, rep=1, ref_fn=None)
        @functools.partial(jax.jit, static_argnames=["n"])
        def scale(x: Any, n: int = 0) -> Any:
            return x + n

        return scale

    one, two = kernel("one"), kernel("two")

    @quarantune.contextual_autotune(rep=1, ref_fn=None, max_trials=7, search="random", name="whole")
    def whole(x: Any) -> Any:
        return two(one(x))

    result = whole.tune(jnp.ones(4))
    assert [len(choice.trials) for choice in result.kernels] == [3, 4]
    assert (result.stopped, result.seen, result.space_size) == ("max_trials", 7, 12)


class Downhill:
    """Asks the neighbours of the best config, one after another."""

    def __init__(self) -> None:
        self.best: tuple[float, int] = (float("inf"), 0)
        self.seen: set[int] = set()

    def ask(self, n: int) -> list[Config]:
        here = self.best[1]
        new = [a for a in (here, here + 1, here + 2, here - 1) if 0 <= a < len(SMALL) and a not in self.seen][:n]
        self.seen.update(new)
        return [{"a": a} for a in new]

    def tell(self, config: Config, trial: Trial) -> None:
        if trial.merit is not None and trial.outcome is Outcome.OK:
            self.best = min(self.best, (trial.merit, config["a"]))


@pytest.mark.long
def test_a_users_own_search_decides_what_is_tried() -> None:
    search = Downhill()
    result = tuner(search=search).run(1.0)
    assert result.best_config["a"] in search.seen, "neighbours are close, and a busy machine may hide the best of them"
    assert {trial.config["a"] for trial in result.trials} == search.seen


def test_a_search_whose_configs_all_fail_names_only_those(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Any, *, a: int = 0) -> Any:
        raise ArithmeticError(f"a={a} is bad")

    monkeypatch.setenv("QUARANTUNE_MAX_TRIALS", "3")
    with pytest.raises(quarantune.TuningFailedError, match="All 3 configs failed") as failed:
        quarantune.AutoTuner(fails, SMALL, search="random").run(1.0)
    assert len(failed.value.trials) == 3


@pytest.mark.long
def test_outputs_are_compared_during_a_search(caplog: pytest.LogCaptureFixture) -> None:
    @functools.partial(jax.jit, static_argnames=["a"])
    def kernel(x: Any, a: int = 99) -> Any:
        if a == 99:
            raise ArithmeticError("the defaults fail")
        return x * (2 if a == 3 else 1)

    result = quarantune.AutoTuner(kernel, SMALL, rep=1, search="random", max_trials=12).run(jnp.ones(8))
    wrong = [trial.config["a"] for trial in result.trials if trial.outcome is Outcome.WRONG]
    assert wrong == [3]
    assert "configs were compared with each other" in caplog.text


def test_a_grid_of_100_000_starts_at_once_and_stays_small(cache_dir: Path) -> None:
    large = {name: list(range(10)) for name in "abcde"}

    def kernel(x: Any, *, a: int, b: int, c: int, d: int, e: int) -> Any:
        return x

    looked_at: list[Config] = []

    def prune(config: Config, x: Any) -> bool:
        looked_at.append(config)
        return config["a"] > 0

    before_bytes = psutil.Process().memory_info().rss
    fn = quarantune.AutoTuner(kernel, large, rep=1, search="random", max_trials=3, prune_fn=prune)
    result = fn.run(1.0)
    assert psutil.Process().memory_info().rss - before_bytes < 200e6
    assert (result.seen, result.space_size) == (3, 100_000)
    assert len(looked_at) < 1000
    assert fn.run(1.0).from_cache
    looked_at.clear()  # a rule with new values is a new rule
    again = quarantune.AutoTuner(kernel, large, rep=1, search="random", max_trials=3, prune_fn=prune).run(1.0)
    assert (again.from_cache, again.best_config) == (True, result.best_config)
