"""The command that starts another Python like this one."""

from __future__ import annotations

import sys


def interpreter() -> str:
    """Returns the path of this Python's interpreter.

    Raises:
        RuntimeError: Python is embedded, or frozen into an application that would start itself again.
    """
    if getattr(sys, "frozen", False):
        raise RuntimeError(
            f"this is a frozen application, and {sys.executable} would start it again as a worker: tune "
            f"with an ordinary Python and ship the results (option tables, or QUARANTUNE_CACHE_PATH), set "
            f"QUARANTUNE_ON_MISS=default to run untuned without a result, or set QUARANTUNE_ISOLATION=none to "
            f"tune in this process"
        )
    if not sys.executable:
        raise RuntimeError(
            "sys.executable is empty, so no worker can be started: set sys.executable to a Python interpreter "
            "or set QUARANTUNE_ISOLATION=none"
        )
    return sys.executable


def interpreter_command() -> list[str]:
    """Returns the command of a fresh interpreter with this one's flags for imports; the caller appends the code.

    `-P`, because `-c` would put the working directory first on the path.

    Raises:
        RuntimeError: this process has no interpreter to start; see `interpreter`.
    """
    isolated = "-I" if sys.flags.isolated else "-E" if sys.flags.ignore_environment else ""
    user = "-s" if sys.flags.no_user_site and not sys.flags.isolated else ""
    flags = [flag for flag in ("-" + "O" * sys.flags.optimize, isolated, user) if len(flag) > 1]
    return [interpreter(), *flags, "-P", "-c"]
