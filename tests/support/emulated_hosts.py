"""Hosts on one machine, with separate names, networks, boot ids and /tmp; this file contains no test.

A host is a process in new namespaces. It ends with the test's process, and the kernel removes the namespaces with their
devices and mounts when their last process ends: nothing stays, whatever happens to the test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import queue
import shutil
import struct
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from quarantune.host.process import SANDBOX_MARK

_SETUP = """
hostname "$0" && mount --bind "$1" /proc/sys/kernel/random/boot_id && mount --bind "$2" /etc/hosts &&
if [ -n "$5" ]; then
    mount --bind "$4" /mnt && mount -t tmpfs -o mode=755 tmpfs "$5" && mkdir -p "$4" && mount --move /mnt "$4"
fi &&
mount --bind "$3" /mnt && mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -t tmpfs -o mode=1777 tmpfs /dev/shm &&
ip link set lo up && echo ready && exec cat
"""
_SWITCH = Path(__file__).with_name("emulated_switch.py")
_SIZE = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: its name.
        pid: the process that keeps its namespaces.
        user: the user whose commands run there.
        names: the file that is its /etc/hosts.
    """

    name: str
    pid: int
    user: int = 0
    names: str = ""

    def command(self, *words: str) -> list[str]:
        """Returns a command that runs another one on this host."""
        user = ["-S", str(self.user), "-G", str(self.user)] if self.user else []
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", *user, *words]

    def knows(self, *names: tuple[str, str]) -> None:
        """Replaces its /etc/hosts with addresses and their names."""
        lines = [("127.0.0.1", "localhost"), ("::1", "localhost"), *names]
        Path(self.names).write_text("".join(f"{address} {name}\n" for address, name in lines))

    def processes(self) -> list[psutil.Process]:
        """Returns all processes of this host except the keeper of its namespaces."""
        space, found = os.readlink(f"/proc/{self.pid}/ns/net"), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/net") == space:
                    found.append(process)
        return found

    def sandboxes(self) -> list[psutil.Process]:
        """Returns the processes of sweeps on this host."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                if SANDBOX_MARK in process.environ():
                    found.append(process)
        return found

    def kill(self) -> None:
        """Kills everything that runs on this host; its namespaces stay."""
        while running := [each for each in self.processes() if each.status() != psutil.STATUS_ZOMBIE]:
            for process in running:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def run(self, *words: str) -> str:
        """Runs a command on this host as root, and returns its output."""
        command = dataclasses.replace(self, user=0).command(*words)
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def popen(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a command on this host."""
        return subprocess.Popen(self.command(*words), text=True, **options)


@contextlib.contextmanager
def hosts(directory: Path, *names: str) -> Iterator[list[Host]]:
    """Starts hosts on one switch; each has the device `eth0`, without an address.

    Args:
        directory: an empty directory.
        *names: their names.
    """
    _skip_unless_possible()
    with contextlib.ExitStack() as running:
        switch, *started = [running.enter_context(_host(directory, name)) for name in ("switch", *names)]
        try:
            switch.run("ip", "link", "add", "bridge", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"the kernel has no bridges: {error.stderr}")
        switch.run("ip", "link", "set", "bridge", "up")
        for place, host in enumerate(started):
            port = f"port{place}"
            switch.run(*f"ip link add {port} type veth peer name eth0 netns {host.pid}".split())
            switch.run(*f"ip link set {port} master bridge up".split())
            host.run("ip", "link", "set", "eth0", "up")
        yield started


class Network:
    """Hosts on a switch with faults. Every host has `/mnt` in common, and an own user, /tmp and /etc/hosts.

    Attributes:
        hosts: the hosts by name.
        addresses: their addresses by name.
        absent: an address in their network that no host has.
    """

    def __init__(self, hosts: Sequence[Host], switch: subprocess.Popen[str], addresses: Sequence[str]) -> None:
        """Knows each host by its name."""
        self.hosts = {host.name: host for host in hosts}
        self.addresses = dict(zip(self.hosts, addresses, strict=True))
        self._switch = switch
        self.absent = f"{addresses[0][:-1]}250"

    def faults(self, *rules: tuple[str, str, dict[str, Any]]) -> None:
        """Replaces the faults of the network.

        Args:
            *rules: a host, another one, and the fields of `emulated_switch.Link` for the way to the other.
        """
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(rules) + "\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline() == "ok\n"

    def apart(self, one: str, other: str) -> None:
        """Cuts the way between two hosts in both directions, and mends everything else."""
        self.faults((one, other, {"is_cut": True}), (other, one, {"is_cut": True}))


@contextlib.contextmanager
def network(directory: Path, *names: str, family: int = 4) -> Iterator[Network]:
    """Starts hosts on a switch with faults.

    Args:
        directory: an empty directory.
        *names: their names.
        family: 4 or 6, for the only version of IP that they have on the switch.
    """
    _skip_unless_possible()
    with contextlib.ExitStack() as running:
        made = [running.enter_context(_host(directory, name)) for name in names]
        devices = json.dumps([(host.name, host.pid, "eth0", "lan") for host in made])
        command = [sys.executable, str(_SWITCH), devices]
        switch = running.enter_context(subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True))
        assert switch.stdin is not None
        assert switch.stdout is not None
        assert switch.stderr is not None
        running.callback(switch.stdin.close)
        if switch.stdout.readline() != "ready\n":
            pytest.skip(f"this machine allows no TAP devices: {switch.stderr.read().strip().splitlines()[-1]}")
        for number, host in enumerate(made, 1):
            host.run("ip", "link", "set", "eth0", "mtu", "9000", "up")
            address = f"10.78.6.{number}/24" if family == 4 else f"fd77:6::{number}/64 nodad"
            host.run(*f"ip addr add {address} dev eth0".split())
        is_open = not (_private(Path(__file__)) or _private(Path(sys.executable)))
        hosts = [dataclasses.replace(host, user=2000 + number if is_open else 0) for number, host in enumerate(made)]
        addresses = [f"10.78.6.{n}" if family == 4 else f"fd77:6::{n}" for n in range(1, 1 + len(hosts))]
        for host in hosts:
            host.knows(*zip(addresses, names, strict=True))
        yield Network(hosts, switch, addresses)


def _private(path: Path) -> Path | None:
    """Returns the outermost directory around a path that other users may not enter; None without one."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)


def _skip_unless_possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if missing := next((tool for tool in ("ip", "nsenter", "unshare", "hostname") if shutil.which(tool) is None), None):
        pytest.skip(f"needs the command {missing}")
    if Path(__file__).is_relative_to("/tmp"):
        pytest.skip("each host mounts a new /tmp, which would hide this checkout")


@contextlib.contextmanager
def _host(directory: Path, name: str) -> Iterator[Host]:
    boot_id, names, shared = directory / f"boot-id-of-{name}", directory / f"hosts-of-{name}", directory / "shared"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    names.write_text("127.0.0.1 localhost\n::1 localhost\n")
    shared.mkdir(exist_ok=True)
    shared.chmod(0o777)
    private = _private(Path(sys.base_prefix))
    setup = ["sh", "-c", _SETUP, name, str(boot_id), str(names), str(shared), sys.base_prefix, str(private or "")]
    command = ["unshare", "-n", "-u", "-m", "--propagation", "private", *setup]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        try:
            if keeper.stdout.readline() != "ready\n":
                pytest.skip(f"this machine does not allow new namespaces: {keeper.stderr.read().strip()}")
            yield Host(name, keeper.pid, names=str(names))
        finally:
            keeper.stdin.close()


class Machines(Executor):
    """An engine with one worker on each host.

    Args:
        hosts: the hosts.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], bytes] | None] = queue.SimpleQueue()
        self._workers = [
            subprocess.Popen(host.command(sys.executable, __file__), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for host in hosts
        ]
        self._threads = [threading.Thread(target=self._serve, args=(worker,)) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Gives the task to the next idle worker."""
        future: Future[Any] = Future()
        self._tasks.put((future, pickle.dumps((fn, args, kwargs))))
        return future

    def _serve(self, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while (task := self._tasks.get()) is not None:
            future, data = task
            if future.set_running_or_notify_cancel():
                _send(worker.stdin, data)
                is_result, result = pickle.loads(_receive(worker.stdout))
                (future.set_result if is_result else future.set_exception)(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the workers once they have done their tasks."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread, worker in zip(self._threads, self._workers, strict=True):
            thread.join()
            worker.communicate(timeout=60)


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    header = stream.read(_SIZE.size)
    return stream.read(_SIZE.unpack(header)[0]) if header else b""


def _work() -> None:
    """Runs incoming tasks, as a worker of an engine."""
    results, sys.stdout = sys.stdout.buffer, sys.stderr
    while data := _receive(sys.stdin.buffer):
        try:
            fn, args, kwargs = pickle.loads(data)
            result = (True, fn(*args, **kwargs))
        except Exception:
            result = (False, RuntimeError(traceback.format_exc()))
        _send(results, pickle.dumps(result))


if __name__ == "__main__":
    _work()
