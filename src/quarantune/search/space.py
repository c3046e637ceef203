"""A space of configs, known by their positions, of which no more is listed than is needed."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from quarantune.values import config_space
from quarantune.values.config_space import MOST_CONFIGS, Configs
from quarantune.values.config_values import text_of
from quarantune.values.trial import Config, ConfigValue

MOST_IN_GRID = 10**12
"""Positions in a grid are 64-bit integers, and a larger grid is surely a mistake."""
_FIRST = 301
"""A generator yields so many configs before the first is tried: their keys are those of all, and `auto` counts them."""

Codes = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""A row for each config and a column for each name: the position of its value among the name's values."""
_PLAIN = (int, str, bool, type(None))


class Values:
    """The different values of one name, in the order of their first use."""

    def __init__(self, values: Iterable[ConfigValue] = ()) -> None:
        self.listed: list[ConfigValue] = []
        self._codes: dict[Any, int] = {}
        for value in values:
            self.add(value)

    def find(self, value: ConfigValue) -> int | None:
        """Returns the position of a value; None where it is not known."""
        return self._codes.get(_identity(value))

    def add(self, value: ConfigValue) -> int:
        """Returns the position of a value, which is added where it is not known."""
        code = self._codes.setdefault(_identity(value), len(self.listed))
        if code == len(self.listed):
            self.listed.append(value)
        return code


class _Source(Protocol):
    """The configs of a space by their positions."""

    names: list[str]
    values: list[Values]

    def reach(self, count: int) -> int:
        """Makes sure that so many configs are known, if there are as many; returns how many are."""
        ...

    @property
    def size(self) -> int | None: ...

    def codes(self, positions: Sequence[int]) -> Codes: ...

    def find(self, codes: Codes) -> list[int | None]: ...


class _Grid:
    """All combinations of lists of values, the last name varying fastest; positions and values are computed."""

    def __init__(self, lists: Mapping[str, Iterable[Any]], fn_name: str) -> None:
        axes = config_space.axes(lists, fn_name=fn_name)
        self.names = list(axes)
        self.values = [Values(values) for values in axes.values()]
        sizes = [len(values) for values in axes.values()]
        self.size: int = math.prod(sizes)
        if self.size > MOST_IN_GRID:
            raise ValueError(
                f"{fn_name}: configs is a grid of {self.size:,} configs, more than {MOST_IN_GRID:,}; leave out values."
            )
        self._sizes = np.array(sizes, np.int64)
        self._strides = np.array([math.prod(sizes[at + 1 :]) for at in range(len(sizes))], np.int64)

    def reach(self, count: int) -> int:
        return self.size

    def codes(self, positions: Sequence[int]) -> Codes:
        return np.asarray(positions, np.int64)[:, None] // self._strides % self._sizes

    def find(self, codes: Codes) -> list[int | None]:
        return list((codes @ self._strides).tolist())


class _Listed:
    """Configs that a list holds, or that a generator yields as they are needed; each counts once."""

    def __init__(self, configs: Iterable[Any], fn_name: str, parameters: inspect.Signature | None) -> None:
        self._fn_name = fn_name
        self._parameters = parameters
        self._rows: dict[tuple[int, ...], int] = {}
        self._rest = None if isinstance(configs, (list, tuple)) else iter(configs)
        first = configs if self._rest is None else list(itertools.islice(self._rest, _FIRST))
        known = config_space.expand(first, fn_name=fn_name, parameters=parameters)
        self._pulled = len(known)
        self._example = known[0]
        self.names = list(known[0])
        self.values = [Values() for _ in self.names]
        for config in known:
            self._add(config)
        self._listed = list(self._rows)

    @property
    def size(self) -> int | None:
        return len(self._listed) if self._rest is None else None

    def reach(self, count: int) -> int:
        while self._rest is not None and len(self._listed) < count:
            if self._pulled == MOST_CONFIGS:
                raise ValueError(
                    f"{self._fn_name}: the generator of configs has yielded {MOST_CONFIGS:,} and not ended: end it, as "
                    "with itertools.islice(..., 1000), or give a dict of lists, which needs no list of all configs."
                )
            try:
                raw = next(self._rest)
            except StopIteration:
                self._rest = None
                break
            config = config_space.extended(
                raw, index=self._pulled, keys=self._example, fn_name=self._fn_name, parameters=self._parameters
            )
            self._pulled += 1
            self._add(config)
            if len(self._rows) > len(self._listed):
                self._listed.append(next(reversed(self._rows)))
        return len(self._listed)

    def codes(self, positions: Sequence[int]) -> Codes:
        rows = [self._listed[position] for position in positions]
        return np.array(rows, np.int64).reshape(len(rows), len(self.names))

    def find(self, codes: Codes) -> list[int | None]:
        return [self._rows.get(tuple(row)) for row in codes.tolist()]

    def _add(self, config: Config) -> None:
        row = tuple(values.add(config[name]) for name, values in zip(self.names, self.values, strict=True))
        self._rows.setdefault(row, len(self._rows))


class Space:
    """The configs of one search by position, in the user's order.

    A list is held as it is, a grid (a dict of lists) is computed position by position, and a generator is run only as
    far as configs are needed. The predicate that drops configs is applied to those that are looked at.
    """

    def __init__(
        self,
        configs: Configs,
        *,
        fn_name: str = "search",
        parameters: inspect.Signature | None = None,
        keep: Callable[[Config], bool] | None = None,
    ) -> None:
        """Checks the configs, of a generator the first few hundred.

        Args:
            configs: dicts, or one dict of lists that stands for its full grid.
            fn_name: the function being tuned, for error messages.
            parameters: the signature of the function being tuned, whose defaults stand for the keys that a config
                lacks; None where every config must have all keys.
            keep: False for a config that is not to be tried; None keeps all.

        Raises:
            TypeError: the configs are not of these forms, or hold something that is no config value.
            ValueError: there are none, far too many, or their keys differ.
        """
        if isinstance(configs, Mapping):
            self._source: _Source = _Grid(configs, fn_name)
        elif isinstance(configs, (str, bytes)) or not isinstance(configs, Iterable):
            config_space.expand(configs, fn_name=fn_name)  # raises
            raise AssertionError
        else:
            self._source = _Listed(configs, fn_name, parameters)
        self._keep = keep
        self._kept: dict[int, bool] = {}

    def where(self, keep: Callable[[Config], bool] | None) -> Space:
        """Returns the same space with another predicate; what a generator has yielded is known to both."""
        space = object.__new__(Space)
        space._source, space._keep, space._kept = self._source, keep, {}
        return space

    @property
    def names(self) -> list[str]:
        """The names of the tunables."""
        return self._source.names

    @property
    def values(self) -> list[list[ConfigValue]]:
        """The different values of each name, as far as the configs are known."""
        return [values.listed for values in self._source.values]

    @property
    def size(self) -> int | None:
        """The number of configs, dropped ones included; None for a generator that has not ended yet."""
        return self._source.size

    @property
    def dropped(self) -> int:
        """The number of configs that the predicate has dropped so far."""
        return sum(not kept for kept in self._kept.values())

    def whole(self) -> int:
        """Returns the number of configs, dropped ones included, after a generator has been run to its end.

        Raises:
            ValueError: the generator does not end.
        """
        return self._source.reach(MOST_CONFIGS + 1)

    def has_more_than(self, count: int) -> bool:
        """Returns whether more than so many configs are kept, looking at no more of them than necessary."""
        return next(itertools.islice(self.positions(), count, None), None) is not None

    def positions(self) -> Iterator[int]:
        """Yields the positions of the configs that are kept, in order."""
        position = 0
        while position < self._source.reach(position + 1):
            if self.keeps(position):
                yield position
            position += 1

    def __iter__(self) -> Iterator[Config]:
        """Yields the configs that are kept, in order."""
        return map(self.__getitem__, self.positions())

    def __getitem__(self, position: int) -> Config:
        """Returns the config at a position."""
        if not 0 <= position < self._source.reach(position + 1):
            raise IndexError(f"there is no config {position} in this space")
        row = self._source.codes([position])[0].tolist()
        return {
            name: values.listed[code] for name, values, code in zip(self.names, self._source.values, row, strict=True)
        }

    def keeps(self, position: int) -> bool:
        """Returns whether a config is kept; the predicate is asked once for each."""
        if self._keep is None:
            return True
        if position not in self._kept:
            self._kept[position] = bool(self._keep(self[position]))
        return self._kept[position]

    def find(self, config: Config) -> int | None:
        """Returns the position of a config, dropped or not; None where it is not in the space as far as known."""
        if config.keys() != set(self.names):
            return None
        row = [values.find(config[name]) for name, values in zip(self.names, self._source.values, strict=True)]
        if None in row:
            return None
        return self._source.find(np.array([row], np.int64))[0]

    def codes(self, positions: Sequence[int]) -> Codes:
        """Returns the configs at some positions as codes."""
        return self._source.codes(positions)

    def positions_of(self, codes: Codes) -> list[int]:
        """Returns the positions of those codes that are configs of the space, dropped ones included."""
        return [position for position in self._source.find(codes) if position is not None]


def _identity(value: ConfigValue) -> Any:
    """Returns a key that is the same for equal values only: as in a cache key, 1 and True differ, and 0.0 and -0.0."""
    return (type(value), value) if type(value) in _PLAIN else text_of(value)
