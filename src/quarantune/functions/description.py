"""The description of a call's arguments and of JAX's settings in a key.

A description is JSON-able and the same in every process. Other values raise `TypeError`, because no later process could
find a result for them. The fingerprint has a describer that never raises (`functions.fingerprint`). Both describe code
by the same text.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from quarantune.functions import describe
from quarantune.functions.binding import Arguments
from quarantune.functions.fingerprint import closure_of, code_text
from quarantune.functions.names import PROGRAMS, module_of
from quarantune.functions.object_parts import pickled_parts, without_caches
from quarantune.jax_internals import jax_options
from quarantune.values.codec import Around, JsonObject, bounded, digest, in_order, is_tagged, tagged
from quarantune.values.texts import shown

SCALARS = (float, int, str, bool, type(None))
_EMPTY = inspect.Parameter.empty
_encode = json.JSONEncoder().encode
_MOST_BITS = 14_000
"""Number of bits above which integers become hex: Python refuses to write more than 4,300 decimal digits."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe_arguments(
    values: Mapping[str, Any], static: Collection[str], *, is_jitted: bool = True, optional: Collection[str] = ()
) -> JsonObject:
    """Returns JSON-able descriptions of arguments, equal for calls that share a tuned config, however users spell them.

    Descriptions contain the shape, dtype and weak type of arrays, the type of Python numbers in dynamic parameters, and
    the value of everything else. A function that is not jitted receives NumPy arrays and numbers unchanged: their
    descriptions contain the exact dtype of arrays, and the value of numbers.

    Args:
        values: the arguments by name, with defaults and without tunables; see `arguments_of`.
        static: the static parameters, which count by value.
        is_jitted: whether the function is jitted.
        optional: static parameters that the result omits if they have no description.

    Raises:
        TypeError: Another argument has no description that is the same in every process.
    """
    described = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError) if name in optional else contextlib.nullcontext():
            described[name] = (
                describe_static(value) if name in static else _describe_dynamic(value, is_jitted=is_jitted)
            )
    return described


def key_part(value: Any) -> Any:
    """Returns the value of a `key_fn` with dtypes as names, and with enums and dataclasses encoded as in configs."""
    if isinstance(value, (type, np.dtype)):
        return describe_plain(value).get("dtype", value)
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
    """Returns the shape, the dtype and the weak type of an array, without its sharding."""
    is_weak = bool(getattr(array, "weak_type", False))
    return jax.ShapeDtypeStruct(array.shape, describe.canonical_dtype(array.dtype), weak_type=is_weak)


def with_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], is_wanted: Callable[[Any], bool], change: Callable[[Any], Any]
) -> Arguments:
    """Returns the arguments of a call with some leaves changed.

    An argument without wanted leaves stays the very same object, because the function may compare it by identity.
    """

    def changed(value: Any) -> Any:
        if not any(map(is_wanted, jax.tree.leaves(value))):
            return value
        return jax.tree.map(lambda leaf: change(leaf) if is_wanted(leaf) else leaf, value)

    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


def describe_jax_state(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, own: str | None = None) -> JsonObject:
    """Returns a JSON-able description of the mesh in force and of JAX's settings that change the program of a call.

    Args:
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        own: the value of this package's user context, to omit from the description.
    """
    state = jax_options.describe_options(describe_static, own=own)
    mesh = describe.describe_context_mesh(args, kwargs)
    return state if mesh is None else {**state, "mesh": mesh}


# --- values ---


def describe_static(value: Any) -> Any:
    """Returns a JSON-able description of a value that is the same for equal values in every process.

    Args:
        value: a static argument, or any other value in a key.

    Raises:
        TypeError: The value has neither fields, nor a pickle, nor a repr that is the same in every process.
    """
    try:
        return bounded(_describe(value, Around((), {})))
    except RecursionError:
        raise TypeError(
            f"{shown(value)} is nested more deeply than Python can follow, so results for it cannot be remembered. "
            f"Pass it with fewer levels, or raise the limit (sys.setrecursionlimit)."
        ) from None


def _describe(value: Any, around: Around) -> Any:
    """Describes a value inside other values."""
    if (plain := describe_plain(value)) is not _EMPTY:
        return plain
    if steps := around.steps_to(value):
        return {"inside": steps}
    if found := around.known.get(id(value)):
        return found[1]
    within = around.inside(value)
    if type(value) in (tuple, list):  # here, so that each level takes few stack frames
        return around.keep(value, [_describe(item, within) for item in value])
    return around.keep(value, _describe_parts(value, within))


def _describe_parts(value: Any, around: Around) -> Any:
    if isinstance(value, Mapping):
        pairs = [[_describe(key, around), _describe(item, around)] for key, item in value.items()]
        return {"type": name_of(type(value)), "items": in_order(pairs, _encode)}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((_describe(item, around) for item in value), key=json.dumps)}
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return {"partial": [_describe(part, around) for part in parts]}
    if isinstance(value, types.MethodType):
        return {"method": value.__func__.__qualname__, "of": _describe(value.__self__, around)}
    if callable(value) and hasattr(value, "__qualname__"):
        return _describe_function(value, around)
    return _describe_object(value, around)


def describe_plain(value: Any) -> Any:
    """Describes a value without parts; returns `_EMPTY` for any other value."""
    kind = type(value)  # the exact type comes first, because there may be very many numbers
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= _MOST_BITS else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, enum.Enum):
        return {"enum": f"{name_of(kind)}.{value.name}", "value": _describe_value(value)}
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.generic) and value.dtype.kind in "iufcmM":
        is_date = value.dtype.kind in "mM"
        return {"dtype": value.dtype.str, "value": str(value) if is_date else describe_plain(value.item())}
    if kind is complex:
        return {"complex": str(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": digest(bytes(value))}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if isinstance(value, (np.ndarray, jax.Array)) and not value.dtype.hasobject:
        return describe.describe_array(value, describe.canonical_dtype(value.dtype)) | {
            "data": digest(np.asarray(value).tobytes())
        }
    return _describe_type(value) if isinstance(value, type) else _EMPTY


def _describe_value(member: enum.Enum) -> Any:
    """Describes the value of a member of an enum; by its type if it has no description."""
    try:
        return describe_static(member.value)
    except TypeError:
        return {"type": name_of(type(member.value))}


def _describe_type(value: Any) -> Any:
    # jnp.float32, np.float32 and np.dtype("float32") are the same to JAX.
    if issubclass(value, np.generic):
        return {"dtype": np.dtype(value).name}
    return {"dtype": value.dtype.name} if isinstance(value, type(jax.numpy.float32)) else {"type": name_of(value)}


def _describe_function(function: Any, around: Around) -> Any:
    """Describes a function by its name, and by its code and bound values if the name does not identify it."""
    described = {"function": name_of(function)}
    if _is_found_by_name(function):
        return described
    is_wrapper = hasattr(function, "__wrapped__")
    if isinstance(function, types.FunctionType) and not is_wrapper:
        strictly = "<" in described["function"]
        return described | _describe_made_of(function, around, strictly=strictly)
    if isinstance(function, types.BuiltinFunctionType):
        parts: Any = _describe_inside(function.__self__, around)
    elif not is_wrapper:
        return described
    else:
        parts = {"type": name_of(type(function)), "wraps": _describe_inside(function.__wrapped__, around)}
        if isinstance(function, types.FunctionType):
            parts |= _describe_made_of(function, around)
        else:
            parts |= {"fields": _describe_inside(_own_fields(function), around)}
    return described | {"made_of": digest(json.dumps(parts, sort_keys=True).encode())}


def _describe_made_of(function: types.FunctionType, around: Around, *, strictly: bool = False) -> Any:
    parts = [[value for _, value in closure_of(function)], function.__defaults__, function.__kwdefaults__]
    described = [_describe_inside(part, around, strictly=strictly) for part in parts]
    return {"code": digest(code_text(function).encode()), "bound": described}


def _own_fields(wrapper: Any) -> Mapping[str, Any]:
    """Returns the attributes that a callable wrapper adds, without the attributes that `functools.wraps` copied."""
    if isinstance(wrapper, jax.stages.Wrapped) or getattr(type(wrapper), "__reduce__", None) is not object.__reduce__:
        return {}
    wrapped = wrapper.__wrapped__
    copied = {name: getattr(wrapped, name, None) for name in functools.WRAPPER_ASSIGNMENTS}
    copied |= getattr(wrapped, "__dict__", {})
    fields = without_caches(wrapper, getattr(wrapper, "__dict__", {}))
    return {name: item for name, item in fields.items() if item is not wrapped and copied.get(name, _EMPTY) is not item}


def _describe_inside(part: Any, around: Around, *, strictly: bool = False) -> Any:
    """Describes a value inside a function.

    Args:
        part: the value.
        around: the values that contain it.
        strictly: whether to raise if the value has no description (a lock, for example) instead of using its type.
    """
    if not strictly and type(part) in (list, tuple, dict) and id(part) not in around.outer:
        items = list(part.items()) if isinstance(part, dict) else part
        return [_describe_inside(item, around.inside(part)) for item in items]
    try:
        return _describe(part, around)
    except TypeError:
        if strictly:
            raise
        return {"type": name_of(type(part))}


def _is_found_by_name(function: Any) -> bool:
    """Returns whether every process finds this very function by its module and name."""
    module = getattr(function, "__module__", None)
    if module in PROGRAMS:  # another module in a worker
        return False
    try:
        return operator.attrgetter(function.__qualname__)(sys.modules[str(module)]) is function
    except (AttributeError, KeyError, TypeError):
        return False


def _describe_object(value: Any, around: Around) -> Any:
    """Describes an object by its dataclass fields, else by the parts that pickle would save, else by its repr."""
    name = name_of(type(value))
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return {"type": name, "fields": {field: _describe(getattr(value, field), around) for field in fields}}
    if isinstance(value, np.ndarray):
        return {"type": name, "shape": list(value.shape), "items": _describe(value.tolist(), around)}
    try:
        build, arguments, *state = pickled_parts(value)
    except (TypeError, ValueError):  # pickle fails, or saves only a name
        return {"type": name, "repr": stable_repr(value)}
    parts = (build, arguments, *(without_caches(value, part) for part in state))
    return {"type": name, "build": [_describe(part, around) for part in parts]}


def stable_repr(value: Any) -> str:
    """Returns the repr of a value.

    Raises:
        TypeError: The repr shows an address, which differs from process to process.
    """
    text = repr(value)
    if _ADDRESS.search(text):
        raise TypeError(
            f"{text} has neither a pickle nor a repr that is the same in every process, so results for it "
            f"cannot be remembered. Pass a value whose class defines a repr, such as a frozen dataclass."
        )
    return text


def name_of(thing: Any) -> str:
    """Returns `module:qualname` of a class or function, or of an object's class."""
    qualname = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    return f"{module_of(thing)}:{qualname}"


# --- dynamic arguments ---


def _describe_dynamic(value: Any, *, is_jitted: bool) -> Any:
    """Describes a dynamic argument: a single leaf, or another pytree by its structure and its leaves by path."""
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
        TypeError: A static part has no description that is the same in every process.
    """
    if _is_shown_by_repr(treedef):
        return str(treedef)
    kind, data = treedef.node_data()
    children = [describe_structure(child) for child in treedef.children()]
    try:
        described = describe_static(data)
    except TypeError:
        described = stable_repr(data)
    return {"type": name_of(kind), "data": described, "children": children}


def _is_shown_by_repr(treedef: Any) -> bool:
    """Returns whether a structure has only plain containers, so that its repr is complete and in a stable order."""
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
            return describe_static(leaf)
        return describe.describe_array(leaf, leaf.dtype) | _describe_memory(leaf)
    if is_array(leaf) or isinstance(leaf, np.generic):
        return describe.describe_array(leaf, describe.canonical_dtype(leaf.dtype))
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, enum.Enum):
        kind = next(kind.__name__ for kind in (bool, int, float, complex) if isinstance(leaf, kind))
        is_wide = kind != "bool" and describe.canonical_dtype(np.dtype(np.float64)) == np.float64
        return {"scalar": kind} | ({"x64": True} if is_wide else {})
    return describe_static(leaf)


def _describe_memory(array: Any) -> JsonObject:
    """Describes the memory of a NumPy array, unless it is writable and in row-major order."""
    if not isinstance(array, np.ndarray):
        return {}
    strides = {} if array.flags.c_contiguous else {"strides": list(array.strides)}
    return strides | ({} if array.flags.writeable else {"read_only": True})


def without_arrays(values: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of values without an array; these count by value if the function is not jitted."""
    return frozenset(name for name, value in values.items() if not any(map(is_array, jax.tree.leaves(value))))


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or a `jax.ShapeDtypeStruct`."""
    # JAX's check is slow, and there may be very many numbers.
    return type(leaf) not in SCALARS and isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
