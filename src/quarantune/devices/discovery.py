"""Finds the devices: from JAX where this process has initialised its backends, and else from a worker."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import time

import jax

from quarantune import jax_internals, sandbox
from quarantune.devices.device import Backend, Device, cpu_device, describe_jax_devices, grouped, visible_devices
from quarantune.host.process import entry_points
from quarantune.values import codec
from quarantune.values.compiling import CompileTarget
from quarantune.values.settings import Settings
from quarantune.values.trial import SandboxError

_PROBE_DEADLINE_S = 120.0
"""The longest wait for a worker to describe the devices; a driver may hang."""
_DEVICE = "QUARANTUNE_SANDBOX_DEVICE"
"""Environment variable with the platform and kind of the device of a worker, which may not be visible to it."""


def sandbox_environ(platform: str, kind: str) -> dict[str, str]:
    """Returns the environment variables that tell a sandbox's processes the device that they work for."""
    return {_DEVICE: f"{platform}:{kind}"}


def platform_and_kind(platform_hint: str | None) -> tuple[str, str]:
    """Returns the platform that a call would run on and the kind of its device, without initialising a JAX backend.

    Args:
        platform_hint: JAX's name for the platform of the call's arrays; None for JAX's default.
    """
    if sandbox.is_inside() and (known := os.environ.get(_DEVICE)):
        platform, _, kind = known.partition(":")
        return platform, kind
    if platform_hint == "cpu" or (platform_hint is None and _only_cpu()):
        return "cpu", cpu_device().kind
    first = _describe(platform_hint).devices[0]
    if first.platform == "cpu":
        return "cpu", cpu_device().kind
    return first.platform, first.kind


def accelerators() -> Backend | None:
    """Returns the devices that JAX chooses, without initialising a backend; None where these are the CPU's.

    Raises:
        SandboxError: the worker that looks for them failed, or took too long.
    """
    return None if _only_cpu() else _describe(None)


def _only_cpu() -> bool:
    """Returns whether JAX can only choose the CPU: it is set to, or no plugin for other devices is installed."""
    if platforms := _platforms():
        return platforms == "cpu"
    if importlib.util.find_spec("jax_plugins") is not None or importlib.util.find_spec("libtpu") is not None:
        return False
    return not entry_points("jax_plugins")


def _describe(platform: str | None) -> Backend:
    """Returns the devices that JAX would use, asked of a worker where this process has initialised none."""
    if not jax_internals.backends_initialized():
        return _probe(_visibility())
    devices = jax.local_devices(backend=platform)
    return Backend(describe_jax_devices(devices), jax_internals.target_config(devices))


def devices_and_target(
    platform: str, settings: Settings, devices_per_trial: int = 1
) -> tuple[list[Device], CompileTarget | None]:
    """Returns the devices to measure on, and the target of compile workers that have no device.

    Returns:
        The devices, and the target; None where compile workers without a device are not possible or not necessary.

    Raises:
        ValueError: the settings name a device that does not exist, or there are fewer devices than a trial needs.
    """
    if platform == "cpu":
        return [cpu_device()], None
    backend = _describe(platform)
    allowed = visible_devices(backend.devices, environ=os.environ, allowed=settings.devices)
    kinds = [device.kind for device in allowed]
    devices = grouped([device for device in allowed if device.kind == kinds[0]], devices_per_trial)
    if platform == "tpu":
        return [Device(platform, kinds[0])], None  # a process takes all of the machine's TPUs
    if backend.config_text is None or platform not in ("cuda", "rocm"):
        return devices, None
    device = next(device for device in backend.devices if device.kind == kinds[0])
    target = CompileTarget(
        platform=platform,
        config_text=backend.config_text,
        device_kind=device.kind,
        num_cores=device.num_cores,
    )
    return devices, target


def _visibility() -> tuple[str | None, ...]:
    """Returns the settings that decide which devices a process sees: the key of a probe's result."""
    variables = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return (_platforms(), *(os.environ.get(variable) for variable in variables))


def _platforms() -> str | None:
    """Returns the platforms that JAX may use, set by the environment or the caller's code; None for its own choice."""
    platforms: str | None = jax.config.values["jax_platforms"]
    return platforms


@functools.lru_cache(maxsize=8)
def _probe(_: tuple[str | None, ...]) -> Backend:
    """Returns the devices that a worker finds, so that this process need not initialise a backend.

    Raises:
        SandboxError: the worker failed, or took too long.
    """
    # Not needed where JAX's backends are initialised, as they usually are.
    from quarantune.sandbox import pool
    from quarantune.sandbox.messages import Failed, PhaseEntered, Probe, Probed, Reply
    from quarantune.sandbox.pool import Said

    with pool.Sandbox(payload_fd=-1, arrays_fd=-1, method="fork") as sandbox:
        sandbox.open(load_timeout_s=None)
        number = sandbox.start(codec.encode(Probe(platforms=_platforms(), last=True)))
        deadline = time.monotonic() + _PROBE_DEADLINE_S
        reply: Reply | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            for event in sandbox.poll(left_s):
                if isinstance(event, Said):
                    with contextlib.suppress(codec.DamageError):
                        reply = codec.decode(event.message, PhaseEntered, Probed, Failed)
                elif event.number == number:
                    if isinstance(reply, Probed):
                        return Backend(reply.devices, reply.config_text)
                    detail = (isinstance(reply, Failed) and reply.text) or sandbox.log(number)[-2000:]
                    raise SandboxError(f"the device probe failed: {detail}")
    raise SandboxError(
        f"the device probe did not end within {_PROBE_DEADLINE_S:g} s: a device's driver or a JAX plugin hangs; "
        "to tune without it, name the platforms to use, as in JAX_PLATFORMS=cpu"
    )
