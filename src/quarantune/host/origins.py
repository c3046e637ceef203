"""The interpreter and the import path for another process, and the modules that such a process imports first."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig

_NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "cloudpickle", "psutil", "platformdirs", "quarantune")
"""Packages that a process of ours imports before any module of the user's."""


def import_path() -> list[str]:
    """Returns `sys.path` with absolute entries, valid in any working directory.

    Left out are entries that are not strings, which the import system ignores, and relative ones where the working
    directory is gone.
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


def is_imported_early(name: str) -> bool:
    """Returns whether a module is Python's own, or belongs to a package that a process of ours imports first.

    Args:
        name: the name of a module that this process has imported.
    """
    package = name.partition(".")[0]
    if package in _NEEDED:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    is_from_library = file is None or os.path.abspath(file).startswith(os.path.dirname(os.__file__) + os.sep)
    return package in sys.stdlib_module_names and is_from_library


def _library_directories() -> list[str]:
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)]
    zipped = os.path.join(sys.base_prefix, sys.platlibdir, f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _NEEDED]
    packages = [os.path.dirname(os.path.dirname(file)) for file in files if file]
    return [*library, *(os.path.join(directory, "lib-dynload") for directory in library), zipped, *packages]


# --- the interpreter ---


def interpreter() -> str:
    """Returns the path of this Python's interpreter.

    Raises:
        RuntimeError: there is none: Python is embedded, or frozen into an application, which would start itself again.
    """
    if getattr(sys, "frozen", False):
        raise RuntimeError(
            f"this is a frozen application, of which {sys.executable} would start another instance as a worker: tune "
            f"with an ordinary Python and ship the results (option tables, or QUARANTUNE_CACHE_PATH), set "
            f"QUARANTUNE_ON_MISS=default to run untuned where there is none, or set QUARANTUNE_ISOLATION=none to tune "
            f"in this process"
        )
    if not sys.executable:
        raise RuntimeError(
            "sys.executable is empty, so no worker can be started: set sys.executable to a Python interpreter "
            "or set QUARANTUNE_ISOLATION=none"
        )
    return sys.executable
