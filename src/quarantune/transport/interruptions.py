"""Tells exceptions raised by signal handlers from those of the code that they interrupt."""

from __future__ import annotations

import inspect
import signal
import traceback
import types


def is_one(error: BaseException) -> bool:
    """Returns whether an exception was raised by a signal handler, for example by a timeout of the caller's.

    Args:
        error: the exception, with its traceback.
    """
    handlers = _handlers()
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _handlers() -> set[types.CodeType]:
    found = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            function = handler if isinstance(handler, types.FunctionType) else getattr(handler, "__func__", None)
            code = getattr(function or inspect.getattr_static(type(handler), "__call__", None), "__code__", None)
            if isinstance(code, types.CodeType):
                found.add(code)
    return found
