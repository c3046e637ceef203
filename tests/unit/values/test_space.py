"""A config space of any form becomes one list of configs, and a bad space is refused with a remedy."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest

from quarantune.values.configs import check_parameters, configs_made_by
from quarantune.values.space import Space, expand, grid


class Size(enum.IntEnum):
    SMALL = 16


class Order(enum.Enum):
    ROWS = "rows"


@dataclasses.dataclass(frozen=True)
class Tile:
    sizes: Any
    order: Order = Order.ROWS


@dataclasses.dataclass
class Loose:
    size: int


def _within_itself() -> list[Any]:
    inner: list[Any] = [1]
    inner.append(inner)
    return inner


def _nested(depth: int) -> Any:
    return 1 if depth == 0 else [_nested(depth - 1)]


def matmul(a: Any, b: Any, BM: int = 32, BN: int = 64, *, flip: bool, scale: float = 1.0) -> None: ...


MATMUL = inspect.signature(matmul)


def test_a_dict_of_lists_is_a_grid_with_the_last_key_fastest() -> None:
    assert expand({"BM": [16, 32], "BN": (1, 2)}, fn_name="f") == [
        {"BM": 16, "BN": 1},
        {"BM": 16, "BN": 2},
        {"BM": 32, "BN": 1},
        {"BM": 32, "BN": 2},
    ]


def test_a_grid_takes_its_lists_by_name() -> None:
    assert grid(BM=range(1, 3), mode=["x"]) == [{"BM": 1, "mode": "x"}, {"BM": 2, "mode": "x"}]


@pytest.mark.parametrize("make", [list, tuple, iter])
def test_dicts_come_from_any_iterable(make: Any) -> None:
    assert expand(make([{"BM": 1}, {"BM": 2}]), fn_name="f") == [{"BM": 1}, {"BM": 2}]


def test_a_repeated_config_is_kept_once_at_its_first_place() -> None:
    configs = [{"a": 1, "b": 2}, {"a": 3, "b": 4}, {"b": 2, "a": 1}, {"a": np.int64(3), "b": 4}]
    assert expand(configs, fn_name="f") == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]


def test_values_of_different_types_are_different_configs() -> None:
    types = [type(config["a"]) for config in expand({"a": [1, True, 1.0]}, fn_name="f")]
    assert types == [int, bool, float]


def test_values_become_plain_hashable_python() -> None:
    values = [np.int32(3), np.float64(0.5), np.bool_(True), np.str_("x"), [1, [np.int8(2)]], (), None]
    found = [config["a"] for config in expand([{"a": value} for value in values], fn_name="f")]
    assert found == [3, 0.5, True, "x", (1, (2,)), (), None]
    assert [type(value) for value in found] == [int, float, bool, str, tuple, tuple, type(None)]
    hash(tuple(found))


def test_enums_dataclasses_and_dicts_become_hashable() -> None:
    values = [Size.SMALL, 16, Order.ROWS, "ROWS", Tile((1, 2)), Tile([1, np.int64(2)]), {"x": [1]}, {"x": (True,)}]
    found = [config["a"] for config in expand([{"a": value} for value in values], fn_name="f")]
    assert found == [Size.SMALL, 16, Order.ROWS, "ROWS", Tile((1, 2)), {"x": (1,)}, {"x": (True,)}]
    assert [type(value) for value in found[:2]] == [Size, int]
    hash(tuple(found))
    with pytest.raises(TypeError, match="cannot be changed"):
        found[-1]["x"] = 2


def test_missing_keys_take_the_functions_defaults() -> None:
    configs = [{"BM": 16}, {"BN": 16, "BM": 8}, {"BM": 16, "BN": 64}]
    found = expand(configs, fn_name="matmul", parameters=MATMUL)
    assert found == [{"BM": 16, "BN": 64}, {"BM": 8, "BN": 16}]
    made = expand(configs_made_by(lambda: iter(configs), (), {}, fn_name="matmul"), fn_name="matmul", parameters=MATMUL)
    assert made == found


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ([{"BM": 1}, {"flip": True}], r"configs\[0\] lacks 'flip', which has no default"),
        ([{"BM": 1}, {"bm": 2}], "lacks 'bm', .*Did you mean 'BM'"),
    ],
)
def test_a_missing_key_without_a_default_is_refused(configs: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        expand(configs, fn_name="matmul", parameters=MATMUL)


def test_a_numpy_range_is_a_list_of_values() -> None:
    assert expand({"a": np.arange(2)}, fn_name="f") == [{"a": 0}, {"a": 1}]


@pytest.mark.parametrize(
    ("configs", "error", "says"),
    [
        ([], ValueError, "configs is empty"),
        ({"a": [1, 10**5000]}, ValueError, r"configs.*\['a'\] is a number of over 1000 bits"),
        ([{"a": (1, 10**400)}], ValueError, r"configs\[0\]\['a'\]\[1\] is a number of over 1000 bits"),
        ({}, ValueError, "no keys"),
        ([{}], ValueError, "no keys"),
        ({"a": []}, ValueError, r"configs\['a'\] is empty"),
        ({"a": {1, 2}}, TypeError, "list of values to try"),
        ({"a": 3}, TypeError, r"\{'a': \[3\]\}"),
        ({"a": "xy"}, TypeError, r"\{'a': \['xy'\]\}"),
        (None, TypeError, "give a list of dicts"),
        ("abc", TypeError, "give a list of dicts"),
        (3, TypeError, "give a list of dicts"),
        ([{"a": 1}, 2], TypeError, r"configs\[1\] is 2"),
        ([{"a": 1}, {"b": 1}], ValueError, "the same keys"),
        ([{"a": 1}, {"a": 1, "b": 1}], ValueError, "the same keys"),
        ([{1: 1}], TypeError, "names of parameters"),
        ([{"a": object()}], TypeError, r"configs\[0\]\['a'\].*the types of JSON"),
        ([{"a": {1: 1}}], TypeError, r"\['a'\] has the key 1"),
        ([{"a": {"$enum": 1}}], TypeError, "do not begin with"),
        ([{"a": Tile([object()])}], TypeError, r"\['a'\].sizes\[0\] is <object"),
        ([{"a": Loose(1)}], TypeError, r"no hash.*@dataclass\(frozen=True\) above class Loose"),
        ([{"a": _within_itself()}], ValueError, r"\['a'\]\[1\] contains itself"),
        ([{"a": _nested(100)}], ValueError, "nested more than 32 deep"),
        (({"a": index} for index in itertools.count()), ValueError, "a generator has to end"),
        ({"a": range(10**3), "b": range(10**3)}, ValueError, "a grid of 1,000,000 configs"),
        ([{"a": [1, {2}]}], TypeError, r"\['a'\]\[1\]"),
        ([{"a": np.ndarray}], TypeError, "look the object up"),
        ([{"a": 1j}], TypeError, "the types of JSON"),
        ([{"a": np.datetime64("2020-01-01")}], TypeError, "the types of JSON"),
        ([{"a": math.nan}], ValueError, "finite"),
        ([{"a": (1.0, np.float32("inf"))}], ValueError, "finite"),
    ],
)
def test_an_invalid_config_space_is_refused_with_a_remedy(
    configs: Any, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quarantune.values.space.MOST_CONFIGS", 2000)
    with pytest.raises(error, match=says) as caught:
        expand(configs, fn_name="matmul")
    assert str(caught.value).startswith("matmul: ")


def test_a_function_makes_configs_from_the_call() -> None:
    def by_size(x: int, *, most: int) -> Any:
        yield from ({"BM": size} for size in (x, 2 * x, 4 * x) if size <= most)

    assert expand(configs_made_by(by_size, (8,), {"most": 16}, fn_name="f"), fn_name="f") == [{"BM": 8}, {"BM": 16}]
    assert expand(configs_made_by(lambda: {"a": [1, 2]}, (), {}, fn_name="f"), fn_name="f") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("made", [[], (), iter(()), {}])
def test_a_function_that_makes_no_config_is_refused(made: Any) -> None:
    with pytest.raises(ValueError, match="yielded no config"):
        expand(configs_made_by(lambda: made, (), {}, fn_name="f"), fn_name="f")


@pytest.mark.parametrize(("made", "says"), [(None, "returned None"), (7, "give a list of dicts")])
def test_a_function_that_makes_something_else_is_refused(made: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        expand(configs_made_by(lambda: made, (), {}, fn_name="f"), fn_name="f")


def test_static_keyword_parameters_with_defaults_are_accepted() -> None:
    configs = grid(BM=[1], scale=[0.5])
    check_parameters(configs, parameters=MATMUL, static_names=frozenset({"BM", "scale"}), fn_name="matmul")


@pytest.mark.parametrize(
    ("configs", "static", "error", "says"),
    [
        (grid(BMM=[1]), {"BM"}, TypeError, "not a parameter of matmul.*Did you mean 'BM'"),
        (grid(zzz=[1]), {"BM"}, TypeError, r"Add it to the function, as in `zzz=1`"),
        (grid(BM=[1], BN=[2]), {"BM"}, ValueError, r"@jax.jit\(static_argnames=\['BM', 'BN'\]\)"),
        (grid(bm=[1]), {"BM"}, TypeError, "Did you mean 'BM'"),
        (grid(flip=[True]), {"flip"}, TypeError, r"def matmul\(..., flip=True\)"),
    ],
)
def test_an_untunable_function_is_refused_with_a_remedy(
    configs: Any, static: set[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_parameters(configs, parameters=MATMUL, static_names=frozenset(static), fn_name="matmul")


@pytest.mark.parametrize("source", ["lambda x, *BM: x", "lambda x, **BM: x", "lambda x, BM=1, /: x"])
def test_a_parameter_that_takes_no_keyword_is_refused(source: str) -> None:
    with pytest.raises(TypeError, match="cannot be passed by keyword"):
        check_parameters(
            grid(BM=[1]),
            parameters=inspect.signature(eval(source)),
            static_names=frozenset({"BM"}),
            fn_name="f",
        )


def test_a_key_swallowed_by_keyword_arguments_is_refused() -> None:
    signature = inspect.signature(lambda x, **rest: x)
    with pytest.raises(TypeError, match="not a parameter"):
        check_parameters(grid(BM=[1]), parameters=signature, static_names=frozenset({"BM"}), fn_name="f")


def test_a_predicate_is_not_asked_about_a_whole_huge_grid() -> None:
    asked = itertools.count()

    def keeps_one(config: Any) -> bool:
        next(asked)
        return bool(config["a"] == config["b"] == config["c"] == 99)

    huge = Space({name: list(range(100)) for name in "abc"}).where(keeps_one)
    assert huge.has_more_than(300), "a search then finds what is left"
    assert next(asked) == 100_000
    small = Space({"a": [1, 2, 3]}).where(lambda config: config["a"] != 2)
    assert [small.has_more_than(count) for count in (0, 1, 2)] == [True, True, False]
    assert not small.has_more_than(0, besides={0, 2})
    read: list[int] = []
    generated = Space({"n": n} for n in range(1000) if read.append(n) or True)  # type: ignore[func-returns-value]
    assert generated.has_more_than(3)
    assert len(read) < 500
