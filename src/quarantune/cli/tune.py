"""`quarantune tune`: tunes ahead of time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from quarantune.api import ahead
from quarantune.api.contextual import Contextual
from quarantune.api.tune_many import tune_many
from quarantune.cli import calls, engines
from quarantune.cli.call_texts import Call
from quarantune.cli.check import check
from quarantune.cli.output import DONE, FAILED, InputError, Output, input_errors
from quarantune.host.shared_files import Directory
from quarantune.results import result
from quarantune.results.result import TuningResult, labels
from quarantune.values import settings as environment
from quarantune.values.config_values import encode
from quarantune.values.json_object import JsonObject
from quarantune.values.shown import format_config
from quarantune.values.trial import Config, Trial, TuningFailedError, count_outcomes

_UNKNOWN = ("device", "config", "time_ms", "default_time_ms", "speedup", "speedup_interval")
"""The fields of a record that are null where all configs failed."""

End: TypeAlias = TuningResult | TuningFailedError


def tune(options: argparse.Namespace, out: Output) -> int:
    """Tunes each call of a function that is not tuned yet; a call for which all configs fail is reported."""
    given = {name: getattr(options, name) for name in ("search", "max_trials", "time_budget")}
    with input_errors(ValueError):
        # Looking for results and nothing else, as the environment may demand of a program, is not what was asked for.
        override = environment.settings(
            on_miss="tune", record=None, **{k: v for k, v in given.items() if v is not None}
        )
    if options.estimate_for is not None:
        _check_cache()
        usual = {"all": False, "compile_timeout": None, "memory_limit": None, "jobs": None}
        usual |= {"target": options.estimate_for, "estimate": True, "again": options.force}
        return check(argparse.Namespace(**vars(options) | usual), out, saves=True)
    records = []
    with override, contextlib.ExitStack() as engine:
        _check_cache()
        if options.recorded is None:
            tuned = calls.load_tuned(options.function)
            with input_errors(TypeError, ValueError):
                function = ahead.function_of(tuned)
            wanted = calls.make(function, options)
        if options.executor is not None:
            executor = engine.enter_context(engines.connected(options.executor))
            engine.enter_context(environment.settings(executor=executor))
        if options.recorded is not None:
            from quarantune.cli import recorded

            return recorded.tune(options, out)
        for call, (ended, was_known) in zip(wanted, _ends(tuned, wanted, options), strict=True):
            about = {"function": function.name, "call": calls.describe(call, function.signature)}
            record, text = told(tuned, call, ended, was_known=was_known)
            records.append(about | record)
            if len(wanted) == 1 and isinstance(ended, TuningResult) and ended.trials:
                out.line(f"{ended.table(width=out.width)}\n")
            out.line(f"{function.name}({about['call']}): {text}")
            if repeating := _repeating(ended.trials, options):
                out.line(f"to repeat one that failed, alone:\n  {repeating}")
    out.json(records)
    return FAILED if any(record["error"] for record in records) else DONE


def _ends(tuned: ahead.Tuned, wanted: Sequence[Call], options: argparse.Namespace) -> Iterator[tuple[End, bool]]:
    """Yields what came of each call, and whether it was in the cache."""
    known: list[bool] = []
    if options.executor is not None and len(wanted) > 1 and not isinstance(tuned, Contextual):
        # The machines of the engine tune all calls at a time. The results are in the cache then, and calls that failed
        # fail once more as they are looked up.
        with input_errors(TypeError, ValueError, ImportError):
            known = [ahead.is_known(tuned, call.args, call.kwargs) and not options.force for call in wanted]
        with environment.settings(always_tune=options.force), contextlib.suppress(ExceptionGroup):
            tune_many([(tuned, call.args, call.kwargs) for call in wanted])
    for index, call in enumerate(wanted):
        try:
            with input_errors(TypeError, ValueError, ImportError):
                anew = options.force and not known
                result = ahead.result_of(tuned, call.args, call.kwargs, anew=anew)
            yield result, known[index] if known else result.from_cache not in (False, "default")
        except TuningFailedError as error:
            yield error, False


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


def told(tuned: ahead.Tuned, call: Call, ended: End, *, was_known: bool) -> tuple[JsonObject, str]:
    """Returns how a call ended, as JSON and as text."""
    if isinstance(ended, TuningFailedError):
        return told_failure(ended)
    kernels = _kernels(tuned, call) if isinstance(tuned, Contextual) else {}
    names = ("device", "key", "time_ms", "default_time_ms", "speedup", "speedup_interval", "stopped")
    record = {name: getattr(ended, name) for name in names} | {
        "config": encode(kernels or ended.best_config),
        "outcomes": count_outcomes(ended.trials) or ended.counts,
        "tie": [encode(config) for config in ended.tie],
        "error": None,
        "from_cache": was_known,
    }
    config = ", ".join(f"{name}: {format_config(config)}" for name, config in kernels.items()) or ended.config_text
    origin = ", from the cache (--force tunes again)" if was_known else ""
    return record, f"{config}, {result.times_text(ended)}{origin}"


def told_failure(error: TuningFailedError) -> tuple[JsonObject, str]:
    """Returns why there is no result for a call, as JSON and as text."""
    failed = {"key": error.key, "outcomes": count_outcomes(error.trials), "tie": [], "stopped": "", "error": str(error)}
    return dict.fromkeys(_UNKNOWN) | failed | {"from_cache": False}, str(error)


def _kernels(tuned: Contextual[..., Any], call: Call) -> dict[str, Config]:
    """Returns the config of each kernel that a function calls, by a short name."""
    chosen = tuned.lookup(*call.args, **call.kwargs) or {}
    return dict(zip(labels([slot.name for slot in chosen]), chosen.values(), strict=True))


def _repeating(trials: Sequence[Trial], options: argparse.Namespace) -> str:
    """Returns the command that runs the first config that failed; empty where none did, or no text gave the call."""
    failed = next((trial for trial in trials if trial.outcome.is_failure), None)
    if failed is None or options.args is None:
        return ""
    config = ["--config", json.dumps(encode(failed.config))]
    call = ["--args", options.args, *(word for text in options.static for word in ("--static", text))]
    return shlex.join(["quarantune", "run", options.function, *config, *call])
