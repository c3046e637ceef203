"""Runs a command, and turns its errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from quarantune.cli import output
from quarantune.cli.output import FAILED, INTERRUPTED, UNREAD, WRONG, InputError, Output
from quarantune.cli.parser import make_parser

if TYPE_CHECKING:
    from quarantune.values.blocks import SettingKeywords

_FAILURES = ("TuningFailed", "ReferenceFailed", "DifferentProgram", "Sandbox", "CacheWrite", "Store", "Engine")
"""The library's errors that mean that the work failed. By name, because importing their classes takes time."""
_SETTINGS = ("cache_dir", "compile_timeout", "timeout", "memory_limit", "num_workers")
"""Options that stand for the setting of their name, in every command that has them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the words after the program's name; None for those of this process.

    Returns:
        The exit code: 0 done, 1 the work failed or the answer is no, 2 the command was wrong, 130 interrupted, 141 the
        reader of stdout left.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            # The stream was closed. This takes its descriptor, or else the next opened file would get it. Stdout's is
            # for reading only, so that writing fails and the loss of output is noticed.
            setattr(sys, name, open(os.open(os.devnull, fd == 2 and os.O_WRONLY), mode, encoding="utf-8"))  # noqa: SIM115
    try:
        code = _code_of(arguments)
        with output.writing():  # here, so that a reader that has left is noticed
            sys.stdout.flush()
    except output.OutputError as error:
        # The reader, such as `head`, may have seen enough.
        code = UNREAD if isinstance(error.__cause__, BrokenPipeError) else FAILED
        if code == FAILED:
            _say("quarantune", output.ERROR_STYLE, str(error))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would complain again at its end
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _code_of(arguments: Sequence[str] | None) -> int:
    try:
        options = make_parser().parse_args(arguments)
    except SystemExit as ended:  # from `--help`, or from a wrong command after its message
        return ended.code if isinstance(ended.code, int) else WRONG
    if options.command == "help":
        return _code_of([*options.words, "--help"])
    if not options.run:
        output.complain(options.parser.format_help().rstrip("\n"))
        return WRONG
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _run(options)
    except InputError as error:
        text, code = str(error), WRONG
    except KeyboardInterrupt as error:
        text, code = "\n".join(getattr(error, "__notes__", ["interrupted"])), INTERRUPTED
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__.removesuffix("Error") not in _FAILURES:
            raise
        text, code = output.message_of(error), FAILED
    _say(f"quarantune {options.command}", output.ERROR_STYLE, text)
    return code


def _run(options: Any) -> int:
    as_json = getattr(options, "json", False)
    if "shapes" in options:  # the command is about calls, and wrong ones are refused before JAX is imported
        from quarantune.cli import call_texts

        options.calls = call_texts.read(options)
    module, _, name = options.run.partition(":")
    handler = getattr(importlib.import_module(f"quarantune.cli.{module}"), name)
    with contextlib.ExitStack() as block:
        if given := {name: value for name, value in vars(options).items() if name in _SETTINGS and value is not None}:
            from quarantune.values.blocks import settings

            with output.input_errors(ValueError):
                block.enter_context(settings(**cast("SettingKeywords", given)))
        out = Output(sys.stdout, as_json=as_json)
        if as_json:  # a user's module may print on import, which must not end up within the JSON
            block.enter_context(contextlib.redirect_stdout(sys.stderr))
        code = int(handler(options, out))
        if out.error is not None:
            raise out.error
        return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Shows a warning without the line of our source code that it comes from."""
    _say("quarantune: warning", "33", " ".join(str(message).split()))


def _say(head: str, style: str, text: str) -> None:
    # Messages may quote files that anybody can write.
    output.complain(f"{output.styled(head, style, sys.stderr)}: {output.printable_lines(text)}")
