from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest

from quarantune.cache import canonical_json, plain, safe_name


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


def test_unusual_names_stay_distinct_also_where_case_is_ignored() -> None:
    names = [safe_name(name).lower() for name in ODD_NAMES]
    assert len(set(names)) == len(ODD_NAMES)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_safe_name_is_a_short_file_name_and_unchanged_if_repeated(name: str) -> None:
    safe = safe_name(name)
    assert set(safe) <= set(string.ascii_letters + string.digits + "_.-")
    assert safe[0] not in ".-"
    assert 0 < len(safe) < 150
    assert safe_name(safe) == safe


def test_a_plain_name_stays_readable() -> None:
    assert safe_name("kernels.matmul.tiled_matmul") == "kernels.matmul.tiled_matmul"
    assert safe_name("kernels.make.<locals>.f").startswith("kernels.make._locals_.f-")
