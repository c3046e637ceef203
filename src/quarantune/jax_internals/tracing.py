"""Traces in progress, and the programs that they yield."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax


@functools.cache
def primitive_type() -> type:
    """Returns the class of JAX's primitives; the public `jax.extend` that also shows it is slow to import."""
    from jax._src import core

    return core.Primitive


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the programs among an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the axes of a `shard_map` along which an array may differ from device to device.

    Private because the public attribute of an array's type that tells has changed its name.

    Args:
        array: an array or a tracer; of one inside a `shard_map` with `check_vma=False` nothing is known.
    """
    kind: Any = jax.typeof(array)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def bound_axes() -> dict[str, int]:
    """Returns the size of each axis that collectives can name here, by its name.

    Private because `jax.lax.axis_size` tells of one whose name is known, and nothing public of all.
    """
    from jax._src import core

    return dict(core.get_axis_env().axis_sizes)


def is_differentiated(value: Any) -> bool:
    """Returns whether a value is a tracer of `jax.grad`, `jax.vjp` or `jax.linearize`.

    Private because nothing public tells one tracer from another.
    """
    from jax._src.interpreters import ad

    return isinstance(value, getattr(ad, "LinearizeTracer", ()))


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Leaves the trace that this thread may be inside of, while the block runs.

    Private because the public `jax.ensure_compile_time_eval` has whatever is traced within it evaluated where it can
    be: callbacks with constant arguments, such as those of Pallas's interpreters, would run while they are traced.
    """
    from jax._src import core

    with core.eval_context():
        yield


def is_tracing() -> bool:
    """Returns whether this thread is inside a trace."""
    from jax._src import core

    return not core.trace_state_clean()
