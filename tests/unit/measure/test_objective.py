"""Objectives other than time choose the winner: a function of a trial, and the energy of a call."""

from __future__ import annotations

import functools
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import isolated

import quarantune
from quarantune import AutoTuner, Outcome, Trial, TuningFailedError, TuningResult
from quarantune.answers import saved_program
from quarantune.calls.call import TunedFunction
from quarantune.measure import finals
from quarantune.measure.observers import energy
from quarantune.search.strategy import log_time
from quarantune.sweep.limits import SearchLimits
from quarantune.sweep.searching import Searching
from quarantune.values.options import Options
from quarantune.values.space import Space

X = np.arange(64, dtype=np.float32)
GRID = {"turns": [2, 4000]}


@functools.partial(jax.jit, static_argnames=["turns"])
def turned(x: Any, turns: int = 2) -> Any:
    """Reverses an array `turns` times: more turns take longer, and an even number changes nothing."""
    return jax.lax.fori_loop(0, turns, lambda _, y: y[::-1], jnp.tile(x, 64))[: len(x)]


def most_turns(trial: Trial) -> float:
    """Objective that prefers more turns."""
    assert trial.time_ms is not None
    return -float(trial.config["turns"])


# --- a function of a trial ---


@pytest.mark.parametrize("isolation", ["none", pytest.param("process", marks=pytest.mark.slow)])
def test_the_winner_has_the_least_objective_even_if_slower(isolation: str, cache_dir: Path) -> None:
    tuned = quarantune.autotune(GRID, objective=most_turns, rep=2)(turned)
    with isolated(isolation):
        result = tuned.tune(X)
        verified = quarantune.TuningCache(cache_dir).verify(tuned, max_loss_percent=1e-9).entries[0]
    assert (result.best_config, result.score, result.default_score) == ({"turns": 4000}, -4000.0, -2.0)
    assert {trial.outcome for trial in result.trials} == {Outcome.OK}, "no config is ruled out by its time"
    assert result.energy_mj is None
    assert "less of the objective than the defaults (objective -4000 against objective -2; " in repr(result)
    assert "turns=4000 has the lowest objective: -4000, where turns=2 has -2" in result.table(width=200)
    assert (verified.verdict, verified.loss_percent) == ("current", None), "another objective ignores more time"
    saved = tuned.result(((X,), {}))
    assert (saved.score, saved.findings.compared) == (-4000.0, result.findings.compared)


def test_a_config_without_an_objective_number_is_an_error() -> None:
    def odd(trial: Trial) -> Any:
        return {2: 5.0, 4: math.nan, 6: "much"}[trial.config["turns"]]

    with isolated("none"):
        tuner = AutoTuner(turned, {"turns": [2, 4, 6, 8]}, objective=odd, rep=1)
        result = tuner.run(X)
        with pytest.raises(TuningFailedError, match="objective gave no number for this trial: ZeroDivisionError"):
            AutoTuner(turned, GRID, objective=lambda trial: 1 / 0, rep=1).run(X)
    assert [trial.outcome.value for trial in result.trials] == ["ok", "error", "error", "error"]
    assert [trial.message for trial in result.trials][1:] == [
        "objective returned nan, which is not finite",
        "objective gave no number for this trial: ValueError: could not convert string to float: 'much'",
        "objective gave no number for this trial: KeyError: 8",
    ]
    assert result.best_config == {"turns": 2}


def scored(score: float, n: int = 0, **fields: Any) -> Trial:
    return Trial(config={"n": n}, outcome=Outcome.OK, time_ms=1.0, samples_ms=(1.0 + n,), score=score, **fields)


def test_a_search_gains_by_the_objective_and_ranks_by_it() -> None:
    limits = SearchLimits(search="exhaustive", max_trials=None, time_budget_s=None, patience=3, seed=0)
    search = Searching(limits, Space([{"n": n} for n in range(9)]))
    for n, score in enumerate((4.0, 1.0, -1.0, -2.0, 3.0, 3.0)):
        search.take(1)
        search.ended(n, scored(score, n))
    assert not search.is_closed
    search.take(1)
    search.ended(6, scored(-2.0, 6))
    assert search.is_closed
    assert search.stopped == "patience"
    ranks = [log_time(scored(score)) for score in (-1e9, -1.0, 0.0, 1e-3, 1.0, 1e9)]
    assert ranks == sorted(ranks, key=lambda rank: rank or 0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_decide_finalists_and_ties(sign: float) -> None:
    levels = [10.0, 10.02, 10.7, 30.0] if sign > 0 else [-30.0, -29.97, -28.0, -10.0]
    trials = {n: scored(level, n) for n, level in enumerate(levels)}
    assert finals.finalists(trials) == [0, 1, 2]
    rounds = finals.Final({n: [5.0 - n] * 3 for n in range(3)}, objective=lambda trial: trial.score or 0.0)
    settled, verdict = finals.conclude(trials, rounds, default=None)
    assert verdict == [0, 1]
    assert [settled[n].time_ms for n in range(3)] == [5.0, 4.0, 3.0]


def test_a_final_is_decided_by_the_medians_of_the_rounds_scores() -> None:
    energies = {0: [50.0, 51.0, 90.0], 1: [40.0, 41.0, 40.0]}
    trials = {n: scored(mj[0], n, energy_mj=mj[0]) for n, mj in energies.items()}
    final = finals.Final(
        {0: [1.0] * 3, 1: [2.0] * 3},
        observed={n: [{"energy_mj": mj} for mj in each] for n, each in energies.items()},
        objective=lambda trial: (trial.energy_mj or 0.0) * (trial.time_ms or 0.0),
    )
    settled, verdict = finals.conclude(trials, final, default=None)
    assert verdict[0] == 0
    assert [(settled[n].score, settled[n].energy_mj) for n in (0, 1)] == [(51.0, 51.0), (80.0, 40.0)]


def test_a_score_of_zero_is_a_score() -> None:
    result = AutoTuner(turned, GRID, rep=2, objective=lambda trial: 0.0 if trial.config["turns"] == 4000 else 1.0).run(
        X
    )
    assert (result.best_config, result.score) == ({"turns": 4000}, 0.0)
    assert [trial.score for trial in result.trials] == [1.0, 0.0]


def test_a_round_of_a_final_that_scores_zero_counts() -> None:
    trials = {n: scored(1.0, n) for n in (0, 1)}
    final = finals.Final(
        {0: [1.0] * 3, 1: [1.0] * 3},
        observed={0: [{"waits": 0.0}] * 3, 1: [{"waits": 2.0}] * 3},
        objective=lambda trial: trial.observed["waits"],
    )
    settled, verdict = finals.conclude(trials, final, default=None)
    assert verdict[0] == 0
    assert [(settled[n].score, dict(settled[n].observed)) for n in (0, 1)] == [
        (0.0, {"waits": 0.0}),
        (2.0, {"waits": 2.0}),
    ]


# --- files and tables ---


def test_results_of_different_objectives_are_kept_apart() -> None:
    def digest(**options: Any) -> str:
        return TunedFunction.of(turned, GRID, Options(**options)).fingerprint.digest

    functions = (most_turns, lambda trial: trial.time_ms, lambda trial: trial.compile_s)
    assert digest() == digest(objective="time")
    assert len({digest(), digest(objective="energy"), *(digest(objective=fn) for fn in functions)}) == 5


def test_energy_is_shown_only_if_it_was_measured(tmp_path: Path) -> None:
    trials = (
        scored(7.0, 1, energy_mj=7.0, watts=7.0),
        scored(9.0, 2, energy_mj=9.0, watts=9.0),
        Trial(config={"n": 3}, outcome=Outcome.OOM),
    )
    fields: dict[str, Any] = {"best_config": {"n": 1}, "time_ms": 1.0, "key": "{}", "device": "NVIDIA H200"}
    result = TuningResult(**fields, trials=trials, score=7.0, default_score=14.0, energy_mj=7.0, default_time_ms=1.0)
    assert "2.00x less energy than the defaults (7 mJ against 14 mJ; 1 ms)" in repr(result)
    head, first = result.table(width=100).splitlines()[:2]
    assert [head.split()[-3:-1], first.split()[-3:-1]] == [["mJ", "W"], ["7", "7"]]
    assert "has the lowest energy: 7, where n=2 has 9" in result.table(width=100)
    names = ("energy_mj", "watts")
    assert [[row[name] for name in names] for row in result.to_dicts()] == [[7.0] * 2, [9.0] * 2, [None] * 2]
    result.report(tmp_path / "report.html")
    assert '"energy_mj":[7' in (tmp_path / "report.html").read_text().replace(" ", "")
    for each in (result, *trials):
        assert type(each).from_json(json.loads(json.dumps(each.to_json()))) == each
    plain = TuningResult(**fields, trials=(Trial(config={}, outcome=Outcome.OK, time_ms=1.0),))
    assert not {*names, "score", "default_score"} & {*plain.to_json(), *plain.trials[0].to_json(), *plain.to_dicts()[0]}


# --- refusals ---


def test_compiled_only_configs_have_neither_energy_nor_score() -> None:
    tuned = quarantune.autotune(GRID, objective="energy")(turned)
    report = quarantune.compile_check(tuned, GRID, X, target="cpu")
    assert [(trial.outcome, trial.score) for trial in report.trials] == [(Outcome.OK, None)] * 2


@pytest.mark.parametrize("given", ["speed", 3, None])
def test_a_value_that_is_not_an_objective_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"objective=.* is not callable: give 'time', 'energy', a function, or leave"):
        quarantune.autotune(GRID, objective=given)


def test_energy_is_refused_by_name_if_it_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(fn: Any = turned, **options: Any) -> TuningResult:
        return AutoTuner(fn, GRID, rep=1, **options).run(X)

    with isolated("none"):
        for given in ("energy", lambda trial: trial.time_ms * trial.energy_mj, lambda trial: trial.watts):
            with pytest.raises(ValueError, match=r"turned: objective needs the energy of a call.* runs on cpu"):
                run(objective=given)
        assert run(objective=lambda trial: trial.energy_mj or 1.0).score == 1.0, "it also works without the energy"
        donates = jax.jit(lambda x, turns=2: x, static_argnames=["turns"], donate_argnums=[0])
        with pytest.raises(ValueError, match="a jitted function that donates no arguments"):
            run(donates, objective="energy")
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="with executor=, time is the only objective"):
        AutoTuner(turned, GRID, objective=most_turns).run(X, executor=pool)
    with pytest.raises(ValueError, match="tune_for compares times"):
        quarantune.autotune(GRID, objective=most_turns)(turned).tune_for([(X,)])
    with pytest.raises(TypeError, match="has no option 'objective': use time alone"):
        quarantune.contextual_autotune(objective="energy")  # type: ignore[call-overload]


# --- the energy counter ---


class NVMLError(Exception):
    """Error of the fake NVML."""


class FakeGpu:
    """Stands for NVML, CUDA and the time: a GPU whose counter advances in steps with the time."""

    NVMLError = NVMLError

    def __init__(self, *, watts: float = 300.0, step_s: float = 0.1, read_s: float = 0.0034, fault: str = "") -> None:
        self.now, self.opened, self._fault = 0.0123, 0, fault
        self._watts, self._step_s, self._read_s = watts, step_s, read_s

    # The time

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # NVML

    def nvmlInit(self) -> None:
        if self._fault == "no driver":
            raise NVMLError("NVML Shared Library Not Found")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return ("NVIDIA T400", "NVIDIA H200")[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f":
            raise NVMLError("Not Found")
        return 1

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 0 or self._fault == "no counter":
            raise NVMLError("Not Supported")
        self.now += self._read_s / 2
        read = int(1e3 * self._watts * self._step_s) * int(self.now / self._step_s)
        self.now += self._read_s / 2
        return read

    # CUDA

    def CDLL(self, name: str) -> Any:
        def name_gpu(found: Any, device: Any) -> int:
            found[:] = range(16) if self._fault != "another GPU" else range(1, 17)
            return 0

        return SimpleNamespace(cuDeviceGet=lambda device, ordinal: 0, cuDeviceGetUuid_v2=name_gpu)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeGpu:
    gpu = FakeGpu(**getattr(request, "param", {}))
    monkeypatch.setitem(sys.modules, "pynvml", gpu)  # type: ignore[misc]
    monkeypatch.setattr(energy.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(energy, "time", gpu)
    monkeypatch.setattr(energy.ctypes, "CDLL", gpu.CDLL)
    return gpu


@pytest.mark.parametrize(
    "fake_gpu",
    [{}, {"step_s": 0.02}, {"step_s": 0.02, "read_s": 1e-5}, {"watts": 55.0, "step_s": 0.35}],
    indirect=True,
)
@pytest.mark.parametrize("run_s", [2e-5, 1e-3, 0.03])
def test_the_energy_of_a_run_is_known_to_within_a_percent_or_two(fake_gpu: FakeGpu, run_s: float) -> None:
    def dispatch() -> None:
        fake_gpu.now += run_s

    began_s = fake_gpu.now
    found, watts = energy.per_call(dispatch, energy.counter(0), run_s)
    assert watts == pytest.approx(fake_gpu._watts, rel=0.02)
    # The fake GPU waits while its counter is read, and this wait counts towards the runs.
    assert found >= 0.98 * fake_gpu._watts * run_s * 1e3
    assert found <= 1.02 * fake_gpu._watts * (run_s * 1e3 + 1e3 * fake_gpu._read_s / max(1, round(0.01 / run_s)))
    assert fake_gpu.now - began_s < 5.5


@pytest.mark.parametrize("fake_gpu", [{"step_s": 60.0}, {"watts": 0.0}], indirect=True)
def test_a_counter_that_stands_still_fails_after_five_seconds(fake_gpu: FakeGpu) -> None:
    with pytest.raises(RuntimeError, match="the energy counter of the GPU advanced 0 times in 5 s"):
        energy.per_call(lambda: fake_gpu.sleep(1e-3), energy.counter(0), 1e-3)
    assert fake_gpu.now < 5.5


@pytest.mark.parametrize("fake_gpu", [{"fault": "no driver"}, {"fault": "no counter"}, {"fault": ""}], indirect=True)
def test_a_gpu_without_a_counter_is_refused_with_nvmls_reason(fake_gpu: FakeGpu, monkeypatch: Any) -> None:
    said = {"no driver": "Shared Library Not Found", "no counter": "Not Supported", "": ""}[fake_gpu._fault]
    reason = energy.why_not("cuda", "NVIDIA H200")
    assert said in reason
    assert bool(reason) is bool(said), "another GPU without a counter does not matter"
    assert fake_gpu.opened == bool(said == "Not Supported")
    assert "only whole NVIDIA GPUs" in energy.why_not("cuda", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert "this call runs on rocm" in energy.why_not("rocm", "MI300")
    monkeypatch.setattr(energy.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'quarantune[energy]'" in energy.why_not("cuda", "NVIDIA H200")


@pytest.mark.parametrize("fake_gpu", [{"fault": "another GPU"}], indirect=True)
def test_a_gpu_that_nvml_does_not_know_is_an_error_of_the_worker(fake_gpu: FakeGpu) -> None:
    with pytest.raises(NVMLError, match="Not Found"):
        energy.counter(0)


@pytest.mark.usefixtures("fake_gpu")
def test_a_sweep_for_energy_measures_trials_and_the_final(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_call(dispatch: Any, read: Any, run_s: float) -> tuple[float, float]:
        assert (jax.block_until_ready(dispatch()).shape, type(read()), run_s < 1) == (X.shape, int, True)
        cells = [cell.cell_contents for cell in dispatch.__closure__]
        turns = next(cell.config["turns"] for cell in cells if hasattr(cell, "config"))
        measured.append(turns)
        return {2: 40.0, 4000: 11.0}[turns], 300.0

    measured: list[int] = []
    monkeypatch.setattr(energy, "why_not", lambda platform, kind: "")
    monkeypatch.setattr(energy, "per_call", per_call)
    with isolated("none"):
        result = AutoTuner(turned, GRID, objective="energy", rep=2).run(X)
    assert (result.best_config, result.score, result.energy_mj) == ({"turns": 4000}, 11.0, 11.0)
    assert "3.64x less energy than the defaults (11 mJ against 40 mJ; " in repr(result)
    assert [(trial.energy_mj, trial.watts) for trial in result.finalists] == [(11.0, 300.0), (40.0, 300.0)]
    assert min(map(measured.count, (2, 4000))) >= 4, "once in the trial and in three rounds of the final"


# --- a score of exactly 0 ---


def test_a_score_of_0_is_the_best_of_an_interrupted_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced_apart(keyed: Any, config: Any) -> Any:
        proved.append(dict(config))
        return trace(keyed, config)

    def objective_of(trial: Trial) -> float:
        if is_cut_short and trial.config["turns"] == 6:
            raise KeyboardInterrupt
        return {2: 3.0, 4000: 0.0, 6: 5.0}[trial.config["turns"]]

    proved: list[Any] = []
    trace, is_cut_short = saved_program.traced_apart, True
    monkeypatch.setattr(saved_program, "traced_apart", traced_apart)
    tuned = quarantune.autotune({"turns": [2, 4000, 6]}, objective=objective_of, rep=1)(turned)
    with isolated("none"):
        with pytest.raises(KeyboardInterrupt):
            tuned.tune(X)
        is_cut_short = False
        result = tuned.tune(X, resume=True)
    assert proved[0] == {"turns": 4000}
    assert (result.best_config, result.score, result.default_score) == ({"turns": 4000}, 0.0, 3.0)


def test_rounds_with_score_0_tie_with_rounds_below_and_above() -> None:
    assert finals.decide({0: [0.0, 0.0, 0.0], 1: [-1.0, 0.0, 5.0]}, default=None) == [0, 1]
