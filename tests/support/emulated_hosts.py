"""Hosts on one machine, with separate names, networks, boot ids and /tmp; this file contains no test.

A host is a process in new namespaces. It ends with the test's process, and the kernel removes the namespaces with their
devices and mounts when their last process ends: nothing stays, whatever happens to the test.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

import pytest

_SETUP = """
hostname "$0" && mount --bind "$1" /proc/sys/kernel/random/boot_id && mount -t tmpfs tmpfs /tmp && ip link set lo up &&
echo ready && exec cat
"""
_SIZE = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: its name.
        pid: the process that keeps its namespaces.
    """

    name: str
    pid: int

    def command(self, *words: str) -> list[str]:
        """Returns a command that runs another one on this host."""
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", *words]

    def run(self, *words: str) -> str:
        """Runs a command on this host, and returns its output."""
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True, timeout=60).stdout

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
    if missing := next((tool for tool in ("ip", "nsenter", "unshare", "hostname") if shutil.which(tool) is None), None):
        pytest.skip(f"needs the command {missing}")
    if Path(__file__).is_relative_to("/tmp"):
        pytest.skip("each host mounts a new /tmp, which would hide this checkout")
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


@contextlib.contextmanager
def _host(directory: Path, name: str) -> Iterator[Host]:
    boot_id = directory / f"boot-id-of-{name}"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    setup = ["sh", "-c", _SETUP, name, str(boot_id)]
    command = ["unshare", "-n", "-u", "-m", "--propagation", "private", *setup]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        try:
            if keeper.stdout.readline() != "ready\n":
                pytest.skip(f"this machine does not allow new namespaces: {keeper.stderr.read().strip()}")
            yield Host(name, keeper.pid)
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
