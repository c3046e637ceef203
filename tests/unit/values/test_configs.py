"""Objects in configs reach the function, its workers, the cache and saved results unchanged."""

from __future__ import annotations

import dataclasses
import enum
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quarantune
from quarantune import Outcome
from quarantune.values import space
from quarantune.values.codec import FrozenDict, equal, frozen, originals, restore
from quarantune.values.codec import as_json as encode
from quarantune.values.configs import format_config

pytestmark = pytest.mark.usefixtures("two_slots")


class Number(enum.IntEnum):
    ONE = 1


class Name(enum.StrEnum):
    ONE = "one"


class Way(enum.IntEnum):
    BACK = 0
    FORTH = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    block: int
    way: Way | None = None
    sizes: tuple[int, ...] = ()


class Tile(NamedTuple):
    rows: int
    ways: tuple[Way, ...] = ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, 3),
        ((1, (True,)), [1, [True]]),
        (Way.FORTH, {"$enum": "Way.FORTH"}),
        (Plan(2, Way.BACK), {"$type": "Plan", "block": 2, "way": {"$enum": "Way.BACK"}, "sizes": []}),
        (Tile(2, (Way.BACK,)), {"$type": "Tile", "rows": 2, "ways": [{"$enum": "Way.BACK"}]}),
        (FrozenDict(a=(Way.BACK,)), {"a": [{"$enum": "Way.BACK"}]}),
    ],
)
def test_a_value_survives_a_round_trip_through_json(value: Any, said: Any) -> None:
    config = {"v": value}
    text = json.dumps(encode(config))
    assert json.loads(text) == {"v": said}
    back = restore(json.loads(text), originals([config]))
    assert back == config
    assert type(back["v"]) is type(value)


def test_no_file_content_is_imported_or_built() -> None:
    said = {"v": {"$type": "os.system", "command": "true"}}
    assert restore(said, originals([{"v": Plan(1)}])) == said


def test_configs_of_objects_are_shown_without_class_defaults() -> None:
    config = {"plan": Plan(2, Way.FORTH), "mode": Way.BACK, "more": FrozenDict(a=(1, "x"))}
    assert format_config(config) == 'plan=(block=2, way=FORTH) mode=BACK more={"a":[1,"x"]}'


def test_two_classes_of_one_name_in_one_space_are_refused() -> None:
    def plan(block: int) -> Any:
        @dataclasses.dataclass(frozen=True)
        class Plan:
            block: int

        return Plan(block)

    with pytest.raises(ValueError, match=r"two classes called .*<locals>.Plan', of test_configs and of test_configs"):
        space.expand([{"plan": plan(1)}, {"plan": plan(1)}], fn_name="f")
    space.expand([{"plan": plan(1)}, {"plan": plan(2)}], fn_name="f")


def planned(seen: Callable[[Any], None] = lambda plan: None) -> Callable[..., Any]:
    """Returns an autotuned function with one good config; workers cannot import the config's types."""

    class Mode(enum.Enum):
        FAST = "fast"
        WRONG = "wrong"

    @dataclasses.dataclass(frozen=True)
    class TuningConfig:
        tile: int
        mode: Mode = Mode.FAST
        more: Any = None

    configs = [
        {"config": TuningConfig(1, Mode.WRONG)},
        {"config": TuningConfig(2, more=Way.FORTH), "extra": {"a": [1, 2]}},
        {"config": TuningConfig(3, Mode.WRONG), "extra": {"a": [3]}},
    ]

    def prune_fn(config: Any, x: Any) -> bool:
        return bool(config["config"].tile < 3)

    @quarantune.autotune(configs, prune_fn=prune_fn, name="planned", warmup=0, rep=2)
    @jax.jit(static_argnames=["config", "extra"])
    def fn(x: Any, config: TuningConfig = configs[0]["config"], extra: Any = None) -> Any:
        # Enums are compared by identity: the worker's class must be the function's.
        if config.mode is not Mode.FAST:
            raise ArithmeticError("not this one")
        assert isinstance(config, TuningConfig)
        return x * config.tile + (0 if extra is None else extra["a"][1])

    return fn


def test_objects_reach_workers_caller_and_cache_unchanged(cache_dir: Path, sweeps: list[str]) -> None:
    x = jnp.ones(4)
    fn = planned()
    result = fn.tune(x)  # type: ignore[attr-defined]
    assert [trial.outcome for trial in result.trials] == [Outcome.ERROR, Outcome.OK, Outcome.PRUNED]
    assert "ArithmeticError: not this one" in result.trials[0].message
    assert '*  (tile=2, more=FORTH)  {"a":[1,2]}  ok ' in result.table(width=200)
    np.testing.assert_array_equal(fn(x), np.full(4, 4.0))
    np.testing.assert_array_equal(result.fn(x), np.full(4, 4.0))
    (file,) = cache_dir.glob("*.json")
    ((entry,),) = (by_key.values() for by_key in json.loads(file.read_text()).values())
    assert entry["config"]["config"] == {
        "$type": f"{planned.__qualname__}.<locals>.TuningConfig",
        "tile": 2,
        "mode": {"$enum": f"{planned.__qualname__}.<locals>.Mode.FAST"},
        "more": {"$enum": "Way.FORTH"},
    }

    result.save(cache_dir / "saved")
    restored = quarantune.TuningResult.load(cache_dir / "saved", trusted=True)
    np.testing.assert_array_equal(restored.fn(x), np.full(4, 4.0))
    assert type(restored.best_config["config"]).__name__ == "TuningConfig"
    assert quarantune.TuningResult.load(cache_dir / "saved").best_config["config"]["tile"] == 2

    again = planned()  # new classes with the same names, as another process has
    config = again.lookup(x)  # type: ignore[attr-defined]
    assert dataclasses.asdict(config["config"])["more"] is Way.FORTH
    np.testing.assert_array_equal(again(x), np.full(4, 4.0))
    assert len(sweeps) == 1


def test_objects_reach_compile_only_and_in_process_runs() -> None:
    fn, x = planned(), jnp.ones(4)
    configs = [{"config": config["config"]} for config in fn.function.configs[:2]]  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=r"tile=1.* did not compile: error: ArithmeticError: not this one"):
        failed, compiled = quarantune.compile_configs(fn, configs, x)
    assert failed is None
    assert compiled is not None
    np.testing.assert_array_equal(compiled(x), np.full(4, 2.0))
    with quarantune.settings(isolation="none"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fn.tune(x).best_config == fn.function.configs[1]  # type: ignore[attr-defined]


def test_an_interrupted_sweeps_trial_recalls_its_objects(cache_dir: Path) -> None:
    stopped: list[Any] = []

    def stop_after_two(index: int, phase: str) -> None:
        if phase == "end":
            stopped.append(index)
            if len(stopped) == 2:
                raise KeyboardInterrupt

    def tuner(**options: Any) -> quarantune.AutoTuner:
        configs = [{"plan": Plan(block, Way.FORTH)} for block in (1, 2, 3)]
        # No default: a tuner never calls the function without a config.
        times = jax.jit(lambda x, plan: x * plan.block, static_argnames=["plan"])
        return quarantune.AutoTuner(times, configs, name="recalled", warmup=0, rep=2, **options)

    with pytest.raises(KeyboardInterrupt):
        tuner(on_progress=stop_after_two).run(jnp.ones(4))
    result = tuner().run(jnp.ones(4))
    assert [trial.config["plan"] for trial in result.trials] == [Plan(block, Way.FORTH) for block in (1, 2, 3)]
    assert len(stopped) == 2


def test_kernels_tuned_in_context_get_their_objects() -> None:
    @quarantune.autotune([{"plan": Plan(1, Way.BACK)}, {"plan": Plan(2, Way.FORTH)}], name="inner")
    @jax.jit(static_argnames=["plan"])
    def inner(x: Any, plan: Plan = Plan(1, Way.FORTH)) -> Any:
        if plan.way is not Way.FORTH:
            raise ArithmeticError("this way only")
        return x * plan.block

    @quarantune.contextual_autotune(ref_fn=None, warmup=0, rep=2, name="outer")
    def outer(x: Any) -> Any:
        return inner(x) + 1

    np.testing.assert_array_equal(outer(jnp.ones(4)), np.full(4, 3.0))
    np.testing.assert_array_equal(outer(jnp.ones(4)), np.full(4, 3.0))


# --- dtypes -------------------------------------------------------------------------------------------------


FLOAT32 = np.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Precision:
    inputs: Any = jnp.bfloat16
    sums: Any = FLOAT32


def rounded(configs: Any, **options: Any) -> quarantune.Autotuned:
    @quarantune.autotune(configs, **{"rep": 1, "ref_fn": None, "name": "rounded", **options})
    @jax.jit(static_argnames=["to"])
    def round_to(x: Any, to: Any = np.float32) -> Any:
        to = getattr(to, "inputs", to)
        if np.dtype(to).itemsize > 2:
            raise ArithmeticError(f"{np.dtype(to)} is too wide")
        return x.astype(to)

    return round_to


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (jnp.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (np.dtype("int8"), "int8"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
        (jnp.dtype(jnp.bfloat16), "bfloat16"),
        (jnp.int4, "int4"),
    ],
)
def test_a_dtype_is_saved_by_its_name_and_rebuilt(value: Any, name: str) -> None:
    config = {"v": value, "inside": (value,)}
    (checked,) = space.expand([config], fn_name="f")
    encoded = json.loads(json.dumps(encode(checked)))
    assert encoded == {"v": {"$dtype": name}, "inside": [{"$dtype": name}]}
    back = restore(encoded, originals([checked]))
    assert back["v"] is value or back["v"] == value
    assert type(back["v"]) is type(value)
    assert format_config(checked) == f"v={name} inside=[{name}]"


@pytest.mark.parametrize(
    "value", [object, float, np.dtype("V3"), np.dtype("U2"), np.dtype(">f4"), np.dtype([("a", "f4")]), np.dtype(object)]
)
def test_types_that_are_not_dtypes_of_numbers_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"configs\[0\]\['v'\].*dtypes"):
        space.expand([{"v": value}], fn_name="f")


def test_one_dtype_given_twice_is_one_config() -> None:
    given = [{"v": jnp.float32}, {"v": np.float32}, {"v": np.dtype("float32")}, {"v": "float32"}]
    assert space.expand(given, fn_name="f") == [{"v": jnp.float32}, {"v": "float32"}]


@pytest.mark.parametrize("search", ["auto", "surrogate"])
def test_dtypes_are_tuned_saved_and_found_again(search: str, tmp_path: Path, sweeps: list[str]) -> None:
    configs = [{"to": jnp.float32}, {"to": jnp.bfloat16}, {"to": np.dtype("float64")}]
    fn, x = rounded(configs, search=search), np.ones(4, np.float32)
    result = fn.tune(x)
    assert result.best_config == {"to": jnp.bfloat16}
    assert "to=bfloat16" in repr(result)
    assert "bfloat16" in result.table()
    assert fn(x).dtype == jnp.bfloat16
    fresh = rounded(configs, search=search)
    assert fresh.lookup(x) == {"to": jnp.bfloat16}
    assert fresh(x).dtype == jnp.bfloat16
    assert jax.jit(fresh)(x).dtype == jnp.bfloat16
    assert len(sweeps) == 1
    result.save(tmp_path / "saved")
    loaded = quarantune.TuningResult.load(tmp_path / "saved", trusted=True)
    assert loaded.best_config == {"to": jnp.bfloat16}
    assert loaded.fn(x).dtype == jnp.bfloat16
    quarantune.TuningCache().export(tmp_path / "table")
    with quarantune.settings(cache_dir=tmp_path / "empty", cache_path=tmp_path / "table", on_miss="error"):
        assert rounded(configs, search=search)(x).dtype == jnp.bfloat16
    longer = rounded([*configs, {"to": np.float16}], search=search, max_trials=4).tune(x)
    assert longer.best_config["to"] in (jnp.bfloat16, np.float16)


def test_dtypes_inside_dataclasses_and_grids_are_tuned() -> None:
    x = np.ones(4, np.float32)
    nested = rounded([{"to": Precision()}, {"to": Precision(jnp.float32)}], name="nested")
    assert nested(x).dtype == jnp.bfloat16
    assert nested.lookup(x) == {"to": Precision()}
    assert rounded({"to": [jnp.float32, jnp.float16]}, name="grid")(x).dtype == jnp.float16


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Way.FORTH, "FORTH"),
        ((Way.FORTH, 2, (Way.BACK,)), "[FORTH,2,[BACK]]"),
        (FrozenDict(a=(Way.BACK, None)), '{"a":[BACK,null]}'),
        ((Plan(2, Way.BACK), 1.5), "[Plan(block=2, way=BACK, sizes=[]),1.5]"),
        ((jnp.dtype("bfloat16"),), "[bfloat16]"),
    ],
)
def test_a_config_that_a_file_holds_is_shown_without_tags(value: Any, text: str) -> None:
    assert format_config(frozen(encode({"n": value}))) == f"n={text}"


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (Number.ONE, 1),
        (Name.ONE, "one"),
        ((1, 2), (True, 2)),
        ({"a": 1}, {"a": True}),
    ],
)
def test_values_equal_only_in_python_are_different_configs(value: Any, other: Any) -> None:
    assert value == other
    assert not equal({"n": value}, {"n": other})
    assert not equal({"n": FrozenDict(a=(value,))}, {"n": FrozenDict(a=(other,))})
    assert equal({"n": value}, {"n": value})
    assert equal({"n": np.int64(2)}, {"n": 2})
