"""Text for messages and tables, and calls as JAX users write them."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

STORE_URL = "https://HOST/PATH, http://HOST/PATH, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
BUCKET_URL = (
    "s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, without credentials, which come from the bucket's own variables and "
    "files. A web server takes no results: jobs that send at once would overwrite each other's"
)
_MOST_SHOWN = 80
_LETTERS = {"bfloat": "bf", "float": "f", "complex": "c", "int": "s", "uint": "u"}
_SHORT = {f"{kind}{bits}": f"{letter}{bits}" for kind, letter in _LETTERS.items() for bits in (4, 8, 16, 32, 64, 128)}
_SHORT["bool"] = "pred"
_DEEPEST = 20
_LARGEST_SIZE = 1e300
_ADDRESS = re.compile(r"""://(\S*@|)([^\s?]*?)(\?\S*?|)(?=['":;,.)\]}]*(?:\s|$))""")
"""A URL after its scheme: user and password, place and query, without the punctuation that follows it."""


# --- text for messages and tables ---


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a space and a sentence with the nearest known name; empty if none is near."""
    folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f" Did you mean {folded[close[0]]!r}?" if close else ""


def check_options(
    caller: str, given: Iterable[str], known: Collection[str], removed: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Checks that a public function has the options that its caller gives.

    Args:
        caller: the function's name.
        given: the names of the given options.
        known: the names of its options.
        removed: for names of former options, the advice in place of the list of all options.

    Raises:
        TypeError: the function lacks one of the options.
    """
    if unknown := [name for name in given if name not in known]:
        if unknown[0] in removed:
            raise TypeError(f"{caller}() has no option {unknown[0]!r}: use {removed[unknown[0]]}")
        hint = did_you_mean(unknown[0], known)
        raise TypeError(f"{caller}() has no option {unknown[0]!r}.{hint} Its options are: {', '.join(known)}.")


def shown(value: object) -> str:
    """Returns the repr of a user's value, cut to a line's length and without the credentials of URLs."""
    try:
        text = without_secrets(repr(value))
    except Exception as error:
        is_too_long = isinstance(value, int) and isinstance(error, ValueError)  # Python refuses to write it
        text = f"a very large {type(value).__name__}" if is_too_long else f"an object of {type(value).__qualname__}"
    return cut(text, _MOST_SHOWN)


def without_secrets(text: str) -> str:
    """Returns a text with `***` for the users, passwords and queries of its URLs."""
    return _ADDRESS.sub(lambda it: f"://{it[1] and '***@'}{it[2]}{it[3] and '?***'}", text)


def cut(text: str, most: int) -> str:
    """Returns a text, or its beginning and three dots if it has more characters than `most`."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def printable(text: str) -> str:
    """Returns a text with control characters and lone surrogates escaped, so that any terminal can show it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def columns(rows: Iterable[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Yields the lines of a table, with columns padded to their widest cell."""
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    for row in listed:
        yield (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


# --- calls ---


def call_text(values: Any) -> str:
    """Returns the arguments of a call on one line, such as `x f32[16], mode fast`.

    Args:
        values: the `key_values` of an entry. Its file may hold anything.
    """
    if isinstance(values, Mapping) and not _is_array(values):
        return ", ".join(f"{printable(str(name))} {_text(value, 0)}" for name, value in values.items())
    return _text(values, 0)


def call_size(values: Any, depth: int = 0) -> float:
    """Returns the number of elements of all arrays in the description of a call, for sorting problems."""
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
    """Returns the kind of an array in a few characters, such as `f32[512,512]`."""
    return printable(f"{_SHORT.get(str(dtype), dtype)}[{','.join(map(str, shape))}]")
