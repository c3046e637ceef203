"""This process's template, started once, on first use, and kept while this process lives; the watch on templates."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from quarantune.host import machine
from quarantune.host.locks import new_lock
from quarantune.host.process import SANDBOX_MARK
from quarantune.sandbox import contain, shortages, spawning, spool, wire
from quarantune.sandbox.template_messages import SPOILED, Open, TemplateOptions, WarmUp
from quarantune.sandbox.wire import Connection, WireClosedError
from quarantune.values.codec import JsonObject
from quarantune.values.errors import SandboxError

_EXIT_WAIT_S = 2.0
STOPPED_CHECKS = 20
"""Checks in a row that may find a template stopped, though each wakes it, before another replaces it."""
SILENT_CHECKS = 50
"""Checks in a row that may find a template idle, though it has a worker to start, before another replaces it."""


class Template:
    """A running template process."""

    def __init__(self) -> None:
        self.inherited = inherited_state()
        self._links: list[Connection] = []
        self.token = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._prepared: set[str] = set()
        """Names of the modules that it prepares; the empty name stands for a task."""
        self._sending = new_lock()  # sweeps of several threads share this connection
        with contextlib.ExitStack() as undo, spawning.standard_descriptors():
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                self._log_fd = spool.create_log()
                undo.callback(os.close, self._log_fd)
                self._process = spawning.start(
                    TemplateOptions(
                        connection_fd=theirs.fileno(),
                        owner_pid=os.getpid(),
                        argv=tuple(str(word) for word in sys.argv),
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=self._log_fd,
                    stderr=self._log_fd,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, SANDBOX_MARK: self.token},
                    start_new_session=True,
                )
            undo.pop_all()
        self._connection = Connection(ours)

    @property
    def pid(self) -> int:
        """The template's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def is_used(self) -> bool:
        """Whether a sandbox is connected to it."""
        return any(link.is_open for link in self._links)

    def open(self, sweep: Open, *, payload_fd: int, arrays_fd: int) -> Connection:
        """Returns a new connection to the template, for one sweep.

        Args:
            sweep: describes the sweep.
            payload_fd: the pickled call; -1 for none.
            arrays_fd: its arrays' bytes; -1 for none.

        Raises:
            SandboxError: the template died.
        """
        connection, theirs = wire.connection_pair()
        try:
            with self._sending, theirs:
                fds = [theirs.fileno(), *(fd for fd in (payload_fd, arrays_fd) if fd >= 0)]
                self._connection.send_message(sweep, fds)
        except WireClosedError as error:
            connection.close()
            self.await_end()
            raise SandboxError(f"the template process is gone: {error}\n{self.log()}") from error
        self._links = [link for link in self._links if link.is_open] + [connection]
        return connection

    def warm_up(self, environ: Mapping[str, str], task: JsonObject | None = None, modules: Sequence[str] = ()) -> None:
        """Makes the template prepare, once, for sweeps like this one, before it obeys the next order.

        If warming up makes a template unfit for forking, it exits, and later templates do not warm up.

        Args:
            environ: the environment of the sweep's workers.
            task: a task for the workers' program; None for none.
            modules: modules to import, of installed packages.
        """
        with self._sending, contextlib.suppress(WireClosedError):
            wanted = {*modules, *([] if task is None else [""])} - self._prepared
            if wanted and not _is_spoiled_by_warmth:
                self._prepared |= wanted
                named = tuple(sorted(wanted - {""}))
                self._connection.send_message(WarmUp(environ, task if "" in wanted else None, named))

    def await_end(self) -> int | None:
        """Waits, within a bound, until a template whose connection broke has exited; returns its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_WAIT_S)
        return self._process.returncode

    def log(self) -> str:
        """Returns the end of the template's own output."""
        return spool.read_log(self._log_fd, last_bytes=4000)

    def close(self) -> None:
        """Ends the template and waits, within a bound, until it has exited."""
        global _is_spoiled_by_warmth
        self._connection.hang_up()
        if not self.is_used:
            self._process.kill()  # it has no children, and may be importing modules
        try:
            self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # this process may have changed its user
                self._process.kill()
                self._process.wait(_EXIT_WAIT_S)
        if self._process.returncode == SPOILED:
            _is_spoiled_by_warmth = True
        _kill_marked(self.token)
        contain.remove_all_of(contain.common_directory(self.token))
        with contextlib.suppress(OSError):
            os.close(self._log_fd)

    def disown(self) -> None:
        """Closes the handle in a fork of the process that owns the template."""
        self._connection.close()
        with contextlib.suppress(OSError):
            os.close(self._log_fd)
        self._process.returncode = 0  # not a child of this process, so there is nothing to wait for


def _kill_marked(token: str) -> None:
    """Kills the orphans of a dead template, found by its token in their environment."""
    mark = f"{SANDBOX_MARK}={token}".encode()
    for pid in machine.process_ids():
        if mark in machine.read_proc(f"/proc/{pid}/environ").split(b"\0"):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


_lock = new_lock()
_templates: list[Template] = []
"""The templates of this process. All but the last are out of date, and end with the last sweep that uses them."""
_is_spoiled_by_warmth = False
"""Whether a template of this process could not fork after it had warmed up."""


def shared() -> Template:
    """Returns this process's template, and starts one if none runs or the running one is out of date.

    A template is out of date once a new one would inherit another state from this process.

    Raises:
        SandboxError: no template can start.
    """
    with _lock:
        for last in _templates[-1:]:
            if last.is_alive and last.inherited == inherited_state():
                return last
        _close_unused(_templates)
        try:
            _templates.append(Template())
        except (OSError, RuntimeError) as error:
            remedy = shortages.remedy(error)
            text = f"the template process cannot be started: {error}{f': {remedy}' if remedy else ''}"
            raise SandboxError(text) from error
        return _templates[-1]


def close_unused() -> None:
    """Closes the templates that are out of date and that no sandbox is connected to."""
    _close_unused(_templates[:-1])


def _close_unused(templates: Sequence[Template]) -> None:
    for template in list(templates):
        if not template.is_used or not template.is_alive:
            discard(template)


def discard(template: Template) -> None:
    """Ends a template that no longer answers, unless another thread has; the process may not have exited yet."""
    with _lock:
        if template in _templates:
            _templates.remove(template)
            template.close()


def close_shared() -> None:
    """Ends this process's templates; the next sweep starts another."""
    for template in list(_templates):
        discard(template)


def _forget_in_fork() -> None:
    for template in _templates:
        template.disown()
    _templates.clear()


atexit.register(close_shared)
os.register_at_fork(after_in_child=_forget_in_fork)


# --- templates that stop or hang ---


class TemplateWatch:
    """Checks the templates of one sandbox at regular intervals.

    It counts checks instead of seconds, so that time in which this process stood still counts against no template.
    """

    def __init__(self) -> None:
        self._stopped_checks = 0
        self._silent_checks = 0
        self._activity: tuple[str, int] | None = None

    def check(self, pids: Sequence[int], *, awaits_start: bool) -> tuple[int, str] | None:
        """Wakes stopped templates; returns the template to replace, if any, and a reason that follows "template 12".

        Args:
            pids: the templates, beginning with the template that starts the workers.
            awaits_start: whether an ordered worker has yet to run, as far as is known.
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


def wake(pids: Iterable[int]) -> None:
    """Sends SIGCONT to templates, because a config may have sent SIGSTOP to its parents."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


# --- the state that a process inherits for good at its start, which shows whether a template is out of date ---


_READ_AT_START = ("LD_", "PYTHON", "JAX_", "XLA_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_")
"""Prefixes of variables that the loader, Python, JAX, its plugins and numerical libraries read once, at start-up.

Every sweep gives its workers the current values of all other variables.
"""


def inherited_state() -> tuple[object, ...]:
    """Returns the state that a new child would keep for good: user, groups, CPUs, cgroups, variables read once."""
    return (
        (os.getuid(), os.geteuid(), os.getgid(), os.getegid(), sorted(os.getgroups())),
        os.sched_getaffinity(0),
        machine.read_proc("/proc/self/cgroup"),
        {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)},
    )
