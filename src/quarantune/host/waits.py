"""How long work takes by itself: without the time that its threads were ready to run and had no CPU."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

_THREADS = "/proc/self/task"
_MOST_HELD = 64
"""Files kept open, which saves opening them for each run; those of further threads leave the work its descriptors."""
_NEGLIGIBLE = 0.1
"""Waits below this share of a run are left in it: to be woken takes a while on a quiet machine, too."""
_DISTURBED = 0.25
"""A run that waited for a larger share than this was disturbed."""
_Result = TypeVar("_Result")


class Taken(NamedTuple):
    """What a run took, in milliseconds or any other unit.

    Attributes:
        whole: from its start to its end.
        own: an estimate of what it takes where nobody else wants the CPUs.
        least: what it takes at the very least, as far as that is known; a config is ruled out by nothing else.
    """

    whole: float
    own: float
    least: float

    @classmethod
    def exactly(cls, whole: float) -> Taken:
        """Returns a run that never waited."""
        return cls(whole, whole, whole)

    @property
    def is_disturbed(self) -> bool:
        """Whether so much of it was spent waiting that it tells little of the run itself."""
        return self.least < (1 - _DISTURBED) * self.whole

    @property
    def is_clean(self) -> bool:
        """Whether nothing had to be taken off, so that it is no estimate."""
        return self.own == self.whole

    def scaled(self, factor: float) -> Taken:
        """Returns the same in another unit, or for one of several runs."""
        return Taken(factor * self.whole, factor * self.own, factor * self.least)


def fastest(samples: Sequence[Taken]) -> Taken:
    """Returns the fastest of some samples, of those that need no estimating if there are any.

    Threads that wait together have more taken off than they cost, which would make slow runs of a busy moment the
    fastest of all.
    """
    return min([sample for sample in samples if sample.is_clean] or samples, key=lambda sample: sample.own)


class ThreadTimes(NamedTuple):
    """How long a thread has run, and waited for a CPU, in nanoseconds."""

    ran_ns: int
    waited_ns: int


class Watch:
    """Times work and tells what of it was spent waiting for a CPU, by Linux's `schedstat`; elsewhere nothing was.

    Threads wait one after another as often as at the same time, so that all their waits count, not the longest. Where
    they wait together that is too much, so that a run takes at least as long as its busiest thread has run. That does
    not hold where threads spin until others have done their part, as those of BLAS libraries do in plain functions.
    """

    def __init__(self, *, spins: bool) -> None:
        """Opens the watch; close it.

        Args:
            spins: whether threads may spin while others wait for a CPU.
        """
        self._spins = spins
        self._files: dict[str, int] = {}
        self._me = str(threading.get_native_id())

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def time(self, work: Callable[[], _Result]) -> tuple[Taken, _Result]:
        """Does work and returns what it took, in seconds, and its result."""
        before = self.read()
        ran, started = time.thread_time_ns(), time.perf_counter()
        result = work()
        whole_s = time.perf_counter() - started
        ran = time.thread_time_ns() - ran
        return self._taken(whole_s, before, self.read(), ran), result

    def read(self) -> dict[str, ThreadTimes]:
        """Returns what each thread of this process has run and waited until now."""
        times = {}
        for thread, fd in list(self._files.items()):
            try:
                times[thread] = _times(fd)
            except (OSError, ValueError):  # it has ended
                os.close(self._files.pop(thread))
        with contextlib.suppress(OSError):
            for thread in os.listdir(_THREADS):
                if thread in times:
                    continue
                with contextlib.suppress(OSError, ValueError):
                    fd = os.open(f"{_THREADS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        times[thread] = _times(fd)
                        if len(self._files) < _MOST_HELD:
                            self._files[thread] = fd
                    finally:
                        if self._files.get(thread) != fd:
                            os.close(fd)
        return times

    def _taken(
        self, whole_s: float, before: Mapping[str, ThreadTimes], after: Mapping[str, ThreadTimes], ran_ns: int
    ) -> Taken:
        none = ThreadTimes(0, 0)
        waited_s = 1e-9 * sum(times.waited_ns - before.get(thread, none).waited_ns for thread, times in after.items())
        if waited_s < _NEGLIGIBLE * whole_s:
            return Taken.exactly(whole_s)
        # What the kernel notes of a thread that is running, as the one that asks, is some milliseconds old.
        others = {thread: times for thread, times in after.items() if thread != self._me}
        ran = [ran_ns, *(times.ran_ns - before.get(thread, none).ran_ns for thread, times in others.items())]
        busiest_s = min(whole_s, 1e-9 * max(ran))
        least_s = max(0.0, whole_s - waited_s)
        own_s = max(busiest_s, least_s)
        return Taken(whole_s, own_s, least_s if self._spins else own_s)


def _times(fd: int) -> ThreadTimes:
    ran, waited, *_ = os.pread(fd, 64, 0).split()
    return ThreadTimes(int(ran), int(waited))
