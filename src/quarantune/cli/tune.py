"""`quarantune tune`: tunes ahead of time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence

from quarantune.api import ahead
from quarantune.api.contextual import Contextual
from quarantune.api.tune_many import tune_many
from quarantune.cli import calls, engines, functions
from quarantune.cli.calls import Call
from quarantune.cli.output import DONE, FAILED, InputError, Output, input_errors
from quarantune.host.shared_files import Directory
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.results import summary
from quarantune.results.contextual_result import labels
from quarantune.results.result import TuningResult
from quarantune.values import settings as environment
from quarantune.values.config_values import encode
from quarantune.values.json_object import JsonObject
from quarantune.values.shown import format_config
from quarantune.values.trial import Trial, TuningFailedError, count_outcomes

_FOR_PEOPLE = ("shown", "times", "table", "trials")
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
        with _engine(options.executor):
            records = []
            for record in _records(tuned, function, wanted, options):
                records.append(record)
                _show(record, out, alone=len(wanted) == 1)
                if repeating := _repeating(record["trials"], options):
                    out.line(f"to repeat one that failed, alone:\n  {repeating}")
    out.json([{key: value for key, value in record.items() if key not in _FOR_PEOPLE} for record in records])
    return FAILED if any(record["error"] for record in records) else DONE


@contextlib.contextmanager
def _engine(address: str | None) -> Iterator[None]:
    """Lets the sweeps of a block run on a distributed engine, if one is named."""
    if address is None:
        yield
        return
    with engines.connected(address) as executor, environment.settings(executor=executor):
        yield


def _records(
    tuned: ahead.Tuned, function: TunedFunction, wanted: Sequence[Call], options: argparse.Namespace
) -> Iterator[JsonObject]:
    """Yields what came of each call."""
    if options.executor is None or isinstance(tuned, Contextual) or len(wanted) == 1:
        for call in wanted:
            yield _tune(tuned, function, call, options.force)
        return
    # The machines of the engine tune all calls at a time. The results are in the cache then, and calls that failed fail
    # once more as they are looked up.
    with input_errors(TypeError, ValueError, ImportError):
        known = [ahead.is_known(tuned, call.args, call.kwargs) for call in wanted]
    with environment.settings(always_tune=options.force), contextlib.suppress(ExceptionGroup):
        tune_many([(tuned, call.args, call.kwargs) for call in wanted])
    for call, was_known in zip(wanted, known, strict=True):
        record = _tune(tuned, function, call, force=False)
        yield record | {"from_cache": was_known and not options.force}


def _check_cache() -> None:
    """Raises where nothing could be saved, before any work starts."""
    with input_errors(ValueError):
        settings = environment.current()
    if settings.disable_cache:
        raise InputError("QUARANTUNE_DISABLE_CACHE is set, so that nothing would be saved: unset it")
    try:
        Directory(settings.cache_dir, make=True).close()
        with tempfile.NamedTemporaryFile(dir=settings.cache_dir, prefix=".probe-", suffix=".tmp"):
            pass
    except OSError as error:
        raise InputError(
            f"nothing can be saved in {os.fspath(settings.cache_dir)!r} ({error.strerror}): give another directory "
            "with --cache-dir or QUARANTUNE_CACHE_DIR"
        ) from error


def _tune(tuned: ahead.Tuned, function: TunedFunction, call: Call, force: bool) -> JsonObject:
    record: JsonObject = {
        "function": function.name,
        "call": call.describe(function.signature),
        "device": None,
        "key": None,
        "config": None,
        "time_ms": None,
        "default_time_ms": None,
        "speedup": None,
        "speedup_interval": None,
        "from_cache": False,
        "outcomes": {},
        "tie": [],
        "stopped": "",
        "error": None,
        "shown": "",
        "times": "",
        "table": "",
        "trials": (),
    }
    try:
        with input_errors(TypeError, ValueError, ImportError):
            result = ahead.result_of(tuned, call.args, call.kwargs, anew=force)
    except TuningFailedError as error:
        return record | {
            "outcomes": count_outcomes(error.trials),
            "key": error.key,
            "error": str(error),
            "trials": error.trials,
        }
    record |= _of_result(result)
    if isinstance(tuned, Contextual):
        chosen = tuned.lookup(*call.args, **call.kwargs) or {}
        kernels = dict(zip(labels([slot.name for slot in chosen]), chosen.values(), strict=True))
        record["config"] = encode(kernels)
        record["shown"] = ", ".join(f"{name}: {format_config(config)}" for name, config in kernels.items())
    return record


def _of_result(result: TuningResult) -> JsonObject:
    return {
        "device": result.device,
        "key": result.key,
        "config": encode(result.best_config),
        "shown": result.config_text,
        "times": summary.times_text(result),
        "time_ms": result.time_ms,
        "default_time_ms": result.default_time_ms,
        "speedup": result.speedup,
        "speedup_interval": result.speedup_interval,
        "from_cache": result.from_cache not in (False, "default"),
        "outcomes": count_outcomes(result.trials) or result.counts,
        "tie": [encode(config) for config in result.tie],
        "stopped": result.stopped,
        "table": result.table if result.trials else "",
        "trials": result.trials,
    }


def _repeating(trials: Sequence[Trial], options: argparse.Namespace) -> str:
    """Returns the command that runs the first config that failed; empty where none did, or no text gave the call."""
    failed = next((trial for trial in trials if trial.outcome.is_failure), None)
    if failed is None or options.args is None:
        return ""
    config = ["--config", json.dumps(encode(failed.config))]
    call = ["--args", options.args, *(word for text in options.static for word in ("--static", text))]
    return shlex.join(["quarantune", "run", options.function, *config, *call])


def _show(record: JsonObject, out: Output, *, alone: bool) -> None:
    label = f"{record['function']}({record['call']})"
    if record["error"]:
        out.line(f"{label}: {record['error']}")
        return
    if alone and record["table"]:
        out.line(record["table"](width=out.width))
        out.line()
    times = f", {record['times']}" if record["times"] else ""
    origin = ", from the cache (--force tunes again)" if record["from_cache"] else ""
    out.line(f"{label}: {record['shown']}{times}{origin}")
