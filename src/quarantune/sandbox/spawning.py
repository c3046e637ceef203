"""How a fresh interpreter of ours is started, with the caller's import path and nothing of its `__main__`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

# Collecting garbage while JAX is imported costs a third of that time and finds none.
_BOOTSTRAP = (
    "import gc, sys, json; gc.disable(); o = json.loads(sys.argv[1]); sys.path[:] = o['path']; "
    "from quarantune.sandbox import main; main.run(o)"
)


_IMPORTABLE = ("jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "quarantune", "absl")
"""Packages whose modules are imported before they are needed: importing these has no effect but time."""


def import_modules(names: Sequence[str]) -> None:
    """Imports modules that will be needed here or in a fork; one that cannot be imported is no harm."""
    for name in names:
        if name.partition(".")[0] in _IMPORTABLE and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


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
