"""The events of one sweep, and the callbacks that receive them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quarantune.scheduler.plan import Compare
from quarantune.values.trial import END, UNTUNED, Trial


def _ignore(*_: object) -> None:
    """Receives an event that nobody listens to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepEvents:
    """Callbacks of a sweep, called in the thread that runs it unless stated otherwise.

    Attributes:
        on_trial: called with the index of a config and its trial, once the trial is over.
        on_tick: called many times a second while the sweep runs.
        on_provisional: called with the index of a config that runs in the caller's own process, and with the trial that
            it has if no other event of it follows, because that process has ended: `lost` as it begins, `timeout` at
            its deadline, which comes from another thread, and `not_run` where an exception interrupts the sweep.
        on_phase: called with the index of a config and the phase that it enters, with `READY` where it was compiled and
            waits, and at last with `END`. The function's own defaults have a negative index where they are no config.
        on_default: called with the time of the function's own defaults in milliseconds, where they are no config; None
            where they failed.
        on_program: called with a config and the lines of its program, where the sweep itself cannot compare these with
            the caller's; None where it can.
    """

    on_trial: Callable[[int, Trial], None]
    on_tick: Callable[[], None] = _ignore
    on_provisional: Callable[[int, Trial], None] = _ignore
    on_phase: Callable[[int, str], None] = _ignore
    on_default: Callable[[float | None], None] = _ignore
    on_program: Compare | None = None

    def untuned(self, trial: Trial) -> None:
        """Reports the trial of the function's own defaults, where they are no config."""
        self.on_default(trial.time_ms)
        self.on_phase(UNTUNED, END)
