"""Kernels of a function are tuned inside it: tried in order, timed together and remembered for the function."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import gc
import inspect
import json
import os
import pickle
import re
import textwrap
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import eventually, nothing_is_left, quiet_place  # noqa: F401
from helpers import ends, isolated, python

import quarantune
from quarantune.host.frames import told
from quarantune.sweep import sweep
from quarantune.transport import assignment

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.zeros(4, np.float32)


def pause(x: Any, ms: float, then: Any = None) -> Any:
    """Returns x after the device has been busy for a time, like a kernel."""

    def host(value: Any) -> Any:
        time.sleep(ms / 1000)
        return value

    return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def kernel(name: str, configs: Any, body: Any = lambda x, ms: pause(x, ms)) -> quarantune.Autotuned:
    """Returns an autotuned kernel with the tunable `ms`."""

    def run(x: Any, ms: Any = 1) -> Any:
        return body(x, ms)

    run.__qualname__ = name
    return quarantune.autotune(configs, ref_fn=None)(functools.partial(jax.jit, static_argnames=["ms"])(run))


def chosen(result: quarantune.ContextualResult) -> dict[str, Any]:
    return {name: choice.config["ms"] for name, choice in zip(result.labels, result.kernels, strict=True)}


@pytest.mark.slow
def test_kernels_are_tuned_in_turn_with_the_others_at_their_best() -> None:
    first, second = kernel("first", {"ms": [255, 3]}), kernel("second", {"ms": [52, 100, 2]})

    @quarantune.contextual_autotune(rep=2)
    def both(x: Any) -> Any:
        return second(first(x))

    result = both.tune(X)
    assert [tuple(trial.config.values()) for trial in result.trials] == [
        ("ms=255", "ms=52"),
        ("ms=3", "ms=52"),
        ("ms=3", "ms=52"),
        ("ms=3", "ms=100"),
        ("ms=3", "ms=2"),
    ]
    assert chosen(result) == {"first": 3, "second": 2}
    assert result.baseline_ms is not None
    assert result.baseline_ms >= 307 > result.time_ms >= 5
    # Every time is the whole function's time.
    assert [min(trial.samples_ms) >= least for trial, least in zip(result.trials, (307, 55, 55, 103, 5), strict=True)]
    assert [len(choice.trials) for choice in result.kernels] == [2, 3]


@pytest.mark.slow
def test_a_config_may_win_alone_and_lose_in_its_context() -> None:
    # The kernel is quick with ms=0, but leaves data that slow its successor.
    maker = kernel("maker", {"ms": [0, 30]}, lambda x, ms: pause(x, ms) + (1 if ms == 0 else 0))
    taker = kernel("taker", {"ms": [150]}, lambda x, ms: jax.lax.cond(x[0] > 0, lambda x: pause(x, ms), lambda x: x, x))

    @quarantune.contextual_autotune(rep=2, ref_fn=None)
    def both(x: Any) -> Any:
        return taker(maker(x))

    assert maker(X)[0] == 1
    assert both(X)[0] == 0
    assert maker(X)[0] == 1, "the best config within the function does not leak out"
    assert both(X)[0] == 0, "the best config alone does not leak in"


@pytest.mark.long
@pytest.mark.slow
def test_a_kernel_is_tuned_once_for_each_of_its_shapes() -> None:
    # Each shape has another quick config.
    shaped = kernel("shaped", {"ms": [4, 8]}, lambda x, ms: pause(x, 1 if x.size == ms else 50))

    @quarantune.contextual_autotune(rep=2)
    def twice(x: Any) -> Any:
        return shaped(shaped(x)), shaped(jnp.concatenate([x, x]))

    result = twice.tune(X)
    assert chosen(result) == {"shaped #1": 4, "shaped #2": 8}
    shapes = [json.loads(choice.key)["x"]["shape"] for choice in result.kernels]
    assert shapes == [[4], [8]]


@pytest.mark.long
@pytest.mark.slow
def test_an_inner_kernel_is_tuned_for_the_shape_it_gets() -> None:
    inner = kernel("inner", {"ms": [40, 1]})
    outer = kernel("outer", {"ms": [2, 4]}, lambda x, ms: inner(x.reshape(ms, -1)).ravel() + pause(x, 160 / ms))

    @quarantune.contextual_autotune(rep=2)
    def nested(x: Any) -> Any:
        return outer(x) + 0

    result = nested.tune(X)
    by_shape = {
        (c.name.rpartition(".")[2], str(json.loads(c.key)["x"]["shape"])): c.config["ms"] for c in result.kernels
    }
    assert by_shape[("outer", "[4]")] == 4
    assert by_shape[("inner", "[4, 1]")] == 1, "the outer kernel's winner calls it with this shape"
    assert len(by_shape) == 2, "no other shape occurs"


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [pytest.param(False, marks=pytest.mark.long), True])
def test_plain_and_jitted_functions_run_their_kernels_winners(jitted: bool) -> None:
    # Each call traces the inner jit again, which takes 25 ms or longer; differences must be larger.
    slow, quick = kernel("left", {"ms": [400, 1]}, lambda x, ms: pause(x, ms) + ms), kernel("right", {"ms": [1, 400]})

    def add(x: Any, *, offset: int) -> Any:
        return jax.jit(lambda x: quick(slow(x)))(x) + offset  # traces of an inner jit must not persist

    tuned = quarantune.contextual_autotune(rep=3)(
        functools.partial(jax.jit, static_argnames=["offset"])(add) if jitted else add
    )
    assert tuned.default(X, offset=100)[0] == 101
    assert tuned.lookup(X, offset=100) is None
    assert tuned(X, offset=100)[0] == 101
    assert {slot.name.rpartition(".")[2]: config for slot, config in tuned.lookup(X, offset=100).items()} == {
        "left": {"ms": 1},
        "right": {"ms": 1},
    }
    assert tuned.default(X, offset=100)[0] == 101
    assert (tuned.__name__, tuned.__wrapped__.__name__) == ("add", "add")


def test_programs_compile_ahead_and_name_their_kernels() -> None:
    ahead = kernel("ahead", {"ms": [1, 2]}, lambda x, ms: x + 0 * ms)
    inner = jax.jit(lambda x: ahead(x))  # JAX traces it once for each assignment

    @quarantune.contextual_autotune(rep=1)
    @functools.partial(jax.jit, static_argnames=["twice"])
    def whole(x: Any, *, twice: bool) -> Any:
        return inner(x) + (inner(jnp.concatenate([x, x]))[: x.size] if twice else 0)

    for twice, kernels in ((False, 1), (True, 2), (False, 1)):
        result = whole.tune(X, twice=twice)
        assert len(result.kernels) == kernels
        assert all(trial.compile_s is not None and trial.compile_s > 0 for trial in result.trials), result.table()
        np.testing.assert_array_equal(whole(X, twice=twice), X)


def test_the_first_jitted_call_finds_its_sweeps_program(compiles: list[str]) -> None:
    found = kernel("found", {"ms": [1, 2]}, lambda x, ms: x * ms / ms)

    @quarantune.contextual_autotune(rep=1)
    @jax.jit
    def whole(x: Any) -> Any:
        return found(x) + 1

    whole.tune(X)
    compiles.clear()
    np.testing.assert_array_equal(whole(X), X + 1)
    assert any("compile_time_saved" in event for event in compiles), compiles


def test_a_jitted_functions_prints_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    heard = kernel("heard", {"ms": [1, 2]}, lambda x, ms: x + 0 * ms)

    @quarantune.contextual_autotune(rep=1)
    @jax.jit
    def whole(x: Any) -> Any:
        print("traced")
        return heard(x)

    whole.tune(X)
    assert "traced" not in capsys.readouterr().out
    whole(X)
    assert capsys.readouterr().out.count("traced") == 1


@pytest.mark.parametrize("isolation", ["none", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("jitted", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("judge", ["ref_fn", "check_fn", "defaults", "tolerance"])
def test_all_kernels_of_a_function_share_one_reference(
    judge: str, jitted: bool, isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last config of each kernel is wrong.
    first, second = (
        kernel(name, {"ms": [1, 2, 3]}, lambda x, ms: jnp.cos(x) * (2 + (ms == 3))) for name in ("first", "second")
    )
    calls = tmp_path / "calls"
    calls.touch()

    def right(x: Any) -> Any:
        with calls.open("a") as file:
            file.write("called\n")
        return jnp.cos(jnp.cos(x) * 2) * 2

    def both(x: Any) -> Any:
        return second(first(x))

    options: dict[str, Any] = {} if judge == "defaults" else {"ref_fn": right}
    if judge == "check_fn":
        options["check_fn"] = lambda output, expected, x: bool(jnp.allclose(output, expected))
    elif judge == "tolerance":
        options["rtol"] = 1e-3
    run, untuned = sweep.run, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        swept = run(*args, **kwargs)
        untuned.append(swept.untuned is not None)
        return swept

    monkeypatch.setattr(sweep, "run", noting)
    both_tuned = quarantune.contextual_autotune(jax.jit(both) if jitted else both, rep=2, **options)
    descriptors = os.listdir("/proc/self/fd")
    with isolated(isolation):
        result = both_tuned.tune(X)
    # JAX frees arrays used in place only when Python collects garbage.
    assert isolation != "none" or eventually(lambda: (gc.collect(), os.listdir("/proc/self/fd"))[1] == descriptors)
    assert ends(result.trials) == ["ok", "ok", "wrong"] * 2
    assert untuned == [True, False, False]
    assert len(calls.read_text().splitlines()) == (judge != "defaults")


def test_untuned_a_function_runs_with_its_kernels_own_defaults() -> None:
    only = kernel("only", {"ms": [7, 8]}, lambda x, ms: x + ms)

    @quarantune.contextual_autotune
    def shifted(x: Any) -> Any:
        return only(x)

    assert shifted.default(X)[0] == 1
    with quarantune.settings(on_miss="default"), pytest.warns(quarantune.CacheWarning, match="not tuned for this call"):
        assert shifted(X)[0] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_a_config_that_crashes_in_its_context_is_contained() -> None:
    def crash_beside_others(x: Any, ms: float) -> Any:
        def host(value: Any) -> Any:
            if ms == 9:
                os.abort()
            return value

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    fragile = kernel("fragile", {"ms": [9, 2, 3]}, crash_beside_others)
    sound = kernel("sound", {"ms": [100, 1]})

    @quarantune.contextual_autotune(rep=2)
    def both(x: Any) -> Any:
        return sound(fragile(x))

    with nothing_is_left():
        result = both.tune(X)
    trials = {choice.name.rpartition(".")[2]: choice.trials for choice in result.kernels}
    assert ends(trials["fragile"]) == ["crashed", "ok", "ok"]
    assert "SIGABRT" in trials["fragile"][0].message
    assert [trial.outcome.is_failure for trial in trials["sound"]] == [False, False]
    assert chosen(result)["sound"] == 1
    assert result.baseline_ms is None
    assert result.failures["crashed"] == 1
    assert result.failures.keys() <= {"crashed", "slow"}


@pytest.mark.slow
def test_a_function_that_always_fails_names_its_attempts() -> None:
    def fail(x: Any, ms: float) -> Any:
        raise ArithmeticError(f"no {ms}")

    broken = kernel("broken", {"ms": [1, 2]}, fail)

    @quarantune.contextual_autotune
    def hopeless(x: Any) -> Any:
        return broken(x)

    with pytest.raises(quarantune.TuningFailedError, match=r"hopeless.*\n.*ArithmeticError: no 1"):
        hopeless(X)


@pytest.mark.long
@pytest.mark.slow
def test_kernels_of_one_name_and_different_code_are_tuned_apart(sweeps: list[str]) -> None:
    # Two kernels of a factory, quick with different configs, and two lambdas.
    def make(quick: int) -> quarantune.Autotuned:
        def run(x: Any, ms: int = 1) -> Any:
            return pause(x, 1 if ms == quick else 25) + ms

        return quarantune.autotune({"ms": [4, 8]}, ref_fn=None)(jax.jit(run, static_argnames=["ms"]))

    left, right = make(8), make(4)
    add, subtract = (
        quarantune.autotune({"n": [1, 2]}, name="lambda", ref_fn=None)(jax.jit(fn, static_argnames=["n"]))
        for fn in (
            lambda x, n=1: pause(x, 1 if n == 2 else 25) + n,
            lambda x, n=1: pause(x, 25 if n == 2 else 1) - n,
        )
    )
    assert left.name == right.name

    @quarantune.contextual_autotune(rep=2, ref_fn=None)
    def all_four(x: Any) -> Any:
        return subtract(add(right(left(x))))

    result = all_four.tune(X)
    assert [tuple(choice.config.values()) for choice in result.kernels] == [(8,), (4,), (2,), (1,)]
    assert [label.partition(" #")[2] for label in result.labels] == ["", "2", "", "2"]
    count = len(sweeps)
    assert all_four(X)[0] == 8 + 4 + 2 - 1
    assert all_four(X)[0] == 8 + 4 + 2 - 1
    again = quarantune.contextual_autotune(rep=2, ref_fn=None)(all_four.__wrapped__)
    assert again(X)[0] == 8 + 4 + 2 - 1, "the entry depends on the order of first calls"
    assert len(sweeps) == count


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_first_and_default_configs_may_fail_if_another_works() -> None:
    def only_the_third(x: Any, ms: Any) -> Any:
        if ms == 7:
            os.abort()
        if ms != 3:
            raise ArithmeticError(ms)
        return x + ms

    fragile, second = (kernel(name, {"ms": [7, 5, 3]}, only_the_third) for name in ("fragile", "second"))
    sound = kernel("sound", {"ms": [100, 1]})

    @quarantune.contextual_autotune(rep=1, ref_fn=None)
    def three(x: Any) -> Any:
        return second(sound(fragile(x)))

    with nothing_is_left():
        result = three.tune(X)
    assert chosen(result) == {"fragile": 3, "sound": 1, "second": 3}
    assert result.baseline_ms is None
    assert three(X)[0] == 6


@pytest.mark.long
@pytest.mark.slow
def test_kernels_that_fail_together_are_tried_in_combinations() -> None:
    # A jit traces all kernels before any fails, so that no single change helps.
    def fails_when_run(x: Any, ms: Any) -> Any:
        def host(value: Any) -> Any:
            if ms != 3:
                raise ArithmeticError(ms)
            return value

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    left, right = (kernel(name, {"ms": [7, 5, 3]}, fails_when_run) for name in ("left", "right"))

    @quarantune.contextual_autotune(rep=1, ref_fn=None)
    @jax.jit
    def both(x: Any) -> Any:
        return left(x) + right(x)

    assert chosen(both.tune(X)) == {"left": 3, "right": 3}


@pytest.mark.slow
def test_the_result_is_remembered_until_a_kernels_configs_change(
    cache_dir: Path, sweeps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(configs: list[int]) -> quarantune.Contextual:
        only = kernel("only", {"ms": configs})

        @quarantune.contextual_autotune(name="whole", rep=2)
        def whole(x: Any) -> Any:
            return only(x)

        return whole

    make([80, 1])(X)
    assert len(sweeps) == 2
    (entry,) = next(iter(json.loads((cache_dir / "whole.json").read_text()).values())).values()
    ((name, by_key),) = entry["config"]["assignment"].items()
    assert name.endswith("only")
    assert list(by_key.values()) == [{"ms": 1}]
    assert entry["kernels"][0]["config"] == {"ms": 1}
    assert entry["time_ms"] < entry["baseline_ms"]

    again = make([80, 1])
    again(X)
    assert len(sweeps) == 2
    with quarantune.settings(always_tune=True):
        fresh = make([80, 1])
        fresh(X)
        fresh(X)
    assert len(sweeps) == 4
    with quarantune.settings(disable_cache=True):
        make([80, 1])(X)
    assert len(sweeps) == 6
    # From now on only new kernels are found by name.
    monkeypatch.setattr("quarantune.functions.binding._kernels", {})
    wider = make([80, 1, 5])
    assert wider.lookup(X) is None


PROGRAM = """
    import functools, sys, jax, numpy as np, quarantune
    from quarantune.sweep import sweep

    started, run = [], sweep.run
    sweep.run = lambda *args, **kwargs: (started.append(1), run(*args, **kwargs))[1]

    @quarantune.autotune({"n": [3, 2]}, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def shift(x, n=1):
        return x + jax.pure_callback(lambda v: (__import__("time").sleep((n == 3) / 10), v)[1], x, x) + n

    @quarantune.contextual_autotune(rep=2, ref_fn=None)
    def whole(x):
        return shift(x)

    print(whole(np.zeros(3, np.float32))[0], len(started))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_script_without_a_guard_tunes_once(tmp_path: Path, cache_dir: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    assert python("-W", "error", script).strip() == "2.0 2"
    assert python("-W", "error", script).strip() == "2.0 0"
    assert (cache_dir / "program.whole.json").exists()


@pytest.mark.long
@pytest.mark.slow
def test_the_table_shows_each_kernels_winner_and_the_total_gain() -> None:
    one, two = kernel("one", {"ms": [80, 1]}), kernel("two", {"ms": [1, 80]})

    @quarantune.contextual_autotune(rep=2)
    def both(x: Any) -> Any:
        return two(one(x))

    result = both.tune(X)
    table = result.table()
    assert max(map(len, table.splitlines())) <= 80
    sections = re.split(r"\n\n(?=two|the whole)", table)
    assert [section.splitlines()[0] for section in sections[:2]] == ["one", "two"]
    assert all(section.count("\n*  1") == 1 for section in sections[:2])
    assert sections[2].startswith("the whole function: ")
    assert "with every kernel's first config" in sections[2]
    assert "against the whole function with every kernel's first config" in " ".join(sections[0].split())
    assert "one: ms=1; two: ms=1" in repr(result)
    assert both.lookup(X) == {(choice.name, choice.key): choice.config for choice in result.kernels}
    assert np.array_equal(result.fn(X), X)


@pytest.mark.long
@pytest.mark.slow
def test_without_a_sandbox_the_same_configs_win() -> None:
    one, two = kernel("one", {"ms": [80, 1]}), kernel("two", {"ms": [1, 80]})

    @quarantune.contextual_autotune(rep=5)
    def both(x: Any) -> Any:
        return two(one(x))

    for isolation in ("none", "compile"):  # workers have nothing to compile
        told.clear()
        with (
            quarantune.settings(isolation=isolation),
            pytest.warns(RuntimeWarning, match="configs run in this process"),
        ):
            result = both.tune(X)
        assert chosen(result) == {"one": 1, "two": 1}


@pytest.mark.slow
def test_an_outer_jit_tunes_the_kernels_and_bakes_them_in(sweeps: list[str]) -> None:
    only = kernel("only", {"ms": [80, 1]}, lambda x, ms: pause(x, ms) + ms)

    @quarantune.contextual_autotune(rep=2, ref_fn=None)
    def whole(x: Any) -> Any:
        return only(x)

    assert jax.jit(lambda x: whole(x) * 2)(X)[0] == 2
    assert len(sweeps) == 2
    assert all(name.endswith("whole") for name in sweeps)


def test_kernels_that_a_function_does_not_call_need_no_tuning(sweeps: list[str]) -> None:
    @quarantune.contextual_autotune
    def plain(x: Any) -> Any:
        return x + 1

    assert plain(X)[0] == 1
    assert plain(X)[0] == 1
    assert len(sweeps) == 1


def test_a_kernels_prune_fn_also_holds_within_the_function() -> None:
    @quarantune.autotune({"ms": [1, 2]}, prune_fn=lambda config, x: config["ms"] > 1)
    @functools.partial(jax.jit, static_argnames=["ms"])
    def picky(x: Any, ms: int = 2) -> Any:
        return x + ms

    @quarantune.contextual_autotune(rep=1)
    def whole(x: Any) -> Any:
        return picky(x)

    assert [trial.config for trial in whole.tune(X).kernels[0].trials] == [{"ms": 2}]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"n_repeat": 3}, TypeError, "no option 'n_repeat': use rep"),
        ({"n_warmup": 3}, TypeError, "no option 'n_warmup': use warmup"),
        ({"objective": "energy"}, TypeError, "use time alone"),
        ({"prune_fn": lambda config: True}, TypeError, "prune_fn of its kernels"),
        ({"rep": 0}, ValueError, "rep=0 is not valid"),
        ({"warmup": -1}, ValueError, "warmup=-1 is not valid"),
        ({"n_repaet": 2}, TypeError, "no option 'n_repaet'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        quarantune.contextual_autotune(**options)


def test_a_gradient_needs_a_function_that_can_be_jitted_again() -> None:
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    whole = quarantune.contextual_autotune(jax.jit(lambda x: x.sum(), out_shardings=there), time_grad=True)
    with pytest.raises(TypeError, match=r"time_grad .* jax.jit was given out_shardings, which would be lost"):
        whole(X)


def test_an_autotuned_kernel_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="put contextual_autotune on a function that calls autotuned kernels"):
        quarantune.contextual_autotune(kernel("only", {"ms": [1]}))


def test_threads_keep_their_assignments_apart() -> None:
    only = kernel("shared", {"ms": [5, 6]}, lambda x, ms: x + ms)
    x, (mine, theirs) = jnp.zeros(4), (threading.Event(), threading.Event())
    slot = assignment.Slot(only.name, '{"x":{"dtype":"float32","shape":[4]}}')

    def assigned(ms: int) -> assignment.Assignment:
        return assignment.Assignment(assignment.encode({slot: {"ms": ms}}, others=assignment.OWN))

    def other_thread() -> float:
        with assigned(6).in_force():
            results = [float(only(x)[0])]
            theirs.set()
            assert mine.wait(100)
            return results[0]

    with quarantune.settings(disable_cache=True, on_miss="default"), ThreadPoolExecutor(1) as pool:
        with assigned(5).in_force():
            assert only(x)[0] == 5
            other = pool.submit(other_thread)
            assert theirs.wait(100)
        mine.set()
        assert other.result() == 6
        with pytest.warns(quarantune.CacheWarning, match="not tuned for this call"):
            assert only(x)[0] == 1
        with assigned(5).in_force():
            assert only(x)[0] == 5


@pytest.mark.long
@pytest.mark.slow
def test_a_tuned_function_within_a_tuned_function_is_part_of_it(sweeps: list[str]) -> None:
    only = kernel("only", {"ms": [80, 1]}, lambda x, ms: pause(x, ms) + ms)

    @quarantune.contextual_autotune(rep=2, ref_fn=None)
    def part(x: Any) -> Any:
        return only(x)

    @quarantune.contextual_autotune(rep=2, ref_fn=None)
    def whole(x: Any) -> Any:
        return part(x) * 2

    assert whole(X)[0] == 2
    assert [name.rpartition(".")[2] for name in sweeps] == ["whole", "whole"]


class Model:
    only = kernel("only", {"ms": [80, 1]}, lambda x, ms: pause(x, ms) + ms)

    @quarantune.contextual_autotune(rep=2, ref_fn=None)
    def forward(self, x: Any) -> Any:
        return Model.only(x)


@pytest.mark.slow
def test_a_method_is_tuned_like_a_function() -> None:
    model = Model()
    assert chosen(model.forward.tune(X)) == {"only": 1}
    assert model.forward(X)[0] == 1
    assert len(model.forward.lookup(X)) == 1


def test_a_search_learns_each_kernels_own_configs() -> None:
    class InOrder:
        def __init__(self) -> None:
            self.left = [{"ms": 0}, {"ms": 1}, {"ms": 2}]
            self.told: list[tuple[Any, Any]] = []

        def ask(self, n: int) -> list[Any]:
            taken, self.left = self.left[:n], self.left[n:]
            return taken

        def tell(self, config: Any, trial: Any) -> None:
            self.told.append((config, trial.config))

    searched = kernel("searched", {"ms": [0, 1, 2]}, lambda x, ms: x + 0 * ms)
    search = InOrder()

    @quarantune.contextual_autotune(rep=1)
    def one(x: Any) -> Any:
        return searched(x)

    with quarantune.settings(search=search):
        one.tune(X)
    assert sorted(search.told, key=str) == [({"ms": ms}, {"ms": ms}) for ms in (0, 1, 2)]


class Way(enum.Enum):
    FORTH = "forth"
    BACK = "back"


@dataclasses.dataclass(frozen=True)
class Plan:
    type: int
    way: Way


def listed(x: Any, ms: Any = 1) -> list[dict[str, Any]]:
    return [{"ms": Plan(int(x.shape[0]) + size, Way.FORTH)} for size in range(3)]


MADE = pytest.mark.parametrize("configs", [listed(X), listed], ids=["a list", "made by a call"])


def planned(name: str, configs: Any, **options: Any) -> quarantune.Contextual:
    """Returns a function with one kernel, whose configs contain plans."""

    def run(x: Any, ms: Any = 1) -> Any:
        return x + 0 * (0 if ms == 1 else ms.type)

    run.__qualname__ = name
    jitted = functools.partial(jax.jit, static_argnames=["ms"])(run)
    only = quarantune.autotune(configs, ref_fn=None, **options)(jitted)

    @quarantune.contextual_autotune(rep=1, name=f"with_{name}")
    def one(x: Any) -> Any:
        return only(x)

    return one


class AsksForPlans:
    """A user's search."""

    def __init__(self) -> None:
        self.left = listed(X)[:2]
        self.told: list[Any] = []

    def ask(self, n: int) -> list[Any]:
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def tell(self, config: Any, trial: Any) -> None:
        self.told.append(config["ms"])


@MADE
def test_objects_are_shown_as_they_are(configs: Any, cache_dir: Path) -> None:
    one = planned("shown", configs)
    result = one.tune(X)
    (found,) = result.kernels
    plans = [config["ms"] for config in listed(X)]
    assert [trial.config["ms"] for trial in found.trials] == plans
    assert found.config["ms"] in plans
    assert {config["ms"] for config in found.tie} <= {*plans}
    assert "type=4" in result.table()
    assert "$" not in f"{result.table()} {result!r} {result.trials}"
    assert one.lookup(X) == {(found.name, found.key): found.config}
    again = planned("shown", configs)
    assert again.lookup(X) == one.lookup(X)
    (entry,) = next(iter(json.loads((cache_dir / "with_shown.json").read_text()).values())).values()
    assert entry["kernels"][0]["config"] == {
        "ms": {"$type": "Plan", "type": found.config["ms"].type, "way": {"$enum": "Way.FORTH"}}
    }


@pytest.mark.long
@pytest.mark.slow
@MADE
def test_a_search_chooses_among_configs_that_hold_objects(configs: Any) -> None:
    with quarantune.settings(search="random", max_trials=2):
        (found,) = planned("searched", configs).tune(X).kernels
    assert [trial.outcome for trial in found.trials] == ["ok"] * 2


@MADE
def test_a_users_search_asks_for_configs_with_their_objects(configs: Any) -> None:
    with quarantune.settings(search=(search := AsksForPlans())):
        planned("asked", configs).tune(X)
    assert sorted(plan.type for plan in search.told) == [4, 5]


def test_a_users_search_learns_which_objects_are_unknown() -> None:
    one = planned("keyed", listed, key_fn=lambda x: 4)
    needed = r"AsksForPlans cannot .*Plan.*only a call of .*keyed makes.*list the configs.*search='surrogate'"
    with quarantune.settings(search=AsksForPlans()), pytest.raises(ValueError, match=needed):
        one.tune(X)
    with quarantune.settings(search="random", max_trials=2):
        (found,) = one.tune(X).kernels
    assert [trial.outcome for trial in found.trials] == ["ok"] * 2


@pytest.mark.parametrize(("jitted", "isolation"), [(True, "process"), (False, "none")])
def test_a_users_search_gets_objects_that_one_call_makes(jitted: bool, isolation: str) -> None:
    """The kernel's key does not describe its calls; its configs are the ones this process has seen."""
    one = planned("seen_here", listed, key_fn=lambda x: 4)
    whole = quarantune.contextual_autotune(rep=1, name=f"in_{isolation}")(
        jax.jit(one.__wrapped__) if jitted else one.__wrapped__
    )
    with isolated(isolation), quarantune.settings(search=(search := AsksForPlans())):
        (found,) = whole.tune(X).kernels
    assert {plan.type for plan in search.told} == {4, 5}
    assert isinstance(found.config["ms"], Plan)


@quarantune.contextual_autotune(rep=1)
def of_this_module(x: Any) -> Any:
    return 2 * x


def test_a_modules_contextual_function_is_pickled_by_name() -> None:
    for pickler in (pickle, cloudpickle):
        assert pickler.loads(pickler.dumps(of_this_module)) is of_this_module
    assert copy.copy(of_this_module) is copy.deepcopy(of_this_module) is of_this_module


AGAIN = [copy.copy, copy.deepcopy, lambda function: pickle.loads(cloudpickle.dumps(function))]


@pytest.mark.parametrize("again", AGAIN)
def test_a_closure_tuned_in_context_can_be_copied_and_sent(again: Callable[[Any], Any]) -> None:
    factor = 3.0
    for wrap in (lambda fn: fn, jax.jit):
        travelled = again(quarantune.contextual_autotune(wrap(lambda x: x * factor), name="copied", rep=1))
        assert (type(travelled), travelled.name) == (quarantune.Contextual, "copied")
        np.testing.assert_array_equal(travelled.default(X), X * 3)


class Layer:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @quarantune.contextual_autotune(rep=1)
    def scaled(self, x: Any) -> Any:
        return x * self.factor


@pytest.mark.parametrize("again", AGAIN)
def test_a_method_tuned_in_context_can_be_copied_and_sent(again: Callable[[Any], Any]) -> None:
    method = again(Layer(3.0).scaled)
    assert method.__name__ == "scaled"
    np.testing.assert_array_equal(method.default(X), X * 3)


def test_any_pickler_keeps_a_contextual_functions_file() -> None:
    def plain(x: Any) -> Any:
        return (lambda y: x + y)(x)

    for fn in (plain, jax.jit(plain)):
        travelled = cloudpickle.loads(cloudpickle.dumps(quarantune.contextual_autotune(fn, name="travelled")))
        code = inspect.unwrap(travelled).__code__
        inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        assert [each.co_filename for each in (code, *inner)] == [__file__] * 2
        assert travelled.name == "travelled"
        np.testing.assert_array_equal(travelled.default(X + 1), 2 * (X + 1))


@pytest.mark.parametrize("deep", [200, 100_000])
def test_a_deeply_nested_report_of_a_runner_is_refused(deep: int) -> None:
    config = f'{{"n": {"[" * deep + "]" * deep}}}'
    with pytest.raises(ValueError, match=r".+"):
        assignment.read_report(f'[["kernel", "{{}}", [{config}], {{}}]]'.encode())
