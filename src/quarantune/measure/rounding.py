"""Measures how far rounding alone moves a function's output, by running it again on inputs that were moved a little.

Two programs that compute the same in another order differ by rounding, and by how much depends on the function and its
inputs. So the program of the reference also runs on inputs moved at random by up to half a unit in the last place. The
deviations of its output show what rounding explains at each element; docs/correctness.md has the evidence. Functions
that take `xp` run with NumPy on the host, and with `jax.numpy` on a device.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.jax_internals import jax_traces
from quarantune.values.options import Tolerance

HostArray: TypeAlias = "np.ndarray[Any, Any]"

RUNS = 4
_SLOWEST_S, _BUDGET_S = 5.0, 1.0
"""Seconds of one run above which a program does not run again; and seconds after which no further run starts."""
BLOCK = 64
"""Number of neighbours in memory that share an allowance: a few deviations of one element show too little."""
_LEAST_ROWS = 16
"""Fewest rows that give each place along the last axis its own scale."""
CHUNK_ELEMENTS = 2**16
"""Number of elements that the host compares together: their temporaries of half a megabyte fit into a core's cache."""

# Chosen on the programs of `tests/support/check_corpus.py`: honest ones stay below half of each bound, bugs exceed one.
_MULTIPLE = 10.0
"""Multiple of an element's noise that rounding explains."""
_FAR = 4.0
"""Multiple of its allowance above which a difference fails the output, even in one element."""
NEVER = 1e30
"""Replaces `_FAR` if the tolerance lets a share of the elements be wrong."""
_SHARE = 1e-4
"""Share of a leaf's elements that may differ by more than their allowances."""
_UNITS = 2.0
"""Units in the last place of the output's dtype by which two roundings of one number may differ, with one to spare."""
_ACCUMULATED = 512.0
"""Units in the last place of the accumulator (float32 or wider), relative to the RMS of the neighbours. A million terms
added one after another reached 200, against a reference that adds them in a tree."""
_NARROWEST = 7
"""Bits in the mantissas of bfloat16, the coarsest type that kernels round intermediate values to unasked."""
_COMMON = 0.01
"""Scale or offset that all differences may have in common, relative to the output's RMS."""
_LARGE, _MASK = 1e12, 1e29
"""Largest size of elements whose squares have sums that fit into float32; larger ones are measured in another unit. And
size above which an element is a mask and does not choose that unit, which would leave nothing of its neighbours."""
_SPREAD = 5.0
"""Largest allowed ratio of the differences' RMS to the noise's RMS."""


@dataclasses.dataclass(frozen=True)
class Allowance:
    """How far the elements of one leaf may be from the reference's.

    An element may differ by `max(block * column, atol) + rtol * |expected|`.

    Attributes:
        rtol: the factor of the expected values.
        atol: the least absolute difference to allow.
        share: the share of the elements that may differ by more.
        block: a factor for each `BLOCK` elements in the order of memory; or one element, for all.
        column: a factor for each place along the last axis; or one element, for all.
        far: the multiple of its allowance that no element may exceed.
        together: the limits of all differences together: of their common scale, as a share of the expected values; of
            their mean; and of their RMS. The last two are relative to the RMS of the expected values.
        noise: the RMS of the deviations on moved inputs, relative to the same; None if it was not measured.
        is_calibrated: whether this was measured, and not chosen by an author. Integers must then be equal.
    """

    rtol: float
    atol: float
    share: float
    block: HostArray = dataclasses.field(default_factory=lambda: np.zeros(1, np.float32))
    column: HostArray = dataclasses.field(default_factory=lambda: np.ones(1, np.float32))
    far: float = NEVER
    together: tuple[float, float, float] = (math.inf, math.inf, math.inf)
    noise: float | None = None
    is_calibrated: bool = False

    @classmethod
    def fixed(cls, tolerance: Tolerance) -> Allowance:
        """Returns the allowance for an author's own tolerances."""
        return cls(tolerance.rtol, tolerance.atol, tolerance.max_mismatched_ratio)

    @property
    def limits(self) -> tuple[float, float, float]:
        """The numbers that a comparison on a device needs in addition to the factors."""
        return self.rtol, self.atol, self.far

    def for_dtype(self, dtype: Any) -> Allowance:
        """Returns the allowance for outputs of a dtype, which may be coarser than the reference's."""
        if not self.is_calibrated or not jnp.issubdtype(dtype, jnp.inexact):
            return self
        least = _UNITS * float(_about(dtype).smallest_subnormal)
        return dataclasses.replace(self, rtol=max(self.rtol, _UNITS * 2.0 ** -_mantissa(dtype)), atol=self.atol + least)

    def reason(self, sums: Any, size: int, rival: Any = (0, 0, 0, 0)) -> str | None:
        """Returns how the differences of all elements together exceed rounding; None if they do not.

        Args:
            sums: the sums from `deviations`.
            size: the number of elements.
            rival: the sums of another output. Differences as large as its own are allowed.
        """
        slope, offset, spread = _together(sums, size)
        limits = np.maximum(self.together, np.abs(_together(rival, size)))
        if abs(slope) > limits[0]:
            return f"all elements together are {1 + slope:.4g} times the expected ones"
        if abs(offset) > limits[1]:
            return f"all elements together are off by {offset:.2%} of their RMS"
        if spread > limits[2]:
            return f"the differences are {spread / limits[2]:.2g} times as large as rounding explains (RMS)"
        return None


def allowed(xp: Any, block: Any, column: Any, limits: Any, wanted: Any, *, start: int, columns: int) -> Any:
    """Returns the allowances of consecutive elements, as `Allowance` describes them.

    Args:
        xp: `numpy` or `jax.numpy`.
        block: `Allowance.block`.
        column: `Allowance.column`.
        limits: `Allowance.limits`.
        wanted: the expected elements, flat.
        start: the place of the first in the order of memory.
        columns: the length of the array's last axis.
    """
    places = start + xp.arange(wanted.size)
    factor = column[0] if column.size == 1 else column[places % columns]
    smooth = (block[0] if block.size == 1 else block[places // BLOCK]) * factor
    return xp.maximum(smooth, limits[1]) + limits[0] * xp.abs(wanted)


def chunks(*arrays: HostArray, wide: Any = None) -> Iterator[tuple[Any, ...]]:
    """Yields the arrays' elements in the order of memory, part by part, each part behind its slice."""
    flat = [array.reshape(-1) if array.flags.c_contiguous else array.flat for array in arrays]
    for start in range(0, arrays[0].size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        yield part, *[array[part] if wide is None else array[part].astype(wide) for array in flat]


def wide_type(*arrays: Any) -> Any:
    """Returns the type that the host compares floats or complex numbers in."""
    return np.result_type(*(np.result_type(array.dtype, np.float64) for array in arrays))


def runs(taken_s: float) -> Iterator[int]:
    """Yields the numbers of the runs on moved inputs that are worth their time.

    Args:
        taken_s: the seconds that a run takes; 0 if unknown.
    """
    start = time.perf_counter()
    for run in range(RUNS if taken_s < _SLOWEST_S else 0):
        if run and time.perf_counter() - start > _BUDGET_S:
            return
        yield run + 1


# --- the noise of one output ----------------------------------------------------------------------------------------


def unit_of(xp: Any, wanted: Any) -> Any:
    """Returns a unit that lets the squares of a reference's elements and of their deviations fit into float32."""
    size = xp.abs(wanted).astype("float32")
    return xp.maximum(xp.max(xp.where(size < _MASK, size, 0)) / _LARGE, 1)


def deviations(xp: Any, got: Any, wanted: Any, unit: Any = 1) -> tuple[Any, Any]:
    """Returns how the finite elements of arrays differ, in a unit.

    Returns:
        The squares of their differences; and four sums: of the differences, of their products with the wanted elements,
        of their squares, and of the squares of the wanted elements.
    """
    known = xp.where(xp.isfinite(wanted), wanted, 0) / unit
    off = xp.where(xp.isfinite(got) & xp.isfinite(wanted), got - wanted, 0) / unit
    squares = xp.abs(off) ** 2
    parts = xp.sum(off.real), xp.sum((off * xp.conj(known)).real), xp.sum(squares), xp.sum(xp.abs(known) ** 2)
    return squares, xp.stack(parts)


def _together(sums: Any, size: int) -> tuple[float, float, float]:
    """Returns the scale, the mean and the RMS of differences from their sums; see `Allowance.together`."""
    total, along, squares, known = map(float, np.asarray(sums))
    if not known:
        return 0.0, 0.0, 0.0
    rms = math.sqrt(known / size)
    return along / known, total / size / rms, math.sqrt(squares / size) / rms


def smoothed(xp: Any, squares: Any, wanted: Any, base: Any, multiple: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the factors of blocks and columns, the noise, and the RMS of the reference.

    A block's factor is at least half of its largest element's, so that a few sensitive elements among others count. No
    element counts as larger than the largest element that moves: the -1e30 of a mask says nothing of its neighbours.

    Args:
        xp: `numpy` or `jax.numpy`.
        squares: the mean squares of the deviations, in the shape of `wanted` and in its unit.
        wanted: the reference, wide enough for its squares.
        base: the least allowance, relative to the RMS of the neighbours.
        multiple: the allowance in units of the noise.
    """
    # The caps keep the sum of all squares finite, however far elements move.
    unit, most = unit_of(xp, wanted), float(np.finfo(squares.dtype).max) / 1e10
    squares, cap = xp.minimum(squares, most), min(1e18, math.sqrt(most))
    size = xp.where(xp.isfinite(wanted), xp.abs(wanted), 0) / unit
    largest = xp.max(xp.where(squares > 0, size, 0))
    known = xp.minimum(size, xp.where(largest > 0, xp.minimum(largest, cap), cap)) ** 2
    mean_square = xp.maximum(xp.mean(known), 1e-36)
    noise = xp.sqrt(xp.mean(squares) / mean_square)
    energy = (base**2 + (multiple * noise) ** 2) * known + multiple**2 * squares
    columns = wanted.shape[-1] if wanted.ndim else 1
    column = xp.ones(1, energy.dtype)
    if 1 < columns <= energy.size // _LEAST_ROWS:
        energy = energy.reshape(-1, columns)
        mean = xp.mean(energy, 0)
        energy, column = energy / xp.where(mean > 0, mean, 1), xp.sqrt(mean)
    flat = energy.reshape(-1)
    padded = xp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    counts = xp.minimum(BLOCK, flat.size - BLOCK * xp.arange(padded.shape[0]))
    block = xp.sqrt(xp.maximum(padded.sum(1) / counts, padded.max(1) / 4))
    return block * unit, column, noise, xp.sqrt(mean_square) * unit


class RoundingNoise:
    """Collects the deviations of one leaf, and makes its allowance."""

    def __init__(
        self, wanted: Any, *, coarsest: int | None, run: Callable[..., Any] | None = None, is_gradient: bool = False
    ) -> None:
        """Begins with no deviations.

        Args:
            wanted: the leaf of the reference, an array of floats or complex numbers.
            coarsest: the bits in the mantissas of the coarsest type that the program computes with.
            run: calls a jitted function with arguments, on the device that holds this leaf and the outputs of moved
                runs; None for the host.
            is_gradient: whether the leaf is a gradient. A backward pass subtracts terms that are nearly equal, such as
                the two of a saturated softmax. Moved inputs move both alike, so the difference hides their rounding.
                The terms are as large as elsewhere in the leaf: each element gets the allowance of the whole leaf.
        """
        self._wanted, self._coarsest, self._run = wanted if run else np.asarray(wanted), coarsest, run
        self._is_gradient = is_gradient
        self._squares: Any = None
        self._unit: Any = None
        self._smooth: Any = None
        self._sums: list[Any] = []
        self._scale = 1.0

    def add(self, moved: Any, scale: float = 1.0) -> None:
        """Takes the output of a run on moved inputs, and the share of its deviations that rounding explains."""
        self._scale = scale
        shape, run = self._wanted.shape, self._run
        if self._squares is None:
            if run is not None:
                self._squares = run(no_squares, self._wanted)
            else:
                with np.errstate(all="ignore"):
                    self._squares, self._unit = np.zeros(shape, self._float), unit_of(np, self._wanted)
        if run is not None:
            terms = np.asarray([len(self._sums) + 1, *self._terms(is_known=True)], np.float32)
            self._squares, sums, *self._smooth = run(add_deviations, self._squares, moved, self._wanted, terms)
        else:
            sums, flat = np.zeros(4), self._squares.reshape(-1)
            with np.errstate(all="ignore"):
                for part, mine, its in chunks(np.asarray(moved), self._wanted, wide=wide_type(self._wanted)):
                    squares, more = deviations(np, mine, its, self._unit)
                    flat[part] += squares
                    sums += more
        self._sums.append(sums)

    def allowance(self) -> Allowance:
        """Returns what rounding explains."""
        unit, is_known = _UNITS * 2.0 ** -_mantissa(self._wanted.dtype), bool(self._sums)
        base, multiple = self._terms(is_known=is_known)
        if self._smooth is None:
            wide = np.asarray(self._wanted, np.result_type(self._wanted.dtype, np.float32))
            squares = self._squares / len(self._sums) if is_known else np.zeros(wide.shape, self._float)
            with np.errstate(all="ignore"):
                self._smooth = smoothed(np, squares, wide, base, multiple)
        block, column, noise, rms = (np.asarray(part, self._float) for part in self._smooth)
        # The scales and offsets of the deviations themselves.
        common = np.asarray([_together(sums, self._wanted.size)[:2] for sums in self._sums] or [(0.0, 0.0)])
        scale, offset = map(float, _COMMON + 5 * self._scale * np.sqrt(np.mean(common**2, 0)))
        spread = self._scale * float(noise)
        least = math.hypot(base, multiple * float(noise)) if self._is_gradient else 4 * self._wide
        return Allowance(
            rtol=unit,
            atol=least * float(rms),
            share=_SHARE,
            block=block,
            column=column,
            far=_FAR,
            together=(scale, offset, _SPREAD * spread + base + unit),
            noise=spread if is_known else None,
            is_calibrated=True,
        )

    @property
    def _float(self) -> Any:
        """The type of the squares and of the allowances: float32 at least."""
        return np.finfo(np.result_type(self._wanted.dtype, np.float32)).dtype

    @property
    def _wide(self) -> float:
        """The unit in the last place of the type of sums: float32 at least."""
        bits = _mantissa(self._wanted.dtype)
        return 2.0 ** -max(23, min(bits, bits if self._coarsest is None else self._coarsest))

    def _terms(self, *, is_known: bool) -> tuple[float, float]:
        """Returns `base` and `multiple` for `smoothed`; `is_known` if deviations were measured."""
        least = 0.0 if is_known else _UNITS * 2.0 ** -(self._coarsest or 23)
        # The noise of a leaf smaller than a block is less certain.
        return max(_ACCUMULATED * self._wide, least), _MULTIPLE * self._scale * (1 + 2 / min(BLOCK, self._wanted.size))


@jax.jit
def no_squares(wanted: jax.Array) -> jax.Array:
    """Returns the squares before the first run, which are zeros, on the device."""
    return jnp.zeros(wanted.shape, jnp.float32)


@jax.jit
def add_deviations(squares: jax.Array, moved: jax.Array, wanted: jax.Array, terms: jax.Array) -> tuple[jax.Array, ...]:
    """Adds the squares of one run's deviations, on the device.

    Args:
        squares: the sums of earlier runs' squares.
        moved: the output of this run.
        wanted: the reference.
        terms: the number of runs; and the last two arguments of `smoothed`.

    Returns:
        All squares, the sums of `deviations`, and the result of `smoothed`.
    """
    wide = wanted.astype("float32")
    more, sums = deviations(jnp, moved.astype("float32"), wide, unit_of(jnp, wide))
    return squares + more, sums, *smoothed(jnp, (squares + more) / terms[0], wide, terms[1], terms[2])


def _mantissa(dtype: Any) -> int:
    """Returns the bits in the mantissa of a dtype of floats or complex numbers."""
    return int(_about(dtype).nmant)


def _about(dtype: Any) -> Any:
    return jnp.finfo(dtype)  # type: ignore[no-untyped-call]


# --- the precision of a program -------------------------------------------------------------------------------------

_DOTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_dot")
_FACTORS = {"cuda": 10, "gpu": 10, "rocm": 10, "tpu": 7}
"""Bits that a platform leaves in the mantissas of the float32 factors of dots by default: TF32 and bfloat16."""


def coarsest_mantissa(jaxpr: Any, platform: str | None) -> int:
    """Returns the bits in the mantissas of the coarsest type that a traced program rounds to.

    Args:
        jaxpr: the program.
        platform: the platform that it runs on.
    """
    least = 52
    for equation in jax_traces.equations(jaxpr):
        for variable in equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                least = min(least, _mantissa(dtype))
        if equation.primitive.name in _DOTS:
            precision = str(equation.params.get("precision")).upper()
            if "BF16" in precision:
                least = min(least, 7)
            elif "HIGHEST" not in precision and equation.invars[0].aval.dtype == jnp.float32:
                least = min(least, _FACTORS.get(platform or "", least))
    return least


# --- moved inputs ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Motion:
    """How far the inputs of one program are moved.

    Attributes:
        coarsest: the bits in the mantissas of the coarsest type that the program rounds to; None if unknown.
        least: inputs with fewer bits stay as they are.
        scale: the share of the deviations that rounding explains.
    """

    coarsest: int | None
    least: int
    scale: float

    @classmethod
    def of(cls, inputs: Any, coarsest: int | None) -> Motion:
        """Returns the motion for a pytree of inputs.

        Numbers of 8 bits are data that a kernel reads; it rounds to their type only if the program says so. If all
        inputs have 8 bits, moving them by their own units overstates rounding, in proportion to the units.
        """
        finest = max((_mantissa(leaf.dtype) for leaf in jax.tree.leaves(inputs) if is_movable(leaf)), default=0)
        wanted = min(_NARROWEST, finest if coarsest is None else coarsest)
        return cls(coarsest, min(wanted, finest), 2.0 ** min(0, finest - wanted))

    def takes(self, leaf: Any) -> bool:
        """Returns whether a leaf of the inputs is moved."""
        return is_movable(leaf) and _mantissa(leaf.dtype) >= self.least

    def units(self, leaf: Any) -> Any:
        """Returns the binary logarithm of the unit for a leaf, in units in the last place of its dtype."""
        return np.int32(0 if self.coarsest is None else max(0, _mantissa(leaf.dtype) - self.coarsest))


def is_movable(leaf: Any) -> bool:
    """Returns whether a leaf is an array of floats with signs and of whole bytes."""
    if not (isinstance(leaf, (np.ndarray, jax.Array)) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size):
        return False
    about = _about(leaf.dtype)
    return about.bits in (8, 16, 32, 64) and float(about.min) < 0


def moved(xp: Any, array: Any, seed: Any, log_units: Any) -> Any:
    """Returns an array whose elements were moved at random by up to half a unit.

    If the unit is the dtype's own, the nearest number would be the old one. So every fourth element goes to a neighbour
    instead, like with random rounding. Zeros, infinities, NaN and signs stay.

    Args:
        xp: `numpy` or `jax.numpy`.
        array: the array, of floats.
        seed: a number for each run.
        log_units: the unit for this array from `Motion.units`.
    """
    about = _about(array.dtype)
    unsigned, signed = xp.dtype(f"uint{about.bits}"), xp.int64 if about.bits == 64 else xp.int32
    view = array.view(unsigned) if xp is np else jax.lax.bitcast_convert_type(array, unsigned)
    sign = xp.asarray(1 << (about.bits - 1), unsigned)
    size = (view & ~sign).astype(signed)
    top = int(np.asarray(about.max, array.dtype).view(f"uint{about.bits}"))
    drawn = _hashed(xp, view.size, seed).reshape(view.shape)
    coarse = xp.minimum(log_units, 31)
    # Half a unit either way: a number of `coarse` random bits around zero.
    half = signed(1) << xp.maximum(coarse - 1, 0).astype(signed)
    step = (drawn >> xp.asarray(32 - xp.maximum(coarse, 1), xp.uint32)).astype(signed) - half
    step = step * (signed(1) << (log_units - coarse).astype(signed))
    eighth = drawn >> xp.asarray(29, xp.uint32)
    step = xp.where(log_units > 0, step, (eighth == 0).astype(signed) - (eighth == 7).astype(signed))
    to = size + step
    found = xp.where((size > 0) & (to > 0) & (size <= top) & (to <= top), to, size).astype(unsigned) | (view & sign)
    return found.view(array.dtype) if xp is np else jax.lax.bitcast_convert_type(found, array.dtype)


def nudged(array: HostArray) -> HostArray:
    """Returns an array with each finite element moved to the next one towards zero; faster on the host than `moved`."""
    unsigned = np.dtype(f"uint{8 * array.dtype.itemsize}").type
    top, view = (np.asarray(each, array.dtype).view(unsigned) for each in (_about(array.dtype).max, array))
    size = view & (unsigned(~unsigned(0)) >> unsigned(1))  # without the sign
    moved: HostArray = view - (size - unsigned(1) < top)  # a zero becomes the largest number
    return moved.view(array.dtype)


def _hashed(xp: Any, size: int, seed: Any) -> Any:
    """Returns numbers of 32 bits that look random: the finaliser of MurmurHash3 of their places."""
    found = xp.arange(size, dtype=xp.uint32) * xp.asarray(2654435761, xp.uint32) + xp.asarray(seed, xp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = (found ^ (found >> shift)) * xp.asarray(factor, xp.uint32)
    return found ^ (found >> 16)


@jax.jit
def move(array: jax.Array, seed: Any, log_units: Any) -> jax.Array:
    """Runs `moved` on the device."""
    found: jax.Array = moved(jnp, array, seed, log_units)
    return found
