"""Tells an exception that a signal handler raised from one of the code that it interrupted."""

from __future__ import annotations

import inspect
import signal
import traceback
import types


def is_one(error: BaseException) -> bool:
    """Returns whether a handler of a signal raised an exception, a timeout of the caller's own for example.

    Args:
        error: the exception, as it was caught.
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
