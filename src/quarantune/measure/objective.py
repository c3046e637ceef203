"""The author's objective: scores of trials, and the observers that it needs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from quarantune.measure import observing
from quarantune.values.configs import Config, as_given
from quarantune.values.trial import TIME, Outcome, Trial

Objective: TypeAlias = str | Callable[[Trial], float]
"""The author's objective: `time`, `energy`, or a function that returns a number for a trial. Smaller is better."""


def scored(trial: Trial, objective: Objective) -> Trial:
    """Returns a trial with its score, or as an error if the objective gives no finite number for it."""
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
        message = f"objective gave no number for this trial: {type(error).__name__}: {error}"
    return trial.without_times(Outcome.ERROR, message)


def scored_rounds(
    trial: Trial, observed: Sequence[Mapping[str, float]], objective: Objective
) -> tuple[Trial, Sequence[float]]:
    """Returns a finalist with its score and the medians of its observed figures, and the scores of its rounds.

    Args:
        trial: the finalist, with its times in the final.
        observed: the observers' figures of each round; empty without observers.
        objective: the objective.
    """
    medians = {name: statistics.median(each[name] for each in observed) for name in (observed or [{}])[0]}
    settled = trial.with_observed(medians)
    if observed:
        timed = [dataclasses.replace(settled, own_ms=trial.time_ms).with_observed(figures) for figures in observed]
    else:
        timed = [dataclasses.replace(settled, time_ms=ms, own_ms=ms) for ms in trial.samples_ms]
    found = [scored(one, objective).score for one in timed]
    scores = [one for one in found if one is not None] or [trial.merit or 0.0]
    return dataclasses.replace(settled, score=statistics.median(scores)), scores


def needed_observers(objective: Objective, config: Config) -> list[str]:
    """Returns the observers that an objective needs: without their figures, it gives no number for a sample trial.

    Args:
        objective: the objective.
        config: the config of the sample trial.
    """
    times = {"time_ms": 1.0, "own_ms": 1.0, "samples_ms": [1.0], "compile_s": 1.0}
    figures = {"peak_memory_bytes": 1024, "figures": {"argument_bytes": 8, "output_bytes": 8, "temporary_bytes": 8}}
    bare = dataclasses.replace(Trial.from_json({"config": {}, "outcome": "ok", **times, **figures}), config=config)
    seen = {name: dict.fromkeys(observing.named(name).FIELDS, 1.0) for name in observing.OBSERVERS}

    def scores(names: Sequence[str]) -> bool:
        trial = bare
        for name in names:
            trial = trial.with_observed(seen[name])
        return scored(trial, objective).outcome is Outcome.OK

    if not scores([*seen]):
        return []  # the objective itself fails
    return [name for name in seen if not scores([other for other in seen if other != name])]
