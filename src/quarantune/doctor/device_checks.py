"""Checks of JAX and the devices: versions, plugins, the devices themselves, their clocks and other tenants."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
from collections.abc import Iterator

import jax

from quarantune.devices import discovery
from quarantune.devices.device import cpu_device
from quarantune.doctor.check import Check, fail, first_line, judged, ok, warn
from quarantune.host import installed
from quarantune.values import versions
from quarantune.values.trial import SandboxError

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
_PATIENCE_S = 30.0


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
        if not _has_plugin(plugin):
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def _should_be_found(kind: str) -> bool:
    files, plugin, _ = _HARDWARE[kind]
    chosen = jax.config.values["jax_platforms"] or plugin
    return any(map(os.path.exists, files)) and _has_plugin(plugin) and plugin in chosen


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _has_plugin(name: str) -> bool:
    if name == "tpu":
        return importlib.util.find_spec("libtpu") is not None
    return any(name in plugin.name for plugin in installed.entry_points("jax_plugins"))
