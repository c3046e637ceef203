"""Describes the devices that JAX finds, in a worker, so that the caller's process initialises no backend."""

from __future__ import annotations

import os

import jax

from quarantune import jax_internals
from quarantune.devices.device import Backend, describe_jax_devices
from quarantune.worker.deviceless import LIBTPU_LOGS


def probe(platforms: str | None) -> Backend:
    """Initialises a backend and describes its devices.

    Args:
        platforms: the caller's `jax_platforms`; None for JAX's own choice.
    """
    for name, value in LIBTPU_LOGS.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", platforms)
    devices = jax.local_devices()
    return Backend(describe_jax_devices(devices), jax_internals.target_config(devices))
