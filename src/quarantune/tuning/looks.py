"""Judges a cached winner by repeated sweeps over it and the defaults, each in fresh processes."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Sequence

from quarantune.measure import intervals
from quarantune.measure.model import TIMES_BETWEEN
from quarantune.results.result import TuningResult
from quarantune.values.configs import Config, as_given
from quarantune.values.trial import TIME, Findings, Trial, interval_text, ranked_by, ratio_text

MOST_LOOKS = 4
"""Most sweeps of one winner."""
_LEAST_LOOKS = 2
"""Fewest sweeps before a winner is accused."""


class Verdict(enum.StrEnum):
    """The result of measuring a cached winner again."""

    CURRENT = "current"
    """It works, has not lost its gain, and has not become too slow."""
    STALE = "stale"
    """It fails, has lost gain, or has become too slow, in several measurements: tune again, or delete the entry."""
    UNCLEAR = "unclear"
    """The measurements disagree, or scatter too much to accuse the winner."""
    TUNED_AGAIN = "tuned again"
    """It was stale, or only estimated, and a new sweep has replaced it."""
    UNUSED = "unused"
    """No call finds it any more, because the code or the list of configs has changed. It was not measured."""
    UNKNOWN = "unknown"
    """It could not be measured, for the reason given."""


@dataclasses.dataclass(frozen=True)
class Review:
    """A verdict, with the figures behind it.

    Attributes:
        verdict: the verdict; `unclear` while another look may change it.
        reason: the verdict in words.
        time_ms: the median time of the winner; None if unknown.
        default_time_ms: the median time of the defaults; None if unknown.
        speedup_interval: the speed-ups of 95 of 100 later runs; None if unknown.
    """

    verdict: Verdict
    reason: str
    time_ms: float | None = None
    default_time_ms: float | None = None
    speedup_interval: tuple[float, float] | None = None


def judge(
    looks: Sequence[TuningResult | Trial],
    saved: Findings,
    *,
    config: Config,
    default: Config | None,
    max_loss_percent: float,
) -> Review:
    """Returns the verdict on a winner.

    Args:
        looks: the results of the sweeps so far, which list the winner first; its trial if it failed.
        saved: the findings of its entry.
        config: the winner.
        default: the function's own defaults; None without.
        max_loss_percent: how much longer than its saved time it may take.
    """
    accused = Verdict.STALE if len(looks) >= _LEAST_LOOKS else Verdict.UNCLEAR
    if failures := [look for look in looks if isinstance(look, Trial)]:
        is_steady = len(failures) == len(looks)
        prefix = "" if is_steady else f"in {len(failures)} of {len(looks)} measurements, "
        return Review(accused if is_steady else Verdict.UNCLEAR, prefix + _failure(failures[0]))
    results = [look for look in looks if isinstance(look, TuningResult)]
    winners, last = [result.trials[0] for result in results], results[-1]
    times_ms = [winner.time_ms for winner in winners if winner.time_ms]
    defaults_ms = [result.default_time_ms for result in results if result.default_time_ms]
    about = _median(times_ms), _median(defaults_ms)
    if ranked_by(last.findings) != TIME:
        if any(as_given(config) in (result.best_config, *result.tie) for result in results):
            return Review(Verdict.CURRENT, f"it works, {_compared(last)}", *about)
        figure = winners[-1].figure
        told = "ruled out at once" if figure is None else f"{figure:.4g} against {last.findings.figure:.4g}"
        return Review(accused, f"the defaults are better: {told}", *about)
    if len(times_ms) < len(looks):
        return Review(accused, "the defaults are faster: it was ruled out at once", *about)
    clock = winners[-1].clock or "wall"
    if ranked_by(saved) == TIME and (slower := _slower(times_ms, saved.time_ms, clock, accused, max_loss_percent)):
        return dataclasses.replace(slower, default_time_ms=about[1])
    if config == default or len(defaults_ms) < len(looks):
        return Review(Verdict.CURRENT, "it is the defaults, and works" if config == default else _works(last), *about)
    gains = [theirs / ours for ours, theirs in zip(times_ms, defaults_ms, strict=True)]
    gain, later = statistics.geometric_mean(gains), intervals.later_run(gains, clock)
    then, then_low = _saved_gain(saved, clock)
    if gain >= math.sqrt(then * then_low):  # well within the saved interval
        return Review(Verdict.CURRENT, _works(last), *about, later)
    # A later run's interval allows for the scatter of the mean and of that run. Here two means are compared: the saved
    # one, of a single sweep, and the present one.
    now_half = math.log(later[1] / gain) / math.sqrt(len(gains) + 1)
    is_excluded = math.log(then / gain) > math.hypot(now_half, math.log(then / then_low) / math.sqrt(2))
    if is_excluded and accused is Verdict.STALE:
        how = (
            "the defaults are faster"
            if gain < 1
            else f"it has lost gain, from {ratio_text(then)} to {ratio_text(gain)}"
        )
        return Review(accused, f"{how}: {about[0]:.4g} ms against {about[1]:.4g}", *about, later)
    reason = (
        f"its speed-up is {interval_text(later)} now, and was {ratio_text(then)}; the scatter between processes may "
        "explain the difference"
    )
    return Review(Verdict.UNCLEAR, reason, *about, later)


def _slower(
    times_ms: Sequence[float], saved_ms: float, clock: str, accused: Verdict, max_loss_percent: float
) -> Review | None:
    """Returns the verdict on a winner that takes longer than its bound; None if it does not."""
    now_ms, bound_ms = statistics.median(times_ms), saved_ms * (1 + max_loss_percent / 100)
    if not now_ms > bound_ms:
        return None
    lost = f"it takes {100 * (now_ms / saved_ms - 1):.3g}% longer than when it was saved"
    low, high = intervals.later_run(times_ms, clock, between=TIMES_BETWEEN)
    if low > bound_ms:
        return Review(accused, f"{lost}: {now_ms:.4g} ms against {saved_ms:.4g} ms", now_ms)
    return Review(Verdict.UNCLEAR, f"{lost}, but a later run may take {low:.4g} to {high:.4g} ms", now_ms)


def _saved_gain(saved: Findings, clock: str) -> tuple[float, float]:
    """Returns the saved speed-up and the lower end of its interval.

    An unknown one is 1: a winner is no slower than the defaults.
    """
    gain = (saved.speedup if ranked_by(saved) == TIME else None) or 1.0
    low, _ = saved.speedup_interval or (0.0, 0.0)
    return gain, low if 0 < low <= gain else intervals.later_run([gain], clock)[0]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _compared(result: TuningResult) -> str:
    return result.findings.compared or "and there are no defaults to compare it with"


def _works(result: TuningResult) -> str:
    return f"it works, {_compared(result)}"


def _failure(trial: Trial) -> str:
    text = (trial.message or "").strip()
    return f"it fails now: {trial.outcome.value}{f': {text.splitlines()[0]}' if text else ''}"
