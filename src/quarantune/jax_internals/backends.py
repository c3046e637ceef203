"""JAX's backends: whether one is initialised, its plugins, and answers about a device that is elsewhere."""

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


def load_plugins() -> None:
    """Loads the plugins through which JAX reaches accelerators, and the libraries they need, but starts no backend.

    Private because JAX does it with whatever needs a backend first. It takes 0.08 s for CUDA, which forks of a process
    that has done it are spared. CUDA itself must not be touched here, since no fork could use it then: JAX's check of
    the libraries' versions would, which the caller's own JAX has made.
    """
    from jax._src import xla_bridge

    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        with contextlib.suppress(AttributeError):  # then every fork does it
            xla_bridge._discover_and_register_pjrt_plugins()
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextlib.contextmanager
def answer_for_device(platform: str, refuse: Callable[[str], None]) -> Iterator[None]:
    """Makes JAX speak for a device that this process does not have, while a program is traced for it.

    A kernel may choose its code by `jax.default_backend()`, which in a process without the device would name the CPU:
    it must hear of the device it is compiled for. Whoever asks for the devices themselves cannot be answered. JAX's own
    calls are left alone. All these public functions, however a module has imported them, get their answer from one
    private one, so that is where they are told apart, by who calls.

    Args:
        platform: what `jax.default_backend()` returns meanwhile.
        refuse: called, with its name, when the user's code calls another function about devices; it must raise.
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
    """Returns what XLA's compiler must know of a GPU to compile for it without having it; None where it cannot be had.

    The public `jax.experimental.topologies` takes such a description and gives none; the client's own topology has it.

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
