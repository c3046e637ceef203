"""The time of each config, and that all that is told of a result agrees with it: 300 results made at random."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from agreeing import check

from quarantune import TuningResult
from quarantune.measure import finals
from quarantune.results import times
from quarantune.results.times import Range
from quarantune.values.trial import CompilerFigures, Outcome, Phase, Trial

_NAMES = ["BM", "BN", "stages", "layout", "split_k", "warps", "k", "order"]


def made_up(seed: int) -> TuningResult:
    """Returns a result as a sweep may end: any number of configs, outcomes, finalists, ties and orders."""
    rng = random.Random(seed)
    scale_ms = 10 ** rng.uniform(-4, 4)
    names = rng.sample(_NAMES, rng.randint(1, 5))
    configs: dict[tuple[Any, ...], None] = {}
    for _ in range(rng.choice([1, 2, 3, 8, 20, 45])):
        configs[
            tuple(
                rng.choice(["row", "col", 8.5, True]) if name == "layout" else 2 ** rng.randint(0, 3) for name in names
            )
        ] = None
    is_dated = rng.random() < 0.8
    clock = rng.choice(["wall", "wall", "device", "queued"])
    trials = []
    for at, values in enumerate(configs):
        outcome = rng.choice([Outcome.OK, Outcome.OK, Outcome.SLOW, Outcome.SLOW, *Outcome])
        outcome = Outcome.OK if not at else outcome
        level_ms = scale_ms * rng.choice([1, 1.001, 1.3, rng.uniform(1, 30)])
        samples = tuple(level_ms * rng.lognormvariate(0, 0.05) for _ in range(rng.randint(1, 12)))
        timed = {
            "time_ms": statistics.median(samples),
            "samples_ms": samples,
            "own_ms": min(samples) * rng.choice([1.0, rng.uniform(0.5, 1)]),
            "clock": clock,
        }
        if outcome is Outcome.SLOW and rng.random() < 0.1:
            timed = {"cheap_ms": level_ms, "message": "it was left out"}
        trials.append(
            Trial(
                config=dict(zip(names, values, strict=True)),
                outcome=outcome,
                phase=Phase.MEASURE,
                compile_s=rng.uniform(0, 9) if rng.random() < 0.8 else None,
                ended_s=1.7e9 + rng.uniform(0, 900) if is_dated else None,
                figures=rng.choice(
                    [None, CompilerFigures(argument_bytes=8, output_bytes=8, temporary_bytes=1 << rng.randint(3, 22))]
                ),
                **(
                    timed
                    if outcome in (Outcome.OK, Outcome.SLOW)
                    else {"message": f"it failed at {rng.randint(1, 99)}"}
                ),  # type: ignore[arg-type]
            )
        )
    return concluded(trials, rng)


def concluded(trials: list[Trial], rng: random.Random) -> TuningResult:
    """Returns the result of a sweep: after a final, as a sweep ends, or without one, as an interrupted sweep does."""
    known = dict(enumerate(trials))
    default = rng.choice([None, *known])
    chosen = finals.in_final(known, default) if rng.random() < 0.8 else []
    rounds = rng.choice([3, 10, 20])
    final = finals.Final(
        {
            at: [(trials[at].time_ms or 0.0) * rng.lognormvariate(0, rng.choice([0.001, 0.1])) for _ in range(rounds)]
            for at in chosen
        }
    )
    settled, (winner, *level) = finals.conclude(known, final, default=default)
    best, own = settled[winner], None if default is None else settled[default]
    is_timed = own is not None and own.outcome is Outcome.OK
    speedup = (own.time_ms or 0.0) / (best.time_ms or 1.0) if own is not None else 1.0
    interval = speedup * rng.uniform(0.5, 1), speedup * rng.uniform(1, 2)
    return TuningResult(
        name="f",
        device="cpu",
        key="{}",
        best_config=best.config,
        time_ms=best.time_ms or math.nan,
        default_config=None if own is None else own.config,
        default_time_ms=own.time_ms if is_timed and own is not None else None,
        speedup_interval=interval if is_timed and len(chosen) > 1 else None,
        finalists=tuple(settled[at] for at in final.rounds_ms),
        tie=tuple(settled[at].config for at in level),
        trials=tuple(settled[at] for at in sorted(settled)),
        seen=len(trials),
        space_size=len(trials),
        stopped="exhausted",
    )


@pytest.mark.parametrize(
    "first", [0, 50, *(pytest.param(first, marks=pytest.mark.slow) for first in range(100, 300, 50))]
)
def test_all_that_is_told_of_a_result_agrees_with_its_trials(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        result = made_up(seed)
        try:
            check(result, tmp_path)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{result.table(width=160, rows=99)}") from error


def found_out(monkeypatch: pytest.MonkeyPatch, folder: Path, where: object, name: str, lie: Any) -> bool:
    """Returns whether the checks notice a wrong function in some of the results."""
    with monkeypatch.context() as lying:
        lying.setattr(where, name, lie)
        for seed in range(40):
            try:
                check(made_up(seed), folder)
            except AssertionError:
                return True
    return False


LIES: dict[str, tuple[object, str, Any]] = {
    "the next of the finalists": (
        times,
        "rivals",
        lambda trials, result, true=times.rivals: true([it for it in trials if result.is_finalist(it)], result),
    ),
    "a bound to the nearest digit": (times, "rounded", lambda value, digits=4, *, up: float(f"{value:.{digits}g}")),
    "a median for a config that was stopped": (
        times,
        "range_of",
        lambda trial: None if trial.time_ms is None else Range(trial.time_ms, trial.time_ms),
    ),
    "any finished config before any stopped one": (
        Range,
        "smallest",
        classmethod(lambda cls, ranges: min(ranges, key=lambda it: (it.most, it.least))),
    ),
    "the median of the samples of all": (times, "kind_of", lambda trial, result: "median"),
    "the first config is the best so far": (times, "best_so_far", lambda trials: [0]),
    "the order of the list": (times, "in_order", lambda result: list(result.trials)),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_checks_find_a_lie(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_out(monkeypatch, tmp_path, *LIES[lie])


# --- figures one by one ---


def ended(n: int, outcome: str = "ok", time_ms: float | None = None, **rest: Any) -> Trial:
    return Trial(config={"n": n}, outcome=Outcome(outcome), time_ms=time_ms, **rest)


def of(*trials: Trial, **fields: Any) -> TuningResult:
    best = trials[0]
    fields = {
        "best_config": best.config,
        "time_ms": best.time_ms,
        "trials": trials,
        "key": "",
        "device": "cpu",
    } | fields
    return TuningResult(**fields)


def reason(*trials: Trial, **fields: Any) -> str:
    return of(*trials, **fields).table(width=300).partition("* n=")[2].splitlines()[0]


def test_a_config_that_was_stopped_early_has_a_bound_that_is_true_of_all_its_samples() -> None:
    stopped = ended(4, "slow", 9.1, samples_ms=(7.6321, 10.6), own_ms=4.63456)
    assert (stopped.time_ms, stopped.is_bound) == (4.63456, True)
    assert ended(4, "slow", 9.1, samples_ms=(7.6, 10.6), own_ms=8.0).time_ms == 7.6
    assert Trial.from_json(stopped.to_json()) == stopped
    old = ended(4, "slow", 4.63456, samples_ms=(7.6321, 10.6), own_ms=4.63456).to_json() | {"time_ms": 9.1}
    assert Trial.from_json(old).time_ms == 4.63456, "earlier versions saved the median"
    assert times.text_of_time(stopped) == "> 4.634", "it is rounded down"
    settled = dataclasses.replace(stopped, outcome=Outcome.OK, time_ms=5.0, samples_ms=(5.0,))
    assert (settled.time_ms, settled.is_bound) == (5.0, False)
    assert ended(4, "slow", cheap_ms=3.0).time_ms is None


def test_the_next_config_is_the_next_of_all_not_of_the_finalists() -> None:
    best, far, near = (
        ended(1, time_ms=1.0, samples_ms=(1.0,)),
        ended(2, time_ms=3.85, samples_ms=(3.85,)),
        ended(3, time_ms=1.74),
    )
    assert reason(best, far, near, finalists=(best, far)) == "1 is the fastest; the next, n=3, takes 74% longer"
    stopped = ended(4, "slow", 1.5, samples_ms=(1.5, 1.6))
    assert reason(best, far, near, stopped, finalists=(best, far)) == (
        "1 is the fastest; the next, n=3, takes 74% longer; n=4, stopped early, takes at least 50% longer"
    )
    assert reason(best, stopped) == (
        "1 is the only config that was measured to the end; n=4, stopped early, takes at least 50% longer"
    )
    early = ended(5, "slow", 0.9, samples_ms=(0.9,))
    assert reason(best, near, early) == (
        "1 is the fastest that was measured to the end; the next, n=3, takes 74% longer; "
        "n=5 was stopped early, before its time was known"
    )


def test_the_effect_of_a_tunable_is_a_range_where_bounds_are_part_of_it() -> None:
    trials = [ended(1, time_ms=1.0), ended(2, "slow", 1.8), ended(3, time_ms=23.5)]
    both = times.effect([0, 1, 1], 2, trials)
    assert (both.factor, both.by_value) == (Range(1.8, 23.5), (Range(1.0, 1.0), Range(1.8, 23.5)))
    assert both.text == "at least 1.80x, at most 23.5x as long"
    assert times.effect([0, 1], 2, trials[:2]).text == "at least 1.80x as long"
    assert times.effect([0, 1], 2, [trials[0], trials[2]]).text == "23.5x as long"
    assert times.effect([0, 1], 2, [trials[0], ended(2, time_ms=1.02)]).text == "hardly matters"
    assert times.effect([0, 1], 2, [trials[0], ended(2, "slow", 0.9)]).text == "not known"
    assert times.effect([0, 1], 3, [ended(1, "error"), ended(2, "error")]) == ((None, None, None), Range(1.0, 1.0))


def test_the_best_so_far_follows_the_ends_of_trials_and_no_bound_counts() -> None:
    order = [ended(1, time_ms=3.0, ended_s=9.0), ended(2, "slow", 0.5, ended_s=1.0), ended(3, time_ms=4.0, ended_s=2.0)]
    assert times.best_so_far(order) == [2, 0]
    undated = [dataclasses.replace(trial, ended_s=None) for trial in order]
    assert times.best_so_far(undated) == [0]


def test_a_stopped_config_beats_none_in_time_and_memory_but_may_be_worth_a_choice() -> None:
    def sized(trial: Trial, size: int) -> Trial:
        return dataclasses.replace(
            trial, figures=CompilerFigures(argument_bytes=8, output_bytes=8, temporary_bytes=size)
        )

    fast, stopped, small = (
        sized(ended(1, time_ms=1.0), 900),
        sized(ended(2, "slow", 2.0), 100),
        sized(ended(3, time_ms=3.0), 200),
    )
    assert of(fast, small, stopped).pareto() == (fast, stopped, small)
    behind = sized(ended(4, "slow", 4.0), 100)
    assert of(fast, small, stopped, behind).pareto() == (fast, stopped, small)


@pytest.mark.parametrize(
    ("times_ms", "unit"),
    [
        ([8e-3, 9e-3, 10.0], "µs"),
        ([5e-4], "ns"),
        ([None, math.nan], "ms"),
        ([3.0], "ms"),
        ([4000.0], "s"),
        ([math.inf], "ms"),
    ],
)
def test_one_unit_suits_all_times_of_a_page(times_ms: list[float | None], unit: str) -> None:
    assert times.unit_of(times_ms)[0] == unit
