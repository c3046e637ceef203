"""Rebuilds arguments from their description in a key."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from quarantune.calls.call import TunedFunction
from quarantune.functions.binding import Arguments
from quarantune.functions.description import describe_arguments
from quarantune.jax_internals import jax_arrays, jax_options
from quarantune.transport import arrays
from quarantune.transport.arrays import dtype_from_name
from quarantune.values.codec import JsonObject, canonical_json, decode_json

_SEED = 0
_NUMBERS: Mapping[str, Any] = {"bool": True, "int": 1, "float": 1.0, "complex": 1j}
_KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
"""The implementations of PRNG keys by the names of their dtypes."""
_PLAIN_TREE = re.compile(r"PyTreeDef\((.*)\)", re.DOTALL)
_LEAF = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\*""")
"""Matches a quoted key of a dict, or the star that stands for a leaf."""


class CannotRebuildError(Exception):
    """The key does not describe an argument fully; the message names the argument."""


def rebuilt(key: str, function: TunedFunction) -> Arguments:
    """Returns arguments that fit the call of a key, without tunables.

    Arrays of a jitted function become `jax.ShapeDtypeStruct`, so that the sweep makes their elements by `supply`. For
    other callables they become NumPy arrays with elements made by `supply`, or structs if `supply` is a function. A
    Python number is 1, because the key holds only its type.

    Args:
        key: the key of an entry.
        function: the function of the entry.

    Raises:
        CannotRebuildError: The key holds only a description of a value, or is not the key of a tuned function.
    """
    try:
        values = dict(decode_json(key)["call"].items())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CannotRebuildError("its key is not the key of a tuned function") from None
    if function.options.key_fn is not None:
        raise CannotRebuildError("its key holds the result of key_fn and not the shapes")
    return described_arguments(values, function)


def described_arguments(values: JsonObject, function: TunedFunction) -> Arguments:
    """Returns arguments of a function from their descriptions by parameter; see `rebuilt`.

    It leaves out defaults, as most calls do: functions such as `ref_fn` get the arguments as the call spells them.

    Raises:
        CannotRebuildError: A description is incomplete, or names something that is not a parameter.
    """
    maker = _Maker(function)
    parameters, made = function.parameters, dict[str, Any]()
    rest = next((name for name, it in parameters.items() if it.kind is inspect.Parameter.VAR_KEYWORD), None)
    for name, described in values.items():
        if name in parameters and (name != rest):
            if not _is_default(name, described, function):
                made[name] = maker.value(name, described)
        elif rest is not None and name != "communicates over":
            made.setdefault(rest, {})[name.removeprefix("**")] = maker.value(name, described)
        else:
            raise CannotRebuildError(f"{name!r} is not a parameter of the function")
    ordered = {name: made[name] for name in parameters if name in made}
    bound = inspect.BoundArguments(function.signature, ordered)
    return bound.args, bound.kwargs


def _is_default(name: str, described: Any, function: TunedFunction) -> bool:
    """Returns whether a description is that of a parameter's default."""
    default, statics = function.parameters[name].default, function.static_names
    if default is inspect.Parameter.empty:
        return False
    static = [name] if statics is None or name in statics else []
    with contextlib.suppress(TypeError, ValueError):  # a default may be anything, and a description too
        own = describe_arguments({name: default}, static, is_jitted=function.is_jitted)[name]
        return canonical_json(own) == canonical_json(described)
    return False


@contextlib.contextmanager
def described_settings(described: Mapping[str, Any]) -> Iterator[None]:
    """Applies the JAX settings that a key describes, for the duration of a block."""
    with contextlib.ExitStack() as block:
        for name, value in jax_options.other_options(described).items():
            block.callback(jax.config.update, name, jax.config.values[name])
            jax.config.update(name, value)
        if (mesh := described.get("mesh")) is not None:
            kinds = tuple(AxisType[name] for name in mesh["types"])
            abstract = AbstractMesh(tuple(mesh["shape"]), tuple(mesh["axes"]), axis_types=kinds)
            block.enter_context(jax.sharding.use_abstract_mesh(abstract))
        yield


class _Maker:
    """Makes the arguments of one call."""

    def __init__(self, function: TunedFunction) -> None:
        self._function = function
        self._arrays = 0

    def value(self, name: str, described: Any) -> Any:
        """Returns an argument made from its description.

        Args:
            name: the parameter.
            described: the description.
        """
        statics = self._function.static_names
        if statics is not None and name in statics:
            return _static(name, described)
        if isinstance(described, dict) and described.keys() == {"structure", "leaves"}:
            return self._tree(name, described["structure"], described["leaves"])
        return self._leaf(name, described)

    def _tree(self, name: str, structure: Any, leaves: JsonObject) -> Any:
        match = _PLAIN_TREE.fullmatch(structure) if isinstance(structure, str) else None
        values = iter([self._leaf(name, leaf) for leaf in leaves.values()])
        try:
            if match is None:
                raise ValueError
            count = iter(range(len(leaves)))
            text = _LEAF.sub(lambda found: str(next(count)) if found[0] == "*" else found[0], match[1])
            treedef = jax.tree.structure(ast.literal_eval(text))
            return jax.tree.unflatten(treedef, values)
        except (ValueError, SyntaxError, StopIteration, RecursionError, MemoryError):
            raise CannotRebuildError(f"{name!r} is a container of another type than dict, list and tuple") from None

    def _leaf(self, name: str, described: Any) -> Any:
        match described:
            case {"shape": list() as shape, "dtype": str() as dtype, **rest}:
                return self._array(name, tuple(shape), dtype, rest)
            case {"scalar": str() as kind} if kind in _NUMBERS:
                return _NUMBERS[kind]
        return _static(name, described)

    def _array(self, name: str, shape: tuple[int, ...], dtype: str, about: Mapping[Any, Any]) -> Any:
        function = self._function
        self._arrays += 1
        try:
            sharding = _sharding(about["sharding"]) if "sharding" in about else None
            if (implementation := _KEY_IMPLEMENTATIONS.get(dtype)) is not None:
                return jax.ShapeDtypeStruct(shape, jax_arrays.key_dtype(implementation), sharding=sharding)
            if function.is_jitted or callable(function.options.supply):
                is_weak = bool(about.get("weak_type"))
                return jax.ShapeDtypeStruct(shape, dtype_from_name(dtype), weak_type=is_weak, sharding=sharding)
            return arrays.elements(
                shape, dtype_from_name(dtype), kind=function.options.supply, seed=_SEED, index=self._arrays
            )
        except (TypeError, ValueError, KeyError, AttributeError):
            raise CannotRebuildError(f"{name!r} is an array of {dtype} that cannot be made here") from None


def _sharding(described: Any) -> NamedSharding:
    """Returns the sharding that a key describes, over a mesh without devices."""
    mesh, explicit = described["mesh"], described.get("explicit", ())
    kinds = tuple(AxisType.Explicit if axis in explicit else AxisType.Auto for axis in mesh)
    spec = PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in described["spec"]))
    return NamedSharding(AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=kinds), spec)


def _static(name: str, described: Any) -> Any:
    """Returns the value that a description holds. Lists become tuples, so that jit can hash them."""
    builders: dict[str, Callable[[str], Any]] = {"float": float, "complex": complex, "dtype": dtype_from_name}
    match described:
        case None | bool() | int() | float() | str():
            return described
        case list():
            return tuple(_static(name, item) for item in described)
        case dict() if len(described) == 1:
            ((kind, text),) = described.items()
            if kind in builders and isinstance(text, str):
                try:
                    return np.dtype(dtype_from_name(text)) if kind == "dtype" else builders[kind](text)
                except (TypeError, ValueError):
                    pass
    raise CannotRebuildError(f"the value of {name!r} is not in its key, only a description of it")
