"""The workers of one sandbox: their connections, logs and process ids."""

from __future__ import annotations

import dataclasses
import enum
import os
import selectors
import socket
from collections.abc import Sequence

from quarantune.sandbox import spool, wire
from quarantune.sandbox.codec import Frame
from quarantune.sandbox.events import Damaged, Ended, Event, Said
from quarantune.sandbox.wire import Connection


class ProcessState(enum.Enum):
    """State of a worker's process, as this process knows it.

    CONNECTED: the worker's messages are read.
    DISCONNECTED: the connection is closed, and the process may still run.
    ENDED: the process is gone.
    """

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    ENDED = "ended"


@dataclasses.dataclass(eq=False)
class _WorkerProcess:
    connection: Connection
    log_fd: int
    pid: int | None = None
    state: ProcessState = ProcessState.CONNECTED


class WorkerTable:
    """Reads the workers' messages and reports each worker's end exactly once, after its last message."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        """Starts with no workers.

        Args:
            selector: watches each worker's connection, with the worker's number as its data.
        """
        self._selector = selector
        self._workers: dict[int, _WorkerProcess] = {}

    @property
    def numbers(self) -> list[int]:
        """The workers in the table."""
        return list(self._workers)

    @property
    def log_fds(self) -> list[int]:
        """The descriptors of all workers' logs."""
        return [worker.log_fd for worker in self._workers.values()]

    @property
    def awaits_start(self) -> bool:
        """Whether a worker was ordered whose process is not known to run yet."""
        return any(worker.pid is None and worker.state is not ProcessState.ENDED for worker in self._workers.values())

    def add(self, number: int) -> tuple[socket.socket, int]:
        """Adds a worker.

        Returns:
            The worker's end of the connection, which the caller closes, and the descriptor of its log.

        Raises:
            OSError: no descriptors are left.
        """
        log_fd = spool.create_log()
        try:
            connection, theirs = wire.connection_pair()
        except OSError:
            os.close(log_fd)
            raise
        self._workers[number] = _WorkerProcess(connection, log_fd)
        self._selector.register(connection, selectors.EVENT_READ, number)
        return theirs, log_fd

    def send(self, number: int, message: Frame, fds: Sequence[int]) -> None:
        """Sends a message to a worker.

        Raises:
            WireError: the worker does not read it.
        """
        self._workers[number].connection.send(message, fds)

    def pid(self, number: int) -> int | None:
        """Returns a worker's process id, once it is known."""
        worker = self._workers.get(number)
        return None if worker is None else worker.pid

    def on_started(self, number: int, pid: int) -> None:
        """Notes the process id of a worker."""
        if (worker := self._workers.get(number)) is not None:
            worker.pid = pid

    def clear_log(self, number: int) -> None:
        """Removes the output of a worker so far; an unknown number is ignored."""
        if (worker := self._workers.get(number)) is not None:
            spool.clear_log(worker.log_fd)

    def log(self, number: int) -> str:
        """Returns a worker's output."""
        worker = self._workers.get(number)
        return "" if worker is None else spool.read_log(worker.log_fd)

    def read(self, number: int) -> list[Event]:
        """Returns the messages that have arrived from a worker; never waits."""
        worker = self._workers.get(number)
        if worker is None or worker.state is not ProcessState.CONNECTED:
            return []
        try:
            received = worker.connection.receive()
        except wire.WireClosedError:
            self._disconnect(worker)
            return []
        except wire.WireError as error:
            self._disconnect(worker)
            return [Damaged(number, str(error))]
        wire.close_all([fd for _, fds in received for fd in fds])  # a worker has no reason to send descriptors
        if received and worker.pid is None and isinstance(pid := received[0][0].get("pid"), int):
            worker.pid = pid  # in its first message, which it sends before any config runs
        return [Said(number, message) for message, _ in received]

    def check(self) -> list[Event]:
        """Disconnects workers that have begun a frame and do not finish it."""
        damaged: list[Event] = []
        for number, worker in self._workers.items():
            if worker.state is ProcessState.CONNECTED:
                try:
                    worker.connection.check()
                except wire.WireError as error:
                    self._disconnect(worker)
                    damaged.append(Damaged(number, str(error)))
        return damaged

    def on_exit(self, number: int, status: int | None) -> list[Event]:
        """Returns a worker's last messages, then its end; nothing where its end is known already."""
        worker = self._workers.get(number)
        if worker is None or worker.state is ProcessState.ENDED:
            return []
        events: list[Event] = []
        while received := self.read(number):
            events += received
        self._disconnect(worker)
        worker.state = ProcessState.ENDED
        return [*events, Ended(number, status)]

    def disconnect(self, number: int) -> None:
        """Closes the connection to a worker, which ends once it notices."""
        self._disconnect(self._workers[number])

    def remove(self, number: int) -> None:
        """Disconnects a worker and closes its log; an unknown number is ignored."""
        if (worker := self._workers.pop(number, None)) is not None:
            self._disconnect(worker)
            os.close(worker.log_fd)

    def _disconnect(self, worker: _WorkerProcess) -> None:
        if worker.state is ProcessState.CONNECTED:
            worker.state = ProcessState.DISCONNECTED
            self._selector.unregister(worker.connection)
            worker.connection.hang_up()
