"""Traces in progress, and the programs that they make."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, Iterator
from typing import Any

import jax
from jax._src import core

primitive_type: type = core.Primitive
"""The class of JAX's primitives; private because the public `jax.extend`, which has it too, is slow to import."""


def equations(jaxpr: Any, *, closed: Collection[str] = ()) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of all jaxprs among their parameters.

    Args:
        jaxpr: the jaxpr.
        closed: the names of primitives whose parameters it does not look into.
    """
    for equation in jaxpr.eqns:
        yield equation
        for value in () if equation.primitive.name in closed else equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, closed=closed)


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the axes of a `shard_map` along which an array may differ from device to device.

    Private because the public attribute of an array's type has changed its name between versions.

    Args:
        array: an array or a tracer. For one inside a `shard_map` with `check_vma=False`, no axes are known.
    """
    kind: Any = jax.typeof(array)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def bound_axes() -> dict[str, int]:
    """Returns the size of each axis that collectives can name here, by its name.

    Private because the public `jax.lax.axis_size` needs the name of an axis, and nothing public lists the names.
    """
    return dict(core.get_axis_env().axis_sizes)


def is_differentiated(value: Any) -> bool:
    """Returns whether a value is a tracer of `jax.grad`, `jax.vjp` or `jax.linearize`.

    Private because JAX has no public way to distinguish kinds of tracers.
    """
    from jax._src.interpreters import ad

    return isinstance(value, getattr(ad, "LinearizeTracer", ()))


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Suspends the trace in progress in this thread, if there is one, while the block runs.

    Private because the public `jax.ensure_compile_time_eval` evaluates as much as it can of a function traced inside
    it: callbacks with constant arguments, such as in Pallas's interpreters, would run during tracing.
    """
    with core.eval_context():
        yield


def is_tracing() -> bool:
    """Returns whether this thread is inside a trace."""
    return not core.trace_state_clean()


def origin_of(equation: Any) -> tuple[types.CodeType, int] | None:
    """Returns the innermost code outside of JAX that made an equation, and the line in its file, or None.

    Private because nothing public distinguishes the frames of JAX from others.

    Args:
        equation: an equation of a jaxpr.
    """
    from jax._src import source_info_util

    traceback = equation.source_info.traceback
    for code, position in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        if source_info_util.is_user_filename(code.co_filename):
            return code, source_info_util.raw_frame_to_frame(code, position).start_line
    return None
