"""The loop inside a template: starts workers by fork or spawn, reaps them, and is the janitor of all they leave behind.

The template runs it, and so does each sweep's template, which is a fork of the template that has loaded a sweep's
payload. It runs single-threaded and without an initialised JAX backend, because only such a process can be forked
safely.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from quarantune.sandbox import contain, spawning, wire
from quarantune.sandbox.wire import Connection, Message

_WORKER = "quarantune.worker.main"


def _worker() -> Any:
    """Returns what a worker does, by its dotted name: the sandbox holds processes and knows nothing of trials."""
    return importlib.import_module(_WORKER)


@dataclasses.dataclass(eq=False)
class _Client:
    """A sweep's connection to this template, with what its workers share."""

    connection: Connection
    payload_fd: int = -1
    arrays_fd: int = -1
    environ: dict[str, str] | None = None
    cwd: str | None = None
    call: Any = None
    children: dict[int, int] = dataclasses.field(default_factory=dict)
    """Process id of each child, by the number the sweep gave it."""


@dataclasses.dataclass(frozen=True)
class _Child:
    number: int
    pid: int
    client: _Client


class Forker:
    """Serves sweeps until its lifeline breaks."""

    def __init__(self, lifeline_pid: int) -> None:
        """Args: lifeline_pid: the process this one must not outlive."""
        self._selector = selectors.DefaultSelector()
        self._clients: list[_Client] = []
        self._children: dict[int, _Child] = {}
        self._wakeup, self._wakeup_write = socket.socketpair()
        for end in (self._wakeup, self._wakeup_write):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up descriptor is written
        # The module of a sweep's function may have blocked it as it was loaded.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)
        self._lifeline_fd = _watch_process(lifeline_pid)
        if self._lifeline_fd >= 0:
            self._selector.register(self._lifeline_fd, selectors.EVENT_READ, self._end)
        if os.getppid() != lifeline_pid:
            self._end()

    def serve(self, client: _Client) -> NoReturn:
        """Serves `client`, and those it opens, until it goes."""
        self._add(client)
        while True:
            for key, _ in self._selector.select():
                # An earlier event of this round may have closed what this one is about.
                if key.fileobj in self._selector.get_map():
                    key.data()

    # Clients

    def _add(self, client: _Client) -> None:
        self._clients.append(client)
        self._selector.register(client.connection, selectors.EVENT_READ, lambda: self._read(client))

    def _read(self, client: _Client) -> None:
        try:
            for message, fds in client.connection.receive():
                self._obey(client, message, fds)
        except wire.WireError:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        """The sweep ended or its process died: nothing of it may stay."""
        if client is self._clients[0]:
            self._end()
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        for pid in client.children.values():
            contain.kill_tree(pid)
        client.connection.close()
        wire.close_all([fd for fd in (client.payload_fd, client.arrays_fd) if fd >= 0])

    def _end(self) -> NoReturn:
        for pid in self._children:
            contain.kill_tree(pid)
        contain.kill_orphans(())
        os._exit(0)

    def _tell(self, client: _Client, message: Message) -> None:
        if client not in self._clients:
            return
        try:
            client.connection.send(message)
        except wire.WireError:
            self._drop(client)

    # Orders

    def _obey(self, client: _Client, message: Message, fds: list[int]) -> None:
        match message["op"]:
            case "open":
                self._add(_client_of(message, fds))
            case "sweep":
                self._start_sweep(client, message, fds)
            case "worker":
                try:
                    self._start_worker(client, message, fds)
                except OSError:  # no more processes, or an environment too large for one
                    traceback.print_exc()
                    wire.close_all(fds)
                    self._tell(client, {"event": "exit", "number": message["number"], "status": None})
            case "kill":
                if (pid := client.children.get(message["number"])) is not None:
                    contain.kill_tree(pid)
            case "import":
                spawning.import_modules(message["modules"])
                prepare_to_fork()

    def _start_sweep(self, client: _Client, message: Message, fds: list[int]) -> None:
        def run() -> NoReturn:
            served = _client_of(message, fds)
            contain.contain_worker(parent=parent, log_fd=fds[3])
            os.close(fds[3])
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("0")
            self._forget_everything()
            _serve_sweep(served, parent, plugins=message["plugins"])

        parent = os.getpid()
        number = message["number"]
        self._fork(client, number, run)
        self._tell(client, {"event": "started", "number": number, "pid": client.children[number]})
        wire.close_all(fds)

    def _start_worker(self, client: _Client, message: Message, fds: list[int]) -> None:
        shared = _worker().Shared(
            payload_fd=client.payload_fd, arrays_fd=client.arrays_fd, call=client.call, cwd=client.cwd
        )
        environ = {**(client.environ or os.environ), **message["environ"]}
        connection_fd, log_fd, *task_fds = fds
        if message["method"] == "spawn":
            self._spawn(client, message, shared, environ, fds)
        else:

            def run() -> NoReturn:
                contain.contain_worker(parent=parent, log_fd=log_fd)
                os.close(log_fd)
                self._forget_everything()
                gc.enable()
                os.environ.clear()
                os.environ.update(environ)
                connection = Connection(socket.socket(fileno=connection_fd))
                _worker().main(connection, shared, message["task"], task_fds)
                raise AssertionError("the main of a worker never returns")

            parent = os.getpid()
            self._fork(client, message["number"], run)
        number = message["number"]
        self._tell(client, {"event": "started", "number": number, "pid": client.children[number]})
        wire.close_all(fds)

    def _fork(self, client: _Client, number: int, run: Callable[[], NoReturn]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._watch(client, number, pid)

    def _spawn(self, client: _Client, message: Message, shared: Any, environ: dict[str, str], fds: list[int]) -> None:
        connection_fd, log_fd, *task_fds = fds
        keep = [fd for fd in (connection_fd, log_fd, *task_fds, shared.payload_fd, shared.arrays_fd) if fd >= 0]
        process = spawning.start(
            "worker",
            {},
            stdin=subprocess.PIPE,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=keep,
            env=environ,
            cwd=shared.cwd,
            start_new_session=True,
        )
        assert process.stdin is not None
        about = {
            "parent": os.getpid(),
            "connection_fd": connection_fd,
            "log_fd": log_fd,
            "task_fds": task_fds,
            "payload_fd": shared.payload_fd,
            "arrays_fd": shared.arrays_fd,
            "cwd": shared.cwd,
            "task": message["task"],
        }
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(about).encode())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.returncode = 0  # reaped here, with the other children, and not by Popen
        self._watch(client, message["number"], process.pid)

    # Children

    def _watch(self, client: _Client, number: int, pid: int) -> None:
        self._children[pid] = _Child(number, pid, client)
        client.children[number] = pid

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._bury(child, status)

    def _bury(self, child: _Child, status: int) -> None:
        del self._children[child.pid]
        child.client.children.pop(child.number, None)
        orphans = contain.kill_orphans(self._children.keys())
        self._tell(
            child.client,
            {
                "event": "exit",
                "number": child.number,
                "status": os.waitstatus_to_exitcode(status),
                "orphans": orphans,
            },
        )

    def _forget_everything(self) -> None:
        """Closes, in a fork, what belongs to the process it was forked from."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._wakeup, self._wakeup_write):
            end.close()
        for client in self._clients:
            client.connection.close()
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
        self._selector.close()


def _watch_process(pid: int) -> int:
    """Returns a descriptor that becomes readable when a process ends; -1 where the system has none.

    The connection's end tells of most deaths; not of one whose forked children hold copies of the connection.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _client_of(message: Message, fds: list[int]) -> _Client:
    return _Client(
        connection=Connection(socket.socket(fileno=fds[0])),
        payload_fd=fds[1],
        arrays_fd=fds[2],
        environ=message["environ"],
        cwd=message["cwd"],
    )


def _serve_sweep(client: _Client, parent: int, *, plugins: bool) -> NoReturn:
    """Loads the payload and serves its sweep, or says why neither is possible."""
    os.environ.clear()
    os.environ.update(client.environ or {})
    try:
        client.call = _worker().load_call(client.payload_fd, client.cwd)
        if plugins:
            _worker().load_plugins()  # in the environment that the function's modules may have changed
    except BaseException as error:
        client.connection.send({"event": "load_failed", **_worker().describe_error(error)})
        os._exit(0)
    spoiled = _worker().why_fork_is_unsafe()
    client.connection.send({"event": "loaded", "spoiled": spoiled})
    if spoiled:
        os._exit(0)
    prepare_to_fork()
    Forker(parent).serve(client)


def prepare_to_fork() -> None:
    """Keeps the garbage collector of forks from touching, and so copying, pages that they share.

    A template collects none itself: it makes next to none, and looking for it costs more than it is worth.
    """
    gc.disable()
    gc.freeze()


def run_template(options: dict[str, Any]) -> NoReturn:
    """The template's main: imports JAX, then serves its owner.

    Args:
        options: `fd` of the owner's connection, `owner` process id, `argv` of the owner.
    """
    contain.adopt_orphans()
    sys.argv = options["argv"]
    importlib.import_module("jax")
    importlib.import_module("quarantune.worker.bench")
    _worker()
    prepare_to_fork()
    owner = Connection(socket.socket(fileno=options["fd"]))
    Forker(options["owner"]).serve(_Client(connection=owner))
