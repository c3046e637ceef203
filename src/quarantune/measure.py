"""How many samples a config gets, and what they say: steady, or ruled out already."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

from quarantune.outcomes import Trial, is_plausible_ms

_FIRST_LOOK = 3
_MIN_SAMPLES = 5
_BATCH = 5
_STEADY = 0.01
"""Sampling ends once the median's standard error is below this share of it: near enough to name the finalists."""
_SOFT_BUDGET_S = 0.06
"""Once this has gone by, `_FIRST_LOOK` samples are enough: a slow config's median is steady with few."""
_BEHIND = 1.1
"""A config all of whose samples are this many times slower than the fastest gets no more than must be: if it is in the
final, that will tell."""
_COLD = 2.0
"""How many times slower than the next ones a first long sample may be for the cold alone."""
_LONG_MS = 50.0
"""A single sample shorter than this may be an interruption, and three more cost little: on a 2-core machine with other
work, one 0.1 ms run in sixty took over three times the median."""
_ALONE_MS = 30.0
_FIRSTS = 1.5
"""A first run this long, and this many times longer than the fastest first run, says something by itself: what the cold
adds is much the same for all."""
TELLING_MS = 5.0
"""Two runs longer than this, one after another, say something: neither the cold nor an interruption takes as long."""
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
    waited: Callable[[], float] = lambda: 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Takes samples until they are steady, or rule the config out.

    The first sample ever taken counts for nothing, as caches and clocks are cold. It counts where runs are so long that
    the cold is little of them, and where a long run was before it: then a config that is far behind needs no other.

    A config is ruled out only by what is its own: the time that its runs waited for a CPU is not.

    Args:
        take: takes that many samples and returns them in milliseconds.
        rep: at most this many samples.
        bar_ms: the median of the fastest config so far; None for none.
        margin: a config is ruled out when even its fastest sample is this many times slower than that.
        before_ms: how long the last run before these took by the same clock, but for waits; None where nobody knows.
        waited: tells for what share of the last samples taken they waited for a CPU.
        clock: seconds.

    Returns:
        The samples.

    Raises:
        ValueError: no plausible sample was taken.
    """
    started = clock()
    is_telling = before_ms is not None and before_ms > TELLING_MS
    least_ms = before_ms if is_telling and before_ms is not None else math.inf
    limit_ms = math.inf if bar_ms is None else margin * bar_ms

    def more(count: int) -> list[float]:
        nonlocal least_ms
        samples = plausible(take(count))
        least_ms = min([least_ms, *(sample * (1.0 - waited()) for sample in samples)])
        return samples

    samples = more(1)
    beyond_doubt_ms = limit_ms if is_telling else max(_LONG_MS, _COLD * limit_ms)
    if samples and least_ms > beyond_doubt_ms:
        return Samples(tuple(samples), is_ruled_out=True)
    enough = 2 if is_telling else _FIRST_LOOK
    if not is_telling:
        least_ms = math.inf
        samples = more(min(rep, enough))
    while True:
        if samples and least_ms > limit_ms:
            return Samples(tuple(samples), is_ruled_out=True)
        if len(samples) >= rep or (len(samples) >= _MIN_SAMPLES and standard_error(samples) < _STEADY):
            break
        is_behind = bar_ms is not None and least_ms > _BEHIND * bar_ms
        if len(samples) >= enough and (is_behind or clock() - started > _SOFT_BUDGET_S):
            break
        further = more(min(rep - len(samples), 1 if is_telling else _BATCH))
        if not further and not samples:
            raise ValueError("the clock gave no plausible sample")
        samples += further
        if not further:
            break
    return Samples(tuple(samples[:rep]))


def is_hopeless(first_ms: float, *, fastest_ms: float, fastest_first_ms: float) -> bool:
    """Returns whether a config is out of the race for what its first run took.

    Args:
        first_ms: how long that took, but for waits.
        fastest_ms: what the fastest config takes.
        fastest_first_ms: how long the fastest first run took; of a short one the cold may be the greater part.
    """
    is_long = first_ms > _ALONE_MS and first_ms > _FIRSTS * fastest_first_ms
    return first_ms > (_COLD * fastest_ms if is_long else 2 * _COLD * fastest_first_ms)


def plausible(samples_ms: Sequence[float]) -> list[float]:
    """Returns the samples that can be times of a kernel at all."""
    return [sample for sample in samples_ms if is_plausible_ms(sample)]


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
