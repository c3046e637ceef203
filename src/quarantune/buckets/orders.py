"""Layers by URL, and the push at a job's end. Another process talks to servers, so that none can hold this one up."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import socket
import subprocess
import time
from pathlib import Path

from quarantune.cache.file_names import safe_name
from quarantune.cache.problems import report_once
from quarantune.cache.store import Store
from quarantune.host.interpreter import interpreter_command
from quarantune.host.locks import new_lock
from quarantune.host.packages import startup_path
from quarantune.host.process import in_sandbox
from quarantune.values.codec import short_hash
from quarantune.values.store_url import StoreURL

FETCHING_S, PUSHING_S = 5.0, 10.0
"""Seconds that a process waits for all its layers together, and for the push at its end."""
_LARGEST_BYTES = 1 << 16
_BOOTSTRAP = (
    "import sys, json, socket; job = socket.socket(fileno=0); sys.path[:] = json.loads(job.recv(1 << 20)); "
    "from quarantune.buckets import serving; serving.main(job)"
)
_logger = logging.getLogger("quarantune")
_lock = new_lock()


def layer(url: StoreURL, name: str, cache_dir: Path) -> Store:
    """Returns the results of a function at a URL, as their local copy in the cache directory.

    The first call of a process for a function brings the copy up to date. Nothing is fetched in a worker: the process
    of the sweep has done so.
    """
    directory = cache_dir / "remote" / short_hash(str(url))  # without the signature of the URL, which changes
    if not in_sandbox():
        with _lock:
            _agent(os.getpid()).refresh(url, safe_name(name), directory)
    return Store(directory, read_only=True, label=str(url))


def push_later(url: StoreURL, name: str, cache_dir: Path) -> None:
    """Pushes the results of a function from the cache directory into a bucket when this process ends."""
    with _lock:
        _agent(os.getpid()).pending.setdefault((url, cache_dir), set()).add(name)


class _Agent:
    """The process that talks to servers for this one, and the orders for it.

    Attributes:
        pending: the functions with results to push, by their bucket and their cache directory.
    """

    def __init__(self, pid: int) -> None:
        self.pending: dict[tuple[StoreURL, Path], set[str]] = {}
        self._refreshed: set[tuple[str, Path]] = set()
        self._left_s = FETCHING_S
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._finish, pid)

    def refresh(self, url: StoreURL, name: str, directory: Path) -> None:
        """Brings the copy of an object up to date, once; warns if that is impossible."""
        if (name, directory) in self._refreshed:
            return
        self._refreshed.add((name, directory))
        started = time.monotonic()
        trouble = self._carry_out(self._left_s, "refresh", url, name, directory)
        self._left_s -= time.monotonic() - started
        if trouble:
            then = "an earlier copy is used" if (directory / f"{name}.json").exists() else "its results are not found"
            report_once(f"{trouble}; {then}: see to the server, or correct QUARANTUNE_CACHE_PATH", topic=str(url))

    def _finish(self, pid: int) -> None:
        """Pushes what is pending. A failure becomes a line in the log, because the job has done its work."""
        deadline = time.monotonic() + PUSHING_S
        while pid == os.getpid() and self.pending:  # not in a fork
            (url, cache_dir), names = self.pending.popitem()
            if trouble := self._carry_out(deadline - time.monotonic(), "push", url, sorted(names), cache_dir):
                told = f"{trouble}: results stay in {str(cache_dir)!r}, and were not pushed"
                _logger.warning("%s; push them with `quarantune cache push %s`", told, url)
        self.end()

    def _carry_out(self, within_s: float, kind: str, url: StoreURL, what: str | list[str], directory: Path) -> str:
        """Carries an order out; returns a sentence about trouble, or an empty text. See `serving`."""
        deadline, answer = time.monotonic() + within_s, b""
        try:
            if within_s <= 0:
                raise TimeoutError("no time is left, because servers were slow")
            if self._process is None or self._process.poll() is not None:
                self.end()
                self._start()
            self._line.send(json.dumps([kind, url.parts.geturl(), what, str(directory), within_s]).encode())
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            if answer := self._line.recv(_LARGEST_BYTES):
                return str(json.loads(answer))
            raise OSError("the process that talks to it has ended")
        except (OSError, RuntimeError) as error:
            return f"{url}: {error}"
        finally:
            if not answer:  # it may still come
                self.end()

    def _start(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, null = [*interpreter_command(), _BOOTSTRAP], subprocess.DEVNULL
        with theirs as stdin:
            self._process = subprocess.Popen(
                command, stdin=stdin.fileno(), stdout=null, stderr=null, start_new_session=True
            )
        self._line.send(json.dumps(startup_path()).encode())

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._line.close()


_agent = functools.cache(_Agent)
"""The agent of a process, by its number: a fork must not talk to its parent's."""
