"""Waits until a sweep's template has loaded the payload, within a deadline."""

from __future__ import annotations

import enum
import selectors
import time

from quarantune.host import machine, stops
from quarantune.sandbox import template_watch, wire
from quarantune.sandbox.events import describe_status, was_killed
from quarantune.sandbox.template import Template
from quarantune.sandbox.template_messages import (
    CHILD_EVENTS,
    LOAD_REPORTS,
    ChildEvent,
    Exited,
    Kill,
    LoadFailed,
    LoadReport,
    Started,
)
from quarantune.sandbox.wire import Connection
from quarantune.values.trial import Outcome, SandboxError

_STARTUP_DEADLINE_S = 120.0
_POLL_S = 0.05


class LoadState(enum.Enum):
    """State of the load.

    STARTING: the process's template starts up or forks; the start-up deadline runs.
    LOADING: the sweep's template runs; the caller's deadline runs.
    KILLED: the caller's deadline has passed, and the exit of the sweep's template is awaited.
    DAMAGED: the sweep's template was killed because its connection is damaged, and its exit is awaited.
    """

    STARTING = "starting"
    LOADING = "loading"
    KILLED = "killed"
    DAMAGED = "damaged"


class SweepLoad:
    """The load of one sweep's payload by a sweep's template that was just ordered."""

    def __init__(
        self, template: Template, process_link: Connection, sweep_link: Connection, *, number: int, timeout_s: float
    ) -> None:
        """Starts the start-up deadline.

        Args:
            template: the process's template.
            process_link: the connection to it.
            sweep_link: the connection to the sweep's template.
            number: the number of the sweep's template among the children of the process's template.
            timeout_s: the deadline for loading, which starts once the sweep's template runs.
        """
        self.pid: int | None = None
        """Process id of the sweep's template, once it runs."""
        self._template = template
        self._process_link = process_link
        self._sweep_link = sweep_link
        self._number = number
        self._timeout_s = timeout_s
        self._state = LoadState.STARTING
        self._deadline = time.monotonic() + _STARTUP_DEADLINE_S
        self._report: LoadReport | None = None
        self._is_link_broken = False
        self._selector = selectors.DefaultSelector()
        for link in (sweep_link, process_link):
            self._selector.register(link, selectors.EVENT_READ)

    def wait(self) -> LoadReport:
        """Returns how the load went; kills the sweep's template at the deadline.

        Raises:
            SandboxError: the process's template died or does not answer.
        """
        with self._selector as selector:
            stopped = stops.Stops(time.monotonic)
            while True:
                selector.select(max(0.0, min(_POLL_S, self._deadline - time.monotonic())))
                if self._state is LoadState.STARTING and machine.is_stopped(self._template.pid):
                    template_watch.wake([self._template.pid])
                self._deadline += stopped.lost_s()
                self._read_report()
                for event in self._read_child_events():
                    match event:
                        case Started():
                            self._on_started(event)
                        case Exited():
                            return self._on_exit(event)
                # A quick fork may have loaded before its parent reports that it runs.
                if self._report is not None and self._state is not LoadState.STARTING:
                    return self._report
                if time.monotonic() >= self._deadline:
                    self._on_deadline()

    def _read_report(self) -> None:
        """Reads the report, if it has arrived.

        A link that was closed is followed by `Exited`. The process at the other end of a damaged link is killed.
        """
        if self._is_link_broken:
            return
        try:
            for report, fds in self._sweep_link.receive_messages(*LOAD_REPORTS):
                wire.close_all(fds)
                self._report = self._report or report
        except wire.WireError as error:
            self._is_link_broken = True
            self._selector.unregister(self._sweep_link)  # it would stay readable and keep this process busy
            self._sweep_link.hang_up()
            if self._report is None and not isinstance(error, wire.WireClosedError):
                self._kill(LoadState.DAMAGED)

    def _read_child_events(self) -> list[ChildEvent]:
        try:
            return [event for event, _ in self._process_link.receive_messages(*CHILD_EVENTS)]
        except wire.WireError as error:
            raise self._template_died() from error

    def _on_started(self, event: Started) -> None:
        self.pid = event.pid
        if self._state is LoadState.STARTING:
            self._state = LoadState.LOADING
            self._deadline = time.monotonic() + self._timeout_s

    def _on_exit(self, event: Exited) -> LoadReport:
        self._read_report()
        if self._report is not None:
            return self._report
        if self._state is LoadState.KILLED:
            return LoadFailed(f"loading the function took longer than {self._timeout_s:g} s", Outcome.TIMEOUT)
        if self._state is LoadState.DAMAGED:
            return LoadFailed("the process damaged its own connection while it loaded the function", Outcome.CRASHED)
        text = f"the process {describe_status(event.status)} while it loaded the function"
        return LoadFailed(text, Outcome.CRASHED, was_killed=was_killed(event.status))

    def _on_deadline(self) -> None:
        if self._state is not LoadState.LOADING:
            raise SandboxError("the template process does not answer")
        self._kill(LoadState.KILLED)

    def _kill(self, state: LoadState) -> None:
        self._state = state
        self._deadline = time.monotonic() + _STARTUP_DEADLINE_S
        try:
            self._process_link.send_message(Kill(self._number))
        except wire.WireError as error:
            raise self._template_died() from error

    def _template_died(self) -> SandboxError:
        self._template.await_end()
        return SandboxError(f"the template process died while it started:\n{self._template.log()}")
