"""How many samples a config gets, and what they say: steady, or ruled out already."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

from quarantune.host.waits import Taken, fastest
from quarantune.values.trial import Trial, is_plausible_ms

_FIRST_LOOK = 3
_MIN_SAMPLES = 5
_BATCH = 5
_STEADY = 0.01
"""Sampling ends once the median's standard error is below this share of it: near enough to name the finalists."""
_DISTURBED_BUDGET_S = 1.0
"""So long is sampled where no run was without long waits: beside a busy process, matrix products of a millisecond took
a hundred in a row, as threads that spin wait for others that do not run."""
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
_STRAY = 1.25
"""A sample this many times longer than the same config's fastest was disturbed."""
_FEWEST_RUNS = 2
_ALL_DISTURBED = 0.0025
"""How likely it may be that all runs that rule a config out were disturbed."""
_NOISE_MARGIN = 1.25
"""How much farther out than any seen before a first run may be for noise alone."""
_FIRSTS = 1.5
"""A first run this long, and this many times longer than the fastest first run, says something by itself: what the cold
adds is much the same for all."""
INFORMATIVE_MS = 5.0
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
        taken: the samples, in milliseconds.
        is_ruled_out: whether sampling stopped because another config is faster beyond doubt.
    """

    taken: tuple[Taken, ...]
    is_ruled_out: bool = False

    @property
    def samples_ms(self) -> tuple[float, ...]:
        """The samples as the clock told them."""
        return tuple(sample.whole for sample in self.taken)

    @property
    def own_ms(self) -> tuple[float, ...]:
        """The samples without the time that they waited for a CPU."""
        return tuple(sample.own for sample in self.taken)

    def level_ms(self, *, is_exact: bool) -> float:
        """Returns the time to choose finalists by.

        Args:
            is_exact: whether nothing that other processes do is in a sample. Where it is, they only ever make a sample
                longer, and beside busy ones half of all samples can be twenty times as long: the fastest counts.
        """
        return statistics.median(self.own_ms) if is_exact else fastest(self.taken).own

    def disturbed(self, *, is_exact: bool) -> int:
        """Returns how many samples took much longer than the fastest, for other reasons than the config's own."""
        return 0 if is_exact else _disturbed(self.own_ms)


@dataclasses.dataclass
class Noise:
    """How much other processes disturb runs here, by all that was sampled until now.

    Every config is a reference for itself: its samples should be equal, and where they are not, that tells of the
    machine.

    Attributes:
        samples: how many were taken.
        disturbed: how many of them took much longer than the same config's fastest.
        first_run: how many times longer than its later ones a config's long first run took at most.
    """

    samples: int = 0
    disturbed: int = 0
    first_run: float = 1.0

    def add(self, samples: int, disturbed: int) -> None:
        """Counts one config's samples."""
        self.samples += samples
        self.disturbed += disturbed

    def add_first_run(self, first_ms: float, later_ms: float) -> None:
        """Compares a config's first run with its later ones, where it was so long that this tells anything."""
        if first_ms > _ALONE_MS:
            self.first_run = max(self.first_run, first_ms / later_ms)

    def runs_needed(self, own_ms: Sequence[float] = ()) -> int:
        """Returns how many runs must agree that a config is slow: so many that hardly ever all of them are disturbed.

        Args:
            own_ms: the config's own samples, which tell more of the machine as it is now where they scatter.
        """
        # With few of them, nobody knows that samples are not disturbed.
        share = (self.disturbed + 1) / (self.samples + 4)
        if own := _disturbed(own_ms):
            share = max(share, (own + 1) / (len(own_ms) + 4))
        return max(_FEWEST_RUNS, round(math.log(_ALL_DISTURBED) / math.log(share)))


def measure(
    take: Callable[[int], Sequence[Taken]],
    *,
    rep: int,
    bar_ms: float | None = None,
    margin: float = math.inf,
    before_ms: float | None = None,
    last_ms: float | None = None,
    is_exact: bool = False,
    noise: Noise | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Takes samples until they are steady, or rule the config out.

    The first sample ever taken counts for nothing, as caches and clocks are cold. It counts where runs are so long that
    the cold is little of them, and where a long run was before it: then a config that is far behind needs no other.

    A config is ruled out only by what is its own: the time that its runs waited for a CPU is not. One sample alone does
    not rule it out, unless the clock is exact.

    Args:
        take: takes that many samples and returns them in milliseconds.
        rep: at most this many samples.
        bar_ms: the time of the fastest config so far; None for none.
        margin: a config is ruled out when even its fastest sample is this many times slower than that.
        before_ms: the least that the last run before these took by the same clock; None where that may have been cold.
        last_ms: the same, cold or not; None where nobody knows.
        is_exact: whether nothing that other processes do is in a sample.
        noise: how much other processes disturb runs here, which says how many must be slow to rule the config out, if
            the clock is not exact; None for not at all.
        clock: seconds.

    Returns:
        The samples.

    Raises:
        ValueError: no plausible sample was taken.
    """
    started = clock()
    is_telling = before_ms is not None and before_ms > INFORMATIVE_MS
    least_ms = before_ms if is_telling and before_ms is not None else math.inf
    limit_ms = math.inf if bar_ms is None else margin * bar_ms

    def more(count: int) -> list[Taken]:
        nonlocal least_ms
        samples = [sample for sample in take(count) if is_plausible_ms(sample.whole)]
        least_ms = min([least_ms, *(sample.least for sample in samples)])
        return samples

    def told(*, is_ruled_out: bool) -> Samples:
        return Samples(tuple(samples[:rep]), is_ruled_out)

    samples = more(1)
    beyond_doubt_ms = limit_ms if is_telling else max(_LONG_MS, _COLD * limit_ms)
    if samples and least_ms > beyond_doubt_ms and not is_telling and not is_exact:
        if last_ms is None:
            more(1)
        least_ms = min(least_ms, math.inf if last_ms is None else last_ms)

    def needed() -> int:
        return 1 if is_exact or noise is None else noise.runs_needed([sample.own for sample in samples])

    if samples and least_ms > beyond_doubt_ms and needed() <= _FEWEST_RUNS:
        return told(is_ruled_out=True)
    enough = 2 if is_telling else _FIRST_LOOK
    if not is_telling:
        least_ms = math.inf
        samples = more(min(rep, enough))
    while True:
        is_slow = bool(samples) and least_ms > limit_ms
        if is_slow and len(samples) + is_telling >= min(max(rep, _FEWEST_RUNS), needed()):
            return told(is_ruled_out=True)
        # Where every run was disturbed, the next may be the first that tells what it takes.
        all_disturbed = bool(samples) and all(sample.is_disturbed for sample in samples)
        is_enough = len(samples) >= _MIN_SAMPLES and not all_disturbed
        if len(samples) >= rep or (
            is_enough and not is_slow and standard_error([sample.own for sample in samples]) < _STEADY
        ):
            break
        is_behind = bar_ms is not None and least_ms > _BEHIND * bar_ms
        budget_s = _DISTURBED_BUDGET_S if all_disturbed else _SOFT_BUDGET_S
        if len(samples) >= enough and not is_slow and (is_behind or clock() - started > budget_s):
            break
        further = more(min(rep - len(samples), 1 if is_telling or all_disturbed or is_slow else _BATCH))
        if not further and not samples:
            raise ValueError("the clock gave no plausible sample")
        samples += further
        if not further:
            break
    return told(is_ruled_out=False)


def is_hopeless(first_ms: float, *, fastest_ms: float, fastest_first_ms: float, noise: Noise) -> bool:
    """Returns whether a config is out of the race for what its first run took.

    Args:
        first_ms: how long that took, but for waits.
        fastest_ms: what the fastest config takes.
        fastest_first_ms: how long the fastest first run took; of a short one the cold may be the greater part.
        noise: how much other processes disturb runs here.
    """
    if noise.runs_needed() > _FEWEST_RUNS:
        return False
    doubt = max(_COLD, _NOISE_MARGIN * noise.first_run)
    is_long = first_ms > _ALONE_MS and first_ms > _FIRSTS * fastest_first_ms
    return first_ms > (doubt * fastest_ms if is_long else 2 * doubt * fastest_first_ms)


def _disturbed(own_ms: Sequence[float]) -> int:
    return sum(each > _STRAY * min(own_ms) for each in own_ms)


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
