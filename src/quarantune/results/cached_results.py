"""Reads the results of a function from a cache directory, with the trials in the journals beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from quarantune.cache import Entry, Journal, Store, canonical_json, conclusions, safe_name
from quarantune.results.result import ResultData, TuningResult
from quarantune.values.config_values import text_of
from quarantune.values.findings import Findings
from quarantune.values.texts import did_you_mean, printable
from quarantune.values.trial import Trial, frozen


def cached_results(directory: Path, name: str, *, device: str | None = None) -> list[ResultData]:
    """Returns the results of a function; of one call tuned under several versions of the function, the newest.

    Args:
        directory: the cache directory, which is only read.
        name: the function's name in the cache, or the stem of its file.
        device: the kind of device; None for all.

    Raises:
        LookupError: nothing is cached for it; the message says what is.
    """
    store = Store(directory, read_only=True)
    contents = store.read(name)
    if device is not None and device not in contents and contents:
        raise LookupError(f"nothing is cached for {printable(name)} on {printable(device)}: {_listed(contents)}")
    newest: dict[tuple[str, str], tuple[str, str, Entry]] = {}
    for kind, entries in contents.items():
        for key, entry in entries.items():
            if device not in (None, kind):
                continue
            problem = (kind, canonical_json(entry.get("key_values") or key))
            created = str(entry.get("created", ""))
            if problem not in newest or newest[problem][0] <= created:
                newest[problem] = (created, key, entry)
    if not newest:
        known = store.names()
        raise LookupError(
            f"nothing is cached for {printable(name)} in {printable(str(directory))!r}."
            f"{did_you_mean(safe_name(name), known) or (' It holds ' + _listed(known) if known else ' It is empty.')}"
        )
    return [result_of(directory, name, kind, key, entry) for (kind, _), (_, key, entry) in newest.items()]


def cached_result(directory: Path, name: str, device: str, key: str) -> ResultData | None:
    """Returns the result of one problem, or None where nothing is cached for it; the arguments as in `result_of`."""
    entry = Store(directory, read_only=True).get(name, device, key)
    return None if entry is None else result_of(directory, name, device, key, entry)


def result_of(directory: Path, name: str, device: str, key: str, entry: Entry) -> ResultData:
    """Returns the result that an entry holds, with its trials where the journals have them.

    Args:
        directory: the cache directory.
        name: the function's name in the cache.
        device: the kind of device.
        key: the key of the problem.
        entry: its entry.
    """
    trials = {text_of(trial.config): trial for trial in _trials(Journal(directory, name, device, key))}
    finalists, tie, default = [], [], None
    findings, is_concluded = Findings.from_json(entry), False
    for record in conclusions(directory, name, device, key).records()[-1:]:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            default = None if record["default"] is None else frozen(record["default"])
            found = [Trial.from_json(trial) for trial in record["finalists"]]
            # A final and a tie belong to their winner, and another job may have saved another winner since.
            is_winner = canonical_json(record["best"]) == canonical_json(entry["config"])
            is_concluded = is_winner and (not found or findings.time_ms in [trial.time_ms for trial in found])
            if is_concluded:
                finalists, tie = found, [frozen(config) for config in record["tie"]]
    trials |= {text: trial for trial in finalists if (text := text_of(trial.config)) in trials}
    result = TuningResult.of(
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
    )
    return ResultData(result, entry.get("key_values"), _origin(trials, is_concluded=is_concluded))


def _origin(trials: dict[str, Trial], *, is_concluded: bool) -> str:
    if not trials:
        return "The cache holds its choice alone, without trials."
    return (
        ""
        if is_concluded
        else "Times of the trials are from their first measurement, before the finalists were compared."
    )


def _trials(journal: Journal) -> Iterator[Trial]:
    """Yields the trials of a journal; a later one of the same config replaces an earlier one."""
    for record in journal.each():
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            yield Trial.from_json(record["trial"])


def _listed(names: Iterable[str]) -> str:
    listed = [printable(name) for name in names]
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")
