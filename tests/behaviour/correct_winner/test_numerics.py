"""Every trial knows its bits; with `numerics="bitwise"`, tuning changes none."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import change_version, ends, everywhere, isolated
from tuned_functions import here

import quarantune
from quarantune.functions.binding import bind_config
from quarantune.host.process import in_sandbox
from quarantune.results.bits_report import exact_winner
from quarantune.values.trial import Outcome, Trial

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
X[0] = 1
KINDS = {"plain": "same", "unroll": "same", "order": "other", "sign": "other", "moved": "other", "race": "unstable"}
_runs = itertools.count()


def nth(_: Any) -> Any:
    """Returns another number in each run."""
    assert in_sandbox()
    return np.int32(next(_runs) % 11)


@functools.partial(jax.jit, static_argnames=["kind"])
def total(x: Any, kind: str = "plain") -> Any:
    """Adds rows up: in another order, in a race, or with other bits where a check of values cannot see them."""

    def add(sums: Any, rows: Any) -> Any:
        return sums + rows.sum(0), None

    rows = x.reshape(-1, 8 if kind == "order" else 16, x.shape[-1])
    sums, _ = jax.lax.scan(add, jnp.zeros(x.shape[-1], x.dtype), rows, unroll=4 if kind == "unroll" else 1)
    sums = jnp.where(jnp.arange(sums.size) == 3, 0.0, sums)
    if kind == "sign":
        return jnp.where(sums == 0, -0.0, sums)
    if kind == "moved":
        return jnp.where(jnp.all(x[0] == 1), sums, jnp.nextafter(sums, jnp.inf))
    if kind == "race":
        return sums * (1 + jax.pure_callback(nth, jax.ShapeDtypeStruct((), jnp.int32), x[0, 0]) * 2.0**-23)
    return sums


@functools.partial(jax.jit, static_argnames=["do"])
def nearly(x: Any, do: str = "exact") -> Any:
    """Returns twice its argument, or the next number."""
    return jnp.nextafter(2 * x, jnp.inf) if do == "next" else x + x if do == "sum" else 2 * x


@functools.partial(jax.jit, static_argnames=["do"])
def slowly(x: Any, do: str = "exact") -> Any:
    """The same, with defaults that take far longer than the configs `next` and `soon`."""
    y = nearly(x, do)
    return y if do in ("next", "soon") else jax.lax.fori_loop(0, 100, lambda _, y: 0 * jnp.sin(y) + 2 * x, y)


def found(result: quarantune.TuningResult, name: str = "kind") -> dict[str, str | None]:
    return {trial.config[name]: trial.bits for trial in result.trials}


def check_kinds(x: Any) -> None:
    result = quarantune.AutoTuner(total, {"kind": list(KINDS)}, rep=5).run(x)
    assert found(result) == KINDS
    assert set(ends(result.trials)) == {"ok"}
    assert {row["kind"]: row["bits"] for row in result.to_dicts()} == KINDS
    (tunable,) = result.bits().tunables
    assert (tunable.pairs, tunable.differ) == (10, 9)  # the config with the race makes no pairs
    assert "bits: kind sometimes (9 of 10)" in result.table(width=120)


def check_exact_kinds(x: Any) -> None:
    with quarantune.settings(always_tune=True):
        exact = quarantune.AutoTuner(total, {"kind": list(KINDS)}, rep=5, numerics="bitwise").run(x)
    told = {trial.config["kind"]: trial.message for trial in exact.trials if trial.outcome == "wrong"}
    assert told.keys() == {kind for kind, bits in KINDS.items() if bits != "same"}
    assert "of 16 elements, at most" in told["order"]
    assert "other bits in 1 of 16 elements, in signs of zeros" in told["sign"]
    assert "on inputs that are moved" in told["moved"]
    assert exact.best_config["kind"] in ("plain", "unroll")


def test_configs_are_told_by_their_bits() -> None:
    check_kinds(X)


@pytest.mark.slow
def test_only_configs_with_the_defaults_bits_may_win() -> None:
    check_exact_kinds(X)


@pytest.mark.long
@pytest.mark.slow
def test_each_kind_of_bits_is_found_every_time() -> None:
    for seed in range(20):
        x = np.random.default_rng(seed).normal(size=X.shape).astype(np.float32)
        x[0] = 1
        with quarantune.settings(disable_cache=True):
            check_kinds(x)
            check_exact_kinds(x)


@everywhere
def test_defaults_that_are_no_config_decide_the_bits(isolation: str) -> None:
    tuner = quarantune.AutoTuner(nearly, {"do": ["next", "sum"]}, numerics="bitwise", rep=3)
    with isolated(isolation):
        result = tuner.run(X)
    assert found(result, "do") == {"next": "other", "sum": "same"}
    assert ends(result.trials) == ["wrong", "ok"]
    assert (
        "at most 1 unit in the last place, compared with the defaults (numerics='bitwise')" in result.trials[0].message
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"ref_fn": None}, {"ref_fn": lambda x: 2 * x, "rtol": 1e-3}, {"check_fn": lambda *_: True}]
)
def test_bits_are_those_of_the_defaults_whatever_judges_values(options: dict[str, Any]) -> None:
    ordinary = quarantune.AutoTuner(nearly, {"do": ["next", "sum", "exact"]}, rep=3, **options).run(X)
    assert found(ordinary, "do") == {"next": "other", "sum": "same", "exact": "same"}
    with quarantune.settings(always_tune=True):
        exact = quarantune.AutoTuner(nearly, {"do": ["next", "sum", "exact"]}, rep=3, numerics="bitwise", **options)
        assert ends(exact.run(X).trials) == ["wrong", "ok", "ok"]


def test_calls_run_with_the_defaults_if_no_config_has_their_bits() -> None:
    tuned = quarantune.autotune({"do": ["next"]}, numerics="bitwise", rep=3)(nearly)
    np.testing.assert_array_equal(tuned(X), 2 * X)
    assert tuned.lookup(X) == {"do": "exact"}


@pytest.mark.slow
def test_configs_have_no_bits_to_keep_if_the_defaults_fail() -> None:
    @functools.partial(jax.jit, static_argnames=["n"])
    def fails(x: Any, n: int = 0) -> Any:
        return x.reshape(n, -1) if n == 0 else x

    with pytest.raises(quarantune.TuningFailedError, match="no output of the defaults to compare its bits with"):
        quarantune.AutoTuner(fails, {"n": [1, 2]}, numerics="bitwise").run(X)


@pytest.mark.slow
def test_gradients_count_if_they_are_checked() -> None:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def square(x: Any, do: str) -> Any:
        return x * x

    def forward(x: Any, do: str) -> Any:
        return x * x, x

    def backward(do: str, x: Any, cotangent: Any) -> Any:
        return (nearly.__wrapped__(x * cotangent, do),)

    square.defvjp(forward, backward)

    @functools.partial(jax.jit, static_argnames=["do"])
    def fn(x: Any, do: str = "exact") -> Any:
        return square(x, do)

    options: dict[str, Any]
    for options in ({"time_grad": True}, {"check_grad": True}):
        result = quarantune.AutoTuner(fn, {"do": ["exact", "sum", "next"]}, numerics="bitwise", rep=3, **options).run(X)
        assert ends(result.trials) == ["ok", "ok", "wrong"]
        assert "the gradient ['args[0]'] has other bits" in result.trials[2].message
    assert set(found(quarantune.AutoTuner(fn, {"do": ["exact", "next"]}, rep=3).run(X), "do").values()) == {"same"}


@pytest.mark.slow
def test_plain_callables_have_bits() -> None:
    def fn(x: Any, do: str = "exact") -> Any:
        return np.nextafter(2 * x, np.float32(np.inf)) if do == "next" else 2 * x

    result = quarantune.AutoTuner(fn, {"do": ["exact", "next"]}, rep=3).run(X)
    assert found(result, "do") == {"exact": "same", "next": "other"}


# --- after an ordinary sweep -----------------------------------------------------------------------------------


def test_a_bitwise_call_after_an_ordinary_sweep_starts_no_worker(sweeps: list[str]) -> None:
    ordinary = quarantune.AutoTuner(nearly, {"do": ["exact", "next", "sum"]}, rep=3).run(X)
    assert len(sweeps) == 1
    exact = quarantune.AutoTuner(nearly, {"do": ["exact", "next", "sum"]}, rep=3, numerics="bitwise").run(X)
    assert exact.from_cache
    assert exact.best_config in ({"do": "exact"}, {"do": "sum"})
    assert exact.time_ms == next(t.time_ms for t in ordinary.trials if t.config == exact.best_config)
    tuned = quarantune.autotune({"do": ["exact", "next", "sum"]})(nearly)
    with quarantune.settings(numerics="bitwise", on_miss="error"):
        assert tuned.lookup(X) == exact.best_config
    assert tuned.lookup(X) == ordinary.best_config
    assert len(sweeps) == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no longer in the config space")  # of a winner that the last list lacks
def test_an_ordinary_sweep_of_other_configs_or_versions_does_not_serve(sweeps: list[str], cache_dir: Path) -> None:
    quarantune.AutoTuner(nearly, {"do": ["exact", "next"]}, rep=3).run(X)
    exact = quarantune.AutoTuner(nearly, {"do": ["exact", "next", "sum"]}, rep=3, numerics="bitwise")
    assert not exact.run(X).from_cache
    assert len(sweeps) == 2
    change_version(cache_dir, "jaxlib", "0.0.1")
    assert not quarantune.AutoTuner(nearly, {"do": ["exact", "next"]}, rep=3, numerics="bitwise").run(X).from_cache


def test_a_sweep_serves_only_if_no_config_of_unknown_bits_may_be_faster() -> None:
    same, other, unknown = (
        Trial(config={"n": n}, outcome=Outcome.OK, time_ms=time_ms, bits=bits)
        for n, (time_ms, bits) in enumerate([(2.0, "same"), (1.0, "other"), (1.5, None)])
    )
    stopped = dataclasses.replace(unknown, outcome=Outcome.SLOW, own_ms=3.0)
    unmeasured = Trial(config={"n": 9}, outcome=Outcome.SLOW, cheap_ms=9.0)
    assert exact_winner([same, other, stopped], other) is same
    assert exact_winner([same, other, unknown], other) is None
    assert exact_winner([same, unmeasured], same) is None
    assert exact_winner([other], other) is None


# --- by the operator -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_operator_demands_bits_for_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = quarantune.autotune({"do": ["next"]}, rep=3)(slowly)
    monkeypatch.setenv("QUARANTUNE_NUMERICS", "bitwise")
    np.testing.assert_array_equal(tuned(X), 2 * X)
    with quarantune.settings(numerics="rounding"):
        np.testing.assert_array_equal(tuned(X), np.nextafter(2 * X, np.float32(np.inf)))
    np.testing.assert_array_equal(tuned(X), 2 * X)
    monkeypatch.setenv("QUARANTUNE_NUMERICS", "exact")
    with pytest.raises(ValueError, match="QUARANTUNE_NUMERICS='exact' is not valid: it must be 'rounding', 'bitwise'"):
        tuned(X[:7])


def test_a_block_decides_for_its_thread_alone() -> None:
    tuned = quarantune.autotune({"do": ["next"]}, rep=3)(slowly)
    x = jnp.asarray(X)
    following = np.nextafter(2 * X, np.float32(np.inf))
    np.testing.assert_array_equal(tuned(x), following)
    np.testing.assert_array_equal(tuned(x), following)
    with concurrent.futures.ThreadPoolExecutor(1) as other, quarantune.settings(numerics="bitwise"):
        for _ in range(3):
            np.testing.assert_array_equal(tuned(x), 2 * X)
            np.testing.assert_array_equal(other.submit(tuned, x).result(), following)
    for _ in range(3):
        np.testing.assert_array_equal(tuned(x), following)


# --- the batch -------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=["do"])
def layer(x: Any, w: Any, do: str = "plain") -> Any:
    """A product with a loss of the whole batch; one config chooses another way for small batches."""
    if do == "refuses" and x.shape[0] < 16:
        raise ValueError("too few rows")
    y = x @ w
    return {"y": jnp.nextafter(y, jnp.inf) if do == "varies" and x.shape[0] < 16 else y, "loss": y.mean()}


@pytest.mark.slow
def test_configs_whose_rows_depend_on_the_batch_are_told_and_may_be_refused() -> None:
    w = np.ones((16, 16), np.float32)
    configs = {"do": ["plain", "varies", "refuses"]}
    axes: Any = {"x": 0}
    result = quarantune.AutoTuner(layer, configs, check_batch=axes, rep=3).run(X[:16], w)
    assert [trial.batch for trial in result.trials] == ["invariant", "varies", None]
    assert set(ends(result.trials)) == {"ok"}
    exact = quarantune.AutoTuner(layer, configs, check_batch=axes, numerics="batch_invariant", rep=3).run(X[:16], w)
    assert ends(exact.trials) == ["ok", "wrong", "wrong"]
    assert "output['y'] has other bits in 128 of 128 elements" in exact.trials[1].message
    assert "too few rows" in exact.trials[2].message
    with pytest.raises(quarantune.TuningFailedError, match="cannot be compared"):  # the weights have 16 rows, too
        quarantune.AutoTuner(layer, configs, check_batch=0, numerics="batch_invariant", rep=3).run(X[:16], w)


@pytest.mark.parametrize("numerics", ["rounding", "batch_invariant"])
def test_a_batch_of_one_is_tuned_without_its_half(numerics: Any) -> None:
    configs = {"do": ["plain", "varies"]}
    with here():
        tuner = quarantune.AutoTuner(layer, configs, check_batch={"x": 0}, numerics=numerics, rep=3)
        result = tuner.run(X[:1], np.ones((16, 16), np.float32))
    assert {trial.batch for trial in result.trials} == {None}
    assert result.best_config in ({"do": "plain"}, {"do": "varies"})


@quarantune.autotune({"do": ["plain", "varies"]}, check_batch={"x": 0}, rep=3)
@functools.partial(jax.jit, static_argnames=["do"])
def kernel(x: Any, w: Any, do: str = "plain") -> Any:
    return layer(x, w, do)["y"]


def test_a_contextual_function_leaves_batches_to_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quarantune.contextual_autotune(jax.jit(lambda x, w: kernel(x, w) + 1), name="model", rep=3)
    x, w = X[:16], np.ones((16, 16), np.float32)
    monkeypatch.setenv("QUARANTUNE_NUMERICS", "batch_invariant")
    with here(), pytest.warns(quarantune.CacheWarning, match="model runs with the results of each of its kernels"):
        np.testing.assert_array_equal(model(x, w), kernel.default(x, w) + 1)
    assert kernel.lookup(x, w) == {"do": "plain"}
    assert model.lookup(x, w) is None
    with pytest.raises(ValueError, match=r"model: contextual_autotune cannot compare half .*: give its kernels"):
        model.tune(x, w)
    with pytest.raises(ValueError, match="contextual_autotune cannot compare half of a batch"):
        quarantune.contextual_autotune(numerics="batch_invariant")


# --- compiler options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["rounding", "bitwise"])
def test_a_trace_keeps_bits_that_a_config_has_by_its_options(numerics: Any) -> None:
    config = {"do": "next", "compiler_options": {"xla_cpu_enable_fast_math": False}}
    bound = bind_config(nearly, config, is_exact=numerics == "bitwise")
    x, following = X[:4], np.nextafter(2 * X[:4], np.float32(np.inf))
    np.testing.assert_array_equal(bound(x), following)
    with pytest.warns(RuntimeWarning, match="its defaults run inside" if numerics == "bitwise" else "without its comp"):
        output = jax.jit(bound)(x)
    np.testing.assert_array_equal(output, 2 * x if numerics == "bitwise" else following)


def test_an_exact_call_inside_jit_runs_no_config_with_options() -> None:
    configs = [{"do": "soon", "compiler_options": {"xla_cpu_enable_fast_math": False}}]
    tuned = quarantune.autotune(configs, numerics="bitwise", rep=3)(slowly)
    with here():
        result = tuned.tune(X)
    assert result.best_config == configs[0]
    with pytest.warns(RuntimeWarning, match="its defaults run inside a trace in place of {'do': 'soon'}"):
        program = jax.make_jaxpr(lambda x: tuned(x))(X)
    assert str(program) == str(jax.make_jaxpr(lambda x: slowly(x))(X))
    assert str(program) == str(jax.make_jaxpr(lambda x: result.fn(x))(X))


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_process")
def test_bad_numerics_are_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="numerics='exact' is not valid: give 'rounding' or 'bitwise'"):
        quarantune.AutoTuner(nearly, {"do": ["sum"]}, numerics="exact")  # type: ignore[arg-type]
    for axis in (-1, True, {}, {"x": "0"}, "x"):
        with pytest.raises(
            ValueError, match=r"check_batch=.* is not valid: give the number of the axis with the batch"
        ):
            quarantune.AutoTuner(nearly, {"do": ["sum"]}, check_batch=axis)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the axis of the batch: give check_batch=0"):
        quarantune.AutoTuner(nearly, {"do": ["sum"]}, numerics="batch_invariant")
    with pytest.raises(ValueError, match="check_batch=5 does not fit the call"):
        quarantune.AutoTuner(nearly, {"do": ["sum"]}, check_batch=5).run(X)
    with pytest.raises(ValueError, match="numerics='bitwise' keeps the bits of the function's own defaults"):
        quarantune.AutoTuner(lambda x, n: x, {"n": [1]}, numerics="bitwise").run(X)
    with (
        quarantune.settings(numerics="batch_invariant"),
        pytest.raises(ValueError, match="nearly: numerics='batch_invariant' needs the axis of the batch"),
    ):
        quarantune.AutoTuner(nearly, {"do": ["sum"]}).run(X)


# --- later on --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_a_winner_whose_bits_have_changed_is_stale(cache_dir: Path) -> None:
    tuned = quarantune.autotune({"do": ["next", "sum"]}, name="exact", rep=3)(nearly)
    with quarantune.settings(numerics="bitwise"):
        tuned.tune(X)
    (file,) = cache_dir.glob("exact.json")
    cache = quarantune.TuningCache(cache_dir)
    assert [entry.verdict.value for entry in cache.verify(tuned).entries] in (["current"], ["unclear"])
    ((device, ((key, entry),)),) = [(device, each.items()) for device, each in json.loads(file.read_text()).items()]
    entry = {name: value for name, value in entry.items() if name != "program"} | {"config": {"do": "next"}}
    file.write_text(json.dumps({device: {key: entry}}))
    (found,) = cache.verify(tuned).entries
    assert found.verdict.value == "stale"
    assert "other bits in 8192 of 8192 elements" in found.reason.replace(",", "")
