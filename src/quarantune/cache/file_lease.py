"""Exclusion between processes by files: one writer at a time to a shared file, also where locks have no effect.

Two mechanisms keep processes apart, here and in `claims`. A lock on a side file, which the kernel releases when its
holder dies. And, since on some shared filesystems locks have no effect or bind one host only, a file that names its
owner: it counts until its owner is dead for certain, or until the file has not changed for so long that the owner must
be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from quarantune.cache.store import CacheWriteError, LeaseLostError, short_hash, short_text
from quarantune.host import machine, shared_files
from quarantune.host.shared_files import Directory, Draft, SideLock
from quarantune.values.codec import Record, within

_POLL_S = 0.005
_STALE_S = 30.0
"""An announcement that has not changed for this long no longer counts; a lease is held for milliseconds."""
_ANNOUNCEMENT = re.compile(r"(?P<host>[0-9a-f]+)-(?P<pid>\d+)-(?P<started>\d+)-\d+\.tmp")
_serial = itertools.count()


@contextlib.contextmanager
def announced(target: Path, *, below: Path, timeout_s: float) -> Iterator[Callable[[bytes], None]]:
    """Waits until no other writer has announced itself for a file; the caller holds the side lock of the writers.

    Writers queue on the lock of a side file that is never removed. In case that lock has no effect, a writer also
    announces itself: it creates its temporary file first, then looks for those of other writers, and backs off if
    there is one; it reads only when it has found itself alone. Of two writers one created its file before the other
    looked, so at most one goes on, which relies only on the order of operations in a directory. The announcement of a
    writer whose process is gone, or that has not changed for 30 s, is removed. Should that writer live after all, its
    replacement fails for want of that file, and it starts over.

    Args:
        target: the file; its folder is made if necessary.
        below: the cache directory.
        timeout_s: the longest wait in seconds.

    Yields:
        A function that makes its argument the file's content, all of it or none, safe from a crash of the machine; it
        raises `LeaseLostError` where another writer has withdrawn the announcement, so that nothing is written.

    Raises:
        CacheWriteError: the wait was too long.
        OSError: the directory cannot be written to.
    """
    deadline = time.monotonic() + timeout_s
    with shared_files.directory_of(target, below=below, make=True) as place:
        for attempt in itertools.count():
            owner = Owner.this_process()
            token = f"{owner.host}-{owner.pid}-{owner.started}-{next(_serial)}"
            with Draft(place, f".{target.name}.{token}.tmp") as own:
                try:
                    other = _other_writer(place, target.name, own.name)
                except FileNotFoundError:
                    other = "one that withdrew ours"
                if other is None:
                    yield functools.partial(_replace, own, target.name)
                    return
            if time.monotonic() > deadline:
                raise CacheWriteError(
                    f"other writers kept {str(target)!r} busy for {timeout_s:g} s, the last by {other!r}: "
                    "see whether that one hangs, or set QUARANTUNE_LOCK_TIMEOUT higher"
                )
            time.sleep(random.uniform(0.2, 1.0) * min(0.05, 0.001 * 2 ** min(attempt, 6)))


def _replace(announcement: Draft, name: str, content: bytes) -> None:
    try:
        announcement.replace(name, content)
    except FileNotFoundError:
        raise LeaseLostError from None


@contextlib.contextmanager
def side_lock(place: Directory, name: str, *, timeout_s: float) -> Iterator[None]:
    """Holds the lock on a side file; on a filesystem without locks, nothing.

    Raises:
        CacheWriteError: the wait was too long.
        OSError: the lock file cannot be opened.
    """
    deadline = time.monotonic() + timeout_s
    with SideLock(place, name) as lock:
        while lock.take() is False:
            if time.monotonic() > deadline:
                raise CacheWriteError(
                    f"the lock {str(place.path / name)!r} was held by others for {timeout_s:g} s: see who holds it, "
                    "or set QUARANTUNE_LOCK_TIMEOUT higher"
                )
            time.sleep(_POLL_S)
        yield


def unchanged_s(place: Directory, name: str, *, clock: str) -> float:
    """Returns for how many seconds a file has not changed.

    Both times are the filesystem's, so that the clocks of different hosts need not agree.

    Args:
        place: the directory.
        name: the file; of a symbolic link its own time counts.
        clock: a file of ours beside it, whose time is set to now.

    Raises:
        OSError: one of the two is not there.
    """
    place.touch(clock)
    return place.status(clock).st_mtime - place.status(name).st_mtime


def _other_writer(place: Directory, target: str, own: str) -> str | None:
    """Returns the announcement of another live writer, or None; removes those of dead ones."""
    # As in `unchanged_s`, with the time at which our own announcement was made.
    now = place.status(own).st_mtime
    prefix = f".{target}."
    for name in place.names():
        match = _ANNOUNCEMENT.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None or name == own:
            continue
        owner = Owner(host=match["host"], pid=int(match["pid"]), started=int(match["started"]))
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if not owner.is_dead() and abs(now - place.status(name).st_mtime) < _STALE_S:
                return name
            place.remove(name)
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner(Record):
    """One process of one host.

    Attributes:
        host: a token for the kernel and PID namespace in which `pid` is valid.
        pid: the process.
        started: its start time, in the kernel's ticks; 0 where that is not known.
    """

    host: Annotated[str, short_text]
    pid: Annotated[int, within(1, 2**31)]
    started: Annotated[int, within(0, 2**64)]

    @classmethod
    def this_process(cls) -> Owner:
        """Returns the calling process."""
        pid = os.getpid()
        status = _status(pid)
        return cls(host=_host_token(pid), pid=pid, started=status[1] if status else 0)

    def is_dead(self) -> bool:
        """Returns whether the process is dead for certain; False for one on another host."""
        if self.host != this_host():
            return False
        status = _status(self.pid)
        if status is None:
            return not _exists(self.pid)
        state, started = status
        return state in "ZX" or self.started not in (0, started)


def this_host() -> str:
    """Returns the token for this host, as in `Owner.host`."""
    return _host_token(os.getpid())


@functools.lru_cache(maxsize=1)
def _host_token(_pid: int) -> str:
    # Containers can share a host name and have different processes with one PID: the namespace distinguishes them. The
    # PID is the key of this function's cache, because a forked child may be in another namespace.
    return short_hash(f"{platform.node()}|{boot_id()}|{_pid_namespace()}")


def boot_id() -> str:
    """Returns the kernel's identifier of this boot; empty where there is none."""
    return machine.proc_text("/proc/sys/kernel/random/boot_id").strip()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, int] | None:
    fields = machine.process_status(pid)
    return (fields[0].decode(), int(fields[19])) if fields else None


def _exists(pid: int) -> bool:
    # /proc may hide other users' processes, so a missing entry does not prove that a process is dead.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False  # no process has such a number
    except PermissionError:
        return True
    return True
