"""The entry point of every freshly started interpreter of the sandbox."""

from __future__ import annotations

import gc
import importlib
import os
import socket
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from quarantune.sandbox.template_messages import SpawnedWorkerOptions


def run(frame: object) -> NoReturn:
    """Runs the template or the worker that `frame` describes.

    Args:
        frame: `TemplateOptions` or `SpawnedWorkerOptions` as encoded by the codec.
    """
    from quarantune.sandbox import codec, contain
    from quarantune.sandbox.template_messages import ROLE_OPTIONS, SpawnedWorkerOptions, TemplateOptions

    contain.reset_signals()
    match codec.decode(frame, *ROLE_OPTIONS):
        case TemplateOptions() as options:
            from quarantune.sandbox import forker

            forker.run_template(options)
        case SpawnedWorkerOptions() as options:
            _run_spawned_worker(options)


def _run_spawned_worker(options: SpawnedWorkerOptions) -> NoReturn:
    from quarantune.sandbox import contain, shared_names, worker_program
    from quarantune.sandbox.wire import Connection

    program = worker_program.load()
    contain.contain_worker(parent=options.parent_pid, log_fd=options.log_fd)
    os.close(options.log_fd)
    shared_names.note_in(options.names_fd)
    shared = worker_program.Shared(
        payload_fd=options.payload_fd, arrays_fd=options.arrays_fd, call=None, cwd=options.cwd
    )
    connection = Connection(socket.socket(fileno=options.connection_fd))
    importlib.import_module("jax")
    gc.enable()
    program.main(connection, shared, options.task, list(options.task_fds))
