"""Trials without a sandbox: in the caller's own process, because the operator asked for it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping

from quarantune import payload, trial
from quarantune.outcomes import Config, Outcome, Phase, Route, Trial
from quarantune.sandbox.worker import describe_error


def run(
    call: payload.Call,
    configs: Mapping[int, Config],
    *,
    arrays_fd: int,
    options: dict[str, object],
    finish: Callable[[int, Trial, str], None],
) -> None:
    """Runs every config here, one after another; only what is raised is contained.

    Args:
        call: the call.
        configs: the configs by index.
        arrays_fd: the file that holds its arrays' bytes; -1 for none.
        options: as for `trial.Bench`.
        finish: told of each config's index, trial and output as it ends.
    """
    for index, config in configs.items():
        ended = _run_one(trial.Bench(call, arrays_fd=arrays_fd, options=options), config)
        finish(index, ended, ended.log_tail)


def _run_one(bench: trial.Bench, config: Config) -> Trial:
    so_far = Trial(config=config, outcome=Outcome.OK, phase=Phase.COMPILE, route=Route.IN_PROCESS)
    try:
        compiled = bench.compile(config, target=None, save_fd=None)
        so_far = dataclasses.replace(so_far, compile_s=compiled["compile_s"], phase=Phase.CHECK)
        bench.check(config, load_fd=None)
        so_far = dataclasses.replace(so_far, phase=Phase.MEASURE)
        samples = bench.measure()["samples_ms"]
    except Exception as error:
        assert so_far.phase is not None
        about = describe_error(error)
        return dataclasses.replace(
            so_far,
            outcome=Outcome(trial.outcome_of(error, so_far.phase.value)),
            message=f"{about['error']}: {about['message']}",
            log_tail=about["traceback"],
        )
    return dataclasses.replace(so_far, time_ms=statistics.median(samples), samples_ms=tuple(samples))
