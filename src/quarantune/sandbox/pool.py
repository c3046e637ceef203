"""A sweep's sandbox: starts its workers and returns one stream of events about them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from quarantune.host import machine
from quarantune.sandbox import shortages, spool, wire
from quarantune.sandbox.template_link import SWEEP, LoadError, TemplateLink
from quarantune.sandbox.template_messages import Ended, Kill, StartWorker
from quarantune.sandbox.wire import Connection
from quarantune.values.codec import Frame
from quarantune.values.trial import SandboxError

_CHECK_S = 0.1
_OPENINGS = 3
"""How often templates are started for a sweep while other processes kill them."""


@dataclasses.dataclass(frozen=True)
class Said:
    """A worker sent a message.

    Attributes:
        number: the worker.
        message: the message's frame, not yet decoded.
    """

    number: int
    message: Frame


@dataclasses.dataclass(frozen=True)
class Damaged:
    """The data from a worker is damaged, so nothing more is read from it.

    Attributes:
        number: the worker.
        reason: the damage, in words.
    """

    number: int
    reason: str


Event: TypeAlias = Said | Damaged | Ended


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker, as this process knows it."""

    number: int
    connection: Connection
    log_fd: int
    pid: int | None = None
    has_ended: bool = False


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """Starts a sweep's workers and reports what happens to them.

    Use it as a context manager, which kills every process that is left at its end.
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
        warm_up: Frame | None = None,
    ) -> None:
        """Prepares a sandbox; `open` starts it.

        Args:
            payload_fd: the pickled call; -1 for none.
            arrays_fd: its arrays' bytes; -1 for none.
            method: `fork` or `spawn`.
            environ: environment variables that all of its processes get in addition to the caller's.
            modules: modules that its workers, and this process, are known to import sooner or later.
            plugins: whether workers need JAX's plugins for devices other than the CPU.
            warm_up: the task by which the process's template prepares for such sweeps; None for none.
        """
        self._modules = modules
        self._method = method
        self._selector = selectors.DefaultSelector()
        try:
            self._null_fd = os.open(os.devnull, os.O_RDONLY)  # stands for a payload that there is not
        except OSError:
            self._selector.close()
            raise
        self._workers: dict[int, _Worker] = {}
        self._link = TemplateLink(
            selector=self._selector,
            payload_fd=payload_fd if payload_fd >= 0 else self._null_fd,
            arrays_fd=arrays_fd if arrays_fd >= 0 else self._null_fd,
            environ=environ or {},
            loads_plugins=plugins,
            warm_up=warm_up,
            on_lost=self._end_all_workers,
        )
        self._next_number = SWEEP + 1
        self._inherited: tuple[int | None, frozenset[machine.FileId]] | None = None
        self._imported: set[str] = set()
        self._next_check = 0.0
        self._pending: list[Event] = []

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def template_pid(self) -> int | None:
        """Process id of the template that starts the workers; None before `open`."""
        return next(iter(self._link.pids), None)

    @property
    def baseline_bytes(self) -> int:
        """Private memory that a worker has from the start, inherited from its template."""
        return 0 if self.template_pid is None else machine.private_memory_bytes(self.template_pid)

    def common_files(self) -> set[machine.FileId]:
        """Returns the files in memory that every worker has open or mapped and that no worker has made."""
        pid = self.template_pid
        if self._inherited is None or self._inherited[0] != pid:
            self._inherited = pid, frozenset(machine.shared_files([] if pid is None else [pid]))
        fds = [self._link.payload_fd, self._link.arrays_fd, *(worker.log_fd for worker in self._workers.values())]
        return {*self._inherited[1], *map(machine.file_id, fds)}

    def open(self, *, load_timeout_s: float | None) -> None:
        """Starts the sweep's template, which loads the payload once for all workers.

        Where loading makes the process unsafe to fork, and where workers are spawned, each worker loads the payload
        itself.

        Args:
            load_timeout_s: the deadline for loading; None where there is nothing to load.

        Raises:
            LoadError: the payload cannot be loaded.
            SandboxError: no template can be started.
            OSError: there are too few processes or threads to start one.
        """
        for again in reversed(range(_OPENINGS)):
            try:
                shortages.patiently(lambda: self._open_link(load_timeout_s))
                return
            except (SandboxError, LoadError) as error:
                was_killed = isinstance(error, LoadError) and error.report.was_killed
                # Another program may have killed the load, or an earlier sweep may have damaged the template.
                if not (was_killed or self._link.has_died):
                    raise
                if not again:
                    error.add_note(f"This happened {_OPENINGS} times in a row: does another program kill processes?")
                    raise

    def _open_link(self, load_timeout_s: float | None) -> None:
        self._link.release()
        self._link.connect()
        self.share_modules(self._modules)
        if self._method == "fork" and load_timeout_s is not None:
            self._link.load(load_timeout_s, self._modules)

    def start(self, task: Frame, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int:
        """Starts a worker with its first task.

        Args:
            task: the task's frame.
            fds: descriptors that go with the task.
            environ: environment variables that only this worker gets.

        Returns:
            The worker's number.

        Raises:
            OSError: no descriptors are left.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        log_fd = spool.create_log()
        try:
            connection, theirs = wire.connection_pair()
        except OSError:
            os.close(log_fd)
            raise
        with theirs:
            self._workers[number] = worker = _Worker(number, connection, log_fd)
            self._selector.register(connection, selectors.EVENT_READ, worker)
            order = StartWorker(number=number, task=task, environ=environ or {}, method=self._method)
            self._link.order(order, [log_fd, theirs.fileno(), *fds])
        return number

    def send(self, number: int, message: Frame, fds: Sequence[int] = ()) -> None:
        """Sends a worker a further task; where the worker no longer reads, `Ended` follows."""
        with contextlib.suppress(wire.WireError):
            self._workers[number].connection.send(message, fds)

    def finish(self, number: int) -> None:
        """Closes the connection to a worker, so that it ends, unless it has ended and was forgotten."""
        if number in self._workers:
            self._disconnect(self._workers[number])

    def kill(self, number: int, *, shows_stack: bool = False) -> None:
        """Kills a worker and everything it started; `Ended` follows.

        Args:
            number: the worker's number.
            shows_stack: whether the worker writes to its log where it is.
        """
        self._link.wake()
        self._link.order(Kill(number, shows_stack))

    def pid(self, number: int) -> int | None:
        """Returns a worker's process id, once it is known."""
        return self._workers[number].pid if number in self._workers else None

    def log(self, number: int) -> str:
        """Returns a worker's output."""
        return spool.read_log(self._workers[number].log_fd) if number in self._workers else ""

    def clear_log(self, number: int) -> None:
        """Removes the output of a worker so far, which is none of its next config's."""
        if number in self._workers:
            spool.clear_log(self._workers[number].log_fd)

    def trim_logs(self) -> None:
        """Shortens the logs that have grown too large."""
        for worker in self._workers.values():
            spool.trim_log(worker.log_fd)

    def forget(self, number: int) -> None:
        """Removes a worker that has ended, or one that does not die."""
        if (worker := self._workers.pop(number, None)) is not None:
            self._disconnect(worker)
            os.close(worker.log_fd)

    def share_modules(self, names: Sequence[str]) -> None:
        """Has the templates import modules that a worker lacked, so that later forks have them."""
        new = [name for name in names if name not in self._imported]
        self._imported.update(new)
        if new:
            self._link.share_modules(new)

    def poll(self, timeout_s: float) -> list[Event]:
        """Returns the events since the last call, waiting for at most `timeout_s` seconds where there are none.

        Of each worker, the end comes once, after its last message.

        Raises:
            SandboxError: templates keep dying.
        """
        ready = self._selector.select(0 if self._pending else max(0.0, timeout_s))
        events = self._take_pending()
        for key, _ in ready:
            events += self._read(key.data) if isinstance(key.data, _Worker) else self._read_template(key.data)
        if (now := time.monotonic()) >= self._next_check:
            self._next_check = now + _CHECK_S
            for worker in self._workers.values():
                events += self._read(worker)  # which notices a frame that is never finished
            waiting = [worker for worker in self._workers.values() if worker.pid is None and not worker.has_ended]
            self._link.check(awaits_start=bool(waiting))
        return events + self._take_pending()

    def _read(self, worker: _Worker) -> list[Event]:
        """Returns the messages that have arrived from a worker; never waits.

        A worker whose connection is closed or damaged is disconnected.
        """
        if not worker.connection.is_open:
            return []
        try:
            received = worker.connection.receive()
        except wire.WireError as error:
            self._disconnect(worker)
            return [] if isinstance(error, wire.WireClosedError) else [Damaged(worker.number, str(error))]
        wire.close_all([fd for _, fds in received for fd in fds])  # a worker has no reason to send descriptors
        if received:
            self._link.on_sound()
            if worker.pid is None and isinstance(pid := received[0][0].get("pid"), int):
                worker.pid = pid  # in its first message, which it sends before any config runs
        return [Said(worker.number, message) for message, _ in received]

    def _read_template(self, connection: Connection) -> list[Event]:
        events: list[Event] = []
        for event in self._link.read(connection):
            worker = self._workers.get(event.number)
            if isinstance(event, Ended):
                events += self._end(worker, event.status)
            elif worker is not None:
                worker.pid = event.pid
        return events

    def _end(self, worker: _Worker | None, status: int | None) -> list[Event]:
        """Returns a worker's last messages, then its end; nothing where its end is known already."""
        if worker is None or worker.has_ended:
            return []
        events: list[Event] = []
        while received := self._read(worker):
            events += received
        self._disconnect(worker)
        worker.has_ended = True
        return [*events, Ended(worker.number, status)]

    def _end_all_workers(self) -> None:
        """Reports all workers as lost, because they died with their template."""
        for worker in self._workers.values():
            self._pending += self._end(worker, None)

    def _disconnect(self, worker: _Worker) -> None:
        if worker.connection.is_open:
            self._selector.unregister(worker.connection)
            worker.connection.hang_up()

    def _take_pending(self) -> list[Event]:
        pending, self._pending = self._pending, []
        return pending

    def close(self) -> None:
        """Kills every worker and the sweep's template, and waits, within a bound, until they are gone."""
        try:
            self._link.close(list(self._workers))
        finally:
            for number in list(self._workers):
                self.forget(number)
            self._link.release()
            self._selector.close()
            if self._null_fd >= 0:
                wire.close_all([self._null_fd])
                self._null_fd = -1
