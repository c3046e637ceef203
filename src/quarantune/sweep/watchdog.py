"""Reports, from a thread of its own, work of this process that takes longer than its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from quarantune.host.stops import Stops

_LOOK_S = 0.1
"""Seconds between two looks at the work; a longer gap than `stops` allows means that this process was stopped."""


class Watched:
    """Watches the work of a `with` statement; reports it when it is overdue, and again when twice as long has passed.

    Nothing can end work of this process from outside, but its user can be told which config hangs.

    Attributes:
        taken_s: the seconds that it has taken, without those for which this process was stopped.
        is_overdue: whether it has taken longer than it may.
    """

    def __init__(self, limit_s: float, report: Callable[[float], None]) -> None:
        """Prepares to watch.

        Args:
            limit_s: the seconds that the work may take.
            report: called, in a thread of its own, with the seconds that it has taken.
        """
        self.taken_s, self.is_overdue = 0.0, False
        self._next_report_s, self._report = max(limit_s, _LOOK_S), report
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="quarantune-watchdog", daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        pauses, before, is_over = Stops(time.monotonic), time.monotonic(), False
        while not is_over:
            is_over = self._over.wait(_LOOK_S)
            now = time.monotonic()
            self.taken_s += now - before - pauses.lost_s()
            before = now
            if self.taken_s >= self._next_report_s:
                self.is_overdue = True
                self._next_report_s *= 2
                self._report(self.taken_s)
