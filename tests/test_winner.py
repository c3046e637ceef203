"""A compiled winner: it runs its executable where that fits the call, and the jitted function otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")


def jitted(fn: Callable[..., Any]) -> Any:
    """Returns `fn` jitted; it has the tunable `n`, and `p` is static."""
    return functools.partial(jax.jit, static_argnames=["n", "p"])(fn)


@jitted
def scaled(x: Any, by: Any, p: Any = None, n: int = 1) -> Any:
    return x * by


@jitted
def times(x: Any, p: Any = None, n: int = 1) -> Any:
    return x if p is None else x * (100 if p is True else p)


@jitted
def cast(x: Any, p: Any = None, n: int = 1) -> Any:
    return x if p is None else x.astype(p)


@functools.cache
def compiled_for(fn: Any, example: str) -> Any:
    """Returns the winner for the arguments in `EXAMPLES`."""
    return compiled(fn, *EXAMPLES[example])


def compiled(fn: Any, *args: Any, **kwargs: Any) -> Any:
    (winner,) = quarantune.compile_configs(fn, [{"n": 1}], *args, **kwargs)
    return winner


BF16 = jnp.ones(3, jnp.bfloat16)
INTS = jnp.arange(3)
EXAMPLES = {
    "array": (BF16, jnp.float32(2)),
    "number": (BF16, 2.0),
    "static 1": (INTS, 1),
    "static True": (INTS, True),
    "static dtype": (INTS, np.float32),
}


@pytest.mark.parametrize(
    ("fn", "made_for", "called_with"),
    [
        (scaled, "array", (BF16, 2.0)),
        (scaled, "number", (BF16, np.float32(2))),
        (scaled, "number", (BF16, 3.0)),
        (times, "static 1", (INTS, 1.0)),
        (times, "static True", (INTS, 1)),
        (times, "static 1", (INTS, True)),
        (cast, "static dtype", (INTS, None)),
        (cast, "static dtype", (INTS, np.float32)),
        (cast, "static dtype", (INTS, np.int16)),
    ],
)
def test_any_call_returns_the_jitted_functions_result(fn: Any, made_for: str, called_with: Any) -> None:
    ours, theirs = compiled_for(fn, made_for)(*called_with), fn(*called_with, n=1)
    assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_the_call_that_it_was_made_for_is_not_traced() -> None:
    traced = []

    @jitted
    def noting(x: Any, p: Any = None, n: int = 1) -> Any:
        traced.append(p)
        return x * n

    winner = compiled(noting, INTS, p=np.float32)
    traced.clear()
    np.testing.assert_array_equal(winner(INTS, p=np.float32), INTS)
    assert not traced
    winner(INTS, p=np.int16)
    assert traced == [np.int16]


@pytest.mark.slow
@jax.tree_util.register_pytree_node_class
class Pair:
    """Validates its contents."""

    def __init__(self, first: Any, second: Any) -> None:
        assert first.shape == second.shape
        self.both = (first, second)

    def tree_flatten(self) -> tuple[Any, None]:
        return self.both, None

    @classmethod
    def tree_unflatten(cls, _: None, both: Any) -> Pair:
        return cls(*both)


def test_a_class_that_validates_its_arrays_may_be_an_argument(tmp_path: Path) -> None:
    @jitted
    def summed(pair: Any, p: Any = None, n: int = 1) -> Any:
        return pair.both[0] + pair.both[1]

    tuned = quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)(summed)
    pair = Pair(jnp.ones(3), jnp.ones(3))
    np.testing.assert_array_equal(tuned(pair), 2)
    tuned.tune(pair).save(tmp_path)
    np.testing.assert_array_equal(quarantune.TuningResult.load(tmp_path, trusted=True).fn(pair), 2)


def test_a_result_without_its_function_is_not_saved_over_a_complete_one(tmp_path: Path) -> None:
    quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)(times).tune(INTS, 2).save(tmp_path)
    with pytest.raises(quarantune.SavedResultError, match="trusted=True"):
        quarantune.TuningResult.load(tmp_path).save(tmp_path)
    np.testing.assert_array_equal(quarantune.TuningResult.load(tmp_path, trusted=True).fn(INTS, 2), 2 * INTS)


@pytest.mark.slow
def test_a_program_that_calls_lapack_is_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "lapack.py").write_text(
        """
import functools, sys
import jax, jax.numpy as jnp, quarantune

@functools.partial(jax.jit, static_argnames=["n"])
def factor(x, n=1):
    return n * jnp.linalg.cholesky(x)

if __name__ == "__main__":
    one, two = quarantune.compile_configs(factor, [{"n": 1}, {"n": 2}], 4 * jnp.eye(3))
    print(one(4 * jnp.eye(3))[0, 0], two(4 * jnp.eye(3))[0, 0])
""",
        encoding="utf-8",
    )
    assert python(tmp_path / "lapack.py").split() == ["2.0", "4.0"]
