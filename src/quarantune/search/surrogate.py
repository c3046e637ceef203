"""A search that models the time of every config by a Gaussian process, and by a logistic model whether it works at all.

This is Bayesian optimisation by expected improvement (Jones, Schonlau and Welch, "Efficient Global Optimization of
Expensive Black-Box Functions", 1998), weighted by the probability of success (Gardner and others, "Bayesian
Optimization with Inequality Constraints", 2014). Pending configs count as measured at their predicted times
(Ginsbourger and others, "Kriging Is Well-Suited to Parallelize Optimization", 2010).

The constants were chosen by replays of five recorded GPU spaces with 4,000 to 18,000 configs, and of one in which 60%
of the configs fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from quarantune.host import blas
from quarantune.search.features import Features, Floats
from quarantune.search.gaussian import GaussianProcess
from quarantune.search.space import Space
from quarantune.search.strategy import Strategy
from quarantune.search.success import SuccessModel
from quarantune.values.trial import Config, Outcome

Positions = NDArray[np.int64]

_STARTS = 24
"""So many configs are spread over the space before the models choose."""
_SPREAD_OVER = 12
"""The next start is the best of so many random configs."""
_MOST_POINTS = 256
"""The cost of the Gaussian process grows with the cube of the number of its points."""
_ADAPT_AFTER = 16
"""The length scales are adapted after so many further trials, or an eighth of all, which takes most of the time."""
_CANDIDATES = 1000
"""The expected improvement is computed for so many configs; half of them are near the best ones."""
_PARENTS = 6
"""The number of the best configs whose neighbours and crossovers are candidates."""
_MUTATIONS = 0.5
"""The mean number of values that are changed at random in a crossover."""
_LEAST_SPREAD = 0.3
"""Times of more than the median, and at least 1.35 times the best, are brought closer: how slow a slow config is says
little about where the best is."""
_BEYOND = 0.3
"""The part that is left of a distance beyond that."""
_DOUBTFUL = 0.2
"""A config that works with less than this probability is asked when there is no other candidate."""
_LAST = 1e6
_CAUTION = 2.0
"""Every second config is chosen as if the model were so much less certain. In the space with the most isolated optimum,
a convolution on an A100, 13 instead of 11 of 16 runs of 400 trials found it; others took no longer."""

_DRAWS = 50
_MOST_LOOKED_AT = 1_000_000
"""Where nearly all configs are dropped or were asked already, so many are looked at in order."""


class Surrogate(Strategy):
    """Asks first for configs that are far from each other, then for those that may improve on the best."""

    def __init__(self, space: Space, seed: int, starts: Iterable[Config] = ()) -> None:
        """Runs a generator to its end, because any of its configs may be the next.

        Args:
            space: the configs.
            seed: the same seed and the same trials give the same configs.
            starts: as for `Strategy`.
        """
        self._size = space.whole()
        super().__init__(space, starts)
        self._rng = np.random.default_rng(seed)
        self._features = Features(space)
        self._sizes = np.array([len(values) for values in space.values], np.int64)
        self._model = GaussianProcess(self._features.groups)
        self._adapted = -_ADAPT_AFTER

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
            with blas.one_thread():
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
        drawn = [position for position in self._free(_SPREAD_OVER).tolist() if position not in pending]
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
        """Returns the candidates of the greatest expected improvement, each as if those before it were measured."""
        points, targets, works = self._points(told), _targets(logs), np.isfinite(logs)
        kept = self._kept(targets)
        mean, spread = targets[kept].mean(), targets[kept].std() + 1e-9
        due = len(told) - self._adapted >= max(_ADAPT_AFTER, len(told) // 8)
        steps = 25 if len(told) < 60 else 8
        self._model.learn(points[kept], (targets[kept] - mean) / spread, steps=steps if due else 0)
        self._adapted = len(told) if due else self._adapted

        best_first = np.argsort(np.where(works, targets, np.inf), kind="stable")
        parents = [told[index] for index in best_first[: min(_PARENTS, int(works.sum()))]]
        candidates = self._candidates(parents, picked)
        pending = [*sorted(self.pending), *picked]
        there = self._points([*candidates, *pending])
        prediction = self._model.predict(there)
        for index in range(len(candidates), len(there)):
            prediction.observe(index)
        succeeds = np.ones(len(there)) if works.all() else SuccessModel(points, works).probability(there)
        rank = 2 * np.log(succeeds + 1e-12) - np.where(succeeds < _DOUBTFUL, _LAST, 0)
        rank[len(candidates) :] = -np.inf  # pending ones
        chosen: list[int] = []
        for _ in range(min(n, len(candidates))):
            caution = _CAUTION if (len(pending) + len(chosen)) % 2 else 1.0
            deviation = caution * np.sqrt(prediction.variance * self._model.variance)
            gain = (-mean / spread - prediction.mean) / deviation
            improvement = deviation * (gain * special.ndtr(gain) + np.exp(-0.5 * gain**2) / np.sqrt(2 * np.pi))
            # Where there is no improvement to be expected anywhere, the model's times decide.
            index = int(np.argmax(rank + np.log(np.maximum(improvement, 1e-30)) - 1e-3 * prediction.mean))
            prediction.observe(index)
            rank[index] = -np.inf
            chosen.append(candidates[index])
        return chosen

    def _kept(self, targets: Floats) -> Positions:
        """Returns which trials the model learns from: of too many, the best and some of the others."""
        order = np.argsort(targets, kind="stable")
        if len(order) <= _MOST_POINTS:
            return np.arange(len(order))
        half = _MOST_POINTS // 2
        return np.concatenate([order[:half], self._rng.choice(order[half:], half, replace=False)])

    def _candidates(self, parents: Sequence[int], picked: Sequence[int]) -> list[int]:
        """Returns free configs: neighbours and crossovers of the parents, and random ones."""
        codes = self.space.codes(parents)
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
        found = set(self.space.positions_of(np.concatenate(rows))).difference(picked)
        near = np.array([position for position in sorted(found) if self.is_free(position)], np.int64)
        if len(near) > _CANDIDATES // 2:
            near = self._rng.choice(near, _CANDIDATES // 2, replace=False)
        return sorted({*near.tolist(), *self._free(_CANDIDATES - len(near)).tolist()}.difference(picked))

    def _free(self, count: int) -> Positions:
        """Returns up to so many random configs that can still be asked."""
        found: set[int] = set()
        if self._size > 4 * count:
            for _ in range(_DRAWS):
                found.update(filter(self.is_free, self._rng.integers(self._size, size=count).tolist()))
                if len(found) >= count:
                    break
        if not found:
            first = int(self._rng.integers(self._size))
            ahead = ((first + step) % self._size for step in range(min(self._size, _MOST_LOOKED_AT)))
            found.update(itertools.islice(filter(self.is_free, ahead), 4 * count))
        return self._rng.permutation(np.array(sorted(found), np.int64))[:count]

    def _points(self, positions: Sequence[int]) -> Floats:
        return self._features.points(self.space.codes(positions))


def _targets(logs: Floats) -> Floats:
    """Returns how far each time is from the best, with failures as slow as the slowest config."""
    distances = np.where(np.isfinite(logs), logs, np.nanmax(logs)) - np.nanmin(logs)
    ordinary = max(float(np.median(distances[np.isfinite(logs)])), _LEAST_SPREAD)
    return np.minimum(distances, ordinary) + _BEYOND * np.maximum(distances - ordinary, 0)
