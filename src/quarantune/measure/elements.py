"""Compares the elements of two numpy arrays in bounded memory."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from quarantune.values.tolerance import Tolerance

_Array: TypeAlias = "np.ndarray[Any, Any]"

_CHUNK_ELEMENTS = 2**16
"""Elements compared at a time: their temporaries, mostly of half a megabyte, stay in the cache of a core."""


@dataclasses.dataclass(frozen=True)
class Mismatches:
    """How two arrays differ.

    Attributes:
        count: how many elements differ by more than the tolerance.
        worst: the flat index of the worst element; it, `got` and `wanted` are only set where too many elements differ.
        got: the value of that element.
        wanted: its expected value.
    """

    count: int
    worst: int = 0
    got: Any = None
    wanted: Any = None


def has_dtype(leaf: Any, *kinds: Any) -> bool:
    """Returns whether a leaf has a dtype of one of these kinds."""
    return hasattr(leaf, "dtype") and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def compare_numbers(
    got: _Array,
    wanted: _Array,
    tolerance: Tolerance,
    where: str,
    *,
    is_exact: bool,
) -> str | None:
    """Compares two arrays of one shape.

    Args:
        got: the array that a config returned.
        wanted: the expected array.
        tolerance: how far apart elements may be.
        where: the array's place in the output, for the message.
        is_exact: whether elements must be equal.

    Returns:
        One sentence, or None where they agree.
    """
    if _are_same_bytes(got, wanted):
        return None
    count, worst = _find_mismatches(got, wanted, None if is_exact else tolerance)
    index = np.unravel_index(worst, got.shape) if got.size else ()
    found = Mismatches(count, worst, got[index], wanted[index]) if count else Mismatches(0)
    return describe_mismatches(found, got.shape, tolerance, where, is_exact=is_exact)


def _are_same_bytes(got: _Array, wanted: _Array) -> bool:
    """Returns whether two arrays are equal bit by bit, several times faster than a search for differences."""
    if got.dtype != wanted.dtype or got.dtype.hasobject or not (got.flags.c_contiguous and wanted.flags.c_contiguous):
        return False
    mine, its = (array.reshape(-1).view(np.uint8) for array in (got, wanted))
    return all(
        np.array_equal(mine[start : start + _CHUNK_ELEMENTS], its[start : start + _CHUNK_ELEMENTS])
        for start in range(0, mine.size, _CHUNK_ELEMENTS)
    )


def describe_mismatches(
    found: Mismatches, shape: tuple[int, ...], tolerance: Tolerance, where: str, *, is_exact: bool
) -> str | None:
    """Returns how two arrays of this shape differ, in one sentence; None where they agree within the tolerance."""
    size = math.prod(shape)
    if not found.count or found.count / size <= tolerance.max_mismatched_ratio:
        return None
    index = tuple(int(i) for i in np.unravel_index(found.worst, shape))
    by = "" if is_exact else f" by more than rtol={tolerance.rtol:g}, atol={tolerance.atol:g}"
    return (
        f"{found.count} of {size} elements ({100 * found.count / size:.3g}%) differ{by}; "
        f"the {'first' if is_exact else 'worst'} is {f'at {list(index)} of ' if index else ''}{where}: "
        f"got {found.got}, expected {found.wanted}"
    )


def _find_mismatches(got: _Array, wanted: _Array, tolerance: Tolerance | None) -> tuple[int, int]:
    """Returns how many elements differ, and the flat index of the worst."""
    got_flat, wanted_flat = _flat(got), _flat(wanted)
    count, worst, worst_excess = 0, 0, 0.0
    for start in range(0, got.size, _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        with np.errstate(all="ignore"):
            excess = _excess(got_flat[chunk], wanted_flat[chunk], tolerance)
        mismatched = excess > 0
        if mismatched.any():
            count += int(np.count_nonzero(mismatched))
            position = int(np.argmax(np.where(mismatched, excess, 0)))
            if excess[position] > worst_excess:
                worst, worst_excess = start + position, excess[position]
    return count, worst


def _flat(array: _Array) -> Any:
    """Returns a flat view or iterator, so that chunks need no full copy."""
    return array.reshape(-1) if array.flags.c_contiguous else array.flat


def _excess(got: _Array, wanted: _Array, tolerance: Tolerance | None) -> _Array:
    """Returns by how much each difference exceeds the tolerance, above 0 where it does; None tolerates nothing."""
    if tolerance is None:
        return np.asarray(got != wanted, np.float64)
    if got.dtype == object:
        pairs = zip(got, wanted, strict=True)
        return np.array([_excess_of_whole(mine, its, tolerance) for mine, its in pairs], np.float64)
    if has_dtype(got, np.integer):
        return _distances(got, wanted) - _allowances(wanted.astype(np.float64), tolerance)
    wide = np.result_type(np.result_type(got.dtype, np.float64), np.result_type(wanted.dtype, np.float64))
    got, wanted = got.astype(wide), wanted.astype(wide)
    excess: _Array = np.abs(got - wanted) - _allowances(wanted, tolerance)
    if (excess <= 0).all():
        return excess  # no NaN and no infinity: with one, the comparison would be False
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    finite = np.isfinite(got) & np.isfinite(wanted)
    return np.where(same, 0.0, np.where(finite, excess, np.inf))


def _excess_of_whole(got: int, wanted: int, tolerance: Tolerance) -> float:
    """Returns the excess for Python integers, which may be larger than any float."""
    allowance = Fraction(float(tolerance.atol)) + Fraction(float(tolerance.rtol)) * abs(wanted)
    excess = abs(got - wanted) - allowance
    try:
        return float(excess)
    except OverflowError:
        return math.inf if excess > 0 else -math.inf


def _allowances(wanted: _Array, tolerance: Tolerance) -> _Array:
    allowances: _Array = tolerance.atol + tolerance.rtol * np.abs(wanted)
    return allowances


def _distances(got: _Array, wanted: _Array) -> _Array:
    """Returns the absolute differences of integers; they may exceed the range of the integers' own type."""
    wide = np.uint64 if has_dtype(got, np.unsignedinteger) else np.int64
    got, wanted = got.astype(wide), wanted.astype(wide)
    distances: _Array = np.maximum(got, wanted).astype(np.uint64) - np.minimum(got, wanted).astype(np.uint64)
    return distances.astype(np.float64)
