"""A tuned call is never slower than the untuned one: calls run with the defaults if these beat every config."""

from __future__ import annotations

import enum
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import X, chained
from helpers import everywhere, isolated

import quarantune
from quarantune.measure import finals
from quarantune.values.trial import UNTUNED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_slots")]


class Turns(enum.Enum):
    FEW = 3


class Opaque:
    """A default that no JSON can hold."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.value == self.value


@everywhere
def test_calls_run_with_defaults_that_beat_every_config(
    isolation: str, cache_dir: Path, caplog: pytest.LogCaptureFixture, sweeps: list[str]
) -> None:
    fn = chained()
    with isolated(isolation):
        result = fn.tune(X)
    assert result.best_config == {"n": 3}
    assert result.default_config == {"n": 3}
    assert result.speedup == 1.0
    assert [trial.config for trial in result.trials] == [{"n": 300}, {"n": 400}]
    assert caplog.messages.count("chained: its own defaults (n=3) beat all 2 configs: calls run with them") == 1
    assert "the function's own defaults (n=3) beat every config: calls run with them" in result.table(width=200)
    (entries,) = json.loads((cache_dir / "chained.json").read_text()).values()
    (entry,) = entries.values()
    assert entry["config"] == {"n": 3}
    assert entry["time_ms"] == entry["default_time_ms"]
    assert len(sweeps) == 1
    np.testing.assert_array_equal(fn(X), X)
    fresh = chained()
    assert fresh.lookup(X) == {"n": 3}
    np.testing.assert_array_equal(fresh(X), X)
    assert len(sweeps) == 1, "the cache has the entry"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "config"), [(Turns.FEW, {"n": Turns.FEW}), (Opaque(3), {})], ids=["an enum", "an object"]
)
def test_defaults_of_any_kind_can_win_and_are_found_again(own: Any, config: Any) -> None:
    result = chained(default=own).tune(X)
    assert result.best_config == config
    np.testing.assert_array_equal(result.fn(X), X)
    fresh = chained(default=own)
    assert fresh.lookup(X) == result.best_config
    np.testing.assert_array_equal(fresh(X), X)


FAST = {"xla_cpu_enable_fast_min_max": True}
WITH_OPTIONS: dict[str, Any] = {
    "some have options": [{"n": 300, "compiler_options": FAST}, {"n": 400}],
    "a grid": {"n": [300, 400], "compiler_options": [{}, FAST]},
    "a callable": lambda x: [{"n": 300, "compiler_options": FAST}],
    "a callable under key_fn": lambda x: [{"n": 300, "compiler_options": FAST}],
}


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_defaults_that_beat_configs_with_options_are_found_again(name: str, sweeps: list[str]) -> None:
    options = {"key_fn": lambda x: {"rows": len(x)}} if "key_fn" in name else {}
    fn, fresh, tuner = (chained(WITH_OPTIONS[name], **options) for _ in range(3))
    assert fn.tune(X).best_config == {"n": 3}
    assert fresh.lookup(X) == {"n": 3}
    np.testing.assert_array_equal(fresh(X), X)
    again = quarantune.AutoTuner(tuner.__wrapped__, WITH_OPTIONS[name], name="chained", timeout=60, **options).run(X)
    assert (again.best_config, again.from_cache) == ({"n": 3}, True)
    assert len(sweeps) == 1


@pytest.mark.long
@pytest.mark.slow
def test_defaults_of_any_kind_that_beat_options_are_found_again(sweeps: list[str]) -> None:
    for own, config in ((Turns.FEW, {"n": Turns.FEW}), (Opaque(3), {})):
        configs = [{"n": 300, "compiler_options": FAST}]
        name = f"chained {type(own).__name__}"
        assert chained(configs, own, name=name).tune(X).best_config == config
        assert chained(configs, own, name=name).lookup(X) == config


def test_a_saved_result_of_the_defaults_has_its_program(tmp_path: Path) -> None:
    chained().tune(X).save(tmp_path / "saved")
    loaded = quarantune.TuningResult.load(tmp_path / "saved", trusted=True)
    assert loaded.best_config == loaded.default_config == {"n": 3}
    np.testing.assert_array_equal(loaded.fn(X), X)


def test_a_config_that_beats_the_defaults_wins_as_before(caplog: pytest.LogCaptureFixture) -> None:
    result = chained([{"n": 3}, {"n": 300}], default=400).tune(X)
    assert result.best_config == {"n": 3}
    assert result.default_config == {"n": 400}
    assert result.speedup is not None
    assert result.speedup > 1
    assert "beat" not in caplog.text


def test_defaults_that_fail_or_are_in_the_list_change_nothing() -> None:
    assert chained([{"n": 3}, {"n": 300}]).tune(X).best_config == {"n": 3}
    assert chained([{"n": 3}, {"n": 300}], default="no number").tune(X).best_config == {"n": 3}


def test_a_search_may_end_with_the_defaults() -> None:
    result = chained({"n": list(range(300, 420, 10))}, search="random", max_trials=3).tune(X)
    assert result.best_config == {"n": 3}
    assert result.stopped == "max_trials"


@pytest.mark.long
@pytest.mark.slow
def test_a_shorter_list_is_compared_with_the_defaults_too(swept: list[list[Any]]) -> None:
    slower = [{"n": 300}, {"n": 310}, {"n": 320}]
    chained(slower).tune(X)
    assert chained(slower[:2]).lookup(X) is None
    np.testing.assert_array_equal(chained(slower[:2])(X), X)
    assert chained(slower[:2]).lookup(X) == {"n": 3}
    assert swept == [[300, 310, 320]]


@pytest.mark.long
def test_a_near_call_uses_the_defaults_that_won(sweeps: list[str]) -> None:
    fn = chained()
    fn.tune(X)
    tuner = quarantune.AutoTuner(fn.__wrapped__, [{"n": 300}, {"n": 400}], name="chained", timeout=60)
    with quarantune.settings(on_miss="nearest"), pytest.warns(quarantune.CacheWarning, match="nearest entry"):
        assert tuner.run(X[:32, :32]).best_config == {"n": 3}
    assert len(sweeps) == 1


@pytest.mark.long
@pytest.mark.slow
def test_the_winner_of_a_sweep_on_an_engine_may_be_the_defaults() -> None:
    with ThreadPoolExecutor(2) as engine:
        result = chained([{"n": n} for n in range(300, 318)]).tune(X, executor=engine)
    assert result.best_config == {"n": 3}
    assert result.speedup == 1.0


def test_defaults_win_only_if_they_are_clearly_quicker() -> None:
    level = {UNTUNED: [1.0] * 9, 0: [1.004] * 9, 1: [1.1] * 9}
    assert finals.decide(level, default=None) == [0]
    assert finals.decide({**level, UNTUNED: [1.004] * 9, 0: [1.0] * 9}, default=None) == [0]
    assert finals.decide({**level, UNTUNED: [1.0] * 9, 0: [1.0] * 9}, default=None) == [0]
    assert finals.decide({**level, UNTUNED: [0.99] * 9}, default=None) == [UNTUNED]


@pytest.mark.slow
def test_verify_accepts_an_entry_of_the_defaults() -> None:
    fn = chained()
    fn.tune(X)
    (verified,) = quarantune.TuningCache().verify(fn).entries
    assert verified.verdict == "current"
    assert verified.reason == "it is the defaults, and works"
