"""A config that is more accurate than the defaults is not wrong, however far from the defaults it is."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import quarantune
from quarantune.values.trial import Trial

CASES: dict[str, tuple[Any, Any]] = {}


def case(make: Any) -> Any:
    def take(fn: Any) -> Any:
        CASES[fn.__name__] = (fn, make)
        return fn

    return take


def ends(trials: tuple[Trial, ...]) -> list[str]:
    return ["ok" if trial.outcome == "slow" else str(trial.outcome) for trial in trials]


def swept(fn: Any, values: list[str], *args: Any, **options: Any) -> quarantune.TuningResult:
    kernel = jax.jit(fn, static_argnames=["do"])
    return quarantune.AutoTuner(kernel, {"do": values}, warmup=0, rep=1, **options).run(*args)


def broken(found: Any, do: str) -> Any:
    """Adds a bug to the output of a more accurate config."""
    if "row" in do:
        found = found.at[-1].set(0)
    if "element" in do:
        worst = jnp.unravel_index(jnp.argmax(jnp.abs(found)), found.shape)
        found = found.at[worst].mul(jnp.asarray(2.5, found.dtype))
    if "scale" in do:
        found = found * jnp.asarray(2.1, found.dtype)
    return found


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def small() -> Any:
    return jnp.asarray(generator().standard_normal((64, 64)) ** 2 * 1e-4, "float32")


@case(small)
def logarithm_of_one_plus_little(x: Any, do: str = "naive") -> Any:
    return jnp.log(1 + x) if do == "naive" else broken(jnp.log1p(x), do)


@case(lambda: jnp.asarray(generator().random((1024, 64)), "bfloat16"))
def sums_in_a_narrow_accumulator(x: Any, do: str = "naive") -> Any:
    kind = x.dtype if do == "naive" else jnp.promote_types(x.dtype, "float32")
    found = jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros(x.shape[1:], kind), x.astype(kind))[0]
    return found.astype(x.dtype) if do == "naive" else broken(found.astype(x.dtype), do)


@case(lambda: jnp.asarray(generator().standard_normal((64, 64)) * 4, "float16"))
def softmax_that_overflows(x: Any, do: str = "naive") -> Any:
    powers = jnp.exp(x)
    return powers / powers.sum(-1, keepdims=True) if do == "naive" else broken(jax.nn.softmax(x), do)


@case(small)
def gradient_of_a_logarithm(x: Any, do: str = "naive") -> Any:
    def value(x: Any) -> Any:
        return jnp.sum(jnp.exp(x) - 1 - x if do == "naive" else x**2 / 2 + x**3 / 6)

    return broken(jax.grad(value)(x), "" if do == "naive" else do)


@pytest.mark.parametrize(
    "name", [next(iter(CASES)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*CASES][1:])]
)
def test_a_more_accurate_config_passes_and_a_bug_does_not(name: str) -> None:
    fn, make = CASES[name]
    result = swept(fn, ["better", "row", "element", "scale", "naive"], make())
    assert ends(result.trials) == ["ok", "wrong", "wrong", "wrong", "ok"]


@pytest.mark.filterwarnings("ignore:QUARANTUNE_ISOLATION=none")  # warns once in a process
@pytest.mark.parametrize("isolation", ["none", "compile"])
def test_configs_in_the_callers_process_are_judged_alike(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_ISOLATION", isolation)
    fn, make = CASES["logarithm_of_one_plus_little"]
    result = swept(fn, ["better", "row", "naive"], make())
    assert ends(result.trials) == ["ok", "wrong", "ok"]
    assert not jax.config.jax_enable_x64


@pytest.mark.long
@pytest.mark.slow
def test_gradients_are_judged_alike() -> None:
    @jax.custom_vjp
    def naive(x: Any) -> Any:
        return x * 2

    naive.defvjp(lambda x: (naive(x), x), lambda x, g: (g * jnp.log(1 + x),))

    @jax.custom_vjp
    def better(x: Any) -> Any:
        return x * 2

    better.defvjp(lambda x: (better(x), x), lambda x, g: (g * jnp.log1p(x),))

    @jax.custom_vjp
    def wrong(x: Any) -> Any:
        return x * 2

    wrong.defvjp(lambda x: (wrong(x), x), lambda x, g: (g * broken(jnp.log1p(x), "element"),))

    def kernel(x: Any, do: str = "naive") -> Any:
        return {"naive": naive, "better": better, "wrong": wrong}[do](x)

    result = swept(kernel, ["better", "wrong", "naive"], small(), check_grad=True)
    assert ends(result.trials) == ["ok", "wrong", "ok"]


def test_with_tolerances_of_the_author_nothing_else_decides() -> None:
    fn, make = CASES["logarithm_of_one_plus_little"]
    result = swept(fn, ["better", "naive"], make(), rtol=1e-5, atol=0.0, max_mismatched_ratio=0.0)
    assert ends(result.trials) == ["wrong", "ok"]


# --- without a wider reference --------------------------------------------------------------------------------------


def logarithm(x: Any, do: str) -> Any:
    return jnp.log(1 + x) if do == "naive" else jnp.log1p(x)


def refuses(x: Any, do: str = "naive") -> Any:
    if x.dtype != jnp.float32:
        raise TypeError("this kernel takes float32 alone")
    return logarithm(x, do)


def holds_a_kernel(x: Any, do: str = "naive") -> Any:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = logarithm(x_ref[...], do)

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def calls_back(x: Any, do: str = "naive") -> Any:
    def check(x: Any) -> None:
        if x.dtype != np.float32:
            os.abort()

    jax.debug.callback(check, x)
    return logarithm(x, do)


def draws_at_random(x: Any, do: str = "naive") -> Any:
    found = logarithm(x, do) * jax.random.uniform(jax.random.key(0), x.shape, x.dtype)
    return found if do == "naive" else found.at[3].set(0)


def returns_another_shape(x: Any, do: str = "naive") -> Any:
    return logarithm(x, do) if x.dtype == jnp.float32 else x[:3]


def rounds_on_the_way(x: Any, do: str = "naive") -> Any:
    return logarithm(x.astype("float32"), do).astype("float32")


@pytest.mark.parametrize(
    "fn", [refuses, holds_a_kernel, calls_back, draws_at_random, returns_another_shape, rounds_on_the_way]
)
def test_the_verdict_stays_if_inputs_cannot_be_wider(fn: Any) -> None:
    result = swept(fn, ["better", "naive"], small())
    assert ends(result.trials) == ["wrong", "ok"]
    assert "differ by more than rounding explains" in result.trials[0].message


@pytest.mark.slow
def test_a_wider_reference_that_takes_too_long_is_not_waited_for() -> None:
    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(x: Any, do: str = "naive") -> Any:
        if x.dtype != jnp.float32:
            time.sleep(600)
        return logarithm(x, do)

    result = quarantune.AutoTuner(kernel, {"do": ["better", "naive"]}, warmup=0, rep=1).run(small())
    assert ends(result.trials) == ["wrong", "ok"]
