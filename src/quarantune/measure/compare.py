"""Says whether a config's output, or its gradient, agrees with the expected one, and if not, where."""

from __future__ import annotations

import dataclasses
import math
import numbers
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

_Array: TypeAlias = "np.ndarray[Any, Any]"

_CHUNK_ELEMENTS = 2**18
"""Elements compared at a time: the widest, complex long doubles, then need some 40 MB of temporaries."""
_WEIGHT_SEED = 20_011
_WEIGHT_TILE_ELEMENTS = 1_000_003
"""Weights are drawn once for a tile and repeated; a prime, so that it fits no block of a kernel."""
_MAX_STRUCTURE_CHARS = 200

_WIDTHS = (jnp.floating, jnp.complexfloating)
"""The kinds of numbers that are compared whatever their widths."""
_NUMBER_TYPES = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far an output may be from the expected one.

    Attributes:
        rtol: allowed difference of an element, relative to the expected element.
        atol: allowed difference of an element, on top of that.
        max_mismatched_ratio: the share of a leaf's elements that may differ by more than that.
    """

    rtol: float = 1e-2
    atol: float = 1e-2
    max_mismatched_ratio: float = 0.01

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if not _is_real(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} is not valid: give a finite number of at least 0")
        ratio = self.max_mismatched_ratio
        if not _is_real(ratio) or not 0 <= ratio <= 1:
            raise ValueError(f"max_mismatched_ratio={ratio!r} is not valid: give a number from 0 to 1")


@dataclasses.dataclass(frozen=True)
class Mismatches:
    """How two arrays differ.

    Attributes:
        count: how many elements are further apart than they may be.
        worst: the position of the worst among all elements in a row; it and the rest count only where too many differ.
        got: what is there.
        wanted: what is expected there.
    """

    count: int
    worst: int = 0
    got: Any = None
    wanted: Any = None


Compare: TypeAlias = "Callable[[Any, Any, Tolerance], Mismatches | None]"
"""Compares an array with what is expected; None where it cannot."""


def judge(
    output: Any,
    expected: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    tolerance: Tolerance,
    check_fn: Callable[..., Any] | None,
    shortcut: Compare | None = None,
) -> str | None:
    """Says what is wrong with a config's output.

    Args:
        output: what the config returned.
        expected: what the reference returned; None where there is none but a `check_fn`.
        args: the call's positional arguments, for `check_fn`.
        kwargs: the call's keyword arguments, for `check_fn`.
        tolerance: how far from `expected` is near enough; not looked at where there is a `check_fn`.
        check_fn: `(output, expected, *args, **kwargs) -> bool or None`; its word is final.
        shortcut: as for `compare`.

    Returns:
        One sentence, or None where nothing is wrong.
    """
    if check_fn is None:
        if expected is None and output is not None:
            return "ref_fn returned None, and the config did not: does ref_fn lack a return?"
        return compare(output, expected, tolerance, shortcut=shortcut)
    try:
        verdict = check_fn(output, expected, *args, **kwargs)
        if verdict is None:
            return None
        if isinstance(verdict, bool) or (_has_dtype(verdict, np.bool_) and verdict.shape == ()):
            return None if verdict else "check_fn returned False"
    except Exception as error:
        return f"check_fn raised {''.join(traceback.format_exception_only(error)).strip()}"
    return (
        f"check_fn returned {reprlib.repr(verdict)}: it must return True or None where the output is right, "
        f"and False where it is wrong"
    )


def compare(
    output: Any,
    expected: Any,
    tolerance: Tolerance,
    *,
    what: str = "output",
    shortcut: Compare | None = None,
    same_dtypes: bool = False,
) -> str | None:
    """Compares two pytrees, on the host and in bounded memory.

    Structures, shapes and dtypes must be the same, but floats may be wider or narrower than expected, and so may
    complex numbers; of a Python number, which has no dtype, only the type must fit. Elements agree where
    `|output - expected| <= atol + rtol * |expected|`; NaN agrees with NaN, an infinity with itself alone. Booleans,
    PRNG keys and what is no number must be equal.

    Args:
        output: what there is.
        expected: what there should be.
        tolerance: how far from it is near enough.
        what: what the message calls `output`.
        shortcut: tried on each pair of arrays before they are brought to the host.
        same_dtypes: whether floats must be as wide as expected.

    Returns:
        One sentence about the first leaf that disagrees, or None where all agree.
    """
    pairs = _pairs(output, expected, what)
    if isinstance(pairs, str):
        return pairs
    for where, output_leaf, expected_leaf in pairs:
        if same_dtypes and _describe(output_leaf) != _describe(expected_leaf):
            return f"{where} is {_describe(output_leaf)}, expected {_describe(expected_leaf)}"
        if difference := _compare_leaf(output_leaf, expected_leaf, tolerance, where, shortcut):
            return difference
    return None


def compare_shapes(output: Any, expected: Any) -> str | None:
    """Says whether two pytrees could agree by their structures, shapes and kinds of dtypes, as `compare` has it."""
    pairs = _pairs(output, expected, "output")
    if isinstance(pairs, str):
        return pairs
    for where, output_leaf, expected_leaf in pairs:
        if not _is_comparable(output_leaf, expected_leaf) and not _is_number_of(output_leaf, expected_leaf):
            return f"{where} is {_describe(output_leaf)}, expected {_describe(expected_leaf)}"
    return None


def gradients(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the gradients of `scalar_of(fn(*args, **kwargs))`.

    Args:
        fn: a jitted or plain function that JAX can differentiate. The arguments it donates are used up.
        args: its positional arguments, the static ones included.
        kwargs: its keyword arguments, the static ones included.
        static_argnums: positions of static arguments; negative ones count from the end.
        static_argnames: names of static keyword arguments.

    Returns:
        A gradient for each floating or complex array among the arguments that are not static, by its place,
        such as `args[0]['w']`. All else is held fixed.
    """
    dynamic_args = {
        index: arg
        for index, arg in enumerate(args)
        if index not in static_argnums and index - len(args) not in static_argnums
    }
    dynamic_kwargs = {name: arg for name, arg in kwargs.items() if name not in static_argnames}
    dynamic = {"args": dynamic_args, "kwargs": dynamic_kwargs}
    found, structure = jax.tree_util.tree_flatten_with_path(dynamic)
    free = {index: leaf for index, (_, leaf) in enumerate(found) if _has_dtype(leaf, np.inexact)}

    def loss(free: dict[int, Any]) -> jax.Array:
        leaves = [free.get(index, leaf) for index, (_, leaf) in enumerate(found)]
        filled = jax.tree_util.tree_unflatten(structure, leaves)
        all_args = [filled["args"].get(index, arg) for index, arg in enumerate(args)]
        return scalar_of(fn(*all_args, **{**kwargs, **filled["kwargs"]}))

    found_gradients = jax.grad(loss)(free) if free else {}
    return {_place(found[index][0]): gradient for index, gradient in found_gradients.items()}


def scalar_of(tree: Any) -> jax.Array:
    """Returns one number in which every element of the floating and complex arrays of a pytree has a say.

    It is the sum of the elements times fixed weights, real parts only. The weights have both signs and none
    is near zero. All ones would not do: a softmax always adds up to 1, whatever its gradient is. Those of
    complex arrays are complex, so that imaginary parts count too.

    Args:
        tree: the output of a function; its other leaves are left out.
    """
    total = jnp.zeros((), jnp.float32)
    for position, leaf in enumerate(jax.tree_util.tree_leaves(tree)):
        if _has_dtype(leaf, np.inexact):
            wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            weights = _weights(position, leaf.shape, is_complex=_has_dtype(leaf, np.complexfloating))
            total += jnp.sum(jnp.real(wide * weights.astype(wide.dtype)))
    return total


def _weights(position: int, shape: tuple[int, ...], *, is_complex: bool) -> _Array:
    generator = np.random.default_rng([_WEIGHT_SEED, position, *shape])

    def tile() -> _Array:
        elements = min(math.prod(shape), _WEIGHT_TILE_ELEMENTS)
        drawn: _Array = generator.random(elements, np.float32) - np.float32(0.5)
        return drawn + np.copysign(np.float32(0.5), drawn)

    return np.resize(tile() + 1j * tile() if is_complex else tile(), shape)


def _place(path: tuple[Any, ...]) -> str:
    return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"


# --- structures and leaves ----------------------------------------------------------------------------------


def _flatten(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found], structure


def _pairs(output: Any, expected: Any, what: str) -> list[tuple[str, Any, Any]] | str:
    """Returns the leaves of two pytrees side by side, each pair with its place; or how their structures differ."""
    output_leaves, output_structure = _flatten(output)
    expected_leaves, expected_structure = _flatten(expected)
    if output_structure != expected_structure:
        return f"the structure of {what} differs: {_show_structures(output_structure, expected_structure)}"
    pairs = zip(output_leaves, expected_leaves, strict=True)
    return [(what + path, mine, its) for (path, mine), (_, its) in pairs]


def _show_structures(output: Any, expected: Any) -> str:
    """Returns two structures as text; of long ones only what lies around their first difference."""
    texts = [str(structure).removeprefix("PyTreeDef(").removesuffix(")") for structure in (output, expected)]
    if max(map(len, texts)) > _MAX_STRUCTURE_CHARS:
        pairs = enumerate(zip(*texts, strict=False))
        differs_at = next((position for position, (one, other) in pairs if one != other), 0)
        start = max(0, differs_at - _MAX_STRUCTURE_CHARS // 2)
        texts = [f"...{text[start : start + _MAX_STRUCTURE_CHARS]}..." for text in texts]
    return f"got {texts[0]}, expected {texts[1]}"


def _compare_leaf(output: Any, expected: Any, tolerance: Tolerance, where: str, shortcut: Compare | None) -> str | None:
    found = shortcut(output, expected, tolerance) if shortcut and _is_comparable(output, expected) else None
    if found is not None:
        return _tell(found, output.shape, tolerance, where, is_exact=False)
    got, wanted = _on_host(output), _on_host(expected)
    is_python_number = type(output) in _NUMBER_TYPES or type(expected) in _NUMBER_TYPES
    if is_python_number:
        got, wanted = _without_dtype(got), _without_dtype(wanted)
        comparable = got.shape == wanted.shape and type(got.item()) is type(wanted.item())
    else:
        comparable = _is_comparable(output, expected)
    if not comparable:
        return f"{where} is {_describe(output)}, expected {_describe(expected)}"
    if is_python_number or _has_dtype(got, np.number, np.bool_):
        is_exact = got.dtype == np.bool_ or _is_key(output)
        return _compare_numbers(got, wanted, tolerance, where, is_exact=is_exact)
    if np.array_equal(got, wanted):
        return None
    return f"{where} is {reprlib.repr(output)}, expected {reprlib.repr(expected)}"


def _is_comparable(output: Any, expected: Any) -> bool:
    """Whether two leaves that are no Python numbers are of one shape and kind; floats may differ in their width."""
    if _describe(output) == _describe(expected):
        return True
    is_same_kind = any(_has_dtype(output, kind) and _has_dtype(expected, kind) for kind in _WIDTHS)
    return is_same_kind and output.shape == expected.shape


def _is_number_of(output: Any, expected: Any) -> bool:
    """Whether one of two leaves is a Python number, and the other a single number of its kind."""
    return any(
        type(mine) in _NUMBER_TYPES and getattr(its, "shape", None) == () and _has_dtype(its, _NUMBER_TYPES[type(mine)])
        for mine, its in ((output, expected), (expected, output))
    )


def _describe(leaf: Any) -> str:
    """Returns a leaf's dtype and shape, or its type."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return "None" if leaf is None else f"a Python {type(leaf).__name__}"


def _on_host(leaf: Any) -> _Array:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _without_dtype(array: _Array) -> _Array:
    """Returns a single number as a Python number would be held, whole numbers of any size included."""
    for number_type, dtype in _NUMBER_TYPES.items():
        if array.shape == () and _has_dtype(array, dtype):
            return np.asarray(number_type(array), object if number_type is int else None)
    return array


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and _has_dtype(leaf, jax.dtypes.prng_key)


def _has_dtype(leaf: Any, *kinds: Any) -> bool:
    return hasattr(leaf, "dtype") and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


# --- numbers ------------------------------------------------------------------------------------------------


def _compare_numbers(
    got: _Array,
    wanted: _Array,
    tolerance: Tolerance,
    where: str,
    *,
    is_exact: bool,
) -> str | None:
    if _are_same_bytes(got, wanted):
        return None
    count, worst = _find_mismatches(got, wanted, None if is_exact else tolerance)
    index = np.unravel_index(worst, got.shape) if got.size else ()
    found = Mismatches(count, worst, got[index], wanted[index]) if count else Mismatches(0)
    return _tell(found, got.shape, tolerance, where, is_exact=is_exact)


def _are_same_bytes(got: _Array, wanted: _Array) -> bool:
    """Whether two arrays are equal bit by bit, which is found out several times faster than how they differ."""
    if got.dtype != wanted.dtype or got.dtype.hasobject or not (got.flags.c_contiguous and wanted.flags.c_contiguous):
        return False
    mine, its = (array.reshape(-1).view(np.uint8) for array in (got, wanted))
    return all(
        np.array_equal(mine[start : start + _CHUNK_ELEMENTS], its[start : start + _CHUNK_ELEMENTS])
        for start in range(0, mine.size, _CHUNK_ELEMENTS)
    )


def _tell(found: Mismatches, shape: tuple[int, ...], tolerance: Tolerance, where: str, *, is_exact: bool) -> str | None:
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
    """Returns how many elements differ, and the position of the worst among all elements in a row."""
    got_row, wanted_row = _in_a_row(got), _in_a_row(wanted)
    count, worst, worst_excess = 0, 0, 0.0
    for start in range(0, got.size, _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        with np.errstate(all="ignore"):
            excess = _excess(got_row[chunk], wanted_row[chunk], tolerance)
        mismatched = excess > 0
        if mismatched.any():
            count += int(np.count_nonzero(mismatched))
            position = int(np.argmax(np.where(mismatched, excess, 0)))
            if excess[position] > worst_excess:
                worst, worst_excess = start + position, excess[position]
    return count, worst


def _in_a_row(array: _Array) -> Any:
    """Returns what gives any stretch of the elements without a copy of them all."""
    return array.reshape(-1) if array.flags.c_contiguous else array.flat


def _excess(got: _Array, wanted: _Array, tolerance: Tolerance | None) -> _Array:
    """Returns how far beyond its tolerance each element is: above 0 where it differs; None allows nothing."""
    if tolerance is None:
        return np.asarray(got != wanted, np.float64)
    if got.dtype == object:
        pairs = zip(got, wanted, strict=True)
        return np.array([_excess_of_whole(mine, its, tolerance) for mine, its in pairs], np.float64)
    if _has_dtype(got, np.integer):
        return _distances(got, wanted) - _allowances(wanted.astype(np.float64), tolerance)
    wide = np.result_type(np.result_type(got.dtype, np.float64), np.result_type(wanted.dtype, np.float64))
    got, wanted = got.astype(wide), wanted.astype(wide)
    excess: _Array = np.abs(got - wanted) - _allowances(wanted, tolerance)
    if (excess <= 0).all():
        return excess  # there was no NaN and no infinity: each would have left a NaN or an infinity here
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    finite = np.isfinite(got) & np.isfinite(wanted)
    return np.where(same, 0.0, np.where(finite, excess, np.inf))


def _excess_of_whole(got: int, wanted: int, tolerance: Tolerance) -> float:
    """Returns the same of Python's integers, which may be larger than any float."""
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
    """Returns the absolute differences of integers, which need not fit into their own type."""
    wide = np.uint64 if _has_dtype(got, np.unsignedinteger) else np.int64
    got, wanted = got.astype(wide), wanted.astype(wide)
    distances: _Array = np.maximum(got, wanted).astype(np.uint64) - np.minimum(got, wanted).astype(np.uint64)
    return distances.astype(np.float64)
