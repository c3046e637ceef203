"""Compiles the configs of calls without running them, for a device that is here or need not be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quarantune.resolve import engines
from quarantune.resolve.call_key import keyed_to_tune
from quarantune.resolve.call_result import entry_for, findings_now
from quarantune.resolve.compile_failures import CompileFailures, note_check
from quarantune.resolve.layers import more_thorough, open_store
from quarantune.resolve.tuning_job import check_outside
from quarantune.results.progress import Progress
from quarantune.results.report import CompileReport
from quarantune.sweep import sweep
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import SweepEvents, SweepRequest, Swept
from quarantune.values import settings as environment
from quarantune.values.configs import Config, text_of
from quarantune.values.trial import ESTIMATED, Searched, Trial, pruned_trial

if TYPE_CHECKING:
    from quarantune.devices.targets import Target
    from quarantune.resolve.bound_call import BoundCall


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The configs of a call, compiled and not run.

    Attributes:
        trials: their trials, in order.
        executables: those that can leave their workers, by the indices of their configs; none for a target.
        key: the key of the call.
        known: on how many of them an earlier job had the verdict.
    """

    trials: tuple[Trial, ...]
    executables: Mapping[int, bytes]
    key: str
    known: int


def compile_all(call: BoundCall, target: Target | None, *, num_workers: int | None, again: bool = False) -> Compiled:
    """Compiles the configs of a call in workers; runs none, and remembers those that fail.

    Args:
        call: the call.
        target: the device, which need not be here; None for the one that the call would run on.
        num_workers: how many configs compile at a time; None follows the settings.
        again: whether configs are compiled for a target although an earlier job has the verdict on them.
    """
    check_outside(call)
    described, settings = keyed_to_tune(call, target), environment.current()
    limits = SweepLimits.of(call.function.options, settings, num_workers=num_workers)
    failures = CompileFailures(described, settings.cache_dir, limits, also=settings.cache_path)
    trials = {index: pruned_trial(call.configs[index]) for index in call.pruned}
    left = {index: call.configs[index] for index in call.configs.listed() if index not in trials}
    known: dict[int, Trial] = {}
    if target is not None and not (again or settings.disable_cache):
        verdicts = failures.known(with_compiled=True)
        found = ((index, verdicts.get(text_of(config))) for index, config in left.items())
        known = {index: trial for index, trial in found if trial is not None and _is_answer(trial, target)}
    trials |= {index: dataclasses.replace(trial, config=left.pop(index)) for index, trial in known.items()}
    label = described.label if target is None else f"{described.label} for {target.name}"
    config_of = call.configs.__getitem__
    with Progress(label, len(left), shown=settings.progress, config_of=config_of) as progress:

        def on_trial(index: int, trial: Trial) -> None:
            trials[index] = trial
            if not settings.disable_cache:
                note_check(failures, trial)
            progress.step(trial)

        request = SweepRequest(
            problem=described.problem(),
            options=call.function.options,
            settings=settings,
            limits=limits,
            events=SweepEvents(on_trial=on_trial, on_phase=progress.enter),
            target=target,
            compile_only=target is None,
        )
        run = sweep.run if target is None else engines.run
        swept = run(request, left) if left else Swept()
        progress.conclude_compiling()
    ordered = tuple(trials[index] for index in range(len(call.configs)))
    return Compiled(ordered, swept.executables, described.key.text, len(known))


def check_all(call: BoundCall, target: Target, *, num_workers: int | None, again: bool) -> CompileReport:
    """Returns the report on compiling the configs of a call for a device; the arguments are those of `compile_all`."""
    compiled = compile_all(call, target, num_workers=num_workers, again=again)
    return CompileReport(name=call.name, target=target, trials=compiled.trials, key=compiled.key, known=compiled.known)


def save_estimated(call: BoundCall, report: CompileReport) -> Config | None:
    """Saves the config with the best estimate of a check as the result of a call, until one is measured.

    Args:
        call: the call.
        report: the check.

    Returns:
        The config; None where none has an estimate.
    """
    best = report.ranked[0]
    if best.figures is None or best.figures.estimate is None:
        return None
    described, settings = keyed_to_tune(call, report.target), environment.current()
    searched = Searched(ESTIMATED, len(report.compiled), call.configs.size)
    findings = findings_now(call, math.nan, report.trials, searched)
    entry = entry_for(described, best.config, findings, {"name": ESTIMATED})
    entry |= {"time_ms": None, "estimated_ms": report.estimated_ms(best)}
    open_store(settings).merge(call.name, {described.key.device: {described.key.text: entry}}, prefer=more_thorough)
    return best.config


def _is_answer(trial: Trial, target: Target) -> bool:
    """Returns whether a known trial has all that a check for a target asks."""
    figures = trial.figures
    return not target.estimates or figures is None or bool(figures.estimate or figures.no_estimate)
