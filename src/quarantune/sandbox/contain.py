"""Contains a worker: its session, signals, limits and output, and the kills that end it with all its descendants."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Collection

from quarantune.host import machine, proc
from quarantune.sandbox import shared_names

_SHOW_STACK = signal.SIGRTMAX - 3
"""Has a worker report its stack; JAX, CUDA and Python use none of the real-time signals."""
_STACK_DEADLINE_S, _STACK_WAIT_S = 0.2, 0.01
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILL_DEADLINE_S = 2.0
"""The longest wait for killed processes to exit; only a process in uninterruptible sleep takes longer."""

_libc = ctypes.CDLL(None, use_errno=True)


_IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})


def reset_signals() -> None:
    """Unblocks every signal and restores the default action of those that are ignored.

    A new process inherits both from the thread that started it. A template that never receives SIGCHLD would never
    report that a worker has ended.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, handler)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread of `parent` that forked it ends; exits if `parent` is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent has died."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def contain_worker(*, parent: int, log_fd: int, names_fd: int, oom_score: int = 1000) -> None:
    """Turns a freshly started process into a worker.

    The worker has a session of its own and dumps no core.

    Args:
        parent: the process that the worker must not outlive.
        log_fd: receives its stdout, its stderr and faulthandler's report; closed here.
        names_fd: takes the names of the shared memory that it makes.
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
    shared_names.note_in(names_fd)


def redirect_output(log_fd: int) -> None:
    """Sends stdout, stderr and faulthandler's report to `log_fd`, and connects stdin to /dev/null."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    # In a fork, the stream objects may be the caller's replacements, or hold text that is not flushed yet.
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(_SHOW_STACK, file=2, chain=True)


def show_stack(pid: int) -> None:
    """Has a worker write its Python stack to its log and die; one that blocks all signals, or is stopped, does neither.

    Were it not to die at once, a call that the signal interrupts would return, and the config would go on.
    """
    with contextlib.suppress(OSError):
        os.kill(pid, _SHOW_STACK)
    deadline = time.monotonic() + _STACK_DEADLINE_S
    while time.monotonic() < deadline and _is_pending(pid):
        time.sleep(_STACK_WAIT_S)
    time.sleep(_STACK_WAIT_S)  # the report takes less than a millisecond once it has begun


def _is_pending(pid: int) -> bool:
    pending = re.search(rb"^ShdPnd:\t([0-9a-f]+)$", proc.read(f"/proc/{pid}/status"), re.MULTILINE)
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

    This process adopts the children of an orphan as it dies, so the search is repeated until it finds none.

    Args:
        known: the children that stay.
    """
    deadline = time.monotonic() + KILL_DEADLINE_S
    while orphans := [pid for pid in machine.children(os.getpid()) if pid not in known]:
        for pid in orphans:
            kill_tree(pid)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                    time.sleep(0.001)
        if time.monotonic() > deadline:
            break
