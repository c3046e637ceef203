"""Made-up trials and results, and readers of their tables."""

from __future__ import annotations

from typing import Any

from quarantune import TuningResult
from quarantune.values.trial import Outcome, Phase, Trial


def trial(n: int, outcome: str = "ok", time_ms: float | None = None, message: str = "", **rest: Any) -> Trial:
    phase = Phase.COMPILE if outcome == "error" else Phase.MEASURE
    return Trial(config={"n": n}, outcome=Outcome(outcome), time_ms=time_ms, message=message, phase=phase, **rest)


def result_of(*trials: Trial, best: int = 1, **rest: Any) -> TuningResult:
    won = next(trial for trial in trials if trial.config == {"n": best})
    assert won.time_ms is not None
    return TuningResult(
        best_config=won.config, time_ms=won.time_ms, trials=trials, key="{}", device="H200", fn=print, **rest
    )


def table_of(trials: list[Trial], width: int | None = None, **fields: Any) -> str:
    fields = {"best_config": {}, "key": "", "device": "cpu", **fields}
    return TuningResult(trials=tuple(trials), **fields).table(width=width)


def first_words(table: str) -> list[list[str]]:
    return [line.split()[:4] for line in table.split("\n\n")[0].splitlines()[1:]]
