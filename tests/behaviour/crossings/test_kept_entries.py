"""What entries hold, and which versions they serve: pairs with `tune_for`, numerics and several programs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import change_version
from tuned_functions import here

import quarantune
from quarantune import CacheMissError, CacheWarning, TuningCache
from quarantune.api.tune_for import tune_for
from quarantune.api.tuner import Tuner
from quarantune.calls.key import keyed

X, Y, Z = (np.linspace(-1, 1, size, dtype=np.float32) for size in (16, 64, 32))
VARIABLE = "MODE_OF_THE_TEST"
QUICK = {"rep": 1, "warmup": 0}


def moded(name: str, **options: Any) -> Any:
    """Returns a kernel that reads its mode from the environment, which no fingerprint shows."""

    @quarantune.autotune([{"n": 1}, {"n": 2}], **{**QUICK, "name": name, "ref_fn": None, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def scaled(x: Any, n: int = 1) -> Any:
        return x * (2.0 if os.environ.get(VARIABLE) == "two" else 3.0) + 1e-9 * n * jnp.cos(x)

    return scaled


def sums(name: str, configs: Any = ({"chunk": 32}, {"chunk": 16}), **options: Any) -> Any:
    """Returns a kernel whose configs add in different orders, so that their bits differ."""

    @quarantune.autotune(list(configs), **{**QUICK, "name": name, **options})
    @functools.partial(jax.jit, static_argnames=["chunk"])
    def total(x: Any, chunk: int = 64) -> Any:
        def add(found: Any, rows: Any) -> tuple[Any, None]:
            return found + rows.sum(0), None

        return jax.lax.scan(add, jnp.zeros(x.shape[1]), x.reshape(-1, chunk, x.shape[1]))[0]

    return total


def rows(count: int) -> Any:
    return np.random.default_rng(count).standard_normal((count, 4)).astype(np.float32)


def only_entry(of: Callable[[dict[str, Any]], bool] = lambda entry: True) -> dict[str, Any]:
    (entry,) = (record.entry for record in TuningCache() if of(record.entry))
    return entry


# --- tune_for ----------------------------------------------------------------------------------------------------


def test_a_result_of_tune_for_is_for_the_programs_of_all_its_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(moded, name, key_fn=lambda x: "all")
    with here():
        best = make().tune_for([(X,), (Y,)]).best_config
    for call in (X, Y, Z):
        assert make().lookup(call) == best
    monkeypatch.setenv(VARIABLE, "two")
    for call in (X, Y):
        with pytest.warns(CacheWarning, match="for another program than this call runs: its line"):
            assert make().lookup(call) is None
    assert make().lookup(Z) == best, "the bucket's other calls were not measured"


def test_tune_for_keeps_the_result_of_another_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with here():
        best = moded(name).tune(X).best_config
        monkeypatch.setenv(VARIABLE, "two")
        moded(name).tune_for([(X,)])
    for mode in ("two", "three"):
        monkeypatch.setenv(VARIABLE, mode)
        assert moded(name).lookup(X) is not None
    assert moded(name).lookup(X) == best


def test_tune_for_saves_what_a_sweep_saves(name: str, sweeps: list[str]) -> None:
    with here():
        sums(name, [{"chunk": 64}, {"chunk": 16}]).tune(rows(128))
        swept = only_entry()
        TuningCache().clear()
        result = sums(name, [{"chunk": 64}, {"chunk": 16}]).tune_for([(rows(128),), (rows(128) + 1,)])
    (entry,) = (record.entry for record in TuningCache() if "calls" in record.entry)
    assert {*swept} <= {*entry} | {"speedup_interval"}
    assert {trial.config["chunk"]: trial.bits for trial in result.trials} == {64: "same", 16: "other"}
    assert (entry["exact"]["config"], entry["exact"]["bits"]) == ({"chunk": 64}, "same")
    assert entry["samples"] >= 2
    sweeps.clear()
    with quarantune.settings(numerics="bitwise", on_miss="error"):
        assert sums(name, [{"chunk": 64}, {"chunk": 16}]).lookup(rows(128)) == {"chunk": 64}
    assert not sweeps


@pytest.mark.parametrize(
    ("search", "is_option"),
    [({}, False), pytest.param({"search": "random", "max_trials": 1}, True, marks=pytest.mark.slow)],
    ids=["a block", "an option and a search"],
)
def test_tune_for_falls_back_to_the_defaults_bits(name: str, search: dict[str, Any], is_option: bool) -> None:
    option: dict[str, Any] = {"numerics": "bitwise"} if is_option else {}
    demand: dict[str, Any] = {} if is_option else {"numerics": "bitwise"}
    fn = sums(name, ref_fn=None, key_fn=lambda x: "all", **search, **option)
    with here(), quarantune.settings(**demand):
        result = fn.tune_for([(rows(128),), (rows(256),)])
        assert result.best_config == {"chunk": 64}
        assert fn.lookup(rows(256)) == {"chunk": 64}


def test_bound_calls_keep_their_numerics_in_tune_for(name: str) -> None:
    fn = sums(name, [{"chunk": 64}, {"chunk": 16}], key_fn=lambda x: "all")
    calls = [fn._tuner.bind((rows(count),), {}) for count in (128, 256)]
    with here(), quarantune.settings(numerics="bitwise"):  # as `verify` does, for an entry of free numerics
        result = tune_for(Tuner(calls[0].function), calls, None, "total")
    assert result.key == keyed(calls[0]).id.key
    assert "exact" in only_entry(lambda entry: "calls" in entry)


# --- several programs --------------------------------------------------------------------------------------------


def test_a_result_for_other_arguments_replaces_no_refused_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(moded, name, key_fn=lambda x: "all")
    with here():
        make().tune(X)
        make().tune(Y)
    monkeypatch.setenv(VARIABLE, "two")
    with pytest.warns(CacheWarning, match="another program"):
        assert make().lookup(Y) is None


def test_caches_are_merged_with_the_results_of_each_program(
    name: str, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with here():
        moded(name).tune(X)
        monkeypatch.setenv(VARIABLE, "two")
        with quarantune.settings(cache_dir=tmp_path / "there"):
            moded(name).tune(X)
    TuningCache(cache_dir).merge(tmp_path / "there")
    for mode in ("two", "three"):
        monkeypatch.setenv(VARIABLE, mode)
        assert moded(name).lookup(X) is not None, mode


# --- versions and flags ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numerics", "changed"),
    [
        ("bitwise", "a flag"),
        ("batch_invariant", "a version"),
        pytest.param("batch_invariant", "a flag", marks=pytest.mark.slow),
        ("rounding", "a flag"),
        pytest.param("rounding, then bitwise", "a flag", marks=pytest.mark.slow),
    ],
)
def test_exact_results_are_for_the_compilers_that_made_them(
    numerics: str, changed: str, name: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, then = numerics.partition(", then ")
    options: dict[str, Any] = {"check_batch": 0} if first == "batch_invariant" else {}

    def fn() -> Any:
        return moded(name, numerics=first, **options)

    with here():
        fn().tune(rows(4))
    demanded: dict[str, Any] = {"numerics": then} if then else {}
    with quarantune.settings(**demanded, on_miss="error"):
        assert fn().lookup(rows(4)) is not None
        if changed == "a version":
            change_version(cache_dir, "jaxlib", "0.0.1")
        else:
            monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=true")
        if numerics == "rounding":
            assert fn().lookup(rows(4)) is not None
            return
        assert fn().lookup(rows(4)) is None
        with pytest.raises(CacheMissError, match=r"versions: .*(jaxlib 0.0.1|XLA_FLAGS .*) \(now .*\)"):
            fn()(rows(4))


def test_an_earlier_releases_entry_serves_ordinary_calls(name: str, tmp_path: Path) -> None:
    with here():
        moded(name).tune(X)
    ((key, entry),) = TuningCache()
    entry["versions"] = {part: entry["versions"][part] for part in ("jax", "jaxlib", "quarantune")}
    with quarantune.settings(cache_path=str(tmp_path / "there"), cache_dir=tmp_path / "new"):
        quarantune.cache.Store(tmp_path / "there").put(key.kernel_type, key.device, key.problem_size, entry)
        assert moded(name).lookup(X) == entry["config"]


def test_bits_in_the_journal_are_of_the_compilers_that_made_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resumed() -> dict[str, Any]:
        TuningCache()._on_disk().clear(name)
        sums(name, [{"chunk": 64}, {"chunk": 16}])(rows(128))  # continues from the journal
        return only_entry()

    with here():
        sums(name, [{"chunk": 64}, {"chunk": 16}]).tune(rows(128))
        assert "exact" in resumed()
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=true")
        assert "exact" not in resumed()
