"""Finds templates that are stopped or do not answer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Sequence

from quarantune.host import machine

STOPPED_CHECKS = 20
"""A template that is stopped at this many checks in a row, though it was woken each time, is given up."""
SILENT_CHECKS = 50
"""A template that is idle at this many checks in a row, though it has a worker to start, is given up."""


@dataclasses.dataclass(frozen=True)
class Unresponsive:
    """A template that must be replaced.

    Attributes:
        pid: its process id.
        reason: a verb phrase that completes "template process 12 ...".
    """

    pid: int
    reason: str


class TemplateWatch:
    """Checks the templates of one sandbox at regular intervals.

    Checks are counted instead of seconds, so that no template is blamed for the time that this process stood still.
    """

    def __init__(self) -> None:
        self._stopped_checks = 0
        self._silent_checks = 0
        self._activity: tuple[str, int] | None = None

    def check(self, pids: Sequence[int], *, awaits_start: bool) -> Unresponsive | None:
        """Wakes stopped templates and returns the one that must be replaced, if any.

        Args:
            pids: the templates, beginning with the one that starts the workers.
            awaits_start: whether a worker was ordered whose process is not known to run yet.
        """
        stopped = [pid for pid in pids if machine.is_stopped(pid)]
        self._stopped_checks = self._stopped_checks + 1 if stopped else 0
        # A template that computes, or waits for a CPU or a disk, is not silent: it may be importing modules.
        before, self._activity = self._activity, machine.activity(pids[0]) if pids else None
        is_asleep = self._activity is not None and self._activity[0] == "S" and self._activity == before
        self._silent_checks = self._silent_checks + 1 if awaits_start and is_asleep else 0
        if stopped:
            wake(pids)
        if self._stopped_checks > STOPPED_CHECKS:
            return self._give_up(stopped[0], "stays stopped")
        if self._silent_checks > SILENT_CHECKS and pids:
            return self._give_up(pids[0], "does not answer")
        return None

    def _give_up(self, pid: int, reason: str) -> Unresponsive:
        self._stopped_checks = self._silent_checks = 0
        return Unresponsive(pid, reason)


def wake(pids: Sequence[int]) -> None:
    """Sends SIGCONT to templates, because a config may have sent SIGSTOP to its parents."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
