"""JAX's backends: whether one is initialised, its plugins, and the answers to code traced for an absent device."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def backends_initialized() -> bool:
    """Returns whether this process has initialised a JAX backend.

    Private because every public way to ask (`jax.devices`, `jax.default_backend`) initialises one.
    """
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


_has_plugins = False
"""Whether `load_plugins` has done its work, in this process or in the one that it was forked from."""


def load_plugins() -> None:
    """Loads JAX's plugins for accelerators, and the libraries they need, without initialising a backend.

    Private because JAX loads plugins only when it initialises a backend. Loading CUDA's takes 0.08 s, which every fork
    of this process is spared. JAX's check of CUDA library versions is skipped: it would initialise CUDA, which no fork
    could use afterwards, and the caller's JAX has made it already.
    """
    global _has_plugins
    if _has_plugins:
        return
    from jax._src import xla_bridge

    _has_plugins = True
    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        with contextlib.suppress(AttributeError):  # another version of JAX: every fork loads the plugins
            xla_bridge._discover_and_register_pjrt_plugins()
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextlib.contextmanager
def answer_for_device(platform: str, refuse: Callable[[str], None]) -> Iterator[None]:
    """Makes JAX answer for a device that this process does not have, while a program is traced for that device.

    A kernel may choose its code by `jax.default_backend()`, which names the CPU in a process without the device, but
    must name the device that the kernel is compiled for. Functions that return the devices themselves have no answer.
    Calls from JAX's own code are unaffected.

    Private (`xla_bridge.get_backend`) because all the public functions get their answer from it, however a module has
    imported them. The calling frames tell which function was called, and whether by the user's code or by JAX's.

    Args:
        platform: the result of `jax.default_backend()` meanwhile.
        refuse: called with the function's name when the user's code calls another function about devices; must raise.
    """
    from jax._src import xla_bridge

    real = xla_bridge.get_backend
    asking = {"default_backend", "devices", "local_devices", "device_count", "local_device_count"}

    def get_backend(*args: Any, **kwargs: Any) -> Any:
        asked = sys._getframe(1)
        name = asked.f_code.co_name
        asker = asked.f_back
        if name in asking and asker is not None and not _is_jax(asker):
            if name == "default_backend":
                return types.SimpleNamespace(platform=platform)
            refuse(name)
        return real(*args, **kwargs)

    xla_bridge.get_backend = get_backend
    try:
        yield
    finally:
        xla_bridge.get_backend = real


def _is_jax(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("jax", "jaxlib")


def target_config(devices: Sequence[Any]) -> str | None:
    """Returns the description of a GPU that XLA needs to compile for it elsewhere; None if there is none.

    Private because the public `jax.experimental.topologies` accepts such a description but cannot produce one.

    Args:
        devices: this process's devices.
    """
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    if devices[0].platform != "gpu":
        return None
    try:
        return str(xla_client.get_topology_for_devices(list(devices)).target_config)
    except (AttributeError, RuntimeError, TypeError):
        return None
