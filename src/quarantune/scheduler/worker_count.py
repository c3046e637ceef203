"""Runs fewer configs at a time once a worker lacks a process, a thread or its device, after a short pause."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from quarantune.host import machine
from quarantune.scheduler.jobs import Jobs
from quarantune.scheduler.workers import Worker, Workers, WorkerVerdict

_logger = logging.getLogger("quarantune")

_TRIES = 3
"""Number of times a lone worker runs again, because other programs may have taken the processes that it lacked."""
_PAUSE_S = 0.25
_PATIENCE_S = 10.0
"""Total seconds that a run waits for other programs to end processes."""
_AMPLE = 64
"""Number of processes and threads that suffices for an ordinary worker, which has about 20 on 2 cores."""
_UNLIMITED = 1 << 20
_GROWTH = 8
"""Number of configs per worker without a shortage after which one more worker is tried."""


class WorkerCount:
    """Limits how many configs may have a worker at a time, and when the next worker may start."""

    def __init__(self, workers: Workers, jobs: Jobs, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._jobs = jobs
        self._clock = clock
        self._most = _UNLIMITED
        self._ended = 0
        self._resume_at = 0.0
        self._vain = 0
        self._patience_s = _PATIENCE_S
        self._given_up = 0

    @property
    def most(self) -> int:
        """How many configs may have a worker at a time."""
        return self._most + (self._jobs.ended - self._ended) // (_GROWTH * self._most)

    @property
    def waits(self) -> bool:
        """Whether a process, thread or device was lacking, and tasks that lacked it may still run again."""
        return self._most < _UNLIMITED

    @property
    def is_full(self) -> bool:
        """Whether no further config may get a worker now. If only one may run, it begins once all workers are gone."""
        return len(self._workers.jobs()) >= self.most if self.most > 1 else any(self._workers)

    @property
    def pauses(self) -> bool:
        """Whether no worker may start for a while."""
        return self._clock() < self._resume_at

    def gives_up(self, worker: Worker, verdict: WorkerVerdict) -> bool:
        """Records a worker that lacked something, and returns whether to give up its task.

        If not, its task runs again with fewer workers, then alone, and then after a pause.

        Raises:
            OSError: not even one worker can run.
        """
        if not self.waits:
            _logger.warning("fewer configs run at a time, as a worker was lost (%s)", verdict.message)
        others = [other for other in self._workers if other is not worker]
        self._most, self._ended = max(1, min(self.most, len(others) + 1) // 2), self._jobs.ended
        self._vain = 0 if others else self._vain + 1
        self._resume_at = self._clock() + _PAUSE_S * (1 + self._vain)
        if self._vain <= _TRIES:
            return False
        left = machine.processes_left()
        if left is not None and left[0] < _AMPLE and self._patience_s > 0:
            self._patience_s -= _PAUSE_S * self._vain
            return False
        self._vain, self._most = 0, _UNLIMITED
        self._given_up += 1
        if not self._jobs.compiled and (self._given_up == _TRIES or self._jobs.unfinished == 1):
            raise OSError(verdict.lacked, os.strerror(verdict.lacked))
        return True
