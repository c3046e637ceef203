"""Keys and file names are equal for equal values, different for different values, and safe for any value."""

from __future__ import annotations

import functools
import itertools
import string
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quarantune
from quarantune.cache.file_names import safe_name
from quarantune.functions import description as describe
from quarantune.functions.fingerprint import fingerprint
from quarantune.values.codec import canonical_json, plain


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        ((1, (2, 3)), [1, [2, 3]]),
        ({"a": (np.int8(1),)}, {"a": [1]}),
    ],
)
def test_values_that_differ_irrelevantly_are_one_key(one: Any, other: Any) -> None:
    assert canonical_json(one) == canonical_json(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(True, 1), (1, 1.0), (1, "1"), (None, "null"), ([1], 1), ([[1], 2], [1, [2]]), (False, None)],
)
def test_values_that_differ_are_different_keys(one: Any, other: Any) -> None:
    assert canonical_json(one) != canonical_json(other)


def test_canonical_json_is_ascii_without_whitespace() -> None:
    assert canonical_json({"b": [1, 2.5], "ä": None}) == '{"b":[1,2.5],"\\u00e4":null}'


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), [-float("inf")], np.float32("nan"), {"a": np.float64("inf")}]
)
def test_nan_and_infinity_are_refused_or_made_none(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON has no NaN or infinity; use None"):
        canonical_json(value)
    assert "None" in str(plain(value, finite_only=False))


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", np.zeros(3), 1j])
def test_a_value_that_json_cannot_hold_is_refused_with_a_remedy(value: Any) -> None:
    with pytest.raises(TypeError, match="use None, bool, int, float, str, or lists"):
        canonical_json(value)


def test_a_dict_key_that_is_not_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"str\(1\)"):
        canonical_json({1: "a"})


ODD_NAMES = [
    "f.<locals>.g",
    "f_locals_.g",
    "f.<locals>.h",
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "",
    ".hidden",
    "a b",
    "a_b",
    "a/b",
    "a\\b",
    "nul\0byte",
    "new\nline",
    "Ünïcode",
    "\udce4",
    "Matmul",
    "matmul",
    "MATMUL",
    "x" * 300,
    "x" * 301,
    "-rf",
    "f.json",
]


def test_unusual_names_stay_distinct_if_case_is_ignored() -> None:
    names = [safe_name(name).lower() for name in ODD_NAMES]
    assert len(set(names)) == len(ODD_NAMES)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_safe_name_is_short_and_unchanged_if_repeated(name: str) -> None:
    safe = safe_name(name)
    assert set(safe) <= set(string.ascii_letters + string.digits + "_.-")
    assert safe[0] not in ".-"
    assert 0 < len(safe) < 150
    assert safe_name(safe) == safe


def test_a_plain_name_stays_readable() -> None:
    assert safe_name("kernels.matmul.tiled_matmul") == "kernels.matmul.tiled_matmul"
    assert safe_name("kernels.make.<locals>.f").startswith("kernels.make._locals_.f-")


# --- large, deep and shared values ---


def nested(levels: int, inner: Any = 1.0, *, times: int = 1) -> Any:
    for _ in range(levels):
        inner = (inner,) * times
    return inner


def test_a_list_that_is_shared_at_sixty_levels_is_described() -> None:
    shared, again, other = (nested(60, leaf, times=2) for leaf in (1.0, 1.0, 2.0))
    digests = [canonical_json(describe.describe_static(value)) for value in (shared, again, other, [shared])]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    lists: Any = [1.0]
    for _ in range(60):
        lists = {"a": lists, "b": types.SimpleNamespace(c=[lists])}
    assert len(canonical_json(describe.describe_static(lists))) < 100


def test_a_global_list_shared_at_sixty_levels_is_hashed() -> None:
    def looks_up(leaf: float) -> Any:
        lists = {"a": nested(60, [leaf], times=2), "b": types.SimpleNamespace(c=nested(60, {leaf, 0.5}, times=2))}
        return lambda x: (x, lists)

    one, again, other = (fingerprint(looks_up(leaf)).parts for leaf in (1.0, 1.0, 2.0))
    assert one == again
    assert one != other


def test_a_little_shared_list_is_described_like_equal_lists() -> None:
    one = [1, [2.5, "x"]]
    assert describe.describe_static([one, one]) == [[1, [2.5, "x"]]] * 2
    one.append([one])
    assert describe.describe_static([one, one]) == [[1, [2.5, "x"], [{"inside": 2}]]] * 2


def test_a_result_for_a_value_nested_400_deep_is_saved_and_found(sweeps: list[str]) -> None:
    def tuner() -> quarantune.Autotuned:
        @quarantune.autotune({"n": [1, 2]}, rep=1, name="deep", ref_fn=None)
        @functools.partial(jax.jit, static_argnames=["deep", "n"])
        def scaled(x: Any, deep: Any, n: int = 1) -> Any:
            return x * n

        return scaled

    for _ in range(2):
        tuner()(jnp.ones(3), nested(400))
    assert sweeps == ["deep"]
    tuner()(jnp.ones(3), nested(401))
    assert sweeps == ["deep", "deep"]


def test_a_value_python_cannot_follow_is_refused_as_that() -> None:
    with pytest.raises(TypeError, match=r"nested more deeply than Python can follow, so results .* remembered"):
        describe.describe_static(nested(2 * sys.getrecursionlimit()))


VOCABULARY = {f"token{number}": number for number in range(10_000)}


def test_values_of_very_many_numbers_take_few_steps_each() -> None:
    numbers = [float(number) for number in VOCABULARY.values()]

    def looks(x: Any) -> Any:
        return x * len(VOCABULARY)

    steps = itertools.count()
    sys.setprofile(lambda *_: next(steps))
    try:
        described = describe.describe_static(numbers), describe.describe_static(VOCABULARY)
        parts = fingerprint(looks).parts
    finally:
        sys.setprofile(None)
    assert described[0] == numbers
    assert described[1]["items"][:2] == [["token0", 0], ["token1", 1]]
    assert "global:VOCABULARY" in parts
    assert next(steps) < 120 * len(numbers)
