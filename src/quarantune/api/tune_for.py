"""Tunes for many calls that share a key: one config for all of them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from quarantune.answers.answer import Situation
from quarantune.answers.layers import save
from quarantune.answers.recording import RecordedCall
from quarantune.api.tuner import Tuner
from quarantune.cache import problems
from quarantune.cache.entry_file import Entry
from quarantune.cache.problems import CacheWriteError
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall, keyed_to_tune
from quarantune.engine.place import place_of
from quarantune.functions.binding import Arguments
from quarantune.results.report_data import CallShare
from quarantune.results.result import TuningResult
from quarantune.tuning.outcome import call_result, entry_for, findings_now
from quarantune.values import blocks
from quarantune.values.codec import JsonObject, equal, text_of
from quarantune.values.errors import TuningFailedError
from quarantune.values.options import EXHAUSTIVE
from quarantune.values.texts import call_text, shown
from quarantune.values.trial import Findings, Outcome, Trial

TOTAL, WORST = "total", "worst"


def tune_for(tuner: Tuner, calls: Sequence[Any], weights: Sequence[float] | None, by: str) -> TuningResult:
    """Returns the result for several calls, and saves it under the key that they share.

    Args:
        tuner: the tuner of the function.
        calls: the calls; see `Autotuned.tune_for`.
        weights: how much each call counts; see `Autotuned.tune_for`.
        by: `total` or `worst`.

    Raises:
        TuningFailedError: No config works for all calls.
        TypeError: `calls` holds something that is not a call, or a call that sets a tunable.
        ValueError: The calls do not share a key, or an argument is not valid.
    """
    if by not in (TOTAL, WORST):
        raise ValueError(f"by={shown(by)} is not valid: give {TOTAL!r} or {WORST!r}")
    if not tuner.function.options.is_by_time:
        raise ValueError(f"{tuner.function.name}: tune_for compares times: leave out objective, or use tune")
    many = given_weights(calls, weights)
    bound = [tuner.bind(*given_arguments(call)) for call in calls]
    now = Situation.of(bound[0])
    device = place_of(now.settings).device()
    described = [keyed_to_tune(call, device) for call in bound]
    labels = [call_text(each.arguments) for each in described]
    first, name = described[0], described[0].call.name
    for label, other in zip(labels, described, strict=True):
        if other.id != first.id:
            raise ValueError(
                f"{name}: these calls share no key, so one config cannot be saved for both: {labels[0]}; and "
                f"{label}. Give autotune a key_fn that returns the same value for them"
            )
    results, found = _sweeps(tuner, described)
    trials = tuple(_merged([each.get(text) for each in found], labels, many) for text in dict.fromkeys(chain(*found)))
    usable = [trial for trial in trials if trial.outcome is Outcome.OK]
    if not usable:
        reasons = "; ".join(dict.fromkeys(trial.message for trial in trials))
        message = f"{name}: no config works for all {len(calls)} calls: {reasons:.2000}"
        raise TuningFailedError(message, trials=trials, key=first.id.key)
    best_ms = [min(trial.time_ms for trial in each.values() if trial.time_ms is not None) for each in found]

    def times_ms(trial: Trial) -> list[float]:
        return [each[text_of(trial.config)].time_ms or math.nan for each in found]

    def score(trial: Trial) -> float:
        return max(map(operator.truediv, times_ms(trial), best_ms)) if by == WORST else trial.time_ms or math.nan

    best, default = min(usable, key=score), results[0].default_config
    # A mean with a bound in it is a bound. The winner stays `ok`: nothing else is known to be better.
    stopped = {text for each in found for text, trial in each.items() if trial.is_bound} - {text_of(best.config)}
    trials = tuple(
        dataclasses.replace(trial, outcome=Outcome.SLOW, message="a call with it was stopped early")
        if trial.outcome is Outcome.OK and text_of(trial.config) in stopped
        else trial
        for trial in trials
    )
    default_ms = next((trial.time_ms for trial in usable if equal(trial.config, default)), None)
    compared = Findings(best.time_ms or math.nan, default_ms)
    findings = findings_now(first.call, compared, trials, results[0].findings.search)
    shares = tuple(map(CallShare, labels, many, times_ms(best), best_ms))
    result = dataclasses.replace(call_result(first, best.config, findings, trials), calls=shares, by=by)
    if not now.settings.disable_cache:
        entry = entry_for(first, best.config, findings, {"name": f"tune_for by {by}"})
        _save(entry, described, shares, now)
    tuner.adopt(first, result, now)
    return result


def _save(entry: Entry, described: Sequence[KeyedCall], shares: Sequence[CallShare], now: Situation) -> None:
    """Saves an entry with the calls that it is for."""
    entry["calls"] = [share.to_json() for share in shares]
    if "arguments" in entry:
        entry["arguments"] = [each.arguments for each in described]
    try:
        save(now.settings, described[0].id, entry)
    except CacheWriteError as error:
        problems.report_once(str(error))


def given_arguments(call: Any) -> Arguments:
    """Returns the arguments of a call as the user gives it.

    Raises:
        TypeError: It is not a call.
    """
    if isinstance(call, RecordedCall) and call.call is not None:
        return call.call
    if isinstance(call, BoundCall):
        return call.args, call.kwargs
    if not isinstance(call, (tuple, list, Mapping)):
        raise TypeError(
            f"{shown(call)} is not a call: give a tuple of positional arguments, or a dict of keyword arguments"
        )
    return ((), dict(call)) if isinstance(call, Mapping) else (tuple(call), {})


def given_weights(calls: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    """Returns how much each call counts; by default, how often it was recorded.

    Raises:
        ValueError: There are no calls, or no weight above 0 for each.
    """
    if weights is None:
        weights = [call.count if isinstance(call, RecordedCall) else 1.0 for call in calls]
    if not calls or len(weights) != len(calls) or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"{len(calls)} calls with weights={shown(weights)}: give calls, and a weight above 0 for each")
    return [float(weight) for weight in weights]


def _sweeps(tuner: Tuner, described: Sequence[KeyedCall]) -> tuple[list[TuningResult], list[dict[str, Trial]]]:
    """Tunes each call under a separate key. If the first search left configs out, the others try only its good ones.

    Returns:
        The results, and for each its trials by the text of their configs; with the defaults' time if these may win.
    """
    options, configs = dataclasses.replace(tuner.function.options, key_fn=None), None
    results, found, block = list[TuningResult](), list[dict[str, Trial]](), JsonObject()
    for each in described:
        own = Tuner(tuner.function.with_options(options, configs))
        with blocks.settings(**block):
            resume = not blocks.current().always_tune
            result = own.tune(own.bind(each.call.args, each.call.kwargs), resume=resume).with_trials()
        # Finals are careful measurements. For other trials take the merit: disturbed runs spoil their times.
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
    """Returns the trial of a config over all calls: with its mean time, or with its first failure.

    If a call's sweep ruled the config out early, its lowest time until then counts.
    """
    known = next(trial for trial in each if trial is not None)
    times_ms = [trial.time_ms for trial in each if trial is not None and trial.time_ms is not None]
    if len(times_ms) == len(each):
        mean_ms = math.fsum(map(operator.mul, weights, times_ms)) / math.fsum(weights)
        return Trial(config=known.config, outcome=Outcome.OK, time_ms=mean_ms)
    at = next(at for at, trial in enumerate(each) if trial is None or trial.time_ms is None)
    ended = each[at] or Trial(config=known.config, outcome=Outcome.NOT_RUN, message="it was not tried")
    return dataclasses.replace(ended, message=f"for {labels[at]}: {ended.message}")
