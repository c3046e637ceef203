"""Describes the devices that JAX finds, in a worker, so that the caller's process initialises no backend."""

from __future__ import annotations

import jax

from quarantune import jax_internals
from quarantune.devices.device import Backend, describe_jax_devices


def probe(platforms: str | None) -> Backend:
    """Initialises a backend and describes its devices.

    Args:
        platforms: the caller's `jax_platforms`; None for JAX's own choice.
    """
    jax.config.update("jax_platforms", platforms)
    devices = jax.local_devices()
    return Backend(describe_jax_devices(devices), jax_internals.target_config(devices))
