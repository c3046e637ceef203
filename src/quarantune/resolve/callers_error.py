"""The error of a call that is wrong whatever the config, which the caller gets instead of a table of failures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quarantune.resolve.bound_call import BoundCall
from quarantune.values.trial import Outcome, Trial


def callers_error(call: BoundCall, trials: Iterable[Trial]) -> Exception | None:
    """Returns the error that all configs ended with, if tracing the function with its defaults raises it here, too.

    It says nothing about other calls of the same key, such as those with a tuple for a list. Nothing is compiled or
    run in this process, so that a function that is not jitted has no such error.

    Args:
        call: the call.
        trials: those of the configs that ran, and of any that `prune_fn` dropped.
    """
    from quarantune.worker.main import describe_error  # which cached calls do not need

    ends = {(trial.outcome, trial.message) for trial in trials if trial.outcome is not Outcome.PRUNED}
    if len(ends) != 1 or not call.function.is_jitted or call.untuned is None:
        return None
    jitted: Any = call.function.fn
    try:
        jitted.eval_shape(*call.args, **call.kwargs)
    except Exception as error:
        if ends == {(Outcome.ERROR, describe_error(error).message)}:
            error.add_note(f"{call.name}: every config fails in this way, and so do the defaults")
            return error
    return None
