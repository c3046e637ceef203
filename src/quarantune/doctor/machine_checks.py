"""Checks of the machine: cores, memory, temporary files, limits, variables, and the cache directory with its locks."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from quarantune.cache.tuning_cache import TuningCache
from quarantune.doctor.check import Check, fail, first_line, judged, ok, warn
from quarantune.host import machine, origins
from quarantune.host.shared_files import Directory, SideLock
from quarantune.values.settings import Settings

_GIB = 1 << 30
_MIB = 1 << 20
_WAITING_CONFIGS = 16
"""About so many compiled configs wait for a CPU device at a time."""
_DESCRIPTORS_PER_CONFIG = 4
"""Descriptors that a config which compiles or waits takes in this process."""
_LEAST_DESCRIPTORS = 48
"""With less, not even a small sweep ends; measured with twelve configs on two cores."""
_LEAST_SHARED_BYTES = 64 * _MIB
"""The size of /dev/shm in a container that was given none."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
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


def cores(settings: Settings) -> Check:
    """Returns how many cores may be used, and how many configs compile at a time."""
    usable, slots = machine.available_cpus(), compile_slots(settings)
    found = f"{usable} of {os.cpu_count() or 1} may be used (affinity and cgroup quota); {slots} compile at a time"
    remedy = "give the job or the container more cores: configs compile one after another"
    return judged("cores", found, remedy, is_good=usable > 1)


def memory(settings: Settings) -> Check:
    """Returns how much memory is free, in total and for each worker."""
    free, slots = machine.available_memory_bytes(), compile_slots(settings)
    is_good = free >= _GIB * slots
    few = "" if is_good else f", less than 1 GiB for each of {slots} compile workers"
    found = f"{free / _GIB:.1f} GiB are free within the machine and its cgroups{few}"
    remedy = "free some, give the job more, or set QUARANTUNE_MAX_CPU_COUNT lower"
    return judged("memory", found, remedy, is_good=is_good)


def shared_memory(*, directory: Path = Path("/dev/shm")) -> Check:
    """Returns how much room there is in /dev/shm."""
    name = str(directory)
    remedy = (
        "start the container with --shm-size=1g, or run `mount -o remount,size=1g /dev/shm`: quarantune itself does "
        "not use it, but NCCL (trials on several GPUs) and functions that share memory do, and die of SIGBUS"
    )
    try:
        size, _, free = shutil.disk_usage(directory)
    except OSError as error:
        return warn(name, f"cannot be used ({error.strerror})", remedy)
    found = f"{_amount(free)} of {_amount(size)} are free"
    return judged(name, found, remedy, is_good=free >= _LEAST_SHARED_BYTES)


def temporary_files() -> Check:
    """Returns whether large arguments can be written to a temporary file."""
    name = "temporary files"
    remedy = "make room, or set TMPDIR to a directory that is writable: arguments that do not fit memory are put there"
    try:
        with tempfile.TemporaryFile(prefix="quarantune-"):
            free = shutil.disk_usage(tempfile.gettempdir()).free
    except OSError as error:
        return warn(name, f"none can be written ({error.strerror})", remedy)
    found = f"{_amount(free)} are free in {tempfile.gettempdir()!r}"
    return judged(name, found, remedy, is_good=free >= _GIB)


def descriptors(settings: Settings) -> Check:
    """Returns how many descriptors this process may have open."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ok("descriptors", "this process may have any number open")
    in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 16
    needed = in_use + _DESCRIPTORS_PER_CONFIG * (compile_slots(settings) + _WAITING_CONFIGS) + 16
    found, is_good = f"this process may have {limit} open, and has {in_use}", limit >= needed
    found += "" if is_good else f"; a sweep here may need {needed}"
    higher = "" if hard == resource.RLIM_INFINITY or hard >= needed else f" (the hard limit of {hard} has to rise too)"
    remedy = f"run `ulimit -n {max(1024, needed)}` first{higher}"
    return judged("descriptors", found, remedy, is_good=is_good, is_needed=limit < _LEAST_DESCRIPTORS)


def processes(settings: Settings) -> Check:
    """Returns how many more processes this user may start."""
    left = machine.processes_left()
    if left is None:
        return ok("processes", "no limit holds for this user or in this cgroup")
    slots = compile_slots(settings)
    needed = 3 * slots + 16  # a worker has threads, and compilers start some more
    number, limit = left
    found, is_good = f"{number} more processes and threads may be started, because {limit}", number >= 16 * needed
    found += "" if is_good else f"; each of {slots} workers may need dozens"
    remedy = "raise `ulimit -u`, or pids.max of the cgroup (for a container: --pids-limit)"
    return judged("processes", found, remedy, is_good=is_good, is_needed=number < needed)


def thread_variables() -> Check:
    """Returns the variables that keep libraries from using all cores."""
    usable, flags = machine.available_cpus(), os.environ.get("XLA_FLAGS", "")
    low = [
        f"{variable}={value}"
        for variable in _THREADS
        if (value := os.environ.get(variable, "").strip()) and (not value.isdigit() or int(value) < usable)
    ]
    if _ONE_THREAD in flags:
        low.append(f"XLA_FLAGS={_ONE_THREAD}")
    if not low:
        return ok("thread variables", f"none limits the {usable} cores" + (f"; XLA_FLAGS={flags}" if flags else ""))
    return warn(
        "thread variables",
        f"{', '.join(low)} while {usable} cores may be used: workers take the variables over, so NumPy and C "
        "functions are measured with that many threads",
        "unset them, unless the program will run with them too (Dask's and Ray's workers set OMP_NUM_THREADS=1)",
    )


def compile_slots(settings: Settings) -> int:
    """Returns how many configs compile at a time under these settings."""
    return machine.compile_slots(
        utilization=settings.cpu_utilization, count=settings.cpu_count, max_count=settings.max_cpu_count
    )


def _amount(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


# --- the cache directory ---


def cache_directory(settings: Settings) -> list[Check]:
    """Returns whether results can be saved, whether locks work, and whether the saved results can be read."""
    if settings.disable_cache:
        found = "QUARANTUNE_DISABLE_CACHE is set: nothing is read or saved, and every process tunes"
        return [warn("cache directory", found, "unset it, unless that is wanted")]
    try:
        with _probe_directory(settings.cache_dir) as probe:
            checks = [_room(settings.cache_dir), _locks(probe)]
    except OSError as error:
        found = f"{str(settings.cache_dir)!r} cannot be written ({error.strerror}): no result is kept"
        return [fail("cache directory", found, "make it writable, or set QUARANTUNE_CACHE_DIR to a directory that is")]
    return [*checks, _content(settings.cache_dir)]


def _room(path: Path) -> Check:
    free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    found = f"{str(path)!r} can be written, {free / (1 << 30):.1f} GiB are free"
    remedy = "make room, or set QUARANTUNE_CACHE_DIR to another disk"
    return judged("cache directory", found, remedy, is_good=free >= _LEAST_FREE_BYTES, is_needed=True)


def _locks(probe: Path) -> Check:
    """Returns whether a lock that this process holds keeps another process out."""
    kind = filesystem(probe)
    place = f" ({kind})" if kind else ""
    with Directory(probe) as opened, SideLock(opened, "lock") as lock, SideLock(opened, "lock") as second:
        if lock.take() is None:
            return warn(
                _LOCKS,
                f"the filesystem{place} has none, so writers use a file in place of a lock, which is slower",
                "mount it with locks (Lustre: -o flock; NFS: with lockd), or set QUARANTUNE_CACHE_DIR to another disk",
            )
        said = _try_in_another_process(second.fd)  # the lock belongs to the open file, not to the name
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
        command = [origins.interpreter(), "-c", _TRY]
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
    found = "; ".join(problems[:_MOST_SHOWN]) + more
    return warn("cached results", found, "nothing damaged is used; look at the files, or delete them")


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


def filesystem(path: Path) -> str:
    """Returns the type of the filesystem that holds a path, such as `nfs4`; empty where it is not known."""
    resolved = path.resolve()
    holding = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    # A later mount covers an earlier one at the same point.
    nearest = max(reversed(holding), key=lambda mount: len(Path(mount.mountpoint).parts), default=None)
    return "" if nearest is None else str(nearest.fstype)
