"""The values that the caller's program has set in modules: collects them in its process, and sets them in a worker.

A worker imports modules afresh. Each value that the function reaches travels with a hash of its state. If the state in
the worker differs, the caller's value replaces the worker's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import io
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quarantune.functions.fingerprint import (
    LITERALS,
    MOST_LAYERS,
    NOTHING,
    attribute,
    closure_of,
    describe,
    describe_array,
    describe_code,
    is_library,
    is_library_function,
    plain_function,
    reached,
    stable_repr,
    type_name,
    wrapped_by,
)
from quarantune.functions.importable import remembering
from quarantune.functions.object_parts import pickled_parts, without_caches
from quarantune.host.interruptions import failure_of
from quarantune.host.packages import content, is_imported_early
from quarantune.transport import pickling
from quarantune.transport.payload import ProgramValue
from quarantune.transport.pickling import LEFT_OUT, dump_state, home_of
from quarantune.values import texts
from quarantune.values.codec import short_hash

_logger = logging.getLogger("quarantune")

_LARGEST_HASHED_BYTES = 1 << 20
"""Larger arrays count by shape and dtype, because every sweep takes these hashes."""
_MOST_HASHED_BYTES = 1 << 24
_MOST_PARTS = 20_000
"""Number of parts of a value above which further parts count by type."""

_WEAK = (weakref.ref, weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary)
_CELL, _INNER = "closure ", "wrapped function"
_DEFAULTS = ("__defaults__", "__kwdefaults__")


class ProgramValueError(TypeError):
    """A value that the program has set cannot travel to a worker, and the worker has a different value."""


# --- in the caller's process ---


def collect(functions: Iterable[Callable[..., Any]]) -> tuple[ProgramValue, ...]:
    """Returns the values that functions reach in modules, as they are now.

    Args:
        functions: the functions that workers will run.
    """
    places: dict[tuple[str, ...], Any] = {}
    for function in functions:
        for place, value in reached(function).items():
            places.setdefault(place, value)
            for held in (value, *(vars(value).values() if _has_fields(value) else ())):
                if (home := home_of(held)) is not None:
                    places[home] = held
    can_import = remembering()
    first: dict[int, int] = {}
    values: list[ProgramValue] = []
    for (module, *path), value in places.items():
        if not can_import(module) or not _may_differ((module, *path), value):
            continue
        for steps, item in ((tuple(path), value), *_cells(value, tuple(path))):
            if _find((module, *steps))[-1] is item:
                number = len(values) if _is_shareable(item) else -1
                values.append(_value((module, *steps), item, first.setdefault(id(item), number), can_import))
    return tuple(values)


def _may_differ(place: Sequence[str], value: Any) -> bool:
    """Returns whether a worker may need the value: not modules and open files, nor values equal in every process."""
    if isinstance(value, (types.ModuleType, io.IOBase)) or value is NOTHING:
        return False
    function = plain_function(value)
    if function is not None:
        return not is_library_function(function) or function.__name__ != place[-1]
    # The state of Python's modules belongs to the process (os.environ), and JAX's options travel separately.
    return not (is_imported_early(place[0]) or (is_library(place[0]) and isinstance(value, type)))


def _value(place: tuple[str, ...], value: Any, same_as: int, can_import: Callable[[str], bool]) -> ProgramValue:
    if _is_own(place, value):
        blob, reason = None, "code outside its module makes it"
    else:
        blob, reason = dump_state(value, ".".join(place), can_import)
    shown = texts.shown(value) if blob is None else ""
    return ProgramValue(place, _state_at(place, value), same_as, shown, blob, reason)


def _state_at(place: Sequence[str], value: Any) -> str:
    """Returns a hash that differs if the value at a place differs in another process; never raises.

    For a function, its code and the code of functions in its closure count: `_cells` yields the values there. If the
    module's own file defines the function there, line numbers count instead of code, because an import hook such as
    pytest's may change the code.
    """
    return short_hash(repr(_Description(by_lines=_is_own(place, value)).of(value, apart=True)))


def _is_own(place: Sequence[str], value: Any) -> bool:
    code = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    file = content(sys.modules[place[0]]).get("__file__")
    is_code = isinstance(code, type) or (isinstance(code, types.FunctionType) and code.__code__.co_filename == file)
    return is_code and f"{code.__module__}.{code.__qualname__}" == ".".join(place)


def _is_shareable(value: Any) -> bool:
    return not isinstance(value, (*LITERALS, tuple, frozenset, type, types.FunctionType))


def _find(place: Sequence[str]) -> list[Any]:
    """Returns the objects along a place, up to the value; the last object is `NOTHING` if the value is missing."""
    found = [sys.modules.get(place[0], NOTHING)]
    for name in place[1:]:
        found.append(NOTHING if found[-1] is NOTHING else _step(found[-1], name))
    return found


# --- in a worker ---


def adopt(values: Sequence[ProgramValue]) -> None:
    """Sets the caller's values if this process has different values.

    Raises:
        ProgramValueError: A value differs and cannot travel.
    """
    adopted: dict[int, Any] = {}
    taken: set[int] = set()
    for number, value in enumerate(values):
        importlib.import_module(value.place[0])
        *_, owner, mine = _find(value.place)
        if value.same_as not in (-1, number):
            theirs = adopted[value.same_as]
        elif mine is not NOTHING and id(mine) not in taken and _state_at(value.place, mine) == value.state:
            theirs = mine
        else:
            if value.blob is None:
                raise ProgramValueError(_message(value, mine))
            _logger.debug("%s is set to the caller's value", ".".join(value.place))
            try:
                loaded = pickling.loads(value.blob)
            except Exception as error:
                raise ProgramValueError(_message(dataclasses.replace(value, reason=repr(error)), mine)) from error
            theirs = loaded if id(mine) in taken else _merged(mine, loaded)
        if theirs is not mine:
            _put(owner, value.place[-1], theirs)
        if _is_shareable(theirs):
            adopted[number] = theirs
            taken.add(id(theirs))


def _message(value: ProgramValue, mine: Any) -> str:
    name, module, shown = ".".join(value.place), value.place[0], value.shown or "another value"
    here = "missing" if mine is NOTHING else texts.shown(mine)
    return (
        f"{name} is {shown} in the calling process, and {here} in a fresh import of {module}, and cannot be sent "
        f"to a worker: {value.reason.rstrip('.')}. Set it where {module} is imported, or pass it to the function as an "
        f"argument"
    )


def _merged(mine: Any, theirs: Any) -> Any:
    """Returns this process's object with the caller's content, or the caller's object if this one cannot change."""
    if theirs is LEFT_OUT or type(mine) is not type(theirs):
        return mine if theirs is LEFT_OUT and mine is not NOTHING else theirs
    if isinstance(mine, (dict, set)):
        if isinstance(mine, dict):
            theirs = {key: _merged(mine.get(key, NOTHING), item) for key, item in theirs.items()}
        mine.clear()
        mine.update(theirs)
    elif isinstance(mine, list):
        mine[:] = theirs
    elif isinstance(mine, np.ndarray) and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
        mine[...] = theirs
    elif _has_fields(mine) and _is_made_of_fields(type(mine)):
        _merged(vars(mine), vars(theirs))
    else:
        return theirs
    return mine


def _is_made_of_fields(cls: type) -> bool:
    """Returns whether objects of a class are mutable and consist of their fields, unlike JAX arrays."""
    by_identity: tuple[Any, ...] = (None, object.__hash__)
    has_slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    return failure_of(object.__new__, cls) is None and cls.__hash__ in by_identity and not has_slots


def _has_fields(value: Any) -> bool:
    is_code = isinstance(value, (type, types.FunctionType, types.ModuleType))
    try:
        return not is_code and isinstance(value.__dict__, dict)
    except Exception:  # an object may raise anything for any attribute
        return False


# --- the state of a value ---
#
# A fingerprint must stay the same while results should be found, so it omits things that may change without the user.
# This hash serves one comparison, soon, so it covers everything: fields, closures, the compiled code of functions.


def _cells(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the values that a function, and the functions that it wraps, keep in closures and defaults.

    Args:
        value: the function; other values have no cells.
        path: the steps to it; the steps to the values continue them, see `_step`.
    """
    if len(path) > MOST_LAYERS:
        return
    if not isinstance(value, types.FunctionType):
        if (inner := wrapped_by(value)) is not None:
            yield from _cells(inner, (*path, _INNER))
        return
    if not is_library_function(value):
        yield from (((*path, name), held) for name in _DEFAULTS if (held := getattr(value, name)) is not None)
    elif not _is_of_functools(value):
        return
    for name, item in closure_of(value):
        if plain_function(item) is not None:
            yield from _cells(item, (*path, _CELL + name))
        elif not (callable(item) or isinstance(item, (types.ModuleType, *_WEAK))):
            yield (*path, _CELL + name), item
    if (inner := wrapped_by(value)) is not None:
        yield from _cells(inner, (*path, _INNER))


def _is_of_functools(function: types.FunctionType) -> bool:
    """Returns whether a function is from `functools`: its closure may hold a registry of `singledispatch`."""
    return function.__code__.co_filename == functools.__file__


def _step(owner: Any, name: str) -> Any:
    """Returns the value one step away from another: an attribute, a closure variable, or a wrapped function.

    Returns:
        The value, or `NOTHING`.
    """
    if name == _INNER:
        return wrapped_by(owner) or NOTHING
    if name.startswith(_CELL):
        return dict(closure_of(owner)).get(name.removeprefix(_CELL), NOTHING)
    return getattr(owner, name, NOTHING) if name in _DEFAULTS else attribute(owner, name)


def _put(owner: Any, name: str, value: Any) -> None:
    """Sets the value one step away from another, which cannot be a wrapped function.

    Raises:
        AttributeError: The owner does not allow setting it.
    """
    if not name.startswith(_CELL):
        setattr(owner, name, value)
        return
    owner.__closure__[owner.__code__.co_freevars.index(name.removeprefix(_CELL))].cell_contents = value


class _Description:
    """Describes one value. A part that occurs again counts by the number of its first occurrence."""

    def __init__(self, *, by_lines: bool = False) -> None:
        self._by_lines = by_lines
        self._bytes_left = _MOST_HASHED_BYTES
        self._seen: dict[int, tuple[int, Any]] = {}  # holds the objects, so that no new object gets their addresses

    def of(self, value: Any, *, apart: bool = False) -> Any:
        """Describes a value; with `apart`, without the values that `_cells` yields."""
        try:
            return self._of(value, apart)
        except Exception:
            return type_name(type(value))

    def _of(self, value: Any, apart: bool) -> Any:
        if isinstance(value, (enum.Enum, type, types.ModuleType, types.CodeType, logging.Logger, *LITERALS)):
            return describe(value)
        kind = type_name(type(value))
        if type(value) is tuple:  # equal constants may be one object here and two in another process
            return [kind, *map(self.of, value)]
        if id(value) in self._seen or len(self._seen) > _MOST_PARTS or isinstance(value, _WEAK):
            return [kind, self._seen.get(id(value), (-1,))[0]]
        self._seen[id(value)] = len(self._seen), value
        return [kind, *self._parts(value, apart)]

    def _parts(self, value: Any, apart: bool) -> Iterator[Any]:
        if isinstance(value, types.FunctionType):
            yield from self._parts_of_function(value, apart)
        elif all(hasattr(value, name) for name in ("dtype", "shape", "__array__")):
            yield from describe_array(value, min(_LARGEST_HASHED_BYTES, self._bytes_left))
            self._bytes_left -= value.nbytes if value.nbytes <= _LARGEST_HASHED_BYTES else 0
        elif isinstance(value, (list, tuple)):
            yield from map(self.of, value)
        elif isinstance(value, (set, frozenset)):
            yield sorted(map(_text, value))
        elif isinstance(value, Mapping):
            items = {_text(key): item for key, item in value.items()}
            yield [[text, self.of(items[text])] for text in sorted(items)]
        elif isinstance(value, (functools.partial, types.MethodType)) or not (inner := wrapped_by(value)):
            yield from map(self.of, _fields(value))
        else:
            yield self.of(inner, apart=apart)

    def _parts_of_function(self, function: types.FunctionType, apart: bool) -> Iterator[Any]:
        if not is_library_function(function):
            yield function.__code__.co_firstlineno if self._by_lines else describe_code(function.__code__)
        else:
            yield f"{function.__module__}.{function.__qualname__}"
            if "<locals>" not in function.__qualname__ and not _is_of_functools(function):
                return  # every process has the same function
        for name in () if apart else _DEFAULTS:
            yield self.of(getattr(function, name))
        for _, item in closure_of(function):
            if not apart or plain_function(item) is not None:
                yield self.of(item, apart=apart)
        if (inner := wrapped_by(function)) is not None:
            yield self.of(inner, apart=apart)


def _text(value: Any) -> str:
    return repr(_Description().of(value))


def _fields(value: Any) -> list[Any]:
    """Returns the parts in a pickle of an object, else its fields, else its repr."""
    with contextlib.suppress(Exception):
        return [without_caches(value, part) for part in pickled_parts(value)]
    if isinstance(fields := getattr(value, "__dict__", None), dict):
        return [fields]
    return [stable_repr(value)]
