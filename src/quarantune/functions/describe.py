"""Describes arrays, meshes and shardings, so that every process describes equal ones alike."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from quarantune.values.codec import JsonObject

_SUMS = ("unreduced", "reduced")
"""Attributes of a `PartitionSpec`: the mesh axes over which a sum is still to be made, or was made."""


def describe_array(array: Any, dtype: Any) -> JsonObject:
    """Returns a JSON-able description of an array without its elements.

    Args:
        array: the array, or its stand-in.
        dtype: its dtype as the function sees it.
    """
    described: JsonObject = {"shape": list(array.shape), "dtype": str(dtype)}
    if getattr(array, "weak_type", False):
        described["weak_type"] = True
    sharding = _describe_sharding(array)
    if sharding is not None:
        described["sharding"] = sharding
    if is_in_host_memory(array):
        described["memory"] = "host"
    if (layout := layout_of(array)) is not None:
        described["layout"] = list(layout)
    return described


def is_in_host_memory(array: Any) -> bool:
    """Returns whether a JAX array, a tracer or a `jax.ShapeDtypeStruct` is in the memory of a device's host."""
    if isinstance(array, jax.Array):
        return getattr(getattr(jax.typeof(array), "memory_space", None), "name", "") == "Host"
    sharding = array.sharding if isinstance(array, jax.ShapeDtypeStruct) else None
    return "host" in (getattr(sharding, "memory_kind", None) or "")


def layout_of(array: Any) -> tuple[int, ...] | None:
    """Returns the order of the axes of a concrete array in memory; None for row-major order, or if JAX does not say."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or array.ndim < 2:
        return None
    with contextlib.suppress(Exception):  # a key, or a deleted array
        order = tuple(cast("Any", array).format.layout.major_to_minor)
        return None if order == tuple(range(array.ndim)) else order
    return None


def _describe_sharding(array: Any) -> Any:
    """Describes how an array is laid out over several devices; returns None for an array on one device."""
    if (named := sharding_of(array)) is not None:
        # With explicit axes the function is another program, or fails to trace.
        kinds = zip(named.mesh.axis_names, named.mesh.axis_types, strict=True)
        explicit = [name for name, kind in kinds if kind is AxisType.Explicit]
        described = {"spec": describe_spec(named.spec), "mesh": dict(named.mesh.shape)}
        return described | ({"explicit": explicit} if explicit else {})
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or len(array.sharding.device_set) == 1:
        return None
    return {"type": type(array.sharding).__name__, "devices": len(array.sharding.device_set)}


def describe_spec(spec: Any) -> list[Any]:
    """Returns a description of a `PartitionSpec`."""
    axes = [list(axis) if isinstance(axis, tuple) else axis and str(axis) for axis in parts_of(spec)]
    while axes and axes[-1] is None:  # P("x") and P("x", None) are one layout
        axes.pop()
    further = {name: sorted(map(str, found)) for name in _SUMS if (found := getattr(spec, name, None))}
    return [*axes, further] if further else axes


def parts_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """Returns the axes of a `PartitionSpec` for each dimension."""
    return tuple(getattr(spec, "partitions", spec))


def canonical_dtype(dtype: Any) -> Any:
    """Returns the dtype JAX gives an array of this one (float64 is float32 unless x64 is on)."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype.kind in "OSUMm" or dtype.names is not None:
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def sharding_of(array: Any) -> NamedSharding | None:
    """Returns how an array is laid out over several devices; None if it is on one device, or JAX does not say.

    Args:
        array: an array, a `jax.ShapeDtypeStruct`, a tracer or its abstract value. The sharding of the last two is known
            only along explicit axes. Inside `shard_map` a tracer stands for one shard, which is on one device.

    Returns:
        The sharding, over a mesh without devices.
    """
    is_tracer = isinstance(array, jax.core.Tracer)
    sharding: Any = getattr(jax.typeof(array) if is_tracer else array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    is_traced = is_tracer or isinstance(array, jax.core.ShapedArray)
    if is_traced and AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    mesh = _abstract(sharding.mesh)
    return NamedSharding(mesh, sharding.spec) if mesh.size > 1 else None


def _abstract(mesh: Any) -> AbstractMesh:
    """Returns a mesh without devices, and without its manual axes, which a function inside `shard_map` does not see."""
    axes = [
        (size, name, kind)
        for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
        if kind is not AxisType.Manual
    ]
    sizes, names, kinds = zip(*axes, strict=True) if axes else ((), (), ())
    return AbstractMesh(sizes, names, axis_types=kinds)


def local_sharding(array: Any, sharding: NamedSharding | None) -> NamedSharding | None:
    """Returns how an array is laid out over the devices of this process.

    Args:
        array: the array, or its stand-in.
        sharding: the result of `sharding_of` for it.

    Returns:
        The sharding; None if the array is on one device, or its devices are unknown.
    """
    if sharding is None:
        return None
    own: Any = None if isinstance(array, jax.core.Tracer) else array.sharding
    if own is not None and isinstance(own.mesh, jax.sharding.Mesh):
        return cast("NamedSharding", own)
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX does not say while it traces
        return None
    return NamedSharding(mesh, sharding.spec) if _abstract(mesh) == sharding.mesh else None


def context_mesh() -> AbstractMesh | None:
    """Returns the mesh that `jax.set_mesh` has set, without manual axes; None if it has fewer than two devices."""
    mesh = _abstract(jax.sharding.get_abstract_mesh())
    return mesh if mesh.size > 1 else None


def describe_context_mesh(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns a JSON-able description of the mesh that `jax.set_mesh` has set.

    Args:
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.

    Returns:
        The description; None if no mesh is set, or if the sharding of an argument describes it already.
    """
    mesh = context_mesh()
    if mesh is None:
        return None
    shardings = [sharding_of(leaf) for leaf in jax.tree.leaves((args, dict(kwargs)))]
    if any(sharding is not None and sharding.mesh == mesh for sharding in shardings):
        return None
    types = [kind.name for kind in mesh.axis_types]
    return {"shape": list(mesh.axis_sizes), "axes": list(mesh.axis_names), "types": types}
