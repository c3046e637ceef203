"""The events of one sweep, and the callbacks that receive them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quarantune.values.trial import Trial

END = "end"
"""The last phase that `SweepEvents.on_phase` reports of a config."""


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
        on_phase: called with the index of a config and the phase that it enters, at last with `END`.
    """

    on_trial: Callable[[int, Trial], None]
    on_tick: Callable[[], None] = _ignore
    on_provisional: Callable[[int, Trial], None] = _ignore
    on_phase: Callable[[int, str], None] = _ignore
