"""Measures cached winners again, each against the function's own defaults, and says which of them are stale."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

from quarantune.cache import CacheKey, CacheRecord, Entry, safe_name
from quarantune.resolve.bound_call import BoundCall
from quarantune.resolve.call_key import keyed
from quarantune.resolve.layers import changed_versions, dict_or_empty
from quarantune.resolve.rebuilding import CannotRebuildError, rebuilt
from quarantune.resolve.resolver import Resolver
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.results.result import TuningResult
from quarantune.transport.call import Arguments
from quarantune.values.config_values import as_given
from quarantune.values.findings import Findings
from quarantune.values.json_object import JsonObject
from quarantune.values.settings import settings
from quarantune.values.trial import Config, Outcome, SandboxError, Trial, TuningFailedError

_logger = logging.getLogger("quarantune")


class Verdict(enum.StrEnum):
    """What measuring a cached winner again has shown."""

    CURRENT = "current"
    """It works, and is not slower than the defaults."""
    STALE = "stale"
    """It fails, or the defaults are faster: tune again, or delete the entry."""
    UNUSED = "unused"
    """It was not measured, because no call finds it any more: the code or the list of configs has changed."""
    UNKNOWN = "unknown"
    """It was not measured: the reason says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """One entry, measured again.

    Attributes:
        key: its key.
        verdict: what that has shown.
        reason: the verdict in words.
        config: its config, as the cache holds it.
        time_ms: the time of its config now, in milliseconds; None where it was not measured or failed.
        default_time_ms: the time of the function's own defaults now; None where that is not known.
        saved_time_ms: its time when it was saved; None where that is not known.
        changed: the versions that have changed since, as text; empty where none has.
    """

    key: CacheKey
    verdict: Verdict
    reason: str
    config: Any
    time_ms: float | None = None
    default_time_ms: float | None = None
    saved_time_ms: float | None = None
    changed: str = ""

    @property
    def speedup(self) -> float | None:
        """The time of the defaults now, divided by that of the config."""
        return self.default_time_ms / self.time_ms if self.default_time_ms and self.time_ms else None

    def __str__(self) -> str:
        """Returns the verdict on one line."""
        changed = f" (made under {self.changed})" if self.changed else ""
        return f"{self.verdict}: {self.key}: {self.reason}{changed}"

    def to_dict(self) -> JsonObject:
        """Returns the entry as JSON holds it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "key"}
        return {**self.key._asdict(), **fields, "verdict": self.verdict.value, "speedup": self.speedup}


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
        head = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
        return "\n".join([head, *(f"  {entry}" for entry in self.entries if entry.verdict is not Verdict.CURRENT)])


def verify(
    records: Iterable[CacheRecord],
    functions: Iterable[TunedFunction],
    arguments: Callable[[CacheKey], Arguments | None] | None,
) -> VerifyReport:
    """Measures winners again.

    Args:
        records: the entries.
        functions: the functions that they are for; an entry of another function is `unknown`.
        arguments: returns the arguments for an entry, or None to make them from its key.
    """
    by_name = {safe_name(function.name): function for function in functions}
    found = []
    for record in records:
        function = by_name.get(record.key.kernel_type)
        if function is None:
            found.append(_verified(record, Verdict.UNKNOWN, "no function of this name was given"))
            continue
        found.append(_verify(record, function, arguments))
        _logger.info("%s", found[-1])
    return VerifyReport(tuple(found))


def _verify(
    record: CacheRecord, function: TunedFunction, arguments: Callable[[CacheKey], Arguments | None] | None
) -> Verified:
    """Measures one winner again, if a call of the function as it is now would find it."""
    fingerprint = function.fingerprint
    if _code_of(record.key) != fingerprint.digest:
        differences = fingerprint.differences(dict_or_empty(record.entry.get("fingerprint")))
        changed = f": {', '.join(differences)}" if differences else ""
        return _verified(record, Verdict.UNUSED, f"the function's code has changed{changed}")
    try:
        given = None if arguments is None else arguments(record.key)
        args, kwargs = rebuilt(record.key.problem_size, function) if given is None else given
        call = BoundCall(function, tuple(args), kwargs)
        now = keyed(call)
    except CannotRebuildError as error:
        return _verified(record, Verdict.UNKNOWN, f"{error}: give its arguments, as in verify(..., arguments=...)")
    except (TypeError, ValueError, SandboxError) as error:
        return _verified(record, Verdict.UNKNOWN, f"its arguments do not fit the function: {_line(error)}")
    if now.key.device != record.key.device:
        return _verified(record, Verdict.UNKNOWN, f"it is for another device; this machine has {now.key.device}")
    if now.key.text != record.key.problem_size:
        origin = "the arguments given" if given is not None else "arguments made from its key"
        return _verified(record, Verdict.UNKNOWN, f"{origin} have another key under the JAX settings of this process")
    config = call.find(record.entry.get("config"))
    if config is None:
        return _verified(record, Verdict.UNUSED, "its config is not in the list of configs any more")
    if record.entry.get("space") != call.space:
        return _verified(record, Verdict.UNUSED, "the list of configs has changed, so a call tunes again")
    return _measured(record, call, config)


def _measured(record: CacheRecord, call: BoundCall, config: Config) -> Verified:
    default = call.own_defaults
    try:
        result = _swept(call, [config, *([default] if default not in (None, config) else [])])
    except TuningFailedError as error:
        return _verified(record, Verdict.STALE, _failure(error.trials[0]))
    except (SandboxError, TypeError, ValueError) as error:
        return _verified(record, Verdict.UNKNOWN, f"it could not be measured: {_line(error)}")
    return _judged(record, config, default, result)


def _judged(record: CacheRecord, config: Config, default: Config | None, result: TuningResult) -> Verified:
    winner = result.trials[0]
    times = {"time_ms": winner.time_ms, "default_time_ms": result.default_time_ms}
    if winner.outcome not in (Outcome.OK, Outcome.SLOW):
        return _verified(record, Verdict.STALE, _failure(winner), **times)
    if as_given(config) in (result.best_config, *result.tie):
        if config == default:
            return _verified(record, Verdict.CURRENT, "it is the defaults, and works", **times)
        gain = result.findings.compared or "and there are no defaults to compare it with"
        return _verified(record, Verdict.CURRENT, f"it works, {gain}", **times)
    slower = f"{winner.time_ms:.4g} ms against {result.time_ms:.4g}" if winner.time_ms else "ruled out at once"
    return _verified(record, Verdict.STALE, f"the defaults are faster: {slower}", **times)


def _swept(call: BoundCall, configs: list[Config]) -> TuningResult:
    """Runs a sweep over a few configs that reads and saves nothing."""
    function = call.function
    limits: JsonObject = {"search": "exhaustive", "max_trials": None, "time_budget": None}
    options = dataclasses.replace(function.options, patience=None, prune_fn=None, **limits)
    resolver = Resolver(function.with_options(options, configs))
    with settings(disable_cache=True, agree="0", progress=False, **limits):
        return resolver.tune(resolver.bind(call.args, call.kwargs))


def _code_of(key: CacheKey) -> Any:
    try:
        return json.loads(key.problem_size)["code"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None


def _verified(record: CacheRecord, verdict: Verdict, reason: str, **times: float | None) -> Verified:
    entry: Entry = record.entry
    saved = Findings.from_json(entry).time_ms
    return Verified(
        key=record.key,
        verdict=verdict,
        reason=reason,
        config=entry.get("config"),
        saved_time_ms=saved if saved == saved else None,
        changed=changed_versions(entry),
        **times,
    )


def _failure(trial: Trial) -> str:
    text = (trial.message or "").strip()
    return f"it fails now: {trial.outcome.value}{f': {text.splitlines()[0]}' if text else ''}"


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
