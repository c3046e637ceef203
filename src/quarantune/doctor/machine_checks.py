"""Checks of the machine: cores, memory, limits, variables, the cache directory with its locks, JAX, and the devices."""

from __future__ import annotations

import contextlib
import csv
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import psutil

from quarantune.cache.tuning_cache import TuningCache
from quarantune.devices import discovery, targets
from quarantune.devices.device import cpu_device
from quarantune.doctor.check import Check, fail, first_line, judged, ok, warn
from quarantune.host import machine, origins
from quarantune.host.shared_files import Directory, SideLock
from quarantune.values import versions
from quarantune.values.settings import Settings
from quarantune.values.trial import SandboxError

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


# --- JAX and the devices: versions, plugins, clocks and other tenants -----------------------------------------

_HARDWARE = {
    "NVIDIA GPU": (("/proc/driver/nvidia/version", "/dev/nvidiactl"), "cuda", "jax[cuda13]"),
    "TPU": (("/dev/accel0",), "tpu", "jax[tpu]"),
}
"""For each kind of device: the files by which its driver is seen, the name of JAX's plugin, and how to install it."""
_HINDERED = {
    0x04: "the power cap",
    0x08: "a hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}
"""NVML's reasons for a lower clock that other load or the machine's cooling causes."""
_TENANT_MIB = 1024
"""Memory in use on a device, in MiB, from which on another program is taken to run there."""
_QUERY = "index,name,driver_version,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,memory.used,utilization.gpu"
_SMI_S = 30.0


def jax_versions() -> Check:
    """Returns the versions of JAX, its library and its plugins, which belong together."""
    found = versions.compilers("cpu") | versions.compilers("cuda") | versions.compilers("tpu")
    found |= {"driver": driver} if (driver := versions.versions().get("nvidia_driver")) else {}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    other = [name for name, version in found.items() if name.startswith("jax-") and version != jax.__version__]
    remedy = f"run `pip install {' '.join(f'{name}=={jax.__version__}' for name in other)}`"
    return judged(
        "versions", f"{text}: {' and '.join(other)} differ from jax" if other else text, remedy, is_good=not other
    )


def plugins() -> Iterator[Check]:
    """Yields whether JAX has a plugin for each kind of device whose driver is here."""
    for kind, (files, plugin, package) in _HARDWARE.items():
        if not any(map(os.path.exists, files)):
            continue
        chosen = jax.config.values["jax_platforms"] or ""
        if not targets.has_plugin(plugin):
            found = f"its driver is here, but JAX's {plugin} plugin is not installed, so JAX does not see the device"
            remedy = f"run `pip install '{package}'`, or set JAX_PLATFORMS=cpu if the CPU is meant"
            yield ok(kind, f"{found}; JAX_PLATFORMS=cpu") if chosen == "cpu" else fail(kind, found, remedy)
        elif chosen and plugin not in chosen and "gpu" not in chosen:
            found = f"JAX is set to use {chosen!r} only and does not see it"
            yield warn(kind, found, "unset JAX_PLATFORMS to use it")
        else:
            yield ok(kind, f"its driver and JAX's {plugin} plugin are here")


def devices() -> Iterator[Check]:
    """Yields the devices that JAX finds, asked of a worker; no backend is initialised here."""
    command = "run `python -c 'import jax; jax.devices()'`, which shows"
    try:
        backend = discovery.accelerators()
    except SandboxError as error:
        yield fail("devices", first_line(error), f"{command} the whole error, or set JAX_PLATFORMS=cpu")
        return
    if backend is None or all(device.platform == "cpu" for device in backend.devices):
        found = f"the CPU, {cpu_device().kind}"
        missing = [kind for kind in _HARDWARE if backend is not None and _should_be_found(kind)]
        if missing:
            found = f"only {found}, although the driver and JAX's plugin for the {missing[0]} are here"
        remedy = f"{command} why JAX does not use the device"
        yield judged("devices", found, remedy, is_good=not missing, is_needed=True)
        return
    yield ok("devices", ", ".join(f"{device.platform}:{device.index} {device.kind}" for device in backend.devices))
    if any(device.platform == "cuda" for device in backend.devices):
        yield from nvidia()
        if backend.config_text is None:
            found = "this JAX gives no description of the GPU, so each compile worker makes a context on it"
            yield warn("compiling without the device", found, "install a JAX version that gives one (0.10 or newer)")


def nvidia() -> list[Check]:
    """Returns the clocks of NVIDIA GPUs, and whether other programs use them."""
    name = "clocks and tenants"
    rows = _smi(f"--query-gpu={_QUERY}") or _smi(f"--query-gpu={_QUERY.replace('throttle', 'event')}")
    if not rows:
        return [warn(name, "nvidia-smi does not answer, so neither is known", "put nvidia-smi on PATH and run again")]
    others = [row for row in _smi("--query-compute-apps=gpu_uuid,pid,used_memory") if row[1:2] != [str(os.getpid())]]
    return [_nvidia(row, others) for row in rows if len(row) == len(_QUERY.split(","))]


def _nvidia(row: list[str], others: list[list[str]]) -> Check:
    index, _, _, clock, most, reasons, used, busy = row
    name = f"clocks and tenants of GPU {index}"
    found = f"{clock} of {most} MHz, {used} MiB in use, {busy}% busy"
    try:
        mask = int(reasons, 16)
    except ValueError:
        mask = 0
    if hindered := [reason for bit, reason in _HINDERED.items() if mask & bit]:
        return warn(name, f"{found}; slowed down by {' and '.join(hindered)}", "wait until it is cool and idle")
    if _whole(used) > _TENANT_MIB or _whole(busy) > 0:
        pids = f", processes {', '.join(row[1] for row in others)}" if others else ""
        found += f": another program uses it{pids}, which makes times scatter and leaves less memory"
        return warn(name, found, "end it, or choose another GPU with QUARANTUNE_DEVICES")
    return ok(name, f"{found}; nobody else uses it")


def _smi(query: str) -> list[list[str]]:
    """Returns the rows that nvidia-smi prints; none where it is missing or refuses the query."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def _should_be_found(kind: str) -> bool:
    files, plugin, _ = _HARDWARE[kind]
    chosen = jax.config.values["jax_platforms"] or plugin
    return any(map(os.path.exists, files)) and targets.has_plugin(plugin) and plugin in chosen


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0
