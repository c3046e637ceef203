"""The program that every worker runs, known here only by its dotted name and its interface.

The sandbox holds processes and knows nothing of trials, so it never imports the `worker` package: a template imports
the program by name before it starts workers.
"""

from __future__ import annotations

import gc
import importlib
import socket
from typing import NoReturn, Protocol, cast

from quarantune.sandbox import contain
from quarantune.sandbox.template_messages import ErrorDescription, WorkerOptions
from quarantune.sandbox.wire import Connection
from quarantune.values.codec import Frame

_WORKER_MAIN = "quarantune.worker.main"
_DECORATOR = "quarantune.api.autotune"


class WorkerProgram(Protocol):
    """The functions of `quarantune.worker.main` that a template calls."""

    def main(self, connection: Connection, options: WorkerOptions, call: object | None) -> NoReturn:
        """Runs a worker from its first task to the end of its process."""

    def load_call(self, payload_fd: int, cwd: str | None) -> object:
        """Loads a sweep's payload."""

    def warm_up(self, task: Frame) -> None:
        """Loads and makes, in a template, whatever a task says that workers need."""

    def describe_error(self, error: BaseException) -> ErrorDescription:
        """Describes an exception; never raises."""


def load() -> WorkerProgram:
    """Imports the worker's program, with JAX and everything that it needs, unless it is imported already."""
    return cast("WorkerProgram", importlib.import_module(_WORKER_MAIN))


def run(options: WorkerOptions, call: object | None) -> NoReturn:
    """Turns this process, fresh or forked, into a worker.

    Args:
        options: describes the worker.
        call: the payload as the template has loaded it; None where the worker must load it itself.
    """
    contain.contain_worker(parent=options.parent_pid, log_fd=options.log_fd, names_fd=options.names_fd)
    program = load()
    gc.enable()
    program.main(Connection(socket.socket(fileno=options.connection_fd)), options, call)


def preload_decorator() -> None:
    """Imports what a module with tuned functions imports, so that later loads of such a module are spared 0.1 s."""
    importlib.import_module(_DECORATOR)
