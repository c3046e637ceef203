"""Decides which modules and objects another process gets, unchanged, by importing them.

A worker imports from disk. If a module's file changed after this process imported it, its functions must not travel by
name: the worker would tune the new code for a caller that runs the old code. The values of modules do not matter here:
`transport.program_values` sends the values that differ.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import InspectLoader
from importlib.machinery import BuiltinImporter, FileFinder, FrozenImporter, PathFinder, all_suffixes
from pathlib import Path
from pkgutil import get_importer
from typing import Any
from zipimport import zipimporter

from quarantune.functions.fingerprint import code_within, describe_code
from quarantune.functions.names import PROGRAMS
from quarantune.host import machine
from quarantune.host.interpreter import interpreter_command
from quarantune.host.interruptions import answer_of
from quarantune.host.packages import content, is_imported_early, is_installed
from quarantune.values.codec import canonical_json

_FINDERS = (BuiltinImporter, FrozenImporter, PathFinder, FileFinder, zipimporter, type(None))
"""Python's own finders; a path that does not exist has no finder, and so `NoneType`."""
_SUFFIXES = tuple(all_suffixes())


def remembering() -> Callable[[str], bool]:
    """Returns `can_import` with a memory. Use it for a moment only, because modules and files change."""
    return functools.cache(functools.partial(can_import, look_at=functools.cache(_look_at)))


def can_import(name: str, look_at: Callable[[str], tuple[bool, set[str]] | None] | None = None) -> bool:
    """Returns whether importing `name` in a fresh process with this `sys.path` gives the same module and code.

    Args:
        name: the module.
        look_at: `_look_at`, with or without a memory.
    """
    module = sys.modules.get(name)
    if module is None or name in PROGRAMS:
        return False
    if is_imported_early(name):
        return True
    path = None
    if parent := name.rpartition(".")[0]:
        if not can_import(parent, look_at):
            return False
        path = getattr(sys.modules[parent], "__path__", None)
        if path is None:
            return True  # its parent makes it (os.path), in every process
    spec = _find_spec(name, path)
    if spec is None:
        return False
    file = getattr(module, "__file__", None)
    if not (spec.has_location and spec.origin and file):
        return spec.loader is not None or file is None  # a mere directory of this name is not the module
    return bool(os.path.realpath(spec.origin) == os.path.realpath(file)) and not leads_to_edited(name, look_at)


def _find_spec(name: str, path: Any) -> Any:
    """Returns the spec that a fresh process finds for a module; ignores finders that only this program has."""
    # Not importlib.util.find_spec: if the module is imported already, it returns the module's `__spec__`.
    for finder in sys.meta_path:
        find = _find_file if finder is PathFinder else getattr(finder, "find_spec", None)
        spec = answer_of(find, name, path) if find else None
        if spec is not None and _is_everywhere(finder, name):
            return spec
    return None


def _find_file(name: str, path: Any) -> Any:
    """Returns the spec that `PathFinder` finds in a fresh process; ignores hooks that only this program has."""
    places = sys.path if path is None else path
    places = [place for place in places if _is_everywhere(answer_of(get_importer, place), name)]
    spec = PathFinder.find_spec(name, places)
    # The program's hooks may have given Python's own finder another directory, or other suffixes.
    stems = tuple(os.path.join(os.path.abspath(place), name.rpartition(".")[2]) for place in places)
    origin = spec and spec.origin
    return spec if not origin or (origin.startswith(stems) and origin.endswith(_SUFFIXES)) else None


def _is_everywhere(finder: Any, name: str) -> bool:
    """Returns whether a fresh process has a finder when it imports a module.

    It has Python's own finders, the finders of startup files (such as an editable install's), and the finders of the
    module's parent package (such as six's).
    """
    kind = finder if isinstance(finder, type) else type(finder)
    package, is_inside, _ = name.partition(".")
    is_parents = is_inside and kind.__module__.partition(".")[0] == package
    return kind in _FINDERS or is_parents or f"{kind.__module__}.{kind.__qualname__}" in _finders_at_startup()


@functools.cache
def _finders_at_startup() -> set[str]:
    """Returns the names of the finders and hooks that a fresh process starts with; empty if the process fails."""
    code = """import sys
for finder in (*sys.meta_path, *sys.path_hooks):
    kind = finder if hasattr(finder, "__qualname__") else type(finder)
    print(kind.__module__, kind.__qualname__, sep=".")"""
    run = functools.partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    done = answer_of(lambda: run([*interpreter_command(), code]))
    return set(done.stdout.splitlines()) if done else set()


def may_travel_by_name(obj: Any) -> bool:
    """Returns whether `travels_by_name` may be true for an object after the import of its module ends."""
    return "<" not in obj.__qualname__ and can_import(obj.__module__)


def travels_by_name(obj: Any) -> bool:
    """Returns whether another process finds this very object by its module and qualified name."""
    found = found_by_name(obj, can_import)
    return found is not None and found[2] == 0


def found_by_name(obj: Any, can_import: Callable[[str], bool]) -> tuple[str, str, int] | None:
    """Returns the place where another process finds this very object by its name.

    Args:
        obj: the object.
        can_import: `can_import`, with or without a memory.

    Returns:
        A module, a qualified name in it, and the number of wrappers around the object there; None if not found.
    """
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(qualname, str) and can_import(module)):
        return None
    try:
        found, depth = operator.attrgetter(qualname)(sys.modules[module]), 0
    except AttributeError:
        return None
    while found is not obj:
        found, depth = getattr(found, "__wrapped__", None), depth + 1
        if found is None:
            return None
    return module, qualname, depth


def home_in(module: types.ModuleType, obj: Any) -> tuple[str, str] | None:
    """Returns the names of a module and of an object in it; None if the object is not among its values."""
    names = content(module)
    return next(((str(names["__name__"]), name) for name, value in list(names.items()) if value is obj), None)


# --- modules whose source has changed ---

_STARTED = time.time()
if _fields := machine.process_status("self"):
    # The kernel counts in whole ticks. Take the end of the tick: a script may be written and started within one.
    _age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - (int(_fields[19]) + 1) / os.sysconf("SC_CLK_TCK")
    _STARTED = time.time() - _age_s
"""The start time of this process. Files last changed before it are as they were at import (forks included)."""


def leads_to_edited(name: str, look_at: Callable[[str], tuple[bool, set[str]] | None] | None = None) -> bool:
    """Returns whether a worker that imports a module gets edited code: from this module, or from modules it needs.

    Assumes that nobody edits modules of installed packages.

    Args:
        name: the module. The worker also imports the modules of its functions and classes.
        look_at: see `can_import`.
    """
    reached, pending = set[str](), [name]
    while pending:
        if (name := pending.pop()) not in reached and (about := (look_at or _look_at)(name)) is not None:
            is_edited, homes = about
            if is_edited:
                return True
            reached.add(name)
            pending += homes
    return False


def own_edited_modules() -> list[str]:
    """Returns all of the user's own modules whose files changed after this process imported them."""
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if name not in PROGRAMS and _is_own(name, module) and _is_edited(module)
    )


def _look_at(name: str) -> tuple[bool, set[str]] | None:
    """Returns whether a module has been edited, and its parent package and the modules of its globals.

    None for a module that is not the user's own.
    """
    module = sys.modules.get(name)
    if module is None or not _is_own(name, module):
        return None
    homes = [answer_of(_home_of, value) for value in list(content(module).values())]
    return _is_edited(module), {name.rpartition(".")[0], *(home for home in homes if isinstance(home, str))}


def _home_of(value: Any) -> Any:
    return content(value).get("__name__") if _is_module(value) else getattr(value, "__module__", None)


def _is_module(value: Any) -> bool:
    """Returns whether a value is a module, without reading attributes, which would import a lazy module."""
    return issubclass(type(value), types.ModuleType)


def _is_own(name: str, module: types.ModuleType) -> bool:
    file = content(module).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py") or not os.path.isabs(file):
        return False
    return not (is_installed(file) or is_imported_early(name))


def _is_edited(module: types.ModuleType) -> bool:
    file = str(content(module)["__file__"])
    try:
        status = os.stat(getattr(content(module).get("__loader__"), "archive", file))
    except OSError:
        return True
    if status.st_ctime < _STARTED:
        return False
    # The file has changed since this process started: the code shows whether before or after the import.
    compiled = getattr(content(module).get("__loader__"), "source_to_code", InspectLoader.source_to_code)
    source = _source_of(file, status.st_mtime_ns, status.st_size, compiled)
    if source is None:
        return True
    return not all(_essence(code) in source for code in _codes_of(module, file))


@functools.lru_cache(maxsize=256)
def _source_of(file: str, mtime_ns: int, size: int, compiled: Callable[[bytes, str], Any]) -> frozenset[Any] | None:
    """Returns the essences of all code in a file, compiled as at import; None if this fails."""
    whole = answer_of(lambda file: compiled(Path(file).read_bytes(), file), file)
    return None if whole is None else frozenset(map(_essence, code_within(whole)))


def _essence(code: types.CodeType) -> Any:
    """Returns the content of a code object without its place in the file, to compare code objects."""
    return code.co_qualname, code.co_flags, canonical_json(describe_code(code))


def _codes_of(module: types.ModuleType, file: str) -> Iterator[types.CodeType]:
    """Yields the code of a module's functions and methods that come from its own file."""
    pending, seen = list(content(module).values()), set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen or _is_module(value):
            continue
        seen.add(id(value))
        if type(value) is types.CodeType and value.co_filename == file:
            yield value
        pending += answer_of(lambda value: _parts_of(value, module.__name__), value) or ()


def _parts_of(value: Any, module: str) -> Iterable[Any]:
    """Returns the parts of a function, class or wrapper of a module that may contain its code."""
    if isinstance(value, type):
        return vars(value).values() if value.__module__ == module else ()
    if isinstance(value, types.FunctionType):
        return value.__code__, getattr(value, "__wrapped__", None)
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, functools.partial):
        return (value.func,)
    return (inspect.getattr_static(value, "__wrapped__", None),)  # a proxy may invent attributes
