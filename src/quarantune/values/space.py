"""A space of configs by position, which computes or reads configs only when somebody needs them."""

from __future__ import annotations

import array
import contextlib
import functools
import inspect
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from quarantune.values.codec import decode_json, originals, text_of
from quarantune.values.configs import (
    MOST_CONFIGS,
    Config,
    Configs,
    ConfigValue,
    check_classes,
    checked_config,
    checked_values,
    nothing_to_choose,
)
from quarantune.values.texts import shown

_ENUMERATED = 1000
"""Grid size above which the lists of values, not their combinations, distinguish one grid from others."""
_MOST_COUNTED = 100_000
"""Most configs to ask about when finding out whether the predicate keeps more than a few."""
_MOST_REMEMBERED = 200_000
"""Most answers of the predicate to remember for a huge grid."""


def grid(**lists: Iterable[Any]) -> list[Config]:
    """Returns every combination of the given values, the last name varying fastest.

    Args:
        **lists: the values of each tunable.

    Raises:
        TypeError: an argument is not a list of config values.
        ValueError: `lists` is empty, or a tunable has no values.

    Example:
        >>> grid(BM=[16, 32], fast=[True])
        [{'BM': 16, 'fast': True}, {'BM': 32, 'fast': True}]
    """
    return expand(lists, fn_name="grid")


def expand(configs: Configs, *, fn_name: str, parameters: inspect.Signature | None = None) -> list[Config]:
    """Returns the configs as a checked list: each once, in order, made of hashable values.

    Args:
        configs: the configs, in a form that `Space` accepts. `Space` also documents the exceptions.
        fn_name: the function being tuned.
        parameters: its signature; None if every config must have all keys.
    """
    space = Space(configs, fn_name=fn_name, parameters=parameters)
    return [space.config_of(row) for row in space.codes(space.listed()).tolist()]


class Space(Sequence[Config]):
    """The configs of one function by position, in the user's order, each once.

    The space stores a list, computes a grid (a dict of lists) position by position, and runs a generator only as far as
    somebody needs configs. It asks the predicate that drops configs once for each config that somebody looks at.
    """

    def __init__(
        self,
        configs: Configs,
        *,
        fn_name: str = "search",
        parameters: inspect.Signature | None = None,
        reads_all: bool = True,
    ) -> None:
        """Checks the configs; only the first few hundred configs of a generator.

        Args:
            configs: dicts, or one dict of lists that stands for its full grid.
            fn_name: the function being tuned, for error messages.
            parameters: the signature of the function being tuned. Its defaults replace the keys that a config lacks.
                None if every config must have all keys.
            reads_all: whether to read a list to its end at once; otherwise it is read like a generator.

        Raises:
            TypeError: the configs have another form, or hold something other than a config value.
            ValueError: there are no configs or far too many, or their keys differ.
        """
        if isinstance(configs, Mapping):
            self._source: Grid | Listed = Grid(configs, fn_name)
        elif isinstance(configs, (str, bytes)) or not isinstance(configs, Iterable):
            raise TypeError(
                f"{fn_name}: configs is {configs!r}; give a list of dicts such as [{{'BM': 32}}, {{'BM': 64}}], "
                "a dict of lists such as {'BM': [32, 64]}, or a function that returns one of them."
            )
        else:
            self._source = Listed(configs, fn_name, parameters)
        self._fn_name = fn_name
        self._keep: Callable[[Config], bool] | None = None
        self._kept: dict[int, bool] = {}
        self.dropped = 0
        if reads_all and isinstance(configs, (list, tuple)):
            self.whole()

    @classmethod
    def of(cls, configs: Any, *, fn_name: str, parameters: inspect.Signature | None) -> Space:
        """Returns a space of configs and checks all of them; returns a space unchanged."""
        if isinstance(configs, Space):
            return configs
        space = cls(configs, fn_name=fn_name, parameters=parameters)
        space.whole()
        return space

    def where(self, keep: Callable[[Config], bool] | None) -> Space:
        """Returns the same space with another predicate. Both share the configs that a generator has yielded.

        Args:
            keep: returns False for a config to drop; None keeps all.
        """
        space = object.__new__(Space)
        space._source, space._keep, space._kept, space.dropped = self._source, keep, {}, 0
        space._fn_name = self._fn_name
        return space

    def __reduce__(self) -> Any:
        """Pickles as the lists of a grid, or as a list of configs; without the predicate."""
        lists = dict(zip(self.names, self.values, strict=True))
        return functools.partial(Space, fn_name=self._fn_name), (lists if self.is_grid else list(self),)

    @property
    def names(self) -> list[str]:
        """The names of the tunables."""
        return self._source.names

    @property
    def values(self) -> list[list[ConfigValue]]:
        """The different values of each name in the configs known so far."""
        return [values.listed for values in self._source.values]

    @property
    def size(self) -> int | None:
        """The number of configs, including dropped ones; None for a generator that has not ended yet."""
        return self._source.size

    @property
    def is_grid(self) -> bool:
        """Whether all combinations of the values are configs."""
        return isinstance(self._source, Grid)

    def reach(self, count: int) -> int:
        """Reads configs until `count` are known or none are left; returns how many are known."""
        return self._source.reach(count)

    def whole(self) -> int:
        """Runs a generator to its end, and returns the number of configs, including dropped ones.

        Raises:
            ValueError: the generator does not end.
        """
        return self._source.reach(MOST_CONFIGS + 1)

    def has_more_than(self, count: int, *, besides: Collection[int] = ()) -> bool:
        """Returns whether the space keeps more than `count` configs, looking at no more of them than necessary.

        It asks about a limited number of configs. If that does not decide it, as in a huge grid whose predicate drops
        nearly everything, the space counts as larger.

        Args:
            count: the number.
            besides: configs that do not count.
        """
        for at in range(_MOST_COUNTED):
            if at >= self.reach(at + 1):
                return False
            if at not in besides and self.keeps(at):
                count -= 1
            if count < 0:
                return True
        return self.reach(_MOST_COUNTED + 1) > _MOST_COUNTED

    def positions(self) -> Iterator[int]:
        """Yields the positions of the kept configs, in order."""
        for position in itertools.count():
            if position >= self._source.reach(position + 1):
                return
            if self.keeps(position):
                yield position

    def listed(self) -> range:
        """Returns the positions of all configs, for callers that visit each.

        Raises:
            ValueError: there are too many configs to visit.
        """
        if self.whole() > MOST_CONFIGS:
            raise ValueError(
                f"{self._fn_name}: configs is a grid of {len(self):,} configs; at most {MOST_CONFIGS:,} are all "
                "tried: let a search choose, as with search='surrogate', or set max_trials; or leave out values."
            )
        return range(len(self))

    def __len__(self) -> int:
        """Returns the number of configs, including dropped ones."""
        return self.whole()

    @overload
    def __getitem__(self, position: int) -> Config: ...
    @overload
    def __getitem__(self, position: slice) -> list[Config]: ...
    def __getitem__(self, position: int | slice) -> Config | list[Config]:
        """Returns the config at a position, or the configs of a slice."""
        if isinstance(position, slice):
            return [self[at] for at in range(*position.indices(len(self)))]
        position += len(self) if position < 0 else 0
        if not 0 <= position < self._source.reach(position + 1):
            raise IndexError(f"there is no config {position} in this space")
        return self.config_of(self._source.codes([position])[0].tolist())

    def config_of(self, row: Sequence[int]) -> Config:
        """Returns the config with the given codes, one for each name."""
        columns = zip(self.names, self._source.values, row, strict=True)
        return {name: values.listed[code] for name, values, code in columns}

    def keeps(self, position: int) -> bool:
        """Returns whether the predicate keeps a config; it is asked once for each."""
        return self._keep is None or self._answer(position, self[position])

    def blamed(self, position: int) -> list[str]:
        """Returns the names that the predicate reads before it drops a config, in order; empty if it keeps it."""
        config = WatchedConfig(self[position])
        return [] if self._keep is None or self._answer(position, config) else config.looked_at or self.names

    def find(self, config: Any) -> int | None:
        """Returns the position of a config, dropped or not; None if it is not among the configs known so far.

        Args:
            config: a config, also one encoded as JSON. Any other value is not found.
        """
        if not isinstance(config, Mapping) or config.keys() != set(self.names):
            return None
        row = [values.find(config[name]) for name, values in zip(self.names, self._source.values, strict=True)]
        return None if None in row else self._source.find(np.array([row], np.int64))[0]

    def completed(self, config: Config) -> Config:
        """Returns a config with the function's defaults for names that it lacks, as the configs of a list may."""
        parameters = self._source.parameters
        if parameters is None or not config.keys() < set(self.names):
            return config
        with contextlib.suppress(TypeError, ValueError):  # a name without a default: no config lacks it
            return checked_config(config, fn_name=self._fn_name, names=self.names, parameters=parameters)
        return config

    def find_text(self, text: str) -> int | None:
        """Returns the position of the config with this `text_of`; None if the space lacks it."""
        self.whole()
        try:
            return self.find(decode_json(text))
        except ValueError:
            return None

    def codes(self, positions: Sequence[int]) -> Codes:
        """Returns the codes of the configs at some positions."""
        return self._source.codes(positions)

    def positions_of(self, codes: Codes) -> list[int]:
        """Returns the positions of codes, leaving out codes that are not configs of the space."""
        return [position for position in self._source.find(codes) if position is not None]

    def examples(self) -> list[Config]:
        """Returns a few configs that contain every value; some of them may not be in the space."""
        first, columns = self[0], zip(self.names, self.values, strict=True)
        examples = [first | {name: value} for name, values in columns for value in values]
        if isinstance(self._source, Listed) and self.size is None:
            self._source.is_plain = not originals(examples)
            if not self._source.is_plain:  # later configs may hold other objects, and workers need all of them
                self.whole()
                return self.examples()
        return examples

    def texts(self) -> Iterable[str]:
        """Returns texts that distinguish this space from others, in no particular order.

        They are the `text_of` of each config or, for a large grid, the texts of each name's values.
        """
        texts = {name: list(map(text_of, values)) for name, values in zip(self.names, self.values, strict=True)}
        if self.is_grid and len(self) > _ENUMERATED:
            return [f"{name}: {','.join(sorted(each))}" for name, each in texts.items()]
        ordered = sorted(self.names)
        parts = [[f"{json.dumps(name)}:{text}" for text in texts[name]] for name in ordered]
        rows = self.codes(range(len(self)))[:, [self.names.index(name) for name in ordered]].tolist()
        return ("{" + ",".join(part[code] for part, code in zip(parts, row, strict=True)) + "}" for row in rows)

    def _answer(self, position: int, config: Config) -> bool:
        """Returns the predicate's answer, and asks for it if it is unknown."""
        if (kept := self._kept.get(position)) is None:
            assert self._keep is not None
            kept = bool(self._keep(config))
            if len(self._kept) < _MOST_REMEMBERED or (self.size or 0) <= MOST_CONFIGS:
                self._kept[position] = kept
                self.dropped += not kept
        return kept


class WatchedConfig(dict[str, Any]):
    """A dict that notes which values are read. It does not notice C code that reads the dict directly.

    Attributes:
        looked_at: the keys whose values were read, in the order of the first reads.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Copies a config; no value counts as read."""
        super().__init__(config)
        self.looked_at: list[str] = []

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value, as `dict.get` does."""
        self._note(key)
        return super().get(key, default)

    def __iter__(self) -> Any:
        """Iterates over the keys. This override makes `dict(config)` and `f(**config)` read the values one by one."""
        return super().__iter__()

    def _note(self, key: str) -> None:
        if key in self and key not in self.looked_at:
            self.looked_at.append(key)


def _noting_all(name: str) -> Any:
    method = getattr(dict, name)

    def noting(self: WatchedConfig, *args: Any) -> Any:
        self.looked_at += [key for key in self.keys() if key not in self.looked_at]
        return method(self, *args)

    return noting


for _name in ("items", "values", "copy", "pop", "popitem", "__eq__", "__ne__", "__or__", "__ror__", "__repr__"):
    setattr(WatchedConfig, _name, _noting_all(_name))


_MOST_IN_GRID = 2**62
"""Largest size of a grid: positions are 64-bit integers."""
_FIRST = 301
"""Configs to read from a generator before the first trial: they fix the keys of all, and `auto` counts them."""

Codes = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""A row for each config and a column for each name: the position of the config's value among the name's values."""
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
        """Returns the position of a value, also one encoded as JSON; None if it is unknown."""
        try:
            return self.codes.get(identity(value))
        except (TypeError, ValueError):  # a function's default may be anything
            return None

    def add(self, value: ConfigValue) -> int:
        """Returns the position of a value, and adds an unknown value."""
        code = self.codes.setdefault(identity(value), len(self.listed))
        if code == len(self.listed):
            self.listed.append(value)
        return code


def identity(value: Any) -> Any:
    """Returns a key that only equal values share. Like a cache key, it differs for 1 and True, and for 0.0 and -0.0."""
    kind = type(value)
    return (kind, value) if kind in _PLAIN or (kind is float and value) else text_of(value)


class Grid:
    """All combinations of lists of values, the last name varying fastest. It computes configs and positions."""

    parameters: inspect.Signature | None = None
    """None: no config of a grid lacks a name."""

    def __init__(self, lists: Mapping[str, Iterable[Any]], fn_name: str) -> None:
        if not lists:
            raise nothing_to_choose(fn_name, "the configs have no keys")
        self.names = list(lists)
        self.values = [Values(checked_values(*each, fn_name=fn_name)) for each in lists.items()]
        check_classes((value for values in self.values for value in values.listed), fn_name, {})
        sizes = [len(values.listed) for values in self.values]
        self.size: int = math.prod(sizes)
        if self.size > _MOST_IN_GRID:
            raise ValueError(
                f"{fn_name}: configs is a grid of {self.size:,} configs, more than {_MOST_IN_GRID:,}; leave out values."
            )
        self._sizes = np.array(sizes, np.int64)
        self._strides = np.array([math.prod(sizes[at + 1 :]) for at in range(len(sizes))], np.int64)
        """Distance in positions between neighbouring values of each name."""

    def reach(self, count: int) -> int:
        """Returns the number of configs; a grid knows all of them."""
        return self.size

    def codes(self, positions: Sequence[int]) -> Codes:
        """Returns the codes of the configs at some positions."""
        return np.asarray(positions, np.int64)[:, None] // self._strides % self._sizes

    def find(self, codes: Codes) -> list[int | None]:
        """Returns the position of each config, as `Listed` does."""
        return list((codes @ self._strides).tolist())


class Listed:
    """The different configs of a list, or of a generator, which it reads when somebody needs configs.

    It stores them as codes: a million configs take about 150 MB.

    Attributes:
        is_plain: whether to refuse further configs that JSON alone cannot restore.
        parameters: the signature whose defaults replace the names that a config lacks; None if every config has all.
    """

    def __init__(self, configs: Iterable[Any], fn_name: str, parameters: inspect.Signature | None) -> None:
        self._fn_name = fn_name
        self.parameters = parameters
        self._rest: Any = iter(configs)
        first = list(itertools.islice(self._rest, _FIRST))
        # Any config of a list may have a key that earlier ones lack.
        known = configs if isinstance(configs, (list, tuple)) else first
        self.names = list(dict.fromkeys(key for config in known if isinstance(config, Mapping) for key in config))
        if not self.names:
            for raw in first:
                checked_config(raw, fn_name=fn_name)
            raise nothing_to_choose(fn_name, "the configs have no keys" if first else "configs is empty")
        self._classes: dict[str, type] = {}
        self.values = [Values() for _ in self.names]
        self._rows = array.array("i")
        self._positions: dict[bytes, int] = {}
        self._pulled = 0
        self.is_plain = False
        self._rest = itertools.chain(first, self._rest)
        self.reach(len(first) + (len(first) < _FIRST))

    @property
    def size(self) -> int | None:
        """The number of configs; None until all are read."""
        return len(self._positions) if self._rest is None else None

    def reach(self, count: int) -> int:
        """Reads configs until `count` are known or none are left; returns how many are known."""
        while self._rest is not None and len(self._positions) < count:
            self._read(count - len(self._positions))
        return len(self._positions)

    def codes(self, positions: Sequence[int]) -> Codes:
        """Returns the codes of the configs at some positions."""
        table = np.frombuffer(self._rows, np.int32).reshape(-1, len(self.names))
        return table[np.asarray(positions, np.int64)].astype(np.int64)

    def find(self, codes: Codes) -> list[int | None]:
        """Returns the position of each config; None if it was not read."""
        return [self._positions.get(row.tobytes()) for row in np.asarray(codes, np.int32)]

    def _read(self, most: int) -> None:
        """Takes up to `most` configs. Nearly all consist of known values, so a fast path looks these up."""
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
            packed = array.array("i", row)
            if (key := packed.tobytes()) not in self._positions:
                self._positions[key] = len(self._positions)
                self._rows += packed
            count += 1
        self._pulled += count
        if self._pulled > MOST_CONFIGS:
            raise ValueError(
                f"{self._fn_name}: there are more than {MOST_CONFIGS:,} configs: a generator has to end, for example "
                "by itertools.islice(..., 1000); or give a dict of lists, which needs no list of all configs."
            )
        if count < min(most, room):
            self._rest = None

    def _checked(self, raw: Any, index: int) -> list[int]:
        """Checks a config, which may hold anything, and returns its codes."""
        config = checked_config(raw, fn_name=self._fn_name, index=index, names=self.names, parameters=self.parameters)
        check_classes(config.values(), self._fn_name, self._classes)
        if self.is_plain and originals([config]):
            raise ValueError(
                f"{self._fn_name}: configs[{index}] holds an object, but none of the first {_FIRST} does "
                f"({shown(config)}): yield a config with an object among these."
            )
        return [values.add(config[name]) for name, values in zip(self.names, self.values, strict=True)]
