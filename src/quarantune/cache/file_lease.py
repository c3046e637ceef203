"""Exclusion between processes by files: one writer at a time to a shared file, also where locks have no effect.

Two mechanisms keep processes apart, here and in `claims`. A lock on a side file, which the kernel releases when its
holder dies. And, since on some shared filesystems locks have no effect or bind one host only, a file that names its
owner: it counts until its owner is dead for certain, or until the file has not changed for so long that the owner must
be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

from quarantune.cache import content
from quarantune.cache.errors import CacheWriteError
from quarantune.cache.owners import Owner

_STALE_S = 30.0
"""An announcement that has not changed for this long no longer counts; a lease is held for milliseconds."""
_NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
"""The errors of filesystems without locks."""
_ANNOUNCEMENT = re.compile(r"(?P<host>[0-9a-f]+)-(?P<pid>\d+)-(?P<started>\d+)-\d+\.tmp")
_serial = itertools.count()


class LeaseLostError(Exception):
    """Another writer took this lease for abandoned and withdrew it: nothing was written; acquire another."""


@dataclasses.dataclass(frozen=True)
class FileLease:
    """The right to replace one file, for as long as the block of `announced` is open.

    Attributes:
        target: the file.
        announcement: the temporary file for the new content; its existence announces a writer to all others.
    """

    target: Path
    announcement: Path

    def replace(self, content: bytes) -> None:
        """Makes `content` the file's content, all of it or none, safe from a crash of the machine.

        Raises:
            LeaseLostError: another writer withdrew the lease; nothing was written.
            OSError: the disk or the directory refused; nothing was written.
        """
        with self._unless_withdrawn():
            fd = os.open(self.announcement, os.O_WRONLY | os.O_CLOEXEC)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.replace(self.announcement, self.target)
        _sync_directory(self.target.parent)

    @contextlib.contextmanager
    def _unless_withdrawn(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if not self.target.parent.is_dir():
                raise
            raise LeaseLostError from None


@contextlib.contextmanager
def announced(target: Path, *, timeout_s: float) -> Iterator[FileLease]:
    """Waits until no other writer has announced itself for a file; the caller holds the side lock of the writers.

    Writers queue on the lock of a side file that is never removed. In case that lock has no effect, a writer also
    announces itself: it creates its temporary file first, then looks for those of other writers, and backs off if
    there is one; it reads only when it has found itself alone. Of two writers one created its file before the other
    looked, so at most one goes on, which relies only on the order of operations in a directory. The announcement of a
    writer whose process is gone, or that has not changed for 30 s, is removed. Should that writer live after all, its
    replacement fails for want of that file, and it starts over.

    Args:
        target: the file, whose directory exists.
        timeout_s: the longest wait in seconds.

    Yields:
        The lease, released when the block ends.

    Raises:
        CacheWriteError: the wait was too long.
        OSError: the directory cannot be written to.
    """
    announcement = _announce(target, deadline=time.monotonic() + timeout_s, timeout_s=timeout_s)
    try:
        yield FileLease(target, announcement)
    finally:
        with contextlib.suppress(OSError):
            announcement.unlink(missing_ok=True)


@contextlib.contextmanager
def side_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Holds the lock on a side file; on a filesystem without locks, the existence of a file beside it.

    Raises:
        CacheWriteError: the wait was too long.
        OSError: the lock file cannot be opened.
    """
    import filelock  # Only writers need it, and importing it takes longer than a look-up.

    lock: filelock.BaseFileLock
    if _has_flock(path):
        lock = filelock.UnixFileLock(path)
    else:
        soft_path = path.with_suffix(".softlock")
        _drop_if_abandoned(soft_path, clock=path)
        lock = filelock.SoftFileLock(soft_path)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=0.005)
    except filelock.Timeout:
        raise CacheWriteError(
            f"the lock {str(lock.lock_file)!r} was held by others for {timeout_s:g} s: see who holds it, "
            "or set QUARANTUNE_LOCK_TIMEOUT higher"
        ) from None
    try:
        yield
    finally:
        # The work under the lock is done: an error while releasing it must not look like a failure of that work.
        with contextlib.suppress(OSError):
            lock.release()


def open_lock(path: Path) -> int:
    """Opens the side file of a lock, made if necessary, and returns the descriptor."""
    return content.open_shared(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)


def try_flock(fd: int, *, shared: bool = False) -> bool | None:
    """Locks a file if nobody else has, without waiting.

    Args:
        fd: the file.
        shared: whether others may hold a shared lock at the same time.

    Returns:
        Whether the lock was granted; None where the filesystem has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def unchanged_s(path: Path, *, clock: Path) -> float:
    """Returns for how many seconds a file has not changed.

    Both times are the filesystem's, so that the clocks of different hosts need not agree.

    Args:
        path: the file; of a symbolic link its own time counts.
        clock: a file of ours beside it, whose time is set to now.

    Raises:
        OSError: one of the two is not there.
    """
    os.utime(clock)
    return clock.stat().st_mtime - path.lstat().st_mtime


def _has_flock(path: Path) -> bool:
    fd = open_lock(path)
    try:
        return try_flock(fd, shared=True) is not None
    except OSError:
        return True  # filelock meets the same error
    finally:
        os.close(fd)


def _drop_if_abandoned(soft_path: Path, *, clock: Path) -> None:
    # filelock breaks a soft lock whose owner died on this host, and cannot judge one of another host. By its age, such
    # a lock may go too, because the announcements keep writers apart even if its owner lives.
    with contextlib.suppress(FileNotFoundError):
        if unchanged_s(soft_path, clock=clock) > _STALE_S:
            soft_path.unlink()


def _announce(target: Path, *, deadline: float, timeout_s: float) -> Path:
    """Creates this writer's announcement once no other writer's is there, and returns it."""
    owner = Owner.this_process()
    for attempt in itertools.count():
        token = f"{owner.host}-{owner.pid}-{owner.started}-{next(_serial)}"
        own = target.with_name(f".{target.name}.{token}.tmp")
        os.close(content.open_shared(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        try:
            other = _other_writer(target, own)
        except FileNotFoundError:
            other = "one that withdrew ours"
        except BaseException:
            own.unlink(missing_ok=True)
            raise
        if other is None:
            return own
        own.unlink(missing_ok=True)
        if time.monotonic() > deadline:
            raise CacheWriteError(
                f"other writers kept {str(target)!r} busy for {timeout_s:g} s, the last by {other!r}: "
                "see whether that one hangs, or set QUARANTUNE_LOCK_TIMEOUT higher"
            )
        time.sleep(random.uniform(0.2, 1.0) * min(0.05, 0.001 * 2 ** min(attempt, 6)))
    raise AssertionError("unreachable")


def _other_writer(target: Path, own: Path) -> str | None:
    """Returns the announcement of another live writer, or None; removes those of dead ones."""
    # As in `unchanged_s`, with the time at which our own announcement was made.
    now = own.stat().st_mtime
    prefix = f".{target.name}."
    for name in os.listdir(target.parent):
        match = _ANNOUNCEMENT.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None or name == own.name:
            continue
        other = target.with_name(name)
        owner = Owner(host=match["host"], pid=int(match["pid"]), started=int(match["started"]))
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            if not owner.is_dead() and abs(now - other.lstat().st_mtime) < _STALE_S:
                return name
            other.unlink()  # unlinking a directory fails: one with that name announces nothing
    return None


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
