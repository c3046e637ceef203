"""Predicts how fast untried configs are, and whether they work at all.

A Gaussian process chooses two of three configs, by Bayesian optimisation with expected improvement (Jones, Schonlau and
Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998), weighted by the probability of success
(Gardner and others, "Bayesian Optimization with Inequality Constraints", 2014). Pending configs count as measured at
their predicted times (Ginsbourger and others, "Kriging Is Well-Suited to Parallelize Optimization", 2010). Densities
choose the third config, with values that the best configs have more often than the others (`log_densities`). The
process learns how values depend on each other; for independent values, the densities need fewer trials. Together they
are faster than either. A forecast of some candidates serves for several trials and learns from each, because making a
forecast takes ten times as long as choosing by it.

Replays of recorded GPU spaces chose the constants. The spaces have 1,280 to 18,000 configs; up to 60% of them fail.
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
"""Largest number of points of the Gaussian process, whose cost grows with the cube of that number."""
_ADAPT_AFTER = 16
"""Number of further trials, or an eighth of all if that is more, after which the length scales adapt. Adapting takes
most of the time."""
_IMPROVABLE = 3
"""Rank of the time that improvements count from. Counted from the best time, fewer runs find an isolated best."""
_DOUBTFUL = 0.2
"""Probability of success below which a config is a candidate only if all others were chosen."""
_LAST = 1e6
_CAUTION = (1.0, 2.0)
"""Factors on the process's standard deviation, used in turn."""
_STEEPNESS_AT = (2, 4, 8, 16)
"""Ranks of distinct times that show, with the best time, how much faster a lower value is; the steepest counts."""
_BY_DENSITIES = 3
"""Number of configs among which the densities choose one, and the process the others."""
_BEST_SHARE = 0.1
"""The share of the trials that count as good for the densities."""
_DRAWN = 24
"""Number of candidates that the densities choose among, drawn with the probabilities of the good configs."""


class Models:
    """Learns from all trials so far, and chooses among candidates.

    A forecast predicts some candidates. It also learns from their trials, until a new forecast replaces it.

    Attributes:
        gain: the gain over the best time that the forecast first expected, as a share of that time.
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
            known: the configs tried before; at least two of them work.
            logs: the logarithms of their times; NaN for failures.
            candidates: the configs to choose from.
            pending: the configs that run now.
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
            # How much less each candidate promises because it may fail.
            self._rank = (2 * np.log(succeeds + 1e-12) - np.where(succeeds < _DOUBTFUL, _LAST, 0))[: len(candidates)]
            self.gain = self._gain(np.where(succeeds < _DOUBTFUL, 0, succeeds))
            for index in range(len(candidates), len(there)):
                self._prediction.observe(index)
            best_first = np.argsort(logs, kind="stable")  # failures are the last
            good = np.isin(np.arange(len(logs)), best_first[: max(2, math.ceil(_BEST_SHARE * len(logs)))])
            self._densities = log_densities(self._levels, known, good, candidates)

    def _learn(self, points: Floats, logs: Floats, *, known: int) -> tuple[Floats, Floats]:
        """Teaches the Gaussian process the times of working configs; returns the sorted times and the sorted values.

        Its values are the normal scores of the times, because the times of slow configs show little about the best.
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
        """Returns which trials the process learns from; if there are too many, the best and some of the others."""
        order = np.argsort(scores, kind="stable")
        if len(order) <= _MOST_POINTS:
            return np.arange(len(order))
        half = _MOST_POINTS // 2
        return np.concatenate([order[:half], self._rng.choice(order[half:], half, replace=False)])

    def tell(self, index: int, log: float) -> None:
        """Takes the logarithm of the time of a point, NaN for a failure; `choose` will not return the point again."""
        if index < len(self._rank):
            self._rank[index] = -np.inf
        if np.isfinite(log):
            self._prediction.tell(index, float(np.interp(log, *self._scale)))

    def choose(self, turn: int) -> int | None:
        """Returns the index of the candidate that promises most; earlier choices count as measured.

        Args:
            turn: how many configs the search has chosen before.

        Returns:
            The index; None if every candidate was chosen.
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
        # If no candidate should improve on the best, the predicted times decide.
        promise = np.log(np.maximum(improvement, 1e-30)) - 1e-3 * self._prediction.mean
        return int(np.argmax(self._rank + promise[: len(self._rank)]))

    def _improvements(self, over: float, caution: float) -> Floats:
        """Returns the expected improvement over a value at each point; `caution` is a factor on the deviations."""
        deviation = caution * np.sqrt(self._process.variance * self._prediction.variance)
        gain = (over - self._prediction.mean) / deviation
        return np.asarray(deviation * (gain * special.ndtr(gain) + np.exp(-0.5 * gain**2) / np.sqrt(2 * np.pi)))

    def _gain(self, succeeds: Floats) -> float:
        """Returns the sum of the expected gains over the best time, which is at least the expected gain of all points.

        The times near the best convert an improvement of the process's values into a gain. The deviations count double,
        because the process may be too certain.

        Args:
            succeeds: the probability that the config at each point works.
        """
        logs, first = np.unique(self._scale[0], return_index=True)  # equal programs share one time
        values = self._scale[1][first]
        ranks = np.minimum(_STEEPNESS_AT, len(logs) - 1)
        steepness = np.max((logs[ranks] - logs[0]) / (values[ranks] - values[0] + 1e-9))
        return float(steepness * (succeeds @ self._improvements(values[0], max(_CAUTION))))

    def _densest(self) -> int:
        """Returns the index of the drawn candidate whose values most favour the best configs over the others."""
        among_good, among_others = self._densities
        weights = np.where(np.isfinite(self._rank), np.exp(among_good - among_good.max()), 0)
        count = min(_DRAWN, int((weights > 0).sum()))
        drawn = self._rng.choice(len(weights), count, replace=False, p=weights / weights.sum())
        return int(drawn[np.argmax((among_good - among_others + self._rank)[drawn])])


def _normal_scores(logs: Floats) -> Floats:
    """Returns the quantile of the normal distribution for the rank of each time; equal times share a quantile."""
    ordered = np.sort(logs)
    ranks = (np.searchsorted(ordered, logs, "left") + np.searchsorted(ordered, logs, "right") + 1) / 2
    return np.asarray(special.ndtri(ranks / (len(logs) + 1)))


# --- the Gaussian process -----------------------------------------------------------------------------------

_JITTER = 1e-8
_SCALE, _SCALE_APART, _SCALE_SPREAD = np.log(0.5), np.log(2.0), 1.2
"""The prior of the length scales' logarithms: half of an axis, within a factor of three. The scale is longer for
coordinates of single numbers, which matter only if the size of the numbers does not explain the values."""
_NOISE, _NOISE_SPREAD = np.log(1e-2), 2.0
"""The prior of the logarithm of the noise's share of the variance."""


class GaussianProcess:
    """A function of points, learned from noisy values with mean 0 and variance 1; each group has a length scale.

    It uses algorithm 2.1 and equation 5.9 of Rasmussen and Williams, Gaussian Processes for Machine Learning (2006),
    with the signal's variance at its maximum-likelihood value.
    """

    def __init__(self, groups: NDArray[np.int64], ordered: int) -> None:
        """Begins with the prior's length scales.

        Args:
            groups: the group of each coordinate, counted from 0.
            ordered: the number of leading coordinates for sizes and words.
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
            values: the values, with mean 0 and variance 1.
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
    """The mean and variance of a function at some points; observations at these points change both.

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
        """Lowers the variance as if the value at a point were known; until `tell`, its mean stands in for the value."""
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
    """Returns Matern's covariance with smoothness 5/2 at squared distances."""
    radius = np.sqrt(5 * squares)
    decay = np.exp(-radius)
    decay *= (radius / 3 + 1) * radius + 1
    return np.asarray(decay)


# --- which configs fail -----------------------------------------------------------------------------------

_PENALTY = 0.05
_STEPS = 8
_MOST_FOR_PRODUCTS = 16
"""Number of coordinates above which their products are left out, because these would take too long."""


def _success(known: Floats, works: NDArray[np.bool_], asked: Floats) -> Floats:
    """Returns the probability that configs work, by logistic regression with Newton's method and a ridge penalty.

    Needs of shared memory and registers are products of a config's values, so their logarithms are sums. A quadratic
    form of the coordinates can follow a limit on them, while a Gaussian process needs many points along it.

    Args:
        known: the coordinates of the configs tried before, one row for each.
        works: whether each of them has a time.
        asked: the coordinates of the configs to predict.
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
"""Number of numeric values above which neighbours share levels."""
_WIDTH = 0.5
"""Reach of a number's weight, in levels; a twentieth of all if there are more than eleven levels."""


def log_densities(
    levels: Sequence[tuple[NDArray[np.int64], Floats | None]], known: Codes, good: NDArray[np.bool_], asked: Codes
) -> tuple[Floats, Floats]:
    """Returns the logarithms of the densities of some configs among good configs, and among the others.

    It estimates the probability of each value, separately for each name: this is the tree-structured Parzen estimator
    of Bergstra and others, "Algorithms for Hyper-Parameter Optimization" (2011), for a finite list of values.

    Args:
        levels: the result of `levels_of` for each name.
        known: the configs tried before.
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
    """Returns the level of each value of a name, and the weight of a config at one level for each other level.

    Numbers of similar size share weight. For words the second result is None, because each word stands alone.
    """
    order = by_size(values)
    if order is None:
        return np.arange(len(values)), None
    count = min(len(values), _MOST_LEVELS)
    levels = np.arange(count)
    nearness = np.exp(-0.5 * ((levels[:, None] - levels) / max(_WIDTH, (count - 1) / 20)) ** 2)
    return np.argsort(order) * count // len(values), np.asarray(nearness / nearness.sum(0))


def _log_density(seen: NDArray[np.int64], count: int, nearness: Floats | None) -> Floats:
    """Returns the density of each level, after adding one config that may have any value."""
    weights = np.bincount(seen, minlength=count).astype(np.float64)
    density = (weights if nearness is None else nearness @ weights) + 1 / count
    return np.asarray(np.log(density / density.sum()))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limits the OpenBLAS libraries of NumPy and SciPy to one thread: on small matrices, more cost more than they save.

    Their threads wait for work by spinning. On a machine of 2 cores with other work, a search took 8.8 ms of CPU per
    trial instead of 0.8, on cores that workers compile on. Neither package has a function for this. Unknown libraries
    keep their threads.
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
