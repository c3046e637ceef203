"""JAX's backends and plugins, answers for an absent device, and the store that a program's processes share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import xla_bridge
from jax._src.array import ArrayImpl

from quarantune.host.process import environment_variables, warn

_ASKING = frozenset({"default_backend", "devices", "device_count", "local_device_count"})
"""The functions of JAX that say what `get_backend` returned."""
_PLATFORM_NAMES = {"gpu": ("cuda", "rocm")}
"""The other names of a platform whose devices are asked for."""
_KERNELS_OF_JAX = "jax.experimental.pallas.ops."


def backends_initialized() -> bool:
    """Returns whether this process has initialised a JAX backend.

    Private because every public way to ask (`jax.devices`, `jax.default_backend`) initialises one.
    """
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
    _has_plugins = True
    missing = contextlib.suppress(AttributeError)  # another version of JAX: every fork loads the plugins
    with environment_variables({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}), missing:
        xla_bridge._discover_and_register_pjrt_plugins()


@contextlib.contextmanager
def answer_for_device(device: Any, asked: Callable[[str], None]) -> Iterator[None]:
    """Makes JAX answer for one device that this process does not have, while a program is traced for that device.

    A kernel may choose its code by `jax.default_backend()` or by the kind of `jax.devices()[0]`, which are the CPU's in
    a process without the device, but must be those of the device that the kernel is compiled for. So must the device of
    an array that the kernel closes over. Calls from JAX's own code are unaffected, apart from the kernels that come
    with it.

    Private (`xla_bridge.get_backend`) because nearly all the public functions get their answer from it, however a
    module has imported them. The calling frames tell which function was called, and by whose code. `ArrayImpl`, because
    the public `jax.Array` only declares its methods.

    Args:
        device: JAX's description of the device.
        asked: called with the name of a function that returned the device, or how many there are, to code that may ask
            the device what its description cannot answer. JAX, and the kernels that come with it, ask for its kind and
            its number of cores alone.
    """
    from jax.extend import backend as extension

    real, real_local_devices, real_default = xla_bridge.get_backend, jax.local_devices, extension.get_default_device
    names = {device.platform, *_PLATFORM_NAMES.get(device.platform, ())}
    backend = types.SimpleNamespace(
        platform=device.platform,
        devices=lambda: [device],
        device_count=lambda: 1,
        local_device_count=lambda: 1,
    )

    def tell(name: str, asker: types.FrameType) -> None:
        if not _comes_with_jax(asker):
            asked(name)

    def get_backend(platform: Any = None) -> Any:
        function = sys._getframe(1)
        name, asker = function.f_code.co_name, function.f_back
        if platform not in (None, *names) or name not in _ASKING or asker is None or _is_jax(asker):
            return real(platform)
        if name != "default_backend":
            tell(name, asker)
        return backend

    def local_devices(process_index: int | None = None, backend: Any = None, host_id: int | None = None) -> Any:
        # JAX remembers its own answer, whoever asked.
        if backend not in (None, *names) or _is_jax(sys._getframe(1)):
            return real_local_devices(process_index, backend, host_id)
        tell("local_devices", sys._getframe(1))
        return [device]

    def get_default_device() -> Any:
        tell("extend.backend.get_default_device", sys._getframe(1))
        return device

    array_type: Any = ArrayImpl
    real_devices, real_device = array_type.devices, array_type.device

    def devices(array: Any) -> Any:
        if _is_jax(asker := sys._getframe(1)):
            return real_devices(array)
        tell("Array.devices", asker)
        return {device}

    def device_of(array: Any) -> Any:
        if _is_jax(asker := sys._getframe(1)):
            return real_device.fget(array)
        tell("Array.device", asker)
        return device

    def answer_with(*answers: Any) -> None:
        xla_bridge.get_backend, jax.local_devices, extension.get_default_device = answers[:3]
        array_type.devices, array_type.device = answers[3:]

    answer_with(get_backend, local_devices, get_default_device, devices, property(device_of))
    try:
        yield
    finally:
        answer_with(real, real_local_devices, real_default, real_devices, real_device)


def _is_jax(frame: types.FrameType) -> bool:
    return _comes_with_jax(frame) and not _module(frame).startswith(_KERNELS_OF_JAX)


def _comes_with_jax(frame: types.FrameType) -> bool:
    return _module(frame).startswith(("jax.", "jaxlib."))


def _module(frame: types.FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


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


# --- the processes of one program ---

_inherited: Any = None
"""The client that this process has from the process it was forked from, whose threads it lacks: calls would hang."""


class CoordinationError(RuntimeError):
    """The coordination service of the program did not answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coordination:
    """This process's access to the key-value store of its program.

    Attributes:
        client: JAX's client of the coordination service.
        rank: the number of this process in the program.
        ranks: how many processes the program has.
    """

    client: Any
    rank: int
    ranks: int

    def read(self, key: str) -> str | None:
        """Returns the value of a key; None where it has none. Never waits for one.

        Raises:
            CoordinationError: the service did not answer.
        """
        with _answered(without="NOT_FOUND"):
            return str(self.client.key_value_try_get(key))
        return None

    def write(self, key: str, value: str) -> bool:
        """Gives a key its value, unless it has one; returns whether this was the first writer.

        Raises:
            CoordinationError: the service did not answer.
        """
        with _answered(without="ALREADY_EXISTS"):
            self.client.key_value_set(key, value, allow_overwrite=False)
            return True
        return False

    def count(self, directory: str) -> int:
        """Returns how many keys begin with `directory` and a slash.

        Raises:
            CoordinationError: the service did not answer.
        """
        with _answered(without="NOT_FOUND"):
            return len(self.client.key_value_dir_get(f"{directory}/"))
        return 0


def coordination() -> Coordination | None:
    """Returns this process's access to the key-value store; None in a program of one process.

    Private (`distributed.global_state`) because JAX makes public only whether it is initialised: neither the client nor
    the number of processes, for which `jax.process_count` would initialise a backend.
    """
    from jax._src import distributed

    try:
        state = distributed.global_state
        client = state.client
        if client is None or client is _inherited:
            return None
        client.key_value_try_get, client.key_value_set, client.key_value_dir_get  # noqa: B018 - are they there?
        rank, ranks = int(state.process_id), int(state.num_processes)
    except (AttributeError, TypeError, ValueError):
        if jax.distributed.is_initialized():
            _warn_missing()
        return None
    return Coordination(client=client, rank=rank, ranks=ranks) if ranks > 1 else None


@functools.cache
def _warn_missing() -> None:
    warn(
        f"quarantune finds no key-value store in jax.distributed of jax {jax.__version__}: each process of this "
        f"program tunes for itself, and a program whose collectives depend on the config may hang; let the processes "
        f"share a QUARANTUNE_CACHE_DIR that has been tuned before, or set QUARANTUNE_AGREE=0 to silence this warning",
        RuntimeWarning,
    )


@contextlib.contextmanager
def _answered(*, without: str) -> Iterator[None]:
    """Ends the block at an answer of the service that says so, and raises `CoordinationError` where there is none."""
    try:
        yield
    except Exception as error:
        if without not in str(error):
            raise CoordinationError(
                f"the coordination service of this jax.distributed program did not answer, so its processes cannot "
                f"agree on a config ({str(error).partition(chr(10))[0]}): see whether process 0 still runs, or set "
                f"QUARANTUNE_AGREE=0 in all processes"
            ) from error


def _forget_inherited() -> None:
    global _inherited
    distributed = sys.modules.get("jax._src.distributed")
    _inherited = getattr(getattr(distributed, "global_state", None), "client", None)


os.register_at_fork(after_in_child=_forget_inherited)
