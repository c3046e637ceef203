"""Compares a config's output, or its gradients, with the expected pytree and describes the first difference."""

from __future__ import annotations

import dataclasses
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.measure.elements import Mismatches, compare_numbers, describe_mismatches, has_dtype, is_as_near
from quarantune.measure.rounding import Allowance, Noise, Run

_Array: TypeAlias = "np.ndarray[Any, Any]"

_MAX_STRUCTURE_CHARS = 200

_WIDTHS = (jnp.floating, jnp.complexfloating)
"""The kinds of numbers that are compared regardless of their widths."""
_NUMBER_TYPES = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


Compare: TypeAlias = "Callable[[Any, Any, Allowance], Mismatches | None]"
"""Compares an array with the expected one; None where it cannot."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """A pytree taken apart; it can be pickled wherever its leaves can.

    Attributes:
        structure: its containers and their static parts, described as data.
        shown: the same for messages.
        leaves: its leaves, None among them, behind their places.
    """

    structure: Any
    shown: str
    leaves: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, tree: Any, describe: Callable[[Any], Any] = repr) -> Flat:
        """Takes a pytree apart.

        Args:
            tree: the pytree.
            describe: returns a description of a static part of a container, such as the keys of a dict; static parts
                are equal where their descriptions are.
        """
        found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
        leaves = tuple((jax.tree_util.keystr(path), leaf) for path, leaf in found)
        shown = str(structure).removeprefix("PyTreeDef(").removesuffix(")")
        return cls(described_structure(structure, describe), shown, leaves)

    def mapped(self, change: Callable[[Any], Any]) -> Flat:
        """Returns the same with other leaves."""
        return dataclasses.replace(self, leaves=tuple((path, change(leaf)) for path, leaf in self.leaves))

    @property
    def values(self) -> list[Any]:
        """The leaves without their places."""
        return [leaf for _, leaf in self.leaves]


def described_structure(structure: Any, describe: Callable[[Any], Any]) -> Any:
    """Returns the containers of a pytree as data, with what `describe` returns for their static parts."""
    node = structure.node_data()
    if node is None:
        return "*"
    kind, static = node
    children = [described_structure(child, describe) for child in structure.children()]
    return [f"{kind.__module__}.{kind.__qualname__}", None if static is None else describe(static), children]


class NoArray(str):
    """A leaf that is no array, by its kind: of a plain callable, such leaves may differ (times, names, handles)."""


def judge_by(
    check_fn: Callable[..., Any], output: Any, expected: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Returns how a config's output is wrong by the author's own check.

    Args:
        check_fn: `(output, expected, *args, **kwargs) -> bool or None`.
        output: the config's output.
        expected: the reference's output; None where there is none.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.

    Returns:
        One sentence, or None where nothing is wrong.
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
        f"check_fn returned {reprlib.repr(verdict)}: it must return True or None where the output is right, "
        f"and False where it is wrong"
    )


def compare(
    output: Flat,
    expected: Flat,
    allowances: Sequence[Allowance],
    *,
    what: str = "output",
    shortcut: Compare | None = None,
    same_dtypes: bool = False,
    truths: Sequence[Any] = (),
) -> str | None:
    """Compares two pytrees, on the host and in bounded memory.

    Structures, shapes and dtypes must be the same, but floats may be wider or narrower than expected, and so may
    complex numbers; of a Python number, which has no dtype, only the type must fit. NaN agrees with NaN, an infinity
    only with itself. Booleans, PRNG keys and leaves that are not numbers must be equal.

    Args:
        output: the output.
        expected: the expected output.
        allowances: how far apart the elements of each leaf may be.
        what: the name of `output` in the message.
        shortcut: tried on each pair of arrays before they are brought to the host.
        same_dtypes: whether floats must be as wide as expected.
        truths: what the leaves would be but for rounding; one that is as near to it as the expected one is right. Empty
            where it is not known.

    Returns:
        One sentence about the first leaf that disagrees, or None where all agree.
    """
    pairs = _pairs(output, expected, what)
    if isinstance(pairs, str):
        return pairs
    truths = truths or [None] * len(pairs)
    for (where, output_leaf, expected_leaf), allowance, truth in zip(pairs, allowances, truths, strict=True):
        if same_dtypes and _describe(output_leaf) != _describe(expected_leaf):
            return f"{where} is {_describe(output_leaf)}, expected {_describe(expected_leaf)}"
        difference = _compare_leaf(output_leaf, expected_leaf, allowance, where, shortcut)
        if difference and not is_as_near(output_leaf, expected_leaf, truth, allowance):
            return difference
    return None


def compare_shapes(output: Flat, expected: Flat) -> str | None:
    """Returns why two pytrees cannot agree, by structures, shapes and kinds of dtypes alone; None where they may."""
    pairs = _pairs(output, expected, "output")
    if isinstance(pairs, str):
        return pairs
    for where, output_leaf, expected_leaf in pairs:
        if not _is_comparable(output_leaf, expected_leaf) and not _is_number_of(output_leaf, expected_leaf):
            return f"{where} is {_describe(output_leaf)}, expected {_describe(expected_leaf)}"
    return None


# --- structures and leaves ----------------------------------------------------------------------------------


def _pairs(output: Flat, expected: Flat, what: str) -> list[tuple[str, Any, Any]] | str:
    """Returns the leaves of two pytrees side by side, each pair with its place; or how their structures differ."""
    if output.structure != expected.structure:
        return f"the structure of {what} differs: {_show_structures(output.shown, expected.shown)}"
    pairs = zip(output.leaves, expected.leaves, strict=True)
    return [(what + path, mine, its) for (path, mine), (_, its) in pairs]


def _show_structures(*texts: str) -> str:
    """Returns two structures as text; of long ones only the part around their first difference."""
    if max(map(len, texts)) > _MAX_STRUCTURE_CHARS:
        pairs = enumerate(zip(*texts, strict=False))
        differs_at = next((position for position, (one, other) in pairs if one != other), 0)
        start = max(0, differs_at - _MAX_STRUCTURE_CHARS // 2)
        texts = tuple(f"...{text[start : start + _MAX_STRUCTURE_CHARS]}..." for text in texts)
    return f"got {texts[0]}, expected {texts[1]}"


def _compare_leaf(output: Any, expected: Any, allowance: Allowance, where: str, shortcut: Compare | None) -> str | None:
    found = shortcut(output, expected, allowance) if shortcut and _is_comparable(output, expected) else None
    if found is not None:
        return describe_mismatches(found, output.shape, allowance, where, is_exact=False)
    if isinstance(output, NoArray) and output == expected:
        return None
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
        return compare_numbers(got, wanted, allowance, where, is_exact=is_exact)
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
    if isinstance(leaf, NoArray):
        return str(leaf)
    return "None" if leaf is None else f"a Python {type(leaf).__name__}"


def noise_of(leaf: Any, *, coarsest: int | None, run: Run | None = None) -> Noise | None:
    """Returns what collects the deviations of a leaf; None for one that is compared exactly."""
    leaf = np.asarray(leaf) if type(leaf) in (float, complex) else leaf
    return Noise(leaf, coarsest=coarsest, run=run) if has_dtype(leaf, np.inexact) and leaf.size else None


def _on_host(leaf: Any) -> _Array:
    """Returns a leaf as a numpy array, and PRNG keys as their data."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _without_dtype(array: _Array) -> _Array:
    """Returns an array of a single number in the form of a Python number's, integers of any size included."""
    for number_type, dtype in _NUMBER_TYPES.items():
        if array.shape == () and has_dtype(array, dtype):
            return np.asarray(number_type(array), object if number_type is int else None)
    return array


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and has_dtype(leaf, jax.dtypes.prng_key)
