"""The values that the caller's program has set in modules: collected in its process, and set in a worker.

A worker imports modules afresh. Each value that the function reaches travels with a hash of its state; where that of a
fresh import is another, the caller's takes its place.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import logging
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from quarantune.cache import state
from quarantune.cache.fingerprint import LITERALS, NOTHING, is_library, is_library_function, plain_function, reached
from quarantune.host.process import is_imported_early
from quarantune.transport import pickling
from quarantune.transport.call import ProgramValue
from quarantune.transport.importable import can_import
from quarantune.transport.pickling import LEFT_OUT, dump_state, home_of
from quarantune.values import texts

_logger = logging.getLogger("quarantune")


class ProgramValueError(TypeError):
    """A value that the program has set cannot travel to a worker, which finds another one."""


# --- in the caller's process ---


def collect(functions: Iterable[Callable[..., Any]]) -> tuple[ProgramValue, ...]:
    """Returns the values that functions reach in modules, as they are now.

    Args:
        functions: the functions that workers are to run.
    """
    places: dict[tuple[str, ...], Any] = {}
    for function in functions:
        for place, value in reached(function).items():
            places.setdefault(place, value)
            for held in (value, *(vars(value).values() if _has_fields(value) else ())):
                if (home := home_of(held)) is not None:
                    places[home] = held
    importable: dict[str, bool] = {}
    first: dict[int, int] = {}
    values: list[ProgramValue] = []
    for (module, *path), value in places.items():
        if module not in importable:
            importable[module] = can_import(module)
        if not importable[module] or not _may_differ((module, *path), value):
            continue
        for steps, item in ((tuple(path), value), *state.cells(value, tuple(path))):
            if _find((module, *steps), sys.modules)[-1] is item:
                number = len(values) if _is_shareable(item) else -1
                values.append(_value((module, *steps), item, first.setdefault(id(item), number)))
    return tuple(values)


def _may_differ(place: Sequence[str], value: Any) -> bool:
    """Returns whether a worker should have the value: not so its own files, and what is the same in every process."""
    if isinstance(value, (types.ModuleType, io.IOBase)) or value is NOTHING:
        return False
    function = plain_function(value)
    if function is not None:
        return not is_library_function(function) or function.__name__ != place[-1]
    # The state of Python is that of the process (os.environ), and JAX's options travel by themselves.
    return not (is_imported_early(place[0]) or (is_library(place[0]) and isinstance(value, type)))


def _value(place: tuple[str, ...], value: Any, same_as: int) -> ProgramValue:
    module, name = place[0], ".".join(place)
    file = getattr(sys.modules[module], "__file__", None)
    code = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    is_own = isinstance(code, type) or (isinstance(code, types.FunctionType) and code.__code__.co_filename == file)
    if is_own and f"{code.__module__}.{code.__qualname__}" == name:
        blob, reason = None, "it is made by running code that is not its module's"
    else:
        blob, reason = dump_state(value, name)
    shown = texts.shown(value) if blob is None else ""
    return ProgramValue(place, state.state_hash(value), same_as, shown, blob, reason)


def _is_shareable(value: Any) -> bool:
    return not isinstance(value, (*LITERALS, tuple, frozenset, type, types.FunctionType))


def _find(place: Sequence[str], modules: Any) -> list[Any]:
    """Returns the objects along a place, up to the value; the last one is `NOTHING` where there is none."""
    found = [modules.get(place[0], NOTHING)]
    for name in place[1:]:
        found.append(NOTHING if found[-1] is NOTHING else state.step(found[-1], name))
    return found


# --- in a worker ---


def adopt(values: Sequence[ProgramValue]) -> None:
    """Sets the values that the caller's program has set, where this process has others.

    Raises:
        ProgramValueError: a value differs and cannot travel.
    """
    adopted: dict[int, Any] = {}
    taken: set[int] = set()
    for number, value in enumerate(values):
        importlib.import_module(value.place[0])
        *_, owner, mine = _find(value.place, sys.modules)
        if value.same_as not in (-1, number):
            theirs = adopted[value.same_as]
        elif mine is not NOTHING and id(mine) not in taken and state.state_hash(mine) == value.state:
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
            state.put(owner, value.place[-1], theirs)
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
    """Returns the caller's value; as this process's own object, if the two are of a kind that can be changed."""
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
    """Returns whether objects of a class can be changed, and hold nothing beside their fields, as arrays of JAX do."""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    by_identity: tuple[Any, ...] = (None, object.__hash__)
    return cls.__hash__ in by_identity and not any(vars(base).get("__slots__") for base in cls.__mro__)


def _has_fields(value: Any) -> bool:
    is_code = isinstance(value, (type, types.FunctionType, types.ModuleType))
    try:
        return not is_code and isinstance(value.__dict__, dict)
    except Exception:  # an object may raise anything for any attribute
        return False
