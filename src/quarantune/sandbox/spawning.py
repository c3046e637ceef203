"""Starts fresh interpreters with the caller's import path, but without running the caller's `__main__`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from quarantune.host.interpreter import interpreter_command
from quarantune.host.packages import startup_path
from quarantune.sandbox import spool
from quarantune.sandbox.template_messages import RoleOptions
from quarantune.values import codec

# Collecting garbage during JAX's import costs a third of the time and finds none. The code sets the import path before
# it imports anything from outside Python's library.
_BOOTSTRAP = (
    "import sys, gc, json, os; gc.disable(); o = json.loads(os.pread(int(sys.argv[1]), int(sys.argv[2]), 0)); "
    "os.close(int(sys.argv[1])); sys.path[:] = o['path']; "
    "from quarantune.sandbox import forker; forker.main(o['options'])"
)
_IMPORTABLE = ("jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "quarantune", "absl")
"""Packages whose modules this package imports ahead of their use, because their import has no side effects."""


def import_modules(names: Sequence[str], *, are_installed: bool = False) -> None:
    """Imports modules for later use here or in a fork, and ignores modules that fail to import.

    Args:
        names: the modules.
        are_installed: whether to import them although they may have side effects.
    """
    for name in names:
        if (are_installed or name.partition(".")[0] in _IMPORTABLE) and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


@contextlib.contextmanager
def standard_descriptors() -> Iterator[None]:
    """Keeps descriptors opened within the block from taking the numbers of closed standard streams.

    A new process would take these descriptors for its standard streams, and libraries write errors to number 2.
    """
    opened = [os.open(os.devnull, os.O_RDWR)]
    try:
        while opened[-1] < 2:
            opened.append(os.open(os.devnull, os.O_RDWR))
        yield
    finally:
        for fd in opened:
            os.close(fd)


def start(options: RoleOptions, *, pass_fds: Sequence[int], **popen: Any) -> subprocess.Popen[bytes]:
    """Starts a fresh interpreter as a template or as a worker.

    `-c` and an explicit path, because `multiprocessing`'s spawn would run the caller's `__main__` again. The options
    travel in an anonymous file, because a command line holds at most 128 KiB.

    Args:
        options: for `forker.main`, which chooses the role by their type.
        pass_fds: descriptors that the process inherits.
        **popen: further arguments of `subprocess.Popen`.

    Raises:
        RuntimeError: this program has no interpreter to start, for example because it is a frozen application.
        OSError: the process cannot start.
    """
    command = interpreter_command()
    data = json.dumps({"path": startup_path(), "options": codec.encode(options)}).encode()
    fd = spool.create("options", size_bytes=len(data))
    try:
        spool.write(fd, data)
        return subprocess.Popen([*command, _BOOTSTRAP, str(fd), str(len(data))], pass_fds=[*pass_fds, fd], **popen)
    finally:
        os.close(fd)
