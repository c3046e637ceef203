"""The winner is right and the fastest: what is wrong cannot win, what is slow cannot, and what is level is told."""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import functools
import io
import itertools
import json
import logging
import os
import random
import re
import socket
import statistics
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from aftermath import nothing_is_left, quiet_place, running_templates  # noqa: F401
from helpers import SweepWatch, ends, everywhere, isolated, python
from jax.experimental.compilation_cache import compilation_cache

import quarantune
from quarantune import Outcome, Trial
from quarantune.calls import given_inputs
from quarantune.jax_internals.other_processes import compilation_cache_in_memory, executable_parts
from quarantune.measure import finals
from quarantune.sandbox import spool, template
from quarantune.sweep.request import Swept
from quarantune.transport import payload, programs
from quarantune.transport.program_text import ProgramText
from quarantune.tuning.reuse import CompilationSeeds
from quarantune.values.configs import format_config
from quarantune.values.options import SUPPLIES, Tolerance
from quarantune.worker.arguments import BenchOptions
from quarantune.worker.bench import Bench
from quarantune.worker.compiling import compile_here

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.linspace(-1, 1, 1000, dtype=np.float32)
SOON = {"warmup": 0, "rep": 3}


class Notes:
    """A file in which workers note what they do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def add(self, *words: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            print(*words, file=file)

    def lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "notes")


@pytest.fixture
def findings(sweep_watch: SweepWatch) -> list[Swept]:
    """Notes what every sweep found out."""
    done: list[Swept] = []
    sweep_watch.on_end.append(done.append)
    return done


@contextlib.contextmanager
def here() -> Iterator[None]:
    """Runs configs in this process, where it is all the same to the test: it is quicker."""
    with quarantune.settings(isolation="none"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def after(turns: int, x: Any) -> Any:
    """Returns x, after so many turns of work."""
    worked = jax.lax.fori_loop(0, turns, lambda _, y: jnp.sin(y), x)
    return x + 0 * worked


_numbers = itertools.count()


def tuned(body: Callable[[Any, Any], Any], configs: list[Any], *, default: Any = None, **options: Any) -> Any:
    """Returns a function of x that is tuned over what `body` gets as its second argument."""

    space = [{"do": config} for config in configs]

    # Most of these functions have no defaults that work, or configs that are meant to differ.
    @quarantune.autotune(space, **{**SOON, "name": f"kernel-{next(_numbers)}", "ref_fn": None, **options})
    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(x: Any, do: Any = default) -> Any:
        return body(x, do)

    return kernel


host = np.asarray
"""Copies a worker's array before a check looks at it, because JAX would compile every operation of the check."""


def by_config(trials: tuple[Trial, ...]) -> dict[Any, Trial]:
    return {trial.config["do"]: trial for trial in trials}


@everywhere
def test_a_caller_with_jit_disabled_still_gets_a_winner(isolation: str) -> None:
    kernel = tuned(lambda x, do: x * do, [2], ref_fn=lambda x: 2 * x)
    with isolated(isolation), jax.disable_jit():
        np.testing.assert_array_equal(kernel(X), 2 * X)
    assert kernel.lookup(X) == {"do": 2}


# --- the reference ------------------------------------------------------------------------------------------


def double_or_not(x: Any, do: tuple[int, str]) -> Any:
    """Doubles x after so many turns, but for what the config gets wrong; the wrong ones are the fastest."""
    turns, slip = do
    doubled = 2 * after(turns, x)
    match slip:
        case "off":
            return {"doubled": doubled + 1, "parts": (x, jnp.nan * x[:2])}
        case "one block":
            return {"doubled": doubled.at[:128].set(0), "parts": (x, jnp.nan * x[:2])}
        case "nan":
            return {"doubled": doubled.at[7].set(jnp.nan), "parts": (x.at[:500].set(jnp.nan), jnp.nan * x[:2])}
        case "dtype":
            return {"doubled": doubled.astype(jnp.int32), "parts": (x, jnp.nan * x[:2])}
        case "structure":
            return {"doubled": doubled}
    return {"doubled": doubled, "parts": (x, jnp.nan * x[:2])}


SLIPS = {
    "off": r"1000 of 1000 elements \(100%\) differ.*worst is at \[\d+\] of output\['doubled'\]: got \S+, expected \S+",
    "one block": r"12\d of 1000 elements \(12\.\d%\) differ.*worst is at \[0\] of output\['doubled'\].*expected -2.0",
    "nan": r"1 of 1000 elements \(0.1%\) differ.*at \[7\] of output\['doubled'\]: got nan, expected -1.97",
    "dtype": r"output\['doubled'\] is int32\[1000\], expected float32\[1000\]",
    "structure": r"structure of output differs",
}


@everywhere
def test_if_the_fastest_third_is_wrong_the_winner_is_still_right(isolation: str, notes: Notes) -> None:
    def doubled(x: Any) -> Any:
        notes.add("reference")
        return {"doubled": 2 * x, "parts": (x, jnp.full(2, jnp.nan))}

    right = [(turns, "") for turns in (8000, 4000, 20, 10)]
    kernel = tuned(double_or_not, [*right[:2], *((1, slip) for slip in SLIPS), *right[2:]], ref_fn=doubled)
    with isolated(isolation):
        result = kernel.tune(X)
    trials = by_config(result.trials)
    for slip, told in SLIPS.items():
        wrong = trials[1, slip]
        assert (wrong.outcome, wrong.phase, wrong.time_ms) == (Outcome.WRONG, "check", None)
        assert re.match(told, wrong.message) or re.search(told, wrong.message), wrong.message
    assert ends(tuple(trials[config] for config in right)) == ["ok"] * 4
    assert result.best_config["do"] in right[-2:]
    assert notes.lines() == ["reference"]
    np.testing.assert_array_equal(kernel(X)["doubled"], 2 * X)


@pytest.mark.slow
def test_how_far_results_may_be_off_is_the_authors_word() -> None:
    def off(x: Any, do: tuple[float, int]) -> Any:
        share, count = do
        return jnp.where(jnp.arange(1000) < count, x + share, x)

    configs = [(0.0, 0), (0.005, 1000), (0.5, 9), (0.5, 300)]

    def judged(**tolerance: float) -> list[str]:
        with here():
            return ends(tuned(off, configs, ref_fn=lambda x: x, **tolerance).tune(X).trials)

    assert judged() == ["ok", "wrong", "wrong", "wrong"]
    assert judged(rtol=1e-2) == judged(atol=1e-2) == ["ok", "ok", "ok", "wrong"]
    assert judged(rtol=1e-4, atol=1e-4) == ["ok", "wrong", "ok", "wrong"]
    assert judged(rtol=1.0, atol=1.0) == ["ok"] * 4
    assert judged(max_mismatched_ratio=0.5) == ["ok"] * 4
    assert judged(max_mismatched_ratio=0) == ["ok", "ok", "wrong", "wrong"]


def boom(x: Any) -> Any:
    raise ArithmeticError("there is no reference today")


def crash(x: Any) -> Any:
    ctypes.memset(0, 1, 1)


def vanish(x: Any) -> Any:
    os._exit(0)


def hang(x: Any) -> Any:
    ctypes.PyDLL(None).pause()


def noting(notes: Notes) -> Callable[[Any, int], Any]:
    def body(x: Any, do: int) -> Any:
        notes.add("config", do)
        return x + do

    return body


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize(
    ("ref_fn", "told"),
    [
        (boom, "error: ArithmeticError: there is no reference today"),
        (crash, "crashed: .*SIGSEGV"),
        (vanish, "crashed: .*code 0 without a result"),
        pytest.param(hang, "timeout: it took longer than 3 s", marks=pytest.mark.slow),
    ],
)
def test_a_failing_reference_is_the_callers_error_and_nothing_runs(ref_fn: Any, told: str, notes: Notes) -> None:
    kernel = tuned(noting(notes), [1, 2], ref_fn=ref_fn)
    template.shared()
    started = time.monotonic()
    haste = {"timeout": 1.5, "compile_timeout": 1.5} if ref_fn is hang else {}
    with nothing_is_left(), quarantune.settings(**haste):
        with pytest.raises(quarantune.ReferenceFailedError, match=f"ref_fn failed, so no config can be judged: {told}"):
            kernel.tune(X)
        assert kernel.lookup(X) is None
    assert time.monotonic() - started < 100
    assert notes.lines() == []


@pytest.mark.usefixtures("no_process")
def test_a_reference_that_raises_in_process_is_the_callers_error_too(notes: Notes) -> None:
    kernel = tuned(noting(notes), [1, 2], ref_fn=boom)
    with isolated("none"), pytest.raises(quarantune.ReferenceFailedError, match="ArithmeticError: there is no ref"):
        kernel.tune(X)
    assert notes.lines() == []


@everywhere
def test_a_reference_that_forgets_to_return_lets_nothing_pass(isolation: str) -> None:
    def forgetful(x: Any) -> None:
        jnp.square(x)

    with isolated(isolation), pytest.raises(quarantune.TuningFailedError, match=r"ref_fn returned None.* lack a "):
        tuned(lambda x, do: x * do, [1, 2], ref_fn=forgetful).tune(X)
    with isolated(isolation):
        assert ends(tuned(lambda x, do: None, [1, 2], ref_fn=forgetful).tune(X).trials) == ["ok"] * 2


# --- the author's own check ---------------------------------------------------------------------------------


def choosy(output: Any, expected: Any, x: Any) -> Any:
    assert expected is None, "there is no reference"
    first = float(host(output)[0]) + 1
    assert (host(x) == X).all()
    if first == 3:
        raise ValueError("three is right out")
    return None if first == 4 else first != 2


@everywhere
def test_a_check_without_a_reference_rejects_wrong_results(isolation: str) -> None:
    kernel = tuned(lambda x, do: x + do, [1, 2, 3, 4], check_fn=choosy)
    with isolated(isolation):
        trials = kernel.tune(X).trials
    assert ends(trials) == ["ok", "wrong", "wrong", "ok"]
    assert [trial.message for trial in trials[1:3]] == [
        "check_fn returned False",
        "check_fn raised ValueError: three is right out",
    ]


@everywhere
def test_a_check_that_fails_in_a_callback_is_told_without_the_frames_of_it(isolation: str) -> None:
    def calls_back(output: Any, expected: Any, x: Any) -> None:
        jax.block_until_ready(jax.pure_callback(boom, output, output))

    kernel = tuned(lambda x, do: x + do, [1], check_fn=calls_back)
    with isolated(isolation), pytest.raises(quarantune.TuningFailedError) as failed:
        kernel.tune(X)
    (trial,) = failed.value.trials
    assert re.match(r"check_fn raised .*ArithmeticError: there is no ref", trial.message)
    assert ", line " not in trial.message


@everywhere
def test_a_check_that_says_true_or_nothing_beats_the_reference(isolation: str) -> None:
    def lenient(output: Any, expected: Any, x: Any) -> Any:
        assert (host(expected) == host(x)).all()
        return {1.0: True, 2.0: None}.get(float(host(output)[0] - host(expected)[0]), False)

    kernel = tuned(lambda x, do: x + do, [0, 1, 2], ref_fn=lambda x: x, check_fn=lenient)
    with isolated(isolation):
        assert ends(kernel.tune(X).trials) == ["wrong", "ok", "ok"]


# --- gradients ----------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def squared(x: Any, factor: float) -> Any:
    return x * x


squared.defvjp(lambda x, factor: (x * x, x), lambda factor, x, g: (factor * x * g,))


@pytest.mark.slow
@everywhere
def test_check_grad_finds_a_wrong_gradient_behind_a_right_output(isolation: str) -> None:
    configs = [2.0, 3.0, 2.00001]
    with here():
        unchecked = tuned(squared, configs, default=2.0, ref_fn=jnp.square).tune(X)
    with isolated(isolation):
        checked = tuned(squared, configs, default=2.0, ref_fn=jnp.square, check_grad=True).tune(X)
    assert ends(unchecked.trials) == ["ok"] * 3
    assert ends(checked.trials) == ["ok", "wrong", "ok"]
    told = checked.trials[1].message
    assert re.match(r"its gradients differ: \d+ of 1000 elements.*\['args\[0\]'\]: got \S+, expected \S+", told), told


# --- slow and level -----------------------------------------------------------------------------------------


def test_what_its_first_samples_rule_out_is_slow_is_told_and_cannot_win(findings: list[Swept]) -> None:
    # So much slower that nothing on a busy machine disturbs the faster one as much.
    result = tuned(lambda x, do: after(do, x), [20, 100_000], rep=20).tune(X)
    fast, slow = result.trials
    assert (fast.outcome, slow.outcome) == (Outcome.OK, Outcome.SLOW)
    assert 1 <= len(slow.samples_ms) <= 20
    assert re.search(r"stopped.*, because another config is clearly faster", slow.message)
    assert slow.time_ms is not None
    assert slow.time_ms <= min(slow.samples_ms), "it is a bound"
    assert result.best_config == fast.config
    assert slow.config not in result.tie
    # On a busy machine it may get a second look, which changes nothing.
    assert findings[0].final == finals.Final() or len(slow.samples_ms) < 4


def test_samples_are_kept_raw_with_the_clock_that_took_them() -> None:
    (only,) = tuned(lambda x, do: x + do, [1], rep=7).tune(X).trials
    assert only.clock == "wall"
    assert 3 <= len(only.samples_ms) <= 7
    assert len(set(only.samples_ms)) > 1
    assert only.time_ms == statistics.median(only.samples_ms)
    with here():
        assert tuned(lambda x, do: x + do, [2]).tune(X).trials[0].clock == "wall"


@everywhere
def test_finalists_are_compared_again_and_what_the_final_says_counts(isolation: str, findings: list[Swept]) -> None:
    # A busy machine may rule out all but one of them, and one needs no final.
    for _ in range(5):
        with isolated(isolation):
            result = tuned(lambda x, do: after(do, x), [300, 301, 302, 303, 304], rep=3).tune(X)
        if (swept := findings[-1]).final.rounds_ms:
            break
    assert 2 <= len(swept.final.rounds_ms) <= finals.MOST_FINALISTS
    for index, rounds_ms in swept.final.rounds_ms.items():
        if result.trials[index].outcome is Outcome.SLOW:  # a second look that confirmed the first
            continue
        assert result.trials[index].samples_ms == tuple(rounds_ms)
        assert result.trials[index].time_ms == statistics.median(rounds_ms)
    for index in set(range(5)) - set(swept.final.rounds_ms):
        assert len(result.trials[index].samples_ms) <= 3
    contenders = [result.trials[index].config for index in swept.final.rounds_ms]
    assert result.best_config in contenders
    assert all(config in contenders for config in result.tie)
    assert result.best_config not in result.tie


@pytest.mark.parametrize(("default", "winner"), [(3, 3), (9, 1)], ids=["its default", "the first"])
def test_among_ties_the_default_wins_or_else_the_first_config(default: int, winner: int) -> None:
    result = tuned(lambda x, do: x + 1, [1, 2, 3], default=default).tune(X)
    assert result.best_config == {"do": winner}
    assert result.tie == tuple({"do": do} for do in (1, 2, 3) if do != winner)


def test_equals_win_together_against_what_is_slower() -> None:
    result = tuned(lambda x, do: after(3000 if do < 2 else 100, x), [0, 1, 2, 3, 4], default=4).tune(X)
    assert result.best_config == {"do": 4}
    assert [config["do"] for config in result.tie] == [2, 3]
    assert len({trial.samples_ms for trial in result.trials[2:]}) == 1


# --- one program --------------------------------------------------------------------------------------------


def test_configs_that_lower_to_one_program_are_checked_and_measured_once(notes: Notes) -> None:
    def check(output: Any, expected: Any, x: Any) -> bool:
        added = float(host(output)[0] - host(x)[0])
        notes.add(added)
        return added < 2

    trials = tuned(lambda x, do: x + do // 2, [0, 1, 2, 3, 4, 5], check_fn=check).tune(X).trials
    assert ends(trials) == ["ok", "ok", "ok", "ok", "wrong", "wrong"]
    assert sorted(set(notes.lines())) == ["0.0", "1.0", "2.0"]
    assert len(notes.lines()) < 6, "a busy machine may have one of them measured again"
    for pair in zip(trials[::2], trials[1::2], strict=True):
        ran, twin = sorted(pair, key=lambda trial: trial.message.startswith("the same"))
        assert not ran.message.startswith("the same")
        same = f"the same program as {format_config(ran.config)}"
        assert twin.message == ": ".join(filter(None, (same, ran.message)))
        assert ran.samples_ms == twin.samples_ms


def test_programs_that_call_back_into_python_are_never_taken_for_one(notes: Notes) -> None:
    def called(x: Any, do: int) -> Any:
        def callback(x: Any) -> Any:
            notes.add(do)
            return np.asarray(x) + do

        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    trials = (
        tuned(called, [1, 2, 3], check_fn=lambda output, _, x: bool(host(output)[0] - host(x)[0] != 2)).tune(X).trials
    )
    assert ends(trials) == ["ok", "wrong", "ok"]
    assert set(notes.lines()) == {"1", "2", "3", "None"}, "the defaults are called, and fail"
    assert not any("same program" in trial.message for trial in trials)


@pytest.mark.parametrize("dos", [["x", "y"], ["y", "x"]])
def test_programs_that_take_different_arguments_are_never_taken_for_one(dos: list[str]) -> None:
    # Arguments that a program has no use for are dropped, and the rest numbered anew: the text is the same for both.
    def doubled(x: Any, y: Any, do: str = "") -> Any:
        return 2 * (x if do == "x" else y)

    tuned = quarantune.autotune({"do": dos}, ref_fn=lambda x, y: 2 * x, **SOON)(jax.jit(doubled, static_argnames="do"))
    trials = tuned.tune(X, X + 1).trials
    assert {trial.config["do"]: trial.outcome.value for trial in trials} == {"x": "ok", "y": "wrong"}


def test_programs_with_different_output_structures_are_never_merged() -> None:
    body = {"tuple": lambda x: (x * 2,), "list": lambda x: [x * 2]}
    trials = tuned(lambda x, do: body[do](x), ["tuple", "list"], ref_fn=lambda x: (x * 2,)).tune(X).trials
    assert ends(trials) == ["ok", "wrong"]


@pytest.mark.slow
def test_programs_with_constants_for_arguments_are_never_merged(tmp_path: Path) -> None:
    script = tmp_path / "constants.py"
    script.write_text(
        """
import jax, numpy as np, quarantune

def added(x, do=1):
    return x + do * np.arange(x.size, dtype=x.dtype)

tuned = quarantune.autotune({"do": [1, 2]}, ref_fn=lambda x: added(x), rep=1)(jax.jit(added, static_argnames="do"))
x = np.ones(100, np.float32)
one, two = (tuned.__wrapped__.lower(x, do=do).as_text() for do in (1, 2))
print(one == two, *(trial.outcome.value for trial in tuned.tune(x).trials), tuned(x)[99])
""",
        encoding="utf-8",
    )
    # JAX reads this option as it is imported.
    said = python(script, JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS="1")
    assert said.split() == ["True", "ok", "wrong", "100.0"]


@pytest.fixture
def cache_events() -> Iterator[list[str]]:
    """What this process's JAX asks compilation caches for, and gets."""
    heard: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event.startswith("/jax/compilation_cache/cache_"):
            heard.append(event.rpartition("/")[2])

    jax.monitoring.register_event_listener(listen)
    yield heard
    jax.monitoring.unregister_event_listener(listen)


# The default wins a tie, whichever of the three ran for all.
@pytest.mark.parametrize(
    ("default", "has_own_cache", "is_committed"),
    [(1, False, True), (2, True, True), (3, False, False), (3, True, False)],
)
def test_the_first_call_after_a_sweep_compiles_nothing(
    default: int, has_own_cache: bool, is_committed: bool, cache_events: list[str], tmp_path: Path
) -> None:
    x = jax.device_put(X, jax.local_devices()[0]) if is_committed else X
    directory = tmp_path / "compiled"
    if has_own_cache:
        jax.config.update("jax_compilation_cache_dir", str(directory))
    try:
        kernel = tuned(lambda x, do: x + do // 10, [1, 2, 3], default=default)
        result = kernel.tune(x)
        assert result.best_config == {"do": default}
        assert not cache_events, "the sweep itself compiles nothing here"
        np.testing.assert_array_equal(kernel(x), x)
        assert cache_events == ["cache_hits"]
        assert len(list(directory.glob("jit_kernel-*"))) == has_own_cache
    finally:
        if has_own_cache:
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("do", [1, 2])
def test_a_program_that_was_compiled_without_its_device_is_found_by_its_text(
    is_committed: bool, do: int, cache_events: list[str]
) -> None:
    def scaled(x: Any, y: Any, do: int) -> Any:
        return {"sum": x @ y + do}

    there, here = (jax.jit(scaled, static_argnames=["do"]) for _ in range(2))
    placed = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    traced = there.trace(placed, placed, do=1)
    lowered = traced.lower()
    identity = programs.identity(lowered, lowered.as_text(), ProgramText(traced.jaxpr), {})
    executable = executable_parts(lowered.compile()).program
    x = np.eye(4, dtype=np.float32)
    arrays = [jax.device_put(x, jax.devices()[0]) if is_committed else jnp.asarray(x), jnp.asarray(x)]
    seeds = CompilationSeeds()
    seeds.add({identity: executable})
    with seeds.in_use(here, {"do": do}, tuple(arrays), {}):
        np.testing.assert_array_equal(here(*arrays, do=do)["sum"], x + do)
    assert cache_events == ["cache_hits" if do == 1 else "cache_misses"], "only the same program is used"


def test_a_program_that_jax_has_the_same_key_for_is_not_lowered_to_be_found(compiles: list[str]) -> None:
    def shifted() -> Any:
        def shift(x: Any) -> Any:
            return x + 7

        return jax.jit(shift)

    with compilation_cache_in_memory({}) as cache:
        traced = shifted().trace(X)
        lowered = traced.lower()
        lowered.compile()
    identity = programs.identity(lowered, lowered.as_text(), ProgramText(traced.jaxpr), {})
    seeds, here = CompilationSeeds(), shifted()
    seeds.add({**cache.programs, str(identity): b"is not looked at"})
    compiles.clear()
    with seeds.in_use(here, {}, (X,), {}):
        np.testing.assert_array_equal(here(X), X + 7)
    events = [event.rpartition("/")[2] for event in compiles]
    assert events.count("jaxpr_to_mlir_module_duration") == 1
    assert "compile_time_saved_sec" in events


@pytest.mark.parametrize("default", [1, 2, 3])
def test_a_saved_winner_is_never_traced_whichever_of_its_twins_ran(default: int, notes: Notes, tmp_path: Path) -> None:
    def noting(x: Any, do: int) -> Any:
        notes.add(do)
        return x + do // 10

    result = tuned(noting, [1, 2, 3], default=default).tune(X)
    assert result.best_config == {"do": default}
    result.save(tmp_path / "best")
    traced = notes.lines()
    np.testing.assert_array_equal(quarantune.TuningResult.load(tmp_path / "best", trusted=True).fn(X), X)
    assert notes.lines() == traced


# --- trouble in the final -----------------------------------------------------------------------------------


def called_back(run: Callable[[Any], None]) -> Callable[[Any, Any], Any]:
    """Returns a body that adds one by way of Python, where `run` is called with the config first."""

    def body(x: Any, do: Any) -> Any:
        def callback(x: Any) -> Any:
            run(do)
            time.sleep(0.05)  # what the configs have in common, so that all are finalists
            return np.asarray(x) + 1

        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return body


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize("mood", ["crash", "raise"])
def test_a_finalist_that_fails_only_in_the_final_breaks_no_sweep(
    mood: str, notes: Notes, caplog: pytest.LogCaptureFixture, findings: list[Swept]
) -> None:
    def fails_in_its_second_process(do: str) -> None:
        notes.add(do, os.getpid())
        if len({line for line in notes.lines() if line.startswith(do)}) > 1:
            if do == "crash":
                ctypes.memset(0, 1, 1)
            if do == "raise":
                raise ArithmeticError("not again")

    kernel = tuned(called_back(fails_in_its_second_process), ["good", mood])
    template.shared()
    with nothing_is_left(), caplog.at_level(logging.WARNING, "quarantune"):
        result = kernel.tune(X)
    assert ends(result.trials) == ["ok", "ok"]
    assert findings[0].final == finals.Final()
    assert "could not be compared" in caplog.text
    assert len({line for line in notes.lines() if line.startswith(mood)}) > 1
    fastest = min(result.trials, key=lambda trial: trial.merit or 0)
    assert result.best_config == fastest.config
    assert len(fastest.samples_ms) <= 3


def test_a_final_that_fails_in_process_breaks_no_sweep_either(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[int] = []

    def fails_in_the_final(do: int) -> None:
        if turns[-1:] == [do]:
            return
        turns.append(do)
        if turns.count(do) > 1:  # each config has its trial in one turn, so another is in the final
            raise ArithmeticError("not again")

    kernel = tuned(called_back(fails_in_the_final), [1, 2])
    with here(), caplog.at_level(logging.WARNING, "quarantune"):
        result = kernel.tune(X)
    assert ends(result.trials) == ["ok", "ok"]
    assert len(turns) > len(set(turns))
    assert "could not be compared" in caplog.text


# --- where arguments come from ------------------------------------------------------------------------------

SEVENS = np.full(3, 7, np.float32)
EIGHTS = np.full(3, 8, np.float32)


def given(*args: Any) -> Any:
    return given_inputs.arguments(lambda *args: args, args, {}, "auto")[0][0]


def test_blocks_of_inputs_nest_and_end_also_by_an_exception() -> None:
    assert given(X[:3]) is not SEVENS
    with quarantune.set_autotune_inputs(SEVENS):
        with contextlib.suppress(ArithmeticError), quarantune.set_autotune_inputs(EIGHTS):
            assert given(X[:3]) is EIGHTS
            raise ArithmeticError
        assert given(X[:3]) is SEVENS
    np.testing.assert_array_equal(given(X[:3]), X[:3])


def test_nested_blocks_of_inputs_end_innermost_first() -> None:
    sevens, eights = quarantune.set_autotune_inputs(SEVENS), quarantune.set_autotune_inputs(EIGHTS)
    with sevens, eights:
        with sevens:
            assert given(X[:3]) is SEVENS
        assert given(X[:3]) is EIGHTS
    assert given(X[:3]) is not SEVENS


def test_a_block_of_inputs_is_that_of_its_own_thread() -> None:
    seen: list[Any] = []
    with quarantune.set_autotune_inputs(SEVENS):
        thread = threading.Thread(target=lambda: seen.append(given(X[:3])))
        thread.start()
        thread.join()
        assert given(X[:3]) is SEVENS
    np.testing.assert_array_equal(seen[0], X[:3])


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("inputs_given", "told"),
    [
        ((X[:2],), r"float32\[2\] where the call has an array of float32\[3\]: make them alike"),
        ((X[:3].astype(np.int32),), r"int32\[3\] where the call has an array of float32\[3\]"),
        ((3.0,), r"a Python float where the call has an array of float32\[3\]"),
        ((X[:3], X[:3]), r"gives for 'do' array\(.* where the call has None"),
        ((X[:3], 1, 2), "gives arguments that the function does not take: too many positional"),
        ((), "gives arguments that cannot be compared with the call's: missing a required argument"),
        (({"x": X[:3]},), r"\['x'\].* where the call has an array of float32\[3\]"),
    ],
    ids=["shape", "dtype", "no array", "a tunable", "too many", "none", "a dict"],
)
def test_inputs_unlike_the_call_are_refused(inputs_given: tuple[Any, ...], told: str) -> None:
    kernel = tuned(lambda x, do: x * do, [1, 2])
    with quarantune.set_autotune_inputs(*inputs_given), pytest.raises(ValueError, match=told):
        kernel(X[:3])
    with pytest.raises(ValueError, match=told.replace("the call has", ".*")):
        jax.jit(tuned(lambda x, do: x * do, [1, 2], supply=lambda _: inputs_given))(X[:3])


@pytest.mark.usefixtures("no_process")
def test_inputs_of_another_mode_are_refused() -> None:
    @quarantune.autotune([{"do": 1}, {"do": 2}])
    @functools.partial(jax.jit, static_argnames=["do", "mode"])
    def kernel(x: Any, mode: str, do: int = 1) -> Any:
        return x * do

    with quarantune.set_autotune_inputs(SEVENS, "fast"), pytest.raises(ValueError, match=r"'fast' where .* 'exact'"):
        kernel(SEVENS, "exact")


def spelt(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return given_inputs.arguments(fn, args, kwargs, "auto")


@functools.partial(jax.jit, static_argnames=["n", "dtype", "do"])
def static_or_not(x: Any, n: Any = 4, scale: Any = 1.0, *, dtype: Any = None, do: int = 1) -> Any:
    return x * n


def test_inputs_with_other_static_values_are_refused() -> None:
    with quarantune.set_autotune_inputs(SEVENS, 4, 5.0, dtype=np.float32):
        for n in (1000, True, 4.0):
            with pytest.raises(ValueError, match=rf"for 'n' 4 where the call has {n}: make them alike"):
                spelt(static_or_not, EIGHTS, n, 1.0, dtype=np.float32)
        with pytest.raises(ValueError, match=r"for 'dtype' .*float32.* where the call has .*int32"):
            spelt(static_or_not, EIGHTS, 4, 1.0, dtype=np.int32)
        with pytest.raises(ValueError, match="for 'scale' a Python float where the call has a Python int"):
            spelt(static_or_not, EIGHTS, 4, 1, dtype=np.float32)
        for args, kwargs in [((4, 1.0), {}), ((), {"n": 4, "scale": 1.0}), ((4,), {"scale": 1.0})]:
            args_given, kwargs_given = spelt(static_or_not, EIGHTS, *args, **kwargs, dtype=np.float32)
            assert args_given[0] is SEVENS
            assert (args_given[1:], kwargs_given) == (
                tuple(5.0 if arg == 1.0 else arg for arg in args),
                {name: 5.0 if arg == 1.0 else arg for name, arg in kwargs.items()} | {"dtype": np.float32},
            )


def test_inputs_may_pass_arguments_in_another_way_than_the_call() -> None:
    with quarantune.set_autotune_inputs(SEVENS, n=4, do=1):
        assert spelt(static_or_not, EIGHTS) == ((SEVENS,), {})
        assert spelt(static_or_not, EIGHTS, 4) == ((SEVENS, 4), {})
        assert spelt(static_or_not, n=4, x=EIGHTS) == ((), {"n": 4, "x": SEVENS})
    with (
        quarantune.set_autotune_inputs(SEVENS, do=2),
        pytest.raises(ValueError, match="for 'do' 2 where the call has 1"),
    ):
        spelt(static_or_not, EIGHTS)


def test_inputs_of_a_plain_callable_count_by_value_but_for_arrays() -> None:
    def plain(x: Any, n: int, *rest: Any, do: int) -> None: ...

    with quarantune.set_autotune_inputs(n=4, x=SEVENS):
        assert spelt(plain, EIGHTS, 4) == ((SEVENS, 4), {})
        with pytest.raises(ValueError, match="for 'n' 4 where the call has 5"):
            spelt(plain, EIGHTS, 5)
    with quarantune.set_autotune_inputs(SEVENS, 4, SEVENS):
        assert spelt(plain, EIGHTS, 4, EIGHTS) == ((SEVENS, 4, SEVENS), {})
        with pytest.raises(ValueError, match="for 'rest'"):
            spelt(plain, EIGHTS, 4)


@pytest.mark.parametrize("like", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_inputs_are_as_weakly_typed_as_the_call(like: Callable[..., Any]) -> None:
    weak, strong = jnp.full(3, 7.0), jnp.full(3, 7, jnp.float32)
    assert (weak.weak_type, strong.weak_type) == (True, False)
    for ours, theirs in itertools.product((weak, strong, like(strong)), (weak, strong)):
        with quarantune.set_autotune_inputs([ours]):
            (((array,), *_), _) = spelt(static_or_not, [theirs])
            assert getattr(array, "weak_type", False) is theirs.weak_type
            np.testing.assert_array_equal(array, ours)


def sees(number: float) -> Callable[..., bool]:
    return lambda output, expected, x: bool((host(x) == number).all())


def test_a_blocks_inputs_replace_the_calls_own_also_inside_jit() -> None:
    with quarantune.set_autotune_inputs(SEVENS):
        concrete = tuned(lambda x, do: x * do, [2], check_fn=sees(7))
        np.testing.assert_array_equal(concrete(EIGHTS), 2 * EIGHTS)
        traced = tuned(lambda x, do: x * do, [3], check_fn=sees(7))
        np.testing.assert_array_equal(jax.jit(lambda x: traced(x) + 1)(EIGHTS), 3 * EIGHTS + 1)
    assert concrete.lookup(EIGHTS) == {"do": 2}


def test_a_supplier_is_called_once_and_only_without_concrete_arguments() -> None:
    asked: list[Any] = []

    def supplier(signature: Any) -> Any:
        asked.append(signature)
        (struct,) = signature
        return (jnp.full(struct.shape, 7, struct.dtype),)

    traced = tuned(lambda x, do: x * do, [2, 3], supply=supplier, check_fn=sees(7))
    jax.jit(traced).lower(EIGHTS)
    ((struct,),) = asked
    assert isinstance(struct, jax.ShapeDtypeStruct)
    assert (struct.shape, struct.dtype) == ((3,), np.float32)

    concrete = tuned(lambda x, do: x * do, [2, 3], supply=supplier, check_fn=sees(8))
    concrete(EIGHTS)
    assert len(asked) == 1


LOOKS_LIKE = {
    "auto": lambda x: x.max() > 1.5 and x.min() < -1.5,
    "uniform": lambda x: x.min() >= -1 and x.max() < 1 and x.std() > 0.1,
    "integer": lambda x: (x == np.round(x)).all() and x.std() > 0.1,
    "normal": lambda x: x.max() > 1.5 and x.min() < -1.5,
    "zeros": lambda x: (x == 0).all(),
    "ones": lambda x: (x == 1).all(),
}


@pytest.mark.parametrize("kind", SUPPLIES)
def test_every_kind_of_supply_runs(kind: str) -> None:
    looks_like = LOOKS_LIKE[kind]
    kernel = tuned(
        lambda x, do: x * do, [1], supply=kind, check_fn=lambda output, _, x: bool(looks_like(np.asarray(x)))
    )
    with here():
        assert jax.jit(kernel)(X).shape == X.shape


def test_integers_made_for_a_call_inside_jit_are_safe_as_indices(tmp_path: Path) -> None:
    def check(output: Any, expected: Any, table: Any, indices: Any) -> bool:
        return bool(np.isfinite(output).all() and (host(indices) >= 0).all() and len(np.unique(indices)) > 1)

    @quarantune.autotune([{"do": 1}], check_fn=check, **SOON)
    @functools.partial(jax.jit, static_argnames=["do"])
    def rows(table: Any, indices: Any, do: int = 1) -> Any:
        return do * table.at[indices].get(mode="fill", fill_value=jnp.nan)

    table, indices = jnp.ones((5, 4)), jnp.zeros((5, 100), jnp.int32)
    assert jax.jit(rows)(table, indices).shape == (5, 100, 4)


# --- pristine arguments -------------------------------------------------------------------------------------


@everywhere
def test_every_run_of_a_donating_config_gets_arguments_of_its_own(isolation: str) -> None:
    def check(output: Any, expected: Any, x: Any) -> None:
        np.testing.assert_array_equal(x, X)

    @quarantune.autotune([{"do": 1.0}, {"do": 2.0}], ref_fn=lambda x: x, check_fn=check, warmup=2, rep=6)
    @functools.partial(jax.jit, static_argnames=["do"], donate_argnames=["x"])
    def kernel(x: Any, do: float = 1.0) -> Any:
        return x * do

    x = jnp.asarray(X)
    with isolated(isolation):
        assert {trial.outcome for trial in kernel.tune(x).trials} <= {Outcome.OK, Outcome.SLOW}
    np.testing.assert_array_equal(x, X)  # and so does the caller


def bench_of(fn: Callable[..., Any], *args: Any, **judges: Any) -> tuple[Bench, int]:
    packed = payload.pack_call(fn, args, {}, judges)
    fd = spool.create("arrays", size_bytes=packed.call.spool_bytes)
    payload.write_arrays(packed, fd)
    options = BenchOptions(platform="cpu", warmup=2, rep=5, supply="auto", tolerance=Tolerance(0.0, 0.0, 0.0))
    return Bench(packed.call, arrays_fd=fd, options=options), fd


def test_a_plain_function_never_sees_its_earlier_writes_to_an_argument() -> None:
    seen: list[float] = []

    def scribble(x: Any, do: int) -> Any:
        seen.append(float(x[0]))
        x[:] = do
        return x

    def check(output: Any, expected: Any, x: Any) -> None:
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(output, np.full_like(X, 5))

    bench, fd = bench_of(scribble, X.copy(), check_fn=check)
    try:
        programs = [compile_here(bench, {"do": do}) for do in (5, 6)]
        assert bench.check(programs[0]).wrong is None
        assert len(bench.measure(programs[0], best_median_ms=None).samples_ms) >= 3
        assert all(1 <= len(rounds_ms) <= 5 for rounds_ms in bench.compare(programs)[:2])
    finally:
        os.close(fd)
    assert len(seen) > 10
    assert set(seen) == {-1.0}


here_and_there = pytest.mark.parametrize("isolation", ["process", "none"])


class Slots:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = [1]

    def __getstate__(self) -> Any:
        return None, {"items": self.items}


MUTABLES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [3, 1, 2], lambda it: it.sort() or it.append(0) or len(it)),
    "bytearray": (lambda: bytearray(b"ab"), lambda it: it.append(0) or len(it)),
    "array of Python's": (lambda: array.array("d", [1.0]), lambda it: it.append(0) or len(it)),
    "deque": (lambda: collections.deque([1]), lambda it: it.append(0) or len(it)),
    "set": (lambda: {1}, lambda it: it.add(len(it) + 9) or len(it)),
    "dict of lists": (lambda: {"a": [1]}, lambda it: it["a"].append(0) or len(it["a"])),
    "defaultdict": (lambda: collections.defaultdict(list), lambda it: it[len(it)].append(0) or len(it)),
    "object": (lambda: types.SimpleNamespace(items=[1]), lambda it: it.items.append(0) or len(it.items)),
    "object with slots": (Slots, lambda it: it.items.append(0) or len(it.items)),
    "object with an array": (lambda: types.SimpleNamespace(a=np.zeros(2)), lambda it: it.a.__iadd__(1).sum()),
    "array of objects": (lambda: np.array([[1], [2, 3]], object), lambda it: it[0].append(0) or len(it[0])),
    "masked array": (lambda: np.ma.masked_array([1.0], [False]), lambda it: it.__iadd__(1).sum()),
    "list with an array": (
        lambda: [np.zeros(2), [1]],
        lambda it: it[1].append(0) or (it[0].__iadd__(1).sum(), len(it[1])),
    ),
    "tuple of lists": (lambda: ([1], [2]), lambda it: it[0].append(0) or len(it[0])),
    "iterator": (lambda: types.SimpleNamespace(i=iter([1, 2])), lambda it: len(list(it.i))),
    "map": (lambda: types.SimpleNamespace(i=map(abs, [1, 2])), lambda it: len(list(it.i))),
    "stream": (lambda: io.StringIO("abc"), lambda it: it.read(1)),
    "random generator": (lambda: random.Random(1), lambda it: it.random()),
    "partial": (lambda: functools.partial(len, [1]), lambda it: it.args[0].append(0) or it()),
}


@here_and_there
def test_a_plain_function_never_sees_its_earlier_changes_of_any_kind(isolation: str) -> None:
    wanted = {name: use(make()) for name, (make, use) in MUTABLES.items()}

    def changes(first: Any, *, given: Any, do: int) -> Any:
        found = {name: use(given[name]) for name, (_, use) in MUTABLES.items()}
        if found != wanted or first.append(do) or len(first) > 1:
            raise ValueError(f"an earlier run has left {found} and {first}")
        return np.ones(2)

    def ref_fn(first: Any, *, given: Any) -> Any:
        return changes(first, given=given, do=0)

    first: list[int] = []
    given = {name: make() for name, (make, _) in MUTABLES.items()}
    with isolated(isolation):
        tuner = quarantune.AutoTuner(changes, [{"do": 1}, {"do": 2}], ref_fn=ref_fn, warmup=2, rep=3)
        trials = tuner.run(first, given=given).trials
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.SLOW}
    assert first == [], "the caller's own list has changed"
    assert {name: use(given[name]) for name, (_, use) in MUTABLES.items()} == wanted


@here_and_there
def test_an_argument_given_twice_is_one_object_in_each_run(isolation: str) -> None:
    def work(a: Any, b: Any, c: Any, nested: Any, do: int) -> Any:
        a[0] += 1
        c.append(a)
        assert b[0] == 1
        assert nested["c"][0] is b
        return np.ones(2)

    same, shared = np.zeros(2), list[Any]()
    with isolated(isolation):
        result = quarantune.AutoTuner(work, [{"do": 1}, {"do": 2}], **SOON).run(same, same, shared, {"c": shared})
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}
    assert (same[0], shared) == (0, [])


@here_and_there
def test_an_argument_that_is_pickled_by_its_name_is_the_one_of_its_module(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("module_of_one")
    exec("class Kind:\n    def __reduce__(self): return 'ONE'\n    __repr__ = __reduce__\nONE = Kind()", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def work(a: Any, given: Any, do: int) -> Any:
        assert given[0] is module.ONE
        return a

    with isolated(isolation):
        result = quarantune.AutoTuner(work, [{"do": 1}, {"do": 2}], **SOON).run(np.ones(2), [module.ONE])
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}


@here_and_there
def test_a_sort_in_place_is_timed_on_unsorted_data(isolation: str) -> None:
    def sort(data: list[int], how: str) -> Any:
        if how == "builtin":
            time.sleep(0.002)
            data.sort()
        for end in range(1, len(data)):
            value, place = data[end], end
            while place and data[place - 1] > value:
                data[place] = data[place - 1]
                place -= 1
            data[place] = value
        return np.asarray(data[:5])

    data = random.Random(0).sample(range(100_000), 700)
    with isolated(isolation):
        result = quarantune.AutoTuner(sort, {"how": ["insertion", "builtin"]}, ref_fn=None, **SOON).run(data)
    assert result.best_config == {"how": "builtin"}


class Mode:
    """It has no equality of its own, so a dict finds only the very object."""

    def __init__(self) -> None:
        self.notes = list[int]()


FAST = Mode()
FACTORS = {FAST: 2}


@here_and_there
@pytest.mark.parametrize("kind", ["static", "closure", "key", "method"])
def test_an_argument_that_the_function_refers_to_is_the_same_object_there(kind: str, isolation: str) -> None:
    fast = Mode()
    table = {fast: 2}

    def static(x: Any, mode: Any, do: int = 1) -> Any:
        return x * table[mode] + 0 * do

    def closure(x: Any, held: Any, notes: list[int], do: int = 1) -> Any:
        assert (held.mode is fast, notes) == (True, [])
        notes.append(do)
        return x * table[held.mode]

    def key(x: Any, given: Any, notes: list[int], do: int = 1) -> Any:
        assert (given is table, notes) == (False, [])
        notes.append(do)
        return x * given[fast]

    class Kernel:
        mode = fast

        def run(self, x: Any, held: Any, notes: list[int], do: int = 1) -> Any:
            assert held.mode is self.mode
            return closure(x, held, notes, do)

    held, notes = types.SimpleNamespace(mode=fast), list[int]()
    fn, args = {
        "static": (jax.jit(static, static_argnames=["mode", "do"]), (fast,)),
        "closure": (closure, (held, notes)),
        "key": (key, (table, notes)),
        "method": (Kernel().run, (held, notes)),
    }[kind]
    with isolated(isolation):
        trials = quarantune.AutoTuner(fn, [{"do": 1}, {"do": 2}], warmup=1, rep=2).run(X, *args).trials
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.SLOW}
    assert notes == []


def test_an_argument_that_a_module_holds_is_the_same_object_in_this_process() -> None:
    def looks_up(x: Any, mode: Any, notes: list[int], do: int = 1) -> Any:
        assert (mode is FAST, notes) == (True, [])
        notes.append(do)
        return x * FACTORS[mode]

    with isolated("none"):
        trials = quarantune.AutoTuner(looks_up, [{"do": 1}, {"do": 2}], warmup=1, rep=2).run(X, FAST, []).trials
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.SLOW}


@here_and_there
def test_an_argument_without_a_copy_is_refused_before_any_work(isolation: str) -> None:
    ran: list[int] = []
    template.close_shared()
    with quarantune.settings(isolation=isolation), socket.socket() as given:
        tuner = quarantune.AutoTuner(lambda held, do: ran.append(do), [{"do": 1}, {"do": 2}], name="refused", **SOON)
        with pytest.raises(
            TypeError, match=r"element 0 \(reached through argument 0\) is <socket\.socket.* cannot be copied"
        ):
            tuner.run([given])
    assert ran == []
    assert running_templates() == []


@pytest.mark.slow
def test_a_big_argument_is_in_memory_once_for_any_number_of_configs() -> None:
    big = np.zeros(16 << 20, np.uint8)
    kernel = tuned(lambda x, do: x[:8] + np.uint8(do), [1, 2, 3])
    kernel.tune(X)  # what is imported and set up once
    process, is_over = psutil.Process(), threading.Event()
    held: list[int] = []
    resident: list[int] = []

    def watch() -> None:
        while not is_over.wait(0.01):
            held.append(_held_in_nameless_files())
            resident.append(process.memory_info().rss)

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        trials = kernel.tune(big).trials
    finally:
        is_over.set()
        watcher.join()
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.SLOW}
    assert big.nbytes <= max(held) < 1.2 * big.nbytes
    assert max(resident) - before < 1.5 * big.nbytes


def _held_in_nameless_files() -> int:
    """Returns how many bytes this process's nameless files in memory take, each counted once."""
    files: dict[int, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:quarantune" in os.readlink(f"/proc/self/fd/{fd}"):
                status = os.stat(f"/proc/self/fd/{fd}")
                files[status.st_ino] = 512 * status.st_blocks
    return sum(files.values())


# --- the key ------------------------------------------------------------------------------------------------


def test_calls_of_one_bucket_share_one_sweep(sweeps: list[str], cache_dir: Path) -> None:
    kernel = tuned(lambda x, do: x * 2 + 0 * do, [1, 2], key_fn=lambda x: {"rows": max(16, x.shape[0])})
    for size in (3, 9, 16):
        np.testing.assert_array_equal(kernel(X[:size]), 2 * X[:size])
    np.testing.assert_array_equal(jax.jit(kernel)(X[:5]), 2 * X[:5])
    assert len(sweeps) == 1
    kernel(X[:17])
    assert len(sweeps) == 2
    (file,) = cache_dir.glob("*.json")
    assert '"rows":16' in json.dumps(json.loads(file.read_text()), separators=(",", ":")).replace("\\", "")


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("bucket", [{1, 2}, X, object(), float("nan")], ids=["set", "array", "object", "nan"])
def test_a_bucket_that_json_cannot_hold_is_refused_by_value(bucket: Any) -> None:
    kernel = tuned(lambda x, do: x * do, [1, 2], key_fn=lambda x: bucket)
    with pytest.raises(TypeError, match=r"(?s)key_fn returned .*, which JSON cannot hold"):
        kernel(X)


def test_what_was_judged_otherwise_is_a_miss(sweeps: list[str]) -> None:
    def variant(**options: Any) -> Any:
        return tuned(lambda x, do: x * do, [1, 2], **{"name": "judged", "ref_fn": lambda x: x, **options})

    with here():
        variant().tune(X)
    assert variant().lookup(X) == {"do": 1}
    assert variant(warmup=3, rep=2, timeout=9).lookup(X) == {"do": 1}
    for changed in (
        {"ref_fn": lambda x: x + 0},
        {"ref_fn": None},
        {"rtol": 0.5},
        {"atol": 0.5},
        {"max_mismatched_ratio": 0.5},
        {"check_fn": lambda output, expected, x: True},
        {"check_grad": True},
        {"supply": "ones"},
    ):
        assert variant(**changed).lookup(X) is None, changed
    assert len(sweeps) == 1


def test_a_failed_reference_is_no_result_to_remember(sweeps: list[str]) -> None:
    moods = iter([boom, lambda x: x, lambda x: x])
    kernel = tuned(lambda x, do: x * do, [1], ref_fn=lambda x: next(moods)(x))
    with here():
        with pytest.raises(quarantune.ReferenceFailedError):
            kernel(X)
        np.testing.assert_array_equal(kernel(X), X)
