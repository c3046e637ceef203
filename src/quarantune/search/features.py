"""Configs as points: numbers keep their order and scale, words are equally far from each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quarantune.search.fields import Fields, by_size
from quarantune.values.space_sources import Codes
from quarantune.values.trial import ConfigValue

Floats = NDArray[np.float64]

_LARGEST = 1e100
"""Larger numbers count as words: their differences may overflow."""


class Features:
    """Turns codes into points; each name has one or two groups of coordinates, which share a length scale each."""

    def __init__(self, fields: Fields) -> None:
        """Looks at the values of all configs."""
        tables = [(column, table) for column, values in enumerate(fields.values) for table in _tables(values)]
        self._columns = [column for column, _ in tables]
        self._tables = [table for _, table in tables]
        self.groups = np.repeat(np.arange(len(tables)), [table.shape[1] for table in self._tables])
        """The group of each coordinate."""

    def points(self, codes: Codes) -> Floats:
        """Returns the points of configs, one row for each, with coordinates from 0 to 1."""
        parts = [table[codes[:, column]] for column, table in zip(self._columns, self._tables, strict=True)]
        return np.concatenate([np.zeros((len(codes), 0)), *parts], axis=1)


def _tables(values: Sequence[ConfigValue]) -> list[Floats]:
    """Returns the coordinates of each value of a name, in one or two groups; none where there is one value only."""
    if len(values) == 1:
        return []
    is_moderate = by_size(values) is not None and all(abs(value) < _LARGEST for value in values)
    numbers = np.array(values if is_moderate else [0.0], np.float64)
    if np.ptp(numbers) == 0:  # words, or numbers that are not far enough apart to be told from each other
        # Two words are two ends of one axis; more are the corners of a simplex with edges of length 1.
        words = np.array([[0.0], [1.0]]) if len(values) == 2 else np.eye(len(values)) * math.sqrt(0.5)
        return [words]
    ranks = np.argsort(np.argsort(numbers)) / (len(values) - 1)
    if (numbers > 0).all() and (numbers.max() >= 8 * numbers.min() or (np.log2(numbers) % 1 == 0).all()):
        numbers = np.log2(numbers)
    tables = [0.5 * _scaled(numbers) + 0.5 * ranks]
    halvings = np.array([_halvings(value) for value in values], np.float64)
    if len(values) > 4 and (numbers % 1 != 0).any() and np.ptp(halvings) > 0:
        # Among many whole numbers, those that powers of two divide are special to hardware.
        tables.append(_scaled(halvings))
    return [table[:, None] for table in tables]


def _halvings(value: float) -> int:
    """Returns how often a whole number can be halved; 0 for any other."""
    return 0 if value == 0 or not float(value).is_integer() else (int(value) & -int(value)).bit_length() - 1


def _scaled(numbers: Floats) -> Floats:
    return np.asarray((numbers - numbers.min()) / np.ptp(numbers))
