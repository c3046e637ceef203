"""Makes results from the entries of the cache and the trials of its journals."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from quarantune.cache import entries
from quarantune.cache.entries import CacheKey
from quarantune.cache.entry_file import Entry
from quarantune.cache.file_names import safe_name
from quarantune.cache.joining import winner_of
from quarantune.cache.journal import Journal, conclusions
from quarantune.cache.store import Store
from quarantune.results.report_data import CallShare, PlainResult, ResultData
from quarantune.rules.rule import FIELD, Rule
from quarantune.values.codec import JsonObject, canonical_json, frozen, short_hash, text_of
from quarantune.values.configs import format_config
from quarantune.values.texts import shown
from quarantune.values.trial import Findings, Outcome, Trial, is_same_program


def cached_results(directory: Path, name: str, *, device: str | None = None) -> list[ResultData]:
    """Returns the results of a function; if versions of the function tuned the same call, the newest.

    Args:
        directory: the cache directory; it is only read.
        name: the function's name in the cache, or the stem of its file.
        device: the kind of device; None for all.

    Raises:
        ValueError: the cache has no result for it; the message helps to find the cached ones.
    """
    store = Store(directory, read_only=True)
    devices = None if device is None else [device]
    contents = dict(entries.chosen(store, names=[name], devices=devices)).get(safe_name(name))
    if contents is None:  # its file is empty, or the name is a pattern that matches others
        raise ValueError(f"no function {shown(name)} has results. `quarantune cache list` shows all names.")
    # Sorted by age: the newest entry of a call replaces earlier ones.
    results = (record for record in entries.entries_of(name, contents) if FIELD not in record.entry)
    found = sorted(results, key=lambda it: str(it.entry.get("created", "")))
    newest = {(it.key.device, canonical_json(it.entry.get("key_values") or it.key.problem_size)): it for it in found}
    return [result_of(directory, *record) for record in newest.values()]


def page_rules(directory: Path, name: str, *, device: str | None = None) -> list[JsonObject]:
    """Returns the rules of a function that can be read, in the form for the report's page; the newest first."""
    found = list[tuple[str, JsonObject]]()
    for key, entry in entries.entries_of(name, Store(directory, read_only=True).read(name)):
        with contextlib.suppress(ValueError):
            if FIELD in entry and device in (None, key.device):
                rule, created = Rule.from_json(entry[FIELD]), str(entry.get("created", ""))
                shown = {"names": [it.name for it in rule.parts], "labels": [*map(format_config, rule.configs)]}
                found.append((created, rule.to_json() | shown | {"lines": [*rule.lines()], "device": key.device}))
    return [rule for _, rule in sorted(found, key=lambda it: it[0], reverse=True)]


def cached_result(directory: Path, key: CacheKey) -> ResultData | None:
    """Returns the result of one problem, or None if the cache has none."""
    entry = Store(directory, read_only=True).get(key.kernel_type, key.device, key.problem_size)
    return None if entry is None else result_of(directory, key, entry)


def result_of(directory: Path, cache_key: CacheKey, entry: Entry) -> ResultData:
    """Returns the result in an entry, with the trials that the journals have of it."""
    name, key, device = cache_key
    shares, by = shares_of(entry)
    # Several calls together have no journal: one of this key is of a sweep for one of them.
    measured = entry.get("arguments")  # with a `key_fn`, the journal also has trials of other calls of the key
    arguments = short_hash(canonical_json(measured[0])) if isinstance(measured, list) and measured else None
    journal = [] if shares else Journal(directory, name, device, key, arguments=arguments).trials()
    trials = {text_of(trial.config): trial for trial in journal}
    finalists, tie, default = [], [], None
    findings, is_concluded = Findings.from_json(entry), False
    for record in [] if shares else conclusions(directory, name, device, key).records()[-1:]:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            default = None if record["default"] is None else frozen(record["default"])
            found = [Trial.from_json(trial) for trial in record["finalists"]]
            # A final and a tie belong to their winner, and another job may have saved another winner since.
            is_winner = canonical_json(record["best"]) == canonical_json(entry["config"])
            is_concluded = is_winner and (not found or findings.time_ms in [trial.time_ms for trial in found])
            if is_concluded:
                finalists, tie = found, [frozen(config) for config in record["tie"]]
    best = text_of(entry["config"])
    if (not is_concluded and best not in trials) or _is_another(entry, trials.get(best)):
        trials, finalists, tie, is_concluded = {}, [], [], False  # the journal is of another result of this key
    if not is_concluded and best in trials and findings.time_ms > 0:
        # The winner has the one time that was saved; the samples of its first measurement are of another.
        known = dataclasses.replace(trials[best], outcome=Outcome.OK, time_ms=findings.time_ms, samples_ms=())
        trials[best] = known
    trials |= {text: trial for trial in finalists if (text := text_of(trial.config)) in trials}
    result = PlainResult.of(
        findings,
        name=name,
        device=device,
        key=key,
        from_cache=True,
        best_config=frozen(entry["config"]),
        default_config=default,
        finalists=tuple(finalists),
        trials=tuple(trials.values()),
        tie=tuple(tie),
        versions=entry.get("versions") or {},
        calls=shares,
        by=by,
    )
    if findings.is_estimate:
        origin = findings.text()
    elif not trials:
        origin = "The cache holds only its choice, without trials."
    elif is_concluded:
        origin = ""
    else:
        origin = "The times of the other trials are from their first measurement, before the final."
    return ResultData(result, entry.get("key_values"), origin)


def _is_another(entry: Entry, trial: Trial | None) -> bool:
    """Returns whether the winner's trial in a journal has another program than the winner of an entry."""
    programs = winner_of(entry), "" if trial is None else trial.program
    return all(programs) and not is_same_program(*programs)


def shares_of(entry: Entry) -> tuple[tuple[CallShare, ...], str]:
    """Returns the calls that an entry was tuned for together, and by what; none for others or malformed ones."""
    try:
        shares = tuple(map(CallShare.from_json, entry.get("calls", ())))
        return shares, str(entry["search"]["name"]).rpartition(" ")[2] if shares else ""
    except (KeyError, TypeError, ValueError):
        return (), ""
