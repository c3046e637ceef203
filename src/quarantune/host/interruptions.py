"""Interruptions: exceptions that signal handlers raise, and times when this process was stopped."""

from __future__ import annotations

import functools
import inspect
import signal
import traceback
import types
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_STOPPED_S = 0.5
"""Seconds between two looks above which this process was stopped: its loops look every twentieth of a second."""


class Stops:
    """Measures for how long this process was stopped, by the gaps between its looks at the clock.

    While the process that keeps the deadlines does not run, its workers may not run either, and their messages are not
    read. That time counts toward no deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts to watch the clock.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._last_look = clock()

    def begin(self) -> None:
        """Starts anew, after work of this process that may have taken long."""
        self._last_look = self._clock()

    def worked(self, taken_s: float) -> None:
        """Takes note of work of this process since its last look, which does not count as a stop."""
        self._last_look += taken_s

    def lost_s(self) -> float:
        """Returns for how many seconds this process was stopped since its last look; 0.0 if it was not."""
        last, self._last_look = self._last_look, self._clock()
        passed_s = self._last_look - last
        return passed_s if passed_s > _STOPPED_S else 0.0


def is_interruption(error: BaseException) -> bool:
    """Returns whether a signal handler raised an exception, for example for a timeout of the caller's.

    Args:
        error: the exception, with its traceback.
    """
    handlers, trace = _handlers(), BaseException.__dict__["__traceback__"].__get__(error)  # whatever its class says
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(trace))


def answer_of(question: Callable[..., _T], *about: Any) -> _T | None:
    """Returns the result of a call of the user's code; None if it raises.

    Raises:
        Exception: a signal handler raised during the call.
    """
    try:
        return question(*about)
    except Exception as error:
        if is_interruption(error):
            raise
        return None


def failure_of(call: Callable[..., object], *about: Any) -> Exception | None:
    """Returns the exception that a call of the user's code raises; None if it raises none.

    Raises:
        Exception: a signal handler raised during the call.
    """
    try:
        call(*about)
    except Exception as error:
        if is_interruption(error):
            raise
        return error
    return None


def _handlers() -> set[types.CodeType]:
    found = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            function = handler if isinstance(handler, types.FunctionType) else getattr(handler, "__func__", None)
            code = getattr(function or inspect.getattr_static(type(handler), "__call__", None), "__code__", None)
            if isinstance(code, types.CodeType):
                found.add(code)
    return found
