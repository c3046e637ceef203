"""Removes what a cache directory holds without use: remains of damage and crashes, and old results."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quarantune.cache import content, journal
from quarantune.cache.entry_file import Entry
from quarantune.cache.exchange import CacheKey
from quarantune.cache.keys import problem_hash
from quarantune.cache.store import Store
from quarantune.host.shared_files import paths

_DRAFT_AGE_S = 3600.0
"""No process works on a draft for longer than this, in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
    """The things that were removed, or would be.

    Attributes:
        entries: the results.
        files: damaged files that were set aside, drafts of dead processes, and the trials of sweeps without a result.
    """

    entries: tuple[CacheKey, ...] = ()
    files: tuple[Path, ...] = ()


def prune(
    store: Store,
    *,
    older_than_s: float | None = None,
    is_chosen: Callable[[str, str | None], bool] = lambda name, device: True,
    dry_run: bool = False,
) -> Pruned:
    """Removes remains and, if an age is given, old results with their trials and the trials of old unfinished sweeps.

    Args:
        store: the entries.
        older_than_s: the least age of results and trials, in seconds; None to keep them all.
        is_chosen: takes the name of a function's file and a kind of device, or None for files that may be about any;
            returns whether to look at it.
        dry_run: whether to remove nothing.

    Returns:
        The things that were removed, or would be.

    Raises:
        CacheWriteError: something could not be removed; the message says why.
    """
    now_s = time.time()
    files = list(_remains(store.directory, now_s, lambda name: is_chosen(name, None)))
    entries: list[CacheKey] = []
    for name in store.names() if older_than_s is not None else ():
        before_s = now_s - (older_than_s or 0)

        def is_old(device: str, key: str, entry: Entry, *, name: str = name, before_s: float = before_s) -> bool:
            return is_chosen(name, device) and _created_s(entry) < before_s

        old = [
            CacheKey(name, key, device)
            for device, found in store.read(name).items()
            for key, entry in found.items()
            if is_old(device, key, entry)
        ]
        if old and not dry_run:
            store.discard(name, is_old)
            for key in old:
                journal.discard_all(store.directory, name, problem_hash(key.device, key.problem_size))
        entries += old
    if older_than_s is not None:
        files += _unfinished(store, now_s - older_than_s, lambda name: is_chosen(name, None))
    if not dry_run:
        journal.remove(store.directory, files)
    return Pruned(entries=tuple(entries), files=tuple(files))


def _remains(directory: Path, now_s: float, is_chosen: Callable[[str], bool]) -> Iterator[Path]:
    """Yields damaged files that were set aside, and the drafts of processes that died as they wrote."""
    patterns = ("*.json.corrupt-*", "*.entries/*.json.corrupt-*", ".*.json.*.tmp", "*.entries/*.tmp", "*.trials/*.tmp")
    for path in [path for pattern in patterns for path in paths(directory, pattern)]:
        name = path.parent.stem if path.parent != directory else path.name.removeprefix(".").rpartition(".json.")[0]
        # A file that was only too large for the version that set it aside holds results.
        is_whole = path.suffix == ".tmp" or _is_readable(path, content.LARGEST_ENTRIES_BYTES)
        if is_chosen(name) and is_whole and (path.suffix != ".tmp" or _written_s(path) < now_s - _DRAFT_AGE_S):
            yield path


def _unfinished(store: Store, before_s: float, is_chosen: Callable[[str], bool]) -> Iterator[Path]:
    """Yields old files about problems that have no result."""
    for folder in paths(store.directory, "*.trials"):
        if not is_chosen(folder.stem):
            continue
        known = {problem_hash(device, key) for device, entries in store.read(folder.stem).items() for key in entries}
        if store.problems(folder.stem):
            continue  # there may be results that cannot be read
        records = [f"{folder.name}/*.{suffix}" for suffix in journal.RECORDS]
        for path in [path for pattern in records for path in paths(store.directory, pattern)]:
            is_old = path.name.partition(".")[0] not in known and _written_s(path) < before_s
            if is_old and _is_readable(path, content.LARGEST_READ_JOURNAL_BYTES):
                yield path


def _is_readable(path: Path, largest_bytes: int) -> bool:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_size <= largest_bytes and os.access(path, os.R_OK)
    return False


def _created_s(entry: Entry) -> float:
    """Returns when an entry was made, in seconds since 1970; infinite where that is not known."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        created = datetime.datetime.fromisoformat(str(entry.get("created")))
        return created.replace(tzinfo=created.tzinfo or datetime.UTC).timestamp()
    return float("inf")


def _written_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return float("inf")
