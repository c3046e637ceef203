"""Decides how many samples a config gets: until they are steady, or rule the config out."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

from quarantune.host.waits import RunTime, fastest
from quarantune.measure.model import (
    ALL_DISTURBED,
    ENOUGH,
    FEW,
    LONG_RUN_MS,
    MARGINS,
    STRAY,
    cautious_share,
    standard_error,
)
from quarantune.values.codec import is_plausible_ms

_STEADY = 0.01
"""Standard error, as a share of the median, below which sampling ends: near enough to name the finalists."""
_DISTURBED_BUDGET_S = 1.0
"""Seconds of sampling if every run had long waits. Next to a busy process, matrix products of a millisecond took 100 ms
time after time, because spinning threads waited for threads that did not run."""
_SOFT_BUDGET_S = 0.06
"""Seconds after which `FEW` samples are enough: a slow config's median is steady with few."""
_BEHIND = 1.1
"""Factor to the fastest config above which a config, slower in all its samples, gets no more than necessary: if it
reaches the final, the final measures it again."""
_COLD = 2.0
"""Slowdown, as a factor, that a cold start alone may cause in a long first sample."""
_ALONE_MS = 50.0
"""Length below which a single sample may be an interruption or a cold start, and three more cost little. On a 2-core
machine with other work, one 0.1 ms run in sixty took over three times the median."""
_EXACT_MS = 0.5
"""Length above which a single sample by an exact clock holds no interruption, and hardly anything of a cold start."""
_GLANCE_MS = 1.0
"""Length above which a single sample ranks a config well enough."""
_WAITED = 0.05
"""Share of waits for a CPU in a sample's time above which the sample does not show the config's own time."""
_FEWEST_RUNS = 2
"""Fewest runs that must agree in any case."""
_MOST_RUNS = 200
"""Number of the latest samples that describe the disturbance."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Times of one call.

    Attributes:
        taken: the samples, in milliseconds.
        is_ruled_out: whether sampling stopped because another config is faster beyond doubt.
    """

    taken: tuple[RunTime, ...]
    is_ruled_out: bool = False

    @property
    def samples_ms(self) -> tuple[float, ...]:
        """The samples by the clock, waits included."""
        return tuple(sample.whole for sample in self.taken)

    @property
    def cpu_ms(self) -> tuple[float, ...]:
        """The samples without the time that they waited for a CPU."""
        return tuple(sample.cpu for sample in self.taken)

    def ranking_ms(self, *, is_exact: bool) -> float:
        """Returns the time by which finalists are chosen: the median, or the fastest sample of an inexact clock.

        Args:
            is_exact: whether samples are free of the effects of other processes. These only ever make a sample longer.
                Next to busy ones, half of all samples can be twenty times as long, so the fastest counts.
        """
        return statistics.median(self.cpu_ms) if is_exact else fastest(self.taken).cpu


@dataclasses.dataclass
class Disturbance:
    """How much other processes disturb runs here, by the latest samples.

    Every config is its own reference: its samples should be equal, and if they are not, the machine was busy.

    Attributes:
        runs: the latest samples, each with the fastest of the same config, in milliseconds.
        first_run: the largest ratio of a config's long first run to its later ones.
    """

    runs: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    first_run: float = 1.0

    def add(self, cpu_ms: Sequence[float], fastest_ms: float) -> None:
        """Records samples of one config, and the fastest."""
        self.runs += [(each, fastest_ms) for each in cpu_ms]
        del self.runs[:-_MOST_RUNS]

    def add_first_run(self, first_ms: float, later_ms: float) -> None:
        """Compares a config's first run with its later ones, if it was long enough to be informative."""
        if first_ms > _ALONE_MS:
            self.first_run = max(self.first_run, first_ms / later_ms)

    def runs_needed(self, least_ms: float, best_ms: float, cpu_ms: Sequence[float] = ()) -> int:
        """Returns how many runs must agree that a config is slow, so that hardly ever all of them are disturbed.

        A slow config may be as fast as the best one only if each of its runs was disturbed, for the whole difference.
        The more rarely other processes disturb runs nearly that much, the fewer must agree.

        Args:
            least_ms: the shortest run.
            best_ms: the time of the fastest config.
            cpu_ms: the config's own samples; if they scatter, they describe the current state of the machine.
        """
        # A share of the best time, or of the difference: the shortest run may be disturbed less than most.
        stray_ms = STRAY * max(least_ms - best_ms, best_ms)
        # Interruptions grow with the length of a run, and a shorter run shows at least one.
        disturbed = sum(
            run_ms - fastest_ms >= stray_ms * max(1.0, fastest_ms / best_ms) for run_ms, fastest_ms in self.runs
        )
        share = cautious_share(disturbed, len(self.runs))
        if own := sum(each - min(cpu_ms) >= stray_ms for each in cpu_ms):
            share = max(share, cautious_share(own, len(cpu_ms)))
        return max(_FEWEST_RUNS, round(math.log(ALL_DISTURBED) / math.log(share)))


def glance(take: Callable[[int], Sequence[RunTime]]) -> Sampled:
    """Takes one sample of a long run, or a few of a short one, merely to rank a config.

    Args:
        take: takes that many samples and returns them in milliseconds.

    Raises:
        ValueError: no plausible sample was taken.
    """
    samples = [*take(1)]
    if all(sample.whole < _GLANCE_MS for sample in samples):
        samples += take(FEW - 1)
    plausible = tuple(sample for sample in samples if is_plausible_ms(sample.whole))
    if not plausible:
        raise ValueError("the clock gave no plausible sample")
    return Sampled(plausible)


def measure(
    take: Callable[[int], Sequence[RunTime]],
    *,
    rep: int,
    best_median_ms: float | None = None,
    margin: float = math.inf,
    before_ms: float | None = None,
    last_ms: float | None = None,
    is_exact: bool = False,
    disturbance: Disturbance | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sampled:
    """Takes samples until they are steady, or rule the config out.

    The first sample of all does not count, because caches and clocks are cold. It counts if a cold start hardly matters
    to runs of this length, and either the clock is exact or a long run came before it: then a config that is far behind
    needs no other sample.

    Only a config's own time rules it out: the waits of its runs for a CPU are subtracted. One sample alone does not
    rule it out, unless the clock is exact.

    Args:
        take: takes that many samples and returns them in milliseconds.
        rep: the largest number of samples.
        best_median_ms: the time of the fastest config so far; None without one.
        margin: a config is out if even its fastest sample is this many times slower than that.
        before_ms: the shortest time that the run before these can have taken by the same clock; None if that run may
            have been cold.
        last_ms: the same, cold or not; None if unknown.
        is_exact: whether samples are free of the effects of other processes.
        disturbance: how much other processes disturb runs here. If the clock is not exact, it decides how many slow
            runs rule a config out. Without it, one does.
        clock: returns seconds.

    Returns:
        The samples.

    Raises:
        ValueError: no plausible sample was taken.
    """
    started_s, best_ms, disturbance = clock(), best_median_ms or math.inf, None if is_exact else disturbance
    limit_ms = math.inf if best_median_ms is None else margin * best_median_ms
    # A long warm run before the samples also counts.
    before = [RunTime.exactly(before_ms)] if before_ms is not None and before_ms > LONG_RUN_MS else []

    def more(count: int) -> list[RunTime]:
        return [sample for sample in take(count) if is_plausible_ms(sample.whole)] if count else []

    def runs_needed(least_ms: float) -> int:
        return (
            1 if disturbance is None else disturbance.runs_needed(least_ms, best_ms, [sample.cpu for sample in samples])
        )

    samples = more(1)
    if not before:
        least_ms = _least_ms(samples)
        alone_ms = max(_EXACT_MS, 2 * _COLD * limit_ms) if is_exact else max(_ALONE_MS, _COLD * limit_ms)
        if samples and least_ms > alone_ms and not is_exact:  # a single run that may be cold shows too little
            least_ms = min(least_ms, _least_ms(more(1)) if last_ms is None else last_ms)
        if samples and least_ms > alone_ms and runs_needed(least_ms) <= _FEWEST_RUNS:
            return Sampled(tuple(samples), is_ruled_out=True)
        needs_few = not is_exact or least_ms > _COLD * limit_ms or ENOUGH * least_ms > 1e3 * _SOFT_BUDGET_S
        counted = samples if is_exact and least_ms > LONG_RUN_MS else []
        samples = counted + more(min(rep, FEW if needs_few else ENOUGH) - len(counted))
    while True:
        runs = before + samples
        least_ms = _least_ms(runs)
        is_slow = bool(samples) and least_ms > limit_ms
        if is_slow and len(runs) >= min(max(rep, _FEWEST_RUNS), runs_needed(least_ms)):
            return Sampled(tuple(samples[:rep]), is_ruled_out=True)
        # The next run may be the first that shows the config's own time.
        all_disturbed = bool(samples) and all(sample.is_disturbed for sample in samples)
        is_late = clock() - started_s > (_DISTURBED_BUDGET_S if all_disturbed else _SOFT_BUDGET_S)
        is_over = len(samples) >= (2 if before else FEW) and (is_late or least_ms > _BEHIND * best_ms)
        cpu_ms = [sample.cpu for sample in samples]
        is_steady = len(samples) >= ENOUGH and standard_error(cpu_ms) < _STEADY and not all_disturbed
        is_enough = is_over or is_steady
        if len(samples) >= rep or (is_enough and not is_slow):
            return Sampled(tuple(samples[:rep]))
        further = more(min(rep - len(samples), 1 if before or all_disturbed or is_slow else ENOUGH))
        samples += further
        if not samples:
            raise ValueError("the clock gave no plausible sample")
        if not further:
            return Sampled(tuple(samples))


def _least_ms(runs: Sequence[RunTime]) -> float:
    return min((run.least for run in runs), default=math.inf)


def is_unreliable(samples_ms: Sequence[float], cpu_ms: Sequence[float]) -> bool:
    """Returns whether a config waited for a CPU in nearly all its samples, so that none may show its own time.

    Args:
        samples_ms: the samples.
        cpu_ms: the samples without waits for a CPU; empty for a clock that is free of the effects of other processes.
    """
    waited = [own <= (1 - _WAITED) * whole for whole, own in zip(samples_ms, cpu_ms, strict=False)]
    return waited.count(False) < min(2, len(waited))


def is_hopeless(first_ms: float, *, fastest_ms: float, fastest_first_ms: float, disturbance: Disturbance) -> bool:
    """Returns whether a config's first run rules it out.

    Args:
        first_ms: the time of that run without its waits.
        fastest_ms: the time of the fastest config.
        fastest_first_ms: the time of the fastest first run; if it is short, most of it may be the cold start.
        disturbance: how much other processes disturb runs here.
    """
    if disturbance.runs_needed(first_ms, fastest_ms) > _FEWEST_RUNS:
        return False
    cold = max(_COLD, (1 + STRAY) * disturbance.first_run)
    is_long = first_ms > _ALONE_MS and first_ms > MARGINS["wall"] * fastest_first_ms
    return first_ms > (cold * fastest_ms if is_long else 2 * cold * fastest_first_ms)


def longest_first_run(fastest_ms: float, *, disturbance: Disturbance) -> float:
    """Returns how long a first run may take, without waits, before it rules its config out.

    It is as long as all consecutive runs that must agree, if each of them is hopeless.

    Args:
        fastest_ms: the time of the fastest config, or of its first run.
        disturbance: how much other processes disturb runs here.
    """
    hopeless_ms = max(_COLD, (1 + STRAY) * disturbance.first_run) * max(fastest_ms, _ALONE_MS)
    return hopeless_ms * disturbance.runs_needed(hopeless_ms, fastest_ms)
