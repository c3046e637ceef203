"""A sweep's sandbox: starts its workers and returns one stream of events about them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence

from quarantune.host import machine
from quarantune.host.interruptions import Stops
from quarantune.host.process import SANDBOX_MARK
from quarantune.sandbox import shortages, spawning, spool, template, wire
from quarantune.sandbox.template_messages import (
    CHILD_EVENTS,
    LOAD_REPORTS,
    ChildEvent,
    Ended,
    ErrorDescription,
    Import,
    Kill,
    Loaded,
    LoadReport,
    Open,
    Order,
    Start,
    describe_status,
    was_killed,
)
from quarantune.sandbox.wire import Connection, WireClosedError
from quarantune.sandbox.workforce import Event, Said
from quarantune.values import codec
from quarantune.values.amounts import too_long
from quarantune.values.codec import DamageError, JsonObject
from quarantune.values.errors import SandboxError
from quarantune.values.trial import Outcome

_logger = logging.getLogger("quarantune")

_SWEEP = 0
"""The number of the sweep's template among the children of the process's template; workers count from 1."""
_CHECK_S = 0.1
_OPENINGS = 3
"""How often a sweep tries to start templates while other processes kill them."""
_MAX_DEATHS = 3
_STARTUP_DEADLINE_S = 120.0
_LOAD_POLL_S = 0.05
_SEND_WAIT_S = 5.0
"""Longest wait, in seconds, for a template to read an order: it forks one worker after another."""
_CLOSE_WAIT_S = 0.7


class LoadError(Exception):
    """The payload could not be loaded.

    Attributes:
        description: the exception, or how the sweep's template ended.
        outcome: the outcome of every config of the sweep.
        was_killed: whether another process may have killed the sweep's template.
        log: the end of the output of the sweep's template.
    """

    def __init__(self, description: ErrorDescription, outcome: Outcome, *, was_killed: bool = False) -> None:
        self.description = description
        self.outcome = outcome
        self.was_killed = was_killed
        self.log = ""

    def __str__(self) -> str:
        return "\n".join((self.description.text, self.description.traceback, self.log))


@dataclasses.dataclass(eq=False)
class _Process:
    """A worker, or the sweep's template while it loads the payload, as this process knows it."""

    number: int
    connection: Connection
    log_fd: int
    pid: int | None = None
    has_ended: bool = False


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """Starts a sweep's workers and reports what happens to them.

    If a sweep's template dies, the process's template replaces it; if the process's template dies, a new one does.

    Use it as a context manager, which kills every remaining process at its end.
    """

    def __init__(
        self,
        *,
        payload_fd: int,
        arrays_fd: int,
        method: str,
        environ: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        plugins: bool = False,
        directory: bool = False,
        warm_up: JsonObject | None = None,
    ) -> None:
        """Prepares a sandbox; `open` starts it.

        Args:
            payload_fd: the pickled call; -1 for none.
            arrays_fd: its arrays' bytes; -1 for none.
            method: `fork` or `spawn`.
            environ: environment variables that all of its processes get in addition to the caller's.
            modules: modules that its workers and this process will import sooner or later.
            plugins: whether workers need JAX's plugins for devices other than the CPU.
            directory: whether they share a directory in memory, with the workers of other sweeps of this process.
            warm_up: the task that prepares the process's template for sweeps of this kind; None for none.
        """
        self._payload_fd = payload_fd
        self._arrays_fd = arrays_fd
        self._method = method
        self._own_environ = environ or {}
        self._environ: dict[str, str] = {}
        self._modules = modules
        self._loads_plugins = plugins
        self._has_directory = directory
        self._warm_up = warm_up
        self._selector = selectors.DefaultSelector()
        self._template: template.Template | None = None
        self._links: dict[Connection, int] = {}
        """The connections to the process's template and then, if there is one, the sweep's, with their process ids."""
        self._packages: tuple[str, ...] = ()
        """Modules of installed packages that the sweep's template has imported."""
        self._deaths = 0
        self._watch = template.TemplateWatch()
        self._children: dict[int, _Process] = {}
        self._worker_numbers = itertools.count(_SWEEP + 1)
        self._inherited: tuple[int | None, frozenset[machine.FileId]] | None = None
        self._imported: set[str] = set()
        self._next_check = 0.0
        self._events: list[Event] = []

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def template_pid(self) -> int | None:
        """Process id of the template that starts the workers; None before `open`."""
        return next(reversed(self._links.values()), None)

    @property
    def baseline_bytes(self) -> int:
        """Private memory that a worker has from the start, inherited from its template."""
        return 0 if self.template_pid is None else machine.resident_bytes(self.template_pid)[0]

    def common_files(self) -> set[machine.FileId]:
        """Returns the files in memory that every worker has open or mapped and that no worker has made."""
        pid = self.template_pid
        if self._inherited is None or self._inherited[0] != pid:
            self._inherited = pid, frozenset(machine.shared_files([] if pid is None else [pid]))
        fds = [self._payload_fd, self._arrays_fd, *(worker.log_fd for worker in self._children.values())]
        return {*self._inherited[1], *(machine.file_id(fd) for fd in fds if fd >= 0)}

    # Opening and closing

    def open(self, *, load_timeout_s: float | None) -> None:
        """Starts the sweep's template, which loads the payload once for all workers.

        If loading makes the process unsafe to fork, or if workers are spawned, each worker loads the payload itself.

        Args:
            load_timeout_s: the deadline for loading; None if there is nothing to load.

        Raises:
            LoadError: the payload does not load.
            SandboxError: no template can start.
            OSError: there are too few processes or threads to start one.
        """
        for again in reversed(range(_OPENINGS)):
            try:
                shortages.patiently(lambda: self._open(load_timeout_s))
                return
            except (SandboxError, LoadError) as error:
                # Another program may have killed the load, or an earlier sweep may have damaged the template.
                load_was_killed = isinstance(error, LoadError) and error.was_killed
                if not load_was_killed and (self._template is None or self._template.is_alive):
                    raise
                if not again:
                    error.add_note(f"This happened {_OPENINGS} times in a row: does another program kill processes?")
                    raise

    def _open(self, load_timeout_s: float | None) -> None:
        self._release()
        self._connect()
        self.share_modules(self._modules)
        if self._method == "fork" and load_timeout_s is not None:
            self._load(load_timeout_s)

    def _connect(self) -> None:
        """Connects to the process's template, and starts one if necessary.

        Raises:
            SandboxError: no template can start.
        """
        self._template = template.shared()
        self._environ = {
            **os.environ,
            # A worker shares the device with the caller, who may hold most of its memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            SANDBOX_MARK: self._template.token,
            **self._own_environ,
        }
        if self._warm_up is not None:
            self._template.warm_up(self._environ, self._warm_up)
        sweep = Open(self._environ, _cwd(), self._loads_plugins, self._has_directory)
        link = self._template.open(sweep, payload_fd=self._payload_fd, arrays_fd=self._arrays_fd)
        self._add_link(link, self._template.pid)

    def _load(self, timeout_s: float) -> None:
        """Starts a sweep's template and waits until it has loaded the payload.

        If loading has made the template unsafe to fork, the sweep has none afterwards.

        Args:
            timeout_s: the deadline for loading.

        Raises:
            LoadError: the payload does not load.
            SandboxError: the process's template died or does not answer.
        """
        try:
            child = self._start(_SWEEP, None, (), {})
            spawning.import_modules(self._modules)  # while the templates start, which takes longer
            loaded = self._await_load(child, timeout_s)
            if loaded.fork_hazard is None and child.connection.is_open and child.pid is not None:
                del self._children[_SWEEP]
                os.close(child.log_fd)
                self._selector.unregister(child.connection)
                self._packages = loaded.modules
                self._add_link(child.connection, child.pid)
        except LoadError as error:
            error.log = spool.read_log(child.log_fd, last_bytes=4000)
            raise
        finally:
            self.forget(_SWEEP)

    def _await_load(self, child: _Process, timeout_s: float) -> Loaded:
        """Returns the report of the sweep's template; kills the template at the deadline, which starts once it runs.

        Raises:
            LoadError: the payload does not load.
            SandboxError: the process's template died or does not answer.
        """
        report: LoadReport | None = None
        failure: LoadError | None = None
        is_up, is_killed = False, False
        deadline, stops = time.monotonic() + _STARTUP_DEADLINE_S, Stops(time.monotonic)
        # A quick fork may have loaded before its parent reports that it runs.
        while report is None or child.pid is None:
            events = self.poll(min(_LOAD_POLL_S, deadline - time.monotonic()))
            deadline += stops.lost_s()
            if child.pid is not None and not is_up:
                is_up, deadline = True, time.monotonic() + timeout_s
            for event in events:
                if isinstance(event, Ended):
                    if report is None:
                        raise failure or _crash(event.status)
                elif report is None and failure is None:
                    try:
                        report = codec.decode(event.message, *LOAD_REPORTS)
                    except DamageError:
                        text = "the process damaged its own connection while it loaded the function"
                        failure = LoadError(ErrorDescription(text, error=""), Outcome.CRASHED)
            is_late = time.monotonic() >= deadline
            if is_late and (is_killed or not is_up):
                raise SandboxError("the template process does not answer")
            if is_late and report is None and failure is None:
                text = too_long("loading the function", timeout_s, "compile_timeout")
                failure = LoadError(ErrorDescription(text, error=""), Outcome.TIMEOUT)
            if failure is not None and not is_killed:
                is_killed, deadline = True, time.monotonic() + _STARTUP_DEADLINE_S
                self._order(Kill(_SWEEP))
        if isinstance(report, ErrorDescription):
            raise LoadError(report, Outcome.ERROR)
        return report

    def close(self) -> None:
        """Kills every worker and the sweep's template, and waits, within a bound, until they are gone."""
        try:
            self._end_children()
        finally:
            for number in list(self._children):
                self.forget(number)
            self._release()
            self._selector.close()

    def _end_children(self) -> None:
        """Ends the children of the process's template, and waits, within a bound, until they are gone."""
        self._wake()
        if not self._links:
            return
        link, *sweep_links = self._links
        for sweep_link in sweep_links:
            sweep_link.hang_up()  # its template kills its workers and exits
        running = {_SWEEP} if sweep_links else set(self._children)
        deadline = time.monotonic() + _CLOSE_WAIT_S
        with contextlib.suppress(DamageError, WireClosedError), selectors.DefaultSelector() as selector:
            for number in running - {_SWEEP}:
                link.send_message(Kill(number))
            selector.register(link, selectors.EVENT_READ)
            while running and (left_s := deadline - time.monotonic()) > 0:
                selector.select(left_s)
                running -= {event.number for event in _child_events(link) if isinstance(event, Ended)}
            if sweep_links and self._template is not None:
                self._template.warm_up(self._environ, modules=self._packages)

    def _release(self) -> None:
        """Closes all connections, so that the templates kill this sandbox's processes. It may connect again."""
        for link in reversed(list(self._links)):
            self._drop_link(link)
        self._events.clear()
        template.close_unused()

    def _add_link(self, link: Connection, pid: int) -> None:
        self._links[link] = pid
        self._selector.register(link, selectors.EVENT_READ, link)

    def _drop_link(self, link: Connection) -> None:
        del self._links[link]
        self._selector.unregister(link)
        link.hang_up()

    # Workers

    def start(self, task: JsonObject, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int:
        """Starts a worker with its first task.

        Args:
            task: the task's frame.
            fds: descriptors that go with the task.
            environ: environment variables that only this worker gets.

        Returns:
            The worker's number.

        Raises:
            OSError: this process has no descriptors left.
        """
        return self._start(next(self._worker_numbers), task, fds, environ or {}).number

    def _start(self, number: int, task: JsonObject | None, fds: Sequence[int], environ: Mapping[str, str]) -> _Process:
        log_fd = spool.create_log()
        try:
            connection, theirs = wire.connection_pair()
        except OSError:
            os.close(log_fd)
            raise
        with theirs:
            self._children[number] = child = _Process(number, connection, log_fd)
            self._selector.register(connection, selectors.EVENT_READ, child)
            order = Start(number=number, task=task, environ=environ, method=self._method)
            self._order(order, [log_fd, theirs.fileno(), *fds])
        return child

    def send(self, number: int, message: JsonObject, fds: Sequence[int] = ()) -> None:
        """Sends a worker a further task; if the worker no longer reads, `Ended` follows."""
        with contextlib.suppress(WireClosedError):
            self._children[number].connection.send(message, fds)

    def finish(self, number: int) -> None:
        """Closes the connection to a worker, so that it ends, unless `forget` has removed it."""
        if number in self._children:
            self._disconnect(self._children[number])

    def kill(self, number: int, *, shows_stack: bool = False) -> None:
        """Kills a worker and everything it started; `Ended` follows.

        Args:
            number: the worker's number.
            shows_stack: whether the worker writes its stack to its log first.
        """
        self._wake()
        self._order(Kill(number, shows_stack))

    def pid(self, number: int) -> int | None:
        """Returns a worker's process id, once it is known."""
        return self._children[number].pid if number in self._children else None

    def log(self, number: int) -> str:
        """Returns a worker's output."""
        return spool.read_log(self._children[number].log_fd) if number in self._children else ""

    def clear_log(self, number: int) -> None:
        """Removes the output of a worker so far, which does not belong to its next config."""
        if number in self._children:
            os.ftruncate(self._children[number].log_fd, 0)

    def trim_logs(self) -> None:
        """Shortens the logs that have grown too large."""
        for worker in self._children.values():
            spool.trim_log(worker.log_fd)

    def forget(self, number: int) -> None:
        """Removes a worker that has ended, or one that does not die."""
        if (worker := self._children.pop(number, None)) is not None:
            self._disconnect(worker)
            os.close(worker.log_fd)

    def _disconnect(self, worker: _Process) -> None:
        if worker.connection.is_open:
            self._selector.unregister(worker.connection)
            worker.connection.hang_up()

    # Orders to the templates

    def share_modules(self, names: Sequence[str]) -> None:
        """Makes the templates import modules that a worker lacked, so that later forks have them."""
        new = tuple(name for name in names if name not in self._imported)
        self._imported.update(new)
        for link in list(self._links) if new else ():
            if link in self._links:  # not replaced since
                self._send(link, Import(new))

    def _order(self, order: Order, fds: Sequence[int] = ()) -> None:
        """Sends an order to the template that starts the workers.

        Raises:
            SandboxError: the sandbox is not open, or templates keep dying.
        """
        if not self._links:
            raise SandboxError("the sandbox is not open")
        self._send(next(reversed(self._links)), order, fds)

    def _send(self, link: Connection, order: Order, fds: Sequence[int] = ()) -> None:
        try:
            link.send_message(order, fds, within_s=_SEND_WAIT_S)
        except WireClosedError:
            self._replace(link)

    # Events

    def poll(self, timeout_s: float) -> list[Event]:
        """Returns the events since the last call, waiting for at most `timeout_s` seconds if there are none.

        The end of each worker comes once, after its last message.

        Raises:
            SandboxError: templates keep dying.
        """
        for key, _ in self._selector.select(0 if self._events else max(0.0, timeout_s)):
            if isinstance(key.data, _Process):
                self._read(key.data)
            else:
                self._read_template(key.data)
        if (now := time.monotonic()) >= self._next_check:
            self._next_check = now + _CHECK_S
            for worker in self._children.values():
                self._read(worker)  # this notices a frame that never ends
            self._check_templates()
        events, self._events = self._events, []
        return events

    def _read(self, worker: _Process) -> bool:
        """Reads the messages that have arrived from a worker, and returns whether there were any; never waits.

        It disconnects a worker whose connection is closed or damaged.
        """
        if not worker.connection.is_open:
            return False
        try:
            received = worker.connection.receive()
        except (DamageError, WireClosedError) as error:
            self._disconnect(worker)
            if isinstance(error, DamageError):
                self._events.append(Said(worker.number, error))
            return False
        wire.close_all([fd for _, fds in received for fd in fds])  # a worker has no reason to send descriptors
        if received:
            self._deaths = 0  # a template whose worker sends messages is sound, so a config killed the others
        self._events += [Said(worker.number, message) for message, _ in received]
        return bool(received)

    def _read_template(self, link: Connection) -> None:
        """Reads a template's reports on workers, unless another template has replaced it."""
        if link not in self._links:
            return
        try:
            events = _child_events(link)
        except (DamageError, WireClosedError):
            self._replace(link)
            return
        for event in events:
            if (worker := self._children.get(event.number)) is None:
                continue
            if isinstance(event, Ended):
                self._end(worker, event.status)
            else:
                worker.pid = event.pid

    def _end(self, worker: _Process, status: int | None) -> None:
        """Adds a worker's last messages, then its end, to the events, unless they have its end already."""
        if worker.has_ended:
            return
        while self._read(worker):
            pass
        self._disconnect(worker)
        worker.has_ended = True
        self._events.append(Ended(worker.number, status))

    # Templates that stop, hang or die

    def _wake(self) -> None:
        """Wakes templates that a config may have stopped."""
        template.wake(self._links.values())

    def _check_templates(self) -> None:
        """Wakes stopped templates, and kills a template that does not answer, so that another replaces it."""
        # To fork the sweep's template, the process's may first have to start, and to warm up, which takes long.
        workers = [child for child in self._children.values() if child.number != _SWEEP]
        awaits_start = any(worker.pid is None and not worker.has_ended for worker in workers)
        unresponsive = self._watch.check([*reversed(self._links.values())], awaits_start=awaits_start)
        if unresponsive is not None:
            pid, reason = unresponsive
            _logger.warning("template process %d %s, so another one takes its place", pid, reason)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # the end of its connection makes `_replace` run

    def _replace(self, lost: Connection) -> None:
        """Continues with another template after the template of `lost` has died, and its workers with it.

        Raises:
            SandboxError: templates keep dying, no other can start, or `lost` had yet to fork the sweep's template.
        """
        if _SWEEP in self._children:
            assert self._template is not None
            ending = describe_status(self._template.await_end())
            raise SandboxError(f"the template process {ending} while it started:\n{self._template.log()}")
        for worker in self._children.values():
            self._end(worker, None)
        self._deaths += 1
        if self._deaths > _MAX_DEATHS:
            raise SandboxError(f"the template process died {self._deaths} times in one sweep")
        link, *sweep_links = self._links
        for sweep_link in sweep_links:
            self._drop_link(sweep_link)
        if lost is not link:
            # The process's template starts the workers from now on. It also kills a sweep's template that still runs.
            with contextlib.suppress(WireClosedError):
                link.send_message(Kill(_SWEEP))
        else:
            self._drop_link(link)
            assert self._template is not None
            template.discard(self._template)
            self._connect()


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # the caller's directory is gone, so workers stay where the template is


def _child_events(link: Connection) -> list[ChildEvent]:
    """Returns a template's reports on its children; closes descriptors that a module's fork hook may have sent."""
    received = link.receive_messages(*CHILD_EVENTS)
    wire.close_all([fd for _, fds in received for fd in fds])
    return [event for event, _ in received]


def _crash(status: int | None) -> LoadError:
    text = f"the process {describe_status(status)} while it loaded the function"
    return LoadError(ErrorDescription(text, error=""), Outcome.CRASHED, was_killed=was_killed(status))
