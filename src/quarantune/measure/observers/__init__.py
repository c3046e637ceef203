"""Observers of a run: each is one module, and finds out more about a run than its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quarantune.measure.observers import energy


class Observer(Protocol):
    """A module that observes one config, once it is timed and again in each round of the final.

    Its values are nonnegative numbers. They are fields of a trial, or in `Trial.observed`; see `observed_fields`.
    """

    WHAT: str
    """The thing observed, in messages."""
    VALUES: Mapping[str, tuple[str, str]]
    """By the name of each value, the heading of its column, and a sentence about it."""

    def why_not(self, platform: str, kind: str) -> str:
        """Returns the reason why this machine cannot observe; empty if it can, as far as is known before a run.

        Args:
            platform: the platform of the call.
            kind: the name of its device.
        """

    def observe(self, dispatch: Callable[[], Any], device: Any, time_ms: float) -> Mapping[str, float]:
        """Returns the values of one run, by name; an error ends the config.

        Args:
            dispatch: queues one run and returns its outputs without waiting.
            device: the device that it runs on, one of `jax.devices()`.
            time_ms: about the milliseconds that a run takes.
        """


OBSERVERS: Mapping[str, Observer] = {
    "energy": energy,
}
"""The observers, by name. A sweep has those that its objective needs."""
