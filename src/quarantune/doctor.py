"""Checks this machine for tuning. Each finding about an obstacle has a remedy."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import enum
import functools
import importlib.util
import logging
import os
import resource
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

import quarantune
from quarantune.api.autotune import AutoTuner
from quarantune.api.tuning_cache import TuningCache
from quarantune.devices import discovery, targets
from quarantune.devices.discovery import cpu_device
from quarantune.functions import versions
from quarantune.host import machine
from quarantune.host.process import environment_variables, in_sandbox
from quarantune.host.shared_files import Directory, advice, side_lock
from quarantune.jax_internals import jax_backends
from quarantune.values import blocks
from quarantune.values.blocks import SettingKeywords
from quarantune.values.errors import SandboxError, TuningFailedError
from quarantune.values.settings import Settings
from quarantune.values.texts import first_line
from quarantune.values.trial import Outcome, Trial

__all__ = ["Check", "Status", "failed", "run"]


def __dir__() -> list[str]:
    return __all__


_GIB = 1 << 30
_MIB = 1 << 20
_PATIENCE_S = 60.0
"""Longest wait in seconds for a config of a trial."""


class Status(enum.StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARN = "warn"
    """Tuning works, but is slower, less precise or less safe than it could be."""
    FAIL = "fail"
    """Tuning does not work, or does not reach the device or the cache that it is meant for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One finding.

    Attributes:
        name: the subject of the check.
        status: the outcome.
        found: the finding, in a sentence without a full stop.
        remedy: the way to put it right; empty for `ok`.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Returns the finding as a JSON object."""
        return dataclasses.asdict(self) | {"status": self.status.value}


def failed(checks: Iterable[Check]) -> bool:
    """Returns whether an essential check failed."""
    return any(check.status is Status.FAIL for check in checks)


def run(*, on_check: Callable[[Check], None] | None = None) -> list[Check]:
    """Returns the findings about this machine. It takes some 10 s, mostly for real sweeps in the sandbox.

    It saves nothing. At its end this process has initialised JAX's backend.

    Args:
        on_check: called at once with each finding.
    """
    checks = []
    for check in _all():
        checks.append(check)
        if on_check is not None:
            on_check(check)
    return checks


def _all() -> Iterator[Check]:
    """Makes all checks, in the order of the page that people read."""
    try:
        settings = blocks.current()
    except ValueError as error:
        yield fail("settings", first_line(error), "correct the variable, or unset it")
        settings = Settings()
    if in_sandbox():
        yield fail("sandbox", "this process is a worker of another sweep", "run the doctor outside of a tuned function")
        return
    steps: dict[str, Callable[[], Check | Iterable[Check]]] = {
        "versions": jax_versions,
        "plugins": plugins,
        "cores": lambda: cores(settings),
        "memory": lambda: memory(settings),
        "/dev/shm": shared_memory,
        "temporary files": temporary_files,
        "descriptors": lambda: descriptors(settings),
        "processes": lambda: processes(settings),
        "thread variables": thread_variables,
        "cache directory": lambda: cache_directory(settings),
        "devices": devices,
        "ranks": lambda: ranks(settings),
        "trials": trials,
        "TPU compiler": tpu_compiler,
    }
    for name, step in steps.items():
        try:
            found = step()
            yield from [found] if isinstance(found, Check) else found
        except Exception as error:  # the other checks may still work
            yield warn(name, f"the check itself failed: {first_line(error)}", "report this as an error of quarantune")


def ok(name: str, found: str) -> Check:
    """Returns a finding without a remedy."""
    return Check(name=name, status=Status.OK, found=found)


def warn(name: str, found: str, remedy: str) -> Check:
    """Returns a finding that makes tuning worse, but not impossible."""
    return Check(name=name, status=Status.WARN, found=found, remedy=remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    """Returns a finding that prevents tuning."""
    return Check(name=name, status=Status.FAIL, found=found, remedy=remedy)


def _judged(name: str, found: str, remedy: str, *, is_good: bool, is_needed: bool = False) -> Check:
    """Returns `ok` for a good finding. For a bad one returns `fail` if tuning needs it, and `warn` otherwise."""
    return ok(name, found) if is_good else (fail if is_needed else warn)(name, found, remedy)


# --- JAX: its versions, and its plugins for the devices that are here ---

_NVIDIA_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
_HARDWARE: dict[str, tuple[Callable[[], bool], str, str]] = {
    "NVIDIA GPU": (lambda: any(map(os.path.exists, _NVIDIA_DRIVER)), "cuda", "jax[cuda13]"),
    "TPU": (jax_backends.has_tpu, "tpu", "jax[tpu]"),
}
"""For each kind of device: a test of its presence, the name of JAX's plugin, and the package to install."""


def jax_versions() -> Check:
    """Returns the versions of JAX, its library and its plugins, which belong together."""
    found = versions.compilers("cpu") | versions.compilers("cuda") | versions.compilers("tpu")
    found |= {"driver": driver} if (driver := versions.versions().get("nvidia_driver")) else {}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    other = [name for name, version in found.items() if name.startswith("jax-") and version != jax.__version__]
    text += f": {' and '.join(other)} differ from jax" if other else ""
    remedy = f"run `pip install {' '.join(f'{name}=={jax.__version__}' for name in other)}`"
    return _judged("versions", text, remedy, is_good=not other)


def plugins() -> Iterator[Check]:
    """Yields whether JAX has a plugin for each kind of device whose driver is here."""
    for kind, plugin, package in _hardware():
        if not targets.has_plugin(plugin):
            found = f"its driver is here, but JAX's {plugin} plugin is not installed, so JAX does not see the device"
            remedy = f"run `pip install '{package}'`, or set JAX_PLATFORMS=cpu if the CPU is meant"
            is_meant = jax.config.values["jax_platforms"] == "cpu"
            yield ok(kind, f"{found}; JAX_PLATFORMS=cpu") if is_meant else fail(kind, found, remedy)
        elif not _is_chosen(plugin):
            found = f"JAX is set to use {jax.config.values['jax_platforms']!r} only and does not see it"
            yield warn(kind, found, "unset JAX_PLATFORMS to use it")
        else:
            yield ok(kind, f"its driver and JAX's {plugin} plugin are here")


def _hardware() -> list[tuple[str, str, str]]:
    """Returns each kind of device whose driver is here, with the name and the package of JAX's plugin."""
    return [(kind, plugin, package) for kind, (is_here, plugin, package) in _HARDWARE.items() if is_here()]


def _is_chosen(plugin: str) -> bool:
    """Returns whether JAX may use the devices of a plugin; `gpu` is its name for CUDA and ROCm."""
    chosen = jax.config.values["jax_platforms"]
    return not chosen or bool({plugin, "gpu" if plugin == "cuda" else plugin} & set(chosen.split(",")))


# --- the machine: cores, memory, limits and variables ---

_WAITING_CONFIGS = 16
"""Approximate number of compiled configs that wait for a CPU device at a time."""
_DESCRIPTORS_PER_CONFIG = 4
"""Descriptors in this process for each compiling or waiting config."""
_LEAST_DESCRIPTORS = 48
"""Least number of descriptors for a small sweep; measured with twelve configs on two cores."""
_LEAST_SHARED_BYTES = 64 * _MIB
"""Default size of /dev/shm in a container."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def cores(settings: Settings) -> Check:
    """Returns the number of usable cores, and of configs that compile at a time."""
    usable, slots = machine.available_cpus(), _compile_slots(settings)
    found = f"{usable} of {os.cpu_count() or 1} are usable (affinity and cgroup quota); {slots} compile at a time"
    remedy = "give the job or the container more cores: configs compile one after another"
    return _judged("cores", found, remedy, is_good=usable > 1)


def memory(settings: Settings) -> Check:
    """Returns the free memory, and whether it suffices for all workers."""
    free, slots = machine.available_memory_bytes(), _compile_slots(settings)
    is_good = free >= _GIB * slots
    few = "" if is_good else f", less than 1 GiB for each of {slots} compile workers"
    found = f"{free / _GIB:.1f} GiB are free within the machine and its cgroups{few}"
    remedy = "free some, give the job more, or set QUARANTUNE_NUM_WORKERS lower"
    return _judged("memory", found, remedy, is_good=is_good)


def shared_memory() -> Check:
    """Returns the free space in /dev/shm."""
    name = "/dev/shm"
    remedy = (
        "start the container with --shm-size=1g, or run `mount -o remount,size=1g /dev/shm`: quarantune itself does "
        "not use it, but NCCL (trials on several GPUs) and functions that share memory do, and die of SIGBUS"
    )
    try:
        size, _, free = shutil.disk_usage(name)
    except OSError as error:
        return warn(name, f"cannot be used ({error.strerror})", remedy)
    found = f"{_amount(free)} of {_amount(size)} are free"
    return _judged(name, found, remedy, is_good=free >= _LEAST_SHARED_BYTES)


def temporary_files() -> Check:
    """Returns whether this process can write large arguments to a temporary file."""
    name = "temporary files"
    remedy = "make room, or set TMPDIR to a writable directory: arguments that do not fit memory go there"
    try:
        with tempfile.TemporaryFile(prefix="quarantune-"):
            free = shutil.disk_usage(tempfile.gettempdir()).free
    except OSError as error:
        return warn(name, f"writing failed ({error.strerror})", remedy)
    found = f"{_amount(free)} are free in {tempfile.gettempdir()!r}"
    return _judged(name, found, remedy, is_good=free >= _GIB)


def descriptors(settings: Settings) -> Check:
    """Returns the limit of open descriptors in this process."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ok("descriptors", "this process may have any number open")
    in_use = psutil.Process().num_fds()
    needed = in_use + _DESCRIPTORS_PER_CONFIG * (_compile_slots(settings) + _WAITING_CONFIGS) + 16
    found, is_good = f"this process may have {limit} open, and has {in_use}", limit >= needed
    found += "" if is_good else f"; a sweep here may need {needed}"
    higher = "" if hard == resource.RLIM_INFINITY or hard >= needed else f" (also raise the hard limit of {hard})"
    remedy = f"run `ulimit -n {max(1024, needed)}` first{higher}"
    return _judged("descriptors", found, remedy, is_good=is_good, is_needed=limit < _LEAST_DESCRIPTORS)


def processes(settings: Settings) -> Check:
    """Returns the number of processes that this user may still start."""
    left = machine.processes_left()
    if left is None:
        return ok("processes", "no limit holds for this user or in this cgroup")
    slots = _compile_slots(settings)
    needed = 3 * slots + 16  # a worker has threads, and its compiler starts more
    number, limit = left
    found, is_good = f"{number} more processes and threads may start, because {limit}", number >= 16 * needed
    found += "" if is_good else f"; each of {slots} workers may need dozens"
    remedy = "raise `ulimit -u`, or pids.max of the cgroup (for a container: --pids-limit)"
    return _judged("processes", found, remedy, is_good=is_good, is_needed=number < needed)


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
        f"{', '.join(low)} while {usable} cores are usable: workers inherit the variables, so NumPy and C "
        "functions run with that many threads during tuning",
        "unset them, unless the program will also run with them (Dask's and Ray's workers set OMP_NUM_THREADS=1)",
    )


def _compile_slots(settings: Settings) -> int:
    """Returns the number of configs that compile at a time under these settings."""
    return machine.compile_slots(settings.num_workers)


def _amount(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


# --- the cache directory ---

_LOCKS = "cache locks"
_MOST_SHOWN = 3
_LEAST_FREE_BYTES = 16 * _MIB
_APART = {"9p", "bindfs", "blobfuse2", "fuse", "gcsfuse", "goofys", "rclone", "s3fs", "sshfs"}
"""Filesystems whose locks other hosts do not see. They may also cache sizes and times of files for seconds."""


def cache_directory(settings: Settings) -> list[Check]:
    """Returns whether saving, locks and reading work in the cache directory."""
    if settings.disable_cache:
        found = "QUARANTUNE_DISABLE_CACHE is set: nothing is read or saved, and every process tunes"
        return [warn("cache directory", found, "unset it, unless you want that")]
    try:
        with _probe_directory(settings.cache_dir) as probe:
            checks = [_room(settings.cache_dir), _locks(probe)]
    except OSError as error:
        found = f"{str(settings.cache_dir)!r} cannot be written ({error.strerror}): no result is kept"
        remedy = f"{advice(error)}, or set QUARANTUNE_CACHE_DIR to another directory"
        return [fail("cache directory", found, remedy)]
    return [*checks, *_missing(settings), _content(settings.cache_dir)]


def _missing(settings: Settings) -> Iterator[Check]:
    """Yields a check for each directory of `CACHE_PATH` that is not there."""
    for directory in settings.cache_path:
        if isinstance(directory, Path) and not os.path.isdir(directory):
            found = f"QUARANTUNE_CACHE_PATH names {str(directory)!r}, which is not a directory: it gives no results"
            yield warn("cache path", found, "make it or mount it, or correct the name")


def _room(path: Path) -> Check:
    free = shutil.disk_usage(path).free
    found = f"{str(path)!r} can be written, {free / _GIB:.1f} GiB are free"
    remedy = "make room, or set QUARANTUNE_CACHE_DIR to another disk"
    return _judged("cache directory", found, remedy, is_good=free >= _LEAST_FREE_BYTES, is_needed=True)


def _locks(probe: Path) -> Check:
    """Returns whether a lock keeps other processes of this machine out, and whether other hosts see it."""
    kind = filesystem(probe)
    place = f" ({kind})" if kind else ""
    with Directory(probe) as opened, side_lock(opened, "lock") as is_good:
        pass
    if is_good and kind.removeprefix("fuse.") not in _APART:
        return ok(_LOCKS, f"a lock keeps another process of this machine out{place}")
    lacks = "a lock binds this machine only" if is_good else "locks are missing, or a lock has no effect"
    return warn(
        _LOCKS,
        f"{lacks}{place}. Writers announce themselves by files instead. This keeps results safe if all hosts see a "
        "new file at once (object stores do not); a dead job keeps others waiting for longer",
        "mount it with locks (Lustre: -o flock, not -o localflock; NFS: with lockd, without nolock), or set "
        "QUARANTUNE_CACHE_DIR to another disk, unless one host alone uses this one",
    )


def _content(path: Path) -> Check:
    """Returns whether all entries are readable."""
    cache = TuningCache(path)
    problems = cache.problems()
    if not problems:
        return ok("cached results", f"{len(cache)} results, all readable")
    more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
    found = "; ".join(problems[:_MOST_SHOWN]) + more
    return warn("cached results", found, "quarantune ignores damaged parts; look at the files, or delete them")


@contextlib.contextmanager
def _probe_directory(path: Path) -> Iterator[Path]:
    """Makes a directory inside the cache directory, which it makes if necessary; removes both at the end."""
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
    """Returns the type of a path's filesystem, such as `nfs4`; empty if unknown."""
    resolved = path.resolve()
    holding = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    # A later mount covers an earlier one at the same point.
    nearest = max(reversed(holding), key=lambda mount: len(Path(mount.mountpoint).parts), default=None)
    return "" if nearest is None else str(nearest.fstype)


# --- the devices: those that JAX finds, their clocks and other tenants ---

_HINDERED = {
    0x04: "the power cap",
    0x08: "a hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}
"""NVML's reasons for a lower clock, caused by other load or by cooling."""
_TENANT_MIB = 1024
"""Memory in use on a device, in MiB, above which another program probably runs there."""
_QUERY = "index,name,driver_version,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,memory.used,utilization.gpu"
_SMI_S = 30.0


def devices() -> Iterator[Check]:
    """Yields the devices that JAX finds. A worker looks for them, so this process initialises no backend."""
    command = "run `python -c 'import jax; jax.devices()'`, which shows"
    try:
        there = discovery.accelerators()
    except SandboxError as error:
        yield fail("devices", first_line(error), f"{command} the whole error, or set JAX_PLATFORMS=cpu")
        return
    if there is None or all(device.platform == "cpu" for device in there):
        found = f"the CPU, {cpu_device().kind}"
        usable = [kind for kind, plugin, _ in _hardware() if targets.has_plugin(plugin) and _is_chosen(plugin)]
        missing = [] if there is None else usable
        if missing:
            found = f"only {found}, although the driver and JAX's plugin for the {missing[0]} are here"
        remedy = f"{command} why JAX does not use the device"
        yield _judged("devices", found, remedy, is_good=not missing, is_needed=True)
        return
    names = (f"{device.platform}:{index} {device.device_kind}" for index, device in enumerate(there))
    yield ok("devices", ", ".join(names))
    if any(device.platform == "cuda" for device in there):
        yield from nvidia()
        if not there[0].config_text:
            found = "this JAX gives no description of the GPU, so each compile worker makes a context on it"
            yield warn("compiling without the device", found, "install a JAX version that gives one (0.10 or newer)")


def nvidia() -> list[Check]:
    """Returns the clocks of NVIDIA GPUs, and whether other programs use them."""
    name = "clocks and tenants"
    rows = _smi(f"--query-gpu={_QUERY}") or _smi(f"--query-gpu={_QUERY.replace('throttle', 'event')}")
    if not rows:
        return [warn(name, "nvidia-smi does not answer, so both are unknown", "put nvidia-smi on PATH and run again")]
    return [_nvidia(row) for row in rows if len(row) == len(_QUERY.split(","))]


def _nvidia(row: list[str]) -> Check:
    index, _, _, clock, most, reasons, used, busy = row
    name = f"clocks and tenants of GPU {index}"
    found = f"{clock} of {most} MHz, {used} MiB in use, {busy}% busy"
    mask = int(reasons, 16) if reasons.startswith("0x") else 0
    if hindered := [reason for bit, reason in _HINDERED.items() if mask & bit]:
        return warn(name, f"{found}; slowed down by {' and '.join(hindered)}", "wait until it is cool and idle")
    if _whole(used) > _TENANT_MIB or _whole(busy) > 0:
        tenants = _smi("--query-compute-apps=gpu_uuid,pid,used_memory", f"--id={index}")
        others = [pid for row in tenants for pid in row[1:2] if pid != str(os.getpid())]
        pids = f", processes {', '.join(others)}" if others else ""
        found += f": another program uses it{pids}, which makes times scatter and leaves less memory"
        return warn(name, found, "end it, or choose another GPU with QUARANTUNE_DEVICES")
    return ok(name, f"{found}; nobody else uses it")


def _smi(*query: str) -> list[list[str]]:
    """Returns the rows that nvidia-smi prints; empty if it is missing or refuses the query."""
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0


# --- checks by doing: one real sweep of each kind ---

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_SHAPE = (256, 256)


@functools.partial(jax.jit, static_argnames=["scale"])
def _jitted(x: jax.Array, scale: int = 2) -> jax.Array:
    return x @ x * scale


def tpu_compiler() -> Iterator[Check]:
    """Yields whether the compiler for TPUs works without a TPU, if this Python has it."""
    if targets.has_plugin("tpu"):
        x = jax.ShapeDtypeStruct(_SHAPE, np.float32)
        with blocks.settings(disable_cache=True):
            report = quarantune.compile_check(_jitted, {"scale": [1]}, x, target="TPU v5e", estimate=True)
        (trial,) = report.trials
        why = trial.message if trial.figures is None else trial.figures.no_estimate
        told = f"no estimates: {why}" if why else "it compiles for TPUs that are not here, and estimates cycles"
        yield _judged("TPU compiler", told, "install another version of libtpu", is_good=not why)


def _plain(x: np.ndarray[Any, Any], scale: int = 2) -> np.ndarray[Any, Any]:
    return x * scale


_KEEP_LOGS = "set QUARANTUNE_LOG_DIR to a directory and run again: each worker's output is kept there"
_TRIALS: tuple[tuple[str, Callable[..., Any], SettingKeywords, bool, str], ...] = (
    ("trial of a jitted function", _jitted, {"isolation": "process"}, True, _KEEP_LOGS),
    (
        "trial in a spawned worker",
        _jitted,
        {"isolation": "process", "start_method": "spawn"},
        False,
        "workers are forked by default, which may work; set QUARANTUNE_LOG_DIR and run again to see the whole output",
    ),
    ("trial of a plain callable", _plain, {"isolation": "process"}, True, _KEEP_LOGS),
    (
        "trial compiled in a worker, measured here",
        _jitted,
        {"isolation": "compile"},
        False,
        "QUARANTUNE_ISOLATION=compile, which a TPU needs, does not work here; on other devices leave it at auto",
    ),
)
"""For each trial: name, function, settings, whether ordinary tuning needs it, and the remedy if it fails."""


def trials() -> Iterator[Check]:
    """Runs one sweep of each kind, and yields its finding.

    The last sweep initialises JAX's backend in this process.
    """
    for number, (name, fn, own_settings, is_needed, remedy) in enumerate(_TRIALS):
        began, ended = time.monotonic(), None
        try:
            swept = _swept(name, fn, own_settings)
            ended = next((trial for trial in swept if trial.outcome in (Outcome.OK, Outcome.SLOW)), None)
            found = "it measured no config"
        except TuningFailedError as error:
            messages = {f"{it.outcome.value}: {it.message.strip()}".splitlines()[0] for it in error.trials}
            found = "; ".join(sorted(messages)) or first_line(error)
        except Exception as error:  # any failure is a finding
            found = first_line(error)
        if ended is not None:
            route = f", {ended.route.value.replace('_', ' ')}" if ended.route else ""
            found = f"worked in {time.monotonic() - began:.1f} s ({ended.clock or 'no'} clock{route})"
        yield _judged(name, found, remedy, is_good=ended is not None, is_needed=is_needed)
        if number == 0 and ended is not None:
            yield from _clock(ended)


def _swept(name: str, fn: Callable[..., Any], own_settings: SettingKeywords) -> tuple[Trial, ...]:
    limits = blocks.settings(
        disable_cache=True,
        on_miss="tune",
        record=None,
        search="exhaustive",
        compile_timeout=_PATIENCE_S,
        timeout=_PATIENCE_S,
        progress=False,
    )
    # Keeps JAX from taking most of the device's memory if this process initialises the backend.
    memory = environment_variables({_PREALLOCATE: os.environ.get(_PREALLOCATE, "false")})
    with blocks.settings(**own_settings), limits, memory, _quiet():
        tuner = AutoTuner(fn, {"scale": [2, 3]}, ref_fn=None, rep=3, name=f"doctor.{name}")
        return tuner.run(np.ones(_SHAPE, np.float32)).trials


def _clock(trial: Trial) -> list[Check]:
    """Returns whether the trial used the device's own clock; empty on a CPU, which has only the wall clock."""
    there = None if trial.clock == "wall" else discovery.accelerators()
    if there is None or (platform := there[0].platform) not in ("cuda", "rocm", "tpu"):
        return []
    has_cupti = platform == "cuda" and importlib.util.find_spec("absl") is not None
    if trial.clock == "device":
        reader = "CUPTI" if has_cupti else "JAX's profiler"
        return [ok("device clock", f"{reader} gives the device's own times")]
    if platform != "cuda":
        found = "JAX's profiler gives no times of the device, so the wall clock times queued runs"
        return [
            warn("device clock", found, "end other profilers; QUARANTUNE_LOG_DIR keeps a log that names the reason")
        ]
    by_wall = "the wall clock times short kernels"
    if not has_cupti:
        found = f"absl-py is missing, so CUPTI does not work, and {by_wall}"
        return [warn("device clock", found, "run `pip install 'quarantune[device-clock]'`")]
    found = f"CUPTI does not work, so {by_wall}: another profiler has it, or the driver lets only root profile"
    remedy = "end nsys, ncu or JAX's profiler, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    return [warn("device clock", found, remedy)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops the warnings of a sweep: they are not findings."""
    logger = logging.getLogger("quarantune")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(before)


# --- the ranks of this program ---

_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables with the number of a program's processes, set by launchers."""


def ranks(settings: Settings) -> Check:
    """Returns the ranks of this program, and whether they agree on configs."""
    if (here := jax_backends.coordination()) is not None:
        agree = "they agree on one config" if settings.agree else "QUARANTUNE_AGREE=0: each tunes for itself"
        return ok("ranks", f"this is rank {here.rank} of {here.ranks}; {agree}")
    tasks = {name: os.environ.get(name, "") for name in _LAUNCHERS}
    if several := [f"{name}={number}" for name, number in tasks.items() if number.isdigit() and int(number) > 1]:
        return warn("ranks", several[0], "call jax.distributed.initialize before the first tuned call")
    return ok("ranks", "this program has one process")
