"""The findings of a sweep, as an entry of the cache holds them: times, and how thorough the search was."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, TypeAlias

from quarantune.values.codec import Record, within
from quarantune.values.texts import printable
from quarantune.values.trial import Millijoules, Milliseconds, Outcome, Score, Trial

ESTIMATED = "estimated"
"""Instead of why a search ended: nothing was measured, and a compiler has estimated the configs."""
_LONGEST_TEXT = 40
SCORES = ("score", "default_score", "energy_mj")
"""Fields of results and entries that there are only where the objective is not time."""
_Count: TypeAlias = Annotated[int, within(0, 1 << 53)]
"""A huge integer does not fit a float."""


def _interval(ends: tuple[float, float]) -> tuple[float, float]:
    if not 0.0 <= ends[0] <= ends[1] < math.inf:
        raise ValueError("it is no interval")
    return ends


def _counts(found: Mapping[str, int]) -> dict[str, int]:
    return {outcome.value: found[outcome] for outcome in Outcome if found.get(outcome, 0) > 0}


def _shortened(text: str) -> str:
    return printable(text[:_LONGEST_TEXT])


Interval: TypeAlias = Annotated[tuple[float, float], _interval]
Counts: TypeAlias = Annotated[dict[str, int], _counts]


@dataclasses.dataclass(frozen=True)
class Searched(Record):
    """How thoroughly a space was searched.

    Attributes:
        stopped: why the search ended: `exhausted`, `max_trials`, `time_budget` or `patience`; `estimated` where there
            was none; empty where that is not known, as for results of earlier versions.
        seen: how many configs were tried, or dropped by `prune_fn`.
        space_size: how many configs there are.
        budget: the budget that ended it, as a number of trials or of seconds; None for another end.
    """

    IS_LENIENT = True

    stopped: str = ""
    seen: _Count | None = None
    space_size: _Count | None = None
    budget: _Count | float | None = None

    @property
    def thoroughness(self) -> float:
        """The larger, the more thorough; a result of an earlier version comes from all configs."""
        if self.stopped == ESTIMATED:
            return 0.0
        is_whole = self.seen is None or self.seen == self.space_size
        return math.inf if self.seen is None or is_whole else self.seen


@dataclasses.dataclass(frozen=True)
class Findings(Record):
    """The findings of a sweep; read from an entry, whose file may hold anything, those that are not known are left out.

    The times are those of one call in milliseconds, measured side by side.

    Attributes:
        time_ms: the time of the best config; NaN where it is unknown.
        default_time_ms: the time of the function's own defaults; None where it is unknown.
        speedup_interval: the speed-ups that the noise of the two allows; None where it is unknown.
        created: when it was saved, as ISO text; empty where that is not known.
        commit: the commit of the user's repository; empty where that is not known.
        trials: how many configs ended in each outcome.
        search: how thorough the search was.
        baseline_ms: the time with every kernel's first config, where kernels were tuned in their context.
        score: what the author's objective makes of the winner, less being better; None where that is time.
        default_score: the same of the defaults; None where it is unknown.
        energy_mj: the energy of one call with the winner, in millijoules; None where it was not measured.
    """

    IS_LENIENT = True

    time_ms: Milliseconds = math.nan
    default_time_ms: Milliseconds | None = None
    speedup_interval: Interval | None = None
    created: Annotated[str, _shortened] = ""
    commit: Annotated[str, _shortened] = ""
    trials: Counts = dataclasses.field(default_factory=dict)
    search: Searched = dataclasses.field(default_factory=Searched)
    baseline_ms: Milliseconds | None = None
    score: Score | None = None
    default_score: Score | None = None
    energy_mj: Millijoules | None = None

    def with_score(self, best: Trial, default: Trial | None) -> Findings:
        """Returns the same with the scores of the winner's trial and of that of the defaults."""
        default_score = None if default is None else default.score
        return dataclasses.replace(self, score=best.score, default_score=default_score, energy_mj=best.energy_mj)

    @property
    def figure(self) -> float:
        """The figure by which the winner was chosen, less being better: the score, or the time."""
        return self.time_ms if self.score is None else self.score

    @property
    def is_estimate(self) -> bool:
        """Whether the config was never measured."""
        return self.search.stopped == ESTIMATED

    @property
    def speedup(self) -> float | None:
        """The time of the defaults divided by that of the best config; None where one of them is unknown."""
        return self.default_time_ms / self.time_ms if self.default_time_ms and self.time_ms > 0 else None

    def text(self, *, is_default: bool = False) -> str:
        """Returns the times as text, as `2.02x faster than the defaults (0.0077 ms against 0.0155 ms)`.

        Args:
            is_default: whether the best config is that of the defaults.
        """
        if not self.time_ms > 0:
            return "estimated, never measured" if self.is_estimate else "time not known"
        best, against, more = f"{self.time_ms:.4g} ms", f"{self.default_time_ms or 0.0:.4g} ms", ""
        if self.score is not None:
            form = "{:.4g} mJ" if self.score == self.energy_mj else "objective {:.4g}"
            best, against, more = form.format(self.score), form.format(self.default_score or 0.0), f"; {best}"
        if is_default:
            return f"the defaults are best ({best}{more})"
        return f"{self.compared} ({best} against {against}{more})" if self.compared else f"{best}{more}"

    @property
    def compared(self) -> str:
        """The gain in words, as `2.02x faster than the defaults`; empty where it is unknown."""
        if self.score is not None:
            what = "energy" if self.score == self.energy_mj else "of the objective"
            return "" if self.default_score is None else _compared(self.score, self.default_score, what)
        if (speedup := self.speedup) is None:
            return ""
        low, high = self.speedup_interval or (speedup, speedup)
        if low <= 1.0 <= high:
            return "as fast as the defaults"
        return f"{ratio_text(max(speedup, 1 / speedup))} {'faster' if speedup > 1 else 'slower'} than the defaults"


def _compared(score: float, default: float, what: str) -> str:
    ratio = f"{ratio_text(max(default / score, score / default))} " if min(score, default) > 0 else ""
    return f"{ratio}{'less' if score < default else 'more'} {what} than the defaults"


def ratio_text(ratio: float) -> str:
    """Returns a ratio of times as text, as `2.02x` or `31.5x`."""
    return f"{ratio:.2f}x" if 0.1 <= ratio < 9.995 else f"{ratio:.3g}x"


def interval_text(interval: tuple[float, float] | None) -> str:
    """Returns an interval of ratios as text, as `1.95x to 2.10x`; empty for None."""
    return "" if interval is None else " to ".join(map(ratio_text, interval))
