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
_MOST_APART = 64
"""More numbers than this are told from each other by their size only: each is tried too seldom to be known itself."""


class Features:
    """Turns codes into points; each name has up to three groups of coordinates, which share a length scale each.

    Attributes:
        groups: the group of each coordinate.
        ordered: so many coordinates, the first, tell numbers by their size; the others tell each number by itself,
            because some are special to hardware or only name a choice.
    """

    def __init__(self, fields: Fields) -> None:
        """Looks at the values of all configs."""
        ordered = [(column, table) for column, values in enumerate(fields.values) for table in _tables(values)]
        self.ordered = sum(table.shape[1] for _, table in ordered)
        numbers = dict.fromkeys(column for column, table in ordered if table.shape[1] == 1)
        apart = [(column, fields.values[column]) for column in numbers if _are_apart(fields.values[column])]
        tables = [*ordered, *((column, _words(len(values))) for column, values in apart)]
        self._columns = [column for column, _ in tables]
        self._tables = [table for _, table in tables]
        self.groups = np.repeat(np.arange(len(tables)), [table.shape[1] for table in self._tables])

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
        return [_words(len(values))]
    ranks = np.argsort(np.argsort(numbers)) / (len(values) - 1)
    if (numbers > 0).all() and (numbers.max() >= 8 * numbers.min() or (np.log2(numbers) % 1 == 0).all()):
        numbers = np.log2(numbers)
    tables = [0.5 * _scaled(numbers) + 0.5 * ranks]
    halvings = np.array([_halvings(value) for value in values], np.float64)
    if len(values) > 4 and (numbers % 1 != 0).any() and np.ptp(halvings) > 0:
        # Among many whole numbers, those that powers of two divide are special to hardware.
        tables.append(_scaled(halvings))
    return [table[:, None] for table in tables]


def _are_apart(values: Sequence[ConfigValue]) -> bool:
    """Returns whether some of these numbers may be special, or name choices: powers of two are plain sizes."""
    return 2 < len(values) <= _MOST_APART and not all(value > 0 and math.log2(value) % 1 == 0 for value in values)


def _words(count: int) -> Floats:
    """Returns two ends of one axis, or the corners of a simplex with edges of length 1."""
    return np.array([[0.0], [1.0]]) if count == 2 else np.eye(count) * math.sqrt(0.5)


def _halvings(value: float) -> int:
    """Returns how often a whole number can be halved; 0 for any other."""
    return 0 if value == 0 or not float(value).is_integer() else (int(value) & -int(value)).bit_length() - 1


def _scaled(numbers: Floats) -> Floats:
    return np.asarray((numbers - numbers.min()) / np.ptp(numbers))
