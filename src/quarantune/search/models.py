"""What a search expects of configs that it has not tried: how fast they are, and whether they work at all.

Of three configs, two are chosen by a Gaussian process: this is Bayesian optimisation by expected improvement (Jones,
Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998), weighted by the probability
of success (Gardner and others, "Bayesian Optimization with Inequality Constraints", 2014). Pending configs count as
measured at their predicted times (Ginsbourger and others, "Kriging Is Well-Suited to Parallelize Optimization", 2010).
The third has the values that the best configs have more often than the others (`log_densities`). The process follows
how values depend on each other, and the densities find good values from fewer trials where they do not: together they
are faster than either. A forecast of some candidates serves for several trials, and learns from each of them: to make
one takes ten times as long as to choose by it.

The constants were chosen by replays of recorded GPU spaces with 1,280 to 18,000 configs, of which up to 60% fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize, special
from scipy.spatial.distance import cdist

from quarantune.host.machine import proc_text
from quarantune.search.fields import Features, Fields, Floats, by_size
from quarantune.values.configs import ConfigValue
from quarantune.values.space import Codes

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
_STEEPNESS_AT = (2, 4, 8, 16)
"""Ranks of the different times that show, with the best time, how much faster a lower value is; the steepest counts."""
_BY_DENSITIES = 3
"""Of so many configs, one is chosen by the densities."""
_BEST_SHARE = 0.1
"""The share of the trials that count as good for the densities."""
_DRAWN = 24
"""The densities choose among so many candidates, drawn with the probabilities of the good ones."""


class Models:
    """Learns from all trials so far, and chooses among candidates.

    A forecast is what is expected of some candidates. It learns from their trials, too, until it is made anew.

    Attributes:
        gain: the gain over the best time that the forecast expected when it was made, as a share of that time.
    """

    def __init__(self, fields: Fields, features: Features, rng: np.random.Generator) -> None:
        """Looks at the values of all configs."""
        self._features = features
        self._levels = [levels_of(values) for values in fields.values]
        self._process = GaussianProcess(features.groups, features.ordered)
        self._adapted = -_ADAPT_AFTER
        self._rng = rng

    def forecast(self, known: Codes, logs: Floats, candidates: Codes, pending: Codes) -> None:
        """Makes a forecast of some candidates.

        Args:
            known: the configs that were tried; at least two of them work.
            logs: the logarithms of their times; NaN for failures.
            candidates: the configs to choose from.
            pending: the configs that are being tried.
        """
        with _one_thread():
            works = np.isfinite(logs)
            points = self._features.points(known)
            self._scale = self._learn(points[works], logs[works], known=len(known))
            there = self._features.points(np.concatenate([candidates, pending]))
            self._prediction = self._process.predict(there)  # at the candidates, and at the pending after them
            ordered = slice(self._features.ordered)
            all_work = np.ones(len(there))
            succeeds = all_work if works.all() else _success(points[:, ordered], works, there[:, ordered])
            # How much less than the others each candidate promises, because it may fail.
            self._rank = (2 * np.log(succeeds + 1e-12) - np.where(succeeds < _DOUBTFUL, _LAST, 0))[: len(candidates)]
            self.gain = self._gain(np.where(succeeds < _DOUBTFUL, 0, succeeds))
            for index in range(len(candidates), len(there)):
                self._prediction.observe(index)
            best_first = np.argsort(logs, kind="stable")  # failures are the last
            good = np.isin(np.arange(len(logs)), best_first[: max(2, math.ceil(_BEST_SHARE * len(logs)))])
            self._densities = log_densities(self._levels, known, good, candidates)

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

    def tell(self, index: int, log: float) -> None:
        """Takes the logarithm of the time of a point of the forecast, NaN for a failure; it is not chosen any more."""
        if index < len(self._rank):
            self._rank[index] = -np.inf
        if np.isfinite(log):
            self._prediction.tell(index, float(np.interp(log, *self._scale)))

    def choose(self, turn: int) -> int | None:
        """Returns the index of the candidate that promises most, as if those chosen before were measured.

        Args:
            turn: how many configs the search has chosen before.

        Returns:
            The index; None where every candidate was chosen.
        """
        if not np.isfinite(self._rank).any():
            return None
        with _one_thread():
            index = self._densest() if turn % _BY_DENSITIES == 0 else self._most_improving(_CAUTION[turn % 2])
            self._prediction.observe(index)
        self._rank[index] = -np.inf
        return index

    def _most_improving(self, caution: float) -> int:
        """Returns the index of the candidate with the greatest expected improvement."""
        improvement = self._improvements(self._scale[1][:_IMPROVABLE][-1], caution)
        # Where there is no improvement to be expected anywhere, the process's times decide.
        promise = np.log(np.maximum(improvement, 1e-30)) - 1e-3 * self._prediction.mean
        return int(np.argmax(self._rank + promise[: len(self._rank)]))

    def _improvements(self, over: float, caution: float) -> Floats:
        """Returns the expected improvement over a value at each point, as if the process were so much less certain."""
        deviation = caution * np.sqrt(self._process.variance * self._prediction.variance)
        gain = (over - self._prediction.mean) / deviation
        return np.asarray(deviation * (gain * special.ndtr(gain) + np.exp(-0.5 * gain**2) / np.sqrt(2 * np.pi)))

    def _gain(self, succeeds: Floats) -> float:
        """Returns the sum of the expected gains over the best time, which is at least the expected gain of all points.

        The times near the best show which gain an improvement of the process's values is. The deviations count double,
        because the process may be too certain.

        Args:
            succeeds: the probability that the config at each point works.
        """
        logs, first = np.unique(self._scale[0], return_index=True)  # programs that are the same share one time
        values = self._scale[1][first]
        ranks = np.minimum(_STEEPNESS_AT, len(logs) - 1)
        steepness = np.max((logs[ranks] - logs[0]) / (values[ranks] - values[0] + 1e-9))
        return float(steepness * (succeeds @ self._improvements(values[0], max(_CAUTION))))

    def _densest(self) -> int:
        """Returns the index of the drawn candidate whose values the best configs have most more often than others."""
        among_good, among_others = self._densities
        weights = np.where(np.isfinite(self._rank), np.exp(among_good - among_good.max()), 0)
        count = min(_DRAWN, int((weights > 0).sum()))
        drawn = self._rng.choice(len(weights), count, replace=False, p=weights / weights.sum())
        return int(drawn[np.argmax((among_good - among_others + self._rank)[drawn])])


def _normal_scores(logs: Floats) -> Floats:
    """Returns the quantile of the normal distribution for the rank of each time; equal times share theirs."""
    ordered = np.sort(logs)
    ranks = (np.searchsorted(ordered, logs, "left") + np.searchsorted(ordered, logs, "right") + 1) / 2
    return np.asarray(special.ndtri(ranks / (len(logs) + 1)))


# --- the Gaussian process -----------------------------------------------------------------------------------

_JITTER = 1e-8
_SCALE, _SCALE_APART, _SCALE_SPREAD = np.log(0.5), np.log(2.0), 1.2
"""The prior of the length scales' logarithms: half of an axis, within a factor of three; longer between numbers that
are told from each other one by one, which is needed where their size does not explain the values."""
_NOISE, _NOISE_SPREAD = np.log(1e-2), 2.0
"""The prior of the logarithm of the noise's share of the variance."""


class GaussianProcess:
    """A function of points, learned from noisy values with mean 0 and variance 1; a length scale for each group.

    The formulas are those of Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), algorithm 2.1 and
    equation 5.9, with the signal's variance at its maximum-likelihood value.
    """

    def __init__(self, groups: NDArray[np.int64], ordered: int) -> None:
        """Begins with the prior's length scales.

        Args:
            groups: the group of each coordinate, counted from 0.
            ordered: so many coordinates, the first, are those of sizes and words.
        """
        self._groups = groups
        self._count = int(groups.max(initial=-1)) + 1
        apart = np.isin(np.arange(self._count), groups[ordered:])
        self._prior: Floats = np.append(np.where(apart, _SCALE_APART, _SCALE), _NOISE)
        self._theta = self._prior

    def learn(self, points: Floats, values: Floats, *, steps: int) -> None:
        """Takes the values at some points, after adapting the length scales to them.

        Args:
            points: one row for each value.
            values: with mean 0 and variance 1.
            steps: how many steps to take towards the most likely length scales; 0 leaves them alone.
        """
        if steps:
            self._adapt(points, values, steps)
        self._stretch = np.exp(-self._theta[:-1])[self._groups]
        self._points = points * self._stretch
        self._noise = float(np.exp(self._theta[-1]))  # as a share of the function's variance
        kernel = _matern(cdist(self._points, self._points, "sqeuclidean"))
        kernel[np.diag_indices(len(points))] += self._noise + _JITTER
        self._factor = linalg.cholesky(kernel, lower=True, check_finite=False)
        self._weights = linalg.cho_solve((self._factor, True), values, check_finite=False)
        self.variance = max(float(values @ self._weights) / len(values), 1e-6)

    def predict(self, points: Floats) -> Prediction:
        """Returns the function's mean at some points, and how uncertain it is."""
        stretched = points * self._stretch
        kernel = _matern(cdist(self._points, stretched, "sqeuclidean"))
        solved = linalg.solve_triangular(self._factor, kernel, lower=True, check_finite=False)
        return Prediction(stretched, kernel.T @ self._weights, solved, self._noise)

    def _adapt(self, points: Floats, values: Floats, steps: int) -> None:
        """Moves the length scales and the noise towards their most likely values."""
        parts = [points[:, self._groups == group] for group in range(self._count)]
        flat = np.array([cdist(part, part, "sqeuclidean") for part in parts]).reshape(self._count, len(points) ** 2)
        spreads = np.append(np.full(self._count, _SCALE_SPREAD), _NOISE_SPREAD)

        def loss(theta: Floats) -> tuple[float, Floats]:
            inverse = np.exp(-2 * theta[:-1])
            radius = np.sqrt(5 * (inverse @ flat)).reshape(len(points), len(points))
            decay = np.exp(-radius)
            kernel = (1 + radius + radius * radius / 3) * decay
            noise = np.exp(theta[-1])
            kernel[np.diag_indices(len(points))] += noise + _JITTER
            try:
                factor = linalg.cholesky(kernel, lower=True, check_finite=False)
            except linalg.LinAlgError:
                return 1e10, np.zeros_like(theta)
            inverted = linalg.cho_solve((factor, True), np.eye(len(points)), check_finite=False)
            weights = inverted @ values
            variance = max(float(values @ weights) / len(points), 1e-6)
            outer = np.outer(weights, weights) / variance - inverted
            slopes = (flat @ (outer * (5 / 3) * (1 + radius) * decay).ravel()) * inverse
            prior = (theta - self._prior) / spreads
            value = 0.5 * len(points) * np.log(variance) + np.log(np.diag(factor)).sum() + 0.5 * (prior @ prior)
            gradient = -0.5 * np.append(slopes, np.trace(outer) * noise) + prior / spreads
            return float(value), gradient

        bounds = [(np.log(0.03), np.log(20.0))] * self._count + [(np.log(1e-5), 0.0)]
        found = optimize.minimize(
            loss, self._theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps}
        )
        self._theta = np.asarray(found.x, np.float64)


class Prediction:
    """The mean and variance of a function at some points, which observations at some of them change.

    Attributes:
        mean: the expected values.
        variance: their variance, as a share of the function's.
    """

    def __init__(self, points: Floats, mean: Floats, solved: Floats, noise: float) -> None:
        self.mean = self._mean_before = mean
        self.variance: Floats = np.maximum(1 - (solved**2).sum(0), 1e-10)
        self._points = points
        self._solved = solved
        self._noise = noise
        self._seen: dict[int, tuple[Floats, float]] = {}
        self._values: dict[int, float] = {}

    def observe(self, index: int) -> None:
        """Lowers the variance as if the value at one of the points were known; until it is told, it equals its mean."""
        covariance = _matern(cdist(self._points, self._points[index : index + 1], "sqeuclidean"))[:, 0]
        covariance -= self._solved.T @ self._solved[:, index]
        for earlier, total in self._seen.values():
            covariance -= earlier * (earlier[index] / total)
        total = float(self.variance[index]) + self._noise
        self._seen[index] = (covariance, total)
        self.variance = np.maximum(self.variance - covariance * covariance / total, 1e-10)

    def tell(self, index: int, value: float) -> None:
        """Takes the value at one of the points."""
        if index not in self._seen:
            self.observe(index)
        self._values[index] = value
        self.mean = self._mean_before.copy()
        for seen, (covariance, total) in self._seen.items():
            if seen in self._values:
                self.mean += covariance * ((self._values[seen] - self.mean[seen]) / total)


def _matern(squares: Floats) -> Floats:
    """Returns Matern's covariance with smoothness 5/2, by the squared distance."""
    radius = np.sqrt(5 * squares)
    decay = np.exp(-radius)
    decay *= (radius / 3 + 1) * radius + 1
    return np.asarray(decay)


# --- which configs fail -----------------------------------------------------------------------------------

_PENALTY = 0.05
_STEPS = 8
_MOST_FOR_PRODUCTS = 16
"""With more coordinates than this, their products are left out: they would take too long."""


def _success(known: Floats, works: NDArray[np.bool_], asked: Floats) -> Floats:
    """Returns the probability that configs work, by logistic regression fitted by Newton's method with a ridge penalty.

    Shared memory and registers are products of a config's values, and so sums of their logarithms: a quadratic form of
    the coordinates follows such a limit, where a Gaussian process needs many points along it.

    Args:
        known: the coordinates of the configs that were tried, one row for each.
        works: whether each of them could be measured.
        asked: the coordinates of the configs in question.
    """
    terms = _terms(known)
    penalty = np.full(terms.shape[1], _PENALTY)
    weights = np.zeros(terms.shape[1])
    for _ in range(_STEPS):
        expected = special.expit(terms @ weights)
        slope = terms.T @ (expected - works) + penalty * weights
        curvature = (terms * (expected * (1 - expected))[:, None]).T @ terms + np.diag(penalty)
        weights = weights - np.linalg.solve(curvature, slope)
    return np.asarray(special.expit(_terms(asked) @ weights))


def _terms(points: Floats) -> Floats:
    columns = [np.ones((len(points), 1)), points]
    if points.shape[1] <= _MOST_FOR_PRODUCTS:
        first, second = np.triu_indices(points.shape[1])
        columns.append(points[:, first] * points[:, second])
    return np.concatenate(columns, axis=1)


# --- densities ---------------------------------------------------------------------------------------------

_MOST_LEVELS = 64
"""More numbers than this share levels with their neighbours."""
_WIDTH = 0.5
"""How far a number's weight reaches, in levels; of more than eleven levels, a twentieth of all."""


def log_densities(
    levels: Sequence[tuple[NDArray[np.int64], Floats | None]], known: Codes, good: NDArray[np.bool_], asked: Codes
) -> tuple[Floats, Floats]:
    """Returns the logarithms of the density of some configs among good ones, and of that among the others.

    It estimates how probable each value is, for each name by itself: this is the tree-structured Parzen estimator of
    Bergstra and others, "Algorithms for Hyper-Parameter Optimization" (2011), for values that can be listed.

    Args:
        levels: for each name what `levels_of` returns.
        known: the configs that were tried.
        good: which of them are good.
        asked: the configs to estimate.
    """
    among_good, among_others = np.zeros(len(asked)), np.zeros(len(asked))
    for column, (level_of, nearness) in enumerate(levels):
        seen, wanted, count = level_of[known[:, column]], level_of[asked[:, column]], int(level_of.max()) + 1
        among_good += _log_density(seen[good], count, nearness)[wanted]
        among_others += _log_density(seen[~good], count, nearness)[wanted]
    return among_good, among_others


def levels_of(values: Sequence[ConfigValue]) -> tuple[NDArray[np.int64], Floats | None]:
    """Returns the level of each value of a name, and how much a config at one level says of each other level.

    Numbers are near by size; for words, each by itself, the second is None.
    """
    order = by_size(values)
    if order is None:
        return np.arange(len(values)), None
    count = min(len(values), _MOST_LEVELS)
    levels = np.arange(count)
    nearness = np.exp(-0.5 * ((levels[:, None] - levels) / max(_WIDTH, (count - 1) / 20)) ** 2)
    return np.argsort(order) * count // len(values), np.asarray(nearness / nearness.sum(0))


def _log_density(seen: NDArray[np.int64], count: int, nearness: Floats | None) -> Floats:
    """Returns the density of each level, to which one config that may have any value is added."""
    weights = np.bincount(seen, minlength=count).astype(np.float64)
    density = (weights if nearness is None else nearness @ weights) + 1 / count
    return np.asarray(np.log(density / density.sum()))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limits the OpenBLAS libraries of NumPy and SciPy to one thread: more cost more than they save on small matrices.

    Their threads wait for work by spinning: on a machine of 2 cores with other work, a search took 8.8 ms of CPU per
    trial instead of 0.8, on cores that workers compile on. Neither package has a function for this. A library that is
    not known is left alone.
    """
    before = [(put, get()) for get, put in _openblas_functions()]
    for put, _ in before:
        put(1)
    try:
        yield
    finally:
        for put, count in before:
            put(count)


@functools.cache
def _openblas_functions() -> list[tuple[Callable[[], int], Callable[[int], None]]]:
    """Returns the functions that read and set the number of threads of each OpenBLAS in this process."""
    paths = sorted(set(re.findall(r"(/\S*openblas\S*\.so\S*)$", proc_text("/proc/self/maps"), re.MULTILINE)))
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            for prefix, suffix in itertools.product(("scipy_openblas", "openblas"), ("64_", "")):
                get = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                put = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                if get and put:
                    found.append((get, put))
                    break
    return found
