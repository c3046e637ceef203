"""Stops a config's first run once it has taken so long that the config cannot win."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from quarantune.host.waits import RunTime, Watch

_SLICE_S = 0.02


class FirstRunLimit:
    """Watches the run inside a `with` statement from another thread, and ends this process if it takes too long.

    Nothing else can stop a run of XLA. Waits for a CPU do not count, nor does time while this process was stopped.
    """

    def __init__(self, limit_ms: float, report: Callable[[RunTime], None]) -> None:
        """Sets up the limit.

        Args:
            limit_ms: the longest time of the run in milliseconds, without waits.
            report: called with the time so far in milliseconds, just before the process ends.
        """
        self._limit_s = 1e-3 * limit_ms
        self._report = report
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._watch = Watch(spins=False)

    def __enter__(self) -> FirstRunLimit:
        self._watch.start()
        try:
            threading.Thread(target=self._look, daemon=True).start()
        except RuntimeError:  # no further thread can start: the run is not watched
            self._watch.close()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # the run may end while it is being reported
            self._over.set()

    def _look(self) -> None:
        with contextlib.closing(self._watch):
            before_s, stopped_s = 0.0, 0.0
            while not self._over.wait(_SLICE_S):
                taken = self._watch.so_far()
                # Waits are left out already: where a busy machine delays this thread, little has been added.
                stopped_s += max(0.0, taken.least - before_s - 2 * _SLICE_S)
                before_s = taken.least
                least_s = taken.least - stopped_s
                if least_s >= self._limit_s:
                    self._end(RunTime(taken.whole, least_s, least_s))

    def _end(self, taken: RunTime) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._report(taken.scaled(1e3))
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)
