"""The entries of a whole cache directory: listing, merging, comparing, exporting and pruning them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fnmatch
import functools
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from quarantune.cache import journal
from quarantune.cache.entry_file import LARGEST_ENTRIES_BYTES, Contents, Entry, encode
from quarantune.cache.file_names import problem_hash, safe_name
from quarantune.cache.joining import config_in, is_conflict, joined_by_export, joined_by_merge
from quarantune.cache.problems import CacheWriteError, write_errors
from quarantune.cache.store import Prefer, Store, joined
from quarantune.host.shared_files import Directory, paths
from quarantune.values.codec import canonical_json, decode_json
from quarantune.values.texts import call_text, did_you_mean, printable, shown

_ASIDE = f"corrupt-{'[0-9]' * 8}T{'[0-9]' * 6}*"
_SET_ASIDE = (f"*.json.{_ASIDE}", f"*.entries/*.json.{_ASIDE}", f"*.trials/*.{_ASIDE}")
_DRAFT = re.compile(r".*\.([0-9a-f]{16}|[0-9a-f]+-\d+-\d+-\d+)\.tmp")
"""Names of drafts: of any file, of writers of entries, and of claims during their removal."""


class CacheKey(NamedTuple):
    """The key of an entry: `cache.get(*key)`.

    Attributes:
        kernel_type: the name of a function or of a kind of kernel.
        problem_size: the key of the problem, as text.
        device: the kind of device.
    """

    kernel_type: str
    problem_size: str
    device: str

    def __str__(self) -> str:
        """Returns the call as people write it, such as `kernels.scale(x f32[8]) on NVIDIA H200, code 3472601ec4d8`."""
        with contextlib.suppress(ValueError):
            match decode_json(self.problem_size):
                case {"call": call, **rest}:
                    more = f", {call_text(rest)}" if rest else ""
                    return f"{self.kernel_type}({call_text(call)}) on {self.device}{more}"
        return f"{self.kernel_type} on {self.device}, {self.problem_size}"


class CacheRecord(NamedTuple):
    """One entry and its key."""

    key: CacheKey
    entry: Entry


@dataclasses.dataclass(frozen=True)
class EntryPair:
    """Two entries for one problem.

    Attributes:
        key: the problem.
        kept: the entry that a merge keeps; in a comparison, the entry of the first cache.
        other: the entry that a merge leaves out; in a comparison, the entry of the second cache.
    """

    key: CacheKey
    kept: Entry
    other: Entry

    def __str__(self) -> str:
        """Returns the problem and the two configs on one line."""
        configs = " and ".join(canonical_json(entry.get("config")) for entry in (self.kept, self.other))
        return f"{self.key}: {configs}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeReport:
    """The effects of merging another cache into one.

    Attributes:
        added: the problems that only the other cache had.
        updated: the problems with the same config in both caches, but with more samples or results of further programs
            in the other one.
        unchanged: the problems with the same config in both caches whose entry stayed.
        conflicts: the problems with different configs for one program: the newer result comes first, and the pair lists
            both.
    """

    added: tuple[CacheKey, ...] = ()
    updated: tuple[CacheKey, ...] = ()
    unchanged: tuple[CacheKey, ...] = ()
    conflicts: tuple[EntryPair, ...] = ()

    def __str__(self) -> str:
        """Returns the numbers, and a line for each conflict."""
        counts = f"{len(self.added)} added, {len(self.updated)} updated, {len(self.unchanged)} unchanged"
        lines = [f"  kept the first, the newer: {conflict}" for conflict in self.conflicts]
        return "\n".join([f"{counts}, {len(lines)} in conflict", *lines])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheDiff:
    """The differences between two caches.

    Attributes:
        only_here: the problems that only the first cache has.
        only_there: the problems that only the second cache has.
        different: the problems with different configs.
        same: the problems with the same config.
    """

    only_here: tuple[CacheKey, ...] = ()
    only_there: tuple[CacheKey, ...] = ()
    different: tuple[EntryPair, ...] = ()
    same: tuple[CacheKey, ...] = ()

    def __str__(self) -> str:
        """Returns the numbers, and a line for each difference."""
        lines = [
            f"{len(self.only_here)} only here, {len(self.only_there)} only there, {len(self.different)} different, "
            f"{len(self.same)} the same"
        ]
        for where, keys in (("here", self.only_here), ("there", self.only_there)):
            lines += [f"  only {where}: {key}" for key in keys]
        return "\n".join([*lines, *(f"  here and there: {pair}" for pair in self.different)])


def records(store: Store) -> Iterator[CacheRecord]:
    """Yields all entries of a cache with their keys."""
    for name in store.names():
        yield from entries_of(name, store.read(name))


def entries_of(name: str, contents: Contents) -> Iterator[CacheRecord]:
    """Yields the entries of a function with their keys."""
    for device, entries in contents.items():
        for key, entry in entries.items():
            yield CacheRecord(CacheKey(name, key, device), entry)


class MergeTarget(Protocol):
    """A cache to copy entries into, such as a `Store`."""

    def merge(self, name: str, contents: Contents, *, prefer: Prefer) -> None:
        """Adds entries of a function; see `Store.merge`."""


def merge(store: MergeTarget, others: Iterable[tuple[str, Contents]]) -> MergeReport:
    """Copies the entries of another cache, as `TuningCache.merge` documents it.

    Args:
        store: the cache to copy into.
        others: the entries of the other one, function by function.

    Raises:
        CacheWriteError: the entries could not be saved. The message says why.
    """
    offered: dict[CacheKey, Entry] = {}
    decided: dict[CacheKey, tuple[Entry, Entry]] = {}
    for name, contents in others:
        if contents:
            offered |= dict(entries_of(name, contents))
            store.merge(name, contents, prefer=functools.partial(_decide, decided, name))
    updated: list[CacheKey] = []
    unchanged: list[CacheKey] = []
    conflicts: list[EntryPair] = []
    for key, (present, kept) in decided.items():
        if is_conflict(present, offered[key]):
            is_first = config_in(kept) == config_in(present)
            conflicts.append(EntryPair(key, kept, offered[key] if is_first else present))
        else:
            (unchanged if kept == present else updated).append(key)
    return MergeReport(
        added=tuple(key for key in offered if key not in decided),
        updated=tuple(updated),
        unchanged=tuple(unchanged),
        conflicts=tuple(conflicts),
    )


def _decide(
    decided: dict[CacheKey, tuple[Entry, Entry]], name: str, device: str, problem: str, present: Entry, offered: Entry
) -> Entry:
    """Returns the entry that a merge leaves, and notes the decision.

    Args:
        decided: the present and the kept entry of each decision, by key; this decision is added.
        name: the function.
        device: the kind of device.
        problem: the key of the problem.
        present: the entry in the file.
        offered: the entry of the other cache.
    """
    key = CacheKey(name, problem, device)
    if key in decided and present == decided[key][1]:
        return present  # a second write of the file, because another process changed it
    kept = joined_by_merge(device, problem, present, offered)
    decided[key] = present, kept
    return kept


def export(
    store: Store, directory: Path, *, names: Collection[str] | None, devices: Collection[str] | None
) -> list[CacheKey]:
    """Writes entries into another directory, as `TuningCache.export` documents it, and returns their keys."""
    found, target = chosen(store, names=names, devices=devices), Store(directory)
    if faults := [fault for name, _ in found for fault in target.problems(name)]:
        raise CacheWriteError(
            f"nothing was exported: {faults[0]}; the file's content would be lost, so move it away, or name "
            "another directory"
        )
    for name, contents in found:
        path, both = target.path(name), joined(contents, joined_by_export, target.read(name))
        ordered = {device: dict(sorted(both[device].items())) for device in sorted(both)}
        with (
            write_errors(f"nothing was exported to {str(path)!r}", "name another directory"),
            Directory(path.parent, make=True) as place,
        ):
            place.replace(path.name, encode(ordered))
    return [key for name, contents in found for key, _ in entries_of(name, contents)]


def compare(here: Iterable[CacheRecord], there: Iterable[CacheRecord]) -> CacheDiff:
    """Returns the differences between the configs in the entries of two caches. It ignores times."""
    ours, theirs = dict(here), dict(there)
    pairs = [EntryPair(key, ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())]
    return CacheDiff(
        only_here=tuple(sorted(ours.keys() - theirs.keys())),
        only_there=tuple(sorted(theirs.keys() - ours.keys())),
        different=tuple(pair for pair in pairs if config_in(pair.kept) != config_in(pair.other)),
        same=tuple(pair.key for pair in pairs if config_in(pair.kept) == config_in(pair.other)),
    )


def chosen(
    store: Store, *, names: Collection[str] | None, devices: Collection[str] | None
) -> list[tuple[str, Contents]]:
    """Returns the entries of some functions for some devices, function by function.

    Args:
        store: the entries.
        names: the functions, as names with `*` for any text; None for all.
        devices: the kinds of devices; None for all.

    Raises:
        ValueError: a name or a device has no entry.
    """
    found = [
        (name, {device: entries for device, entries in store.read(name).items() if entries})
        for name in (store.names() if names is None else among(names, store.names(), str(store.directory)))
    ]
    kinds = sorted({device for _, contents in found for device in contents})
    for wanted in devices or ():
        if wanted not in kinds:
            near = did_you_mean(wanted, kinds) or f" There are results for: {', '.join(kinds) or 'none'}."
            raise ValueError(f"nothing is cached for the device {shown(wanted)}.{printable(near)}")
    of_devices = [
        (name, {device: entries for device, entries in contents.items() if devices is None or device in devices})
        for name, contents in found
    ]
    return [(name, contents) for name, contents in of_devices if contents]


def named(store: Store, names: Collection[str]) -> list[str]:
    """Returns the functions of these names that have entries or saved trials.

    Args:
        store: the entries.
        names: the functions, as names with `*` for any text.

    Raises:
        ValueError: a name has neither.
    """
    swept = [path.parent.stem for path in paths(store.directory, "*.trials/*")]
    return among(names, sorted({*store.names(), *swept}), str(store.directory))


def among(
    names: Collection[str], known: Collection[str], place: str, remedy: str = "`quarantune cache list` shows all names."
) -> list[str]:
    """Returns the functions of these names among the functions in a directory or at a URL.

    Raises:
        ValueError: there is nothing for a name, and no near name, so that the message gives the remedy.
    """
    for wanted in names:
        if not any(_matches(name, wanted) for name in known):
            near = did_you_mean(wanted, known) or f" {remedy}"
            raise ValueError(f"nothing is cached for {shown(wanted)} in {place!r}.{near}")
    return [name for name in known if any(_matches(name, wanted) for wanted in names)]


def _matches(name: str, wanted: str) -> bool:
    return name == safe_name(wanted) or fnmatch.fnmatchcase(name, wanted)


def problems(store: Store) -> list[str]:
    """Returns a sentence for each problem in a cache directory; changes nothing."""
    found = [problem for name in store.names() for problem in store.problems(name)]
    for path in paths(store.directory, *_SET_ASIDE):
        found.append(f"{str(path)!r} was damaged and set aside: look at it, or delete it")
    return found + journal.damage(store.directory)


# --- pruning ---

_DRAFT_AGE_S = 24 * 3600.0
"""Age of a draft in seconds beyond which no process works on it, even if the clocks of two hosts differ."""


def prune(
    store: Store,
    *,
    older_than_s: float | None = None,
    is_chosen: Callable[[str, str | None], bool] = lambda name, device: True,
    dry_run: bool = False,
) -> tuple[list[CacheKey], list[Path]]:
    """Removes remains and, if an age is given, old results with their trials and the trials of old unfinished sweeps.

    Args:
        store: the entries.
        older_than_s: the least age of results and trials, in seconds; None to keep them all.
        is_chosen: takes the name of a function's file and a kind of device (None for files that may be about any
            device), and returns whether to look at it.
        dry_run: whether to remove nothing.

    Returns:
        The results and the files that it removed, or would remove without `dry_run`. The files are damaged ones that
        were set aside, drafts of dead processes, and the trials of sweeps without a result.

    Raises:
        CacheWriteError: a result or a file could not be removed. The message says why.
    """
    now_s = time.time()
    files = list(_remains(store.directory, now_s, is_chosen))
    results: list[CacheKey] = []
    if older_than_s is not None:
        before_s = now_s - older_than_s
        for name in store.names():
            results += _prune_entries(store, name, before_s, is_chosen, dry_run=dry_run)
        files += _unfinished(store, before_s, is_chosen)
    if not dry_run:
        journal.remove(store.directory, files)
    return results, files


def _prune_entries(
    store: Store, name: str, before_s: float, is_chosen: Callable[[str, str | None], bool], *, dry_run: bool
) -> list[CacheKey]:
    """Removes the old results of one function with their trials, and returns their keys."""

    def is_old(device: str, key: str, entry: Entry) -> bool:
        return is_chosen(name, device) and _created_s(entry) < before_s

    old = [key for key, entry in entries_of(name, store.read(name)) if is_old(key.device, key.problem_size, entry)]
    if old and not dry_run:
        store.discard(name, is_old)
        renewed = {record.key for record in entries_of(name, store.read(name))}
        old = [key for key in old if key not in renewed]
        for key in old:
            journal.discard_all(store.directory, name, problem_hash(key.device, key.problem_size))
    return old


def _remains(directory: Path, now_s: float, is_chosen: Callable[[str, None], bool]) -> Iterator[Path]:
    """Yields damaged files that were set aside, and the drafts of processes that died while writing."""
    for path in paths(directory, *_SET_ASIDE, ".*.json.*.tmp", "*.entries/*.tmp", "*.trials/*.tmp"):
        name = path.parent.stem if path.parent != directory else path.name.removeprefix(".").rpartition(".json.")[0]
        # A file set aside only because it was too large still holds results: keep it.
        is_old_draft = _DRAFT.fullmatch(path.name) is not None and _written_s(path) < now_s - _DRAFT_AGE_S
        is_remains = is_old_draft if path.suffix == ".tmp" else _is_readable(path, LARGEST_ENTRIES_BYTES)
        if is_remains and is_chosen(name, None):
            yield path


def _unfinished(store: Store, before_s: float, is_chosen: Callable[[str, None], bool]) -> Iterator[Path]:
    """Yields old files about problems without a result."""
    for folder in paths(store.directory, "*.trials"):
        # As a pattern, the name of another program's folder may match folders of this one.
        if folder.stem != safe_name(folder.stem) or not is_chosen(folder.stem, None):
            continue
        if store.problems(folder.stem):
            continue  # unreadable files may hold results
        known = {problem_hash(device, key) for device, entries in store.read(folder.stem).items() for key in entries}
        for path in paths(store.directory, *(f"{folder.name}/{journal.PROBLEM}.*{it}" for it in journal.RECORDS)):
            is_old = path.name.partition(".")[0] not in known and _written_s(path) < before_s
            if is_old and _is_readable(path, journal.LARGEST_READ_JOURNAL_BYTES):
                yield path


def _is_readable(path: Path, largest_bytes: int) -> bool:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_size <= largest_bytes and os.access(path, os.R_OK)
    return False


def _created_s(entry: Entry) -> float:
    """Returns when an entry was made, in seconds since 1970; infinite if unknown."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        created = datetime.datetime.fromisoformat(str(entry.get("created")))
        return created.replace(tzinfo=created.tzinfo or datetime.UTC).timestamp()
    return float("inf")


def _written_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return float("inf")
