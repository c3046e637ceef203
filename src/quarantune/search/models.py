"""What a search expects of configs that it has not tried: how fast they are, and whether they work at all.

Of three configs, two are chosen by a Gaussian process: this is Bayesian optimisation by expected improvement (Jones,
Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998), weighted by the probability
of success (Gardner and others, "Bayesian Optimization with Inequality Constraints", 2014). Pending configs count as
measured at their predicted times (Ginsbourger and others, "Kriging Is Well-Suited to Parallelize Optimization", 2010).
The third has the values that the best configs have more often than the others (`densities.py`). The process follows
how values depend on each other, and the densities find good values from fewer trials where they do not: together they
are faster than either. A forecast of some candidates serves for several trials, and learns from each of them: to make
one takes ten times as long as to choose by it.

The constants were chosen by replays of recorded GPU spaces with 1,280 to 18,000 configs, of which up to 60% fail.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from quarantune.host import blas
from quarantune.search.densities import Densities
from quarantune.search.features import Features, Floats
from quarantune.search.fields import Fields
from quarantune.search.gaussian import GaussianProcess, Prediction
from quarantune.search.success import SuccessModel
from quarantune.values.space_sources import Codes

_MOST_POINTS = 256
"""The cost of the Gaussian process grows with the cube of the number of its points."""
_ADAPT_AFTER = 16
"""The length scales are adapted after so many further trials, or an eighth of all, which takes most of the time."""
_IMPROVABLE = 3
"""An improvement is what is gained over the time of this rank: over the best, fewer runs find an isolated one."""
_DOUBTFUL = 0.2
"""A config that works with less than this probability is asked when there is no other candidate."""
_LAST = 1e6
_CAUTION = (1.0, 2.0)
"""Every second config is chosen as if the process were so much less certain."""
_BY_DENSITIES = 3
"""Of so many configs, one is chosen by the densities."""
_BEST_SHARE = 0.1
"""The share of the trials that count as good for the densities."""
_DRAWN = 24
"""The densities choose among so many candidates, drawn with the probabilities of the good ones."""


class Models:
    """Learns from all trials so far."""

    def __init__(self, fields: Fields, features: Features, rng: np.random.Generator) -> None:
        """Looks at the values of all configs."""
        self._features = features
        self._densities = Densities(fields)
        self._process = GaussianProcess(features.groups, features.ordered)
        self._adapted = -_ADAPT_AFTER
        self._rng = rng

    def forecast(self, known: Codes, logs: Floats, candidates: Codes, pending: Codes) -> Forecast:
        """Returns what is expected of some candidates.

        Args:
            known: the configs that were tried; at least two of them work.
            logs: the logarithms of their times; NaN for failures.
            candidates: the configs to choose from.
            pending: the configs that are being tried.
        """
        with blas.one_thread():
            works = np.isfinite(logs)
            points = self._features.points(known)
            scale = self._learn(points[works], logs[works], known=len(known))
            there = self._features.points(np.concatenate([candidates, pending]))
            prediction = self._process.predict(there)
            for index in range(len(candidates), len(there)):
                prediction.observe(index)
            ordered = slice(self._features.ordered)
            rank = np.zeros(len(candidates))
            if not works.all():
                succeeds = SuccessModel(points[:, ordered], works).probability(there[: len(candidates), ordered])
                rank = 2 * np.log(succeeds + 1e-12) - np.where(succeeds < _DOUBTFUL, _LAST, 0)
            densities = self._densities.logs(known, _best(logs), candidates)
            return Forecast(prediction, scale, math.sqrt(self._process.variance), rank, densities, self._rng)

    def _learn(self, points: Floats, logs: Floats, *, known: int) -> tuple[Floats, Floats]:
        """Teaches the Gaussian process the times of configs that work, and returns them in order with its values.

        Its values are the normal scores of the times: how slow a slow config is says little about where the best is.
        """
        scores = _normal_scores(logs)
        kept = self._kept(scores)
        values = (scores - scores[kept].mean()) / (scores[kept].std() + 1e-9)
        due = known - self._adapted >= max(_ADAPT_AFTER, known // 8)
        steps = 25 if known < 60 else 8
        self._process.learn(points[kept], values[kept], steps=steps if due else 0)
        self._adapted = known if due else self._adapted
        return np.sort(logs), np.sort(values)

    def _kept(self, scores: Floats) -> NDArray[np.int64]:
        """Returns which trials the process learns from: of too many, the best and some of the others."""
        order = np.argsort(scores, kind="stable")
        if len(order) <= _MOST_POINTS:
            return np.arange(len(order))
        half = _MOST_POINTS // 2
        return np.concatenate([order[:half], self._rng.choice(order[half:], half, replace=False)])


class Forecast:
    """What is expected of candidates: it chooses among them, and learns from their trials, until it is made anew."""

    def __init__(
        self,
        prediction: Prediction,
        scale: tuple[Floats, Floats],
        deviation: float,
        rank: Floats,
        densities: tuple[Floats, Floats],
        rng: np.random.Generator,
    ) -> None:
        """Has chosen nothing yet.

        Args:
            prediction: the Gaussian process at the candidates, and at other points after them.
            scale: the logarithms of the known times in order, and the process's values for them.
            deviation: the standard deviation of its values.
            rank: how much less than the others each candidate promises, because it may fail.
            densities: as `Densities.logs` returns them.
            rng: the source of randomness.
        """
        self._prediction = prediction
        self._scale = scale
        self._deviation = deviation
        self._rank = rank
        self._among_good, self._among_others = densities
        self._rng = rng

    def tell(self, index: int, log: float) -> None:
        """Takes the logarithm of a point's time, NaN for a failure; the point is not chosen any more."""
        if index < len(self._rank):
            self._rank[index] = -np.inf
        if np.isfinite(log):
            self._prediction.tell(index, float(np.interp(log, *self._scale)))

    def choose(self, n: int, turn: int) -> list[int]:
        """Returns the indices of the candidates that promise most, each as if those before it were measured.

        Args:
            n: how many to choose.
            turn: how many configs the search has chosen before.
        """
        with blas.one_thread():
            chosen: list[int] = []
            for number in range(turn, turn + min(n, int(np.isfinite(self._rank).sum()))):
                index = self._densest() if number % _BY_DENSITIES == 0 else self._most_improving(_CAUTION[number % 2])
                self._prediction.observe(index)
                self._rank[index] = -np.inf
                chosen.append(index)
            return chosen

    def _most_improving(self, caution: float) -> int:
        """Returns the index of the candidate with the greatest expected improvement."""
        mean, variance = (each[: len(self._rank)] for each in (self._prediction.mean, self._prediction.variance))
        deviation = caution * self._deviation * np.sqrt(variance)
        gain = (self._scale[1][:_IMPROVABLE][-1] - mean) / deviation
        improvement = deviation * (gain * special.ndtr(gain) + np.exp(-0.5 * gain**2) / np.sqrt(2 * np.pi))
        # Where there is no improvement to be expected anywhere, the process's times decide.
        return int(np.argmax(self._rank + np.log(np.maximum(improvement, 1e-30)) - 1e-3 * mean))

    def _densest(self) -> int:
        """Returns the index of the drawn candidate whose values the best configs have most more often than others."""
        weights = np.where(np.isfinite(self._rank), np.exp(self._among_good - self._among_good.max()), 0)
        count = min(_DRAWN, int((weights > 0).sum()))
        drawn = self._rng.choice(len(weights), count, replace=False, p=weights / weights.sum())
        return int(drawn[np.argmax((self._among_good - self._among_others + self._rank)[drawn])])


def _best(logs: Floats) -> NDArray[np.bool_]:
    """Returns which trials count as good for the densities."""
    good = np.zeros(len(logs), np.bool_)
    best_first = np.argsort(np.where(np.isfinite(logs), logs, np.inf), kind="stable")
    good[best_first[: max(2, math.ceil(_BEST_SHARE * len(logs)))]] = True
    return good


def _normal_scores(logs: Floats) -> Floats:
    """Returns the quantile of the normal distribution for the rank of each time; equal times share theirs."""
    ordered = np.sort(logs)
    ranks = (np.searchsorted(ordered, logs, "left") + np.searchsorted(ordered, logs, "right") + 1) / 2
    return np.asarray(special.ndtri(ranks / (len(logs) + 1)))
