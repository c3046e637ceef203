"""The user's line, from deep inside this package: where warnings point, and what tracebacks show."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import types
import warnings
from types import TracebackType
from typing import TypeVar

from quarantune.host.locks import new_lock

_E = TypeVar("_E", bound=BaseException)

_PASSED_THROUGH = frozenset({"quarantune", "jax", "jaxlib", "contextlib", "functools"})
"""Packages whose frames may stand between a user's call and a warning."""
_FRAME = r'  File "([^"\n]+)", line \d+,? in [^\n]*(?:\n    [^\n]*)*(?:\n|\Z)'
"""A frame in a traceback or in faulthandler's report, with its lines of code."""
_FRAMES = re.compile(f"(?:{_FRAME}){{2,}}")
_INSIDE = re.compile(
    "|".join(
        [
            "<frozen ",
            re.escape(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep),
            rf"{re.escape(sysconfig.get_path('stdlib') + os.sep)}(?!site-packages|dist-packages)",
            r".*/(?:site|dist)-packages/jax(?:lib)?/",
        ]
    )
)
"""Files of this package, of JAX and of Python itself."""

told: set[str] = set()
"""The topics of the warnings that this process issues once. Tests clear it."""
_told_lock = new_lock()


def warn(message: str, category: type[Warning]) -> None:
    """Issues a warning that points to the user's line.

    `warnings.warn` needs the number of frames in between, which varies: the same warning may come from a plain call,
    from a trace that JAX makes, or from `lookup`.

    Args:
        message: the text.
        category: the class of the warning.
    """
    frame = users_frame()
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=str(names.get("__name__") or "<unknown>"),
        registry=names.setdefault("__warningregistry__", {}),
    )


def warn_once(message: str, category: type[Warning], *, topic: str | None = None) -> None:
    """Issues a warning like `warn`, the first time in this process.

    Args:
        message: the text.
        category: the class of the warning.
        topic: what the warning is about, if it has several texts; by default, the text.
    """
    with _told_lock:
        if (topic or message) in told:
            return
        told.add(topic or message)
    warn(message, category)


def callers_mistake(error: _E) -> _E:
    """Marks an error as a mistake in the caller's line, where its traceback should end; returns it."""
    error._is_callers_mistake = True  # type: ignore[attr-defined]
    return error


def ends_at_caller(error: BaseException) -> bool:
    """Returns whether the traceback of an error should not show this package."""
    return isinstance(error, KeyboardInterrupt) or hasattr(error, "_is_callers_mistake")


class own_frames_hidden:
    """Hides this package's frames from the traceback of a Ctrl-C, or of a caller's mistake, in the block.

    The frames of user code in the block stay. This belongs in the outermost function of this package: an exception
    that leaves a `with` does not record its frame again.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and ends_at_caller(error):
            hide_own_frames(error)


def hide_own_frames(error: BaseException) -> None:
    """Removes the frames before the first frame of the user's code from a traceback."""
    trace = error.__traceback__
    while trace is not None and _package(trace.tb_frame) in _PASSED_THROUGH | sys.stdlib_module_names:
        trace = trace.tb_next
    error.__traceback__ = trace


def folded(log: str) -> str:
    """Returns a log in which a line stands for several frames in a row of this package, of JAX or of Python."""
    return _FRAMES.sub(_folded_run, log)


def _folded_run(frames: re.Match[str]) -> str:
    kept, inside = list[str](), list[str]()

    def close() -> None:
        if len(inside) > 1:
            kept.append(f"  ... {len(inside)} frames of quarantune, JAX and Python\n")
        else:
            kept.extend(inside)
        inside.clear()

    for frame in re.finditer(_FRAME, frames[0]):
        if _INSIDE.match(frame[1]):
            inside.append(frame[0])
        else:
            close()
            kept.append(frame[0])
    close()
    text = "".join(kept)
    return text if frames[0].endswith("\n") else text.removesuffix("\n")


def users_frame() -> types.FrameType:
    """Returns the innermost frame of the user's code, or else the outermost frame."""
    frame = sys._getframe(1)
    while _package(frame) in _PASSED_THROUGH and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
