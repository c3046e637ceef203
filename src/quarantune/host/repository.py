"""The commit of the repository that holds a function."""

from __future__ import annotations

import functools
import os
import subprocess
import types

from quarantune.host.packages import is_installed

_GIT_PATIENCE_S = 2.0
_OTHER_REPOSITORY = frozenset({"GIT_DIR", "GIT_COMMON_DIR", "GIT_WORK_TREE"})
"""Variables that name a repository for any directory; git sets them for hooks and `git rebase --exec`."""


def commit_of(function: types.FunctionType | None) -> str:
    """Returns the commit of the repository that holds a function's file, as `3f2a9c1b04d7`.

    Args:
        function: a Python function, or None. A function without a file, such as in a notebook, counts as part of the
            working directory.

    Returns:
        The commit; empty without a repository or git, or if the function is an installed package's.
    """
    file = "" if function is None else function.__code__.co_filename
    return "" if is_installed(file) else _commit(os.path.dirname(file) if os.path.isfile(file) else ".")


@functools.cache
def _commit(directory: str) -> str:
    """Returns the commit of a directory when this process first asked: the commit of the code it has loaded."""
    command = ["git", "-C", directory, "rev-parse", "--short=12", "HEAD"]
    variables = {name: value for name, value in os.environ.items() if name not in _OTHER_REPOSITORY}
    try:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()
