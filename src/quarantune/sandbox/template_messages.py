"""Every message between the caller's process, its template and the sweep's template, one frozen dataclass for each.

`values.codec` encodes and decodes them. Each message documents the descriptors that travel with it. The messages of
workers are in `messages`.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from typing import TypeAlias

from quarantune.values.codec import JsonObject


@dataclasses.dataclass(frozen=True)
class Open:
    """Caller to template: accept a connection for one sweep.

    Descriptors: the connection, then the payload and the arrays, if any.

    Attributes:
        environ: the environment of the sweep's template and its workers.
        cwd: their working directory; None if the caller's no longer exists.
        loads_plugins: whether its workers need JAX's plugins for devices other than the CPU.
        has_directory: whether its workers share the directory in memory of the process's template.
    """

    environ: Mapping[str, str]
    cwd: str | None
    loads_plugins: bool
    has_directory: bool = False


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Caller to the process's template: load and make whatever the workers of later sweeps need.

    A template that must not fork afterwards exits with `SPOILED`.

    Attributes:
        environ: the environment of the sweep's workers; plugins take their options from it as they load.
        task: the frame of a task for the workers' program, which templates pass on unread; None for none.
        modules: modules that a sweep's template has imported, to import once for the templates of later sweeps.
    """

    environ: Mapping[str, str]
    task: JsonObject | None = None
    modules: tuple[str, ...] = ()


SPOILED = 76
"""The exit status of a template that warmed up and must not fork."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Caller to a template: start a worker, or a sweep's template, which loads the payload and serves its connection.

    Descriptors: the child's log, its connection, then those that belong to its first task.

    Attributes:
        number: identifies the child in later messages.
        task: the frame of a worker's first task, which templates pass on unread; None for a sweep's template.
        environ: environment variables that this worker gets in addition to the sweep's.
        method: `fork` or `spawn`; always `fork` for a sweep's template.
    """

    number: int
    task: JsonObject | None
    environ: Mapping[str, str]
    method: str


@dataclasses.dataclass(frozen=True)
class Kill:
    """Caller to a template: kill a child and all of its descendants.

    Attributes:
        number: the child, as numbered by the message that started it.
        shows_stack: whether it writes its stack to its log before it dies.
    """

    number: int
    shows_stack: bool = False


@dataclasses.dataclass(frozen=True)
class Import:
    """Caller to a template: import modules, so that later forks have them.

    Attributes:
        modules: their names.
    """

    modules: tuple[str, ...]


Order: TypeAlias = Open | WarmUp | Start | Kill | Import
ORDERS: tuple[type[Order], ...] = (Open, WarmUp, Start, Kill, Import)
"""Messages that a template receives."""


@dataclasses.dataclass(frozen=True)
class Started:
    """Template to caller: a child runs.

    Attributes:
        number: the child.
        pid: its process id.
    """

    number: int
    pid: int


@dataclasses.dataclass(frozen=True)
class Ended:
    """Template to caller: a child is gone, along with every process that it had started.

    It is also the sandbox's last event of a worker.

    Attributes:
        number: the child.
        status: its exit code, or minus the signal that ended it; None if its template died, or could not start it.
    """

    number: int
    status: int | None


ChildEvent: TypeAlias = Started | Ended
CHILD_EVENTS: tuple[type[ChildEvent], ...] = (Started, Ended)
"""Messages that a template sends about its children."""


def was_killed(status: int | None) -> bool:
    """Returns whether a signal that only comes from outside, such as SIGKILL, ended a process.

    Args:
        status: see `Ended`.
    """
    return status is not None and -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def describe_status(status: int | None) -> str:
    """Returns, in words, how a process ended.

    Args:
        status: see `Ended`.
    """
    if status is None:
        return "was lost"
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Sweep's template to caller: the payload is loaded.

    Attributes:
        fork_hazard: why the process must not fork and therefore ends; None if it serves the sweep.
        modules: the modules of installed packages that it has imported.
    """

    fork_hazard: str | None
    modules: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ErrorDescription:
    """An exception as text, or how a process ended.

    Attributes:
        text: its message.
        error: its type; empty if a process ended without one.
        traceback: the last lines of its traceback.
    """

    text: str
    error: str
    traceback: str = ""

    @property
    def message(self) -> str:
        """The type and the message, as a trial has them."""
        return ": ".join(filter(None, (self.error, self.text)))


LoadReport: TypeAlias = Loaded | ErrorDescription
LOAD_REPORTS: tuple[type[LoadReport], ...] = (Loaded, ErrorDescription)
"""Messages that a sweep's template sends once, after loading the payload, or failing to."""


# --- options of freshly started interpreters ---


@dataclasses.dataclass(frozen=True)
class TemplateOptions:
    """Makes a new interpreter the template of a process.

    Attributes:
        connection_fd: the connection to its owner.
        owner_pid: the process that it must not outlive.
        argv: the owner's `sys.argv`.
    """

    connection_fd: int
    owner_pid: int
    argv: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """Makes a new interpreter, or a fork of a template, a worker.

    Attributes:
        parent_pid: the template that started it and that it must not outlive.
        connection_fd: the connection to the scheduler.
        log_fd: takes the worker's output.
        task_fds: descriptors of its first task.
        names_fd: receives the names of the shared memory that it makes.
        payload_fd: holds the pickled call.
        arrays_fd: holds the call's array data.
        cwd: the caller's working directory; None if it no longer exists.
        task: the frame of its first task.
    """

    parent_pid: int
    connection_fd: int
    log_fd: int
    task_fds: tuple[int, ...]
    names_fd: int
    payload_fd: int
    arrays_fd: int
    cwd: str | None
    task: JsonObject


RoleOptions: TypeAlias = TemplateOptions | WorkerOptions
ROLE_OPTIONS: tuple[type[RoleOptions], ...] = (TemplateOptions, WorkerOptions)
"""Options that a freshly started interpreter may get; their type is its role."""
