"""Configs run on the call's arguments, or on inputs like them that the user gives for tuning."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tuned_functions import SOON, X, here, host, tuned

import quarantune
from quarantune.calls import given_inputs
from quarantune.values.options import SUPPLIES

pytestmark = pytest.mark.usefixtures("two_slots")


SEVENS = np.full(3, 7, np.float32)
EIGHTS = np.full(3, 8, np.float32)


def given(*args: Any) -> Any:
    return given_inputs.arguments(lambda *args: args, args, {}, "auto")[0][0]


def test_blocks_of_inputs_nest_and_end_also_by_an_exception() -> None:
    assert given(X[:3]) is not SEVENS
    with quarantune.set_autotune_inputs(SEVENS):
        with contextlib.suppress(ArithmeticError), quarantune.set_autotune_inputs(EIGHTS):
            assert given(X[:3]) is EIGHTS
            raise ArithmeticError
        assert given(X[:3]) is SEVENS
    np.testing.assert_array_equal(given(X[:3]), X[:3])


def test_nested_blocks_of_inputs_end_innermost_first() -> None:
    sevens, eights = quarantune.set_autotune_inputs(SEVENS), quarantune.set_autotune_inputs(EIGHTS)
    with sevens, eights:
        with sevens:
            assert given(X[:3]) is SEVENS
        assert given(X[:3]) is EIGHTS
    assert given(X[:3]) is not SEVENS


def test_a_block_of_inputs_holds_in_its_thread_alone() -> None:
    seen: list[Any] = []
    with quarantune.set_autotune_inputs(SEVENS):
        thread = threading.Thread(target=lambda: seen.append(given(X[:3])))
        thread.start()
        thread.join()
        assert given(X[:3]) is SEVENS
    np.testing.assert_array_equal(seen[0], X[:3])


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("inputs_given", "told"),
    [
        ((X[:2],), r"float32\[2\] where the call has an array of float32\[3\]: make them alike"),
        ((X[:3].astype(np.int32),), r"int32\[3\] where the call has an array of float32\[3\]"),
        ((3.0,), r"a Python float where the call has an array of float32\[3\]"),
        ((X[:3], X[:3]), r"gives for 'do' array\(.* where the call has None"),
        ((X[:3], 1, 2), "gives arguments that the function does not take: too many positional"),
        ((), "gives arguments that cannot be compared with the call's: missing a required argument"),
        (({"x": X[:3]},), r"\['x'\].* where the call has an array of float32\[3\]"),
    ],
    ids=["shape", "dtype", "not an array", "a tunable", "too many", "too few", "a dict"],
)
def test_inputs_unlike_the_call_are_refused(inputs_given: tuple[Any, ...], told: str) -> None:
    kernel = tuned(lambda x, do: x * do, [1, 2])
    with quarantune.set_autotune_inputs(*inputs_given), pytest.raises(ValueError, match=told):
        kernel(X[:3])
    with pytest.raises(ValueError, match=told.replace("the call has", ".*")):
        jax.jit(tuned(lambda x, do: x * do, [1, 2], supply=lambda _: inputs_given))(X[:3])


@pytest.mark.usefixtures("no_process")
def test_inputs_of_another_mode_are_refused() -> None:
    @quarantune.autotune([{"do": 1}, {"do": 2}])
    @functools.partial(jax.jit, static_argnames=["do", "mode"])
    def kernel(x: Any, mode: str, do: int = 1) -> Any:
        return x * do

    with quarantune.set_autotune_inputs(SEVENS, "fast"), pytest.raises(ValueError, match=r"'fast' where .* 'exact'"):
        kernel(SEVENS, "exact")


def spelt(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return given_inputs.arguments(fn, args, kwargs, "auto")


@functools.partial(jax.jit, static_argnames=["n", "dtype", "do"])
def static_or_not(x: Any, n: Any = 4, scale: Any = 1.0, *, dtype: Any = None, do: int = 1) -> Any:
    return x * n


def test_inputs_with_other_static_values_are_refused() -> None:
    with quarantune.set_autotune_inputs(SEVENS, 4, 5.0, dtype=np.float32):
        for n in (1000, True, 4.0):
            with pytest.raises(ValueError, match=rf"for 'n' 4 where the call has {n}: make them alike"):
                spelt(static_or_not, EIGHTS, n, 1.0, dtype=np.float32)
        with pytest.raises(ValueError, match=r"for 'dtype' .*float32.* where the call has .*int32"):
            spelt(static_or_not, EIGHTS, 4, 1.0, dtype=np.int32)
        with pytest.raises(ValueError, match="for 'scale' a Python float where the call has a Python int"):
            spelt(static_or_not, EIGHTS, 4, 1, dtype=np.float32)
        for args, kwargs in [((4, 1.0), {}), ((), {"n": 4, "scale": 1.0}), ((4,), {"scale": 1.0})]:
            args_given, kwargs_given = spelt(static_or_not, EIGHTS, *args, **kwargs, dtype=np.float32)
            assert args_given[0] is SEVENS
            assert (args_given[1:], kwargs_given) == (
                tuple(5.0 if arg == 1.0 else arg for arg in args),
                {name: 5.0 if arg == 1.0 else arg for name, arg in kwargs.items()} | {"dtype": np.float32},
            )


def test_inputs_may_pass_arguments_in_another_way_than_the_call() -> None:
    with quarantune.set_autotune_inputs(SEVENS, n=4, do=1):
        assert spelt(static_or_not, EIGHTS) == ((SEVENS,), {})
        assert spelt(static_or_not, EIGHTS, 4) == ((SEVENS, 4), {})
        assert spelt(static_or_not, n=4, x=EIGHTS) == ((), {"n": 4, "x": SEVENS})
    with (
        quarantune.set_autotune_inputs(SEVENS, do=2),
        pytest.raises(ValueError, match="for 'do' 2 where the call has 1"),
    ):
        spelt(static_or_not, EIGHTS)


def test_inputs_of_a_plain_callable_must_have_equal_values() -> None:
    def plain(x: Any, n: int, *rest: Any, do: int) -> None: ...

    with quarantune.set_autotune_inputs(n=4, x=SEVENS):
        assert spelt(plain, EIGHTS, 4) == ((SEVENS, 4), {})
        with pytest.raises(ValueError, match="for 'n' 4 where the call has 5"):
            spelt(plain, EIGHTS, 5)
    with quarantune.set_autotune_inputs(SEVENS, 4, SEVENS):
        assert spelt(plain, EIGHTS, 4, EIGHTS) == ((SEVENS, 4, SEVENS), {})
        with pytest.raises(ValueError, match="for 'rest'"):
            spelt(plain, EIGHTS, 4)


@pytest.mark.parametrize("like", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_inputs_are_as_weakly_typed_as_the_call(like: Callable[..., Any]) -> None:
    weak, strong = jnp.full(3, 7.0), jnp.full(3, 7, jnp.float32)
    assert (weak.weak_type, strong.weak_type) == (True, False)
    for ours, theirs in itertools.product((weak, strong, like(strong)), (weak, strong)):
        with quarantune.set_autotune_inputs([ours]):
            (((array,), *_), _) = spelt(static_or_not, [theirs])
            assert getattr(array, "weak_type", False) is theirs.weak_type
            np.testing.assert_array_equal(array, ours)


def sees(number: float) -> Callable[..., bool]:
    return lambda output, expected, x: bool((host(x) == number).all())


def test_a_blocks_inputs_replace_the_calls_own_also_inside_jit() -> None:
    with quarantune.set_autotune_inputs(SEVENS):
        concrete = tuned(lambda x, do: x * do, [2], check_fn=sees(7))
        np.testing.assert_array_equal(concrete(EIGHTS), 2 * EIGHTS)
        traced = tuned(lambda x, do: x * do, [3], check_fn=sees(7))
        np.testing.assert_array_equal(jax.jit(lambda x: traced(x) + 1)(EIGHTS), 3 * EIGHTS + 1)
    assert concrete.lookup(EIGHTS) == {"do": 2}


def test_a_supplier_is_called_once_if_arguments_are_abstract() -> None:
    asked: list[Any] = []

    def supplier(signature: Any) -> Any:
        asked.append(signature)
        (struct,) = signature
        return (jnp.full(struct.shape, 7, struct.dtype),)

    traced = tuned(lambda x, do: x * do, [2, 3], supply=supplier, check_fn=sees(7))
    jax.jit(traced).lower(EIGHTS)
    ((struct,),) = asked
    assert isinstance(struct, jax.ShapeDtypeStruct)
    assert (struct.shape, struct.dtype) == ((3,), np.float32)

    concrete = tuned(lambda x, do: x * do, [2, 3], supply=supplier, check_fn=sees(8))
    concrete(EIGHTS)
    assert len(asked) == 1


LOOKS_LIKE = {
    "auto": lambda x: x.max() > 1.5 and x.min() < -1.5,
    "uniform": lambda x: x.min() >= -1 and x.max() < 1 and x.std() > 0.1,
    "integer": lambda x: (x == np.round(x)).all() and x.std() > 0.1,
    "normal": lambda x: x.max() > 1.5 and x.min() < -1.5,
    "zeros": lambda x: (x == 0).all(),
    "ones": lambda x: (x == 1).all(),
}


@pytest.mark.parametrize("kind", SUPPLIES)
def test_every_kind_of_supply_runs(kind: str) -> None:
    looks_like = LOOKS_LIKE[kind]
    kernel = tuned(
        lambda x, do: x * do, [1], supply=kind, check_fn=lambda output, _, x: bool(looks_like(np.asarray(x)))
    )
    with here():
        assert jax.jit(kernel)(X).shape == X.shape


def test_integers_made_for_a_call_inside_jit_are_safe_as_indices(tmp_path: Path) -> None:
    def check(output: Any, expected: Any, table: Any, indices: Any) -> bool:
        return bool(np.isfinite(output).all() and (host(indices) >= 0).all() and len(np.unique(indices)) > 1)

    @quarantune.autotune([{"do": 1}], check_fn=check, **SOON)
    @functools.partial(jax.jit, static_argnames=["do"])
    def rows(table: Any, indices: Any, do: int = 1) -> Any:
        return do * table.at[indices].get(mode="fill", fill_value=jnp.nan)

    table, indices = jnp.ones((5, 4)), jnp.zeros((5, 100), jnp.int32)
    assert jax.jit(rows)(table, indices).shape == (5, 100, 4)
