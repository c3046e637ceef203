"""Carries a call from the caller to a worker process: one blob, and beside it the arrays as raw bytes."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from quarantune import jax_internals
from quarantune.host import origins
from quarantune.jax_internals import state
from quarantune.transport import unpicklable
from quarantune.transport.arrays import concrete_data, dtype_from_name, is_key_dtype, next_start, restore_array
from quarantune.transport.pickling import dumps, loads, travels_by_name
from quarantune.values.shardings import MeshSpec, ShardingSpec, context_mesh, local_sharding, sharding_of

__all__ = [
    "ArrayRef",
    "ArraySpec",
    "Call",
    "PackedCall",
    "dtype_from_name",
    "dumps",
    "is_key_dtype",
    "loads",
    "pack_call",
    "restore_array",
    "travels_by_name",
    "unpack_call",
    "write_arrays",
]

_CHUNK_BYTES = 64 << 20


def _mesh_to_send(specs: tuple[ArraySpec, ...], devices: float) -> MeshSpec | None:
    """Returns the context's mesh where a trial has its devices, which it must have where it is an argument's too."""
    mesh = context_mesh()
    is_shared = any(spec.sharding is not None and spec.sharding.mesh == mesh for spec in specs)
    return mesh if mesh is not None and (is_shared or mesh.size <= devices) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One array among a call's arguments.

    Attributes:
        index: its number among the arrays of the call.
        shape: its shape.
        dtype: the name of its dtype; for a PRNG key array, of its key data.
        weak_type: whether it is weakly typed.
        kind: `jax` or `numpy` array, or PRNG `key` array.
        key_impl: the PRNG implementation of a key array, else None.
        offset: where its bytes start in the spool.
        nbytes: how many they are; 0 where it is made.
        made: whether there is no concrete value, so that the worker makes one.
        sharding: how it is laid out over several devices; None where it is on one.
        is_transposed: whether its bytes are those of its transpose: a numpy array in Fortran's order stays so, on which
            the speed of a plain callable may hang.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False
    kind: Literal["jax", "numpy", "key"] = "jax"
    key_impl: str | None = None
    offset: int = 0
    nbytes: int = 0
    made: bool = False
    sharding: ShardingSpec | None = None
    is_transposed: bool = False

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of the data in the spool; key arrays have further axes there."""
        return self.shape if self.key_impl is None else self.shape + jax_internals.key_data_shape(self.key_impl)


@dataclasses.dataclass(frozen=True)
class ArrayRef:
    """Stands for an array in the argument trees of a call that travels.

    It has a shape and a dtype because classes of the user's may look at them when a tree is put together.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A call ready to be sent.

    Attributes:
        blob: all but the arrays' bytes, for `unpack_call`.
        call: the same, for a worker in this process.
        arrays: what the spool holds, and what is to be made.
        context_mesh: the mesh that a worker is to set; None for none.
        spool_bytes: the size of the spool.
        sources: the caller's arrays, in the order of `arrays`; None for those to be made.
    """

    blob: bytes
    call: Call = dataclasses.field(repr=False, compare=False)
    arrays: tuple[ArraySpec, ...]
    context_mesh: MeshSpec | None
    spool_bytes: int
    sources: tuple[Any, ...] = dataclasses.field(repr=False, compare=False)

    @property
    def devices_needed(self) -> int:
        """How many devices the arrays are laid out over, or the context's mesh has."""
        return _devices_needed(self.arrays, self.context_mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call as it arrives in a worker.

    Attributes:
        fn: the function.
        args: positional arguments, with an `ArrayRef` for each array.
        kwargs: keyword arguments, likewise.
        specs: the arrays the references point to.
        companions: functions that judge the function's output, by name.
        config_values: what configs hold that JSON does not give back, by its text.
        context_mesh: the mesh that the worker is to set, as the caller has; None for none.
        own_shardings: in the caller's own process, how each array is laid out over the caller's own devices, None where
            that is on one of them or not known; empty in a worker, which has others.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    specs: tuple[ArraySpec, ...]
    companions: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    config_values: dict[str, Any] = dataclasses.field(default_factory=dict)
    context_mesh: MeshSpec | None = None
    own_shardings: tuple[jax.sharding.NamedSharding | None, ...] = ()

    @property
    def devices_needed(self) -> int:
        """How many devices the arrays are laid out over, or the context's mesh has."""
        return _devices_needed(self.specs, self.context_mesh)


@dataclasses.dataclass(frozen=True)
class _Root(unpicklable.Bundle):
    """What a blob holds, as one pickle, so that what is one object here is one object there."""

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    companions: dict[str, Any]
    config_values: dict[str, Any]

    def labelled_parts(self) -> Iterator[tuple[str, Any]]:
        yield f"the function {getattr(self.fn, '__qualname__', unpicklable.short(self.fn))!r}", self.fn
        yield from ((f"argument {index}", value) for index, value in enumerate(self.args))
        yield from ((f"argument {key!r}", value) for key, value in self.kwargs.items())
        yield from ((f"the function given as {key}", value) for key, value in self.companions.items())
        yield from ((f"the config value {unpicklable.short(value)}", value) for value in self.config_values.values())


def pack_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    companions: Mapping[str, Callable[..., Any]] | None = None,
    config_values: Mapping[str, Any] | None = None,
    manual_mesh: MeshSpec | None = None,
    *,
    devices: float = math.inf,
) -> PackedCall:
    """Packs a function with its arguments for other processes.

    Args:
        fn: the function, jitted or not.
        args: positional arguments; arrays may be concrete, tracers or `jax.ShapeDtypeStruct`.
        kwargs: keyword arguments, likewise.
        companions: functions that judge its output, by name.
        config_values: what the configs hold that JSON does not give back, by its text.
        manual_mesh: the mesh of the `shard_map` that the worker is to call the function in; None for none.
        devices: how many devices a trial may have; a larger mesh that only the context knows is not sent.

    Raises:
        TypeError: something in the call cannot travel.
        ValueError: an argument was donated to an earlier call or deleted.
    """
    packer = _ArrayPacker()
    packed_args = tuple(packer.pack(value) for value in args)
    packed_kwargs = {name: packer.pack(value) for name, value in kwargs.items()}
    root = _Root(fn, packed_args, packed_kwargs, dict(companions or {}), dict(config_values or {}))
    specs = tuple(packer.specs)
    if manual_mesh is not None:
        specs = _as_shards(specs, packer.varying, manual_mesh)
    # Inside shard_map the worker's own call of it sets the mesh.
    mesh = _mesh_to_send(specs, devices if manual_mesh is None else 0)
    contexts = dumps(jax_internals.contexts())
    return PackedCall(
        blob=pickle.dumps((origins.import_path(), state.options_to_travel(), specs, mesh, contexts, dumps(root))),
        call=Call(
            fn=fn,
            args=root.args,
            kwargs=root.kwargs,
            specs=specs,
            companions=root.companions,
            config_values=root.config_values,
            own_shardings=tuple(packer.shardings),
        ),
        arrays=specs,
        context_mesh=mesh,
        spool_bytes=packer.spool_bytes,
        sources=tuple(packer.sources),
    )


def _as_shards(specs: Sequence[ArraySpec], varying: Sequence[frozenset[str]], mesh: MeshSpec) -> tuple[ArraySpec, ...]:
    """Returns arrays that are spread over a mesh so that each device has a shard like the ones described.

    What is made differs from device to device where it does in the caller, which tells of the axes unless its
    `shard_map` does not check them: then it differs along all. What has a value is the same on all devices.

    Args:
        specs: the shards.
        varying: for each, the axes along which it may differ.
        mesh: the mesh.
    """
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    is_told = any(varying)

    def spread(spec: ArraySpec, axes: frozenset[str]) -> ArraySpec:
        names = tuple(name for name in mesh.axis_names if name in axes or not is_told)
        if not spec.made or not spec.shape or not names:
            return dataclasses.replace(spec, sharding=ShardingSpec(mesh=mesh, partitions=()))
        whole = (math.prod(sizes[name] for name in names) * spec.shape[0], *spec.shape[1:])
        return dataclasses.replace(spec, shape=whole, sharding=ShardingSpec(mesh=mesh, partitions=(names,)))

    return tuple(map(spread, specs, varying))


def unpack_call(blob: bytes) -> Call:
    """Returns the call that `pack_call` packed; `sys.path` and JAX's options become what they were there.

    Args:
        blob: `PackedCall.blob`.
    """
    path, options, specs, mesh, contexts, inner = pickle.loads(blob)
    _adopt_path(path)
    unknown = state.adopt_options(options)
    _have_cpu_devices(_devices_needed(specs, mesh))
    root = loads(inner)
    state.adopt_late_options(unknown)
    jax_internals.set_contexts(loads(contexts))
    return Call(
        fn=root.fn,
        args=root.args,
        kwargs=root.kwargs,
        specs=specs,
        companions=root.companions,
        config_values=root.config_values,
        context_mesh=mesh,
    )


def write_arrays(packed: PackedCall, fd: int) -> None:
    """Writes the bytes of a call's concrete arrays into a file, each at its offset.

    Args:
        packed: the call.
        fd: a file descriptor open for writing.

    Raises:
        OSError: the file could not be written, for want of space for example.
    """
    for spec, source in zip(packed.arrays, packed.sources, strict=True):
        if not spec.made and spec.nbytes:
            data = source if isinstance(source, np.ndarray) else concrete_data(source)[0]
            data = data.T if spec.is_transposed else data
            _write_all(fd, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, spec.offset)
    # A zero-sized array at the end leaves the file shorter than its offsets say.
    if os.fstat(fd).st_size < packed.spool_bytes:
        os.ftruncate(fd, packed.spool_bytes)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _CHUNK_BYTES], offset + done)


class _ArrayPacker:
    """Numbers the arrays of a call and lays them out in the spool."""

    def __init__(self) -> None:
        self.specs: list[ArraySpec] = []
        self.sources: list[Any] = []
        self.shardings: list[jax.sharding.NamedSharding | None] = []
        self.varying: list[frozenset[str]] = []
        self.spool_bytes = 0

    def pack(self, value: Any) -> Any:
        """Returns one argument with a reference for each array in it."""
        leaves = jax.tree_util.tree_leaves(value)
        if not any(_is_spooled(leaf) for leaf in leaves):
            return value  # as it is: an object that is compared by identity stays itself
        return jax.tree_util.tree_map(lambda leaf: self._reference(leaf) if _is_spooled(leaf) else leaf, value)

    def _reference(self, array: Any) -> ArrayRef:
        spec = _describe(array, index=len(self.specs), offset=next_start(self.spool_bytes))
        self.specs.append(spec)
        self.sources.append(None if spec.made else array)
        self.shardings.append(local_sharding(array, spec.sharding))
        is_tracer = isinstance(array, jax.core.Tracer)
        self.varying.append(jax_internals.varying_axes(array) if is_tracer else frozenset())
        if spec.nbytes:
            self.spool_bytes = spec.offset + spec.nbytes
        return ArrayRef(spec.index, spec.shape, array.dtype)


def _is_spooled(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        # Exotic ones (objects, strings, foreign byte order, subclasses) are pickled like any other value.
        plain = type(leaf) in (np.ndarray, np.memmap, jax_internals.typed_ndarray()) and leaf.dtype.isnative
        return plain and (leaf.dtype.kind in "biufc" or hasattr(ml_dtypes, leaf.dtype.name))
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def _describe(array: Any, *, index: int, offset: int) -> ArraySpec:
    if isinstance(array, np.ndarray):
        return ArraySpec(
            index=index,
            shape=array.shape,
            dtype=array.dtype.name,
            weak_type=bool(getattr(array, "weak_type", False)),
            kind="jax" if type(array) is jax_internals.typed_ndarray() else "numpy",
            offset=offset,
            nbytes=array.nbytes,
            is_transposed=array.flags.f_contiguous and not array.flags.c_contiguous,
        )
    impl = jax_internals.key_impl(array.dtype) if is_key_dtype(array.dtype) else None
    made = not _has_value(array)
    spec = ArraySpec(
        index=index,
        shape=tuple(array.shape),
        dtype="uint32" if impl else _dtype_name(array.dtype, made=made),
        weak_type=bool(getattr(array, "weak_type", False)),
        kind="key" if impl else "jax",
        key_impl=impl,
        made=made,
        sharding=sharding_of(array) if _is_abstract(array) or not made else None,  # not of one that is elsewhere too
    )
    if spec.made:
        return spec
    nbytes = int(np.prod(spec.data_shape, dtype=np.int64)) * dtype_from_name(spec.dtype).itemsize
    return dataclasses.replace(spec, offset=offset, nbytes=nbytes)


def _dtype_name(dtype: np.dtype[Any], *, made: bool) -> str:
    # A concrete array has the dtype it has; a struct's float64 is float32 unless x64 is on.
    return str((jax.dtypes.canonicalize_dtype(dtype) if made else dtype).name)


def _is_abstract(array: Any) -> bool:
    return isinstance(array, (jax.ShapeDtypeStruct, jax.core.Tracer))


def _has_value(array: Any) -> bool:
    if _is_abstract(array):
        return False
    if array.is_deleted():
        raise ValueError(
            f"an argument of shape {tuple(array.shape)} and dtype {array.dtype} has been deleted: it was "
            f"donated to an earlier call. Pass a copy (jnp.copy) to calls that donate their arguments."
        )
    return bool(array.is_fully_addressable)


def _devices_needed(specs: tuple[ArraySpec, ...], mesh: MeshSpec | None) -> int:
    meshes = [spec.sharding.mesh for spec in specs if spec.sharding is not None]
    return max((mesh.size for mesh in [*meshes, *([mesh] if mesh else [])]), default=1)


def _have_cpu_devices(count: int) -> None:
    """Has JAX make at least so many devices of this process's CPU, where the caller's arrays may be on none of them."""
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    option = jax.config.values["jax_num_cpu_devices"]
    if count > (option if option >= 0 else int(forced[-1]) if forced else 1):
        jax.config.update("jax_num_cpu_devices", count)


def _adopt_path(path: list[str]) -> None:
    sys.path[:] = path + [entry for entry in sys.path if entry not in path]
    importlib.invalidate_caches()  # the user may have written a module since this process last looked
