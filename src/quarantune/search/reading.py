"""A search in a space that takes long to read: the first config does not wait for the last."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from quarantune.search.strategy import Strategy
from quarantune.values.search_choice import Search
from quarantune.values.space import Space
from quarantune.values.trial import Config, Trial

_READ_FIRST_S = 0.2
"""So much CPU time a generator gets before the first config is tried; it yields some 50,000 configs in that time."""


def reads_on(space: Space) -> bool:
    """Reads a space for a moment, and returns whether that was not enough."""
    ends_s = time.thread_time() + _READ_FIRST_S
    known = space.reach(1)
    while space.size is None and time.thread_time() < ends_s:
        known = space.reach(known + max(1000, known // 2))
    return space.size is None


class Reading(Strategy):
    """Asks for one config that is known already, then reads the others for the search itself."""

    def __init__(self, space: Space, starts: Iterable[Config], make: Callable[[], Search]) -> None:
        """Reads nothing yet.

        Args:
            space: the configs.
            starts: as for `Strategy`.
            make: makes the search, which may read the space to its end.
        """
        super().__init__(space, starts)
        self._make = make
        self._search: Search | None = None

    def pick(self, n: int) -> list[int]:
        """Returns one config at first, none while it is tried, and then those of the search."""
        if self._search is None:
            if self.pending:
                return []
            if not self.trials:
                return list(itertools.islice(filter(self.is_free, self.space.positions()), 1))
            self.space.whole()
            self._search = self._make()
            for position, trial in self.trials.items():
                self._search.tell(self.space[position], trial)
        found = map(self.space.find, self._search.ask(n))
        return [position for position in found if position is not None]

    def tell(self, config: Config, trial: Trial) -> None:
        """Takes note of a trial, and passes it on."""
        super().tell(config, trial)
        if self._search is not None:
            self._search.tell(config, trial)
