"""A wait for an engine that says nothing: a line tells what may be wrong, and in the end it is an error."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Executor

from quarantune.values.trial import EngineError

_logger = logging.getLogger("quarantune")

_SAYS_S = 20.0
"""A silence is reported after this time and, for as long as it lasts, again and again after twice as long."""
_ENDS_S = 600.0
"""An engine without a sign of life for this long ends the call: perhaps its machines have left for good."""


class Silence:
    """The time since an engine gave its last sign of life."""

    def __init__(self, executor: Executor) -> None:
        """Begins to wait.

        Args:
            executor: the engine.
        """
        self._kind = type(executor).__name__
        self.broken()

    def broken(self) -> None:
        """Notes a sign of life."""
        self._since, self._says_s = time.monotonic(), _SAYS_S

    def check(self, *, works_s: float = 0.0) -> None:
        """Says what is waited for, where that has taken long.

        Args:
            works_s: how long a machine that works may be silent.

        Raises:
            EngineError: it has taken too long.
        """
        silent_s = time.monotonic() - self._since
        about = (
            f"no machine of the executor {self._kind} has begun to work for {silent_s:.0f} s: see whether its "
            f"scheduler and its workers run, and whether they are busy with other work"
        )
        if silent_s > _ENDS_S + works_s:
            raise EngineError(f"{about}; call again when they are there: the trials so far are kept")
        if silent_s > self._says_s:
            self._says_s *= 2
            _logger.warning("%s", about)
