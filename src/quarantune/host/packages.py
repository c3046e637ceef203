"""Where code comes from: Python itself, installed packages, and the import path of this process."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OWN_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "cloudpickle", "psutil", "platformdirs", "quarantune")
"""Packages that our processes import before any module of the user's."""


@functools.cache
def is_installed(file: str) -> bool:
    """Returns whether a file is part of Python or of an installed package, so that its version stands for its code.

    A package in any other directory (`pip install --target`) counts if pip left its record next to it. An editable
    installation does not count: its files are where its author works.
    """
    if file.startswith("<frozen "):  # a module inside the Python program, such as `importlib._bootstrap`
        return True
    path = os.path.normpath(file)  # not `abspath`, which fails if the working directory is gone
    if path.startswith(_homes()) or not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep)):
        return True
    for directory in import_path():
        name, _, _ = path.removeprefix(directory + os.sep).partition(os.sep)
        if path.startswith(directory + os.sep) and name in _recorded(directory):
            return True
    return False


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Returns the entry points of a group. The first call reads all packages, which takes 20 ms for 100 packages."""
    found: importlib.metadata.EntryPoints = _entry_points(tuple(sys.path)).select(group=group)
    return found


@functools.cache
def _entry_points(path: tuple[str, ...]) -> Any:
    return importlib.metadata.entry_points()


@functools.cache
def _homes() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return (*(os.path.abspath(sysconfig.get_path(kind)) + os.sep for kind in kinds), _OWN_PACKAGE)


@functools.cache
def _recorded(directory: str) -> frozenset[str]:
    """Returns the names of files and directories in a directory that belong to packages installed there."""
    names: set[str] = set()
    for record in Path(directory).glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            names.update(line.partition(",")[0].partition("/")[0] for line in record.read_text("utf-8").splitlines())
    return frozenset(names)


def import_path() -> list[str]:
    """Returns `sys.path` with absolute entries, valid in any working directory.

    Omits entries that are not strings, which the import system ignores, and relative entries if the working directory
    is gone.
    """
    absolute = []
    for entry in sys.path:
        if isinstance(entry, str):
            with contextlib.suppress(OSError):  # no working directory
                absolute.append(os.path.abspath(entry))
    return absolute


def startup_path() -> list[str]:
    """Returns `import_path()` with the directories of Python and of our own packages first.

    No module in the user's directories can then shadow one of the standard library, or JAX.
    """
    path = import_path()
    homes = {os.path.abspath(directory) for directory in _library_directories()}
    return [entry for entry in path if entry in homes] + [entry for entry in path if entry not in homes]


def content(module: object) -> Mapping[str, Any]:
    """Returns the globals of a module without running any code: a lazy module stays unimported."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found


def is_imported_early(name: str) -> bool:
    """Returns whether a module is Python's own, or belongs to a package that our processes import first.

    Args:
        name: the name of a module that this process has imported.
    """
    package = name.partition(".")[0]
    if package in _NEEDED:
        return True
    file = content(sys.modules.get(name)).get("__file__")
    is_from_library = file is None or os.path.abspath(file).startswith(os.path.dirname(os.__file__) + os.sep)
    return package in sys.stdlib_module_names and is_from_library


def _library_directories() -> list[str]:
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)]
    zipped = os.path.join(sys.base_prefix, sys.platlibdir, f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _NEEDED]
    packages = [os.path.dirname(os.path.dirname(file)) for file in files if file]
    return [*library, *(os.path.join(directory, "lib-dynload") for directory in library), zipped, *packages]
