"""All searches keep the same rules and protocol, and their spaces are lazy."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import python

import quarantune
from quarantune import Outcome, Trial
from quarantune.search import models, optuna_search, searches, surrogate
from quarantune.search.fields import Features, Fields
from quarantune.search.models import GaussianProcess, levels_of, log_densities
from quarantune.search.strategy import Strategy
from quarantune.values.configs import Config
from quarantune.values.options import check_search
from quarantune.values.space import Space

GRID = {"BM": [16, 32, 64], "BN": [16, 32], "fast": [True, False]}


def ok(config: Config, time_ms: float = 1.0) -> Trial:
    return Trial(config=config, outcome=Outcome.OK, time_ms=time_ms)


def drained(made: quarantune.Search, n: int = 5) -> list[Config]:
    """Returns all configs a search asks for; each gets the outcome `ok` at once."""
    asked: list[Config] = []
    while batch := made.ask(n):
        assert len(batch) <= n
        for config in batch:
            made.tell(config, ok(config, 1.0 + len(asked)))
        asked += batch
    return asked


def endless() -> Iterator[Config]:
    return ({"BM": size} for size in itertools.count(1))


@pytest.mark.parametrize("form", ["grid", "list", "generator"])
def test_a_space_has_the_same_configs_in_every_form(form: str) -> None:
    listed = quarantune.grid(**GRID)
    space = Space({"grid": GRID, "list": listed, "generator": iter(listed)}[form])
    assert list(space) == listed
    assert (space.size, space.whole(), space[7]) == (12, 12, listed[7])
    assert [space.find(config) for config in listed] == list(range(12))
    assert space.find({"BM": 16, "BN": 16, "fast": 1}) is None  # 1 is not True
    assert space.positions_of(space.codes([3, 5])) == [3, 5]
    zeros = [{"x": 0.0}, {"x": -0.0}]  # two configs, because their cache keys differ
    assert [str(config) for config in Space({"grid": {"x": [0.0, -0.0]}}.get(form, zeros))] == list(map(str, zeros))


def test_a_generator_is_run_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "_READ_FIRST_S", 60.0)  # a busy machine may be slow to read 5,000 configs
    yielded = []

    def configs() -> Iterator[Config]:
        for size in range(5000):
            yielded.append(size)
            yield {"BM": size}

    space = Space(configs())
    made = searches.make("exhaustive", space)
    assert [config["BM"] for config in made.ask(400)] == list(range(400))
    assert len(yielded) == 400
    assert space.size is None
    assert len({config["BM"] for config in searches.make("random", space).ask(10)}) == 10
    assert space.size == len(yielded) == 5000


def test_an_endless_generator_is_refused_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarantune.values.space.MOST_CONFIGS", 2000)
    with pytest.raises(ValueError, match=r"matmul: there are more than 2,000 configs: a generator has to end"):
        searches.make("random", Space(endless(), fn_name="matmul"))
    assert len(searches.make("exhaustive", Space(endless())).ask(1500)) == 1500


def test_a_generators_later_configs_are_checked_too() -> None:
    def configs(last: Any) -> Iterator[Any]:
        yield from ({"BM": size} for size in range(400))
        yield last

    with pytest.raises(ValueError, match=r"matmul: configs\[400\] has the key 'BN', which earlier ones lack"):
        Space(configs({"BM": 1, "BN": 2}), fn_name="matmul").whole()
    with pytest.raises(TypeError, match=r"matmul: configs\[400\] is 7; every config is a dict"):
        Space(configs(7), fn_name="matmul").whole()


def test_a_predicate_sees_only_the_configs_looked_at() -> None:
    seen = []

    def keep(config: Config) -> bool:
        seen.append(config)
        return bool(config["BM"] % 2)

    space = Space({"BM": list(range(1000)), "BN": list(range(1000))}).where(keep)
    assert space.has_more_than(300)
    assert len(seen) <= 1301
    assert all(config["BM"] % 2 for config in searches.make("random", space).ask(50))
    assert len(seen) < 2000
    assert space.dropped > 0


def test_a_huge_grid_takes_no_memory_until_it_is_asked() -> None:
    tracemalloc.start()
    try:
        space = Space({name: list(range(100)) for name in "abcdef"})  # 10^12 configs
        made = searches.make("random", space)
        assert len(made.ask(100)) == 100
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match=r"f: configs is a grid of 100,000,000,000,000,000,000 configs, more than"):
        Space({name: list(range(100)) for name in "abcdefghij"}, fn_name="f")


def test_the_surrogate_starts_in_a_large_grid_without_listing() -> None:
    import quarantune.search.models  # noqa: F401  its imports are not in question

    tracemalloc.start()
    try:
        began = time.process_time()
        space = Space({name: list(range(10)) for name in "abcde"}).where(lambda config: config["a"] != config["b"])
        made = searches.make("surrogate", space)
        first = made.ask(8)
        assert time.process_time() - began < 1
        for count, config in enumerate(itertools.chain(first, *(made.ask(8) for _ in range(3))), 1):
            made.tell(config, ok(config, count))
        assert len(made.ask(8)) == 8
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "space",
    [
        [{"BM": 1}],
        {"BM": [None, 1, 2], "BN": list(range(12))},
        {"via": [(1, 2), (3, 4), (5, 6)], "BM": [10**300, 1, -1e308, 0.0], "fast": [1, True, 1.0]},
        {"outcome": list(Outcome), "BM": [-4, 0, 0.5, 3.5]},
        {"scale": [0.0, -0.0], "one": [1, 1.0], "large": [2**60, 2**60 + 1], "BM": list(range(5))},
    ],
)
def test_the_surrogate_takes_every_kind_of_value(space: Any) -> None:
    made, asked = searches.make("surrogate", Space(space)), []
    while batch := made.ask(8):
        for config in batch:
            asked.append(config)
            fails = len(asked) % 2
            made.tell(config, Trial(config=config, outcome=Outcome.CRASHED) if fails else ok(config, len(asked)))
    assert sorted(map(str, asked)) == sorted(map(str, Space(space)))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A config like those of JAX's kernels."""

    shape: tuple[int, ...]
    steps: int = 2
    minor: Outcome = Outcome.OK


def test_values_that_hold_several_are_taken_apart() -> None:
    tiles = [Tiles((m, n), steps) for m in (64, 128) for n in (64, 128, 256) for steps in (2, 4) if m * n < 2**15]
    space = Space([{"tiles": each, "BK": size, "block": (8,)} for each in tiles for size in (32, 64)])
    fields = Fields(space)
    assert fields.names == ["tiles.shape[0]", "tiles.shape[1]", "tiles.steps", "tiles.minor", "BK", "block[0]"]
    assert fields.values == [[64, 128], [64, 128, 256], [2, 4], [Outcome.OK], [32, 64], [8]]
    codes = fields.codes(range(space.whole()))
    assert codes[[0, 3, 19]].tolist() == [[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0]]
    assert fields.positions_of(codes) == list(range(20))
    assert fields.positions_of(np.array([[1, 2, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0]])) == [5]  # the first is not a config


def test_values_of_different_shapes_are_split_if_they_differ() -> None:
    def fields_of(*values: Any) -> list[tuple[str, list[Any]]]:
        fields = Fields(Space([{"x": value} for value in values]))
        assert fields.positions_of(fields.codes(range(len(values)))) == list(range(len(values)))
        return list(zip(fields.names, fields.values, strict=True))

    assert fields_of((1,), (1, 2)) == [("x[0]", [1]), ("x[1]", [None, 2])]
    assert fields_of(None, (1, 2)) == [("x", [None]), ("x[0]", [None, 1]), ("x[1]", [None, 2])]
    assert fields_of({"flag": True}, {"flag": False, "level": 1}) == [
        ("x['flag']", [True, False]),
        ("x['level']", [None, 1]),
    ]
    assert fields_of((), (None,)) == [("x", [(), (None,)])]  # apart, both would be None
    assert fields_of(3, 1, "a") == [("x", [3, 1, "a"])]


@pytest.mark.parametrize("name", ["surrogate", pytest.param("optuna:tpe", marks=pytest.mark.clients)])
def test_a_configs_result_helps_with_configs_that_share_parts(name: str) -> None:
    shapes, steps = list(itertools.product([16, 32, 64, 128], repeat=2)), [1, 2, 3, 4]
    flat = Space([{"m": m, "n": n, "steps": count} for m, n in shapes for count in steps])
    whole = Space([{"tiles": Tiles((m, n), count)} for m, n in shapes for count in steps])
    asked: list[list[int]] = []
    for space in (flat, whole):
        made, positions = searches.make(name, space, seed=5), []
        while len(positions) < 40:
            for config in made.ask(4):
                positions.append(space.find(config))
                m, n = shapes[positions[-1] // 4]
                made.tell(config, ok(config, 1 + abs(m - 64) + abs(n - 32) + positions[-1] % 4))
        asked.append(positions)
    assert asked[0] == asked[1]


def test_the_densities_prefer_what_the_good_have_more_often() -> None:
    space = Space({"size": [8, 64, 1, 512], "word": ["a", "b"], "many": list(range(1000)), "one": [1]})
    levels = [levels_of(values) for values in Fields(space).values]
    known = np.array([[0, 0, 500, 0], [0, 0, 510, 0], [3, 1, 100, 0], [2, 1, 900, 0]])
    asked = np.array([[0, 0, 505, 0], [1, 0, 505, 0], [3, 0, 505, 0], [0, 1, 505, 0], [0, 0, 905, 0]])
    good, others = log_densities(levels, known, np.array([True, True, False, False]), asked)
    ratio = (good - others).tolist()
    assert max(ratio) == ratio[0]
    assert ratio[0] > ratio[1] > ratio[2]  # 64 is next to 8
    assert min(ratio[0] - ratio[3], ratio[0] - ratio[4]) > 1


def test_long_lists_and_choices_also_tell_values_apart_singly() -> None:
    lists = {"size": [16, 32, 64], "choice": [2, 0, 1], "many": list(range(8, 80, 8)), "flag": [0, 1]}
    features = Features(Fields(Space(lists)))
    codes = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 8, 0], [1, 0, 0, 0]])
    points = features.points(codes)
    assert features.ordered == 5  # `many` also has halvings
    assert points.shape[1] == 5 + 3 + 9
    apart = ((points[1:, features.ordered :] - points[0, features.ordered :]) ** 2).sum(1)
    assert apart.round(9).tolist() == [1, 1, 1, 0]


def test_updating_a_forecast_equals_making_it_with_the_value() -> None:
    rng = np.random.default_rng(1)
    points, values = rng.random((12, 2)), rng.standard_normal(12)
    process = GaussianProcess(np.array([0, 1]), 2)
    process.learn(points[:9], values[:9], steps=5)
    told = process.predict(points)
    told.observe(9)
    told.observe(10)
    told.tell(10, values[10])
    told.tell(9, values[9])  # told in another order than asked
    told.tell(11, values[11])
    process.learn(points, values, steps=0)
    anew = process.predict(points)
    assert told.mean == pytest.approx(anew.mean, abs=1e-4)
    assert told.variance == pytest.approx(anew.variance, abs=1e-4)


@pytest.mark.parametrize("others", [0, 1, 2, 3])
def test_both_models_choose_however_many_configs_are_under_way(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"densities": 0, "process": 0}

    def counting(owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name)

        def counted(*given: Any, **options: Any) -> Any:
            chosen[label] += 1
            return real(*given, **options)

        monkeypatch.setattr(owner, name, counted)

    counting(models.Models, "_densest", "densities")
    counting(models.Models, "_most_improving", "process")
    made = searches.make("surrogate", Space({"a": list(range(20)), "b": list(range(20))}))
    pending = made.ask(others)
    for number in range(16 + 30):
        pending += made.ask(1)
        config = pending.pop(0)
        made.tell(config, ok(config, 1.0 + number))
    assert chosen["densities"] >= 9
    assert chosen["process"] >= 18


def test_a_search_begins_before_scipy_is_imported() -> None:
    python("-c", "import sys, quarantune.search.surrogate; sys.exit('scipy' in sys.modules)")


def test_a_search_continues_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    made = searches.make("surrogate", Space({"a": list(range(6)), "b": list(range(6))}))
    assert len(drained(made)) == 36


@pytest.mark.parametrize("name", ["exhaustive", "random", "surrogate"])
def test_starts_come_first_and_nothing_is_asked_twice(name: str) -> None:
    space = Space(GRID).where(lambda config: config["BN"] == 16 or config["BM"] == 64)
    defaults, start = {"BM": 64, "BN": 32, "fast": False}, {"BM": 32, "BN": 16, "fast": True}
    elsewhere, dropped = {"BM": 128, "BN": 16, "fast": True}, {"BM": 16, "BN": 32, "fast": True}
    made = searches.make(name, space, seed=3, starts=[defaults, elsewhere, dropped, start, defaults])
    known = {"BM": 16, "BN": 16, "fast": True}
    made.tell(known, ok(known))  # a journal's trial
    made.tell(elsewhere, ok(elsewhere))
    asked = drained(made)
    assert asked[:2] == [defaults, start]
    assert sorted(map(str, asked)) == sorted(str(space[at]) for at in space.positions() if space[at] != known)


@pytest.mark.parametrize("name", ["random", "surrogate"])
def test_the_same_seed_asks_the_same(name: str) -> None:
    first, again, other = (drained(searches.make(name, Space(GRID), seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_auto_tries_a_small_space_whole_after_pruning() -> None:
    grid = {"BM": list(range(40)), "BN": list(range(20))}
    assert isinstance(searches.make("auto", Space(grid)), surrogate.Surrogate)
    assert type(searches.make("auto", Space(grid).where(lambda config: config["BN"] < 7))) is Strategy


class Backwards:
    """A user's search: asks for configs from last to first, and repeats the last two each time."""

    def __init__(self, configs: list[Config]) -> None:
        self.left = list(configs)
        self.told: list[tuple[Config, float | None]] = []
        self.last = configs[-2:]

    def ask(self, n: int) -> list[Config]:
        fresh = min(max(n - len(self.last), 0), len(self.left))
        return [*self.last[:n], *(self.left.pop() for _ in range(fresh))]

    def tell(self, config: Config, trial: Trial) -> None:
        self.told.append((config, trial.time_ms))
        if len(self.told) == 20:
            self.last = []


def test_a_users_search_object_repeats_nothing() -> None:
    listed = quarantune.grid(**GRID)
    mine = Backwards(listed)
    assert isinstance(mine, quarantune.Search)
    asked = drained(searches.make(mine, Space(GRID), starts=listed[:1]))
    assert asked[0] == listed[0]
    assert len(asked) == 12
    assert sorted(map(str, asked)) == sorted(map(str, listed))
    assert len(mine.told) > 12  # repeated configs get their known trial


def test_a_users_search_that_asks_nonsense_is_an_error() -> None:
    class Odd(Backwards):
        def ask(self, n: int) -> list[Config]:
            return [self.answer] * n

    odd = Odd(quarantune.grid(**GRID))
    odd.answer = {"BM": 17, "BN": 16, "fast": True}
    with pytest.raises(ValueError, match=r"Odd.ask returned \{'BM': 17.*which is not one of the configs"):
        searches.make(odd, Space(GRID)).ask(1)
    odd.answer = 7
    with pytest.raises(TypeError, match=r"Odd.ask returned 7 among the configs; every config is a dict"):
        searches.make(odd, Space(GRID)).ask(1)


def test_a_wrong_choice_of_search_is_refused_with_the_choices() -> None:
    for name in ("auto", "exhaustive", "random", "surrogate", "optuna:tpe"):
        check_search(name)
    with pytest.raises(ValueError, match=r"search='surogate' is not valid. Did you mean 'surrogate'\? Give 'auto', "):
        check_search("surogate")
    with pytest.raises(TypeError, match=r"is not a search: give 'auto', .*, or an object with the methods ask\(n\)"):
        check_search(7)
    with pytest.raises(TypeError, match=r"is not a search"):
        check_search(Backwards)  # a class, not an object


@pytest.mark.long
@pytest.mark.clients
def test_samplers_of_optuna_search_and_repeat_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    for name in ("optuna:tpe", "optuna:random", "optuna:nsgaii"):
        space = Space({**GRID, "via": ["a", "b", "c"]}).where(lambda config: config["BN"] == 16)
        made = searches.make(name, space, seed=2**70 + 1, starts=[{"BM": 64, "BN": 16, "fast": True, "via": "c"}])
        known = {"BM": 16, "BN": 16, "fast": True, "via": "a"}
        made.tell(known, ok(known))
        asked = drained(made)
        assert asked[0] == {"BM": 64, "BN": 16, "fast": True, "via": "c"}
        assert sorted(map(str, asked)) == sorted(str(space[at]) for at in space.positions() if space[at] != known)
    with pytest.raises(ValueError, match=r"search='optuna:tpx' is not valid: .* Did you mean 'tpe'\? Give one of "):
        searches.make("optuna:tpx", Space(GRID))
    monkeypatch.setitem(optuna_search._NEEDED, "tpe", "no_such_module")
    with pytest.raises(ImportError, match=r"search='optuna:tpe' needs no_such_module.*: pip install no_such_module"):
        searches.make("optuna:tpe", Space(GRID))


@pytest.mark.clients
def test_a_failure_is_worst_even_if_the_worst_score_is_0() -> None:
    pytest.importorskip("optuna")
    made = searches.make("optuna:random", Space(GRID))
    first, second, failed = made.ask(3)
    made.tell(first, dataclasses.replace(ok(first), score=-1.0))
    made.tell(second, dataclasses.replace(ok(second), score=0.0))
    made.tell(failed, Trial(config=failed, outcome=Outcome.ERROR))
    assert isinstance(made, optuna_search.OptunaSearch)
    assert [trial.value for trial in made._study.trials][2] == 0.0


@pytest.mark.long
@pytest.mark.clients
def test_every_sampler_of_optuna_that_is_offered_can_search() -> None:
    samplers = pytest.importorskip("optuna").samplers
    with pytest.raises(ValueError, match="Give one of ") as refused:
        searches.make("optuna:none", Space(GRID))
    names = str(refused.value).partition("Give one of ")[2].rstrip(".").split(", ")
    assert {"tpe", "random", "nsgaii"} <= set(names) <= {it.removesuffix("Sampler").lower() for it in samplers.__all__}
    for name in names:
        if importlib.util.find_spec(optuna_search._NEEDED.get(name, "optuna")):
            assert len(drained(searches.make(f"optuna:{name}", Space(GRID)))) == 12, name


def test_a_search_without_optuna_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"needs Optuna.*pip install 'quarantune\[optuna\]'"):
        searches.make("optuna:tpe", Space(GRID))


def test_linear_algebra_of_a_search_uses_one_thread() -> None:
    pytest.importorskip("scipy.linalg")
    functions = models._openblas_functions()
    if not functions:
        pytest.skip("NumPy does not use OpenBLAS here")
    before = [get() for get, _ in functions]
    with models._one_thread():
        assert [get() for get, _ in functions] == [1] * len(functions)
    assert [get() for get, _ in functions] == before
