"""Converts JAX arrays to raw data, and raw data to JAX arrays that own their buffers."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from quarantune import jax_internals

# On the CPU, XLA always uses NumPy data aligned to 64 bytes in place, and does not donate such a buffer. It copies data
# that starts 16 bytes after such an address (which is aligned enough for every dtype) into a buffer of its own.
_XLA_ALIGNMENT_BYTES = 64
_OFF_ALIGNMENT_BYTES = 16


def restore_array(
    data: np.ndarray[Any, Any], weak_type: bool, impl: str | None, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """Returns the JAX array with the given elements.

    Args:
        data: the elements; the key data of a PRNG key array.
        weak_type: whether the array is weakly typed.
        impl: the PRNG implementation of a key array; None for any other.
        sharding: its sharding; None for the default device.
    """
    wide = data.dtype.itemsize == 8 or data.dtype == np.complex128
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        array: jax.Array = _put(data, sharding).block_until_ready()
    if impl is not None:
        keys: jax.Array = jax.random.wrap_key_data(array, impl=impl)
        return keys
    return jax_internals.as_weak(array) if weak_type else array


def _put(data: np.ndarray[Any, Any], sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return cast("jax.Array", jax.device_put(_off_alignment(data)))

    def shard(index: Any) -> np.ndarray[Any, Any]:
        return _off_alignment(np.asarray(data[index], order="C"))

    return jax.make_array_from_callback(data.shape, sharding, shard)  # the whole may be too large for one device


def _off_alignment(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the data at an address that makes XLA copy it, so that a JAX array made of it owns its buffer."""
    if data.ctypes.data % _XLA_ALIGNMENT_BYTES:
        return data
    room = np.empty(data.nbytes + _XLA_ALIGNMENT_BYTES, np.uint8)
    start = next_start(room.ctypes.data) - room.ctypes.data
    moved: np.ndarray[Any, Any] = room[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    moved[...] = data
    return moved


def next_start(address: int) -> int:
    """Returns the first address, from the given one on, at which XLA does not use data in place."""
    return address + (_OFF_ALIGNMENT_BYTES - address) % _XLA_ALIGNMENT_BYTES


def is_key_dtype(dtype: Any) -> bool:
    """Returns whether a dtype is a PRNG key dtype."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def dtype_from_name(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name, including names of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def concrete_data(array: jax.Array) -> tuple[np.ndarray[Any, Any], str | None]:
    """Returns an array's elements as numpy, and its PRNG implementation if it holds keys."""
    if is_key_dtype(array.dtype):
        with jax.ensure_compile_time_eval():  # inside a trace this would be a tracer
            return np.asarray(jax.random.key_data(array)), jax_internals.key_impl(array.dtype)
    return np.asarray(array), None
