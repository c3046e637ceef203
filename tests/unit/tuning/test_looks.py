"""A cached winner is accused only if several measurements exclude what was saved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quarantune import Outcome, Trial, TuningResult
from quarantune.measure import intervals
from quarantune.measure.model import BETWEEN
from quarantune.tuning.looks import MOST_LOOKS, Review, Verdict, judge
from quarantune.values.trial import ClockName, Findings

WINNER, DEFAULT = {"n": 1}, {"n": 2}


def look(time_ms: float, default_ms: float, clock: ClockName = "wall") -> TuningResult:
    """Returns the result of a sweep over the winner and the defaults."""
    ours, own = (
        Trial(config=config, outcome=Outcome.OK, time_ms=ms, samples_ms=(ms,), clock=clock)
        for config, ms in ((WINNER, time_ms), (DEFAULT, default_ms))
    )
    best_config, best_ms = min((WINNER, time_ms), (DEFAULT, default_ms), key=lambda pair: pair[1])
    return TuningResult(
        best_config=best_config,
        time_ms=best_ms,
        default_config=DEFAULT,
        default_time_ms=default_ms,
        trials=(ours, own),
        key="",
        device="",
    )


def failed(message: str = "RuntimeError: no") -> Trial:
    return Trial(config=WINNER, outcome=Outcome.ERROR, message=message)


def judged(saved: Findings, *looks: Any, most: float = math.inf) -> Review:
    return judge(looks, saved, config=WINNER, default=DEFAULT, max_loss_percent=most)


def verified(saved: Findings, next_look: Any, **limits: Any) -> Verdict:
    """Looks at a winner as often as `verify` does."""
    looks: list[Any] = []
    verdict = Verdict.UNCLEAR
    while verdict is Verdict.UNCLEAR and len(looks) < MOST_LOOKS:
        looks.append(next_look())
        verdict = judged(saved, *looks, **limits).verdict
    return verdict


def scattered(generator: np.random.Generator, gain: float, scatter: float, clock: ClockName) -> TuningResult:
    return look(1.0, gain * math.exp(generator.normal(0, scatter)), clock)


@pytest.mark.parametrize("clock", ["wall", "device"])
@pytest.mark.parametrize("gain", [1.0, 1.05, 2.0, 10.0])
def test_a_winner_that_is_right_is_not_accused(gain: float, clock: ClockName) -> None:
    generator = np.random.default_rng(5)
    verdicts = []
    for _ in range(500):
        found = scattered(generator, gain, BETWEEN[clock], clock)
        speedup = (found.default_time_ms or 0) / 1.0
        saved = Findings(1.0, found.default_time_ms, intervals.later_run([speedup], clock))
        verdicts.append(verified(saved, lambda: scattered(generator, gain, BETWEEN[clock], clock)))
    assert verdicts.count(Verdict.STALE) <= 3
    assert verdicts.count(Verdict.CURRENT) > 400


@pytest.mark.parametrize(("clock", "scatter"), [("wall", 0.02), ("device", 0.005)])
@pytest.mark.parametrize("gain", [1.1, 2.0, 10.0])
def test_a_winner_that_became_30_percent_slower_is_found(gain: float, clock: ClockName, scatter: float) -> None:
    generator = np.random.default_rng(6)
    found = 0
    for _ in range(200):
        speedups = [gain * math.exp(generator.normal(0, scatter)) for _ in range(3)]
        saved = Findings(1.0, gain, intervals.later_run(speedups, clock))
        found += verified(saved, lambda: scattered(generator, gain / 1.3, scatter, clock)) is Verdict.STALE
    assert found == 200


def test_one_measurement_accuses_nobody() -> None:
    saved = Findings(1.0, 5.0, (4.5, 5.5))
    for bad in (look(3.0, 5.0), look(9.0, 5.0), failed()):
        assert judged(saved, bad).verdict is Verdict.UNCLEAR
        assert judged(saved, bad, bad).verdict is Verdict.STALE
        assert judged(saved, bad, look(1.0, 5.0)).verdict is not Verdict.STALE


def test_the_reason_names_what_was_saved_and_what_is_found() -> None:
    saved = Findings(1.0, 5.0, (4.5, 5.5))
    assert judged(saved, look(1.0, 5.0)).reason == "it works, 5.00x faster than the defaults"
    lost = judged(saved, look(2.0, 5.0), look(2.0, 5.0))
    assert lost.reason == "it has lost gain, from 5.00x to 2.50x: 2 ms against 5"
    assert lost.speedup_interval == intervals.later_run([2.5, 2.5], "wall")
    behind = judged(saved, look(10.0, 5.0), look(10.0, 5.0))
    assert (behind.verdict, behind.reason) == (Verdict.STALE, "the defaults are faster: 10 ms against 5")
    flaky = judged(saved, failed(), look(1.0, 5.0))
    assert (flaky.verdict, flaky.reason) == (
        Verdict.UNCLEAR,
        "in 1 of 2 measurements, it fails now: error: RuntimeError: no",
    )
    assert judged(saved, failed(), failed()).reason == "it fails now: error: RuntimeError: no"
    unclear = judged(saved, *[look(1.08, 5.0)] * MOST_LOOKS)
    assert unclear.verdict is Verdict.UNCLEAR
    assert "was 5.00x; the scatter between processes may explain" in unclear.reason


def test_an_entry_without_a_speedup_claims_no_more_than_to_be_as_fast_as_the_defaults() -> None:
    assert judged(Findings(1.0), look(1.0, 1.0)).verdict is Verdict.CURRENT
    assert judged(Findings(1.0), look(1.0, 0.5), look(1.0, 0.5)).verdict is Verdict.STALE
    assert judged(Findings(), look(1.0, 0.5), look(1.0, 0.5)).verdict is Verdict.STALE


def test_a_winner_that_equals_the_defaults_or_has_none_is_judged_by_its_own_time_alone() -> None:
    slow = [look(3.0, 3.0)] * 2
    for default, words in ((WINNER, "it is the defaults, and works"), (None, "no defaults to compare it with")):
        alone = [
            TuningResult(best_config=WINNER, time_ms=3.0, trials=each.trials[:1], key="", device="") for each in slow
        ]
        found = judge(alone, Findings(1.0), config=WINNER, default=default, max_loss_percent=math.inf)
        assert found.verdict is Verdict.CURRENT
        assert words in found.reason
        found = judge(alone, Findings(1.0), config=WINNER, default=default, max_loss_percent=50)
        assert (found.verdict, found.time_ms) == (Verdict.STALE, 3.0)


def test_a_longer_time_is_a_loss_only_if_a_later_run_takes_longer_than_the_bound() -> None:
    saved = Findings(1.0, 5.0, (4.5, 5.5))
    assert judged(saved, *[look(1.2, 6.0)] * 2, most=10).verdict is Verdict.UNCLEAR
    assert judged(saved, *[look(1.2, 6.0, "device")] * 2, most=10).verdict is Verdict.STALE
    assert judged(saved, *[look(2.0, 10.0)] * 2, most=10).verdict is Verdict.STALE
    assert judged(saved, look(1.05, 5.0), most=10).verdict is Verdict.CURRENT
