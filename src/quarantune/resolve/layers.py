"""The layers in which results are looked up: the user's cache, then directories that are only read."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quarantune import cache
from quarantune.cache import Entry, Store
from quarantune.host.process import entry_points
from quarantune.values.codec import JsonObject
from quarantune.values.describe import versions
from quarantune.values.settings import Settings, table_directory
from quarantune.values.space import Space
from quarantune.values.trial import Findings

GROUP = "quarantune.tables"
"""The group of entry points with which packages name their tables."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One directory of results.

    Attributes:
        label: the layer in messages.
        store: its entries.
        is_own: whether it is the user's cache, which is written too.
    """

    label: str
    store: Store
    is_own: bool = False


@dataclasses.dataclass(frozen=True)
class Found:
    """An entry of a layer.

    Attributes:
        layer: the layer.
        device: the kind of device that it is for.
        key: its key.
        entry: the entry.
    """

    layer: Layer
    device: str
    key: str
    entry: Entry


def open_layers(settings: Settings, tables: str | None) -> Iterator[Layer]:
    """Yields the layers in the order of look-ups, each opened when it is needed.

    Args:
        settings: the operator's settings, with the user's cache and the directories of `CACHE_PATH`.
        tables: the table that the function's author names, as `package:directory`.
    """
    own = settings.cache_dir
    yield Layer(str(own), Store(own, lock_timeout_s=settings.lock_timeout), is_own=True)
    for directory in settings.cache_path:
        if _is_there(directory, f"QUARANTUNE_CACHE_PATH names {str(directory)!r}"):
            yield _read_only(str(directory), directory)
    if tables is not None:
        directory = table_directory(tables)
        if _is_there(directory, f"tables={tables!r} stands for {str(directory)!r}"):
            yield _read_only(f"the table {tables}", directory)
    for label, directory in _installed(tuple(sys.path)):
        yield _read_only(label, directory)


def entries_of(layer: Layer, name: str) -> Iterator[Found]:
    """Yields all entries of a function in a layer."""
    for device, entries in layer.store.read(name).items():
        for key, entry in entries.items():
            yield Found(layer, device, key, entry)


def _read_only(label: str, directory: Path) -> Layer:
    return Layer(label, Store(directory, read_only=True))


def _is_there(directory: Path, origin: str) -> bool:
    if os.path.isdir(directory):  # unlike `Path.is_dir`, it raises nothing where the path cannot be examined
        return True
    cache.report_once(f"{origin}, which is no directory: no results are looked up there; make it, or correct the name")
    return False


@functools.lru_cache(maxsize=4)
def _installed(_: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Returns the tables of installed packages, by the names of their entry points."""
    found = []
    for point in sorted(entry_points(GROUP), key=lambda point: (point.name, point.value)):
        try:
            directory = table_directory(point.value)
        except ValueError as error:
            cache.report_once(f"the entry point {point.name!r} of the group {GROUP!r} is not usable: {error}")
            continue
        if _is_there(directory, f"the entry point {point.name!r} of the group {GROUP!r} names {str(directory)!r}"):
            found.append((f"the table {point.value}", directory))
    return found


def more_thorough(device: str, key: str, present: Entry, offered: Entry) -> Entry:
    """Returns the one of two entries for one problem to keep.

    That is the offered one, unless the present one comes from a more thorough search of the same space under the same
    versions, and its config is as fast. An estimate never replaces a measured one.

    Args:
        device: the kind of device.
        key: the key of the problem.
        present: the entry that is saved.
        offered: the entry to save.
    """
    is_alike = all(present.get(part) == offered.get(part) for part in ("space", "versions", "fingerprint"))
    then, now = Findings.from_json(present), Findings.from_json(offered)
    if now.is_estimate != then.is_estimate:
        return present if now.is_estimate else offered
    is_less = now.search.thoroughness < then.search.thoroughness
    return present if is_alike and is_less and now.figure >= then.figure else offered


def open_store(settings: Settings) -> Store:
    """Returns the store of results in the cache directory."""
    return Store(settings.cache_dir, lock_timeout_s=settings.lock_timeout)


def space_of(configs: Space) -> JsonObject:
    """Returns values that distinguish one config space from another, whatever the order of the configs."""
    return {"configs": len(configs), "hash": cache.short_hash("\n".join(sorted(configs.texts())))}


def changed_versions(entry: Entry) -> str:
    """Lists the versions that have changed since an entry was made; empty where all are the same."""
    then = dict_or_empty(entry.get("versions"))
    changed = {name: now for name, now in versions().items() if then and then.get(name) != now}
    return ", ".join(f"{name} {then.get(name)} (now {now})" for name, now in changed.items())


def dict_or_empty(value: Any) -> JsonObject:
    """Returns a part of an entry that should be a dict; an empty one where somebody has edited the file."""
    return value if isinstance(value, dict) else {}
