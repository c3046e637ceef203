"""Outputs are compared by value within tolerances, and a message names the worst difference."""

from __future__ import annotations

import math
import re
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quarantune.jax_internals.jax_functions import JitOptions
from quarantune.measure.compare import Flat, judge_by
from quarantune.measure.compare import compare as compare_flat
from quarantune.measure.compare import compare_shapes as compare_flat_shapes
from quarantune.measure.rounding import Allowance
from quarantune.transport.differentiation import gradients, scalar_of
from quarantune.values.options import Options, Tolerance

EXACT = Tolerance(rtol=0, atol=0, max_mismatched_ratio=0)
STRICT = Tolerance(rtol=1e-2, atol=1e-2, max_mismatched_ratio=0)
FLOATS = ["float16", "float32", "float64", "longdouble", "bfloat16", "float8_e5m2"]
INT64 = np.iinfo(np.int64)
UINT64 = np.iinfo(np.uint64)


def compare(output: Any, expected: Any, tolerance: Tolerance, **options: Any) -> str | None:
    wanted = Flat.of(expected)
    return compare_flat(Flat.of(output), wanted, [Allowance.fixed(tolerance)] * len(wanted.leaves), **options)


def compare_shapes(output: Any, expected: Any) -> str | None:
    return compare_flat_shapes(Flat.of(output), Flat.of(expected))


def _agree(output: Any, expected: Any, tolerance: Tolerance = STRICT) -> bool:
    return compare(output, expected, tolerance) is None


# --- tolerances ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rtol", "atol", "max_mismatched_ratio"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "1", True])
def test_a_bad_tolerance_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))} is not valid: give a .*number"):
        Options(**{name: value})


def test_only_the_ratio_has_an_upper_bound() -> None:
    assert Options(rtol=2, atol=np.float64(3), max_mismatched_ratio=1).tolerance == Tolerance(2, 3, 1)
    with pytest.raises(ValueError, match="from 0 to 1"):
        Options(max_mismatched_ratio=1.01)


# --- elements -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "int4", "uint4", "int8", "uint64"])
def test_every_number_type_is_compared_by_value(dtype: str) -> None:
    expected = np.arange(6).reshape(2, 3).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    other = expected.copy()
    assert _agree(other, expected, EXACT)
    other[1, 1] = 1
    message = compare(other, expected, STRICT)
    assert message is not None
    assert message.startswith("1 of 6 elements (16.7%) differ by more than rtol=0.01, atol=0.01; ")
    assert "; the worst is at [1, 1] of output: " in message
    assert re.search(r"got 1(\.0)?, expected 4(\.0)?$", message)


@pytest.mark.parametrize(
    ("got", "wanted", "agrees"),
    [
        (101.0, 100.0, True),
        (101.02, 100.0, False),
        (0.0, 0.01, True),
        (-0.0102, 0.0, False),
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        (0.0, math.nan, False),
        (math.inf, math.inf, True),
        (-math.inf, -math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1e300, False),
        (1e300, math.inf, False),
        (math.inf, math.nan, False),
        (1.7e308, -1.7e308, False),
        (-0.0, 0.0, True),
    ],
)
@pytest.mark.parametrize("beside", [0.0, math.nan])
def test_floats_agree_within_the_sum_of_both_tolerances(
    got: float,
    wanted: float,
    agrees: bool,
    beside: float,
) -> None:
    assert _agree(np.array([beside, got]), np.array([beside, wanted])) is agrees


def test_the_relative_tolerance_refers_to_the_expected_value() -> None:
    tolerance = Tolerance(rtol=0.5, atol=0, max_mismatched_ratio=0)
    assert _agree(np.float32([1]), np.float32([2]), tolerance)
    assert not _agree(np.float32([2]), np.float32([1]), tolerance)


@pytest.mark.parametrize("zero_by", ["rtol", "atol"])
def test_infinities_differ_even_with_one_tolerance_zero(zero_by: str) -> None:
    tolerance = Tolerance(**{"max_mismatched_ratio": 0, zero_by: 0})
    expected = np.array([math.inf, 1.0])
    assert _agree(expected.copy(), expected, tolerance)
    assert not _agree(np.array([5.0, 1.0]), expected, tolerance)
    assert not _agree(expected, np.array([5.0, 1.0]), tolerance)


@pytest.mark.parametrize(
    ("got", "wanted", "agrees"),
    [
        (3 + 4.05j, 3 + 4j, True),
        (3 + 4.07j, 3 + 4j, False),
        (3.05 + 4.05j, 3 + 4j, False),  # each part is within the tolerance, the modulus of the difference is not
        (complex(math.nan, 1), complex(math.nan, 1), True),
        (complex(math.inf, 1), complex(math.inf, 1), True),
        (complex(math.inf, 1), complex(math.inf, 2), False),
        (complex(1, math.inf), complex(1, 2), False),
    ],
)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_agree_by_modulus(got: complex, wanted: complex, agrees: bool, dtype: str) -> None:
    assert _agree(np.array([got], dtype), np.array([wanted], dtype)) is agrees


@pytest.mark.parametrize(
    ("dtype", "got", "wanted"),
    [
        ("int64", INT64.max, INT64.min),
        ("int64", INT64.min, INT64.max),
        ("int64", INT64.min, 0),
        ("uint64", 0, UINT64.max),
        ("uint64", UINT64.max, 0),
        ("int8", -128, 127),
    ],
)
def test_integers_far_apart_do_not_overflow_into_agreement(dtype: str, got: int, wanted: int) -> None:
    message = compare(np.array([got], dtype), np.array([wanted], dtype), STRICT)
    assert message is not None
    assert message.endswith(f"got {got}, expected {wanted}")
    assert _agree(np.array([got], dtype), np.array([got], dtype), EXACT)


def test_integers_are_compared_exactly_only_under_zero_tolerance() -> None:
    low, high = np.array([INT64.max - 1]), np.array([INT64.max])
    assert not _agree(low, high, EXACT)
    assert _agree(low, high)
    assert not _agree(np.array([UINT64.max - 1], "uint64"), np.array([UINT64.max], "uint64"), EXACT)
    assert _agree(np.array([99]), np.array([100]))
    assert not _agree(np.array([98]), np.array([100]))


def test_booleans_must_be_equal_whatever_the_tolerance() -> None:
    loose = Tolerance(rtol=10, atol=10, max_mismatched_ratio=0.3)
    told = "2 of 3 elements (66.7%) differ; the first is at [1] of output: got False, expected True"
    assert compare(np.array([True, False, False]), np.array([True, True, True]), loose) == told
    assert _agree(np.array([True, True, False, True]), np.ones(4, bool), loose)


# --- how many, and which ------------------------------------------------------------------------------------


def test_as_many_elements_may_differ_as_the_ratio_says() -> None:
    expected, output = np.zeros(300, np.float32), np.zeros(300, np.float32)
    output[:3] = 1
    assert _agree(output, expected, Tolerance())
    output[3] = 1
    assert not _agree(output, expected, Tolerance())


def test_the_ratio_holds_for_each_leaf_alone() -> None:
    wrong, right = np.ones(2), np.zeros(2)
    assert not _agree([wrong, np.zeros(1000)], [right, np.zeros(1000)], Tolerance())


def test_the_worst_element_is_farthest_beyond_its_tolerance() -> None:
    expected = np.array([[1e6, 0.0], [0.0, 0.0]])
    output = np.array([[1e6 + 5000, 1.0], [3.0, 2.0]])  # the first difference is the largest, and allowed
    message = compare({"x": [output]}, {"x": [expected]}, STRICT)
    assert message == (
        "3 of 4 elements (75%) differ by more than rtol=0.01, atol=0.01; "
        "the worst is at [1, 0] of output['x'][0]: got 3.0, expected 0.0"
    )


def test_an_element_that_is_not_finite_is_worse_than_any_that_is() -> None:
    message = compare(np.array([1e30, 0.0, math.nan, math.inf]), np.zeros(4), STRICT)
    assert message is not None
    assert message.startswith("3 of 4 ")
    assert message.endswith("at [2] of output: got nan, expected 0.0")


def test_a_large_array_is_compared_completely_in_little_memory() -> None:
    expected = np.zeros((1500, 1400), np.float32)
    output = expected.copy()
    output[3, 5], output[1499, 1399] = 1, 2
    tracemalloc.start()
    try:
        for got, wanted in [(output, expected), (output.T, expected.T)]:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            message = compare(got, wanted, STRICT)
            _, peak = tracemalloc.get_traced_memory()
            assert message is not None
            assert message.startswith("2 of 2100000 ")
            assert f"at {[i - 1 for i in got.shape]} of output: got 2.0" in message
            assert peak - before < 2 * expected.nbytes  # neither array was copied as a whole
    finally:
        tracemalloc.stop()


def test_no_element_type_needs_more_than_64_megabytes() -> None:
    expected = np.ones(600_000, np.clongdouble)
    output = expected * 2
    tracemalloc.start()
    try:
        assert not _agree(output, expected)
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bool", "int32"])
def test_arrays_without_elements_agree(shape: tuple[int, ...], dtype: str) -> None:
    assert _agree(np.zeros(shape, dtype), jnp.zeros(shape, dtype), EXACT)


def test_a_scalar_is_named_without_an_index() -> None:
    message = compare(jnp.float32(1), jnp.float32(2), STRICT)
    assert message is not None
    assert message.endswith("the worst is output: got 1.0, expected 2.0")


# --- leaves and structures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected", "told"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), "output is float64[2, 3], expected float64[3, 2]"),
        (jnp.zeros(2), jnp.zeros(2, jnp.complex64), "output is float32[2], expected complex64[2]"),
        (np.zeros(1, np.int32), np.zeros(1, np.uint32), "output is int32[1], expected uint32[1]"),
        ({"a": 1, "b": None}, {"a": 1, "b": np.zeros(1)}, "output['b'] is None, expected float64[1]"),
        (None, 5, "output is None, expected a Python int"),
        (True, 1, "output is a Python bool, expected a Python int"),
        (1, np.float32(1), "output is a Python int, expected float32[]"),
        (1.0, np.ones(1), "output is a Python float, expected float64[1]"),
        ("a", 1, "output is a Python str, expected a Python int"),
        ("a", "b", "output is 'a', expected 'b'"),
        ([1], (1,), "the structure of output differs: got [*], expected (*,)"),
        ((1,), 1, "the structure of output differs: got (*,), expected *"),
        ({"a": 1}, {"b": 2}, "the structure of output differs: got {'a': *}, expected {'b': *}"),
    ],
)
def test_the_message_about_incomparable_outputs_shows_both(output: Any, expected: Any, told: str) -> None:
    assert compare(output, expected, Tolerance()) == told


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [(jnp.float16, jnp.float32), (jnp.bfloat16, jnp.float32), (np.float32, np.float64), (np.complex64, np.complex128)],
)
def test_numbers_of_one_kind_are_compared_in_the_wider_type(narrow: Any, wide: Any) -> None:
    thirds = np.arange(100) / 3
    for output, expected in ((narrow, wide), (wide, narrow)):
        mine, its = thirds.astype(output), thirds.astype(expected)
        assert compare(mine, its, Tolerance()) is None
        assert "100 of 100 elements (100%) differ" in (compare(mine + mine.dtype.type(1), its, EXACT) or "")
        assert compare(mine, its, EXACT) is not None  # the wider type shows the difference


def test_long_structures_are_shown_around_their_difference() -> None:
    output = {f"layer{i:03}": [1, 2] for i in range(100)}
    message = compare(output, output | {"layer050": (1, 2)}, STRICT)
    assert message is not None
    assert len(message) < 600
    assert "'layer050': [*, *]" in message
    assert "'layer050': (*, *)" in message


@pytest.mark.parametrize(
    ("got", "wanted", "agrees"),
    [
        (1, 1, True),
        (1, np.int8(1), True),
        (jnp.int32(300), 300, True),
        (300, 400, False),
        (2**63 + 2**62, -1, False),
        (2**64 - 1, -1, False),
        (2**63, np.uint64(2**63), True),
        (10**30, 10**30 + 1, True),
        (10**30, 10**31, False),
        (1.0, np.float32(1.001), True),
        (1.0, ml_dtypes.bfloat16(2.0), False),
        (math.nan, jnp.float32(math.nan), True),
        (1j, np.complex64(1j), True),
        (True, np.bool_(True), True),
        (True, False, False),
        ("a", "a", True),
        (None, None, True),
        ((), (), True),
        (np.array(["a", None], object), np.array(["a", None], object), True),
        (np.array(["a", None], object), np.array(["a", "b"], object), False),
    ],
)
def test_python_values_and_other_leaves_agree_by_value(got: Any, wanted: Any, agrees: bool) -> None:
    assert _agree(got, wanted) is agrees


def test_integers_larger_than_any_float_are_compared_exactly() -> None:
    huge = 10**400
    assert _agree(huge, huge, EXACT)
    assert _agree(huge + 1, huge)
    assert not _agree(huge + 1, huge, EXACT)
    assert not any(_agree(*pair) for pair in [(huge, -huge), (huge, 1), (1, huge)])


def test_keys_must_be_equal_and_of_one_kind() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    assert _agree(keys, keys, EXACT)
    assert not _agree(keys, jax.random.split(jax.random.key(1), 3))
    assert compare(keys, jax.random.key_data(keys), STRICT) == "output is key<fry>[3], expected uint32[3, 2]"
    near = jax.random.wrap_key_data(jax.random.key_data(keys) + jnp.uint32(1))
    assert not _agree(keys, near)


def test_the_message_uses_the_given_name_of_the_output() -> None:
    assert compare([None], [1], Tolerance()) == "output[0] is None, expected a Python int"


def test_comparing_compiles_nothing(compiles: list[str]) -> None:
    values = {"f": jnp.ones((8, 3), jnp.bfloat16), "k": jax.random.key(0), "c": jnp.ones(2, jnp.complex64)}
    compiles.clear()
    assert _agree(values, values)
    assert not compiles


# --- the verdict --------------------------------------------------------------------------------------------


def _judge(check_fn: Any, expected: Any = None) -> str | None:
    return judge_by(check_fn, np.ones(2), expected, (7,), {"b": 8})


def test_a_check_sees_output_expected_output_and_arguments() -> None:
    seen: list[Any] = []
    _judge(lambda *args, **kwargs: seen.append((args, kwargs)), "expected")
    ((output, *rest), named) = seen[0]
    assert output.tolist() == [1, 1]
    assert (rest, named) == (["expected", 7], {"b": 8})


@pytest.mark.parametrize("right", [None, True, np.True_, jnp.bool_(True), np.array(True)])
def test_a_check_that_returns_true_or_none_decides_alone(right: Any) -> None:
    assert _judge(lambda *_, b: right, np.zeros(2)) is None


@pytest.mark.parametrize("wrong", [False, np.False_, jnp.bool_(False), np.array(False)])
def test_a_check_that_returns_false_means_wrong(wrong: Any) -> None:
    assert _judge(lambda *_, b: wrong, np.ones(2)) == "check_fn returned False"


@pytest.mark.parametrize("odd", [1, 0, "yes", np.array([True]), (), jnp.float32(1)])
def test_a_check_that_returns_anything_else_is_an_error(odd: Any) -> None:
    message = _judge(lambda *_, b: odd)
    assert message is not None
    assert message.startswith(f"check_fn returned {odd!r}: it must return True or None ")


def test_a_check_that_raises_means_wrong_and_is_quoted() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(error: Exception) -> Any:
        def check(*_: Any, b: int) -> None:
            raise error

        return _judge(check, np.ones(2))

    assert fail(ValueError("row 3 is off")) == "check_fn raised ValueError: row 3 is off"
    assert fail(AssertionError()) == "check_fn raised AssertionError"
    assert "UnprintableError" in fail(UnprintableError())


# --- gradients ----------------------------------------------------------------------------------------------


def test_gradients_belong_to_the_scalar() -> None:
    x = jnp.arange(1.0, 5.0)
    (found,) = gradients(jax.jit(lambda x: x**2), (x,), {}, JitOptions()).values()
    weights = jax.grad(scalar_of)(x)
    assert _agree(found, 2 * x * weights, Tolerance(rtol=1e-6, atol=0, max_mismatched_ratio=0))


def test_only_floating_arrays_that_are_not_static_get_a_gradient() -> None:
    def fn(a: Any, n: int, tree: Any, key: Any, *, scale: Any, mode: Any, flag: bool = True) -> Any:
        assert mode == 2.5
        return a * n * tree["w"][0] + tree["i"].sum(), jnp.real(scale) * tree["w"][1], key

    jitted = jax.jit(fn, static_argnums=(1,), static_argnames=("mode", "flag"))
    tree = {"w": [np.ones(3, np.float32), jnp.ones(2, jnp.bfloat16)], "i": jnp.arange(3), "none": None}
    args = (jnp.ones(3), np.float32(2), tree, jax.random.key(0))
    kwargs = {"scale": np.complex64(1 + 2j), "mode": np.float32(2.5), "flag": True}
    found = gradients(jitted, args, kwargs, JitOptions(static_argnums=(-3,), static_argnames=("mode", "flag")))
    assert {place: (gradient.shape, gradient.dtype.name) for place, gradient in found.items()} == {
        "args[0]": ((3,), "float32"),
        "args[2]['w'][0]": ((3,), "float32"),
        "args[2]['w'][1]": ((2,), "bfloat16"),
        "kwargs['scale']": ((), "complex64"),
    }
    plain = gradients(fn, args, kwargs, JitOptions(static_argnums=(1,), static_argnames=("mode", "flag")))
    assert _agree(found, plain)


def test_a_wrong_derivative_rule_under_a_right_output_is_found() -> None:
    @jax.custom_vjp
    def wrong(x: Any, y: Any) -> Any:
        return x * y

    wrong.defvjp(lambda x, y: (x * y, (x, y)), lambda kept, g: (g * kept[1], g * kept[1]))
    args = (jnp.full((4, 4), 2.0), jnp.full((4, 4), 3.0))
    assert _agree(wrong(*args), args[0] * args[1])
    message = compare(
        gradients(wrong, args, {}, JitOptions()),
        gradients(jnp.multiply, args, {}, JitOptions()),
        STRICT,
    )
    assert message is not None
    assert message.startswith("16 of 16 elements (100%)")
    assert "of output['args[1]']: got " in message


def test_a_function_without_floating_inputs_has_no_gradients() -> None:
    found = gradients(lambda n, m: n + m, (jnp.arange(3), 2.5), {}, JitOptions())
    assert found == {}
    assert _agree(found, {})


def test_a_function_without_floating_outputs_has_zero_gradients() -> None:
    (found,) = gradients(lambda x: (x > 0, x.astype(jnp.int32)), (jnp.ones(3),), {}, JitOptions()).values()
    assert found.tolist() == [0, 0, 0]


def test_the_scalar_weighs_every_element_differently() -> None:
    weights = jax.grad(scalar_of)([jnp.ones((20, 30)), jnp.ones((20, 30), jnp.float16)])
    for leaf in map(np.asarray, weights):
        assert ((np.abs(leaf) >= 0.5) & (np.abs(leaf) <= 1)).all()
        assert 200 < (leaf > 0).sum() < 400
    assert not _agree(weights[0], weights[1].astype(jnp.float32))


def test_the_scalar_of_half_precision_numbers_does_not_overflow() -> None:
    assert np.isfinite(scalar_of(jnp.full((100, 100), 60_000, jnp.float16)))


def test_imaginary_parts_count_in_the_scalar() -> None:
    real, imaginary = scalar_of(jnp.ones(5, jnp.complex64)), scalar_of(jnp.full(5, 1j, jnp.complex64))
    assert (real.dtype, imaginary.dtype) == (jnp.float32, jnp.float32)
    assert abs(float(real)) > 0.1
    assert abs(float(imaginary)) > 0.1


def test_the_scalar_is_reproducible_and_ignores_other_leaves() -> None:
    tree = {"x": jnp.ones((3, 0)), "y": jnp.arange(6.0).reshape(2, 3)}
    assert float(scalar_of(tree)) == float(scalar_of(tree)) != 0
    others = {"z1": 3, "z2": "text", "z3": jnp.arange(3), "z4": jax.random.key(0), "z5": None}
    assert float(scalar_of(tree | others)) == float(scalar_of(tree))
    assert float(scalar_of(others)) == 0


def test_shapes_alone_show_that_outputs_cannot_agree() -> None:
    struct = jax.ShapeDtypeStruct
    like = {"a": struct((2, 3), jnp.bfloat16), "n": struct((), jnp.int32), "x": struct((), jnp.float32)}
    assert compare_shapes(like, {"a": np.zeros((2, 3)), "n": 7, "x": 0.5}) is None
    assert compare_shapes(like, {**like, "n": 0.5}) == "output['n'] is int32[], expected a Python float"
    assert compare_shapes(like, {**like, "a": np.zeros(6)}) == "output['a'] is bfloat16[2, 3], expected float64[6]"
    assert "the structure of output differs" in (compare_shapes(like, [1, 2, 3]) or "")
