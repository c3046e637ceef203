"""Measures cached winners again, each against the function's own defaults, and reports the stale ones."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from quarantune.answers import saved_program
from quarantune.answers.layers import changed_versions, dict_or_empty
from quarantune.answers.recording import Tune
from quarantune.cache.entries import CacheKey, CacheRecord
from quarantune.cache.entry_file import Entry
from quarantune.cache.file_names import safe_name
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import KeyedCall, keyed
from quarantune.calls.rebuilt import CannotRebuildError, rebuilt
from quarantune.functions.binding import Arguments
from quarantune.results.result import TuningResult
from quarantune.tuning.looks import MOST_LOOKS, Review, Verdict, judge
from quarantune.values.blocks import settings
from quarantune.values.codec import JsonObject, decode_json, text_of
from quarantune.values.configs import Config
from quarantune.values.errors import SandboxError, TuningFailedError
from quarantune.values.forgetting import forget_choices
from quarantune.values.options import BITWISE, ROUNDING
from quarantune.values.texts import call_text, first_line
from quarantune.values.trial import TIME, Findings, Outcome, Trial, ranked_by

_logger = logging.getLogger("quarantune")


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
    records: Iterable[CacheRecord],
    functions: Iterable[TunedFunction],
    arguments: Callable[[CacheKey], Arguments | None] | None,
    *,
    tune: Tune,
    complete: Callable[[CacheKey, JsonObject], None],
    max_loss_percent: float | None = None,
    again: bool = False,
) -> VerifyReport:
    """Measures winners again.

    Args:
        records: the entries.
        functions: the functions of the entries; an entry of another function is `unknown`.
        arguments: returns the arguments for an entry, or None to make them from its key.
        tune: tunes for a call of a function now.
        complete: takes the key of a current entry that lacks its program, and the result of `measured_program`.
        max_loss_percent: a winner is stale if its time has grown by more than this; None for no bound.
        again: whether to measure all configs again if a winner is stale or was only estimated.
    """
    # A demand of the operator for other numerics gives an entry of its own.
    found = []
    given = dict.fromkeys(each.under(numerics) for each in functions for numerics in (None, ROUNDING, BITWISE))
    for record in (record for record in records if "rule" not in record.entry):
        named = [function for function in given if safe_name(function.name) == record.key.kernel_type]
        # Several functions may share a name: prefer those with the entry's code. These may still differ in configs.
        named.sort(key=lambda function: function.fingerprint.digest != _code_of(record.key))
        verdicts = [_verify(record, function, arguments) for function in named]
        verdicts.append(_verified(record, Verdict.UNKNOWN, "no function of this name was given"))
        verified = next((it for it in verdicts if isinstance(it, tuple)), verdicts[0])
        if isinstance(verified, tuple):
            verified = _measured(record, *verified, tune, max_loss_percent, again=again, complete=complete)
        found.append(verified)
        _logger.info("%s", found[-1])
    return VerifyReport(tuple(found))


def _verify(
    record: CacheRecord, function: TunedFunction, arguments: Callable[[CacheKey], Arguments | None] | None
) -> Verified | tuple[KeyedCall, Config]:
    """Returns the call and the config to measure, or a verdict if no call of the function finds the entry now."""
    fingerprint = function.fingerprint
    if _code_of(record.key) != fingerprint.digest:
        differences = fingerprint.differences(dict_or_empty(record.entry.get("fingerprint")))
        changed = f": {', '.join(differences)}" if differences else ""
        return _verified(record, Verdict.UNUSED, f"the function's code has changed{changed}")
    try:
        given = None if arguments is None else arguments(record.key)
        args, kwargs = rebuilt(record.key.problem_size, function) if given is None else given
        with settings(numerics=function.options.numerics):
            call = saved_program.as_spelt(record.entry, BoundCall(function, tuple(args), kwargs))
        now = keyed(call)
    except CannotRebuildError as error:
        return _verified(record, Verdict.UNKNOWN, f"{error}: give its arguments, as in verify(..., arguments=...)")
    except (TypeError, ValueError, SandboxError) as error:
        return _verified(record, Verdict.UNKNOWN, f"its arguments do not fit the function: {first_line(error)}")
    if now.id.device != record.key.device:
        return _verified(record, Verdict.UNKNOWN, f"it is for another device; this machine has {now.id.device}")
    if now.id.key != record.key.problem_size:
        origin = "the arguments given" if given is not None else "arguments made from its key"
        return _verified(record, Verdict.UNKNOWN, f"{origin} have another key under the JAX settings of this process")
    config = call.find(record.entry.get("config"))
    if config is None:
        return _verified(record, Verdict.UNUSED, "its config is not in the list of configs any more")
    if record.entry.get("space") != call.space:
        return _verified(record, Verdict.UNUSED, "the list of configs has changed, so a call tunes again")
    if not changed_versions(record.entry) and (difference := saved_program.why_another(record.entry, now, config)):
        return _verified(record, Verdict.UNUSED, f"a call runs another program than the measured one: {difference}")
    return now, config


def _measured(
    record: CacheRecord,
    keyed: KeyedCall,
    config: Config,
    tune: Tune,
    max_loss_percent: float | None,
    *,
    again: bool,
    complete: Callable[[CacheKey, JsonObject], None],
) -> Verified:
    """Measures one winner again, and replaces it by a new sweep if that is due and `again` is set."""
    call, default = keyed.call, keyed.call.own_defaults
    configs = [config, *([default] if default not in (None, config) else [])]
    saved, most = Findings.from_json(record.entry), max_loss_percent or math.inf
    looks = list[TuningResult | Trial]()
    judged = Review(Verdict.UNCLEAR, "")
    try:
        while judged.verdict is Verdict.UNCLEAR and len(looks) < MOST_LOOKS:
            looks.append(_looked_at(call, configs, tune))
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
        complete(record.key, saved_program.measured_program(keyed, winner, None, is_here=True))
    is_estimate = found.verdict is Verdict.CURRENT and saved.is_estimate
    if not again or not (is_estimate or found.verdict is Verdict.STALE):
        return found
    try:
        result = tune(call)
    except (SandboxError, TuningFailedError) as error:
        return dataclasses.replace(found, reason=f"{found.reason}; tuning again failed: {first_line(error)}")
    forget_choices(lambda _, *key: key == (record.key.device, record.key.problem_size))
    reason = f"{found.reason}; tuned again: {result.config_text}, {result.findings.text()}"
    return dataclasses.replace(found, verdict=Verdict.TUNED_AGAIN, reason=reason)


def _looked_at(call: BoundCall, configs: list[Config], tune: Tune) -> TuningResult | Trial:
    """Returns the result of a sweep over a winner and the defaults, or the trial of a winner that failed."""
    try:
        result = swept(call, configs, tune)
    except TuningFailedError as error:
        return error.trials[0]
    winner = result.trials[0]
    return result if winner.outcome in (Outcome.OK, Outcome.SLOW) else winner


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
