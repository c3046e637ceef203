"""Config spaces as plain values: expanded, normalised and checked against the function they tune."""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from quarantune.outcomes import Config, ConfigValue

Configs: TypeAlias = "Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]]"


_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def grid(**lists: Iterable[Any]) -> list[Config]:
    """Returns every combination of the given values, the last name varying fastest.

    Args:
        **lists: the values of each tunable.

    Raises:
        TypeError: something is no list of config values.
        ValueError: there is no name, or a name without values.

    Example:
        >>> grid(BM=[16, 32], fast=[True])
        [{'BM': 16, 'fast': True}, {'BM': 32, 'fast': True}]
    """
    return expand(lists, fn_name="grid")


def expand(configs: Configs, *, fn_name: str, keep_repeated: bool = False) -> list[Config]:
    """Returns the configs as a checked list: each once, in order, made of plain hashable Python values.

    Args:
        configs: dicts, or one dict of lists that stands for its full grid.
        fn_name: the function being tuned, for error messages.
        keep_repeated: whether a config is there as often as it was given.

    Raises:
        TypeError: the configs are not of these forms, or hold a value JSON cannot.
        ValueError: there are none, or their keys differ.
    """
    if isinstance(configs, Mapping):
        configs = _combinations(configs, fn_name)
    if isinstance(configs, (str, bytes)) or not isinstance(configs, Iterable):
        raise TypeError(
            f"{fn_name}: configs is {configs!r}; give a list of dicts such as [{{'BM': 32}}, {{'BM': 64}}], "
            "a dict of lists such as {'BM': [32, 64]}, or a function that returns one of them."
        )
    checked = _validate(configs, fn_name=fn_name)
    return checked if keep_repeated else distinct(checked)


def distinct(configs: Iterable[Config]) -> list[Config]:
    """Returns the configs without those that are there already."""
    unique: dict[str, Config] = {}
    for config in configs:
        unique.setdefault(text_of(config), config)
    return list(unique.values())


def text_of(config: Config) -> str:
    """Returns what equal configs have in common, 1 and True being different things."""
    return json.dumps(config, sort_keys=True)


def expand_callable(
    configs_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    fn_name: str,
    keep_repeated: bool = False,
) -> list[Config]:
    """Returns the configs that a user's function makes for one call.

    Args:
        configs_fn: returns or yields dicts, or returns a dict of lists.
        args: the call's positional arguments, arrays as `jax.ShapeDtypeStruct`.
        kwargs: its keyword arguments, likewise.
        fn_name: the function being tuned, for error messages.
        keep_repeated: whether a config is there as often as it was made.

    Raises:
        TypeError: what it made is no config space.
        ValueError: it made no config, or configs whose keys differ.
    """
    made = configs_fn(*args, **kwargs)
    source = f"{fn_name}: {getattr(configs_fn, '__qualname__', configs_fn)}() "
    if made is None:
        raise TypeError(f"{source}returned None; let it return a list of dicts, or yield them.")
    # A copy, because a generator can be walked once only.
    listed: Configs = made if isinstance(made, Mapping) or not isinstance(made, Iterable) else list(made)
    if isinstance(listed, (Mapping, list)) and not listed:
        raise ValueError(f"{source}yielded no config for these arguments; let it yield at least one dict.")
    return expand(listed, fn_name=fn_name, keep_repeated=keep_repeated)


def check_parameters(
    configs: Sequence[Config], *, parameters: inspect.Signature, static_names: frozenset[str], fn_name: str
) -> None:
    """Checks that every tunable is a static keyword parameter with a default.

    Args:
        configs: what `expand` returned.
        parameters: the signature of the function being tuned.
        static_names: the parameters that `jax.jit` treats as static where they are given by keyword.
        fn_name: the function's name, for error messages.

    Raises:
        TypeError: a key is no parameter that can be passed by keyword.
        ValueError: a key is not static, or has no default.
    """
    tunable = {name: item for name, item in parameters.parameters.items() if item.kind in _BY_KEYWORD}
    keys = list(configs[0])
    for key in keys:
        if key in parameters.parameters and key not in tunable:
            raise TypeError(
                f"{fn_name}: config key {key!r} cannot be passed by keyword; make it an ordinary "
                f"parameter, as in `def {fn_name}(..., *, {key}={configs[0][key]!r})`."
            )
        if key not in tunable:
            close = difflib.get_close_matches(key, tunable, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{fn_name}: config key {key!r} is no parameter of {fn_name}{parameters}.{hint} "
                f"Add it to the function, as in `{key}={configs[0][key]!r}`, or take it out of the configs."
            )
    moving = [key for key in keys if key not in static_names]
    if moving:
        names = sorted(static_names | set(keys), key=list(parameters.parameters).index)
        raise ValueError(
            f"{fn_name}: config keys {moving} are not static, so jit would trace them; "
            f"decorate with `@jax.jit(static_argnames={names})`."
        )
    required = [key for key in keys if tunable[key].default is inspect.Parameter.empty]
    if required:
        defaults = ", ".join(f"{key}={configs[0][key]!r}" for key in required)
        raise ValueError(
            f"{fn_name}: config keys {required} have no default, so {fn_name} cannot be called without them; "
            f"give them one, as in `def {fn_name}(..., {defaults})`."
        )


def check_keywords(configs: Sequence[Config], *, parameters: inspect.Signature, fn_name: str) -> None:
    """Checks that a function which is not jitted takes every tunable as a keyword argument.

    Args:
        configs: what `expand` returned.
        parameters: the signature of the function being tuned.
        fn_name: the function's name, for error messages.

    Raises:
        TypeError: a key is no parameter that can be passed by keyword.
    """
    items = parameters.parameters.values()
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in items):
        return
    by_keyword = {item.name for item in items if item.kind in _BY_KEYWORD}
    for key in configs[0]:
        if key not in by_keyword:
            close = difflib.get_close_matches(key, by_keyword, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{fn_name}: config key {key!r} is no parameter of {fn_name}{parameters} that can be passed by keyword."
                f"{hint} Add it to the function, or take it out of the configs."
            )


def _combinations(lists: Mapping[str, Iterable[Any]], fn_name: str) -> list[dict[str, Any]]:
    for key, values in lists.items():
        # A set has no order of its own, and a string is one value, not a list of letters.
        if not isinstance(values, (list, tuple, range, np.ndarray)):
            raise TypeError(
                f"{fn_name}: configs[{key!r}] is {values!r}; in a dict of lists each value is the list "
                f"of what to try, as in {{{key!r}: [{values!r}]}}."
            )
        if not len(values):
            raise ValueError(f"{fn_name}: configs[{key!r}] is empty; list at least one value to try.")
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def _validate(configs: Iterable[Mapping[str, Any]], *, fn_name: str) -> list[Config]:
    """Returns the configs normalised."""
    checked: list[Config] = []
    first: Config | None = None
    for index, raw in enumerate(configs):
        where = f"{fn_name}: configs[{index}]"
        if not isinstance(raw, Mapping):
            raise TypeError(f"{where} is {raw!r}; every config is a dict such as {{'BM': 32}}.")
        config = {_key(key, where): _value(value, f"{where}[{key!r}]") for key, value in raw.items()}
        first = config if first is None else first
        if config.keys() != first.keys():
            raise ValueError(
                f"{where} has the keys {sorted(config)}, configs[0] has {sorted(first)}; "
                "give every config the same keys."
            )
        checked.append(config)
    if not first:
        problem = "configs is empty" if first is None else "the configs have no keys"
        raise ValueError(
            f"{fn_name}: {problem}; there is nothing to choose from: give at least one, as in [{{'BM': 32}}]."
        )
    return checked


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; keys are the names of parameters, as strings.")
    return key


def _value(value: Any, where: str) -> ConfigValue:
    """Returns a config value as plain Python data, lists as tuples so that jit can hash it."""
    if isinstance(value, (list, tuple)):
        return tuple(_value(item, f"{where}[{index}]") for index, item in enumerate(value))
    plain: Any = value.item() if isinstance(value, np.generic) else value
    # Exact types: a subclass (an IntEnum, say) would come back from the cache as something else.
    if type(plain) not in (int, float, str, bool, type(None)):
        raise TypeError(
            f"{where} is {value!r} of type {type(value).__name__}; config values are what JSON holds: "
            "int, float, str, bool, None, or lists of them. Pass a name or a number instead, and look the "
            "object up inside the function."
        )
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{where} is {plain}, which JSON cannot hold; use a finite number, or None.")
    return cast("ConfigValue", plain)
