"""What an exception of a config says: its message, then the lines of the author's own files that led to it."""

from __future__ import annotations

import traceback
import types
from collections.abc import Iterator

from quarantune.host import installed
from quarantune.sandbox.worker_program import ErrorDescription

_MESSAGE_CHARS = 4000
_MOST_FRAMES = 8
"""Lines of the author's own files that are shown of one exception, the latest first."""
_TRACEBACKS = (types.TracebackType, type(None))


def readable(error: BaseException) -> BaseException:
    """Returns an exception, or a stand-in for one that raises another when it is looked at: configs raise anything."""
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
    except BaseException:  # an exception that it came from cannot be read
        trace = ""
    kind = type(error)
    return ErrorDescription(
        error=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")[:_MESSAGE_CHARS],
        text=shortened(str(error)),
        traceback=f"{trace}\n"[:_MESSAGE_CHARS] if trace else "",
    )


def shortened(text: str) -> str:
    """Returns a long text without its middle, since a callback's error has its reason at the end."""
    if len(text) <= _MESSAGE_CHARS:
        return text
    half = _MESSAGE_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"


def _lines(error: BaseException) -> Iterator[str]:
    """Yields an exception's message and its frames, then those of the exceptions that it came from."""
    shown: set[int] = set()
    found: list[str] = []
    each: BaseException | None = error
    while each is not None and id(each) not in shown:
        is_first, frames = not shown, _own_frames(each)
        # JAX adds exceptions that say where it was when it raised another: of use if that has no line of the author.
        is_told = is_first or not type(each).__module__.startswith("jax.")
        if is_told:
            yield ("" if is_first else "from ") + shortened("\n".join([_headline(each), *_notes(each)]))
        if is_told or not found:
            yield from frames[:_MOST_FRAMES]
            if len(frames) > _MOST_FRAMES:
                yield f"  ... and {len(frames) - _MOST_FRAMES} earlier lines"
        found += frames
        shown.add(id(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _headline(error: BaseException) -> str:
    kind, text = type(error), str(error)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"{name}: {text}" if text else name


def _notes(error: BaseException) -> list[str]:
    """Returns the notes that were added to an exception, but not what JAX says of its own frames."""
    return [note for note in getattr(error, "__notes__", ()) if "JAX has removed its internal frames" not in note]


def _own_frames(error: BaseException) -> list[str]:
    """Returns the frames of an exception that are in the author's own files, the latest first."""
    return [
        f"  {frame.filename}:{frame.lineno}, in {frame.name}{f': {frame.line}' if frame.line else ''}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not installed.is_installed(frame.filename)
    ]
