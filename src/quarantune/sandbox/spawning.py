"""How a fresh interpreter of ours is started, with the caller's import path and nothing of its `__main__`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

_BOOTSTRAP = (
    "import sys, json; o = json.loads(sys.argv[1]); sys.path[:] = o['path']; "
    "from quarantune.sandbox import main; main.run(o)"
)


def command(role: str, path: Sequence[str], **options: Any) -> list[str]:
    """Returns the command line of a process of ours.

    `-c` and an explicit path, because `-m` would put the working directory first on the path, and `multiprocessing`'s
    spawn would run the caller's `__main__` again.

    Args:
        role: `template` or `worker`.
        path: the `sys.path` it is to have; an empty entry means the working directory of this moment.
        options: JSON-able data for its main.

    Raises:
        RuntimeError: there is no interpreter to start, as in an embedded Python.
    """
    if not sys.executable:
        raise RuntimeError(
            "sys.executable is empty, so no worker can be started: set sys.executable to a Python interpreter "
            "or set QUARANTUNE_ISOLATION=none"
        )
    optimize = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    full = [entry or os.getcwd() for entry in path]
    return [
        sys.executable,
        *optimize,
        "-c",
        _BOOTSTRAP,
        json.dumps({"role": role, "path": full, **options}),
    ]
