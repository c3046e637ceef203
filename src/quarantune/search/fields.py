"""Configs as the models see them: a column for each number and word of a space, and points that keep sizes in order.

Values that hold several numbers or words, such as tuples and dataclasses, have a column for each.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quarantune.values.codec import field_names, is_number
from quarantune.values.configs import ConfigValue
from quarantune.values.space import Codes, Space, Values

Floats = NDArray[np.float64]

_LARGEST = 1e100
"""Largest number that counts as a number; larger ones count as words, because their differences may overflow."""
_MOST_APART = 64
"""Largest number of numeric values that also have one coordinate each. With more, a search tries each value too seldom
to learn about it, so only the size counts."""


class Fields:
    """Takes apart dataclasses, named tuples, tuples and dicts, so that searches see the parts that two of them share.

    Attributes:
        names: a name for each column, such as `config.tile_m` or `block[0]`.
        values: the different values in each column.
    """

    def __init__(self, space: Space) -> None:
        """Looks at all values of the space, and so runs a generator to its end."""
        space.whole()
        self._space = space
        columns = [_Column(name, values) for name, values in zip(space.names, space.values, strict=True)]
        self._columns = columns
        self.names: list[str] = [name for column in columns for name in column.names]
        self.values: list[list[ConfigValue]] = [values for column in columns for values in column.values]

    def codes(self, positions: Sequence[int]) -> Codes:
        """Returns the configs at some positions, a row for each, as the positions of their values in `values`."""
        codes = self._space.codes(positions)
        return np.concatenate([column.rows[codes[:, at]] for at, column in enumerate(self._columns)], axis=1)

    def positions_of(self, codes: Codes) -> list[int]:
        """Returns the positions of the codes that are configs of the space, including dropped configs."""
        parts = np.split(codes, np.cumsum([len(column.names) for column in self._columns])[:-1], axis=1)
        whole = np.stack([column.find(part) for column, part in zip(self._columns, parts, strict=True)], axis=1)
        return self._space.positions_of(whole[(whole >= 0).all(axis=1)])


def by_size(values: Sequence[ConfigValue]) -> list[int] | None:
    """Returns the positions of numbers in the order of their size; None if any value is a word or a flag."""
    if not all(map(is_number, values)):
        return None
    return sorted(range(len(values)), key=values.__getitem__)


class _Column:
    """The fields of one name's values."""

    def __init__(self, name: str, values: Sequence[ConfigValue]) -> None:
        parts = [dict(_parts(value, name)) for value in values]
        self.names = list(dict.fromkeys(part for found in parts for part in found))
        known = [Values() for _ in self.names]
        # A value that lacks a part, such as the second number of a shorter tuple, has None there.
        rows = [tuple(v.add(p.get(n)) for n, v in zip(self.names, known, strict=True)) for p in parts]
        self._codes = {row: code for code, row in enumerate(rows)}
        self.rows = np.array(rows, np.int64).reshape(len(rows), len(self.names))
        self.values = [each.listed for each in known]
        if self.names in ([], [name]) or len(self._codes) < len(rows):  # plain values, or two have the same parts
            self._codes = {}
            self.names, self.values, self.rows = [name], [list(values)], np.arange(len(values))[:, None]

    def find(self, rows: Codes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns the position of the value with each row of parts; -1 if there is none."""
        if not self._codes:
            return np.asarray(rows[:, 0])
        return np.array([self._codes.get(tuple(row), -1) for row in rows.tolist()], np.int64)


def _parts(value: ConfigValue, name: str) -> Iterator[tuple[str, ConfigValue]]:
    """Yields the numbers and words in a value, each with its name."""
    if isinstance(value, enum.Enum):
        yield name, value
    elif (fields := field_names(value)) is not None:
        for field in fields:
            yield from _parts(getattr(value, field), f"{name}.{field}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(item, f"{name}[{key!r}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _parts(item, f"{name}[{index}]")
    else:
        yield name, value


class Features:
    """Turns codes into points. Each name has up to three groups of coordinates; a group shares one length scale.

    Attributes:
        groups: the group of each coordinate.
        ordered: the number of leading coordinates for sizes and words. The others have one coordinate for each number,
            because some numbers are special to hardware or only name a choice.
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
    """Returns the coordinates of each value of a name, in one or two groups; no groups for a single value."""
    if len(values) == 1:
        return []
    is_moderate = by_size(values) is not None and all(abs(value) < _LARGEST for value in values)
    numbers = np.array(values if is_moderate else [0.0], np.float64)
    if np.ptp(numbers) == 0:  # words, or numbers that are too close to tell apart
        return [_words(len(values))]
    ranks = np.argsort(np.argsort(numbers)) / (len(values) - 1)
    if (numbers > 0).all() and (numbers.max() >= 8 * numbers.min() or (np.log2(numbers) % 1 == 0).all()):
        numbers = np.log2(numbers)
    tables = [0.5 * _scaled(numbers) + 0.5 * ranks]
    halvings = np.array([_halvings(value) for value in values], np.float64)
    if len(values) > 4 and (numbers % 1 != 0).any() and np.ptp(halvings) > 0:
        # Among many whole numbers, multiples of powers of two are special to hardware.
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
