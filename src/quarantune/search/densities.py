"""Which values the best configs have more often than the others, for each name by itself.

This is the tree-structured Parzen estimator of Bergstra and others, "Algorithms for Hyper-Parameter Optimization"
(2011), for values that can be listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quarantune.search.features import Floats
from quarantune.search.fields import Fields, by_size
from quarantune.values.space_sources import Codes
from quarantune.values.trial import ConfigValue

_MOST_LEVELS = 64
"""More numbers than this share levels with their neighbours."""
_WIDTH = 0.5
"""How far a number's weight reaches, in levels; of more than eleven levels, a twentieth of all."""


class Densities:
    """Estimates how probable each value is among good and among other configs."""

    def __init__(self, fields: Fields) -> None:
        """Looks at the values of all configs."""
        self._columns = [_levels(values) for values in fields.values]

    def logs(self, known: Codes, good: NDArray[np.bool_], asked: Codes) -> tuple[Floats, Floats]:
        """Returns the logarithms of the density of some configs among the good ones, and of that among the others.

        Args:
            known: the configs that were tried.
            good: which of them are good.
            asked: the configs to estimate.
        """
        among_good, among_others = np.zeros(len(asked)), np.zeros(len(asked))
        for column, (levels, nearness) in enumerate(self._columns):
            seen, wanted, count = levels[known[:, column]], levels[asked[:, column]], int(levels.max()) + 1
            among_good += _log_density(seen[good], count, nearness)[wanted]
            among_others += _log_density(seen[~good], count, nearness)[wanted]
        return among_good, among_others


def _levels(values: Sequence[ConfigValue]) -> tuple[NDArray[np.int64], Floats | None]:
    """Returns the level of each value, and how near levels are: numbers by size; None for words, each by itself."""
    order = by_size(values)
    if order is None:
        return np.arange(len(values)), None
    count = min(len(values), _MOST_LEVELS)
    return np.argsort(order) * count // len(values), _nearness(count)


def _nearness(count: int) -> Floats:
    """Returns how much a config at one level says of each other level."""
    levels = np.arange(count)
    nearness = np.exp(-0.5 * ((levels[:, None] - levels) / max(_WIDTH, (count - 1) / 20)) ** 2)
    return np.asarray(nearness / nearness.sum(0))


def _log_density(seen: NDArray[np.int64], count: int, nearness: Floats | None) -> Floats:
    """Returns the density of each level, to which one config that may have any value is added."""
    weights = np.bincount(seen, minlength=count).astype(np.float64)
    density = (weights if nearness is None else nearness @ weights) + 1 / count
    return np.asarray(np.log(density / density.sum()))
