"""The description of a call: what its arguments, and JAX's settings, count as in a key."""

from __future__ import annotations

import collections
import contextlib
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from quarantune import jax_internals
from quarantune.functions.binding import Arguments
from quarantune.values import describe
from quarantune.values.codec import JsonObject, is_tagged, tagged

SCALARS = (float, int, str, bool, type(None))


def describe_arguments(
    values: Mapping[str, Any], static: Collection[str], *, is_jitted: bool = True, optional: Collection[str] = ()
) -> JsonObject:
    """Returns JSON-able descriptions of arguments, equal for calls that share a tuned config, however they are spelt.

    Arrays are described by shape, dtype and weak type, Python numbers in dynamic parameters by type, all else by value.
    A function that is not jitted receives NumPy arrays and numbers unchanged: they are described by their own dtype and
    by value.

    Args:
        values: the arguments by name, with defaults and without tunables; see `arguments_of`.
        static: the static parameters, which are described by value.
        is_jitted: whether the function is jitted.
        optional: static parameters that are left out if they have no description.

    Raises:
        TypeError: another argument has no description that is the same in every process.
    """
    described = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError) if name in optional else contextlib.nullcontext():
            described[name] = (
                describe.describe_static(value) if name in static else _describe_dynamic(value, is_jitted=is_jitted)
            )
    return described


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
    return with_leaves(args, kwargs, is_array, struct_of)


def struct_of(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and the dtype of an array, without its place."""
    is_weak = bool(getattr(array, "weak_type", False))
    return jax.ShapeDtypeStruct(array.shape, describe.canonical_dtype(array.dtype), weak_type=is_weak)


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


def describe_jax_state(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, own: str | None = None) -> JsonObject:
    """Returns a JSON-able description of JAX's settings that change the program of a call, and of the mesh in force.

    Args:
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        own: the value of this package's own user context, which is left out.
    """
    state = jax_internals.describe_options(describe.describe_static, own=own)
    mesh = describe.describe_context_mesh(args, kwargs)
    return state if mesh is None else {**state, "mesh": mesh}


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
    return {"structure": describe_structure(treedef), "leaves": described}


def describe_structure(treedef: Any) -> Any:
    """Returns a description of the structure of a pytree, with the static parts of its nodes.

    Raises:
        TypeError: a static part has no description that is the same in every process.
    """
    if _is_shown_by_repr(treedef):
        return str(treedef)
    kind, data = treedef.node_data()
    children = [describe_structure(child) for child in treedef.children()]
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
        if not is_array(leaf):
            return describe.describe_static(leaf)
        return describe.describe_array(leaf, leaf.dtype) | _describe_memory(leaf)
    if is_array(leaf) or isinstance(leaf, np.generic):
        return describe.describe_array(leaf, describe.canonical_dtype(leaf.dtype))
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, enum.Enum):
        kind = next(kind.__name__ for kind in (bool, int, float, complex) if isinstance(leaf, kind))
        is_wide = kind != "bool" and describe.canonical_dtype(np.dtype(np.float64)) == np.float64
        return {"scalar": kind} | ({"x64": True} if is_wide else {})
    return describe.describe_static(leaf)


def _describe_memory(array: Any) -> JsonObject:
    """Describes how the elements of an array of NumPy's lie in memory, unless they lie as usual."""
    if not isinstance(array, np.ndarray):
        return {}
    strides = {} if array.flags.c_contiguous else {"strides": list(array.strides)}
    return strides | ({} if array.flags.writeable else {"read_only": True})


def without_arrays(values: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the values that hold no array: those that count by value if the function is not jitted."""
    return frozenset(name for name, value in values.items() if not any(map(is_array, jax.tree.leaves(value))))


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or a `jax.ShapeDtypeStruct`."""
    # JAX takes long to say so, and there may be very many numbers.
    return type(leaf) not in SCALARS and isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
