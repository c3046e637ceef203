"""A call inside a JAX transformation is tuned once, while JAX traces, and the winner is part of the program."""

from __future__ import annotations

import functools
import gc
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)


def square(n: int, x: Any) -> Any:
    """Multiplies its argument by its sine if n is 2. The default is not 2, so only a tuned call works."""
    if n != 2:
        raise ArithmeticError(n)
    return jnp.sin(x) * x


@pytest.fixture
def kernel() -> quarantune.Autotuned:
    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def kernel(x: Any, n: int = 1) -> Any:
        return square(n, x)

    return kernel


def scanned(fn: Any) -> Callable[[Any], Any]:
    return lambda x: jax.lax.scan(lambda carry, row: (carry + fn(row), fn(row)), jnp.zeros(2), x)


def looped(fn: Any) -> Callable[[Any], Any]:
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, y: fn(y), x)


def branched(fn: Any) -> Callable[[Any], Any]:
    return lambda x: jax.lax.cond(x.sum() > 1, fn, lambda y: y, x)


def sharded(fn: Any) -> Callable[[Any], Any]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    return jax.shard_map(fn, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def with_custom_vjp_around(fn: Any) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def around(x: Any) -> Any:
        return fn(x)

    around.defvjp(lambda x: (fn(x), x), lambda x, g: (fn(x) * g,))
    return jax.grad(lambda x: around(x).sum())


TRANSFORMS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "jit": jax.jit,
    "grad": lambda fn: jax.grad(lambda x: fn(x).sum()),
    "hessian": lambda fn: jax.hessian(lambda x: fn(x).sum()),
    "vmap": jax.vmap,
    "jit of vmap of grad": lambda fn: jax.jit(jax.vmap(jax.grad(lambda x: fn(x).sum()))),
    "scan": scanned,
    "jit of grad of scan": lambda fn: jax.jit(jax.grad(lambda x: scanned(fn)(x)[0].sum())),
    "fori_loop": looped,
    "cond": branched,
    "remat": lambda fn: jax.grad(lambda x: jax.checkpoint(fn)(x).sum()),
    "shard_map": sharded,
    "jit of shard_map": lambda fn: jax.jit(sharded(fn)),
    "grad of shard_map": lambda fn: jax.grad(lambda x: sharded(fn)(x).sum()),
    "custom_vjp around": with_custom_vjp_around,
    "linear_transpose of linearize": lambda fn: lambda x: jax.linearize(fn, x)[1](x),
    "eval_shape": lambda fn: lambda x: jax.eval_shape(fn, x),
    "make_jaxpr": lambda fn: lambda x: str(jax.make_jaxpr(jax.jit(fn))(x)),
}


SLOW, LONG = ("grad of shard_map", "jit of grad of scan"), ("hessian",)


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(
            transform,
            id=name,
            marks=pytest.mark.slow if name in SLOW else pytest.mark.long if name in LONG else (),
        )
        for name, transform in TRANSFORMS.items()
    ],
)
def test_a_call_in_a_transformation_is_tuned_once(
    transform: Any, kernel: quarantune.Autotuned, sweeps: list[str]
) -> None:
    expected = transform(jax.jit(lambda x: square(2, x)))(X)
    with jax.checking_leaks():
        cold = transform(kernel)(X)
    assert len(sweeps) == 1
    warm = transform(kernel)(X)
    assert len(sweeps) == 1
    if transform is TRANSFORMS["eval_shape"]:
        assert cold == warm == expected
    elif isinstance(expected, str):  # names of functions in a jaxpr do not matter
        assert cold.count("sin") == warm.count("sin") == expected.count("sin") == 1
    else:
        for found in (cold, warm):
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, scanned], ids=["jit", "vmap", "scan"])
def test_a_call_inside_a_transformation_finds_the_cached_result(transform: Any, sweeps: list[str]) -> None:
    for _ in range(2):

        @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None, name="on-disk")
        @functools.partial(jax.jit, static_argnames=["n"])
        def kernel(x: Any, n: int = 1) -> Any:
            return square(n, x)

        transform(kernel)(X)
    assert len(sweeps) == 1


def test_a_compiled_program_keeps_its_winner(
    kernel: quarantune.Autotuned, sweeps: list[str], compiles: list[str]
) -> None:
    step = jax.jit(lambda x: kernel(x) + 1)
    step(X)
    compiles.clear()
    again = step(X)
    assert not compiles, "JAX does not trace it again"
    np.testing.assert_allclose(again, square(2, X) + 1, rtol=1e-6)
    assert len(sweeps) == 1


def test_the_winner_is_in_the_text_of_the_outer_program(sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [3, 5]}, rep=1, prune_fn=lambda config, x: config["n"] == 5)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 3) -> Any:
        return x * (n + 0.0625)

    text = jax.jit(lambda x: scale(x)).lower(X).as_text()
    assert "5.0625" in text
    assert "3.0625" not in text


def test_traced_and_eager_calls_of_one_shape_share_an_entry(kernel: quarantune.Autotuned, sweeps: list[str]) -> None:
    jax.jit(kernel)(X)
    kernel(X)
    jax.vmap(kernel)(np.stack([X, X]))
    jax.grad(lambda x: kernel(x).sum())(X)
    assert len(sweeps) == 1
    jax.vmap(kernel)(X)  # rows
    assert len(sweeps) == 2


def test_each_shape_in_one_trace_is_tuned(kernel: quarantune.Autotuned, sweeps: list[str]) -> None:
    both = jax.jit(lambda x: kernel(x).sum() + kernel(x[0]).sum() + kernel(x).sum())
    expected = 2 * square(2, X).sum() + square(2, X[0]).sum()
    np.testing.assert_allclose(both(X), expected, rtol=1e-5)
    assert len(sweeps) == 2


def test_tracers_and_concrete_values_may_be_mixed_in_one_call(sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def noisy(x: Any, key: Any, table: Any, scale: Any, n: int = 1) -> Any:
        return square(n, x) + jax.random.normal(key, x.shape) * scale + table

    key, table = jax.random.key(3), jnp.ones(2)
    with jax.checking_leaks():
        found = jax.jit(lambda x: noisy(x, key, table, 0.5))(X)
    np.testing.assert_allclose(found, noisy(X, key, table, 0.5, n=2), rtol=1e-5)
    assert len(sweeps) == 1


def test_an_autotuned_function_may_call_another(sweeps: list[str]) -> None:
    @quarantune.autotune({"m": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["m"])
    def inner(x: Any, m: int = 2) -> Any:
        return square(m, x)

    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def outer(x: Any, n: int = 1) -> Any:
        return square(n, inner(x))

    expected = square(2, square(2, X))
    np.testing.assert_allclose(jax.jit(outer)(X), expected, rtol=1e-5)
    np.testing.assert_allclose(outer(X), expected, rtol=1e-5)
    assert sorted(name.rpartition(".")[2] for name in sweeps) == ["inner", "outer"]
    assert outer.lookup(X) == {"n": 2}
    assert inner.lookup(X) == {"m": 2}


def test_a_custom_vjp_inside_the_function_is_used_by_the_winner(sweeps: list[str]) -> None:
    @jax.custom_vjp
    def straight_through(x: Any) -> Any:
        return jnp.round(x)

    straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (7 * g,))

    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def rounded(x: Any, n: int = 1) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return straight_through(x)

    np.testing.assert_array_equal(jax.grad(lambda x: rounded(x).sum())(X), np.full_like(X, 7))
    assert len(sweeps) == 1


def test_a_sweep_that_fails_in_a_trace_keeps_no_tracer_alive(sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [1, 2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def hopeless(x: Any, n: int = 0) -> Any:
        if n:
            raise ArithmeticError(n)
        return x

    tracers = []

    def cautious(x: Any) -> Any:
        tracers.append(weakref.ref(x))
        try:
            return hopeless(x)
        except quarantune.TuningFailedError:
            return hopeless.default(x)

    with jax.checking_leaks():
        np.testing.assert_array_equal(jax.jit(cautious)(X), X)
        np.testing.assert_array_equal(jax.grad(lambda x: cautious(x).sum())(X), np.ones_like(X))
    assert len(sweeps) == 1
    gc.collect()
    assert [tracer() for tracer in tracers] == [None, None]


@pytest.mark.filterwarnings("ignore:.*ISOLATION.*")
def test_a_sweep_in_process_stays_out_of_an_outer_trace(kernel: quarantune.Autotuned, sweeps: list[str]) -> None:
    with quarantune.settings(isolation="none"), jax.checking_leaks():
        step = jax.jit(lambda x: kernel(x) + 1)
        np.testing.assert_allclose(step(X), square(2, X) + 1, rtol=1e-6)
    assert step.lower(X).as_text().count("sine") == 1
    assert len(sweeps) == 1


@pytest.mark.slow
def test_shard_map_over_two_devices_tunes_for_one_shard_once(tmp_path: Path) -> None:
    script = tmp_path / "two_devices.py"
    script.write_text(
        textwrap.dedent(
            """
            import functools, jax, jax.numpy as jnp, numpy as np, quarantune
            from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
            jax.config.update("jax_num_cpu_devices", 2)
            seen = []

            def space(x):
                seen.append(x.shape)
                return [{"n": 1}, {"n": 2}]

            @quarantune.autotune(space, rep=1)
            @functools.partial(jax.jit, static_argnames=["n"])
            def double(x, n: int = 1):
                if n != 2:
                    raise ArithmeticError(n)
                return x * 2

            mesh = Mesh(np.array(jax.devices()), ("i",))
            assert mesh.size == 2
            X = np.arange(8, dtype=np.float32).reshape(4, 2)
            per_shard = jax.shard_map(double, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
            for run in (per_shard, jax.jit(per_shard), jax.jit(jax.grad(lambda x: (per_shard(x) ** 2).sum() / 4))):
                np.testing.assert_array_equal(run(X), X * 2)
            assert set(seen) == {(2, 2)}, seen

            x = jax.device_put(X, NamedSharding(mesh, P("i")))
            np.testing.assert_array_equal(jax.jit(per_shard)(x), X * 2)
            assert set(seen) == {(2, 2)}, seen
            np.testing.assert_array_equal(double(x), X * 2)
            np.testing.assert_array_equal(jax.jit(double)(x), X * 2)
            """
        )
    )
    python("-W", "error", script)
