"""A search that models how fast each config is and whether it works, and asks for the most promising configs."""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quarantune.search.fields import Features, Fields, Floats
from quarantune.search.random_search import RandomSearch
from quarantune.search.strategy import log_time
from quarantune.values.configs import Config
from quarantune.values.options import LEAST_GAIN
from quarantune.values.space import Space
from quarantune.values.trial import Trial

if TYPE_CHECKING:
    from quarantune.search.models import Models

_STARTS = 16
"""Number of configs spread over the space before the models choose. The models end the search only after as many
worked."""
_SPREAD_OVER = 12
"""Number of random configs to draw for each start; the best of them becomes the start."""
_CANDIDATES = 1000
"""Number of configs that the models choose among; half of them are near the best configs."""
_SERVES = 8
"""Number of trials after which new candidates are drawn; a new best trial also draws them."""
_PARENTS = 9
"""The number of the best configs whose neighbours and crossovers are candidates."""
_AGREEING = 3
"""Number of forecasts in a row without a gain that end the hope of one."""
_MUTATIONS = 0.5
"""The mean number of values that a crossover changes at random."""


class Surrogate(RandomSearch):
    """Asks first for configs that are far from each other, then for those that may improve on the best."""

    def __init__(self, space: Space, seed: int, starts: Iterable[Config] = ()) -> None:
        """Makes no model yet; see `RandomSearch` for the arguments."""
        super().__init__(space, seed, starts)
        self._fields = Fields(space)
        self._features = Features(self._fields)
        self._sizes = np.array([len(values) for values in self._fields.values], np.int64)
        self._models: Models | None = None
        self._positions: list[int] = []  # of the configs in the forecast; empty if a new forecast is due
        self._renewal = 0
        self._hopeless = 0
        self._best = math.inf
        self._logs: dict[int, float] = {}
        # The models import SciPy, which takes a second; the search needs it only after the starts.
        with contextlib.suppress(RuntimeError):  # if no further thread can start, the first use imports them
            threading.Thread(target=importlib.import_module, args=("quarantune.search.models",), daemon=True).start()

    @property
    def expects_gain(self) -> bool:
        """Whether the models expect a further config to beat the best by at least the least gain that counts."""
        return self._hopeless < _AGREEING

    def learn(self, position: int, trial: Trial) -> None:
        """Takes the logarithm of the config's time, or NaN for a failure; ignores a lost config."""
        self._logs.pop(position, None)
        if (log := log_time(trial)) is None:
            return
        self._logs[position] = log
        if log < self._best:
            self._positions = []
        elif self._models is not None and position in self._positions:
            self._models.tell(self._positions.index(position), log)

    def pick(self, n: int) -> Iterable[int]:
        """Yields the most promising configs, given all trials so far."""
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
        drawn, known = self.draw(_SPREAD_OVER).tolist(), [*told, *self.pending]
        if not drawn or not known:
            return drawn[0] if drawn else None
        squares = ((self._points(drawn)[:, None] - self._points(known)[None]) ** 2).sum(-1)
        near = np.exp(-squares[:, : len(told)] / 0.3)
        works_there = (near @ works + 0.5) / (near.sum(1) + 1)
        return int(drawn[int(np.argmax(np.sqrt(squares.min(1)) * works_there**2))])

    def _forecasting(self) -> Models:
        """Returns the models with a forecast of new candidates, if any candidates are left."""
        from quarantune.search.models import Models

        models = self._models or Models(self._fields, self._features, self.rng)
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
        first, second = self.rng.integers(len(codes), size=(2, shape[0]))
        crossed = np.where(self.rng.random(shape) < 0.5, codes[first], codes[second])
        mutated = self.rng.random(shape) < _MUTATIONS / len(self._sizes)
        rows.append(np.where(mutated, self.rng.integers(self._sizes, size=shape), crossed))
        found = sorted(set(self._fields.positions_of(np.concatenate(rows))))
        near = np.array(list(filter(self.is_free, found)), np.int64)
        if len(near) > _CANDIDATES // 2:
            near = self.rng.choice(near, _CANDIDATES // 2, replace=False)
        return sorted({*near.tolist(), *self.draw(_CANDIDATES - len(near)).tolist()})

    def _points(self, positions: Sequence[int]) -> Floats:
        """Returns configs as points with the coordinates of sizes and words only."""
        return self._features.points(self._fields.codes(positions))[:, : self._features.ordered]
