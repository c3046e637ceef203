"""`quarantune check`: which configs compile for a device that need not be here."""

from __future__ import annotations

import argparse
import dataclasses

from quarantune.api import ahead
from quarantune.api.autotune import Autotuned
from quarantune.api.compile_check import compile_check
from quarantune.cli import calls
from quarantune.cli.output import DONE, FAILED, InputError, Output, input_errors
from quarantune.devices import targets
from quarantune.resolve import compiling
from quarantune.resolve.bound_call import BoundCall
from quarantune.results.report import CompileReport
from quarantune.values.config_values import encode
from quarantune.values.json_object import JsonObject
from quarantune.values.shown import format_config
from quarantune.values.trial import Trial, count_outcomes


def check(options: argparse.Namespace, out: Output, *, saves: bool = False) -> int:
    """Compiles the configs of each call; none compiling is a failure, or with `--all` one that does not.

    Args:
        options: those of the command.
        out: receives the reports.
        saves: whether the config with the best estimate is saved, which none having one prevents.
    """
    with input_errors(ValueError, ImportError):
        target = targets.usable(options.target)
    tuned = calls.load_tuned(options.function)
    if not isinstance(tuned, Autotuned):
        raise InputError(f"{options.function} is no autotuned function: check one of the kernels that it calls")
    function = ahead.function_of(tuned)
    records, ended_well = [], True
    for call in calls.make(function, options):
        with input_errors(TypeError, ValueError, ImportError):
            report = compile_check(
                tuned,
                function.configs,
                *call.args,
                target=target,
                num_workers=options.jobs,
                compile_timeout=options.compile_timeout,
                memory_limit=options.memory_limit,
                again=options.again,
                estimate=options.estimate,
                **call.kwargs,
            )
        described = calls.describe(call, function.signature)
        out.line(f"{function.name}({described}) on {target.name}")
        out.line(report.table(width=out.width))
        if report.known:
            out.line("--again compiles all of them")
        if saves:
            best = compiling.save_estimated(BoundCall(function, call.args, call.kwargs), report)
            told = "no config has an estimate" if best is None else f"{format_config(best)}, estimated, never measured"
            out.line(told)
            ended_well &= best is not None
        out.line()
        records.append(_record(report, described))
        ended_well &= report.ok if options.all else bool(report.compiled)
    out.json(records)
    return DONE if ended_well else FAILED


def _record(report: CompileReport, call: str) -> JsonObject:
    return {
        "function": report.name,
        "call": call,
        "target": report.target.name,
        "ok": report.ok,
        "known": report.known,
        "outcomes": count_outcomes(report.trials),
        "trials": [_trial(trial) | {"estimated_ms": report.estimated_ms(trial)} for trial in report.trials],
    }


def _trial(trial: Trial) -> JsonObject:
    figures = dataclasses.asdict(trial.figures) if trial.figures else None
    ended = {name: getattr(trial, name) for name in ("outcome", "phase", "compile_s", "message")}
    return {"config": encode(trial.config), "figures": figures} | ended
