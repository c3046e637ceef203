"""Descriptions of calls and static values: equal for one tuning problem, different for two, in every process."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import json
import os
import re
import threading
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python

from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import keyed
from quarantune.devices import discovery
from quarantune.functions import description as describe
from quarantune.functions.binding import arguments_of, check_complete
from quarantune.functions.description import as_structs, describe_arguments
from quarantune.values.options import Options


def describe_call(
    signature: inspect.Signature,
    static: Collection[str],
    tunables: Collection[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_jitted: bool = True,
) -> dict[str, Any]:
    bound = signature.bind_partial(*args, **kwargs)
    check_complete(bound, tunables)
    values = {name: value for name, value in arguments_of(bound).items() if name not in tunables}
    return describe_arguments(values, static, is_jitted=is_jitted)


def _kernel(a: Any, b: Any = None, transpose: bool = False, BM: int = 32, BN: int = 32) -> None:
    """The function of the calls below."""


SIGNATURE = inspect.signature(_kernel)


def _describe(*args: Any, static: tuple[str, ...] = ("transpose",), **kwargs: Any) -> dict[str, Any]:
    return describe_call(SIGNATURE, static, ("BM", "BN"), args, kwargs)


def _values(*args: Any, **kwargs: Any) -> dict[str, Any]:
    values = _describe(*args, **kwargs)
    json.dumps(values, allow_nan=False)
    return values


def test_spellings_of_one_call_have_one_description() -> None:
    a = jnp.ones((3, 4))
    expected = _values(a)
    assert _values(a=a) == expected
    assert _values(a, None, False) == expected
    assert _values(a, transpose=False) == expected
    assert _values(a, transpose=np.bool_(False)) == expected
    assert _values(a, transpose=True) != expected


def test_arrays_are_described_by_shape_dtype_and_weak_type() -> None:
    calls = [
        jnp.ones((3, 4)),
        jnp.ones((4, 3)),
        jnp.ones((3, 4), jnp.bfloat16),
        jnp.full((3, 4), 1.0),
        jax.random.key(0),
        jax.random.key(0, impl="rbg"),
    ]
    assert len({json.dumps(_values(call)) for call in calls}) == len(calls)
    assert _values(jnp.zeros((3, 4))) == _values(jnp.ones((3, 4)))


def test_a_numpy_array_counts_as_the_jax_array_it_becomes() -> None:
    assert _values(np.ones((3, 4))) == _values(jnp.ones((3, 4)))
    assert _values(np.float64(2)) == _values(jnp.asarray(2, jnp.float32))
    with jax.enable_x64(True):
        assert _values(np.ones((3, 4)))["a"]["dtype"] == "float64"


def _plainly(*args: Any) -> str:
    """Returns the description of a call of a function that is not jitted."""
    signature = inspect.signature(lambda *args: None)
    return json.dumps(describe_call(signature, (), (), args, {}, is_jitted=False), allow_nan=False)


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("int64", "int32"), ("complex128", "complex64")])
def test_without_jit_a_numpy_array_counts_by_its_own_dtype(dtypes: tuple[str, str]) -> None:
    one, other = (_plainly(np.ones(3, dtype)) for dtype in dtypes)
    assert one != other
    assert _plainly(np.ones(3, "float32")) == _plainly(jnp.zeros(3))
    assert _plainly(jax.ShapeDtypeStruct((3,), np.float64)) == _plainly(jnp.zeros(3))


def test_without_jit_values_other_than_arrays_count_by_value() -> None:
    a = np.ones(3)
    calls: list[Any] = [5, 6, 5.5, True, "5", None]
    assert len({_plainly(a, call) for call in calls}) == len(calls)
    assert len({_plainly({"a": a, "n": call}) for call in calls}) == len(calls)
    assert _plainly({"a": a, "n": 5}) == _plainly({"n": 5, "a": a + 1})


def test_structs_count_as_arrays() -> None:
    assert _values(jax.ShapeDtypeStruct((3,), jnp.float32)) == _values(jnp.ones(3))


def test_python_scalars_in_dynamic_parameters_count_by_type() -> None:
    assert _values(1.5) == _values(2.5)
    assert len({json.dumps(_values(value)) for value in (True, 1, 1.0, 1j, None)}) == 5


def test_python_numbers_count_by_their_width_under_x64() -> None:
    numbers = (1, 1.0, 1j)
    narrow = [_values(number) for number in numbers]
    assert narrow == [{**_values(0), "a": {"scalar": kind}} for kind in ("int", "float", "complex")]
    was = _values(True)
    with jax.enable_x64(True):
        assert [_values(number) == then for number, then in zip(numbers, narrow, strict=True)] == [False] * 3
        assert _values(True) == was


def test_pytrees_are_described_by_structure_and_each_leaf() -> None:
    a = jnp.ones(3)
    calls = [{"x": a}, {"y": a}, [a], (a,), {"x": [a]}, {"x": a, "y": a}, {"x": jnp.ones(4)}, a]
    assert len({json.dumps(_values(call)) for call in calls}) == len(calls)
    assert _values({"x": a, "y": 1}) == _values({"y": 2, "x": a})


def test_leaves_are_listed_by_their_path() -> None:
    described = _values({"weights": [jnp.ones(3)]})["a"]
    assert described["leaves"] == {"['weights'][0]": {"shape": [3], "dtype": "float32"}}


class _Opaque:
    pass


@jax.tree_util.register_pytree_node_class
class _Node:
    def __init__(self, x: Any, data: Any) -> None:
        self.x, self.data = x, data

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.x,), self.data

    @classmethod
    def tree_unflatten(cls, data: Any, children: Any) -> _Node:
        return cls(children[0], data)


def test_static_data_of_a_pytree_counts_without_its_address() -> None:
    described = json.dumps(_values(_Node(jnp.ones(3), _Opaque())))
    assert described == json.dumps(_values(_Node(jnp.ones(3), _Opaque())))
    assert " at 0x" not in described
    assert _values(_Node(jnp.ones(3), 1)) != _values(_Node(jnp.ones(3), 2))


@dataclasses.dataclass(frozen=True)
class _Hiding:
    shown: int
    hidden: int = dataclasses.field(repr=False)


def test_static_data_of_a_pytree_counts_though_its_repr_hides_it() -> None:
    a = jnp.ones(3)
    assert _values(_Node(a, _Hiding(1, 2))) == _values(_Node(a, _Hiding(1, 2)))
    assert _values(_Node(a, _Hiding(1, 2))) != _values(_Node(a, _Hiding(1, 3)))
    assert _values({"x": [_Node(a, _Hiding(1, 2))]}) != _values({"x": [_Node(a, _Hiding(1, 3))]})


def test_structures_of_containers_are_described_by_their_repr() -> None:
    tree = {"x": [jnp.ones(3), (1, None)], "y": _Pair(1, 2), "z": collections.OrderedDict(w=3)}
    assert _values(tree)["a"]["structure"] == str(jax.tree.structure(tree))


def test_static_data_without_fields_counts_by_its_repr() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name, self.lock = name, threading.Lock()

        def __repr__(self) -> str:
            return self.name

    assert _values(_Node(jnp.ones(3), Named("one"))) != _values(_Node(jnp.ones(3), Named("other")))


def test_var_arguments_are_described() -> None:
    def kernel(*arrays: Any, BM: int = 2, **options: Any) -> None: ...

    def values(*args: Any, **kwargs: Any) -> Any:
        return describe_call(inspect.signature(kernel), (), ("BM",), args, kwargs)

    a, b = jnp.ones(2), jnp.ones(3)
    assert values(a, b) != values(b, a)
    assert values(a, scale=b, shift=a) == values(a, shift=a, scale=b)
    assert values(a, scale=b) != values(a, shift=b)


def test_a_keyword_does_not_hide_a_positional_of_its_name() -> None:
    def kernel(x: Any, /, *rest: Any, **options: Any) -> None: ...

    def values(*args: Any, **kwargs: Any) -> Any:
        return describe_call(inspect.signature(kernel), (), (), args, kwargs)

    a, b = jnp.ones(2), jnp.ones(3)
    calls = [values(a, x=b), values(b, x=a), values(a, x=a), values(a), values(a, b, rest=a), values(a, rest=a)]
    assert len({json.dumps(call) for call in calls}) == len(calls)


def test_static_arguments_in_var_keywords_count_by_value() -> None:
    def kernel(a: Any, **options: Any) -> None: ...

    def values(**kwargs: Any) -> Any:
        signature = inspect.signature(kernel)
        return describe_call(signature, ("mode",), (), (jnp.ones(2),), kwargs)

    assert values(mode=1) != values(mode=2)
    assert values(scale=1) == values(scale=2)


def test_tunables_passed_by_hand_are_reported_and_left_out() -> None:
    a = jnp.ones(3)
    fn = jax.jit(_kernel, static_argnames=["transpose", "BM", "BN"])
    function = TunedFunction.of(fn, [{"BM": 1, "BN": 2}], Options())
    assert BoundCall(function, (a,), {}).given == frozenset()
    assert BoundCall(function, (a,), {"BM": 16}).given == {"BM"}
    assert BoundCall(function, (a, None, False, 16), {"BN": 8}).given == {"BM", "BN"}
    assert _values(a, BM=16) == _values(a)


def test_a_call_that_does_not_fit_the_signature_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        _describe(jnp.ones(3), c=1)


def test_tracers_are_described_as_arrays() -> None:
    seen = []

    @jax.jit
    def outer(a: jax.Array) -> jax.Array:
        seen.append(_describe({"x": a}))
        jax.vmap(lambda row: seen.append(_describe(row)) or row)(a)
        return a

    outer(jnp.ones((5, 3)))
    assert seen == [_describe({"x": jnp.ones((5, 3))}), _describe(jnp.ones(3))]


def test_the_platform_is_that_of_the_concrete_jax_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    here = discovery.platform_and_kind
    monkeypatch.setattr(discovery, "platform_and_kind", lambda platform: asked.append(platform) or here(platform))
    function = TunedFunction.of(jax.jit(_kernel, static_argnames=["BM"]), [{"BM": 1}], Options())
    keyed(BoundCall(function, ({"x": jnp.ones(3)}, np.ones(3)), {}))
    keyed(BoundCall(function, (np.ones(3), 1.0), {}))
    assert asked == ["cpu", None]


class _Mode(enum.Enum):
    UP = 1
    DOWN = 2


class _Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class _Options:
    width: int
    mode: _Mode = _Mode.UP
    note: str = dataclasses.field(default="", compare=False)


class _Pair(typing.NamedTuple):
    x: int
    y: int


class _Bits(enum.IntFlag, boundary=enum.KEEP):
    READ = 4


class _Plain:
    def __init__(self, width: int) -> None:
        self.width = width

    @functools.cached_property
    def area(self) -> int:
        return self.width**2


class _Stated:
    __slots__ = ("width",)

    def __init__(self, width: int) -> None:
        self.width = width

    def __getstate__(self) -> Any:
        return (None, {"width": self.width})


class _Many(list[int]):
    pass


def _adder(n: int) -> Callable[[int], int]:
    return lambda a: a + n


def _wrapping(fn: Callable[..., Any], factor: int) -> Callable[..., Any]:
    lock = threading.Lock()  # a lock has no description

    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        with lock:
            return fn(*args) * factor

    return wrapper


class _Wrapping:
    def __init__(self, fn: Callable[..., Any], factor: int) -> None:
        functools.update_wrapper(self, fn)
        self._factor, self._lock = factor, threading.Lock()

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args) * self._factor  # type: ignore[attr-defined]


def _square(x: Any) -> Any:
    return x * x


def _cube(x: Any) -> Any:
    return x * x * x


class _HalfLayer:
    dtype = np.dtype("float16")


class _OtherHalfLayer:
    dtype = np.dtype("float16")


EQUAL = {
    "wrappers": (_wrapping(_square, 2), _wrapping(_square, 2)),
    "wrapping objects": (_Wrapping(_square, 2), _Wrapping(_square, 2)),
    "gradients": (jax.grad(_square), jax.grad(_square)),
    "jitted functions": (jax.jit(_square), jax.jit(_square)),
    "numpy scalar": (np.int64(3), np.array(3)[()]),
    "numpy booleans": (np.bool_(True), True),
    "dtypes": (jnp.float32, np.dtype("float32")),
    "scalar types": (np.float32, jnp.float32),
    "dataclass": (_Options(3), _Options(3, note="other")),
    "set": ({"a", "b", "c"}, {"c", "b", "a"}),
    "dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "object": (_Plain(3), _Plain(3)),
    "object with state of its own": (_Stated(3), _Stated(3)),
    "array": (np.arange(3), np.arange(3)),
    "closures": (_adder(1), _adder(1)),
    "partial": (functools.partial(_kernel, 1), functools.partial(_kernel, 1)),
    "method": (_Options(3).__eq__, _Options(3).__eq__),
    "tuple": ((1, (2, "x")), (1, (2, "x"))),
}

DIFFERENT = {
    "wrapper and function": (_wrapping(_square, 2), _square),
    "wrappers": (_wrapping(_square, 2), _wrapping(_square, 3)),
    "wrappers of functions": (_wrapping(_square, 2), _wrapping(_cube, 2)),
    "wrappers of lambdas": (_wrapping(lambda a: a, 2), _wrapping(lambda a: a, 3)),
    "wrapping objects": (_Wrapping(_square, 2), _Wrapping(_square, 3)),
    "wrapping objects of functions": (_Wrapping(_square, 2), _Wrapping(_cube, 2)),
    "gradient and function": (jax.grad(_square), _square),
    "gradients": (jax.grad(_square), jax.grad(_cube)),
    "gradients of gradients": (jax.grad(_square), jax.grad(jax.grad(_square))),
    "vmapped": (jax.vmap(_square), jax.vmap(_square, in_axes=1)),
    "checkpointed": (jax.checkpoint(_square), _square),
    "jitted and wrapped": (jax.jit(_wrapping(_square, 2)), jax.jit(_square)),
    "methods of containers": ([1].count, [2].count),
    "numbers": (1, 1.0),
    "bool and int": (True, 1),
    "number and text": (1, "1"),
    "nan and text": (float("nan"), "nan"),
    "infinities": (float("inf"), float("-inf")),
    "enum": (_Mode.UP, _Mode.DOWN),
    "enum and its value": (_Level.LOW, 1),
    "dtypes": (jnp.float32, jnp.bfloat16),
    "dataclass": (_Options(3), _Options(4)),
    "nested dataclass": (_Options(3), _Options(3, _Mode.DOWN)),
    "named tuples": (_Pair(1, 2), _Pair(2, 1)),
    "named tuple and tuple": (_Pair(1, 2), (1, 2)),
    "object": (_Plain(3), _Plain(4)),
    "object with state of its own": (_Stated(3), _Stated(4)),
    "array": (np.arange(3), np.arange(1, 4)),
    "long arrays": (np.arange(5000), np.arange(5000) ** 2),
    "functions": (_kernel, _adder),
    "lambdas": (lambda a: a + 1, lambda a: a + 2),
    "closures": (_adder(1), _adder(2)),
    "jitted functions": (jax.jit(_kernel), jax.jit(_adder)),
    "partial": (functools.partial(_kernel, 1), functools.partial(_kernel, 2)),
    "bytes": (b"a", b"b"),
    "types": (int, float),
    "types with a dtype": (_HalfLayer, _OtherHalfLayer),
    "type with a dtype and that dtype": (_HalfLayer, np.dtype("float16")),
    "modules": (json, os),
    "specs": (jax.P("x"), jax.P("y")),
    "arrays of objects": (np.array([None, "a"], object), np.array([None, "b"], object)),
    "ordered dicts": (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    "lists of a class": (_Many([1, 2]), _Many([1, 3])),
    "descriptions": (re.compile("a"), re.compile("b")),
    "a numpy scalar and a number": (np.float32(2), 2.0),
    "numpy scalars": (np.int64(2), np.int32(2)),
    "numpy dates": (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
    "members of an enum": (enum.Enum("Mode", {"FAST": 1}).FAST, enum.Enum("Mode", {"FAST": 2}).FAST),  # type: ignore[attr-defined]
    "members that hold tuples": (enum.Enum("Mode", {"A": (1, 2)}).A, enum.Enum("Mode", {"A": (1, 3)}).A),  # type: ignore[attr-defined]
    "flags without a name": (_Bits(8), _Bits(16)),
    "sums over axes": (jax.P("x", unreduced={"y"}), jax.P("x")),
}


def test_a_plain_callables_memory_order_counts() -> None:
    square = np.zeros((4, 4))
    frozen = np.zeros((4, 4))
    frozen.flags.writeable = False
    arrays = [square, square.T, np.zeros((4, 8))[:, ::2], square[::-1], np.broadcast_to(np.zeros(4), (4, 4)), frozen]
    assert len({_plainly(array) for array in arrays}) == len(arrays)
    assert _plainly(square) == _plainly(np.zeros((8, 4))[:4])


@pytest.mark.parametrize("name", EQUAL)
def test_equal_static_values_have_one_description(name: str) -> None:
    first, second = (json.dumps(describe.describe_static(value), allow_nan=False) for value in EQUAL[name])
    assert first == second
    assert " at 0x" not in first


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_static_values_have_different_descriptions(name: str) -> None:
    first, second = (json.dumps(describe.describe_static(value), allow_nan=False) for value in DIFFERENT[name])
    assert first != second


def test_a_cached_property_does_not_change_a_description() -> None:
    plain, used = _Plain(3), _Plain(3)
    assert used.area == 9
    assert describe.describe_static(used) == describe.describe_static(plain)


def test_a_function_found_by_its_name_is_described_by_name_alone() -> None:
    for function in (_square, jax.nn.relu, np.add):
        assert describe.describe_static(function) == {"function": f"{function.__module__}:{function.__qualname__}"}


def test_an_object_with_only_an_address_is_refused() -> None:
    with pytest.raises(TypeError, match=r"<unlocked .* frozen dataclass"):
        describe.describe_static(threading.Lock())


def test_an_object_that_holds_itself_can_be_described() -> None:
    loop, other = _Plain(3), _Plain(3)
    loop.width = loop  # type: ignore[assignment]
    other.width = other  # type: ignore[assignment]
    assert describe.describe_static(loop) == describe.describe_static(other)


@pytest.mark.slow
def test_every_process_describes_static_values_alike(tmp_path: Path) -> None:
    path = tmp_path / "describe.py"
    path.write_text(
        "import dataclasses, enum, inspect, json, jax\n"
        "from quarantune.functions.description import describe_arguments\n"
        "from quarantune.functions import description as describe\n"
        "class Mode(enum.Enum):\n    UP = 1\n"
        "@dataclasses.dataclass(frozen=True)\nclass Options:\n    mode: Mode\n    names: frozenset\n"
        "@jax.tree_util.register_pytree_node_class\n"
        "class Node:\n"
        "    def tree_flatten(self): return (1,), {'tags': frozenset('abcdef')}\n"
        "    def tree_unflatten(data, children): return Node()\n"
        "class Slots:\n    __slots__ = ('x',)\n"
        "slots = Slots(); slots.x = 5\n"
        "values = [Options(Mode.UP, frozenset('abcdef')), lambda a: a + 1, slots, {'b': 1, 'a': (2, 3)}]\n"
        "values += [lambda a: a in {'x', 'y', 'z', ('u', 1)}, jax.grad(lambda a: a in {'x', 'y', 'z'})]\n"
        "print(json.dumps([describe.describe_static(value) for value in values]))\n"
        "print(describe_arguments({'a': [Node()]}, ()))\n"
    )
    one, other = (python(path, PYTHONHASHSEED=seed, JAX_PLATFORMS="cpu") for seed in ("1", "2"))
    assert one == other


def test_as_structs_replaces_arrays_alone() -> None:
    options = _Options(3)
    args, kwargs = as_structs((np.ones((2, 3)), 2.5, options), {"b": {"x": jnp.full((3,), 1.0), "n": 1}})
    assert args[0] == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert args[1:] == (2.5, options)
    assert kwargs == {"b": {"x": jax.ShapeDtypeStruct((3,), jnp.float32, weak_type=True), "n": 1}}
    assert kwargs["b"]["x"].weak_type


SHARDED = """
import inspect, json
import jax, jax.numpy as jnp
from quarantune.functions.description import describe_arguments
from quarantune.functions import description as describe

def values(a):
    return describe_arguments({"a": a}, ())["a"]

found = {}
auto = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
found["auto"] = values(jax.device_put(jnp.ones((4, 2)), jax.NamedSharding(auto, jax.P("x"))))
found["one device"] = values(jnp.ones((4, 2)))
explicit = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(explicit):
    array = jax.device_put(jnp.ones((4, 2)), jax.P("x"))
    found["explicit"] = values(array)
    jax.jit(lambda a: found.update(traced=values(a)) or a)(array)
with jax.set_mesh(auto):
    traced_auto = jax.jit(lambda a: found.update(traced_auto=values(a)) or a)
    traced_auto(jax.device_put(jnp.ones((4, 2)), jax.P("x")))
print(json.dumps(found))
"""


def test_sharding_counts_if_explicit_or_over_several_devices(tmp_path: Path) -> None:
    path = tmp_path / "sharded.py"
    path.write_text(SHARDED)
    said = python(path, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    found = json.loads(said)
    assert "sharding" not in found["one device"]
    assert "sharding" not in found["traced_auto"]
    assert found["auto"]["sharding"]["mesh"] == {"x": 2}
    assert found["explicit"] == found["traced"]
