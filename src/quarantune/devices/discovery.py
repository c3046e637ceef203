"""The devices that exist, those that a sweep may use, and the environment of a worker that sees only some of them.

JAX finds the devices if this process has initialised JAX's backends; otherwise a worker finds them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from quarantune.host import machine
from quarantune.host.packages import entry_points
from quarantune.host.process import in_sandbox
from quarantune.jax_internals import jax_backends
from quarantune.values import codec
from quarantune.values.errors import SandboxError
from quarantune.values.settings import Settings
from quarantune.values.trial import CompileTarget

_PROBE_DEADLINE_S = 120.0
"""Longest wait, in seconds, for a worker to describe the devices; a driver may hang."""
_DEVICE = "QUARANTUNE_SANDBOX_DEVICE"
"""Environment variable with the platform and kind of a worker's device, which the worker may not see."""
_CUDA, _ROCR, _HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
LOGS_PTXAS = {"TF_CPP_VMODULE": "subprocess_compilation=2", "TF_CPP_MIN_LOG_LEVEL": "0"}
"""Environment variables that XLA reads as it loads: it then logs ptxas's output for each kernel, unlike by default."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that trials run on, or a group of devices that one trial uses.

    Attributes:
        platform: `cpu`, `cuda`, `rocm` or `tpu`.
        kind: its name in the cache, such as `NVIDIA H200`; for a CPU the processor's model and the available cores.
        token: the driver's name of it, as CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES holds it; comma-separated for a
            group; empty for a CPU.
    """

    platform: str
    kind: str
    token: str = ""

    @property
    def name(self) -> str:
        """Its name in messages and in the names of leases."""
        return f"{self.platform}:{self.token}" if self.token else self.platform

    @property
    def members(self) -> tuple[Device, ...]:
        """The single devices of a group."""
        return tuple(dataclasses.replace(self, token=token) for token in self.token.split(","))

    @property
    def has_one_owner(self) -> bool:
        """Whether only one process can use it at a time; the next must wait until that process has ended."""
        return self.platform == "tpu"

    def position(self, environ: Mapping[str, str]) -> int:
        """Returns the position of the device, or of the first of its group, among those that JAX sees.

        Args:
            environ: the environment whose visibility variables JAX follows.
        """
        token, listed = self.token.partition(",")[0], _listed(self.platform, environ)
        return listed.index(token) if token in listed else int(token) if token.isdigit() else 0

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables of a process that sees no other device of this platform."""
        match self.platform:
            case "cuda":
                return {_CUDA: self.token}
            case "rocm":  # HIP takes all that ROCr leaves, whatever the caller has chosen
                return {_ROCR: self.token, _HIP: ",".join(map(str, range(len(self.members))))}
        return {}


def _listed(platform: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the driver's names of the devices that JAX sees, in JAX's order; an empty list if it sees all.

    On AMD's GPUs, ROCr, the runtime below HIP, first chooses devices. HIP's indices count only these.
    """

    def names(*variables: str) -> list[str]:
        value = next(filter(None, map(environ.get, variables)), "")
        return [name for part in value.split(",") if (name := part.strip())]

    if platform == "cuda":
        return names(_CUDA)
    left, chosen = (names(_ROCR), names(_HIP, _CUDA)) if platform == "rocm" else ([], [])
    return [left[int(name)] if name.isdigit() and int(name) < len(left) else name for name in chosen] or left


def sandbox_environ(platform: str, kind: str) -> dict[str, str]:
    """Returns the environment variables that name the device that a sandbox's processes work for."""
    return {_DEVICE: f"{platform}:{kind}"}


def platform_and_kind(platform_hint: str | None) -> tuple[str, str]:
    """Returns the platform that a call would run on and the kind of its device, without initialising a JAX backend.

    Args:
        platform_hint: JAX's name for the platform of the call's arrays; None for JAX's default.
    """
    if in_sandbox() and (known := os.environ.get(_DEVICE)):
        platform, _, kind = known.partition(":")
        return platform, kind
    if platform_hint == "cpu" or (platform_hint is None and _only_cpu()):
        return "cpu", cpu_device().kind
    first = _describe(platform_hint, for_compiling=False)[0]
    return first.platform, cpu_device().kind if first.platform == "cpu" else first.device_kind


def accelerators() -> tuple[CompileTarget, ...] | None:
    """Returns the devices that JAX chooses, without initialising a backend; None if JAX can choose only the CPU.

    Raises:
        SandboxError: the worker that looks for them failed, or took too long.
    """
    return None if _only_cpu() else _describe(None)


def cheap_context(platform: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that lets a process create the context of a single device fastest.

    The driver creates and destroys contexts one after another, however many cores there are. More than half of
    the time goes into the eight hardware queues that CUDA requests: a context takes 0.15 s on an H200, and 0.06 s with
    one queue. The kernels of a program for one device run in one stream and need only one queue.

    Args:
        platform: the devices' platform.
        environ: the caller's environment, whose own setting has priority.
    """
    return {_QUEUES: "1"} if platform == "cuda" and _QUEUES not in environ else {}


def described(devices: Sequence[Any], *, for_compiling: bool = True) -> tuple[CompileTarget, ...]:
    """Returns descriptions of a backend's devices that can be sent to another process.

    Args:
        devices: the devices.
        for_compiling: whether XLA also describes GPUs for its compiler.
    """
    config_text = jax_backends.target_config(devices) if for_compiling else ""
    return tuple(
        CompileTarget(
            platform=_platform_of(device),
            device_kind=device.device_kind,
            config_text=config_text,
            num_cores=getattr(device, "core_count", None),
        )
        for device in devices
    )


def _platform_of(device: Any) -> str:
    """Returns `cpu`, `cuda`, `rocm` or `tpu`; JAX's devices call both `cuda` and `rocm` `gpu`."""
    if device.platform != "gpu":
        return str(device.platform)
    version = device.client.platform_version.lower()
    return "rocm" if "rocm" in version else "cuda"


def cpu_device() -> Device:
    """Returns the machine's processor as a device; its kind includes the number of cores, which affects times."""
    return Device("cpu", f"{machine.processor_name()} ({machine.available_cpus()} cores)")


def visible_devices(
    probed: Sequence[CompileTarget], *, environ: Mapping[str, str], allowed: Sequence[str] | None
) -> list[Device]:
    """Returns the devices that workers may use.

    Args:
        probed: the devices that the caller's own JAX would see, in its order.
        environ: the caller's environment; its visibility variables list the devices in the same order.
        allowed: the operator's `DEVICES`, as indices in `probed` or as values of the visibility variable; None allows
            all devices.

    Returns:
        The devices; a CPU is one device, however many JAX makes of it.

    Raises:
        ValueError: `allowed` names a device that does not exist.
    """
    if not probed or probed[0].platform == "cpu":
        return [cpu_device()]
    platform = probed[0].platform
    tokens = _listed(platform, environ)
    tokens = [*tokens, *map(str, range(len(tokens), len(probed)))]
    devices = [Device(platform, each.device_kind, token) for each, token in zip(probed, tokens, strict=False)]
    return devices if allowed is None else _select(devices, allowed)


def grouped(devices: Sequence[Device], size: int) -> list[Device]:
    """Joins devices into groups for trials that need several.

    Args:
        devices: single devices of one kind.
        size: the number of devices in a group.

    Returns:
        The groups, in order; surplus devices at the end belong to none.

    Raises:
        ValueError: there are too few devices for one group.
    """
    if len(devices) < size:
        there = ", ".join(device.name for device in devices)
        raise ValueError(
            f"devices_per_trial={size} needs {size} devices of one kind, and there are {len(devices)} to use "
            f"({there}): make more visible, or ask for fewer"
        )
    starts = range(0, len(devices) - size + 1, size)
    return [
        dataclasses.replace(devices[start], token=",".join(device.token for device in devices[start : start + size]))
        for start in starts
    ]


def _select(devices: list[Device], allowed: Sequence[str]) -> list[Device]:
    named = {device.token: device for device in devices if not device.token.isdigit()}
    named |= {str(index): device for index, device in enumerate(devices)}
    for name in allowed:
        if name not in named:
            there = ", ".join(f"{index} ({device.token})" for index, device in enumerate(devices))
            raise ValueError(f"QUARANTUNE_DEVICES names {name!r}, which is not there; visible are: {there}")
    return list(dict.fromkeys(named[name] for name in allowed))  # an index and a UUID may name one device


def _only_cpu() -> bool:
    """Returns whether JAX can only choose the CPU: by its settings, or for lack of a plugin for other devices."""
    if platforms := _platforms():
        return platforms == "cpu"
    if importlib.util.find_spec("jax_plugins") is not None or importlib.util.find_spec("libtpu") is not None:
        return False
    return not entry_points("jax_plugins")


def _describe(platform: str | None, *, for_compiling: bool = True) -> tuple[CompileTarget, ...]:
    """Returns the devices that JAX would use; asks a worker if this process has initialised no backend."""
    if not jax_backends.backends_initialized():
        return _probe((_platforms(), *map(os.environ.get, (_CUDA, _ROCR, _HIP))))
    return described(jax.local_devices(backend=platform), for_compiling=for_compiling)


def devices_and_target(
    platform: str, settings: Settings, devices_per_trial: int = 1
) -> tuple[list[Device], CompileTarget | None]:
    """Returns the devices to measure on, and the target of compile workers that have no device.

    Returns:
        The devices, and the target; None if compile workers without a device are impossible or unnecessary.

    Raises:
        ValueError: the settings name a device that does not exist, or there are fewer devices than a trial needs.
    """
    if platform == "cpu":
        return [cpu_device()], None
    there = _describe(platform)
    allowed = visible_devices(there, environ=os.environ, allowed=settings.devices)
    kinds = [device.kind for device in allowed]
    devices = grouped([device for device in allowed if device.kind == kinds[0]], devices_per_trial)
    if platform == "tpu":
        return [Device(platform, kinds[0])], None  # a process takes all of the machine's TPUs
    target = next(device for device in there if device.device_kind == kinds[0])
    return devices, target if target.config_text else None


def _platforms() -> str | None:
    """Returns the platforms to which the environment or the caller's code limits JAX; None for JAX's choice."""
    platforms: str | None = jax.config.values["jax_platforms"]
    return platforms


@functools.lru_cache(maxsize=8)
def _probe(_: tuple[str | None, ...]) -> tuple[CompileTarget, ...]:
    """Returns the devices that a worker finds, so that this process need not initialise a backend.

    Args:
        _: the settings that decide which devices a process sees.

    Raises:
        SandboxError: the worker failed, or took too long.
    """
    # Imported here because few processes get here: JAX's backends usually are initialised.
    from quarantune.sandbox import messages, pool
    from quarantune.sandbox.workforce import Said

    with pool.Sandbox(payload_fd=-1, arrays_fd=-1, method="fork") as sandbox:
        sandbox.open(load_timeout_s=None)
        number = sandbox.start(codec.encode(messages.Probe(platforms=_platforms(), last=True)))
        deadline = time.monotonic() + _PROBE_DEADLINE_S
        reply: messages.Reply | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            for event in sandbox.poll(left_s):
                if isinstance(event, Said):
                    with contextlib.suppress(codec.DamageError):
                        reply = codec.decode(event.message, *messages.REPLIES)
                elif event.number == number:
                    if isinstance(reply, messages.Probed):
                        return reply.devices
                    # JAX raises an assertion without a text if the plugin of a platform is missing.
                    detail = reply.message if isinstance(reply, messages.Failed) else sandbox.log(number)[-2000:]
                    found = _platforms()
                    hint = f" (JAX_PLATFORMS={found}: is JAX's plugin for that installed?)" if found else ""
                    raise SandboxError(f"the device probe failed: {detail}{hint}")
    raise SandboxError(
        f"the device probe did not end within {_PROBE_DEADLINE_S:g} s: a device's driver or a JAX plugin hangs; "
        "to tune without it, name the platforms to use, for example with JAX_PLATFORMS=cpu"
    )
