"""Errors with advice, for a process that lacks descriptors, memory, disk space or its device; no config is to blame."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator

from quarantune.host import machine
from quarantune.values.errors import SandboxError

_NO_PROCESS = re.compile(
    r"can't start new thread|Cannot fork|[Tt]hread creation failed|pthread_create[^\n]*fail|failed[^\n]*pthread_create"
    r"|(fork|std::system_error)[^\n]*(\n[^\n]*){0,3}Resource temporarily unavailable"
)
"""Messages of Python, XLA, LLVM, OpenBLAS, OpenMP, C++ and shells about a process or thread that could not start."""
_NO_DEVICE = re.compile(r"Unable to initialize backend '[^\n]*")

_PATIENCE_S = 10.0
_PAUSE_S = 0.25


@contextlib.contextmanager
def with_advice(name: str) -> Iterator[None]:
    """Replaces the `OSError` of a shortage within the block by an error that gives a remedy.

    Args:
        name: the tuned function's name.

    Raises:
        SandboxError: a resource ran out.
    """
    try:
        yield
    except OSError as error:
        if (advice := remedy(error)) is None:
            raise
        raise SandboxError(
            f"{name}: the sweep had to end ({error.strerror}): {advice}. Finished configs are kept, and the next sweep "
            f"continues from there"
        ) from error


def lacks_processes(text: str) -> bool:
    """Returns whether an error or an output says that no further process or thread could start."""
    return _NO_PROCESS.search(text) is not None


def lacking(text: str, *, has_device: bool) -> tuple[int, str]:
    """Returns the resource that a worker lacked, as an `errno` and in words; 0 if it lacked nothing.

    Args:
        text: the worker's error and output.
        has_device: whether the worker had a device to use.
    """
    if lacks_processes(text):
        return errno.EAGAIN, f"it could not start a process or thread, and {_process_limit()}"
    if has_device and (told := _NO_DEVICE.search(text)):
        return errno.ENODEV, f"its process could not use the device, whose memory others may hold: {told[0]}"
    return 0, ""


def _process_limit() -> str:
    """Returns the limit on processes and threads that binds most, in words."""
    left = machine.processes_left()
    return "the system starts no more" if left is None else left[1]


def patiently(act: Callable[[], object]) -> None:
    """Calls `act` again, for a limited time, while it lacks processes or threads, which others may end.

    Raises:
        OSError: `act` still lacks a process or thread after `_PATIENCE_S`.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            act()
            return
        except Exception as error:
            if not isinstance(error.__cause__ or error, BlockingIOError) and not lacks_processes(str(error)):
                raise
            if time.monotonic() > deadline:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        time.sleep(_PAUSE_S)


def remedy(error: Exception) -> str | None:
    """Returns the remedy for a shortage; None for another error."""
    match error.errno if isinstance(error, OSError) else None:
        case errno.EAGAIN:
            return (
                f"not even one worker could start its threads, and {_process_limit()}: end other processes, or raise "
                "the limit with `ulimit -u` (in a container: --pids-limit)"
            )
        case errno.ENODEV:
            return (
                "no worker could share the device with this process: end the programs that hold its memory, or give "
                "this one less of it (XLA_PYTHON_CLIENT_MEM_FRACTION); `quarantune doctor` shows more"
            )
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"this process may have {limit} descriptors open, and a sweep needs about four for each config that "
                "compiles or waits: raise the limit with `ulimit -n 1024`"
            )
        case errno.ENFILE:
            return "the machine has too many files open: close some, or raise fs.file-max"
        case errno.EFBIG:
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            return f"a file of this process may not grow over {limit} bytes: raise the limit with `ulimit -f`"
        case errno.ENOSPC | errno.EDQUOT:
            return f"there is no room left in memory and in {tempfile.gettempdir()}: make some, or set TMPDIR"
        case errno.ENOMEM:
            return "there is no memory left for this process: free some, or tune with smaller arguments"
    return None
