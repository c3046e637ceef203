"""A call in transit: packed in the caller's process, and unpacked in a worker.

A packed call is a blob that contains a description instead of each array. A file, the spool, contains the elements of
the arrays as raw bytes.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import mmap
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from quarantune.functions import importable
from quarantune.functions.binding import Arguments
from quarantune.functions.describe import canonical_dtype, context_mesh, is_in_host_memory, local_sharding, sharding_of
from quarantune.functions.description import with_leaves
from quarantune.functions.fingerprint import is_library
from quarantune.functions.names import adopt_program_name, program_name
from quarantune.host.interruptions import is_interruption
from quarantune.host.packages import import_path
from quarantune.host.shared_files import write_all
from quarantune.jax_internals import jax_arrays, jax_functions, jax_options, jax_traces
from quarantune.transport import process_state
from quarantune.transport.arrays import ArraySpec, concrete_data, make, mesh_like, next_start, once, restore_array
from quarantune.transport.pickling import Copies, dumps, held_by, loads
from quarantune.transport.unpicklable import explain
from quarantune.values.texts import shown

_MOST_EXTENT_BYTES, _MOST_SPREAD = 1 << 28, 16
"""Largest memory that a NumPy view may cover, and the multiple of its size that a larger view may cover."""


@dataclasses.dataclass(frozen=True)
class ProgramValue:
    """A value of one of the caller's modules.

    Attributes:
        place: the name of the module, and the steps to the value.
        state: a hash of its state.
        same_as: the number of the first value that is this very object; -1 for an object without identity.
        shown: its repr if it cannot travel.
        blob: the pickled value; None if it cannot travel.
        reason: why a part of it cannot travel.
    """

    place: tuple[str, ...]
    state: str
    same_as: int
    shown: str
    blob: bytes | None
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call as it arrives in a worker. One pickle contains it all, so that its parts can share objects.

    Attributes:
        fn: the function.
        args: positional arguments, with an `ArraySpec` for each array.
        kwargs: keyword arguments, with an `ArraySpec` for each array.
        specs: the array specs, by number.
        copies: makes the arguments of a function that is not jitted, with array specs; a run may change its arguments,
            so `args` and `kwargs` are empty. None for a jitted function.
        judges: functions that judge the function's output, by name.
        config_values: the config values that JSON cannot restore, by their JSON texts.
        context_mesh: the mesh that the worker sets, if any.
        program_values: the values of modules that a worker takes over; empty in the caller's process.
        own_shardings: in the caller's process, the sharding of each array over the caller's devices; None for an array
            on one device or on unknown devices. Empty in a worker, which has other devices.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    specs: tuple[ArraySpec, ...]
    copies: Copies | None = None
    judges: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    config_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    context_mesh: AbstractMesh | None = None
    program_values: tuple[ProgramValue, ...] = ()
    own_shardings: tuple[jax.sharding.NamedSharding | None, ...] = ()

    @property
    def devices_needed(self) -> int:
        """The largest number of devices that an array or the context's mesh covers; at least 1."""
        meshes = [self.context_mesh, *(spec.sharding.mesh for spec in self.specs if spec.sharding is not None)]
        return max((mesh.size for mesh in meshes if mesh is not None), default=1)

    @property
    def spool_bytes(self) -> int:
        """The size of the spool."""
        return max((spec.offset + spec.nbytes for spec in self.specs if spec.nbytes), default=0)

    def labelled_parts(self) -> Iterator[tuple[str, Any]]:
        """Yields the parts that pickle may fail on, each after a phrase that names it."""
        yield f"the function {getattr(self.fn, '__qualname__', shown(self.fn))!r}", self.fn
        yield from ((f"argument {index}", value) for index, value in enumerate(self.args))
        yield from ((f"argument {key!r}", value) for key, value in self.kwargs.items())
        yield from ((f"the function given as {key}", value) for key, value in self.judges.items())
        yield from ((f"the config value {shown(value)}", value) for value in self.config_values.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A call ready to send.

    Attributes:
        blob: everything except the bytes of the arrays, for `payload.unpack_call`; empty for a call that stays here.
        call: the same call for trials in this process.
        devices_needed: `Call.devices_needed` of the call that travels.
        sources: the caller's arrays, in the order of `call.specs`; None for each array that the worker generates.
        spool: the content of the spool of a call from another machine; None if `sources` contain the arrays.
    """

    blob: bytes
    call: Call = dataclasses.field(repr=False, compare=False)
    devices_needed: int
    sources: tuple[Any, ...] = dataclasses.field(repr=False, compare=False)
    spool: bytes | None = dataclasses.field(default=None, repr=False, compare=False)


def pack_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    judges: Mapping[str, Callable[..., Any]] | None = None,
    config_values: Mapping[str, Any] | None = None,
    manual_mesh: AbstractMesh | None = None,
    *,
    devices: float = math.inf,
    with_values: bool = True,
    program_values: tuple[ProgramValue, ...] = (),
    is_sent: bool = True,
) -> PackedCall:
    """Packs a function with its arguments for other processes.

    Args:
        fn: the function, jitted or not.
        args: positional arguments; arrays may be concrete, tracers or `jax.ShapeDtypeStruct`.
        kwargs: keyword arguments, with the same kinds of arrays.
        judges: functions that judge the function's output, by name.
        config_values: the config values that JSON cannot restore, by their JSON texts.
        manual_mesh: the mesh of the `shard_map` around the worker's call of the function, if any.
        devices: how many devices a trial may have; a larger mesh travels only if an argument uses it.
        with_values: whether arrays travel with their values. If not, workers generate JAX arrays by shape and dtype.
            They also generate NumPy arrays of a jitted function; other functions might not accept JAX arrays instead.
        program_values: the values that the caller's program has set in modules.
        is_sent: whether another process gets the call. If not, pickle may fail on its parts.

    Raises:
        TypeError: Pickle fails on a part of the call.
        ValueError: An argument was deleted, or donated to an earlier call, or is a view that covers too much memory.
    """
    is_jitted = jax_functions.is_jitted(fn)
    given = Call(fn=fn, args=args, kwargs=kwargs, specs=(), judges={**(judges or {})}, program_values=program_values)
    given = dataclasses.replace(given, config_values={**(config_values or {})})
    copies = None if is_jitted else _copies_of(given, is_sent=is_sent)
    by_position, by_name = jax_functions.jit_options(fn).dynamic(args, kwargs) if is_jitted else ({}, {})
    dynamic = [*by_position.values()], by_name
    arrays = list(filter(_is_spooled, jax.tree.leaves(dynamic) if copies is None else copies.parts))
    found = _specs(arrays, with_values=with_values, is_jitted=is_jitted)
    specs = found if manual_mesh is None else _as_shards(found, arrays, manual_mesh)
    in_order = iter(specs)
    if copies is None:
        packed, packed_kwargs = with_leaves(*dynamic, _is_spooled, lambda _: next(in_order))
        packed_args = dict(zip(by_position, packed, strict=True))
        args = tuple(packed_args.get(position, arg) for position, arg in enumerate(args))
        kwargs = {**kwargs, **packed_kwargs}
    else:
        args, kwargs = (), {}
        copies.replace(lambda part: next(in_order) if _is_spooled(part) else part)
    call = dataclasses.replace(
        given,
        args=args,
        kwargs=kwargs,
        specs=specs,
        copies=copies,
        # The worker's own shard_map sets a manual mesh.
        context_mesh=_mesh_to_send(specs, devices if manual_mesh is None else 0),
    )
    return PackedCall(
        blob=_blob(call, given) if is_sent else b"",
        call=dataclasses.replace(
            call,
            context_mesh=None,
            program_values=(),
            own_shardings=tuple(map(local_sharding, arrays, (spec.sharding for spec in found))),
        ),
        devices_needed=call.devices_needed,
        sources=tuple(None if spec.is_generated else array for array, spec in zip(arrays, found, strict=True)),
    )


def _copies_of(call: Call, *, is_sent: bool) -> Copies:
    """Returns the maker of a call's arguments.

    All copies share the objects that the functions hold, because a function may compare an argument by identity.

    Raises:
        TypeError: Copying an argument fails.
    """
    held = held_by([call.fn, call.judges], importable.remembering() if is_sent else is_library)

    def copies(value: object) -> Copies:
        return Copies(value, lambda part: _is_spooled(part) or (id(part) in held and not _is_container(part)))

    try:
        return copies((call.args, dict(call.kwargs)))
    except Exception as error:
        if is_interruption(error):
            raise
        failure = "copied, and each run of a function that is not jitted needs a copy, because a run may change it"
        remedy = "Create it inside the function, or pass its source data, such as a list or a path."
        raise TypeError(explain(call, error, copies, failure, remedy)) from error


def _blob(call: Call, given: Call) -> bytes:
    """Returns a pickle in a pickle, because a worker reads the outer pickle before it imports the user's modules."""
    contexts = dumps(jax_options.contexts())  # their values may have the user's own classes
    options, state = jax_options.options_to_travel(), process_state.state()
    process = import_path(), options, contexts, call.devices_needed, program_name(), state
    return pickle.dumps((*process, dumps(call, source=given)))


def write_arrays(packed: PackedCall, fd: int) -> None:
    """Writes the bytes of a call's concrete arrays into a file, each at its offset.

    Args:
        packed: the call.
        fd: a file descriptor open for writing.

    Raises:
        OSError: Writing fails, for example because the disk is full.
    """
    if packed.spool is not None:
        os.lseek(fd, 0, os.SEEK_SET)
        write_all(fd, packed.spool)
        return
    for spec, source in zip(packed.call.specs, packed.sources, strict=True):
        if spec.nbytes:
            data = source if isinstance(source, np.ndarray) else concrete_data(source)[0]
            data = data if spec.strides is None else once(data)
            os.lseek(fd, spec.offset, os.SEEK_SET)
            write_all(fd, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def unpack_call(blob: bytes | memoryview) -> Call:
    """Returns the call that `pack_call` packed, and adopts the import path and JAX options of its process.

    Args:
        blob: `PackedCall.blob`.
    """
    paths, options, contexts, devices, program, state, root = pickle.loads(blob)
    sys.path[:] = paths + [entry for entry in sys.path if entry not in paths]
    adopt_program_name(program)
    process_state.adopt_before(state)
    importlib.invalidate_caches()  # the user may have written a module since this process last looked
    options = {**options, "jax_num_cpu_devices": _cpu_devices(options["jax_num_cpu_devices"], devices)}
    jax_options.adopt_options(options)
    call: Call = loads(root)
    # Again, because `loads` has imported the user's modules: some register options, or set options that the caller has
    # changed since.
    jax_options.adopt_options(options)
    jax_options.set_contexts(loads(contexts))
    process_state.adopt(state)
    return call


def materialize(call: Call, fd: int, *, seed: int, kind: str = "auto") -> Arguments:
    """Returns a call's arguments with real arrays in them, new arrays each time.

    Args:
        call: the call, from `payload.unpack_call`.
        fd: the spool, open for reading; unused if no array has bytes in it.
        seed: the seed of generated arrays.
        kind: how to generate them, one of `SUPPLIES`.

    Returns:
        Positional and keyword arguments. JAX arrays own their buffers, so that a kernel may donate them;
        NumPy arrays are copies, writable unless their spec is read-only.

    Raises:
        ValueError: The spool is too short for the call, or there are fewer devices than it needs.
    """
    spool = _map_spool(call, fd)

    def array(spec: ArraySpec) -> Any:
        sharding = _sharding(call, spec)
        if spec.is_generated:
            return make(
                spec.shape, spec.dtype, spec.weak_type, kind=kind, seed=seed, index=spec.index, sharding=sharding
            )
        data = _view(spool, spec)
        if spec.is_numpy:
            return spec.arranged(data)
        return restore_array(data, spec.weak_type, spec.key_impl, sharding)

    # Freeing the last view of the mapping closes it.
    return _with_arrays(call, array)


def call_as_structs(call: Call, *, sharding: Any = None) -> Arguments:
    """Returns a call's arguments with a `jax.ShapeDtypeStruct` for each array, to compile without data.

    Args:
        call: the call, from `payload.unpack_call`.
        sharding: the sharding of every array; None for the call's shardings.

    Raises:
        ValueError: There are fewer devices than the call needs.
    """

    def struct(spec: ArraySpec) -> jax.ShapeDtypeStruct:
        # The key dtype of this process: unpickling may have made another dtype for the user's own PRNG.
        dtype = spec.dtype if spec.key_impl is None else jax_arrays.key_dtype(spec.key_impl)
        if spec.is_numpy:
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(
            spec.shape, dtype, weak_type=spec.weak_type, sharding=sharding or _sharding(call, spec)
        )

    return _with_arrays(call, struct)


# --- in the caller's process ---


def _mesh_to_send(specs: tuple[ArraySpec, ...], devices: float) -> AbstractMesh | None:
    """Returns the mesh of the context that the worker must set, if any.

    Args:
        specs: the arrays of the call.
        devices: how many devices a trial may have. A larger mesh travels only if an argument uses it.
    """
    mesh = context_mesh()
    is_shared = any(spec.sharding is not None and spec.sharding.mesh == mesh for spec in specs)
    return mesh if mesh is not None and (is_shared or mesh.size <= devices) else None


def _as_shards(specs: Sequence[ArraySpec], shards: Sequence[Any], mesh: AbstractMesh) -> tuple[ArraySpec, ...]:
    """Returns descriptions of arrays over a mesh whose shard on each device is like the given shard.

    A generated array differs from device to device along the same mesh axes as the caller's array. JAX knows these axes
    only if the caller's `shard_map` checks them; otherwise the array differs along all axes. An array with a value is
    the same on all devices.

    Args:
        specs: describe the shards.
        shards: the shards.
        mesh: the mesh.
    """
    varying = list(map(_varying, shards))
    is_known = any(varying)

    def spread(spec: ArraySpec, axes: frozenset[str]) -> ArraySpec:
        names = tuple(name for name in mesh.axis_names if name in axes or not is_known)
        if not spec.is_generated or not spec.shape or not names:
            return dataclasses.replace(spec, sharding=NamedSharding(mesh, PartitionSpec()))
        whole = (math.prod(mesh.shape[name] for name in names) * spec.shape[0], *spec.shape[1:])
        return dataclasses.replace(spec, shape=whole, sharding=NamedSharding(mesh, PartitionSpec(names)))

    return tuple(map(spread, specs, varying))


def _varying(shard: Any) -> frozenset[str]:
    if isinstance(shard, jax.ShapeDtypeStruct) and isinstance(shard.sharding, NamedSharding):  # of a recorded call
        names = shard.sharding.spec[0]  # JAX turns a tuple of one name into the name
        return frozenset({names} if isinstance(names, str) else names)
    return jax_traces.varying_axes(shard) if isinstance(shard, jax.core.Tracer) else frozenset()


def _is_container(part: Any) -> bool:
    return type(part).__module__ in ("builtins", "collections", "array", "numpy")


def _is_spooled(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        # Pickle handles other arrays: of objects or strings, in foreign byte order, or of subclasses.
        plain = type(leaf) in (np.ndarray, np.memmap, jax_arrays.typed_ndarray) and leaf.dtype.isnative
        return plain and (leaf.dtype.kind in "biufc" or hasattr(ml_dtypes, leaf.dtype.name))
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def _specs(arrays: Sequence[Any], *, with_values: bool, is_jitted: bool) -> tuple[ArraySpec, ...]:
    """Describes the arrays of a call, and lays them out in the spool.

    Args:
        arrays: the arrays.
        with_values: whether arrays that have a value travel with it.
        is_jitted: whether the function is jitted. Other functions always get NumPy arrays with their values and their
            layout in memory.
    """
    specs, end = [], 0
    for index, array in enumerate(arrays):
        is_as_given = isinstance(array, np.ndarray) and not is_jitted
        with_value = with_values or is_as_given
        offset = next_start(end)
        specs.append(_describe(array, index=index, offset=offset, with_value=with_value, is_as_given=is_as_given))
        end = max(end, specs[-1].offset + specs[-1].nbytes)
    return tuple(specs)


def _describe(array: Any, *, index: int, offset: int, with_value: bool, is_as_given: bool) -> ArraySpec:
    has_value = _has_value(array)
    is_generated = not (has_value and with_value)
    is_numpy = isinstance(array, np.ndarray) and not is_generated
    spec = ArraySpec(
        index=index,
        shape=tuple(array.shape),
        # A concrete array has the dtype it has; a struct's float64 is float32 unless x64 is on.
        dtype=canonical_dtype(array.dtype) if is_generated else array.dtype,
        weak_type=bool(getattr(array, "weak_type", False)),
        is_committed=_is_committed(array),
        is_numpy=is_numpy and type(array) is not jax_arrays.typed_ndarray,
        offset=offset,
        is_generated=is_generated,
        sharding=sharding_of(array) if _is_abstract(array) or has_value else None,
        memory_kind=_memory_kind(array),
        strides=array.strides if is_as_given and not array.flags.c_contiguous else None,
        is_read_only=is_as_given and not array.flags.writeable,
    )
    if spec.extent_bytes > max(_MOST_EXTENT_BYTES, _MOST_SPREAD * spec.nbytes):
        raise ValueError(
            f"an argument of shape {spec.shape} is a view that covers {spec.extent_bytes:,} bytes, and workers would "
            f"need as much memory: pass a copy (numpy.ascontiguousarray)"
        )
    return spec


def _is_committed(array: Any) -> bool:
    """Returns whether an array, or the array that a struct describes, is on one device and committed to it."""
    if isinstance(array, jax.core.Tracer):
        return False
    is_on_one = isinstance(getattr(array, "sharding", None), jax.sharding.SingleDeviceSharding)
    return is_on_one and bool(getattr(array, "committed", True))  # a struct names a device only if it is committed


def _memory_kind(array: Any) -> str | None:
    if not is_in_host_memory(array):
        return None
    return "pinned_host" if isinstance(array, jax.core.Tracer) else str(array.sharding.memory_kind)


def _is_abstract(array: Any) -> bool:
    return isinstance(array, (jax.ShapeDtypeStruct, jax.core.Tracer))


def _has_value(array: Any) -> bool:
    if _is_abstract(array):
        return False
    if isinstance(array, np.ndarray):
        return True
    if array.is_deleted():
        raise ValueError(
            f"an argument of shape {tuple(array.shape)} and dtype {array.dtype} has been deleted: it was "
            f"donated to an earlier call. Pass a copy (jnp.copy) to calls that donate their arguments."
        )
    return bool(array.is_fully_addressable)


# --- in a worker ---


def _cpu_devices(option: int, needed: int) -> int:
    """Returns the number of CPU devices for JAX to make: at least as many as the call needs.

    Args:
        option: JAX's option in the caller's process; -1 if unset.
        needed: how many devices the call needs.
    """
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return needed if needed > (option if option >= 0 else int(forced[-1]) if forced else 1) else option


def _map_spool(call: Call, fd: int) -> mmap.mmap | None:
    if (needed := call.spool_bytes) == 0:
        return None
    size = os.fstat(fd).st_size
    if size < needed:
        # Reading past the end of a mapped file would kill the process.
        raise ValueError(
            f"the spool holds {size} bytes and the call needs {needed}: write_arrays did not run or failed"
        )
    return mmap.mmap(fd, needed, access=mmap.ACCESS_READ)


def _view(spool: mmap.mmap | None, spec: ArraySpec) -> np.ndarray[Any, Any]:
    if spool is None or spec.nbytes == 0:
        return np.zeros(spec.data_shape, spec.data_dtype)
    flat = np.frombuffer(spool, spec.data_dtype, math.prod(spec.data_shape), spec.offset)
    return flat.reshape(spec.data_shape)


def _sharding(call: Call, spec: ArraySpec) -> Sharding | None:
    """Returns the sharding of an array in this process; None for an array that may be anywhere."""
    place: Sharding | None = None
    if call.own_shardings and (own := call.own_shardings[spec.index]) is not None:
        place = own
    elif spec.sharding is not None:
        place = NamedSharding(mesh_like(spec.sharding.mesh), spec.sharding.spec)
    elif spec.is_committed or spec.memory_kind:
        place = jax.device_put(np.zeros(())).sharding  # JAX's default device
    return place.with_memory_kind(spec.memory_kind) if place is not None and spec.memory_kind else place


def _with_arrays(call: Call, make_array: Callable[[ArraySpec], Any]) -> Arguments:
    if call.copies is None:
        return with_leaves(call.args, call.kwargs, lambda leaf: isinstance(leaf, ArraySpec), make_array)
    made: Arguments = call.copies.make(lambda part: make_array(part) if isinstance(part, ArraySpec) else part)
    return made
