"""Searches that learn nothing from the trials: all configs in order, or in random order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from quarantune.search.strategy import Strategy
from quarantune.values.space import Space
from quarantune.values.trial import Config


class Exhaustive(Strategy):
    """All configs in their order; a generator is run only as far as it is asked."""

    def __init__(self, space: Space, starts: Iterable[Config] = ()) -> None:
        """Begins at the first config."""
        super().__init__(space, starts)
        self._order = space.positions()

    def pick(self, n: int) -> list[int]:
        """Returns the next configs."""
        return list(itertools.islice(filter(self.is_free, self._order), n))


class Random(Strategy):
    """All configs in random order."""

    def __init__(self, space: Space, seed: int, starts: Iterable[Config] = ()) -> None:
        """Draws nothing yet.

        Args:
            space: the configs.
            seed: the same seed gives the same order.
            starts: as for `Strategy`.
        """
        space.whole()
        super().__init__(space, starts)
        self._order = shuffled(space, np.random.default_rng(seed))

    def pick(self, n: int) -> list[int]:
        """Returns the next configs of the order."""
        return list(itertools.islice(filter(self.is_free, self._order), n))


def shuffled(space: Space, rng: np.random.Generator) -> Iterator[int]:
    """Yields all positions of a space in random order; needs memory only for those that it has yielded.

    This is the shuffle of Fisher and Yates, which keeps only the positions that were moved.
    """
    size = space.whole()
    moved: dict[int, int] = {}
    for at in range(size):
        drawn = int(rng.integers(at, size))
        here = moved.pop(at, at)
        yield here if drawn == at else moved.get(drawn, drawn)
        if drawn != at:
            moved[drawn] = here
