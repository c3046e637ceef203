"""Regression by a Gaussian process, with a length scale for each group of coordinates.

The formulas are those of Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), algorithm 2.1 and
equation 5.9, with the signal's variance at its maximum-likelihood value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize

from quarantune.search.features import Floats

_JITTER = 1e-8
_SCALE, _SCALE_APART, _SCALE_SPREAD = np.log(0.5), np.log(2.0), 1.2
"""The prior of the length scales' logarithms: half of an axis, within a factor of three; longer between numbers that
are told from each other one by one, which is needed where their size does not explain the values."""
_NOISE, _NOISE_SPREAD = np.log(1e-2), 2.0
"""The prior of the logarithm of the noise's share of the variance."""


class GaussianProcess:
    """A function of points, learned from noisy values with mean 0 and variance 1."""

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

    @property
    def noise(self) -> float:
        """The variance of the noise, as a share of the function's."""
        return float(np.exp(self._theta[-1]))

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
        kernel = _matern(_squares(self._points, self._points))
        kernel[np.diag_indices(len(points))] += self.noise + _JITTER
        self._factor = linalg.cholesky(kernel, lower=True, check_finite=False)
        self._weights = linalg.cho_solve((self._factor, True), values, check_finite=False)
        self.variance = max(float(values @ self._weights) / len(values), 1e-6)

    def predict(self, points: Floats) -> Prediction:
        """Returns the function's mean at some points, and how uncertain it is."""
        stretched = points * self._stretch
        kernel = _matern(_squares(self._points, stretched))
        solved = linalg.solve_triangular(self._factor, kernel, lower=True, check_finite=False)
        return Prediction(stretched, kernel.T @ self._weights, solved, self.noise)

    def _adapt(self, points: Floats, values: Floats, steps: int) -> None:
        """Moves the length scales and the noise towards their most likely values."""
        parts = [points[:, self._groups == group] for group in range(self._count)]
        squares = np.array([_squares(part, part) for part in parts]).reshape(self._count, len(points), len(points))
        flat = squares.reshape(self._count, -1)
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
        covariance = _matern(_squares(self._points, self._points[index : index + 1]))[:, 0]
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


def _squares(a: Floats, b: Floats) -> Floats:
    """Returns the squared distances between the rows of two matrices."""
    squares = (-2 * a) @ b.T
    squares += (a * a).sum(1)[:, None]
    squares += (b * b).sum(1)
    return np.asarray(np.maximum(squares, 0, out=squares))
