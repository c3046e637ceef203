"""A search that asks for random configs, and the random draws that other searches use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quarantune.search.strategy import Strategy
from quarantune.values.configs import Config
from quarantune.values.space import Space

_ROUNDS = 50
_RARE, _ENOUGH = 0.02, 200
"""Share of free configs among at least `_ENOUGH` random ones; repairs replace random draws below `_RARE`."""
_MOST_REPAIRS = 1000
"""Largest number of times that a draw asks the predicate; they take about 20 ms."""
_MOST_IN_VAIN = 100_000
"""Replaces `_MOST_REPAIRS` until a config is found; these calls take about two seconds."""
_MOST_LOOKED_AT = 1_000_000
"""Size of the largest space that a draw searches in order if it found no free config at random."""


class RandomSearch(Strategy):
    """Asks for random configs.

    If nearly all configs of a grid are dropped, the search repairs a dropped config. Predicates mostly look at a few
    names, and drop the config as soon as these do not fit together. So only the last of these names has to change, and
    the name before it after all values of the last. This is backjumping (Prosser, "Hybrid Algorithms for the
    Constraint Satisfaction Problem", 1993). Its work grows with the sum of the configs that single constraints drop,
    while the work of random draws grows with the product.
    """

    def __init__(self, space: Space, seed: int, starts: Iterable[Config] = ()) -> None:
        """Runs a generator to its end, because any of its configs may be the next.

        Args:
            space: the configs.
            seed: the same seed and the same trials give the same configs.
            starts: configs to try first; see `Strategy`.
        """
        self._size = space.whole()
        super().__init__(space, starts)
        self.rng = np.random.default_rng(seed)
        self._counts = [len(values) for values in space.values]
        self._depths: dict[int, int] = {}
        self._dropped: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def pick(self, n: int) -> Iterable[int]:
        """Returns random positions."""
        return map(int, self.draw(n))

    def draw(self, count: int) -> NDArray[np.int64]:
        """Returns the positions of up to `count` random free configs."""
        found: set[int] = set()
        if self._size > 4 * count:
            for drawn in range(1, _ROUNDS + 1):
                found.update(filter(self.is_free, self.rng.integers(self._size, size=count).tolist()))
                if len(found) >= count:
                    break
                is_rare = drawn * count >= _ENOUGH and len(found) < _RARE * drawn * count
                if is_rare and self.space.is_grid and (self.space.dropped or self._size > _MOST_LOOKED_AT):
                    found |= self._repaired(count)
                    break
        if not found and self._size <= _MOST_LOOKED_AT:
            first = int(self.rng.integers(self._size))
            ahead = ((first + step) % self._size for step in range(self._size))
            found.update(itertools.islice(filter(self.is_free, ahead), 4 * count))
        return self.rng.permutation(np.array(sorted(found), np.int64))[:count]

    def _repaired(self, count: int) -> set[int]:
        found: set[int] = set()
        asked = 0
        while len(found) < count and asked < (_MOST_REPAIRS if found else _MOST_IN_VAIN):
            position, steps = self._repair()
            # If the predicate looks at all values before it decides, random draws may find a config sooner.
            drawn = self.rng.integers(self._size, size=steps).tolist()
            found.update(filter(self.is_free, drawn if position is None else [position, *drawn]))
            asked += 2 * steps
        return found

    def _repair(self) -> tuple[int | None, int]:
        """Returns the position of a kept config, or None if it finds none, and how many steps it took."""
        row: list[int] = self.rng.integers(self._counts).tolist()
        untried: dict[int, list[int]] = {}
        blamed: dict[int, set[int]] = {}
        for step in range(1, _MOST_REPAIRS + 1):
            to_blame = self._to_blame(row)
            if not to_blame:
                return self.space.positions_of(np.array([row], np.int64))[0], step
            while to_blame:
                last = max(to_blame, key=self._depths.__getitem__)
                blamed[last] = blamed.get(last, set()) | to_blame - {last}
                shuffled = self.rng.permutation(self._counts[last]).tolist()
                if others := untried.setdefault(last, [code for code in shuffled if code != row[last]]):
                    row[last] = others.pop()
                    break
                to_blame = blamed.pop(last)
                del untried[last]
                self._note(to_blame, row)
            else:
                return None, step
            for column in [each for each in untried if self._depths[each] > self._depths[last]]:
                del untried[column]
                blamed.pop(column, None)
        return None, _MOST_REPAIRS

    def _to_blame(self, row: list[int]) -> set[int]:
        """Returns the columns whose values make the predicate drop a config; empty if it keeps the config."""
        for columns, dropped in self._dropped.items():
            if tuple([row[column] for column in columns]) in dropped:
                return set(columns)
        position = self.space.positions_of(np.array([row], np.int64))[0]
        to_blame = list(map(self.space.names.index, self.space.blamed(position)))
        for column in to_blame:
            self._depths.setdefault(column, len(self._depths))
        self._note(set(to_blame), row)
        return set(to_blame)

    def _note(self, columns: set[int], row: list[int]) -> None:
        """Records that the predicate drops every config with these values."""
        if 0 < len(columns) < len(row):
            key = tuple(sorted(columns))
            self._dropped.setdefault(key, set()).add(tuple([row[column] for column in key]))
