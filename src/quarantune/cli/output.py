"""The output of a command: text for people, or one JSON value."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from quarantune.values.texts import printable

DONE, FAILED, WRONG, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
"""Exit codes: done; the work failed or the answer is "no"; the command is wrong; Ctrl-C; the reader of the output left
(the code of a program that SIGPIPE ends)."""

ERROR_STYLE, OK_STYLE = "1;31", "32"
"""Bold red for errors and green for success, the usual colours of pytest and others."""


_LEAST_ROOM = 20
"""Least width of a wrapped column."""


class OutputError(Exception):
    """Writing the output failed; `__cause__` is the error of the stream."""


class InputError(Exception):
    """The command is wrong; the message names the mistake and the remedy."""


@contextlib.contextmanager
def input_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turns the library's errors about wrong input into `InputError`.

    Args:
        *kinds: the classes of these errors.
    """
    try:
        yield
    except kinds as error:
        raise InputError(message_of(error)) from error


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Turns errors of writing to stdout into `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"the output cannot be written ({error.strerror}): send it elsewhere") from error


def complain(text: str) -> None:
    """Writes lines to stderr; ignores a closed or full stream."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def message_of(error: BaseException) -> str:
    """Returns the message of an error on one line, with its notes."""
    text: object = error
    if isinstance(error, KeyError) and error.args:
        text = error.args[0]  # str(error) would put quotes around it
    elif isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{str(error.filename)!r} cannot be read ({error.strerror}): give the path of another file"
    line = " ".join(str(text).split()) or type(error).__name__
    return line + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def printable_lines(text: str) -> str:
    """Returns a text of several lines with control characters escaped."""
    return "\n".join(map(printable, text.splitlines()))


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `1 result` or `2 results`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def wrapped(rows: Sequence[Sequence[str]], width: int) -> Iterator[Sequence[str]]:
    """Yields the rows of a table. Wraps last cells between words to fit a width, into additional rows."""
    room = width - sum(2 + max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True))
    for *cells, last in rows:
        lines = textwrap.wrap(last, max(room, _LEAST_ROOM), break_long_words=False, break_on_hyphens=False)
        yield *cells, next(iter(lines), "")
        yield from ((*[""] * len(cells), line) for line in lines[1:])


def styled(text: str, style: str, stream: TextIO) -> str:
    """Returns text in a terminal style; without the style if the stream does not show colours.

    Args:
        text: the text.
        style: numbers of ECMA-48, such as `1` for bold or `1;31` for bold red.
        stream: the destination of the text.
    """
    is_plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if is_plain else f"\x1b[{style}m{text}\x1b[0m"


class Output:
    """Writes text or JSON. If the reader leaves, the command ends; `error` keeps other errors until its end."""

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        """Sets the form.

        Args:
            stream: the stream.
            as_json: whether to write JSON, and no text.
        """
        self.as_json = as_json
        self._stream = stream
        self.error: OutputError | None = None  # from the last failed write

    @property
    def width(self) -> int:
        """The columns of the terminal; 120 without a terminal."""
        return max(shutil.get_terminal_size((120, 24)).columns, 40)

    def fits(self, lines: Iterable[str]) -> bool:
        """Returns whether lines fit the terminal; always True without a terminal."""
        return not self._stream.isatty() or max(map(len, lines)) <= self.width

    def line(self, text: str = "") -> None:
        """Writes text with a line end, except in JSON mode."""
        if not self.as_json:
            self._write(text)

    def styled(self, text: str, style: str) -> str:
        """Returns text in a style if the stream is a terminal."""
        return styled(text, style, self._stream)

    def json(self, value: Any) -> None:
        """Writes a value in JSON mode; unknown times become null."""
        if self.as_json:
            from quarantune.values.codec import plain  # the help does not need it

            self._write(json.dumps(plain(value, finite_only=False), indent=2))

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        try:
            with writing():
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
                self._stream.flush()
        except OutputError as error:
            if isinstance(error.__cause__, BrokenPipeError):
                raise
            self.error = error
