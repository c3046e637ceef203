"""A sweep's sandbox: its template, its workers, and one stream of events about them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from quarantune.host import machine, memory, stops
from quarantune.sandbox import spawning, spool, template, wire
from quarantune.sandbox.wire import Connection, Message
from quarantune.values.trial import SandboxError

_logger = logging.getLogger("quarantune")

_CLOSE_WAIT_S = 0.7
_SLOW_S = 5.0
"""How long a template may take to read: it forks one worker after another, and a stopped one is as good as dead."""
_STARTUP_DEADLINE_S = 120.0
_MAX_REVIVALS = 3
_CHECK_S = 0.1
_STOPPED_CHECKS = 20
"""After so many checks in a row a template that stays stopped, though it is woken each time, is given up."""
_SILENT_CHECKS = 50
"""The same for one that does nothing at all while it has a worker to start."""
_LOAD_LOOK_S = 0.05
_SWEEP = 0
"""The number of the sweep's template among the children of the process's template."""


@dataclasses.dataclass(frozen=True)
class Said:
    """A worker sent a message."""

    number: int
    message: Message


@dataclasses.dataclass(frozen=True)
class Damaged:
    """A worker's stream cannot be believed any more."""

    number: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """A worker's process is gone, and with it everything it had started.

    Attributes:
        number: the worker.
        status: its exit code, or minus the signal that ended it; None where its template died with it.
    """

    number: int
    status: int | None


Event: TypeAlias = Said | Damaged | Ended


class LoadError(Exception):
    """The payload could not be loaded; `report` says how: a worker's failure message with its outcome."""

    def __init__(self, report: Message) -> None:
        super().__init__(report["message"])
        self.report = report


@dataclasses.dataclass(eq=False)
class _Worker:
    connection: Connection
    log_fd: int
    pid: int | None = None
    hears: bool = True
    ended: bool = False


class Sandbox:
    """Starts a sweep's workers and tells what becomes of them.

    Use it as a context manager: leaving it kills what still runs.
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
    ) -> None:
        """Prepares a sandbox; `open` starts it.

        Args:
            payload_fd: the pickled call; -1 for none.
            arrays_fd: its arrays' bytes; -1 for none.
            method: `fork` or `spawn`.
            environ: environment variables that all of its processes get beside the caller's.
            modules: what its workers, and this process, are known to import sooner or later.
            plugins: whether workers will need what JAX has for other devices than the CPU.
        """
        self._plugins = plugins
        self._modules = modules
        self._extra_environ = dict(environ or {})
        self._selector = selectors.DefaultSelector()
        # A descriptor that can be sent even where there is nothing to send.
        try:
            self._null_fd = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            self._selector.close()
            raise
        self._payload_fd = payload_fd if payload_fd >= 0 else self._null_fd
        self._arrays_fd = arrays_fd if arrays_fd >= 0 else self._null_fd
        self._method = method
        self._workers: dict[int, _Worker] = {}
        self._next_number = _SWEEP + 1
        self._manager: Connection | None = None
        self._sweep: Connection | None = None
        self._sweep_log_fd = -1
        self._sweep_pid: int | None = None
        self._inherited: tuple[int | None, frozenset[memory.FileId]] | None = None
        self._imported: set[str] = set()
        self._revivals = 0
        self._next_check = 0.0
        self._stopped_checks = 0
        self._silent_checks = 0
        self._activity: tuple[str, int] | None = None
        self._pending: list[Event] = []
        self._template: template.Template | None = None
        self._used: template.Template | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def forks_loaded(self) -> bool:
        """Whether workers are forks of a template that has loaded the payload."""
        return self._sweep is not None

    @property
    def baseline_bytes(self) -> int:
        """Private memory that a worker has from the start, because its template had it."""
        return 0 if self._template is None else machine.private_memory_bytes(self._sweep_pid or self._template.pid)

    def common_files(self) -> set[memory.FileId]:
        """Returns the files in memory that every worker has open or mapped and none has made."""
        pid = self._sweep_pid or (None if self._template is None else self._template.pid)
        if self._inherited is None or self._inherited[0] != pid:
            self._inherited = pid, frozenset(memory.shared_files([] if pid is None else [pid]))
        logs = [worker.log_fd for worker in self._workers.values()]
        return {*self._inherited[1], *map(memory.file_id, [self._payload_fd, self._arrays_fd, *logs])}

    def open(self, *, load_timeout_s: float | None) -> None:
        """Starts the sweep's template, which loads the payload once for all workers.

        Where loading made the process unsafe to fork, and where workers are to be spawned, each worker will load the
        payload itself.

        Args:
            load_timeout_s: the deadline for loading; None where there is nothing to load.

        Raises:
            LoadError: the payload cannot be loaded.
            SandboxError: no template can be started.
        """
        try:
            self._open_all(load_timeout_s)
        except SandboxError:
            if self._template is None or self._template.is_alive:
                raise
            if self._manager is not None:
                self._drop(self._manager)
                self._manager = None
            wire.close_all([fd for fd in (self._sweep_log_fd,) if fd >= 0])
            self._open_all(load_timeout_s)  # it died as it was asked, of something before us

    def _open_all(self, load_timeout_s: float | None) -> None:
        self._open_manager()
        self.share_modules(self._modules)
        if self._method == "fork" and load_timeout_s is not None:
            self._open_sweep(load_timeout_s)

    def start(self, task: Message, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int:
        """Starts a worker with its first task.

        Args:
            task: the task.
            fds: descriptors that go with it.
            environ: environment variables of this worker's own.

        Returns:
            The worker's number.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        log_fd = spool.create_log()
        try:
            connection, theirs = wire.connection_pair()
        except OSError:  # no descriptors left
            os.close(log_fd)
            raise
        self._workers[number] = _Worker(connection, log_fd)
        self._selector.register(connection, selectors.EVENT_READ, number)
        order = {
            "op": "worker",
            "number": number,
            "task": task,
            "environ": dict(environ or {}),
            "method": self._method,
        }
        forker = self._forker()
        try:
            forker.send(order, [theirs.fileno(), log_fd, *fds], within_s=_SLOW_S)
        except wire.WireError:
            self._lose_forker(forker)
        finally:
            theirs.close()
        return number

    def send(self, number: int, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a worker a further task; one that does not listen any more will be seen to end."""
        with contextlib.suppress(wire.WireError):
            self._workers[number].connection.send(message, fds)

    def finish(self, number: int) -> None:
        """Tells a worker that nothing more will come, so that it ends."""
        self._stop_listening(self._workers[number])

    def kill(self, number: int) -> None:
        """Kills a worker and everything it started; `Ended` follows."""
        forker = self._forker()
        self._wake_templates()
        try:
            forker.send({"op": "kill", "number": number}, within_s=_SLOW_S)
        except wire.WireError:
            self._lose_forker(forker)

    def pid(self, number: int) -> int | None:
        """Returns a worker's process id, once it is known."""
        worker = self._workers.get(number)
        return None if worker is None else worker.pid

    def log(self, number: int) -> str:
        """Returns what a worker printed."""
        worker = self._workers.get(number)
        return "" if worker is None else spool.read_log(worker.log_fd)

    def trim_logs(self) -> None:
        """Cuts the logs that have grown too large."""
        for worker in self._workers.values():
            spool.trim_log(worker.log_fd)

    def forget(self, number: int) -> None:
        """Gives up a worker that will not die, or lets go of one that has ended."""
        if (worker := self._workers.pop(number, None)) is not None:
            self._stop_listening(worker)
            os.close(worker.log_fd)

    def share_modules(self, names: Sequence[str]) -> None:
        """Has the templates import what a worker found missing, so that later forks have it."""
        new = [name for name in names if name not in self._imported]
        self._imported.update(new)
        for connection in (self._manager, self._sweep):
            if new and connection is not None:
                try:
                    connection.send({"op": "import", "modules": new}, within_s=_SLOW_S)
                except wire.WireError:
                    self._lose_forker(connection)

    def poll(self, timeout_s: float) -> list[Event]:
        """Returns what happened, waiting for at most `timeout_s` where nothing has.

        Raises:
            SandboxError: templates keep dying.
        """
        ready = self._selector.select(0 if self._pending else max(0.0, timeout_s))
        events, self._pending = self._pending, []
        for key, _ in ready:
            if isinstance(key.data, int):
                events += self._hear(key.data)
            else:
                events += self._hear_forker(key.data)
        if (now := time.monotonic()) >= self._next_check:
            self._next_check = now + _CHECK_S
            events += self._check()
            self._check_templates()
        return events + self._take_pending()

    def _check(self) -> list[Event]:
        """Stops listening to workers that have begun a frame and do not finish it."""
        damaged: list[Event] = []
        for number, worker in self._workers.items():
            if worker.hears:
                try:
                    worker.connection.check()
                except wire.WireError as error:
                    self._stop_listening(worker)
                    damaged.append(Damaged(number, str(error)))
        return damaged

    def _check_templates(self) -> None:
        """Wakes templates that were stopped, and kills one that does not answer, so that another takes its place.

        Checks are counted, not seconds: while this process itself stands still nobody is silent.
        """
        sweep, process = self._sweep_pid, None if self._template is None else self._template.pid
        stopped = [pid for pid in (sweep, process) if pid is not None and machine.is_stopped(pid)]
        self._stopped_checks = self._stopped_checks + 1 if stopped else 0
        forker = sweep or process
        # One that works, or waits for a CPU or a disk, is not silent: it may be importing what workers will need.
        before, self._activity = self._activity, None if forker is None else machine.activity(forker)
        is_asleep = self._activity is not None and self._activity[0] == "S" and self._activity == before
        is_asked = any(worker.pid is None and not worker.ended for worker in self._workers.values())
        self._silent_checks = self._silent_checks + 1 if is_asked and is_asleep else 0
        if stopped:
            self._wake_templates()
        if self._stopped_checks > _STOPPED_CHECKS:
            self._give_up_template(stopped[0], "stays stopped")
        elif self._silent_checks > _SILENT_CHECKS and forker is not None:
            self._give_up_template(forker, "does not answer")

    def _give_up_template(self, pid: int, why: str) -> None:
        _logger.warning("template process %d %s, so another one takes its place", pid, why)
        self._stopped_checks = self._silent_checks = 0
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)  # its connection's end tells the rest

    def close(self) -> None:
        """Kills every worker and the sweep's template, and waits, within a bound, until they are gone."""
        if self._manager is None and not self._workers:
            self._release()
            return
        self._wake_templates()
        if self._sweep is not None:
            self._sweep.hang_up()  # its template kills its workers and ends
        try:
            if self._manager is not None:
                alive = set(self._workers) if self._sweep is None else {_SWEEP}
                for number in alive if self._sweep is None else ():
                    self._manager.send({"op": "kill", "number": number})
                self._await_exits(alive)
        except wire.WireError:
            pass
        finally:
            self._release()

    # The templates

    def _open_manager(self) -> None:
        self._leave_template()
        self._template = template.shared()
        environ = {
            **os.environ,
            # A worker shares the device with the caller, who may hold most of its memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            template.MARK: self._template.token,
            **self._extra_environ,
        }
        self._manager = self._template.open(
            payload_fd=self._payload_fd, arrays_fd=self._arrays_fd, environ=environ, cwd=_cwd()
        )
        self._used = self._template
        self._environ = environ
        self._selector.register(self._manager, selectors.EVENT_READ, self._manager)

    def _leave_template(self) -> None:
        used, self._used = self._used, None
        if used is not None:
            template.leave(used)

    def _open_sweep(self, load_timeout_s: float) -> None:
        assert self._manager is not None
        self._sweep_log_fd = spool.create_log()
        connection, theirs = wire.connection_pair()
        try:
            self._manager.send(
                {
                    "op": "sweep",
                    "number": _SWEEP,
                    "environ": self._environ,
                    "cwd": _cwd(),
                    "plugins": self._plugins,
                },
                [theirs.fileno(), self._payload_fd, self._arrays_fd, self._sweep_log_fd],
                within_s=_SLOW_S,
            )
        except wire.WireError as error:
            connection.hang_up()
            raise SandboxError("the template process died") from error
        finally:
            theirs.close()
        spawning.import_modules(self._modules)  # while the templates start, which takes longer
        try:
            report = self._await_load(connection, load_timeout_s)
        except (SandboxError, OSError):
            connection.hang_up()
            raise
        if report["event"] == "loaded" and not report["spoiled"]:
            self._sweep = connection
            self._selector.register(connection, selectors.EVENT_READ, connection)
            return
        connection.hang_up()
        self._sweep_pid = None
        if report["event"] == "load_failed":
            raise LoadError({**report, "log": spool.read_log(self._sweep_log_fd, last_bytes=4000)})

    def _await_load(self, connection: Connection, load_timeout_s: float) -> Message:
        """Waits for the sweep's template to have loaded the payload, killing it at the deadline."""
        assert self._manager is not None
        # Until the fork is there, the clock that runs is the template's start-up.
        deadline, started, timed_out = time.monotonic() + _STARTUP_DEADLINE_S, False, False
        loaded: list[Message] = []
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._manager, selectors.EVENT_READ)
            stopped = stops.Stops(time.monotonic)
            while True:
                selector.select(max(0.0, min(_LOAD_LOOK_S, deadline - time.monotonic())))
                if not started and self._template is not None and machine.is_stopped(self._template.pid):
                    self._wake_templates()
                deadline += stopped.lost_s()
                loaded += _receive_quietly(connection)
                try:
                    messages = [message for message, _ in self._manager.receive()]
                except wire.WireError as error:
                    assert self._template is not None
                    self._template.await_end()
                    raise SandboxError(
                        f"the template process died while it started:\n{self._template.log()}"
                    ) from error
                for message in messages:
                    if message["event"] == "started":
                        self._sweep_pid, started = message["pid"], True
                        deadline = time.monotonic() + load_timeout_s
                    else:
                        loaded += _receive_quietly(connection)
                        death = _load_death(message["status"], timed_out=timed_out, timeout_s=load_timeout_s)
                        return loaded[0] if loaded else death
                if loaded and started:  # a quick fork is done before its parent has told that it is there
                    return loaded[0]
                if time.monotonic() >= deadline:
                    if timed_out or not started:
                        raise SandboxError("the template process does not answer")
                    timed_out, deadline = True, time.monotonic() + _STARTUP_DEADLINE_S
                    self._manager.send({"op": "kill", "number": _SWEEP})

    def _forker(self) -> Connection:
        forker = self._sweep or self._manager
        if forker is None:
            raise SandboxError("the sandbox is not open")
        return forker

    def _hear_forker(self, connection: Connection) -> list[Event]:
        if connection is not self._sweep and connection is not self._manager:
            return []  # an earlier event of this round was its end
        try:
            received = connection.receive()
        except wire.WireError:
            self._lose_forker(connection)
            return []
        events: list[Event] = []
        for message, _ in received:
            number = message["number"]
            if message["event"] == "started" and number in self._workers:
                self._workers[number].pid = message["pid"]
            elif message["event"] == "exit" and number != _SWEEP:
                events += self._bury(number, message["status"])
        return events

    def _lose_forker(self, lost: Connection) -> None:
        """The process that forks our workers is gone, and its workers with it: go on with what is left."""
        for number in list(self._workers):
            self._pending += self._bury(number, None)
        self._revivals += 1
        if self._revivals > _MAX_REVIVALS:
            raise SandboxError(f"the template process died {self._revivals} times in one sweep")
        if self._sweep is not None:
            self._drop(self._sweep)
            self._sweep = self._sweep_pid = None
        if lost is not self._manager:
            # From here on the process's template forks the workers. It also sees to it that a lost one is dead.
            assert self._manager is not None
            with contextlib.suppress(wire.WireError):
                self._manager.send({"op": "kill", "number": _SWEEP})
        else:
            self._drop(lost)
            self._manager = None
            assert self._template is not None
            template.discard(self._template)
            self._open_manager()

    def _wake_templates(self) -> None:
        """Undoes a config's SIGSTOP to its parents, who would never do what they are asked for."""
        for pid in (self._sweep_pid, None if self._template is None else self._template.pid):
            if pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        connection.hang_up()

    def _await_exits(self, numbers: set[int]) -> None:
        assert self._manager is not None
        deadline = time.monotonic() + _CLOSE_WAIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._manager, selectors.EVENT_READ)
            while numbers and (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                for message, _ in self._manager.receive():
                    if message["event"] == "exit":
                        numbers.discard(message["number"])

    def _release(self) -> None:
        for number in list(self._workers):
            self.forget(number)
        if self._sweep is not None:
            self._sweep.hang_up()
        if self._manager is not None:
            self._manager.hang_up()  # the template kills what this sweep still has there
        self._sweep = self._manager = None
        self._leave_template()
        self._selector.close()
        wire.close_all([fd for fd in (self._null_fd, self._sweep_log_fd) if fd >= 0])
        self._null_fd = self._sweep_log_fd = -1

    # The workers

    def _hear(self, number: int) -> list[Event]:
        worker = self._workers.get(number)
        if worker is None or not worker.hears:
            return []
        try:
            said = worker.connection.receive()
            wire.close_all([fd for _, fds in said for fd in fds])  # a worker has no descriptors to give
            if said:
                if worker.pid is None and isinstance(pid := said[0][0].get("pid"), int):
                    worker.pid = pid  # told with its first word, before a config has had one
                self._revivals = 0  # a template whose worker speaks is sound: what it dies of is the config's doing
            return [Said(number, message) for message, _ in said]
        except wire.WireClosedError:
            self._stop_listening(worker)
            return []
        except wire.WireError as error:
            self._stop_listening(worker)
            return [Damaged(number, str(error))]

    def _bury(self, number: int, status: int | None) -> list[Event]:
        """Hears a dead worker's last words before its end is told."""
        worker = self._workers.get(number)
        if worker is None or worker.ended:
            return []  # its template's death told of it already
        worker.ended = True
        events: list[Event] = []
        while worker.hears and (heard := self._hear(number)):
            events += heard
        self._stop_listening(worker)
        return [*events, Ended(number, status)]

    def _stop_listening(self, worker: _Worker) -> None:
        if worker.hears:
            worker.hears = False
            self._drop(worker.connection)

    def _take_pending(self) -> list[Event]:
        pending, self._pending = self._pending, []
        return pending


def _receive_quietly(connection: Connection) -> list[Message]:
    """Returns what has arrived; nothing where the other end is gone, whose exit will be told by its parent."""
    try:
        return [message for message, _ in connection.receive()]
    except wire.WireError:
        return []


def _load_death(status: int, *, timed_out: bool, timeout_s: float) -> Message:
    if timed_out:
        outcome, message = "timeout", f"loading the function took longer than {timeout_s:g} s"
    else:
        outcome, message = "crashed", f"the process {describe_status(status)} while it loaded the function"
    return {"event": "load_failed", "outcome": outcome, "error": "", "message": message, "traceback": ""}


def describe_status(status: int | None) -> str:
    """Returns, in words, how a process ended."""
    if status is None:
        return "was lost"
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # the caller's directory is gone; workers then stay where the template is
