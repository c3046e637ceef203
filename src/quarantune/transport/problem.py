"""Describes a call on the caller's side: what tells it from other calls, and which devices it is for."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from quarantune import jax_internals
from quarantune.transport import payload
from quarantune.values.config_values import is_tagged, tagged

_EMPTY = inspect.Parameter.empty
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class DeviceId:
    """A device as this process knows it.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`, as JAX calls it.
        kind: the model.
        index: JAX's number for it.
    """

    platform: str
    kind: str
    index: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallDescription:
    """What is known of one call before anything runs.

    Attributes:
        key_values: JSON-able; equal for calls that are one tuning problem.
        tunables_given: tunable parameters the caller passed by hand.
        has_tracers: whether an argument is a tracer, so that there is no data to tune with.
        devices: where the call's concrete JAX arrays are, in order.
    """

    key_values: dict[str, Any]
    tunables_given: frozenset[str]
    has_tracers: bool
    devices: tuple[DeviceId, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A call to tune for.

    Attributes:
        fn: the function inside, jitted or not.
        name: what to call it.
        args: the call's positional arguments; arrays may be concrete, tracers or `jax.ShapeDtypeStruct`.
        kwargs: its keyword arguments, likewise.
        platform: where it is to run: `cpu`, `cuda`, `rocm` or `tpu`.
        device_kind: the kind of device there, as the cache calls it.
        manual_mesh: the mesh of the `shard_map` in which it is called, where it communicates over that; else None.
        untuned: the config under which the function does what it does when nobody tunes it; None where it has no
            defaults.
        default: which of the configs, by index, that is; None where it is none of them.
    """

    fn: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    platform: str
    device_kind: str
    manual_mesh: payload.MeshSpec | None = None
    untuned: dict[str, Any] | None = None
    default: int | None = None


def describe_call(
    signature: inspect.Signature,
    static_names: Iterable[str],
    tunable_names: Iterable[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_jitted: bool = True,
) -> CallDescription:
    """Returns what tells a call from others, whichever way it was spelt.

    `f(a)`, `f(a=a)` and `f(a, transpose=False)` with that default are one call. Arrays count by shape, dtype
    and weak type, Python numbers in dynamic parameters by type, everything else by value. A function that is not
    jitted is given NumPy's arrays and all numbers as they are: there these count by their own dtype and by value.

    Args:
        signature: of the tuned function.
        static_names: its static parameters, described by value.
        tunable_names: parameters the configs set; they are left out.
        args: positional arguments.
        kwargs: keyword arguments.
        is_jitted: whether the function sees its arguments through JAX.

    Raises:
        TypeError: the arguments do not fit the signature, or one cannot be described in a way that another
            process would agree on.
    """
    static, tunable = frozenset(static_names), frozenset(tunable_names)
    bound = _bind(signature, tunable, args, kwargs)
    given = tunable.intersection(name for name, _ in named(bound))
    bound.apply_defaults()
    values = {name: value for name, value in named(bound) if name not in tunable}
    key_values = {
        name: describe_static(value) if name in static else _describe_dynamic(value, is_jitted=is_jitted)
        for name, value in values.items()
    }
    leaves = [leaf for name, value in values.items() if name not in static for leaf in jax.tree_util.tree_leaves(value)]
    return CallDescription(
        key_values=key_values,
        tunables_given=given,
        has_tracers=any(isinstance(leaf, jax.core.Tracer) for leaf in leaves),
        devices=_devices(leaves),
    )


def _bind(
    signature: inspect.Signature, tunables: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Binds a call, in which tunables may be missing whether they have a default or not."""
    missing = tunables & signature.parameters.keys() - signature.bind_partial(*args, **kwargs).arguments.keys()
    bound = signature.bind(*args, **kwargs, **dict.fromkeys(missing))
    for name in missing:
        del bound.arguments[name]
    return bound


def describe_function(
    fn: Callable[..., Any],
) -> tuple[Callable[..., Any], inspect.Signature, frozenset[str] | None]:
    """Returns the function to tune, its signature, and its static parameters: None where it is not jitted.

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"{fn!r} cannot be called: give a function")
    inner = getattr(fn, "__wrapped__", None)
    if inner is not None and not jax_internals.is_jitted(fn) and jax_internals.is_jitted(inner):
        fn = inner  # an autotuned function is tuned here by other configs
    static_names = jax_internals.jit_options(fn).static_names if jax_internals.is_jitted(fn) else None
    try:
        signature = inspect.signature(inspect.unwrap(fn))
    except (TypeError, ValueError):
        signature = inspect.signature(_anything)  # a built-in that does not tell
    return fn, signature, static_names


def _anything(*args: Any, **kwargs: Any) -> None: ...


def named(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    """Yields the arguments by name, those that `**kwargs` takes in by their own where no parameter has it too."""
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
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call as a function beside the tuned one takes it, which may leave static parameters out or name more.

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
    except ValueError:  # a built-in that does not tell
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
    """Returns what a `key_fn` returned with dtypes by their names, and enums and dataclasses as in a config."""
    if is_tagged(value):
        value = tagged(value)
    if isinstance(value, Mapping):
        return {key: key_part(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [key_part(item) for item in value]
    return _describe_plain(value).get("dtype", value) if isinstance(value, (type, np.dtype)) else value


def as_structs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the same call with a `jax.ShapeDtypeStruct` in place of every array.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """
    return tuple(map(_structs, args)), {name: _structs(value) for name, value in kwargs.items()}


def _structs(value: Any) -> Any:
    if not any(is_array(leaf) for leaf in jax.tree_util.tree_leaves(value)):
        return value
    return jax.tree_util.tree_map(lambda leaf: _struct(leaf) if is_array(leaf) else leaf, value)


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        array.shape, _canonical(array.dtype), weak_type=bool(getattr(array, "weak_type", False))
    )


# --- dynamic arguments --------------------------------------------------------------------------------------


def _describe_dynamic(value: Any, *, is_jitted: bool) -> Any:
    """Describes an argument with arrays: a leaf as it is, anything else as a structure with its leaves by path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    if len(leaves) == 1 and not leaves[0][0]:
        return _describe_leaf(value, is_jitted=is_jitted)
    described: dict[str, Any] = {}
    for index, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        described[name if name not in described else f"{name}#{index}"] = _describe_leaf(leaf, is_jitted=is_jitted)
    return {"structure": _describe_structure(treedef), "leaves": described}


def _describe_structure(treedef: Any) -> Any:
    if _is_told_by_repr(treedef):
        return str(treedef)
    kind, data = treedef.node_data()
    children = [_describe_structure(child) for child in treedef.children()]
    try:
        described = describe_static(data)
    except TypeError:
        described = _stable_repr(data)
    return {"type": _name_of(kind), "data": described, "children": children}


def _is_told_by_repr(treedef: Any) -> bool:
    """Returns whether a structure is of containers alone: metadata need not show in its repr, or not in one order."""
    node = treedef.node_data()
    if node is None:
        return True
    kind, data = node
    if kind in (dict, collections.OrderedDict):
        if not all(type(key) in (str, int) for key in data):
            return False
    elif data is not None or not issubclass(kind, (list, tuple, type(None))):  # named tuples have no data
        return False
    return all(map(_is_told_by_repr, treedef.children()))


def _describe_leaf(leaf: Any, *, is_jitted: bool) -> Any:
    if not is_jitted and not isinstance(leaf, jax.ShapeDtypeStruct):  # JAX makes the array that a struct stands for
        return _describe_array(leaf, leaf.dtype) if is_array(leaf) else describe_static(leaf)
    if is_array(leaf) or isinstance(leaf, np.generic):
        return _describe_array(leaf, _canonical(leaf.dtype))
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, enum.Enum):
        kind = next(kind.__name__ for kind in (bool, int, float, complex) if isinstance(leaf, kind))
        is_wide = kind != "bool" and _canonical(np.dtype(np.float64)) == np.float64
        return {"scalar": kind} | ({"x64": True} if is_wide else {})
    return describe_static(leaf)


def _describe_array(array: Any, dtype: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": list(array.shape), "dtype": str(dtype)}
    if getattr(array, "weak_type", False):
        described["weak_type"] = True
    sharding = _describe_sharding(array)
    if sharding is not None:
        described["sharding"] = sharding
    return described


def _describe_sharding(array: Any) -> Any:
    """Returns how an array is laid out over devices; None where that is neither explicit nor over several."""
    if (named := payload.sharding_of(array)) is not None:
        mesh = dict(zip(named.mesh.axis_names, named.mesh.shape, strict=True))
        # An explicit axis makes another program of the function, or none.
        kinds = zip(named.mesh.axis_names, named.mesh.axis_types, strict=True)
        explicit = [name for name, kind in kinds if kind == "Explicit"]
        described = {"spec": _describe_spec(named.partitions), "mesh": mesh}
        return described | ({"explicit": explicit} if explicit else {})
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or len(array.sharding.device_set) == 1:
        return None
    return {"type": type(array.sharding).__name__, "devices": len(array.sharding.device_set)}


def _describe_spec(spec: Any) -> list[Any]:
    axes = [list(axis) if isinstance(axis, tuple) else axis and str(axis) for axis in spec]
    while axes and axes[-1] is None:  # P("x") and P("x", None) are one layout
        axes.pop()
    return axes


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or stands for one."""
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _canonical(dtype: Any) -> Any:
    """Returns the dtype JAX gives an array of this one (float64 is float32 unless x64 is on)."""
    if payload.is_key_dtype(dtype) or dtype.kind in "OSUMm" or dtype.names is not None:
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def _devices(leaves: Iterable[Any]) -> tuple[DeviceId, ...]:
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    devices = {device for array in arrays for device in array.devices()}
    return tuple(sorted(DeviceId(platform=d.platform, kind=d.device_kind, index=d.id) for d in devices))


# --- static values ------------------------------------------------------------------------------------------


def describe_static(value: Any) -> Any:
    """Returns a JSON-able description of a value that every process gives to an equal value.

    Args:
        value: a static argument, or any other value that is part of a key.

    Raises:
        TypeError: it can neither be looked into nor pickled.
    """
    return _describe(value, ())


def _describe(value: Any, outer: tuple[int, ...]) -> Any:
    """Describes a value inside others, whose identities are `outer`."""
    if id(value) in outer:
        return {"inside": len(outer) - outer.index(id(value))}
    plain = _describe_plain(value)
    if plain is not _EMPTY:
        return plain
    outer = (*outer, id(value))
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return [_describe(item, outer) for item in value]
    if isinstance(value, Mapping):
        items = [[_describe(key, outer), _describe(item, outer)] for key, item in value.items()]
        return {"type": _name_of(type(value)), "items": sorted(items, key=json.dumps)}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((_describe(item, outer) for item in value), key=json.dumps)}
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return {"partial": [_describe(part, outer) for part in parts]}
    if isinstance(value, types.MethodType):
        return {"method": value.__func__.__qualname__, "of": _describe(value.__self__, outer)}
    if callable(value) and hasattr(value, "__qualname__"):
        return _describe_function(value, outer)
    return _describe_object(value, outer)


def _describe_plain(value: Any) -> Any:
    """Describes what has no parts; `_EMPTY` for anything else."""
    if isinstance(value, enum.Enum):
        return {"enum": f"{_name_of(type(value))}.{value.name}"}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return _describe_plain(value.item())
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is complex:
        return {"complex": str(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": _digest(bytes(value))}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if isinstance(value, (np.ndarray, jax.Array)) and not value.dtype.hasobject:
        return _describe_array(value, _canonical(value.dtype)) | {"data": _digest(np.asarray(value).tobytes())}
    return _describe_type(value) if isinstance(value, type) else _EMPTY


def _describe_type(value: Any) -> Any:
    # jnp.float32, np.float32 and np.dtype("float32") are one thing to JAX.
    if issubclass(value, np.generic):
        return {"dtype": np.dtype(value).name}
    return {"dtype": value.dtype.name} if isinstance(value, type(jax.numpy.float32)) else {"type": _name_of(value)}


def _describe_function(function: Any, outer: tuple[int, ...]) -> Any:
    """Describes a function by name, and one whose name does not tell it from others by what it is made of too."""
    described = {"function": _name_of(function)}
    if _is_found_by_name(function):
        return described
    is_wrapper = hasattr(function, "__wrapped__")
    if isinstance(function, types.FunctionType) and not is_wrapper:
        strictly = "<" in described["function"]
        return described | _describe_made_of(function, outer, strictly=strictly)
    if isinstance(function, types.BuiltinFunctionType):
        parts: Any = _describe_inside(function.__self__, outer)
    elif not is_wrapper:
        return described
    else:
        parts = {"type": _name_of(type(function)), "wraps": _describe_inside(function.__wrapped__, outer)}
        if isinstance(function, types.FunctionType):
            parts |= _describe_made_of(function, outer)
        else:
            parts |= {"fields": _describe_inside(_own_fields(function), outer)}
    return described | {"made_of": _digest(json.dumps(parts, sort_keys=True).encode())}


def _describe_made_of(function: types.FunctionType, outer: tuple[int, ...], *, strictly: bool = False) -> Any:
    parts = [[_cell(cell) for cell in function.__closure__ or ()], function.__defaults__, function.__kwdefaults__]
    described = [_describe_inside(part, outer, strictly=strictly) for part in parts]
    return {"code": _digest(_code(function.__code__).encode()), "bound": described}


def _own_fields(wrapper: Any) -> dict[str, Any]:
    """Returns what a callable object adds to what it wraps, without what `functools.wraps` copied from there."""
    if jax_internals.is_jitted(wrapper) or getattr(type(wrapper), "__reduce__", None) is not object.__reduce__:
        return {}
    wrapped = wrapper.__wrapped__
    copied = {name: getattr(wrapped, name, None) for name in functools.WRAPPER_ASSIGNMENTS} | _fields(wrapped)
    fields = _without_caches(wrapper, _fields(wrapper))
    return {name: item for name, item in fields.items() if item is not wrapped and copied.get(name, _EMPTY) is not item}


def _fields(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _describe_inside(part: Any, outer: tuple[int, ...], *, strictly: bool = False) -> Any:
    """Describes what a function keeps; unless strictly, what shows nothing of itself (a lock, say) by its type."""
    if not strictly and type(part) in (list, tuple, dict) and id(part) not in outer:
        items = list(part.items()) if isinstance(part, dict) else part
        return [_describe_inside(item, (*outer, id(part))) for item in items]
    try:
        return _describe(part, outer)
    except TypeError:
        if strictly:
            raise
        return {"type": _name_of(type(part))}


def _is_found_by_name(function: Any) -> bool:
    """Returns whether the module and name of a function are those of this very object, in every process."""
    module = getattr(function, "__module__", None)
    if module == "__main__":  # another module in a worker
        return False
    try:
        return operator.attrgetter(function.__qualname__)(sys.modules[str(module)]) is function
    except (AttributeError, KeyError, TypeError):
        return False


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "<empty>"


def _code(code: types.CodeType) -> str:
    """Returns what a code object does, without where it stands."""
    constants = [_constant(item) for item in code.co_consts]
    return repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars))


def _constant(item: Any) -> str:
    """Returns a constant's repr, in which a set has an order that every process gives it."""
    if isinstance(item, types.CodeType):
        return _code(item)
    if isinstance(item, frozenset):
        return f"frozenset({', '.join(sorted(map(_constant, item)))})"
    if isinstance(item, tuple):
        return f"({', '.join(map(_constant, item))}{',' * (len(item) == 1)})"
    return repr(item)


def _describe_object(value: Any, outer: tuple[int, ...]) -> Any:
    """Describes an object by its fields, or by what pickle would take to build it again, or by its repr."""
    name = _name_of(type(value))
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return {"type": name, "fields": {field: _describe(getattr(value, field), outer) for field in fields}}
    if isinstance(value, np.ndarray):
        return {"type": name, "shape": list(value.shape), "items": _describe(value.tolist(), outer)}
    try:
        build, arguments, *state = value.__reduce_ex__(4)
    except (TypeError, ValueError):  # cannot be pickled, or is a name
        return {"type": name, "repr": _stable_repr(value)}
    parts = [list(part) if isinstance(part, Iterator) else part for part in state]
    parts = [_without_caches(value, part) for part in parts]
    return {"type": name, "build": [_describe(part, outer) for part in (build, arguments, *parts)]}


def _without_caches(value: Any, state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    cached = functools.cached_property
    return {key: item for key, item in state.items() if not isinstance(getattr(type(value), key, None), cached)}


def _stable_repr(value: Any) -> str:
    text = repr(value)
    if _ADDRESS.search(text):
        raise TypeError(
            f"{text} has neither a pickle nor a repr that another process would agree on, so results for it "
            f"cannot be remembered. Pass a value with a repr of its own (a frozen dataclass, say)."
        )
    return text


def _name_of(thing: Any) -> str:
    qualname = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    return f"{getattr(thing, '__module__', None)}:{qualname}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
