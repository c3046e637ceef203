"""A limit on processes and threads costs no config its outcome; a config that exhausts it fails alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aftermath import MARK, carriers, eventually
from helpers import child_environ

from quarantune.host import machine

pytestmark = pytest.mark.slow

PROGRAM = """
import functools, json, os, sys, threading, time
import jax, numpy as np
import quarantune
from quarantune.values.errors import SandboxError

CONFIGS = json.loads(sys.argv[1])

def sleep():
    time.sleep(600)

def start_threads():
    for _ in range(4000):
        threading.Thread(target=sleep, daemon=True).start()

def keep_threads():
    try:
        start_threads()
    except RuntimeError:
        time.sleep(0.5)  # while siblings need some

def fork():
    while True:
        if os.fork() == 0:
            sleep()

ACTS = {"start_threads": start_threads, "keep_threads": keep_threads, "fork": fork}

@quarantune.autotune({"mode": CONFIGS}, warmup=0, rep=1, name="kernel", timeout=60, compile_timeout=60)
@functools.partial(jax.jit, static_argnames=["mode"])
def kernel(x, mode=CONFIGS[0]):
    ACTS.get(mode, lambda: None)()
    work = int(mode.partition(" ")[2] or 12000)
    return jax.lax.fori_loop(0, work, lambda _, x: jax.numpy.sin(x), x) * 0

if __name__ == "__main__":
    try:
        result = kernel.tune(np.ones((64, 64), np.float32))
        print(json.dumps([[trial.config["mode"], trial.outcome.value, trial.message] for trial in result.trials]))
        print(result.best_config["mode"])
    except SandboxError as error:
        print("failed", error)
"""
GOOD = [f"good {work}" for work in (8000, 10000, 9000, 10, 12000, 11000)]
"""The fourth config does the least work. Its lead is too large for a busy machine to hide."""


def _as_other_user(limit: int) -> list[str] | None:
    """Returns the start of a command that runs as a user with this limit on processes and threads."""
    if os.geteuid() != 0:
        return None
    # The limit does not bind root. The other user may read root's files, and nothing more.
    user, capabilities = str(50_000 + os.getpid() % 10_000), "-all,+dac_override,+dac_read_search"
    change = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    change += [f"--{kind}={capabilities}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    return ["prlimit", f"--nproc={limit}:{limit}", *change]


@contextlib.contextmanager
def _in_a_group(limit: int) -> Iterator[list[str] | None]:
    """Yields the start of a command that runs in a control group with this limit; None if no group can be made."""
    group = Path(f"/sys/fs/cgroup/pids/quarantune-{os.getpid()}")
    try:
        group.mkdir()
        (group / "pids.max").write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@contextlib.contextmanager
def limited(kind: str, limit: int) -> Iterator[list[str]]:
    with contextlib.nullcontext(_as_other_user(limit)) if kind == "user" else _in_a_group(limit) as command:
        if command is None or subprocess.run([*command, "true"], capture_output=True).returncode:
            pytest.skip("this machine lets tests set no limit on a control group")
        yield command


class Limited:
    """Runs the program in a new directory, limited or not."""

    def __init__(self, tmp_path: Path) -> None:
        self.place = tmp_path
        self.mark = f"{os.getpid()}-{tmp_path}"
        (tmp_path / "program.py").write_text(PROGRAM)
        for directory in (tmp_path, *tmp_path.parents[:2]):
            directory.chmod(0o777)

    def run(self, command: list[str], configs: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
        done = self.result(self.start(command, configs, **settings))
        assert eventually(lambda: not carriers(MARK, self.mark))
        assert not [name for name in os.listdir(self.place) if name.startswith("quarantune")]
        return done

    def result(self, program: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        stdout, stderr = program.communicate(timeout=300)
        return subprocess.CompletedProcess(program.args, program.returncode, stdout, stderr)

    def start(self, command: list[str], configs: list[str], **settings: str) -> subprocess.Popen[str]:
        changes = {
            "JAX_PLATFORMS": "cpu",
            "QUARANTUNE_CACHE_DIR": str(self.place / "cache"),
            "TMPDIR": str(self.place),
            "QUARANTUNE_NUM_WORKERS": "2",
            MARK: self.mark,
            **settings,
        }
        return subprocess.Popen(
            [*command, sys.executable, str(self.place / "program.py"), json.dumps(configs)],
            env=child_environ(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def journal(self) -> str:
        return "".join(file.read_text() for file in (self.place / "cache").rglob("*") if file.is_file())


def trials_of(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, tuple[str, str]], str]:
    assert done.returncode == 0, done.stderr
    listed, best = done.stdout.splitlines()
    found: list[Any] = json.loads(listed)
    return {mode: (outcome, message) for mode, outcome, message in found}, best


@pytest.mark.parametrize(
    ("kind", "limit", "settings"),
    [
        ("user", 24, {}),
        pytest.param("user", 24, {"QUARANTUNE_CONFIGS_PER_WORKER": "4"}, marks=pytest.mark.long),
        pytest.param("user", 40, {}, marks=pytest.mark.long),
        pytest.param("group", 48, {"QUARANTUNE_START_METHOD": "spawn"}, marks=pytest.mark.long),
    ],
)
def test_a_limit_on_processes_costs_no_config_its_outcome(
    kind: str, limit: int, settings: dict[str, str], tmp_path: Path
) -> None:
    program = Limited(tmp_path)
    with limited(kind, limit) as command:
        done = program.run(command, GOOD, **settings)
    trials, best = trials_of(done)
    assert {outcome for outcome, _ in trials.values()} <= {"ok", "slow"}, trials
    assert best == GOOD[3]
    advice = re.findall(r"fewer configs run at a time, as a worker was lost \((.*)\)", done.stderr)
    assert len(advice) == 1
    assert str(limit) in advice[0]
    assert not re.search("crashed|Resource temporarily", program.journal())


@pytest.mark.parametrize("limit", [2, 12])
@pytest.mark.long
def test_a_limit_too_low_for_one_worker_is_named_and_forgotten(limit: int, tmp_path: Path) -> None:
    program = Limited(tmp_path)
    with limited("user", limit) as command:
        told = program.run([*command, "env", "OPENBLAS_NUM_THREADS=1"], GOOD).stdout
    assert re.match(rf"failed kernel: .*not even one worker.*ulimit -u` of this user is {limit}", told), told
    trials, best = trials_of(program.run([], GOOD[2:4]))
    assert {outcome for outcome, _ in trials.values()} <= {"ok", "slow"}
    assert best == GOOD[3]


@pytest.mark.parametrize(
    "misdeed", ["keep_threads", *(pytest.param(each, marks=pytest.mark.long) for each in ("start_threads", "fork"))]
)
def test_a_config_that_exhausts_the_limit_costs_only_itself(misdeed: str, tmp_path: Path) -> None:
    program = Limited(tmp_path)
    with limited("user", 80) as command:
        trials, best = trials_of(program.run(command, [*GOOD[:3], misdeed, *GOOD[3:]]))
    outcome, message = trials.pop(misdeed)
    assert {outcome for outcome, _ in trials.values()} <= {"ok", "slow"}, trials
    assert best == GOOD[3]
    if misdeed != "keep_threads":  # `keep_threads` works once it has its threads
        assert outcome == "lost"
        assert "`ulimit -u` of this user is 80" in message
        assert misdeed not in "".join(re.findall(r'"outcome": ?"(?:crashed|error)".*', program.journal()))


def _await_child(pid: int, of: subprocess.Popen[str]) -> int | None:
    """Waits for a child of a process and returns it; None if the program ends first."""
    found: list[int] = []
    assert eventually(lambda: found.extend(machine.children(pid)) or found or of.poll() is not None, timeout_s=60)
    return found[-1] if found else None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("depth", range(4))
@pytest.mark.long
def test_kills_under_a_limit_neither_lose_nor_spoil_a_result(depth: int, tmp_path: Path) -> None:
    """Kills the caller, its template, the sweep's template or a worker, while two callers share a limit."""
    program = Limited(tmp_path)
    with limited("user", 64) as command:
        callers = [program.start(command, GOOD[:4]) for _ in range(2)]
        victim: int | None = callers[0].pid
        for _ in range(depth):
            victim = None if victim is None else _await_child(victim, callers[0])
        if victim is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        ended = [program.result(caller) for caller in callers]
        ended[0] = program.run(command, GOOD[:4]) if depth == 0 else ended[0]
    for done in ended:
        trials, best = trials_of(done)
        assert {outcome for outcome, _ in trials.values()} <= {"ok", "slow"}, trials
        assert best == GOOD[3]
    assert not re.search("crashed|Resource temporarily", program.journal())
