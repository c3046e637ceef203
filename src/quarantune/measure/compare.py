"""Compares a config's output, or its gradients, with the expected pytree and describes the first difference."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from quarantune.measure import rounding
from quarantune.measure.rounding import (
    NEVER,
    Allowance,
    HostArray,
    RoundingNoise,
    allowed,
    chunks,
    deviations,
    wide_type,
)
from quarantune.values.trial import ArrayKind

_MAX_STRUCTURE_CHARS = 200

_WIDTHS = (jnp.floating, jnp.complexfloating)
"""The kinds of numbers whose widths may differ."""
_NUMBER_TYPES = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


CompareArrays: TypeAlias = "Callable[[Any, Any, Allowance], Mismatches | None]"
"""Compares an array with the expected one; returns None if it cannot."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flattened pytree. It can be pickled if its leaves can.

    Attributes:
        structure: its containers and their static parts, described as data.
        shown: the structure as text, for messages.
        leaves: its leaves, each after its place; None counts as a leaf.
    """

    structure: Any
    shown: str
    leaves: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, tree: Any, describe: Callable[[Any], Any] = repr) -> Flat:
        """Flattens a pytree.

        Args:
            tree: the pytree.
            describe: returns a description of a static part of a container, for example of the keys of a dict. Static
                parts with equal descriptions are equal.
        """
        found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
        leaves = tuple((jax.tree_util.keystr(path), leaf) for path, leaf in found)
        shown = str(structure).removeprefix("PyTreeDef(").removesuffix(")")
        return cls(described_structure(structure, describe), shown, leaves)

    def mapped(self, change: Callable[[Any], Any]) -> Flat:
        """Returns a copy with each leaf changed."""
        return dataclasses.replace(self, leaves=tuple((path, change(leaf)) for path, leaf in self.leaves))

    @property
    def values(self) -> list[Any]:
        """The leaves without their places."""
        return [leaf for _, leaf in self.leaves]


def described_structure(structure: Any, describe: Callable[[Any], Any]) -> Any:
    """Returns the containers of a pytree as data; `describe` describes their static parts."""
    node = structure.node_data()
    if node is None:
        return "*"
    kind, static = node
    children = [described_structure(child, describe) for child in structure.children()]
    return [f"{kind.__module__}.{kind.__qualname__}", None if static is None else describe(static), children]


class NoArray(str):
    """The kind of a plain callable's leaf that is not an array: times, names and handles may differ in value."""


def judge_by(
    check_fn: Callable[..., Any], output: Any, expected: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Returns how a config's output fails the author's own check.

    Args:
        check_fn: `(output, expected, *args, **kwargs) -> bool or None`.
        output: the config's output.
        expected: the reference's output; None without a reference.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.

    Returns:
        One sentence, or None if nothing is wrong.
    """
    try:
        verdict = check_fn(output, expected, *args, **kwargs)
        if verdict is None:
            return None
        if isinstance(verdict, bool) or (has_dtype(verdict, np.bool_) and verdict.shape == ()):
            return None if verdict else "check_fn returned False"
    except Exception as error:
        return f"check_fn raised {''.join(traceback.format_exception_only(error)).strip()}"
    return (
        f"check_fn returned {reprlib.repr(verdict)}: it must return True or None if the output is right, "
        f"and False if it is wrong"
    )


def compare(
    output: Flat,
    expected: Flat,
    allowances: Sequence[Allowance],
    *,
    shortcut: CompareArrays | None = None,
    same_dtypes: bool = False,
    truths: Sequence[Any] = (),
) -> str | None:
    """Compares two pytrees, on the host and in bounded memory.

    Structures, shapes and dtypes must be the same, but floats and complex numbers may be wider or narrower than
    expected. A Python number has no dtype; only its type must fit. NaN agrees with NaN, an infinity only with itself.
    Booleans, PRNG keys and leaves that are not numbers must be equal.

    Args:
        output: the output.
        expected: the expected output.
        allowances: how far apart the elements of each leaf may be.
        shortcut: tried on each pair of arrays before they are brought to the host.
        same_dtypes: whether floats must be as wide as expected.
        truths: the leaves without rounding. A leaf that is as near to its truth as the expected one is right. Empty if
            unknown.

    Returns:
        One sentence about the first leaf that disagrees, or None if all agree.
    """
    pairs = _pairs(output, expected)
    if isinstance(pairs, str):
        return pairs
    truths = truths or [None] * len(pairs)
    for (where, output_leaf, expected_leaf), allowance, truth in zip(pairs, allowances, truths, strict=True):
        if (differ := _kinds_differ(where, output_leaf, expected_leaf, same_dtypes=same_dtypes)) is not None:
            return differ
        difference = _compare_leaf(output_leaf, expected_leaf, allowance, where, shortcut)
        if difference and not is_as_near(output_leaf, expected_leaf, truth, allowance):
            return difference
    return None


def compare_shapes(output: Flat, expected: Flat) -> str | None:
    """Returns why two pytrees cannot agree, by structures, shapes and kinds of dtypes alone; None if they may."""
    pairs = _pairs(output, expected)
    if isinstance(pairs, str):
        return pairs
    return next((differ for pair in pairs if (differ := _kinds_differ(*pair)) is not None), None)


# --- structures and leaves ----------------------------------------------------------------------------------


def _pairs(output: Flat, expected: Flat) -> list[tuple[str, Any, Any]] | str:
    """Returns the leaves of two pytrees side by side, each pair with its place; or how their structures differ."""
    if output.structure != expected.structure:
        return f"the structure of output differs: {_show_structures(output.shown, expected.shown)}"
    pairs = zip(output.leaves, expected.leaves, strict=True)
    return [(f"output{path}", mine, its) for (path, mine), (_, its) in pairs]


def _show_structures(*texts: str) -> str:
    """Returns two structures as text; of long ones only the part around their first difference."""
    if max(map(len, texts)) > _MAX_STRUCTURE_CHARS:
        pairs = enumerate(zip(*texts, strict=False))
        differs_at = next((position for position, (one, other) in pairs if one != other), 0)
        start = max(0, differs_at - _MAX_STRUCTURE_CHARS // 2)
        texts = tuple(f"...{text[start : start + _MAX_STRUCTURE_CHARS]}..." for text in texts)
    return f"got {texts[0]}, expected {texts[1]}"


def _compare_leaf(
    output: Any, expected: Any, allowance: Allowance, where: str, shortcut: CompareArrays | None
) -> str | None:
    found = shortcut(output, expected, allowance) if shortcut else None
    if found is not None:
        return _describe_mismatches(found, output.shape, allowance, where, is_exact=False)
    got, wanted = on_host(output), on_host(expected)
    is_python_number = type(output) in _NUMBER_TYPES or type(expected) in _NUMBER_TYPES
    if is_python_number:
        got, wanted = _without_dtype(got), _without_dtype(wanted)
    if is_python_number or has_dtype(got, np.number, np.bool_):
        is_exact = got.dtype == np.bool_ or _is_key(output)
        return compare_numbers(got, wanted, allowance, where, is_exact=is_exact)
    if np.array_equal(got, wanted):
        return None
    return f"{where} is {reprlib.repr(output)}, expected {reprlib.repr(expected)}"


def _kinds_differ(where: str, output: Any, expected: Any, *, same_dtypes: bool = False) -> str | None:
    """Returns how two leaves differ in shape or kind, in one sentence; None if they may agree."""
    mine, its = _describe(output), _describe(expected)
    may_agree = mine == its or (not same_dtypes and _are_alike(output, expected))
    return None if may_agree else f"{where} is {mine}, expected {its}"


def _are_alike(output: Any, expected: Any) -> bool:
    """Returns whether two leaves have the same shape and kind. Widths may differ, and a number may be Python's."""
    if any(has_dtype(output, kind) and has_dtype(expected, kind) for kind in _WIDTHS):
        return bool(output.shape == expected.shape)
    return any(
        type(mine) in _NUMBER_TYPES and getattr(its, "shape", None) == () and has_dtype(its, _NUMBER_TYPES[type(mine)])
        for mine, its in ((output, expected), (expected, output))
    )


def _describe(leaf: Any) -> str:
    """Returns a leaf's dtype and shape, or its type."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, NoArray):
        return str(leaf)
    return "None" if leaf is None else f"a Python {type(leaf).__name__}"


def noise_of(leaf: Any, **about: Any) -> RoundingNoise | None:
    """Returns a `RoundingNoise` of a leaf, with its keyword arguments; None for a leaf that must be equal."""
    leaf = np.asarray(leaf) if type(leaf) in (float, complex) else leaf
    return RoundingNoise(leaf, **about) if has_dtype(leaf, np.inexact) and leaf.size else None


def on_host(leaf: Any) -> HostArray:
    """Returns a leaf as a numpy array, and PRNG keys as their data."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _without_dtype(array: HostArray) -> HostArray:
    """Returns an array of a single number as the array of a Python number; integers may have any size."""
    for number_type, dtype in _NUMBER_TYPES.items():
        if array.shape == () and has_dtype(array, dtype):
            return np.asarray(number_type(array), object if number_type is int else None)
    return array


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and has_dtype(leaf, jax.dtypes.prng_key)


# --- the elements of two arrays, in bounded memory ---


@dataclasses.dataclass(frozen=True)
class Mismatches:
    """How two arrays differ.

    Attributes:
        count: how many elements differ by more than their allowances.
        worst: the flat index of the worst element. It, `got` and `wanted` matter only if the arrays disagree.
        got: the value of that element.
        wanted: its expected value.
        far: how many elements exceed their allowances so far that one is too many; see `Allowance.far`.
        together: how all elements together differ by more than rounding; None if they do not.
        allowed: the allowance of the worst element; None unless it is a float or a complex number.
    """

    count: int
    worst: int = 0
    got: Any = None
    wanted: Any = None
    far: int = 0
    together: str | None = None
    allowed: float | None = None

    def disagree(self, size: int, allowance: Allowance) -> bool:
        """Returns whether an array of this size has too many differences, or too large ones."""
        return bool(self.far or self.together or (self.count and self.count / size > allowance.share))


def has_dtype(leaf: Any, *kinds: Any) -> bool:
    """Returns whether a leaf has a dtype of one of these kinds."""
    return hasattr(leaf, "dtype") and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def compare_numbers(
    got: HostArray, wanted: HostArray, allowance: Allowance, where: str, *, is_exact: bool
) -> str | None:
    """Compares two arrays of one shape.

    Args:
        got: the array that a config returned.
        wanted: the expected array.
        allowance: how far apart elements may be.
        where: the array's place in the output, for the message.
        is_exact: whether elements must be equal.

    Returns:
        One sentence, or None if they agree.
    """
    if _are_same_bytes(got, wanted):
        return None
    if allowance.is_calibrated and not has_dtype(got, np.inexact):
        is_exact, allowance = True, dataclasses.replace(allowance, share=0.0)
    found = _find_mismatches(got, wanted, None if is_exact else allowance.for_dtype(got.dtype))
    return _describe_mismatches(found, got.shape, allowance, where, is_exact=is_exact)


def _are_same_bytes(got: HostArray, wanted: HostArray) -> bool:
    """Returns whether two arrays are equal bit by bit; several times faster than a search for differences."""
    if got.dtype != wanted.dtype or got.dtype.hasobject or not (got.flags.c_contiguous and wanted.flags.c_contiguous):
        return False
    mine, its = (array.reshape(-1).view(np.uint8) for array in (got, wanted))
    return all(np.array_equal(ours, theirs) for _, ours, theirs in chunks(mine, its))


def _describe_mismatches(
    found: Mismatches, shape: tuple[int, ...], allowance: Allowance, where: str, *, is_exact: bool
) -> str | None:
    """Returns how two arrays of this shape differ, in one sentence; None if they agree."""
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
        rival: another array. Differences from the truth as large as its own are allowed.
        truth: the exact values of both.
        allowance: the differences that rounding explains.
    """
    if not all(has_dtype(array, np.inexact) and array.shape == got.shape for array in (got, rival, truth)):
        return False
    mine, its, wanted = map(np.asarray, (got, rival, truth))
    return not _find_mismatches(mine, wanted, allowance.for_dtype(mine.dtype), its).disagree(mine.size, allowance)


def _find_mismatches(got: HostArray, wanted: HostArray, allowance: Allowance | None, *rival: HostArray) -> Mismatches:
    """Returns how arrays differ.

    Args:
        got: an array.
        wanted: the expected array.
        allowance: how far apart elements may be; None if they must be equal.
        *rival: a third array. Differences from the expected array as large as its own are allowed.
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
    mine, its = (array.flat[worst] if array.size else None for array in (got, wanted))
    return Mismatches(count, worst, mine, its, far, together, worst_allowed)


def excess_of(xp: Any, got: Any, wanted: Any, limit: Any) -> Any:
    """Returns by how much each difference exceeds its limit. An infinity or NaN agrees only with itself."""
    excess = xp.abs(got - wanted) - limit
    same = (got == wanted) | (xp.isnan(got) & xp.isnan(wanted))
    finite = xp.isfinite(got) & xp.isfinite(wanted)
    return xp.where(same, 0.0 if xp is np else xp.zeros_like(excess), xp.where(finite, excess, xp.inf))


def is_far(xp: Any, excess: Any, limit: Any, far: Any) -> Any:
    """Returns which elements differ by more than `far` times their limits, or in an infinity or NaN."""
    return ((excess > (far - 1) * limit) | xp.isinf(excess)) & (far < NEVER)


def _excess_of_integers(got: HostArray, wanted: HostArray, tolerance: Allowance) -> HostArray:
    if got.dtype == object:  # Python integers, which may be larger than any float
        atol, rtol, most = map(Fraction, (float(tolerance.atol), float(tolerance.rtol), sys.float_info.max))
        pairs = zip(got, wanted, strict=True)
        return np.array([float(max(-most, min(most, abs(mine - its) - atol - rtol * abs(its)))) for mine, its in pairs])
    excess: HostArray = _distances(got, wanted) - (tolerance.atol + tolerance.rtol * np.abs(wanted.astype(np.float64)))
    return excess


def _distances(got: HostArray, wanted: HostArray) -> HostArray:
    """Returns the absolute differences of integers; they may exceed the range of the integers' own type."""
    wide = np.uint64 if has_dtype(got, np.unsignedinteger) else np.int64
    got, wanted = got.astype(wide), wanted.astype(wide)
    distances: HostArray = np.maximum(got, wanted).astype(np.uint64) - np.minimum(got, wanted).astype(np.uint64)
    return distances.astype(np.float64)


# --- on a device: expected arrays are carried there once; counts and the worst element come back ---

_MOST_ELEMENTS = 2**31 - 1
"""The largest size of an array that a device compares: its counts have 32 bits."""
_RUNS_NOTHING: dict[str, bool | str] = {"xla_gpu_autotune_level": "0"}
"""Options that keep XLA from trying kernels while it compiles: the clock may be timing other kernels."""
_NARROW = frozenset({"float32", "bfloat16", "float16"})


class Comparer:
    """Compares one worker's outputs with the expected ones on their device.

    It compares floats in float32 and leaves wider ones to the host. An element within a rounding error of its allowance
    may be judged differently than on the host. Other dtypes must be equal.

    Attributes:
        programs: the compiled programs, by name, device numbers, shapes and dtypes.
    """

    def __init__(self) -> None:
        """Sets up a comparer with nothing on the device."""
        self._there: dict[int, tuple[Any, jax.Array]] = {}
        self.programs: dict[Any, Any] = {}

    def __call__(self, got: Any, wanted: Any, allowance: Allowance) -> Mismatches | None:
        """Compares two arrays of one shape.

        Args:
            got: the output.
            wanted: the expected output, the same object each time; it is kept.
            allowance: how far apart elements may be, the same object each time.

        Returns:
            How they differ, or None if the host must compare them.
        """
        if not self.takes(got) or not isinstance(wanted, np.ndarray):
            return None
        try:
            return self._compare(got, self._carried(wanted, got.sharding), allowance)
        except (jax.errors.JaxRuntimeError, ValueError):
            # Most likely out of memory; JAX 0.10 contradicts itself about the layouts of floats of 4 bits.
            return None

    @staticmethod
    def takes(array: Any) -> bool:
        """Returns whether an array can be compared on its device."""
        return (
            isinstance(array, jax.Array)
            and 0 < array.size <= _MOST_ELEMENTS
            and len(array.sharding.device_set) == 1
            and not jnp.issubdtype(array.dtype, jax.dtypes.extended)
        )

    @classmethod
    def is_narrow(cls, leaf: Any) -> bool:
        """Returns whether a leaf's noise can be measured on its device."""
        return cls.takes(leaf) and leaf.dtype.name in _NARROW

    def prepare(self, expected: Sequence[Any], allowances: Sequence[Allowance]) -> None:
        """Carries the expected leaves to the device, and compiles their comparison."""
        for wanted, allowance in zip(expected, allowances, strict=True):
            if isinstance(wanted, np.ndarray) and wanted.size:
                self(self._carried(wanted), wanted, allowance)

    def expect(self, outputs: Sequence[ArrayKind], *others: Any) -> None:
        """Compiles the comparison of arrays with others like them: 0.2 s for each on a GPU.

        Args:
            outputs: the arrays.
            *others: further functions of one array to compile.
        """
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        for output in outputs:
            size = math.prod(output.shape)
            if not 0 < size <= _MOST_ELEMENTS or output.dtype not in _NARROW:
                continue
            like = jax.ShapeDtypeStruct(output.shape, output.dtype, sharding=sharding)
            squares = jax.ShapeDtypeStruct(output.shape, "float32", sharding=sharding)
            three = jax.ShapeDtypeStruct((3,), "float32")
            noise = (rounding.add_deviations, squares, like, like, three)
            _, _, block, column, *_ = jax.eval_shape(*noise)
            programs = [noise, (rounding.no_squares, like), (_judge, like, like, block, column, three)]
            programs += [(each, like) for each in others]
            with ThreadPoolExecutor(3) as pool:  # XLA compiles without holding the interpreter's lock
                list(pool.map(lambda work: self._compiled(*work), programs))

    def keep(self, output: Sequence[Any], on_host: Sequence[Any]) -> None:
        """Keeps an output on the device, to compare others with it.

        Args:
            output: its leaves.
            on_host: the same as numpy arrays. If one is later the expected array, its copy on the device is compared.
        """
        for there, wanted in zip(output, on_host, strict=True):
            if isinstance(there, jax.Array) and isinstance(wanted, np.ndarray):
                self._there[id(wanted)] = (wanted, there)

    def run(self, program: Any, *args: Any) -> Any:
        """Runs one of the programs that `expect` compiles, or compiles it now."""
        return self._compiled(program, *args)(*args)

    def _compiled(self, program: Any, *args: Any) -> Any:
        devices = tuple(sorted(device.id for device in args[0].sharding.device_set))
        kind = (program.__name__, devices, *((np.shape(arg), str(jnp.result_type(arg))) for arg in args))
        if kind not in self.programs:
            self.programs[kind] = program.lower(*args).compile(_RUNS_NOTHING)
        return self.programs[kind]

    def _carried(self, wanted: Any, sharding: Any = None) -> jax.Array:
        if id(wanted) not in self._there:
            self._there[id(wanted)] = (wanted, jax.device_put(wanted, sharding))
        return self._there[id(wanted)][1]

    def _compare(self, got: jax.Array, wanted: jax.Array, allowance: Allowance) -> Mismatches | None:
        if not all(jnp.issubdtype(array.dtype, jnp.floating) for array in (got, wanted)):
            return Mismatches(0) if got.dtype == wanted.dtype and bool(_are_equal(got, wanted)) else None
        if max(got.dtype.itemsize, wanted.dtype.itemsize) > 4:
            return None
        block, column = (self._carried(part, got.sharding) for part in (allowance.block, allowance.column))
        limits = np.asarray(allowance.for_dtype(got.dtype).limits, np.float32)
        there = np.asarray(self.run(_judge, got, wanted, block, column, limits))
        (count, far, worst), floats = map(int, there[:3]), there[3:].view(np.float32)
        found = Mismatches(count, far=far, together=allowance.reason(floats[:4], got.size))
        if not found.disagree(got.size, allowance):
            return found
        mine, its = floats[4].astype(got.dtype), floats[5].astype(wanted.dtype)
        return dataclasses.replace(found, worst=worst, got=mine, wanted=its, allowed=float(floats[6]))


@jax.jit
def _are_equal(got: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.all(got == wanted)


@jax.jit
def _judge(got: jax.Array, wanted: jax.Array, block: jax.Array, column: jax.Array, limits: jax.Array) -> jax.Array:
    """Compares two arrays.

    Returns:
        One array, for a single transfer to the host: the number of elements that differ by more than their allowances,
        the number that differ by far, and the place of the worst. The bits of floats follow: the sums of `deviations`,
        the worst element, the expected one, and its allowance.
    """
    mine, its = (array.reshape(-1).astype("float32") for array in (got, wanted))
    columns = got.shape[-1] if got.ndim else 1
    limit = rounding.allowed(jnp, block, column, limits, its, start=0, columns=columns)
    excess = excess_of(jnp, mine, its, limit)
    worst = jnp.argmax(excess)
    counts = jnp.sum(excess > 0), jnp.sum(is_far(jnp, excess, limit, limits[2])), worst
    sums = rounding.deviations(jnp, mine, its, rounding.unit_of(jnp, its))[1]
    floats = jnp.concatenate([sums, jnp.stack([mine[worst], its[worst], limit[worst]])])
    return jnp.concatenate(
        [jnp.stack(counts).astype("int32"), jax.lax.bitcast_convert_type(floats.astype("float32"), "int32")]
    )
