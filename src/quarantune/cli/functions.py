"""`quarantune tune`, `check` and `run`: tune a function, compile all its configs, or run one config."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeAlias

import quarantune.ray
from quarantune.answers import recording as recorded
from quarantune.answers.recording import RecordedCall
from quarantune.api import ahead
from quarantune.api.autotune import Autotuned
from quarantune.api.compile_check import compile_check, save_estimated
from quarantune.api.contextual import Contextual
from quarantune.api.tune_many import MOST, tune_many
from quarantune.api.tuner import Tuned
from quarantune.calls.call import BoundCall
from quarantune.calls.rebuilt import described_arguments, described_settings
from quarantune.cli import calls
from quarantune.cli.call_texts import GivenCall
from quarantune.cli.output import (
    DONE,
    ERROR_STYLE,
    FAILED,
    OK_STYLE,
    InputError,
    Output,
    counted,
    input_errors,
    message_of,
    printable_lines,
)
from quarantune.devices import discovery, targets
from quarantune.engine import distributed
from quarantune.functions.names import PROGRAMS
from quarantune.host.shared_files import Directory, advice
from quarantune.results.report import CompileReport
from quarantune.results.result import TuningResult, labels
from quarantune.values import blocks
from quarantune.values.codec import JsonObject, as_json, canonical_json, decode_json
from quarantune.values.configs import Config, format_config
from quarantune.values.errors import TuningFailedError
from quarantune.values.texts import call_text, did_you_mean, printable, shown
from quarantune.values.trial import Outcome, Trial, count_outcomes

_UNKNOWN = ("device", "config", "time_ms", "default_time_ms", "speedup", "speedup_interval")
"""Fields of a record that are null if all configs failed."""

End: TypeAlias = TuningResult | TuningFailedError


def tune(options: argparse.Namespace, out: Output) -> int:
    """Tunes each call of a function without a result yet; reports a call if all its configs fail."""
    if options.dry_run and options.profile is None:
        raise InputError("--dry-run belongs to --profile: leave it out, or add --profile PATH")
    recording = options.recorded
    if options.profile is not None and options.recorded is None:
        with input_errors(ValueError):
            recording = blocks.current().record
    given = {name: getattr(options, name) for name in ("search", "max_trials", "time_budget")}
    with input_errors(ValueError):
        # The environment may restrict programs to saved results; this command must tune all the same.
        override = blocks.settings(on_miss="tune", record=None, **{k: v for k, v in given.items() if v is not None})
    if options.estimate_for is not None:
        check_cache()
        usual = {"all": False, "target": options.estimate_for, "estimate": True}
        return check(argparse.Namespace(**vars(options) | usual), out, saves=True)
    records = []
    with override, contextlib.ExitStack() as engine:
        check_cache()
        if options.recorded is None and options.profile is None:
            tuned = calls.load_tuned(options.function)
            with input_errors(TypeError, ValueError):
                function = tuned.function
            wanted = calls.make(function, options)
        if options.executor is not None:
            executor = engine.enter_context(_connected(options.executor))
            engine.enter_context(blocks.settings(executor=executor))
        if options.recorded is not None or options.profile is not None:
            return _tune_recorded(options, out, recording)
        for call, (ended, was_known) in zip(wanted, _ends(tuned, wanted, options), strict=True):
            about = {"function": function.name, "call": calls.describe(call, function.signature)}
            record, text = told(tuned, call, ended, was_known=was_known)
            records.append(about | record)
            if len(wanted) == 1 and isinstance(ended, TuningResult) and ended.trials:
                out.line(f"{ended.table(width=out.width)}\n")
            out.line(f"{function.name}({about['call']}): {text}")
            if not isinstance(tuned, Contextual) and (repeating := _repeating(ended.trials, options)):
                out.line(f"to repeat one that failed, alone:\n  {repeating}")
    out.json(records)
    return FAILED if any(record["error"] for record in records) else DONE


def _ends(tuned: Tuned, wanted: Sequence[GivenCall], options: argparse.Namespace) -> Iterator[tuple[End, bool]]:
    """Yields the outcome of each call, and whether it came from the cache."""
    known: list[bool] = []
    if options.executor is not None and len(wanted) > 1 and not isinstance(tuned, Contextual):
        # The machines of the engine tune all calls at a time and fill the cache. The look-ups below then find the
        # results; failed calls fail once more.
        with input_errors(TypeError, ValueError, ImportError):
            known = [ahead.is_known(tuned, call.args, call.kwargs) and not options.again for call in wanted]
        with blocks.settings(always_tune=options.again), contextlib.suppress(ExceptionGroup):
            tune_many([(tuned, call.args, call.kwargs) for call in wanted])
    for index, call in enumerate(wanted):
        try:
            with input_errors(TypeError, ValueError, ImportError):
                anew = options.again and not known
                result = tuned.result((call.args, call.kwargs), anew=anew)
            yield result, known[index] if known else result.from_cache not in (False, "default")
        except TuningFailedError as error:
            yield error, False


def check_cache() -> None:
    """Checks before any work starts that the cache can save results.

    Raises:
        InputError: The cache is off, or its directory is not writable.
    """
    with input_errors(ValueError):
        settings = blocks.current()
    if settings.disable_cache:
        raise InputError("QUARANTUNE_DISABLE_CACHE is set, so nothing would be saved: unset it")
    try:
        Directory(settings.cache_dir, make=True).close()
        with tempfile.NamedTemporaryFile(dir=settings.cache_dir, prefix=".probe-", suffix=".tmp"):
            pass
    except OSError as error:
        raise InputError(
            f"nothing can be saved in {os.fspath(settings.cache_dir)!r} ({error.strerror}): {advice(error)}, or give "
            "another directory with --cache-dir or QUARANTUNE_CACHE_DIR"
        ) from error


def told(tuned: Tuned, call: GivenCall, ended: End, *, was_known: bool) -> tuple[JsonObject, str]:
    """Returns the outcome of a call, as JSON and as text."""
    if isinstance(ended, TuningFailedError):
        return _told_failure(ended)
    kernels = _kernels(tuned, call) if isinstance(tuned, Contextual) else {}
    names = ("device", "key", "time_ms", "default_time_ms", "speedup", "speedup_interval", "stopped")
    record = {name: getattr(ended, name) for name in names} | {
        "config": as_json(kernels or ended.best_config),
        "outcomes": count_outcomes(ended.trials) or ended.counts,
        "tie": [as_json(config) for config in ended.tie],
        "error": None,
        "from_cache": was_known,
    }
    config = ", ".join(f"{name}: {format_config(config)}" for name, config in kernels.items()) or ended.config_text
    origin = ", from the cache (--again tunes it again)" if was_known else ""
    return record, f"{config}, {ended.findings.text()}{origin}"


def _told_failure(error: TuningFailedError) -> tuple[JsonObject, str]:
    """Returns the failure of a call, as JSON and as text."""
    failed = {"key": error.key, "outcomes": count_outcomes(error.trials), "tie": [], "stopped": "", "error": str(error)}
    return dict.fromkeys(_UNKNOWN) | failed | {"from_cache": False}, str(error)


def _kernels(tuned: Contextual[..., Any], call: GivenCall) -> dict[str, Config]:
    """Returns the configs of the kernels in a function, by short names."""
    chosen = tuned.lookup(*call.args, **call.kwargs) or {}
    return dict(zip(labels([slot.name for slot in chosen]), chosen.values(), strict=True))


def _repeating(trials: Sequence[Trial], options: argparse.Namespace) -> str:
    """Returns the command that runs the first failed config; empty without one, or if no text gave the call."""
    failed = next((trial for trial in trials if trial.outcome.is_failure), None)
    if failed is None or options.args is None:
        return ""
    config = ["--config", json.dumps(as_json(failed.config))]
    call = ["--args", options.args, *(word for text in options.static for word in ("--static", text))]
    return shlex.join(["quarantune", "run", options.function, *config, *call])


# --- recorded calls -------------------------------------------------------------------------------------------

TUNED, _KNOWN, _FAILED, _REFUSED = "tuned", "tuned before", "failed", "not possible here"


def _tune_recorded(options: argparse.Namespace, out: Output, recording: str | Path | None) -> int:
    """Tunes recorded calls without a result yet, and names the calls that it could not tune.

    Args:
        options: the options of the command.
        out: the output.
        recording: the directory of the recorded calls; None for a profile without any.
    """
    loaded, found = recorded_calls(options, recording)
    document: JsonObject = {}
    if options.profile is not None:
        from quarantune.cli import profiled  # few commands read a profile

        job = profiled.read(options.profile, blocks.current(), found)
        document, found = job.show(out), job.to_tune()
        if options.dry_run:
            out.json(document)
            return DONE
        out.line()
    counts, records = Counter[str](), []
    for call, status, (record, text) in _recorded_ends(found, options, loaded):
        about = {"function": call.name, "call": call_text(call.arguments), "count": call.count, "status": status}
        records.append(about | record)
        if status in (TUNED, _FAILED, _REFUSED):
            out.line(printable_lines(f"{call}, met {counted(call.count, 'time')}: {text}"))
        counts[status] += 1
    ends = ", ".join(f"{number} {status}" for status, number in counts.items()) or "nothing to tune"
    place = "no directory (QUARANTUNE_RECORD is not set)" if recording is None else repr(str(recording))
    out.line(f"{counted(len(found), 'call')} recorded in {place}: {ends}")
    out.json(document | {"tuned": records} if document else records)
    return FAILED if counts[_FAILED] or counts[_REFUSED] else DONE


Load: TypeAlias = Callable[[str, str], Tuned | str]
"""Returns the function of a recorded call by its place and its name, or the reason why there is none."""


def recorded_calls(options: argparse.Namespace, recording: str | Path | None) -> tuple[Load, list[RecordedCall]]:
    """Returns the function that the command names, or functions by their names, and the recorded calls.

    Args:
        options: the options of the command.
        recording: the directory of the recorded calls; None for none.

    Raises:
        InputError: The directory or the function does not exist.
    """
    named = None if options.function is None else calls.load_tuned(options.function)
    loaded: Load = functools.cache(loaded_by_name) if named is None else lambda *_: named
    if recording is None:
        return loaded, []
    directory = Path(os.path.expanduser(recording))
    if not directory.is_dir():
        label = "QUARANTUNE_RECORD=" if options.recorded is None else "--recorded "
        raise InputError(f"{label}{shown(str(recording))} is not a directory: name that of QUARANTUNE_RECORD")
    name = None if named is None else named.function.name
    return loaded, [call for call in recorded.read(directory) if name in (None, call.name)]


_Made = tuple[Tuned, GivenCall]
_Ended = tuple[RecordedCall, str, tuple[JsonObject, str]]
"""A call, its status, and its outcome as JSON and as text."""


def _recorded_ends(found: Sequence[RecordedCall], options: argparse.Namespace, loaded: Load) -> Iterator[_Ended]:
    """Yields the outcome of each recorded call."""
    at_a_time = 1
    if (executor := blocks.current().executor) is None:
        here = discovery.platform_and_kind(None)[1]
    else:
        at_a_time, here = MOST, distributed.device(executor).device_kind
    ends_s = math.inf if options.time_budget is None else time.monotonic() + options.time_budget
    for _, alike in itertools.groupby(found, key=lambda call: canonical_json(call.jax_settings)):
        while batch := [*itertools.islice(alike, at_a_time)]:
            ready: list[tuple[RecordedCall, _Made]] = []
            with contextlib.ExitStack() as block:
                with contextlib.suppress(Exception):  # if JAX refuses settings, `made_again` sees another key
                    block.enter_context(described_settings(batch[0].jax_settings))
                left_s = ends_s - time.monotonic()
                for call in batch:
                    status, made, reason = made_again(call, here, loaded, again=options.again)
                    if status == TUNED and left_s <= 0:
                        status, made = "left for the next run", None
                    if made is None:
                        yield call, status, _told_failure(TuningFailedError(reason or status, trials=(), key=""))
                    elif status == _KNOWN:
                        yield _ended(call, made, status)
                    else:
                        ready.append((call, made))
                if left_s < math.inf:
                    block.enter_context(blocks.settings(time_budget=max(left_s, 1e-3)))
                block.enter_context(blocks.settings(always_tune=options.again))
                if executor is not None:
                    with contextlib.suppress(ExceptionGroup):  # these fail once more below
                        tune_many((fn, to.args, to.kwargs) for _, (fn, to) in ready if not isinstance(fn, Contextual))
                yield from (_ended(call, made, TUNED) for call, made in ready)


def made_again(call: RecordedCall, here: str, loaded: Load, *, again: bool) -> tuple[str, _Made | None, str]:
    """Returns the planned status of a call; its function and arguments without values, or None; and the reason."""
    if call.device != here:
        return f"for {call.device}, and not for {here}", None, ""
    try:
        if isinstance(tuned := loaded(call.function, call.name), str):
            return _REFUSED, None, tuned
        args, kwargs = described_arguments(dict(call.arguments), tuned.function)
        if not ahead.is_same(call, tuned, args, kwargs):
            return _REFUSED, None, "made again, it has another key, as inside shard_map: tune it in the calling program"
        status = TUNED if again or not ahead.is_known(tuned, args, kwargs) else _KNOWN
    except Exception as error:  # also from the author's functions
        return _REFUSED, None, f"it cannot be made again ({message_of(error)}): tune it with --inputs"
    return status, (tuned, GivenCall(args, kwargs)), ""


def loaded_by_name(function: str, name: str) -> Tuned | str:
    """Imports a function, or its tuner in the same module; returns a message if that fails."""
    module = function.partition(":")[0]
    if "<locals>" in function or module in PROGRAMS or not module.replace(".", "_").isidentifier():  # a path, for one
        return f"{function!r} is not at the top of a module: tune it in Python, with tune_many(recording)"
    try:
        found, missing = calls.load(function), f"{module!r} tunes nothing of the name {name!r}."
    except InputError as error:
        found, missing = None, str(error)
    for candidate in (found, *vars(sys.modules.get(module, object)).values()):
        if isinstance(candidate, Tuned) and candidate.function.name == name:
            return candidate
    return f"{missing} Or name it: quarantune tune PATH/FILE.py:NAME --recorded DIR"


def _ended(call: RecordedCall, made: _Made, status: str) -> _Ended:
    tuned, again = made
    ended: End
    try:
        ended = tuned.result((again.args, again.kwargs))
    except Exception as error:  # the other calls continue
        failed = TuningFailedError(message_of(error), trials=(), key="")
        ended, status = error if isinstance(error, TuningFailedError) else failed, _FAILED
    return call, status, told(tuned, again, ended, was_known=status == _KNOWN)


# --- the engine that `--executor` names -----------------------------------------------------------------------

_CONNECT_S = 20
"""Seconds to wait for an engine's answer; no network that is fit for tuning takes longer."""
_SCHEMES = ("dask", "ray")


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Executor]:
    """Yields an executor whose tasks run on an engine, and closes the connection in the end.

    Args:
        address: `dask://HOST:PORT`, `ray://HOST:PORT`, or `ray://auto` for the cluster of this machine.

    Raises:
        InputError: The engine does not answer, or this Python lacks its library.
    """
    scheme, separator, place = address.partition("://")
    if not separator or scheme not in _SCHEMES or not place:
        near = did_you_mean(scheme, _SCHEMES) if separator else ""
        raise InputError(
            f"--executor {shown(address)} is unknown.{near} Write dask://HOST:PORT, ray://HOST:PORT or ray://auto."
        )
    library = {"dask": "distributed", "ray": "ray"}[scheme]
    try:
        engine: Any = importlib.import_module(library)
    except ImportError as error:
        name = scheme.capitalize()
        raise InputError(f"--executor {scheme}:// needs {name}: pip install 'quarantune[{scheme}]'") from error
    with contextlib.ExitStack() as connection:
        try:
            if scheme == "dask":
                client = connection.enter_context(engine.Client(f"tcp://{place}", timeout=_CONNECT_S))
                # With `pure`, Dask would run two calls with equal arguments once.
                executor = client.get_executor(pure=False)
            else:
                engine.init("auto" if place == "auto" else address, log_to_driver=False)
                connection.callback(engine.shutdown)
                executor = quarantune.ray.executor()
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            if "ray[client]" in str(error) or isinstance(error, ImportError):
                raise InputError(f"--executor {address} needs Ray's client: pip install 'quarantune[ray]'") from error
            kind = "Dask scheduler" if scheme == "dask" else "Ray cluster"
            reason = message_of(error)
            raise InputError(f"no {kind} answers at {place!r} ({reason}): start one, or correct the address") from error
        yield executor


# --- one compile check of all configs -------------------------------------------------------------------------


def check(options: argparse.Namespace, out: Output, *, saves: bool = False) -> int:
    """Compiles the configs of each call. It fails if no config compiles; with `--all`, if any config does not.

    Args:
        options: the options of the command.
        out: receives the reports.
        saves: whether to save the config with the best estimate. A call without any estimate is then a failure.
    """
    with input_errors(ValueError, ImportError):
        target = targets.usable(options.target)
    tuned = calls.load_tuned(options.function)
    if not isinstance(tuned, Autotuned):
        raise InputError(f"{options.function} is not an autotuned function: check a kernel that it calls")
    function = tuned.function
    checked = functools.partial(compile_check, target=target, again=options.again, estimate=options.estimate)
    records: list[JsonObject] = []
    ended_well = True
    for call in calls.make(function, options):
        with input_errors(TypeError, ValueError, ImportError):
            report = checked(tuned, function.configs, *call.args, **call.kwargs)
        described = calls.describe(call, function.signature)
        if records:
            out.line()
        out.line(f"{function.name}({described}) on {target.name}")
        out.line(report.table(width=out.width))
        if report.known:
            out.line("--again compiles all of them")
        if saves:
            best = save_estimated(BoundCall(function, call.args, call.kwargs), report)
            told = "no config has an estimate" if best is None else f"{format_config(best)}, estimated, never measured"
            out.line(told)
            ended_well &= best is not None
        records.append(_check_record(report, described))
        ended_well &= report.ok if options.all else bool(report.compiled)
    out.json(records)
    return DONE if ended_well else FAILED


def _check_record(report: CompileReport, call: str) -> JsonObject:
    return {
        "function": report.name,
        "call": call,
        "target": report.target.name,
        "ok": report.ok,
        "known": report.known,
        "outcomes": count_outcomes(report.trials),
        "trials": [_trial_record(trial) | {"estimated_ms": report.estimated_ms(trial)} for trial in report.trials],
    }


def _trial_record(trial: Trial) -> JsonObject:
    figures = dataclasses.asdict(trial.figures) if trial.figures else None
    ended = {name: getattr(trial, name) for name in ("outcome", "phase", "compile_s", "message")}
    return {"config": as_json(trial.config), "figures": figures} | ended


# --- one config alone -----------------------------------------------------------------------------------------

_TRIAL_FIELDS = ("outcome", "phase", "time_ms", "compile_s", "peak_memory_bytes", "device_memory_bytes", "message")


def run(options: argparse.Namespace, out: Output) -> int:
    """Runs a config for a call; prints its output, then its outcome."""
    config = _parsed_config(options.config)
    tuned = calls.load_kernel(options.function, to_do="run")
    function = tuned.function
    call, *others = calls.make(function, options)
    if others:
        raise InputError(f"{call.source.partition(',')[0]} gives {1 + len(others)} calls: give one of them")
    with input_errors(TypeError, ValueError):
        trial = ahead.run_alone(tuned, call.args, call.kwargs, config)
    described = calls.describe(call, function.signature)
    _show_alone(f"{function.name}({described}) with {format_config(trial.config)}", trial, out)
    fields = {"device": trial.device or None, **{name: getattr(trial, name) for name in _TRIAL_FIELDS}}
    about = {"function": function.name, "call": described, "config": as_json(trial.config)}
    out.json({**about, **fields, "log": trial.log_tail})
    return DONE if trial.outcome is Outcome.OK else FAILED


def _show_alone(label: str, trial: Trial, out: Output) -> None:
    is_ok = trial.outcome is Outcome.OK
    for line in trial.log_tail.splitlines():
        out.line(printable(line.expandtabs()))
    phase = "" if is_ok or trial.phase is None else f" ({trial.phase.value})"
    time = "" if trial.time_ms is None else f", {trial.time_ms:.4g} ms"
    compiling = "" if trial.compile_s is None else f", compiled in {trial.compile_s:.2f} s"
    outcome = out.styled(trial.outcome.value, OK_STYLE if is_ok else ERROR_STYLE)
    out.line(f"{label}: {outcome}{phase}{time}{compiling}")
    for line in [] if trial.message in trial.log_tail else trial.message.splitlines():
        out.line(f"  {printable(line)}")


def _parsed_config(text: str) -> JsonObject:
    try:
        config = decode_json(text.removeprefix("\ufeff"))
    except ValueError as error:
        raise InputError(f"--config {shown(text)} is not JSON ({error}): write it as '{{\"bm\": 64}}'") from None
    if not isinstance(config, dict) or not config:
        raise InputError(f"--config {shown(text)} is not a config: write values by their names, as '{{\"bm\": 64}}'")
    return config
