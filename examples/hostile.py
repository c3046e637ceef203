"""Tunes over configs that crash, hang, exhaust memory, exit, print without end, fork and stop: the best still wins."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import quarantune


def fail() -> None:
    """Raises an exception."""
    raise ArithmeticError("this config is no good")


def segfault() -> None:
    """Writes to address 0."""
    ctypes.memset(0, 1, 1)


def hang() -> None:
    """Sleeps in C while holding the GIL, so that no Python thread can end it."""
    while True:
        ctypes.PyDLL(None).pause()


def starve() -> None:
    """Allocates memory as fast as the kernel provides it, up to 8 GB."""
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    taken = []
    for _ in range(128):
        taken.append(mmap.mmap(-1, 64 << 20, flags=how))


def vanish() -> None:
    """Ends the process with exit code 0."""
    os._exit(0)


def flood() -> None:
    """Prints 64 MB."""
    for _ in range(1024):
        os.write(1, b"blah" * (16 << 10))


def flood_forever() -> None:
    """Never stops printing."""
    while True:
        flood()


def scribble() -> None:
    """Writes garbage to every open descriptor."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.write(int(name), b"\xff" * 4096)


def leave_a_grandchild(name: str) -> None:
    """Forks twice and leaves a process in a separate session, with every descriptor open."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME, the name that `main` looks for
    while True:
        time.sleep(60)


def starve_in_shared_memory() -> None:
    """Allocates anonymous shared memory."""
    how = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    taken = [mmap.mmap(-1, 64 << 20, flags=how) for _ in range(32)]
    time.sleep(60 * len(taken))


def starve_in_a_file_in_memory() -> None:
    """Fills a nameless file in memory without mapping it."""
    balloon = os.memfd_create("balloon")
    for _ in range(32):
        os.write(balloon, bytes(64 << 20))
    time.sleep(60)


def starve_as_a_daemon() -> None:
    """Allocates memory in a process of another session whose parent has ended."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            starve()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(60)


def share_with_a_pool() -> None:
    """Reads 100 MB from eight forks that share it. The memory limit allows that: shared pages count once."""
    data = bytes(100 << 20)
    children = [os.fork() or os._exit(data[-1]) for _ in range(8)]
    for child in children:
        os.waitpid(child, 0)


def become_another_program() -> None:
    """Replaces its process by another program."""
    os.execv("/bin/true", ["true"])


def stop_its_template() -> None:
    """Stops the template, which starts all workers."""
    os.kill(os.getppid(), signal.SIGSTOP)


def stop_itself() -> None:
    """Stops its own process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def turn_deaf() -> None:
    """Ignores every signal that can be ignored, and sleeps."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(60)


def kill_its_group() -> None:
    """Kills its own process group."""
    os.killpg(0, signal.SIGKILL)


def kill_its_siblings() -> None:
    """Kills the workers of all other configs, and then itself."""
    template = os.getppid()
    for tasks in Path(f"/proc/{template}/task").iterdir():
        for sibling in map(int, (tasks / "children").read_text().split()):
            if sibling == os.getpid():
                continue
            with contextlib.suppress(ProcessLookupError):  # it may have ended
                os.kill(sibling, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def leak_threads() -> None:
    """Starts 300 threads that never end."""
    for _ in range(300):
        threading.Thread(target=time.sleep, args=[3600], daemon=True).start()


def bomb() -> None:
    """Forks 64 processes that never end, half of them in separate sessions."""
    for number in range(64):
        if os.fork() == 0:
            if number % 2:
                os.setsid()
            time.sleep(3600)
            os._exit(0)


def close_everything() -> None:
    """Closes every descriptor."""
    os.closerange(0, 1024)


def deface_files() -> None:
    """Truncates every nameless file that it has inherited, such as the call and its arrays."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "quarantune-" in os.readlink(f"/proc/self/fd/{name}"):
                os.truncate(f"/proc/self/fd/{name}", 0)


TRACING, RUNNING = "while JAX traces it", "while it runs"
# For each mode: its action, the time of the action, and the right outcomes.
MODES = {
    "good": (None, "", {"ok"}),
    "slow": (None, "", {"ok", "slow"}),
    "raise": (fail, TRACING, {"error"}),
    "raise late": (fail, RUNNING, {"error"}),
    "segfault": (segfault, TRACING, {"crashed"}),
    "segfault late": (segfault, RUNNING, {"crashed"}),
    "abort": (os.abort, RUNNING, {"crashed"}),
    "hang": (hang, TRACING, {"timeout"}),
    "hang late": (hang, RUNNING, {"timeout"}),
    "starve": (starve, TRACING, {"oom"}),
    "vanish": (vanish, TRACING, {"crashed"}),
    "vanish late": (vanish, RUNNING, {"crashed"}),
    "scribble": (scribble, TRACING, {"crashed"}),
    "scribble late": (scribble, RUNNING, {"crashed"}),
    "flood": (flood, TRACING, {"ok", "slow"}),
    "flood forever": (flood_forever, RUNNING, {"timeout"}),
    "grandchild": (leave_a_grandchild, TRACING, {"ok", "slow"}),
    "shared memory": (starve_in_shared_memory, TRACING, {"oom"}),
    "file in memory": (starve_in_a_file_in_memory, TRACING, {"oom"}),
    "daemon": (starve_as_a_daemon, TRACING, {"oom"}),
    "pool": (share_with_a_pool, TRACING, {"ok", "slow"}),
    "another program": (become_another_program, TRACING, {"crashed"}),
    "stopped template": (stop_its_template, TRACING, {"ok", "slow"}),
    "stopped": (stop_itself, RUNNING, {"timeout"}),
    "deaf": (turn_deaf, TRACING, {"timeout"}),
    "kill the group": (kill_its_group, RUNNING, {"crashed"}),
    "kill the siblings": (kill_its_siblings, RUNNING, {"crashed"}),
    "thread leak": (leak_threads, TRACING, {"ok", "slow"}),
    "fork bomb": (bomb, TRACING, {"ok", "slow"}),
    "close everything": (close_everything, TRACING, {"crashed"}),
    "deface": (deface_files, TRACING, {"ok", "slow"}),
    "good again": (None, "", {"ok", "slow"}),
}


@quarantune.autotune({"mode": list(MODES)}, timeout=2, compile_timeout=2, memory_limit="256MB")
@functools.partial(jax.jit, static_argnames=["mode", "grandchild"])
def kernel(x, mode: str = "good", grandchild: str = "unnamed"):
    """Sums a matrix; every mode except `good` does extra work, so that `good` is the fastest."""
    act, when, _ = MODES[mode]
    if act is leave_a_grandchild:
        act = functools.partial(act, grandchild)
    if when == TRACING:
        act()
    if when == RUNNING:

        def call_back(value):
            act()
            return value

        x = jax.pure_callback(call_back, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    for _ in range(0 if mode == "good" else 16):
        x = x @ x / x.shape[0]
    return x.sum()


def processes_named(name: str) -> list[str]:
    """Returns the ids of the processes with this name."""
    found = []
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if file.read_text().strip() == name:
                found.append(file.parent.name)
    return found


def main() -> None:
    """Tunes, prints the outcome of every config, and checks that each outcome is right."""
    x = jnp.ones((256, 256))
    grandchild = f"left-{os.getpid()}"

    # A worker with a GPU needs more memory and more time.
    own = {} if jax.default_backend() == "cpu" else {"memory_limit": "1.6GB", "compile_timeout": 4, "timeout": 6}
    with quarantune.settings(**own):
        result = kernel.tune(x, grandchild=grandchild)
    print(result.table())

    complaints = [
        f"{trial.config['mode']!r} ended as {trial.outcome}, not {' or '.join(sorted(expected))}"
        for trial in result.trials
        if trial.outcome not in (expected := MODES[trial.config["mode"]][2])
    ]
    if result.best_config != {"mode": "good"}:
        complaints.append(f"the best config is {result.best_config}, not 'good'")
    if len(result.trials) != len(MODES):
        complaints.append(f"{len(result.trials)} configs have an outcome, not {len(MODES)}")
    if survivors := processes_named(grandchild):
        complaints.append(f"the grandchild lives on as {', '.join(survivors)}")
    if kernel(x, grandchild=grandchild) != x.size:
        complaints.append("the winner's result is wrong")
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"all {len(MODES)} outcomes are right; the best config is {result.best_config}")


if __name__ == "__main__":
    main()
