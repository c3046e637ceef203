"""JAX settings around a call reach workers; settings that change the program are part of the key."""

from __future__ import annotations

import functools
import json
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import quarantune
from quarantune.calls.key import keyed
from quarantune.jax_internals import jax_options
from quarantune.jax_internals.other_processes import answer_for_device

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.arange(4, dtype=np.float32)


def key_of(fn: quarantune.Autotuned, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return dict(json.loads(keyed(fn._tuner.bind(args, kwargs)).id.key))


@quarantune.autotune({"n": [1, 2]})
@functools.partial(jax.jit, static_argnames=["n", "mode"])
def kernel(x: Any, y: Any = 1.0, mode: str = "add", n: int = 1) -> Any:
    return x


def script(code: str, directory: Path) -> str:
    """Runs a script in a new process and returns its output."""
    file = directory / "script.py"
    file.write_text(textwrap.dedent(code), encoding="utf-8")
    return python(file, path=[directory])


# --- the key ------------------------------------------------------------------------------------------------


GOLDEN: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "one_array": (
        lambda: (jnp.zeros((2, 3)),),
        '{"mode": "add", "x": {"dtype": "float32", "shape": [2, 3]}, "y": {"scalar": "float"}}',
    ),
    "numpy_and_a_static": (
        lambda: (X, np.float64(2), "sub"),
        '{"mode": "sub", "x": {"dtype": "float32", "shape": [4]}, "y": {"dtype": "float32", "shape": []}}',
    ),
    "a_tree_and_a_key": (
        lambda: ({"w": jnp.ones(3, jnp.bfloat16), "b": 2}, jax.random.key(0)),
        '{"mode": "add", "x": {"leaves": {"[\'b\']": {"scalar": "int"}, "[\'w\']": {"dtype": "bfloat16", '
        '"shape": [3]}}, "structure": "PyTreeDef({\'b\': *, \'w\': *})"}, "y": {"dtype": "key<fry>", "shape": []}}',
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_keys_under_default_settings_stay_the_same(name: str) -> None:
    make, expected = GOLDEN[name]
    key = key_of(kernel, *make())
    assert set(key) == {"call", "code"}
    assert json.dumps(key["call"], sort_keys=True) == expected


SETTINGS: dict[str, Callable[[], Any]] = {
    "jax_default_matmul_precision": lambda: jax.default_matmul_precision("float32"),
    "jax_numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "jax_enable_x64": lambda: jax.enable_x64(True),
    "jax_default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "jax_threefry_partitionable": lambda: jax.threefry_partitionable(False),
    "pallas_tpu_interpret_mode_context_manager": lambda: pltpu.force_tpu_interpret_mode(),
    "user_context": lambda: USERS_OWN(("a", 1)),
}
USERS_OWN = jax.make_user_context(None)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_the_program_is_part_of_the_key(name: str) -> None:
    x = jnp.zeros(3)
    usual = key_of(kernel, x, x)
    with SETTINGS[name]():
        other = key_of(kernel, x, x)
    assert list(other["jax"]) == [name]
    assert {part: other[part] for part in ("call", "code")} == usual
    assert key_of(kernel, x, x) == usual


def test_a_setting_from_the_environment_is_part_of_the_key_too(tmp_path: Path) -> None:
    told = script(
        """
        import os
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        from quarantune.jax_internals import jax_options
        print(jax_options.describe_options(lambda value: value))
        """,
        tmp_path,
    )
    assert told.strip() == "{'jax_default_matmul_precision': 'highest'}"


NOT_OF_THE_CALL = frozenset(
    {
        # The arguments' descriptions have the meshes and devices that matter.
        "abstract_mesh_context_manager",
        "axis_env_state",
        "jax_default_device",
        "mesh_context_manager",
        # These do not affect a sweep, or JAX itself sets them while it traces.
        "check_vma",
        "eager_constant_folding",
        "jax_disable_jit",
        "jax_mutable_array_checks",
        "jax_no_collectives",
        "jax_no_execution",
        # JAX sets these while it traces a kernel's body or exports it; no call is tuned there.
        "layout_tracing_mode",
        "pallas_dynamic_shapes_export",
        "pallas_fuser_disable_nested_fuse",
        "pallas_grid_context",
        # These concern profiling and the file names in a program.
        "jax_enable_pgle",
        "jax_hlo_source_file_canonicalization_regex",
        "jax_pgle_profiling_runs",
        "jax_xla_profile_version",
    }
)
"""Parts of JAX's own key that a call's key leaves out."""


def test_every_part_of_the_key_of_jax_is_known() -> None:
    known = {*jax_options.OPTION_DEFAULTS, *jax_options.CONTEXTS, "user_context", *NOT_OF_THE_CALL}
    assert [name for name in jax_options.trace_context_names() if name not in known] == []


def test_each_setting_has_its_own_winner_even_in_the_call_memo(sweeps: list[str]) -> None:
    @quarantune.autotune({"n": [1, 2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def fn(x: Any, n: int = 1) -> Any:
        # In a worker, only the config that fits the setting works.
        if n != (2 if jax.config.jax_default_matmul_precision == "float32" else 1):  # type: ignore[attr-defined]
            raise ArithmeticError("not with this precision")
        return x * n

    x = jnp.ones(4)
    for _ in range(2):
        np.testing.assert_array_equal(fn(x), np.ones(4))
        with jax.default_matmul_precision("float32"):
            np.testing.assert_array_equal(fn(x), 2 * np.ones(4))
    assert len(sweeps) == 2


# --- in workers ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_ignores_options_that_it_does_not_know(tmp_path: Path) -> None:
    registering = "from jax._src import config\nconfig.string_flag('a_late_option', 'as it was')\n"
    (tmp_path / "registering.py").write_text(registering, encoding="utf-8")
    told = script(
        """
        import jax, jax.numpy as jnp, quarantune
        from jax._src import config
        try:
            import jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu  # registers the flags of JAX's own tests
            assert "test_targets" in jax.config.values
        except ImportError as error:
            assert error.name == "absl"

        config.string_flag("an_option_of_the_script", "x")  # nothing in a worker registers it

        @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
        @jax.jit(static_argnames=["n"])
        def plain(x, n: int = 1):
            return x * n

        import registering

        @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
        @jax.jit(static_argnames=["n"])
        def imports_it(x, n: int = 1):
            if jax.config.values[registering.__name__ and "a_late_option"] != "changed":
                raise ValueError(jax.config.values["a_late_option"])
            return x * n

        if __name__ == "__main__":
            jax.config.update("a_late_option", "changed")
            for fn in (plain, imports_it):
                print([trial.outcome.is_failure for trial in fn.tune(jnp.ones(3)).trials])
        """,
        tmp_path,
    )
    assert told.splitlines() == ["[False]"] * 2


@functools.partial(jax.jit, static_argnames=["block"])
def doubled_on_a_tpu(x: Any, block: int = 8) -> Any:
    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((block, 128), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, grid=(x.shape[0] // block,), in_specs=[spec], out_specs=spec, out_shape=shape)(x)


ROWS = np.arange(16 * 128, dtype=np.float32).reshape(16, 128)


@pytest.mark.slow
def test_the_callers_tpu_interpret_mode_reaches_workers() -> None:
    tuned = quarantune.autotune({"block": [8, 16]}, rep=1, name="interpreted")(doubled_on_a_tpu)
    with pltpu.force_tpu_interpret_mode():
        result = tuned.tune(ROWS)
        np.testing.assert_array_equal(tuned(ROWS), 2 * ROWS)
    assert [trial.outcome.is_failure for trial in result.trials] == [False, False], result.table()


@pytest.mark.long
@pytest.mark.slow
def test_a_process_wide_tpu_interpret_mode_reaches_workers(tmp_path: Path) -> None:
    told = script(
        """
        import functools, sys
        import jax, numpy as np, quarantune
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        @quarantune.autotune({"block": [8, 16]}, rep=1)
        @functools.partial(jax.jit, static_argnames=["block"])
        def doubled(x, block: int = 8):
            def double(x_ref, out_ref):
                out_ref[...] = x_ref[...] * 2
            spec = pl.BlockSpec((block, 128), lambda i: (i, 0))
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pl.pallas_call(double, grid=(2,), in_specs=[spec], out_specs=spec, out_shape=shape)(x)

        if __name__ == "__main__":
            pltpu.set_tpu_interpret_mode()
            print(doubled.tune(np.ones((16, 128), np.float32)).trials[0].outcome.value)
        """,
        tmp_path,
    )
    assert told.strip() in ("ok", "slow")


def test_explicit_interpret_params_work_without_isolation() -> None:
    @quarantune.autotune({"block": [8, 16]}, rep=3)
    @functools.partial(jax.jit, static_argnames=["block"])
    def doubled(x: Any, block: int = 8) -> Any:
        def double(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = x_ref[...] * 2

        spec = pl.BlockSpec((block, 128), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            double,
            grid=(x.shape[0] // block,),
            in_specs=[spec],
            out_specs=spec,
            out_shape=shape,
            interpret=pltpu.InterpretParams(),
        )(x)

    with quarantune.settings(isolation="none"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # configs run without containment
        result = doubled.tune(ROWS)
    assert [trial.outcome.is_failure for trial in result.trials] == [False, False], result.table()


@pytest.mark.long
@pytest.mark.slow
def test_a_shard_map_without_a_mesh_finds_it_in_workers(tmp_path: Path) -> None:
    told = script(
        """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        import functools, jax, jax.numpy as jnp, quarantune
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

        @quarantune.autotune({"n": [1, 2]}, rep=1)
        @functools.partial(jax.jit, static_argnames=["n"])
        def doubled(x, n: int = 1):
            return jax.shard_map(lambda shard: shard * 2, in_specs=P("d"), out_specs=P("d"))(x)

        if __name__ == "__main__":
            x = jnp.arange(8.0)
            mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
            with jax.set_mesh(mesh):
                print(jax.jit(lambda x: doubled(x))(x).tolist() == (2 * x).tolist())  # inside jit: no shardings
                print(doubled.lookup(x) is not None)  # the same problem outside
                laid_out = jax.device_put(x, NamedSharding(mesh, P("d")))
                print(doubled.lookup(laid_out) is None, doubled(laid_out).tolist() == (2 * x).tolist())
                with quarantune.settings(isolation="none"):
                    print(set(doubled.tune(x).failures) <= {"slow"})
            print(doubled.lookup(x))  # without the mesh it is another problem
        """,
        tmp_path,
    )
    assert told.splitlines() == ["True", "True", "True True", "True", "None"]


class Absent:
    """Describes a device that this machine lacks."""

    platform = "gpu"


def test_an_array_answers_for_the_device_it_is_traced_for() -> None:
    x, device, asked = jnp.arange(3.0), Absent(), list[str]()
    with answer_for_device(device, asked.append):
        assert x.devices() == {device}
        assert x.device is device
        assert float(jax.jit(lambda y: y + x)(x)[2]) == 4
    assert set(asked) == {"Array.devices", "Array.device"}
    assert x.devices() == {jax.devices("cpu")[0]}
