"""The batch of a call: the axis that holds it, and the call with half of it; see `Options.check_batch`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from quarantune.functions.binding import Arguments, signature_of
from quarantune.functions.description import is_array


def bound_batch(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], axes: int | Mapping[str, int]
) -> tuple[inspect.BoundArguments, Mapping[str, int], int]:
    """Returns the arguments of a call by parameter, the axis of the batch in each, and the length of the batch.

    Args:
        fn: the function.
        args: its positional arguments; arrays may be `jax.ShapeDtypeStruct`s.
        kwargs: its keyword arguments.
        axes: the axis of the batch, in all arguments or by parameter.

    Raises:
        ValueError: the arguments have no such axis, or different lengths there.
    """
    bound = signature_of(fn).bind_partial(*args, **kwargs)
    axis_of = axes if isinstance(axes, Mapping) else dict.fromkeys(bound.arguments, axes)
    leaves = [(leaf, axis) for name, axis in axis_of.items() for leaf in jax.tree.leaves(bound.arguments.get(name))]
    rows = [leaf.shape[axis] for leaf, axis in leaves if is_array(leaf) and leaf.ndim > axis]
    is_unclear = axis_of is axes and (len({*rows}) > 1 or not axis_of.keys() <= bound.arguments.keys())
    if is_unclear or not rows:
        raise ValueError(
            f"{getattr(fn, '__name__', fn)}: check_batch={axes!r} does not fit the call: its arrays have "
            f"{sorted({*rows}) or 'no'} rows there. Give the axis of the batch, or the axis of each parameter with the "
            f"batch, as in {{'x': 0}}"
        )
    return bound, axis_of, rows[0]


def halved(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], axes: int | Mapping[str, int]
) -> Arguments | None:
    """Returns the arguments of a call with the first half of the batch; None for a batch of one. See `bound_batch`."""
    bound, axis_of, length = bound_batch(fn, args, kwargs, axes)
    if length < 2:
        return None
    for name, axis in axis_of.items():
        cut = (slice(None),) * axis + (slice(length // 2),)
        leaves, structure = jax.tree.flatten(bound.arguments[name])
        has_batch = [is_array(leaf) and leaf.ndim > axis and leaf.shape[axis] == length for leaf in leaves]
        halves = [leaf[cut] if has else leaf for leaf, has in zip(leaves, has_batch, strict=True)]
        bound.arguments[name] = jax.tree.unflatten(structure, halves)
    return bound.args, bound.kwargs


def first_rows(wholes: Sequence[Any], halves: Sequence[Any]) -> list[Any]:
    """Returns the first rows of outputs, as many as those for half of the batch have; of others, the half's own value.

    Raises:
        ValueError: all have the same shapes in both, so that none has rows.
    """
    found = []
    for whole, half in zip(wholes, halves, strict=True):
        axes = [axis for axis, rows in enumerate(np.shape(whole)) if rows != np.shape(half)[axis]]
        found.append(whole[(slice(None),) * axes[0] + (slice(half.shape[axes[0]]),)] if axes else half)
    if all(rows is half for rows, half in zip(found, halves, strict=True)):
        raise ValueError("no output has the batch as an axis")
    return found
