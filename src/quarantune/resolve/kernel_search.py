"""The search over one kernel of a function whose kernels are tuned by the time of the whole."""

from __future__ import annotations

from collections.abc import Sequence

from quarantune.sweep.searching import Searching
from quarantune.transport.assignment import KEY
from quarantune.values.trial import Config


class KernelSearch:
    """The search over one kernel's configs, each as an assignment of configs to all kernels."""

    def __init__(self, searching: Searching, texts: Sequence[str]) -> None:
        self._searching = searching
        self._texts = texts
        self.ended = searching.ended
        self.reason_to_stop = searching.reason_to_stop

    @property
    def is_closed(self) -> bool:
        """Whether no more configs will be asked."""
        return self._searching.is_closed

    def take(self, count: int) -> dict[int, Config]:
        """Returns the next configs to try, at most `count`, by index."""
        return {index: {KEY: self._texts[index]} for index in self._searching.take(count)}
