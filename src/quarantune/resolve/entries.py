"""Reads cache entries: the config, the times and the versions that they hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from quarantune import cache
from quarantune.cache import Entry, Store
from quarantune.values import versions
from quarantune.values.config_values import text_of
from quarantune.values.json_object import JsonObject
from quarantune.values.settings import Settings
from quarantune.values.trial import Config


@dataclasses.dataclass(frozen=True)
class Times:
    """Measured times of one call in milliseconds.

    Attributes:
        best_ms: the time of the best config.
        default_ms: the time of the function's own defaults; None where it is unknown.
    """

    best_ms: float
    default_ms: float | None


def open_store(settings: Settings) -> Store:
    """Returns the store of results in the cache directory."""
    return Store(settings.cache_dir, lock_timeout_s=settings.lock_timeout)


def space_of(configs: Sequence[Config]) -> JsonObject:
    """Returns values that distinguish one config space from another, whatever the order of the configs."""
    texts = sorted(map(text_of, configs))
    return {"configs": len(texts), "hash": cache.short_hash("\n".join(texts))}


def times_of(entry: Entry) -> Times:
    """Returns the times in an entry."""
    best_ms, default_ms = entry.get("time_ms"), entry.get("default_time_ms")
    return Times(
        float(best_ms) if isinstance(best_ms, (int, float)) else math.nan,
        float(default_ms) if isinstance(default_ms, (int, float)) else None,
    )


def find_config(raw: Any, configs: Sequence[Config]) -> Config | None:
    """Returns the config that is equal to the `config` of an entry, or None where there is none."""
    try:
        text = cache.canonical_json(raw)
    except ValueError:  # 1e999 is JSON, and infinite
        return None
    return next((dict(config) for config in configs if text_of(config) == text), None)


def changed_versions(entry: Entry) -> str:
    """Lists the versions that have changed since an entry was made; empty where all are the same."""
    then = dict_or_empty(entry.get("versions"))
    changed = {name: now for name, now in versions.versions().items() if then.get(name) != now}
    return ", ".join(f"{name} {then.get(name)} (now {now})" for name, now in changed.items())


def dict_or_empty(value: Any) -> JsonObject:
    """Returns a part of an entry that should be a dict; an empty one where somebody has edited the file."""
    return value if isinstance(value, dict) else {}
