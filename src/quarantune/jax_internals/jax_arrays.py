"""JAX arrays, their types, and the keys of random numbers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core, literals
from jax._src.array import ArrayImpl


def as_weak(array: jax.Array) -> jax.Array:
    """Returns a weakly typed array with the same buffers.

    Private because every public way to make a weakly typed array that is not a scalar compiles a program.

    Args:
        array: an array whose shards are all in this process.
    """
    whole: Any = array
    buffers = [shard.data for shard in whole.addressable_shards] if len(whole.sharding.device_set) > 1 else [whole]
    weak: jax.Array = ArrayImpl(whole.aval.update(weak_type=True), whole.sharding, buffers, committed=whole.committed)
    return weak


typed_ndarray: type = literals.TypedNdArray
"""The class of the NumPy arrays that JAX uses for constants while it traces.

Private because users rarely see it, but JAX calls the rules of a `jax.custom_vjp` function with these arrays.
"""


def key_impl(dtype: Any) -> str:
    """Returns the name of the implementation behind the dtype of a PRNG key array.

    Private because `jax.random.key_impl` needs an array, and a call may have only a `ShapeDtypeStruct` or a tracer.
    """
    return str(dtype._impl.name)


def key_dtype(impl: str) -> Any:
    """Returns the dtype of PRNG key arrays of an implementation, without making a key.

    Private because `jax.random.key(...).dtype` initialises a backend.
    """
    from jax._src.random import prng

    return prng.KeyTy(prng.prngs[impl])


def key_data_shape(impl: str) -> tuple[int, ...]:
    """Returns the shape of the data of one PRNG key of an implementation."""
    return tuple(key_dtype(impl)._impl.key_shape)


array_type: type[Any] = ArrayImpl
"""The concrete class of JAX arrays.

Private because `isinstance(x, jax.Array)` is true for tracers too, and several times slower than comparing types,
which would be half the time of a cached call. Making an array to get its type would initialise a backend.
"""
aval_of = operator.attrgetter("aval")
raw_sharding_of = operator.attrgetter("_sharding")
"""Reads the sharding of a JAX array; the public `sharding` takes three times as long, in every cached call."""


def aval(shape: Sequence[int], dtype: Any, *, weak_type: bool) -> Any:
    """Returns the type of an array.

    Private because JAX has no public way to make a weak type.
    """
    return core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def is_plain_aval(item: Any) -> bool:
    """Returns whether `aval` can make this type: an array in device memory, without explicit mesh axes."""
    if type(item) is not core.ShapedArray:
        return False
    mesh = item.sharding.mesh
    if not mesh.empty and not mesh.are_all_axes_auto:
        return False
    # A mesh with automatic axes alone adds nothing to the sharding of the argument.
    return item == core.ShapedArray(item.shape, item.dtype, weak_type=item.weak_type, sharding=item.sharding)
