"""Real misdeeds of configs, and a tuned kernel that performs them; this module has no tests."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp

import quarantune
from quarantune.host import machine
from quarantune.host.process import SANDBOX_MARK, in_sandbox


class UnspeakableError(Exception):
    """An exception that cannot be formatted."""

    def __str__(self) -> str:
        raise RuntimeError("no words for it")


class Secretive(type):
    """A class of classes without readable names."""

    def __getattribute__(cls, name: str) -> NoReturn:
        raise RuntimeError("nothing to see")


class ClasslessError(Exception):
    """An exception without a readable type."""

    @property
    def __class__(self) -> NoReturn:
        raise RuntimeError("no class")


class OddText(str):
    """A string whose methods fail."""

    def __getitem__(self, place: object) -> NoReturn:
        raise RuntimeError("no letters")


class OddError(Exception):
    """An exception with an `OddText` as its message."""

    def __str__(self) -> str:
        return OddText("odd" * 2000)


def fail() -> NoReturn:
    raise ArithmeticError("this config is bad")


def fail_unspeakably() -> NoReturn:
    raise UnspeakableError


def fail_namelessly() -> NoReturn:
    raise Secretive("NamelessError", (Exception,), {})


def fail_without_a_class() -> NoReturn:
    raise ClasslessError


def fail_oddly() -> NoReturn:
    raise OddError


def exit_politely() -> NoReturn:
    sys.exit("that is enough")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt("no terminal did this")


def segfault() -> None:
    ctypes.memset(0, 1, 1)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_its_group() -> None:
    os.killpg(0, signal.SIGKILL)


def kill_its_siblings() -> None:
    """Kills the workers of all other configs, and then itself."""
    parent = os.getppid()
    if f"{SANDBOX_MARK}=".encode() not in Path(f"/proc/{parent}/environ").read_bytes():
        raise AssertionError(f"process {parent} is no template")
    for sibling in machine.children(parent):
        if sibling != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(sibling, signal.SIGKILL)
    kill_itself()


def kill_its_parent() -> None:
    parent = os.getppid()
    # An orphan's parent can be any process, even process 1, so kill only a template.
    if f"{SANDBOX_MARK}=".encode() not in Path(f"/proc/{parent}/environ").read_bytes():
        raise AssertionError(f"process {parent} is no template")
    os.kill(parent, signal.SIGKILL)
    hang()  # its parent's death must end it


def stop_its_template() -> None:
    parent = os.getppid()
    if f"{SANDBOX_MARK}=".encode() not in Path(f"/proc/{parent}/environ").read_bytes():
        raise AssertionError(f"process {parent} is no template")
    os.kill(parent, signal.SIGSTOP)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> NoReturn:
    while True:
        time.sleep(60)


def hang_holding_the_gil() -> NoReturn:
    while True:
        ctypes.PyDLL(None).pause()


def hang_deaf_to_signals() -> NoReturn:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    hang()


def starve() -> NoReturn:
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    taken = [mmap.mmap(-1, 32 << 20, flags=how) for _ in range(32)]  # 1 GB, unless it is stopped
    time.sleep(20)  # a busy machine measures memory late
    raise AssertionError(f"nobody stopped it at {len(taken)} maps")


def starve_in_a_child() -> None:
    child = os.fork()
    if child == 0:
        starve()
    os.waitpid(child, 0)


def starve_in_shared_memory() -> NoReturn:
    how = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    taken = [mmap.mmap(-1, 32 << 20, flags=how) for _ in range(32)]
    time.sleep(20)
    raise AssertionError(f"nobody stopped it at {len(taken)} maps")


def hold_shared_memory() -> None:
    """Makes shared memory under a name of Python, and a child makes some under another name."""
    _held.append(SharedMemory(create=True, size=1 << 20))
    if not (child := os.fork()):
        try:
            SharedMemory(name=f"own-{os.getppid()}", create=True, size=1 << 20).close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def hold_shared_memory_and_die() -> None:
    hold_shared_memory()
    kill_itself()


def hold_shared_memory_and_hang() -> None:
    hold_shared_memory()
    hang()


def hold_shared_memory_and_exit() -> None:
    hold_shared_memory()
    exit_with_0()


_held: list[SharedMemory] = []


def enlarge() -> None:
    """Makes the files for its results larger than any memory."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:quarantune" in os.readlink(f"/proc/self/fd/{name}"):
                os.ftruncate(int(name), 1 << 40)


def enlarge_mapped() -> None:
    """Enlarges the files for its results, and prevents their sealing."""
    enlarge()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if "memfd:quarantune" in os.readlink(f"/proc/self/fd/{name}"):
                _kept.append(mmap.mmap(int(name), mmap.PAGESIZE))


_kept: list[mmap.mmap] = []


def flood_and_seal() -> None:
    """Prints too much, then seals the files for its results."""
    flood()
    every = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:quarantune" in os.readlink(f"/proc/self/fd/{name}"):
                fcntl.fcntl(int(name), fcntl.F_ADD_SEALS, every)
    time.sleep(1.0)  # time to shorten the output


def starve_in_a_memfd() -> NoReturn:
    """Writes 1 GB to a file in memory that it never maps."""
    fd = os.memfd_create("balloon")
    for _ in range(32):
        os.write(fd, bytes(32 << 20))
    hang()


def starve_as_a_daemon() -> NoReturn:
    """Takes the memory in an orphan with its own session."""
    leave_a_daemon(starve)
    hang()


def share_data_with_a_pool() -> None:
    """Shares data with four forks; it fits into the limit once, but not five times."""
    data = bytes(range(256)) * (120 << 12)  # 120 MB
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            time.sleep(1.0)  # time to sample the memory
            os._exit(data[-1] != 255)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def become_another_program() -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-c", ""])


def hold_400_mb() -> None:
    """Takes memory for one sample, then frees it."""
    with mmap.mmap(-1, 400 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE):
        time.sleep(1.0)


def ask_for_too_much() -> None:
    bytearray(1 << 62)


def exit_with_0() -> None:
    os._exit(0)


def exit_with_7() -> None:
    os._exit(7)


def leave_a_child() -> None:
    if os.fork() == 0:
        hang()


def leave_a_daemon(act: Callable[[], object] = lambda: hang()) -> None:
    """Forks twice, with a new session in between: the remaining process is an orphan in another group."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    act()
    os._exit(0)


def bomb() -> None:
    """Leaves 60 processes: 30 children, each with a child in another session."""
    for _ in range(30):
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
            hang()


def flood() -> None:
    for _ in range(256):
        os.write(1, b"blah" * (16 << 10))
    print("the last word")


def flood_forever() -> None:
    while True:
        flood()


def scribble() -> None:
    """Writes garbage to every descriptor."""
    for fd in range(1024):
        with contextlib.suppress(OSError):
            os.write(fd, b"\xff" * 4096)


def close_everything() -> None:
    os.closerange(0, 1024)


def replace_stdout() -> None:
    if sys.stdout is not None:
        sys.stdout.close()
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


def move_away() -> None:
    os.chdir("/")
    os.environ.clear()
    os.umask(0o777)
    sys.path.clear()


def leave_threads() -> None:
    for daemon in (True, False):
        threading.Thread(target=hang, daemon=daemon).start()


def hang_at_exit() -> None:
    atexit.register(hang)


MEASURED = ("ok", "slow")
"""Outcomes of configs without a misdeed."""
MISDEEDS: dict[str, Callable[[], object]] = {
    act.__name__: act
    for act in (
        fail,
        fail_unspeakably,
        fail_namelessly,
        fail_without_a_class,
        fail_oddly,
        exit_politely,
        interrupt,
        segfault,
        os.abort,
        kill_itself,
        kill_its_group,
        kill_its_siblings,
        kill_its_parent,
        stop_its_template,
        stop_itself,
        hang,
        hang_holding_the_gil,
        hang_deaf_to_signals,
        starve,
        starve_in_a_child,
        starve_in_shared_memory,
        starve_in_a_memfd,
        hold_shared_memory,
        hold_shared_memory_and_die,
        hold_shared_memory_and_hang,
        hold_shared_memory_and_exit,
        enlarge,
        enlarge_mapped,
        starve_as_a_daemon,
        share_data_with_a_pool,
        become_another_program,
        ask_for_too_much,
        exit_with_0,
        exit_with_7,
        leave_a_child,
        leave_a_daemon,
        bomb,
        flood,
        flood_forever,
        flood_and_seal,
        scribble,
        close_everything,
        replace_stdout,
        move_away,
        leave_threads,
        hang_at_exit,
    )
}


@quarantune.autotune(
    lambda x, space, **_: [{"mode": mode, "when": when, "turn": turn} for turn, (mode, when) in enumerate(space)],
    warmup=0,
    rep=1,
    timeout=30,  # long enough for a busy machine; tests of hangs set less
    compile_timeout=30,
    memory_limit="200MB",
)
@functools.partial(jax.jit, static_argnames=["space", "mode", "when", "turn"])
def kernel(x, space=(), mode: str = "good", when: str = "", turn: int = 0):
    """Doubles `x`, with a different program for each `turn`.

    A mode other than `good` happens while JAX traces or while the program runs: see `when`. `space` is a tuple of the
    (mode, when) to try.
    """
    # Once in a process: timing runs the program many times, and 60 processes each time would be too many.
    act = functools.cache(MISDEEDS.get(mode, lambda: None))
    assert mode == "good" or in_sandbox(), "misdeeds are for workers only"
    if when == "tracing":
        act()
    if when == "running":

        def call_back(value):
            act()
            return value

        x = jax.pure_callback(call_back, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return 2 * jnp.asarray(x) + 0 * (jnp.asarray(x) * turn)
