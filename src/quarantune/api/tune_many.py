"""Tunes for many calls, each by a separate sweep, on this machine or on an engine."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeAlias

from quarantune.answers.recording import RecordedCall
from quarantune.api.autotune import BoundMethod, read_context
from quarantune.api.tuner import Tuned
from quarantune.functions.binding import Arguments
from quarantune.host.frames import own_frames_hidden
from quarantune.results.result import TuningResult
from quarantune.values import blocks
from quarantune.values.texts import shown

if TYPE_CHECKING:
    from quarantune.engine.distributed import WholeSweeps

MOST = 64
"""The most problems that tune at a time; one thread waits for each."""
_Tune: TypeAlias = Callable[[], TuningResult]
_Result: TypeAlias = TuningResult | Exception


def tune_many(calls: Iterable[Sequence[Any] | RecordedCall], *, executor: Executor | None = None) -> list[TuningResult]:
    """Returns the results for many calls, from the cache or by tuning now.

    Each machine of the executor gets the whole sweep of one problem, and then the next. If a search does not try a
    problem's whole space, several machines share the problem. Calls with the same key are tuned once.

    Args:
        calls: for each call a tuple of a tuned function or an `AutoTuner`, its positional arguments as a tuple, and, if
            there are any, its keyword arguments as a dict; or a call from `recording` or `calls_in`.
        executor: a `concurrent.futures.Executor`; None for the setting `executor`. Without either, this machine tunes
            one call after another.

    Returns:
        The results, in the order of the calls.

    Raises:
        ExceptionGroup: Tuning failed for some problems. The results of all others are in the cache.
        TypeError: `calls` holds something that is not a call.

    Example:
        >>> import jax, quarantune
        >>> import jax.numpy as jnp
        >>> @quarantune.autotune({"batch": [1, 64]})
        ... @jax.jit(static_argnames=["batch"])
        ... def scale(x, batch: int = 1):
        ...     return jax.lax.map(lambda each: 2 * each + 1, x, batch_size=batch)
        >>> program = jax.jit(lambda x, y: scale(x).sum() + scale(y).sum())
        >>> calls = quarantune.calls_in(program, jnp.ones(2**16), jnp.ones(2**17))
        >>> [result.best_config for result in quarantune.tune_many(calls)]
        [{'batch': 64}, {'batch': 64}]
    """
    tunes = [_tune_of(call) for call in calls]
    done: list[None] = []
    engine = blocks.current().executor if executor is None else executor
    with own_frames_hidden(), blocks.settings(executor=engine, record=None):  # a call that was recorded is tuned now
        try:
            outcomes = [_outcome(tune, done) for tune in tunes] if engine is None else _all_at_once(tunes, engine, done)
        except KeyboardInterrupt as error:
            error.add_note(f"tune_many: {len(done)} of {len(tunes)} calls are done: continue with the next run")
            raise
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(tunes)} problems could not be tuned", errors)
    return [outcome for outcome in outcomes if isinstance(outcome, TuningResult)]


def _tune_of(call: Any) -> _Tune:
    if isinstance(call, RecordedCall):
        return call.tune
    advice = "give (function, args) or (function, args, kwargs), with args as a tuple and kwargs as a dict"
    if not isinstance(call, (tuple, list)) or len(call) not in (2, 3):
        raise TypeError(f"{shown(call)} is not a call to tune for: {advice}")
    function, args, kwargs = (*call, {})[:3]
    if isinstance(method := function, BoundMethod) and isinstance(args, (tuple, list)):
        function, args = method.__func__, (method.__self__, *args)
    if not isinstance(function, Tuned):
        raise TypeError(f"{shown(function)} is neither an autotuned function nor an AutoTuner: {advice}")
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise TypeError(f"the arguments of {shown(function)} are {shown(args)} and {shown(kwargs)}: {advice}")
    arguments: Arguments = tuple(args), dict(kwargs)
    return lambda: function.result(arguments)


def _outcome(tune: _Tune, done: list[None]) -> _Result:
    try:
        result = tune()
    except Exception as error:
        return error
    done.append(None)
    return result


def _all_at_once(tunes: Sequence[_Tune], executor: Executor, done: list[None]) -> list[_Result]:
    from quarantune.engine.distributed import WholeSweeps

    whole = WholeSweeps(executor)
    with blocks.settings(executor=whole):
        with ThreadPoolExecutor(min(MOST, max(1, len(tunes))), "quarantune-tune-many") as threads:
            if threads.submit(read_context).result() == read_context():
                # Each thread runs inside the `settings` blocks of this one.
                runs = [contextvars.copy_context().run for _ in tunes]
                futures = [threads.submit(run, _outcome, tune, done) for run, tune in zip(runs, tunes, strict=True)]
                return _followed(futures, whole)
        return [_outcome(tune, done) for tune in tunes]  # a JAX context manager holds in this thread only


def _followed(futures: Sequence[Future[_Result]], whole: WholeSweeps) -> list[_Result]:
    """Returns the results of threads; an exception in this thread, such as Ctrl-C, ends all of them."""
    try:
        wait(futures)
    except BaseException:
        whole.interrupt()
        for future in futures:
            future.cancel()
        raise
    return [future.result() for future in futures]
