"""`quarantune tune`: tunes ahead of time."""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from quarantune.api import ahead
from quarantune.api.contextual import Contextual
from quarantune.cli import calls, functions
from quarantune.cli.calls import Call
from quarantune.cli.output import DONE, FAILED, InputError, Output, input_errors
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.results.contextual_result import labels
from quarantune.results.result import TuningResult
from quarantune.values import settings as environment
from quarantune.values.config_values import encode
from quarantune.values.shown import format_config
from quarantune.values.trial import TuningFailedError, count_outcomes

_FOR_PEOPLE = ("shown", "table")
"""The parts of a record that are not for programs."""


def tune(options: argparse.Namespace, out: Output) -> int:
    """Tunes each call of a function that is not tuned yet; a call for which all configs fail is reported."""
    with input_errors(ValueError):
        given = {"search": options.search, "max_trials": options.max_trials, "time_budget": options.time_budget}
        # Looking for results and nothing else, as the environment may demand of a program, is not what was asked for.
        override = environment.settings(on_miss="tune", **{k: v for k, v in given.items() if v is not None})
    with override:
        _check_cache()
        tuned = functions.load_tuned(options.function)
        with input_errors(TypeError, ValueError):
            function = ahead.function_of(tuned)
        wanted = calls.make(function, options.texts, options)
        records = []
        for call in wanted:
            record = _tune(tuned, function, call, options.force)
            records.append(record)
            _show(record, out, alone=len(wanted) == 1)
    out.json([{key: value for key, value in record.items() if key not in _FOR_PEOPLE} for record in records])
    return FAILED if any(record["error"] for record in records) else DONE


def _check_cache() -> None:
    """Raises where nothing could be saved, before any work starts."""
    with input_errors(ValueError):
        settings = environment.current()
    if settings.disable_cache:
        raise InputError("QUARANTUNE_DISABLE_CACHE is set, so that nothing would be saved: unset it")
    try:
        settings.cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=settings.cache_dir, prefix=".probe-", suffix=".tmp"):
            pass
    except OSError as error:
        raise InputError(
            f"nothing can be saved in {os.fspath(settings.cache_dir)!r} ({error.strerror}): give another directory "
            "with --cache-dir or QUARANTUNE_CACHE_DIR"
        ) from error


def _tune(tuned: ahead.Tuned, function: TunedFunction, call: Call, force: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "function": function.name,
        "call": call.describe(function.signature),
        "device": None,
        "key": None,
        "config": None,
        "time_ms": None,
        "default_time_ms": None,
        "speedup": None,
        "from_cache": False,
        "outcomes": {},
        "tie": [],
        "stopped": "",
        "error": None,
        "shown": "",
        "table": "",
    }
    try:
        with input_errors(TypeError, ValueError, ImportError):
            result = ahead.result_of(tuned, call.args, call.kwargs, anew=force)
    except TuningFailedError as error:
        return record | {"outcomes": count_outcomes(error.trials), "key": error.key, "error": str(error)}
    record |= _of_result(result)
    if isinstance(tuned, Contextual):
        chosen = tuned.lookup(*call.args, **call.kwargs) or {}
        kernels = dict(zip(labels([slot.name for slot in chosen]), chosen.values(), strict=True))
        record["config"] = encode(kernels)
        record["shown"] = ", ".join(f"{name}: {format_config(config)}" for name, config in kernels.items())
    return record


def _of_result(result: TuningResult) -> dict[str, Any]:
    return {
        "device": result.device,
        "key": result.key,
        "config": encode(result.best_config),
        "shown": result.config_text,
        "time_ms": result.time_ms,
        "default_time_ms": result.default_time_ms,
        "speedup": result.speedup,
        "from_cache": bool(result.from_cache),
        "outcomes": count_outcomes(result.trials),
        "tie": [encode(config) for config in result.tie],
        "stopped": result.stopped,
        "table": result.table if result.trials else "",
    }


def _show(record: dict[str, Any], out: Output, *, alone: bool) -> None:
    label = f"{record['function']}({record['call']})"
    if record["error"]:
        out.line(f"{label}: {record['error']}")
        return
    if alone and record["table"]:
        out.line(record["table"](width=out.width))
        out.line()
    time = "" if not record["time_ms"] else f", {record['time_ms']:.4g} ms"
    gain = f", {record['speedup']:.3g}x the defaults" if record["speedup"] else ""
    origin = ", from the cache (--force tunes again)" if record["from_cache"] else ""
    out.line(f"{label}: {record['shown']}{time}{gain}{origin}")
