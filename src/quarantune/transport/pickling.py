"""Pickles functions and values for workers: everything that cloudpickle supports, and JAX's own objects."""

from __future__ import annotations

import contextvars
import enum
import functools
import importlib.util
import inspect
import io
import operator
import os
import pickle
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import cloudpickle
import jax
import numpy as np

from quarantune.functions import importable
from quarantune.functions.fingerprint import code_within
from quarantune.functions.names import PROGRAMS
from quarantune.host.interruptions import answer_of, failure_of, is_interruption
from quarantune.host.process import in_sandbox
from quarantune.jax_internals import jax_functions, jax_traces
from quarantune.transport import classes, unpicklable
from quarantune.transport.arrays import concrete_data, restore_array

_Names = dict[str, Any]
_SIGNATURE_ATTRIBUTES = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")


def dumps(obj: object, apart: list[memoryview] | None = None, *, source: object = None) -> bytes:
    """Pickles a function with everything that it refers to.

    Args:
        obj: functions (also jitted functions, closures, and functions of `__main__` or a notebook), arrays,
            classes, values.
        apart: receives the elements of NumPy arrays without a copy; None puts them into the result.
        source: the object whose parts an error names; None for `obj` itself.

    Returns:
        Bytes for `loads`, in a process with the same packages.

    Raises:
        TypeError: Pickle fails on a part of `obj`. The message names the part, the way to it, and a remedy.
    """
    try:
        return _dump(obj, apart)
    except Exception as error:
        if is_interruption(error):
            raise
        message = unpicklable.explain(source or obj, error, _dump)
        if edited := importable.own_edited_modules():
            message += (
                f" ({', '.join(edited)} changed on disk after this process imported it. A worker would import the new "
                f"code, so its functions do not travel by name: reload it, or start the program again.)"
            )
        raise TypeError(message) from error


def loads(blob: bytes | memoryview, apart: Sequence[memoryview] = ()) -> Any:
    """Returns the object that `dumps` pickled.

    This initialises a backend only if a function closes over JAX arrays, because this creates the arrays.

    Args:
        blob: bytes from `dumps`, from a trusted process: loading them may run code.
        apart: the elements that `dumps` added to its `apart`; the arrays share this memory.
    """
    return pickle.loads(blob, buffers=apart)


def _dump(obj: object, apart: list[memoryview] | None = None) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, apart).dump(obj)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, extended to JAX's own objects."""

    def __init__(self, file: io.BytesIO, apart: list[memoryview] | None = None) -> None:
        take = None if apart is None else lambda buffer: apart.append(buffer.raw())
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=take)
        self._takes_apart = apart is not None
        self._can_import = importable.remembering()

    def reducer_override(self, obj: Any) -> Any:
        """Reduces an object with one of our reducers, or leaves it to cloudpickle."""
        if isinstance(obj, type):
            return self._at_its_name(obj, obj.__qualname__, self._reduce_class(obj))
        if self._takes_apart and type(obj) is np.ndarray and obj.nbytes and not obj.dtype.hasobject:
            # NumPy does not pickle arrays of dtypes such as bfloat16 out of band.
            elements = np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
            return _array_of, (pickle.PickleBuffer(elements.data), obj.dtype, obj.shape)
        kind: Any = type(obj)
        reducer = _reducer_for(kind)
        reduced = self._by_name(obj) if reducer in _OF_WRAPPERS else NotImplemented
        if reduced is NotImplemented and reducer is not None:
            reduced = reducer(self, obj)
        if isinstance(obj, types.FunctionType):
            return self._at_its_name(obj, obj.__qualname__, reduced)
        if reduced is NotImplemented and (kind not in self.dispatch_table or kind is TypeVar):
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return self._at_its_name(obj, reduced, reduced) if isinstance(reduced, str) else reduced

    def _at_its_name(self, obj: Any, name: str, reduced: Any) -> Any:
        """Completes a reduction: an object of a module that a worker cannot import gets its name again there.

        Args:
            obj: the object.
            name: its name in its module.
            reduced: its reduction; the name itself if pickle saves only the name.
        """
        home = str(getattr(obj, "__module__", None))
        is_there = answer_of(operator.attrgetter(name), sys.modules.get(home)) is obj
        if is_there and self._can_import(home):
            return reduced
        if isinstance(reduced, str) and (is_there or type(obj).__module__ in ("typing", "typing_extensions")):
            reduced = self._reduce_named(obj, home)
        if not is_there:
            return reduced
        return _put, (self._about(sys.modules[home]), name, *reduced[:2]), *reduced[2:]

    def _reduce_named(self, obj: Any, home: str) -> Any:
        """Reduces an object by value although pickle would save only its name."""
        kind: Any = type(obj)
        if kind is _ALIAS:
            value = self.globals_ref.setdefault(id(obj), {"_value": answer_of(lambda: obj.__value__)})
            parameters = ", ".join(_STARS[type(each)] + each.__name__ for each in obj.__type_params__)
            # The value is in a dictionary because it may refer to the alias.
            return _make_alias, (home, obj.__name__, parameters, value)
        if kind in _STARS:
            named = ("bound", "covariant", "contravariant", "infer_variance", "default")
            options = {name: getattr(obj, f"__{name}__") for name in named if hasattr(obj, f"__{name}__")}
            return functools.partial(kind, **options), (obj.__name__, *getattr(obj, "__constraints__", ()))
        if failure_of(object.__new__, kind) is None:
            return object.__new__, (kind,), object.__getstate__(obj)
        raise unpicklable.CannotTravelError(
            f"Pickle saves only its name in {home}, which a worker cannot import: move it into an importable module."
        )

    def _about(self, module: types.ModuleType) -> _Names:
        """Returns the initial globals of a module that a worker cannot import, shared with the module's functions."""
        names: _Names = self.globals_ref.setdefault(id(vars(module)), {})
        if "__spec__" not in names:
            names |= {name: vars(module)[name] for name in _ABOUT if name in vars(module)}
            spec = vars(module).get("__spec__")  # children of `multiprocessing` find the module by it
            names["__spec__"] = spec and importlib.machinery.ModuleSpec(spec.name, None)
        return names

    def _lives_here_only(self, obj: Any) -> bool:
        """Returns whether a function, class or type variable is in a module that a worker cannot import."""
        name = obj.__module__
        module = sys.modules.get(name) if isinstance(name, str) else None
        # cloudpickle handles `__main__` without help.
        return module is not None and name != "__main__" and not self._can_import(module.__name__)

    def _reduce_class(self, cls: type) -> Any:
        reduced = _reduce_by_value(self, cls) if self._lives_here_only(cls) else super().reducer_override(cls)
        if not isinstance(reduced, tuple) or len(reduced) != 6 or isinstance(cls, enum.EnumMeta):
            return reduced
        reduced[2][0]["__qualname__"] = cls.__qualname__  # cloudpickle does not keep it
        return classes.reduce_class(cls, reduced, self._can_import)

    def _reduce_function(self, function: types.FunctionType) -> Any:
        is_here_only = self._lives_here_only(function)
        reduced = _reduce_by_value(self, function) if is_here_only else super().reducer_override(function)
        if reduced is NotImplemented:
            return reduced
        rebuild, (code, namespace, *rest), (attributes, slots), _, _, set_state = reduced
        # The module of its globals, because a decorator (functools.wraps) may have changed `__module__`.
        module = sys.modules.get(function.__globals__.get("__name__", ""))
        if module and function.__globals__ is vars(module):
            # The worker imports the module and uses its globals. Copies could include values that cannot travel, and
            # JAX compares sentinels and primitives by identity.
            is_there = self._can_import(module.__name__)
            namespace = module.__name__ if is_there else self._about(module)
            slots = slots | {"__globals__": {} if is_there else slots["__globals__"] | _looked_up(function)}
        # Loading wraps a function that refers to its own wrapper before the function is complete. The wrapper reads
        # the signature and the name, so these come first; cloudpickle would set them last.
        early = {name: slots[name] for name in _SIGNATURE_ATTRIBUTES}
        arguments = (rebuild, code, namespace, rest, early)
        return _make_function, arguments, (attributes, slots), None, None, set_state

    def _reduce_code(self, code: types.CodeType) -> Any:
        make, arguments = self.dispatch_table[types.CodeType](code)
        return make, tuple(
            code.co_filename if type(argument) is str and argument == _NO_FILE else argument for argument in arguments
        )

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if module.__name__ not in sys.modules or self._can_import(module.__name__):
            return NotImplemented
        about = self._about(module)
        left_out = vars(module) if module.__name__ in PROGRAMS else {"__builtins__", "__loader__", *about}
        content = {name: value for name, value in vars(module).items() if name not in left_out}
        # The module starts empty, because modules may refer to each other.
        return _module_like, (about,), content, None, None, _set_attributes

    def _reduce_lock(self, lock: Any) -> Any:
        # In the receiving process nobody holds the lock.
        return _LOCKS[type(lock)], ()

    def _reduce_context_variable(self, variable: contextvars.ContextVar[Any]) -> Any:
        # The value here becomes the default of the copy, because no context there sets it.
        default = {} if failure_of(variable.get) else {"default": variable.get()}
        return functools.partial(contextvars.ContextVar, variable.name, **default), ()

    def _reduce_thread_local(self, local: threading.local) -> Any:
        return threading.local, (), dict(vars(local)), None, None, _set_attributes

    def _reduce_weak_reference(self, reference: Any) -> Any:
        held = reference()
        return (_dead_reference, ()) if held is None else (weakref.ref, (held,))

    def _reduce_jitted(self, fn: Any) -> Any:
        options = jax_functions.jit_options(fn)
        try:
            options.check_can_travel(getattr(fn, "__qualname__", repr(fn)))
        except TypeError as error:
            raise unpicklable.CannotTravelError(str(error)) from None
        return options.rebuild, (fn.__wrapped__,)

    def _reduce_custom_rule(self, rule: Any) -> Any:
        # The object starts empty, because the rules of f refer to f.
        return object.__new__, (type(rule),), dict(vars(rule)), None, None, _set_attributes

    def _reduce_lru_cache(self, cached: Any) -> Any:
        parameters = cached.cache_parameters()
        return _rebuild_lru_cache, (cached.__wrapped__, parameters["maxsize"], parameters["typed"])

    def _reduce_array(self, array: jax.Array) -> Any:
        data, impl = concrete_data(array)
        return restore_array, (data, bool(getattr(array, "weak_type", False)), impl)

    def _reduce_forbidden(self, obj: Any) -> Any:
        raise unpicklable.CannotTravelError(next(text for kinds, text in _FORBIDDEN.items() if isinstance(obj, kinds)))

    def _reduce_jax_object(self, obj: Any) -> Any:
        # JAX compares its sentinels (Pallas's `no_block_spec`) by identity, so they travel by name.
        return _reference_from(sys.modules[type(obj).__module__], obj)

    def _reduce_plain(self, obj: Any) -> Any:
        # Code compares a sentinel by identity, so it travels by name. An object that refuses copies has no other way.
        module = sys.modules.get(type(obj).__module__)
        if module and (classes.is_sentinel(obj) or self._refuses(obj)) and self._can_import(module.__name__):
            return _reference_from(module, obj)
        return NotImplemented

    def _refuses(self, obj: Any) -> bool:
        return classes.refuses_to_be_copied(obj)

    def _reduce_primitive(self, primitive: Any) -> Any:
        # A primitive may live in any module.
        homes = (importable.home_in(module, primitive) for module in list(sys.modules.values()))
        if (home := next((home for home in homes if home and self._can_import(home[0])), None)) is None:
            raise unpicklable.CannotTravelError(
                "JAX finds the rules of a primitive by its identity. Move it, with its rules, into a module that can "
                "be imported (it then travels by name)."
            )
        return load_by_name, (*home, 0)

    def _by_name(self, obj: Any) -> Any:
        """Reduces an object to a reference if a worker finds this very object by its name."""
        found = importable.found_by_name(obj, self._can_import)
        return NotImplemented if found is None else (load_by_name, found)


class Copies:
    """Makes copies of a value as it is now: later changes of the value, or of one copy, do not affect other copies.

    A part that has several places in the value is one object in each copy. Functions, classes, modules and objects
    without state stay out of the pickle.

    Attributes:
        parts: the parts that stay out of the pickle; `make` asks for an object for each.
    """

    def __init__(self, value: object, is_kept: Callable[[Any], bool]) -> None:
        """Pickles the value.

        Args:
            value: the value.
            is_kept: returns whether a further part stays out of the pickle.
        """
        self.parts: list[Any] = []
        with io.BytesIO() as file:
            _CopyPickler(file, self.parts, is_kept).dump(value)
            self._blob = file.getvalue()

    def replace(self, replaced: Callable[[Any], Any]) -> None:
        """Replaces each item of `parts` by the result of `replaced`."""
        self.parts = list(map(replaced, self.parts))

    def make(self, part: Callable[[Any], Any]) -> Any:
        """Returns a new copy.

        Args:
            part: returns the object that the copy gets for an item of `parts`.
        """
        return _CopyUnpickler(self._blob, functools.cache(lambda number: part(self.parts[number]))).load()


class _CopyPickler(_Pickler):
    """Pickles a value, with numbers for the parts that stay out of the pickle."""

    def __init__(self, file: io.BytesIO, parts: list[Any], is_kept: Callable[[Any], bool]) -> None:
        super().__init__(file)
        self._can_import = lambda _: True  # this process finds every module
        self._parts, self._is_kept = parts, is_kept
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        kind: Any = type(obj)
        if kind in _PLAIN or not (
            self._is_kept(obj)
            or isinstance(obj, (type, *_STARS))
            or _reducer_for(kind) in _OF_KEPT
            or classes.is_sentinel(obj)
        ):
            return None
        number = self._numbers.setdefault(id(obj), len(self._parts))
        if number == len(self._parts) or kind is jax.ShapeDtypeStruct:  # each struct stands for a separate array
            self._parts.append(obj)
            return len(self._parts) - 1
        return number


class _CopyUnpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, part: Callable[[int], Any]) -> None:
        super().__init__(io.BytesIO(blob))
        self._part = part

    def persistent_load(self, number: Any) -> Any:
        return self._part(number)


_PLAIN = (int, float, str, tuple, list, dict, bool, bytes, type(None))
_OF_KEPT: tuple[Any, ...] = (
    _Pickler._reduce_function,
    _Pickler._reduce_code,
    _Pickler._reduce_module,
    _Pickler._reduce_jitted,
    _Pickler._reduce_custom_rule,
    _Pickler._reduce_lru_cache,
    _Pickler._reduce_primitive,
    _Pickler._reduce_forbidden,
)
"""The reducers of objects that stay out of the pickle of `Copies`."""
_OF_WRAPPERS = (_Pickler._reduce_jitted, _Pickler._reduce_custom_rule, _Pickler._reduce_lru_cache)
"""The reducers of objects that travel by name if possible."""


def _reference_from(module: types.ModuleType, obj: Any) -> Any:
    home = importable.home_in(module, obj)
    return NotImplemented if home is None else (load_by_name, (*home, 0))


def _looked_up(function: types.FunctionType) -> _Names:
    """Returns globals that a function may look up by name: for annotations, as module attributes, by `globals()`."""
    names = {word for text in function.__annotations__.values() for word in re.findall(r"\w+", str(text))}
    codes = list(code_within(function.__code__))
    found = [name for code in codes for name in code.co_names + code.co_consts if isinstance(name, str)]
    if not {"globals", function.__globals__["__name__"]}.isdisjoint(found):
        names.update(found)
    return {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}


_ABOUT = ("__name__", "__file__", "__package__", "__path__", "__doc__")
_STARS = {TypeVar: "", TypeVarTuple: "*", ParamSpec: "**"}
_ALIAS = getattr(typing, "TypeAliasType", None)
"""The class of the objects that `type` statements make, since Python 3.12."""


_LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}


_REDUCERS: Mapping[Any, Callable[[_Pickler, Any], Any]] = {
    types.FunctionType: _Pickler._reduce_function,
    types.CodeType: _Pickler._reduce_code,
    types.ModuleType: _Pickler._reduce_module,
    weakref.ref: _Pickler._reduce_weak_reference,
    contextvars.ContextVar: _Pickler._reduce_context_variable,
    threading.local: _Pickler._reduce_thread_local,
    jax_functions.pjit_type: _Pickler._reduce_jitted,
    functools._lru_cache_wrapper: _Pickler._reduce_lru_cache,
    **dict.fromkeys(_LOCKS, _Pickler._reduce_lock),
}


# One look-up per class, not per object. The bound lets Python free classes made in a loop.
@functools.lru_cache(maxsize=1024)
def _reducer_for(kind: Any) -> Callable[[_Pickler, Any], Any] | None:
    """Returns the method that reduces objects of a class; None for cloudpickle's own way."""
    if kind in _REDUCERS:
        return _REDUCERS[kind]
    if issubclass(kind, jax_functions.custom_rule_types()):
        return _Pickler._reduce_custom_rule
    if issubclass(kind, tuple(_FORBIDDEN)):
        return _Pickler._reduce_forbidden
    if issubclass(kind, jax.Array):
        return _Pickler._reduce_array
    if issubclass(kind, jax_traces.primitive_type):
        return _Pickler._reduce_primitive
    if kind.__module__.partition(".")[0] == "jax" and kind.__module__ in sys.modules:
        return _Pickler._reduce_jax_object
    return _Pickler._reduce_plain if kind.__eq__ is object.__eq__ and kind.__module__ != "builtins" else None


_FORBIDDEN: Mapping[type | tuple[type, ...], str] = {
    jax.core.Tracer: (
        "It is a value of a trace in progress and means nothing elsewhere. Pass it to the tuned function "
        "as an argument instead of closing over it."
    ),
    (jax.Device, jax.sharding.Mesh): (
        "Devices and meshes belong to one process. Call jax.devices() or make the mesh inside the "
        "function, or move the function into a module that can be imported (it then travels by name)."
    ),
    (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled): (
        "It belongs to this process's compiler. Refer to the jitted function itself; the worker compiles its own."
    ),
}
"""The classes whose objects cannot travel, and why."""


# --- private parts of cloudpickle: releases 3.0 to 3.1.3 have these names ---


_NO_FILE = "<dynamic-code>"
"""Placeholder for a code's file in cloudpickle since 3.1.3. Errors and fingerprints need the file, so we restore it."""


def _reduce_by_value(pickler: _Pickler, obj: Any) -> Any:
    """Reduces a function or class by value, whatever its module.

    Uses private names because the public `register_pickle_by_value` changes a list that all threads share.
    """
    if isinstance(obj, type):
        return cloudpickle.cloudpickle._dynamic_class_reduce(obj)
    return pickler._dynamic_function_reduce(obj)


def _free_class_tracker() -> None:
    """Frees cloudpickle's lock in a fork, in case another thread was pickling a class at the time of the fork.

    Uses a private name because no public function reaches the lock.
    """
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK = threading.Lock()


os.register_at_fork(after_in_child=_free_class_tracker)


def parts_of(fn: Any) -> tuple[Callable[..., Any], jax_functions.JitOptions | None, str]:
    """Returns the parts that any pickler can carry: the plain function, its options of `jax.jit`, and its file.

    Raises:
        TypeError: The options hold devices, shardings or layouts of this process.
    """
    jit = jax_functions.jit_options(fn) if jax_functions.is_jitted(fn) else None
    if jit is not None:
        jit.check_can_travel(getattr(fn, "__qualname__", repr(fn)))
        fn = fn.__wrapped__
    plain = inspect.unwrap(fn)
    return fn, jit, plain.__code__.co_filename if isinstance(plain, types.FunctionType) else ""


def from_parts(fn: Callable[..., Any], jit: jax_functions.JitOptions | None, file: str) -> Any:
    """Returns the function that has these parts."""
    plain = inspect.unwrap(fn)
    if isinstance(plain, types.FunctionType):
        plain.__code__ = _in_file(plain.__code__, file)
    return fn if jit is None else jit.rebuild(fn)


def _in_file(code: types.CodeType, file: str) -> types.CodeType:
    """Returns code, and the code inside it, with the file that cloudpickle has left out."""
    if code.co_filename != _NO_FILE:
        return code
    constants = (_in_file(item, file) if isinstance(item, types.CodeType) else item for item in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(constants))


# --- values of modules ---


_LARGEST_BYTES, _LARGEST_ARRAY_BYTES = 1 << 26, 1 << 24


LEFT_OUT = object()
"""Stands for a part of a value that cannot travel."""


def dump_state(value: object, place: str, can_import: Callable[[str], bool]) -> tuple[bytes | None, str]:
    """Pickles a value without the parts that cannot travel.

    Args:
        value: the value.
        place: the dotted name of its place; a function of this name travels by value.
        can_import: from `importable.remembering`.

    Returns:
        Bytes for `pickling.loads`, or None if the whole value cannot travel; and the reason for the first part that
        cannot. In the bytes, `LEFT_OUT` stands for parts that cannot travel.
    """
    with _BoundedFile() as file:
        pickler = _StatePickler(file, value, place, can_import)
        if (failure := failure_of(pickler.dump, value)) is not None:
            return None, str(failure)
        return file.getvalue(), next(iter(pickler.reasons), "")


def held_by(value: object, can_import: Callable[[str], bool]) -> Mapping[int, Any]:
    """Returns the objects in a pickle of a value by `id`, except objects that pickle reaches through a module.

    Args:
        value: the value; the result omits parts that cannot travel.
        can_import: returns whether the objects of a module travel by name.
    """
    with _BoundedFile() as file:
        pickler = _StatePickler(file, value, "", can_import)
        failure_of(pickler.dump, value)
        held: Mapping[int, Any] = pickler.memo.copy()
        return held


class _BoundedFile(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _LARGEST_BYTES:
            raise OSError(f"it has more than {_LARGEST_BYTES >> 20} MiB")
        return super().write(data)


def home_of(obj: Any) -> tuple[str, str] | None:
    """Returns the module and the name of an object that refuses copies and so travels by name; else None."""
    module = sys.modules.get(type(obj).__module__)
    if module is None or type(obj).__module__ == "builtins" or not classes.refuses_to_be_copied(obj):
        return None
    return importable.home_in(module, obj)


class _StatePickler(_Pickler):
    """Pickles objects by their parts, and leaves out the parts that cannot travel."""

    def __init__(self, file: io.BytesIO, value: object, place: str, can_import: Callable[[str], bool]) -> None:
        super().__init__(file)
        self._value, self._place, self._can_import = value, place, can_import
        self.reasons: list[str] = []

    def reducer_override(self, obj: Any) -> Any:
        try:
            if isinstance(obj, (np.ndarray, jax.Array)) and obj.nbytes > _LARGEST_ARRAY_BYTES:
                raise unpicklable.CannotTravelError("It is too large.")
            return super().reducer_override(obj)
        except Exception as error:
            cannot_travel = isinstance(error, unpicklable.CannotTravelError) or not _is_all_fields(obj)
            if is_interruption(error) or (obj is self._value and cannot_travel):
                raise
            if cannot_travel:
                self.reasons.append(str(error))
                return load_by_name, (__name__, "LEFT_OUT", 0)
            # An object that refuses copies, such as absl's parsed flags: the worker makes a new one with its fields.
            return object.__new__, (type(obj),), dict(vars(obj)), None, None, _set_attributes

    def _refuses(self, obj: Any) -> bool:
        return False

    def _by_name(self, obj: Any) -> Any:
        return NotImplemented if self._has_place(obj) else super()._by_name(obj)

    def _lives_here_only(self, obj: Any) -> bool:
        return (isinstance(obj, types.FunctionType) and self._has_place(obj)) or super()._lives_here_only(obj)

    def _has_place(self, obj: Any) -> bool:
        return f"{getattr(obj, '__module__', None)}.{getattr(obj, '__qualname__', None)}" == self._place


def _is_all_fields(obj: Any) -> bool:
    """Returns whether an object consists of its fields, so that setting them on an empty object recreates it."""
    return failure_of(object.__new__, type(obj)) is None and hasattr(obj, "__dict__")


# --- functions called by `loads` --------------------------------------------------------------------


def load_by_name(module: str, qualname: str, depth: int) -> Any:
    """Returns the object that a module calls `qualname`, or the object `depth` wrappers inside it."""
    found = operator.attrgetter(qualname)(importlib.import_module(module))
    for _ in range(depth):
        found = found.__wrapped__
    return found


_rebuilt: dict[str, _Names] = {}
"""The globals of the modules that `_names_like` has created in this worker, by module name."""


def _names_like(about: _Names) -> _Names:
    """Returns the globals for functions of a module that only the caller's process has.

    In a worker, the first call creates a module of the same name in `sys.modules`, because pickle looks up names there;
    all calls return the globals of this module. Other processes get `about` itself.

    Args:
        about: the initial globals, from `_Pickler._about`.
    """
    name = about.get("__name__", "")
    if "__spec__" not in about or not in_sandbox():
        return about
    if name not in _rebuilt and getattr(answer_of(importlib.util.find_spec, name), "loader", None) is None:
        # The caller's `__main__` replaces the `__main__` that starts workers.
        module = sys.modules[name] = sys.modules["__main__" if name in PROGRAMS else name] = types.ModuleType(name)
        _rebuilt[name] = vars(module)
        _rebuilt[name].update(about)
    names = _rebuilt.get(name, about)
    # A saved winner may come from another program: its functions use separate globals.
    return names if names.get("__file__") == about.get("__file__") else about


def _module_like(about: _Names) -> types.ModuleType:
    name, is_made = about["__name__"], _names_like(about) is not about
    return sys.modules[name] if is_made or name in PROGRAMS else types.ModuleType(name)


def _put(about: _Names, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Makes an object of a module under its name, unless the module has it already."""
    names = {} if "." in name else _names_like(about)
    if name not in names:
        names[name] = make(*arguments)
    return names[name]


def _make_alias(module: str, name: str, parameters: str, names: _Names) -> Any:
    names["__name__"], name = module, name if name.isidentifier() else "_alias"
    exec(f"type {name}{parameters and f'[{parameters}]'} = _value", names)  # Python evaluates the value on first use
    return names[name]


def _make_function(
    make: Callable[..., types.FunctionType],
    code: types.CodeType,
    namespace: Any,
    rest: tuple[Any, ...],
    attributes: Mapping[str, Any],
) -> types.FunctionType:
    """Makes a function. `namespace` is the name of the module that holds its globals, or its initial globals."""
    is_name = isinstance(namespace, str)
    function = make(code, vars(importlib.import_module(namespace)) if is_name else _names_like(namespace), *rest)
    for name, value in attributes.items():
        setattr(function, name, value)
    return function


def _array_of(elements: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    return np.frombuffer(elements, np.uint8).view(dtype).reshape(shape)


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(set())


def _rebuild_lru_cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def _set_attributes(obj: Any, attributes: Mapping[str, Any]) -> None:
    vars(obj).update(attributes)
