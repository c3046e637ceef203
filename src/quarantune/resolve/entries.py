"""Compares cache entries: how thorough their searches were, their config spaces and their versions."""

from __future__ import annotations

from typing import Any

from quarantune import cache
from quarantune.cache import Entry, Store
from quarantune.values import versions
from quarantune.values.findings import Findings
from quarantune.values.json_object import JsonObject
from quarantune.values.settings import Settings
from quarantune.values.space import Space


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
    then, now = Findings.from_json(present), Findings.from_json(offered)
    is_less = now.search.thoroughness < then.search.thoroughness
    return present if is_alike and is_less and now.time_ms >= then.time_ms else offered


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
