"""Describes values so that every process gives equal values equal descriptions: the values in the key of a call.

A description is JSON-able. A value that has no such description raises `TypeError`, because a result for it could never
be found again. The fingerprint of a function has a describer of its own (`cache.fingerprint`), which must never raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import inspect
import json
import math
import operator
import os
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from quarantune._version import __version__
from quarantune.host.process import PROGRAMS, module_of, pickled_parts, without_caches
from quarantune.values.codec import Around, JsonObject, bounded, digest, in_order
from quarantune.values.texts import shown

_EMPTY = inspect.Parameter.empty
_encode = json.JSONEncoder().encode
_MOST_BITS = 14_000
"""Python refuses to write an integer with more decimal digits than this one may have, which is 4,300."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLUGINS = {
    "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "rocm": ("jax-rocm60-plugin", "jax-rocm60-pjrt", "jax-rocm7-plugin", "jax-rocm7-pjrt"),
    "tpu": ("libtpu",),
}
"""The packages that compile for a platform, beside jaxlib."""
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_SUMS = ("unreduced", "reduced")
"""The axes of a mesh over which an array is a sum that is yet to be made, or was."""


# --- values ---


def describe_static(value: Any) -> Any:
    """Returns a JSON-able description of a value that is the same for equal values in every process.

    Args:
        value: a static argument, or any other value that is part of a key.

    Raises:
        TypeError: the value has neither fields, nor a pickle, nor a repr that is the same in every process.
    """
    try:
        return bounded(_describe(value, Around((), {})))
    except RecursionError:
        raise TypeError(
            f"{shown(value)} is nested more deeply than Python can follow, so results for it cannot be remembered. "
            f"Pass it with fewer levels, or raise the limit (sys.setrecursionlimit)."
        ) from None


def _describe(value: Any, around: Around) -> Any:
    """Describes a value inside others."""
    if (plain := describe_plain(value)) is not _EMPTY:
        return plain
    if steps := around.steps_to(value):
        return {"inside": steps}
    if found := around.known.get(id(value)):
        return found[1]
    within = around.inside(value)
    if type(value) in (tuple, list):  # here, as each level takes as few frames as it can
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
    kind = type(value)  # asked first, as there may be very many numbers
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
        return describe_array(value, canonical_dtype(value.dtype)) | {"data": digest(np.asarray(value).tobytes())}
    return _describe_type(value) if isinstance(value, type) else _EMPTY


def _describe_value(member: enum.Enum) -> Any:
    """Describes the value of a member of an enum; by its type if it has no description."""
    try:
        return describe_static(member.value)
    except TypeError:
        return {"type": name_of(type(member.value))}


def _describe_type(value: Any) -> Any:
    # jnp.float32, np.float32 and np.dtype("float32") are one thing to JAX.
    if issubclass(value, np.generic):
        return {"dtype": np.dtype(value).name}
    return {"dtype": value.dtype.name} if isinstance(value, type(jax.numpy.float32)) else {"type": name_of(value)}


def _describe_function(function: Any, around: Around) -> Any:
    """Describes a function by its name, and by its code and bound values too if other functions have that name."""
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
    parts = [[_cell(cell) for cell in function.__closure__ or ()], function.__defaults__, function.__kwdefaults__]
    described = [_describe_inside(part, around, strictly=strictly) for part in parts]
    return {"code": digest(_code(function.__code__).encode()), "bound": described}


def _own_fields(wrapper: Any) -> Mapping[str, Any]:
    """Returns the attributes that a callable wrapper adds, without those that `functools.wraps` copied to it."""
    if isinstance(wrapper, jax.stages.Wrapped) or getattr(type(wrapper), "__reduce__", None) is not object.__reduce__:
        return {}
    wrapped = wrapper.__wrapped__
    copied = {name: getattr(wrapped, name, None) for name in functools.WRAPPER_ASSIGNMENTS}
    copied |= getattr(wrapped, "__dict__", {})
    fields = without_caches(wrapper, getattr(wrapper, "__dict__", {}))
    return {name: item for name, item in fields.items() if item is not wrapped and copied.get(name, _EMPTY) is not item}


def _describe_inside(part: Any, around: Around, *, strictly: bool = False) -> Any:
    """Describes a value that a function keeps.

    Args:
        part: the value.
        around: the values that hold it.
        strictly: whether to raise if the value has no description (a lock, say); otherwise its type stands for it.
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


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "<empty>"


def _code(code: types.CodeType) -> str:
    """Returns the content of a code object as text, without its file and line numbers."""
    constants = [_constant(item) for item in code.co_consts]
    return repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars))


def _constant(item: Any) -> str:
    """Returns a constant's repr, with sets in the same order in every process."""
    if isinstance(item, types.CodeType):
        return _code(item)
    if isinstance(item, frozenset):
        return f"frozenset({', '.join(sorted(map(_constant, item)))})"
    if isinstance(item, tuple):
        return f"({', '.join(map(_constant, item))}{',' * (len(item) == 1)})"
    return repr(item)


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
    except (TypeError, ValueError):  # cannot be pickled, or is a name
        return {"type": name, "repr": stable_repr(value)}
    parts = (build, arguments, *(without_caches(value, part) for part in state))
    return {"type": name, "build": [_describe(part, around) for part in parts]}


def stable_repr(value: Any) -> str:
    """Returns the repr of a value.

    Raises:
        TypeError: the repr holds an address, which differs from process to process.
    """
    text = repr(value)
    if _ADDRESS.search(text):
        raise TypeError(
            f"{text} has neither a pickle nor a repr that is the same in every process, so results for it "
            f"cannot be remembered. Pass a value with a repr of its own (a frozen dataclass, say)."
        )
    return text


def name_of(thing: Any) -> str:
    """Returns `module:qualname` of a class or function, or of an object's class."""
    qualname = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    return f"{module_of(thing)}:{qualname}"


# --- arrays, meshes and shardings ---


def describe_array(array: Any, dtype: Any) -> JsonObject:
    """Returns a JSON-able description of an array without its elements.

    Args:
        array: the array, or whatever stands for it.
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
    """Returns whether an array of JAX's, a tracer or a `jax.ShapeDtypeStruct` is in the memory of a device's host."""
    if isinstance(array, jax.Array):
        return getattr(getattr(jax.typeof(array), "memory_space", None), "name", "") == "Host"
    sharding = array.sharding if isinstance(array, jax.ShapeDtypeStruct) else None
    return "host" in (getattr(sharding, "memory_kind", None) or "")


def layout_of(array: Any) -> tuple[int, ...] | None:
    """Returns the order of the axes of a concrete array in memory; None for row-major order, or if JAX does not say."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or array.ndim < 2:
        return None
    with contextlib.suppress(Exception):  # a key, or an array that was deleted
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
        array: an array, a `jax.ShapeDtypeStruct` or a tracer. The sharding of a tracer is known only along explicit
            axes. Inside `shard_map` a tracer stands for one shard, which is on one device.

    Returns:
        The sharding, over a mesh without devices.
    """
    is_tracer = isinstance(array, jax.core.Tracer)
    sharding: Any = getattr(jax.typeof(array) if is_tracer else array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    if is_tracer and AxisType.Explicit not in sharding.mesh.axis_types:
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
        array: the array, or whatever stands for it.
        sharding: what `sharding_of` returned for it.

    Returns:
        The sharding; None if the array is on one device, or its devices are not known.
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
        The description; None if there is no such mesh, or the sharding of an argument describes it already.
    """
    mesh = context_mesh()
    if mesh is None:
        return None
    shardings = [sharding_of(leaf) for leaf in jax.tree.leaves((args, dict(kwargs)))]
    if any(sharding is not None and sharding.mesh == mesh for sharding in shardings):
        return None
    types = [kind.name for kind in mesh.axis_types]
    return {"shape": list(mesh.axis_sizes), "axes": list(mesh.axis_names), "types": types}


# --- versions ---


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of JAX, its library, this package, and a GPU's driver."""
    found = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "quarantune": __version__}
    with contextlib.suppress(OSError):
        found["nvidia_driver"] = Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return found


def compilers(platform: str) -> dict[str, str]:
    """Returns the versions and flags of all that compiles for a platform, whether or not its device is here.

    Args:
        platform: `cpu`, `cuda`, `rocm` or `tpu`.
    """
    found = {name: version for name, version in versions().items() if name != "nvidia_driver"} | _plugins(platform)
    return found | {name: flags for name in _FLAGS if (flags := os.environ.get(name, "").strip())}


@functools.cache
def _plugins(platform: str) -> dict[str, str]:
    found = {}
    for name in _PLUGINS.get(platform, ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
