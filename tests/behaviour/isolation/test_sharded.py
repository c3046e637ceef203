"""Arguments on several devices: workers have an equal mesh, keys hold the layout, and leases cover the group."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import python
from jax.sharding import AbstractMesh, AxisType

from quarantune.devices.discovery import Device, cpu_device, grouped
from quarantune.devices.leases import Lease
from quarantune.sweep import sweep
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import SweepRequest
from quarantune.transport import arrays
from quarantune.values.blocks import current
from quarantune.values.options import Options

pytestmark = pytest.mark.usefixtures("two_slots")

PRELUDE = """
import functools, os, sys, warnings
import jax, jax.numpy as jnp, numpy as np
import quarantune
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

def place(value, mesh, *spec):
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))

def assert_all_ran(result):
    assert {trial.outcome.value for trial in result.trials} <= {"ok", "slow"}, result.table(width=200)

X = np.arange(32, dtype=np.float32).reshape(8, 4)
"""


@pytest.fixture
def run_script(tmp_path: Path, run_on_devices: Callable[[Path, str, int], None]) -> Callable[..., None]:
    """Runs a program behind the prelude on some CPU devices."""
    return lambda program, *, devices: run_on_devices(tmp_path, PRELUDE + textwrap.dedent(program), devices)


# --- workers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_configs_run_on_a_mesh_of_the_callers_shape(run_script: Callable[..., None]) -> None:
    run_script(
        """
        import psutil
        from aftermath import eventually, left_of

        def is_laid_out(output, expected, x, y, z):
            mesh = x.sharding.mesh
            return (
                dict(mesh.shape) == {"a": 2, "b": 2}
                and mesh.axis_types == (AxisType.Auto,) * 2
                and mesh.devices.flatten().tolist() == jax.devices()[:4]
                and (x.sharding.spec, y.sharding.spec) == (P(("a", "b")), P(None, "b"))
                and y.sharding.mesh is mesh
                and [shard.data.shape for shard in x.addressable_shards] == [(2, 4)] * 4
                and len(output.sharding.device_set) == 4
            )

        @quarantune.autotune({"rounds": [-1, 2_000_000, 0]}, check_fn=is_laid_out, rep=3)
        @functools.partial(jax.jit, static_argnames=["rounds"])
        def f(x, y, z, rounds: int = 0):
            if rounds < 0:
                os.abort()
            waste = jax.lax.fori_loop(0, rounds, lambda i, carried: jnp.sin(carried), x)
            return x + y + z + 0 * waste

        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
        x, y = place(X, mesh, ("a", "b")), place(X, mesh, None, "b")
        for per_worker in (None, 4):
            with quarantune.settings(configs_per_worker=per_worker) if per_worker else quarantune.settings():
                result = f.tune(x, y, X)
            assert result.best_config == {"rounds": 0}, result.table()
            assert [trial.outcome.value for trial in result.trials][:3:2] == ["crashed", "ok"], result.table()
            assert {trial.route.value for trial in result.trials} == {"together"}, result.table()
            assert eventually(lambda: len(left_of(psutil.Process())) == 1), "the template may stay"
        np.testing.assert_array_equal(f(x, y, X), 3 * X)
        assert f.lookup(x, y, X) == {"rounds": 0}
        """,
        devices=4,
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_mesh_of_some_of_the_devices_gets_some_of_the_workers(run_script: Callable[..., None]) -> None:
    run_script(
        """
        def is_laid_out(output, expected, x):
            return x.sharding.mesh.devices.tolist() == jax.devices()[:2] and jax.device_count() == 4

        @quarantune.autotune({"n": [1, 2]}, check_fn=is_laid_out, ref_fn=lambda x: x.sum(), rep=1)
        @functools.partial(jax.jit, static_argnames=["n"])
        def f(x, n: int = 1):
            return (x * n).sum() / n

        x = place(X, Mesh(np.array(jax.devices()[2:]), ("a",)), "a")
        assert_all_ran(f.tune(x))
        assert f(x) == X.sum()
        """,
        devices=4,
    )


@pytest.mark.long
@pytest.mark.slow
def test_explicit_axes_are_explicit_in_the_worker(run_script: Callable[..., None]) -> None:
    run_script(
        """
        @quarantune.autotune({"n": [1, 2]}, rep=1)
        @functools.partial(jax.jit, static_argnames=["n"])
        def f(x, n: int = 1):
            sharding = jax.typeof(x).sharding
            if sharding.spec != P("a", None) or sharding.mesh.axis_types != (AxisType.Explicit,):
                raise TypeError(f"not as the caller has it: {sharding}")
            if n == 2:
                raise ArithmeticError(n)
            return x * n

        mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
        result = f.tune(place(X, mesh, "a"))
        assert [trial.outcome.value for trial in result.trials] == ["ok", "error"], result.table()
        assert "ArithmeticError" in result.trials[1].message
        with quarantune.settings(on_miss="error"):
            np.testing.assert_array_equal(jax.jit(f)(place(X, mesh, "a")), X)  # the same problem, traced
        long = np.concatenate([X, X])
        np.testing.assert_array_equal(jax.jit(f)(place(long, mesh, "a")), long)
        struct = jax.ShapeDtypeStruct((6, 2), jnp.bfloat16, sharding=NamedSharding(mesh.abstract_mesh, P("a")))
        assert f.tune(struct).best_config == {"n": 1}
        assert f.lookup(place(np.ones((6, 2), jnp.bfloat16), mesh, "a")) == {"n": 1}
        """,
        devices=2,
    )


@pytest.mark.slow
def test_the_mesh_of_the_context_is_found_in_workers(run_script: Callable[..., None]) -> None:
    run_script(
        """
        @quarantune.autotune({"n": [1, 2]}, rep=1, ref_fn=lambda x: jax.reshard(x * 2, P()))
        @functools.partial(jax.jit, static_argnames=["n"])
        def f(x, n: int = 1):
            return jax.reshard(x / n, P()) * 2 * n

        with jax.set_mesh(jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))):
            x = jax.device_put(X, P("a"))
            assert_all_ran(f.tune(x))
            np.testing.assert_array_equal(f(x), X * 2)
        """,
        devices=2,
    )


@pytest.mark.long
@pytest.mark.slow
def test_calls_look_up_the_kernels_that_a_jit_tuned(run_script: Callable[..., None]) -> None:
    run_script(
        """
        @quarantune.autotune({"n": [1, 2]})
        @functools.partial(jax.jit, static_argnames=["n"])
        def kernel(x, n: int = 1):
            return x * n / n

        whole = quarantune.contextual_autotune(jax.jit(lambda x: kernel(x) + 1), rep=1)
        x = place(X, jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,)), "a")
        result = whole.tune(x)
        assert '"explicit":["a"]' in result.kernels[0].key, result.kernels
        with quarantune.settings(on_miss="error"):
            np.testing.assert_array_equal(whole(x), X + 1)
        """,
        devices=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_configs_in_this_process_run_on_the_callers_devices(axis_type: str, run_script: Callable[..., None]) -> None:
    run_script(
        """
        def is_there(output, expected, x):
            return x.sharding.mesh.devices.tolist() == jax.devices()[3:1:-1]

        @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None, check_fn=is_there, name=f"f-{os.getpid()}")
        @functools.partial(jax.jit, static_argnames=["n"])
        def f(x, n: int = 1):
            return x / n * n

        warnings.simplefilter("ignore", RuntimeWarning)
        mesh = Mesh(np.array(jax.devices()[3:1:-1]), ("a",), axis_types=(AxisType.KIND,))
        x = place(X, mesh, "a")
        with quarantune.settings(isolation="compile"):
            assert_all_ran(f.tune(x))
        with quarantune.settings(isolation="none"):
            assert_all_ran(f.tune(x))
            with jax.set_mesh(mesh):
                assert_all_ran(f.tune(x))
                struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh.abstract_mesh, P("a")))
                assert_all_ran(f.tune(struct))
        """.replace("KIND", axis_type),
        devices=4,
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_has_the_cpu_devices_that_its_arguments_need(tmp_path: Path) -> None:
    program = """
        jax.config.update("jax_num_cpu_devices", 3)

        @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
        @functools.partial(jax.jit, static_argnames=["n", "count"])
        def f(x, count, n: int = 1):
            if jax.device_count() != count:
                raise RuntimeError(f"{jax.device_count()} devices, not {count}")
            return x * n

        mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
        for x in (place(X, mesh, "a"), X):
            assert_all_ran(f.tune(x, 3))
        abstract = jax.sharding.AbstractMesh((4,), ("a",))
        struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(abstract, P("a")))
        assert_all_ran(f.tune(struct, 4))

        # A trial in this process has all devices of the process.
        with warnings.catch_warnings(), quarantune.settings(isolation="none"):
            warnings.filterwarnings("ignore", "QUARANTUNE_ISOLATION=none")
            try:
                f.tune(struct, 3)
            except quarantune.TuningFailedError as error:
                messages = {trial.message for trial in error.trials}
        (message,) = messages
        assert "devices_per_trial=4" in message and "has 3" in message, message
        """
    (tmp_path / "program.py").write_text(PRELUDE + textwrap.dedent(program))
    python("-W", "error", tmp_path / "program.py", JAX_PLATFORMS="cpu")


def test_two_shardings_have_two_keys(run_script: Callable[..., None]) -> None:
    run_script(
        """
        import inspect
        from quarantune.functions.description import describe_arguments

        def key(a):
            return str(describe_arguments({"a": a}, ()))

        auto = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
        explicit = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
        line = Mesh(np.array(jax.devices()), ("a",))
        specs = (("a",), ("b",), (("a", "b"),), (None, "a"), ())
        layouts = [(mesh, spec) for mesh in (auto, explicit) for spec in specs]
        layouts += [(line, ("a",)), (line, ())]
        keys = {key(place(X, mesh, *spec)) for mesh, spec in layouts}
        assert len(keys) == len(layouts)
        assert key(X) not in keys
        for mesh, spec in layouts:
            for known in (mesh, mesh.abstract_mesh):
                struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(known, P(*spec)))
                assert key(struct) == key(place(X, mesh, *spec))
        assert key(place(X, auto, "a")) == key(place(X, auto, "a", None))
        one = Mesh(np.array(jax.devices()[:1]), ("a",))
        assert key(place(X, one, "a")) == key(X)
        """,
        devices=4,
    )


@pytest.mark.slow
def test_a_sharding_without_a_mesh_is_bound_to_no_mesh(
    run_script: Callable[..., None],
) -> None:
    run_script(
        """
        # XLA's own layouts have no public name any more; JAX may still choose one for an output.
        from jax._src.lib import xla_client
        from jax._src.sharding_impls import GSPMDSharding

        mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
        copied = jax.device_put(X, GSPMDSharding(jax.devices()[:2], xla_client.HloSharding.replicate()))

        @quarantune.autotune({"n": [1, 2]}, devices_per_trial=2)
        @functools.partial(jax.jit, static_argnames=["n"])
        def add(x, y, n=1):
            return x + n * y - n * y

        assert_all_ran(add.tune(copied, place(X, mesh, "a")))
        np.testing.assert_array_equal(add(copied, place(X, mesh, "a")), X)
        """,
        devices=4,
    )


def test_arrays_of_every_kind_arrive_in_buffers_of_their_own(run_script: Callable[..., None]) -> None:
    run_script(
        """
        from quarantune.transport import arrays, payload

        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
        weak = place(jnp.full((4,), 2.0), mesh, "a")
        with jax.enable_x64(True):
            wide = place(np.arange(8, dtype=np.int64) << 40, mesh, ("a", "b"))
        given = {
            "float": place(X, mesh, "b", "a"),
            "copied everywhere": place(X, mesh),
            "half": place(X.astype(jnp.bfloat16), mesh, None, "a"),
            "none": place(np.ones((0, 4), np.float32), mesh, "a"),
            "keys": place(jax.random.split(jax.random.key(1), 4), mesh, "a"),
            "wide": wide,
            "weak": weak,
            "alone": jnp.arange(3),
        }
        packed = payload.pack_call(len, (given,), {})
        assert packed.devices_needed == 4
        path = sys.argv[0] + ".arrays"
        with open(path, "w+b") as file:
            payload.write_arrays(packed, file.fileno())
            call = payload.unpack_call(packed.blob)
            (first,), _ = payload.materialize(call, file.fileno(), seed=0)
            (second,), _ = payload.materialize(call, file.fileno(), seed=0)
        (structs,), _ = payload.call_as_structs(call)

        def values(array):
            return np.asarray(jax.random.key_data(array) if name == "keys" else array)

        for name, array in given.items():
            for other in (first[name], second[name], structs[name]):
                assert (other.shape, other.dtype) == (array.shape, array.dtype), name
                assert getattr(other, "weak_type", False) == (name == "weak"), name
                if name != "alone":
                    assert other.sharding.is_equivalent_to(array.sharding, array.ndim), name
                    assert jax.typeof(first[name]) == jax.typeof(array), name
            if name != "keys":
                with jax.enable_x64(True):
                    negated = jax.jit(jax.lax.neg, donate_argnums=0)(second[name])
                np.testing.assert_array_equal(values(negated), -values(array))
                assert second[name].is_deleted(), name
            np.testing.assert_array_equal(values(first[name]), values(array))
        assert weak.weak_type

        # Arrays generated from shapes and dtypes are laid out too.
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), [given["float"], given["keys"]]
        )
        (made,), _ = payload.materialize(payload.unpack_call(payload.pack_call(len, (shapes,), {}).blob), -1, seed=0)
        for array, like in zip(made, shapes):
            assert (array.shape, array.dtype) == (like.shape, like.dtype)
            assert array.sharding == like.sharding
        """,
        devices=4,
    )


@pytest.mark.long
@pytest.mark.slow
def test_configs_run_on_the_devices_they_were_compiled_for(run_script: Callable[..., None]) -> None:
    run_script(
        """
        @functools.partial(jax.jit, static_argnames=["n"])
        def f(x, n: int = 1):
            traced.append(n)
            return jnp.cumsum(x * n, axis=0)

        traced = []
        first, last = (Mesh(np.array(jax.devices()[half]), ("a",)) for half in (slice(2), slice(2, 4)))
        for x, elsewhere in ((jnp.asarray(X), None), (place(X, first, "a"), place(X, last, "a"))):
            functions = quarantune.compile_configs(f, {"n": [1, 2]}, x)
            traced.clear()  # one config was traced, to compare its program with the workers'
            for n, function in zip((1, 2), functions):
                np.testing.assert_allclose(function(x), np.cumsum(X * n, axis=0))
                assert function(x).sharding.device_set == x.sharding.device_set
            assert traced == []
        np.testing.assert_allclose(functions[0](elsewhere), np.cumsum(X, axis=0))
        assert traced == [1]
        """,
        devices=4,
    )


# --- too few devices ----------------------------------------------------------------------------------------


def test_the_error_for_a_large_mesh_counts_the_devices() -> None:
    spec = AbstractMesh((64, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(ValueError, match=r"need 128 devices.*has \d+: set devices_per_trial=128"):
        arrays.mesh_like(spec)


def test_arguments_on_too_many_devices_stop_the_sweep_early() -> None:
    jax = pytest.importorskip("jax")
    abstract = jax.sharding.AbstractMesh((2,), ("a",))
    sharding = jax.sharding.NamedSharding(abstract, jax.sharding.PartitionSpec("a"))
    problem = sweep.Problem(
        fn=len,
        name="wide",
        args=(jax.ShapeDtypeStruct((4,), "float32", sharding=sharding),),
        kwargs={},
        platform="cuda",
        device_kind="fake",
    )

    def never(*_: object) -> None:
        raise AssertionError("no trial was to be run")

    limits, ledger = SweepLimits.of(Options(), current()), Ledger(Listener(on_trial=never, on_tick=never))
    with pytest.raises(ValueError, match=r"wide: .* over 2 devices, and devices_per_trial=1: set devices_per_trial=2"):
        sweep.run(
            SweepRequest(problem=problem, options=Options(), settings=current(), limits=limits, ledger=ledger), {0: {}}
        )


# --- the option ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", None])
def test_devices_per_trial_must_be_a_positive_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"devices_per_trial=.* whole number of at least 1"):
        Options(devices_per_trial=value)


def test_results_for_another_number_of_devices_do_not_count() -> None:
    assert Options(devices_per_trial=2).deciding() == {"devices_per_trial": 2}
    assert Options(devices_per_trial=1).deciding() == {}


# --- groups and leases --------------------------------------------------------------------------------------


def cards(*tokens: str) -> list[Device]:
    return [Device("cuda", "card", token) for token in tokens]


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(1, ["4", "GPU-b", "2", "1", "0"]), (2, ["4,GPU-b", "2,1"]), (3, ["4,GPU-b,2"]), (5, ["4,GPU-b,2,1,0"])],
)
def test_devices_are_grouped_in_order_and_the_rest_stay_out(size: int, tokens: list[str]) -> None:
    groups = grouped(cards("4", "GPU-b", "2", "1", "0"), size)
    assert [group.token for group in groups] == tokens
    assert [group.name for group in groups] == [f"cuda:{token}" for token in tokens]
    assert [group.environ for group in groups] == [{"CUDA_VISIBLE_DEVICES": token} for token in tokens]
    assert {group.kind for group in groups} == {"card"}
    assert [member.name for group in groups for member in group.members] == [
        f"cuda:{token}" for group in tokens for token in group.split(",")
    ]


def test_too_few_devices_for_a_group_are_counted() -> None:
    with pytest.raises(ValueError, match=r"devices_per_trial=3 needs 3 .* there are 2 to use \(cuda:0, cuda:1\)"):
        grouped(cards("0", "1"), 3)


def test_a_single_processor_is_its_only_member() -> None:
    assert cpu_device().members == (cpu_device(),)


@pytest.fixture
def four(tmp_path: Path) -> list[Device]:
    """Four devices with names that only this test uses, because leases are machine-wide."""
    return cards(*(f"{tmp_path.name}-{os.getpid()}-{time.monotonic_ns()}-{index}" for index in range(4)))


def test_a_groups_lease_holds_each_of_its_devices(four: list[Device]) -> None:
    group, singles = Lease(grouped(four, 3)[0]), [Lease(device) for device in four]
    assert group.acquire(0.0)
    assert [single.acquire(0.0) for single in singles] == [False, False, False, True]
    group.release()
    assert [single.acquire(0.01) for single in singles] == [True] * 4
    assert not group.acquire(1.0)
    for lease in (group, *singles):
        lease.release()


def test_a_group_with_one_device_taken_takes_none(four: list[Device]) -> None:
    group, last, first = Lease(grouped(four, 4)[0]), Lease(four[3]), Lease(four[0])
    descriptors = len(os.listdir("/proc/self/fd"))
    assert last.acquire(0.0)
    assert not group.acquire(0.0)
    assert first.acquire(0.0)
    for lease in (last, first):
        lease.release()
    assert group.acquire(0.1)
    group.release()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_groups_that_overlap_take_turns(four: list[Device]) -> None:
    low, high, single = Lease(grouped(four[:2], 2)[0]), Lease(grouped(four[1:], 2)[0]), Lease(four[1])
    turns: dict[str, int] = {"low": 0, "high": 0, "single": 0}
    for step in range(120):  # all ask 20 times a second in the same order, and measure for one step
        leases = {"low": low, "high": high, "single": single}
        holding = [name for name, lease in leases.items() if lease.acquire(0.05 * step)]
        assert len(holding) <= 1, "they share a device"
        for name in holding:
            turns[name] += 1
            leases[name].release()
    for lease in (low, high, single):
        lease.release()
    assert min(turns.values()) >= 10, turns


def test_a_busy_device_lets_in_a_group_that_waits(four: list[Device]) -> None:
    group, busy = Lease(grouped(four, 2)[0]), Lease(four[1])
    assert busy.acquire(0.0)
    assert not group.acquire(0.01)
    busy.release()
    assert not busy.acquire(5.0), "a group still waits"
    assert group.acquire(5.05)
    group.release()
    assert busy.acquire(6.0)
    busy.release()


@pytest.mark.slow
def test_an_unreduced_argument_is_refused_but_runs_untuned(run_script: Callable[..., None]) -> None:
    run_script(
        """
        jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2))

        @quarantune.autotune({"chunk": [8, 64]}, warmup=0, rep=2)
        @jax.jit(static_argnames=["chunk"])
        def doubled(a, chunk: int = 8):
            return jax.sharding.reshard(a, P(None, None)) * 2

        @jax.jit(static_argnums=2)
        def step(u, v, call):
            return call(jnp.einsum("ij,jk->ik", u, v, out_sharding=P(None, None, unreduced={"x"})))

        u, v = jax.device_put(jnp.ones((64, 8)), P(None, "x")), jax.device_put(jnp.ones((8, 4)), P("x", None))
        untuned = step(u, v, doubled.default)
        try:
            step(u, v, doubled)
        except ValueError as error:
            assert "a is unreduced over x: reduce it before the call" in str(error), error
        else:
            raise AssertionError("it was tuned")
        step(u, v, lambda a: (doubled.lookup(a), a)[1])
        with quarantune.settings(on_miss="default"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert (step(u, v, lambda a: doubled(a)) == untuned).all()
        reduced = jax.sharding.reshard(jnp.ones((64, 4)), P(None, None))
        assert doubled(reduced)[0, 0] == 2, "the next call is tuned"
        """,
        devices=4,
    )
