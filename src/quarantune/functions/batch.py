"""The batch of a call: which axes of its arguments hold it, and the call with half of it; see `Options.check_batch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from quarantune.functions.binding import Arguments, signature_of
from quarantune.functions.description import is_array


def halved(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], axes: int | Mapping[str, int] | None
) -> Arguments:
    """Returns the arguments of a call with the first half of the batch.

    Args:
        fn: the function.
        args: its positional arguments; arrays may be `jax.ShapeDtypeStruct`s, which stay as they are.
        kwargs: its keyword arguments.
        axes: the axis of the batch, in all arguments or by parameter.

    Raises:
        ValueError: no argument has the axis, or its lengths differ, or it has fewer than two rows.
    """
    bound = signature_of(fn).bind_partial(*args, **kwargs)
    axis_of = dict.fromkeys(bound.arguments, axes) if isinstance(axes, int) else dict(axes or {})
    if unknown := axis_of.keys() - bound.arguments.keys():
        raise ValueError(
            f"check_batch names {', '.join(sorted(unknown))}: give parameters of the call, {', '.join(bound.arguments)}"
        )
    found = [
        leaf.shape[axis]
        for name, axis in axis_of.items()
        for leaf in jax.tree.leaves(bound.arguments[name])
        if axis is not None and is_array(leaf) and leaf.ndim > axis
    ]
    lengths = set(found[:1] if isinstance(axes, int) else found)
    if len(lengths) != 1 or min(lengths) < 2:
        raise ValueError(
            f"check_batch={axes!r} does not fit the call: its arrays have {sorted(set(found)) or 'no'} rows there. Give "
            f"an axis of at least two rows, or the axis of each parameter that has the batch, as in {{'x': 0}}"
        )
    length = lengths.pop()

    def half(leaf: Any, axis: int) -> Any:
        is_batch = is_array(leaf) and leaf.ndim > axis and leaf.shape[axis] == length
        if not is_batch or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return leaf[(slice(None),) * axis + (slice(length // 2),)]

    for name, axis in axis_of.items():
        if axis is not None:
            bound.arguments[name] = jax.tree.map(lambda leaf, axis=axis: half(leaf, axis), bound.arguments[name])
    return bound.args, bound.kwargs


def rows_like(half: Any, whole: Any) -> Any:
    """Returns the rows of an output that has half of them in another run; None if the outputs have the same shape.

    Raises:
        ValueError: the outputs differ in another way.
    """
    if not is_array(whole) or not is_array(half) or half.shape == whole.shape:
        return None
    differ = [axis for axis, (mine, its) in enumerate(zip(half.shape, whole.shape, strict=False)) if mine != its]
    if half.ndim != whole.ndim or len(differ) != 1 or half.shape[differ[0]] != whole.shape[differ[0]] // 2:
        raise ValueError(f"it gives {list(half.shape)} of {list(whole.shape)}")
    axis = differ[0]
    return whole[(slice(None),) * axis + (slice(half.shape[axis]),)]
