"""A search decides which configs a sweep tries, as places become free, and its budget ends it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import runpy
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT
from scripted import GB, SLOTS, TARGET, Clock, FakeSandbox, compiles, for_config, measures, plan_for

from quarantune import settings
from quarantune.calls.call import space_of
from quarantune.sweep.limits import SearchLimits
from quarantune.sweep.searching import Searching
from quarantune.tuning.outcome import more_thorough
from quarantune.tuning.starts import difference
from quarantune.values import blocks
from quarantune.values.codec import text_of
from quarantune.values.configs import Config
from quarantune.values.options import Options
from quarantune.values.space import Space, expand
from quarantune.values.trial import Findings, Outcome, Phase, Route, Searched, Trial

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes
EXAMPLES = ROOT / "examples"
RECORDINGS = EXAMPLES / "spaces"
read = runpy.run_path(str(EXAMPLES / "search_replay.py"))["read"]
ROUTES = pytest.mark.parametrize("route", [Route.APART, Route.TOGETHER])


class Growing:
    """A source of configs that sometimes waits for trials, and records its calls."""

    def __init__(self, count: int, *, batch: int = 100, stop_after: int | None = None) -> None:
        self.left = list(range(count))
        self.batch = batch
        self.stop_after = stop_after
        self.pending: set[int] = set()
        self.told: dict[int, Trial] = {}
        self.most_pending = 0
        self.times_asked: list[float] = []

    @property
    def is_closed(self) -> bool:
        return not self.left

    def take(self, count: int) -> Mapping[int, Config]:
        assert count > 0
        count = min(count, self.batch - len(self.pending))
        taken, self.left = self.left[:count], self.left[count:]
        self.pending |= set(taken)
        self.most_pending = max(self.most_pending, len(self.pending))
        return {index: {"id": index} for index in taken}

    def ended(self, index: int, trial: Trial) -> None:
        assert index not in self.told
        self.pending.remove(index)
        self.told[index] = trial

    def reason_to_stop(self) -> str:
        if self.stop_after is None or len(self.told) < self.stop_after:
            return ""
        self.left = []
        return "the time was over"


def run(source: Growing, route: Route, act: Any = lambda worker: None, **changes: Any) -> tuple[dict[int, Trial], Any]:
    clock = Clock()
    sandbox = FakeSandbox(clock, act)
    trials: dict[int, Trial] = {}
    scheduler = plan_for(route, **changes).scheduler(
        sandbox,
        on_trial=lambda index, trial, log: trials.update({index: trial}),
        source=source,
        clock=clock,
        available_memory=lambda: 100 * GB,
    )
    scheduler.run({})
    scheduler.close()
    return trials, (sandbox, clock.now - 1000.0)


@ROUTES
def test_every_config_of_a_source_gets_an_outcome(route: Route) -> None:
    source = Growing(20)
    trials, (sandbox, _) = run(source, route)
    assert sorted(trials) == sorted(source.told) == list(range(20))
    assert {trial.outcome for trial in trials.values()} == {Outcome.OK}
    assert sandbox.most_compiling == SLOTS


@ROUTES
def test_a_source_is_asked_as_late_as_places_become_free(route: Route) -> None:
    source = Growing(40)
    run(source, route, parked=4)
    # Configs that compile, wait or are measured, and one batch just taken.
    assert source.most_pending <= SLOTS + 4 + 1 + 8


def test_slots_are_busy_while_a_worker_initialises_its_device() -> None:
    def act(worker: Any) -> Any:
        return [(2.3, worker.says("Ready", "load", modules=[]))] if worker.do == "Prepare" else None

    source = Growing(60)
    _, (sandbox, _) = run(source, Route.APART, act, slots=8, parked=4)
    before = list(itertools.takewhile(lambda worker: worker.do != "Measure", sandbox.given))
    # Each compiles in 1.2 s: 16 have begun after 2.3 s.
    assert sum(worker.do == "Compile" for worker in before) == 16
    assert source.most_pending <= 16 + 8


@ROUTES
def test_a_source_that_waits_for_trials_gets_them_without_delay(route: Route) -> None:
    waiting = Growing(12, batch=2)
    trials, (_, waited_s) = run(waiting, route)
    assert len(trials) == 12
    # Each pair compiles for a second and is measured in turn: nothing waits for a tick or a deadline.
    assert waited_s < 6 * 2.5


def test_growing_is_as_quick_as_knowing_all_configs() -> None:
    _, (_, growing_s) = run(Growing(30), Route.APART)
    clock = Clock()
    plan = plan_for(Route.APART)
    plan.scheduler(
        FakeSandbox(clock, lambda worker: None),
        on_trial=lambda *_: None,
        clock=clock,
        available_memory=lambda: GB,
    ).run({index: {"id": index} for index in range(30)})
    assert growing_s <= 1.1 * (clock.now - 1000.0)


@ROUTES
def test_after_the_time_only_measured_configs_finish(route: Route) -> None:
    def act(worker: Any) -> Any:
        if worker.do == "Compile" and worker.trial >= 6:
            return compiles(worker, compile_s=4.0)
        return measures(worker, seconds=1.5) if worker.do == "Measure" else None

    source = Growing(100, stop_after=2)
    trials, (_, seconds) = run(source, route, act)
    outcomes = [trial.outcome for trial in trials.values()]
    assert set(outcomes) == {Outcome.OK, Outcome.NOT_RUN}
    assert len(trials) < 20
    assert all(trial.message == "the time was over" for trial in trials.values() if trial.outcome is Outcome.NOT_RUN)
    assert source.told == trials
    assert seconds < 15


@ROUTES
def test_configs_that_a_source_gives_may_fail_like_all_others(route: Route) -> None:
    def act(worker: Any) -> Any:
        return [(0.1, worker.ends(3))] if worker.do == "Compile" and worker.trial % 2 else None

    source = Growing(10)
    trials, _ = run(source, route, act)
    assert [trials[index].outcome for index in range(10)] == [Outcome.OK, Outcome.CRASHED] * 5


# The search of a sweep


def trial(config: Config, time_ms: float | None, outcome: Outcome = Outcome.OK) -> Trial:
    return Trial(config=config, outcome=outcome, phase=Phase.MEASURE, time_ms=time_ms)


def limits(**changes: Any) -> SearchLimits:
    plain = SearchLimits(search="exhaustive", max_trials=None, time_budget_s=None, patience=None, seed=0)
    return dataclasses.replace(plain, **changes)


SPACE = [{"n": n} for n in range(10)]


def searching(given: SearchLimits, configs: list[Config] = SPACE, **more: Any) -> Searching:
    return Searching(given, Space(configs), **more)


def test_defaults_come_first_then_starts_then_the_search() -> None:
    search = searching(limits(), defaults=4, starts=[{"n": 7}, {"n": 4}, {"n": 99}])
    assert list(search.take(4)) == [4, 7, 0, 1]


def test_trials_count_up_to_the_budget_without_pruned_ones() -> None:
    search = Searching(limits(max_trials=3), Space(SPACE).where(lambda config: config["n"] >= 2))
    taken = search.take(10)
    assert list(taken) == [2, 3, 4]
    assert search.is_closed
    for index, config in taken.items():
        search.ended(index, trial(config, 1.0))
    assert search.stopped == "max_trials"


def test_a_search_that_has_tried_all_says_so_whatever_its_budget() -> None:
    search = searching(limits(max_trials=10))
    for index, config in search.take(10).items():
        search.ended(index, trial(config, 1.0))
    assert search.take(1) == {}
    assert search.stopped == "exhausted"


def test_a_search_without_a_gain_ends_after_its_patience() -> None:
    search = searching(limits(patience=3))
    times = [5.0, 4.0, 3.99, 3.985, 4.5]  # the later ones gain less than half a percent over 4.0
    for time_ms in times:
        assert search.stopped == ""
        ((index, config),) = search.take(1).items()
        search.ended(index, trial(config, time_ms))
    assert search.is_closed
    assert search.stopped == "patience"


def test_failures_use_up_patience_only_once_something_works() -> None:
    search = searching(limits(patience=2))
    for _ in range(6):
        ((index, config),) = search.take(1).items()
        search.ended(index, trial(config, None, Outcome.ERROR))
    assert not search.is_closed


def test_failures_while_configs_compile_use_up_no_patience() -> None:
    search = searching(limits(patience=2))
    ((index, config),) = search.take(1).items()
    search.ended(index, trial(config, 1.0))
    ends = [(Outcome.ERROR, Phase.COMPILE)] * 5 + [(Outcome.TIMEOUT, Phase.COMPILE), (Outcome.ERROR, Phase.CHECK)]
    for outcome, phase in ends:  # only the last two count
        assert not search.is_closed
        ((index, config),) = search.take(1).items()
        search.ended(index, dataclasses.replace(trial(config, None, outcome), phase=phase))
    assert search.is_closed
    assert search.stopped == "patience"


class Hopeful:
    """A search that expects a gain for its first `told` trials and `asked` configs."""

    def __init__(self, told: int = 100, asked: int = 100) -> None:
        self.left_to_tell, self.left_to_ask = told, asked
        self.configs = iter(SPACE)

    @property
    def expects_gain(self) -> bool:
        return self.left_to_tell > 0 and self.left_to_ask > 0

    def ask(self, n: int) -> list[Config]:
        self.left_to_ask -= n
        return list(itertools.islice(self.configs, n))

    def tell(self, config: Config, trial: Trial) -> None:
        self.left_to_tell -= 1


def test_waiting_configs_do_not_run_once_no_gain_is_expected() -> None:
    search = searching(limits(search=Hopeful(told=2), ends_without_hope=True))
    taken = search.take(4)
    for index in (0, 1):
        assert (search.is_closed, search.reason_to_stop()) == (False, "")
        search.ended(index, trial(taken[index], 1.0))
    assert (search.is_closed, search.take(2), search.stopped) == (True, {}, "no_gain")
    assert search.reason_to_stop() == "the search expected no gain of 0.5%"
    for index in (2, 3):
        search.ended(index, trial(taken[index], None, Outcome.NOT_RUN))
    assert (search.stopped, search.saw_all) == ("no_gain", False)
    assert limits().why_ended("no_gain") == "the search ended after its model expected no gain of 0.5%"
    for budget_s, text in ((2 / 3, "0.667 s"), (90.0625, "90.1 s"), (3600.0, "3600 s"), (1234.5678, "1235 s")):
        assert limits(time_budget_s=budget_s).why_ended("time_budget") == f"the search ended after {text}"


def test_a_model_may_end_the_search_while_it_is_asked() -> None:
    search = searching(limits(search=Hopeful(asked=4), ends_without_hope=True))
    for index, config in search.take(3).items():
        search.ended(index, trial(config, 1.0))
    assert (search.take(3), search.stopped) == ({}, "no_gain")


def test_without_the_option_a_search_continues_without_a_gain() -> None:
    search = searching(limits(search=Hopeful(told=1)))
    for index, config in search.take(8).items():
        search.ended(index, trial(config, 1.0))
    assert (len(search.take(8)), search.is_closed) == (2, False)


def auto(trials: list[Trial], configs: Any = None, **options: Any) -> tuple[Searching, list[Trial]]:
    """Runs `auto` on recorded trials, eight at a time; returns the search and the trials it asked for."""
    recorded = {text_of(trial.config): trial for trial in trials}
    space = Space([trial.config for trial in trials] if configs is None else configs)
    search = Searching(SearchLimits.of(Options(**options), blocks.current()).resolved(space), space)
    asked: list[Trial] = []
    while taken := search.take(8):
        for index, config in taken.items():
            asked.append(recorded[text_of(config)])
            search.ended(index, asked[-1])
    return search, asked


def best_ms(trials: list[Trial]) -> float:
    return min(trial.time_ms or math.inf for trial in trials)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("recording", sorted((RECORDINGS / "half_invalid").glob("*")), ids=lambda path: path.name)
def test_auto_ends_soon_in_recorded_spaces_that_half_fail(recording: Path, seed: int) -> None:
    trials = read(recording)
    search, asked = auto(trials, seed=seed)
    assert search.stopped == "no_gain"
    assert len(asked) < 180
    works, of = (sum(trial.outcome is Outcome.OK for trial in each) for each in (asked, trials))
    assert works <= 0.55 * of
    assert best_ms(asked) <= 1.005 * best_ms(trials)


def half_invalid(size: int = 24, *, duplicates: int = 1) -> list[Trial]:
    """Returns trials of a square; the half beyond a diagonal fails in tracing."""
    trials = []
    for a, b, c in itertools.product(range(size), range(size), range(duplicates)):
        config = {"a": a, "b": b, "c": c}
        if a + b >= size:
            trials.append(Trial(config=config, outcome=Outcome.ERROR, phase=Phase.COMPILE))
        else:
            trials.append(trial(config, 1.0 + 0.02 * ((a - 9) ** 2 + (b - 7) ** 2)))
    return trials


def test_half_of_a_space_that_fails_costs_the_search_little() -> None:
    trials = half_invalid()
    search, asked = auto(trials)
    assert search.stopped == "no_gain"
    assert sum(trial.outcome is Outcome.OK for trial in asked) < 0.4 * sum(t.outcome is Outcome.OK for t in trials)
    assert best_ms(asked) == best_ms(trials)


def test_configs_of_equal_times_end_no_search_before_the_best() -> None:
    trials = half_invalid(duplicates=20)  # more than the models use to predict a gain
    search, asked = auto(trials)
    assert search.stopped == "no_gain"
    assert best_ms(asked) == best_ms(trials)


def test_a_slow_generator_is_searched_until_no_gain_is_expected() -> None:
    trials = half_invalid()

    def slowly() -> Iterator[Config]:
        for at, each in enumerate(trials):
            if at == 310:  # read after the first config was tried
                began_s = time.thread_time()
                while time.thread_time() < began_s + 0.3:
                    pass
            yield each.config

    search, asked = auto(trials, slowly())
    assert search.stopped == "no_gain"
    assert best_ms(asked) == best_ms(trials)


def test_the_authors_patience_replaces_the_models() -> None:
    search, asked = auto(half_invalid(), patience=150)
    assert search.stopped == "patience"
    assert len(asked) > 150


def test_known_trials_count_and_are_not_tried_again() -> None:
    known = {index: trial(SPACE[index], 1.0) for index in range(4)}
    search = searching(limits(max_trials=6), known=known)
    assert list(search.take(10)) == [4, 5]


def test_configs_known_to_fail_are_neither_tried_nor_counted() -> None:
    failures = {0: trial(SPACE[0], None, Outcome.ERROR)}
    search = searching(limits(max_trials=2), failures=failures)
    taken = search.take(5)
    assert list(taken) == [1, 2]
    assert not searching(limits(), failures=failures).is_closed


def test_after_the_time_a_search_continues_until_one_works() -> None:
    now = 0.0
    search = searching(limits(time_budget_s=5.0), clock=lambda: now, trial_s=10.0)
    taken = search.take(3)
    now = 3.9
    assert (search.is_closed, search.reason_to_stop()) == (False, "")
    now = 4.0  # a fifth of the time is for the final
    assert (search.is_closed, search.reason_to_stop(), search.take(1)) == (True, "", {})
    search.ended(0, trial(taken[0], 1.0))
    assert search.reason_to_stop() == "the time budget of 5 s was over"
    assert search.stopped == "time_budget"


def test_after_the_time_no_trial_outlasts_its_own_limit() -> None:
    now = 0.0
    search = searching(limits(time_budget_s=5.0), clock=lambda: now, trial_s=10.0)
    search.take(3)
    now = 15.0
    assert search.reason_to_stop()


def test_a_config_that_was_not_run_does_not_count_as_tried() -> None:
    search = searching(limits(max_trials=2))
    for index, config in search.take(2).items():
        search.ended(index, trial(config, None, Outcome.NOT_RUN))
    assert list(search.take(2)) == [2, 3]


def test_the_first_config_begins_however_short_the_time_is() -> None:
    now = 0.0
    search = searching(limits(time_budget_s=1e-3), clock=lambda: now, trial_s=10.0)
    now = 1.0  # setting up the search took this long
    ((index, config),) = search.take(1).items()
    assert (search.take(1), search.stopped) == ({}, "time_budget")
    search.ended(index, trial(config, None, Outcome.NOT_RUN))
    assert search.take(1) == {}


def test_a_search_stopped_by_time_did_not_stop_by_max_trials() -> None:
    now = 0.0
    search = searching(limits(max_trials=2, time_budget_s=5.0), clock=lambda: now)
    taken = search.take(2)
    assert (search.is_closed, search.stopped) == (True, "max_trials")
    now = 5.0
    search.ended(0, trial(taken[0], 1.0))
    assert search.reason_to_stop()
    search.ended(1, trial(taken[1], None, Outcome.NOT_RUN))
    assert search.stopped == "time_budget"


def test_a_search_that_ends_early_has_not_seen_all() -> None:
    class Nothing:
        def ask(self, n: int) -> list[Config]:
            return []

        def tell(self, config: Config, trial: Trial) -> None:
            return

    search = searching(limits(search=Nothing()), defaults=0)
    ((index, config),) = search.take(4).items()
    search.ended(index, trial(config, 1.0))
    assert (search.take(1), search.stopped, search.saw_all) == ({}, "exhausted", False)
    assert Searched("exhausted", 1, 10).thoroughness < Searched("max_trials", 2, 10).thoroughness
    failures = {index: trial(SPACE[index], None, Outcome.ERROR) for index in range(1, 10)}
    search = searching(limits(max_trials=1), failures=failures)
    search.ended(0, trial(search.take(1)[0], 1.0))
    assert (search.is_closed, search.stopped, search.saw_all) == (True, "exhausted", True)


# The choice of a search


@pytest.mark.parametrize(
    ("size", "dropped", "given", "wanted"),
    [
        (300, 0, {}, ("exhaustive", None, None)),
        (301, 0, {}, ("surrogate", 400, None)),
        (700, 400, {}, ("exhaustive", None, None)),
        (301, 0, {"max_trials": 50}, ("surrogate", 50, None)),
        (200, 0, {"max_trials": 50}, ("surrogate", 50, None)),
        (200, 0, {"max_trials": 200}, ("exhaustive", 200, None)),
        (5000, 0, {"search": "random"}, ("random", None, None)),
        (5000, 0, {"patience": 9}, ("surrogate", 400, 9)),
    ],
)
def test_auto_tries_a_small_space_and_searches_a_large_one(size: int, dropped: int, given: Any, wanted: Any) -> None:
    chosen = SearchLimits.of(Options(**given), blocks.current()).resolved(
        Space([{"n": n} for n in range(size)]).where(lambda config: config["n"] >= dropped)
    )
    assert (chosen.search, chosen.max_trials, chosen.patience) == wanted
    assert chosen.ends_without_hope is (wanted[0] == "surrogate" and "patience" not in given)


def test_the_operators_search_and_budgets_beat_the_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_SEARCH", "random")
    monkeypatch.setenv("QUARANTUNE_MAX_TRIALS", "7")
    monkeypatch.setenv("QUARANTUNE_TIME_BUDGET", "2.5")
    options = Options(search="surrogate", max_trials=100, time_budget=60, seed=3)
    assert SearchLimits.of(options, blocks.current()) == limits(
        search="random", max_trials=7, time_budget_s=2.5, seed=3
    )
    with settings(max_trials=9, search="exhaustive"):
        assert SearchLimits.of(options, blocks.current()).max_trials == 9


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"search": "surogate"}, ValueError, "Did you mean 'surrogate'"),
        ({"search": 3}, TypeError, "ask"),
        ({"max_trials": 0}, ValueError, "max_trials=0 is not valid: give a whole number of at least 1"),
        ({"max_trials": 2.5}, ValueError, "max_trials"),
        ({"time_budget": -1}, ValueError, "time_budget=-1 is not valid: give a number of seconds"),
        ({"patience": 0}, ValueError, "patience"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": None}, ValueError, "seed"),
    ],
)
def test_bad_searches_and_budgets_are_refused(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Options(**options)


def test_searches_and_budgets_do_not_change_the_fingerprint() -> None:
    searched = Options(search="random", max_trials=5, time_budget=1.0, patience=3, seed=2)
    assert searched.deciding() == Options().deciding() == {}


def test_several_searches_divide_their_budgets() -> None:
    whole = limits(max_trials=90, time_budget_s=60.0)
    first = whole.share(3, spent_trials=0, spent_s=0.0)
    assert (first.max_trials, first.time_budget_s) == (30, 20.0)
    second = whole.share(2, spent_trials=10, spent_s=40.0)
    assert (second.max_trials, second.time_budget_s) == (40, 10.0)
    assert limits().share(2, spent_trials=5, spent_s=1.0) == limits()


# Large grids


def test_a_grid_is_a_list_that_is_not_kept() -> None:
    axes: dict[str, list[Any]] = {"b": [1, 2, 4], "a": ["x", True, None], "c": [(1, 2), 1.5]}
    listed, computed = Space(expand(axes, fn_name="f")), Space(axes)
    assert list(computed) == [computed[index] for index in range(len(computed))] == list(listed)
    assert computed[-1] == listed[-1]
    assert computed[2:5] == listed[2:5]
    for space in (listed, computed):
        assert sorted(space.texts()) == sorted(map(text_of, listed))
        assert [space.find(config) for config in listed] == list(range(len(listed)))
        assert [space.find_text(text_of(config)) for config in listed] == list(range(len(listed)))
        assert [space.find({"a": 1, "b": 1, "c": 1.5}), space.find({"a": "x"}), space.find(3)] == [None] * 3
        with pytest.raises(IndexError):
            space[len(listed)]
    assert space_of(computed) == space_of(listed)


def test_large_grids_are_not_listed() -> None:
    axes = {name: list(range(1000)) for name in "abc"}
    large = Space.of(axes, fn_name="f", parameters=None)
    assert len(large) == 10**9
    assert len(large.examples()) == 3000
    assert large.find(large[4321]) == 4321
    assert Space.of(pickle.loads(pickle.dumps(large)), fn_name="f", parameters=None)[4321] == large[4321]
    assert space_of(large) == space_of(Space({name: axes[name][::-1] for name in "cba"}))
    assert space_of(large) != space_of(Space(axes | {"c": list(range(1, 1001))}))
    with pytest.raises(ValueError, match=r"1,000,000,000 configs; at most 1,000,000 are all tried"):
        large.listed()


# Similar problems


def array(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, "weak_type": False}


def test_problems_with_similar_sizes_are_nearer() -> None:
    here = {"x": array(1024, 1024), "causal": True}
    others = [
        {"x": array(1024, 1024), "causal": True},
        {"x": array(1024, 2048), "causal": True},
        {"x": array(512, 512), "causal": True},
        {"x": array(1024, 1024), "causal": False},
        {"x": array(1024, 1024, dtype="int8"), "causal": False},
    ]
    distances = [difference(here, other) for other in others]
    assert distances[0] == 0
    assert all(nearer < farther for nearer, farther in itertools.pairwise(distances))
    assert difference({"x": 10**400}, {"x": 3}) < difference({"x": 10**500}, {"x": 3}), "numbers beyond any float"
    assert difference({"key_fn": ["small", 64]}, {"key_fn": ["small", 128]}) < difference(here, {"key_fn": 3})


def entry(time_ms: float, stopped: str, seen: int) -> dict[str, Any]:
    search = {"stopped": stopped, "seen": seen, "space_size": 100, "budget": None}
    return {"time_ms": time_ms, "space": {"configs": 100}, "versions": {}, "fingerprint": {}, "search": search}


def test_a_less_thorough_result_never_replaces_a_better_one() -> None:
    thorough, quick, better = entry(1.0, "max_trials", 80), entry(1.1, "max_trials", 20), entry(0.9, "patience", 30)
    assert more_thorough("gpu", "key", thorough, quick) is thorough
    assert more_thorough("gpu", "key", quick, thorough) is thorough
    assert more_thorough("gpu", "key", thorough, better) is better
    everything = entry(1.2, "exhausted", 100)
    assert more_thorough("gpu", "key", thorough, everything) is everything
    assert more_thorough("gpu", "key", everything, everything | {"time_ms": 1.3})["time_ms"] == 1.3
    nothing_spent = thorough | {"score": 0.0}  # 0.0 is a score, less than 0.5
    assert more_thorough("gpu", "key", nothing_spent, quick | {"score": 0.5}) is nothing_spent
    of_another_space = quick | {"space": {"configs": 7}}
    assert more_thorough("gpu", "key", thorough, of_another_space) is of_another_space


@pytest.mark.parametrize("record", [None, 3, {"stopped": 5, "seen": -1, "budget": "x"}, {"seen": True}])
def test_any_saved_text_about_a_search_is_read_without_an_error(record: Any) -> None:
    found = Findings.from_json({"search": record}).search
    assert (found.stopped, found.seen, found.budget) == ("", None, None)


def test_a_search_may_be_an_object_with_ask_and_tell() -> None:
    class Mine:
        def __init__(self) -> None:
            self.told: list[tuple[Config, Outcome]] = []

        def ask(self, n: int) -> list[Config]:
            return [{"n": np.random.default_rng(0).integers(0, 3).item()}][:n]

        def tell(self, config: Config, trial: Trial) -> None:
            self.told.append((config, trial.outcome))

    mine = Mine()
    search = searching(limits(search=mine))
    ((index, config),) = search.take(4).items()
    search.ended(index, trial(config, 1.0))
    assert mine.told == [(config, Outcome.OK)]
    assert search.take(1) == {}
    assert search.stopped == "exhausted"


# Routes that cannot settle a config


def test_a_route_that_cannot_compile_takes_no_more_configs() -> None:
    source = Growing(30)
    clock = Clock()
    act = for_config(4, lambda worker: [(0.1, worker.raises("compile", "unfit", message="it calls back"))])
    scheduler = plan_for(Route.APART, target=TARGET).scheduler(
        FakeSandbox(clock, act),
        on_trial=lambda *_: None,
        source=source,
        clock=clock,
        available_memory=lambda: 100 * GB,
    )
    leftovers = scheduler.run({})
    scheduler.close()
    assert 4 in leftovers.unfit
    assert leftovers.unfit.keys() == source.pending, "the other route runs the rest"
    assert source.left, "the source still has configs"

    together = plan_for(Route.TOGETHER).scheduler(
        FakeSandbox(clock, lambda worker: None),
        on_trial=lambda *_: None,
        source=source,
        clock=clock,
        available_memory=lambda: 100 * GB,
    )
    together.run(leftovers.unfit)
    together.close()
    assert sorted(source.told) == list(range(30))


def test_a_search_learns_of_an_error_before_its_confirmation() -> None:
    source = Growing(10)
    clock = Clock()
    act = for_config(2, lambda worker: [(0.1, worker.raises("compile"))])
    scheduler = plan_for(Route.APART, target=TARGET, confirms=True).scheduler(
        FakeSandbox(clock, act),
        on_trial=lambda *_: None,
        source=source,
        clock=clock,
        available_memory=lambda: 100 * GB,
    )
    leftovers = scheduler.run({})
    scheduler.close()
    assert leftovers.unconfirmed.keys() == {2}
    assert source.told[2].outcome is Outcome.ERROR
