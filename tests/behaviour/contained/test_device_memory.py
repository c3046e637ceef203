"""The device memory of a config's program is in its trial, can be bounded, and is weighed against its time."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import isolated

import quarantune
from quarantune import AutoTuner, Outcome, Phase, Trial, TuningResult
from quarantune.calls.call import TunedFunction
from quarantune.tuning.compile_verdicts import _FailedCompile
from quarantune.values.options import Options
from quarantune.values.trial import CompilerFigures, CycleEstimate

X = np.arange(64, dtype=np.float32)


@functools.partial(jax.jit, static_argnames=["copies", "log"])
def turned_copies(x: Any, log: str = "", copies: int = 1) -> Any:
    def note() -> None:
        with open(log, "a") as file:
            file.write(f"{copies}\n")

    if log:
        jax.debug.callback(note)
    return jax.lax.fori_loop(0, 2, lambda _, y: y[::-1], jnp.tile(x, copies))[: len(x)]


def memory_of(copies: int, log: str) -> int:
    found = turned_copies.lower(X, log=log, copies=copies).compile().memory_analysis()
    assert found is not None
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


@pytest.mark.parametrize(
    "isolation", ["none", *(pytest.param(name, marks=pytest.mark.slow) for name in ("process", "compile"))]
)
def test_a_memory_bound_drops_the_configs_above_it_unrun(
    isolation: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    log, sizes = tmp_path / "ran", [1, 64]
    needed = {copies: memory_of(copies, str(log)) for copies in sizes}
    assert sorted(set(needed.values())) == list(needed.values())
    tuner = AutoTuner(turned_copies, {"copies": sizes}, max_device_memory=needed[1], rep=2)
    if isolation != "none":
        request.getfixturevalue("quiet_place")
    with contextlib.nullcontext() if isolation == "none" else nothing_is_left(), isolated(isolation):
        result = tuner.run(X, log=str(log))
    assert {trial.config["copies"]: trial.device_memory_bytes for trial in result.trials} == needed
    refused = {trial.config["copies"]: trial for trial in result.trials if trial.outcome is Outcome.DEVICE_OOM}
    assert list(refused) == [64]
    assert (refused[64].phase, refused[64].time_ms) == (Phase.COMPILE, None)
    assert f"needs {needed[64]:,} bytes of device memory, over max_device_memory of {needed[1]:,} bytes" in (
        refused[64].message
    )
    assert set(log.read_text().split()) == {"1"}


def test_a_result_under_another_bound_is_not_used() -> None:
    def digest(**options: Any) -> str:
        return TunedFunction.of(turned_copies, {"copies": [1, 2]}, Options(**options)).fingerprint.digest

    assert digest(max_device_memory="1MB") == digest(max_device_memory=1_000_000)
    assert len({digest(), digest(max_device_memory="1MB"), digest(max_device_memory="1MiB")}) == 3


def test_a_bound_that_cannot_hold_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="'much' is not an amount of memory"):
        quarantune.autotune({"copies": [1]}, max_device_memory="much")
    with pytest.raises(
        TypeError, match=r"max_device_memory bounds the compiled program of the function, so the function must"
    ):
        AutoTuner(lambda x, n: np.repeat(x, n), {"n": [1, 2]}, max_device_memory="1MB")
    with pytest.raises(TypeError, match="use max_device_memory of its kernels"):
        quarantune.contextual_autotune(max_device_memory="1MB")  # type: ignore[call-overload]


def sized(time_ms: float, size: int | None, outcome: Outcome = Outcome.OK, **figures: Any) -> Trial:
    known = None if size is None else CompilerFigures(argument_bytes=8, output_bytes=8, temporary_bytes=size, **figures)
    return Trial(config={"time": time_ms, "size": size}, outcome=outcome, time_ms=time_ms, figures=known)


def result_of(*trials: Trial) -> TuningResult:
    return TuningResult(
        best_config=trials[0].config, time_ms=trials[0].time_ms or 0, trials=trials, key="{}", device="cpu"
    )


def test_the_pareto_front_weighs_time_against_memory() -> None:
    slow, failed = sized(2.7, 900, Outcome.SLOW), Trial(config={}, outcome=Outcome.ERROR)
    unknown, fast, equal, small = sized(1.0, None), sized(2.0, 4000), sized(2.5, 4000), sized(3.0, 800)
    assert result_of(small, equal, slow, unknown, failed, fast).pareto() == (fast, slow, small)
    assert result_of(unknown).pareto() == ()


def test_reports_show_memory_only_if_configs_differ_in_it() -> None:
    one, two = sized(1.0, (1 << 20) - 16), sized(2.0, (5 << 19) - 16, flops=64.0, moved_bytes=32.0)
    assert "device MiB" not in result_of(one).table(width=100)
    head, first, second = result_of(one, two).table(width=100).splitlines()[:3]
    assert head.split()[-2:] == ["device", "MiB"]
    assert [first.split()[-1], second.split()[-1]] == ["1", "2.5"]
    assert "device MiB" not in result_of(one, two).table(width=30), "a narrow table leaves memory out"
    names = ("device_memory_bytes", "flops", "moved_bytes")
    assert [[row[name] for name in names] for row in result_of(one, two).to_dicts()] == [
        [1 << 20, None, None],
        [5 << 19, 64.0, 32.0],
    ]


def test_an_output_in_a_donated_argument_counts_once() -> None:
    assert sized(1.0, 10, aliased_bytes=8).device_memory_bytes == 18


def test_files_have_no_field_for_unknown_memory() -> None:
    trial = sized(1.0, 100, flops=7.0)
    data = json.loads(json.dumps(trial.to_json()))
    assert data["figures"] == {"argument_bytes": 8, "output_bytes": 8, "temporary_bytes": 100, "flops": 7.0}
    assert Trial.from_json(data) == trial
    assert "figures" not in sized(1.0, None).to_json()


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.DEVICE_OOM])
def test_a_compile_verdict_keeps_its_outcome_and_figures(outcome: Outcome) -> None:
    figures = CompilerFigures(argument_bytes=8, estimate=CycleEstimate(cycles=5.0))
    trial = Trial(config={"n": 1}, outcome=outcome, phase=Phase.COMPILE, figures=figures)
    about = {"source": "a sweep", "found": "2026-01-01T00:00:00+00:00", "compilers": {}}
    failure = _FailedCompile(trial=trial, compile_timeout_s=1.0, memory_limit_bytes=None, **about)  # type: ignore[arg-type]
    assert _FailedCompile.from_json(json.loads(json.dumps(failure.to_json()))).trial == trial
