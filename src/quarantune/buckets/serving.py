"""The process that talks to servers for a job: it carries out one order after another."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import resource
import signal
import socket
from pathlib import Path

from quarantune.buckets import exchange
from quarantune.buckets.objects import LARGEST_OBJECT_BYTES, StoreError, open_objects
from quarantune.cache.problems import CacheWriteError, write_errors
from quarantune.cache.store import Store
from quarantune.host.shared_files import Directory
from quarantune.values.store_url import StoreURL

_IDLE_S = 20
"""Seconds without an order after which this process ends; the job starts another one if necessary. In the same time
after the deadline of an order, it ends whatever it does."""
_MEMORY_BYTES = 4 << 30
"""Most address space, for servers that lie about the size of an object."""
_opened = functools.cache(open_objects)


def main(job: socket.socket) -> None:
    """Answers each order by a sentence about trouble; by an empty text if there is none."""
    with contextlib.suppress(ValueError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.alarm(_IDLE_S)
    while order := job.recv(1 << 20):
        kind, url, what, directory, within_s = json.loads(order)
        signal.alarm(int(within_s) + _IDLE_S)
        trouble = ""
        try:
            if kind == "push":
                exchange.push(StoreURL.parse(url), Store(Path(directory), read_only=True), names=what)
            else:
                refresh(StoreURL.parse(url), what, Path(directory))
        except (StoreError, CacheWriteError, ValueError, MemoryError) as error:
            trouble = str(error) or type(error).__name__
        job.send(json.dumps(trouble).encode())
        signal.alarm(_IDLE_S)
    os._exit(0)  # a thread that waits for a name server would delay an ordinary end


def refresh(url: StoreURL, name: str, directory: Path) -> None:
    """Brings the local copy of an object up to date.

    Args:
        url: the URL.
        name: the safe name of the function.
        directory: the directory of the copy, `remote/HASH` in the cache directory.

    Raises:
        StoreError: the object cannot be fetched, or is damaged.
        CacheWriteError: the directory cannot keep the copy.
    """
    with (
        write_errors(f"{url}: there can be no copy in {str(directory)!r}"),
        Directory(directory.parents[1], *directory.parts[-2:], make=True) as place,
    ):
        found = _opened(url).read(name, _version(place, name))
        if found is None:
            place.remove(f"{name}.json")
        elif found.data is not None:
            exchange.decoded(url, name, found)
            about = {"version": found.version, "sha256": hashlib.sha256(found.data).hexdigest()}
            place.replace(f"{name}.json", found.data)
            place.replace(f"{name}.etag", json.dumps(about).encode())


def _version(place: Directory, name: str) -> str:
    """Returns the version of a copy; empty if there is no whole copy."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        about = json.loads(place.read(f"{name}.etag", largest_bytes=1 << 12))
        data = place.read(f"{name}.json", largest_bytes=LARGEST_OBJECT_BYTES)
        if about["sha256"] == hashlib.sha256(data).hexdigest():  # or one of the files is another process's
            return str(about["version"])
    return ""
