"""Writes the description of a call, as cache keys hold it, the way JAX users write shapes: `f32[512,512]`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from quarantune.values.texts import printable

_SHORT = {
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"s{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (4, 8, 16, 32, 64)},
    "bfloat16": "bf16",
    "bool": "pred",
    "complex64": "c64",
    "complex128": "c128",
}
_DEEPEST = 20
_LARGEST_SIZE = 1e300


def call_text(values: Any) -> str:
    """Returns the arguments of a call on one line, as `x f32[16], mode fast`.

    Args:
        values: the `key_values` of an entry; files may hold anything.
    """
    if isinstance(values, Mapping) and not _is_array(values):
        return ", ".join(f"{printable(str(name))} {_text(value, 0)}" for name, value in values.items())
    return _text(values, 0)


def call_size(values: Any, depth: int = 0) -> float:
    """Returns the number of elements of all arrays in the description of a call, by which problems are sorted."""
    if depth > _DEEPEST:
        return 0.0
    if isinstance(values, Mapping):
        if _is_array(values):
            lengths = [length for length in values["shape"] if isinstance(length, int)]
            return min(math.prod(float(length) for length in lengths if 0 <= length < 1 << 63), _LARGEST_SIZE)
        return sum(call_size(value, depth + 1) for value in values.values())
    return sum(call_size(value, depth + 1) for value in values) if isinstance(values, list) else 0.0


def _is_array(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("shape"), list) and isinstance(value.get("dtype"), str)


def _text(value: Any, depth: int) -> str:
    if isinstance(value, Mapping) and depth < _DEEPEST:
        if _is_array(value):
            return array_text(value["shape"], value["dtype"])
        return "{" + ", ".join(f"{printable(str(key))}: {_text(item, depth + 1)}" for key, item in value.items()) + "}"
    if isinstance(value, list) and depth < _DEEPEST:
        return "[" + ", ".join(_text(item, depth + 1) for item in value) + "]"
    return printable(value) if isinstance(value, str) else printable(json.dumps(value, default=str))


def array_text(shape: Iterable[object], dtype: object) -> str:
    """Returns the kind of an array on a few characters, as `f32[512,512]`."""
    return printable(f"{_SHORT.get(str(dtype), dtype)}[{','.join(map(str, shape))}]")
