"""JAX's backends, and the key-value store that the processes of one program share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import xla_bridge

from quarantune.host.frames import warn_once

_inherited: Any = None
"""The client inherited from the process that forked this one, or None. Its threads are not here: calls would hang."""


def backends_initialized() -> bool:
    """Returns whether this process has initialised a JAX backend.

    Private because every public way to ask (`jax.devices`, `jax.default_backend`) initialises one.
    """
    return bool(xla_bridge.backends_are_initialized())


def has_tpu() -> bool:
    """Returns whether this machine has TPUs on its PCI bus, whether or not their driver works.

    Private because JAX has no public way to look for them without initialising a backend, and files such as
    `/dev/accel0` and `/dev/vfio/0` differ between kinds of TPUs, or belong to other devices.
    """
    from jax._src import hardware_utils

    return bool(hardware_utils.num_available_tpu_chips_and_device_id()[0])


def target_config(devices: Sequence[Any]) -> str:
    """Returns the description of a GPU that XLA needs to compile for it elsewhere; empty if JAX has none.

    Private because the public `jax.experimental.topologies` accepts this description but cannot produce it.

    Args:
        devices: this process's devices.
    """
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        if devices[0].platform == "gpu":
            return str(xla_client.get_topology_for_devices(list(devices)).target_config)
    return ""


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
        """Returns the value of a key; None if it has none. Never waits for a value.

        Raises:
            RuntimeError: the service did not answer.
        """
        with _answered(without="NOT_FOUND"):
            return str(self.client.key_value_try_get(key))
        return None

    def write(self, key: str, value: str) -> bool:
        """Gives a key its value, unless it has one; returns whether this was the first writer.

        Raises:
            RuntimeError: the service did not answer.
        """
        with _answered(without="ALREADY_EXISTS"):
            self.client.key_value_set(key, value, allow_overwrite=False)
            return True
        return False

    def put(self, key: str, value: str) -> None:
        """Gives a key a value, in place of one that it may have.

        Raises:
            RuntimeError: the service did not answer.
        """
        with _answered():
            self.client.key_value_set(key, value, allow_overwrite=True)

    def listed(self, directory: str) -> dict[str, str]:
        """Returns the values of the keys that begin with `directory` and a slash, by the rest of the key.

        Raises:
            RuntimeError: the service did not answer.
        """
        start = f"{directory}/"
        with _answered(without="NOT_FOUND"):
            return {str(key).removeprefix(start): str(value) for key, value in self.client.key_value_dir_get(start)}
        return {}

    def count(self, directory: str) -> int:
        """Returns how many keys begin with `directory` and a slash.

        Raises:
            RuntimeError: the service did not answer.
        """
        return len(self.listed(directory))


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


def _warn_missing() -> None:
    warn_once(
        f"quarantune finds no key-value store in jax.distributed of jax {jax.__version__}: each process of this "
        f"program tunes for itself, and a program whose collectives depend on the config may hang; let the processes "
        f"share a QUARANTUNE_CACHE_DIR that has been tuned before, or set QUARANTUNE_AGREE=0 to silence this warning",
        RuntimeWarning,
    )


@contextlib.contextmanager
def _answered(*, without: str = "") -> Iterator[None]:
    """Ends the block quietly at an error that contains the text `without`; raises if the service did not answer."""
    try:
        yield
    except Exception as error:
        if not without or without not in str(error):
            raise RuntimeError(
                f"the coordination service of this jax.distributed program did not answer, so its processes cannot "
                f"agree on a config ({str(error).partition(chr(10))[0]}): see whether process 0 still runs, or set "
                f"QUARANTUNE_AGREE=0 in all processes"
            ) from error


def _forget_inherited() -> None:
    global _inherited
    distributed = sys.modules.get("jax._src.distributed")
    _inherited = getattr(getattr(distributed, "global_state", None), "client", None)


os.register_at_fork(after_in_child=_forget_inherited)
