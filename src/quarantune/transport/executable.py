"""Compiled programs as bytes: one process compiles and writes them, another loads them onto the same devices.

The bytes are a pickle for a process that trusts the writer, or data that a reader decodes without running Python code.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.layout import Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from quarantune.host.interruptions import is_interruption
from quarantune.jax_internals import jax_arrays
from quarantune.jax_internals.other_processes import ExecutableParts, executable_parts, prepare_to_load
from quarantune.transport import pickling
from quarantune.values.codec import JsonObject, decode_json

_LARGEST_HEADER_BYTES = 1 << 24


def to_pickle(compiled: Any) -> bytes:
    """Returns a compiled program as bytes for `from_pickle`.

    Args:
        compiled: the result of `lower(...).compile()`.

    Raises:
        Exception: JAX cannot serialise the program.
    """
    return pickling.dumps((*serialize_executable.serialize(compiled), _device_ids(compiled)))


def from_pickle(blob: bytes) -> Any:
    """Returns the program, ready to run on the devices of this process with the same numbers.

    Args:
        blob: bytes from `to_pickle`, from a trusted process: loading them may run code.

    Raises:
        ValueError: This process lacks a device of the program.
    """
    serialized, in_tree, out_tree, numbers = pickling.loads(blob)
    prepare_to_load(serialized)
    here = {device.id: device for device in jax.local_devices()}
    if missing := [number for number in numbers if number not in here]:
        raise ValueError(f"it was compiled for the devices {numbers}, and {missing} are missing here")
    # By default JAX loads onto all devices, which ends the process if the program is for fewer.
    devices = [here[number] for number in numbers]
    return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, execution_devices=devices)


def is_in_order(sharding: jax.sharding.NamedSharding) -> bool:
    """Returns whether a mesh has the first devices in their order, like the meshes of workers."""
    mesh = sharding.mesh
    return [device.id for device in mesh.devices.flat] == list(range(mesh.size))


def _device_ids(compiled: Any) -> list[int]:
    """Returns the numbers of the devices that a program runs on, in the program's order."""
    runtime = compiled.runtime_executable()
    if not hasattr(runtime, "local_devices"):
        return [0]  # a program for one device, compiled without it
    return [device.id for device in runtime.local_devices()]


# --- as data ---


def to_data(compiled: Any) -> bytes:
    """Returns a compiled program as bytes for `from_data`.

    Args:
        compiled: the result of `lower(...).compile()`.

    Raises:
        ValueError: The program has parts that data cannot represent.
    """
    parts = executable_parts(compiled)
    header: JsonObject = {name: list(map(write, getattr(parts, name))) for name, (write, _) in _LISTS.items()}
    header |= {"devices": _device_ids(compiled), "name": parts.name, "committed": parts.committed, "out_tree": None}
    with contextlib.suppress(ValueError):
        header["out_tree"] = _tree(parts.out_tree)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + parts.program


def from_data(blob: bytes, *, onto: jax.Device | None = None) -> ExecutableParts:
    """Returns the parts of the program that `to_data` wrote, for the devices of this process with the same numbers.

    This runs no Python code from the bytes. XLA loads the machine code, which runs only if someone calls the program.

    Args:
        blob: the bytes.
        onto: the device for a program that runs on one device; None for the device with the same number.

    Raises:
        ValueError: The bytes are not from `to_data`, or this process lacks a device of the program.
    """
    try:
        (length,) = struct.unpack_from("<Q", blob)
        if length > _LARGEST_HEADER_BYTES:
            raise ValueError("its header is too long")
        header = decode_json(blob[8 : 8 + length])
        here = {device.id: device for device in jax.local_devices()}
        if onto is not None and len(header["devices"]) == 1:
            number = header["devices"][0]
            if number not in {device.id for device in onto.client.local_devices()}:
                # XLA would not run it: a worker numbers its devices from 0, but only one of several ranks has device 0.
                raise ValueError("this process has no device with its number")
            here = {number: onto}
        parts = ExecutableParts(
            program=blob[8 + length :],
            name=str(header["name"]),
            committed=bool(header["committed"]),
            **{name: [read(item, here) for item in header[name]] for name, (_, read) in _LISTS.items()},
            out_tree=None if header["out_tree"] is None else jax.tree.structure(_read_tree(header["out_tree"][0])),
            devices=[here[number] for number in header["devices"]],
        )
        if not parts.devices or (parts.out_tree is not None and parts.out_tree.num_leaves != len(parts.out_avals)):
            raise ValueError("it has no devices, or a wrong number of outputs")
        return parts
    except Exception as error:  # any class: JAX has several for parts that do not fit together
        if is_interruption(error):
            raise
        raise ValueError(f"the compiled program cannot be read: {error!r}") from error


# --- the parts of a program as data ---


def _aval(item: Any) -> list[Any]:
    if not jax_arrays.is_plain_aval(item):
        raise ValueError(f"{item} is not a plain array")
    is_key = jnp.issubdtype(item.dtype, jax.dtypes.prng_key)
    dtype = {"key": jax_arrays.key_impl(item.dtype)} if is_key else item.dtype.name
    return [list(map(int, item.shape)), dtype, bool(item.weak_type)]


def _read_aval(item: Any, _: object) -> Any:
    shape, name, weak_type = item
    dtype = jax_arrays.key_dtype(name["key"]) if isinstance(name, dict) else jnp.dtype(str(name))
    return jax_arrays.aval(list(map(int, shape)), dtype, weak_type=bool(weak_type))


# --- shardings and layouts ------------------------------------------------------------------------------------------


def _sharding(item: Any) -> Mapping[str, Any]:
    if isinstance(item, SingleDeviceSharding):
        device: Any
        (device,) = item.device_set
        return {"device": device.id, "memory": item.memory_kind}
    if isinstance(item, NamedSharding) and isinstance(item.mesh, Mesh):
        spec = [list(axes) if isinstance(axes, tuple) else axes for axes in item.spec]
        if any(axes is PartitionSpec.UNCONSTRAINED for axes in spec):
            raise ValueError(f"{item} leaves the place of an array open")
        return {
            "mesh": [device.id for device in item.mesh.devices.flat],
            "shape": list(item.mesh.devices.shape),
            "axes": [str(name) for name in item.mesh.axis_names],
            "kinds": [kind.name for kind in item.mesh.axis_types],
            "spec": spec,
            "memory": item.memory_kind,
        }
    raise ValueError(f"{item} is a sharding that cannot be represented as data")


def _read_sharding(item: Any, here: dict[int, Any]) -> Any:
    memory = None if item["memory"] is None else str(item["memory"])
    if "device" in item:
        return SingleDeviceSharding(here[item["device"]], memory_kind=memory)
    devices = np.array([here[number] for number in item["mesh"]], dtype=object).reshape(item["shape"])
    kinds = tuple(AxisType[kind] for kind in item["kinds"])
    mesh = Mesh(devices, tuple(map(str, item["axes"])), axis_types=kinds)
    spec = [tuple(map(str, axes)) if isinstance(axes, list) else axes for axes in item["spec"]]
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory)


def _layout(item: Any) -> Any:
    if item is None:
        return None
    size = item.sub_byte_element_size_in_bits
    return [list(item.major_to_minor), None if item.tiling is None else list(map(list, item.tiling)), size]


def _read_layout(item: Any, _: object) -> Any:
    if item is None:
        return None
    order, tiling, size = item
    return Layout(
        tuple(map(int, order)), None if tiling is None else tuple(tuple(map(int, tile)) for tile in tiling), size
    )


_LISTS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any, dict[int, Any]], Any]]] = {
    **dict.fromkeys(("kept", "donated"), (int, lambda item, _: int(item))),
    **dict.fromkeys(("all_in_avals", "in_avals", "out_avals"), (_aval, _read_aval)),
    **dict.fromkeys(("in_shardings", "out_shardings"), (_sharding, _read_sharding)),
    **dict.fromkeys(("in_layouts", "out_layouts"), (_layout, _read_layout)),
}
"""Parts of a program that are lists, with the functions that write and read an item; reading takes the devices here."""


# --- trees --------------------------------------------------------------------------------------------------


def _tree(tree: Any) -> list[Any]:
    """Describes a tree of built-in containers, inside a list, so that None can mean no description."""
    node = tree.node_data()
    if node is None:
        return ["leaf"]
    kind, about = node
    children = [_tree(child) for child in tree.children()]
    if kind in (tuple, list):
        return [[kind.__name__, children]]
    if kind is dict and all(isinstance(key, str) for key in about):
        return [["dict", dict(zip(about, children, strict=True))]]
    if kind is type(None):
        return [["none", []]]
    raise ValueError(f"a {kind.__name__} is not a plain container")


def _read_tree(item: Any) -> Any:
    if item == "leaf":
        return 0
    kind, children = item
    match kind:
        case "tuple":
            return tuple(_read_tree(child) for (child,) in children)
        case "list":
            return [_read_tree(child) for (child,) in children]
        case "dict":
            return {str(key): _read_tree(child) for key, (child,) in children.items()}
        case "none":
            return None
    raise ValueError(f"there is no container {kind!r}")
