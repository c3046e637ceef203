"""The author's objective: how a trial is scored, and what must be observed for it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from quarantune.measure.observers import OBSERVERS, Observer
from quarantune.values.configs import Config, as_given
from quarantune.values.trial import TIME, Observed, Outcome, Trial, observed_fields

Objective: TypeAlias = str | Callable[[Trial], float]
"""`time`, `energy`, or the number that a function makes of a trial; the smaller the better."""
Complete: TypeAlias = Callable[[Trial], Trial]
"""Returns a trial with its score."""


def scored(trial: Trial, objective: Objective) -> Trial:
    """Returns a trial with its score; it is an error if the objective makes no finite number of it."""
    is_by_time = not callable(objective) and objective == TIME
    if is_by_time or not trial.is_usable:  # it was only compiled
        return trial
    try:
        given = dataclasses.replace(trial, config=as_given(trial.config))
        found: Any = objective(given) if callable(objective) else trial.energy_mj
        if abs(score := float(found)) < 1e308:
            return dataclasses.replace(trial, score=score)
        message = f"objective returned {score}, which is not finite"
    except Exception as error:
        message = f"objective made no number of this trial: {type(error).__name__}: {error}"
    return dataclasses.replace(trial, outcome=Outcome.ERROR, message=message, time_ms=None, own_ms=None, samples_ms=())


def with_rounds(trial: Trial, observed: Sequence[Observed], complete: Complete) -> tuple[Trial, Sequence[float]]:
    """Returns a finalist with the medians of its observed values and of its scores, and the score of each round.

    Args:
        trial: the finalist, with its times in the final.
        observed: the values observed in each of a few rounds; empty if nothing was observed.
        complete: scores a trial.
    """
    if observed:
        medians = {name: statistics.median(each[name] for each in observed if name in each) for name in observed[0]}
        trial = dataclasses.replace(trial, **observed_fields(medians))
    fields = [observed_fields(each) for each in observed] or [{}] * len(trial.samples_ms)
    pairs = zip([trial.time_ms] * len(observed) or trial.samples_ms, fields, strict=True)
    each = [complete(dataclasses.replace(trial, time_ms=ms, own_ms=ms, **seen)).score for ms, seen in pairs]
    scores = [one for one in each if one is not None] or [trial.merit or 0.0]
    return dataclasses.replace(trial, score=statistics.median(scores)), scores


def needed_observers(objective: Objective, config: Config) -> dict[str, Observer]:
    """Returns the observers, by name, without which an objective makes no number of a made-up trial.

    Args:
        objective: the objective.
        config: the config of that trial.
    """
    times = {"time_ms": 1.0, "own_ms": 1.0, "samples_ms": [1.0], "compile_s": 1.0}
    figures = {"peak_memory_bytes": 1024, "figures": {"argument_bytes": 8, "output_bytes": 8, "temporary_bytes": 8}}
    trial = dataclasses.replace(Trial.from_json({"config": {}, "outcome": "ok", **times, **figures}), config=config)

    def lacks(missing: str | None) -> bool:
        seen = {value: 1.0 for name, each in OBSERVERS.items() if name != missing for value in each.VALUES}
        return scored(dataclasses.replace(trial, **observed_fields(seen)), objective).outcome is not Outcome.OK

    return {} if lacks(None) else {name: OBSERVERS[name] for name in OBSERVERS if lacks(name)}
