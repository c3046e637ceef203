"""Checks of the machine: cores, memory, shared memory, temporary files, descriptors, processes, thread variables."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

from quarantune.doctor.check import Check, fail, ok, warn
from quarantune.host import machine
from quarantune.values.settings import Settings

_GIB = 1 << 30
_MIB = 1 << 20
_ROOT = Path("/")
_WAITING_CONFIGS = 16
"""About so many compiled configs wait for a CPU device at a time."""
_DESCRIPTORS_PER_CONFIG = 4
"""Descriptors that a config which compiles or waits takes in this process."""
_LEAST_DESCRIPTORS = 48
"""With less, not even a small sweep ends; measured with twelve configs on two cores."""
_LEAST_SHARED_BYTES = 64 * _MIB
"""The size of /dev/shm in a container that was given none."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def cores(settings: Settings) -> Check:
    """Returns how many cores may be used, and how many configs compile at a time."""
    usable, all_cores = machine.available_cpus(), os.cpu_count() or 1
    slots = compile_slots(settings)
    found = f"{usable} of {all_cores} may be used (affinity and cgroup quota); {slots} compile at a time"
    if usable == 1:
        return warn("cores", found, "give the job or the container more cores: configs compile one after another")
    return ok("cores", found)


def memory(settings: Settings) -> Check:
    """Returns how much memory is free, in total and for each worker."""
    free = machine.available_memory_bytes()
    slots = compile_slots(settings)
    found = f"{free / _GIB:.1f} GiB are free within the machine and its cgroups"
    if free < _GIB * slots:
        return warn(
            "memory",
            f"{found}, less than 1 GiB for each of {slots} compile workers",
            "free some, give the job more, or set QUARANTUNE_MAX_CPU_COUNT lower",
        )
    return ok("memory", found)


def shared_memory(*, directory: Path = _ROOT / "dev/shm") -> Check:
    """Returns how much room there is in /dev/shm."""
    name = str(directory)
    remedy = (
        "start the container with --shm-size=1g, or run `mount -o remount,size=1g /dev/shm`: quarantune itself does "
        "not use it, but NCCL (trials on several GPUs) and functions that share memory do, and die of SIGBUS"
    )
    try:
        status = os.statvfs(directory)
    except OSError as error:
        return warn(name, f"cannot be used ({error.strerror})", remedy)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{_amount(free)} of {_amount(size)} are free"
    return ok(name, found) if free >= _LEAST_SHARED_BYTES else warn(name, found, remedy)


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
    return ok(name, found) if free >= _GIB else warn(name, found, remedy)


def descriptors(settings: Settings) -> Check:
    """Returns how many descriptors this process may have open."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ok("descriptors", "this process may have any number open")
    in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 16
    needed = in_use + _DESCRIPTORS_PER_CONFIG * (compile_slots(settings) + _WAITING_CONFIGS) + 16
    found = f"this process may have {limit} open, and has {in_use}"
    if limit >= needed:
        return ok("descriptors", found)
    higher = "" if hard == resource.RLIM_INFINITY or hard >= needed else f" (the hard limit of {hard} has to rise too)"
    remedy = f"run `ulimit -n {max(1024, needed)}` first{higher}"
    judge = fail if limit < _LEAST_DESCRIPTORS else warn
    return judge("descriptors", f"{found}; a sweep here may need {needed}", remedy)


def processes(settings: Settings) -> Check:
    """Returns how many more processes this user may start."""
    left = machine.processes_left()
    if left is None:
        return ok("processes", "no limit holds for this user or in this cgroup")
    needed = 3 * compile_slots(settings) + 16  # a worker has threads, and compilers start some more
    number, limit = left
    found = f"{number} more processes and threads may be started, because {limit}"
    if number >= 16 * needed:
        return ok("processes", found)
    remedy = "raise `ulimit -u`, or pids.max of the cgroup (for a container: --pids-limit)"
    judge = fail if number < needed else warn
    return judge("processes", f"{found}; each of {compile_slots(settings)} workers may need dozens", remedy)


def thread_variables() -> Check:
    """Returns the variables that keep libraries from using all cores."""
    name = "thread variables"
    usable = machine.available_cpus()
    low = [
        f"{variable}={value}"
        for variable in _THREADS
        if (value := os.environ.get(variable, "").strip()) and (not value.isdigit() or int(value) < usable)
    ]
    if "--xla_cpu_multi_thread_eigen=false" in (flags := os.environ.get("XLA_FLAGS", "")):
        low.append("XLA_FLAGS=--xla_cpu_multi_thread_eigen=false")
    if low:
        return warn(
            name,
            f"{', '.join(low)} while {usable} cores may be used: workers take the variables over, so NumPy and C "
            "functions are measured with that many threads",
            "unset them, unless the program will run with them too (Dask's and Ray's workers set OMP_NUM_THREADS=1)",
        )
    return ok(name, f"none limits the {usable} cores" + (f"; XLA_FLAGS={flags}" if flags else ""))


def compile_slots(settings: Settings) -> int:
    """Returns how many configs compile at a time under these settings."""
    return machine.compile_slots(
        utilization=settings.cpu_utilization, count=settings.cpu_count, max_count=settings.max_cpu_count
    )


def _amount(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"
