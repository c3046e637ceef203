"""Predicts which configs fail, from those that failed: resources run out beyond smooth boundaries."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

from quarantune.search.features import Floats

_PENALTY = 0.05
_STEPS = 8
_MOST_FOR_PRODUCTS = 16
"""With more coordinates than this, their products are left out: they would take too long."""


class SuccessModel:
    """Logistic regression on the coordinates and their products, fitted by Newton's method with a ridge penalty.

    Shared memory and registers are products of a config's values, and so sums of their logarithms: a quadratic form of
    the coordinates follows such a limit, where a Gaussian process needs many points along it.
    """

    def __init__(self, points: Floats, works: NDArray[np.bool_]) -> None:
        """Learns from the configs that were tried.

        Args:
            points: their coordinates, one row for each.
            works: whether each of them could be measured.
        """
        terms = _terms(points)
        penalty = np.full(terms.shape[1], _PENALTY)
        self._weights = np.zeros(terms.shape[1])
        for _ in range(_STEPS):
            expected = special.expit(terms @ self._weights)
            slope = terms.T @ (expected - works) + penalty * self._weights
            curvature = (terms * (expected * (1 - expected))[:, None]).T @ terms + np.diag(penalty)
            self._weights = self._weights - np.linalg.solve(curvature, slope)

    def probability(self, points: Floats) -> Floats:
        """Returns with which probability configs work."""
        return np.asarray(special.expit(_terms(points) @ self._weights))


def _terms(points: Floats) -> Floats:
    columns = [np.ones((len(points), 1)), points]
    if points.shape[1] <= _MOST_FOR_PRODUCTS:
        first, second = np.triu_indices(points.shape[1])
        columns.append(points[:, first] * points[:, second])
    return np.concatenate(columns, axis=1)
