"""What a process of ours does to itself, and to its descendants, so that nothing it does reaches beyond it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterable

from quarantune.host import machine

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILL_DEADLINE_S = 2.0
"""How long a killed tree is waited for; only a process in uninterruptible sleep outlasts it."""

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


_IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})


def reset_signals() -> None:
    """Unblocks every signal and ends the ignoring of any, as the thread that started this process may have left them.

    A new process inherits both. A template that never sees SIGCHLD would never tell that a worker has ended.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            how = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, how)


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when `parent`'s forking thread ends; exits when it already has."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def contain_worker(*, parent: int, log_fd: int) -> None:
    """Turns a freshly started process into a worker: own session, no core, first to go when memory is short.

    Args:
        parent: the process it must not outlive.
        log_fd: takes its stdout, its stderr and faulthandler's report.
    """
    with contextlib.suppress(PermissionError):  # already a session's leader when it was spawned as one
        os.setsid()
    die_with_parent(parent)
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    redirect_output(log_fd)


def redirect_output(log_fd: int) -> None:
    """Sends stdout and stderr to `log_fd`, where faulthandler reports too, and gives stdin nothing to read."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    # The interpreter's stream objects may be the caller's replacements or hold a fork's unflushed text.
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable(file=2, all_threads=False)


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to a process, its process group and every descendant."""
    family = [*machine.descendants(pid), pid]
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    _kill(family)


def kill_orphans(known: Collection[int]) -> int:
    """Kills and reaps every child of this process that is not in `known`, and whatever they leave behind.

    An orphan's children become ours as it dies, so this goes round until none is left.

    Args:
        known: the children that are to stay.

    Returns:
        How many processes were killed.
    """
    killed = 0
    deadline = time.monotonic() + KILL_DEADLINE_S
    while orphans := [pid for pid in machine.children(os.getpid()) if pid not in known]:
        for pid in orphans:
            kill_tree(pid)
        for pid in orphans:
            killed += _reap_within(pid, deadline)
        if time.monotonic() > deadline:
            break
    return killed


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _reap_within(pid: int, deadline: float) -> int:
    while True:
        try:
            reaped, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if reaped:
            return 1
        if time.monotonic() > deadline:
            return 0
        time.sleep(0.001)
