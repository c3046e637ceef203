"""Generated arguments: finite, safe as indices, the same in every process, and made without compiling."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import python

import quarantune
from quarantune.transport import arrays

FLOATS = [
    "float16",
    "float32",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
]
INTEGERS = ["int4", "uint4", "int8", "uint8", "int16", "int32", "uint32"]


def _numbers(array: jax.Array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("kind", "largest"), [("auto", 5), ("uniform", 1)])
def test_floats_are_finite_and_neither_large_nor_constant(dtype: str, kind: str, largest: float) -> None:
    array = arrays.make((64, 3), dtype, seed=0, kind=kind)
    assert (array.shape, array.dtype.name) == ((64, 3), dtype)
    numbers = _numbers(array)
    assert np.isfinite(numbers).all()
    assert largest / 3 < np.abs(numbers).max() <= largest
    assert len(np.unique(numbers)) > 3


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", ["auto", "integer", "uniform", "normal"])
def test_integers_are_safe_as_indices_into_their_own_array(dtype: str, kind: str) -> None:
    numbers = _numbers(arrays.make((5, 100), dtype, kind=kind, seed=1))
    assert numbers.min() >= 0
    assert 1 <= numbers.max() < 5


def test_integers_stay_small_in_large_arrays_and_zero_in_scalars() -> None:
    assert np.asarray(arrays.make((4096,), "int32", seed=0)).max() == 7
    assert arrays.make((), "int32", seed=0) == 0
    assert arrays.make((1, 9), "int32", seed=0).max() == 0


def test_booleans_are_balanced() -> None:
    assert 0.4 < np.asarray(arrays.make((1000,), "bool", seed=0)).mean() < 0.6


def test_complex_numbers_have_both_parts() -> None:
    array = np.asarray(arrays.make((100,), "complex64", seed=0))
    assert array.real.std() > 0.3
    assert array.imag.std() > 0.3


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_generated_keys_have_their_implementation(impl: str) -> None:
    dtype = jax.random.key(0, impl=impl).dtype
    keys = arrays.make((3,), dtype, seed=0)
    assert (keys.shape, keys.dtype) == ((3,), dtype)
    assert len({float(jax.random.uniform(key)) for key in keys}) == 3


@pytest.mark.parametrize(
    ("kind", "low", "high", "mean", "deviation"),
    [
        ("uniform", -1, 1, 0, 1 / 3**0.5),
        ("normal", -6, 6, 0, 1),
        ("integer", -2, 2, 0, 2**0.5),
        ("zeros", 0, 0, 0, 0),
        ("ones", 1, 1, 1, 0),
    ],
)
def test_each_kind_has_its_distribution(kind: str, low: int, high: int, mean: float, deviation: float) -> None:
    numbers = _numbers(arrays.make((20_000,), "float32", kind=kind, seed=0))
    assert numbers.min() >= low
    assert numbers.max() <= high
    assert numbers.mean() == pytest.approx(mean, abs=0.05)
    assert numbers.std() == pytest.approx(deviation, abs=0.05)
    assert kind != "integer" or (numbers == numbers.round()).all()


@pytest.mark.parametrize(
    ("kind", "allowed"), [("zeros", {2.0**-127}), ("ones", {1.0}), ("integer", {1.0, 2.0}), ("uniform", None)]
)
def test_a_dtype_without_zero_and_sign_gets_the_nearest_numbers(kind: str, allowed: set[float] | None) -> None:
    numbers = _numbers(arrays.make((1000,), "float8_e8m0fnu", kind=kind, seed=0))
    assert np.isfinite(numbers).all()
    assert allowed is None or set(numbers) == allowed


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4", "bool", "complex64"])
def test_zeros_are_zero_and_ones_are_one(dtype: str) -> None:
    for kind, number in (("zeros", 0), ("ones", 1)):
        assert (np.asarray(arrays.make((3,), dtype, kind=kind, seed=0)) == number).all()


def test_an_unknown_kind_is_refused_with_the_known_kinds() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of auto, .*got 'gaussian'"):
        arrays.make((2,), "float32", kind="gaussian", seed=0)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "bfloat16"])
def test_any_shape_can_be_generated(shape: tuple[int, ...], dtype: str) -> None:
    assert arrays.make(shape, dtype, seed=0).shape == shape


def test_weak_types_are_kept() -> None:
    weak = arrays.make((3,), "float32", True, seed=0)
    assert weak.weak_type
    assert (weak * jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
    assert not arrays.make((3,), "float32", seed=0).weak_type


def test_double_precision_is_kept_whatever_the_mode() -> None:
    assert arrays.make((3,), "float64", seed=0).dtype == np.float64


def test_different_seeds_and_arguments_get_different_data() -> None:
    first, *others = (
        np.asarray(arrays.make((50,), "float32", seed=seed, index=index)) for seed, index in [(0, 0), (0, 1), (1, 0)]
    )
    assert all((first != other).any() for other in others)


def test_a_large_array_does_not_repeat_within_its_rows() -> None:
    array = np.asarray(arrays.make((2048, 1024), "float16", seed=0))
    assert not any((array[row] == array[0]).all() for row in range(1, 2048))


def test_every_process_generates_the_same_data(tmp_path: Path) -> None:
    script = "import json\nfrom quarantune.transport import arrays\n"
    script += "print(json.dumps(arrays.make((4, 5), 'float32', seed=3, index=2).tolist()))"
    path = tmp_path / "make.py"
    path.write_text(script)
    made = python(path, PYTHONHASHSEED="77", JAX_PLATFORMS="cpu")
    assert json.loads(made) == arrays.make((4, 5), "float32", seed=3, index=2).tolist()


def test_generating_arrays_compiles_nothing(compiles: list[str]) -> None:
    for dtype in ("float32", "bfloat16", "int32", "bool", "complex64", np.dtype(ml_dtypes.float8_e4m3fn)):
        arrays.make((7, 11), dtype, True, seed=0)
    assert not compiles


def added_up(*arrays: Any, do: int = 1) -> Any:
    return jnp.float32(do + sum(array.size for array in arrays))


def plain(*arrays: Any, do: int) -> Any:
    return added_up(*arrays, do=do)


jitted = jax.jit(added_up, static_argnames=["do"])
ALONE = (np.zeros((0, 3), np.float32),)
LAST = (np.ones(3, np.float32), np.zeros((0, 3), np.float32))


@pytest.mark.filterwarnings("ignore:QUARANTUNE_ISOLATION=none:RuntimeWarning")
@pytest.mark.parametrize(
    ("args", "fn", "settings"),
    [
        (ALONE, jitted, {}),
        (ALONE, plain, {"isolation": "none"}),
        (LAST, plain, {}),
        (LAST, jitted, {"configs_per_worker": 4}),
    ],
    ids=["alone", "alone in process", "last of a plain function", "last of two configs"],
)
def test_a_call_whose_last_array_is_empty_is_tuned(
    args: tuple[Any, ...], fn: Callable[..., Any], settings: dict[str, Any]
) -> None:
    ref_fn = functools.partial(added_up, do=1)
    if args is LAST:
        args = (args[0], jnp.asarray(args[1]))
    with quarantune.settings(**settings):
        result = quarantune.AutoTuner(fn, {"do": [1, 2]}, name="added_up", ref_fn=ref_fn, warmup=0, rep=2).run(*args)
    assert result.trials[0].outcome in ("ok", "slow"), result.table()
    assert result.trials[1].outcome == "wrong", result.table()
