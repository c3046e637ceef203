"""Notices that this process was stopped for a while: by Ctrl-Z, a paused container, a frozen cgroup, a closed lid."""

from __future__ import annotations

from collections.abc import Callable

_STOPPED_S = 0.5
"""Who looks this seldom was not running: the loops that look do so every twentieth of a second."""


class Stops:
    """Tells how long nobody has looked at the clock.

    While the process that keeps the deadlines does not run, its workers may not run either, and what they send is not
    read. That time is nobody's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begins to look.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._last_look = clock()

    def begin(self) -> None:
        """Begins anew, after something else was done that may have taken long."""
        self._last_look = self._clock()

    def lost_s(self) -> float:
        """Returns for how many seconds this process was stopped since it last looked; 0.0 where it was not."""
        last, self._last_look = self._last_look, self._clock()
        passed_s = self._last_look - last
        return passed_s if passed_s > _STOPPED_S else 0.0
