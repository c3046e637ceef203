"""The user's line, from deep inside this package: where warnings point, and what tracebacks show."""

from __future__ import annotations

import sys
import types
import warnings
from types import TracebackType

_PASSED_THROUGH = frozenset({"quarantune", "jax", "jaxlib", "contextlib", "functools"})
"""Packages whose frames may stand between a user's call and a warning."""


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


class own_frames_hidden:
    """Hides this package's frames from the traceback of a Ctrl-C in the block.

    The frames of user code in the block stay. This belongs in the outermost function of this package: an exception
    that leaves a `with` does not record its frame again.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            hide_own_frames(error)


def hide_own_frames(error: BaseException) -> None:
    """Removes the frames before the first frame of the user's code from a traceback."""
    trace = error.__traceback__
    while trace is not None and _package(trace.tb_frame) in _PASSED_THROUGH | sys.stdlib_module_names:
        trace = trace.tb_next
    error.__traceback__ = trace


def users_frame() -> types.FrameType:
    """Returns the innermost frame of the user's code, or else the outermost frame."""
    frame = sys._getframe(1)
    while _package(frame) in _PASSED_THROUGH and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
