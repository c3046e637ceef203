"""The configs that a search tries first: winners of similar problems."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quarantune.answers.answer import Situation
from quarantune.answers.layers import Layers, dict_or_empty
from quarantune.answers.nearest import kept, leaves_of
from quarantune.cache.entries import CacheKey, CacheRecord
from quarantune.cache.entry_file import Entry
from quarantune.cache.journal import Journal
from quarantune.cache.store import Store
from quarantune.calls.key import KeyedCall
from quarantune.values.codec import decode_json, is_number, text_of
from quarantune.values.configs import Config, distinct
from quarantune.values.trial import Outcome

_MOST_NEIGHBOURS = 8
"""How many winners of similar problems are tried first."""
_MOST_FROM_JOURNAL = 8
"""How many of the nearest problem's fastest configs are tried after them."""
_UNLIKE = 4.0
"""How far apart two different words or flags count, such as dtypes: as far as sizes that differ by a factor of 16."""


def starts(call: KeyedCall, known: Layers, now: Situation) -> list[Config]:
    """Returns configs to try first, those of the most similar problems first.

    First come those that won for this call with other code or configs: the best starts for a function that was edited
    are its own earlier winners.

    Args:
        call: the call.
        known: the known results of its function.
        now: the situation of the call.
    """
    name, device, wanted = call.id
    find = call.call.find
    everything = list(known.entries(now))
    entries: dict[str, Entry] = {}
    for _, (key, entry) in everything:
        if key.device == device and key.problem_size != wanted:
            entries.setdefault(key.problem_size, entry)
    ours = call.readable
    nearest = sorted(entries, key=lambda key: (difference(ours, dict_or_empty(entries[key].get("key_values"))), key))
    won = [*earlier_winners(call, everything), *(entries[key].get("config") for key in nearest)]
    found = distinct(config for config in map(find, won) if config is not None)[:_MOST_NEIGHBOURS]
    for problem in nearest[:1]:
        journal = Journal(now.settings.cache_dir, name, device, problem)
        found += _fastest(journal, find)[:_MOST_FROM_JOURNAL]
    return distinct(found)


def earlier_winners(call: KeyedCall, entries: Iterable[tuple[Store, CacheRecord]]) -> list[Config]:
    """Returns the configs that won for a call with other code or configs, as far as they are still worth trying.

    They come in the order of the entries, each once, and only those in the call's config space.
    """
    here = decode_json(call.id.key)

    def is_same_call(key: CacheKey) -> bool:
        with contextlib.suppress(ValueError):
            there = decode_json(key.problem_size) if key.device == call.id.device else None
            return isinstance(there, dict) and all(here.get(part) == there.get(part) for part in ("call", "jax"))
        return False

    won = (kept(entry, call.call) for _, (key, entry) in entries if is_same_call(key))
    return distinct(config for config in won if config is not None)


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Returns how different two described problems are: the sum of the differences of their sizes in powers of two."""
    here, there = dict(leaves_of(ours)), dict(leaves_of(theirs))
    return sum(_apart(here.get(path), there.get(path)) for path in here.keys() | there.keys())


def _apart(ours: Any, theirs: Any) -> float:
    if ours == theirs and type(ours) is type(theirs):
        return 0.0
    if _is_size(ours) and _is_size(theirs):
        return abs(math.log2(1 + abs(ours)) - math.log2(1 + abs(theirs)))
    return _UNLIKE


def _is_size(value: Any) -> bool:
    return is_number(value) and (isinstance(value, int) or math.isfinite(value))


def _fastest(journal: Journal, find: Callable[[Any], Config | None]) -> list[Config]:
    """Returns the configs of a journal that were measured, the fastest first."""
    times: dict[str, tuple[float, Config]] = {}
    for trial in journal.trials():
        config = find(trial.config)
        if config is not None and trial.outcome is Outcome.OK and trial.merit is not None:
            times[text_of(config)] = trial.merit, config
    return [config for _, config in sorted(times.values(), key=lambda timed: timed[0])]
