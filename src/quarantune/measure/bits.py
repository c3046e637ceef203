"""The bits of outputs: digests that distinguish them, and how two outputs differ in bits.

A NaN equals every other NaN. -0.0 and 0.0 differ. The host and a device compute different digests of the same bits, so
only digests of one platform are comparable.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.measure.compare import Flat, NoArray, has_dtype, on_host
from quarantune.measure.rounding import HostArray

MOVED = {True: 2, False: 1}
"""Number of runs on moved inputs whose bits are part of a digest, on a device and on the host. Moving 16 MB of inputs
and hashing as much output takes the host 40 ms."""
SLOWEST_S = 1.0
"""Seconds of a run above which a program does not run on moved inputs for its bits."""
_DIGITS = 16
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x2C1B3C6D)


def digest(output: Flat, run: Callable[..., Any] | None = None, takes: Callable[[Any], bool] | None = None) -> str:
    """Returns a hash of the bits of an output, its structure, shapes and dtypes.

    Args:
        output: the output.
        run: calls a jitted function with arguments on their device; None to hash everything on the host.
        takes: returns whether `run` takes an array.
    """
    there = [leaf if run is not None and takes is not None and takes(leaf) else None for leaf in output.values]
    sums = [None if leaf is None or run is None else run(sums_of, leaf) for leaf in there]  # all, before any is awaited
    parts = [_described(leaf, found) for leaf, found in zip(output.values, sums, strict=True)]
    return hashlib.sha256(repr((output.shown, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def _described(leaf: Any, found: Any) -> Any:
    if found is None:
        array = on_host(leaf)
        if isinstance(leaf, NoArray) or array.dtype.hasobject:
            return repr(leaf)
        found = [zlib.crc32(words_of(array).data), array.size]
    return str(getattr(leaf, "dtype", type(leaf).__name__)), np.shape(leaf), [int(part) for part in np.asarray(found)]


def words_of(array: HostArray) -> HostArray:
    """Returns the bits of an array as a flat array of unsigned numbers; complex numbers and long ones are several."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if has_dtype(flat, np.complexfloating):
        flat = flat.view(flat.real.dtype)
    size = flat.dtype.itemsize
    words = flat.view(f"uint{8 * size}") if size in (1, 2, 4, 8) else flat.view(np.uint8)
    if _may_have_nan(flat) and (is_nan := np.isnan(flat)).any():
        words = np.where(is_nan, ~words.dtype.type(0), words)
    return words.view(np.uint32) if size == 8 else words


def _may_have_nan(flat: HostArray) -> bool:
    if flat.dtype in (np.float32, np.float64):
        with np.errstate(all="ignore"):
            return not np.isfinite(flat.sum())  # several times faster than a look at each element
    return has_dtype(flat, np.floating)


@jax.jit
def sums_of(array: jax.Array) -> jax.Array:
    """Returns the two sums of a digest for an array of floats of at most 32 bits, on its device."""
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    words = jax.lax.bitcast_convert_type(array, unsigned)
    words = jnp.where(jnp.isnan(array), ~unsigned.type(0), words).reshape(-1).astype(jnp.uint32)
    # The sums, modulo 2**32, of two hashes of each word with its place.
    first, second, third, fourth = (np.uint32(factor) for factor in _FACTORS)
    mixed = words + jnp.arange(1, 1 + words.size, dtype=jnp.uint32) * first
    mixed = (mixed ^ (mixed >> 16)) * second
    mixed = (mixed ^ (mixed >> 13)) * third
    mixed = mixed ^ (mixed >> 16)
    again = (mixed ^ (mixed >> 15)) * fourth
    return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in (mixed, again ^ (again >> 12))])


def difference(output: Flat, expected: Flat, what: str = "output") -> str | None:
    """Returns how the bits of an output differ, in one sentence about the first leaf that does; None if none does.

    Args:
        output: the output.
        expected: the output to compare with, of the same structure.
        what: the name of the output in the sentence.
    """
    for (path, leaf), wanted in zip(output.leaves, expected.values, strict=True):
        mine, its = on_host(leaf), on_host(wanted)
        if isinstance(leaf, NoArray) or mine.dtype.hasobject or mine.dtype != its.dtype or mine.shape != its.shape:
            if repr(leaf) != repr(wanted):
                return f"{what}{path} is not the same"
        elif reason := _difference(mine, its):
            return f"{what}{path} has {reason}"
    return None


def _difference(mine: HostArray, its: HostArray) -> str | None:
    differs = words_of(mine) != words_of(its)
    if not differs.any():
        return None
    if differs.size != mine.size:
        differs = differs.reshape(mine.size, -1).any(1)
    count = f"other bits in {np.count_nonzero(differs):,} of {mine.size:,} elements"
    if not has_dtype(mine, np.floating):
        return count
    mine, its = (array.reshape(-1)[differs] for array in (mine, its))
    if not all(np.isfinite(array.astype(np.float64)).all() for array in (mine, its)):
        return f"{count}, some of them NaN or infinite"
    pairs = zip(_places(mine).tolist(), _places(its).tolist(), strict=True)
    units = max(abs(one - other) for one, other in pairs)
    if not units:
        return f"{count}, in the sign of zeros only"
    return f"{count}, at most {units:,} unit{'' if units == 1 else 's'} in the last place"


def _places(array: HostArray) -> HostArray:
    """Returns the place of each float among all numbers of its dtype; both zeros have the same."""
    size = array.dtype.itemsize
    bits = array.view(f"int{8 * size}").astype(np.int64)
    return np.where(bits < 0, -(bits & (2 ** (8 * size - 1) - 1)), bits)
