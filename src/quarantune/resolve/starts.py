"""Configs to try first: the best ones of similar problems of the same function on the same kind of device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quarantune.cache import Entry, Journal
from quarantune.resolve.call_key import KeyedCall
from quarantune.resolve.entries import dict_or_empty
from quarantune.resolve.known_results import KnownResults
from quarantune.values import config_space
from quarantune.values.config_values import text_of
from quarantune.values.settings import Settings
from quarantune.values.trial import Config, Outcome, Trial

_MOST_NEIGHBOURS = 8
"""How many winners of similar problems are tried first."""
_MOST_FROM_JOURNAL = 8
"""How many of the nearest problem's fastest configs are tried after them."""
_UNLIKE = 4.0
"""How far apart two different words or flags count, such as dtypes: as far as sizes that differ by a factor of 16."""


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
    for it in everything:
        if it.device == device and it.key != keyed.key.text:
            entries.setdefault(it.key, it.entry)
    ours = keyed.readable
    nearest = sorted(entries, key=lambda key: (distance(ours, dict_or_empty(entries[key].get("key_values"))), key))
    won = [*known.seeds(keyed, everything), *(entries[key].get("config") for key in nearest)]
    found = config_space.distinct(config for config in map(find, won) if config is not None)[:_MOST_NEIGHBOURS]
    for key in nearest[:1]:
        journal = Journal(settings.cache_dir, name, device, key)
        found += _fastest(journal, find)[:_MOST_FROM_JOURNAL]
    return config_space.distinct(found)


def distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
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
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or math.isfinite(value))


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, (*path, str(name)))
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            yield from _leaves(item, (*path, str(at)))
    else:
        yield path, value


def _fastest(journal: Journal, find: Callable[[Any], Config | None]) -> list[Config]:
    """Returns the configs of a journal that were measured, the fastest first."""
    times: dict[str, tuple[float, Config]] = {}
    for record in journal.each():
        try:
            trial = Trial.from_json(record["trial"])
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        config = find(trial.config)
        if config is not None and trial.outcome is Outcome.OK and trial.level_ms is not None:
            times[text_of(config)] = trial.level_ms, config
    return [config for _, config in sorted(times.values(), key=lambda timed: timed[0])]
