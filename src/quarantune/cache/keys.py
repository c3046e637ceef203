"""Turns values into cache keys and names into file names, so that only equal values and names coincide."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

_PLAIN_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,99}")
_HASHED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}-[0-9a-f]{12}")


def canonical_json(value: Any) -> str:
    """Returns the canonical JSON text for a value: sorted keys, no whitespace, ASCII.

    NumPy scalars count as the Python scalars they hold and tuples as lists; True is not 1, and 1 is not 1.0.

    Args:
        value: JSON-able data.

    Raises:
        TypeError: JSON cannot hold a part of the value.
        ValueError: a part of the value is NaN or infinite.
    """
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def plain(value: Any, *, finite_only: bool = True) -> Any:
    """Returns a value in the types that JSON returns: None, bool, int, float, str, list and dict with text keys.

    Args:
        value: JSON-able data.
        finite_only: whether to refuse NaN and infinity; else they become None.

    Raises:
        TypeError: JSON cannot hold a part of the value.
        ValueError: a part of the value is NaN or infinite.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        if finite_only:
            raise ValueError(f"{value!r} cannot be kept in the cache: JSON has no NaN or infinity; use None")
        return None
    if isinstance(value, (list, tuple)):
        return [plain(item, finite_only=finite_only) for item in value]
    if isinstance(value, Mapping):
        return {_plain_key(key): plain(item, finite_only=finite_only) for key, item in value.items()}
    if _is_numpy_scalar(value):
        item = value.item()
        return plain(float(item) if _is_numpy_scalar(item) else item, finite_only=finite_only)
    raise TypeError(
        f"{value!r} of type {type(value).__name__} cannot be kept in the cache: "
        "use None, bool, int, float, str, or lists, tuples and dicts of them"
    )


def _plain_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the dict key {key!r} cannot be kept in the cache: use text, str({key!r})")
    return str.__str__(key)


def _is_numpy_scalar(value: Any) -> bool:
    # Where NumPy was never imported, the value cannot be a NumPy scalar, and importing NumPy here would take time.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


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


def short_hash(text: str) -> str:
    """Returns a hash of a text, in 12 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def problem_hash(device: str, key: str) -> str:
    """Returns the file name stem for one problem on one device."""
    return short_hash(canonical_json([device, key]))
