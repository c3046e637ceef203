"""The loop inside a template: starts workers by fork or spawn, reaps them, and kills the processes they leave behind.

The process's template runs this loop, and so does each sweep's template, a fork of it that has loaded the sweep's
payload. The loop is single-threaded and initialises no JAX backend, because only such a process can be forked safely.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from quarantune.sandbox import contain, shared_names, spawning, wire, worker_program
from quarantune.sandbox.template_messages import (
    ORDERS,
    SPOILED,
    ChildEvent,
    Exited,
    Import,
    Kill,
    Loaded,
    LoadFailed,
    Open,
    Order,
    SpawnedWorkerOptions,
    Started,
    StartSweep,
    StartWorker,
    TemplateOptions,
    WarmUp,
)
from quarantune.sandbox.wire import Connection
from quarantune.sandbox.worker_program import Shared


@dataclasses.dataclass(eq=False)
class _Client:
    """A sweep's connection to this template, with the data that its workers share."""

    connection: Connection
    payload_fd: int = -1
    arrays_fd: int = -1
    environ: Mapping[str, str] | None = None
    cwd: str | None = None
    call: object | None = None
    children: dict[int, int] = dataclasses.field(default_factory=dict)
    """Process id of each child, by the number that the sweep gave it."""


@dataclasses.dataclass(frozen=True)
class _Child:
    number: int
    pid: int
    client: _Client
    names_fd: int


class Forker:
    """Serves sweeps until the process that it must not outlive ends."""

    def __init__(self, lifeline_pid: int) -> None:
        """Watches children and the lifeline.

        Args:
            lifeline_pid: the process that this one must not outlive.
        """
        self._selector = selectors.DefaultSelector()
        self._clients: list[_Client] = []
        self._has_decorator = False
        self._children: dict[int, _Child] = {}
        self._wakeup, self._wakeup_write = socket.socketpair()
        for end in (self._wakeup, self._wakeup_write):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wake-up descriptor
        # The module of a sweep's function may have blocked the signal while it was loaded.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)
        self._lifeline_fd = _watch_process(lifeline_pid)
        if self._lifeline_fd >= 0:
            self._selector.register(self._lifeline_fd, selectors.EVENT_READ, self._end)
        if os.getppid() != lifeline_pid:
            self._end()

    def serve(self, client: _Client) -> NoReturn:
        """Serves `client`, and the clients that it opens, until it disconnects."""
        self._add(client)
        while True:
            for key, _ in self._selector.select():
                # An earlier event of this round may have closed the object of this one.
                if key.fileobj in self._selector.get_map():
                    key.data()

    # Clients

    def _add(self, client: _Client) -> None:
        self._clients.append(client)
        self._selector.register(client.connection, selectors.EVENT_READ, lambda: self._read(client))

    def _read(self, client: _Client) -> None:
        try:
            for order, fds in client.connection.receive_messages(*ORDERS):
                self._obey(client, order, fds)
        except wire.WireError:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        """Kills all children of a sweep that ended or whose process died."""
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
        for child in self._children.values():
            shared_names.remove(child.names_fd)
        os._exit(0)

    def _report(self, client: _Client, event: ChildEvent) -> None:
        if client not in self._clients:
            return
        try:
            client.connection.send_message(event)
        except wire.WireError:
            self._drop(client)

    # Orders

    def _obey(self, client: _Client, order: Order, fds: list[int]) -> None:
        match order:
            case Open():
                self._add(_new_client(order, fds))
            case WarmUp():
                self._warm_up(order)
            case StartSweep() | StartWorker():
                try:
                    if isinstance(order, StartSweep):
                        self._start_sweep(client, order, fds)
                    else:
                        self._start_worker(client, order, fds)
                except OSError:  # no more processes, or an environment too large for one
                    with open(fds[3 if isinstance(order, StartSweep) else 1], "a", closefd=False) as log:
                        traceback.print_exc(file=log)
                    wire.close_all(fds)
                    self._report(client, Exited(order.number, None))
            case Kill():
                if (pid := client.children.get(order.number)) is not None:
                    if order.shows_stack:
                        contain.show_stack(pid)
                    contain.kill_tree(pid)
            case Import():
                spawning.import_modules(order.modules)
                prepare_to_fork()

    def _warm_up(self, order: WarmUp) -> None:
        if self._children:
            return  # of sweeps that began before; they would not survive the end of a process that was spoiled
        # Threads of numerical libraries are started when these are imported, and prepared for forks.
        before, own = _count_threads(), dict(os.environ)
        os.environ.update(order.environ)
        try:
            worker_program.load().warm_up(order.task)
        except BaseException:  # a plugin may raise anything; every worker will meet it again
            traceback.print_exc()
        os.environ.clear()
        os.environ.update(own)
        if _count_threads() > before:
            os._exit(SPOILED)
        prepare_to_fork()

    def _start_sweep(self, client: _Client, order: StartSweep, fds: list[int]) -> None:
        def run() -> NoReturn:
            served = _new_client(order, fds)
            contain.contain_worker(parent=parent, log_fd=fds[3])
            os.close(fds[3])
            shared_names.note_in(names_fd)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("0")
            self._close_in_fork()
            _serve_sweep(served, parent, loads_plugins=order.loads_plugins)

        parent = os.getpid()
        with shared_names.file() as names_fd:
            self._fork(client, order.number, names_fd, run)
        self._report(client, Started(order.number, client.children[order.number]))
        wire.close_all(fds)
        if not self._has_decorator:
            self._has_decorator = True
            worker_program.preload_decorator()  # beside the load that has begun
            prepare_to_fork()

    def _start_worker(self, client: _Client, order: StartWorker, fds: list[int]) -> None:
        environ = {**(client.environ or os.environ), **order.environ}
        with shared_names.file() as names_fd:
            if order.method == "spawn":
                self._spawn(client, order, environ, [*fds, names_fd])
            else:
                self._fork(client, order.number, names_fd, self._worker_main(client, order, environ, [*fds, names_fd]))
        self._report(client, Started(order.number, client.children[order.number]))
        wire.close_all(fds)

    def _worker_main(
        self, client: _Client, order: StartWorker, environ: dict[str, str], fds: list[int]
    ) -> Callable[[], NoReturn]:
        """Returns the main function of a forked worker."""
        parent = os.getpid()
        connection_fd, log_fd, *task_fds, names_fd = fds

        def run() -> NoReturn:
            contain.contain_worker(parent=parent, log_fd=log_fd)
            shared_names.note_in(names_fd)
            os.close(log_fd)
            self._close_in_fork()
            gc.enable()
            os.environ.clear()
            os.environ.update(environ)
            connection = Connection(socket.socket(fileno=connection_fd))
            shared = Shared(payload_fd=client.payload_fd, arrays_fd=client.arrays_fd, call=client.call, cwd=client.cwd)
            worker_program.load().main(connection, shared, order.task, task_fds)

        return run

    def _fork(self, client: _Client, number: int, names_fd: int, run: Callable[[], NoReturn]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._watch(client, number, pid, names_fd)

    def _spawn(self, client: _Client, order: StartWorker, environ: dict[str, str], fds: list[int]) -> None:
        connection_fd, log_fd, *task_fds, names_fd = fds
        options = SpawnedWorkerOptions(
            parent_pid=os.getpid(),
            connection_fd=connection_fd,
            log_fd=log_fd,
            task_fds=tuple(task_fds),
            names_fd=names_fd,
            payload_fd=client.payload_fd,
            arrays_fd=client.arrays_fd,
            cwd=client.cwd,
            task=order.task,
        )
        process = spawning.start(
            options,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=[fd for fd in (*fds, client.payload_fd, client.arrays_fd) if fd >= 0],
            env=environ,
            cwd=client.cwd,
            start_new_session=True,
        )
        process.returncode = 0  # reaped here, with the other children, and not by Popen
        self._watch(client, order.number, process.pid, names_fd)

    # Children

    def _watch(self, client: _Client, number: int, pid: int, names_fd: int) -> None:
        self._children[pid] = _Child(number, pid, client, names_fd)
        client.children[number] = pid

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._on_child_exit(child, status)

    def _on_child_exit(self, child: _Child, wait_status: int) -> None:
        del self._children[child.pid]
        child.client.children.pop(child.number, None)
        orphans = contain.kill_orphans(self._children.keys())
        shared_names.remove(child.names_fd)
        self._report(child.client, Exited(child.number, os.waitstatus_to_exitcode(wait_status), orphans))

    def _close_in_fork(self) -> None:
        """Closes, in a fork, the descriptors that belong to the process it was forked from."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._wakeup, self._wakeup_write):
            end.close()
        for client in self._clients:
            client.connection.close()
        for child in self._children.values():
            os.close(child.names_fd)
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
        self._selector.close()


def _watch_process(pid: int) -> int:
    """Returns a descriptor that becomes readable when a process ends; -1 where the system has none.

    The end of the connection reveals most deaths, but not that of a process whose forked children hold copies of the
    connection.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _new_client(order: Open | StartSweep, fds: list[int]) -> _Client:
    return _Client(
        connection=Connection(socket.socket(fileno=fds[0])),
        payload_fd=fds[1],
        arrays_fd=fds[2],
        environ=order.environ,
        cwd=order.cwd,
    )


def _serve_sweep(client: _Client, parent: int, *, loads_plugins: bool) -> NoReturn:
    """Loads the payload and serves its sweep, or reports why it cannot and exits."""
    from quarantune import jax_internals

    os.environ.clear()
    os.environ.update(client.environ or {})
    program = worker_program.load()
    try:
        client.call = program.load_call(client.payload_fd, client.cwd)
        if loads_plugins:
            # In the environment that the function's modules may have changed. Every fork uses the plugins, and none of
            # them is initialised here, because a process that has done that must not be forked.
            jax_internals.load_plugins()
    except BaseException as error:
        described = program.describe_error(error)
        client.connection.send_message(LoadFailed(described.text, error=described.error, traceback=described.traceback))
        os._exit(0)
    hazard = _fork_hazard()
    client.connection.send_message(Loaded(hazard))
    if hazard:
        os._exit(0)
    prepare_to_fork()
    Forker(parent).serve(client)


def _fork_hazard() -> str | None:
    """Returns why this process must not be forked; None where forking is safe."""
    from quarantune import jax_internals

    if jax_internals.backends_initialized():
        return "a JAX backend was initialised while the function was loaded"
    if _count_threads() > 1:
        return "a thread was started while the function was loaded"
    return None


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def prepare_to_fork() -> None:
    """Prevents the garbage collector of forks from touching, and so copying, the pages they share.

    A template itself never collects: it makes hardly any garbage, and looking for it costs more than it frees.
    """
    gc.disable()
    gc.freeze()


def run_template(options: TemplateOptions) -> NoReturn:
    """Runs the process's template: imports JAX, then serves the owner."""
    contain.adopt_orphans()
    sys.argv = list(options.argv)
    worker_program.preload()
    prepare_to_fork()
    owner = Connection(socket.socket(fileno=options.connection_fd))
    Forker(options.owner_pid).serve(_Client(connection=owner))
