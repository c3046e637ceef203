"""Where a freshly started interpreter of ours begins."""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from typing import Any, NoReturn


def run(options: dict[str, Any]) -> NoReturn:
    """Runs the role named in `options`."""
    from quarantune.sandbox import contain

    contain.reset_signals()
    if options["role"] == "template":
        from quarantune.sandbox import forker

        forker.run_template(options)
    _run_spawned_worker(json.load(sys.stdin))


def _run_spawned_worker(about: dict[str, Any]) -> NoReturn:
    from quarantune.sandbox import contain
    from quarantune.sandbox.wire import Connection

    main: Any = importlib.import_module("quarantune.worker.main")
    contain.contain_worker(parent=about["parent"], log_fd=about["log_fd"])
    os.close(about["log_fd"])
    shared = main.Shared(payload_fd=about["payload_fd"], arrays_fd=about["arrays_fd"], call=None, cwd=about["cwd"])
    connection = Connection(socket.socket(fileno=about["connection_fd"]))
    importlib.import_module("jax")
    gc.enable()
    main.main(connection, shared, about["task"], about["task_fds"])
    raise AssertionError("the main of a worker never returns")
