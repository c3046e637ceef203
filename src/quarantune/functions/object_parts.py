"""The parts of an object that its pickle holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any


def pickled_parts(value: Any) -> list[Any]:
    """Returns the parts from which a pickle makes an object again: a function, its arguments, and its state.

    An object that is pickled by its name has the characters of that name. This raises what the object's own methods
    raise, which may be anything.
    """
    return [list(part) if isinstance(part, Iterator) else part for part in value.__reduce_ex__(4)]


def without_caches(value: Any, part: Any) -> Any:
    """Returns the fields of an object without those that hold its cached properties; anything else as it is."""
    if not isinstance(part, dict):
        return part
    kind, cached = type(value), functools.cached_property
    return {name: item for name, item in part.items() if not isinstance(getattr(kind, str(name), None), cached)}
