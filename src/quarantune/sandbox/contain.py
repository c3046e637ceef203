"""Contains a worker: its session, signals, limits, output and shared memory, and the kills that end all of it."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import functools
import glob
import importlib
import io
import multiprocessing.process
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from typing import Any

from quarantune.host import machine
from quarantune.host.process import SANDBOX_MARK

_SHOW_STACK = signal.SIGRTMAX - 3
"""Signal that makes a worker report its stack; JAX, CUDA and Python use none of the real-time signals."""
_STACK_DEADLINE_S, _STACK_WAIT_S = 0.2, 0.01
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_DEADLINE_S = 2.0
"""Longest wait, in seconds, for killed processes to exit; only one in uninterruptible sleep takes longer."""
_IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
_SHARED_MEMORY = "/dev/shm"
_MOST_BYTES = 1 << 20
"""Most bytes to read of a file with names of shared memory."""
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_ARGUMENTS_WITH_OPENER = 7
"""Number of positional arguments of `open` after the file, up to and including the opener."""
_noted_in: list[int] = []
"""Files for the names that this process makes: its own file and, because its template may die first, the template's."""

_libc = ctypes.CDLL(None, use_errno=True)


def reset_signals() -> None:
    """Unblocks every signal and restores the default action of ignored signals.

    A new process inherits both from the thread that started it. A template that never receives SIGCHLD would never
    report that a worker has ended.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, handler)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread of `parent` that forked it ends; exits if `parent` is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent has died."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def contain_worker(*, parent: int, log_fd: int, names_fd: int, oom_score: int = 1000) -> None:
    """Turns a freshly started process into a worker.

    The worker leads a new session and dumps no core.

    Args:
        parent: the process that the worker must not outlive.
        log_fd: receives its stdout, its stderr and faulthandler's report; closed here.
        names_fd: receives the names of the shared memory that it makes.
        oom_score: how much sooner than others the kernel kills it when memory runs out, from 0 to 1000.
    """
    with contextlib.suppress(PermissionError):  # a spawned worker leads a session already
        os.setsid()
    die_with_parent(parent)
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(oom_score))
    redirect_output(log_fd)
    os.close(log_fd)
    note_in(names_fd)
    directory = own_directory(os.getpid())
    with contextlib.suppress(OSError):  # the system has no shared memory
        os.mkdir(directory, 0o700)
        # Children of `multiprocessing`, even spawned ones, take over its settings.
        settings = vars(multiprocessing.process.current_process())["_config"]
        settings.update(tempdir=directory, semprefix=f"/{os.path.basename(directory)}")


def redirect_output(log_fd: int) -> None:
    """Sends stdout, stderr and faulthandler's report to `log_fd`, and connects stdin to /dev/null."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    # In a fork, the stream objects may be the caller's replacements, or hold text that nobody has flushed yet.
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(_SHOW_STACK, file=2, chain=True)


def show_stack(pid: int) -> None:
    """Makes a worker write its Python stack to its log and die; a worker that is stopped or blocks all signals cannot.

    The worker must die at once: otherwise a call that the signal interrupts would return, and the config continue.
    """
    with contextlib.suppress(OSError):
        os.kill(pid, _SHOW_STACK)
    deadline = time.monotonic() + _STACK_DEADLINE_S
    while time.monotonic() < deadline and _is_pending(pid):
        time.sleep(_STACK_WAIT_S)
    time.sleep(_STACK_WAIT_S)  # the report takes less than a millisecond once it has begun


def _is_pending(pid: int) -> bool:
    pending = re.search(rb"^ShdPnd:\t([0-9a-f]+)$", machine.read_proc(f"/proc/{pid}/status"), re.MULTILINE)
    return pending is not None and bool(int(pending[1], 16) >> (_SHOW_STACK - 1) & 1)


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to a process, its process group and every descendant."""
    family = [*machine.descendants(pid), pid]
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(OSError):
            os.kill(member, signal.SIGKILL)


def kill_orphans(known: Collection[int]) -> None:
    """Kills and reaps every child of this process that is not in `known`, and all of their descendants.

    This process adopts the children of an orphan as it dies, so the search continues until it finds none.

    Args:
        known: the children that stay.
    """
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while orphans := [pid for pid in machine.children(os.getpid()) if pid not in known]:
        for pid in orphans:
            kill_tree(pid)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                    time.sleep(0.001)
        if time.monotonic() > deadline:
            break


# --- shared memory ---
#
# Its name outlives its processes, and `multiprocessing` removes it only if its tracker outlives them. So a worker notes
# each name in a file that its template holds. A worker may die at any moment, and another process may use the same
# name. So the worker first notes a draft name that only it uses, and makes the object under that. Then it notes the
# real name with the object's inode, and renames the object. Nobody notes the names that C code or a freshly started
# child makes. C code makes semaphores: `multiprocessing` begins their names with the name of the worker's directory.


def common_directory(token: str) -> str:
    """Returns the directory in memory that all workers of a process's template share; it may not exist.

    Args:
        token: the token of the template, which makes the directory and removes it at its end.
    """
    return f"{_SHARED_MEMORY}/quarantune-{token}"


def own_directory(pid: int) -> str:
    """Returns the directory in memory for the sockets of a worker's children; names of semaphores begin with its name.

    Args:
        pid: the worker.
    """
    return f"{common_directory(os.environ.get(SANDBOX_MARK, ''))}-{pid}"


def remove_all_of(directory: str) -> None:
    """Removes a directory in shared memory, and the directories and semaphores whose names begin with its name."""
    semaphores = f"{_SHARED_MEMORY}/sem.{os.path.basename(directory)}-*"
    for path in (directory, *glob.glob(f"{directory}-*"), *glob.glob(semaphores)):
        with contextlib.suppress(OSError, RecursionError):  # a thousand nested directories
            _remove(path)


def directory() -> tempfile.TemporaryDirectory[str]:
    """Returns a new directory in memory for small files and a `with` statement.

    It is gone after the block, and however the worker ends, because `os.mkdir` makes it and notes its name.

    Raises:
        OSError: the system has no room for it.
    """
    return tempfile.TemporaryDirectory(prefix="quarantune-", dir=_SHARED_MEMORY, ignore_cleanup_errors=True)


def _note(path: str, about: os.stat_result | None = None) -> None:
    """Notes a name in shared memory, and the object that has it; None for a name that only this worker uses."""
    device, inode = (about.st_dev, about.st_ino) if about else (0, 0)
    for fd in _noted_in:
        with contextlib.suppress(OSError, ValueError):  # the config may have closed the file
            os.write(fd, b"%d %d %b\0" % (device, inode, os.fsencode(os.path.basename(path))))


def note_in(fd: int) -> None:
    """Makes this process and its forks note the shared memory that they make by `multiprocessing`, `open` or `mkdir`.

    Args:
        fd: the file, which stays open.
    """
    _noted_in.append(fd)
    if len(_noted_in) > 1:
        return  # a fork of a process that already notes names
    os.mkdir = _noting(os.mkdir, lambda *_, **__: True)
    os.open = _noting(os.open, lambda flags, *_, **__: flags & os.O_CREAT)
    builtins.open = io.open = _opening_by(open)
    with contextlib.suppress(ImportError):  # a system without shared memory
        module: Any = importlib.import_module("_posixshmem")
        module.shm_open = _noting(module.shm_open, lambda flags, *_, **__: flags & os.O_CREAT, place="")
        module = importlib.import_module("_multiprocessing")

        class SemLock(module.SemLock):  # type: ignore[misc]
            """Notes the names that other packages, such as joblib, give their semaphores."""

            def __new__(cls, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> Any:
                made = super().__new__(cls, kind, value, maxvalue, name, unlink)
                if not unlink:
                    path = f"{_SHARED_MEMORY}/sem.{name.lstrip('/')}"
                    _note(path, os.lstat(path))
                return made

        module.SemLock = SemLock


def _noting(real: Any, makes: Callable[..., object], *, place: str = _SHARED_MEMORY) -> Any:
    """Returns a function like `real` that notes each name in shared memory before it makes it.

    Args:
        real: opens or makes a path.
        makes: returns whether `real` may make the path, given the other arguments.
        place: the directory of shared memory in the paths of `real`.
    """

    @functools.wraps(real)
    def made(path: Any, *args: Any, **kwargs: Any) -> Any:
        name = _name_in(place, path)
        target = f"{_SHARED_MEMORY}/{name}"
        if not name or not makes(*args, **kwargs) or os.path.lexists(target):
            return real(path, *args, **kwargs)
        draft = f"{_SHARED_MEMORY}/quarantune-{os.urandom(8).hex()}"
        _note(draft)
        try:
            result = real(f"{place}/{os.path.basename(draft)}", *args, **kwargs)
        except OSError as error:
            error.filename = path
            raise
        _note(target, os.lstat(draft))
        if not _rename_to_new(draft, target):
            _remove(draft)
            if result is not None:
                os.close(result)
            return real(path, *args, **kwargs)
        return result

    made.__module__ = "os"  # pickle finds it there by its name
    return made


def _opening_by(real: Any) -> Any:
    """Returns a function like `open` that opens files in shared memory by `os.open`."""

    @functools.wraps(real)
    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if _name_in(_SHARED_MEMORY, file) and len(args) < _ARGUMENTS_WITH_OPENER:
            kwargs.setdefault("opener", lambda path, flags: os.open(path, flags, 0o666))
        return real(file, *args, **kwargs)

    opened.__module__ = "builtins"
    return opened


def _name_in(place: str, path: Any) -> str:
    """Returns the name of a path directly in a directory; an empty text for any other path."""
    directory, name = os.path.split(os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else "")
    return name if directory.rstrip("/") == place else ""


def _rename_to_new(path: str, target: str) -> bool:
    """Renames a file or directory unless the new name exists; returns whether it did."""
    try:
        return not _libc.renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    except AttributeError:  # a C library of before 2018
        return False


def _remove(path: str | bytes) -> None:
    """Removes a file, or a directory with its content."""
    shutil.rmtree(path) if stat.S_ISDIR(os.lstat(path).st_mode) else os.unlink(path)


def remove_shared_memory(fd: int) -> None:
    """Removes the shared memory whose names a worker left, and closes the file of the names."""
    # The config may have enlarged the file, which then reads as zeros.
    for record in os.pread(fd, _MOST_BYTES, 0).partition(b"\0\0")[0].split(b"\0"):
        with contextlib.suppress(OSError, ValueError, RecursionError):  # a thousand nested directories
            device, inode, name = record.split(b" ", 2)
            path = os.path.join(os.fsencode(_SHARED_MEMORY), name.lstrip(b"/"))
            about = os.lstat(path)
            # Another process may have made a new object of this name since.
            if (int(device), int(inode)) in ((0, 0), (about.st_dev, about.st_ino)):
                _remove(path)
    os.close(fd)
