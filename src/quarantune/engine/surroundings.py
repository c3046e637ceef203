"""The process of an engine's worker while shards run in it: its environment, and the template that it keeps."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping

from quarantune.host import locks
from quarantune.sandbox import template

_LINGER_S = 20.0
"""A template that no shard has used for this long is ended."""

_lock = locks.new()
_running = 0
_begun = 0
_before: dict[str, str | None] = {}


@contextlib.contextmanager
def prepared(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Prepares this process for a shard, and keeps its template for the next one unless the shard is interrupted.

    Args:
        variables: the submitter's limits of threads, None for those that are not set. A numerical library reads them
            when it is loaded, in the template, and engines set them to 1 for their own workers. Where shards of several
            sweeps run in one process at a time, those of the first hold.
    """
    global _running, _begun
    with _lock:
        _running += 1
        _begun += 1
        if _running == 1:
            _before.update({name: os.environ.get(name) for name in variables})
            _set(variables)
    linger_s = 0.0
    try:
        yield
        linger_s = _LINGER_S
    finally:
        with _lock:
            _running -= 1
            if not _running:
                _set(_before)
                _before.clear()
        _end_template_after(linger_s, _begun)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


def _end_template_after(linger_s: float, begun: int) -> None:
    """Ends the template unless a shard runs by then, or another has."""
    if "quarantune.engine.distributed" in sys.modules:
        return  # this process tunes, too, and keeps its template

    def end() -> None:
        with _lock:
            if not _running and begun == _begun:
                template.close_shared()

    if not linger_s:
        end()
        return
    timer = threading.Timer(linger_s, end)
    timer.daemon = True
    timer.start()
