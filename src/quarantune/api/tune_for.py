"""Tunes for many calls that share a key: one config for all of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from quarantune.answers import saved_program
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
from quarantune.tuning.outcome import call_result, findings_now, measured_entry
from quarantune.values import blocks
from quarantune.values.codec import JsonObject, text_of
from quarantune.values.errors import TuningFailedError
from quarantune.values.options import EXHAUSTIVE
from quarantune.values.texts import call_text, shown
from quarantune.values.trial import OTHER, UNSTABLE, VARIES, Findings, Outcome, Trial

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
    # A bound call has its numerics, whatever is in force now.
    bound = [call if isinstance(call, BoundCall) else tuner.bind(*given_arguments(call)) for call in calls]
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
    results, found, owns = _sweeps(described)

    def merged(each: Sequence[Trial | None]) -> Trial:
        return _merged(each, labels, many)

    trials = tuple(merged([each.get(text) for each in found]) for text in dict.fromkeys(chain(*found)))
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

    best = min(usable, key=score)
    # A mean with a bound in it is a bound. The winner stays `ok`: nothing else is known to be better.
    stopped = {text for each in found for text, trial in each.items() if trial.is_bound} - {text_of(best.config)}
    trials = tuple(
        dataclasses.replace(trial, outcome=Outcome.SLOW, message="a call with it was stopped early")
        if trial.outcome is Outcome.OK and text_of(trial.config) in stopped
        else trial
        for trial in trials
    )
    own = merged(owns) if all(owns) else None
    findings = findings_now(first.call, Findings.of(best, own), trials, results[0].findings.search)
    shares = tuple(map(CallShare, labels, many, times_ms(best), best_ms))
    result = dataclasses.replace(call_result(first, best.config, findings, trials), calls=shares, by=by)
    if not now.settings.disable_cache:
        program = functools.partial(_program, described, found, owns, is_here=place_of(now.settings).is_here)
        samples = sum(len(each[text_of(best.config)].samples_ms) for each in found)
        # Configs with the defaults' bits are ranked by the total.
        among = [best] if by == WORST else [*trials, *([] if own is None else [own])]
        named = {"name": f"tune_for by {by}"}
        entry = measured_entry(first, best, findings, named, among=among, program=program, samples=samples)
        _save(entry, described, shares, now)
    tuner.adopt(first, result, now)
    return result


def _program(
    described: Sequence[KeyedCall],
    found: Sequence[Mapping[str, Trial]],
    owns: Sequence[Trial | None],
    trial: Trial,
    *,
    is_here: bool,
) -> JsonObject:
    """Returns the record of the programs that a config had in the sweeps of the calls.

    Args:
        described: the calls.
        found: for each call its trials by the text of their configs.
        owns: for each call the trial of the defaults.
        trial: the trial of the config over all calls.
        is_here: see `measured_program`.
    """
    text = text_of(trial.config)
    return saved_program.programs_of_calls(
        [
            saved_program.measured_program(call, each.get(text) or untuned or trial, untuned, is_here=is_here)
            for call, each, untuned in zip(described, found, owns, strict=True)
        ]
    )


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


def _sweeps(
    described: Sequence[KeyedCall],
) -> tuple[list[TuningResult], list[dict[str, Trial]], list[Trial | None]]:
    """Tunes each call under a separate key. If the first search left configs out, the others try only its good ones.

    Returns:
        The results; for each its trials by the text of their configs, with the defaults' trial if these may win; and
        the defaults' trials, None if they have no time.
    """
    function, configs = described[0].call.function, None
    options = dataclasses.replace(function.options, key_fn=None)
    results, found, owns = list[TuningResult](), list[dict[str, Trial]](), list[Trial | None]()
    is_in_force = blocks.numerics_in_force() in (None, options.numerics)
    block: JsonObject = {} if is_in_force else {"numerics": options.numerics}
    for each in described:
        own = Tuner(function.with_options(options, configs))
        with blocks.settings(**block):
            resume = not blocks.current().always_tune
            result = own.tune(own.bind(each.call.args, each.call.kwargs), resume=resume).with_trials()
        # Finals are careful measurements. For other trials take the merit: disturbed runs spoil their times.
        measured = {text_of(trial.config): trial for trial in result.finalists}
        trials = dict[str, Trial]()
        for trial in result.trials:
            text = text_of(trial.config)
            time_ms = measured[text].time_ms if text in measured else trial.merit
            trials[text] = dataclasses.replace(trial, time_ms=time_ms)
        untuned = None
        if (default := result.default_config) is not None:
            text = text_of(default)
            untuned = trials.get(text)
            if untuned is None and result.default_time_ms:
                timed = Trial(config=default, outcome=Outcome.OK, time_ms=result.default_time_ms)
                untuned = measured.get(text, timed)
                if options.judges_outputs:
                    trials[text] = untuned
        results.append(result)
        found.append(trials)
        owns.append(untuned if untuned is not None and untuned.is_usable else None)
        good = [trial.config for trial in results[0].trials if trial.merit is not None]
        if results[0].seen != results[0].space_size and good:
            options, configs = dataclasses.replace(options, max_trials=None, time_budget=None, patience=None), good
            block |= {"search": EXHAUSTIVE, "max_trials": None, "time_budget": None}
    return results, found, owns


def _merged(each: Sequence[Trial | None], labels: Sequence[str], weights: Sequence[float]) -> Trial:
    """Returns the trial of a config over all calls: with its mean time, or with its first failure.

    If a call's sweep ruled the config out early, its lowest time until then counts.
    """
    known = next(trial for trial in each if trial is not None)
    times_ms = [trial.time_ms for trial in each if trial is not None and trial.time_ms is not None]
    if len(times_ms) == len(each):
        mean_ms = math.fsum(map(operator.mul, weights, times_ms)) / math.fsum(weights)
        trials = [trial for trial in each if trial is not None]
        bits = _worst([trial.bits for trial in trials], UNSTABLE, OTHER)
        batch = _worst([trial.batch for trial in trials], VARIES)
        return Trial(config=known.config, outcome=Outcome.OK, time_ms=mean_ms, bits=bits, batch=batch)
    at = next(at for at, trial in enumerate(each) if trial is None or trial.time_ms is None)
    ended = each[at] or Trial(config=known.config, outcome=Outcome.NOT_RUN, message="it was not tried")
    return dataclasses.replace(ended, message=f"for {labels[at]}: {ended.message}")


def _worst(values: Sequence[str | None], *worse: str) -> str | None:
    """Returns what is known of all calls: the worst of their values, None if unknown for one of them."""
    return next((value for value in (*worse, None) if value in values), values[0])
