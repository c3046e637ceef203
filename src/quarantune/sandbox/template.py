"""The owner's handle on its template process: started once, lazily, and kept while the owner lives."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping

from quarantune.host import locks
from quarantune.sandbox import habitat, spawning, spool, wire
from quarantune.sandbox.wire import Connection
from quarantune.values.trial import SandboxError

MARK = "QUARANTUNE_SANDBOX"
"""Set in the environment of everything that runs in a sandbox, to the owner's own token."""
_EXIT_WAIT_S = 2.0


def is_inside() -> bool:
    """Returns whether this process runs in a sandbox, where tuning must not start another."""
    return MARK in os.environ


class Template:
    """A running template process."""

    def __init__(self) -> None:
        self.habitat = habitat.current()
        self.users = 0
        """How many sandboxes have a connection to it."""
        self.token = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._sending = locks.new()  # sweeps of several threads share this connection
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                self._log_fd = spool.create_log()
                undo.callback(os.close, self._log_fd)
                self._process = spawning.start(
                    "template",
                    {"fd": theirs.fileno(), "owner": os.getpid(), "argv": [str(word) for word in sys.argv]},
                    stdin=subprocess.DEVNULL,
                    stdout=self._log_fd,
                    stderr=self._log_fd,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, MARK: self.token},
                    start_new_session=True,
                )
            undo.pop_all()
        self._connection = Connection(ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def open(self, *, payload_fd: int, arrays_fd: int, environ: Mapping[str, str], cwd: str | None) -> Connection:
        """Returns a connection of a sweep's own to the template."""
        connection, theirs = wire.connection_pair()
        try:
            with self._sending:
                self._connection.send(
                    {"op": "open", "environ": dict(environ), "cwd": cwd},
                    [theirs.fileno(), payload_fd, arrays_fd],
                )
        except wire.WireError as error:
            connection.close()
            self.await_end()
            raise SandboxError(f"the template process is gone: {error}\n{self.log()}") from error
        finally:
            theirs.close()
        with _lock:
            self.users += 1
        return connection

    def await_end(self) -> None:
        """Waits for the end of a process whose connection broke: a dying one closes its descriptors first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_WAIT_S)

    def log(self) -> str:
        """Returns the end of what the template itself printed."""
        return spool.read_log(self._log_fd, last_bytes=4000)

    def close(self) -> None:
        """Lets the template end, and waits until it has."""
        self._connection.hang_up()
        try:
            self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it may be another user's than we are now
                self._process.kill()
                self._process.wait(_EXIT_WAIT_S)
        kill_marked(self.token)
        with contextlib.suppress(OSError):
            os.close(self._log_fd)

    def disown(self) -> None:
        """Lets go of the template in a process that was forked from its owner."""
        self._connection.close()
        with contextlib.suppress(OSError):
            os.close(self._log_fd)
        self._process.returncode = 0  # not our child: there is nothing to wait for


def kill_marked(token: str) -> None:
    """Kills what still carries a dead template's mark: its orphans, which no janitor is left to find."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == token:
                process.kill()


_lock = locks.new()
_template: Template | None = None
_outdated: list[Template] = []
"""Templates that were replaced while a sweep still used them."""


def shared() -> Template:
    """Returns the process's template, started if there is none, the last one died, or a new one would not be like it.

    Raises:
        SandboxError: it cannot be started.
    """
    global _template
    with _lock:
        if _template is not None and _template.habitat != habitat.current():
            _outdated.append(_template)
            _template = None
            _close_unused()
        if _template is not None and not _template.is_alive:
            _template.close()
            _template = None
        if _template is None:
            try:
                _template = Template()
            except (OSError, RuntimeError) as error:
                raise SandboxError(f"the template process cannot be started: {error}") from error
        return _template


def leave(template: Template) -> None:
    """Says that a sandbox is done with a template."""
    with _lock:
        template.users -= 1
        _close_unused()


def _close_unused() -> None:
    for template in [template for template in _outdated if template.users <= 0]:
        _outdated.remove(template)
        template.close()


def discard(template: Template) -> None:
    """Ends a template that does not answer any more, if nobody else has: it may be dying still, and not yet dead."""
    global _template
    with _lock:
        if _template is template:
            _template = None
            template.close()


def close_shared() -> None:
    """Ends the process's template, if it runs; the next sweep starts another."""
    if _template is not None:
        discard(_template)
    with _lock:
        while _outdated:
            _outdated.pop().close()


def _forget_in_fork() -> None:
    global _template
    for template in (_template, *_outdated):
        if template is not None:
            template.disown()
    _template = None
    _outdated.clear()


atexit.register(close_shared)
os.register_at_fork(after_in_child=_forget_in_fork)
