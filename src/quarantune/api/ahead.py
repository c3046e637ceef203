"""Tunes ahead of time, for callers that know neither how a function is tuned nor by what: such as the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from quarantune.api.autotune import Autotuned
from quarantune.api.contextual import Contextual
from quarantune.api.tuner import AutoTuner
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.results.result import TuningResult

Tuned: TypeAlias = "Autotuned | Contextual | AutoTuner"


def is_tuned(value: object) -> bool:
    """Returns whether an object is a function with a tuner."""
    return isinstance(value, (Autotuned, Contextual, AutoTuner))


def function_of(tuned: Tuned) -> TunedFunction:
    """Returns a function with its configs and options."""
    return tuned._resolver.function


def is_known(tuned: Tuned, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a config is remembered for a call."""
    resolver = tuned._resolver
    return resolver.lookup(resolver.bind(args, kwargs)) is not None


def result_of(tuned: Tuned, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, anew: bool) -> TuningResult:
    """Returns the result for a call, from the cache or by tuning now.

    Args:
        tuned: the function.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
        anew: whether to tune even if a result is cached.

    Raises:
        TuningFailedError: every config failed.
        TypeError: the function does not take these arguments.
    """
    resolver = tuned._resolver
    call = resolver.bind(args, kwargs)
    return resolver.tune(call) if anew else resolver.result(call)
