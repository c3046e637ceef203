"""One line on the terminal while a sweep runs, and one log record for each config."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

from quarantune.values import shown
from quarantune.values.trial import Outcome, Trial

_logger = logging.getLogger("quarantune")


class Progress:
    """Shows the progress of a sweep."""

    def __init__(self, name: str, total: int, *, shown: bool | None, stream: TextIO | None = None) -> None:
        """Starts to show a sweep.

        Args:
            name: the tuned function's name.
            total: how many configs there are.
            shown: whether to write to the terminal; None for whether `stream` is one.
            stream: the stream to write to; None for stderr.
        """
        self._name = name
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._shown = (self._stream is not None and self._stream.isatty()) if shown is None else shown
        self._drawn = False
        self._done = self._failed = 0
        self._best: Trial | None = None

    def expect(self, total: int) -> None:
        """Sets how many configs are to be tried."""
        self._total = total

    def step(self, trial: Trial) -> None:
        """Counts a trial that ended."""
        self._count(trial)
        took = "" if trial.time_ms is None else f" {trial.time_ms:.4g} ms"
        _logger.info(
            "%s: %s: %s%s %s",
            self._name,
            shown.format_config(trial.config),
            trial.outcome.value,
            took,
            trial.message,
        )
        self._draw()

    def recall(self, trials: Sequence[Trial]) -> None:
        """Counts trials that an earlier sweep finished."""
        for trial in trials:
            self._count(trial)
        if trials:
            _logger.info("%s: %d of %d configs are known already", self._name, len(trials), self._total)
            self._draw()

    def say(self, text: str) -> None:
        """Shows a sentence about something other than a config, such as waiting for another job."""
        _logger.info("%s: %s", self._name, text)
        if self._shown:
            self._write(f"\r\x1b[Kquarantune: {self._name}: {text}")

    def close(self) -> None:
        """Ends the line."""
        if self._shown and self._drawn:
            self._write("\n")

    def _count(self, trial: Trial) -> None:
        self._done += 1
        self._failed += trial.outcome.is_failure
        if trial.outcome is Outcome.OK and trial.time_ms is not None:
            best = self._best.time_ms if self._best is not None else None
            if best is None or trial.time_ms < best:
                self._best = trial

    def _draw(self) -> None:
        if not self._shown:
            return
        best = ""
        if self._best is not None:
            best = f", best {self._best.time_ms:.4g} ms ({shown.format_config(self._best.config)})"
        failed = f", {self._failed} failed" if self._failed else ""
        self._write(f"\r\x1b[Kquarantune: {self._name}: {self._done}/{self._total}{failed}{best}")

    def _write(self, text: str) -> None:
        self._drawn = True
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._shown = False  # the terminal is gone, which must not end the sweep
