"""How many samples a config gets, and what they say: steady, or ruled out already."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

from quarantune.outcomes import Trial

_FIRST_LOOK = 3
_MIN_SAMPLES = 5
_BATCH = 5
_STEADY = 0.01
"""Sampling ends once the median's standard error is below this share of it: near enough to name the finalists."""
_SOFT_BUDGET_S = 0.1
"""Once this has gone by, `_FIRST_LOOK` samples are enough: a slow config's median is steady with few."""
COLD = 2.0
"""How many times slower than the next ones a first long sample may be for the cold alone."""
LONG_MS = 50.0
"""A single sample shorter than this may be an interruption, and three more cost little: on a 2-core machine with other
work, one 0.1 ms run in sixty took over three times the median."""
_LONGEST_MS = 1e8
"""Longer samples are the clock's error, not the kernel's: a device clock was seen to answer with nearly 2^64 ns."""
BUSY = {"device": 0.05, "queued": 0.15, "wall": 0.25}
"""Scatter, as a share of the median, above which something else was going on, by the clock that took the samples."""
_MAD_TO_SIGMA = 1.4826
_MEDIAN_EFFICIENCY = 1.2533
"""The standard error of a median is this many times that of a mean, for normal noise."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Times of one call.

    Attributes:
        samples_ms: one per sample, in milliseconds.
        is_ruled_out: whether sampling stopped because another config is faster beyond doubt.
    """

    samples_ms: tuple[float, ...]
    is_ruled_out: bool = False

    @property
    def median_ms(self) -> float:
        """The median sample: the mean would follow every hiccup of the machine."""
        return statistics.median(self.samples_ms)


def measure(
    take: Callable[[int], Sequence[float]],
    *,
    rep: int,
    bar_ms: float | None = None,
    margin: float = math.inf,
    before_ms: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Takes samples until they are steady, or rule the config out.

    The first sample ever taken counts for nothing, as caches and clocks are cold. It counts where runs are so long that
    the cold is little of them; then the run before it says something too, and a config that is far behind needs no
    other.

    Args:
        take: takes that many samples and returns them in milliseconds.
        rep: at most this many samples.
        bar_ms: the median of the fastest config so far; None for none.
        margin: a config is ruled out when even its fastest sample is this many times slower than that.
        before_ms: how long the last run before these took by the same clock; None where nobody knows.
        clock: seconds.

    Returns:
        The samples.

    Raises:
        ValueError: no plausible sample was taken.
    """
    started = clock()
    is_long = before_ms is not None and before_ms > LONG_MS
    if is_long and bar_ms is not None and before_ms is not None and before_ms > COLD * margin * bar_ms:
        return Samples((before_ms,), is_ruled_out=True)
    samples = plausible(take(1))
    if samples and bar_ms is not None and samples[0] > max(LONG_MS, COLD * margin * bar_ms):
        return Samples(tuple(samples), is_ruled_out=True)
    enough = 2 if is_long else _FIRST_LOOK
    samples = plausible(take(1)) + samples if is_long else plausible(take(min(rep, _FIRST_LOOK)))
    while True:
        if samples and bar_ms is not None and min(samples) > margin * bar_ms:
            return Samples(tuple(samples), is_ruled_out=True)
        if len(samples) >= rep or (len(samples) >= _MIN_SAMPLES and standard_error(samples) < _STEADY):
            break
        if clock() - started > _SOFT_BUDGET_S and len(samples) >= enough:
            break
        more = plausible(take(min(rep - len(samples), 1 if is_long else _BATCH)))
        if not more and not samples:
            raise ValueError("the clock gave no plausible sample")
        samples += more
        if not more:
            break
    return Samples(tuple(samples[:rep]))


def plausible(samples_ms: Sequence[float]) -> list[float]:
    """Returns the samples that can be times of a kernel at all."""
    return [sample for sample in samples_ms if 0.0 < sample < _LONGEST_MS]


def typical_spread(trials: Sequence[Trial]) -> float:
    """Returns how much the samples of a typical trial scatter, as a share of their median."""
    return statistics.median(spread(trial.samples_ms) for trial in trials)


def standard_error(samples: Sequence[float]) -> float:
    """Returns the standard error of the samples' median, as a share of it, from their median absolute deviation."""
    return _MEDIAN_EFFICIENCY * spread(samples) / math.sqrt(len(samples))


def spread(samples: Sequence[float]) -> float:
    """Returns the samples' scatter as a share of their median: the median absolute deviation, scaled as sigma is."""
    middle = statistics.median(samples)
    if not middle:
        return math.inf
    return _MAD_TO_SIGMA * statistics.median(abs(sample - middle) for sample in samples) / middle
