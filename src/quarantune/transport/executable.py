"""Compiled programs as bytes: written by the process that compiles, loaded by another one onto the same devices."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import serialize_executable

from quarantune import jax_internals
from quarantune.transport import pickling


def dumps(compiled: Any) -> bytes:
    """Returns a compiled program as bytes for `loads`.

    Args:
        compiled: the result of `lower(...).compile()`.

    Raises:
        Exception: the program cannot be serialised.
    """
    return pickling.dumps((*serialize_executable.serialize(compiled), device_ids(compiled)))


def loads(blob: bytes) -> Any:
    """Returns the program, ready to run on the devices of this process with the same numbers.

    Args:
        blob: bytes from `dumps`, from a trusted process: loading them may run code.

    Raises:
        ValueError: this process lacks one of the devices.
    """
    serialized, in_tree, out_tree, numbers = pickling.loads(blob)
    jax_internals.prepare_to_load(serialized)
    here = {device.id: device for device in jax.local_devices()}
    if missing := [number for number in numbers if number not in here]:
        raise ValueError(f"it was compiled for the devices {numbers}, of which {missing} are missing here")
    # By default JAX loads onto all devices, which ends the process if the program was compiled for fewer.
    devices = [here[number] for number in numbers]
    return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, execution_devices=devices)


def device_ids(compiled: Any) -> list[int]:
    """Returns the numbers of the devices that a program runs on, in the program's order."""
    runtime = compiled.runtime_executable()
    if not hasattr(runtime, "local_devices"):
        return [0]  # compiled without its device, for one device
    return [device.id for device in runtime.local_devices()]
