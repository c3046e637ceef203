"""Compares a call with entries for other calls: the nearest, the configs to try first, and why a call missed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from quarantune.cache import store as cache
from quarantune.cache.entries import CacheKey, CacheRecord
from quarantune.cache.journal import Journal
from quarantune.cache.store import Entry, Store
from quarantune.resolve.call_key import KeyedCall
from quarantune.resolve.resolver import Known, KnownResults, changed_versions, dict_or_empty
from quarantune.values.codec import decode_json, is_number, text_of
from quarantune.values.configs import Config, distinct
from quarantune.values.settings import Settings
from quarantune.values.trial import Findings, Outcome

_LARGEST_FACTOR = 4
"""Sizes that differ by more than this factor are not compared: the best config may be another one."""
_ROUNDING = 9
_MOST_NEIGHBOURS = 8
"""How many winners of similar problems are tried first."""
_MOST_FROM_JOURNAL = 8
"""How many of the nearest problem's fastest configs are tried after them."""
_UNLIKE = 4.0
"""How far apart two different words or flags count, such as dtypes: as far as sizes that differ by a factor of 16."""
_FIX = "tune it with QUARANTUNE_ON_MISS=tune"
_ALLOW = f"{_FIX}, or allow defaults with QUARANTUNE_ON_MISS=default"


def nearest(known: KnownResults, keyed: KeyedCall, settings: Settings) -> Known | None:
    """Returns the config of the entry whose sizes are nearest to a call's, without a time; warns of it.

    The entry is of the same kind of device and code, and its dtypes and static arguments are those of the call. Its
    config is in the call's config space, and `prune_fn` accepts it. The result is not remembered.
    """
    name, candidates = keyed.call.name, []
    for store, (key, entry) in known.entries(settings):
        away = distance(key.problem_size, keyed.key.text) if key.device == keyed.key.device else None
        if away is not None:
            candidates.append(((Findings.from_json(entry).is_estimate, away), store, entry))
    for _, store, entry in sorted(candidates, key=lambda candidate: candidate[0]):
        config = _kept(entry, keyed)
        if config is not None and known.versions_serve(entry, settings, is_own=not store.read_only):
            wanted, there = map(cache.canonical_json, (keyed.readable, entry.get("key_values")))
            cache.report_once(
                f"{name}: nothing is cached for {wanted}: using the config of the nearest entry, "
                f"{there} in {store.label} (ON_MISS=nearest; this is said once)",
                topic=f"nearest {name}",
            )
            return Known(config, is_nearest=True)
    return None


def _kept(entry: Entry, keyed: KeyedCall) -> Config | None:
    """Returns the config of an entry if it is one of a call's that `prune_fn` accepts."""
    config = keyed.call.find(entry.get("config"), is_listed=True)
    return config if config is not None and keyed.call.keeps(config) else None


def explain(known: KnownResults, keyed: KeyedCall, settings: Settings, *, may_run_untuned: bool) -> str:
    """Returns a message about a call for which no layer has a usable entry: the key, the layers, the nearest entry."""
    layers = [store.label for store in known.layers(settings)]
    name = keyed.call.name
    wanted = f"{name}: nothing is cached for {cache.canonical_json(keyed.readable)} on {keyed.key.device!r}"
    fix = _ALLOW if may_run_untuned else f"{_FIX}, or give its tunables defaults"
    if settings.disable_cache:
        return f"{wanted}: the cache is off (QUARANTUNE_DISABLE_CACHE); {fix}"
    candidates = [(_differences(keyed, record, settings), store) for store, record in known.entries(settings)]
    if not candidates:
        asked = ", ".join(layers)
        asked = f"{asked} holds no entry" if len(layers) == 1 else f"none of these holds an entry: {asked}"
        return f"{wanted}: {asked}; {fix}"
    differences, store = min(candidates, key=lambda candidate: len(candidate[0]))
    differences = differences or ["its config, which is not in the config space"]
    place = f" in {store.label}" if len(layers) > 1 else ""
    others = f" (asked: {', '.join(layers)})" if len(layers) > 1 else ""
    return f"{wanted}{others}; the nearest entry{place} differs in {'; '.join(differences)}; {fix}"


def _differences(keyed: KeyedCall, record: CacheRecord, settings: Settings) -> list[str]:
    (_, _, device), entry = record
    differences = [] if device == keyed.key.device else [f"device: {device!r}, not {keyed.key.device!r}"]
    ours, theirs = keyed.readable, dict_or_empty(entry.get("key_values"))
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            differences.append(
                f"{name}: {cache.canonical_json(theirs.get(name))}, not {cache.canonical_json(ours.get(name))}"
            )
    parts = entry.get("fingerprint")
    if isinstance(parts, dict) and (changed := keyed.call.function.fingerprint.differences(parts)):
        differences.append(f"the function's {', '.join(changed)}")
    if entry.get("space") != (wanted := keyed.call.space):
        then, now = dict_or_empty(entry.get("space")).get("configs", "unknown"), wanted.get("configs")
        differences.append(
            "the function that makes the configs" if now is None else f"the list of configs ({then} then, {now} now)"
        )
    if settings.version_check and (changed_since := changed_versions(entry)):
        differences.append(f"versions: {changed_since}")
    return differences


def distance(found: str, wanted: str) -> tuple[float, bool] | None:
    """Returns the distance of a key from the wanted one; None where they differ in more than sizes, or by too much.

    Sizes are the dimensions of arrays. Where a `key_fn` describes them, all whole numbers that it returns count.

    Args:
        found: the key of an entry.
        wanted: the key of a call.

    Returns:
        The sum of the absolute logarithms to base 2 of the factors between their sizes; and whether a size is larger
        than that of the wanted one, as of two that are as near, the smaller is preferred.
    """
    try:
        there, here = (dict(_leaves(decode_json(key))) for key in (found, wanted))
    except ValueError:
        return None
    if there.keys() != here.keys():
        return None
    factors = []
    for path, size in here.items():
        other = there[path]
        if type(size) is type(other) and size == other:
            continue
        is_size = "key_fn" in path or (path[-2:-1] == ("shape",) and (*path[:-2], "dtype") in here)
        if not (is_size and type(size) is int and type(other) is int and min(size, other) >= 1):
            return None
        if max(size, other) > _LARGEST_FACTOR * min(size, other):
            return None
        factors.append(math.log2(other / size))
    return (round(math.fsum(map(abs, factors)), _ROUNDING), any(factor > 0 for factor in factors))


def earlier_winners(keyed: KeyedCall, entries: Iterable[tuple[Store, CacheRecord]]) -> list[Config]:
    """Returns the configs that won for a call with other code or configs, as far as they are still worth trying.

    They come in the order of the entries, each once, and only those in the call's config space.
    """
    here = decode_json(keyed.key.text)

    def is_same_call(key: CacheKey) -> bool:
        with contextlib.suppress(ValueError):
            there = decode_json(key.problem_size) if key.device == keyed.key.device else None
            return isinstance(there, dict) and all(here.get(part) == there.get(part) for part in ("call", "jax"))
        return False

    won = (_kept(entry, keyed) for _, (key, entry) in entries if is_same_call(key))
    return distinct(config for config in won if config is not None)


def starts(keyed: KeyedCall, known: KnownResults, settings: Settings) -> list[Config]:
    """Returns configs to try first, those of the most similar problems first.

    First come those that won for this call with other code or configs: the best starts for a function that was edited
    are its own earlier winners.

    Args:
        keyed: the call.
        known: the known results of its function.
        settings: the operator's settings.
    """
    name, device, find = keyed.call.name, keyed.key.device, keyed.call.find
    everything = list(known.entries(settings))
    entries: dict[str, Entry] = {}
    for _, (key, entry) in everything:
        if key.device == device and key.problem_size != keyed.key.text:
            entries.setdefault(key.problem_size, entry)
    ours = keyed.readable
    nearest = sorted(entries, key=lambda key: (difference(ours, dict_or_empty(entries[key].get("key_values"))), key))
    won = [*earlier_winners(keyed, everything), *(entries[key].get("config") for key in nearest)]
    found = distinct(config for config in map(find, won) if config is not None)[:_MOST_NEIGHBOURS]
    for problem in nearest[:1]:
        journal = Journal(settings.cache_dir, name, device, problem)
        found += _fastest(journal, find)[:_MOST_FROM_JOURNAL]
    return distinct(found)


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Returns how different two described problems are: the sum of the differences of their sizes in powers of two."""
    here, there = dict(_leaves(ours)), dict(_leaves(theirs))
    return sum(_apart(here.get(path), there.get(path)) for path in here.keys() | there.keys())


def _apart(ours: Any, theirs: Any) -> float:
    if ours == theirs and type(ours) is type(theirs):
        return 0.0
    if _is_size(ours) and _is_size(theirs):
        return abs(math.log2(1 + abs(ours)) - math.log2(1 + abs(theirs)))
    return _UNLIKE


def _is_size(value: Any) -> bool:
    return is_number(value) and (isinstance(value, int) or math.isfinite(value))


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields the parts of a value that have no parts, with the names and places that lead to them."""
    if isinstance(value, (Mapping, list, tuple)) and value:
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(item, (*path, name))
    else:
        yield path, value


def _fastest(journal: Journal, find: Callable[[Any], Config | None]) -> list[Config]:
    """Returns the configs of a journal that were measured, the fastest first."""
    times: dict[str, tuple[float, Config]] = {}
    for trial in journal.trials():
        config = find(trial.config)
        if config is not None and trial.outcome is Outcome.OK and trial.merit is not None:
            times[text_of(config)] = trial.merit, config
    return [config for _, config in sorted(times.values(), key=lambda timed: timed[0])]
