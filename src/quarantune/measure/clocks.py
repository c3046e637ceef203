"""Clocks that take samples of a run, and the clocks that use this machine's time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax

from quarantune.host.waits import RunTime, Watch

_SAMPLE_TARGET_S = 200e-6
"""Least seconds of a wall-clock sample: a thousand times the cost of reading the clock."""
_QUEUE_TARGET_S = 2e-3
"""Least seconds of a queued sample, so that launching the first run and waiting for the last do not count."""
_MAX_INNER = 1000
"""Most runs within one sample."""


@dataclasses.dataclass(frozen=True)
class Clock:
    """Takes samples of the runs of one program.

    Attributes:
        name: the name in `Trial.clock` and in `model.MARGINS`: `device` for the device's own clock, whatever reads it.
        take: takes a number of samples and returns them, in milliseconds.
    """

    name: str
    take: Callable[[int], Sequence[RunTime]]

    @property
    def is_exact(self) -> bool:
        """Whether samples are free of the effects of other processes."""
        return self.name == "device"


def wall_clock(run: Callable[[], object], prepare: Callable[[], None] | None, *, spins: bool = False) -> Clock:
    """Returns a clock for the time from a call to the end of its work; a sample repeats short runs.

    Args:
        run: runs once, to the end.
        prepare: called, untimed, before every run, so that each run is one sample; None if runs can follow one
            another.
        spins: whether threads may spin while others wait for a CPU.
    """
    inner = 0

    def sample(watch: Watch, runs: int) -> RunTime:
        if prepare is not None:
            prepare()

        def work() -> None:
            for _ in range(runs):
                run()

        return watch.time(work)[0].scaled(1e3 / runs)

    def take(count: int) -> Sequence[RunTime]:
        nonlocal inner
        with Watch(spins=spins) as watch:
            if prepare is None and inner:
                return [sample(watch, inner) for _ in range(count)]
            samples = [sample(watch, 1) for _ in range(count)]
        inner = max(1, min(_MAX_INNER, round(1e3 * _SAMPLE_TARGET_S / max(samples[0].cpu, 1e-9))))
        return samples

    return Clock("wall", take)


def queued_clock(dispatch: Callable[[], object]) -> Clock:
    """Returns a clock for the wall-clock time of many runs queued on a device between two synchronisations, by number.

    Args:
        dispatch: queues one run and returns its outputs without waiting.
    """
    inner = 1

    def take(count: int) -> Sequence[RunTime]:
        nonlocal inner
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            for _ in range(inner):
                outputs = dispatch()
            jax.block_until_ready(outputs)
            elapsed = time.perf_counter() - start
            samples.append(RunTime.exactly(1e3 * elapsed / inner))
            inner = max(inner, min(_MAX_INNER, round(_QUEUE_TARGET_S * inner / elapsed)))
        return samples

    return Clock("queued", take)
