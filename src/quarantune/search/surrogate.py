"""A search that models how fast each config is and whether it works, and asks for what promises most."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quarantune.search.drawing import Drawing
from quarantune.search.features import Features, Floats
from quarantune.search.fields import Fields
from quarantune.search.strategy import Strategy
from quarantune.values.space import Space
from quarantune.values.trial import Config, Outcome

if TYPE_CHECKING:
    from quarantune.search.models import Models

_STARTS = 16
"""So many configs are spread over the space before the models choose."""
_SPREAD_OVER = 12
"""The next start is the best of so many random configs."""
_CANDIDATES = 1000
"""The models choose among so many configs; half of them are near the best ones."""
_PARENTS = 6
"""The number of the best configs whose neighbours and crossovers are candidates."""
_MUTATIONS = 0.5
"""The mean number of values that are changed at random in a crossover."""


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
        with contextlib.suppress(RuntimeError):  # no further thread can start: they are imported when they are needed
            threading.Thread(target=_import_models, daemon=True).start()

    def pick(self, n: int) -> list[int]:
        """Returns the configs that promise most, given all trials so far."""
        told, logs = self._results()
        picked: list[int] = []
        works = np.isfinite(logs)
        while len(picked) < n and (len(told) + len(self.pending) + len(picked) < _STARTS or works.sum() < 2):
            start = self._start(told, works, [*self.pending, *picked])
            if start is None:
                return picked
            picked.append(start)
        if len(picked) < n:
            picked += self._promising(told, logs, n - len(picked), picked)
        return picked

    def _results(self) -> tuple[list[int], Floats]:
        """Returns the configs that count as measured, and the logarithms of their times; NaN for failures."""
        logs: dict[int, float] = {}
        for position, trial in self.trials.items():
            if trial.outcome in (Outcome.OK, Outcome.SLOW) and trial.level_ms:
                logs[position] = float(np.log(trial.level_ms))
            elif trial.outcome.is_failure and trial.outcome is not Outcome.LOST:
                logs[position] = np.nan
        return list(logs), np.array(list(logs.values()), np.float64)

    def _start(self, told: Sequence[int], works: NDArray[np.bool_], pending: Sequence[int]) -> int | None:
        """Returns one of a few random configs: far from all others, and rather near those that work."""
        drawn = [position for position in self._drawing.draw(_SPREAD_OVER).tolist() if position not in pending]
        if not drawn:
            return None
        known = [*told, *pending]
        if not known:
            return int(drawn[0])
        squares = ((self._points(drawn)[:, None] - self._points(known)[None]) ** 2).sum(-1)
        near = np.exp(-squares[:, : len(told)] / 0.3)
        works_there = (near @ works + 0.5) / (near.sum(1) + 1)
        return int(drawn[int(np.argmax(np.sqrt(squares.min(1)) * works_there**2))])

    def _promising(self, told: Sequence[int], logs: Floats, n: int, picked: Sequence[int]) -> list[int]:
        """Returns the candidates that the models choose."""
        if self._models is None:
            self._models = _import_models()(self._fields, self._features, self._rng)
        best_first = np.argsort(np.where(np.isfinite(logs), logs, np.inf), kind="stable")
        parents = [told[index] for index in best_first[: min(_PARENTS, int(np.isfinite(logs).sum()))]]
        candidates = self._candidates(parents, picked)
        pending = [*sorted(self.pending), *picked]
        known, near, under_way = map(self._fields.codes, (told, candidates, pending))
        turn = len(self.trials) + len(pending)
        chosen = self._models.choose(known, logs, near, under_way, n=n, turn=turn)
        return [candidates[index] for index in chosen]

    def _candidates(self, parents: Sequence[int], picked: Sequence[int]) -> list[int]:
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
        found = set(self._fields.positions_of(np.concatenate(rows))).difference(picked)
        near = np.array([position for position in sorted(found) if self.is_free(position)], np.int64)
        if len(near) > _CANDIDATES // 2:
            near = self._rng.choice(near, _CANDIDATES // 2, replace=False)
        return sorted({*near.tolist(), *self._drawing.draw(_CANDIDATES - len(near)).tolist()}.difference(picked))

    def _points(self, positions: Sequence[int]) -> Floats:
        return self._features.points(self._fields.codes(positions))


def _import_models() -> type[Models]:
    """Imports the models and SciPy, which takes a second and is not needed before the starts have been tried."""
    from quarantune.search.models import Models

    return Models
