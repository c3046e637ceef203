"""Reports, from a thread of its own, work of this process that takes longer than its deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

from quarantune.host import stops

_LOOK_S = 0.1
"""Seconds between two looks at the work; a longer gap than `stops` allows means that this process was stopped."""


@dataclasses.dataclass(eq=False)
class Watched:
    """Work that is watched.

    Attributes:
        limit_s: the seconds that it may take.
        report: called, in the watchdog's thread, with the seconds that it has taken.
        taken_s: the seconds that it has taken, without those for which this process was stopped.
        is_overdue: whether it has taken longer than it may.
    """

    limit_s: float
    report: Callable[[float], None]
    taken_s: float = 0.0
    is_overdue: bool = False
    next_report_s: float = 0.0


class Watchdog:
    """Watches one piece of work after another; reports each that is overdue, and again when twice as long has passed.

    Nothing can end work of this process from outside, but its user can be told which config hangs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Sets up a watchdog; its thread starts with the first work.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._changed = threading.Condition()
        self._watched: Watched | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @contextlib.contextmanager
    def watching(self, limit_s: float, report: Callable[[float], None]) -> Iterator[Watched]:
        """Watches the work of a block; attributes of `Watched`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quarantune-watchdog", daemon=True)
            self._thread.start()
        watched = Watched(limit_s, report, next_report_s=max(limit_s, _LOOK_S))
        with self._changed:
            self._watched = watched
            self._changed.notify()
        try:
            yield watched
        finally:
            with self._changed:
                self._watched = None

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        last: Watched | None = None
        pauses, before = stops.Stops(self._clock), self._clock()
        while True:
            with self._changed:
                if self._is_closed:
                    return
                watched = self._watched
                if watched is None or watched is not last:
                    last, before = watched, self._clock()
                    pauses.begin()
                self._changed.wait(None if watched is None else _LOOK_S)
                if watched is None or watched is not self._watched:
                    continue
                now = self._clock()
                watched.taken_s += now - before - pauses.lost_s()
                before = now
                is_due = watched.taken_s >= watched.next_report_s
                if is_due:
                    watched.is_overdue = True
                    watched.next_report_s *= 2
            if is_due:
                watched.report(watched.taken_s)
