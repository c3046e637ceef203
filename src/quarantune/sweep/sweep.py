"""One sweep: packs the call, and lets the processes of the sweep's mode run its configs."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from quarantune.cache.file_names import safe_name
from quarantune.calls import given_inputs
from quarantune.host.shared_files import Directory
from quarantune.scheduler.plan import Finish
from quarantune.sweep import processes
from quarantune.sweep.request import Problem, SweepRequest, Swept
from quarantune.transport import payload, program_values
from quarantune.transport.payload import PackedCall
from quarantune.values.codec import originals
from quarantune.values.configs import Config, format_config
from quarantune.values.options import Options
from quarantune.values.trial import Trial

_logger = logging.getLogger("quarantune")

_sweep_numbers = itertools.count(1)


def run(
    request: SweepRequest,
    configs: Mapping[int, Config],
    *,
    packed: PackedCall | None = None,
) -> Swept:
    """Runs every config to its outcome, then times the fastest once more, in alternation.

    Args:
        request: the call, and the conditions under which its configs run.
        configs: the configs by index, in the order to try them.
        packed: the call as another machine has packed it, in place of the function and arguments of the request; None
            to pack them here.

    Returns:
        Everything that the sweep found except its trials.

    Raises:
        TypeError: a part of the call cannot travel to another process; no process has started.
        ValueError: the settings name a device that does not exist.
        SandboxError: the sandbox itself failed.
    """
    possible, runs_in = request.possible(configs), processes.of(request)
    if packed is None:
        packed = pack(request.problem, possible, request.options, is_sent=runs_in.sends)
    observers = runs_in.observers(packed, possible)
    runs_in.check(packed, possible)
    return runs_in.run(configs, packed, _finisher(request), observers=observers)


def _finisher(request: SweepRequest) -> Finish:
    """Returns a function that keeps the log of a trial, and enters the trial into the ledger."""
    settings, name, ledger = request.settings, request.problem.name, request.ledger
    sweep_number = next(_sweep_numbers)

    def finish(index: int, trial: Trial, log: str) -> None:
        if settings.log_dir is not None:
            _keep_log(settings.log_dir, name, f"{os.getpid()}-{sweep_number}-{index:04d}", trial, log)
        ledger.end(index, trial)

    return finish


def pack(
    problem: Problem,
    configs: Sequence[Config],
    options: Options,
    *,
    with_values: bool = True,
    is_sent: bool = True,
) -> PackedCall:
    """Packs a call, with the arguments to run with and the functions that judge outputs.

    Args:
        problem: the call.
        configs: configs with all values that the configs of the space have.
        options: the author's options.
        with_values: see `payload.pack_call`.
        is_sent: see `payload.pack_call`.
    """
    judges = {name: fn for name in ("ref_fn", "check_fn") if callable(fn := getattr(options, name))}
    args, kwargs = given_inputs.arguments(problem.fn, problem.args, problem.kwargs, options.supply)
    return payload.pack_call(
        problem.fn,
        args,
        kwargs,
        judges,
        originals(configs),
        problem.manual_mesh,
        devices=math.inf if problem.platform == "cpu" else options.devices_per_trial,
        with_values=with_values,
        program_values=program_values.collect([problem.fn, *judges.values()]) if is_sent else (),
        is_sent=is_sent,
    )


def _keep_log(directory: Path, name: str, label: str, trial: Trial, log: str) -> None:
    """Keeps the output of a trial; warns if it cannot write it."""
    text = f"# {format_config(trial.config)}\n# {trial.outcome.value}: {trial.message}\n{log}"
    try:
        with Directory(directory, safe_name(name), make=True) as place:
            place.replace(f"{label}.log", text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        _logger.warning("cannot keep a trial's log in %s: %s", directory, error)
