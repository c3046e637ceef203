"""The time of each config, and figures from these times; tables, sentences, pages and exports all take them from here.

A config has one time: the median of the final for a finalist, the median of its own samples for another, and a bound
for one that was stopped early, which takes at least that long. So figures from several times are ranges, whose ends
are equal if no bound is involved.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from quarantune.results.report_data import PlainResult
from quarantune.values.trial import TIME, Outcome, Trial, ranked_by, ratio_text

FINAL, MEDIAN, MEAN, AT_LEAST = "final", "median", "mean", "at least"
"""The kinds of times: the median of the final, of other samples, the mean over several calls, and a bound."""
_SLIGHT = 1.05
"""Factor below which a tunable hardly matters."""
_UNITS = (("ns", 1e6, 0.001), ("µs", 1e3, 0.1), ("ms", 1.0, 1000.0), ("s", 1e-3, math.inf))
"""Units of time: the name, the number in a millisecond, and the milliseconds from which the next one is better."""


class Range(NamedTuple):
    """A number that is known, or known to lie between two others.

    Attributes:
        least: the least that it can be.
        most: the most that it can be; infinite if only a bound is known.
    """

    least: float
    most: float

    @property
    def is_known(self) -> bool:
        """Whether the number is known."""
        return self.least == self.most

    @classmethod
    def smallest(cls, ranges: Iterable[Range]) -> Self:
        """Returns the range of the smallest of some numbers; there must be one."""
        return cls(*map(min, zip(*ranges, strict=True)))

    @classmethod
    def largest(cls, ranges: Iterable[Range]) -> Self:
        """Returns the range of the largest of some numbers; there must be one."""
        return cls(*map(max, zip(*ranges, strict=True)))

    def over(self, other: Range) -> Range:
        """Returns the range of the quotient of two numbers."""
        return Range(self.least / other.most, self.most / other.least)

    def text(self, form: Callable[[float], str]) -> str:
        """Returns the range in words, such as `1.80x`, `at least 1.80x` or `at least 1.80x, at most 23.1x`."""
        if self.is_known:
            return form(self.least)
        most = "" if self.most == math.inf else f", at most {form(rounded(self.most, 3, up=True))}"
        return f"at least {form(rounded(self.least, 3, up=False))}{most}"


def range_of(trial: Trial) -> Range | None:
    """Returns the time of a trial in milliseconds; None if it has none."""
    if trial.time_ms is None or trial.outcome not in (Outcome.OK, Outcome.SLOW):
        return None
    return Range(trial.time_ms, math.inf if trial.is_bound else trial.time_ms)


def kind_of(trial: Trial, result: PlainResult) -> str:
    """Returns the kind of a trial's time: `final`, `median`, `mean` or `at least`; empty if it has no time."""
    if (known := range_of(trial)) is None:
        return ""
    if not known.is_known:
        return AT_LEAST
    return FINAL if result.is_finalist(trial) else MEAN if result.calls else MEDIAN


def text_of_time(trial: Trial) -> str:
    """Returns the time of a trial in milliseconds as text, such as `> 23.8` for a bound, which is rounded down."""
    if (known := range_of(trial)) is None:
        return ""
    return f"{known.least:.4g}" if known.is_known else f"> {rounded(known.least, up=False):.4g}"


def rounded(value: float, digits: int = 4, *, up: bool) -> float:
    """Returns a number with few significant digits that is still a bound: rounded up or down, not to the nearest."""
    way = decimal.ROUND_CEILING if up else decimal.ROUND_FLOOR
    return float(decimal.Context(digits, way).create_decimal(repr(float(value))))


def unit_of(times_ms: Iterable[float | None]) -> tuple[str, float]:
    """Returns the unit in which people would tell some times: its name, and its number in a millisecond."""
    known = sorted(ms for ms in times_ms if ms is not None and math.isfinite(ms))
    typical_ms = known[len(known) // 2] if known else 1.0
    return next((name, factor) for name, factor, below_ms in _UNITS if typical_ms < below_ms)


# --- the winner and the others ---


class Rivals(NamedTuple):
    """The configs that come nearest to the winner, by the figure that chose it.

    Attributes:
        following: the trial with the least figure of all others that were measured to the end; None without one.
        unsettled: the one with the least bound, if that is below the figure of `following`; else None.
    """

    following: Trial | None
    unsettled: Trial | None


def rivals(trials: Iterable[Trial], result: PlainResult) -> Rivals:
    """Returns the configs that come nearest to a result's winner."""
    others = [(trial.figure, trial) for trial in trials if not result.is_best(trial) and range_of(trial) is not None]
    known = [(figure, trial) for figure, trial in others if figure is not None]

    def least(of: Iterable[tuple[float, Trial]]) -> Trial | None:
        return min(of, key=lambda pair: pair[0], default=(0.0, None))[1]

    following = least(pair for pair in known if not pair[1].is_bound)
    limit = math.inf if following is None or following.figure is None else following.figure
    return Rivals(following, least(pair for pair in known if pair[1].is_bound and pair[0] < limit))


def in_order(result: PlainResult) -> list[Trial]:
    """Returns the winner, then finalists and then other trials by figure, then trials without a figure by outcome."""
    outcomes = list(Outcome)

    def rank(trial: Trial) -> tuple[bool, bool, bool, float, int]:
        figure = None if ranked_by(trial) == TIME and range_of(trial) is None else trial.figure
        is_other, place = not result.is_finalist(trial), outcomes.index(trial.outcome) if figure is None else 0
        return (not result.is_best(trial), figure is None, is_other, figure or 0.0, place)

    return sorted(result.trials, key=rank)


def best_so_far(trials: Sequence[Trial]) -> list[int]:
    """Returns the positions of the trials that were the fastest when they ended, in the order of their ends.

    A bound never counts: it says only that the config takes longer.
    """
    order = list(range(len(trials)))
    if all(trial.ended_s is not None for trial in trials if trial.outcome is not Outcome.PRUNED):
        order.sort(key=lambda at: trials[at].ended_s or 0.0)
    found, least_ms = list[int](), math.inf
    for at in order:
        known = range_of(trials[at])
        if known is not None and known.most < least_ms:
            found.append(at)
            least_ms = known.most
    return found


# --- tunables ---


class Effect(NamedTuple):
    """What the choice of one tunable's value costs, with the best of all other tunables.

    Attributes:
        by_value: for each value, the time in milliseconds of the best config that has it; None if none has a time.
        factor: the time with the worst value by the time with the best one. Values without a time do not count.
    """

    by_value: tuple[Range | None, ...]
    factor: Range

    @property
    def text(self) -> str:
        """The factor in words."""
        if self.factor.most < _SLIGHT:
            return "hardly matters"
        if not self.is_notable:
            most = self.factor.most
            return "not known" if most == math.inf else f"at most {ratio_text(rounded(most, 3, up=True))} as long"
        return f"{self.factor.text(ratio_text)} as long"

    @property
    def is_notable(self) -> bool:
        """Whether the value surely matters."""
        return self.factor.least >= _SLIGHT


def effect(values: Sequence[int], count: int, trials: Sequence[Trial]) -> Effect:
    """Returns the effect of a tunable.

    Args:
        values: for each trial, the position of its value among the tunable's values.
        count: the number of these values.
        trials: the trials.
    """
    known: Mapping[int, list[Range]] = {at: [] for at in range(count)}
    for value, trial in zip(values, trials, strict=True):
        if (found := range_of(trial)) is not None:
            known[value].append(found)
    by_value = tuple(Range.smallest(ranges) if ranges else None for ranges in known.values())
    timed = [each for each in by_value if each is not None]
    if not timed:
        return Effect(by_value, Range(1.0, 1.0))
    factor = Range.largest(timed).over(Range.smallest(timed))
    return Effect(by_value, Range(max(1.0, factor.least), max(1.0, factor.most)))
