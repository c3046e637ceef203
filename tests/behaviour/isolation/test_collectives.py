"""Functions that communicate between devices of a `shard_map` are tuned on an equal mesh, or refused with advice."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import quarantune
from quarantune.sweep import sweep
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import SweepRequest
from quarantune.values.blocks import current
from quarantune.values.options import Options

pytestmark = pytest.mark.usefixtures("two_slots")

PRELUDE = """
import functools, json, logging, os, sys, warnings
import jax, jax.numpy as jnp, numpy as np
import psutil
import quarantune
from jax.sharding import Mesh, PartitionSpec as P

X = np.arange(32, dtype=np.float32).reshape(8, 4)
sweeps = []

class Ends(logging.Handler):
    def emit(self, record):
        name, _, told = record.getMessage().partition(": ")
        if told.startswith("best of "):
            sweeps.append(name)

logging.getLogger("quarantune").setLevel(logging.INFO)
logging.getLogger("quarantune").addHandler(Ends())
"""


@pytest.fixture
def run_script(tmp_path: Path, run_on_devices: Callable[[Path, str, int], None]) -> Callable[[str], None]:
    """Runs a program behind the prelude on four CPU devices."""
    return lambda program: run_on_devices(tmp_path, PRELUDE + textwrap.dedent(program), 4)


@pytest.mark.slow
def test_a_collective_is_tuned_on_a_mesh_of_the_same_axes(run_script: Callable[..., None]) -> None:
    run_script(
        """
        def mean_of_all(x, weight, mode):
            return jax.lax.pmean(x, "i") * weight

        @quarantune.autotune([{"n": n} for n in (0, 1, 2, 3)], rep=1, ref_fn=mean_of_all)
        @functools.partial(jax.jit, static_argnames=["n", "mode"])
        def mean(x, weight, mode, n: int = 2):
            if n == 0:
                os.abort()
            if n == 1:
                return x * weight  # of this shard
            size = jax.lax.axis_size("i")
            assert (x.shape, size, mode) == ((2, 4), 4, "mean")
            rotated, total = x, x
            for _ in range(size - 1):  # its weight must be the same on all devices, as it is in the caller
                rotated = jax.lax.ppermute(rotated * weight, "i", [(k, (k + 1) % size) for k in range(size)]) / weight
                total = total + rotated
            if n == 3:
                raise ArithmeticError(n)
            return total / size * weight

        mesh = Mesh(np.array(jax.devices()), ("i",))
        weight = np.full(4, 2, np.float32)

        def per_shard(x, weight):
            return mean(x, weight, "mean")

        def over_mesh(**options):
            return jax.shard_map(per_shard, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"), **options)

        expected = np.tile(X.reshape(4, 2, 4).mean(0), (4, 1)) * 2
        np.testing.assert_allclose(jax.jit(over_mesh())(X, weight), expected)
        np.testing.assert_allclose(over_mesh()(X, weight), expected)
        gradient = jax.jit(jax.grad(lambda x: over_mesh()(x, weight).sum()))(X)
        np.testing.assert_allclose(gradient, np.full_like(X, 2))
        assert len(sweeps) == 1, sweeps
        (entries,) = json.load(open(os.environ["QUARANTUNE_CACHE_DIR"] + "/program.mean.json")).values()
        ((_, entry),) = entries.items()
        assert entry["config"] == {"n": 2}
        assert entry["key_values"]["communicates over"] == {"i": 4}
        assert entry["trials"] == {"crashed": 1, "wrong": 1, "ok": 1, "error": 1}, entry
        from aftermath import eventually, left_of
        assert eventually(lambda: len(left_of(psutil.Process())) == 1), "the template may stay"
        """,
    )


@pytest.mark.slow
def test_a_function_that_names_no_axis_is_tuned_for_one_shard(run_script: Callable[..., None]) -> None:
    run_script(
        """
        @quarantune.autotune({"n": [1]}, rep=1)
        @functools.partial(jax.jit, static_argnames=["n"])
        def double(x, n: int = 1):
            return 2 * x

        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
        per_shard = jax.shard_map(lambda x: double(x) + jax.lax.axis_index("j"), mesh=mesh, in_specs=P("i"),
                                  out_specs=P(("i", "j")))
        jax.jit(per_shard)(X)
        np.testing.assert_array_equal(double(X[:4]), 2 * X[:4])
        assert sweeps == ["program.double"], "inside and outside it is one problem"
        """,
    )


@pytest.mark.slow
def test_recorded_collectives_are_tuned_after_their_program(run_script: Callable[..., None]) -> None:
    run_script(
        """
        def is_laid_out(output, expected, x, weight):
            return x.shape == (8, 4) and weight.sharding.is_fully_replicated

        @quarantune.autotune([{"n": 0}, {"n": 1}], rep=1, check_fn=is_laid_out, ref_fn=None)
        @functools.partial(jax.jit, static_argnames=["n"])
        def summed(x, weight, n: int = 0):
            return jax.lax.psum(x, "data") * weight + n

        mesh = Mesh(np.array(jax.devices()), ("data",))
        weight = np.full(4, 2, np.float32)

        def program(x, weight):
            return jax.shard_map(summed, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())(x, weight)

        with quarantune.recording() as calls, warnings.catch_warnings(action="ignore"):
            jax.jit(program)(X, weight)
        (listed,) = quarantune.calls_in(program, X, weight)
        assert [call.identity for call in calls] == [listed.identity]
        (result,) = quarantune.tune_many(calls)
        assert quarantune.tune_many([listed])[0].from_cache
        assert sweeps == ["program.summed"], sweeps
        output = jax.jit(lambda x, weight: program(x, weight))(X, weight)
        np.testing.assert_allclose(output, X.reshape(4, 2, 4).sum(0) * 2 + result.best_config["n"])
        assert sweeps == ["program.summed"], "the program finds the result"
        """
    )


@pytest.mark.slow
def test_configs_that_alone_communicate_are_reported(run_script: Callable[..., None]) -> None:
    run_script(
        """
        told = []
        logging.getLogger("quarantune").handlers[0].emit = lambda record: told.append(record.getMessage())

        @quarantune.autotune([{"way": "gather"}, {"way": "local"}], rep=1, ref_fn=None)
        @functools.partial(jax.jit, static_argnames=["way"])
        def ring(x, way: str = "local"):
            return jax.lax.pmean(x, "i") if way == "gather" else x

        mesh = Mesh(np.array(jax.devices()), ("i",))
        jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))(X)
        (warning,) = [text for text in told if "communicate" in text]
        assert warning.endswith("defaults that communicate, and it is tuned on a mesh"), warning
        """
    )


@pytest.mark.long
@pytest.mark.slow
def test_finding_the_named_axes_tunes_no_kernel(run_script: Callable[..., None]) -> None:
    run_script(
        """
        @quarantune.autotune({"n": [1, 2]}, rep=1)
        @functools.partial(jax.jit, static_argnames=["n"])
        def double(x, n: int = 1):
            return 2 * x

        summed = quarantune.contextual_autotune(jax.jit(lambda x: jax.lax.psum(double(x), "i")), rep=1)
        mesh = Mesh(np.array(jax.devices()), ("i",))
        per_shard = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P("i"), out_specs=P()))
        np.testing.assert_array_equal(per_shard(X), 2 * X.reshape(4, 2, 4).sum(0))
        assert sweeps == [], "by the time of the whole alone"
        """,
    )


@pytest.mark.long
@pytest.mark.slow
def test_generated_arrays_differ_only_along_axes_that_vary(run_script: Callable[..., None]) -> None:
    run_script(
        """
        def is_laid_out(output, expected, x, y, count):
            return (
                output.shape == (4, 2, 4)
                and x.shape == (4, 4) and x.sharding.spec == P(("i",))
                and y.shape == (16,) and y.sharding.spec == P(("i", "j"))
                and count.shape == () and len(count.sharding.device_set) == 4
                and [shard.data.shape for shard in x.addressable_shards] == [(2, 4)] * 4
            )

        @quarantune.autotune({"n": [1, 2]}, rep=1, check_fn=is_laid_out, ref_fn=None)
        @functools.partial(jax.jit, static_argnames=["n"])
        def scaled(x, y, count, n: int = 1):
            return jax.lax.psum(x * count + y, "j")

        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
        per_shard = jax.shard_map(scaled, mesh=mesh, in_specs=(P("i"), P(("i", "j")), P()), out_specs=P("i"))
        jax.jit(per_shard)(X[:4], np.arange(16, dtype=np.float32), jnp.float32(2))
        assert sweeps == ["program.scaled"]
        """,
    )


@quarantune.autotune({"n": [1, 2]}, rep=1)
@functools.partial(jax.jit, static_argnames=["n"])
def summed(x: Any, n: int = 1) -> Any:
    return jax.lax.psum(x, "i")


def test_an_axis_of_vmap_is_refused_with_advice_before_the_sweep(sweeps: list[str]) -> None:
    x = jnp.ones((4, 2))
    with pytest.raises(TypeError, match=r"summed cannot be tuned here: .*'i', which only jax.vmap.*by hand"):
        jax.vmap(summed, axis_name="i")(x)
    assert jax.vmap(lambda x: summed(x, n=2), axis_name="i")(x)[0, 0] == 4
    with quarantune.settings(on_miss="default"), pytest.warns(quarantune.CacheWarning, match="not tuned for this call"):
        assert jax.vmap(summed, axis_name="i")(x)[0, 0] == 4
    assert not sweeps


def test_a_collective_on_accelerators_needs_devices_per_trial() -> None:
    mesh = AbstractMesh((2,), ("i",), axis_types=(AxisType.Manual,))
    problem = sweep.Problem(
        fn=summed.__wrapped__,
        name="summed",
        args=(jax.ShapeDtypeStruct((4,), "float32"),),
        kwargs={},
        platform="cuda",
        device_kind="fake",
        manual_mesh=mesh,
    )

    def never(*_: object) -> None:
        raise AssertionError("no trial was to be run")

    words = r"summed: in shard_map it communicates over 2 devices, and devices_per_trial=1: set devices_per_trial=2"
    limits, ledger = SweepLimits.of(Options(), current()), Ledger(Listener(on_trial=never, on_tick=never))
    with pytest.raises(ValueError, match=words):
        sweep.run(
            SweepRequest(problem=problem, options=Options(), settings=current(), limits=limits, ledger=ledger), {0: {}}
        )


def test_without_workers_a_collective_is_refused_with_advice(sweeps: list[str]) -> None:
    mesh = Mesh(jax.devices()[:1], ("i",), axis_types=(AxisType.Auto,))
    per_shard = jax.shard_map(summed, mesh=mesh, in_specs=P("i"), out_specs=P())
    with quarantune.settings(isolation="none"), pytest.raises(ValueError, match="devices: unset QUARANTUNE_ISOL"):
        jax.jit(per_shard)(jnp.ones((4, 2)))
