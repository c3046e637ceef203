"""The loop inside a template: starts workers by fork or spawn, reaps them, and kills the processes they leave behind.

The process's template runs this loop, and so does each sweep's template, a fork of it that has loaded the sweep's
payload. The loop is single-threaded and initialises no JAX backend, because its process must be able to fork safely.

The sandbox holds processes and knows nothing of trials, so it never imports the `worker` package: a template imports
the workers' program by its name before it starts workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from quarantune.host.packages import content, is_installed
from quarantune.host.process import SANDBOX_MARK
from quarantune.jax_internals import jax_backends
from quarantune.jax_internals.other_processes import load_plugins
from quarantune.sandbox import contain, spawning, spool, wire
from quarantune.sandbox.template_messages import (
    ORDERS,
    ROLE_OPTIONS,
    SPOILED,
    ChildEvent,
    Ended,
    Import,
    Kill,
    Loaded,
    Open,
    Order,
    Start,
    Started,
    TemplateOptions,
    WarmUp,
    WorkerOptions,
)
from quarantune.sandbox.wire import Connection, WireClosedError
from quarantune.values import codec

_WORKER_PROGRAM = "quarantune.worker.main"
_DECORATOR = "quarantune.api.autotune"
"""Module that every module with tuned functions imports. Importing it ahead saves 0.1 s when they load."""

_set_by_modules: dict[str, str] = {}
"""Environment variables that modules have set during their import here; Mosaic GPU's modules do so."""


def main(frame: object) -> None:
    """Runs a freshly started interpreter as a template or a worker, to the end of the process.

    Args:
        frame: `TemplateOptions` or `WorkerOptions`, encoded by the codec.
    """
    contain.reset_signals()
    match codec.decode(frame, *ROLE_OPTIONS):
        case TemplateOptions() as options:
            contain.adopt_orphans()
            sys.argv = list(options.argv)
            _worker_program()
            _prepare_to_fork()
            owner = _Client(_connection(options.connection_fd), Open({}, None, loads_plugins=False))
            directory = contain.common_directory(os.environ[SANDBOX_MARK])
            _Forker(options.owner_pid, directory).serve(owner)
        case WorkerOptions() as options:
            _run_worker(options, None)


def _worker_program() -> Any:
    """Imports the module of the workers' program, with JAX and everything that it needs, and returns it."""
    return importlib.import_module(_WORKER_PROGRAM)


def _run_worker(options: WorkerOptions, call: object | None) -> None:
    """Turns this process, fresh or forked, into a worker, and runs it to the end of the process.

    Args:
        options: describes the worker.
        call: the payload as the template has loaded it; None if the worker must load it itself.
    """
    contain.contain_worker(parent=options.parent_pid, log_fd=options.log_fd, names_fd=options.names_fd)
    program = _worker_program()
    gc.enable()
    program.main(_connection(options.connection_fd), options, call)


@dataclasses.dataclass(eq=False)
class _Client:
    """A connection to this template: its owner's, or a sweep's, with the data that the sweep's workers share."""

    connection: Connection
    sweep: Open
    payload_fd: int = -1
    arrays_fd: int = -1
    call: object | None = None


@dataclasses.dataclass(frozen=True)
class _Child:
    """A child, with its number in its sweep, and with the file for the names of its shared memory."""

    number: int
    pid: int
    client: _Client
    names_fd: int

    def remove_shared_memory(self) -> None:
        """Removes the shared memory that the child left when it ended."""
        contain.remove_all_of(contain.own_directory(self.pid))
        contain.remove_shared_memory(self.names_fd)


class _Forker:
    """Serves sweeps until the process that it must not outlive ends."""

    def __init__(self, lifeline_pid: int, directory: str = "") -> None:
        """Watches children and the lifeline.

        Args:
            lifeline_pid: the process that this one must not outlive.
            directory: the directory in memory that it makes for sweeps that share one; empty for a sweep's template.
        """
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._clients: list[_Client] = []
        self._children: dict[int, _Child] = {}
        self._wakeup_fd, self._wakeup_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nobody writes to the wake-up descriptor
        # The module of a sweep's function may have blocked the signal as it loaded.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        signal.set_wakeup_fd(self._wakeup_write_fd, warn_on_full_buffer=False)
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ, self._reap)
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
        except (codec.DamageError, WireClosedError):
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        """Kills all children of a sweep that ended or whose process died."""
        if client is self._clients[0]:
            self._end()
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        for child in self._children.values():
            if child.client is client:
                contain.kill_tree(child.pid)
        client.connection.close()
        wire.close_all([client.payload_fd, client.arrays_fd])

    def _end(self) -> NoReturn:
        for pid in self._children:
            contain.kill_tree(pid)
        contain.kill_orphans(())
        for child in self._children.values():
            child.remove_shared_memory()
        if self._directory:
            contain.remove_all_of(self._directory)  # also for workers whose sweep's template died just now
        os._exit(0)

    def _report(self, client: _Client, event: ChildEvent) -> None:
        if client not in self._clients:
            return
        try:
            client.connection.send_message(event)
        except WireClosedError:
            self._drop(client)

    # Orders

    def _obey(self, client: _Client, order: Order, fds: list[int]) -> None:
        match order:
            case Open():
                connection_fd, payload_fd, arrays_fd = (*fds, -1, -1)[:3]
                if order.has_directory:
                    with contextlib.suppress(OSError):  # it exists already, or the system has no room for it
                        os.mkdir(self._directory, 0o700)
                self._add(_Client(_connection(connection_fd), order, payload_fd, arrays_fd))
            case WarmUp():
                self._warm_up(order)
            case Start():
                self._start(client, order, fds)
                if order.task is None:
                    importlib.import_module(_DECORATOR)  # during the load that has begun
                    _prepare_to_fork()
            case Kill():
                for child in self._children.values():
                    if child.client is client and child.number == order.number:
                        if order.shows_stack:
                            contain.show_stack(child.pid)
                        contain.kill_tree(child.pid)
            case Import():
                _import_for_forks(order.modules)
                _prepare_to_fork()

    def _warm_up(self, order: WarmUp) -> None:
        if self._children:
            return  # children of earlier sweeps would not survive the end of a spoiled process
        # Numerical libraries start threads during their import, and prepare these for forks.
        before, own = _count_threads(), dict(os.environ)
        os.environ.update(order.environ)
        try:
            if order.task is not None:
                _worker_program().warm_up(order.task)
            _import_for_forks(order.modules, are_installed=True)
        except BaseException:  # a plugin may raise anything; every worker will meet it again
            traceback.print_exc()
        _set_environ(own)
        if _count_threads() > before or (order.modules and _fork_hazard()):
            os._exit(SPOILED)
        _prepare_to_fork()

    def _start(self, client: _Client, order: Start, fds: list[int]) -> None:
        names_fd = -1
        try:
            names_fd = spool.create_log()
            pid = self._launch(client, order, fds, names_fd)
        except OSError:  # no more processes, or an environment too large for one
            wire.close_all([names_fd])
            with open(fds[0], "a", closefd=False) as log:
                traceback.print_exc(file=log)
            self._report(client, Ended(order.number, None))
        else:
            self._children[pid] = _Child(order.number, pid, client, names_fd)
            self._report(client, Started(order.number, pid))
        wire.close_all(fds)

    def _launch(self, client: _Client, order: Start, fds: list[int], names_fd: int) -> int:
        """Starts the process of a child and returns its id."""
        parent = os.getpid()
        log_fd, connection_fd, *task_fds = fds
        if order.task is None:

            def serve_sweep() -> None:
                contain.contain_worker(parent=parent, log_fd=log_fd, names_fd=names_fd, oom_score=0)
                self._close_in_fork()
                _serve_sweep(dataclasses.replace(client, connection=_connection(connection_fd)), parent)

            return _fork(serve_sweep)
        environ = {**_set_by_modules, **client.sweep.environ, **order.environ}
        options = WorkerOptions(
            parent_pid=parent,
            connection_fd=connection_fd,
            log_fd=log_fd,
            task_fds=tuple(task_fds),
            names_fd=names_fd,
            payload_fd=client.payload_fd,
            arrays_fd=client.arrays_fd,
            cwd=client.sweep.cwd,
            task=order.task,
        )
        if order.method == "spawn":
            process = spawning.start(
                options,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=[fd for fd in (*fds, names_fd, client.payload_fd, client.arrays_fd) if fd >= 0],
                env=environ,
                cwd=client.sweep.cwd,
                start_new_session=True,
            )
            process.returncode = 0  # `_reap` reaps it with the other children, and Popen must not
            return process.pid

        def work() -> None:
            self._close_in_fork()
            _set_environ(environ)
            _run_worker(options, client.call)

        return _fork(work)

    # Children

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_fd, 4096)
        for child in list(self._children.values()):
            pid, wait_status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                del self._children[pid]
                contain.kill_orphans(self._children.keys())
                child.remove_shared_memory()
                self._report(child.client, Ended(child.number, os.waitstatus_to_exitcode(wait_status)))

    def _close_in_fork(self) -> None:
        """Closes, in a fork, the descriptors that belong to the parent process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for client in self._clients:
            client.connection.close()
        names_fds = [child.names_fd for child in self._children.values()]
        wire.close_all([self._wakeup_fd, self._wakeup_write_fd, self._lifeline_fd, *names_fds])
        self._selector.close()


def _serve_sweep(client: _Client, parent: int) -> None:
    """Loads the payload and serves its sweep, or reports why it cannot and exits."""
    _set_environ({**_set_by_modules, **client.sweep.environ})
    program = _worker_program()
    before = set(sys.modules)
    try:
        client.call = program.load_bench(client.payload_fd, client.sweep.cwd)
        if client.sweep.loads_plugins:
            # Every fork uses the plugins, in an environment that the function's modules may have changed. This loads
            # the plugins without initialising any, because a process with an initialised plugin must not fork.
            load_plugins()
    except BaseException as error:
        client.connection.send_message(program.describe_error(error))
        os._exit(0)
    hazard = _fork_hazard()
    client.connection.send_message(Loaded(hazard, _of_packages(sys.modules.keys() - before)))
    if hazard:
        os._exit(0)
    _prepare_to_fork()
    _Forker(parent).serve(client)


def _fork(run: Callable[[], None]) -> int:
    """Returns the id of a new fork of this process, which runs a function that ends it."""
    if pid := os.fork():
        return pid
    try:
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _watch_process(pid: int) -> int:
    """Returns a descriptor that becomes readable when a process ends; -1 if the system has none.

    The end of the connection reveals most deaths, but not the death of a process whose forked children hold copies of
    the connection.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _connection(fd: int) -> Connection:
    return Connection(socket.socket(fileno=fd))


def _set_environ(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def _import_for_forks(modules: Sequence[str], *, are_installed: bool = False) -> None:
    """Imports modules ahead of their use in forks. The environments of forks get the variables that modules set."""
    before = dict(os.environ)
    spawning.import_modules(modules, are_installed=are_installed)
    _set_by_modules.update(os.environ.items() - before.items())


def _of_packages(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the imported modules of some names that belong to installed packages, which nobody edits."""
    files = {name: content(sys.modules.get(name)).get("__file__") for name in names}
    return tuple(sorted(name for name, file in files.items() if isinstance(file, str) and is_installed(file)))


def _fork_hazard() -> str | None:
    """Returns why this process must not fork; None if forking is safe."""
    if jax_backends.backends_initialized():
        return "loading the function has initialised a JAX backend"
    if _count_threads() > 1:
        return "loading the function has started a thread"
    return None


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # for example in a container without /proc
        return threading.active_count()


def _prepare_to_fork() -> None:
    """Prevents the garbage collector of forks from touching, and so copying, the pages they share.

    A template itself never collects: it makes hardly any garbage, and looking for it costs more than it frees.
    """
    gc.disable()
    gc.freeze()
