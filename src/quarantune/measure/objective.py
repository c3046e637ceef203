"""The author's objective: what it makes of a trial, and whether that takes the energy of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from quarantune.values.config_values import as_given
from quarantune.values.options import TIME
from quarantune.values.trial import Config, Outcome, Trial

Objective: TypeAlias = str | Callable[[Trial], float]


def scored(trial: Trial, objective: Objective) -> Trial:
    """Returns a trial with its score; it is an error if the objective makes no finite number of it."""
    if objective == TIME or trial.outcome is not Outcome.OK or trial.time_ms is None:  # it was only compiled
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


def needs_energy(objective: Objective, config: Config) -> bool:
    """Returns whether an objective makes a number of a made-up trial with an energy only.

    Args:
        objective: the objective.
        config: the config of that trial.
    """
    times = {"time_ms": 1.0, "own_ms": 1.0, "samples_ms": [1.0], "compile_s": 1.0, "energy_mj": 1.0, "watts": 1.0}
    figures = {"peak_memory_bytes": 1024, "figures": {"argument_bytes": 8, "output_bytes": 8, "temporary_bytes": 8}}
    trial = dataclasses.replace(Trial.from_json({"config": {}, "outcome": "ok", **times, **figures}), config=config)
    both = [scored(each, objective) for each in (trial, dataclasses.replace(trial, energy_mj=None, watts=None))]
    return [each.outcome is Outcome.OK for each in both] == [True, False]
