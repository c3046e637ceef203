"""Reads cache entries: the config, the times and the versions that they hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from quarantune import cache
from quarantune.cache import Entry, Store
from quarantune.values import versions
from quarantune.values.json_object import JsonObject
from quarantune.values.settings import Settings
from quarantune.values.space import Space
from quarantune.values.texts import printable
from quarantune.values.times import times_of
from quarantune.values.trial import checked_counts

_LONGEST_DATE = 40
_LARGEST_COUNT = 1 << 53


@dataclasses.dataclass(frozen=True)
class Saved:
    """The part of an entry that describes its sweep.

    Attributes:
        created: when it was saved, as ISO text; empty where that is not known.
        counts: how many configs ended in each outcome.
    """

    created: str = ""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


def saved_of(entry: Entry) -> Saved:
    """Returns the part of an entry that describes its sweep; the file may hold anything."""
    created = entry.get("created")
    text = printable(created[:_LONGEST_DATE]) if isinstance(created, str) else ""
    return Saved(text, checked_counts(entry.get("trials")))


@dataclasses.dataclass(frozen=True)
class Searched:
    """How thoroughly a space was searched.

    Attributes:
        stopped: why the search ended: `exhausted`, `max_trials`, `time_budget` or `patience`; empty where that is not
            known, as for results of earlier versions.
        seen: how many configs were tried, or dropped by `prune_fn`.
        space_size: how many configs there are.
        budget: the budget that ended it, as a number of trials or of seconds; None for another end.
    """

    stopped: str = ""
    seen: int | None = None
    space_size: int | None = None
    budget: float | None = None

    def to_json(self) -> JsonObject:
        """Returns the part of an entry that says how thorough its search was."""
        return dataclasses.asdict(self)

    @property
    def thoroughness(self) -> float:
        """The larger, the more thorough; a result of an earlier version comes from all configs."""
        is_whole = self.seen is None or self.seen == self.space_size
        return math.inf if self.seen is None or is_whole else self.seen


def searched_of(entry: Entry) -> Searched:
    """Returns how thorough the search was that an entry comes from; the file may hold anything."""
    record = dict_or_empty(entry.get("search"))
    stopped, budget = record.get("stopped"), record.get("budget")
    return Searched(
        stopped if isinstance(stopped, str) else "",
        _count_or_none(record.get("seen")),
        _count_or_none(record.get("space_size")),
        budget if isinstance(budget, float) else _count_or_none(budget),
    )


def more_thorough(device: str, key: str, present: Entry, offered: Entry) -> Entry:
    """Returns the one of two entries for one problem to keep.

    That is the offered one, unless the present one comes from a more thorough search of the same space under the same
    versions, and its config is as fast.

    Args:
        device: the kind of device.
        key: the key of the problem.
        present: the entry that is saved.
        offered: the entry to save.
    """
    is_alike = all(present.get(part) == offered.get(part) for part in ("space", "versions", "fingerprint"))
    is_less = searched_of(offered).thoroughness < searched_of(present).thoroughness
    is_slower = times_of(offered).best_ms >= times_of(present).best_ms
    return present if is_alike and is_less and is_slower else offered


def _count_or_none(value: Any) -> int | None:
    # A huge integer does not fit a float.
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT else None


def open_store(settings: Settings) -> Store:
    """Returns the store of results in the cache directory."""
    return Store(settings.cache_dir, lock_timeout_s=settings.lock_timeout)


def space_of(configs: Space) -> JsonObject:
    """Returns values that distinguish one config space from another, whatever the order of the configs."""
    return {"configs": len(configs), "hash": cache.short_hash("\n".join(sorted(configs.texts())))}


def changed_versions(entry: Entry) -> str:
    """Lists the versions that have changed since an entry was made; empty where all are the same."""
    then = dict_or_empty(entry.get("versions"))
    changed = {name: now for name, now in versions.versions().items() if then and then.get(name) != now}
    return ", ".join(f"{name} {then.get(name)} (now {now})" for name, now in changed.items())


def dict_or_empty(value: Any) -> JsonObject:
    """Returns a part of an entry that should be a dict; an empty one where somebody has edited the file."""
    return value if isinstance(value, dict) else {}
