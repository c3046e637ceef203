"""The bits of outputs: digests that distinguish them, and how two outputs differ in bits.

A NaN equals every other NaN. -0.0 and 0.0 differ. The host and a device compute different digests of the same bits, so
only digests of one platform are comparable.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.measure.compare import Comparer, Flat, NoArray, has_dtype, on_host
from quarantune.measure.rounding import HostArray

MOVED = {True: 2, False: 1}
"""Number of runs on moved inputs whose bits are part of a digest, on a device and on the host. Moving 16 MB of inputs
and hashing as much output takes the host 40 ms."""
SLOWEST_S = 1.0
"""Seconds of a run above which a program does not run on moved inputs for its bits."""
_DIGITS = 16


def digest(output: Flat, device: Comparer | None) -> str:
    """Returns a hash of the bits of an output, its structure, shapes and dtypes.

    Args:
        output: the output.
        device: hashes arrays where they are; None to hash them on the host.
    """
    # All sums begin before the first is awaited.
    sums = [device.run(sums_of, leaf) if device and device.is_narrow(leaf) else None for leaf in output.values]
    parts = [_described(leaf, found) for leaf, found in zip(output.values, sums, strict=True)]
    return hashlib.sha256(repr((output.shown, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def _described(leaf: Any, sums: Any) -> Any:
    if sums is not None:
        return str(leaf.dtype), leaf.shape, np.asarray(sums).tolist()
    array = on_host(leaf)
    if isinstance(leaf, NoArray) or array.dtype.hasobject:
        return repr(leaf)
    return str(array.dtype), array.shape, zlib.crc32(_with_one_nan(array).view(np.uint8).data)


def _with_one_nan(array: HostArray) -> HostArray:
    """Returns the elements of an array in one dimension, with the same bits for all that are NaN."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if has_dtype(flat, np.inexact) and (is_nan := np.isnan(flat)).any():
        return np.where(is_nan, flat.dtype.type(np.nan), flat)
    return flat


@jax.jit
def sums_of(array: jax.Array) -> jax.Array:
    """Returns the sums, modulo 2**32, of two hashes of each element with its place, for floats of at most 32 bits."""
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    words = jnp.where(jnp.isnan(array), ~unsigned.type(0), jax.lax.bitcast_convert_type(array, unsigned)).reshape(-1)
    # The multipliers and shifts are those of MurmurHash3's finaliser.
    mixed = words.astype(jnp.uint32) + jnp.arange(1, 1 + words.size, dtype=jnp.uint32) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    again = (mixed ^ (mixed >> 16)) * np.uint32(0x2C1B3C6D)
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
            continue
        mine, its = _with_one_nan(mine), _with_one_nan(its)
        differs = mine.view(f"V{mine.itemsize}") != its.view(f"V{mine.itemsize}")
        if differs.any():
            count = f"{what}{path} has other bits in {np.count_nonzero(differs):,} of {mine.size:,} elements"
            return f"{count}{_apart(mine[differs], its[differs])}"
    return None


def _apart(mine: HostArray, its: HostArray) -> str:
    """Returns by how much floats differ at most; both zeros have one place among all numbers of their dtype."""
    if not has_dtype(mine, np.floating):
        return ""
    signed = [array.view(f"int{8 * array.itemsize}").astype(np.int64) for array in (mine, its)]
    sign = 1 << (8 * mine.itemsize - 1)
    places = [np.where(bits < 0, -(bits & (sign - 1)), bits).astype(np.float64) for bits in signed]
    units = int(np.abs(places[0] - places[1]).max())
    return f", at most {units:,} unit{'' if units == 1 else 's'} in the last place" if units else ", in signs of zeros"
