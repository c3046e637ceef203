"""Pairs of features that once failed where they met, each with the fault that it had."""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from tuned_functions import here

import quarantune
from quarantune import Outcome, Trial, TuningResult
from quarantune.answers import recording
from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.calls.call import BoundCall
from quarantune.calls.key import keyed
from quarantune.calls.rebuilt import rebuilt
from quarantune.cli.entry_point import main
from quarantune.tuning import verification

X = np.linspace(-1, 1, 16, dtype=np.float32)
QUICK = {"rep": 1, "warmup": 0, "ref_fn": None}
MEASURED = {"current", "unclear", "stale"}  # a busy machine decides between them


def parts(name: str, configs: Any, *, default: Any = 4, **options: Any) -> quarantune.Autotuned[..., Any]:
    """Returns a tuned function that computes the same with every config."""

    @quarantune.autotune(configs, **{**QUICK, "name": name, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def sine(x: Any, n: Any = default) -> Any:
        return 2 * jnp.sin(x.reshape(n if isinstance(n, int) else 1, -1)).reshape(x.shape)

    return sine


def verdicts(function: Any, **options: Any) -> list[str]:
    with here():
        report = quarantune.TuningCache().verify(function, **options)
    return [f"{entry.verdict}: {entry.reason}" for entry in report.entries]


def assert_measured(found: Sequence[str]) -> None:
    assert found
    assert {it.partition(":")[0] for it in found} <= MEASURED, found


# --- verify ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configs", "options"),
    [
        ([{"n": 1}, {"n": 2}], {"key_fn": lambda x: "all"}),
        ([{"n": 1, "compiler_options": {"xla_cpu_enable_fast_math": False}}, {"n": 2}], {}),
        pytest.param(lambda x: [{"n": 1}, {"n": 2}], {"key_fn": lambda x: "all"}, marks=pytest.mark.slow),
    ],
    ids=["key_fn", "compiler_options", "key_fn and a callable of configs"],
)
def test_verify_measures_entries(configs: Any, options: Any, name: str) -> None:
    with here():
        parts(name, configs, **options).tune(X)
    assert_measured(verdicts(parts(name, configs, **options)))


@pytest.mark.slow
def test_verify_measures_entries_of_other_jax_settings(name: str) -> None:
    with here(), jax.enable_x64(True):
        parts(name, [{"n": 1}, {"n": 2}]).tune(np.float64(X))
    assert_measured(verdicts(parts(name, [{"n": 1}, {"n": 2}])))
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]


@pytest.mark.slow
def test_verify_measures_entries_of_each_numerics(name: str) -> None:
    configs = [{"n": 1}, {"n": 2}]
    for numerics in ("rounding", "bitwise", "batch_invariant"):
        with here(), quarantune.settings(numerics=numerics):
            parts(name, configs, check_batch=0).tune(X)
    found = verdicts(parts(name, configs, check_batch=0))
    assert len(found) == 3
    assert_measured(found)


def test_an_entry_without_its_arguments_asks_for_them(name: str, cache_dir: Path) -> None:
    fn = parts(name, [{"n": 1}, {"n": 2}], key_fn=lambda x: "all")
    with here():
        fn.tune(X)
    file = cache_dir / f"{name}.json"
    for damaged in ("absent", [], [3], [{"y": 1}], {"x": 1}):  # `absent` is the entry of an earlier version
        contents = json.loads(file.read_text())
        ((entry,),) = (each.values() for each in contents.values())
        entry["arguments"] = damaged
        file.write_text(json.dumps(contents))
        (found,) = verdicts(fn)
        assert found.startswith("unknown: "), found
    assert_measured(verdicts(fn, arguments=lambda key: ((X,), {})))


@pytest.fixture
def measured_alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes measurements by `verify` end at once with a time for each length, and notes the lengths."""
    lengths: list[int] = []

    def swept(call: Any, configs: Any, tune: Any) -> TuningResult:
        lengths.append(call.args[0].shape[0])
        ms = {16: 1.0, 64: 5.0}[lengths[-1]]
        ours, own = (Trial(config={"n": n}, outcome=Outcome.OK, time_ms=at) for n, at in ((2, ms), (4, 3 * ms)))
        return TuningResult(
            best_config={"n": 2},
            time_ms=ms,
            default_config={"n": 4},
            default_time_ms=3 * ms,
            trials=(ours, own),
            key="",
            device="",
        )

    monkeypatch.setattr(verification, "swept", swept)
    return lengths


def test_verify_measures_all_calls_of_tune_for(name: str, measured_alone: list[int], cache_dir: Path) -> None:
    fn = parts(name, [{"n": 2}], key_fn=lambda x: "all")
    with here():
        fn.tune_for([(X,), (np.ones(64, np.float32),)], [3, 1])
    report = quarantune.TuningCache(cache_dir).verify(parts(name, [{"n": 2}], key_fn=lambda x: "all"))
    assert {*measured_alone} == {16, 64}
    assert [it.reason.partition(",")[0] for it in report.of("unused")] == ["the function has a key_fn"] * 2
    (entry,) = (it for it in report.entries if it.verdict != "unused")
    assert (entry.time_ms, entry.default_time_ms) == (2.0, 6.0), "means with the weights 3 and 1"


def test_a_stale_winner_of_tune_for_is_tuned_for_all_again(
    name: str, measured_alone: list[int], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn = parts(name, [{"n": 2}], key_fn=lambda x: "all")
    with here():
        fn.tune_for([(X,), (np.ones(64, np.float32),)], [3, 1], by="worst")
    asked: list[Any] = []

    def anew(tuner: Any, calls: Any, weights: Any, by: str) -> TuningResult:
        asked.append(([call.args[0].shape for call in calls], weights, by))
        _, device, key = keyed(calls[0]).id
        quarantune.TuningCache(cache_dir).put(name, key, device, {"n": 2})
        return TuningResult(best_config={"n": 2}, time_ms=1.0, trials=(), key="", device="")

    monkeypatch.setattr("quarantune.api.tune_for.tune_for", anew)
    report = quarantune.TuningCache(cache_dir).verify(fn, max_loss_percent=1e-6, again=True)
    assert sorted(str(entry.verdict) for entry in report.entries) == ["tuned again", "unused", "unused"], report
    assert asked == [([(16,), (64,)], [3.0, 1.0], "worst")]


def test_verify_sends_contextual_functions_to_their_kernels(name: str) -> None:
    layer = quarantune.contextual_autotune(lambda x: parts(name, [{"n": 1}])(x), name=name)
    with pytest.raises(TypeError, match=r"<Contextual .* and verify measures kernels alone: give its kernels"):
        quarantune.TuningCache().verify(layer)


@pytest.mark.slow
def test_a_report_of_tune_for_has_no_trials_of_one_call(name: str, cache_dir: Path) -> None:
    fn = parts(name, [{"n": 1}, {"n": 2}], key_fn=lambda x: "all")
    with here():
        fn.tune(X)  # its journal is under the same key
        told = fn.tune_for([(X,), (np.ones(64, np.float32),)])
        (cached,) = quarantune.tune_many([(parts(name, [{"n": 1}, {"n": 2}], key_fn=lambda x: "all"), (X,))])
    assert cached.from_cache is True
    assert (cached.with_trials().calls, cached.with_trials().by) == (told.calls, "total")
    assert cached.with_trials().trials == ()
    assert main(["report", name, "-o", str(cache_dir / "it.html")]) == 0


# --- configs -------------------------------------------------------------------------------------------------------


class Undescribed:
    """A default that JSON cannot hold; it works as 1 does."""


@pytest.mark.parametrize("makes", [False, True], ids=["list", "callable"])
@pytest.mark.parametrize("default", [4, Undescribed()], ids=["plain", "undescribed"])
def test_unlisted_defaults_that_win_are_found_again(
    makes: bool, default: Any, name: str, sweeps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(x: Any, n: Any = default) -> Any:
        if n in (1, 2):
            raise ArithmeticError(n)
        return 2 * x

    listed = [{"n": 1, "compiler_options": {"xla_cpu_enable_fast_math": False}}, {"n": 2}, {"n": 3}]

    def slow_unless_default(x: Any, n: Any = default) -> Any:
        return failing(x, n) if n != 3 else jax.lax.fori_loop(0, 100_000, lambda _, y: jnp.sin(y), x) * 0 + 2 * x

    def made() -> Any:
        jitted = jax.jit(slow_unless_default, static_argnames=["n"])
        configs = (lambda x: listed) if makes else listed
        return quarantune.autotune(configs, **{**QUICK, "name": name, "ref_fn": "defaults"})(jitted)

    with here():
        made().tune(X)
    assert made().lookup(X) == ({} if isinstance(default, Undescribed) else {"n": 4})
    np.testing.assert_array_equal(made()(X), 2 * X)
    assert sweeps == [name]


def test_the_nearest_config_is_one_that_a_callable_makes(name: str) -> None:
    def fits(x: Any) -> list[dict[str, int]]:
        return [{"n": 16}] if x.shape[0] % 16 == 0 else [{"n": 8}]

    with here():
        parts(name, fits).tune(X)
    other = np.ones(24, np.float32)  # its parts cannot be 16
    with (
        quarantune.settings(on_miss="nearest"),
        pytest.warns(quarantune.CacheWarning, match="does not use the nearest entry"),
        pytest.warns(quarantune.CacheWarning, match="running with its defaults"),
    ):
        np.testing.assert_allclose(parts(name, fits)(other), 2 * np.sin(other), rtol=1e-5)


def test_exact_numerics_take_no_config_of_other_sizes(name: str) -> None:  # `fit` refuses them
    configs = [{"n": 1}, {"n": 2}]
    with here(), quarantune.settings(numerics="bitwise"):
        parts(name, configs).tune(X)
    with (
        quarantune.settings(numerics="bitwise", on_miss="nearest"),
        pytest.warns(quarantune.CacheWarning, match="running with its defaults"),
    ):
        parts(name, configs)(np.ones(48, np.float32))


@pytest.mark.slow
def test_a_check_of_one_shape_says_nothing_of_another(name: str) -> None:
    def rows(x: Any, n: int = 1) -> Any:
        return x.reshape(n, -1)

    fn = quarantune.autotune([{"n": 3}], **{**QUICK, "name": name, "key_fn": lambda x: "all"})(
        jax.jit(rows, static_argnames=["n"])
    )
    reports = [
        quarantune.compile_check(fn, [{"n": 3}], jax.ShapeDtypeStruct((size,), np.float32), target="cpu")
        for size in (16, 24, 16)
    ]
    assert [(report.ok, report.known) for report in reports] == [(False, 0), (True, 0), (False, 1)]


# --- contextual functions ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recorded_calls_of_contextual_functions_are_tuned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("crossed_layers")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernel = parts(f"{name}-kernel", [{"n": 1}, {"n": 2}])
    kernel.__wrapped__.__module__, kernel.__wrapped__.__qualname__ = module.__name__, "kernel"
    module.kernel = kernel  # type: ignore[attr-defined]

    def layer(x: Any) -> Any:
        return 2 * kernel(x)

    layer.__module__, layer.__qualname__ = module.__name__, "layer"
    module.layer = quarantune.contextual_autotune(layer, warmup=0, rep=1, name=name)  # type: ignore[attr-defined]
    with quarantune.settings(record=tmp_path / "recorded"), pytest.warns(quarantune.CacheWarning, match="recorded"):
        module.layer(X)
    recording._flush()
    with here():
        code = main(["tune", "--recorded", str(tmp_path / "recorded"), "--json"])
    ended = {it["function"]: it["status"] for it in json.loads(capsys.readouterr().out)}
    assert (code, ended[name]) == (0, "tuned"), ended
    assert module.layer.lookup(jnp.asarray(X)) or module.layer.lookup(X)


def test_many_contextual_functions_are_tuned_by_one_call(name: str) -> None:
    kernel = parts(f"{name}-kernel", [{"n": 1}, {"n": 2}])
    layer = quarantune.contextual_autotune(lambda x: 2 * kernel(x), warmup=0, rep=1, name=name)
    with here():
        (result,) = quarantune.tune_many([(layer, (X,))])
    assert result.kernels  # type: ignore[attr-defined]
    assert layer.lookup(X)


# --- donated arguments, searches and methods -----------------------------------------------------------------------


@pytest.mark.slow
def test_donated_arguments_leave_gradients_their_noise(name: str) -> None:
    def rounded(x: Any, n: int = 4) -> Any:
        return jnp.cumsum(jnp.sin(x) / 3)

    noises = []
    for donated in ({}, {"donate_argnames": ["x"]}):
        jitted = jax.jit(rounded, static_argnames=["n"], **donated)
        tuned = quarantune.autotune([{"n": 1}], rep=1, name=f"{name}-{len(donated)}", check_grad=True)(jitted)
        with here():
            noises.append(tuned.tune(jnp.asarray(X)).noise)
    assert noises[0] == noises[1] is not None


def test_a_users_search_may_ask_configs_as_they_were_listed(name: str) -> None:
    class InTurn:
        def __init__(self) -> None:
            self.left = [{"n": 2}, {"n": 1, "compiler_options": {"xla_cpu_enable_fast_math": False}}]

        def ask(self, n: int) -> list[Any]:
            asked, self.left = self.left[:n], self.left[n:]
            return asked

        def tell(self, config: Any, trial: Any) -> None: ...

    fn = parts(name, InTurn().left, search=InTurn())
    with here():
        assert len(fn.tune(X).trials) == 2


class Model:
    """Has a tuned method."""

    @quarantune.autotune([{"n": 1}, {"n": 2}], **QUICK)
    @functools.partial(jax.jit, static_argnames=["self", "n"])
    def scaled(self, x: Any, n: int = 4) -> Any:
        return 2 * x.reshape(n, -1).reshape(x.shape)


def test_many_methods_are_tuned_and_others_name_their_class() -> None:
    model = Model()
    with here():
        (result,) = quarantune.tune_many([(model.scaled, (X,))])
    assert model.scaled.lookup(X) == result.best_config
    with pytest.raises(AttributeError, match=r"no 'tune_for': use Model.scaled.tune_for, with calls that begin with"):
        model.scaled.tune_for([(X,)])
    with pytest.raises(AttributeError, match=r"no 'tune_fro'$"):
        _ = model.scaled.tune_fro


def test_a_refused_sweep_does_not_count_as_interrupted(
    name: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        quarantune.settings(executor=pool, isolation="none"),
        pytest.raises(ValueError, match=r"QUARANTUNE_ISOLATION=none .* executor= .* unset one of them"),
    ):
        parts(name, [{"n": 1}]).tune(X)
    assert main(["cache", "list", "--running"]) == 0
    assert "no sweep runs" in capsys.readouterr().out


@pytest.mark.parametrize("made", [Model().scaled, Model.scaled.__wrapped__.__get__(Model())], ids=["tuned", "jitted"])
def test_a_jitted_method_of_an_object_is_refused_by_name(made: Any) -> None:
    for ask in (
        lambda: quarantune.AutoTuner(made, [{"n": 1}]),
        lambda: quarantune.compile_check(made, [{"n": 1}], X, target="cpu"),
        lambda: quarantune.compile_configs(made, [{"n": 1}], X),
        lambda: quarantune.contextual_autotune(made),
    ):
        with pytest.raises(
            TypeError, match=r"'Model.scaled' is a jitted method of an object: give the function of its"
        ):
            ask()


def test_a_wrapped_method_of_an_object_takes_its_arguments(name: str) -> None:
    class Plain:
        @functools.wraps(lambda self, x, n=4: x)
        def doubled(self, x: Any, n: int = 4) -> Any:
            return 2 * x

    with here():
        result = quarantune.AutoTuner(Plain().doubled, [{"n": 1}], name=name, rep=1).run(X)
    np.testing.assert_array_equal(result.fn(X), 2 * X)


def test_recorded_calls_leave_defaults_out_as_calls_do(name: str) -> None:
    def half(x: Any, mode: str = "up", by: float = 2.0, n: int = 4) -> Any:
        return x / by

    fn = quarantune.autotune([{"n": 1}], name=name, ref_fn=lambda x: x / 2, rep=1)(
        jax.jit(half, static_argnames=["mode", "n"])
    )
    key = keyed(BoundCall(fn.function, (X,), {})).id.key
    (args, kwargs) = rebuilt(key, fn.function)
    assert (len(args), kwargs) == (1, {})
    with here():
        assert fn.tune(*args).trials[0].outcome in ("ok", "slow"), "ref_fn takes these arguments"
    spelt = keyed(BoundCall(fn.function, (X, "down"), {"by": 3.0})).id.key
    assert rebuilt(spelt, fn.function)[0][1:] == ("down",)


def test_verify_leaves_results_of_shard_map_usable(name: str) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, found = jax.sharding.PartitionSpec("d"), list[Any]()

    def inside(ask: Any) -> None:
        jax.shard_map(ask, mesh=mesh, in_specs=spec, out_specs=spec)(X)

    with here():
        inside(parts(name, [{"n": 1}, {"n": 2}]))
        assert_measured(verdicts(parts(name, [{"n": 1}, {"n": 2}])))
        inside(lambda x: (found.append(parts(name, [{"n": 1}, {"n": 2}]).lookup(x)), x)[1])
    assert found[0] is not None


def test_gradients_of_numpy_functions_name_the_option(name: str) -> None:
    options = {"name": name, "rep": 1, "check_grad": True, "ref_fn": lambda x: np.sin(x)}
    tuner = quarantune.AutoTuner(lambda x, n=4: np.sin(x), [{"n": 1}], **options)
    with here(), pytest.raises(RuntimeError, match=r"check_grad differentiates it by JAX, .* or leave check_grad out"):
        tuner.run(X)


def test_a_new_process_exports_with_the_config_of_a_bucket(name: str) -> None:
    def made() -> Any:
        return parts(name, [{"n": 1}, {"n": 2}], key_fn=lambda x: "all")

    with here():
        made().tune(np.ones((2, 16), np.float32))
    struct = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16"), np.float32)
    assert made().lookup(struct) is not None, "found in the file"
    fn = made()
    exported = jax.export.export(jax.jit(lambda x: fn(x)))(struct)
    np.testing.assert_allclose(exported.call(np.ones((3, 16), np.float32)), 2 * np.sin(1), rtol=1e-5)


def test_results_for_one_shard_are_used_inside_shard_map(name: str) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    with here():
        parts(name, [{"n": 1}, {"n": 2}]).tune(jax.ShapeDtypeStruct(X.shape, X.dtype))  # ahead of time
    with quarantune.settings(on_miss="error"):
        found = jax.shard_map(parts(name, [{"n": 1}, {"n": 2}]), mesh=mesh, in_specs=spec, out_specs=spec)(X)
    np.testing.assert_allclose(found, 2 * np.sin(X), rtol=1e-5)


@pytest.mark.parametrize("on_miss", ["default", "nearest", "rule"])
def test_exact_numerics_take_no_estimated_config(on_miss: Any) -> None:
    found = {}
    for numerics in ("rounding", "bitwise"):
        function = parts(f"estimated_{numerics}", [{"n": 1}, {"n": 2}], default=1, numerics=numerics)
        layers, call = function._tuner.rungs.layers, keyed(BoundCall(function.function, (jnp.ones(8),), {}))
        layers._memory.answers[call.id] = Answer(Origin.ESTIMATED, {"n": 2})
        with quarantune.settings(on_miss=on_miss):
            found[numerics] = layers.estimated(call, Situation.of(call.call)) is not None
    assert found == {"rounding": True, "bitwise": False}


@pytest.mark.slow
def test_a_score_is_not_served_from_the_fastest_exact_config() -> None:
    scores = {1: 3.0, 2: 2.0, 3: 1.0}
    space = [{"n": n} for n in scores]

    @quarantune.autotune(space, name="scored_bits", objective=lambda trial: scores[trial.config["n"]])
    @functools.partial(jax.jit, static_argnames=["n"])
    def scored(x: Any, n: int = 1) -> Any:
        return jax.lax.fori_loop(0, 4 - n, lambda _, y: jnp.tanh(y), x) * 0 + x

    assert scored.tune(jnp.ones(8)).best_config == {"n": 3}
    with quarantune.settings(numerics="bitwise", on_miss="default"):
        assert scored.lookup(jnp.ones(8)) is None, "saved figures of exact configs are times"
