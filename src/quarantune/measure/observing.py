"""The interface of an observer, and the names of all observers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quarantune.measure import observers

OBSERVERS = ("energy",)
"""The names of all observers, which are also the names of their files."""


class Observer(Protocol):
    """The interface of an observer's file."""

    @property
    def WHAT(self) -> str:
        """The measured quantity in words, for example `the energy of a call`."""

    @property
    def FIELDS(self) -> Mapping[str, tuple[str, str]]:
        """Its figures by name, each with the heading of its column and a sentence on it; see `Trial.with_observed`."""

    def why_not(self, platform: str, kind: str) -> str:
        """Returns the reason why it cannot measure on this machine; empty if it can.

        Args:
            platform: the platform of the call.
            kind: the name of its device.
        """

    def observe(self, dispatch: Callable[[], Any], ordinal: int, run_s: float) -> Mapping[str, float]:
        """Returns the figures of one run by name.

        Args:
            dispatch: queues one run and returns its outputs without waiting; it may be called any number of times.
            ordinal: the number of the device in this process.
            run_s: the approximate duration of a run, in seconds.

        Raises:
            RuntimeError: the observer could not measure.
        """


def named(name: str) -> Observer:
    """Returns the observer with a name."""
    found: Observer = importlib.import_module(f"{observers.__name__}.{name}")
    return found
