"""Notices that this process was stopped for a while: by Ctrl-Z, a paused container, a frozen cgroup, a closed lid."""

from __future__ import annotations

from collections.abc import Callable

_STOPPED_S = 0.5
"""A longer gap between two looks means that this process was stopped: its loops look every twentieth of a second."""


class Stops:
    """Measures for how long this process was stopped, by the gaps between its looks at the clock.

    While the process that keeps the deadlines does not run, its workers may not run either, and their messages are not
    read. That time counts toward no deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts to watch the clock.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._last_look = clock()

    def begin(self) -> None:
        """Starts anew, after work of this process that may have taken long."""
        self._last_look = self._clock()

    def worked(self, taken_s: float) -> None:
        """Takes note of work of this process since its last look, which was no stop."""
        self._last_look += taken_s

    def lost_s(self) -> float:
        """Returns for how many seconds this process was stopped since its last look; 0.0 where it was not."""
        last, self._last_look = self._last_look, self._clock()
        passed_s = self._last_look - last
        return passed_s if passed_s > _STOPPED_S else 0.0
