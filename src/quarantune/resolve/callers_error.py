"""The error of a call that is wrong whatever the config, which the caller gets instead of a table of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quarantune.resolve.bound_call import BoundCall
from quarantune.values.trial import DifferentProgramError, Outcome, Phase, Trial, TuningFailedError


def callers_error(
    call: BoundCall, trials: Iterable[Trial], *, only_there: Callable[[], TuningFailedError] | None
) -> Exception | None:
    """Returns the error that all configs ended with, if tracing the function with its defaults raises it here, too.

    It says nothing about other calls of the same key, such as those with a tuple for a list. Nothing is compiled or
    run in this process, so that a function that is not jitted has no such error.

    Args:
        call: the call.
        trials: those of the configs that ran, and of any that `prune_fn` dropped.
        only_there: makes the error for where only workers raise it while they trace; None if one has traced a config.
    """
    from quarantune.worker.error_report import describe_error  # which cached calls do not need

    ends = {(trial.outcome, trial.phase, trial.message) for trial in trials if trial.outcome is not Outcome.PRUNED}
    if len(ends) != 1 or not call.function.is_jitted or call.untuned is None:
        return None
    jitted: Any = call.function.fn
    try:
        jitted.eval_shape(*call.args, **call.kwargs)
    except Exception as error:
        if [end[::2] for end in ends] == [(Outcome.ERROR, describe_error(error).message)]:
            error.add_note(f"{call.name}: every config fails in this way, and so do the defaults")
            return error
        return None
    outcome, phase, message = ends.pop()
    if only_there is None or (outcome, phase) != (Outcome.ERROR, Phase.COMPILE):
        return None
    failure = only_there()
    failure.add_note(str(DifferentProgramError(call.name, f"only workers raise {message} while they trace it")))
    return failure
