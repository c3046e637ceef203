"""Which arguments a sweep runs with: given for the block, the call's own, a supplier's, or made from shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from quarantune.problem import as_structs

_REAL = "with quarantune.set_autotune_inputs(...)"


class _Blocks(threading.local):
    """The inputs of the `set_autotune_inputs` blocks that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.entered: list[set_autotune_inputs] = []


_blocks = _Blocks()


class set_autotune_inputs:
    """Has the sweeps of a block of code run with these arguments, in this thread only; blocks nest.

    It serves calls inside `jit` and its kin, which have no concrete arguments, and calls whose own arguments say little
    about speed, such as indices that are all zero. What is tuned for is still the call: its shapes and dtypes must be
    those of these arguments.

    Args:
        *args: the tuned function's positional arguments, without tunables.
        **kwargs: its keyword arguments.

    Example:
        >>> with set_autotune_inputs(a, b):  # doctest: +SKIP
        ...     c = matmul(x, y)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __enter__(self) -> None:
        _blocks.entered.append(self)

    def __exit__(self, *_: object) -> None:
        _blocks.entered.remove(self)


def arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], supply: str | Callable[..., Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what a sweep for a call is to run with; what is still without a value is made from shape and dtype.

    Args:
        args: the call's positional arguments.
        kwargs: its keyword arguments.
        supply: the author's option.

    Raises:
        ValueError: the arguments given for the block, or the supplier's, are not of the call's shapes and dtypes.
    """
    if _blocks.entered:
        given = _blocks.entered[-1]
        _check_alike((given.args, given.kwargs), (args, dict(kwargs)), _REAL)
        return given.args, dict(given.kwargs)
    leaves = jax.tree.leaves((args, kwargs))
    if not callable(supply) or not any(_has_no_value(leaf) for leaf in leaves):
        return args, dict(kwargs)
    structs, _ = as_structs(args, kwargs)
    with jax.ensure_compile_time_eval():  # the call may be inside a trace, which this is not part of
        supplied = tuple(supply(structs))
    _check_alike(supplied, args, "supply")
    return supplied, dict(kwargs)


def _has_no_value(leaf: Any) -> bool:
    return isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _check_alike(given: Any, wanted: Any, source: str) -> None:
    """Raises where two argument trees differ in structure, shape or dtype."""
    ours: Any
    theirs: Any
    ours, theirs = jax.tree.structure(given), jax.tree.structure(wanted)
    if ours != theirs:
        raise ValueError(
            f"{source} gives arguments of the structure {ours}, and the call has {theirs}: make them alike"
        )
    (given_structs, _), (wanted_structs, _) = as_structs((given,), {}), as_structs((wanted,), {})
    for mine, its in zip(jax.tree.leaves(given_structs), jax.tree.leaves(wanted_structs), strict=True):
        if _describe(mine) != _describe(its):
            raise ValueError(f"{source} gives {_describe(mine)} where the call has {_describe(its)}: make them alike")


def _describe(leaf: Any) -> str:
    """Returns what two leaves that may stand for one another have in common."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"an array of {leaf.dtype}{list(leaf.shape)}"
    is_number = isinstance(leaf, (bool, int, float, complex))
    return f"a Python {type(leaf).__name__}" if is_number else repr(leaf)
