"""One writer at a time to one shared file, also where locks do nothing: side locks and announcements."""

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
"""An announcement that has not changed for this long no longer counts; a turn takes milliseconds."""
NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
"""What filesystems say that have no locks."""
_ANNOUNCEMENT = re.compile(r"(?P<host>[0-9a-f]+)-(?P<pid>\d+)-(?P<started>\d+)-\d+\.tmp")
_serial = itertools.count()


class TurnLostError(Exception):
    """Another writer took this turn for abandoned and withdrew it: nothing was written, take another."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """The right to replace one file, for as long as `take_turn` is open.

    Attributes:
        target: the file.
        announcement: the temporary file that the new content goes through; to others it says that a writer is
            at work.
    """

    target: Path
    announcement: Path

    def replace(self, content: bytes) -> None:
        """Makes `content` the file's content, all of it or none, safe from a crash of the machine.

        Raises:
            TurnLostError: the turn was withdrawn by another writer; nothing was written.
            OSError: the disk or the directory would not have it; nothing was written.
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
            raise TurnLostError from None


@contextlib.contextmanager
def take_turn(target: Path, *, timeout_s: float) -> Iterator[Turn]:
    """Waits for this writer's turn at a file.

    Two things keep writers apart. A lock on a side file that is never removed, so that they queue. And, since
    on some shared filesystems a lock is silently none or binds one host only, an announcement: a writer
    creates its temporary file first, then looks whether any other writer's is there, and backs off if so; it
    reads only when it has found itself alone. Of two writers one created its file before the other looked, so
    at most one goes on, by nothing but the directory's own order. A writer that died is known by its process
    being gone, or by its file not having changed for 30 s; its announcement is removed, and should it live
    after all, its replacement then fails for want of that file, and it starts over.

    Args:
        target: the file; its directory is made if it is not there.
        timeout_s: longest wait in seconds.

    Yields:
        The turn, over when the block ends.

    Raises:
        CacheWriteError: the wait was too long.
        OSError: the directory cannot be written to.
    """
    deadline = time.monotonic() + timeout_s
    target.parent.mkdir(parents=True, exist_ok=True)
    with side_lock(target.with_name(f".{target.name}.lock"), timeout_s=timeout_s):
        announcement = _announce(target, deadline=deadline, timeout_s=timeout_s)
        try:
            yield Turn(target, announcement)
        finally:
            with contextlib.suppress(OSError):
                announcement.unlink(missing_ok=True)


@contextlib.contextmanager
def side_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Holds the lock on a side file; where the filesystem has none, the existence of a file beside it.

    Raises:
        CacheWriteError: the wait was too long.
        OSError: the lock file cannot be opened.
    """
    import filelock  # Only writers need it, and it takes longer to import than a look-up takes.

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
        # What the lock protected is done: failing to let go of it must not look like failing to do it.
        with contextlib.suppress(OSError):
            lock.release()


def _has_flock(path: Path) -> bool:
    fd = content.open_shared(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_FLOCK
    finally:
        os.close(fd)
    return True


def _drop_if_abandoned(soft_path: Path, *, clock: Path) -> None:
    # filelock breaks a soft lock whose owner died on this host. One of another host it cannot judge; by age
    # it can go too, as the announcements keep writers apart even if its owner lives.
    os.utime(clock)
    with contextlib.suppress(FileNotFoundError):
        if clock.stat().st_mtime - soft_path.stat().st_mtime > _STALE_S:
            soft_path.unlink()


def _announce(target: Path, *, deadline: float, timeout_s: float) -> Path:
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
    # Both times come from the filesystem's clock, so that hosts need not agree on the time.
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
            other.unlink()  # a directory by that name announces nothing
    return None


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
