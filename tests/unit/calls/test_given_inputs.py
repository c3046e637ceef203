"""`set_autotune_inputs` accepts numbers for arrays without dimensions and concrete arrays for symbolic shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.ones(4, np.float32)


def scaled(name: str, **options: Any) -> quarantune.Autotuned:
    """Returns a function whose only good config is n=2, and whose check sees the factor."""

    @quarantune.autotune({"n": [1, 2]}, **{"rep": 1, "name": name, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, factor: Any, n: int = 0) -> Any:
        if n == 1:
            raise ArithmeticError("no good")
        return x * factor

    return scale


def saw(*factors: float) -> Any:
    return lambda output, _, x, factor: float(factor) in factors


def test_a_number_is_given_for_an_array_without_dimensions(sweeps: list[str]) -> None:
    fn = scaled("arrays", check_fn=saw(7.0))
    for given in (7, 7.0, np.float32(7), jnp.float32(7), np.array(7, np.float32)):
        with quarantune.set_autotune_inputs(X, given):
            assert fn.tune(X, jnp.float32(1)).best_config == {"n": 2}
            np.testing.assert_array_equal(jax.jit(fn)(X, jnp.float32(3)), X * 3)
    with quarantune.set_autotune_inputs([X, 7]):
        np.testing.assert_array_equal(jax.jit(fn)(X, 3.0), X * 3)
    assert len(sweeps) == 6


def test_an_array_without_dimensions_is_given_for_a_number() -> None:
    fn = scaled("numbers", check_fn=saw(7.0))
    for given in (7.0, np.float32(7), jnp.float32(7)):
        with quarantune.set_autotune_inputs(X, factor=given):
            assert fn.tune(X, factor=3.0).best_config == {"n": 2}
    with quarantune.set_autotune_inputs(X, jnp.ones(2)), pytest.raises(ValueError, match="gives for 'factor'"):
        fn.tune(X, 3.0)


def exported(fn: Any, shape: str, dtype: Any = jnp.float32) -> Any:
    struct = jax.ShapeDtypeStruct(export.symbolic_shape(shape), dtype)
    return export.export(jax.jit(lambda x: fn(x, jnp.float32(3))))(struct)


@pytest.mark.parametrize("key_fn", [None, lambda x, factor: "any"])
def test_a_symbolic_shape_is_tuned_with_the_given_arrays(key_fn: Any, sweeps: list[str]) -> None:
    fn = scaled(f"symbolic {key_fn is None}", key_fn=key_fn)
    for given in ((X, jnp.float32(7)), ([X, jnp.float32(7)],)):
        with quarantune.set_autotune_inputs(*given):
            program = exported(fn, "b")
            np.testing.assert_array_equal(program.call(np.ones(9, np.float32)), np.full(9, 3.0))
    assert len(sweeps) == 1
    assert fn.lookup(X, jnp.float32(7)) == {"n": 2}
    with quarantune.set_autotune_inputs(X, jnp.float32(7)), pytest.raises(ValueError, match="make dtypes"):
        exported(fn, "b, 4")
    mixed = quarantune.set_autotune_inputs([X, jnp.float32(7)], factor=jnp.float32(8))
    with mixed, pytest.raises(ValueError, match="make dtypes"):
        exported(fn, "b")
