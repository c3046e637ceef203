"""Timing one callable: warm-up, then repeated samples, each long enough for the clock."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

_SAMPLE_TARGET_S = 200e-6
"""A sample lasts at least this long: a thousand times what reading the clock costs."""
_MAX_INNER = 1000
_MIN_SAMPLES = 3
_SOFT_BUDGET_S = 1.0
"""Once this has gone by, `_MIN_SAMPLES` samples are enough: a slow config's median is steady with few."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Times of one call, in milliseconds, one per sample."""

    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median sample: the mean would follow every hiccup of the machine."""
        return statistics.median(self.samples_ms)


def measure(
    run: Callable[[], object],
    *,
    warmup: int,
    rep: int,
    prepare: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Times `run`, which must not return before its work is done.

    Short runs are repeated within a sample so that the clock's resolution does not matter.

    Args:
        run: what is timed.
        warmup: untimed runs before the first sample.
        rep: at most this many samples.
        prepare: called, untimed, before every run; then each sample is a single run.
        clock: seconds.

    Returns:
        The samples.
    """

    def once() -> float:
        if prepare is not None:
            prepare()
        start = clock()
        run()
        return clock() - start

    for _ in range(warmup):
        once()
    first = once()
    inner = 1 if prepare is not None else _inner_runs(first)
    samples: list[float] = []
    deadline = clock() + _SOFT_BUDGET_S
    while len(samples) < rep and not (len(samples) >= _MIN_SAMPLES and clock() > deadline):
        samples.append(once() if inner == 1 else _sample(run, inner, clock))
    return Samples(tuple(1e3 * sample for sample in samples))


def _inner_runs(run_s: float) -> int:
    return max(1, min(_MAX_INNER, round(_SAMPLE_TARGET_S / max(run_s, 1e-9))))


def _sample(run: Callable[[], object], inner: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(inner):
        run()
    return (clock() - start) / inner
