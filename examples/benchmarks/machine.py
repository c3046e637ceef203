"""Describes the machine and the software that produced the numbers."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import quarantune


def describe(*, distributions: Sequence[str]) -> dict[str, Any]:
    """Returns the `platform` that JAX chose, `cpu` or `gpu`, and names and versions of the device and the software."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("jax", *distributions)},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str:
    if distribution == quarantune.__name__:
        return quarantune.__version__  # works in a checkout without installation
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(unknown version)"
