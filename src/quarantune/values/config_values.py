"""Config values that JSON lacks: how enums, dtypes, dataclasses and dicts are encoded, and restored."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn


class FrozenDict(dict[str, Any]):
    """A dict that cannot change, and therefore has a hash, which `jax.jit` needs of every static argument."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        """Pickles like an ordinary dict."""
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a config's dict cannot be changed: change a copy, dict(...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


COMPILER_OPTIONS = "compiler_options"
"""The key of a config that holds options for XLA, where the function has no parameter of that name."""

NO_OPTIONS = FrozenDict()
"""The compiler options of a config without any, where others have some."""


def as_given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without the options for XLA that it has only because others have some."""
    return {name: value for name, value in config.items() if value is not NO_OPTIONS}


_PLAIN = frozenset({int, str, float, bool, type(None)})
"""Most values by far are of these types, and need no look at their fields."""


def freeze(value: Any) -> Any:
    """Returns a config value with lists turned into tuples and dicts into `FrozenDict`, so that jit can hash it."""
    if isinstance(value, (list, tuple)) and not is_tagged(value):
        return tuple(map(freeze, value))
    return FrozenDict({key: freeze(item) for key, item in value.items()}) if isinstance(value, Mapping) else value


def is_tagged(value: Any) -> bool:
    """Returns whether JSON needs a tag for a value: an enum's member, a dtype, a dataclass or a named tuple."""
    return isinstance(value, enum.Enum) or field_names(value) is not None or dtype_name(value) is not None


def dtype_name(value: Any) -> str | None:
    """Returns the name of a dtype of numbers, also given as a type such as `jnp.bfloat16`; None for anything else."""
    if (np := sys.modules.get("numpy")) is None:
        return None  # there is no dtype without it, and reading a cache does not import it
    dtype = value
    if isinstance(value, type):
        dtype = np.dtype(value) if issubclass(value, np.generic) else getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype) or not dtype.isnative:
        return None
    return dtype.name if dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes" else None


def field_names(value: Any) -> list[str] | None:
    """Returns the names of a dataclass's or a named tuple's fields; None for anything else."""
    if type(value) in _PLAIN:
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return list(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else None


def tagged(value: Any) -> dict[str, Any]:
    """Returns a dict in place of an enum's member, a dtype, a dataclass or a named tuple, with unchanged fields.

    The type is given by its qualified name without the module: one file may be `__main__` here and a module there.
    """
    name = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return {"$enum": f"{name}.{value.name if value.name is not None else value.value}"}
    if (dtype := dtype_name(value)) is not None:
        return {"$dtype": dtype}
    return {"$type": name} | {field: getattr(value, field) for field in field_names(value) or ()}


def encode(value: Any) -> Any:
    """Returns a config, or one value of it, as JSON can hold it."""
    if type(value) in _PLAIN:
        return value
    if is_tagged(value):
        value = tagged(value)
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, (list, tuple)) else value


def text_of(value: Any) -> str:
    """Returns a text that is the same for equal configs, or values; 1 and True are not equal."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"))


def originals(configs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values that JSON alone does not preserve, by their texts, for `restore`."""
    values = (value for config in configs for value in config.values())
    return {text_of(value): value for value in values if _has_tagged(value)}


def restore(config: Mapping[str, Any], originals: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with the values that it had before it went through JSON.

    Nothing is imported or built by name: a file can only select one of the values that exist here already.

    Args:
        config: the config as `encode` returned it.
        originals: the values to restore, by their texts.
    """
    if not originals:
        return {name: freeze(value) for name, value in config.items()}
    return {
        name: originals[text] if (text := text_of(value)) in originals else freeze(value)
        for name, value in config.items()
    }


def has_tag(value: Any) -> bool:
    """Returns whether `tagged` made a part of an encoded value, so that JSON alone cannot restore it."""
    if isinstance(value, Mapping):
        return any(str(key).startswith("$") for key in value) or any(map(has_tag, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_tag, value))


def _has_tagged(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tagged, value.values()))
    return is_tagged(value) or (isinstance(value, (list, tuple)) and any(map(_has_tagged, value)))
