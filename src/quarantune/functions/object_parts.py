"""The parts of an object that its pickle holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any


def pickled_parts(value: Any) -> list[Any]:
    """Returns the parts that a pickle rebuilds an object from: a function, its arguments, and its state.

    The parts of an object pickled by name are the characters of that name. The object's own methods run, and may raise
    anything.
    """
    return [list(part) if isinstance(part, Iterator) else part for part in value.__reduce_ex__(4)]


def without_caches(value: Any, part: Any) -> Any:
    """Returns the fields of an object without its cached properties; any other part unchanged."""
    if not isinstance(part, dict):
        return part
    kind, cached = type(value), functools.cached_property
    return {name: item for name, item in part.items() if not isinstance(getattr(kind, str(name), None), cached)}
