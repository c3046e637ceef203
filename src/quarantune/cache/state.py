"""Compares the state of a value in two processes: a hash of the value and of all that it holds.

A fingerprint must be the same for as long as results are to be found, and leaves out what may change by itself. This
hash is compared at once and once, so it covers everything: fields, closures, the code of functions as compiled.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.cache.fingerprint import (
    LITERALS,
    MOST_LAYERS,
    NOTHING,
    attribute,
    closure_of,
    describe,
    describe_array,
    describe_code,
    is_library_function,
    plain_function,
    stable_repr,
    type_name,
    without_caches,
    wrapped_by,
)
from quarantune.cache.store import short_hash

_LARGEST_HASHED_BYTES = 1 << 20
"""Larger arrays count by shape and dtype, as this is done before every sweep."""
_MOST_HASHED_BYTES = 1 << 24
_MOST_PARTS = 20_000
"""Further parts of a value count by their types."""

_WEAK = (weakref.ref, weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary)


def state_hash(value: Any) -> str:
    """Returns a hash that differs where a value is another in another process; never raises.

    Of a function, its code counts, and that of the functions in its closure: `cells` yields the values there.
    """
    return short_hash(repr(_Description().of(value, apart=True)))


def cells(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the values that a function, and the functions that it wraps, keep in closures and defaults.

    Args:
        value: the function; nothing is yielded for other values.
        path: the steps to it, which the steps to the values continue: see `step`.
    """
    if len(path) > MOST_LAYERS:
        return
    if not isinstance(value, types.FunctionType):
        if (inner := wrapped_by(value)) is not None:
            yield from cells(inner, (*path, _INNER))
        return
    if not is_library_function(value):
        yield from (((*path, name), held) for name in _DEFAULTS if (held := getattr(value, name)) is not None)
    elif not _is_of_functools(value):
        return
    for name, item in closure_of(value):
        if plain_function(item) is not None:
            yield from cells(item, (*path, _CELL + name))
        elif not (callable(item) or isinstance(item, (types.ModuleType, *_WEAK))):
            yield (*path, _CELL + name), item
    if (inner := wrapped_by(value)) is not None:
        yield from cells(inner, (*path, _INNER))


def _is_of_functools(function: types.FunctionType) -> bool:
    """Returns whether a function's closure holds what `functools.singledispatch` knows."""
    return function.__code__.co_filename == functools.__file__


_CELL, _INNER = "closure ", "wrapped function"
_DEFAULTS = ("__defaults__", "__kwdefaults__")


def step(owner: Any, name: str) -> Any:
    """Returns the value one step away from another: an attribute, a closure's variable, or a wrapped function.

    Returns:
        The value, or `NOTHING`.
    """
    if name == _INNER:
        return wrapped_by(owner) or NOTHING
    if name.startswith(_CELL):
        return dict(closure_of(owner)).get(name.removeprefix(_CELL), NOTHING)
    return getattr(owner, name, NOTHING) if name in _DEFAULTS else attribute(owner, name)


def put(owner: Any, name: str, value: Any) -> None:
    """Sets the value one step away from another, which cannot be a wrapped function.

    Raises:
        AttributeError: the owner does not let it be set.
    """
    if not name.startswith(_CELL):
        setattr(owner, name, value)
        return
    owner.__closure__[owner.__code__.co_freevars.index(name.removeprefix(_CELL))].cell_contents = value


class _Description:
    """Describes one value; parts that are met again count by the number of their first time."""

    def __init__(self) -> None:
        self._bytes_left = _MOST_HASHED_BYTES
        self._seen: dict[int, tuple[int, Any]] = {}  # with the objects, so that their addresses are not used again

    def of(self, value: Any, *, apart: bool = False) -> Any:
        """Describes a value; with `apart`, without the values that `cells` yields."""
        try:
            return self._of(value, apart)
        except Exception:
            return type_name(type(value))

    def _of(self, value: Any, apart: bool) -> Any:
        if isinstance(value, (enum.Enum, type, types.ModuleType, types.CodeType, logging.Logger, *LITERALS)):
            return describe(value)
        kind = type_name(type(value))
        if type(value) is tuple:  # constants, which may be one object here and two elsewhere
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
            yield describe_code(function.__code__)
        else:
            yield f"{function.__module__}.{function.__qualname__}"
            if "<locals>" not in function.__qualname__ and not _is_of_functools(function):
                return  # every process has the same one
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
    """Returns the parts that a pickle of an object holds, else its fields, else its repr."""
    with contextlib.suppress(Exception):
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return [reduced]
        parts = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        return [without_caches(value, part) for part in parts]
    if isinstance(fields := getattr(value, "__dict__", None), dict):
        return [fields]
    return [stable_repr(value)]
