"""The configs that a search tries first: winners of similar problems."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quarantune.answers.answer import Situation
from quarantune.answers.by_rule import by_rule
from quarantune.answers.layers import Layers, dict_or_empty
from quarantune.answers.nearest import kept
from quarantune.cache.entries import CacheKey, CacheRecord
from quarantune.cache.entry_file import Entry
from quarantune.cache.journal import Journal
from quarantune.cache.store import Store
from quarantune.calls.key import KeyedCall
from quarantune.values.codec import decode_json, is_number, leaves_of, text_of
from quarantune.values.configs import Config, distinct
from quarantune.values.trial import Outcome

_MOST_NEIGHBOURS = 8
"""Most winners of similar problems to try first."""
_MOST_FROM_JOURNAL = 8
"""Most of the nearest problem's fastest configs to try after the winners of similar problems."""
_UNLIKE = 4.0
"""Distance between two unequal words or flags (such as dtypes): the same as a factor of 16 between sizes."""


def starts(call: KeyedCall, known: Layers, now: Situation) -> list[Config]:
    """Returns configs to try first.

    They begin with winners for this call with other code or configs, because an edited function's own earlier winners
    are the best starts. The answer of a rule and winners of other problems follow, the most similar problem first.

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
    ruled = by_rule(call, now, known)
    nearest = sorted(entries, key=lambda key: (difference(ours, dict_or_empty(entries[key].get("key_values"))), key))
    won = [
        *earlier_winners(call, everything),
        *([] if isinstance(ruled, str) else [ruled.config]),
        *(entries[key].get("config") for key in nearest),
    ]
    found = distinct(config for config in map(find, won) if config is not None)[:_MOST_NEIGHBOURS]
    for problem in nearest[:1]:
        journal = Journal(now.settings.cache_dir, name, device, problem)
        found += _fastest(journal, find)[:_MOST_FROM_JOURNAL]
    return distinct(found)


def earlier_winners(call: KeyedCall, entries: Iterable[tuple[Store, CacheRecord]]) -> list[Config]:
    """Returns the configs that won for a call with other code or configs, in the order of the entries, each once.

    It leaves out configs that are not in the call's config space any more, or that `prune_fn` drops.
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
    """Returns the distance of two described problems: the sum of the differences of their sizes in powers of two."""
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
    """Returns the measured configs of a journal, the fastest first."""
    times: dict[str, tuple[float, Config]] = {}
    for trial in journal.trials():
        config = find(trial.config)
        if config is not None and trial.outcome is Outcome.OK and trial.merit is not None:
            times[text_of(config)] = trial.merit, config
    return [config for _, config in sorted(times.values(), key=lambda timed: timed[0])]
