"""Formats configs and their values for people."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping

from quarantune.values.config_values import dtype_name, field_names
from quarantune.values.texts import printable
from quarantune.values.trial import Config

_NO_DEFAULT = object()


def format_config(config: Config) -> str:
    """Returns a config on one line, as `BM=32 BN=64`."""
    return " ".join(f"{printable(name)}={format_value(value)}" for name, value in config.items())


def format_value(value: object) -> str:
    """Returns a config value as short text that any terminal can show."""
    if isinstance(value, enum.Enum):
        return printable(str(value.name or value.value))
    if isinstance(value, str):
        return printable(value)
    if (names := field_names(value)) is not None:
        # Without the defaults of the class: only the others distinguish configs.
        shown = [name for name in names if getattr(value, name) != getattr(type(value), name, _NO_DEFAULT)]
        return f"({', '.join(f'{name}={format_value(getattr(value, name))}' for name in shown)})"
    if isinstance(value, tuple):
        return f"[{','.join(map(_inner, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{json.dumps(key)}:{_inner(item)}' for key, item in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else dtype_name(value) or str(value)


def _inner(value: object) -> str:
    """Returns a value inside another, as JSON writes it where it can."""
    is_plain = value is None or type(value) in (bool, int, float, str)
    return json.dumps(value) if is_plain else format_value(value)
