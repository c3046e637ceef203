"""After a cheap compile of all configs, only configs that may win are compiled fully."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from helpers import ROOT

from quarantune.scheduler.plan import ConfigSource
from quarantune.scheduler.screening import MARGIN, Screening
from quarantune.values.configs import Config
from quarantune.values.trial import Outcome, Trial

BENCHMARKS = ROOT / "examples" / "benchmarks"
SEEDS = range(60)


def configs_of(count: int) -> dict[int, Config]:
    return {index: {"BM": index} for index in range(count)}


def full(index: int, time_ms: float | None, outcome: Outcome = Outcome.OK) -> Trial:
    return Trial(config={"BM": index}, outcome=outcome if time_ms else Outcome.ERROR, time_ms=time_ms)


def replayed(
    screening: Screening, full_ms: Mapping[int, float | None], *, at_once: int = 1, rng: random.Random | None = None
) -> list[int]:
    """Returns the configs in the order they are taken, with at most `at_once` compiling at a time."""
    taken: list[int] = []
    running: list[int] = []
    while running or not screening.is_closed:
        new = screening.take(at_once - len(running))
        assert len(new) <= at_once - len(running)
        taken += new
        running += new
        assert running, "screening gives no config though no trial is running"
        ends = running.pop(0 if rng is None else rng.randrange(len(running)))
        screening.ended(ends, full(ends, full_ms[ends]))
    assert screening.take(at_once) == {}
    return taken


def test_configs_come_by_cheap_time_until_none_can_win() -> None:
    cheap_ms = {0: 9.0, 1: 1.0, 2: 1.1, 3: 3.0, 4: 1.2, 5: 1.3}
    screening = Screening(configs_of(6), cheap_ms)
    assert replayed(screening, cheap_ms) == [1, 2, 4]  # 1.3 * 0.8 exceeds 1.0
    assert screening.left == pytest.approx({0: 7.2, 3: 2.4, 5: 1.04})
    assert screening.why_it_did_not_pay == ""


def test_configs_within_the_margin_are_compiled_fully() -> None:
    cheap_ms = {0: 1.0, 1: 1.1, 2: 1.15, 3: 1.2, 4: 1.24, 5: 1.26, 6: 5.0, 7: 5.0}
    screening = Screening(configs_of(8), cheap_ms)
    assert replayed(screening, cheap_ms) == [0, 1, 2, 3, 4]
    assert screening.left.keys() == {5, 6, 7}


def test_configs_that_no_ratio_can_rule_out_wait_for_none() -> None:
    cheap_ms = {0: 1.0, 1: 1.1, 2: 1.15, 3: 1.2, 4: 1.24, 5: 1.26, 6: 5.0, 7: 5.0}
    assert [*Screening(configs_of(8), cheap_ms).take(8)] == [0, 1, 2, 3, 4]
    # The time of a config without screening may rule out any config.
    assert [*Screening(configs_of(8), cheap_ms, best_ms=0.5).take(8)] == [0, 1, 2]


def test_the_defaults_come_first_however_slow_they_are() -> None:
    cheap_ms = {0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0, 4: 9.0, 5: 90.0}
    assert replayed(Screening(configs_of(6), cheap_ms, defaults=5), cheap_ms) == [5, 0, 1, 2]


def test_nothing_is_ruled_out_before_the_first_ratios_are_known() -> None:
    screening = Screening(configs_of(8), {index: 1.0 + index / 10 for index in range(8)})
    assert [*screening.take(8)] == [0, 1, 2]
    for index in (2, 0):
        screening.ended(index, full(index, 1.0 + index / 10))
        assert screening.take(8) == {}
        assert not screening.is_closed
    screening.ended(1, full(1, 0.55))  # half its cheap time: config 3 could take 0.8 * 0.5 * 1.3 ms
    assert [*screening.take(8)] == [3]
    assert not screening.is_closed


def test_a_config_that_fails_fully_is_replaced_by_the_next() -> None:
    cheap_ms = {index: 1.0 + index for index in range(8)}
    full_ms = {**cheap_ms, 0: None, 2: None}
    assert replayed(Screening(configs_of(8), cheap_ms), full_ms) == [0, 1, 2, 3, 4]


def test_a_config_without_a_cheap_time_may_win() -> None:
    cheap_ms = {index: 1.0 + index for index in range(6)}
    screening = Screening(configs_of(8), cheap_ms)
    assert [*screening.take(8)] == [0, 1, 2, 6, 7]  # 6 and 7 need not wait for the bound
    screening = Screening(configs_of(8), cheap_ms)
    assert replayed(screening, {**cheap_ms, 6: 0.1, 7: None}) == [0, 1, 2, 6, 7]
    assert screening.left.keys() == {3, 4, 5}


def test_a_smaller_ratio_brings_back_configs_that_could_not_win() -> None:
    cheap_ms = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.2, 4: 2.0, 5: 9.0, 6: 9.0}
    full_ms = {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.6, 4: 0.5, 5: 9.0, 6: 9.0}
    screening = Screening(configs_of(7), cheap_ms)
    assert replayed(screening, full_ms) == [0, 1, 2, 3]  # config 4 takes at least 0.8 * 0.5 * 2.0 ms: more than 0.6
    screening = Screening(configs_of(7), cheap_ms, margin=0.6)
    assert replayed(screening, full_ms) == [0, 1, 2, 3, 4]


def test_a_slow_trial_gives_a_ratio_but_is_not_the_best() -> None:
    screening = Screening(configs_of(4), dict.fromkeys(range(4), 1.0) | {3: 4.0})
    for index in screening.take(4):
        screening.ended(index, full(index, 1.0 if index else 0.1, Outcome.OK if index else Outcome.SLOW))
    assert [*screening.take(4)] == [3]  # could take 0.32 ms


def test_if_little_is_ruled_out_all_compile_and_a_line_says_so() -> None:
    cheap_ms = dict.fromkeys(range(9), 1.0) | {9: 100.0}
    screening = Screening(configs_of(10), cheap_ms)
    assert sorted(replayed(screening, {**cheap_ms, 0: 2.0})) == [*range(10)]
    assert screening.left == {}
    assert screening.why_it_did_not_pay == (
        "ranking by a cheap compile did not pay: full programs took 1 to 2 times as long as cheap ones, "
        "so all 10 configs were compiled fully"
    )


def test_after_the_time_no_config_begins_once_one_worked() -> None:
    class Late(ConfigSource):
        def why_late(self) -> str:
            return "late"

    screening = Screening(configs_of(8), {index: 1.0 + index for index in range(8)}, source=Late())
    assert (screening.is_closed, screening.reason_to_stop()) == (False, "")
    assert [*screening.take(8)] == [0, 1, 2]
    screening.ended(0, full(0, None))
    assert not screening.is_closed
    screening.ended(1, full(1, 2.0))
    assert (screening.is_closed, screening.reason_to_stop()) == (True, "late")
    assert all(screening.left[index] == 0.0 for index in range(3, 8)), "every config left may still win"


def test_a_trial_of_a_config_that_was_not_taken_also_counts() -> None:
    cheap_ms = {0: 1.0, 1: 1.1, 2: 1.2, 3: 8.0, 4: 9.0}
    screening = Screening(configs_of(5), cheap_ms)
    screening.ended(-1, full(-1, 0.1))  # the defaults are not in the list
    screening.ended(1, full(1, 1.1))  # it has another config's program
    assert [*screening.take(5)] == [0, 2]


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.NOT_RUN, Outcome.WRONG])
def test_if_every_full_compile_fails_all_are_tried(outcome: Outcome) -> None:
    screening = Screening(configs_of(7), {index: 1.0 + index for index in range(7)})
    tried = []
    while not screening.is_closed:
        for index, config in screening.take(2).items():
            tried.append(index)
            screening.ended(index, Trial(config=config, outcome=outcome))
    assert tried == [*range(7)]
    assert (screening.left, screening.why_it_did_not_pay) == ({}, "")


@pytest.mark.parametrize("cheap_ms", [{}, {0: 1.0}, {0: 1.0, 1: 2.0}])
def test_few_configs_are_all_compiled_fully(cheap_ms: dict[int, float]) -> None:
    assert replayed(Screening(configs_of(len(cheap_ms)), cheap_ms), cheap_ms) == [*cheap_ms]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_winner_within_the_margin_is_never_ruled_out(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 60)
    # No ratio is below the margin times another, so that the bound holds for any seen ratios.
    cheap_ms = {index: rng.lognormvariate(0, 1) for index in range(count)}
    full_ms: dict[int, float | None] = {index: ms * rng.uniform(MARGIN, 1.0) for index, ms in cheap_ms.items()}
    for index in rng.sample(range(count), count // 8):
        del cheap_ms[index]
    for index in rng.sample(range(count), count // 8):
        full_ms[index] = None
    at_once = rng.randint(1, 16)
    screening = Screening(configs_of(count), cheap_ms, defaults=rng.choice([None, rng.randrange(count)]))
    taken = replayed(screening, full_ms, at_once=at_once, rng=rng)
    assert len(set(taken)) == len(taken)
    assert {*taken, *screening.left} == {*range(count)}
    assert {*taken}.isdisjoint(screening.left)
    works = {index: ms for index, ms in full_ms.items() if ms is not None}
    if works:
        assert min(works, key=lambda index: works[index]) in taken
        best_ms = min(works.values())
        for index, least_ms in screening.left.items():
            assert best_ms <= least_ms
            assert index not in works or least_ms <= works[index]


@pytest.mark.parametrize("seed", SEEDS)
def test_regret_keeps_its_bound_whatever_the_ratios(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(5, 60)
    cheap_ms = {index: rng.lognormvariate(0, 1) for index in range(count)}
    full_ms: dict[int, float | None] = {index: ms * rng.lognormvariate(0, 0.5) for index, ms in cheap_ms.items()}
    screening = Screening(configs_of(count), cheap_ms)
    taken = replayed(screening, full_ms, at_once=rng.randint(1, 16), rng=rng)
    assert {*sorted(cheap_ms, key=lambda index: cheap_ms[index])[:3]} <= {*taken}
    works = {index: ms for index, ms in full_ms.items() if ms is not None}
    bound = MARGIN * min(works[index] / cheap_ms[index] for index in taken)
    best_ms = min(works[index] for index in taken)
    for index in screening.left:
        assert works[index] > best_ms or works[index] / cheap_ms[index] < bound


def test_the_replay_of_a_study_counts_full_compiles_and_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    fidelity_replay: Any = pytest.importorskip("fidelity_replay", reason="source distributions may lack it")
    times = [(2.0, 2.0), (1.0, 1.0), (1.1, 1.1), (1.2, 1.2), (0.9, 1.3), (None, 0.5), (5.0, None), (9.0, 9.0)]
    study = [
        {"config": {"BM": index}, "ms": {"full": full_ms, "cheap": cheap_ms}, "compile_s": {"full": 1.0}}
        for index, (full_ms, cheap_ms) in enumerate(times)
    ]
    narrow = fidelity_replay.replay(study, "cheap", margin=1.0, at_once=2)
    assert sorted(narrow.taken) == [0, 1, 2, 3, 5, 6]  # config 4 would be faster than its cheap program
    assert narrow.regret == pytest.approx(1 / 9)
    assert narrow.share == 0.75
    wide = fidelity_replay.replay(study, "cheap", margin=0.75, at_once=2)
    assert sorted(wide.taken) == [0, 1, 2, 3, 4, 5, 6, 7]  # ruling out config 7 alone does not pay
    assert (wide.regret, wide.paid) == (0.0, False)
