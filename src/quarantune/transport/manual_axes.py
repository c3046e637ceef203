"""Finds functions that communicate over the axes of a `jax.shard_map`, and calls them on a similar mesh in workers.

Inside `shard_map` a function gets one shard of each array, and most functions are tuned for that shard on one device.
A function that names an axis of the mesh, for example to sum over it, cannot run on one device: its workers need a mesh
with the same axes, and call the function in another `shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from quarantune.functions.describe import sharding_of
from quarantune.host.interruptions import answer_of
from quarantune.jax_internals import jax_functions, jax_traces
from quarantune.transport import assignment
from quarantune.transport.arrays import ArraySpec, mesh_like

if TYPE_CHECKING:
    from quarantune.transport.payload import Call  # a call in a trace needs no pickling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """The manual axes around the call of a function that communicates over some of them.

    Attributes:
        sizes: the number of shards along each axis.
        mesh: the mesh for its workers; None if they cannot have a mesh with these axes.
        problem: the reason for a missing mesh.
    """

    sizes: dict[str, int]
    mesh: AbstractMesh | None = None
    problem: str = ""

    def check(self, name: str) -> None:
        """Raises if workers cannot have a mesh with these axes.

        Args:
            name: the function's name in the message.

        Raises:
            TypeError: Workers cannot have a mesh with these axes.
        """
        if self.mesh is None:
            raise TypeError(
                f"{name} cannot be tuned here: {self.problem}. Give its tunables by hand in this call, or run it with "
                f"its defaults: with quarantune.settings(on_miss='default')"
            )

    def sharding_of(self, shard: Any) -> NamedSharding | None:
        """Returns a sharding for a recorded shard: along the axes that it varies along, as far as JAX knows these."""
        names = tuple(name for name in self.sizes if name in jax_traces.varying_axes(shard))
        return NamedSharding(self.mesh, PartitionSpec(names)) if self.mesh and names and shard.ndim else None


def communicated_over(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Axes | None:
    """Returns the axes around a call whose function communicates over some of them; None for other calls.

    If there are named axes around the call, this traces the function and the kernels that it calls, with their defaults
    and without tuning. If the trace fails, the function counts as not communicating, because this process must not try
    other configs.

    Args:
        fn: the jitted function.
        args: the call's positional arguments.
        kwargs: its keyword arguments.
    """
    bound = jax_traces.bound_axes()
    if not bound:
        return None
    with assignment.without_tuning("axes"):
        used = answer_of(lambda: set(_names(fn.trace(*args, **kwargs).jaxpr.jaxpr, bound)))
    if not used:
        return None
    around = jax.sharding.get_abstract_mesh()
    kinds = zip(around.shape.items(), around.axis_types, strict=True)
    manual = {name: size for (name, size), kind in kinds if kind is AxisType.Manual}
    if others := sorted(used - manual.keys()):
        names = " and ".join(map(repr, others))
        return Axes(sizes=bound, problem=f"it communicates over {names}, which only jax.vmap or jax.pmap knows")
    if any(sharding_of(leaf) is not None for leaf in jax.tree_util.tree_leaves((args, dict(kwargs)))):
        return Axes(sizes=manual, problem="its arguments are laid out over further axes that are explicit")
    mesh = AbstractMesh(tuple(manual.values()), tuple(manual), axis_types=(AxisType.Manual,) * len(manual))
    return Axes(sizes=manual, mesh=mesh)


def _names(jaxpr: Any, bound: Mapping[str, int]) -> Iterator[str]:
    """Yields the axes that a program names in its collectives."""
    for equation in jax_traces.equations(jaxpr):
        name = equation.primitive.name
        if name == "pvary" or "cast" in name:
            continue  # changes only the type of a value, for example of a constant before adding it to an array
        for parameter in ("axis_name", "axes"):
            value = equation.params.get(parameter, ())
            names = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
            yield from (name for name in names if isinstance(name, str) and name in bound)


def under_shard_map(call: Call) -> Call:
    """Returns a worker's call, with its functions in a `shard_map` if the caller's function is in a `shard_map`.

    The outputs get a new first axis, which `shard_map` splits over the devices.

    Args:
        call: the call, from `payload.unpack_call`.
    """
    meshes = (spec.sharding.mesh for spec in call.specs if spec.sharding is not None)
    mesh = next((mesh for mesh in meshes if AxisType.Manual in mesh.axis_types), None)
    if mesh is None:
        return call
    jitted: Any = call.fn
    options = jax_functions.jit_options(jitted)
    judges = dict(call.judges)
    if "ref_fn" in judges:
        judges["ref_fn"] = _sharded(judges["ref_fn"], call, mesh)
    # The function inside the jit, because JAX accepts compiler options only at the outermost jit.
    return dataclasses.replace(call, fn=options.rebuild(_sharded(jitted.__wrapped__, call, mesh)), judges=judges)


def _sharded(fn: Callable[..., Any], call: Call, mesh: AbstractMesh | Mesh) -> Callable[..., Any]:
    described = jax.tree_util.tree_leaves((call.args, call.kwargs))

    @functools.wraps(fn)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs[name] for name in call.kwargs}
        leaves, structure = jax.tree_util.tree_flatten((args, given))
        shards = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

        def local(*arrays: jax.Array) -> Any:
            filled = {**dict(enumerate(leaves)), **dict(zip(shards, arrays, strict=True))}
            local_args, local_kwargs = jax.tree_util.tree_unflatten(structure, filled.values())
            output = fn(*local_args, **{**kwargs, **local_kwargs})
            return jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf)[None], output)

        over_devices = jax.shard_map(
            local,
            mesh=mesh_like(mesh),
            in_specs=tuple(_partitions(described[place]) for place in shards),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )
        return jax.jit(over_devices)(*shards.values())

    return sharded


def _partitions(leaf: Any) -> PartitionSpec:
    sharding = leaf.sharding if isinstance(leaf, ArraySpec) else None
    return PartitionSpec() if sharding is None else sharding.spec
