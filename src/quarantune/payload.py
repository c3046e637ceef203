"""Carries a call from the caller to a worker process: one blob, and beside it the arrays as raw bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import math
import operator
import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import cloudpickle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from quarantune import _jax_internals

# On the CPU, XLA uses numpy data that starts on a multiple of 64 bytes in place, whatever it is told, and will not
# donate such a buffer. Data that starts 16 bytes past one (enough for every dtype) it copies into a buffer of its own.
_XLA_ALIGNMENT_BYTES = 64
_OFF_ALIGNMENT_BYTES = 16

_CHUNK_BYTES = 64 << 20

# Options that belong to a process: which devices it may touch, where it caches, whom it talks to, whether somebody
# debugs it. A worker's are set by the sandbox.
_PROCESS_OPTIONS = (
    "jax_platforms",
    "jax_platform_name",
    "jax_xla_backend",
    "jax_backend_target",
    "jax_compilation_cache",
    "jax_enable_compilation_cache",
    "jax_persistent_cache",
    "jax_raise_persistent_cache",
    "jax_share_binary",
    "jax_cuda_",
    "jax_rocm_",
    "jax_oneapi_",
    "jax_mock_gpu",
    "mock_num_gpu",
    "jax_cross_host",
    "jax_force_dcn",
    "jax_distributed",
    "jax_mtls",
    "jax_enable_preemption",
    "jax_enable_recoverability",
    "jax_cpu_collectives",
    "jax_cpu_get_",
    "jax_dump_ir",
    "jax_pjrt_client",
    "jax_default_device",
    "jax_disable_jit",
    "jax_no_tracing",
    "jax_no_execution",
    "jax_transfer_guard",
    "jax_array_garbage_collection_guard",
    "jax_thread_guard",
)

_SIGNATURE_ATTRIBUTES = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
)

_REMEDY = (
    "Create it inside the function, pass it as an argument, or move the function into a module that can be "
    "imported (it then travels by name)."
)


# --- pickling -----------------------------------------------------------------------------------------------


def dumps(obj: object) -> bytes:
    """Pickles anything a tuned function may be made of.

    Args:
        obj: functions (jitted ones and those of `__main__`, closures and notebooks included), arrays,
            classes, values.

    Returns:
        Bytes for `loads`, in a process with the same packages.

    Raises:
        TypeError: something in `obj` cannot travel; the message says what, where it was found and what to do
            instead.
    """
    try:
        return _dump(obj)
    except Exception as error:
        raise TypeError(_explain(obj, error)) from error


def loads(blob: bytes) -> Any:
    """Returns what `dumps` pickled.

    Arrays that functions close over are made here, which initialises a backend; nothing else does.

    Args:
        blob: bytes from `dumps`, from a process that may run code in this one.
    """
    return pickle.loads(blob)


# cloudpickle's list of modules to pickle by value is global; the lock makes our additions private to a dump.
_dump_lock = threading.RLock()


def _dump(obj: object) -> bytes:
    with _dump_lock, contextlib.ExitStack() as cleanup, io.BytesIO() as file:
        _Pickler(file, cleanup).dump(obj)
        return file.getvalue()


class _CannotTravelError(TypeError):
    """An object of a kind that must not be pickled, with the advice for its kind."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, taught the things that JAX makes."""

    def __init__(self, file: io.BytesIO, cleanup: contextlib.ExitStack) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._cleanup = cleanup
        self._importable: dict[str, bool] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return self._reduce_class(obj)
        kind: Any = type(obj)
        reducer = _reducer_for(kind)
        reduced = NotImplemented if reducer is None else reducer(self, obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced

    def _reduce_class(self, cls: type) -> Any:
        self._note_module(cls.__module__)
        reduced = super().reducer_override(cls)
        if not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        registration = _jax_internals.pytree_registration(cls)
        if registration is None:
            return reduced
        rebuild, arguments, state, _, _, set_state = reduced
        return rebuild, arguments, (set_state, state, registration), None, None, _set_class_and_register

    def _reduce_function(self, function: types.FunctionType) -> Any:
        self._note_module(function.__module__)
        reduced = super().reducer_override(function)
        if reduced is NotImplemented:
            return reduced
        rebuild, (code, namespace, *rest), (attributes, slots), _, _, set_state = reduced
        # Its globals' name, not its own: a decorator may have given it another (functools.wraps).
        module = sys.modules.get(function.__globals__.get("__name__", ""))
        if module and function.__globals__ is vars(module) and self._can_import(module.__name__):
            # At home in a module the worker can import, where it gets the module's own globals. Copies of
            # them could hold locks, and would not be the sentinels and primitives JAX knows by identity.
            namespace, slots = _ModuleGlobals(module.__name__), slots | {"__globals__": {}}
        # A function that mentions what wraps it is wrapped before it is whole, and the wrapper wants
        # to know its signature and name: cloudpickle would give it these at the end.
        early = {name: slots[name] for name in _SIGNATURE_ATTRIBUTES}
        arguments = (rebuild, (code, namespace, *rest), early)
        return _make_function, arguments, (attributes, slots), None, None, set_state

    def _reduce_module(self, module: types.ModuleType) -> Any:
        self._note_module(module.__name__)
        return NotImplemented

    def _reduce_jitted(self, fn: Any) -> Any:
        by_name = self._by_name(fn)
        if by_name is not NotImplemented:
            return by_name
        options = _jax_internals.jit_options(fn)
        try:
            options.check_can_travel(getattr(fn, "__qualname__", repr(fn)))
        except TypeError as error:
            raise _CannotTravelError(str(error)) from None
        return options.rebuild, (fn.__wrapped__,)

    def _reduce_custom_rule(self, rule: Any) -> Any:
        by_name = self._by_name(rule)
        if by_name is not NotImplemented:
            return by_name
        # An empty shell first: the rules of f mention f.
        return object.__new__, (type(rule),), dict(vars(rule)), None, None, _set_attributes

    def _reduce_lru_cache(self, cached: Any) -> Any:
        by_name = self._by_name(cached)
        if by_name is not NotImplemented:
            return by_name
        parameters = cached.cache_parameters()
        return _rebuild_lru_cache, (cached.__wrapped__, parameters["maxsize"], parameters["typed"])

    def _reduce_array(self, array: jax.Array) -> Any:
        data, impl = _concrete_data(array)
        return restore_array, (data, bool(getattr(array, "weak_type", False)), impl)

    def _reduce_forbidden(self, obj: Any) -> Any:
        raise _CannotTravelError(next(text for kinds, text in _forbidden() if isinstance(obj, kinds)))

    def _reduce_jax_object(self, obj: Any) -> Any:
        # JAX compares its sentinels (Pallas's `no_block_spec`) by identity: they must arrive as themselves.
        return _reference_from([sys.modules[type(obj).__module__]], obj)

    def _reduce_primitive(self, primitive: Any) -> Any:
        # The rules for a primitive are found by its identity, and it may live in any module.
        modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
        return _reference_from(modules, primitive)

    def _by_name(self, obj: Any) -> Any:
        """Reduces to a reference where `module:qualname`, or what it wraps, is this very object."""
        module_name, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
        if not (isinstance(module_name, str) and isinstance(qualname, str) and self._can_import(module_name)):
            return NotImplemented
        try:
            found, depth = operator.attrgetter(qualname)(sys.modules[module_name]), 0
        except AttributeError:
            return NotImplemented
        while found is not obj:
            found, depth = getattr(found, "__wrapped__", None), depth + 1
            if found is None:
                return NotImplemented
        return load_by_name, (module_name, qualname, depth)

    def _note_module(self, name: str | None) -> None:
        """Makes cloudpickle take by value what lives in a module that a worker could not import."""
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None or name == "__main__" or self._can_import(module.__name__):
            return
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._cleanup.callback(cloudpickle.unregister_pickle_by_value, module)

    def _can_import(self, name: str) -> bool:
        if name not in self._importable:
            self._importable[name] = _can_import(name)
        return self._importable[name]


class _ModuleGlobals:
    """Arrives as the globals of a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return module_globals, (self._name,)


def _reference_from(modules: list[types.ModuleType], obj: Any) -> Any:
    for module in modules:
        for name, value in list(vars(module).items()):
            if value is obj:
                return load_by_name, (module.__name__, name, 0)
    return NotImplemented


# One look-up per class, not per object; bounded, because classes made in loops must be let go.
@functools.lru_cache(maxsize=1024)
def _reducer_for(kind: Any) -> Callable[[_Pickler, Any], Any] | None:
    """Returns the special treatment for objects of a class."""
    if kind is types.FunctionType:
        return _Pickler._reduce_function
    if kind is types.ModuleType:
        return _Pickler._reduce_module
    if kind is _jax_internals.pjit_type():
        return _Pickler._reduce_jitted
    if issubclass(kind, _jax_internals.custom_rule_types()):
        return _Pickler._reduce_custom_rule
    if kind is functools._lru_cache_wrapper:
        return _Pickler._reduce_lru_cache
    if any(issubclass(kind, kinds) for kinds, _ in _forbidden()):
        return _Pickler._reduce_forbidden
    if issubclass(kind, jax.Array):
        return _Pickler._reduce_array
    if issubclass(kind, _jax_internals.primitive_type()):
        return _Pickler._reduce_primitive
    if kind.__module__.partition(".")[0] == "jax" and kind.__module__ in sys.modules:
        return _Pickler._reduce_jax_object
    return None


@functools.cache
def _forbidden() -> tuple[tuple[type | tuple[type, ...], str], ...]:
    stages = (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)
    return (
        (
            jax.core.Tracer,
            "It is a value of a trace in progress and means nothing elsewhere. Pass it to the tuned function "
            "as an argument instead of closing over it.",
        ),
        (
            (jax.Device, jax.sharding.Mesh),
            "Devices and meshes belong to one process. Call jax.devices() or make the mesh inside the "
            "function, or move the function into a module that can be imported (it then travels by name).",
        ),
        (
            stages,
            "It belongs to this process's compiler. Refer to the jitted function itself; the worker compiles its own.",
        ),
    )


def _can_import(name: str) -> bool:
    """Returns whether importing `name` in a fresh process with this `sys.path` gives the same module."""
    module = sys.modules.get(name)
    if module is None or name in ("__main__", "__mp_main__"):
        return False
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return _can_import(parent)  # put there by its parent (os.path), and will be again
    spec = _find_spec(name, path)
    if spec is None:
        return False
    file = getattr(module, "__file__", None)
    if not (spec.has_location and spec.origin and file):
        return True
    return bool(os.path.realpath(spec.origin) == os.path.realpath(file))


def _find_spec(name: str, path: Any) -> Any:
    # Not importlib.util.find_spec: for a module already imported it returns what that module says of itself.
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None


def travels_by_name(obj: Any) -> bool:
    """Returns whether another process finds this very object by its module and qualified name."""
    try:
        return _can_import(obj.__module__) and operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except AttributeError:
        return False


# --- what a blob calls when it is loaded --------------------------------------------------------------------


def load_by_name(module: str, qualname: str, depth: int) -> Any:
    """Returns the object a module calls `qualname`, or the one `depth` wrappers inside it."""
    found = operator.attrgetter(qualname)(importlib.import_module(module))
    for _ in range(depth):
        found = found.__wrapped__
    return found


def module_globals(module: str) -> dict[str, Any]:
    """Returns the globals of a module, imported if need be."""
    return vars(importlib.import_module(module))


def restore_array(
    data: np.ndarray[Any, Any], weak_type: bool, impl: str | None, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """Returns numpy data as the JAX array it was.

    Args:
        data: the elements; the key data of a PRNG key array.
        weak_type: whether the array is weakly typed.
        impl: the PRNG implementation of a key array; None for any other.
        sharding: where it goes; None for the default device.
    """
    wide = data.dtype.itemsize == 8 or data.dtype == np.complex128
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        array: jax.Array = _put(data, sharding).block_until_ready()
    if impl is not None:
        return cast("jax.Array", jax.random.wrap_key_data(array, impl=impl))
    return _jax_internals.as_weak(array) if weak_type else array


def _put(data: np.ndarray[Any, Any], sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return cast("jax.Array", jax.device_put(_off_alignment(data)))

    def shard(index: Any) -> np.ndarray[Any, Any]:
        return _off_alignment(np.ascontiguousarray(data[index]))

    return jax.make_array_from_callback(data.shape, sharding, shard)  # the whole may be too large for one device


def _make_function(
    make: Callable[..., types.FunctionType], arguments: tuple[Any, ...], attributes: Mapping[str, Any]
) -> types.FunctionType:
    function = make(*arguments)
    for name, value in attributes.items():
        setattr(function, name, value)
    return function


def _rebuild_lru_cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def _off_alignment(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the same data where XLA must copy it, so that the JAX array made of it owns its buffer."""
    if data.ctypes.data % _XLA_ALIGNMENT_BYTES:
        return data
    room = np.empty(data.nbytes + _XLA_ALIGNMENT_BYTES, np.uint8)
    start = _next_start(room.ctypes.data) - room.ctypes.data
    moved: np.ndarray[Any, Any] = room[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    moved[...] = data
    return moved


def _set_attributes(obj: Any, attributes: Mapping[str, Any]) -> None:
    vars(obj).update(attributes)


def _set_class_and_register(cls: type, state: tuple[Any, Any, _jax_internals.PytreeRegistration]) -> None:
    set_state, class_state, registration = state
    set_state(cls, class_state)
    _jax_internals.register_pytree(cls, registration)


# --- saying what could not travel ---------------------------------------------------------------------------


def _explain(obj: object, error: BaseException) -> str:
    """Returns the message for an object that could not be pickled."""
    trail, culprit, cause = _find_culprit(obj, error)
    where = trail[-1] if trail else "it"
    through = f" (reached through {', then '.join(trail[:-1])})" if len(trail) > 1 else ""
    advice = str(cause) if isinstance(cause, _CannotTravelError) else f"{str(cause).rstrip('.')}. {_REMEDY}"
    return f"{where}{through} is {_short(culprit)}, which cannot be sent to a worker process. {advice}"


def _find_culprit(obj: object, error: BaseException) -> tuple[list[str], object, BaseException]:
    """Returns the way to the innermost part of `obj` that cannot be pickled, that part, and its error."""
    trail: list[str] = []
    seen = {id(obj)}
    while True:
        for label, child in _parts(obj):
            if id(child) in seen:
                continue
            seen.add(id(child))
            failure = _failure(child)
            if failure is not None:
                trail.append(label)
                obj, error = child, failure
                break
        else:
            return trail, obj, error


def _failure(obj: object) -> Exception | None:
    try:
        _dump(obj)
    except Exception as error:
        return error
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object is made of, each with a phrase that says where it is."""
    name = getattr(obj, "__qualname__", None) or type(obj).__qualname__
    if isinstance(obj, types.FunctionType):
        yield from _parts_of_function(obj, name)
    elif isinstance(obj, types.MethodType):
        yield f"the object that {name!r} is bound to", obj.__self__
    elif isinstance(obj, functools.partial):
        yield f"the function of the partial of {_short(obj.func)}", obj.func
        yield from ((f"partial argument {index}", value) for index, value in enumerate(obj.args))
        yield from ((f"partial argument {key!r}", value) for key, value in obj.keywords.items())
    elif isinstance(obj, _Root):
        yield f"the function {getattr(obj.fn, '__qualname__', _short(obj.fn))!r}", obj.fn
        yield from ((f"argument {index}", value) for index, value in enumerate(obj.args))
        yield from ((f"argument {key!r}", value) for key, value in obj.kwargs.items())
        yield from ((f"the function given as {key}", value) for key, value in obj.companions.items())
    elif isinstance(obj, dict):
        yield from ((f"the entry {_short(key)}", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"element {index}", value) for index, value in enumerate(obj))
    elif type(obj) is _jax_internals.pjit_type():
        yield f"the function inside jax.jit({name!r})", obj.__wrapped__
    elif hasattr(obj, "__dict__") and not isinstance(obj, types.ModuleType):
        # Of a class only what its author wrote: the rest never travels as it is.
        hidden = isinstance(obj, type)
        for key, value in dict(vars(obj)).items():
            if not (hidden and key.startswith("__")):
                yield f"attribute {key!r} of {name!r}", value


def _parts_of_function(function: types.FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell not filled yet
            yield f"closure variable {variable!r} of {name!r}", cell.cell_contents
    for variable in sorted(_names_used(function.__code__) & function.__globals__.keys()):
        yield f"global {variable!r} used by {name!r}", function.__globals__[variable]
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default value {index} of {name!r}", value
    for variable, value in (function.__kwdefaults__ or {}).items():
        yield f"default value of {variable!r} of {name!r}", value
    for variable, value in vars(function).items():
        yield f"attribute {variable!r} of {name!r}", value


def _names_used(code: types.CodeType) -> set[str]:
    inner = (_names_used(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _short(obj: object) -> str:
    try:
        text = repr(obj)
    except Exception:
        text = f"an object of {type(obj).__qualname__}"
    return text if len(text) <= 120 else f"{text[:117]}..."


# --- shardings ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """A mesh of devices, whichever they are.

    Attributes:
        shape: the size of each axis.
        axis_names: their names.
        axis_types: the names of their `jax.sharding.AxisType`.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_types: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """How an array is laid out over a mesh.

    Attributes:
        mesh: the mesh.
        partitions: for each axis of the array the mesh axes it is split over: None, a name, or several.
    """

    mesh: MeshSpec
    partitions: tuple[str | tuple[str, ...] | None, ...]


def sharding_of(array: Any) -> ShardingSpec | None:
    """Returns how an array is laid out over several devices; None where it is not, or JAX does not say.

    Args:
        array: an array, a `jax.ShapeDtypeStruct`, or a tracer: of one only what is explicit is known, and inside
            `shard_map` it is one shard, which is on one device.
    """
    is_tracer = isinstance(array, jax.core.Tracer)
    sharding: Any = getattr(jax.typeof(array) if is_tracer else array, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    if is_tracer and jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    mesh = _describe_mesh(sharding.mesh)
    return ShardingSpec(mesh=mesh, partitions=tuple(sharding.spec)) if mesh.size > 1 else None


def _describe_mesh(mesh: Any) -> MeshSpec:
    """Describes a mesh without its manual axes: inside `shard_map`, they are not the function's business."""
    axes = [
        (size, name, kind.name)
        for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
        if kind is not jax.sharding.AxisType.Manual
    ]
    shape, names, kinds = zip(*axes, strict=True) if axes else ((), (), ())
    return MeshSpec(shape=shape, axis_names=names, axis_types=kinds)


def _own_sharding(array: Any, spec: ShardingSpec | None) -> jax.sharding.NamedSharding | None:
    """Returns how an array is laid out over devices of this process; None where it is on one, or which is not known."""
    if spec is None:
        return None
    sharding: Any = None if isinstance(array, jax.core.Tracer) else array.sharding
    if sharding is not None and isinstance(sharding.mesh, jax.sharding.Mesh):
        return cast("jax.sharding.NamedSharding", sharding)
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX does not say while it traces
        return None
    is_same = _describe_mesh(mesh) == spec.mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec.partitions)) if is_same else None


def _context_mesh(specs: tuple[ArraySpec, ...]) -> MeshSpec | None:
    """Returns the mesh that `jax.set_mesh` has set, where it is that of an argument too."""
    mesh = _describe_mesh(jax.sharding.get_abstract_mesh())
    return mesh if any(spec.sharding is not None and spec.sharding.mesh == mesh for spec in specs) else None


# --- a whole call -------------------------------------------------------------------------------------------


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
        return self.shape if self.key_impl is None else self.shape + _jax_internals.key_data_shape(self.key_impl)


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
        spool_bytes: the size of the spool.
        sources: the caller's arrays, in the order of `arrays`; None for those to be made.
    """

    blob: bytes
    call: Call = dataclasses.field(repr=False, compare=False)
    arrays: tuple[ArraySpec, ...]
    spool_bytes: int
    sources: tuple[Any, ...] = dataclasses.field(repr=False, compare=False)

    @property
    def devices_needed(self) -> int:
        """How many devices the arrays are laid out over."""
        return _devices_needed(self.arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call as it arrives in a worker.

    Attributes:
        fn: the function.
        args: positional arguments, with an `ArrayRef` for each array.
        kwargs: keyword arguments, likewise.
        specs: the arrays the references point to.
        companions: functions that judge the function's output, by name.
        context_mesh: the mesh that the worker is to set, as the caller has; None for none.
        own_shardings: in the caller's own process, how each array is laid out over the caller's own devices, None where
            that is on one of them or not known; empty in a worker, which has others.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    specs: tuple[ArraySpec, ...]
    companions: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    context_mesh: MeshSpec | None = None
    own_shardings: tuple[jax.sharding.NamedSharding | None, ...] = ()

    @property
    def devices_needed(self) -> int:
        """How many devices the arrays are laid out over."""
        return _devices_needed(self.specs)


@dataclasses.dataclass(frozen=True)
class _Root:
    """What a blob holds, as one pickle, so that what is one object here is one object there."""

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    companions: dict[str, Any]


def pack_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    companions: Mapping[str, Callable[..., Any]] | None = None,
) -> PackedCall:
    """Packs a function with its arguments for other processes.

    Args:
        fn: the function, jitted or not.
        args: positional arguments; arrays may be concrete, tracers or `jax.ShapeDtypeStruct`.
        kwargs: keyword arguments, likewise.
        companions: functions that judge its output, by name.

    Raises:
        TypeError: something in the call cannot travel.
        ValueError: an argument was donated to an earlier call or deleted.
    """
    packer = _ArrayPacker()
    packed_args = tuple(packer.pack(value) for value in args)
    packed_kwargs = {name: packer.pack(value) for name, value in kwargs.items()}
    root = _Root(fn, packed_args, packed_kwargs, dict(companions or {}))
    path = [os.path.abspath(entry) for entry in sys.path]  # "" means where this process stands
    specs = tuple(packer.specs)
    return PackedCall(
        blob=pickle.dumps((path, _travelling_config(), specs, _context_mesh(specs), dumps(root))),
        call=Call(
            fn=fn,
            args=root.args,
            kwargs=root.kwargs,
            specs=specs,
            companions=root.companions,
            own_shardings=tuple(packer.shardings),
        ),
        arrays=specs,
        spool_bytes=packer.spool_bytes,
        sources=tuple(packer.sources),
    )


def unpack_call(blob: bytes) -> Call:
    """Returns the call that `pack_call` packed; `sys.path` and JAX's options become what they were there.

    Args:
        blob: `PackedCall.blob`.
    """
    path, config, specs, context_mesh, inner = pickle.loads(blob)
    _adopt_path(path)
    _adopt_config(config)
    _have_cpu_devices(_devices_needed(specs))
    root = loads(inner)
    return Call(
        fn=root.fn,
        args=root.args,
        kwargs=root.kwargs,
        specs=specs,
        companions=root.companions,
        context_mesh=context_mesh,
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
            data = source if isinstance(source, np.ndarray) else _concrete_data(source)[0]
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
        self.spool_bytes = 0

    def pack(self, value: Any) -> Any:
        """Returns one argument with a reference for each array in it."""
        leaves = jax.tree_util.tree_leaves(value)
        if not any(_is_spooled(leaf) for leaf in leaves):
            return value  # as it is: an object that is compared by identity stays itself
        return jax.tree_util.tree_map(lambda leaf: self._reference(leaf) if _is_spooled(leaf) else leaf, value)

    def _reference(self, array: Any) -> ArrayRef:
        spec = _describe(array, index=len(self.specs), offset=_next_start(self.spool_bytes))
        self.specs.append(spec)
        self.sources.append(None if spec.made else array)
        self.shardings.append(_own_sharding(array, spec.sharding))
        if spec.nbytes:
            self.spool_bytes = spec.offset + spec.nbytes
        return ArrayRef(spec.index, spec.shape, array.dtype)


def _next_start(address: int) -> int:
    """Returns the first address from this one on at which XLA does not use data in place."""
    return address + (_OFF_ALIGNMENT_BYTES - address) % _XLA_ALIGNMENT_BYTES


def _is_spooled(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        # Exotic ones (objects, strings, foreign byte order, subclasses) are pickled like any other value.
        plain = type(leaf) in (np.ndarray, np.memmap, _jax_internals.typed_ndarray()) and leaf.dtype.isnative
        return plain and (leaf.dtype.kind in "biufc" or hasattr(ml_dtypes, leaf.dtype.name))
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def _describe(array: Any, *, index: int, offset: int) -> ArraySpec:
    if isinstance(array, np.ndarray):
        return ArraySpec(
            index=index,
            shape=array.shape,
            dtype=array.dtype.name,
            weak_type=bool(getattr(array, "weak_type", False)),
            kind="jax" if type(array) is _jax_internals.typed_ndarray() else "numpy",
            offset=offset,
            nbytes=array.nbytes,
            is_transposed=array.flags.f_contiguous and not array.flags.c_contiguous,
        )
    impl = _jax_internals.key_impl(array.dtype) if is_key_dtype(array.dtype) else None
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


def is_key_dtype(dtype: Any) -> bool:
    """Returns whether a dtype is that of PRNG key arrays."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def dtype_from_name(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype of a name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _concrete_data(array: jax.Array) -> tuple[np.ndarray[Any, Any], str | None]:
    """Returns an array's elements as numpy, and its PRNG implementation if it holds keys."""
    if is_key_dtype(array.dtype):
        with jax.ensure_compile_time_eval():  # a caller that traces would be given a tracer
            return np.asarray(jax.random.key_data(array)), _jax_internals.key_impl(array.dtype)
    return np.asarray(array), None


def _travelling_config() -> dict[str, Any]:
    return {
        name: value
        for name, value in _jax_internals.config_values().items()
        if not name.startswith(_PROCESS_OPTIONS) and isinstance(value, (bool, int, float, str, type(None)))
    }


def _adopt_config(config: Mapping[str, Any]) -> None:
    here = _jax_internals.config_values()
    for name, value in config.items():
        if here.get(name) != value:
            jax.config.update(name, value)


def _devices_needed(specs: tuple[ArraySpec, ...]) -> int:
    return max((spec.sharding.mesh.size for spec in specs if spec.sharding is not None), default=1)


def _have_cpu_devices(count: int) -> None:
    """Has JAX make at least so many devices of this process's CPU, where the caller's arrays may be on none of them."""
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    option = jax.config.values["jax_num_cpu_devices"]
    if count > (option if option >= 0 else int(forced[-1]) if forced else 1):
        jax.config.update("jax_num_cpu_devices", count)


def _adopt_path(path: list[str]) -> None:
    sys.path[:] = path + [entry for entry in sys.path if entry not in path]
    importlib.invalidate_caches()  # the user may have written a module since this process last looked
