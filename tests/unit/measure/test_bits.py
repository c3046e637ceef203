"""Digests distinguish the bits of outputs on the host and on a device, and differences are counted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quarantune.measure import bits, rounding
from quarantune.measure.compare import Comparer, Flat, NoArray

FLOATS = ("float32", "bfloat16", "float16")
KINDS = (*FLOATS, "float64", "float8_e4m3fn", "int4", "int8", "uint64", "bool", "complex64")


def array(dtype: str) -> Any:
    drawn = np.random.default_rng(0).normal(size=(100, 33)) * 3
    return (abs(drawn) if dtype == "uint64" else drawn).astype(dtype)


def both_digests(value: Any) -> tuple[str, str]:
    """Returns the digest by the host, and the digest by a device."""
    return bits.digest(Flat.of(value), None), bits.digest(Flat.of(jnp.asarray(value)), Comparer())


@pytest.mark.parametrize("dtype", KINDS)
def test_another_element_gives_another_digest(dtype: str) -> None:
    one, other = array(dtype), array(dtype)
    other[7, 5] = np.asarray(not other[7, 5] if dtype == "bool" else float(other[7, 5].real) + 1, dtype)
    assert bits.digest(Flat.of(one), None) == bits.digest(Flat.of(array(dtype)), None)
    assert bits.digest(Flat.of(one), None) != bits.digest(Flat.of(other), None)
    assert "other bits in 1 of 3,300 elements" in str(bits.difference(Flat.of(other), Flat.of(one)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_unit_and_the_sign_of_zero_count_and_the_kind_of_nan_does_not(dtype: str) -> None:
    plain = array(dtype)
    plain[0, :3] = [np.nan, 0.0, 1.0]
    unit, sign, nan = plain.copy(), plain.copy(), plain.copy()
    unit[0, 2] = np.nextafter(unit[0, 2], np.asarray(2, dtype))
    sign[0, 1] = -0.0
    nan.view(f"uint{8 * nan.itemsize}")[0, 0] ^= 1
    assert np.isnan(nan[0, 0])
    for mine, its in zip(both_digests(nan), both_digests(plain), strict=True):
        assert mine == its
    for changed in (unit, sign, plain[::-1]):
        for mine, its in zip(both_digests(changed), both_digests(plain), strict=True):
            assert mine != its
    assert bits.difference(Flat.of(nan), Flat.of(plain)) is None
    told = "output['y'] has other bits in 1 of 3,300 elements, "
    assert bits.difference(Flat.of({"y": unit}), Flat.of({"y": plain})) == f"{told}at most 1 unit in the last place"
    assert bits.difference(Flat.of({"y": sign}), Flat.of({"y": plain})) == f"{told}in signs of zeros"


def test_units_are_counted_across_zero() -> None:
    least = np.finfo(np.float32).smallest_subnormal
    found = bits.difference(Flat.of(np.array([-2 * least, 1.0])), Flat.of(np.array([least, 1.0])))
    assert found is not None
    mine, its = (np.array([value], np.float32) for value in (-2 * least, least))
    assert "at most 3 units" in str(bits.difference(Flat.of(mine), Flat.of(its)))


def test_structures_keys_and_leaves_without_bits_have_digests() -> None:
    tree = {"n": 1.5, "none": None, "key": jax.random.key(0), "empty": np.zeros((0, 3)), "name": NoArray("a str")}
    assert bits.digest(Flat.of(tree), None) == bits.digest(Flat.of(dict(tree)), None)
    for name, value in {"n": 2.5, "none": 1, "key": jax.random.key(1), "empty": np.zeros((3, 0))}.items():
        assert bits.digest(Flat.of({**tree, name: value}), None) != bits.digest(Flat.of(tree), None)


@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "float8_e4m3fn"])
def test_nudged_inputs_move_by_one_unit_and_keep_what_has_no_neighbour(dtype: str) -> None:
    values = array(dtype)
    values[0, :2] = [0.0, np.nan]
    moved = rounding.nudged(values)
    assert moved.dtype == values.dtype
    np.testing.assert_array_equal(moved[0, :2].astype(float), [0.0, np.nan])
    signed = f"int{8 * values.itemsize}"
    is_zero = values == 0
    steps = moved.view(signed).astype(int) - values.view(signed).astype(int)
    assert set(steps[1:][~is_zero[1:]].tolist()) == {-1}, "towards zero"
    infinite = np.array([np.inf, -np.inf], "float32")
    np.testing.assert_array_equal(rounding.nudged(infinite), infinite)
