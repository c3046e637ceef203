"""The time of work without the time that its threads waited for a CPU, and a limit on that time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeVar

_THREADS = "/proc/self/task"
_MOST_HELD = 64
"""Most files that stay open between runs, to save opening them. More would take descriptors from the work."""
_NEGLIGIBLE = 0.1
"""Share of a run below which waits stay part of it: waking up takes a while even on a quiet machine."""
_DISTURBED = 0.25
"""Share of waits above which a run was disturbed."""
_SLICE_S = 0.02
"""Seconds between two looks at a run with a limit."""
_Result = TypeVar("_Result")


class RunTime(NamedTuple):
    """The time of a run, in milliseconds or any other unit.

    Attributes:
        whole: from its start to its end.
        cpu: an estimate of the time without other processes on the CPUs.
        least: a lower bound of that time; only this bound rules a config out.
    """

    whole: float
    cpu: float
    least: float

    @classmethod
    def exactly(cls, whole: float) -> RunTime:
        """Returns a run that never waited."""
        return cls(whole, whole, whole)

    @property
    def is_disturbed(self) -> bool:
        """Whether waits took so large a share that the rest is unreliable."""
        return self.least < (1 - _DISTURBED) * self.whole

    @property
    def is_clean(self) -> bool:
        """Whether no wait was subtracted, so that `cpu` is exact."""
        return self.cpu == self.whole

    def scaled(self, factor: float) -> RunTime:
        """Returns the times multiplied by a factor: in another unit, or for one of several equal runs."""
        return RunTime(factor * self.whole, factor * self.cpu, factor * self.least)


def fastest(samples: Sequence[RunTime]) -> RunTime:
    """Returns the fastest sample, chosen from those without waits if there are any.

    For threads that wait at the same time, the watch subtracts more than the waits cost, so a slow run of a busy moment
    could look fastest.
    """
    return min([sample for sample in samples if sample.is_clean] or samples, key=lambda sample: sample.cpu)


class ThreadTimes(NamedTuple):
    """The times that a thread ran and waited for a CPU, in nanoseconds."""

    ran_ns: int
    waited_ns: int


class Watch(contextlib.AbstractContextManager["Watch"]):
    """Times work, and its waits for a CPU by Linux's `schedstat`. Without `schedstat`, waits count as 0.

    The watch subtracts the sum of all threads' waits, because threads often wait one after another. The sum is too much
    for threads that wait at the same time, so a run takes at least as long as its busiest thread ran. That bound is
    wrong if threads spin until others have done their part, as threads of BLAS libraries do.
    """

    def __init__(self, *, spins: bool) -> None:
        """Sets up the watch. Use it as a context manager.

        Args:
            spins: whether threads may spin while others wait for a CPU.
        """
        self._spins = spins
        self._files: dict[str, int] = {}
        self._me = str(threading.get_native_id())
        self._started = 0.0
        self._before: dict[str, ThreadTimes] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the open files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def time(self, work: Callable[[], _Result]) -> tuple[RunTime, _Result]:
        """Does work and returns its time, in seconds, and its result."""
        before = self.read()
        ran, started = time.thread_time_ns(), time.perf_counter()
        result = work()
        whole_s = time.perf_counter() - started
        ran = time.thread_time_ns() - ran
        return self._taken(whole_s, before, self.read(), ran), result

    def start(self) -> None:
        """Begins to time the work of this thread."""
        self._before, self._started = self.read(), time.perf_counter()

    def so_far(self) -> RunTime:
        """Returns the time of the work since `start`, in seconds; for another thread to call."""
        return self._taken(time.perf_counter() - self._started, self._before, self.read(), None)

    def read(self) -> dict[str, ThreadTimes]:
        """Returns how long each thread of this process has run and waited so far."""
        times = {}
        for thread, fd in list(self._files.items()):
            try:
                times[thread] = _times(fd)
            except (OSError, ValueError):  # the thread has ended
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
        self, whole_s: float, before: Mapping[str, ThreadTimes], after: Mapping[str, ThreadTimes], ran_ns: int | None
    ) -> RunTime:
        none = ThreadTimes(0, 0)
        waited_s = 1e-9 * sum(times.waited_ns - before.get(thread, none).waited_ns for thread, times in after.items())
        if waited_s < _NEGLIGIBLE * whole_s:
            return RunTime.exactly(whole_s)
        # The kernel's figure for a running thread, such as this one, is some milliseconds old.
        others = {thread: times for thread, times in after.items() if ran_ns is None or thread != self._me}
        ran = [ran_ns or 0, *(times.ran_ns - before.get(thread, none).ran_ns for thread, times in others.items())]
        busiest_s = min(whole_s, 1e-9 * max(ran))
        least_s = max(0.0, whole_s - waited_s)
        cpu_s = max(busiest_s, least_s)
        return RunTime(whole_s, cpu_s, least_s if self._spins else cpu_s)


@contextlib.contextmanager
def run_limit(limit_ms: float, report: Callable[[RunTime], None]) -> Iterator[None]:
    """Watches the run inside a `with` statement from another thread, and ends this process if the run takes too long.

    Nothing else can stop a run of XLA. Waits for a CPU do not count, nor do stops of this process.

    Args:
        limit_ms: the longest time of the run in milliseconds, without waits.
        report: called with the time so far in milliseconds, just before the process ends.
    """
    over, lock, watch = threading.Event(), threading.Lock(), Watch(spins=False)

    def look() -> None:
        with watch:
            before_s, stopped_s = 0.0, 0.0
            while not over.wait(_SLICE_S):
                taken = watch.so_far()
                # A long step means that the process was stopped: a busy machine's delays are waits, left out already.
                stopped_s += max(0.0, taken.least - before_s - 2 * _SLICE_S)
                before_s = taken.least
                least_s = taken.least - stopped_s
                if least_s >= 1e-3 * limit_ms:
                    with lock:
                        if not over.is_set():
                            _end(report, RunTime(taken.whole, least_s, least_s).scaled(1e3))

    watch.start()
    try:
        threading.Thread(target=look, daemon=True).start()
    except RuntimeError:  # no further thread can start: the run goes unwatched
        watch.close()
    try:
        yield
    finally:
        with lock:  # the run may end during the report
            over.set()


def _end(report: Callable[[RunTime], None], taken: RunTime) -> NoReturn:
    """Ends this process."""
    report(taken)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _times(fd: int) -> ThreadTimes:
    ran, waited, *_ = os.pread(fd, 64, 0).split()
    return ThreadTimes(int(ran), int(waited))
