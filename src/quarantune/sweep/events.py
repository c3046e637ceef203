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
        on_overdue: called with the index of a config that has missed its deadline in the caller's own process, and with
            the trial that it will have. Nothing can end the config, so this may be the last event of the sweep; it
            comes from another thread.
        on_phase: called with the index of a config and the phase that it enters, at last with `END`.
    """

    on_trial: Callable[[int, Trial], None]
    on_tick: Callable[[], None] = _ignore
    on_overdue: Callable[[int, Trial], None] = _ignore
    on_phase: Callable[[int, str], None] = _ignore
