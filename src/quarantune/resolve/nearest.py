"""How far apart the sizes of two calls are, so that the result of one may stand in for the other's."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

_LARGEST_FACTOR = 4
"""Sizes that differ by more than this factor are not compared: the best config may be another one."""
_ROUNDING = 9


@dataclasses.dataclass(frozen=True, order=True)
class Distance:
    """The distance of a call from another one that differs in sizes only.

    Attributes:
        doublings: the sum of the absolute logarithms to base 2 of the factors between their sizes.
        is_above: whether a size is larger than that of the other call; of two calls as near, the smaller is preferred.
    """

    doublings: float
    is_above: bool


def distance(found: str, wanted: str) -> Distance | None:
    """Returns the distance of a key from the wanted one; None where they differ in more than sizes, or by too much.

    Sizes are the dimensions of arrays. Where a `key_fn` describes them, all whole numbers that it returns count.

    Args:
        found: the key of an entry.
        wanted: the key of a call.
    """
    try:
        pairs = list(_pairs(json.loads(found), json.loads(wanted), numbers=False))
    except (_OtherCallError, ValueError, RecursionError):
        return None
    different = [pair for pair in pairs if pair[0] != pair[1]]
    if any(min(pair) < 1 or max(pair) > _LARGEST_FACTOR * min(pair) for pair in different):
        return None
    factors = [math.log2(size / other) for size, other in different]
    return Distance(round(math.fsum(map(abs, factors)), _ROUNDING), any(factor > 0 for factor in factors))


class _OtherCallError(Exception):
    """The two keys differ in more than sizes."""


def _pairs(found: Any, wanted: Any, *, numbers: bool) -> Iterator[tuple[int, int]]:
    """Yields the sizes in which two keys may differ.

    Args:
        found: a part of the one key.
        wanted: the same part of the other.
        numbers: whether all whole numbers are sizes, as in what a `key_fn` returns.

    Raises:
        _OtherCallError: they differ in anything else.
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            raise _OtherCallError
        is_array = {"shape", "dtype"} <= wanted.keys()
        for name, part in wanted.items():
            is_size = numbers or name == "key_fn" or (name == "shape" and is_array)
            yield from _pairs(found[name], part, numbers=is_size)
    elif isinstance(found, list) and isinstance(wanted, list):
        if len(found) != len(wanted):
            raise _OtherCallError
        for ours, theirs in zip(found, wanted, strict=True):
            yield from _pairs(ours, theirs, numbers=numbers)
    elif numbers and type(found) is int and type(wanted) is int:
        yield found, wanted
    elif type(found) is not type(wanted) or found != wanted:
        raise _OtherCallError
