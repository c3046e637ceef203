"""The connections of one sandbox to the templates that start its workers: loading, watching and replacing them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from quarantune.host import machine
from quarantune.host.process import Stops
from quarantune.sandbox import MARK, spawning, spool, template, wire
from quarantune.sandbox.template_messages import (
    CHILD_EVENTS,
    LOAD_REPORTS,
    ChildEvent,
    Ended,
    Import,
    Kill,
    Loaded,
    LoadFailed,
    LoadReport,
    Order,
    StartSweep,
    describe_status,
    was_killed,
)
from quarantune.sandbox.wire import Connection
from quarantune.values.codec import Frame
from quarantune.values.trial import Outcome, SandboxError

_logger = logging.getLogger("quarantune")

SWEEP = 0
"""The number of the sweep's template among the children of the process's template; workers count from 1."""
_CLOSE_WAIT_S = 0.7
_SEND_WAIT_S = 5.0
"""The longest wait for a template to read an order: it forks one worker after another."""
_MAX_DEATHS = 3
_STARTUP_DEADLINE_S = 120.0
_POLL_S = 0.05
STOPPED_CHECKS = 20
"""A template that is stopped at this many checks in a row, though it was woken each time, is given up."""
SILENT_CHECKS = 50
"""A template that is idle at this many checks in a row, though it has a worker to start, is given up."""


class LoadError(Exception):
    """The payload could not be loaded.

    Attributes:
        report: the failure, with the end of the loading process's output.
    """

    def __init__(self, report: LoadFailed) -> None:
        super().__init__("\n".join((report.text, report.traceback, report.log)))
        self.report = report


@dataclasses.dataclass(eq=False, kw_only=True)
class TemplateLink:
    """Sends orders to the templates, reports the exits of their children, and replaces templates that die.

    A sweep's template that dies is replaced by the process's template, and a process's template by a new one.

    Attributes:
        selector: watches each connection, with the connection as its data.
        payload_fd: the pickled call.
        arrays_fd: its arrays' bytes.
        environ: environment variables that all processes get in addition to the caller's.
        loads_plugins: whether workers need JAX's plugins for devices other than the CPU.
        warm_up: the task by which the process's template prepares for such sweeps; None for none.
        on_lost: called when a template has died, and its workers with it, before it is replaced.
    """

    selector: selectors.BaseSelector
    payload_fd: int
    arrays_fd: int
    environ: Mapping[str, str]
    loads_plugins: bool
    warm_up: Frame | None
    on_lost: Callable[[], None]

    def __post_init__(self) -> None:
        self._whole_environ: dict[str, str] = {}
        self._template: template.Template | None = None
        self._process_link: Connection | None = None
        self._sweep_link: Connection | None = None
        self._sweep_pid: int | None = None
        self._sweep_log_fd = -1
        self._modules: tuple[str, ...] = ()
        self._deaths = 0
        self._watch = TemplateWatch()

    @property
    def pids(self) -> list[int]:
        """Process ids of the templates, beginning with the one that starts the workers."""
        process_pid = None if self._template is None or self._process_link is None else self._template.pid
        return [pid for pid in (self._sweep_pid, process_pid) if pid is not None]

    @property
    def has_died(self) -> bool:
        """Whether the process's template has exited without being replaced yet."""
        return self._template is not None and not self._template.is_alive

    # Opening and closing

    def connect(self) -> None:
        """Connects to the process's template, and starts one if necessary.

        Raises:
            SandboxError: no template can be started.
        """
        self._template = template.shared()
        self._whole_environ = {
            **os.environ,
            # A worker shares the device with the caller, who may hold most of its memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            MARK: self._template.token,
            **self.environ,
        }
        if self.warm_up is not None:
            self._template.warm_up(self._whole_environ, self.warm_up)
        self._process_link = self._template.open(
            payload_fd=self.payload_fd, arrays_fd=self.arrays_fd, environ=self._whole_environ, cwd=_cwd()
        )
        self.selector.register(self._process_link, selectors.EVENT_READ, self._process_link)

    def load(self, timeout_s: float, modules: Sequence[str]) -> None:
        """Starts a sweep's template and waits until it has loaded the payload.

        The link stays `CLEAN` where loading made that process unsafe to fork.

        Args:
            timeout_s: the deadline for loading.
            modules: imported by this process meanwhile.

        Raises:
            LoadError: the payload cannot be loaded.
            SandboxError: the process's template died or does not answer.
        """
        assert self._template is not None
        assert self._process_link is not None
        sweep_link = self._order_sweep(self._process_link)
        spawning.import_modules(modules)  # while the templates start, which takes longer
        load = _Load(self._template, self._process_link, sweep_link, timeout_s)
        try:
            report = load.wait()
        except (SandboxError, OSError):
            sweep_link.hang_up()
            raise
        match report:
            case Loaded(fork_hazard=None):
                self._sweep_link, self._sweep_pid = sweep_link, load.pid
                self._modules = report.modules
                self.selector.register(sweep_link, selectors.EVENT_READ, sweep_link)
            case Loaded():
                sweep_link.hang_up()
            case LoadFailed():
                sweep_link.hang_up()
                log = spool.read_log(self._sweep_log_fd, last_bytes=4000)
                raise LoadError(dataclasses.replace(report, log=log))

    def _order_sweep(self, process_link: Connection) -> Connection:
        """Orders a sweep's template and returns the connection to it."""
        assert self._template is not None
        self._sweep_log_fd = spool.create_log()
        sweep_link, theirs = wire.connection_pair()
        order = StartSweep(number=SWEEP, loads_plugins=self.loads_plugins)
        try:
            process_link.send_message(order, [self._sweep_log_fd, theirs.fileno()], within_s=_SEND_WAIT_S)
        except wire.WireError as error:
            sweep_link.hang_up()
            self._template.await_end()  # it has closed its connections before it can be seen to have exited
            raise SandboxError("the template process died") from error
        finally:
            theirs.close()
        return sweep_link

    def close(self, workers: Sequence[int]) -> None:
        """Kills the sweep's template and every worker, and waits, within a bound, until they are gone.

        Args:
            workers: the workers that may still run.
        """
        self.wake()
        if self._sweep_link is not None:
            self._sweep_link.hang_up()  # its template kills its workers and exits
        try:
            if self._process_link is not None:
                running = {SWEEP} if self._sweep_link is not None else set(workers)
                for number in running - {SWEEP}:
                    self._process_link.send_message(Kill(number))
                self._await_exits(self._process_link, running)
                if self._template is not None and self._sweep_link is not None:
                    self._template.warm_up(self._whole_environ, modules=self._modules)
        except wire.WireError:
            pass

    def release(self) -> None:
        """Closes all connections; the templates kill what this sandbox still has there. It may connect again."""
        for connection in (self._sweep_link, self._process_link):
            if connection is not None:
                self._drop(connection)
        self._sweep_link = self._process_link = self._sweep_pid = None
        template.close_unused()
        if self._sweep_log_fd >= 0:
            wire.close_all([self._sweep_log_fd])
            self._sweep_log_fd = -1

    def _await_exits(self, process_link: Connection, numbers: set[int]) -> None:
        deadline = time.monotonic() + _CLOSE_WAIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(process_link, selectors.EVENT_READ)
            while numbers and (left_s := deadline - time.monotonic()) > 0:
                selector.select(left_s)
                for event, _ in process_link.receive_messages(*CHILD_EVENTS):
                    if isinstance(event, Ended):
                        numbers.discard(event.number)

    # Orders and events

    def order(self, order: Order, fds: Sequence[int] = ()) -> None:
        """Sends an order to the template that starts the workers.

        Raises:
            SandboxError: the link is closed, or templates keep dying.
        """
        connection = self._sweep_link or self._process_link
        if connection is None:
            raise SandboxError("the sandbox is not open")
        self._send(connection, order, fds)

    def share_modules(self, names: Sequence[str]) -> None:
        """Orders every template to import modules."""
        for connection in (self._process_link, self._sweep_link):
            if connection is not None and connection in (self._process_link, self._sweep_link):  # not replaced since
                self._send(connection, Import(tuple(names)))

    def _send(self, connection: Connection, order: Order, fds: Sequence[int] = ()) -> None:
        try:
            connection.send_message(order, fds, within_s=_SEND_WAIT_S)
        except wire.WireError:
            self._replace(connection)

    def read(self, connection: Connection) -> list[ChildEvent]:
        """Returns the events about workers that have arrived from a template.

        Args:
            connection: the data of a ready selector key; one that was replaced meanwhile has no events.
        """
        if connection is not self._sweep_link and connection is not self._process_link:
            return []
        try:
            received = connection.receive_messages(*CHILD_EVENTS)
        except wire.WireError:
            self._replace(connection)
            return []
        return [event for event, _ in received if event.number != SWEEP]

    # Templates that stop, hang or die

    def wake(self) -> None:
        """Wakes templates that a config may have stopped."""
        wake(self.pids)

    def check(self, *, awaits_start: bool) -> None:
        """Wakes templates that were stopped, and kills one that does not answer, so that it is replaced.

        Args:
            awaits_start: whether a worker was ordered whose process is not known to run yet.
        """
        unresponsive = self._watch.check(self.pids, awaits_start=awaits_start)
        if unresponsive is not None:
            pid, reason = unresponsive
            _logger.warning("template process %d %s, so another one takes its place", pid, reason)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # it is replaced once its connection ends

    def on_sound(self) -> None:
        """Forgives earlier deaths: a template whose worker sends messages is sound, so a config killed the others."""
        self._deaths = 0

    def _replace(self, lost: Connection) -> None:
        """Goes on with another template after the one at the end of `lost` has died, and its workers with it."""
        self.on_lost()
        self._deaths += 1
        if self._deaths > _MAX_DEATHS:
            raise SandboxError(f"the template process died {self._deaths} times in one sweep")
        if self._sweep_link is not None:
            self._drop(self._sweep_link)
            self._sweep_link = self._sweep_pid = None
        assert self._template is not None
        assert self._process_link is not None
        if lost is not self._process_link:
            # The process's template starts the workers from now on. It also kills a sweep's template that still runs.
            with contextlib.suppress(wire.WireError):
                self._process_link.send_message(Kill(SWEEP))
        else:
            self._drop(lost)
            self._process_link = None
            template.discard(self._template)
            self.connect()

    def _drop(self, connection: Connection) -> None:
        self.selector.unregister(connection)
        connection.hang_up()


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # the caller's directory is gone, so workers stay where the template is


class _Load:
    """The load of one sweep's payload by a sweep's template that was just ordered."""

    def __init__(
        self, process_template: template.Template, process_link: Connection, sweep_link: Connection, timeout_s: float
    ) -> None:
        """Starts the deadline for the template's start, which the one for loading follows once it runs."""
        self.pid: int | None = None
        """Process id of the sweep's template, once it runs."""
        self._template = process_template
        self._process_link = process_link
        self._sweep_link = sweep_link
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + _STARTUP_DEADLINE_S
        self._report: LoadReport | None = None
        self._killed_for: LoadFailed | None = None
        self._is_link_broken = False

    def wait(self) -> LoadReport:
        """Returns how the load went; kills the sweep's template at the deadline.

        Raises:
            SandboxError: the process's template died or does not answer.
        """
        with selectors.DefaultSelector() as selector:
            for link in (self._sweep_link, self._process_link):
                selector.register(link, selectors.EVENT_READ)
            stopped = Stops(time.monotonic)
            while True:
                selector.select(max(0.0, min(_POLL_S, self._deadline - time.monotonic())))
                if self.pid is None and machine.is_stopped(self._template.pid):
                    wake([self._template.pid])
                self._deadline += stopped.lost_s()
                self._read_report(selector)
                for event in self._read_child_events():
                    if isinstance(event, Ended):
                        return self._on_exit(event, selector)
                    self.pid = event.pid
                    if self._killed_for is None:
                        self._deadline = time.monotonic() + self._timeout_s
                # A quick fork may have loaded before its parent reports that it runs.
                if self._report is not None and self.pid is not None:
                    return self._report
                if time.monotonic() >= self._deadline:
                    if self.pid is None or self._killed_for is not None:
                        raise SandboxError("the template process does not answer")
                    text = f"loading the function took longer than {self._timeout_s:g} s"
                    self._kill(LoadFailed(text, outcome=Outcome.TIMEOUT))

    def _read_report(self, selector: selectors.BaseSelector) -> None:
        """Reads the report, if it has arrived.

        A link that was closed is followed by `Ended`. The process at the other end of a damaged link is killed.
        """
        if self._is_link_broken:
            return
        try:
            for report, fds in self._sweep_link.receive_messages(*LOAD_REPORTS):
                wire.close_all(fds)
                self._report = self._report or report
        except wire.WireError as error:
            self._is_link_broken = True
            selector.unregister(self._sweep_link)  # it would stay readable and keep this process busy
            self._sweep_link.hang_up()
            if self._report is None and not isinstance(error, wire.WireClosedError):
                text = "the process damaged its own connection while it loaded the function"
                self._kill(LoadFailed(text, outcome=Outcome.CRASHED))

    def _read_child_events(self) -> list[ChildEvent]:
        try:
            return [event for event, _ in self._process_link.receive_messages(*CHILD_EVENTS)]
        except wire.WireError as error:
            raise self._template_died() from error

    def _on_exit(self, event: Ended, selector: selectors.BaseSelector) -> LoadReport:
        self._read_report(selector)
        text = f"the process {describe_status(event.status)} while it loaded the function"
        crash = LoadFailed(text, outcome=Outcome.CRASHED, was_killed=was_killed(event.status))
        return self._report or self._killed_for or crash

    def _kill(self, reason: LoadFailed) -> None:
        self._killed_for = reason
        self._deadline = time.monotonic() + _STARTUP_DEADLINE_S
        try:
            self._process_link.send_message(Kill(SWEEP))
        except wire.WireError as error:
            raise self._template_died() from error

    def _template_died(self) -> SandboxError:
        ending = describe_status(self._template.await_end())
        return SandboxError(f"the template process {ending} while it started:\n{self._template.log()}")


class TemplateWatch:
    """Checks the templates of one sandbox at regular intervals.

    Checks are counted instead of seconds, so that no template is blamed for the time that this process stood still.
    """

    def __init__(self) -> None:
        self._stopped_checks = 0
        self._silent_checks = 0
        self._activity: tuple[str, int] | None = None

    def check(self, pids: Sequence[int], *, awaits_start: bool) -> tuple[int, str] | None:
        """Wakes stopped templates; returns the one that must be replaced, if any, and why, as in "template 12 ...".

        Args:
            pids: the templates, beginning with the one that starts the workers.
            awaits_start: whether a worker was ordered whose process is not known to run yet.
        """
        stopped = [pid for pid in pids if machine.is_stopped(pid)]
        self._stopped_checks = self._stopped_checks + 1 if stopped else 0
        # A template that computes, or waits for a CPU or a disk, is not silent: it may be importing modules.
        before, self._activity = self._activity, machine.activity(pids[0]) if pids else None
        is_asleep = self._activity is not None and self._activity[0] == "S" and self._activity == before
        self._silent_checks = self._silent_checks + 1 if awaits_start and is_asleep else 0
        if stopped:
            wake(pids)
        given_up = None
        if self._stopped_checks > STOPPED_CHECKS:
            given_up = stopped[0], "stays stopped"
        elif self._silent_checks > SILENT_CHECKS and pids:
            given_up = pids[0], "does not answer"
        if given_up is not None:
            self._stopped_checks = self._silent_checks = 0
        return given_up


def wake(pids: Sequence[int]) -> None:
    """Sends SIGCONT to templates, because a config may have sent SIGSTOP to its parents."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
