"""Measures cached winners again, each against the function's own defaults, and reports the stale ones."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from quarantune.answers import saved_program
from quarantune.answers.layers import changed_versions, dict_or_empty
from quarantune.answers.recording import Tune
from quarantune.cache import entries
from quarantune.cache.entries import CacheKey, CacheRecord
from quarantune.cache.entry_file import Entry
from quarantune.cache.file_names import safe_name
from quarantune.cache.problems import CacheWriteError
from quarantune.cache.store import Store
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import KeyedCall, keyed
from quarantune.calls.rebuilt import CannotRebuildError, described_arguments, described_settings, rebuilt
from quarantune.functions.binding import Arguments
from quarantune.results.result import TuningResult
from quarantune.tuning.looks import MOST_LOOKS, Review, Verdict, judge
from quarantune.values.blocks import settings
from quarantune.values.codec import JsonObject, decode_json, is_number, text_of
from quarantune.values.configs import Config
from quarantune.values.errors import SandboxError, TuningFailedError
from quarantune.values.forgetting import forget_choices
from quarantune.values.options import BATCH_INVARIANT, BITWISE, ROUNDING
from quarantune.values.texts import call_text, first_line
from quarantune.values.trial import TIME, Findings, Outcome, Trial, ranked_by

_logger = logging.getLogger("quarantune")

TuneFor: TypeAlias = Callable[[Sequence[BoundCall], Sequence[float], str], TuningResult]
"""Tunes one config for several calls: takes the calls, their weights, and `total` or `worst`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """One entry, measured again.

    Attributes:
        key: the entry's key.
        verdict: the result of the measurement.
        reason: the verdict in words.
        call: the entry's call, as text.
        config: the entry's config, as the cache holds it.
        time_ms: the time of the config now, in milliseconds; None without a measurement, or after a failure.
        default_time_ms: the time of the function's own defaults now; None if unknown.
        saved_time_ms: the time in the entry; None if unknown, or if the objective was not time.
        speedup_interval: the speed-ups of 95 of 100 later runs, by the measurements now; None if unknown.
        changed: the versions that have changed since, as text; empty if none has.
    """

    key: CacheKey
    verdict: Verdict
    reason: str
    call: str
    config: Any
    time_ms: float | None = None
    default_time_ms: float | None = None
    saved_time_ms: float | None = None
    speedup_interval: tuple[float, float] | None = None
    changed: str = ""

    @property
    def speedup(self) -> float | None:
        """The time of the defaults now, divided by the time of the config."""
        return self.default_time_ms / self.time_ms if self.default_time_ms and self.time_ms else None

    @property
    def loss_percent(self) -> float | None:
        """How much longer the config takes now than when the cache saved it, in percent of the saved time."""
        return 100 * (self.time_ms / self.saved_time_ms - 1) if self.time_ms and self.saved_time_ms else None

    def __str__(self) -> str:
        """Returns the verdict on one line."""
        changed = f" (made under {self.changed})" if self.changed else ""
        return f"{self.verdict}: {self.key}: {self.reason}{changed}"

    def to_dict(self) -> JsonObject:
        """Returns the entry as JSON-able data."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "key"}
        rates = {"speedup": self.speedup, "loss_percent": self.loss_percent}
        return {**self.key._asdict(), **fields, "verdict": self.verdict.value, **rates}


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """The entries of a cache, measured again.

    Attributes:
        entries: one for each entry of the cache.
    """

    entries: tuple[Verified, ...]

    @property
    def stale(self) -> tuple[Verified, ...]:
        """The entries that are stale."""
        return self.of(Verdict.STALE)

    def of(self, verdict: Verdict | str) -> tuple[Verified, ...]:
        """Returns the entries with a verdict."""
        return tuple(entry for entry in self.entries if entry.verdict == verdict)

    def __str__(self) -> str:
        """Returns the numbers, and a line for each entry that is not current."""
        counts = collections.Counter(entry.verdict for entry in self.entries)
        head = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]) or "no entries"
        return "\n".join([head, *(f"  {entry}" for entry in self.entries if entry.verdict is not Verdict.CURRENT)])


def verify(
    store: Store,
    functions: Iterable[TunedFunction],
    arguments: Callable[[CacheKey], Arguments | None] | None,
    *,
    tune: Tune,
    tune_for: TuneFor,
    max_loss_percent: float | None = None,
    again: bool = False,
) -> VerifyReport:
    """Measures winners again.

    Args:
        store: the cache.
        functions: the functions of the entries; an entry of another function is `unknown`.
        arguments: returns the arguments for an entry, or None to make them from its key.
        tune: tunes for a call of a function now.
        tune_for: tunes for several calls now, for a winner that was chosen for several.
        max_loss_percent: a winner is stale if its time has grown by more than this; None for no bound.
        again: whether to measure all configs again if a winner is stale or was only estimated.
    """
    # A demand of the operator for other numerics gives an entry of its own.
    found = []
    given = dict.fromkeys(
        each.under(numerics)
        for each in functions
        for numerics in (None, ROUNDING, BITWISE, BATCH_INVARIANT)
        if numerics != BATCH_INVARIANT or each.options.check_batch is not None
    )
    for record in (record for record in entries.records(store) if "rule" not in record.entry):
        named = [function for function in given if safe_name(function.name) == record.key.kernel_type]
        # Several functions may share a name: prefer those with the entry's code. These may still differ in configs.
        named.sort(key=lambda function: function.fingerprint.digest != _code_of(record.key))
        # An entry may hold results of several programs, and calls use the result of the program that they run.
        results = [CacheRecord(record.key, each) for each in saved_program.results_in(record.entry)]
        with _settings_of(record.key):
            verdicts = [(it, _verify(it, function, arguments)) for it in results for function in named]
            verdicts.append((record, _verified(record, Verdict.UNKNOWN, "no function of this name was given")))
            used, verified = next((each for each in verdicts if isinstance(each[1], tuple)), verdicts[0])
            if isinstance(verified, tuple):
                anew = functools.partial(_tuned_again, store, used, verified[0], tune, tune_for) if again else None
                verified = _measured(store, used, *verified, tune, max_loss_percent, anew=anew)
        found.append(verified)
        _logger.info("%s", found[-1])
    return VerifyReport(tuple(found))


@contextlib.contextmanager
def _settings_of(key: CacheKey) -> Iterator[None]:
    """Applies the JAX settings of a key for the duration of a block, if JAX accepts them."""
    with contextlib.ExitStack() as block:
        with contextlib.suppress(Exception):  # a file may hold anything; otherwise the call has another key
            block.enter_context(described_settings(dict_or_empty(decode_json(key.problem_size).get("jax"))))
        yield


def _verify(
    record: CacheRecord, function: TunedFunction, arguments: Callable[[CacheKey], Arguments | None] | None
) -> Verified | tuple[list[KeyedCall], Config]:
    """Returns the calls and the config to measure, or a verdict if no call of the function finds the entry now."""
    fingerprint = function.fingerprint
    if _code_of(record.key) != fingerprint.digest:
        differences = fingerprint.differences(dict_or_empty(record.entry.get("fingerprint")))
        changed = f": {', '.join(differences)}" if differences else ""
        return _verified(record, Verdict.UNUSED, f"the function's code has changed{changed}")
    if function.options.key_fn is not None and not _has_bucket(record.key):
        reason = "the function has a key_fn, so calls look for the result of that; tune_for uses the measurements"
        return _verified(record, Verdict.UNUSED, reason)
    try:
        given = None if arguments is None else arguments(record.key)
        with settings(numerics=function.options.numerics):
            calls = [
                saved_program.as_spelt(record.entry, BoundCall(function, tuple(args), kwargs))
                for args, kwargs in (_rebuilt(record, function) if given is None else [given])
            ]
        all_now = [keyed(call) for call in calls]
    except CannotRebuildError as error:
        return _verified(record, Verdict.UNKNOWN, f"{error}: give its arguments, as in verify(..., arguments=...)")
    except (TypeError, ValueError, SandboxError) as error:
        return _verified(record, Verdict.UNKNOWN, f"its arguments do not fit the function: {first_line(error)}")
    (now, *_), (call, *_) = all_now, calls
    if now.id.device != record.key.device:
        return _verified(record, Verdict.UNKNOWN, f"it is for another device; this machine has {now.id.device}")
    if any(each.id.key != record.key.problem_size for each in all_now):
        origin = "the arguments given" if given is not None else "arguments made from its key"
        return _verified(record, Verdict.UNKNOWN, f"{origin} have another key under the JAX settings of this process")
    config = call.find(record.entry.get("config"))
    if config is None:
        return _verified(record, Verdict.UNUSED, "its config is not in the list of configs any more")
    if record.entry.get("space") != call.space:
        return _verified(record, Verdict.UNUSED, "the list of configs has changed, so a call tunes again")
    if not changed_versions(record.entry) and (difference := saved_program.why_another(record.entry, now, config)):
        return _verified(record, Verdict.UNUSED, f"a call runs another program than the measured one: {difference}")
    return all_now, config


def _rebuilt(record: CacheRecord, function: TunedFunction) -> list[Arguments]:
    """Returns the arguments of the calls that an entry was measured for; the key has them only without a `key_fn`."""
    described = record.entry.get("arguments")
    if function.options.key_fn is None or not (isinstance(described, list) and described):
        return [rebuilt(record.key.problem_size, function)]
    return [described_arguments(dict(each), function) for each in described]


def _measured(
    store: Store,
    record: CacheRecord,
    calls: Sequence[KeyedCall],
    config: Config,
    tune: Tune,
    max_loss_percent: float | None,
    *,
    anew: Callable[[Verified], Verified] | None,
) -> Verified:
    """Measures one winner again, for all its calls, and replaces it by a new sweep if that is due.

    Args:
        store: the cache.
        record: the entry, with the result to measure first.
        calls: its calls.
        config: its config.
        tune: tunes for a call now.
        max_loss_percent: see `verify`.
        anew: see `_tuned_again`; None if a stale winner stays.
    """
    keyed = calls[0]
    call, default = keyed.call, keyed.call.own_defaults
    configs = [config, *([default] if default not in (None, config) else [])]
    saved, most = Findings.from_json(record.entry), max_loss_percent or math.inf
    looks = list[TuningResult | Trial]()
    judged = Review(Verdict.UNCLEAR, "")
    try:
        while judged.verdict is Verdict.UNCLEAR and len(looks) < MOST_LOOKS:
            each = [_looked_at(it.call, configs, tune) for it in calls]
            looks.append(_together(each, _weights(record.entry, len(calls))))
            judged = judge(looks, saved, config=config, default=default, max_loss_percent=most)
    except (SandboxError, TypeError, ValueError) as error:
        return _verified(record, Verdict.UNKNOWN, f"it could not be measured: {first_line(error)}")
    found = _verified(record, **vars(judged))
    is_complete = (
        "program" in record.entry or changed_versions(record.entry) or call.function.options.key_fn is not None
    )
    last = looks[-1]
    if found.verdict is Verdict.CURRENT and not is_complete and isinstance(last, TuningResult):
        winner = dataclasses.replace(last.trials[0], config=config)
        if program := saved_program.measured_program(keyed, winner, None, is_here=True):
            _amend(store, record, {"program": program})
    is_estimate = found.verdict is Verdict.CURRENT and saved.is_estimate
    is_due = is_estimate or found.verdict is Verdict.STALE
    return found if anew is None or not is_due else anew(found)


def _looked_at(call: BoundCall, configs: list[Config], tune: Tune) -> TuningResult | Trial:
    """Returns the result of a sweep over a winner and the defaults, or the trial of a winner that failed."""
    try:
        result = swept(call, configs, tune)
    except TuningFailedError as error:
        return error.trials[0]
    winner = result.trials[0]
    return result if winner.outcome in (Outcome.OK, Outcome.SLOW) else winner


def _weights(entry: Entry, count: int) -> list[float]:
    """Returns the weights of the calls of an entry; 1 for each if the entry has no weights for so many calls."""
    shares = entry.get("calls")
    found = [dict_or_empty(share).get("weight") for share in (shares if isinstance(shares, list) else [])]
    weights = [float(it) for it in found if is_number(it) and 0 < it < math.inf]
    return weights if len(weights) == count else [1.0] * count


def _together(looks: Sequence[TuningResult | Trial], weights: Sequence[float]) -> TuningResult | Trial:
    """Returns the sweeps of several calls as one with weighted mean times; the first failure if a call failed."""
    results = [look for look in looks if isinstance(look, TuningResult)]
    if len(looks) == 1 or len(results) < len(looks):
        return next((look for look in looks if isinstance(look, Trial)), looks[0])

    def mean(times_ms: Sequence[float | None]) -> float | None:
        known = [time_ms for time_ms in times_ms if time_ms]
        return sum(map(operator.mul, weights, known)) / sum(weights) if len(known) == len(times_ms) else None

    first, winner = results[0], results[0].trials[0]
    time_ms = mean([result.trials[0].time_ms for result in results])
    return dataclasses.replace(
        first,
        trials=(dataclasses.replace(winner, time_ms=time_ms), *first.trials[1:]),
        time_ms=math.nan if time_ms is None else time_ms,
        default_time_ms=mean([result.default_time_ms for result in results]),
        speedup_interval=None,
    )


def _tuned_again(
    store: Store, record: CacheRecord, calls: Sequence[KeyedCall], tune: Tune, tune_for: TuneFor, found: Verified
) -> Verified:
    """Tunes again for the calls of an entry, as it was tuned: for one call, or for several together.

    The new result replaces the result that was found stale, whatever the budgets of the two searches. If tuning fails,
    the stale result stays, and the next sweep replaces it.

    Args:
        store: the cache.
        record: the entry.
        calls: its calls.
        tune: tunes for a call now.
        tune_for: tunes for several calls now.
        found: the verdict on the entry.

    Returns:
        The verdict, with the result that the cache has now.
    """
    entry, (call, *_) = record.entry, calls
    _, for_many, by = str(dict_or_empty(entry.get("search")).get("name")).partition("tune_for by ")
    _amend(store, record, {saved_program.STALE: found.reason})
    try:
        # Otherwise `tune_for` takes over the measurements of its earlier sweeps.
        with settings(numerics=call.call.function.options.numerics, always_tune=True):
            many = [each.call for each in calls]
            result = tune_for(many, _weights(entry, len(many)), by) if for_many else tune(call.call)
    except (SandboxError, TuningFailedError, ValueError) as error:
        return dataclasses.replace(found, reason=f"{found.reason}; tuning again failed: {first_line(error)}")
    forget_choices(lambda _, *key: key == (record.key.device, record.key.problem_size))
    reason = f"{found.reason}; tuned again: {result.config_text}, {result.findings.text()}"
    now = _entry(store, record.key)
    if now is None or any(saved_program.STALE in it or it == entry for it in saved_program.results_in(now)):
        return dataclasses.replace(found, reason=f"{reason}; but the cache could not save it, and keeps its result")
    return dataclasses.replace(found, verdict=Verdict.TUNED_AGAIN, reason=reason)


def _entry(store: Store, key: CacheKey) -> Entry | None:
    return store.get(key.kernel_type, key.device, key.problem_size, afresh=True)


def _amend(store: Store, record: CacheRecord, fields: JsonObject) -> None:
    """Adds fields to a result on disk, unless another result has replaced it."""
    key = record.key

    def amended(device: str, problem: str, present: Entry, offered: Entry) -> Entry:
        results = [it | fields if it == record.entry else it for it in saved_program.results_in(present)]
        return results[0] | ({saved_program.OTHERS: results[1:]} if results[1:] else {})

    if _entry(store, key) is not None:
        with contextlib.suppress(CacheWriteError):  # a directory that is only read
            store.put(key.kernel_type, key.device, key.problem_size, record.entry, prefer=amended)


def swept(call: BoundCall, configs: list[Config], tune: Tune) -> TuningResult:
    """Returns the result of a sweep over a few configs that reads and saves nothing."""
    function = call.function
    limits: JsonObject = {"search": "exhaustive", "max_trials": None, "time_budget": None}
    options = dataclasses.replace(function.options, patience=None, prune_fn=None, **limits)
    with settings(disable_cache=True, agree="0", progress=False, numerics=options.numerics, **limits):
        return tune(BoundCall(function.with_options(options, configs), call.args, call.kwargs))


def times_of(result: TuningResult) -> dict[str, float]:
    """Returns the time of each config of a sweep that ran, by its text, in milliseconds; infinite for a failure.

    Finals are careful measurements. For other trials it takes the merit: disturbed runs spoil their times.
    """
    final = {text_of(trial.config): trial.time_ms for trial in result.finalists}
    ended = {text_of(trial.config): trial.merit for trial in result.trials if trial.outcome is not Outcome.NOT_RUN}
    return {text: final.get(text) or merit or math.inf for text, merit in ended.items()}


def _code_of(key: CacheKey) -> Any:
    try:
        return decode_json(key.problem_size)["code"]
    except (ValueError, TypeError, KeyError):
        return None


def _has_bucket(key: CacheKey) -> bool:
    """Returns whether a key holds the result of a `key_fn`."""
    try:
        return "key_fn" in decode_json(key.problem_size)["call"]
    except (ValueError, TypeError, KeyError):
        return False


def _verified(record: CacheRecord, verdict: Verdict, reason: str, **about: Any) -> Verified:
    entry: Entry = record.entry
    found = Findings.from_json(entry)
    saved = found.time_ms if ranked_by(found) == TIME else math.nan  # more time is a loss only if it chose the winner
    return Verified(
        key=record.key,
        verdict=verdict,
        reason=reason,
        call=call_text(entry.get("key_values")),
        config=entry.get("config"),
        saved_time_ms=saved if saved == saved else None,
        changed=changed_versions(entry),
        **about,
    )
