"""Where modules come from: the import path that another process is to have."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig

_NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "cloudpickle", "psutil", "filelock", "platformdirs", "quarantune")
"""Packages that a process of ours imports before anything of the user's."""


def import_path() -> list[str]:
    """Returns `sys.path` as it holds in any directory.

    Entries that are no strings are left out, as the import system ignores them, and so are relative ones where the
    working directory is gone.
    """
    absolute = []
    for entry in sys.path:
        if isinstance(entry, str):
            with contextlib.suppress(OSError):  # no working directory
                absolute.append(os.path.abspath(entry))
    return absolute


def startup_path() -> list[str]:
    """Returns the same path with the directories first that Python and our own packages come from.

    So nothing in the user's directories is taken for a module of the standard library, or for JAX.
    """
    path = import_path()
    homes = {os.path.abspath(directory) for directory in _library_directories()}
    return [entry for entry in path if entry in homes] + [entry for entry in path if entry not in homes]


def is_imported_early(name: str) -> bool:
    """Returns whether a module is Python's own, or of a package that a process of ours imports before any other.

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
