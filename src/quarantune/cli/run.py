"""`quarantune run`: runs one config alone in the sandbox, with all that it prints. Nothing is saved."""

from __future__ import annotations

import argparse
import json

from quarantune.api import ahead
from quarantune.api.ahead import Alone
from quarantune.cli import calls
from quarantune.cli.output import DONE, ERROR_STYLE, FAILED, OK_STYLE, InputError, Output, input_errors
from quarantune.values.config_values import encode
from quarantune.values.json_object import JsonObject
from quarantune.values.shown import format_config
from quarantune.values.texts import printable, shown
from quarantune.values.trial import Outcome

_FIELDS = ("time_ms", "compile_s", "peak_memory_bytes", "device_memory_bytes", "message")


def run(options: argparse.Namespace, out: Output) -> int:
    """Runs a config for a call and prints its output, then its outcome."""
    config = _parsed(options.config)
    tuned = calls.load_kernel(options.function, to_do="run")
    function = ahead.function_of(tuned)
    call, *others = calls.make(function, options)
    if others:
        raise InputError(f"{call.source.partition(',')[0]} gives {1 + len(others)} calls: give one of them")
    with input_errors(TypeError, ValueError):
        alone = ahead.run_alone(tuned, call.args, call.kwargs, config)
    described, trial = calls.describe(call, function.signature), alone.trial
    _show(f"{function.name}({described}) with {format_config(trial.config)}", alone, out)
    ended = {"outcome": trial.outcome.value, "phase": trial.phase.value if trial.phase else None}
    fields = {"device": trial.device or None, **ended, **{name: getattr(trial, name) for name in _FIELDS}}
    about = {"function": function.name, "call": described, "config": encode(trial.config)}
    out.json({**about, **fields, "log": alone.log})
    return DONE if trial.outcome is Outcome.OK else FAILED


def _show(label: str, alone: Alone, out: Output) -> None:
    trial, is_ok = alone.trial, alone.trial.outcome is Outcome.OK
    for line in alone.log.splitlines():
        out.line(printable(line.expandtabs()))
    phase = "" if is_ok or trial.phase is None else f" ({trial.phase.value})"
    time = "" if trial.time_ms is None else f", {trial.time_ms:.4g} ms"
    compiling = "" if trial.compile_s is None else f", compiled in {trial.compile_s:.2f} s"
    outcome = out.styled(trial.outcome.value, OK_STYLE if is_ok else ERROR_STYLE)
    out.line(f"{label}: {outcome}{phase}{time}{compiling}")
    message = "" if trial.message in alone.log else trial.message
    # Where the config is wrong, its message says all that the complaint about one config can say.
    complaint = "" if trial.outcome is Outcome.WRONG else alone.complaint
    for line in [*message.splitlines(), *complaint.splitlines()]:
        out.line(f"  {printable(line)}")


def _parsed(text: str) -> JsonObject:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--config {shown(text)} is no JSON ({error}): write it as '{{\"bm\": 64}}'") from None
    if not isinstance(config, dict) or not config:
        raise InputError(f"--config {shown(text)} is no config: write values by their names, as '{{\"bm\": 64}}'")
    return config
