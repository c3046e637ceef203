"""Versions and flags of everything that compiles."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from quarantune._version import __version__

_PLUGINS = {
    "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "rocm": ("jax-rocm60-plugin", "jax-rocm60-pjrt", "jax-rocm7-plugin", "jax-rocm7-pjrt"),
    "tpu": ("libtpu",),
}
"""The packages that compile for a platform, in addition to jaxlib."""
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of JAX, its library, this package, and a GPU's driver."""
    found = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "quarantune": __version__}
    with contextlib.suppress(OSError):
        found["nvidia_driver"] = Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return found


def compilers(platform: str) -> dict[str, str]:
    """Returns the versions and flags of everything that compiles for a platform, whether or not its device is here.

    Args:
        platform: `cpu`, `cuda`, `rocm` or `tpu`.
    """
    found = {name: version for name, version in versions().items() if name != "nvidia_driver"} | _plugins(platform)
    return found | {name: flags for name in _FLAGS if (flags := os.environ.get(name, "").strip())}


def all_that_compiles(platform: str) -> dict[str, str]:
    """Returns everything that decides the bits of a program: `versions` and `compilers`."""
    return versions() | compilers(platform)


def changed_since(then: Mapping[str, Any], platform: str = "") -> str:
    """Lists the versions that have changed; empty if all are the same, or were not recorded.

    Args:
        then: the versions of an earlier time: all that compiles, or only `versions`, as earlier releases saved them.
        platform: the platform whose plugins and flags also count; empty if only `versions` count.
    """
    now = all_that_compiles(platform) if platform else versions()
    names = dict.fromkeys([*now, *(then if platform else ())]) if then else ()
    changed = [name for name in names if then.get(name) != now.get(name)]
    return ", ".join(f"{name} {then.get(name, 'unset')} (now {now.get(name, 'unset')})" for name in changed)


@functools.cache
def _plugins(platform: str) -> dict[str, str]:
    found = {}
    for name in _PLUGINS.get(platform, ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
