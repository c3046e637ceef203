"""Devices, which of them a sweep may use, and the environment of a worker that sees only some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from quarantune.host import machine
from quarantune.values.compiling import ProbedDevice

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "ROCR_VISIBLE_DEVICES"}
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
LOGS_PTXAS = {"TF_CPP_VMODULE": "subprocess_compilation=2", "TF_CPP_MIN_LOG_LEVEL": "0"}
"""With these when it is loaded, XLA logs what ptxas says of each kernel; JAX's default level has no such lines."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that trials run on, or a group of devices that one trial uses.

    Attributes:
        platform: `cpu`, `cuda`, `rocm` or `tpu`.
        kind: its name in the cache, such as `NVIDIA H200`; for a CPU the processor's model and the available cores.
        token: its value in the platform's visibility variable, comma-separated for a group; empty for a CPU.
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
        """Whether only one process can use it at a time; the next one has to wait until that has ended."""
        return self.platform == "tpu"

    def position(self, environ: Mapping[str, str]) -> int:
        """Returns the position of the device, or of the first of its group, among those that JAX sees.

        Args:
            environ: the environment whose visibility variable JAX follows.
        """
        token = self.token.partition(",")[0]
        listed = [name.strip() for name in environ.get(_VISIBLE.get(self.platform, ""), "").split(",")]
        return listed.index(token) if token in listed else int(token) if token.isdigit() else 0

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables of a process that sees no other device of this platform."""
        variable = _VISIBLE.get(self.platform)
        return {} if variable is None else {variable: self.token}


def cheap_context(platform: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that lets a process create the context of a single device fastest.

    The driver creates and destroys contexts one after another, however many cores there are. More than half of the
    time goes into the eight hardware queues that CUDA requests: 0.15 s on an H200, and 0.06 s with one queue. The
    kernels of a program for one device run in one stream and need only one queue.

    Args:
        platform: the devices' platform.
        environ: the caller's environment, whose own setting has priority.
    """
    return {_QUEUES: "1"} if platform == "cuda" and _QUEUES not in environ else {}


@dataclasses.dataclass(frozen=True)
class Backend:
    """The devices of one JAX backend.

    Attributes:
        devices: the devices, in JAX's order.
        config_text: the description that a compiler without the devices needs; None where JAX has none.
    """

    devices: tuple[ProbedDevice, ...]
    config_text: str | None


def describe_jax_devices(devices: Sequence[Any]) -> tuple[ProbedDevice, ...]:
    """Returns descriptions of JAX devices that can be sent to another process."""
    return tuple(
        ProbedDevice(
            platform=_platform_of(device),
            kind=device.device_kind,
            index=position,
            num_cores=getattr(device, "core_count", None),
        )
        for position, device in enumerate(devices)
    )


def _platform_of(device: Any) -> str:
    """Returns `cpu`, `cuda`, `rocm` or `tpu`; JAX's devices call both `cuda` and `rocm` `gpu`."""
    if device.platform != "gpu":
        return str(device.platform)
    version = device.client.platform_version.lower()
    return "rocm" if "rocm" in version else "cuda"


def cpu_device() -> Device:
    """Returns the machine's processor as a device; its kind includes the number of cores, which times depend on."""
    return Device("cpu", f"{machine.processor_name()} ({machine.available_cpus()} cores)")


def visible_devices(
    probed: Sequence[ProbedDevice], *, environ: Mapping[str, str], allowed: Sequence[str] | None
) -> list[Device]:
    """Returns the devices that a worker may be given.

    Args:
        probed: the devices that the caller's own JAX would see, in its order.
        environ: the caller's environment, whose visibility variable the indices are relative to.
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
    listed = environ.get(_VISIBLE.get(platform, ""), "")
    tokens = [token.strip() for token in listed.split(",") if token.strip()]
    devices = []
    for entry in probed:
        token = tokens[entry.index] if entry.index < len(tokens) else str(entry.index)
        devices.append(Device(platform, entry.kind, token))
    return devices if allowed is None else _select(devices, allowed)


def grouped(devices: Sequence[Device], size: int) -> list[Device]:
    """Joins devices into groups for trials that need several.

    Args:
        devices: single devices of one kind.
        size: the number of devices in a group.

    Returns:
        The groups, in order; devices left over at the end are not used.

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
    selected = []
    for name in allowed:
        by_token = [device for device in devices if device.token == name and not name.isdigit()]
        if name.isdigit() and int(name) < len(devices):
            selected.append(devices[int(name)])
        elif by_token:
            selected.append(by_token[0])
        else:
            there = ", ".join(f"{index} ({device.token})" for index, device in enumerate(devices))
            raise ValueError(f"QUARANTUNE_DEVICES names {name!r}, which is not there; visible are: {there}")
    return selected
