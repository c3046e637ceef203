"""A space with a column for each number and word of its configs, also where a value holds several of them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from quarantune.values.config_values import field_names
from quarantune.values.space import Space
from quarantune.values.space_sources import Codes, Values
from quarantune.values.trial import ConfigValue


class Fields:
    """Takes apart dataclasses, named tuples, tuples and dicts, so that searches see what two of them have in common.

    Attributes:
        names: a name for each column, such as `config.tile_m` or `block[0]`.
        values: the different values in each column.
    """

    def __init__(self, space: Space) -> None:
        """Looks at all values of the space, so that a generator is run to its end."""
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
        """Returns the positions of those codes that are configs of the space, dropped ones included."""
        found = []
        start = 0
        for column in self._columns:
            found.append(column.find(codes[:, start : start + len(column.names)]))
            start += len(column.names)
        whole = np.stack(found, axis=1)
        return self._space.positions_of(whole[(whole >= 0).all(axis=1)])


def by_size(values: Sequence[ConfigValue]) -> list[int] | None:
    """Returns the positions of numbers in the order of their size; None where some value is a word or a flag."""
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
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
        if self.names in ([], [name]) or len(self._codes) < len(rows):  # plain values, or some would look the same
            self._codes = {}
            self.names, self.values, self.rows = [name], [list(values)], np.arange(len(values))[:, None]

    def find(self, rows: Codes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns the position of the value with each row of parts; -1 where there is none."""
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
