"""Names of tables that packages ship: `package:directory`, a directory of results below a package's own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_NAME = re.compile(r"(?P<package>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<directory>[\w-][\w.-]*(/[\w-][\w.-]*)*)")


def directory_of(name: object) -> Path:
    """Returns the directory of a table, whether or not it exists; the package is found, and not imported.

    Args:
        name: `package:directory`, as in `mykernels:tables`; the directory is relative to that of the package.

    Raises:
        TypeError: the name is no text.
        ValueError: it does not have that form, or the package is not installed.
    """
    if not isinstance(name, str):
        raise TypeError(f"tables={name!r} is not valid: give 'package:directory', as in 'mykernels:tables'")
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"tables={name!r} is not valid: give 'package:directory', as in 'mykernels:tables', with the directory "
            "relative to the package's own"
        )
    top, *inner = match["package"].split(".")
    try:
        found = importlib.util.find_spec(top)
    except ValueError:  # a module without a specification, such as `__main__`
        found = None
    if found is None or not found.submodule_search_locations:
        reason = "no package of that name is installed" if found is None else f"{top!r} is a module and no package"
        raise ValueError(f"tables={name!r} is not valid: {reason}; give a package that can be imported")
    places = [Path(root, *inner, match["directory"]) for root in found.submodule_search_locations]
    return next((place for place in places if place.is_dir()), places[0])
