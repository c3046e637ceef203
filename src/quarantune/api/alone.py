"""Runs one config of a call alone, as a sweep would run it, for the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quarantune.api.autotune import Autotuned
from quarantune.api.tuner import AutoTuner
from quarantune.resolve.bound_call import BoundCall
from quarantune.resolve.call_key import keyed_to_tune
from quarantune.sweep import sweep
from quarantune.sweep.events import SweepEvents
from quarantune.sweep.isolation import Isolation
from quarantune.sweep.limits import SweepLimits
from quarantune.values import settings as environment
from quarantune.values.json_object import JsonObject
from quarantune.values.texts import did_you_mean
from quarantune.values.trial import Trial


@dataclasses.dataclass(frozen=True)
class Alone:
    """The end of a config that ran alone.

    Attributes:
        trial: its trial.
        log: its whole output.
        complaint: how the function's defaults disagreed with the reference; else empty.
    """

    trial: Trial
    log: str
    complaint: str


def run_alone(tuned: Autotuned | AutoTuner, args: tuple[Any, ...], kwargs: Mapping[str, Any], raw: JsonObject) -> Alone:
    """Runs a config for a call, whatever `prune_fn` says of it, and saves nothing.

    Args:
        tuned: the function.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
        raw: the config as JSON: one of the function's, or another that it can take.

    Raises:
        TypeError, ValueError: the function cannot take the call or the config.
    """
    call = _with_config(BoundCall(tuned._resolver.function, args, kwargs), raw)
    trials: dict[int, Trial] = {}
    with (
        tempfile.TemporaryDirectory(prefix="quarantune-run-") as logs,
        environment.settings(log_dir=logs, disable_cache=True),
    ):
        settings, options = environment.current(), call.function.options
        # This process traces the defaults to compare them with those of workers; what that prints is not the config's.
        is_here = settings.isolation == Isolation.NONE.value
        aside: Any = contextlib.nullcontext() if is_here else contextlib.redirect_stdout(io.StringIO())
        with aside:
            swept = sweep.run(
                keyed_to_tune(call).problem(),
                {0: call.configs[0]},
                options=options,
                settings=settings,
                limits=SweepLimits.of(options, settings),
                events=SweepEvents(on_trial=trials.__setitem__),
                has_final=False,
            )
        trial = trials[0]
        # The file begins with the config and the message.
        files = Path(logs).glob("*/*-0000.log")
        kept = [file.read_text("utf-8").split("\n", 2 + trial.message.count("\n"))[-1] for file in files]
    return Alone(trial, "".join(kept) or trial.log_tail, swept.complaint)


def _with_config(call: BoundCall, raw: JsonObject) -> BoundCall:
    """Returns the call of a function that has one config."""
    function = call.function
    if (unknown := next((name for name in raw if name not in call.tunables), None)) is not None:
        near = did_you_mean(unknown, call.tunables) or f" Tuned are: {', '.join(sorted(call.tunables))}."
        raise ValueError(f"{function.name} has no tunable {unknown!r}.{near}")
    options: Any = vars(function.options) | {"name": function.name}
    alone = AutoTuner(function.fn, [call.find(raw) or raw], **options)
    return BoundCall(alone._resolver.function, call.args, call.kwargs)
