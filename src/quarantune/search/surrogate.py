"""A search that models how fast each config is and whether it works, and asks for what promises most."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quarantune.search import Strategy, log_time
from quarantune.search.fields import Features, Fields, Floats
from quarantune.values.configs import Config
from quarantune.values.settings import LEAST_GAIN
from quarantune.values.space import Space
from quarantune.values.trial import Trial

if TYPE_CHECKING:
    from quarantune.search.models import Models

_STARTS = 16
"""So many configs are spread over the space before the models choose, and have worked before they end the search."""
_SPREAD_OVER = 12
"""The next start is the best of so many random configs."""
_CANDIDATES = 1000
"""The models choose among so many configs; half of them are near the best ones."""
_SERVES = 8
"""New candidates are looked at after so many trials, or after one that was better than all before it."""
_PARENTS = 9
"""The number of the best configs whose neighbours and crossovers are candidates."""
_AGREEING = 3
"""Number of forecasts in a row without a gain that end the hope of one."""
_MUTATIONS = 0.5
"""The mean number of values that are changed at random in a crossover."""


_ROUNDS = 50
_RARE, _ENOUGH = 0.02, 200
"""Where a smaller share of so many random configs can be asked, the others are looked for."""
_MOST_REPAIRS = 1000
"""A draw asks the predicate so often at most, which takes some 20 ms."""
_MOST_IN_VAIN = 100_000
"""As long as none was found, so often; it takes some two seconds."""
_MOST_LOOKED_AT = 1_000_000
"""Where nearly all configs of a smaller space are dropped or were asked already, they are looked at in order."""


class Surrogate(Strategy):
    """Asks first for configs that are far from each other, then for those that may improve on the best."""

    def __init__(self, space: Space, seed: int, starts: Iterable[Config] = ()) -> None:
        """Runs a generator to its end, because any of its configs may be the next.

        Args:
            space: the configs.
            seed: the same seed and the same trials give the same configs.
            starts: as for `Strategy`.
        """
        space.whole()
        super().__init__(space, starts)
        self._rng = np.random.default_rng(seed)
        self._drawing = Drawing(space, self._rng, self.is_free)
        self._fields = Fields(space)
        self._features = Features(self._fields)
        self._sizes = np.array([len(values) for values in self._fields.values], np.int64)
        self._models: Models | None = None
        self._positions: list[int] = []  # of the configs in the forecast; none where it must be made
        self._renewal = 0
        self._hopeless = 0
        self._best = math.inf
        self._logs: dict[int, float] = {}
        # The models import SciPy, which takes a second and is not needed before the starts have been tried.
        with contextlib.suppress(RuntimeError):  # no further thread can start: they are imported when they are needed
            threading.Thread(target=importlib.import_module, args=("quarantune.search.models",), daemon=True).start()

    @property
    def expects_gain(self) -> bool:
        """Whether the models expect that a further config is faster than the best by the least gain that counts."""
        return self._hopeless < _AGREEING

    def learn(self, position: int, trial: Trial) -> None:
        """Takes the logarithm of the config's time, or NaN for a failure; a lost config has neither."""
        self._logs.pop(position, None)
        if (log := log_time(trial)) is None:
            return
        self._logs[position] = log
        if log < self._best:
            self._positions = []
        elif self._models is not None and position in self._positions:
            self._models.tell(self._positions.index(position), log)

    def pick(self, n: int) -> Iterable[int]:
        """Yields the configs that promise most, given all trials so far."""
        told, works = list(self._logs), np.isfinite(list(self._logs.values()))
        while len(told) + len(self.pending) < _STARTS or works.sum() < 2:
            start = self._start(told, works)
            if start is None:
                return
            yield start
        while True:
            if self._models is None or not self._positions or len(self.trials) >= self._renewal:
                self._models = self._forecasting()
            if not self._positions:
                return
            chosen = self._models.choose(turn=len(self.trials) + len(self.pending))
            if chosen is None:
                self._positions = []
            elif self.is_free(self._positions[chosen]):
                yield self._positions[chosen]

    def _start(self, told: Sequence[int], works: NDArray[np.bool_]) -> int | None:
        """Returns one of a few random configs: far from all others, and rather near those that work."""
        drawn = self._drawing.draw(_SPREAD_OVER).tolist()
        if not drawn:
            return None
        known = [*told, *self.pending]
        if not known:
            return int(drawn[0])
        squares = ((self._points(drawn)[:, None] - self._points(known)[None]) ** 2).sum(-1)
        near = np.exp(-squares[:, : len(told)] / 0.3)
        works_there = (near @ works + 0.5) / (near.sum(1) + 1)
        return int(drawn[int(np.argmax(np.sqrt(squares.min(1)) * works_there**2))])

    def _forecasting(self) -> Models:
        """Returns the models, which have made a forecast of new candidates, if any are left."""
        from quarantune.search.models import Models

        models = self._models or Models(self._fields, self._features, self._rng)
        told, logs = list(self._logs), np.array(list(self._logs.values()), np.float64)
        best_first = np.argsort(logs, kind="stable")  # failures are the last
        parents = [told[index] for index in best_first[: min(_PARENTS, int(np.isfinite(logs).sum()))]]
        candidates, pending = self._candidates(parents), sorted(self.pending)
        self._positions = [*candidates, *pending] if candidates else []
        self._best = float(np.nanmin(logs))
        self._renewal = len(self.trials) + _SERVES
        if candidates:
            codes = self._fields.codes
            models.forecast(codes(told), logs, codes(candidates), codes(pending))
            is_hopeless = models.gain < LEAST_GAIN and np.isfinite(logs).sum() >= _STARTS
            self._hopeless = self._hopeless + 1 if is_hopeless else 0
        return models

    def _candidates(self, parents: Sequence[int]) -> list[int]:
        """Returns free configs: neighbours and crossovers of the parents, and random ones."""
        codes = self._fields.codes(parents)
        rows = [codes[:0]]
        for column, size in enumerate(self._sizes.tolist()):
            changed = np.repeat(codes, size, axis=0)
            changed[:, column] = np.tile(np.arange(size), len(codes))
            rows.append(changed)
        shape = (_CANDIDATES // 4, len(self._sizes))
        first, second = self._rng.integers(len(codes), size=(2, shape[0]))
        crossed = np.where(self._rng.random(shape) < 0.5, codes[first], codes[second])
        mutated = self._rng.random(shape) < _MUTATIONS / len(self._sizes)
        rows.append(np.where(mutated, self._rng.integers(self._sizes, size=shape), crossed))
        found = sorted(set(self._fields.positions_of(np.concatenate(rows))))
        near = np.array(list(filter(self.is_free, found)), np.int64)
        if len(near) > _CANDIDATES // 2:
            near = self._rng.choice(near, _CANDIDATES // 2, replace=False)
        return sorted({*near.tolist(), *self._drawing.draw(_CANDIDATES - len(near)).tolist()})

    def _points(self, positions: Sequence[int]) -> Floats:
        """Returns configs as points, where only sizes and words count."""
        return self._features.points(self._fields.codes(positions))[:, : self._features.ordered]


class Drawing:
    """Random configs of a space.

    Where nearly all configs of a grid are dropped, one that is dropped is repaired: predicates mostly look at a few
    names, and drop the config as soon as these do not fit together, so that only the last of these names has to change,
    and the one before it once all values of the last were tried. (Backjumping, as in Prosser, "Hybrid Algorithms for
    the Constraint Satisfaction Problem", 1993.) The work grows with the sum of what the single constraints drop, where
    drawing at random grows with the product.
    """

    def __init__(self, space: Space, rng: np.random.Generator, is_free: Callable[[int], bool]) -> None:
        """Draws nothing yet.

        Args:
            space: the configs, all of them known.
            rng: the source of randomness.
            is_free: whether the config at a position can be asked.
        """
        self._space = space
        self._size = len(space)
        self._rng = rng
        self._is_free = is_free
        self._sizes = [len(values) for values in space.values]
        self._depths: dict[int, int] = {}
        self._dropped: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def draw(self, count: int) -> NDArray[np.int64]:
        """Returns up to so many random configs that can be asked."""
        found: set[int] = set()
        if self._size > 4 * count:
            for drawn in range(1, _ROUNDS + 1):
                found.update(filter(self._is_free, self._rng.integers(self._size, size=count).tolist()))
                if len(found) >= count:
                    break
                is_rare = drawn * count >= _ENOUGH and len(found) < _RARE * drawn * count
                if is_rare and self._space.is_grid and (self._space.dropped or self._size > _MOST_LOOKED_AT):
                    found |= self._repaired(count)
                    break
        if not found and self._size <= _MOST_LOOKED_AT:
            first = int(self._rng.integers(self._size))
            ahead = ((first + step) % self._size for step in range(self._size))
            found.update(itertools.islice(filter(self._is_free, ahead), 4 * count))
        return self._rng.permutation(np.array(sorted(found), np.int64))[:count]

    def _repaired(self, count: int) -> set[int]:
        found: set[int] = set()
        asked = 0
        while len(found) < count and asked < (_MOST_REPAIRS if found else _MOST_IN_VAIN):
            position, steps = self._repair()
            # A predicate may look at all values before it decides, and a config be found sooner at random.
            drawn = self._rng.integers(self._size, size=steps).tolist()
            found.update(filter(self._is_free, drawn if position is None else [position, *drawn]))
            asked += 2 * steps
        return found

    def _repair(self) -> tuple[int | None, int]:
        """Returns a config that is kept, if one is found, and how many steps that took."""
        row: list[int] = self._rng.integers(self._sizes).tolist()
        untried: dict[int, list[int]] = {}
        blamed: dict[int, set[int]] = {}
        for step in range(1, _MOST_REPAIRS + 1):
            to_blame = self._to_blame(row)
            if not to_blame:
                return self._space.positions_of(np.array([row], np.int64))[0], step
            while to_blame:
                last = max(to_blame, key=self._depths.__getitem__)
                blamed[last] = blamed.get(last, set()) | to_blame - {last}
                others = untried.setdefault(last, self._others(last, row[last]))
                if others:
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
        """Returns the columns whose values make the predicate drop a config; none where it is kept."""
        for columns, dropped in self._dropped.items():
            if tuple([row[column] for column in columns]) in dropped:
                return set(columns)
        position = self._space.positions_of(np.array([row], np.int64))[0]
        to_blame = list(map(self._space.names.index, self._space.blamed(position)))
        for column in to_blame:
            self._depths.setdefault(column, len(self._depths))
        self._note(set(to_blame), row)
        return set(to_blame)

    def _note(self, columns: set[int], row: list[int]) -> None:
        """Notes that every config with these values is dropped."""
        if 0 < len(columns) < len(row):
            key = tuple(sorted(columns))
            self._dropped.setdefault(key, set()).add(tuple([row[column] for column in key]))

    def _others(self, column: int, code: int) -> list[int]:
        """Returns the other values of a name in random order."""
        return [other for other in self._rng.permutation(self._sizes[column]).tolist() if other != code]
