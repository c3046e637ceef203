"""Tuners take turns on a device, wait for holders for a bounded time, and pass over those that cannot be tuners."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from aftermath import eventually
from helpers import child_environ

import quarantune
from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
from quarantune.host import machine

HOLDER = """
import os, signal, sys
from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
lease = Lease(Device("cuda", "fake", sys.argv[1]))
assert lease.acquire(0.0)
print("held", flush=True)
sys.stdin.read()
lease.release()
print("released", flush=True)
"""
SQUATTER = """
import os, socket, sys
squatter = socket.socket(socket.AF_UNIX)
if sys.argv[2] != "the same":
    os.setuid(int(sys.argv[2]))
squatter.bind(chr(0) + sys.argv[1])
if sys.argv[2] != "the same":
    squatter.listen()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device that no other test uses, because leases are machine-wide."""
    return Device("cuda", "fake", f"{tmp_path.name}-{os.getpid()}-{time.monotonic_ns()}")


@contextlib.contextmanager
def program(code: str, *argv: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        env=child_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_lease_has_one_holder_at_a_time(device: Device) -> None:
    first, second = Lease(device), Lease(device)
    assert first.acquire(0.0)
    assert first.acquire(1.0), "a holder may acquire again"
    assert not second.acquire(1.0)
    first.release()
    assert second.acquire(1.1)
    assert not first.acquire(2.0)
    second.release()
    second.release()
    first.release()


def test_leases_on_different_devices_are_independent(device: Device) -> None:
    other = Device("rocm", device.kind, device.token)
    first, second = Lease(device), Lease(other)
    assert first.acquire(0.0)
    assert second.acquire(0.0)
    first.release()
    second.release()


def test_a_busy_tuner_gives_a_waiting_one_its_turn(device: Device) -> None:
    busy, waiting = Lease(device), Lease(device)
    turns = []
    for step in range(60):  # both ask 20 times a second; the busy tuner asks first and measures for one step
        now = 0.05 * step
        if busy.acquire(now):
            turns.append("busy")
        if waiting.acquire(now):
            turns.append("waiting")
            waiting.release()
        busy.release()
    assert turns.count("busy") >= 10
    assert turns.count("waiting") >= 10


def test_a_busy_tuner_gives_waiting_tuners_their_turns(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    tuners = [Lease(device) for _ in range(3)]
    turns = []
    for step in range(4000):  # each asks 20 times a second and never calls `release`
        for number, tuner in enumerate(tuners):
            if tuner.acquire(0.05 * step) and turns[-1:] != [number]:
                turns.append(number)
    for tuner in tuners:
        tuner.release()
    assert min(turns.count(number) for number in range(3)) >= 8
    assert len(turns) < 50, "a turn lasts seconds"
    assert not caplog.messages


def test_a_released_lease_goes_to_the_waiting_tuner_first(device: Device) -> None:
    busy, waiting = Lease(device), Lease(device)
    assert busy.acquire(0.0)
    assert not waiting.acquire(0.01)
    busy.release()  # after five seconds of measuring
    assert not busy.acquire(5.0), "another tuner waits"
    assert waiting.acquire(5.05)
    assert not busy.acquire(5.2)
    waiting.release()
    assert not waiting.acquire(6.0), "the busy tuner waits"
    assert busy.acquire(6.05)
    busy.release()
    waiting.release()


def test_a_lease_nobody_waits_for_can_be_taken_again_at_once(device: Device) -> None:
    lease = Lease(device)
    for step in range(3):
        assert lease.acquire(step * 0.001)
        lease.release()


def test_a_stuck_holder_is_passed_after_a_minute_with_a_warning(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, patient = Lease(device), Lease(device)
    assert stuck.acquire(0.0)
    for second in range(61):
        assert not patient.acquire(float(second))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert patient.acquire(60.5)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"another tuner has held {device.name} for over 60 s; measuring at the same time"
    ]
    patient.release()
    assert patient.acquire(61.0), "a sweep waits once"
    patient.release()
    other = Lease(device)
    assert not other.acquire(61.0), "another sweep waits again"
    other.release()
    stuck.release()
    assert patient.acquire(61.2)
    assert not stuck.acquire(61.4), "a free lease is taken, not passed over"
    patient.release()
    stuck.release()


FORKING_HOLDER = """
import os, signal, sys
from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
lease = Lease(Device("cuda", "fake", sys.argv[1]))
assert lease.acquire(0.0)
if sys.argv[2] == "fork" and os.fork() == 0:
    print(os.getpid(), flush=True)
    signal.pause()
if sys.argv[2] == "hold":
    print("held", flush=True)
    signal.pause()
sys.stdin.read()
lease.release()
print("released", flush=True)
sys.stdin.close()
signal.pause()
"""


@contextlib.contextmanager
def forking_holder(device: Device, mode: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING_HOLDER, device.token, mode],
        env=child_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_holder_releases_the_lease(device: Device) -> None:
    lease = Lease(device)
    with forking_holder(device, "hold") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert not lease.acquire(0.0)
        process.kill()
        process.wait(20)
        assert lease.acquire(1.0)
        lease.release()


def test_a_fork_of_the_holder_does_not_keep_the_lease(device: Device) -> None:
    lease = Lease(device)
    with forking_holder(device, "fork") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        child = int(process.stdout.readline())
        assert not lease.acquire(0.0)
        process.stdin.close()
        assert process.stdout.readline() == "released\n"
        assert lease.acquire(1.0)
        assert psutil.Process(child).status() != psutil.STATUS_ZOMBIE
        lease.release()
        os.kill(child, signal.SIGKILL)


def test_a_stopped_holder_is_passed_over_for_the_whole_sweep(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    lease = Lease(device)
    with program(HOLDER, device.token) as holder:
        assert not lease.acquire(0.0)
        assert not lease.acquire(5.0), "a running holder is waited for"
        holder.send_signal(signal.SIGSTOP)
        assert eventually(lambda: machine.is_stopped(holder.pid))
        assert not lease.acquire(6.0)
        assert lease.acquire(6.6)
        lease.release()
        assert lease.acquire(7.0), "the holder is checked once in a sweep"
        assert warnings(caplog) == [
            f"{device.name} is held by process {holder.pid}, which is stopped; measuring at the same time"
        ]
        holder.send_signal(signal.SIGCONT)
        holder.communicate()
        assert lease.acquire(8.0)
        other = Lease(device)
        assert not other.acquire(8.0), "the lease was free and is held again"
        other.release()
    lease.release()


def test_a_holder_that_was_stopped_for_a_moment_is_waited_for(device: Device) -> None:
    lease = Lease(device)
    with program(HOLDER, device.token) as holder:
        for now in (0.0, 1.0, 2.0):
            assert not lease.acquire(now)
            os.kill(holder.pid, signal.SIGSTOP if now == 0.0 else signal.SIGCONT)
            assert eventually(lambda now=now: machine.is_stopped(holder.pid) == (now == 0.0))  # type: ignore[misc]
    lease.release()


@pytest.mark.parametrize("user", ["the same", "65534"])
def test_a_holder_that_is_not_this_users_tuner_is_passed_over(
    user: str, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    if user != "the same" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    lease = Lease(device)
    (name,) = lease._names("lease")
    with program(SQUATTER, name[1:], user) as squatter:
        passed = [lease.acquire(now) for now in (0.0, 0.6, 1.2)]
        assert passed == ([False, True, True] if user == "the same" else [True, True, True])
        who = "a process that does not" if user == "the same" else f"process {squatter.pid} of another user (65534)"
        (told,) = warnings(caplog)
        assert told.startswith(f"{device.name} is held by {who}")
    lease.release()


def test_users_do_not_wait_for_each_other(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Lease(device), Lease(device)
    assert ours.acquire(0.0)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert theirs.acquire(0.0)
    theirs.release()
    monkeypatch.undo()
    ours.release()


def test_many_waiting_tuners_do_not_exhaust_the_holders_backlog(device: Device) -> None:
    holder, waiting = Lease(device), Lease(device)
    assert holder.acquire(0.0)
    for look in range(119):
        assert not waiting.acquire(0.5 * look)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        probe.connect(waiting._names("lease")[0])
    holder.release()
    waiting.release()


def test_a_lease_of_another_thread_is_waited_for(device: Device) -> None:
    mine, nested = (Lease(device, thread=threading.get_ident()) for _ in range(2))
    other = Lease(device, thread=threading.get_ident() + 1)
    assert mine.acquire(0.0)
    assert nested.acquire(0.0), "a thread does not wait for its own lease"
    assert not other.acquire(0.0)
    for lease in (nested, mine, other):
        lease.release()


def test_a_sweep_in_a_progress_callback_does_not_block_itself() -> None:
    took_s: list[float] = []

    @quarantune.autotune({"n": [1, 2]}, rep=1, name="inner")
    @functools.partial(jax.jit, static_argnames=["n"])
    def inner(x: jax.Array, n: int = 1) -> jax.Array:
        return x * n

    @quarantune.autotune({"n": [1, 2]}, rep=1, name="outer")
    @functools.partial(jax.jit, static_argnames=["n"])
    def outer(x: jax.Array, n: int = 1) -> jax.Array:
        return x + n

    class Nesting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("outer: n=") and not took_s:
                took_s.append(0.0)
                start = time.monotonic()
                inner.tune(np.ones(8, np.float32))
                took_s[0] = time.monotonic() - start

    logger, handler = logging.getLogger("quarantune"), Nesting(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        outer.tune(np.ones(8, np.float32))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert took_s
    assert took_s[0] < 50, "the inner sweep waited for the outer one until it was passed over, after a minute"
