"""Layers by URL, and the push at a job's end. Another process talks to servers, so that none can hold this one up."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import select
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
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from quarantune.buckets import serving; serving.main()"
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
        self._process: subprocess.Popen[str] | None = None
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
        self._end()

    def _carry_out(self, within_s: float, kind: str, url: StoreURL, what: str | list[str], directory: Path) -> str:
        """Carries an order out; returns a sentence about trouble, or an empty text. See `serving`."""
        deadline = time.monotonic() + within_s
        is_done = False
        try:
            if within_s <= 0:
                raise TimeoutError("no time is left, because servers were slow")
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            order = kind, url.parts.geturl(), what, str(directory), within_s
            print(json.dumps(order), file=process.stdin, flush=True)
            ready = select.poll()
            ready.register(process.stdout, select.POLLIN)
            if not ready.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no answer within {within_s:.2g} s")
            answer = json.loads(process.stdout.readline() or '"its process has ended"')
            is_done = True
            return str(answer)
        except (OSError, RuntimeError, ValueError) as error:
            return f"{url}: {error}"
        finally:
            if not is_done:  # the answer may still come
                self._end()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            command, pipe, null = [*interpreter_command(), _BOOTSTRAP], subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=null, text=True, start_new_session=True
            )
            print(json.dumps(startup_path()), file=self._process.stdin)
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_agent = functools.cache(_Agent)
"""The agent of a process, by its number: a fork must not talk to its parent's."""
