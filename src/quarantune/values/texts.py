"""Text for messages and tables: the nearest known name, values that fit a line, text that is safe for a terminal."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence

_MOST_SHOWN = 80


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a space and a sentence with the nearest known name; empty where none is near."""
    folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f" Did you mean {folded[close[0]]!r}?" if close else ""


def check_options(caller: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises where a public function is given an option that it does not have.

    Raises:
        TypeError: there is no such option.
    """
    if unknown := [name for name in given if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise TypeError(f"{caller}() has no option {unknown[0]!r}.{hint} Its options are: {', '.join(known)}.")


def shown(value: object) -> str:
    """Returns the repr of a value a user gave, cut to a line's length."""
    try:
        text = repr(value)
    except Exception as error:
        is_too_long = isinstance(value, int) and isinstance(error, ValueError)  # Python refuses to write it
        text = f"a very large {type(value).__name__}" if is_too_long else f"an object of {type(value).__qualname__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def printable(text: str) -> str:
    """Returns a text with control characters and lone surrogates escaped, so that any terminal can show it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def columns(rows: Iterable[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Yields the lines of a table without rules, the last column as wide as it needs to be."""
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    for row in listed:
        yield (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
