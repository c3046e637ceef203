"""Compares the elements of two numpy arrays in bounded memory."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from quarantune.measure.rounding import CHUNK_ELEMENTS, NEVER, Allowance, allowed, chunks, deviations, wide_type

_Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclasses.dataclass(frozen=True)
class Mismatches:
    """How two arrays differ.

    Attributes:
        count: how many elements differ by more than their allowances.
        worst: the flat index of the worst element; it, `got` and `wanted` are only set where the arrays disagree.
        got: the value of that element.
        wanted: its expected value.
        far: how many elements differ by so many times their allowances that there may be none.
        together: how all elements together differ by more than rounding; None where they do not.
        allowed: the allowance of the worst element; None where its dtype is not one of floats.
    """

    count: int
    worst: int = 0
    got: Any = None
    wanted: Any = None
    far: int = 0
    together: str | None = None
    allowed: float | None = None

    def disagree(self, size: int, allowance: Allowance) -> bool:
        """Returns whether these are too many differences, or too large ones, for an array of a size."""
        return bool(self.far or self.together or (self.count and self.count / size > allowance.share))


def has_dtype(leaf: Any, *kinds: Any) -> bool:
    """Returns whether a leaf has a dtype of one of these kinds."""
    return hasattr(leaf, "dtype") and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def compare_numbers(got: _Array, wanted: _Array, allowance: Allowance, where: str, *, is_exact: bool) -> str | None:
    """Compares two arrays of one shape.

    Args:
        got: the array that a config returned.
        wanted: the expected array.
        allowance: how far apart elements may be.
        where: the array's place in the output, for the message.
        is_exact: whether elements must be equal.

    Returns:
        One sentence, or None where they agree.
    """
    if _are_same_bytes(got, wanted):
        return None
    if allowance.is_calibrated and not has_dtype(got, np.inexact):
        is_exact, allowance = True, dataclasses.replace(allowance, share=0.0)
    found = _find_mismatches(got, wanted, None if is_exact else allowance.for_dtype(got.dtype))
    if found.disagree(got.size, allowance):
        index = np.unravel_index(found.worst, got.shape)
        found = dataclasses.replace(found, got=got[index], wanted=wanted[index])
    return describe_mismatches(found, got.shape, allowance, where, is_exact=is_exact)


def _are_same_bytes(got: _Array, wanted: _Array) -> bool:
    """Returns whether two arrays are equal bit by bit, several times faster than a search for differences."""
    if got.dtype != wanted.dtype or got.dtype.hasobject or not (got.flags.c_contiguous and wanted.flags.c_contiguous):
        return False
    mine, its = (array.reshape(-1).view(np.uint8) for array in (got, wanted))
    return all(
        np.array_equal(mine[start : start + CHUNK_ELEMENTS], its[start : start + CHUNK_ELEMENTS])
        for start in range(0, mine.size, CHUNK_ELEMENTS)
    )


def describe_mismatches(
    found: Mismatches, shape: tuple[int, ...], allowance: Allowance, where: str, *, is_exact: bool
) -> str | None:
    """Returns how two arrays of this shape differ, in one sentence; None where they agree."""
    size = math.prod(shape)
    if not found.disagree(size, allowance):
        return None
    index = tuple(int(i) for i in np.unravel_index(found.worst, shape))
    place = f"at {list(index)} of {where}" if index else where
    by, near, remedy = f" by more than rtol={allowance.rtol:g}, atol={allowance.atol:g}", "", ""
    if is_exact:
        by = ""
    elif allowance.is_calibrated:
        by, remedy = " by more than rounding explains", f"; {_remedy(allowance)}"
        near = "" if found.allowed is None else f" within {found.allowed:.3g}"
    count = f"{found.count} of {size} elements ({100 * found.count / size:.3g}%) differ{by}" if found.count else None
    which = f"; the {'first' if is_exact else 'worst'} is" if found.count else ", as"
    what = f"{', and '.join(filter(None, (count, found.together)))}{which} {place}"
    return f"{what}: got {found.got}, expected {found.wanted}{near}{remedy}"


def _remedy(allowance: Allowance) -> str:
    if allowance.noise is None:
        noise = "how far rounding moves the output is not known"
    else:
        noise = f"rounding of the inputs moves the output by {allowance.noise:.2g} of its RMS"
    return f"{noise}; give rtol and atol to allow more"


def is_as_near(got: Any, rival: Any, truth: Any, allowance: Allowance) -> bool:
    """Returns whether an output is no farther from the truth than a rival, or no farther than rounding explains.

    Args:
        got: an array.
        rival: another one, whose differences from the truth are allowed, too.
        truth: what both are meant to be.
        allowance: what rounding explains.
    """
    if not all(has_dtype(array, np.inexact) and array.shape == got.shape for array in (got, rival, truth)):
        return False
    mine, its, wanted = map(np.asarray, (got, rival, truth))
    return not _find_mismatches(mine, wanted, allowance.for_dtype(mine.dtype), its).disagree(mine.size, allowance)


def _find_mismatches(got: _Array, wanted: _Array, allowance: Allowance | None, *rival: _Array) -> Mismatches:
    """Returns how arrays differ, without the values of the worst element.

    Args:
        got: an array.
        wanted: the expected one.
        allowance: what is allowed; None where elements must be equal.
        *rival: a third array, whose differences from the expected one are allowed, too.
    """
    count, far, worst, worst_excess, worst_allowed = 0, 0, 0, 0.0, None
    columns = got.shape[-1] if got.ndim else 1
    is_plain = has_dtype(got, np.inexact)
    wide = wide_type(got, wanted) if allowance is not None and is_plain else None
    sums = np.zeros((2, 4))
    with np.errstate(all="ignore"):
        for part, mine, its, *theirs in chunks(got, wanted, *rival, wide=wide):
            if allowance is None:
                excess, limit = np.asarray(mine != its, np.float64), None
            elif not is_plain:
                excess, limit = _excess_of_integers(mine, its, allowance), None
            else:
                limit = allowed(
                    np, allowance.block, allowance.column, allowance.limits, its, start=part.start, columns=columns
                )
                for other in theirs:
                    limit = np.fmax(limit, np.where(np.isfinite(other), np.abs(other - its), 0))
                excess = excess_of(np, mine, its, limit)
                if allowance.is_calibrated:
                    far += int(np.count_nonzero(is_far(np, excess, limit, allowance.far)))
                    sums[: 1 + len(theirs)] += [deviations(np, each, its)[1] for each in (mine, *theirs)]
            mismatched = excess > 0
            if mismatched.any():
                count += int(np.count_nonzero(mismatched))
                position = int(np.argmax(np.where(mismatched, excess, 0)))
                if excess[position] > worst_excess:
                    worst, worst_excess = part.start + position, excess[position]
                    worst_allowed = None if limit is None else float(limit[position])
        together = allowance.reason(sums[0], got.size, sums[1]) if allowance is not None and is_plain else None
    return Mismatches(count, worst, far=far, together=together, allowed=worst_allowed)


def excess_of(xp: Any, got: Any, wanted: Any, limit: Any) -> Any:
    """Returns by how much each difference exceeds its limit; an infinity or NaN agrees with its like only."""
    excess = xp.abs(got - wanted) - limit
    same = (got == wanted) | (xp.isnan(got) & xp.isnan(wanted))
    finite = xp.isfinite(got) & xp.isfinite(wanted)
    return xp.where(same, 0.0 if xp is np else xp.zeros_like(excess), xp.where(finite, excess, xp.inf))


def is_far(xp: Any, excess: Any, limit: Any, far: Any) -> Any:
    """Returns which elements differ by far too many times their limits; infinities and NaN among them."""
    return ((excess > (far - 1) * limit) | xp.isinf(excess)) & (far < NEVER)


def _excess_of_whole(got: int, wanted: int, tolerance: Allowance) -> float:
    """Returns the excess for Python integers, which may be larger than any float."""
    allowance = Fraction(float(tolerance.atol)) + Fraction(float(tolerance.rtol)) * abs(wanted)
    excess = abs(got - wanted) - allowance
    try:
        return float(excess)
    except OverflowError:
        return math.inf if excess > 0 else -math.inf


def _excess_of_integers(got: _Array, wanted: _Array, tolerance: Allowance) -> _Array:
    if got.dtype == object:
        pairs = zip(got, wanted, strict=True)
        return np.array([_excess_of_whole(mine, its, tolerance) for mine, its in pairs], np.float64)
    allowances = tolerance.atol + tolerance.rtol * np.abs(wanted.astype(np.float64))
    excess: _Array = _distances(got, wanted) - allowances
    return excess


def _distances(got: _Array, wanted: _Array) -> _Array:
    """Returns the absolute differences of integers; they may exceed the range of the integers' own type."""
    wide = np.uint64 if has_dtype(got, np.unsignedinteger) else np.int64
    got, wanted = got.astype(wide), wanted.astype(wide)
    distances: _Array = np.maximum(got, wanted).astype(np.uint64) - np.minimum(got, wanted).astype(np.uint64)
    return distances.astype(np.float64)
