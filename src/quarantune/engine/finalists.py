"""Chooses the finalists of a sweep over several machines, whose milliseconds are never compared with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quarantune.measure import finals
from quarantune.values.trial import Outcome, Trial

MOST = 16
"""The number of finalists: each is compiled, checked and measured again on the machine of the final."""


def of_machines(trials: Mapping[int, Trial]) -> list[list[int]]:
    """Returns for each machine the configs that may be the fastest, in the order of their times on that machine."""
    machines: dict[str, dict[int, Trial]] = {}
    for index, trial in trials.items():
        machines.setdefault(machine_of(trial), {})[index] = trial
    share = max(1, MOST // max(1, len(machines)))
    ranked = [finals.finalists(group, count=share)[:share] for group in machines.values()]
    return [group for group in ranked if group]


def machine_of(trial: Trial) -> str:
    """Returns the machine on which a config was measured; empty for the one of an earlier sweep without an engine."""
    return trial.device.partition(" on ")[2]


def heats(groups: Sequence[Sequence[int]], default: int | None) -> list[list[int]]:
    """Returns the configs to compare next: one list is the final; several are heats, whose winners go on.

    Args:
        groups: the candidates of each machine, the fastest first.
        default: the config of the function's own defaults, which is in the final so that its time is known there; None
            where it cannot be.
    """
    if len(groups) > MOST:
        leaders = [group[0] for group in groups]
        count = -(-len(leaders) // MOST)
        return [leaders[first::count] for first in range(count)]
    chosen = [index for group in groups for index in group][:MOST]
    return [chosen if default is None or default in chosen else [*chosen, default]]


def is_usable(trial: Trial) -> bool:
    """Returns whether a config may win."""
    return trial.outcome is Outcome.OK and trial.time_ms is not None
