"""Describes the devices that JAX finds, in a worker, so that the caller's process initialises no backend."""

from __future__ import annotations

from typing import Any

import jax

from quarantune import jax_internals
from quarantune.devices.device import describe_jax_devices


def probe(platforms: str | None) -> dict[str, Any]:
    """Initialises a backend and describes its devices.

    Args:
        platforms: the caller's `jax_platforms`; None for JAX's own choice.

    Returns:
        `devices`, each with `platform`, `kind`, `index` and `num_cores`; and `config_text`, the description that a
        compiler without the device needs (None where JAX cannot give one).
    """
    jax.config.update("jax_platforms", platforms)
    devices = jax.local_devices()
    return {"devices": describe_jax_devices(devices), "config_text": jax_internals.target_config(devices)}
