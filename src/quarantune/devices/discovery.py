"""Which devices there are, asked of a worker where this process has not yet asked JAX itself."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import time
from typing import Any

import jax

from quarantune import jax_internals
from quarantune.devices.device import Device, cpu_device, describe_jax_devices, grouped, visible_devices
from quarantune.sandbox import codec, template
from quarantune.sandbox.messages import CompileTarget, Failed, PhaseEntered, Probe, Probed, Reply
from quarantune.values.settings import Settings
from quarantune.values.trial import SandboxError

_TOLD = "QUARANTUNE_SANDBOX_DEVICE"
"""Tells a worker what it works for, as a compile worker for a GPU has none to ask."""

_PROBE_DEADLINE_S = 120.0
"""How long the devices may take to be counted; a driver that hangs takes for ever."""


def telling(platform: str, kind: str) -> dict[str, str]:
    """Returns the environment that tells a sandbox's processes which device they work for."""
    return {_TOLD: f"{platform}:{kind}"}


def platform_and_kind(platform_hint: str | None) -> tuple[str, str]:
    """Returns the platform a call would run on and the kind of its device, starting no backend in this process.

    Args:
        platform_hint: JAX's name for the platform of the call's arrays; None for JAX's default.
    """
    if template.is_inside() and (told := os.environ.get(_TOLD)):
        platform, _, kind = told.partition(":")
        return platform, kind
    if platform_hint == "cpu" or (platform_hint is None and _only_cpu()):
        return "cpu", cpu_device().kind
    described = _describe(platform_hint)["devices"]
    if described[0]["platform"] == "cpu":
        return "cpu", cpu_device().kind
    return described[0]["platform"], described[0]["kind"]


def _only_cpu() -> bool:
    """Whether JAX cannot but choose the CPU: told to, or with no plugin for anything else installed."""
    if platforms := _platforms():
        return platforms == "cpu"
    if importlib.util.find_spec("jax_plugins") is not None or importlib.util.find_spec("libtpu") is not None:
        return False
    return not importlib.metadata.entry_points(group="jax_plugins")


def _describe(platform: str | None) -> dict[str, Any]:
    """Returns what `trial.probe` does: from this process where it knows already, else from a worker."""
    if not jax_internals.backends_initialized():
        return _probe(_visibility())
    devices = jax.local_devices(backend=platform)
    return {"devices": describe_jax_devices(devices), "config_text": jax_internals.target_config(devices)}


def devices_and_target(
    platform: str, settings: Settings, devices_per_trial: int = 1
) -> tuple[list[Device], CompileTarget | None]:
    """Returns where to measure, and what a compiler must be told that has no device.

    Raises:
        ValueError: the settings name a device that is not there, or there are fewer than a trial needs.
    """
    if platform == "cpu":
        return [cpu_device()], None
    described = _describe(platform)
    allowed = visible_devices(described["devices"], environ=os.environ, allowed=settings.devices)
    kinds = [device.kind for device in allowed]
    devices = grouped([device for device in allowed if device.kind == kinds[0]], devices_per_trial)
    if described["config_text"] is None or platform not in ("cuda", "rocm"):
        return devices, None
    about = next(entry for entry in described["devices"] if entry["kind"] == kinds[0])
    target = CompileTarget(
        platform=platform,
        config_text=described["config_text"],
        device_kind=about["kind"],
        num_cores=about["num_cores"],
    )
    return devices, target


def _visibility() -> tuple[str | None, ...]:
    """What decides which devices a process sees; an answer is good while it stays the same."""
    variables = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return (_platforms(), *(os.environ.get(variable) for variable in variables))


def _platforms() -> str | None:
    """Returns the platforms JAX was told to use, by environment or by the caller's code; None where it may choose."""
    platforms: str | None = jax.config.values["jax_platforms"]
    return platforms


@functools.lru_cache(maxsize=8)
def _probe(_: tuple[str | None, ...]) -> dict[str, Any]:
    """Asks a worker what devices there are.

    Raises:
        SandboxError: it could not say.
    """
    # Where JAX's backends are up, as is usual, nothing of this is needed.
    from quarantune.sandbox import pool

    with pool.Sandbox(payload_fd=-1, arrays_fd=-1, method="fork") as sandbox:
        sandbox.open(load_timeout_s=None)
        number = sandbox.start(codec.encode(Probe(platforms=_platforms(), last=True)))
        deadline = time.monotonic() + _PROBE_DEADLINE_S
        reply: Reply | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            for event in sandbox.poll(left_s):
                if isinstance(event, pool.Said):
                    reply = codec.decode(event.message, PhaseEntered, Probed, Failed)
                elif event.number == number:
                    if isinstance(reply, Probed):
                        devices = [dataclasses.asdict(device) for device in reply.devices]
                        return {"devices": devices, "config_text": reply.config_text}
                    detail = (isinstance(reply, Failed) and reply.text) or sandbox.log(number)[-2000:]
                    raise SandboxError(f"the device probe failed: {detail}")
    raise SandboxError(
        f"the device probe did not end within {_PROBE_DEADLINE_S:g} s: a device's driver or a JAX plugin hangs; "
        "to tune without it, name the platforms to use, as in JAX_PLATFORMS=cpu"
    )
