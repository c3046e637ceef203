"""The interval that a later run falls into: of a speed-up or a time that a few processes have measured.

Rounds of one process share its memory layout, its clock rates and its neighbours, so their scatter says little about a
later run. Each process therefore counts as one observation: the logarithm of its figure. Few processes tell little of
how much processes differ, so the scatter that `model.BETWEEN` states counts like `_PRIOR_WEIGHT` further observations
of it. The predictive distribution of the next observation is then Student's t (Gelman et al., Bayesian Data Analysis,
sections 3.2 and 3.3; Smyth, Linear Models and Empirical Bayes Methods, 2004, has the same moderated variance for few
replicates of many experiments). A single process gets the widest interval, and needs no other rule.

A wall clock's samples lack waits for a CPU, and the fastest of them count: they are the times of a machine that has
nothing else to do. If other processes run, now and later, programs are slowed down unevenly. So the interval also
encloses the interval of the typical times, with waits and interruptions. On a quiet machine, the two are the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from quarantune.measure.model import BETWEEN, FEW, standard_error

_PRIOR_WEIGHT = 4
"""Degrees of freedom of the stated scatter. The speed-ups of 14 runs on a busy machine had the tails of a t with 4."""
_T95 = (2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
"""The 97.5th percentile of Student's t with `_PRIOR_WEIGHT` degrees of freedom, and one more each."""

Rounds: TypeAlias = Sequence[float]


def later_run(
    figures: Sequence[float], clock: str, *, within: float = 0.0, between: Mapping[str, float] = BETWEEN
) -> tuple[float, float]:
    """Returns the interval that the figure of a later run falls into in 95 of 100 cases.

    Args:
        figures: the figure of each process, above zero: a speed-up, or a time.
        clock: the clock that measured them.
        within: the standard error of one figure within its process, as a share.
        between: the stated scatter between processes, by clock.
    """
    logs = [math.log(figure) for figure in figures]
    count, middle = len(logs), statistics.fmean(logs)
    stated = between[clock] ** 2 + within**2
    freedom = _PRIOR_WEIGHT + count - 1
    variance = (_PRIOR_WEIGHT * stated + sum((log - middle) ** 2 for log in logs)) / freedom
    quantile = _T95[min(count, len(_T95)) - 1]
    half = quantile * math.sqrt(variance * (1 + 1 / count))
    return math.exp(middle - half), math.exp(middle + half)


def speedup_interval(
    best_ms: Rounds, default_ms: Rounds, *, clock: str, processes: Sequence[int] = (), typical: Sequence[float] = ()
) -> tuple[float, float] | None:
    """Returns the interval that the speed-up of a winner over the defaults falls into in a later run.

    Args:
        best_ms: the winner's samples in the final.
        default_ms: the samples of the defaults.
        clock: the clock that measured them.
        processes: how many rounds each process has, in the order of the samples; empty for one process.
        typical: the ratio of their typical times in each process; empty if unknown.

    Returns:
        Its ends, which enclose the ratio of the medians; None if there are too few rounds.
    """
    if min(len(best_ms), len(default_ms)) < FEW:
        return None
    if {len(best_ms), len(default_ms)} != {sum(processes)}:
        processes = ()  # one of the two left the final early, so only the first process has its rounds
    pairs = list(_by_process(best_ms, default_ms, processes))
    figures = [statistics.median(theirs) / statistics.median(ours) for ours, theirs in pairs]
    errors = [standard_error([b / a for a, b in zip(*pair, strict=False)]) for pair in pairs]
    within, speedup = statistics.fmean(errors), statistics.median(default_ms) / statistics.median(best_ms)
    found = [later_run(ratios, clock, within=within) for ratios in (figures, typical) if ratios]
    return min(speedup, *(low for low, _ in found)), max(speedup, *(high for _, high in found))


def _by_process(best_ms: Rounds, default_ms: Rounds, processes: Sequence[int]) -> Iterator[tuple[Rounds, Rounds]]:
    begin = 0
    for count in processes or [max(len(best_ms), len(default_ms))]:
        yield best_ms[begin : begin + count], default_ms[begin : begin + count]
        begin += count
