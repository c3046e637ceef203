"""Checks of the cache directory: whether it can be written, and whether locks in it keep processes apart."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quarantune.cache import file_lease
from quarantune.cache.tuning_cache import TuningCache
from quarantune.doctor.check import Check, fail, first_line, ok, warn
from quarantune.host import interpreter, proc
from quarantune.host.shared_files import Directory
from quarantune.values.settings import Settings

_LOCKS = "cache locks"
_MOST_SHOWN = 3
_PATIENCE_S = 60.0
_LEAST_FREE_BYTES = 16 << 20
_TRY = """
import fcntl, sys
try:
    fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("refused")
else:
    print("granted")
"""
"""The program of a second process, whose standard input is a file that the first one has locked."""


def directory(settings: Settings) -> list[Check]:
    """Returns whether results can be saved, whether locks work, and whether the saved results can be read."""
    if settings.disable_cache:
        return [
            warn(
                "cache directory",
                "QUARANTUNE_DISABLE_CACHE is set: nothing is read or saved, and every process tunes",
                "unset it, unless that is wanted",
            )
        ]
    try:
        with _probe_directory(settings.cache_dir) as probe:
            checks = [_room(settings.cache_dir), _locks(probe)]
    except OSError as error:
        return [
            fail(
                "cache directory",
                f"{str(settings.cache_dir)!r} cannot be written ({error.strerror}): no result is kept",
                "make it writable, or set QUARANTUNE_CACHE_DIR to a directory that is",
            )
        ]
    return [*checks, _content(settings.cache_dir)]


def _room(path: Path) -> Check:
    free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    found = f"{str(path)!r} can be written, {free / (1 << 30):.1f} GiB are free"
    if free < _LEAST_FREE_BYTES:
        return fail("cache directory", found, "make room, or set QUARANTUNE_CACHE_DIR to another disk")
    return ok("cache directory", found)


def _locks(probe: Path) -> Check:
    """Returns whether a lock that this process holds keeps another process out."""
    kind = filesystem(probe)
    place = f" ({kind})" if kind else ""
    with Directory(probe) as opened:
        fd = opened.open("lock", file_lease.LOCK)
        second = opened.open("lock", file_lease.LOCK)  # the lock belongs to the open file, not to the name
    try:
        if file_lease.try_flock(fd) is None:
            return warn(
                _LOCKS,
                f"the filesystem{place} has none, so writers use a file in place of a lock, which is slower",
                "mount it with locks (Lustre: -o flock; NFS: with lockd), or set QUARANTUNE_CACHE_DIR to another disk",
            )
        said = _try_in_another_process(second)
    finally:
        os.close(second)
        os.close(fd)
    if said == "refused":
        return ok(_LOCKS, f"a lock keeps another process of this machine out{place}")
    if said == "granted":
        return warn(
            _LOCKS,
            f"a lock has no effect{place}: two processes held it at a time. Nothing is lost, since writers also "
            "announce themselves by files, but a job that died keeps others waiting for longer",
            "mount the filesystem with locks (Lustre: -o flock, not -o localflock; NFS: without nolock), or set "
            "QUARANTUNE_CACHE_DIR to another disk",
        )
    return warn(_LOCKS, f"the second process that tries a lock failed: {said}", "see whether Python starts processes")


def _try_in_another_process(fd: int) -> str:
    try:
        command = [interpreter.path(), "-c", _TRY]
        done = subprocess.run(command, stdin=fd, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return first_line(error)
    return done.stdout.strip() or (done.stderr.strip().splitlines() or ["it said nothing"])[-1]


def _content(path: Path) -> Check:
    """Returns whether the entries can be read."""
    cache = TuningCache(path)
    problems = cache.problems()
    if not problems:
        return ok("cached results", f"{len(cache)} results, all readable")
    more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
    return warn(
        "cached results",
        "; ".join(problems[:_MOST_SHOWN]) + more,
        "nothing damaged is used; look at the files, or delete them",
    )


@contextlib.contextmanager
def _probe_directory(path: Path) -> Iterator[Path]:
    """Makes a directory inside the cache directory, which is itself made if necessary; removes what it made."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    Directory(path, make=True).close()
    try:
        with tempfile.TemporaryDirectory(dir=path, prefix=".doctor-") as probe:
            yield Path(probe)
    finally:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()


def filesystem(path: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Returns the type of the filesystem that holds a path, such as `nfs4`; empty where it is not known."""
    resolved, best, kind = path.resolve(), -1, ""
    for line in proc.lines(mounts):
        before, _, after = line.partition(b" - ")
        escaped = before.split(b" ")[4]
        point = Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), escaped)))
        # A later mount covers an earlier one at the same point.
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0].decode()
    return kind
