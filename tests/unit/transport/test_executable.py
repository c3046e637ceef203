"""Executables return to the caller as data: reading a worker's bytes runs no code."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import platform
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import python

import quarantune
from quarantune.transport import executable

X = np.arange(4, dtype=np.float32)


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.usefixtures("quiet_place", "two_slots")
def test_the_caller_loads_no_pickle_that_a_config_forged(tmp_path: Path) -> None:
    mark = str(tmp_path / "made by the caller")

    @functools.partial(jax.jit, static_argnames=["n"])
    def forging(x: Any, n: int = 1) -> Any:
        if n == 2:
            from quarantune.transport import executable

            blob = pickle.dumps((Evil(mark), None, None, [0]))
            executable.to_pickle = executable.to_data = lambda compiled: blob  # type: ignore[assignment]
        return x * n

    with nothing_is_left():
        one, two, three = quarantune.compile_configs(forging, [{"n": 1}, {"n": 2}, {"n": 3}], X)
        assert not os.path.exists(mark)
    assert one is not None
    assert three is not None
    np.testing.assert_array_equal(one(X), X)
    np.testing.assert_array_equal(three(X), 3 * X)
    assert isinstance(two, functools.partial)  # a call compiles it here


def blob_of(fn: Any, *args: Any) -> tuple[Any, bytes]:
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled, executable.to_data(compiled)


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tree": (lambda x, y: {"a": [x * 2, None], "b": (y,)}, (X, X[0])),
    "unused and weak": (lambda x, y, z: (x + y, y), (X, 2.0, X)),
    "bfloat16": (lambda x: x * 2, (X.astype(jnp.bfloat16),)),
    "key": (lambda key: jax.random.split(key, 3), (None,)),
    "matrix": (lambda x: x @ x.T, (jnp.ones((3, 5)),)),
    "nothing": (lambda: jnp.arange(3), ()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_program_read_from_data_gives_the_same_result(name: str) -> None:
    fn, args = CALLS[name]
    if name == "key":
        args = (jax.random.key(3),)
    compiled, blob = blob_of(fn, *args)
    loaded = executable.from_data(blob)
    program = loaded.with_trees(compiled.in_tree, loaded.out_tree)
    found, expected = program(*args), compiled(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (jax.typeof(one), one.sharding) == (jax.typeof(other), other.sharding)
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    assert jax.tree.leaves(program.in_avals) == jax.tree.leaves(compiled.in_avals)


def test_a_program_with_callbacks_cannot_be_represented_as_data() -> None:
    def calling_back(x: Any) -> Any:
        return jax.pure_callback(lambda value: value, jax.ShapeDtypeStruct((4,), jnp.float32), x)

    with pytest.raises(ValueError, match="host_callbacks"):
        blob_of(calling_back, X)


def forged(**changes: Any) -> bytes:
    _, blob = blob_of(lambda x: x * 2, X)
    (length,) = struct.unpack_from("<Q", blob)
    text = json.dumps(json.loads(blob[8 : 8 + length]) | changes).encode()
    return struct.pack("<Q", len(text)) + text + blob[8 + length :]


NESTED = b"[" * 100_000
FORGED: dict[str, bytes] = {
    "nothing": b"",
    "a pickle": pickle.dumps(Evil("/nonexistent/mark")),
    "too short": b"\x00" * 7,
    "too long": struct.pack("<Q", 1 << 62),
    "not JSON": struct.pack("<Q", 3) + b"abc",
    "not text": struct.pack("<Q", 2) + b"\xff\xfe",
    "deep": struct.pack("<Q", len(NESTED)) + NESTED,
    "a list": struct.pack("<Q", 2) + b"[]",
}
CHANGES: dict[str, dict[str, Any]] = {
    "devices": {"devices": [99]},
    "no devices": {"devices": []},
    "odd devices": {"devices": [[0]]},
    "dtype": {"in_avals": [[[4], "no dtype", False]]},
    "shape": {"in_avals": [["four", "float32", False]]},
    "layouts": {"in_layouts": [3]},
    "mesh": {
        "in_shardings": [{"mesh": [0], "shape": [2], "axes": ["a"], "kinds": ["Auto"], "spec": [], "memory": None}]
    },
    "spec": {
        "in_shardings": [
            {"mesh": [0], "shape": [1], "axes": ["a"], "kinds": ["Auto"], "spec": ["a", "a"], "memory": None}
        ]
    },
    "memory": {"in_shardings": [{"device": 0, "memory": "nowhere"}]},
    "tree": {"out_tree": ["strange"]},
    "leaves": {"out_tree": [["tuple", [["leaf"], ["leaf"]]]]},
}


@pytest.mark.parametrize("name", [*FORGED, *CHANGES])
def test_forged_data_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="compiled program"):
        executable.from_data(FORGED[name] if name in FORGED else forged(**CHANGES[name]))


def test_a_program_that_xla_refuses_is_a_value_error() -> None:
    compiled, blob = blob_of(lambda x: x * 2, X)
    (length,) = struct.unpack_from("<Q", blob)
    loaded = executable.from_data(blob[: 8 + length] + b"no program")
    with pytest.raises(ValueError, match="cannot be loaded"):
        loaded.with_trees(compiled.in_tree, loaded.out_tree)


@jax.tree_util.register_pytree_node_class
class Boxed:
    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Boxed:
        return cls(*children)


@pytest.mark.usefixtures("two_slots")
def test_output_classes_come_from_the_functions_first_call() -> None:
    traced = []

    @functools.partial(jax.jit, static_argnames=["n"])
    def boxing(x: Any, n: int = 1) -> Any:
        traced.append(n)
        return {"boxed": Boxed(x * n)}

    (function,) = quarantune.compile_configs(boxing, [{"n": 3}], X)
    assert function is not None
    assert traced == [3], "its program is compared with the workers' program"
    traced.clear()
    for _ in range(2):
        np.testing.assert_array_equal(function(X)["boxed"].value, 3 * X)
    assert traced == [3]


def test_a_program_for_a_device_of_another_rank_is_refused() -> None:
    _, blob = blob_of(jnp.sin, jnp.ones(3))
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + length])
    header["devices"] = [2048]
    header["in_shardings"] = header["out_shardings"] = [{"device": 2048, "memory": None}]
    text = json.dumps(header).encode()
    moved = struct.pack("<Q", len(text)) + text + blob[8 + length :]
    with pytest.raises(ValueError, match="no device with its number"):
        executable.from_data(moved, onto=jax.local_devices()[0])


FORGING = """
import struct, sys
import jax, jax.numpy as jnp, numpy as np
import quarantune
from quarantune.host.process import in_sandbox
from quarantune.transport import executable

def unloadable(program):
    # The sections of the machine code get an impossible size. LLVM aborts a process that loads them.
    data = bytearray(program)
    start = data.find(b"\\x7fELF")
    (table,) = struct.unpack_from("<Q", data, start + 0x28)
    size, count = struct.unpack_from("<HH", data, start + 0x3A)
    for place in range(start + table, start + table + size * count, size):
        if struct.unpack_from("<Q", data, place + 8)[0] & 2:  # it is loaded
            struct.pack_into("<I", data, place + 4, 8)  # and has no bytes in the file
            struct.pack_into("<Q", data, place + 0x20, 1 << 46)
    return bytes(data)

def forge(name):
    honest = getattr(executable, name)
    setattr(executable, name, lambda compiled: unloadable(honest(compiled)))

@jax.jit(static_argnames=["n", "all_forge"])
def forging(x, all_forge=False, n: int = 1):
    if in_sandbox() and (all_forge or n == 2):
        forge("to_data")
        forge("to_pickle")
    for _ in range(300 if n == 1 else 0):  # the defaults are slow, so that another config wins, and both are finalists
        x = jnp.sort(x)
    return jnp.tanh(x) * n / n

X = np.ones(8, np.float32)
if __name__ == "__main__":
    if sys.argv[1] == "compile":
        one, two, three = quarantune.compile_configs(forging, [{"n": 1}, {"n": 2}, {"n": 3}], X)
        print(one(X)[0] == three(X)[0] == np.tanh(X[0]))
    else:
        tuner = quarantune.AutoTuner(forging, [{"n": 1}, {"n": 2}, {"n": 3}], rep=3)
        result = tuner.run(X, all_forge=True)
        result.save(sys.argv[2])
        print([trial.outcome.value for trial in result.trials], result.executable)
        print(quarantune.TuningResult.load(sys.argv[2], trusted=True).fn(X, all_forge=True)[0] == np.tanh(X[0]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="forges machine code in an ELF file")
@pytest.mark.parametrize("do", [pytest.param("compile", marks=pytest.mark.long), "tune"])
def test_a_program_that_aborts_whoever_loads_it_aborts_no_caller(do: str, tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "program.py").write_text(FORGING)
    said = python(tmp_path / "program.py", do, tmp_path / "saved", JAX_PLATFORMS="cpu").splitlines()
    assert said[-1] == "True"
    assert do == "compile" or said[0].endswith("] None")


@pytest.mark.usefixtures("two_slots")
@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "empty"])
def test_a_saved_winner_that_cannot_be_loaded_is_compiled_again(damage: str, tmp_path: Path) -> None:
    @functools.partial(jax.jit, static_argnames=["n"])
    def doubling(x: Any, n: int = 1) -> Any:
        return x * 2

    compiled = executable.to_pickle(doubling.lower(X).compile())
    cut = compiled[: len(compiled) // 2]
    program = {"cut": cut, "flipped": b"\0" + compiled[1:], "other": pickle.dumps(3), "empty": b""}[damage]
    result = quarantune.AutoTuner(doubling, [{"n": 1}], rep=1).run(X)
    dataclasses.replace(result, executable=program).save(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"the saved winner cannot be loaded: \w+.*compiled again"):
        loaded = quarantune.TuningResult.load(tmp_path, trusted=True)
    np.testing.assert_array_equal(loaded.fn(X), 2 * X)
