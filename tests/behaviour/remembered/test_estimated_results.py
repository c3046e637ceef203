"""Estimates serve as results until something is measured, and order sweeps and searches."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import isolated

import quarantune
from quarantune.answers import nearest
from quarantune.answers.answer import Situation
from quarantune.api import compile_check
from quarantune.api.tuning_cache import TuningCache
from quarantune.cache.joining import joined_by_sweep
from quarantune.cache.store import Store
from quarantune.calls.key import keyed, keyed_to_tune
from quarantune.cli.entry_point import main
from quarantune.devices import targets
from quarantune.results.report import CompileReport
from quarantune.sweep.limits import SweepLimits
from quarantune.tuning import job as tuning_job
from quarantune.tuning.claim_and_journal import ClaimAndJournal
from quarantune.tuning.compile_verdicts import CompileVerdicts, note_check
from quarantune.values import blocks
from quarantune.values.trial import CompilerFigures, CycleEstimate, Findings, Outcome, Trial

X = np.arange(8, dtype=np.float32)
N = [1, 2, 3, 4]
CYCLES = {1: 4001.0, 2: 1000.0, 3: 1100.0, 4: 9000.0}
MANY = {1: 5000.0} | {n: 1000.0 + 10 * n for n in range(2, 18)} | {18: 9000.0}
"""More configs than always run whatever their estimates. The last one is far behind and not the default."""
MEASURED = {"schema": 1, "config": {"n": 3}, "time_ms": 2.0, "created": "2026-01-01T00:00:00+00:00"}
ESTIMATED = {
    "schema": 1,
    "config": {"n": 2},
    "created": "2026-02-02T00:00:00+00:00",
    "search": {"stopped": "estimated"},
}


def kernel(values: Iterable[int] = N, traced: list[int] | None = None, **options: Any) -> Any:
    @quarantune.autotune([{"n": n} for n in values], name="scale", **options)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 1) -> Any:
        if traced is not None:
            traced.append(n)
        return x * 2 + 0 * n

    return scale


def checked(fn: Any, target: Any = None, cycles: Mapping[int, float] = CYCLES) -> CompileReport:
    """Returns the verdicts of a compile check with estimates, and saves them as the check does."""
    call = fn._tuner.bind((X,), {})
    described, settings = keyed_to_tune(call, target), blocks.current()
    limits = SweepLimits.of(fn.function.options, settings)
    trials = [
        Trial(
            config={"n": n},
            outcome=Outcome.OK,
            figures=CompilerFigures(argument_bytes=32, estimate=CycleEstimate(cycles=cycles[n])),
        )
        for n in cycles
    ]
    for trial in trials:
        note_check(CompileVerdicts(described, limits, settings.cache_dir), trial)
    target = target or targets.find("TPU v6e")
    return CompileReport(name=fn.name, target=target, trials=tuple(trials), key=described.id.key, known=0)


def save(directory: Path, fn: Any, entry: dict[str, Any], key: str | None = None) -> None:
    call = keyed(fn._tuner.bind((X,), {}))
    Store(directory).put(fn.name, call.id.device, key or call.id.key, {"space": None, **entry})


def trials_of(fn: Any) -> dict[str, int]:
    """Returns how many trials of the saved result ended in each outcome."""
    device = keyed(fn._tuner.bind((X,), {})).id.device
    (entry,) = Store(blocks.current().cache_dir).read("scale")[device].values()
    return dict(entry["trials"])


# --- estimates in a sweep --------------------------------------------------------------------------------------


def test_a_sweep_skips_configs_estimated_far_behind() -> None:
    fn = kernel(MANY, rep=1)
    checked(fn, cycles=MANY)
    with isolated("none"):
        fn(X)
    assert fn.lookup(X)["n"] in range(1, 18)
    assert trials_of(fn).get("pruned") == 1


@pytest.mark.parametrize(("cycles", "pruned"), [(MANY, {17: "estimated at 8.82x the best"}), (CYCLES, {})])
def test_the_best_by_their_estimates_and_the_defaults_always_run(
    cycles: dict[int, float], pruned: dict[int, str]
) -> None:
    fn = kernel(cycles)
    checked(fn, cycles=cycles)
    job = job_of(fn)
    estimates = job._records.estimates(job._configs)
    assert [*estimates] == sorted(range(len(cycles)), key=lambda index: cycles[index + 1])
    assert {index: trial.message for index, trial in job._far_behind(estimates).items()} == pruned
    job._start_over = True  # as `tune()` does, to run every config
    assert job._far_behind(estimates) == {}


def test_a_search_starts_with_the_best_estimates() -> None:
    traced: list[int] = []
    fn = kernel(MANY, traced=traced, rep=1, search="random", max_trials=40)
    checked(fn, cycles=MANY)
    with isolated("none"):
        fn(X)
    assert [*dict.fromkeys(traced)] == [*range(1, 18)]  # the defaults come first, then the best estimates
    assert trials_of(fn).get("pruned") == 1


@pytest.mark.parametrize("search", ["exhaustive", "random"])
def test_configs_far_behind_run_if_no_other_works(search: str) -> None:
    @quarantune.autotune([{"n": n} for n in MANY], name="scale", rep=1, ref_fn=None, search=search)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 1) -> Any:
        if n < 18:
            raise ArithmeticError(f"n={n} is too small")
        return x * 2

    checked(scale, cycles=MANY)
    with isolated("none"):
        (result,) = quarantune.tune_many([(scale, (X,))])
    assert result.best_config == {"n": 18}
    assert result.failures == {"error": 17}


def test_a_check_adds_estimates_to_earlier_verdicts() -> None:
    fn = kernel()
    call = keyed_to_tune(fn._tuner.bind((X,), {}))
    limits = SweepLimits.of(fn.function.options, blocks.current())
    failures = CompileVerdicts(call, limits, blocks.current().cache_dir)
    bare = Trial(config={"n": 2}, outcome=Outcome.OK, figures=CompilerFigures(argument_bytes=32))
    note_check(failures, bare)
    checked(fn)
    job = job_of(fn)
    assert len(job._records.estimates(job._configs)) == len(N)


def job_of(fn: Any) -> Any:
    resolver = fn._tuner
    described = keyed_to_tune(resolver.bind((X,), {}))
    return tuning_job.TuningJob(described, Situation.of(described.call), resolver.rungs.tuning)


def test_nothing_is_read_if_the_cache_is_off() -> None:
    fn = kernel()
    with quarantune.settings(disable_cache=True):
        call, settings = keyed_to_tune(fn._tuner.bind((X,), {})), blocks.current()
        now = Situation.of(call.call)
        records = ClaimAndJournal(call, now, SweepLimits.of(fn.function.options, settings))
        assert records.estimates(call.call.configs) == {}


# --- estimated results ------------------------------------------------------------------------------------------


def test_a_measured_result_replaces_an_estimate_for_good() -> None:
    assert joined_by_sweep("", "", ESTIMATED, MEASURED) == MEASURED
    assert joined_by_sweep("", "", MEASURED, ESTIMATED) == MEASURED
    newer = {**ESTIMATED, "config": {"n": 4}}
    assert joined_by_sweep("", "", ESTIMATED, newer) == newer


def test_merged_caches_keep_measured_results(tmp_path: Path, cache_dir: Path) -> None:
    fn = kernel()
    save(cache_dir, fn, MEASURED)
    save(tmp_path / "other", fn, ESTIMATED)
    TuningCache(cache_dir).merge(tmp_path / "other")
    assert fn.lookup(X) == {"n": 3}


def test_an_estimate_is_used_until_a_result_is_measured(
    tmp_path: Path, cache_dir: Path, sweeps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fn = kernel()
    save(cache_dir, fn, ESTIMATED)
    with quarantune.settings(on_miss="error"):
        fn(X)
    assert sweeps == []
    save(tmp_path / "table", kernel(), MEASURED)
    with quarantune.settings(on_miss="error", cache_path=str(tmp_path / "table")):
        assert kernel().lookup(X) == {"n": 3}
    fn(X)
    assert sweeps == ["scale"], "an estimate is a miss if misses are tuned"
    (entry,) = [entry for entries in Store(cache_dir).read("scale").values() for entry in entries.values()]
    assert not Findings.from_json(entry).is_estimate


def test_the_nearest_result_is_preferably_a_measured_one(cache_dir: Path) -> None:
    fn = kernel()
    key = keyed(fn._tuner.bind((X,), {})).id.key
    save(cache_dir, fn, ESTIMATED, key.replace('"shape":[8]', '"shape":[9]'))
    save(cache_dir, fn, MEASURED, key.replace('"shape":[8]', '"shape":[16]'))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns once in a process
        call = keyed(fn._tuner.bind((X,), {}))
        now = Situation.of(call.call)
        known = nearest.nearest(call, now, fn._tuner.rungs.layers)
    assert known.config == {"n": 3}


def compiled(report: CompileReport) -> tuple[Any, ...]:
    """Returns the verdicts of compiling all configs of a call."""
    return report.trials, {}, report.key, report.known


def test_the_best_estimate_is_saved_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernels.py").write_text(
        "import functools, jax, quarantune\n"
        "@quarantune.autotune([{'n': n} for n in (1, 2, 3, 4)], name='scale')\n"
        "@functools.partial(jax.jit, static_argnames=['n'])\n"
        "def scale(x, n=1):\n    return x * 2 + 0 * n\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(targets, "usable", targets.find)
    asked: list[Any] = []

    def check_all(call: Any, target: Any, **_: Any) -> tuple[Any, ...]:
        asked.append(target.estimates)
        return compiled(checked(kernel(), target))

    monkeypatch.setattr(compile_check, "_compile_all", check_all)
    command = ["tune", "kernels.py:scale", "--args", "f32[8]", "--estimate-for"]
    assert main([*command, "TPU v6e"]) == 0
    assert "\nn=2, estimated, never measured\n" in capsys.readouterr().out
    assert asked == [True]
    assert main(["cache", "list"]) == 0
    assert "estimated" in capsys.readouterr().out
    assert main(["cache", "show", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["device"], shown["config"], shown["time_ms"]) == ("TPU v6 lite", {"n": 2}, None)
    assert shown["entry"]["estimated_ms"] == pytest.approx(1000 / 1.75e6)
    assert main(["cache", "show"]) == 0
    assert "estimated, never measured" in capsys.readouterr().out
    assert main(["report", "scale", "-o", "page.html"]) == 0
    assert "estimated, never measured" in (tmp_path / "page.html").read_text()
    assert main(["cache", "verify"]) == 0
    assert main([*command, "h100"]) == 2
    assert "NVIDIA H100 is not a TPU" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*configs run in this process:RuntimeWarning")
def test_verify_measures_what_was_only_estimated(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "estimated_kernels.py").write_text(
        "import functools, jax, quarantune\n"
        "@quarantune.autotune([{'n': n} for n in (1, 2, 3, 4)], name='scale', rep=2, ref_fn=None)\n"
        "@functools.partial(jax.jit, static_argnames=['n'])\n"
        "def scale(x, n=1):\n"
        "    return jax.lax.fori_loop(0, 50_000 // n**8, lambda i, y: jax.numpy.tanh(y), x)\n"
    )
    monkeypatch.chdir(tmp_path)
    here = keyed(kernel()._tuner.bind((X,), {})).id.device
    target = dataclasses.replace(targets.find("TPU v6e"), device_kind=here)
    monkeypatch.setattr(targets, "usable", lambda name: target)
    monkeypatch.setattr(compile_check, "_compile_all", lambda *_, **__: compiled(checked(kernel(), target)))

    def entry() -> dict[str, Any]:
        return next(iter(Store(cache_dir).read("scale")[here].values()))

    assert main(["tune", "estimated_kernels.py:scale", "--args", "f32[8]", "--estimate-for", "TPU v6e"]) == 0
    assert (entry()["config"], Findings.from_json(entry()).is_estimate) == ({"n": 2}, True)
    command = ["cache", "verify", "estimated_kernels.py:scale"]
    capsys.readouterr()
    with quarantune.settings(isolation="none"):
        assert main([*command, "--json"]) == 0
        (seen,) = json.loads(capsys.readouterr().out)["entries"]
        assert Findings.from_json(entry()).is_estimate, "without --again, nothing is saved"
        assert main([*command, "--again"]) == 0
    assert (seen["verdict"], seen["config"], seen["saved_time_ms"]) == ("current", {"n": 2}, None)
    assert 0 < seen["time_ms"] < seen["default_time_ms"]
    assert "tuned again: " in capsys.readouterr().out
    assert not Findings.from_json(entry()).is_estimate
    assert entry()["time_ms"] > 0


def test_configs_of_equal_memory_traffic_rank_by_cycles() -> None:
    figures = [CompilerFigures(argument_bytes=1 << 30, estimate=CycleEstimate(cycles=cycles)) for cycles in (9.0, 8.0)]
    trials = tuple(Trial(config={"n": n}, outcome=Outcome.OK, figures=it) for n, it in enumerate(figures))
    report = CompileReport(name="scale", target=targets.find("TPU v6e"), trials=trials, key="", known=0)
    assert [trial.config["n"] for trial in report.ranked] == [1, 0]
