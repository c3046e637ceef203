"""`compiler_options` of a config reach XLA in workers and eager calls; a trace leaves them out with a warning."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quarantune
from quarantune.functions.binding import bind_config, check_compiler_options, jitted_with, split_config
from quarantune.jax_internals import jax_functions
from quarantune.transport import differentiation
from quarantune.values.codec import text_of

X = np.ones((8, 8), np.float32)
UNKNOWN = {"xla_no_such_option": True}
UNOPTIMISED = {"xla_disable_all_hlo_passes": True}


@functools.partial(jax.jit, static_argnames=["n"])
def scale(x: Any, n: int = 1) -> Any:
    if n == 1:
        raise ArithmeticError("the defaults are bad")
    return jnp.sin(x) * n + 1


def test_options_reach_xla_in_an_eager_call_and_not_in_a_trace() -> None:
    bound = bind_config(scale, {"n": 2, "compiler_options": UNKNOWN})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        bound(X)
    with pytest.warns(RuntimeWarning, match=r"jax\.jit\(\.\.\., compiler_options=\{'xla_no_such_option': True\}\)"):
        inside = jax.jit(lambda x: bound(x) + 1)(X)
    np.testing.assert_allclose(inside, np.sin(X) * 2 + 2, rtol=1e-6)
    jax.grad(lambda x: bound(x).sum())(jnp.asarray(X))  # warns only once
    assert jax.jit(lambda y: bound(X) + y)(X).shape == X.shape  # no argument is a tracer


def test_a_function_is_jitted_once_for_the_same_options() -> None:
    one, keywords = jitted_with(scale, {"n": 2, "compiler_options": {"xla_cpu_enable_fast_math": True}})
    assert keywords == {"n": 2}
    assert jitted_with(scale, {"n": 3, "compiler_options": {"xla_cpu_enable_fast_math": True}})[0] is one
    assert jitted_with(scale, {"n": 2, "compiler_options": {"xla_cpu_enable_fast_math": 1}})[0] is not one
    assert jitted_with(scale, {"n": 2, "compiler_options": {}})[0] is scale


def test_a_configs_options_override_the_options_of_jit() -> None:
    own = jax.jit(lambda x: x, compiler_options={"xla_a": 1, "xla_b": 2})
    jitted, _ = jitted_with(own, {"compiler_options": {"xla_b": 3}})
    assert dict(jax_functions.jit_options(jitted).compiler_options) == {"xla_a": 1, "xla_b": 3}


def test_a_jit_with_options_can_be_timed_with_its_gradient() -> None:
    own = jax.jit(lambda x: x * x, compiler_options={"xla_cpu_enable_fast_math": True})
    output, (gradient,) = differentiation.with_gradient(own)(jnp.asarray(X))
    np.testing.assert_allclose(gradient, 2 * output * X)


def test_a_parameter_of_that_name_is_an_ordinary_tunable() -> None:
    def plain(x: Any, compiler_options: Any = None) -> Any:
        return x, compiler_options

    config = {"compiler_options": {"fast": True}}
    assert bind_config(plain, config)(1) == (1, {"fast": True})
    jitted = jax.jit(plain, static_argnames=["compiler_options"])
    assert split_config(jitted, config) == (config, {})
    tuned = quarantune.autotune([{"compiler_options": "any"}])(jitted)
    assert isinstance(tuned, quarantune.Autotuned)


def test_a_config_without_options_gets_none_from_others() -> None:
    listed = [{"n": 2}, {"n": 2, "compiler_options": UNOPTIMISED}]
    tuned = quarantune.autotune(listed)(scale)
    assert list(tuned.function.configs) == [{"n": 2, "compiler_options": {}}, {"n": 2, "compiler_options": UNOPTIMISED}]
    assert len({text_of(config) for config in tuned.function.configs}) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [("fast", "give a dict of XLA's options"), ({"xla_a": [1]}, "booleans, numbers and strings")],
)
def test_options_that_xla_cannot_take_are_refused(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quarantune.autotune([{"n": 2, "compiler_options": options}])(scale)


def test_a_function_that_jit_cannot_wrap_again_is_refused() -> None:
    def double(x: Any) -> Any:
        return x * 2

    with pytest.raises(TypeError, match=r"double is not jitted: put jax\.jit on it"):
        quarantune.AutoTuner(double, [{"compiler_options": UNOPTIMISED}])
    laid_out = jax.jit(scale.__wrapped__, static_argnames=["n"], out_shardings=jax.sharding.PartitionSpec())
    with pytest.raises(TypeError, match="out_shardings, which would be lost"):
        check_compiler_options(laid_out, [{"n": 2, "compiler_options": UNOPTIMISED}], name="scale")
    check_compiler_options(laid_out, [{"n": 2, "compiler_options": {}}], name="scale")


def test_options_reach_workers_and_unknown_ones_fail_alone(tmp_path: Path, sweeps: list[str]) -> None:
    dump = {"xla_dump_to": str(tmp_path / "dump")}
    good = {"n": 2, "compiler_options": {**UNOPTIMISED, **dump}}
    configs = [{"n": 2, "compiler_options": UNKNOWN}, good]
    tuned = quarantune.autotune(configs, rep=1, ref_fn=None)(scale)
    result = tuned.tune(X)
    bad = result.trials[0]
    assert (bad.outcome.value, result.best_config) == ("error", good)
    assert "xla_no_such_option" in bad.message
    assert list((tmp_path / "dump").iterdir())
    usual, *own = (
        text.count(" sine(") + text.count(" fusion(")
        for text in (scale.lower(X, n=2).compile().as_text(), result.lowered_text(), tuned.lower(X).compile().as_text())
    )
    assert usual not in own, "its options keep its operations apart"
    assert own[0] == own[1]
    np.testing.assert_allclose(tuned(X), np.sin(X) * 2 + 1, rtol=1e-6)
    with pytest.warns(RuntimeWarning, match="runs without its compiler_options inside a trace"):
        jax.jit(tuned)(X)
    result.save(tmp_path / "saved")
    loaded = quarantune.TuningResult.load(tmp_path / "saved", trusted=True)
    assert loaded.best_config == good
    np.testing.assert_allclose(loaded.fn(X), tuned(X))
    again = quarantune.autotune(configs, rep=1, ref_fn=None)(scale)
    assert again.lookup(X) == good
    again(X)
    assert len(sweeps) == 1


@pytest.mark.filterwarnings("ignore:QUARANTUNE_ISOLATION=none")  # warns once in a process
def test_configs_that_differ_only_in_options_are_two_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = [{"xla_dump_to": str(tmp_path / name)} for name in "ab"]
    configs = [{"n": 2, "compiler_options": dump} for dump in [*dumps, UNKNOWN]]
    with pytest.warns(UserWarning, match="xla_no_such_option"):
        first, second, bad = quarantune.compile_configs(scale, configs, X)
    assert [path.name for path in sorted(tmp_path.iterdir()) if path.name in "ab"] == ["a", "b"]
    assert bad is None
    for fn in (first, second):
        assert fn is not None
        np.testing.assert_allclose(fn(X), np.sin(X) * 2 + 1, rtol=1e-6)
    monkeypatch.setenv("QUARANTUNE_ISOLATION", "none")
    result = quarantune.AutoTuner(scale, configs[1:], rep=1, ref_fn=None).run(X)
    assert [trial.outcome.value for trial in result.trials] == ["ok", "error"]
    assert "xla_no_such_option" in result.trials[1].message


def test_an_interrupted_sweep_with_options_continues() -> None:
    configs = [{"n": 2, "compiler_options": options} for options in (UNKNOWN, UNOPTIMISED)]
    ended: list[int] = []

    def stop_after_the_first(index: int, phase: str) -> None:
        if phase == "end":
            ended.append(index)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quarantune.AutoTuner(scale, configs, rep=1, ref_fn=None, on_progress=stop_after_the_first).run(X)
    started: list[int] = []
    tuner = quarantune.AutoTuner(
        scale, configs, rep=1, ref_fn=None, on_progress=lambda index, phase: started.append(index)
    )
    assert tuner.run(X).best_config == configs[1]
    assert len(ended) == 1
    assert ended[0] not in started
