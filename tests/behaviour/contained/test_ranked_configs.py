"""Sweeps that rank configs by a cheap compile compile few fully, remember cheap times, and contain misdeeds.

The route is for NVIDIA GPUs. Here the CPU takes it, and compiles the programs that rank configs like all others.
tests/system/test_compile_targets.py compiles cheaply for a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from deadlines import haste
from helpers import ends
from misdeeds import MISDEEDS

import quarantune
from quarantune.host.process import in_sandbox
from quarantune.sandbox.messages import Compile
from quarantune.scheduler.plan import ConfigSource
from quarantune.scheduler.routes import choosing
from quarantune.scheduler.routes.apart import ApartInTurns
from quarantune.scheduler.routes.base import Conditions
from quarantune.scheduler.routes.together import Together
from quarantune.scheduler.screening import Screening
from quarantune.scheduler.workers import Job
from quarantune.sweep import routes
from quarantune.values.trial import Trial

X = np.ones((256, 256), np.float32)
TURNS = [2, 8, 32, 64, 128, 256]
FULLY = {2, 8, 32, 256}
"""The three fastest and the defaults are compiled fully. The others take many times as long as the best."""


@dataclasses.dataclass
class Compiles:
    """The configs that workers got to compile, by the purpose of the compile."""

    cheaply: list[Any] = dataclasses.field(default_factory=list)
    fully: list[Any] = dataclasses.field(default_factory=list)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Compiles:
    """Makes sweeps on the CPU rank configs by a cheap compile, and notes the compiles."""
    noted = Compiles()

    class CheaplyInTurns(ApartInTurns):
        _ranks = True

        def _task(self, job: Job, *, last: bool) -> Compile:
            noted.cheaply.append(job.config)
            return dataclasses.replace(super()._task(job, last=last), is_cheap=True)

    class Fully(Together):
        def _task(self, job: Job, *, last: bool) -> Compile:
            noted.fully.append(job.config)
            return super()._task(job, last=last)

    def cheaply(given: Conditions, unfit: Any, *, count: int, is_closed: bool) -> CheaplyInTurns | None:
        return CheaplyInTurns.of(given, is_closed=is_closed) if given.ranks else None

    def screening(configs: Mapping[int, Any], cheap_ms: Mapping[int, float], **options: Any) -> Screening:
        assert all(ms > 0 for ms in cheap_ms.values())
        # A busy machine may time them in another order.
        ideal_ms = {index: float(configs[index].get("turns", 256)) for index in cheap_ms}
        return Screening(configs, ideal_ms, **options)

    monkeypatch.setattr(choosing, "cheaply", cheaply)
    if request.function is not test_misdeeds_of_ranked_configs_harm_no_other_config:
        monkeypatch.setattr(routes, "Screening", screening)
    monkeypatch.setattr(choosing, "Together", Fully)
    return noted


def work(x: Any, turns: int = 256, fault: float = 0.0) -> Any:
    """Takes longer with more turns. Its result is the same, unless it has a fault."""
    return x + fault + 0 * jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ x), x)


def tuned(space: Any, fn: Callable[..., Any] = work, **options: Any) -> Any:
    jitted = jax.jit(fn, static_argnames=["turns", "fault"])
    return quarantune.autotune(space, rep=3, **options)(jitted)


def turns_of(configs: Iterable[Any]) -> set[int]:
    return {config.get("turns", 256) for config in configs}


def test_only_configs_that_may_win_are_compiled_fully(compiles: Compiles) -> None:
    result = tuned({"turns": TURNS}).tune(X)
    assert result.best_config == {"turns": 2}
    assert turns_of(compiles.cheaply) == {*TURNS}
    assert turns_of(compiles.fully) == FULLY
    for trial in result.trials:
        assert trial.cheap_ms is not None
        assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
        if trial.config["turns"] in FULLY:
            assert trial.time_ms is not None
            assert not trial.is_ruled_out
        else:
            assert trial.is_ruled_out
            assert (trial.outcome, trial.phase) == ("slow", "measure")
            assert (trial.time_ms, trial.own_ms, trial.samples_ms, trial.figures) == (None, None, (), None)
            assert re.fullmatch(r"cheap compile: at least [0-9.]+ ms", trial.message)
    assert "cheap ms: the time of a cheaply compiled program" in result.table()
    assert re.search(r"slow \(measure\), 2 configs, for turns=\d+: cheap compile: at least", result.table())


@pytest.mark.slow
def test_full_fidelity_compiles_and_times_all(compiles: Compiles) -> None:
    result = tuned({"turns": TURNS}, fidelity="full").tune(X)
    assert compiles.cheaply == []
    assert all(trial.time_ms is not None and trial.cheap_ms is None for trial in result.trials)
    assert "cheap" not in result.table()
    with pytest.raises(ValueError, match="fidelity='half' is not valid: give 'auto' or 'full'"):
        tuned({"turns": TURNS}, fidelity="half")


@pytest.mark.slow
def test_an_objective_other_than_time_is_not_ranked_by_time(compiles: Compiles) -> None:
    tuned({"turns": TURNS[-3:]}, objective=lambda trial: -trial.time_ms).tune(X)
    assert compiles.cheaply == []


@pytest.mark.slow
def test_a_config_is_wrong_only_by_its_full_program(compiles: Compiles) -> None:
    space = [{"turns": turns, "fault": float(turns == 2)} for turns in TURNS]
    result = tuned(space, ref_fn=lambda x: x).tune(X)
    assert ends(result.trials[:2]) == ["wrong", "ok"]
    assert result.best_config == space[1]
    assert space[0] in compiles.fully


@pytest.mark.long
@pytest.mark.slow
def test_unlisted_defaults_are_compiled_fully(compiles: Compiles) -> None:
    result = tuned({"turns": TURNS[:-1]}).tune(X)
    assert result.default_time_ms is not None
    assert turns_of(compiles.fully) == FULLY


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["fully", pytest.param("cheaply", marks=pytest.mark.long)])
def test_a_config_fails_only_by_its_full_program(compiles: Compiles, fails: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def fail_once(x: Any, turns: int = 256, fault: float = 0.0) -> Any:
        if turns == 8:
            is_first = not seen.exists()
            seen.touch()
            if is_first == (fails == "cheaply"):
                raise ArithmeticError("not this time")
        return work(x, turns)

    result = tuned({"turns": TURNS}, fail_once).tune(X)
    trial = result.trials[1]
    assert trial.outcome in ({"ok", "slow"} if fails == "cheaply" else {"error"})
    assert (trial.cheap_ms is None) is (fails == "cheaply")
    assert result.best_config == {"turns": 2}


@pytest.mark.slow
def test_a_search_looks_at_cheap_times_first(compiles: Compiles) -> None:
    result = tuned({"turns": [1, 2, 4, 8, 16, 32, 4096, 8192]}, search="random", max_trials=5, seed=3).tune(X)
    tried = turns_of(trial.config for trial in result.trials)
    assert len(tried) == 5
    assert turns_of(compiles.cheaply) >= tried
    assert turns_of([result.best_config]) == {min(tried)}
    assert max(tried) not in turns_of(compiles.fully)


@pytest.mark.slow
def test_the_best_at_the_end_of_the_time_has_a_full_program(compiles: Compiles) -> None:
    result = tuned({"turns": TURNS}, search="random", time_budget=0.01).tune(X)
    assert result.time_ms is not None
    assert turns_of([result.best_config]) <= turns_of(compiles.fully)


@pytest.mark.slow
def test_a_config_that_was_ruled_out_may_win_a_shorter_list(compiles: Compiles) -> None:
    tuned({"turns": TURNS}).tune(X)
    assert turns_of(compiles.fully) == FULLY
    compiles.fully.clear()
    result = tuned({"turns": [64, 128, 256]}).tune(X, resume=True)
    assert result.best_config == {"turns": 64}
    assert turns_of(compiles.fully) >= {64, 128}
    assert result.trials[0].time_ms is not None


@pytest.mark.long
@pytest.mark.slow
def test_cheap_times_are_recalled_by_program(compiles: Compiles) -> None:
    """The edit changes no program: measured times are recalled, and configs are ruled out again."""
    first = tuned({"turns": TURNS}).tune(X)

    def edited(x: Any, turns: int = 256, fault: float = 0.0) -> Any:
        renamed = fault
        return x + renamed + 0 * jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ x), x)

    edited.__name__, edited.__qualname__ = work.__name__, work.__qualname__
    second = tuned({"turns": TURNS}, edited).tune(X, resume=True)
    for before, after in zip(first.trials, second.trials, strict=True):
        assert (after.is_ruled_out, after.cheap_ms) == (before.is_ruled_out, before.cheap_ms)
        assert (after.recalled_from is not None) is not after.is_ruled_out


def misbehave(x: Any, mode: str = "good") -> Any:
    """Does something bad while it is traced, or in its program."""
    kind, _, when = mode.partition(" ")
    if when == "tracing":
        assert in_sandbox(), "misdeeds are for workers only"
        MISDEEDS[kind]()
    elif kind == "hang":
        x = jax.lax.while_loop(lambda y: y[0, 0] < jnp.inf, lambda y: y * 0.5, x)
    elif kind == "slow":
        x = work(x, 300)
    return 2 * x + len(mode)  # no two have the same program


BAD = {
    "segfault tracing": ("crashed", "SIGSEGV"),
    "hang_holding_the_gil tracing": ("timeout", "compiling.*longer than"),
    "starve tracing": ("oom", "held .* [MG]B.*limit"),
    "fail tracing": ("error", "ArithmeticError: this config is bad"),
    "kill_itself tracing": ("crashed", "SIGKILL"),
    "scribble tracing": ("crashed", "damaged its own connection"),
    "hang running": ("timeout|slow", ""),  # its first run ends once another config has a time
}
MODES = ["good", *BAD, "good again", "slow"]


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_misdeeds_of_ranked_configs_harm_no_other_config(compiles: Compiles) -> None:
    jitted = jax.jit(misbehave, static_argnames=["mode"])
    function = quarantune.autotune({"mode": MODES}, ref_fn=None, rep=3)(jitted)
    with nothing_is_left(), quarantune.settings(memory_limit="600MB", **haste()):
        result = function.tune(X)
    found = {trial.config["mode"]: trial for trial in result.trials}
    assert result.best_config["mode"].startswith("good")
    for mode, (outcome, words) in BAD.items():
        assert re.fullmatch(outcome, found[mode].outcome), (mode, found[mode])
        assert re.search(words, found[mode].message, re.DOTALL), found[mode].message
    assert {mode for mode in found if found[mode].cheap_ms is not None} == {"good", "good again", "slow"}
    asked = [config["mode"] for config in compiles.fully]
    # Misdeeds before the compiler begins happen once, others again with the full program.
    assert not {"segfault tracing", "hang_holding_the_gil tracing", "starve tracing"} & {*asked}
    assert {"fail tracing", "hang running"} <= {*asked}


def test_a_ranked_run_ends_when_its_time_is_over() -> None:
    class Late(ConfigSource):
        def why_late(self) -> str:
            return "late"

    assert Late().reason_to_stop() == "late"
