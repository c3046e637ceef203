"""An eager call with any kind of argument is tuned and returns the function's own result."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ends, python

import quarantune

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_slots")]


@pytest.fixture
def same() -> quarantune.Autotuned:
    """Returns its arguments if n is 2. The default is not 2, so only a tuned call works."""

    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def same(tree: Any, n: int = 1) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return tree

    return same


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any
    label: str = dataclasses.field(default="", metadata={"static": True})


def floats(dtype: Any) -> jax.Array:
    return jnp.asarray(np.arange(6).reshape(2, 3), dtype)


ARGUMENTS = {
    "dict": lambda: {"a": floats("float32"), "b": {"c": np.arange(3), "d": ()}},
    "nested": lambda: [floats("float32"), (np.float32(3), [2.5, None]), {"k": [True]}],
    "empty tree": dict,
    "registered dataclass": lambda: Point(floats("float32"), 2, label="p"),
    "numpy": lambda: np.arange(6, dtype=np.int32),
    "numpy view": lambda: np.arange(12, dtype=np.float32).reshape(3, 4).T[::2],
    "numpy scalar": lambda: np.float32(1.5),
    "numpy float64": lambda: np.linspace(0, 1, 5),
    "python int": lambda: 3,
    "python float": lambda: 0.5,
    "python complex": lambda: 1 + 2j,
    "python bool": lambda: True,
    "none": lambda: None,
    "zero-sized": lambda: (jnp.zeros((0, 4)), np.zeros((3, 0), np.int8), jnp.ones(2)),
    "complex64": lambda: floats("complex64") * (1 + 2j),
    "bfloat16": lambda: floats("bfloat16"),
    "float8_e4m3fn": lambda: floats("float8_e4m3fn"),
    "float8_e5m2": lambda: np.asarray(floats("float8_e5m2")),
    "int4": lambda: (floats("int4"), floats("uint4")),
    "bool": lambda: floats("int32") > 2,
    "typed keys": lambda: jax.random.split(jax.random.key(7), 3),
    "raw key": lambda: jax.random.PRNGKey(7),
    "rbg key": lambda: jax.random.key(7, impl="rbg"),
    "weakly typed": lambda: jnp.asarray(2.0),
    "one buffer twice": lambda: (lambda x: (x, x))(floats("float32")),
}
ALONE = ("empty tree", "none", "python int", "zero-sized", "typed keys", "weakly typed")
"""Arguments that are also tried without any other array."""


def every_argument() -> dict[str, Any]:
    return {name: make() for name, make in ARGUMENTS.items()}


@pytest.mark.parametrize("make", [every_argument, *map(ARGUMENTS.get, ALONE)], ids=["all of them", *ALONE])
def test_calls_with_every_kind_of_argument_are_tuned(make: Any, same: quarantune.Autotuned, sweeps: list[str]) -> None:
    given = make()
    expected = jax.jit(lambda tree: tree)(given)
    for _ in range(2):
        found = same(given)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert jax.typeof(ours) == jax.typeof(theirs)
            if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
                ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert len(sweeps) == 1
    assert same.lookup(make()) == {"n": 2}
    same(make())
    assert len(sweeps) == 1


def test_workers_compute_with_the_callers_own_values() -> None:
    @quarantune.autotune({"n": [1, 2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def guarded(numbers: Any, flags: Any, scale: Any, n: int = 1) -> Any:
        def check(numbers: Any, flags: Any, scale: Any) -> Any:
            if n == 1 or numbers.tolist() != [3, 1, 4] or flags.tolist() != [True, False] or scale != 0.5:
                raise ArithmeticError((n, numbers, flags, scale))
            return numbers

        return jax.pure_callback(check, jax.ShapeDtypeStruct((3,), jnp.int32), numbers, flags, scale)

    result = guarded.tune(jnp.array([3, 1, 4]), np.array([True, False]), 0.5)
    assert result.best_config == {"n": 2}
    assert result.failures == {"error": 1}


@dataclasses.dataclass(frozen=True)
class Options:
    scale: int
    shape: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("one", "equal", "other"),
    [
        ("mul", "m" + "ul", "add"),
        ((1, ("a", None)), (1, ("a", None)), (1, ("b", None))),
        (Options(2, (3,)), Options(2, (3,)), Options(4, (3,))),
        (1, 1, True),
        (jnp.float32, np.float32, jnp.bfloat16),
        (jnp.tanh, jnp.tanh, jnp.sin),
        tuple(jax.ShapeDtypeStruct((size,), np.float32) for size in (2, 2, 3)),
    ],
    ids=["string", "tuple", "dataclass", "number", "dtype", "function", "shape and dtype"],
)
def test_static_arguments_reach_workers_and_are_part_of_the_key(
    one: Any, equal: Any, other: Any, sweeps: list[str]
) -> None:
    if one is jnp.float32:
        one, equal, other = np.dtype(one), np.dtype(equal), np.dtype(other)

    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def fn(x: Any, mode: Any, n: int = 1) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return x * (2 if mode == one and type(mode) is type(one) else 3)

    x = jnp.ones(2)
    assert fn(x, one).tolist() == [2, 2]
    assert fn(x, mode=equal).tolist() == [2, 2]
    assert len(sweeps) == 1
    assert fn(x, other).tolist() == [3, 3]
    assert len(sweeps) == 2


def test_a_static_argument_may_be_too_long_a_number_to_print() -> None:
    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["m", "n"])
    def modulo(x: Any, m: int, n: int = 1) -> Any:
        return x * (m % 7) * n

    x = jnp.ones(2)
    for m in (10**5000, 10**5000 + 1):
        np.testing.assert_array_equal(modulo(x, m), 2 * (m % 7))
    assert len(quarantune.TuningCache()) == 2


def test_static_positions_may_count_from_the_end(sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnums=(-1,), static_argnames=["n"])
    def power(x: Any, exponent: int, *, n: int = 1) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return x**exponent

    for exponent in (2, 3, 2):
        assert power(jnp.full(2, 3.0), exponent).tolist() == [3.0**exponent] * 2
    assert len(sweeps) == 2


def test_a_function_may_take_no_arrays_at_all(sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n", "size"])
    def ramp(size: int = 3, n: int = 1) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return jnp.arange(size)

    assert ramp().tolist() == ramp(3).tolist() == ramp(size=3).tolist() == [0, 1, 2]
    assert len(sweeps) == 1


def test_starred_parameters_are_tuned(sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def total(first: Any, *rest: Any, n: int = 1, **named: Any) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return first + sum(rest) + 10 * sum(named.values())

    x = jnp.ones(2)
    assert total(x).tolist() == [1, 1]
    assert total(x, x, 2 * x, a=x, b=2.0).tolist() == [34, 34]
    assert total(x, x, 2 * x, b=2.0, a=x).tolist() == [34, 34]
    assert len(sweeps) == 2
    with pytest.raises(ArithmeticError):
        total(x, a=x, n=3)


@pytest.mark.parametrize("donate", [{"donate_argnums": (0,)}, {"donate_argnames": ["state"]}])
def test_donated_arguments_are_consumed_by_the_call_alone(donate: dict[str, Any], sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [1, 2, 3]}, rep=3)
    @functools.partial(jax.jit, static_argnames=["n"], **donate)
    def step(state: Any, x: Any, n: int = 1) -> Any:
        if n == 1:
            raise ArithmeticError(n)
        return jax.tree.map(lambda leaf: leaf + x, state)

    state, x = {"w": jnp.zeros(1000), "b": jnp.zeros(3)}, jnp.ones(())
    result = step.tune(state, x)
    assert ends(result.trials) == ["error", "ok", "ok"]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, x)))
    for count in (1, 2, 3):
        before = state
        state = step(state, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert state["w"][0] == state["b"][2] == count
    assert not x.is_deleted()
    fresh = jnp.zeros(5)
    assert step(fresh, x).tolist() == [1] * 5
    assert fresh.is_deleted()
    assert len(sweeps) == 2


def test_an_array_donated_earlier_is_an_error_before_the_sweep(same: quarantune.Autotuned, sweeps: list[str]) -> None:
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        same(gone)
    assert sweeps == []


def test_a_kernel_that_writes_to_numpy_keeps_the_callers_array() -> None:
    given = np.zeros(4, np.float32)

    @quarantune.autotune({"n": [1, 2]}, rep=2)
    @functools.partial(jax.jit, static_argnames=["n"], donate_argnums=(0,))
    def fill(x: Any, n: int = 1) -> Any:
        return x.at[:].set(7)

    fill.tune(given)
    assert given.tolist() == [0] * 4


def test_x64_values_and_python_scalars_keep_their_width(same: quarantune.Autotuned, sweeps: list[str]) -> None:
    with jax.enable_x64(True):
        for value in (np.array([2**40 + 1]), jnp.array([1e-300]), jnp.array([1 + 1e-12j]), 2**40 + 1):
            found = same(value)
            assert found.dtype.itemsize >= 8
            np.testing.assert_array_equal(np.asarray(found), value)
    assert len(sweeps) == 4


@pytest.mark.slow
def test_x64_of_the_whole_process_holds_in_workers_too(tmp_path: Path) -> None:
    script = tmp_path / "wide.py"
    script.write_text(
        textwrap.dedent(
            """
            import functools, jax, jax.numpy as jnp, numpy as np, quarantune
            jax.config.update("jax_enable_x64", True)

            @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
            @functools.partial(jax.jit, static_argnames=["n"])
            def narrow(x, n: int = 1):
                assert x.dtype == jnp.float64 and jnp.arange(3).dtype == jnp.int64
                if n != 2:
                    raise ArithmeticError(n)
                return x + 1e-12

            for x in (np.ones(2), jnp.ones(3), 1.0):
                assert (narrow(x) > 1).all()
                assert jax.jit(narrow)(x).dtype == "float64"
            """
        )
    )
    python("-W", "error", script)


# --- callables of odd classes ---


@dataclasses.dataclass
class WithoutHash:
    call: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class RaisesWhenCompared(WithoutHash):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("I am never compared")

    def __hash__(self) -> int:
        raise RuntimeError("I have no hash")


class ComparedByElement(WithoutHash):
    def __eq__(self, other: object) -> Any:
        return np.ones(3) == 1

    __hash__ = None  # type: ignore[assignment]


class WithoutReferences:
    __slots__ = ("call",)

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("kind", [WithoutHash, RaisesWhenCompared, ComparedByElement, WithoutReferences])
def test_callables_differ_by_identity_in_every_role(kind: Any, isolation: str) -> None:
    def work(x: Any, do: int = 1) -> Any:
        return x * 2

    roles: dict[str, Any] = {
        "ref_fn": kind(lambda x: x * 2),
        "check_fn": kind(lambda output, wanted, x: None),
        "prune_fn": kind(lambda config, x: config["do"] < 3),
        "key_fn": kind(lambda x: 1),
        "supply": kind(lambda structs: [np.ones(3)]),
        "objective": kind(lambda trial: trial.time_ms),
    }
    configs = kind(lambda x: [{"do": 1}, {"do": 2}, {"do": 3}])
    tuner = quarantune.AutoTuner(kind(work), configs, name=kind.__name__, warmup=0, rep=2, **roles)
    with warnings.catch_warnings(), quarantune.settings(isolation=isolation):
        warnings.simplefilter("ignore", RuntimeWarning)  # configs run in this process
        result = tuner.run(np.ones(3))
    assert sorted(trial.config["do"] for trial in result.trials if trial.time_ms) == [1, 2]


def test_an_array_in_host_memory_reaches_workers_there() -> None:
    @quarantune.autotune({"how": ["copied", "direct"]}, warmup=0, rep=2)
    @functools.partial(jax.jit, static_argnames=["how"])
    def total(w: Any, x: Any, how: str = "copied") -> Any:
        return x + (jax.device_put(w, jax.memory.Space.Device) if how == "copied" else w)

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    w, x = jax.device_put(floats("float32"), place), floats("float32")
    result = total.tune(w, x)
    assert ends(result.trials) == ["ok", "error"], "JAX cannot add an array of the host to an array of the device"
    assert "memory_space" in result.trials[1].message
    np.testing.assert_array_equal(total(w, x), 2 * np.asarray(x))
    assert total.lookup(x, x) is None, "another key"


def test_an_array_of_another_layout_is_refused_by_name(no_process: None) -> None:
    from jax.experimental.layout import Format, Layout

    @quarantune.autotune({"n": [1, 2]}, warmup=0, rep=2)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scaled(tree: Any, n: int = 1) -> Any:
        return tree["x"] * n

    x = jnp.ones((4, 6))
    turned = jax.device_put(x, Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0])))
    with pytest.raises(ValueError, match=r"tree\['x'\] has the layout \(1, 0\), not row-major order: copy it"):
        scaled({"x": turned})
    assert scaled.lookup({"x": turned}) is None
    with quarantune.settings(on_miss="default"), pytest.warns(quarantune.CacheWarning, match="not tuned"):
        np.testing.assert_array_equal(scaled({"x": turned}), x)
