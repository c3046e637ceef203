"""Amounts that users write: bytes with units, times, and scalars of NumPy and JAX."""

from __future__ import annotations

import re
from typing import Any

from quarantune.values.texts import shown

LONGEST_S = 1e9
"""The longest accepted time in seconds: thirty years."""
_LEAST_MEMORY = 16 * 2**20
_UNITS = {prefix: 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}
_UNITS |= {f"{prefix}i": 1024**power for power, prefix in enumerate(("", "k", "m", "g", "t")) if prefix}


class MemoryAmount(int):
    """An amount of memory in bytes, which remembers the unit in which a user wrote it.

    Attributes:
        unit: the prefix of the unit in lower case, as in `gi`; empty for bytes.
    """

    unit: str = ""


def memory_text(amount_bytes: int, like: int) -> str:
    """Returns an amount of memory in the unit of another amount; in GB if nobody wrote that one.

    Args:
        amount_bytes: the amount.
        like: the other amount.
    """
    unit = like.unit if isinstance(like, MemoryAmount) else "g"
    return f"{amount_bytes / _UNITS[unit]:.2f} {unit.capitalize()}B" if unit else f"{amount_bytes:,} bytes"


def too_long(doing: str, limit_s: float, option: str) -> str:
    """Returns the message for work that was ended at a deadline.

    Args:
        doing: the work, as in `compiling`.
        limit_s: the deadline in seconds.
        option: the name of the option that sets it.
    """
    return f"{doing} took longer than {limit_s:g} s: raise {option} to allow more"


def parse_memory(value: int | str, *, least: int = _LEAST_MEMORY) -> MemoryAmount:
    """Returns an amount of memory in bytes.

    Args:
        value: a whole number of bytes, or a number with a unit: `"8GB"` is 8e9, `"8GiB"` is 8 * 2**30; the
            `B` may be left out, and case does not matter.
        least: the least amount; by default, the amount below which no process starts.

    Raises:
        ValueError: the value is not an amount of memory, or too little.
    """
    if isinstance(value, MemoryAmount):
        return value
    text = shown(value) if isinstance(value, int) else str(value)  # an int may have too many digits for str
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    amount = float(match[1]) * _UNITS[match[2] or ""] if match and not isinstance(value, bool) else 0
    if not 1 <= amount < 2**63:
        raise ValueError(
            f"{shown(value)} is not an amount of memory: give bytes, or a number with a unit, as in '8GB' or '512MiB'"
        )
    if amount < least:
        raise ValueError(
            f"{shown(value)} is {amount:.0f} bytes, and no worker starts with less than 16 MiB: "
            "give a number with a unit, as in '8GB' or '512MiB'"
        )
    parsed = MemoryAmount(amount)
    parsed.unit = (match[2] if match else None) or ""
    return parsed


def unwrapped(value: Any) -> Any:
    """Returns the number or flag in a scalar of NumPy's or JAX's; any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and not isinstance(value, float) else value
