"""A remembered call obeys settings and results that changed since the last call."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tuned_functions import here

import quarantune
from quarantune import CacheMissError, CacheWarning, TuningCache

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.arange(4, dtype=np.float32)
CONFIGS = ({"n": 1}, {"n": 2})


def scaled(configs: Any = CONFIGS, *, name: str = "scaled", **options: Any) -> quarantune.Autotuned:
    @quarantune.autotune(configs, **{"rep": 1, "name": name, "ref_fn": None, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 0) -> Any:
        return x * (n + 1)

    return scale


# --- the places of results ---------------------------------------------------------------------------------


def test_each_block_fills_its_cache_with_a_known_call(tmp_path: Path, sweeps: list[str]) -> None:
    fn, x = scaled(), jax.numpy.asarray(X)
    with here():
        for place in ("a", "b", "a", "b"):
            with quarantune.settings(cache_dir=tmp_path / place):
                fn(x)
                fn(x)
                assert fn.lookup(x) is not None
        assert fn.lookup(x) is None
        fn(x)
    assert [(tmp_path / place / "scaled.json").exists() for place in "ab"] == [True, True]
    assert len(sweeps) == 3, "one for each cache"


def test_a_block_reads_its_layers_for_a_known_call(tmp_path: Path, sweeps: list[str]) -> None:
    fn, x = scaled(), jax.numpy.asarray(X)
    with quarantune.settings(on_miss="default"), pytest.warns(CacheWarning, match="not tuned for this call"):
        np.testing.assert_array_equal(fn(x), X)
    with here(), quarantune.settings(cache_dir=tmp_path):
        result = fn.tune(X)
        TuningCache().put(result.name, result.key, result.device, {"n": 2})
    sweeps.clear()
    with quarantune.settings(cache_path=tmp_path, on_miss="error"):
        np.testing.assert_array_equal(fn(x), 3 * X)
    with quarantune.settings(on_miss="error"), pytest.raises(CacheMissError):
        fn(x)
    assert not sweeps


# --- always_tune --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_block_that_always_tunes_does_so_once_for_each_call(sweeps: list[str]) -> None:
    scaled()(X)
    fn, x = scaled(), jax.numpy.asarray(X)
    for _ in range(3):
        fn(x)
        fn(X)
    assert len(sweeps) == 1, "the cache is filled, and the call is in memory"
    for block in range(2):
        with quarantune.settings(always_tune=True):
            for _ in range(3):
                fn(x)
                fn(X)
            with quarantune.settings(timeout=20):
                fn(x)
        fn(x)
        assert len(sweeps) == 2 + block
    block_of_its_own = quarantune.settings(always_tune=True)
    for again in range(2):
        with block_of_its_own:
            fn(x)
        assert len(sweeps) == 4 + again
    with quarantune.settings(always_tune=False):
        fn(x)
    assert len(sweeps) == 5


@pytest.mark.long
@pytest.mark.slow
def test_a_block_that_always_tunes_holds_for_tuners_and_jit(sweeps: list[str]) -> None:
    tuner = quarantune.AutoTuner(scaled().__wrapped__, CONFIGS, rep=1, ref_fn=None)
    tuner.run(X)
    with quarantune.settings(always_tune=True):
        assert not tuner.run(X).from_cache
        assert tuner.run(X).from_cache
        fn = scaled()
        jax.jit(lambda x: fn(x))(X)
        jax.jit(lambda x: fn(x) + 1)(X)
    assert len(sweeps) == 3


@pytest.mark.long
@pytest.mark.slow
def test_always_tune_in_the_environment_tunes_once_per_process(
    sweeps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled()(X)
    monkeypatch.setenv("QUARANTUNE_ALWAYS_TUNE", "1")
    fn = scaled()
    for _ in range(3):
        fn(X)
        fn(jax.numpy.asarray(X))
    assert len(sweeps) == 2


# --- compiler options ---------------------------------------------------------------------------------------


def test_a_result_has_no_compiler_options_its_config_lacked(tmp_path: Path, sweeps: list[str]) -> None:
    unusable = {"xla_no_such_option": True}
    configs = [{"n": 2}, {"n": 3, "compiler_options": unusable}, {"n": 4, "compiler_options": unusable}]
    fn = scaled(configs)
    result = fn.tune(X)
    assert result.best_config == {"n": 2}
    assert [trial.config for trial in result.trials] == configs
    assert "compiler_options" not in str(result)
    assert fn.lookup(X) == {"n": 2}
    for again in (scaled(configs), fn):
        np.testing.assert_array_equal(again(X), X * 3)
        assert again.lookup(X) == {"n": 2}
    assert len(sweeps) == 1
    result.save(tmp_path / "saved")
    loaded = quarantune.TuningResult.load(tmp_path / "saved", trusted=True)
    assert loaded.best_config == {"n": 2}
    np.testing.assert_array_equal(loaded.fn(X), X * 3)
    (verified,) = TuningCache().verify(fn).entries
    assert verified.verdict in ("current", "stale", "unclear"), "a call finds it"
    given = [{"n": 2, "compiler_options": {}}, configs[1]]
    assert scaled(given, name="given").tune(X).best_config == given[0]


# --- a miss -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_nearest_config_warns_once_for_each_function() -> None:
    fn, other = scaled(name="near"), scaled(name="far")
    fn(X), other(X)
    with quarantune.settings(on_miss="nearest"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (2, 3, 5, 6):
            np.testing.assert_array_equal(fn(np.ones(n, np.float32)), fn(np.ones(n, np.float32)))
            scaled(name="near")(np.ones(n + 10, np.float32))
        other(np.ones(3, np.float32))
    said = [str(warning.message).partition(":")[0] for warning in caught if warning.category is CacheWarning]
    assert said == ["near", "far"]


def test_a_tuner_runs_the_defaults_if_on_miss_allows_them(sweeps: list[str]) -> None:
    tuner = quarantune.AutoTuner(scaled().__wrapped__, CONFIGS, rep=1, name="untuned", ref_fn=None)
    with quarantune.settings(on_miss="default"):
        with pytest.warns(CacheWarning, match="untuned: not tuned for this call, running with its defaults"):
            result = tuner.run(X)
        again = tuner.run(X)
    for found in (result, again):
        assert found.best_config == {"n": 0}
        assert found.from_cache == "default"
        assert math.isnan(found.time_ms)
        np.testing.assert_array_equal(found.fn(X), X)
        assert "not tuned: the function's own defaults" in repr(found)
        assert found.table()
    assert sweeps == []
    assert tuner.run(X).best_config in CONFIGS


def test_a_tuner_without_defaults_names_the_setting_to_change() -> None:
    tuner = quarantune.AutoTuner(lambda x, n: x * n, CONFIGS, name="bare", rep=1)
    with quarantune.settings(on_miss="default"), pytest.raises(CacheMissError) as caught:
        tuner.run(X)
    assert str(caught.value).endswith("QUARANTUNE_ON_MISS=tune, or give its tunables defaults")


def test_a_miss_names_the_setting_that_lets_the_call_run() -> None:
    dropped = scaled({"n": [0, 1]}, name="dropped", prune_fn=lambda config, x: config["n"] > 0)
    whole = quarantune.contextual_autotune(lambda x: dropped(x), name="whole")
    for function in (dropped, whole):
        with quarantune.settings(on_miss="error"), pytest.raises(CacheMissError) as caught:
            function(X)
        assert str(caught.value).endswith("or allow defaults with QUARANTUNE_ON_MISS=default")
        with quarantune.settings(on_miss="default"), pytest.warns(CacheWarning, match="running with its defaults"):
            np.testing.assert_array_equal(function(X), X)


# --- a config put by hand -----------------------------------------------------------------------------------


def test_a_config_that_is_put_is_used_by_the_next_call(sweeps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fn, x = scaled(), jax.numpy.asarray(X)
    result = fn.tune(X)
    other = next(config for config in CONFIGS if config != result.best_config)
    fn(x), fn(X)
    monkeypatch.setenv("QUARANTUNE_VERSION_CHECK", "1")
    cache = TuningCache()
    cache.put(result.name, result.key, result.device, other)
    for again in (fn, scaled()):
        for given in (x, X):
            np.testing.assert_array_equal(again(given), X * (other["n"] + 1))
        assert again.lookup(X) == other
    tuner = quarantune.AutoTuner(scaled().__wrapped__, CONFIGS, name="scaled", rep=1, ref_fn=None)
    assert tuner.run(X).best_config == other
    cache.put(result.name, result.key, result.device, result.best_config)
    assert tuner.run(X).best_config == result.best_config
    assert len(sweeps) == 1


def test_a_config_put_elsewhere_or_outside_the_space_is_unused(tmp_path: Path, sweeps: list[str]) -> None:
    fn = scaled(name="elsewhere")
    result = fn.tune(X)
    other = next(config for config in CONFIGS if config != result.best_config)
    TuningCache(tmp_path / "elsewhere").put(result.name, result.key, result.device, other)
    assert fn.lookup(X) == result.best_config
    TuningCache().put(result.name, result.key, result.device, {"n": 7})
    with pytest.warns(CacheWarning, match=r"\{'n': 7\} is no longer in the config space"):
        assert fn.lookup(X) is None
    assert len(sweeps) == 1


def test_a_config_with_an_enum_or_a_dtype_can_be_put(sweeps: list[str]) -> None:
    configs = [{"to": jax.numpy.bfloat16}, {"to": np.float16}]

    @quarantune.autotune(configs, rep=1, ref_fn=None, name="cast")
    @jax.jit(static_argnames=["to"])
    def cast(x: Any, to: Any = np.float32) -> Any:
        return x.astype(to)

    result = cast.tune(X)
    for config in configs:
        TuningCache().put(result.name, result.key, result.device, config)
        assert cast(X).dtype == config["to"]
    assert len(sweeps) == 1
