"""Tunes ahead of time, or runs one config alone, on behalf of the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quarantune.answers.recording import RecordedCall
from quarantune.api.autotune import Autotuned, AutoTuner
from quarantune.api.tuner import Tuned
from quarantune.calls.call import BoundCall
from quarantune.calls.key import keyed_to_tune
from quarantune.engine.place import place_of
from quarantune.sweep import sweep
from quarantune.sweep.ledger import Ledger
from quarantune.sweep.request import SweepRequest
from quarantune.values import blocks
from quarantune.values.codec import JsonObject
from quarantune.values.settings import Isolation
from quarantune.values.texts import did_you_mean
from quarantune.values.trial import Trial


def is_known(tuned: Tuned, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether there is a thorough enough result for a call on the devices that would tune it."""
    return tuned._tuner.is_known(tuned._tuner.bind(args, kwargs))


def is_same(recorded: RecordedCall, tuned: Tuned, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call, made again from its record, has the key of the recorded call."""
    device = place_of(blocks.current()).device()
    return RecordedCall.of(keyed_to_tune(tuned._tuner.bind(args, kwargs), device)).identity == recorded.identity


def run_alone(
    tuned: Autotuned[..., Any] | AutoTuner, args: tuple[Any, ...], kwargs: Mapping[str, Any], raw: JsonObject
) -> Trial:
    """Runs a config for a call, even if `prune_fn` drops it, and saves nothing.

    The trial has the whole output instead of the last lines. Its message also describes a disagreement with the
    defaults.

    Args:
        tuned: the function.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
        raw: the config as JSON: one of the function's, or another that it can take.

    Raises:
        TypeError, ValueError: The function cannot take the call or the config.
    """
    call = _with_config(BoundCall(tuned.function, args, kwargs), raw)
    ledger = Ledger()
    with (
        tempfile.TemporaryDirectory(prefix="quarantune-run-") as logs,
        blocks.settings(log_dir=logs, disable_cache=True),
    ):
        settings = blocks.current()
        # This process traces the defaults to compare them with the workers'. Their prints are not the config's output.
        is_here = settings.isolation == Isolation.NONE.value
        aside: Any = contextlib.nullcontext() if is_here else contextlib.redirect_stdout(io.StringIO())
        with aside:
            request = dataclasses.replace(SweepRequest.of(keyed_to_tune(call), settings, ledger), has_final=False)
            swept = sweep.run(request, {0: call.configs[0]})
        trial = ledger.trials[0]
        # The file begins with the config and the message.
        files = Path(logs).glob("*/*-0000.log")
        kept = [file.read_text("utf-8").split("\n", 2 + trial.message.count("\n"))[-1] for file in files]
    return dataclasses.replace(
        trial, ended_s=None, log_tail="".join(kept) or trial.log_tail, message=trial.message or swept.complaint
    )


def _with_config(call: BoundCall, raw: JsonObject) -> BoundCall:
    """Returns the same call of a function with this config alone."""
    function = call.function
    if (unknown := next((name for name in raw if name not in call.tunables), None)) is not None:
        near = did_you_mean(unknown, call.tunables) or f" Tuned are: {', '.join(sorted(call.tunables))}."
        raise ValueError(f"{function.name} has no tunable {unknown!r}.{near}")
    options: Any = vars(function.options) | {"name": function.name}
    alone = AutoTuner(function.fn, [call.find(raw) or raw], **options)
    return BoundCall(alone.function, call.args, call.kwargs)
