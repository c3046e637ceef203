"""A simulated machine: other processes take the CPU from a run now and then."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from quarantune.host.waits import RunTime


@dataclasses.dataclass
class Machine:
    """A machine with other processes that take the CPU from a run now and then.

    Attributes:
        generator: source of random numbers.
        share: probability that a short sample is interrupted.
        slice_ms: shortest and longest interruption.
        told: share of the waiting that the system reports.
        now: the time in seconds.
    """

    generator: random.Random
    share: float
    slice_ms: tuple[float, float]
    told: float
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def runs(self, time_ms: float) -> Callable[[int], Sequence[RunTime]]:
        """Returns a function that takes samples of a config."""

        def sample() -> RunTime:
            cpu_ms = time_ms * (1 + 0.01 * abs(self.generator.gauss(0, 1)))
            waited_ms = self.generator.uniform(*self.slice_ms) if self.generator.random() < self.share else 0.0
            whole_ms = cpu_ms + waited_ms
            self.now += 1e-3 * whole_ms
            if waited_ms < 0.1 * whole_ms:
                return RunTime.exactly(whole_ms)
            estimated_ms = whole_ms - self.told * waited_ms
            return RunTime(whole_ms, estimated_ms, estimated_ms)

        return lambda count: [sample() for _ in range(count)]


MACHINES = {
    "quiet": (0.0, (0.0, 0.0), 1.0),
    "now and then": (0.2, (4.0, 100.0), 1.0),
    "half of all, half told": (0.5, (2.0, 40.0), 0.5),
    "most of all, half told": (0.65, (2.0, 40.0), 0.5),
    "half of all, none told": (0.5, (2.0, 40.0), 0.0),
}
