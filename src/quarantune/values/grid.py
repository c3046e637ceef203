"""A large grid of configs, of which none is kept: each is computed when it is looked at."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from quarantune.values import config_space
from quarantune.values.config_values import text_of
from quarantune.values.trial import Config, ConfigValue

_LARGE = 1000
"""Smaller grids are lists: a hundred thousand dicts take 80 MB, and a second to make and to check."""


class Grid(Sequence[Config]):
    """All combinations of lists of values, the last name varying fastest.

    Attributes:
        axes: the values of each name, each once.
    """

    def __init__(self, axes: Mapping[str, Sequence[ConfigValue]]) -> None:
        """Takes checked values, as `config_space.axes` returns them."""
        self.axes = {name: list(values) for name, values in axes.items()}
        self._size = math.prod(map(len, self.axes.values()))
        self._texts = {name: [text_of(value) for value in values] for name, values in self.axes.items()}

    def __len__(self) -> int:
        """Returns the number of configs."""
        return self._size

    @overload
    def __getitem__(self, index: int) -> Config: ...
    @overload
    def __getitem__(self, index: slice) -> list[Config]: ...
    def __getitem__(self, index: int | slice) -> Config | list[Config]:
        """Returns the config at an index, or those of a slice."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._size))]
        rest = index + self._size if index < 0 else index
        if not 0 <= rest < self._size:
            raise IndexError(f"there is no config {index} in a grid of {self._size}")
        values: dict[str, ConfigValue] = {}
        for name in reversed(self.axes):
            rest, at = divmod(rest, len(self.axes[name]))
            values[name] = self.axes[name][at]
        return {name: values[name] for name in self.axes}

    def __iter__(self) -> Iterator[Config]:
        """Yields the configs in order."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def texts(self) -> Iterator[str]:
        """Yields the text of each config, as `text_of` returns it, in no particular order."""
        parts = [[f"{json.dumps(name)}:{text}" for text in self._texts[name]] for name in sorted(self.axes)]
        return ("{" + ",".join(pairs) + "}" for pairs in itertools.product(*parts))

    def index_of(self, config: Mapping[str, Any]) -> int | None:
        """Returns the index of a config, which may be encoded; None where it is not in the grid."""
        if config.keys() != self.axes.keys():
            return None
        index = 0
        for name, texts in self._texts.items():
            try:
                text = text_of(config[name])
            except (TypeError, ValueError):  # a default may be anything
                return None
            if text not in texts:
                return None
            index = index * len(texts) + texts.index(text)
        return index

    def examples(self) -> list[Config]:
        """Returns a few configs in which every value occurs."""
        first = self[0]
        return [first | {name: value} for name, values in self.axes.items() for value in values]


def expand(configs: Any, *, fn_name: str, parameters: inspect.Signature | None) -> Sequence[Config]:
    """Returns the configs as `config_space.expand` does, those of a large grid as a `Grid`.

    Raises:
        TypeError: the configs are not of these forms, or hold something that is no config value.
        ValueError: there are none, far too many, or their keys differ.
    """
    if isinstance(configs, Grid):
        return configs
    if isinstance(configs, Mapping) and configs:
        axes = config_space.axes(configs, fn_name=fn_name)
        size = math.prod(map(len, axes.values()))
        if _LARGE < size <= config_space.MOST_CONFIGS:
            return Grid(axes)
    return config_space.expand(configs, fn_name=fn_name, parameters=parameters)


def texts(configs: Sequence[Config]) -> Iterable[str]:
    """Returns the text of each config, in no particular order."""
    return configs.texts() if isinstance(configs, Grid) else map(text_of, configs)


def examples(configs: Sequence[Config]) -> Sequence[Config]:
    """Returns configs in which every value of these occurs."""
    return configs.examples() if isinstance(configs, Grid) else configs


class Positions:
    """Finds configs by their texts."""

    def __init__(self, configs: Sequence[Config]) -> None:
        """Reads a list once; a `Grid` needs no reading."""
        self._grid = configs if isinstance(configs, Grid) else None
        self._by_text = {} if self._grid else {text_of(config): index for index, config in enumerate(configs)}

    def of_text(self, text: str) -> int | None:
        """Returns the index of the config with a text; None where there is none."""
        return self._by_text.get(text) if self._grid is None else self._of_json(text)

    def of(self, config: Mapping[str, Any]) -> int | None:
        """Returns the index of a config, which may be encoded; None where there is none like it."""
        return self._by_text.get(text_of(config)) if self._grid is None else self._grid.index_of(config)

    def _of_json(self, text: str) -> int | None:
        try:
            config = json.loads(text)
        except ValueError:
            return None
        return self.of(config) if isinstance(config, dict) else None
