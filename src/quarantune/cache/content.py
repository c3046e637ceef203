"""The content of files in a cache directory, which may be anything: bounded in size, decoded and checked."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from types import NoneType
from typing import Any, NoReturn

from quarantune.values.codec import JsonObject
from quarantune.values.trial import is_plausible_ms

LARGEST_ENTRIES_BYTES = 1 << 28
LARGEST_JOURNAL_BYTES = 1 << 28
"""The sizes that no writer lets a file pass."""
LARGEST_READ_ENTRIES_BYTES = 1 << 29
LARGEST_READ_JOURNAL_BYTES = 1 << 30
"""The sizes of the largest files that are read: earlier versions wrote without looking at their size."""
LARGEST_CLAIM_BYTES = 1 << 16
LARGEST_FAILURE_BYTES = 1 << 26
_DEEPEST = 100
_LONGEST_TEXT = 1 << 20
_LARGE_BYTES = 1 << 18
_CONTAINERS = frozenset({dict, list})
_TEXTS = frozenset({str})
_OF_TEXTS = ("fingerprint", "versions")


def decode(content: bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: it is not JSON, holds NaN or infinity, or is nested more deeply than our files are.
    """
    with _uncollected() if len(content) > _LARGE_BYTES else contextlib.nullcontext():
        try:
            value = json.loads(content, parse_constant=_refuse_constant)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        _check_depth(value)
    return value


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pauses the garbage collector, which would otherwise traverse all of JAX's objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_depth(value: Any) -> None:
    # One comprehension for each depth: a cache of ten thousand entries holds a hundred thousand dicts.
    layer: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(_DEEPEST + 1):
        layer = [
            item
            for outer in layer
            for item in (outer.values() if type(outer) is dict else outer)
            if type(item) in _CONTAINERS
        ]
        if not layer:
            return
    raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def faults(entry: JsonObject) -> Iterator[str]:
    """Yields a clause for each fault that makes an entry unusable."""
    if not isinstance(entry.get("schema"), int):
        yield f"its schema is {_shown(entry.get('schema'))}, not a number"
    if not isinstance(entry.get("config"), dict):
        yield f"its config is {_shown(entry.get('config'))}, not a dict"
    for name in ("time_ms", "default_time_ms"):
        if (time_ms := entry.get(name)) is not None and not is_plausible_ms(time_ms):
            yield f"its {name} is {_shown(time_ms)}, not a time"
    for name in ("fingerprint", "versions", "trials", "space"):
        values = entry.get(name)
        if not isinstance(values, (dict, NoneType)):
            yield f"its {name} is {_shown(values)}, not a dict"
        elif values and name in _OF_TEXTS and not _TEXTS.issuperset(map(type, values.values())):
            yield f"its {name} holds more than texts"
    if not isinstance(entry.get("created", ""), str):
        yield f"its created is {_shown(entry['created'])}, not a time"


def _shown(value: Any) -> str:
    # Python refuses to convert a huge integer to decimal digits.
    return "a huge number" if isinstance(value, int) and abs(value) >= 10**40 else f"{value!r:.80}"


def short_text(value: str) -> str:
    """Returns a text that a message can show.

    Raises:
        ValueError: it is long, or has characters that no terminal shows.
    """
    if len(value) > _LONGEST_TEXT or not value.isprintable():
        raise ValueError("it is no short text")
    return value
