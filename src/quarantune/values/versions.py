"""The versions of JAX, this package and a driver, recorded with each result."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import jax
import jaxlib.version

from quarantune._version import __version__


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of JAX, its library, this package, and a GPU's driver."""
    found = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "quarantune": __version__}
    with contextlib.suppress(OSError):
        found["nvidia_driver"] = Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return found
