"""The interpreter with which this process starts others."""

from __future__ import annotations

import sys


def path() -> str:
    """Returns the path of this Python's interpreter.

    Raises:
        RuntimeError: there is none: Python is embedded, or frozen into an application, which would start itself again.
    """
    if getattr(sys, "frozen", False):
        raise RuntimeError(
            f"this is a frozen application, of which {sys.executable} would start another instance as a worker: tune "
            f"with an ordinary Python and ship the results (option tables, or QUARANTUNE_CACHE_PATH), set "
            f"QUARANTUNE_ON_MISS=default to run untuned where there is none, or set QUARANTUNE_ISOLATION=none to tune "
            f"in this process"
        )
    if not sys.executable:
        raise RuntimeError(
            "sys.executable is empty, so no worker can be started: set sys.executable to a Python interpreter "
            "or set QUARANTUNE_ISOLATION=none"
        )
    return sys.executable
