"""Tunes for many calls: each by a sweep of its own, or all of them for one config."""

from __future__ import annotations

import contextvars
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from quarantune.api.autotune import Autotuned, AutoTuner, read_context
from quarantune.cache import store as cache
from quarantune.cache.store import CacheWriteError
from quarantune.host.process import own_frames_hidden
from quarantune.resolve.call_key import KeyedCall
from quarantune.resolve.call_results import call_result, entry_for, findings_now
from quarantune.resolve.recorded import RecordedCall
from quarantune.resolve.resolver import Resolver, keyed_for_engine, open_store
from quarantune.results.result import CallShare, TuningResult
from quarantune.transport.problem import Arguments
from quarantune.values import settings as environment
from quarantune.values.codec import JsonObject, equal, text_of
from quarantune.values.settings import EXHAUSTIVE
from quarantune.values.texts import call_text, shown
from quarantune.values.trial import Outcome, Trial, TuningFailedError

if TYPE_CHECKING:
    from quarantune.engine.distributed import WholeSweeps

MOST = 64
"""How many problems are followed at a time, each by one thread."""
_Tune: TypeAlias = Callable[[], TuningResult]
_Result: TypeAlias = TuningResult | Exception
TOTAL, WORST = "total", "worst"


def tune_many(calls: Iterable[Sequence[Any] | RecordedCall], *, executor: Executor | None = None) -> list[TuningResult]:
    """Returns the results for many calls, from the cache or by tuning now.

    Each machine of the executor gets the whole sweep of one problem, and later another; a problem whose space is
    searched, and not tried whole, is divided. Calls with the same key are tuned once.

    Args:
        calls: for each call a tuple of an autotuned function or an `AutoTuner`, its positional arguments as a tuple,
            and, if there are any, its keyword arguments as a dict; or a call that `recording` or `calls_in` has listed.
        executor: a `concurrent.futures.Executor`; None for that of the settings. Without either, this machine tunes one
            after another.

    Returns:
        The results, in the order of the calls.

    Raises:
        ExceptionGroup: some problems could not be tuned; the results of all others are in the cache.
        TypeError: one of the calls is none.

    Example:
        >>> results = tune_many([(matmul, (a, b)), (matmul, (c, d))], executor=pool)  # doctest: +SKIP
    """
    tunes = [_tune_of(call) for call in calls]
    done: list[None] = []
    engine = environment.current().executor if executor is None else executor
    with own_frames_hidden(), environment.settings(executor=engine):
        try:
            outcomes = [_outcome(tune, done) for tune in tunes] if engine is None else _all_at_once(tunes, engine, done)
        except KeyboardInterrupt as error:
            error.add_note(f"tune_many: {len(done)} of {len(tunes)} calls are done: the next run goes on with the rest")
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
        raise TypeError(f"{shown(call)} is no call to tune for: {advice}")
    function, args, kwargs = (*call, {})[:3]
    if not isinstance(function, (Autotuned, AutoTuner)):
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
    with environment.settings(executor=whole):
        with ThreadPoolExecutor(min(MOST, max(1, len(tunes))), "quarantune-tune-many") as threads:
            if threads.submit(read_context).result() == read_context():
                # Each thread is in the blocks of this one.
                runs = [contextvars.copy_context().run for _ in tunes]
                futures = [threads.submit(run, _outcome, tune, done) for run, tune in zip(runs, tunes, strict=True)]
                return _followed(futures, whole)
        return [_outcome(tune, done) for tune in tunes]  # a `with` of JAX's holds in this thread only


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


def tune_for(resolver: Resolver, calls: Sequence[Any], weights: Sequence[float] | None, by: str) -> TuningResult:
    """Returns the result for several calls, and saves it under the key that they share.

    Args:
        resolver: that of the function.
        calls: as for `Autotuned.tune_for`, like the next two.
        weights: the weights.
        by: `total` or `worst`.

    Raises:
        TuningFailedError: no config works for all calls.
        TypeError: a call is none, or sets a tunable by hand.
        ValueError: the calls do not share a key, or an argument is not valid.
    """
    if by not in (TOTAL, WORST):
        raise ValueError(f"by={shown(by)} is not valid: give {TOTAL!r} or {WORST!r}")
    if not resolver.function.options.is_by_time:
        raise ValueError(f"{resolver.function.name}: tune_for compares times: leave out objective, or use tune")
    settings, many = environment.current(), _weights(calls, weights)
    described = [keyed_for_engine(resolver.bind(*_arguments(call)), settings) for call in calls]
    labels = [call_text(each.arguments) for each in described]
    first, name = described[0], described[0].call.name
    for label, other in zip(labels, described, strict=True):
        if other.key != first.key:
            raise ValueError(
                f"{name}: these calls share no key, under which one config for both could be saved: {labels[0]}; and "
                f"{label}. Give autotune a key_fn that returns the same value for them"
            )
    results, found = _sweeps(resolver, described)
    trials = tuple(_merged([each.get(text) for each in found], labels, many) for text in dict.fromkeys(chain(*found)))
    usable = [trial for trial in trials if trial.outcome is Outcome.OK]
    if not usable:
        reasons = "; ".join(dict.fromkeys(trial.message for trial in trials))
        message = f"{name}: no config works for all {len(calls)} calls: {reasons:.2000}"
        raise TuningFailedError(message, trials=trials, key=first.key.text)
    best_ms = [min(trial.time_ms for trial in each.values() if trial.time_ms is not None) for each in found]

    def times_ms(trial: Trial) -> list[float]:
        return [each[text_of(trial.config)].time_ms or math.nan for each in found]

    def score(trial: Trial) -> float:
        return max(map(operator.truediv, times_ms(trial), best_ms)) if by == WORST else trial.time_ms or math.nan

    best, default = min(usable, key=score), results[0].default_config
    default_ms = next((trial.time_ms for trial in usable if equal(trial.config, default)), None)
    findings = findings_now(first.call, best.time_ms or math.nan, trials, results[0].findings.search)
    findings = dataclasses.replace(findings, default_time_ms=default_ms)
    shares = tuple(map(CallShare, labels, many, times_ms(best), best_ms))
    result = dataclasses.replace(call_result(first, best.config, findings, trials), calls=shares, by=by)
    if not settings.disable_cache:
        entry = entry_for(first, best.config, findings, {"name": f"tune_for by {by}"})
        entry["calls"] = [share.to_json() for share in shares]
        try:
            open_store(settings).put(name, first.key.device, first.key.text, entry)
        except CacheWriteError as error:
            cache.report_once(str(error))
    resolver.adopt(first, result, settings)
    return result


def _arguments(call: Any) -> Arguments:
    if isinstance(call, RecordedCall) and call.call is not None:
        return call.call
    if not isinstance(call, (tuple, list, Mapping)):
        raise TypeError(
            f"{shown(call)} is no call: give a tuple of positional arguments, or a dict of keyword arguments"
        )
    return ((), dict(call)) if isinstance(call, Mapping) else (tuple(call), {})


def _weights(calls: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    if weights is None:
        weights = [call.count if isinstance(call, RecordedCall) else 1.0 for call in calls]
    if not calls or len(weights) != len(calls) or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"{len(calls)} calls with weights={shown(weights)}: give calls, and a weight above 0 for each")
    return [float(weight) for weight in weights]


def _sweeps(resolver: Resolver, described: Sequence[KeyedCall]) -> tuple[list[TuningResult], list[dict[str, Trial]]]:
    """Tunes each call under a key of its own; where the first was searched, the others try what worked there.

    Returns:
        The results, and the trials of each by the text of the config, those of the defaults where these may win.
    """
    options, configs = dataclasses.replace(resolver.function.options, key_fn=None), None
    results, found, block = list[TuningResult](), list[dict[str, Trial]](), JsonObject()
    for each in described:
        own = Resolver(resolver.function.with_options(options, configs))
        with environment.settings(**block):
            resume = not environment.current().always_tune
            result = own.tune(own.bind(each.call.args, each.call.kwargs), resume=resume).with_trials()
        # Finals are measured with care; of others, disturbed runs would count.
        measured = {text_of(trial.config): trial.time_ms for trial in result.finalists}
        trials = dict[str, Trial]()
        for trial in result.trials:
            text = text_of(trial.config)
            trials[text] = dataclasses.replace(trial, time_ms=measured.get(text, trial.merit))
        if (default := result.default_config) is not None and options.judges_outputs and result.default_time_ms:
            timed = Trial(config=default, outcome=Outcome.OK, time_ms=result.default_time_ms)
            trials.setdefault(text_of(default), timed)
        results.append(result)
        found.append(trials)
        if results[0].seen != results[0].space_size:
            options = dataclasses.replace(options, max_trials=None, time_budget=None, patience=None)
            configs = [trial.config for trial in results[0].trials if trial.merit is not None]
            block = {"search": EXHAUSTIVE, "max_trials": None, "time_budget": None}
    return results, found


def _merged(each: Sequence[Trial | None], labels: Sequence[str], weights: Sequence[float]) -> Trial:
    """Returns the trial of a config over all calls: with its mean time, or as it ended in the first that it failed.

    A call that has ruled it out early counts with the least time that it had by then.
    """
    known = next(trial for trial in each if trial is not None)
    times_ms = [trial.time_ms for trial in each if trial is not None and trial.time_ms is not None]
    if len(times_ms) == len(each):
        mean_ms = math.fsum(map(operator.mul, weights, times_ms)) / math.fsum(weights)
        return Trial(config=known.config, outcome=Outcome.OK, time_ms=mean_ms)
    at = next(at for at, trial in enumerate(each) if trial is None or trial.time_ms is None)
    ended = each[at] or Trial(config=known.config, outcome=Outcome.NOT_RUN, message="it was not tried")
    return dataclasses.replace(ended, message=f"for {labels[at]}: {ended.message}")
