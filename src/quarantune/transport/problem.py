"""Describes a call in the caller's process: the values that make up its key, and the platform it is for."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from quarantune import jax_internals
from quarantune.values import describe
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config, is_tagged, tagged
from quarantune.values.describe import MeshSpec

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call: the positional ones, and the keyword arguments by name."""

_EMPTY = inspect.Parameter.empty
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallDescription:
    """The facts about a call that are known before it runs.

    Attributes:
        key_values: JSON-able descriptions of the arguments, equal for calls that share a tuned config.
        tunables_given: the tunable parameters that the caller passed by hand.
        has_tracers: whether an argument is a tracer, so that there is no data to tune with.
        platform: JAX's name for where the call's concrete JAX arrays are (`cpu`, `gpu` or `tpu`); None if it has none.
    """

    key_values: JsonObject
    tunables_given: frozenset[str]
    has_tracers: bool
    platform: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A call to tune for.

    Attributes:
        fn: the function to tune, jitted or not.
        name: its name in messages.
        args: the call's positional arguments; arrays may be concrete, tracers or `jax.ShapeDtypeStruct`.
        kwargs: the call's keyword arguments, likewise.
        platform: the platform to tune for: `cpu`, `cuda`, `rocm` or `tpu`.
        device_kind: the kind of device to tune for, by its name in the cache.
        manual_mesh: the mesh of the enclosing `shard_map`, if the function communicates over it; else None.
        untuned: the config with the function's own defaults; None if a tunable has no default.
        default: the index of `untuned` among the configs; None if it is not one of them.
    """

    fn: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    platform: str
    device_kind: str
    manual_mesh: MeshSpec | None = None
    untuned: Config | None = None
    default: int | None = None


def describe_call(
    signature: inspect.Signature,
    static_names: Iterable[str],
    tunable_names: Iterable[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_jitted: bool = True,
    optional: Collection[str] = (),
) -> CallDescription:
    """Describes a call, in the same way however it is spelt.

    `f(a)`, `f(a=a)` and, if `transpose` defaults to False, `f(a, transpose=False)` have one description. Arrays are
    described by shape, dtype and weak type, Python numbers in dynamic parameters by type, all else by value. A function
    that is not jitted receives NumPy arrays and numbers unchanged: they are described by their own dtype and by value.

    Args:
        signature: of the tuned function.
        static_names: its static parameters, which are described by value.
        tunable_names: the parameters that configs set, which are left out.
        args: positional arguments.
        kwargs: keyword arguments.
        is_jitted: whether the function is jitted.
        optional: static parameters that are left out where they have no description.

    Raises:
        TypeError: the arguments do not fit the signature, or another argument has no description that is the same in
            every process.
    """
    static, tunable = frozenset(static_names), frozenset(tunable_names)
    bound = _bind(signature, tunable, args, kwargs)
    given = tunable.intersection(name for name, _ in named(bound))
    bound.apply_defaults()
    values = {name: value for name, value in named(bound) if name not in tunable}
    key_values = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError) if name in optional else contextlib.nullcontext():
            is_static = name in static
            key_values[name] = (
                describe.describe_static(value) if is_static else _describe_dynamic(value, is_jitted=is_jitted)
            )
    leaves = [leaf for name, value in values.items() if name not in static for leaf in jax.tree_util.tree_leaves(value)]
    return CallDescription(
        key_values=key_values,
        tunables_given=given,
        has_tracers=any(isinstance(leaf, jax.core.Tracer) for leaf in leaves),
        platform=_platform(leaves),
    )


def _bind(
    signature: inspect.Signature, tunables: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Binds a call that may lack tunables, with or without a default."""
    missing = tunables & signature.parameters.keys() - signature.bind_partial(*args, **kwargs).arguments.keys()
    bound = signature.bind(*args, **kwargs, **dict.fromkeys(missing))
    for name in missing:
        del bound.arguments[name]
    return bound


def describe_function(
    fn: Callable[..., Any],
) -> tuple[Callable[..., Any], inspect.Signature, frozenset[str] | None]:
    """Returns the function to tune, its signature, and its static parameters (None if it is not jitted).

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"{fn!r} cannot be called: give a function")
    inner = getattr(fn, "__wrapped__", None)
    if inner is not None and not jax_internals.is_jitted(fn) and jax_internals.is_jitted(inner):
        fn = inner  # an autotuned function, to be tuned with other configs
    static_names = jax_internals.jit_options(fn).static_names if jax_internals.is_jitted(fn) else None
    try:
        signature = inspect.signature(inspect.unwrap(fn))
    except (TypeError, ValueError):
        signature = inspect.signature(_anything)  # a built-in without a signature
    return fn, signature, static_names


def _anything(*args: Any, **kwargs: Any) -> None: ...


def named(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    """Yields the arguments by name; `**` precedes the name of one in `**kwargs` that is also a parameter's."""
    parameters = bound.signature.parameters
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((f"**{key}" if key in parameters else key, item) for key, item in value.items())
        else:
            yield name, value


def fitted(
    function: Callable[..., Any],
    signature: inspect.Signature,
    statics: Iterable[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Arguments:
    """Returns the arguments of a call as another function takes them, which may have fewer static parameters or more.

    Args:
        function: `key_fn`, `prune_fn` or a function that makes configs.
        signature: of the tuned function.
        statics: its static parameters.
        args: the call's positional arguments.
        kwargs: its keyword arguments.
    """
    try:
        expected = inspect.signature(function)
        expected.bind(*args, **kwargs)
    except ValueError:  # a built-in without a signature
        return args, dict(kwargs)
    except TypeError:
        bound = signature.bind_partial(*args, **kwargs)
        for name in statics:
            default = signature.parameters[name].default if name in signature.parameters else _EMPTY
            if name not in expected.parameters:
                bound.arguments.pop(name, None)
            elif default is not _EMPTY:
                bound.arguments.setdefault(name, default)
        return bound.args, bound.kwargs
    return args, dict(kwargs)


def key_part(value: Any) -> Any:
    """Returns the value of a `key_fn` with dtypes by their names, and enums and dataclasses as they are in a config."""
    if isinstance(value, (type, np.dtype)):
        return describe.describe_plain(value).get("dtype", value)
    if is_tagged(value):
        value = tagged(value)
    if isinstance(value, Mapping):
        return {key: key_part(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [key_part(item) for item in value]
    return value


def as_structs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Returns the same call with a `jax.ShapeDtypeStruct` in place of every array.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    def struct(array: Any) -> jax.ShapeDtypeStruct:
        is_weak = bool(getattr(array, "weak_type", False))
        return jax.ShapeDtypeStruct(array.shape, describe.canonical_dtype(array.dtype), weak_type=is_weak)

    return with_leaves(args, kwargs, is_array, struct)


def with_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], is_wanted: Callable[[Any], bool], change: Callable[[Any], Any]
) -> Arguments:
    """Returns the arguments of a call with some leaves changed.

    An argument without such leaves stays the very same object, as it may be compared by identity.
    """

    def changed(value: Any) -> Any:
        if not any(map(is_wanted, jax.tree.leaves(value))):
            return value
        return jax.tree.map(lambda leaf: change(leaf) if is_wanted(leaf) else leaf, value)

    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


# --- dynamic arguments --------------------------------------------------------------------------------------


def _describe_dynamic(value: Any, *, is_jitted: bool) -> Any:
    """Describes a dynamic argument: a leaf by itself, any other pytree by its structure and its leaves by path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    if len(leaves) == 1 and not leaves[0][0]:
        return _describe_leaf(value, is_jitted=is_jitted)
    described: JsonObject = {}
    for index, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        described[name if name not in described else f"{name}#{index}"] = _describe_leaf(leaf, is_jitted=is_jitted)
    return {"structure": _describe_structure(treedef), "leaves": described}


def _describe_structure(treedef: Any) -> Any:
    if _is_shown_by_repr(treedef):
        return str(treedef)
    kind, data = treedef.node_data()
    children = [_describe_structure(child) for child in treedef.children()]
    try:
        described = describe.describe_static(data)
    except TypeError:
        described = describe.stable_repr(data)
    return {"type": describe.name_of(kind), "data": described, "children": children}


def _is_shown_by_repr(treedef: Any) -> bool:
    """Returns whether a structure has plain containers alone: its repr is complete and in a stable order."""
    node = treedef.node_data()
    if node is None:
        return True
    kind, data = node
    if kind in (dict, collections.OrderedDict):
        if not all(type(key) in (str, int) for key in data):
            return False
    elif data is not None or not issubclass(kind, (list, tuple, type(None))):  # named tuples have no data
        return False
    return all(map(_is_shown_by_repr, treedef.children()))


def _describe_leaf(leaf: Any, *, is_jitted: bool) -> Any:
    if not is_jitted and not isinstance(leaf, jax.ShapeDtypeStruct):  # a struct stands for a JAX array
        return describe.describe_array(leaf, leaf.dtype) if is_array(leaf) else describe.describe_static(leaf)
    if is_array(leaf) or isinstance(leaf, np.generic):
        return describe.describe_array(leaf, describe.canonical_dtype(leaf.dtype))
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, enum.Enum):
        kind = next(kind.__name__ for kind in (bool, int, float, complex) if isinstance(leaf, kind))
        is_wide = kind != "bool" and describe.canonical_dtype(np.dtype(np.float64)) == np.float64
        return {"scalar": kind} | ({"x64": True} if is_wide else {})
    return describe.describe_static(leaf)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or a `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _platform(leaves: Iterable[Any]) -> str | None:
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    return min((device.platform for array in arrays for device in array.devices()), default=None)
