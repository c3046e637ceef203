"""Compares a config's output, or its gradients, with the expected pytree and describes the first difference."""

from __future__ import annotations

import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.measure.elements import Mismatches, compare_numbers, describe_mismatches, has_dtype
from quarantune.values.tolerance import Tolerance

_Array: TypeAlias = "np.ndarray[Any, Any]"

_MAX_STRUCTURE_CHARS = 200

_WIDTHS = (jnp.floating, jnp.complexfloating)
"""The kinds of numbers that are compared regardless of their widths."""
_NUMBER_TYPES = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


Compare: TypeAlias = "Callable[[Any, Any, Tolerance], Mismatches | None]"
"""Compares an array with the expected one; None where it cannot."""


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
    """Returns how a config's output is wrong.

    Args:
        output: the config's output.
        expected: the reference's output; None where only a `check_fn` judges.
        args: the call's positional arguments, for `check_fn`.
        kwargs: the call's keyword arguments, for `check_fn`.
        tolerance: how far `output` may be from `expected`; ignored where there is a `check_fn`.
        check_fn: `(output, expected, *args, **kwargs) -> bool or None`; if given, it alone decides.
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
        if isinstance(verdict, bool) or (has_dtype(verdict, np.bool_) and verdict.shape == ()):
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
    `|output - expected| <= atol + rtol * |expected|`; NaN agrees with NaN, an infinity only with itself. Booleans, PRNG
    keys and leaves that are not numbers must be equal.

    Args:
        output: the output.
        expected: the expected output.
        tolerance: how far apart elements may be.
        what: the name of `output` in the message.
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
    """Returns why two pytrees cannot agree, by structures, shapes and kinds of dtypes alone; None where they may."""
    pairs = _pairs(output, expected, "output")
    if isinstance(pairs, str):
        return pairs
    for where, output_leaf, expected_leaf in pairs:
        if not _is_comparable(output_leaf, expected_leaf) and not _is_number_of(output_leaf, expected_leaf):
            return f"{where} is {_describe(output_leaf)}, expected {_describe(expected_leaf)}"
    return None


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
    """Returns two structures as text; of long ones only the part around their first difference."""
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
        return describe_mismatches(found, output.shape, tolerance, where, is_exact=False)
    got, wanted = _on_host(output), _on_host(expected)
    is_python_number = type(output) in _NUMBER_TYPES or type(expected) in _NUMBER_TYPES
    if is_python_number:
        got, wanted = _without_dtype(got), _without_dtype(wanted)
        comparable = got.shape == wanted.shape and type(got.item()) is type(wanted.item())
    else:
        comparable = _is_comparable(output, expected)
    if not comparable:
        return f"{where} is {_describe(output)}, expected {_describe(expected)}"
    if is_python_number or has_dtype(got, np.number, np.bool_):
        is_exact = got.dtype == np.bool_ or _is_key(output)
        return compare_numbers(got, wanted, tolerance, where, is_exact=is_exact)
    if np.array_equal(got, wanted):
        return None
    return f"{where} is {reprlib.repr(output)}, expected {reprlib.repr(expected)}"


def _is_comparable(output: Any, expected: Any) -> bool:
    """Returns whether two leaves other than Python numbers have the same shape and kind; floats may differ in width."""
    if _describe(output) == _describe(expected):
        return True
    is_same_kind = any(has_dtype(output, kind) and has_dtype(expected, kind) for kind in _WIDTHS)
    return is_same_kind and output.shape == expected.shape


def _is_number_of(output: Any, expected: Any) -> bool:
    """Returns whether one of two leaves is a Python number, and the other a single number of its kind."""
    return any(
        type(mine) in _NUMBER_TYPES and getattr(its, "shape", None) == () and has_dtype(its, _NUMBER_TYPES[type(mine)])
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
    """Returns an array of a single number in the form of a Python number's, integers of any size included."""
    for number_type, dtype in _NUMBER_TYPES.items():
        if array.shape == () and has_dtype(array, dtype):
            return np.asarray(number_type(array), object if number_type is int else None)
    return array


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and has_dtype(leaf, jax.dtypes.prng_key)
