"""Where the configs of a space come from: computed from lists of values, or read from a list or a generator."""

from __future__ import annotations

import array
import inspect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quarantune.values import config_space
from quarantune.values.config_space import MOST_CONFIGS
from quarantune.values.config_values import originals, text_of
from quarantune.values.texts import shown
from quarantune.values.trial import ConfigValue

MOST_IN_GRID = 2**62
"""Positions in a grid are 64-bit integers."""
_FIRST = 301
"""A generator yields so many configs before the first is tried: their keys are those of all, and `auto` counts them."""

Codes = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""A row for each config and a column for each name: the position of its value among the name's values."""
_PLAIN = (int, str, bool, type(None))


class Values:
    """The different values of one name, in the order of their first use.

    Attributes:
        listed: the values.
        codes: their positions, by their `identity`.
    """

    def __init__(self, values: Iterable[ConfigValue] = ()) -> None:
        self.listed: list[ConfigValue] = []
        self.codes: dict[Any, int] = {}
        for value in values:
            self.add(value)

    def find(self, value: Any) -> int | None:
        """Returns the position of a value, which may be encoded as JSON; None where it is not known."""
        try:
            return self.codes.get(identity(value))
        except (TypeError, ValueError):  # a function's default may be anything
            return None

    def add(self, value: ConfigValue) -> int:
        """Returns the position of a value, which is added where it is not known."""
        code = self.codes.setdefault(identity(value), len(self.listed))
        if code == len(self.listed):
            self.listed.append(value)
        return code


def identity(value: Any) -> Any:
    """Returns a key that is the same for equal values only: as in a cache key, 1 and True differ, and 0.0 and -0.0."""
    kind = type(value)
    return (kind, value) if kind in _PLAIN or (kind is float and value) else text_of(value)


class Source(Protocol):
    """The configs of a space by their positions."""

    names: list[str]
    values: list[Values]

    def reach(self, count: int) -> int:
        """Makes sure that so many configs are known, if there are as many; returns how many are."""
        ...

    @property
    def size(self) -> int | None:
        """The number of configs; None until all are known."""
        ...

    def codes(self, positions: Sequence[int]) -> Codes:
        """Returns the configs at some positions as codes."""
        ...

    def find(self, codes: Codes) -> list[int | None]:
        """Returns the position of each config; None for one that is not known."""
        ...


class Grid:
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
        """Returns the number of configs."""
        return self.size

    def codes(self, positions: Sequence[int]) -> Codes:
        """Returns the configs at some positions as codes."""
        return np.asarray(positions, np.int64)[:, None] // self._strides % self._sizes

    def find(self, codes: Codes) -> list[int | None]:
        """Returns the position of each config."""
        return list((codes @ self._strides).tolist())


class Listed:
    """Configs that a list holds, or that a generator yields as they are needed; each counts once.

    They are kept as codes, and found by binary search: a million configs take less than 100 MB.

    Attributes:
        is_plain: whether a config that JSON alone cannot restore is refused from now on.
    """

    def __init__(self, configs: Iterable[Any], fn_name: str, parameters: inspect.Signature | None) -> None:
        self._fn_name = fn_name
        self._parameters = parameters
        self._rest: Any = iter(configs)
        first = list(itertools.islice(self._rest, _FIRST))
        keys = config_space.expand(first, fn_name=fn_name, parameters=parameters)[0]
        if isinstance(configs, (list, tuple)):  # of which any may have a key that those before it lack
            keys |= {key: value for config in _by_keys(configs) for key, value in config.items() if key not in keys}
        self._keys = keys
        self._classes: dict[str, type] = {}
        self.names = list(keys)
        self.values = [Values() for _ in self.names]
        self._rows = array.array("i")
        self._pulled = 0
        self.is_plain = False
        self._rest = itertools.chain(first, self._rest)
        self.reach(len(first) + (len(first) < _FIRST))

    @property
    def size(self) -> int | None:
        """The number of configs; None until all were read."""
        return self._count() if self._rest is None else None

    def reach(self, count: int) -> int:
        """Reads configs until so many are known, or there are no more; returns how many are known."""
        while self._rest is not None and (known := self._count()) < count:
            self._read(count - known)
            self._settle()
        return self._count()

    def codes(self, positions: Sequence[int]) -> Codes:
        """Returns the configs at some positions as codes."""
        return self._table()[np.asarray(positions, np.int64)].astype(np.int64)

    def find(self, codes: Codes) -> list[int | None]:
        """Returns the position of each config; None for one that was not read."""
        keys = self._keys_of(codes)
        places = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        found = self._order[places]
        is_known = (self._table()[found] == codes).all(1)
        pairs = zip(found.tolist(), is_known.tolist(), strict=True)
        return [position if known else None for position, known in pairs]

    def _count(self) -> int:
        return len(self._rows) // len(self.names)

    def _table(self) -> NDArray[np.int32]:
        return np.frombuffer(self._rows, np.int32).reshape(-1, len(self.names))

    def _read(self, most: int) -> None:
        """Takes up to so many configs; nearly all consist of values that are known already."""
        room = MOST_CONFIGS + 1 - self._pulled
        columns = [(name, values.codes) for name, values in zip(self.names, self.values, strict=True)]
        count = 0
        for raw in itertools.islice(self._rest, min(most, room)):
            try:
                row = [codes[(value := raw[name]).__class__, value] for name, codes in columns]
                if len(raw) != len(row):
                    row = self._checked(raw, self._pulled + count)
            except (KeyError, TypeError):
                row = self._checked(raw, self._pulled + count)
            self._rows.extend(row)
            count += 1
        self._pulled += count
        if self._pulled > MOST_CONFIGS:
            raise ValueError(
                f"{self._fn_name}: there are more than {MOST_CONFIGS:,} configs: a generator has to end, as with "
                "itertools.islice(..., 1000); or give a dict of lists, which needs no list of all configs."
            )
        if count < min(most, room):
            self._rest = self._parameters = None

    def _checked(self, raw: Any, index: int) -> list[int]:
        """Returns the codes of a config, which may hold anything."""
        config = config_space.extended(
            raw, index=index, keys=self._keys, fn_name=self._fn_name, parameters=self._parameters
        )
        config_space.check_classes([config], self._fn_name, self._classes)
        if self.is_plain and originals([config]):
            raise ValueError(
                f"{self._fn_name}: configs[{index}] holds an object, as the first {_FIRST} do not ({shown(config)}): "
                "yield a config with an object among these."
            )
        return [values.add(config[name]) for name, values in zip(self.names, self.values, strict=True)]

    def _settle(self) -> None:
        """Leaves out configs that are there already, and makes the others ready to be found."""
        sizes = [len(values.listed) for values in self.values]
        if math.prod(sizes) < 2**63:
            self._strides = np.array([math.prod(sizes[at + 1 :]) for at in range(len(sizes))], np.uint64)
        else:  # sums with odd numbers modulo 2**64 are the same for two of a million rows once in ten million spaces
            self._strides = np.random.default_rng(0).integers(2**63, size=len(sizes), dtype=np.uint64) * 2 + 1
        keys = self._keys_of(self._table())
        self._sorted, self._order = np.unique(keys, return_index=True)
        if len(self._sorted) < len(keys):
            kept = np.sort(self._order)
            self._rows = array.array("i", self._table()[kept].tobytes())
            self._sorted, self._order = np.unique(keys[kept], return_index=True)

    def _keys_of(self, codes: NDArray[Any]) -> NDArray[np.uint64]:
        """Returns a number for each row, different for different rows."""
        keys = np.zeros(len(codes), np.uint64)
        for column, stride in enumerate(self._strides):
            keys += codes[:, column].astype(np.uint64) * stride
        return keys


def _by_keys(configs: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Returns one config for each list of keys that some have."""
    return list({tuple(config): config for config in configs if isinstance(config, Mapping)}.values())
