"""Functions that the tests of distributed engines tune; workers import them from here. This file contains no test."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import psutil

from quarantune.host.process import SANDBOX_MARK, in_sandbox


def engine_pid() -> int:
    """Returns the process of the engine's worker in whose sandbox this process runs."""
    return next(parent.pid for parent in psutil.Process().parents() if SANDBOX_MARK not in parent.environ())


def work(x: Any, n: int) -> Any:
    """Returns `x`, after work that grows with `n`."""
    return x + 0 * jax.lax.fori_loop(0, 20 + 80 * n, lambda _, y: jax.numpy.sin(y), x)


@functools.partial(jax.jit, static_argnames=["place", "n"])
def noted(x: Any, place: str, n: int = 3) -> Any:
    """Notes its trace in `place`, and waits there while a gate for `n` is shut."""
    if in_sandbox() and place:
        with (Path(place) / "notes").open("a") as notes:
            notes.write(f"{n} {engine_pid()}\n")
        while (Path(place) / f"shut-{n % 2}").exists():
            time.sleep(0.01)
    return work(x, n)


@functools.partial(jax.jit, static_argnames=["n"])
def deadly(x: Any, n: int = 3) -> Any:
    """Kills the engine's worker in whose sandbox it is traced with n=9."""
    if n == 9 and in_sandbox():
        os.kill(engine_pid(), signal.SIGKILL)
        time.sleep(60)
    return work(x, n)


def threads_of(x: Any, n: int) -> Any:
    """Fails unless the process has had the thread limits in `x` since its start."""
    told = Path("/proc/self/environ").read_text().split("\0") if n < 0 else [f"{k}={v}" for k, v in os.environ.items()]
    expected = [f"OMP_NUM_THREADS={int(x[0])}"] if x[0] else []
    assert [item for item in told if item.startswith("OMP_NUM_THREADS=")] == expected
    time.sleep(0.001)
    return x


@functools.partial(jax.jit, static_argnames=["n", "same"])
def plain(x: Any, n: int = 1, same: int = 0) -> Any:
    """Writes no note, and does not depend on `same`."""
    return work(x, n)
