"""Abstract calls never tune: exports with symbolic shapes use cached configs or defaults, and so does `eval_shape`."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.ones((8, 4), np.float32)


def tunable(name: str, **options: Any) -> quarantune.Autotuned:
    """Makes a function that works only with n=3; its default is n=1."""

    @quarantune.autotune(lambda x: [{"n": n} for n in (2, 3) if x.shape[-1] == 4], name=name, rep=1, **options)
    @functools.partial(jax.jit, static_argnames=["n"])
    def raised(x: Any, n: int = 1) -> Any:
        if n == 2:
            raise ArithmeticError(n)
        return x**n

    return raised


def exported(fn: Any, shape: str) -> Any:
    struct = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
    return export.export(jax.jit(lambda x: fn(x)))(struct)


def test_symbolic_shapes_use_the_defaults_and_warn_once(sweeps: list[str]) -> None:
    fn = tunable("symbolic")
    with pytest.warns(quarantune.CacheWarning, match=r"symbolic: running with its defaults.*key_fn") as caught:
        one, two = exported(fn, "b, 4"), exported(fn, "b, d")
    assert len([item for item in caught if "key_fn" in str(item.message)]) == 1
    np.testing.assert_array_equal(one.call(2 * X), 2 * X)
    np.testing.assert_array_equal(two.call(2 * X), 2 * X)
    struct = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), jnp.float32)
    assert fn.lookup(struct) is None
    with pytest.raises(TypeError, match=r"tune it with concrete shapes"):
        fn.tune(struct)
    assert not sweeps


def test_a_key_fn_without_symbolic_values_finds_the_tuned_config(sweeps: list[str]) -> None:
    fn = tunable("bucketed", key_fn=lambda x: [x.shape[-1], str(x.dtype)], ref_fn=None)
    with pytest.warns(
        quarantune.CacheWarning, match=r"nothing is cached for the key .*4.*tune it with concrete shapes"
    ):
        np.testing.assert_array_equal(exported(fn, "b, 4").call(2 * X), 2 * X)
    np.testing.assert_array_equal(fn(2 * X), 8 * X)
    with warnings.catch_warnings(), quarantune.settings(always_tune=True):
        warnings.simplefilter("error")
        np.testing.assert_array_equal(exported(fn, "b, 4").call(2 * X), 8 * X)
    assert len(sweeps) == 1
    whole = tunable("whole", key_fn=lambda x: x.shape)
    with pytest.raises(TypeError, match=r"key_fn returned .*for symbolic shapes return the value for the concrete"):
        exported(whole, "b, 4")


def test_eval_shape_of_a_tuned_function_never_tunes(sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def stacked(x: Any, n: int = 1) -> Any:
        return jnp.stack([x] * n)

    assert stacked.eval_shape(X).shape == (1, 8, 4)
    assert not sweeps
    assert stacked(X).shape == (2, 8, 4)
    assert stacked.eval_shape(X).shape == (2, 8, 4)
    assert stacked.eval_shape(X, n=3).shape == (3, 8, 4)
    assert len(sweeps) == 1
