"""The names of shared memory that a worker's processes make: those that are left go with the worker, however it ends.

A name outlives its processes, and `multiprocessing` removes it only where its tracker outlives them. So a worker notes
each name as it makes it, in a file that its template holds. Names that code in C makes are not noted.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import Any

from quarantune.sandbox import spool

_DIRECTORY = "/dev/shm"
_MOST_BYTES = 1 << 20
_noted_in: list[int] = []
"""The files for the names that this process makes: its own and, since its template may be killed, the template's."""


@contextlib.contextmanager
def file() -> Iterator[int]:
    """Yields a descriptor of a new file for the names of the worker that the block starts; for `remove` after it."""
    fd = spool.create_log()
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise


@contextlib.contextmanager
def directory() -> Iterator[str]:
    """Yields a new directory in memory for small files, which is gone after the block, and however the worker ends.

    Raises:
        OSError: the system has no room for it.
    """
    path = tempfile.mkdtemp(prefix="quarantune-", dir=_DIRECTORY)
    try:
        _note(path, os.stat(path))
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _note(path: str, about: os.stat_result) -> None:
    for fd in _noted_in:
        with contextlib.suppress(OSError, ValueError):  # the config may have closed the file
            os.write(fd, b"%d %d %b\0" % (about.st_dev, about.st_ino, os.fsencode(os.path.basename(path))))


def note_in(fd: int) -> None:
    """Has this process, and its forks, note the shared memory that they make by `multiprocessing`, `open` or `mkdir`.

    Args:
        fd: the file, which stays open.
    """
    _noted_in.append(fd)
    if len(_noted_in) > 1:
        return  # a fork of a process that notes them
    builtins.open = io.open = _noting(open)
    for name in ("open", "mkdir"):
        setattr(os, name, _noting(getattr(os, name)))
    try:
        module: Any = importlib.import_module("_posixshmem")
    except ImportError:
        return  # a system without shared memory
    real = module.shm_open

    def shm_open(path: str, flags: int, **how: Any) -> int:
        opened: int = real(path, flags, **how)
        if flags & os.O_EXCL:  # it was not there before
            _note(path, os.fstat(opened))
        return opened

    module.shm_open = shm_open


def _noting(real: Any) -> Any:
    """Returns a function that opens or makes a path as `real` does, and notes a name that was not there before."""

    @functools.wraps(real)
    def made(*args: Any, **kwargs: Any) -> Any:
        path = args[0] if args else kwargs.get("file", kwargs.get("path"))
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        is_new = os.path.dirname(name) == _DIRECTORY and not os.path.lexists(name)
        result = real(*args, **kwargs)
        if is_new:
            with contextlib.suppress(OSError):
                _note(name, os.lstat(name))
        return result

    made.__module__ = "builtins" if real is open else "os"  # where pickle finds it by its name
    return made


def remove(fd: int) -> None:
    """Removes the shared memory whose names a worker left, and closes the file of the names."""
    # The config may have enlarged the file, which then reads as zeros.
    for record in os.pread(fd, _MOST_BYTES, 0).partition(b"\0\0")[0].split(b"\0"):
        with contextlib.suppress(OSError, ValueError):
            device, inode, name = record.split(b" ", 2)
            path = os.path.join(os.fsencode(_DIRECTORY), name.lstrip(b"/"))
            about = os.lstat(path)
            if (about.st_dev, about.st_ino) == (int(device), int(inode)):  # not what another process made since
                shutil.rmtree(path) if stat.S_ISDIR(about.st_mode) else os.unlink(path)
    os.close(fd)
