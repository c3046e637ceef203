"""Has a worker describe the devices, so that this process need not initialise a backend."""

from __future__ import annotations

import time

from quarantune.devices.device import Backend
from quarantune.sandbox import pool
from quarantune.sandbox.events import Said
from quarantune.sandbox.messages import Failed, PhaseEntered, Probe, Probed, Reply
from quarantune.values import codec
from quarantune.values.trial import SandboxError

_DEADLINE_S = 120.0
"""The longest wait for a worker to describe the devices; a driver may hang."""


def probe(platforms: str | None) -> Backend:
    """Returns the devices that a worker finds.

    Args:
        platforms: the platforms that JAX may use; None for its own choice.

    Raises:
        SandboxError: the worker failed, or took too long.
    """
    with pool.Sandbox(payload_fd=-1, arrays_fd=-1, method="fork") as sandbox:
        sandbox.open(load_timeout_s=None)
        number = sandbox.start(codec.encode(Probe(platforms=platforms, last=True)))
        deadline = time.monotonic() + _DEADLINE_S
        reply: Reply | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            for event in sandbox.poll(left_s):
                if isinstance(event, Said):
                    reply = _decode(event.message)
                elif event.number == number:
                    if isinstance(reply, Probed):
                        return Backend(reply.devices, reply.config_text)
                    detail = (isinstance(reply, Failed) and reply.text) or sandbox.log(number)[-2000:]
                    raise SandboxError(f"the device probe failed: {detail}")
    raise SandboxError(
        f"the device probe did not end within {_DEADLINE_S:g} s: a device's driver or a JAX plugin hangs; "
        "to tune without it, name the platforms to use, as in JAX_PLATFORMS=cpu"
    )


def _decode(frame: codec.Frame) -> Reply | None:
    """Returns the probe's reply; None where it is damaged."""
    try:
        return codec.decode(frame, PhaseEntered, Probed, Failed)
    except codec.DamageError:
        return None
