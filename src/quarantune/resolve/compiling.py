"""Compiles the configs of calls without running them, for a device that is here or need not be."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from quarantune.resolve import engines
from quarantune.resolve.call_key import KeyedCall, keyed_to_tune
from quarantune.resolve.call_result import entry_for, findings_now
from quarantune.resolve.compile_failures import CompileFailures, note_check
from quarantune.resolve.layers import more_thorough, open_store
from quarantune.resolve.tuning_job import check_outside
from quarantune.results.progress import Progress
from quarantune.results.report import CompileReport
from quarantune.sweep import sweep
from quarantune.sweep.events import SweepEvents
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import SweepRequest
from quarantune.values import settings as environment
from quarantune.values.config_values import text_of
from quarantune.values.findings import ESTIMATED, Searched
from quarantune.values.trial import Config, Trial, pruned_trial

if TYPE_CHECKING:
    from quarantune.devices.targets import Target
    from quarantune.resolve.bound_call import BoundCall
    from quarantune.values.settings import Settings


def compile_all(call: BoundCall, *, num_workers: int | None) -> list[tuple[Trial, bytes | None]]:
    """Compiles the configs of a call in workers; runs none, and remembers those that fail.

    Args:
        call: the call.
        num_workers: how many configs compile at a time; None follows the settings.

    Returns:
        For each config its trial, and its executable where there is one that can leave its worker.
    """
    check_outside(call)
    described, settings = keyed_to_tune(call), environment.current()
    limits = SweepLimits.of(call.function.options, settings, num_workers=num_workers)
    configs = {index: call.configs[index] for index in call.configs.listed()}
    trials: dict[int, Trial] = {}
    with _compiling(described, settings, limits, "", configs, trials) as request:
        swept = sweep.run(dataclasses.replace(request, compile_only=True), configs)
    return [(trials[index], swept.executables.get(index)) for index in range(len(call.configs))]


def check_all(call: BoundCall, target: Target, *, num_workers: int | None, again: bool) -> CompileReport:
    """Compiles the configs of a call for a device that need not be here; runs none, and remembers those that fail.

    Args:
        call: the call.
        target: the device.
        num_workers: how many configs compile at a time; None follows the settings.
        again: whether configs are compiled although an earlier job has the verdict on them.
    """
    check_outside(call)
    described, settings = keyed_to_tune(call, target), environment.current()
    trials = {index: pruned_trial(call.configs[index]) for index in call.pruned}
    limits = SweepLimits.of(call.function.options, settings, num_workers=num_workers)
    known = {} if again or settings.disable_cache else _verdicts(described, settings, limits).known(with_compiled=True)
    left = {index: call.configs[index] for index in call.configs.listed() if index not in trials}
    found = {
        index: trial
        for index, config in left.items()
        if (trial := known.get(text_of(config))) is not None and _is_answer(trial, target)
    }
    trials |= {index: dataclasses.replace(trial, config=left.pop(index)) for index, trial in found.items()}
    with _compiling(described, settings, limits, f" for {target.name}", left, trials) as request:
        if left:
            engines.run(dataclasses.replace(request, target=target), left)
    ordered = tuple(trials[index] for index in range(len(call.configs)))
    return CompileReport(name=call.name, target=target, trials=ordered, key=described.key.text, known=len(found))


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


def _verdicts(described: KeyedCall, settings: Settings, limits: SweepLimits) -> CompileFailures:
    return CompileFailures(described, settings.cache_dir, limits, also=settings.cache_path)


@contextlib.contextmanager
def _compiling(
    described: KeyedCall,
    settings: Settings,
    limits: SweepLimits,
    where: str,
    configs: Mapping[int, Config],
    trials: dict[int, Trial],
) -> Iterator[SweepRequest]:
    """Yields the request for configs that are only compiled; shows their progress, and remembers those that fail."""
    note: Callable[[Trial], None] = lambda trial: None  # noqa: E731
    if not settings.disable_cache:
        note = functools.partial(note_check, _verdicts(described, settings, limits))
    config_of = described.call.configs.__getitem__
    with Progress(f"{described.label}{where}", len(configs), shown=settings.progress, config_of=config_of) as progress:

        def on_trial(index: int, trial: Trial) -> None:
            trials[index] = trial
            note(trial)
            progress.step(trial)

        events = SweepEvents(on_trial=on_trial, on_phase=progress.enter)
        problem, options = described.problem(), described.call.function.options
        yield SweepRequest(problem=problem, options=options, settings=settings, limits=limits, events=events)
        progress.conclude_compiling()
