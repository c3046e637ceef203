"""Runs a command and turns its errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from quarantune.cli.output import (
    ERROR_STYLE,
    FAILED,
    INTERRUPTED,
    UNREAD,
    WRONG,
    InputError,
    Output,
    message_of,
    styled,
)
from quarantune.cli.parser import make_parser

_FAILURES = ("TuningFailed", "ReferenceFailed", "DifferentProgram", "Sandbox", "CacheWrite", "Engine")
"""The library's errors that say that the work failed. By name, because the import of their classes takes time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the words after the program's name; None for those of this process.

    Returns:
        The exit code: 0 done, 1 the work failed or the answer is no, 2 the command was wrong, 130 interrupted, 141 the
        reader of stdout left.
    """
    try:
        code = _code_of(arguments)
        sys.stdout.flush()  # here, so that a reader that has left is noticed
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain once more when it flushes at its end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    return code


def show_help(options: Any, out: Output) -> int:
    """Prints the help of a command."""
    return main([*options.words, "--help"])


def _code_of(arguments: Sequence[str] | None) -> int:
    try:
        options = make_parser().parse_args(arguments)
    except SystemExit as ended:  # of `--help`, or of a wrong command after its message
        return ended.code if isinstance(ended.code, int) else WRONG
    if not options.run:
        options.parser.print_help(sys.stderr)
        return WRONG
    try:
        with _warnings_on_one_line():
            return _run(options)
    except InputError as error:
        return _say(options.command, str(error), WRONG)
    except KeyboardInterrupt:
        return _say(options.command, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        raise
    except Exception as error:
        if type(error).__name__.removesuffix("Error") not in _FAILURES:
            raise
        return _say(options.command, message_of(error), FAILED)


def _run(options: Any) -> int:
    as_json = getattr(options, "json", False)
    out = Output(sys.stdout, as_json=as_json)
    if "shapes" in options:  # the command is about calls, and wrong ones are refused before JAX is imported
        from quarantune.cli import call_texts

        options.texts = call_texts.read(options)
    module, _, name = options.run.partition(":")
    handler = getattr(importlib.import_module(f"quarantune.cli.{module}"), name)
    if getattr(options, "cache_dir", None) is not None:
        from quarantune.values.settings import settings

        overridden: Any = settings(cache_dir=options.cache_dir)
    else:
        overridden = contextlib.nullcontext()
    # A user's module may print when it is imported, which must not end up within the JSON.
    aside: Any = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with overridden, aside:
        return int(handler(options, out))


def _say(command: str, text: str, code: int) -> int:
    print(f"{styled(f'quarantune {command}', ERROR_STYLE, sys.stderr)}: {text}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _warnings_on_one_line() -> Iterator[None]:
    """Shows warnings without the line of our source code that they come from."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        stream = sys.stderr if file is None else file
        head = styled("quarantune: warning", "33", stream)
        print(f"{head}: {' '.join(str(message).split())}", file=stream)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
