"""A call in transit: its function, its arguments with a reference for each array, and a description of each array."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax

from quarantune import jax_internals
from quarantune.values.describe import MeshSpec, ShardingSpec
from quarantune.values.texts import shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One array among a call's arguments.

    Attributes:
        index: its number among the arrays of the call.
        shape: its shape.
        dtype: the name of its dtype; for a PRNG key array, the dtype of its key data.
        weak_type: whether it is weakly typed.
        is_committed: whether it is on one device and bound to that, which makes another program of a call.
        kind: `jax` or `numpy` array, or PRNG `key` array.
        key_impl: the PRNG implementation of a key array, else None.
        offset: where its bytes start in the spool.
        nbytes: how many bytes it has in the spool; 0 if the worker generates it.
        made: whether the worker generates the array, because there is no concrete value.
        sharding: how it is laid out over several devices; None if it is on one device.
        is_transposed: whether the spool has the bytes of its transpose. A numpy array in Fortran order keeps its order,
            as the speed of a plain callable may depend on it.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False
    is_committed: bool = False
    kind: Literal["jax", "numpy", "key"] = "jax"
    key_impl: str | None = None
    offset: int = 0
    nbytes: int = 0
    made: bool = False
    sharding: ShardingSpec | None = None
    is_transposed: bool = False

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of the data in the spool, where key arrays have further axes."""
        return self.shape if self.key_impl is None else self.shape + jax_internals.key_data_shape(self.key_impl)


@dataclasses.dataclass(frozen=True)
class ArrayRef:
    """Stands for an array in the argument trees of a call.

    It has a shape and a dtype because a pytree class of the user's may read them when it is unflattened.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class ProgramValue:
    """A value of one of the caller's modules.

    Attributes:
        place: the name of the module, and the steps to the value.
        state: a hash of its state.
        same_as: the number of the first of the values that are this very object; -1 for an object without identity.
        shown: its repr, where it cannot travel.
        blob: the pickled value; None where it cannot travel.
        reason: why a part of it cannot.
    """

    place: tuple[str, ...]
    state: str
    same_as: int
    shown: str
    blob: bytes | None
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call as it arrives in a worker; pickled as one, so that an object shared by two of its parts stays one object.

    Attributes:
        fn: the function.
        args: positional arguments, with an `ArrayRef` for each array.
        kwargs: keyword arguments, likewise.
        specs: the arrays the references point to.
        judges: functions that judge the function's output, by name.
        config_values: the config values that JSON cannot restore, by their JSON texts.
        context_mesh: the mesh that the worker sets; None for none.
        program_values: the values of modules that a worker takes over; empty in the caller's process.
        own_shardings: in the caller's process, how each array is laid out over the caller's devices, None for an array
            that is on one device or whose devices are not known; empty in a worker, which has other devices.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    specs: tuple[ArraySpec, ...]
    judges: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    config_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    context_mesh: MeshSpec | None = None
    program_values: tuple[ProgramValue, ...] = ()
    own_shardings: tuple[jax.sharding.NamedSharding | None, ...] = ()

    @property
    def devices_needed(self) -> int:
        """How many devices the arrays, or the mesh of the context, are laid out over; at least 1."""
        meshes = [self.context_mesh, *(spec.sharding.mesh for spec in self.specs if spec.sharding is not None)]
        return max((mesh.size for mesh in meshes if mesh is not None), default=1)

    @property
    def spool_bytes(self) -> int:
        """The size of the spool."""
        return max((spec.offset + spec.nbytes for spec in self.specs if spec.nbytes), default=0)

    def labelled_parts(self) -> Iterator[tuple[str, Any]]:
        """Yields the parts that may be impossible to pickle, each after a phrase that names it."""
        yield f"the function {getattr(self.fn, '__qualname__', shown(self.fn))!r}", self.fn
        yield from ((f"argument {index}", value) for index, value in enumerate(self.args))
        yield from ((f"argument {key!r}", value) for key, value in self.kwargs.items())
        yield from ((f"the function given as {key}", value) for key, value in self.judges.items())
        yield from ((f"the config value {shown(value)}", value) for value in self.config_values.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A call ready to be sent.

    Attributes:
        blob: everything except the bytes of the arrays, for `payload.unpack_call`.
        call: the same call for trials in this process.
        devices_needed: how many devices the arrays, or the mesh of the context, are laid out over.
        sources: the caller's arrays, in the order of `call.specs`; None for each that the worker generates.
        spool: the content of the spool, where the call was packed on another machine; None where `sources` hold it.
    """

    blob: bytes
    call: Call = dataclasses.field(repr=False, compare=False)
    devices_needed: int
    sources: tuple[Any, ...] = dataclasses.field(repr=False, compare=False)
    spool: bytes | None = dataclasses.field(default=None, repr=False, compare=False)
