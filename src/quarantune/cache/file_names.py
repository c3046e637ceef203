"""File names for functions and problems."""

from __future__ import annotations

import re

from quarantune.values.codec import (
    canonical_json,
    short_hash,
)

_PLAIN_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,99}")
_HASHED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}-[0-9a-f]{12}")


def safe_name(name: str) -> str:
    """Returns a file name stem for a function's name.

    Plain lower-case names are unchanged. All others keep their readable part and end in a hash of the whole name, so
    that names that differ, if only in case, have different files on every filesystem. The result is itself unchanged by
    this function.

    Args:
        name: any text: a qualified name with `<locals>`, a path, a name too long for a file.
    """
    if _PLAIN_NAME.fullmatch(name) or _HASHED_NAME.fullmatch(name):
        return name
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:100]
    if not re.match(r"[A-Za-z0-9_]", readable):
        readable = ("_" + readable)[:100]
    return f"{readable}-{short_hash(name)}"


def problem_hash(device: str, key: str) -> str:
    """Returns the file name stem for one problem on one device."""
    return short_hash(canonical_json([device, key]))
