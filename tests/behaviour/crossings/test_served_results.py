"""What reads a result later takes the one that served the call, and not another one of its key."""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tuned_functions import here

import quarantune
from quarantune import Outcome, Trial, TuningResult
from quarantune.api.fit import _Fitting
from quarantune.api.tuner import Tuner
from quarantune.calls.key import keyed
from quarantune.calls.program import program_of
from quarantune.tuning import verification

pytestmark = pytest.mark.filterwarnings("ignore:.*(is no longer in the config space|for another program)")
X = np.linspace(-1, 1, 16, dtype=np.float32)
QUICK = {"rep": 1, "warmup": 0, "ref_fn": None}


def sums(name: str, configs: Any, **options: Any) -> quarantune.Autotuned[..., Any]:
    """Returns a tuned function whose program depends on a variable, which no key holds."""

    @quarantune.autotune(configs, **{**QUICK, "name": name, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def sine(x: Any, n: int = 4) -> Any:
        for _ in range(int(os.environ.get("TURNS_OF_SINE", "1"))):
            x = jnp.sin(x.reshape(n, -1)).reshape(x.shape)
        return x

    return sine


def cached(function: Any) -> TuningResult:
    with here():
        (found,) = quarantune.tune_many([(function, (X,))])
    assert found.from_cache is True
    return found


def entry_of(cache_dir: Path, name: str) -> dict[str, Any]:
    ((entry,),) = (entries.values() for entries in json.loads((cache_dir / f"{name}.json").read_text()).values())
    return dict(entry)


def values(trials: Any) -> set[int]:
    return {trial.config["n"] for trial in trials}


# --- trials and reports ---------------------------------------------------------------------------------------------


def test_trials_are_read_from_the_layer_that_served_the_call(name: str, cache_dir: Path, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    with here():
        sums(name, [{"n": 1}, {"n": 2}]).tune(X)
        with quarantune.settings(cache_dir=layer):
            told = sums(name, [{"n": 4}, {"n": 8}]).tune(X)
    with quarantune.settings(cache_path=[layer]):
        found = cached(sums(name, [{"n": 4}, {"n": 8}]))
    shown = found.with_trials()
    assert (shown.best_config, shown.time_ms) == (told.best_config, told.time_ms)
    assert values(shown.trials) == {4, 8}
    assert values(found._report_data().result.trials) == {4, 8}
    assert found.fn.keywords == shown.best_config  # type: ignore[attr-defined]


@pytest.mark.slow
def test_trials_of_another_program_are_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with here():
        told = sums(name, [{"n": 1}, {"n": 2}]).tune(X)
        monkeypatch.setenv("TURNS_OF_SINE", "2")
        sums(name, [{"n": 1}, {"n": 2}])(X)
    of_last = cached(sums(name, [{"n": 1}, {"n": 2}]))
    assert values(of_last.with_trials().trials) == {1, 2}
    monkeypatch.setenv("TURNS_OF_SINE", "1")
    found = cached(sums(name, [{"n": 1}, {"n": 2}]))
    assert (found.time_ms, found.created) == (told.time_ms, told.created)
    shown = found.with_trials()
    assert (shown.best_config, shown.time_ms, shown.trials) == (told.best_config, told.time_ms, ())


def test_a_remembered_result_shows_the_trials_of_its_sweep(name: str, cache_dir: Path) -> None:
    fn = sums(name, [{"n": 1}, {"n": 2}])
    with here():
        told = fn.tune(X)
    (cache_dir / f"{name}.json").write_text("{}")  # another job's work
    shown = cached(fn).with_trials()
    assert (shown.best_config, values(shown.trials)) == (told.best_config, {1, 2})
    assert shown.versions == told.versions


# --- verify ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every measurement of a winner by `verify` find that the defaults are far faster."""

    def swept(call: Any, configs: Any, tune: Any) -> TuningResult:
        winner = Trial(config=configs[0], outcome=Outcome.OK, time_ms=50.0)
        own = Trial(config=configs[-1], outcome=Outcome.OK, time_ms=1.0)
        return TuningResult(
            best_config=configs[-1],
            time_ms=1.0,
            default_config=configs[-1],
            default_time_ms=1.0,
            trials=(winner, own),
            key="",
            device="",
        )

    monkeypatch.setattr(verification, "swept", swept)


def shifted(x: Any, n: int = 4) -> Any:
    return x + n - n


def make_best(cache_dir: Path, name: str, **fields: Any) -> None:
    """Gives a function's only entry the least time, as if its machine had become slower since."""
    file = cache_dir / f"{name}.json"
    contents = json.loads(file.read_text())
    for entries in contents.values():
        for entry in entries.values():
            entry |= {"time_ms": 1e-6, "default_time_ms": 1e-3, "speedup_interval": [900, 1100], **fields}
    file.write_text(json.dumps(contents))


@pytest.mark.usefixtures("stale")
def test_a_stale_result_is_replaced_whatever_the_budget(name: str, cache_dir: Path) -> None:
    tuner = quarantune.AutoTuner(shifted, {"n": [1, 2, 3]}, **{**QUICK, "name": name})
    with here():
        tuner.run(X)
        make_best(cache_dir, name, config={"n": 2})
        with quarantune.settings(max_trials=2):
            (found,) = quarantune.TuningCache(cache_dir).verify(tuner, again=True).entries
    entry = entry_of(cache_dir, name)
    assert found.verdict == "tuned again", found
    assert entry["time_ms"] > 1e-6
    assert quarantune.TuningCache(cache_dir).get(*found.key) == entry["config"]
    assert f"tuned again: n={entry['config']['n']}" in found.reason
    assert entry.keys().isdisjoint({"stale", "other_programs"})


@pytest.mark.usefixtures("stale")
def test_a_result_that_could_not_be_saved_is_still_stale(
    name: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn = sums(name, [{"n": 1}, {"n": 2}])
    with here():
        fn.tune(X)
        result = cached(fn)
        monkeypatch.setattr(Tuner, "tune", lambda *_: result)
        (found,) = quarantune.TuningCache(cache_dir).verify(fn, again=True).entries
    assert found.verdict == "stale"
    assert found.reason.endswith("but the cache could not save it, and keeps its result")
    assert entry_of(cache_dir, name)["config"] == result.best_config


@pytest.mark.usefixtures("stale")
def test_verify_saves_in_its_directory_with_the_cache_off(name: str, cache_dir: Path) -> None:
    fn = sums(name, [{"n": 1}, {"n": 2}])
    with here():
        fn.tune(X)
        make_best(cache_dir, name)
        with quarantune.settings(disable_cache=True):
            (found,) = quarantune.TuningCache(cache_dir).verify(fn, again=True).entries
    assert found.verdict == "tuned again", found
    assert entry_of(cache_dir, name)["time_ms"] > 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("stale")
def test_verify_measures_the_result_of_the_program_that_calls_run(
    name: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with here():
        sums(name, [{"n": 1}, {"n": 2}])(X)
        monkeypatch.setenv("TURNS_OF_SINE", "2")
        sums(name, [{"n": 1}, {"n": 2}])(X)
    (other,) = entry_of(cache_dir, name)["other_programs"]
    monkeypatch.setenv("TURNS_OF_SINE", "1")
    with here():
        (found,) = quarantune.TuningCache(cache_dir).verify(sums(name, [{"n": 1}, {"n": 2}])).entries
        assert (found.verdict, found.saved_time_ms) == ("stale", other["time_ms"])
        (found,) = quarantune.TuningCache(cache_dir).verify(sums(name, [{"n": 1}, {"n": 2}]), again=True).entries
    assert found.verdict == "tuned again", found
    assert other not in [entry_of(cache_dir, name), *entry_of(cache_dir, name)["other_programs"]]
    assert len(entry_of(cache_dir, name)["other_programs"]) == 1, "the other program's result stays"


@pytest.mark.parametrize("time_grad", [False, True])
def test_a_saved_program_is_the_same_with_jit_turned_off(time_grad: bool, name: str) -> None:
    fn = sums(name, [{"n": 1}, {"n": 2}], time_grad=time_grad)
    found = []
    for turned_off in (False, True):
        with jax.disable_jit(turned_off):
            found.append(program_of(keyed(fn._tuner.bind((X,), {})), {"n": 2}, lowers=False))
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].identity == found[1].identity


# --- fit ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("is_setting", [False, True])
@pytest.mark.parametrize("numerics", ["bitwise", "batch_invariant"])
def test_fit_refuses_exact_numerics(numerics: str, is_setting: bool, name: str, cache_dir: Path) -> None:
    options = {"check_batch": 0} | ({} if is_setting else {"numerics": numerics})
    fn = sums(name, [{"n": 1}, {"n": 2}], **options)
    with (
        quarantune.settings(**({"numerics": numerics} if is_setting else {})),
        pytest.raises(ValueError, match=f"fit makes rules for other calls .* numerics='{numerics}' .* or use tune"),
    ):
        fn.fit([(np.ones(size, np.float32),) for size in (16, 32, 64)])
    assert not cache_dir.exists()


def test_a_rule_is_fitted_on_configs_of_the_list_alone(name: str) -> None:
    tuner = sums(name, [{"n": 1}, {"n": 2}])._tuner
    trials = tuple(Trial(config={"n": n}, outcome=Outcome.OK, time_ms=float(n)) for n in (1, 2, 3))
    result = TuningResult(best_config={"n": 1}, time_ms=1.0, trials=trials, key="", device="")
    row = _Fitting(tuner, 8, 0.03, math.inf)._row(keyed(tuner.bind((X,), {})), 1.0, result)
    assert row.times == {'{"n":1}': 1.0, '{"n":2}': 2.0}
