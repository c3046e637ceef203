"""A call packed in one process and unpacked in another gives the same result, or packing fails with the reason."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
import tempfile
import textwrap
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import compiling_once, python
from jax.extend.core import Primitive, primitives

import quarantune
from quarantune.functions.description import describe_arguments
from quarantune.jax_internals import jax_functions
from quarantune.sandbox import spool
from quarantune.transport import arrays, payload, pickling
from quarantune.transport.payload import Call

# The script has no `if __name__` guard, so that all of it is in `__main__`. Each case is a call: this script packs it
# and records its result, and another process unpacks it and reports the result there.
SENDER = r"""
import dataclasses, enum, functools, json, linecache, sys, types, typing
from collections.abc import Callable
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl
import quarantune
from quarantune.jax_internals import jax_backends, jax_functions
from quarantune.transport import payload
import named_module

out = Path(sys.argv[1])
CASES = {}
def case(make):
    CASES[make.__name__] = make
    return make

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 7

@functools.partial(jax.jit, static_argnames=["scale", "act"], donate_argnums=(1,), keep_unused=True)
def kernel(a, b, scale: int = 2, act=None):
    "Its docstring."
    return helper(a + b) * scale

def helper(x):
    return jnp.sin(x)

@case
def a_jitted_function_of_a_script_without_a_guard():
    return kernel, (X, jnp.asarray(X)), {"scale": 3}

@case
def a_plain_function():
    return (lambda a: helper(a)), (X,), {}

@case
def a_closure():
    factor, offset = 3.5, np.float32(2)
    @jax.jit
    def scaled(a):
        return a * factor + offset
    return scaled, (X,), {}

@case
def a_function_inside_a_function():
    def outer(a):
        def inner(b):
            return helper(b) + 1
        return inner(a)
    return jax.jit(outer), (X,), {}

@case
def a_jitted_lambda():
    return jax.jit(lambda a, k=2: a * k), (X,), {}

@case
def a_partial_inside_jit():
    return jax.jit(functools.partial(lambda power, a: a ** power, 3)), (X,), {}

@dataclasses.dataclass(frozen=True)
class Scaler:
    by: float
    @functools.partial(jax.jit, static_argnames=["self", "n"])
    def apply(self, a, n=2):
        return a * self.by * n

@case
def a_method_whose_self_is_static():
    return Scaler.apply, (Scaler(1.5), X), {"n": 4}

@case
def a_jitted_bound_method():
    class Holder:
        def __init__(self, by): self.by = by
        def apply(self, a): return a * self.by
    return jax.jit(Holder(4.0).apply), (X,), {}

@case
def a_callable_object():
    class Callable:
        def __init__(self, by): self.by = by
        def __call__(self, a): return a - self.by
    return jax.jit(Callable(2.0)), (X,), {}

@case
def a_notebook_cell():
    source = "@jax.jit\ndef cell(a):\n    return helper(a) * CONSTANT\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
    globals()["CONSTANT"] = 5
    exec(compile(source, "<cell 1>", "exec"), globals())
    return cell, (X,), {}

@functools.partial(jax.jit, static_argnames=["depth"])
def recursive(a, depth=2):
    return a if depth == 0 else recursive(a * 2, depth=depth - 1)

@case
def a_jitted_function_that_mentions_itself():
    return recursive, (X,), {}

class Layer:
    FACTOR = 3
    @functools.partial(jax.jit, static_argnames=["self", "n"])
    def apply(self, a, *, n=2):
        return a * Layer.FACTOR * n

@case
def a_method_that_mentions_its_class():
    return Layer.apply, (Layer(), X), {}

@quarantune.autotune([{"n": 1}, {"n": 2}])
@functools.partial(jax.jit, static_argnames=["n"])
def tuned(a, *, n: int = 2):
    assert (tuned.__wrapped__.__name__, tuned.__module__) == ("tuned", "__main__")
    return a if n == 0 else tuned.__wrapped__(a * 2, n=n - 1)

@case
def a_tuned_function_that_mentions_itself():
    return tuned.__wrapped__, (X,), {"n": 2}

@jax.custom_vjp
def clipped(x):
    return jnp.sum(x)
def clipped_fwd(x):
    return clipped(x), (x,)
def clipped_bwd(residuals, g):
    return (g * 7 * jnp.ones_like(residuals[0]),)
clipped.defvjp(clipped_fwd, clipped_bwd)

@case
def a_gradient_through_a_custom_vjp_that_mentions_itself():
    return jax.jit(lambda a: jax.grad(clipped)(a)), (X,), {}

@jax.custom_jvp
def bent(x):
    return x * 2
@bent.defjvp
def bent_jvp(primals, tangents):
    return bent(*primals), tangents[0] * 9

@case
def a_tangent_through_a_custom_jvp():
    return jax.jit(lambda a: jax.jvp(bent, (a,), (a,))[1]), (X,), {}

def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

@case
def a_prebuilt_pallas_call():
    built = pl.pallas_call(double_kernel, out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=True)
    return jax.jit(lambda a: built(a)), (X,), {}

@case
def a_prebuilt_pallas_call_with_squeezed_blocks():
    built = pl.pallas_call(
        double_kernel, out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype), grid=(2,), interpret=True,
        in_specs=[pl.BlockSpec((pl.squeezed, 3), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((pl.squeezed, 3), lambda i: (i, 0)))
    return built, (X,), {}

@case
def closed_over_jax_arrays():
    plain, half = jnp.asarray(X), jnp.asarray(X, jnp.bfloat16)
    weak, key = jnp.full((3,), 2.0), jax.random.key(3, impl="rbg")
    assert weak.weak_type
    @jax.jit
    def uses(a):
        assert (a.astype(jnp.bfloat16) * weak).dtype == jnp.bfloat16 and half.dtype == jnp.bfloat16
        return a * plain + half * weak + jax.random.uniform(key, (3,))
    return uses, (X,), {}

@case
def an_argument_also_closed_over():
    shared = jnp.asarray(X)
    return jax.jit(lambda a: a * shared), (shared,), {}

class Node:
    def __init__(self, x, tag): self.x, self.tag = x, tag
jax.tree_util.register_pytree_node(Node, lambda n: ((n.x,), n.tag), lambda tag, c: Node(c[0], tag))

@jax.tree_util.register_pytree_node_class
class ClassNode:
    def __init__(self, x, tag): self.x, self.tag = x, tag
    def tree_flatten(self): return (self.x,), self.tag
    @classmethod
    def tree_unflatten(cls, tag, children): return cls(children[0], tag)

@jax.tree_util.register_pytree_with_keys_class
class KeysClassNode:
    def __init__(self, x, tag): self.x, self.tag = x, tag
    def tree_flatten_with_keys(self): return ((jax.tree_util.GetAttrKey("x"), self.x),), self.tag
    @classmethod
    def tree_unflatten(cls, tag, children): return cls(children[0], tag)

class KeysNode:
    def __init__(self, x, tag): self.x, self.tag = x, tag
jax.tree_util.register_pytree_with_keys(
    KeysNode, lambda n: (((jax.tree_util.GetAttrKey("x"), n.x),), n.tag), lambda tag, c: KeysNode(c[0], tag))

@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["tag"])
@dataclasses.dataclass
class DataNode:
    x: object
    tag: int

@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticNode:
    tag: int

class TupleNode(typing.NamedTuple):
    x: object
    tag: float

@jax.jit
def of_node(node):
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(node)[0]]
    named = 100 if paths == [".x"] else 0
    return jax.tree_util.tree_map(lambda x: x * node.tag + named, node).x

class FieldsMeta(type):
    def __new__(mcs, name, bases, namespace):
        cls = super().__new__(mcs, name, bases, namespace)
        fields = tuple(namespace.get("__annotations__", ()))
        named_module.FIELDS[cls] = fields  # for whoever makes one
        flatten = lambda node: (tuple(getattr(node, field) for field in fields), node.tag)
        jax.tree_util.register_pytree_node(cls, flatten, lambda tag, children: cls(*children, tag))
        return cls

class MetaNode(named_module.Tabled, metaclass=FieldsMeta):
    x: object
    def __init__(self, x, tag):
        (field,) = named_module.FIELDS[type(self)]
        setattr(self, field, x)
        self.tag = tag

class SelfRegistering:
    def __init_subclass__(cls, *, meta):
        dataclasses.dataclass(cls)
        jax.tree_util.register_dataclass(cls, ["x"], [meta])

class SubclassNode(SelfRegistering, meta="tag"):
    x: object
    tag: int

for cls in (Node, ClassNode, KeysClassNode, KeysNode, DataNode, MetaNode, SubclassNode):
    CASES[f"a_pytree_class_{cls.__name__}"] = lambda cls=cls: (of_node, (cls(X, 3),), {})

@case
def a_pytree_class_inside_a_dict_and_a_static_node():
    tree = {"n": DataNode(jnp.asarray(X), 2), "s": StaticNode(5)}
    return jax.jit(lambda d: d["n"].x * d["s"].tag), (tree,), {}

@case
def a_marker_compared_by_identity():
    marker = named_module.MISSING
    return jax.jit(lambda a: a * (3 if marker is named_module.MISSING else 5)), (X,), {}

@case
def the_structure_of_a_pytree_class():
    structure = jax.tree_util.tree_structure({"n": DataNode(1, 2), "m": (Node(1, 3), None)})
    return jax.jit(lambda a, b: structure.unflatten([a, b])["m"][0].x), (X, X + 1), {}

@case
def a_named_tuple_class():
    return jax.jit(lambda t: t.x * t.tag), (TupleNode(X, 2.0),), {}

class Mode(enum.Enum):
    UP = 1
    DOWN = 2

@case
def an_enum_as_a_static_argument():
    @functools.partial(jax.jit, static_argnames=["mode"])
    def moded(a, mode):
        return a + 1 if mode is Mode.UP else a - 1
    return moded, (X,), {"mode": Mode.UP}

@case
def a_function_as_a_static_argument_is_the_one_the_kernel_knows():
    @functools.partial(jax.jit, static_argnames=["act"])
    def activated(a, act):
        return a * 2 if act is helper else a * 3
    return activated, (X,), {"act": helper}

@functools.lru_cache(maxsize=8)
def cached_factor(n):
    return n * 11

@case
def a_cached_helper():
    return jax.jit(lambda a: a * cached_factor(2)), (X,), {}

@case
def a_function_of_an_importable_module():
    return named_module.tuned, (X,), {}

@case
def a_function_wrapped_in_an_importable_module():
    return named_module.wrapped.__wrapped__, (X,), {}

@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def remembered(x):
    return jnp.sin(x) @ x.T

mapped = jax.vmap(helper)
differentiated = jax.grad(lambda x: jnp.sum(remembered(x)))

@case
def globals_that_jax_transformed():
    return jax.jit(lambda a: mapped(a) + differentiated(a)), (X,), {}

@case
def a_function_of_a_module_that_no_worker_can_import():
    made_up = sys.modules["made_up"] = types.ModuleType("made_up")
    exec("import jax\ndef helper(a): return a * 6\n@jax.jit\ndef tuned(a): return helper(a)\n", vars(made_up))
    return made_up.tuned, (X,), {}

@case
def odd_arrays():
    arrays = {
        "complex": X + 1j, "bool": X > 0.3, "empty": np.zeros((0, 3), np.float32), "transposed": X.T,
        "bf16": jnp.asarray(X, jnp.bfloat16), "fp8": jnp.asarray(X, jnp.float8_e4m3fn), "python": 5,
        "numpy_fp8": np.asarray(X, jnp.float8_e5m2), "fortran": np.asfortranarray(X),
        "strided": np.arange(20, dtype=np.float32)[::3],
        "scalar": np.array(3, np.int8), "int4": jnp.asarray([1, -2], jnp.int4), "numpy_scalar": np.float32(4),
        "key": jax.random.split(jax.random.key(1)), "weak": jnp.full((2,), 1),
    }
    expected = {k: (str(jax.typeof(v).dtype), jax.typeof(v).weak_type) for k, v in arrays.items()}
    @jax.jit
    def total(d):
        assert {k: (str(v.dtype), v.aval.weak_type) for k, v in d.items()} == expected, d
        d = dict(d, key=jax.random.key_data(d["key"]))
        return {k: jnp.sum(v.astype(complex) if hasattr(v, "astype") else v).real for k, v in d.items()}
    return total, (arrays,), {}

@case
def sixty_four_bits_in_a_context():
    with jax.enable_x64(True):
        wide = jnp.asarray(X, jnp.float64)
    return jax.jit(lambda a: a * (1 + 1e-12)), (wide,), {}

@case
def an_object_array_for_a_plain_callable():
    def plain(numbers, words):
        return np.asarray([float(number) for number in numbers]) + len(words)
    return plain, (np.array([1, 2.5], object), np.array(["ab"])), {}

def to_lists(tree):
    return jax.tree_util.tree_map(lambda x: np.asarray(x).astype(np.float64).tolist(), tree)

structs = jax.ShapeDtypeStruct((2, 3), jnp.float32)
payload.pack_call(kernel, (X, structs), {"scale": 2})
(out / "packed_without_a_backend").write_text(str(not jax_backends.backends_initialized()))

if True:
    for name, make in CASES.items():
        fn, args, kwargs = make()
        context = jax.enable_x64(name == "sixty_four_bits_in_a_context")
        with context:
            packed = payload.pack_call(fn, args, kwargs)
            with open(out / f"{name}.spool", "wb") as spool:
                payload.write_arrays(packed, spool.fileno())
            (out / f"{name}.blob").write_bytes(packed.blob)
            (out / f"{name}.expected").write_text(json.dumps(to_lists(fn(*args, **kwargs))))
"""

RECEIVER = r"""
import json, sys, traceback
from collections.abc import Callable
from pathlib import Path
import jax, numpy as np
from quarantune.jax_internals import jax_backends, jax_functions
from quarantune.transport import arrays, payload

out = Path(sys.argv[1])
report, calls = {}, {}
before = jax.config.values

def to_lists(tree):
    return jax.tree_util.tree_map(lambda x: np.asarray(x).astype(np.float64).tolist(), tree)

# Cases that close over arrays come last, as they alone may initialise the backend.
for blob in sorted(out.glob("*.blob"), key=lambda path: "closed_over" in path.name):
    entry = report[blob.stem] = {}
    try:
        calls[blob] = payload.unpack_call(blob.read_bytes())
    except BaseException:
        entry["error"] = traceback.format_exc()
    entry["backend"], entry["x64"] = jax_backends.backends_initialized(), jax.config.jax_enable_x64
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)

for blob, call in calls.items():
    entry = report[blob.stem]
    try:
        with jax.enable_x64(entry["x64"]), open(blob.with_suffix(".spool"), "rb") as spool:
            for _ in range(2):  # a call that donates its arguments gets fresh ones
                args, kwargs = payload.materialize(call, spool.fileno(), seed=0)
                entry["result"] = to_lists(call.fn(*args, **kwargs))
            if jax_functions.is_jitted(call.fn):
                args, kwargs = payload.call_as_structs(call)
                call.fn.lower(*args, **kwargs)
        entry["name"], entry["doc"] = getattr(call.fn, "__qualname__", None), call.fn.__doc__
    except BaseException:
        entry["error"] = traceback.format_exc()
(out / "report.json").write_text(json.dumps(report))
"""

NAMED_MODULE = """
import functools, threading, weakref
import jax
class Missing: ...
MISSING = Missing()
class Tabled: ...
FIELDS = weakref.WeakKeyDictionary()
class Own(threading.local): ...
own = Own()  # could not travel by value
@jax.jit
def tuned(a):
    own.shape = a.shape
    return a * 3
class Wrapper:
    def __init__(self, fn):
        functools.update_wrapper(self, fn)
@Wrapper
@jax.jit
def wrapped(a):
    own.shape = a.shape
    return a * 4
"""


def _run(script: str, directory: Path, out: Path, *, name: str, path: tuple[Path, ...] = ()) -> None:
    file = directory / name
    file.write_text(textwrap.dedent(script))
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error", **compiling_once(out / "compiled")}
    python(file, out, path=path, cwd=directory, **variables)


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns for each case the receiver's result and the sender's recorded result."""
    out, sender, receiver, modules = (tmp_path_factory.mktemp(name) for name in ("out", "sender", "receiver", "mods"))
    (modules / "named_module.py").write_text(NAMED_MODULE)
    _run(SENDER, sender, out, name="train.py", path=(modules,))
    _run(RECEIVER, receiver, out, name="worker.py")
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert report.keys() == set(CASES)
    assert (out / "packed_without_a_backend").read_text() == "True"
    for name, entry in report.items():
        entry["expected"] = json.loads((out / f"{name}.expected").read_text())
    return report


CASES = [
    "a_jitted_function_of_a_script_without_a_guard",
    "a_plain_function",
    "a_closure",
    "a_function_inside_a_function",
    "a_jitted_lambda",
    "a_partial_inside_jit",
    "a_method_whose_self_is_static",
    "a_jitted_bound_method",
    "a_callable_object",
    "a_notebook_cell",
    "a_jitted_function_that_mentions_itself",
    "a_method_that_mentions_its_class",
    "a_tuned_function_that_mentions_itself",
    "a_gradient_through_a_custom_vjp_that_mentions_itself",
    "a_tangent_through_a_custom_jvp",
    "a_prebuilt_pallas_call",
    "a_prebuilt_pallas_call_with_squeezed_blocks",
    "closed_over_jax_arrays",
    "an_argument_also_closed_over",
    "a_pytree_class_Node",
    "a_pytree_class_ClassNode",
    "a_pytree_class_KeysClassNode",
    "a_pytree_class_KeysNode",
    "a_pytree_class_DataNode",
    "a_pytree_class_MetaNode",
    "a_pytree_class_SubclassNode",
    "a_marker_compared_by_identity",
    "a_pytree_class_inside_a_dict_and_a_static_node",
    "the_structure_of_a_pytree_class",
    "a_named_tuple_class",
    "an_enum_as_a_static_argument",
    "a_function_as_a_static_argument_is_the_one_the_kernel_knows",
    "a_cached_helper",
    "a_function_of_an_importable_module",
    "a_function_wrapped_in_an_importable_module",
    "globals_that_jax_transformed",
    "a_function_of_a_module_that_no_worker_can_import",
    "odd_arrays",
    "sixty_four_bits_in_a_context",
    "an_object_array_for_a_plain_callable",
]


@pytest.mark.parametrize("case", CASES)
def test_a_call_gives_the_same_result_in_another_process(travelled: dict[str, Any], case: str) -> None:
    entry = travelled[case]
    assert "error" not in entry, entry["error"]
    here, structure_here = jax.tree_util.tree_flatten(entry["expected"])
    there, structure_there = jax.tree_util.tree_flatten(entry["result"])
    assert structure_there == structure_here
    assert there == here


@pytest.mark.parametrize("case", [case for case in CASES if "closed_over" not in case])
def test_unpacking_initialises_no_backend(travelled: dict[str, Any], case: str) -> None:
    assert travelled[case]["backend"] is False


def test_a_jitted_function_keeps_its_name_and_docstring(travelled: dict[str, Any]) -> None:
    entry = travelled["a_jitted_function_of_a_script_without_a_guard"]
    assert (entry["name"], entry["doc"]) == ("kernel", "Its docstring.")


def test_the_x64_mode_of_a_context_is_sent(travelled: dict[str, Any]) -> None:
    assert travelled["sixty_four_bits_in_a_context"]["x64"] is True
    assert travelled["a_closure"]["x64"] is False


def _roundtrip(fn: Any, *args: Any, **kwargs: Any) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    packed = payload.pack_call(fn, args, kwargs)
    with tempfile.TemporaryFile() as spool:
        payload.write_arrays(packed, spool.fileno())
        call = payload.unpack_call(packed.blob)
        return call, *payload.materialize(call, spool.fileno(), seed=0)


def _plain(*args: Any, **kwargs: Any) -> None:
    """A function for tests of arguments."""


def _read_only() -> np.ndarray[Any, Any]:
    array = np.ones((3, 4))
    array.setflags(write=False)
    return array


ARGUMENTS: dict[str, Callable[[], Any]] = {
    "every other element": lambda: np.ones((8, 6))[::2, ::3],
    "backwards": lambda: np.arange(6)[::-1],
    "broadcast": lambda: np.broadcast_to(np.float32(1), (3, 4)),
    "in columns": lambda: np.asfortranarray(np.ones((3, 4))),
    "transposed": lambda: np.ones((3, 4, 5)).transpose(2, 0, 1),
    "overlapping windows": lambda: np.lib.stride_tricks.sliding_window_view(np.arange(6.0), 3),
    "read-only": _read_only,
    "off its alignment": lambda: np.frombuffer(bytes(17), np.uint8)[1:].view(np.float64),
    "empty": lambda: np.ones((0, 3)),
    "scalar of NumPy": lambda: np.float32(2),
    "without axes": lambda: np.array(3.0),
    "of the other byte order": lambda: np.arange(3, dtype=">i4"),
    "bfloat16": lambda: np.ones(3, ml_dtypes.bfloat16),
    "float8": lambda: np.ones(3, ml_dtypes.float8_e4m3fn),
    "int4": lambda: np.ones(3, ml_dtypes.int4),
    "complex": lambda: np.ones(3, np.complex64),
    "records": lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]),
    "objects": lambda: np.array([1, None, "a"], object),
    "text": lambda: np.array(["a", "bc"]),
    "dates": lambda: np.zeros(2, "M8[s]"),
    "masked": lambda: np.ma.masked_array([1, 2], [0, 1]),
    "weakly typed": lambda: jnp.asarray(2.0),
    "of JAX": lambda: jnp.ones((2, 3), jnp.bfloat16),
    "key": lambda: jax.random.key(0),
    "keys of another kind": lambda: jax.random.split(jax.random.key(0, impl="rbg"), 3),
    "in the host's memory": lambda: jax.device_put(
        jnp.ones(3), jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    ),
    "in a dict": lambda: {"a": np.ones((4, 4))[::2], "b": [jnp.ones(3), 2, "x"]},
}


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_every_relevant_property_of_an_argument_travels(kind: str, is_jitted: bool) -> None:
    def described(argument: Any) -> dict[str, Any]:
        return describe_arguments({"x": argument}, (), is_jitted=is_jitted)

    argument = ARGUMENTS[kind]()
    _, (arrived,), _ = _roundtrip(jax.jit(_plain) if is_jitted else _plain, argument)
    assert described(arrived) == described(argument)


def test_a_function_of_an_importable_module_stays_identical() -> None:
    assert pickling.loads(pickling.dumps(_plain)) is _plain
    assert pickling.loads(pickling.dumps(jnp.matmul)) is jnp.matmul


def test_the_jitted_function_inside_a_wrapper_stays_identical() -> None:
    assert pickling.loads(pickling.dumps(wrapped_twice.__wrapped__)) is wrapped_twice.__wrapped__


@functools.lru_cache
@jax.jit
def wrapped_twice(a: jax.Array) -> jax.Array:
    return a


own_p = Primitive("own")


@pytest.mark.parametrize("primitive", [primitives.sin_p, own_p], ids=["of JAX", "of a module"])
def test_a_primitive_stays_identical(primitive: Primitive) -> None:
    assert pickling.loads(pickling.dumps(primitive)) is primitive


def test_the_message_for_a_primitive_of_no_module_has_a_remedy() -> None:
    with pytest.raises(TypeError, match=r"element 0 is hidden, .*by its identity.* into a module that can be imported"):
        pickling.dumps([Primitive("hidden")])


def test_a_rebuilt_function_keeps_its_jit_options() -> None:
    def plain(a: Any, b: Any, mode: str = "x", n: int = 2) -> Any:
        return a, b

    fn = jax.jit(
        plain,
        static_argnums=(3,),
        static_argnames=["mode"],
        donate_argnames="b",
        keep_unused=True,
        inline=True,
        compiler_options={"xla_embed_ir_in_executable": True},
    )
    there = pickling.loads(pickling.dumps(fn))
    assert there is not fn
    assert jax_functions.jit_options(there) == jax_functions.jit_options(fn)
    assert jax_functions.jit_options(fn).static_names == {"mode", "n"}


def test_arrays_in_the_spool_are_apart_and_aligned_for_xla() -> None:
    arrays = [
        np.ones(3, np.int8),
        jnp.ones(5),
        np.zeros((0, 4)),
        np.ones(1000, np.float16),
        jax.random.key(0),
    ]
    packed = payload.pack_call(_plain, tuple(arrays), {})
    end = 0
    for spec in packed.call.specs:
        assert spec.offset % 64 == 16
        assert spec.offset >= end
        end = max(end, spec.offset + spec.nbytes)
    assert packed.call.spool_bytes == end


def test_the_blob_does_not_contain_array_data() -> None:
    packed = payload.pack_call(_plain, (np.zeros(1_000_000),), {"b": jnp.zeros(1_000_000)})
    assert len(packed.blob) < 100_000


def test_numpy_arguments_are_writable_copies_of_the_spool() -> None:
    packed = payload.pack_call(_plain, (np.arange(4),), {})
    call = payload.unpack_call(packed.blob)
    with tempfile.TemporaryFile() as spool:
        payload.write_arrays(packed, spool.fileno())
        (first,), _ = payload.materialize(call, spool.fileno(), seed=0)
        first[:] = -1
        (second,), _ = payload.materialize(call, spool.fileno(), seed=0)
    assert second.tolist() == [0, 1, 2, 3]


def test_numpy_arguments_keep_their_strides() -> None:
    cube = np.arange(24).reshape(2, 3, 4)
    orders = {
        "C": cube,
        "F": np.asfortranarray(cube),
        "strided": cube[:, ::2],
        "both": np.asfortranarray(np.arange(3)),
        "backwards": cube[::-1, :, ::-2],
        "repeated": np.broadcast_to(np.arange(4), (5, 4)).copy(order="K"),
        "repeated twice": np.lib.stride_tricks.as_strided(np.arange(3), (2, 3, 5), (0, 8, 0)),
    }
    packed = payload.pack_call(_plain, tuple(orders.values()), {"x": np.zeros((0, 2), order="F")})
    with tempfile.TemporaryFile() as spool:
        payload.write_arrays(packed, spool.fileno())
        arrived, _ = payload.materialize(payload.unpack_call(packed.blob), spool.fileno(), seed=0)
    for (order, given), array in zip(orders.items(), arrived, strict=True):
        np.testing.assert_array_equal(array, given)
        assert array.strides == given.strides, order
        assert array.flags.writeable
        assert not np.shares_memory(array, given)


def test_a_spread_view_is_refused_for_plain_callables_alone() -> None:
    column = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 10,), (1 << 20,))  # its elements are never read
    with pytest.raises(ValueError, match=r"covers 1,072,693,256 bytes.*ascontiguousarray"):
        payload.pack_call(_plain, (column,), {})
    (spec,) = payload.pack_call(jax.jit(_plain), (column,), {}).call.specs
    assert spec.strides is None, "JAX copies the view"
    (spec,) = payload.pack_call(_plain, (np.zeros((64, 64))[:, 0],), {}).call.specs
    assert spec.strides == (512,)


def test_plain_callables_get_the_callers_memory_order() -> None:
    given = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))

    def plain(x: Any, do: int) -> Any:
        assert x.flags.f_contiguous
        return x

    for fn in (plain, jax.jit(lambda x, do=1: x, static_argnames=["do"])):
        tuner = quarantune.AutoTuner(
            fn, {"do": [1]}, name="ordered", ref_fn=lambda x: x + 0, rep=2, max_mismatched_ratio=0
        )
        assert tuner.run(given).best_config == {"do": 1}


def test_arrays_bound_to_their_device_arrive_bound_to_one() -> None:
    device = jax.local_devices()[0]
    placed = jax.sharding.SingleDeviceSharding(device)
    free = {
        "array": jnp.arange(3.0),
        "key": jax.random.key(1),
        "numpy": np.arange(3.0),
        "struct": jax.ShapeDtypeStruct((3,), jnp.float32),
    }
    bound = {
        "array": jax.device_put(free["array"], device),
        "key": jax.device_put(free["key"], device),
        "struct": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=placed),
    }
    packed = payload.pack_call(_plain, (free, bound), {})
    call = payload.unpack_call(packed.blob)
    with tempfile.TemporaryFile() as spool:
        payload.write_arrays(packed, spool.fileno())
        (free_made, bound_made), _ = payload.materialize(call, spool.fileno(), seed=0)
    assert {name: made.committed for name, made in free_made.items() if name != "numpy"} == dict.fromkeys(
        ("array", "key", "struct"), False
    )
    assert {name: made.committed for name, made in bound_made.items()} == dict.fromkeys(bound, True)
    (free_structs, bound_structs), _ = payload.call_as_structs(call)
    assert {struct.sharding for struct in free_structs.values()} == {None}
    assert {struct.sharding for struct in bound_structs.values()} == {placed}


@pytest.mark.parametrize("is_bound", [False, True])
def test_jax_arguments_own_their_buffers_every_time(is_bound: bool) -> None:
    given = jnp.arange(4096.0)
    packed = payload.pack_call(_plain, (jax.device_put(given, given.device) if is_bound else given,), {})
    call = payload.unpack_call(packed.blob)
    overwrite = jax.jit(lambda a: a + 1, donate_argnums=0)
    with tempfile.TemporaryFile() as spool:
        payload.write_arrays(packed, spool.fileno())
        for _ in range(3):
            (array,), _ = payload.materialize(call, spool.fileno(), seed=0)
            assert array[4095] == 4095
            address = array.unsafe_buffer_pointer()
            # XLA writes only into buffers that it owns, and copies any other.
            assert overwrite(array).unsafe_buffer_pointer() == address


@pytest.mark.parametrize("offset", range(0, 128, 16))
def test_arrays_of_numpy_data_own_buffers_at_any_alignment(offset: int) -> None:
    room = np.arange(1000, dtype=np.float32)
    start = (offset - room.ctypes.data) % 128 // 4
    array = arrays.restore_array(room[start : start + 500], False, None)
    address = array.unsafe_buffer_pointer()
    result = jax.jit(lambda a: a + 1, donate_argnums=0)(array)
    assert result.unsafe_buffer_pointer() == address
    assert result[0] == start + 1


def test_the_spool_is_unmapped_after_use(tmp_path: Path) -> None:
    packed = payload.pack_call(_plain, (jnp.arange(100_000.0), np.arange(100_000)), {})
    with open(tmp_path / "the_spool", "w+b") as spool:
        payload.write_arrays(packed, spool.fileno())
        arguments = payload.materialize(payload.unpack_call(packed.blob), spool.fileno(), seed=0)
    gc.collect()  # JAX frees the copied arrays only now
    assert arguments[0][0][99_999] == 99_999
    assert "the_spool" not in Path("/proc/self/maps").read_text()


def test_arrays_without_a_value_are_generated_in_the_worker() -> None:
    struct = jax.ShapeDtypeStruct((3, 2), jnp.bfloat16, weak_type=True)
    call, (array, key), _ = _roundtrip(_plain, struct, jax.ShapeDtypeStruct((2,), jax.random.key(0).dtype))
    assert [spec.is_generated for spec in call.specs] == [True, True]
    assert (array.shape, array.dtype, array.weak_type) == ((3, 2), jnp.bfloat16, True)
    assert (key.shape, key.dtype) == ((2,), jax.random.key(0).dtype)


def test_tracers_are_packed_by_shape() -> None:
    packed = []

    @jax.jit
    def outer(a: jax.Array) -> jax.Array:
        jax.vmap(lambda row: packed.append(payload.pack_call(_plain, (row, 2.0), {})) or row)(a)
        return a

    outer(jnp.ones((5, 3), jnp.float16))
    (spec,) = packed[0].call.specs
    assert (spec.shape, spec.dtype, spec.is_generated, packed[0].call.spool_bytes) == ((3,), "float16", True, 0)


def test_python_scalars_stay_python_scalars() -> None:
    _, args, kwargs = _roundtrip(_plain, 1, 2.5, None, flag=True, name="x")
    assert (args, kwargs) == ((1, 2.5, None), {"flag": True, "name": "x"})
    assert type(kwargs["flag"]) is bool


def test_structs_have_the_dtype_jax_would_use() -> None:
    call, _, _ = _roundtrip(_plain, np.ones(2), jnp.full((2,), 1.0))
    (wide, weak), _ = payload.call_as_structs(call)
    assert (wide.dtype, weak.weak_type) == (jnp.float32, True)


def test_an_option_a_module_sets_on_import_has_the_callers_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "jax_numpy_rank_promotion"
    setting = f"import jax\njax.config.update({name!r}, 'raise')\ndef double(x):\n    return 2 * x\n"
    (tmp_path / "setting_an_option.py").write_text(setting, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = jax.config.values[name]  # type: ignore[attr-defined]
    try:
        module = importlib.import_module("setting_an_option")
        jax.config.update(name, "warn")
        packed = payload.pack_call(module.double, (np.ones(3),), {})
        del sys.modules["setting_an_option"]  # a worker has not imported it
        payload.unpack_call(packed.blob)
        assert "setting_an_option" in sys.modules
        assert jax.config.values[name] == "warn"  # type: ignore[attr-defined]
    finally:
        jax.config.update(name, before)


def test_a_full_disk_raises_instead_of_leaving_a_short_spool() -> None:
    packed = payload.pack_call(_plain, (np.ones(10_000),), {})
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        payload.write_arrays(packed, full.fileno())


def test_a_spool_that_is_too_short_is_refused() -> None:
    packed = payload.pack_call(_plain, (np.ones(10_000),), {})
    with tempfile.TemporaryFile() as spool, pytest.raises(ValueError, match="the spool holds 0 bytes"):
        payload.materialize(payload.unpack_call(packed.blob), spool.fileno(), seed=0)


def test_no_descriptor_stays_open() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        _roundtrip(_plain, np.ones(100_000), jnp.ones(1000))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_message_for_a_deleted_argument_mentions_donation() -> None:
    array = jnp.ones(4)
    array.delete()
    with pytest.raises(ValueError, match="was donated to an earlier call"):
        payload.pack_call(_plain, (array,), {})


def test_dumping_leaves_cloudpickles_global_list_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = types.ModuleType("made_up_module")
    exec("def helper(a): return a + 1", vars(made_up))
    monkeypatch.setitem(sys.modules, "made_up_module", made_up)
    blob = pickling.dumps(made_up.helper)
    assert not cloudpickle.list_registry_pickle_by_value()
    monkeypatch.delitem(sys.modules, "made_up_module")
    assert pickling.loads(blob)(1) == 2


def test_modules_that_refer_to_each_other_travel_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = types.ModuleType("made_up_first"), types.ModuleType("made_up_second")
    for module, other in ((first, second), (second, first)):
        module.other = other  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def kernel(a): return other.twice(a)", vars(first))
    exec("def twice(a): return 2 * a", vars(second))
    blob = pickling.dumps(first.kernel)
    for module in (first, second):
        monkeypatch.delitem(sys.modules, module.__name__)
    found = pickling.loads(blob)
    assert found(21) == 42
    there = found.__globals__["other"]
    assert there.other.other is there


def test_a_type_variable_of_a_made_up_module_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = types.ModuleType("made_up_module")
    made_up.own = (n for n in ())  # type: ignore[attr-defined]  # so that the module cannot travel as a whole
    code = "from typing import Generic, TypeVar\nT = TypeVar('T', int, str, covariant=True)\nclass Box(Generic[T]): ..."
    exec(code, vars(made_up))
    monkeypatch.setitem(sys.modules, "made_up_module", made_up)
    blob = pickling.dumps([made_up.T, made_up.Box])
    monkeypatch.delitem(sys.modules, "made_up_module")
    found, box = pickling.loads(blob)
    assert box.__parameters__ == (found,)
    assert (found.__name__, found.__constraints__, found.__covariant__) == ("T", (int, str), True)


NAMED_OBJECTS = {
    "NewType": "K = typing.NewType('K', int)",
    "ParamSpec": "K = typing.ParamSpec('K')",
    "TypeVarTuple": "K = typing.TypeVarTuple('K')",
    "sentinel": "class Kind:\n    def __reduce__(self): return 'K'\nK = Kind()",
    "in a class": "class K:\n    def __reduce__(self): return 'K.one'\nK.one = K()",
    "slots": "class Kind:\n    __slots__ = ('n',)\n    def __reduce__(self): return 'K'\nK = Kind()\nK.n = 1",
    "alias": "type K = int",
    "recursive alias": "type K = int | list[K]",
    "generic alias": "type K[T, *Ts, **P] = typing.Callable[P, tuple[T, *Ts]]",
    "alias of nothing": "type K = Missing",
    "type parameters": "def K[T, *Ts, **P](a: T) -> tuple[T, *Ts]: ...",
}


@pytest.mark.parametrize("kind", NAMED_OBJECTS)
def test_an_object_pickled_by_name_travels_from_its_module(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info < (3, 12) and ("type K" in NAMED_OBJECTS[kind] or "K[" in NAMED_OBJECTS[kind]):
        pytest.skip("Python 3.12 has this syntax")
    made_up = types.ModuleType("made_up_module")
    exec(f"import typing\n{NAMED_OBJECTS[kind]}\ndef kernel(a, b=[K, K]): return b", vars(made_up))
    monkeypatch.setitem(sys.modules, "made_up_module", made_up)
    blob = pickling.dumps(made_up.kernel)
    monkeypatch.delitem(sys.modules, "made_up_module")
    kernel = pickling.loads(blob)
    found, again = kernel(1)
    assert found is again
    assert type(found).__name__ == type(made_up.K).__name__
    if kind == "recursive alias":
        assert found.__value__.__args__[1].__args__[0] is found
    if kind == "slots":
        assert found.n == 1


def test_an_object_whose_name_no_worker_can_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = types.ModuleType("made_up_module")
    exec(
        "class Kind(int):\n    def __reduce__(self): return 'K'\nK = Kind(2)\ndef kernel(a): return a * K",
        vars(made_up),
    )
    monkeypatch.setitem(sys.modules, "made_up_module", made_up)
    with pytest.raises(TypeError, match=r"'K'.*only its name in made_up_module, which a worker cannot import: move it"):
        pickling.dumps(made_up.kernel)


def test_the_message_for_a_generator_names_the_way_to_it() -> None:
    numbers = (number for number in range(9))

    def helper(a: Any) -> Any:
        return a * next(numbers)

    def kernel(a: Any) -> Any:
        return helper(a)

    with pytest.raises(TypeError) as caught:
        payload.pack_call(jax.jit(kernel), (), {})
    message = str(caught.value)
    assert "closure variable 'numbers' of" in message
    assert "closure variable 'helper' of" in message
    assert "<generator object" in message
    assert "Create it inside the function" in message


def test_a_decorators_weak_reference_to_its_function_arrives() -> None:
    def counted(function: Callable[[], int]) -> Callable[[], int]:
        def wrapper() -> int:
            return function() + (holder[0]() is wrapper) + (gone() is None)

        holder, gone = [weakref.ref(wrapper)], weakref.ref(set[int]())
        return wrapper

    assert pickling.loads(pickling.dumps(counted(lambda: 40)))() == 42


def test_an_objects_held_locks_arrive_as_new_ones() -> None:
    class Guarded:
        def __init__(self) -> None:
            self.lock, self.again, self.changed = threading.Lock(), threading.RLock(), threading.Condition()

        @functools.cached_property  # it has a lock in Python 3.11
        def doubled(self) -> int:
            return 2 * 3

    sent = Guarded()
    with sent.lock, sent.again, sent.changed:
        found = pickling.loads(pickling.dumps(sent))
    assert found.lock is not sent.lock
    assert all(lock.acquire(blocking=False) for lock in (found.lock, found.again, found.changed))
    assert found.doubled == 6
    found.changed.notify_all()  # raises unless the lock is held


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: Holder(_ for _ in ()),
            r"attribute 'held' of 'Holder'.* is <generator .* cannot be copied, and each run",
        ),
        (lambda: Holder(sys.__stderr__), r"attribute 'held' of 'Holder' .*TextIOWrapper"),
        (lambda: {"a": (n for n in ())}, r"the entry 'a' \(reached through argument 0\) is <generator"),
        (lambda: jax.devices()[0], "Devices and meshes belong to one process"),
        (lambda: jax.make_mesh((1,), ("x",)), "Devices and meshes belong to one process"),
        (lambda: jax.jit(jnp.sin).lower(1.0), "the worker compiles its own"),
        (lambda: jax.jit(jnp.sin).lower(1.0).compile(), "the worker compiles its own"),
        (lambda: jax.jit(_local(), out_shardings=_sharding()), r"jax\.jit was given out_shardings"),
    ],
    ids=[
        "generator",
        "open file",
        "generator in a dict",
        "device",
        "mesh",
        "lowered",
        "compiled",
        "jit with shardings",
    ],
)
def test_the_message_for_an_unpicklable_object_gives_the_reason(make: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        payload.pack_call(_plain, (make(),), {})


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def _sharding() -> jax.sharding.Sharding:
    return jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P("x"))


def _local() -> Any:
    def local(a: Any) -> Any:
        return a

    return local


def test_the_message_for_a_sharding_in_a_closure_has_a_remedy() -> None:
    sharding = _sharding()

    def kernel(a: Any) -> Any:
        return jax.lax.with_sharding_constraint(a, sharding)

    with pytest.raises(TypeError, match=r"closure variable 'sharding' of .*make the mesh inside the function"):
        pickling.dumps(kernel)


def test_the_message_for_a_tracer_in_a_closure_has_a_remedy() -> None:
    @jax.jit
    def outer(a: jax.Array) -> jax.Array:
        with pytest.raises(TypeError, match=r"closure variable 'a' of .*as an argument instead"):
            pickling.dumps(lambda: a)
        return a

    outer(jnp.ones(3))


@pytest.mark.parametrize("is_sealed", [True, False])
def test_arrays_of_any_type_survive_a_file(is_sealed: bool) -> None:
    sent = [np.arange(7, dtype=dtype).reshape(7, 1)[::step] for dtype in ("int8", "complex128") for step in (1, -2)]
    sent += [np.asarray(jnp.ones((3, 5), jnp.bfloat16)), np.zeros((0, 3)), np.array(2.5, np.float32)]
    apart: list[memoryview] = []
    blob, written = pickling.dumps(sent, apart), spool.create("output")
    try:
        spool.write_parts(written, [blob, *apart])
        assert spool.read_parts(written) == [blob, *map(bytes, apart)]
        read_from = spool.protect(written) if is_sealed else os.dup(written)
        try:
            first, *parts = spool.map_parts(read_from)
            for array, expected in zip(pickling.loads(first, parts), sent, strict=True):
                assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
                assert array.flags.aligned
                np.testing.assert_array_equal(array, expected)
        finally:
            os.close(read_from)
    finally:
        os.close(written)
