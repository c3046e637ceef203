"""Configs and their values: checks, and text for people.

A value is a JSON value, an enum's member, a dtype, a dataclass, or a list or dict of these. Lists become tuples and
dicts become `FrozenDict`, so that jit can hash them.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from quarantune.values.codec import FrozenDict, dtype_name, field_names, is_tagged, text_of
from quarantune.values.texts import did_you_mean, printable, shown

ConfigValue: TypeAlias = Any
"""A number, a string, a boolean or None; an enum's member or a dtype; or a tuple, `FrozenDict` or dataclass of them."""
Config: TypeAlias = dict[str, ConfigValue]
Configs: TypeAlias = "Mapping[str, Any] | Iterable[Mapping[str, Any]]"
MadeConfigs: TypeAlias = "Configs | Callable[..., Configs]"

COMPILER_OPTIONS = "compiler_options"
"""The key of a config's options for XLA, unless the function has a parameter of that name."""
MOST_CONFIGS = 1_000_000
"""Most configs of a list or generator. More count as a mistake, such as an endless generator."""
_MOST_NESTED = 32
_MOST_BITS = 1000
"""Most bits of an integer. Larger ones do not fit a float, and Python's JSON refuses over 4,300 digits."""
BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that may be tunable."""
_NO_DEFAULT = object()


NO_OPTIONS = FrozenDict()
"""The compiler options of a config that has none, while other configs have some."""


def as_given(config: Mapping[str, Any]) -> Config:
    """Returns a config without the placeholder `NO_OPTIONS`."""
    return {name: value for name, value in config.items() if value is not NO_OPTIONS}


# --- configs from users ---


def _of_numpy(name: str) -> Any:
    """Returns a class of NumPy; if nobody has imported NumPy, an empty tuple for `isinstance`."""
    return getattr(sys.modules.get("numpy"), name, ())


def distinct(configs: Iterable[Config]) -> list[Config]:
    """Returns the configs without repetitions."""
    unique: dict[str, Config] = {}
    for config in configs:
        unique.setdefault(text_of(config), config)
    return list(unique.values())


def configs_made_by(
    configs_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, fn_name: str
) -> Any:
    """Returns the configs that a user's function makes for one call: not empty, otherwise unchecked.

    Args:
        configs_fn: returns or yields dicts, or returns a dict of lists.
        args: the call's positional arguments, with each array as a `jax.ShapeDtypeStruct`.
        kwargs: the call's keyword arguments, with arrays in the same form.
        fn_name: the function being tuned, for error messages.

    Raises:
        TypeError: `configs_fn` returned None.
        ValueError: `configs_fn` made no config.
    """
    configs = configs_fn(*args, **kwargs)
    source = f"{fn_name}: {getattr(configs_fn, '__qualname__', configs_fn)}() "
    if configs is None:
        raise TypeError(f"{source}returned None; let it return a list of dicts, or yield them.")
    if isinstance(configs, Iterable) and not isinstance(configs, (Mapping, str, bytes, list, tuple)):
        rest = iter(configs)
        first = list(itertools.islice(rest, 1))
        configs = itertools.chain(first, rest) if first else first
    if isinstance(configs, (Mapping, list, tuple)) and not configs:
        raise ValueError(f"{source}yielded no config for these arguments; let it yield at least one dict.")
    return configs


def checked_values(name: Any, values: Any, *, fn_name: str) -> list[ConfigValue]:
    """Returns the checked values of one tunable of a grid.

    Args:
        name: the name.
        values: the list of its values.
        fn_name: the function being tuned, for error messages.

    Raises:
        TypeError: the name is not a string, or `values` is not a list of config values.
        ValueError: `values` is empty.
    """
    key, where = _key(name, f"{fn_name}: configs"), f"{fn_name}: configs[{name!r}]"
    # Sets are unordered, and a string is one value, not a list of letters.
    if not isinstance(values, (list, tuple, range, _of_numpy("ndarray"))):
        raise TypeError(
            f"{where} is {shown(values)}; in a dict of lists each value is the list of values to try, as in "
            f"{{{key!r}: [{shown(values)}]}}."
        )
    if not len(values):
        raise ValueError(f"{where} is empty; list at least one value to try.")
    return [_value(item, where, ()) for item in values]


def nothing_to_choose(fn_name: str, problem: str) -> ValueError:
    """Returns the error for an empty list of configs."""
    return ValueError(
        f"{fn_name}: {problem}; there is nothing to choose from: give at least one, as in [{{'BM': 32}}]."
    )


def checked_config(
    raw: Any,
    *,
    fn_name: str,
    index: int = 0,
    names: Sequence[str] | None = None,
    parameters: inspect.Signature | None = None,
) -> Config:
    """Returns one config made of hashable values, with the function's defaults for the names that it lacks.

    Args:
        raw: the user's config.
        fn_name: the function being tuned, for error messages.
        index: the config's position, for error messages.
        names: the names of all tunables; None for the names in the config.
        parameters: the signature of the function being tuned. Its defaults replace the keys that the config lacks.
            None if every config must have all keys.

    Raises:
        TypeError: `raw` is not a config, or holds something other than a config value.
        ValueError: `raw` lacks a name, or has an unknown one.
    """
    where = f"{fn_name}: configs[{index}]"
    if not isinstance(raw, Mapping):
        raise TypeError(f"{where} is {shown(raw)}; every config is a dict such as {{'BM': 32}}.")
    config = {_key(key, where): _value(value, f"{where}[{key!r}]", ()) for key, value in raw.items()}
    if names is None:
        return config
    if new := [key for key in config if key not in names]:
        raise ValueError(f"{where} has the key {new[0]!r}, which earlier ones lack; give every config the same keys.")
    if len(config) < len(names) and parameters is None:
        raise ValueError(
            f"{where} has the keys {sorted(config)}, others have {sorted(names)}; give every config the same keys."
        )
    return {name: config[name] if name in config else _default(name, parameters, where) for name in names}


def _default(name: str, parameters: inspect.Signature | None, where: str) -> ConfigValue:
    assert parameters is not None
    parameter = parameters.parameters.get(name)
    if parameter is None and name == COMPILER_OPTIONS:
        return NO_OPTIONS
    if parameter is None or parameter.kind not in BY_KEYWORD:
        by_keyword = [item.name for item in parameters.parameters.values() if item.kind in BY_KEYWORD]
        raise TypeError(
            f"{where} lacks {name!r}, which other configs have and which is not a parameter with a default."
            f"{did_you_mean(name, by_keyword)} Give every config the same keys."
        )
    if parameter.default is inspect.Parameter.empty:
        raise TypeError(f"{where} lacks {name!r}, which has no default in the function; give one or the other.")
    return _value(parameter.default, f"{where} lacks {name!r}, whose default", ())


def check_classes(values: Iterable[ConfigValue], fn_name: str, classes: dict[str, type]) -> None:
    """Checks that values of different classes have different texts. A text holds only the name of the class.

    Args:
        values: the values.
        fn_name: the function being tuned, for error messages.
        classes: the classes of values checked earlier, by text. This function adds the classes of the new values.

    Raises:
        ValueError: two values of different classes have the same text.
    """
    for value in (value for value in values if is_tagged(value) and not dtype_name(value)):
        kind = type(value)
        other = classes.setdefault(text_of(value), kind)
        if other is not kind:
            raise ValueError(
                f"{fn_name}: two classes called {kind.__qualname__!r}, of {other.__module__} and of {kind.__module__}, "
                f"have the value {shown(value)} in the configs; give one of them another name, as in a subclass."
            )


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {shown(key)}; keys are the names of parameters, as strings.")
    return key


def _value(value: Any, where: str, outer: tuple[int, ...]) -> ConfigValue:
    """Checks a config value and returns it, with lists as tuples and dicts as `FrozenDict` so that jit can hash them.

    Args:
        value: the value.
        where: its path within the configs, for error messages.
        outer: the identities of the containers around it.
    """
    if id(value) in outer or len(outer) > _MOST_NESTED:
        how = "contains itself" if id(value) in outer else f"is nested more than {_MOST_NESTED} deep"
        raise ValueError(f"{where[:200]} {how}, which JSON cannot hold; use a flat list, or a number or a name.")
    inside = (*outer, id(value))
    if is_tagged(value):
        return _tagged_value(value, where, inside)
    if isinstance(value, (list, tuple)):
        return tuple(_value(item, f"{where}[{index}]", inside) for index, item in enumerate(value))
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str) or key.startswith("$")]:
            raise TypeError(f"{where} has the key {shown(odd[0])}; keys are strings that do not begin with '$'.")
        return FrozenDict({key: _value(item, f"{where}[{key!r}]", inside) for key, item in value.items()})
    plain: Any = value.item() if isinstance(value, _of_numpy("generic")) else value
    # Exact types: the cache would return an instance of a subclass as another type.
    if type(plain) not in (int, float, str, bool, type(None)):
        raise TypeError(
            f"{where} is {shown(value)} of type {type(value).__name__}; config values are the types of JSON "
            "(int, float, str, bool, None), enums, dtypes, and lists, dicts and frozen dataclasses of them. Pass a "
            "name or a number instead, and look the object up inside the function."
        )
    if isinstance(plain, int) and plain.bit_length() > _MOST_BITS:
        raise ValueError(f"{where} is a number of over {_MOST_BITS} bits, which JSON cannot hold; use a name for it.")
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{where} is {plain}, which JSON cannot hold; use a finite number, or None.")
    return plain


def _tagged_value(value: Any, where: str, inside: tuple[int, ...]) -> ConfigValue:
    """Returns an enum's member unchanged, or a dataclass or named tuple with checked fields."""
    changed = {}
    for field in field_names(value) or ():
        given = getattr(value, field)
        if (checked := _value(given, f"{where}.{field}", inside)) is not given:
            changed[field] = checked
    if changed:
        replace = type(value)._replace if hasattr(value, "_replace") else dataclasses.replace
        value = replace(value, **changed)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{where} is {shown(value)}, which has no hash, so jit cannot take it; "
            f"make it immutable: @dataclass(frozen=True) above class {type(value).__name__}."
        ) from None
    return value


def check_parameters(
    configs: Sequence[Config],
    *,
    parameters: inspect.Signature,
    static_names: frozenset[str] | None,
    fn_name: str,
    need_defaults: bool = True,
) -> None:
    """Checks that every tunable is a static keyword parameter with a default.

    Args:
        configs: the configs, or a few that contain every value.
        parameters: the signature of the function being tuned.
        static_names: the keyword parameters that `jax.jit` treats as static. None for a function that is not jitted,
            which only has to take every tunable as a keyword argument.
        fn_name: the function's name, for error messages.
        need_defaults: whether calls of a jitted function may also lack a config, as calls of a decorated one do.

    Raises:
        TypeError: a key does not name a keyword parameter, or the parameter has no default.
        ValueError: a key is not static.
    """
    items = parameters.parameters
    tunable = {name: item for name, item in items.items() if item.kind in BY_KEYWORD}
    examples = {key: value for config in configs for key, value in config.items()}
    if static_names is None and any(item.kind is inspect.Parameter.VAR_KEYWORD for item in items.values()):
        return
    if static_names is not None and COMPILER_OPTIONS not in items:
        examples.pop(COMPILER_OPTIONS, None)
    for key, example in examples.items():
        if key in items and key not in tunable:
            raise TypeError(
                f"{fn_name}: config key {key!r} cannot be passed by keyword; make it an ordinary "
                f"parameter, for example `def {fn_name}(..., *, {key}={shown(example)})`."
            )
        if key == COMPILER_OPTIONS and key not in tunable:
            raise TypeError(
                f"{fn_name}: configs have {COMPILER_OPTIONS}, and {fn_name} is not jitted: put jax.jit on it, or "
                f"make {COMPILER_OPTIONS!r} a parameter of {fn_name} and apply it there."
            )
        if key not in tunable:
            raise TypeError(
                f"{fn_name}: config key {key!r} is not a parameter of {fn_name}{parameters}."
                f"{did_you_mean(key, tunable)} Add it to the function, as in `{key}={shown(example)}`, or take it out "
                "of the configs."
            )
    if static_names is None:
        return
    moving = [key for key in examples if key not in static_names]
    if moving:
        names = sorted(static_names | examples.keys(), key=list(items).index)
        raise ValueError(
            f"{fn_name}: config keys {moving} are not static, so jit would trace them; "
            f"decorate with `@jax.jit(static_argnames={names})`."
        )
    required = [key for key in examples if tunable[key].default is inspect.Parameter.empty]
    if required and need_defaults:
        defaults = ", ".join(f"{key}={shown(examples[key])}" for key in required)
        raise TypeError(
            f"{fn_name}: config keys {required} have no default, so {fn_name} cannot be called without them; "
            f"give them one, for example `def {fn_name}(..., {defaults})`."
        )


# --- for people ---


def format_config(config: Config) -> str:
    """Returns a config on one line, such as `BM=32 BN=64`."""
    return " ".join(f"{printable(name)}={format_value(value)}" for name, value in config.items())


def format_value(value: object) -> str:
    """Returns a config value, also one in its JSON form, as short text that any terminal can show."""
    if isinstance(value, enum.Enum):
        return printable(str(value.name or value.value))
    if isinstance(value, str):
        return printable(value)
    if (names := field_names(value)) is not None:
        # Without fields that equal the class's default: only the others distinguish configs.
        shown = [name for name in names if getattr(value, name) != getattr(type(value), name, _NO_DEFAULT)]
        return f"({', '.join(f'{name}={format_value(getattr(value, name))}' for name in shown)})"
    match value:
        case list() | tuple():
            return f"[{','.join(map(_inner, value))}]"
        case {"$enum": name, **fields} | {"$dtype": name, **fields} | {"$type": name, **fields}:  # the JSON form
            parts = ", ".join(f"{printable(str(key))}={format_value(item)}" for key, item in fields.items())
            return printable(str(name).rpartition(".")[2]) + (f"({parts})" if fields else "")
        case Mapping():
            return f"{{{','.join(f'{json.dumps(key)}:{_inner(item)}' for key, item in value.items())}}}"
    return dtype_name(value) or str(value)


def _inner(value: object) -> str:
    """Returns a value inside another: as JSON if it is plain, else as `format_value` writes it."""
    is_plain = value is None or type(value) in (bool, int, float, str)
    return json.dumps(value) if is_plain else format_value(value)
