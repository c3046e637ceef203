"""The ledger of one sweep: its trials by index, and the listeners that hear of them."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable, Mapping

from quarantune.values.trial import END, UNTUNED, Trial


def _ignore(*_: object) -> None:
    """Ignores an event."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listener:
    """A listener to a sweep, such as a journal or a display. Calls come from the sweep's thread unless stated.

    Attributes:
        on_trial: called with the index of a config and its trial, once the trial is over.
        on_tick: called many times a second while the sweep runs.
        on_provisional: called with the index of a config that runs in the caller's own process, and with the trial that
            it gets if that process ends before the config's next event: `lost` as it begins, `timeout` at its deadline
            (from another thread), and `not_run` if it waits or an exception interrupts the sweep.
        on_phase: called with the index of a config and the phase that it enters, with `READY` when it has compiled and
            waits, with `AGAIN` when it must begin once more, and finally with `END`. The function's own defaults have a
            negative index if they are not a config.
        on_default: called with the trial of the function's own defaults, if they are not a config.
    """

    on_trial: Callable[[int, Trial], None] = _ignore
    on_tick: Callable[[], None] = _ignore
    on_provisional: Callable[[int, Trial], None] = _ignore
    on_phase: Callable[[int, str], None] = _ignore
    on_default: Callable[[Trial], None] = _ignore


class Ledger:
    """The settled trials of one sweep. Only the ledger writes them; the sweep and its job read them here.

    Attributes:
        trials: the trials so far by config index, including recalled and ruled-out ones.
    """

    def __init__(self, *listeners: Listener, trials: Mapping[int, Trial] | None = None) -> None:
        """Opens a ledger.

        Args:
            *listeners: hear of each event, in this order.
            trials: the trials of an earlier sweep; their configs do not run again, but may be finalists.
        """
        self._listeners = [*listeners]
        self._trials: dict[int, Trial] = dict(trials or {})
        self.trials: Mapping[int, Trial] = types.MappingProxyType(self._trials)

    def listen(self, listener: Listener) -> None:
        """Adds a listener for the events from now on."""
        self._listeners.append(listener)

    def close(self) -> None:
        """Dismisses the listeners: they belong to objects that hold the ledger, which would keep each other alive."""
        self._listeners.clear()

    def recall(self, trials: Mapping[int, Trial]) -> None:
        """Enters trials of an earlier sweep; listeners do not hear of them."""
        self._trials.update(trials)

    def keep(self, trials: Mapping[int, Trial]) -> None:
        """Replaces all trials, once the sweep is over."""
        self._trials.clear()
        self._trials.update(trials)

    def end(self, index: int, trial: Trial) -> None:
        """Enters the trial of a config that has ended."""
        trial = dataclasses.replace(trial, ended_s=time.time())
        self._trials[index] = trial
        for listener in self._listeners:
            listener.on_trial(index, trial)
        self.enter(index, END)

    def enter(self, index: int, phase: str) -> None:
        """Reports that a config enters a phase."""
        for listener in self._listeners:
            listener.on_phase(index, phase)

    def provisional(self, index: int, trial: Trial) -> None:
        """Reports the trial that a config has if this process ends now."""
        for listener in self._listeners:
            listener.on_provisional(index, trial)

    def untuned(self, trial: Trial) -> None:
        """Reports the trial of the function's own defaults, if they are not a config."""
        trial = dataclasses.replace(trial, ended_s=time.time())
        for listener in self._listeners:
            listener.on_default(trial)
        self.enter(UNTUNED, END)

    def tick(self) -> None:
        """Reports that the sweep continues."""
        for listener in self._listeners:
            listener.on_tick()
