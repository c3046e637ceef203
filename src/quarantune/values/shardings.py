"""Meshes and shardings as values: without devices, so that they can be sent, compared and described."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """A mesh without its devices.

    Attributes:
        shape: the size of each axis.
        axis_names: the names of the axes.
        axis_types: the name of each axis's `jax.sharding.AxisType`.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_types: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def is_manual(self) -> bool:
        """Whether the function is called inside a `shard_map` over this mesh."""
        return jax.sharding.AxisType.Manual.name in self.axis_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """How an array is laid out over a mesh.

    Attributes:
        mesh: the mesh.
        partitions: for each axis of the array, the mesh axes it is split over: None, one name, or several.
    """

    mesh: MeshSpec
    partitions: tuple[str | tuple[str, ...] | None, ...]


def sharding_of(array: Any) -> ShardingSpec | None:
    """Returns how an array is laid out over several devices; None if it is on one device, or JAX does not say.

    Args:
        array: an array, a `jax.ShapeDtypeStruct` or a tracer. The sharding of a tracer is known only along explicit
            axes. Inside `shard_map` a tracer stands for one shard, which is on one device.
    """
    is_tracer = isinstance(array, jax.core.Tracer)
    sharding: Any = getattr(jax.typeof(array) if is_tracer else array, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    if is_tracer and jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    mesh = _mesh_spec(sharding.mesh)
    return ShardingSpec(mesh=mesh, partitions=tuple(sharding.spec)) if mesh.size > 1 else None


def _mesh_spec(mesh: Any) -> MeshSpec:
    """Returns a mesh without its manual axes, which a function inside `shard_map` does not see."""
    axes = [
        (size, name, kind.name)
        for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
        if kind is not jax.sharding.AxisType.Manual
    ]
    shape, names, kinds = zip(*axes, strict=True) if axes else ((), (), ())
    return MeshSpec(shape=shape, axis_names=names, axis_types=kinds)


def abstract_mesh(spec: MeshSpec) -> jax.sharding.AbstractMesh:
    """Returns a mesh without devices."""
    kinds = tuple(jax.sharding.AxisType[name] for name in spec.axis_types)
    return jax.sharding.AbstractMesh(spec.shape, spec.axis_names, axis_types=kinds)


def abstract_sharding(spec: ShardingSpec) -> jax.sharding.NamedSharding:
    """Returns a sharding over a mesh without devices, for a `jax.ShapeDtypeStruct`."""
    return jax.sharding.NamedSharding(abstract_mesh(spec.mesh), jax.sharding.PartitionSpec(*spec.partitions))


def local_sharding(array: Any, spec: ShardingSpec | None) -> jax.sharding.NamedSharding | None:
    """Returns how an array is laid out over the devices of this process.

    Args:
        array: the array, or whatever stands for it.
        spec: what `sharding_of` returned for it.

    Returns:
        The sharding; None if the array is on one device, or its devices are not known.
    """
    if spec is None:
        return None
    sharding: Any = None if isinstance(array, jax.core.Tracer) else array.sharding
    if sharding is not None and isinstance(sharding.mesh, jax.sharding.Mesh):
        return cast("jax.sharding.NamedSharding", sharding)
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX does not say while it traces
        return None
    is_same = _mesh_spec(mesh) == spec.mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec.partitions)) if is_same else None


def context_mesh() -> MeshSpec | None:
    """Returns the mesh that `jax.set_mesh` has set, without manual axes; None if it has fewer than two devices."""
    mesh = _mesh_spec(jax.sharding.get_abstract_mesh())
    return mesh if mesh.size > 1 else None


def describe_context_mesh(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns a JSON-able description of the mesh that `jax.set_mesh` has set.

    Args:
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.

    Returns:
        The description; None if there is no such mesh, or the sharding of an argument describes it already.
    """
    mesh = context_mesh()
    if mesh is None:
        return None
    shardings = [sharding_of(leaf) for leaf in jax.tree.leaves((args, dict(kwargs)))]
    if any(sharding is not None and sharding.mesh == mesh for sharding in shardings):
        return None
    return {"shape": list(mesh.shape), "axes": list(mesh.axis_names), "types": list(mesh.axis_types)}
