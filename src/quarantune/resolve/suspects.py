"""Configs whose last trial is that of a process which has ended while it ran them itself, as read from a journal."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from quarantune.values.trial import Config, Outcome, Phase, Route, Trial

_FATAL = 2
"""How often a process must end while it runs a config for the config to be the cause, and not chance."""


class Suspects:
    """Counts, for each config, the processes that have ended while they ran it, since it last had an outcome.

    A trial that is `lost` is recorded when a process begins to run a config, and one that is `not_run` when it pauses.
    """

    def __init__(self) -> None:
        self._ended: collections.Counter[int] = collections.Counter()

    def note(self, index: int, trial: Trial) -> None:
        """Takes the next trial of a config from the journal."""
        if trial.outcome is Outcome.NOT_RUN:
            self._ended[index] = max(0, self._ended[index] - 1)
        elif trial.outcome is Outcome.LOST and trial.route in (Route.COMPILED_APART, Route.IN_PROCESS):
            self._ended[index] += 1
        else:
            self._ended[index] = 0

    def once(self) -> set[int]:
        """Returns the configs that may be innocent: they run again, as the last ones."""
        return {index for index, times in self._ended.items() if 0 < times < _FATAL}

    def fatal(self, configs: Sequence[Config]) -> Iterator[tuple[int, Trial]]:
        """Yields the trials of the configs that are not run again."""
        for index, times in self._ended.items():
            if times >= _FATAL:
                yield (
                    index,
                    Trial(
                        config=configs[index],
                        outcome=Outcome.CRASHED,
                        phase=Phase.CHECK,
                        message=f"the process that ran it ended {times} times meanwhile",
                        route=Route.IN_PROCESS,
                    ),
                )
