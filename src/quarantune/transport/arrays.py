"""Arrays of a call: makes them from raw data, or from a shape and a dtype, and describes them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from quarantune.jax_internals import jax_arrays
from quarantune.values.options import SUPPLIES

# Number of random elements that an array repeats: copying is faster than drawing. It is a prime, so that no block of a
# kernel has this size, and a kernel that mixes up its blocks still gives a wrong result.
TILE_ELEMENTS = 1_000_003

_MAX_INDEX = 8

# On the CPU, XLA uses NumPy data aligned to 64 bytes in place, and does not donate this memory. It copies data that
# starts 16 bytes later (enough alignment for every dtype) into a new buffer.
_XLA_ALIGNMENT_BYTES = 64
_OFF_ALIGNMENT_BYTES = 16


def make(
    shape: tuple[int, ...],
    dtype: Any,
    weak_type: bool = False,
    *,
    kind: str = "auto",
    seed: int,
    index: int = 0,
    sharding: Sharding | None = None,
) -> jax.Array:
    """Generates an array of a shape and dtype, without compiling anything.

    Equal arguments give equal data, in every process. Floats follow the standard normal distribution for `auto` and
    `normal`, lie in [-1, 1) for `uniform`, and are whole numbers from -2 to 2 for `integer`. Integers may be indices or
    lengths, so for every random kind they are at least 0 and below both 8 and the array's smallest dimension (a scalar
    is 0). Booleans are balanced, complex numbers have both parts, and PRNG keys are random keys. A dtype without zero
    gets absolute values, at least its smallest number, or at least 1 for `integer`.

    Args:
        shape: the shape.
        dtype: a NumPy or ml_dtypes dtype or its name, or the dtype of PRNG keys.
        weak_type: whether the array is weakly typed.
        kind: one of `SUPPLIES`.
        seed: the seed of the sweep.
        index: the number of the argument, so that arguments of one shape differ.
        sharding: its sharding; None for the default device.

    Raises:
        ValueError: `kind` is not one of `SUPPLIES`.
    """
    if is_key_dtype(dtype):
        generator = np.random.default_rng((seed, index))
        impl = jax_arrays.key_impl(dtype)
        data_shape = shape + jax_arrays.key_data_shape(impl)
        return restore_array(generator.integers(0, 2**32, data_shape, dtype=np.uint32), False, impl, sharding)
    dtype = dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    return restore_array(elements(shape, dtype, kind=kind, seed=seed, index=index), weak_type, None, sharding)


def elements(shape: tuple[int, ...], dtype: np.dtype[Any], *, kind: str, seed: int, index: int) -> np.ndarray[Any, Any]:
    """Returns the elements that `make` gives an array, as a NumPy array.

    Args:
        shape: the shape.
        dtype: the dtype.
        kind: one of `SUPPLIES`.
        seed: the seed of the sweep.
        index: the number of the argument.

    Raises:
        ValueError: `kind` is not one of `SUPPLIES`.
    """
    if kind not in SUPPLIES:
        raise ValueError(f"kind must be one of {', '.join(SUPPLIES)}, got {kind!r}")
    if kind in ("zeros", "ones"):
        return np.full(shape, _held(np.float64(kind == "ones"), kind, dtype), dtype)
    generator = np.random.default_rng((seed, index))
    tile = _tile(generator, shape, dtype, kind, elements=min(math.prod(shape), TILE_ELEMENTS))
    return np.resize(tile, shape)


def _tile(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], kind: str, *, elements: int
) -> np.ndarray[Any, Any]:
    """Returns the first `elements` elements of an array, flat."""
    if dtype == np.bool_:
        return generator.integers(0, 2, elements).astype(dtype)
    if jnp.issubdtype(dtype, np.integer):
        return generator.integers(0, _index_bound(shape, dtype), elements).astype(dtype)
    if jnp.issubdtype(dtype, np.complexfloating):
        return (_floats(generator, kind, elements) + 1j * _floats(generator, kind, elements)).astype(dtype)
    return np.asarray(_held(_floats(generator, kind, elements), kind, dtype)).astype(dtype)


def _held(numbers: Any, kind: str, dtype: np.dtype[Any]) -> Any:
    """Returns numbers in the range of a dtype, which may lack zero and signs (a dtype for scales)."""
    smallest = float(jnp.finfo(dtype).min) if jnp.issubdtype(dtype, np.floating) else -1  # type: ignore[no-untyped-call]
    return np.maximum(np.abs(numbers), 1 if kind == "integer" else smallest) if smallest > 0 else numbers


def _index_bound(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    largest = int(jnp.iinfo(dtype).max)  # type: ignore[no-untyped-call]
    return max(1, min(_MAX_INDEX, largest + 1, *shape)) if shape else 1


def _floats(generator: np.random.Generator, kind: str, elements: int) -> np.ndarray[Any, Any]:
    if kind in ("auto", "normal"):
        return generator.standard_normal(elements)
    if kind == "integer":
        return generator.integers(-2, 3, elements).astype(np.float64)
    return generator.uniform(-1, 1, elements)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Stands for one array in the arguments of a call.

    It has a shape and a dtype like an array, because the user's pytree class may read them in its unflatten function.

    Attributes:
        index: its number among the arrays of the call.
        shape: its shape.
        dtype: its dtype, perhaps a dtype of PRNG keys.
        weak_type: whether it is weakly typed.
        is_committed: whether it is on one device and committed to it, which changes the program of a call.
        is_numpy: whether the function gets a NumPy array.
        offset: the position of its first byte in the spool, if it has bytes there.
        is_generated: whether the worker generates the array, because it gets no value.
        sharding: its sharding over several devices, with a mesh that does not name them; None on a single device.
        memory_kind: the memory of its device, by JAX's name; None for the device's default memory.
        strides: the strides of a NumPy array in bytes, because the speed of a plain callable may depend on them; None
            for row-major order.
        is_read_only: whether a NumPy array is read-only.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    is_committed: bool = False
    is_numpy: bool = False
    offset: int = 0
    is_generated: bool = False
    sharding: NamedSharding | None = None
    memory_kind: str | None = None
    strides: tuple[int, ...] | None = None
    is_read_only: bool = False

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def key_impl(self) -> str | None:
        """The PRNG implementation of a key array, else None."""
        return jax_arrays.key_impl(self.dtype) if is_key_dtype(self.dtype) else None

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of the data in the spool: key arrays have more axes, and repeated elements are there once."""
        if self.strides is not None:
            return tuple(size if stride else 1 for size, stride in zip(self.shape, self.strides, strict=True))
        return self.shape if self.key_impl is None else self.shape + jax_arrays.key_data_shape(self.key_impl)

    @property
    def data_dtype(self) -> np.dtype[Any]:
        """The dtype of the data in the spool."""
        return np.dtype(np.uint32 if self.key_impl else self.dtype)

    @property
    def nbytes(self) -> int:
        """The number of its bytes in the spool; 0 if the worker generates it."""
        return 0 if self.is_generated else math.prod(self.data_shape) * self.data_dtype.itemsize

    @property
    def extent_bytes(self) -> int:
        """The size of the memory that a NumPy array covers with its strides."""
        steps = [(size - 1) * abs(stride) for size, stride in zip(self.shape, self.strides or (), strict=False)]
        return sum(steps) + self.data_dtype.itemsize if self.strides is not None else self.nbytes

    def arranged(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns a NumPy array in new memory, with the strides of the caller's array, read-only if that one is.

        Args:
            data: the elements from the spool.
        """
        if self.strides is None:
            array = data.copy()
        else:
            first = sum(
                (1 - size) * stride for size, stride in zip(self.shape, self.strides, strict=True) if stride < 0
            )
            array = np.ndarray(self.shape, self.dtype, np.zeros(self.extent_bytes, np.uint8), first, self.strides)
            once(array)[...] = data
        array.flags.writeable = not self.is_read_only
        return array


def once(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a view of an array without the elements that its strides repeat."""
    return array[tuple(slice(None) if stride else slice(0, 1) for stride in array.strides)]


def mesh_like(mesh: AbstractMesh | Mesh) -> Mesh:
    """Returns a mesh of this process's first devices, the same for equal meshes.

    Raises:
        ValueError: There are fewer devices than the mesh needs.
    """
    devices = jax.local_devices()[: mesh.size]  # other processes may own some of JAX's devices
    if len(devices) < mesh.size:
        raise ValueError(
            f"the arguments need {mesh.size} devices, and this trial has {len(devices)}: "
            f"set devices_per_trial={mesh.size} and make as many visible"
        )
    # A manual axis becomes manual only in the worker's `shard_map`.
    axis_types = tuple(AxisType.Auto if kind is AxisType.Manual else kind for kind in mesh.axis_types)
    return Mesh(np.array(devices).reshape(mesh.axis_sizes), mesh.axis_names, axis_types=axis_types)


# --- arrays from raw data ---


def restore_array(
    data: np.ndarray[Any, Any], weak_type: bool, impl: str | None, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """Returns the JAX array with the given elements.

    Args:
        data: the elements, or the key data of a PRNG key array.
        weak_type: whether the array is weakly typed.
        impl: the PRNG implementation of a key array; None for other arrays.
        sharding: its sharding; None for the default device.
    """
    wide = data.dtype.itemsize == 8 or data.dtype == np.complex128
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        array: jax.Array = _put(data, sharding).block_until_ready()
    if impl is not None:
        keys: jax.Array = jax.random.wrap_key_data(array, impl=impl)
        return keys
    return jax_arrays.as_weak(array) if weak_type else array


def _put(data: np.ndarray[Any, Any], sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return cast("jax.Array", jax.device_put(_off_alignment(data)))

    if "host" in (sharding.memory_kind or ""):  # the type of an array from a callback lacks the memory kind
        return cast("jax.Array", jax.device_put(_off_alignment(data), sharding))

    def shard(index: Any) -> np.ndarray[Any, Any]:
        return _off_alignment(np.asarray(data[index], order="C"))

    return jax.make_array_from_callback(data.shape, sharding, shard)  # the whole array may not fit on one device


def _off_alignment(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the data at an address that makes XLA copy it, so that its JAX array owns its buffer."""
    if data.ctypes.data % _XLA_ALIGNMENT_BYTES:
        return data
    room = np.empty(data.nbytes + _XLA_ALIGNMENT_BYTES, np.uint8)
    start = next_start(room.ctypes.data) - room.ctypes.data
    moved: np.ndarray[Any, Any] = room[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    moved[...] = data
    return moved


def next_start(address: int) -> int:
    """Returns the first address, from the given address on, whose data XLA copies instead of using it in place."""
    return address + (_OFF_ALIGNMENT_BYTES - address) % _XLA_ALIGNMENT_BYTES


def is_key_dtype(dtype: Any) -> bool:
    """Returns whether a dtype is a PRNG key dtype."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def dtype_from_name(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name, including names of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def concrete_data(array: jax.Array) -> tuple[np.ndarray[Any, Any], str | None]:
    """Returns an array's elements as a NumPy array, and its PRNG implementation if it holds keys."""
    if is_key_dtype(array.dtype):
        with jax.ensure_compile_time_eval():  # inside a trace this would be a tracer
            return np.asarray(jax.random.key_data(array)), jax_arrays.key_impl(array.dtype)
    return np.asarray(array), None
