"""The errors that a config's worker raises; the outcome that an exception stands for, and its text for the author."""

from __future__ import annotations

import concurrent.futures
import io
import re
import traceback
import types
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from typing import Any

import jax

from quarantune.host.packages import is_installed
from quarantune.sandbox.messages import Raised
from quarantune.sandbox.template_messages import ErrorDescription

_ON_CHIP = re.compile(r"memory space [vs]mem")
"""Marks a compiler's complaint about a TPU's memory on the chip, which only a kernel's blocks can exhaust."""
_STATUS = re.compile(r"[A-Z_]+(?=:)")
"""The start of an XLA error's message."""
_MESSAGE_CHARS = 4000
_MOST_FRAMES = 8
"""Most lines of the author's own files to show for one exception, the latest first."""
_QUOTED_FRAME = r'  File "(.*)", line ([0-9]+), in (.*)\n(?:    .*\n)*'
_QUOTED = re.compile(rf"Traceback \(most recent call last\):\n(?:{_QUOTED_FRAME})+")
"""A traceback in a message: JAX puts a host callback's traceback in front of its exception."""
_TRACEBACKS = (types.TracebackType, type(None))


class NeedsDeviceError(RuntimeError):
    """The program cannot be compiled well, or at all, without its device: compile it there."""


class UncheckableError(RuntimeError):
    """This machine cannot check the config for that device; the config may still compile there."""


def check_is_done(output: Any) -> None:
    """Raises if a result, or a part of it, stands for unfinished work, which the time would leave out.

    Raises:
        TypeError: a part is a coroutine, an iterator, a future or a lazy collection.
    """
    for leaf in jax.tree.leaves(output, is_leaf=lambda part: bool(_how_to_do(part))):
        if remedy := _how_to_do(leaf):
            if isinstance(leaf, Coroutine):
                leaf.close()  # else, Python warns that nobody awaits it
            raise TypeError(
                f"it returned {type(leaf).__qualname__}, whose work is not done when the call returns and would not be "
                f"timed: {remedy} inside the function, and return the result"
            )


def _how_to_do(value: Any) -> str:
    """Returns how to do the work that a value stands for; an empty text for other values."""
    graph = getattr(type(value), "__dask_graph__", None)
    if graph is not None and graph(value) is not None:
        return "compute it (compute())"
    if isinstance(value, (Awaitable, AsyncIterator)):
        return "await it (asyncio.run)"
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return "exhaust it (list)"
    return "wait for it (result())" if isinstance(value, concurrent.futures.Future) else ""


def outcome_of(error: BaseException, phase: str) -> Raised:
    """Returns the outcome that an exception in `phase` stands for, or `unfit` for a program in the wrong worker."""
    if isinstance(error, NeedsDeviceError):
        return "unfit"
    # While compiling, the same status also means that a kernel wants more shared memory than there is.
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    if exhausted and (
        phase != "compile" or ("out of memory" in str(error).lower() and not _ON_CHIP.search(str(error)))
    ):
        return "device_oom"
    return "error"


def place_of(error: BaseException, message: str, phase: str) -> str:
    """Returns an exception's type with the file and line that raised it, or with the status of an XLA error.

    JAX raises all XLA errors at the line that called XLA, which another route to the same program does not pass. An XLA
    error of a running program may be of any kind: its message without numbers takes the place of the status.

    Args:
        error: the exception.
        message: its text.
        phase: the phase that it ended.
    """
    status = _STATUS.match(message) if isinstance(error, jax.errors.JaxRuntimeError) else None
    if status:
        return f"{type(error).__qualname__} {status[0] if phase == 'compile' else re.sub('[0-9]+', 'N', message)}"
    where = [f" at {frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return f"{type(error).__qualname__}{''.join(where[-1:])}"


# --- the text of an exception: its message, then the lines of the author's own files that led to it ---


def readable(error: BaseException) -> BaseException:
    """Returns an exception, or a stand-in if looking at it raises another: configs raise anything."""
    kind, name_of = type(error), type.__dict__["__qualname__"].__get__  # whatever its metaclass says
    try:
        parts = (str(error), f"{kind.__module__} {kind.__qualname__} {kind.__name__}")
        if {*map(type, parts)} == {str} and error.__class__ is kind and type(error.__traceback__) in _TRACEBACKS:
            return error
        reason = "its parts are of odd types"
    except BaseException as broken:
        reason = name_of(type(broken))
    stand_in: type[BaseException] = type(name_of(kind), (BaseException,), {"__module__": "builtins"})
    trace = BaseException.__dict__["__traceback__"].__get__(error)
    return stand_in(f"(it cannot be printed: {reason})").with_traceback(trace)


def describe_error(error: BaseException) -> ErrorDescription:
    """Describes an exception; never raises, whatever the exception and its class do when they are looked at."""
    error = readable(error)
    try:
        trace = "\n".join(_lines(error))
    except BaseException:  # one of its causes cannot be read
        trace = ""
    return ErrorDescription(
        error=_name(error)[:_MESSAGE_CHARS],
        text=shortened(without_frames(str(error))),
        traceback=f"{trace}\n"[:_MESSAGE_CHARS] if trace else "",
    )


def shortened(text: str) -> str:
    """Returns a long text without its middle, since a callback's error has its reason at the end."""
    if len(text) <= _MESSAGE_CHARS:
        return text
    half = _MESSAGE_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"


def _lines(error: BaseException) -> Iterator[str]:
    """Yields an exception's message and its frames, then the messages and frames of its causes."""
    shown: set[int] = set()
    found: list[str] = []
    each: BaseException | None = error
    while each is not None and id(each) not in shown:
        is_first, frames = not shown, _own_frames(each)
        # JAX adds exceptions that show where it raised another: they help only if that has no line of the author's.
        is_told = is_first or not type(each).__module__.startswith("jax.")
        if is_told:
            headline = ErrorDescription(without_frames(str(each)), _name(each)).message
            yield ("" if is_first else "from ") + shortened("\n".join([headline, *_notes(each)]))
        if is_told or not found:
            yield from frames[:_MOST_FRAMES]
            if len(frames) > _MOST_FRAMES:
                yield f"  ... and {len(frames) - _MOST_FRAMES} earlier lines"
        found += frames
        shown.add(id(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _name(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def without_frames(message: str) -> str:
    """Returns the message of an exception without the frames that it quotes."""
    return _QUOTED.sub("", message)


def _notes(error: BaseException) -> list[str]:
    """Returns an exception's notes, but not JAX's note about its own frames."""
    return [note for note in getattr(error, "__notes__", ()) if "JAX has removed its internal frames" not in note]


def _own_frames(error: BaseException) -> list[str]:
    """Returns the frames of an exception that are in the author's own files, the latest first."""
    quoted = [
        traceback.FrameSummary(file, int(line), name) for file, line, name in re.findall(_QUOTED_FRAME, str(error))
    ]
    return [
        f"  {frame.filename}:{frame.lineno}, in {frame.name}{f': {frame.line}' if frame.line else ''}"
        for frame in reversed([*traceback.extract_tb(error.__traceback__), *quoted])
        if not is_installed(frame.filename)
    ]
