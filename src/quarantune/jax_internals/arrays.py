"""Arrays, their types, and PRNG keys."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax


def as_weak(array: jax.Array) -> jax.Array:
    """Returns the same buffers as a weakly typed array.

    Private because the public ways to a weakly typed array that is not a scalar compile a program for it.

    Args:
        array: an array, all of it in this process.
    """
    from jax._src.array import ArrayImpl

    whole: Any = array
    buffers = [shard.data for shard in whole.addressable_shards] if len(whole.sharding.device_set) > 1 else [whole]
    weak: jax.Array = ArrayImpl(whole.aval.update(weak_type=True), whole.sharding, buffers, committed=whole.committed)
    return weak


@functools.cache
def typed_ndarray() -> type:
    """Returns the class of numpy arrays that stand in for JAX's own where it evaluates while it traces.

    Private because users are not meant to meet it, but the rules of a `jax.custom_vjp` are given some.
    """
    from jax._src import literals

    return literals.TypedNdArray


def key_impl(dtype: Any) -> str:
    """Returns the name of the implementation behind the dtype of a PRNG key array.

    Private because `jax.random.key_impl` wants an array, and a `ShapeDtypeStruct` or a tracer may be all
    there is.
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


@functools.cache
def array_type() -> type[Any]:
    """Returns the concrete class of JAX arrays.

    `isinstance(x, jax.Array)` is true of tracers too and several times slower than comparing types, which
    would be half of a cached call's cost; making an array to ask for its type would initialise a backend.
    """
    from jax._src.array import ArrayImpl

    return ArrayImpl


aval_of = operator.attrgetter("aval")
sharding_of = operator.attrgetter("_sharding")
"""Of a JAX array; the public `sharding` is three times as slow, and this is on the path of every cached call."""


def aval(shape: Sequence[int], dtype: Any, *, weak_type: bool) -> Any:
    """Returns the type of an array; private because nothing public makes one that is weak."""
    from jax._src import core

    return core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def is_plain_aval(item: Any) -> bool:
    """Returns whether `aval` can make such a type: one of an array in a device's memory, under no explicit mesh."""
    from jax._src import core

    if type(item) is not core.ShapedArray:
        return False
    mesh = item.sharding.mesh
    if not mesh.empty and not mesh.are_all_axes_auto:
        return False
    # A mesh whose axes are JAX's to use says nothing that the sharding of the argument does not say.
    return item == core.ShapedArray(item.shape, item.dtype, weak_type=item.weak_type, sharding=item.sharding)
