"""Exchanges entries between cache directories: what a merge did, how two caches differ, and tables to ship."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from quarantune.cache.errors import CacheWriteError
from quarantune.cache.keys import canonical_json, safe_name
from quarantune.cache.store import Contents, Entry, Store, encode
from quarantune.host.shared_files import Directory
from quarantune.values.texts import call_text, did_you_mean, printable, shown
from quarantune.values.trial import Findings


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
        """Returns the call as people write it, as `kernels.scale(x f32[8]) on NVIDIA H200, code 3472601ec4d8`."""
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(self.problem_size):
                case {"call": call, **rest}:
                    more = f", {call_text(rest)}" if rest else ""
                    return f"{self.kernel_type}({call_text(call)}) on {self.device}{more}"
        return f"{self.kernel_type} on {self.device}, {self.problem_size}"


@dataclasses.dataclass(frozen=True)
class EntryPair:
    """Two entries for one problem.

    Attributes:
        key: the problem.
        kept: the entry that a merge keeps; in a comparison, that of the one cache.
        other: the entry that a merge leaves out; in a comparison, that of the other cache.
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
        updated: the problems for which both had the same config, and the other more samples: its entry was taken.
        unchanged: the problems for which both had the same config, and the entry stayed.
        conflicts: the problems for which the configs differ: the newer entry was kept, and both are listed.
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
        only_here: the problems that only the one cache has.
        only_there: the problems that only the other has.
        different: the problems for which their configs differ.
        same: the problems for which they have the same config.
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


class Merging:
    """Decides about the entries of one merge, and keeps a record."""

    def __init__(self) -> None:
        self._present: dict[CacheKey, Entry] = {}
        self._offered: dict[CacheKey, Entry] = {}
        self._kept: dict[CacheKey, Entry] = {}

    def offer(self, name: str, contents: Contents) -> None:
        """Notes the entries of the other cache for a function."""
        self._offered |= dict(entries_of(name, contents))

    def prefer(self, name: str, device: str, problem: str, present: Entry, offered: Entry) -> Entry:
        """Returns which of two entries stays: of the same config the one with more samples, else the newer one."""
        key = CacheKey(name, problem, device)
        if present == self._kept.get(key):
            return present  # the file is written once more, because another process wrote it meanwhile
        if _config_of(present) == _config_of(offered):
            kept = offered if _samples_of(offered) > _samples_of(present) else present
        else:
            # A measured one before an estimate. ISO times in UTC sort as text; an entry without one counts as older.
            kept = max(
                present, offered, key=lambda it: (not Findings.from_json(it).is_estimate, str(it.get("created", "")))
            )
        self._present[key], self._kept[key] = present, kept
        return kept

    def report(self) -> MergeReport:
        """Returns the effects of the merge."""
        updated: list[CacheKey] = []
        unchanged: list[CacheKey] = []
        conflicts: list[EntryPair] = []
        for key, present in self._present.items():
            kept, offered = self._kept[key], self._offered[key]
            if _config_of(present) != _config_of(offered):
                conflicts.append(EntryPair(key, kept, offered if kept == present else present))
            else:
                (unchanged if kept == present else updated).append(key)
        return MergeReport(
            added=tuple(key for key in self._offered if key not in self._present),
            updated=tuple(updated),
            unchanged=tuple(unchanged),
            conflicts=tuple(conflicts),
        )


def entries_of(name: str, contents: Contents) -> Iterator[tuple[CacheKey, Entry]]:
    """Yields the entries of a function with their keys."""
    for device, entries in contents.items():
        for key, entry in entries.items():
            yield CacheKey(name, key, device), entry


def compare(here: Iterable[tuple[CacheKey, Entry]], there: Iterable[tuple[CacheKey, Entry]]) -> CacheDiff:
    """Returns the differences between the entries of two caches; configs count, times do not."""
    ours, theirs = dict(here), dict(there)
    both = [key for key in sorted(ours) if key in theirs]
    is_same = {key: _config_of(ours[key]) == _config_of(theirs[key]) for key in both}
    return CacheDiff(
        only_here=tuple(key for key in sorted(ours) if key not in theirs),
        only_there=tuple(key for key in sorted(theirs) if key not in ours),
        different=tuple(EntryPair(key, ours[key], theirs[key]) for key in both if not is_same[key]),
        same=tuple(key for key in both if is_same[key]),
    )


def export(
    source: Store, directory: Path, *, names: Collection[str] | None, devices: Collection[str] | None
) -> list[CacheKey]:
    """Writes entries into a directory of their own, sorted, so that it can be kept under version control.

    Entries that the directory already holds for other problems stay. No lock is taken, and no file of a lock is left.

    Args:
        source: the entries.
        directory: made if necessary.
        names: the functions, in which `*` stands for any text; None for all.
        devices: the kinds of devices; None for all.

    Returns:
        The keys of the entries written.

    Raises:
        ValueError: a name or a device has no entry.
        CacheWriteError: the directory cannot be written to, or a file in it is damaged or from a later version.
    """
    found = chosen(source, names=names, devices=devices)
    target = Store(directory)
    if faults := [fault for name, _ in found for fault in target.problems(name)]:
        raise CacheWriteError(
            f"nothing was exported: {faults[0]}; what the file holds would be lost, so move it away, or name another "
            "directory"
        )
    for name, contents in found:
        _replace(target.path(name), _joined(target.read(name), contents))
    return [key for name, contents in found for key, _ in entries_of(name, contents)]


def chosen(
    store: Store, *, names: Collection[str] | None, devices: Collection[str] | None
) -> list[tuple[str, Contents]]:
    """Returns the entries of some functions for some devices, function by function.

    Args:
        store: the entries.
        names: the functions, in which `*` stands for any text; None for all.
        devices: the kinds of devices; None for all.

    Raises:
        ValueError: a name or a device has no entry.
    """
    known = store.names()
    for wanted in names or ():
        if not any(_matches(name, wanted) for name in known):
            near = did_you_mean(wanted, known) or " `quarantune cache list` shows all names."
            raise ValueError(f"nothing is cached for {shown(wanted)} in {str(store.directory)!r}.{near}")
    found = [
        (name, {device: entries for device, entries in store.read(name).items() if entries})
        for name in known
        if names is None or any(_matches(name, wanted) for wanted in names)
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


def _matches(name: str, wanted: str) -> bool:
    return name == safe_name(wanted) or fnmatch.fnmatchcase(name, wanted)


def _joined(present: Contents, added: Contents) -> Contents:
    devices = sorted({*present, *added})
    joined = {device: {**present.get(device, {}), **added.get(device, {})} for device in devices}
    return {device: dict(sorted(entries.items())) for device, entries in joined.items()}


def _replace(path: Path, contents: Contents) -> None:
    try:
        with Directory(path.parent, make=True) as place:
            place.replace(path.name, encode(contents))
    except OSError as error:
        raise CacheWriteError(
            f"nothing was exported to {str(path)!r} ({error.strerror}): name a directory that is writable"
        ) from error


def _config_of(entry: Entry) -> str:
    return canonical_json(entry.get("config"))


def _samples_of(entry: Entry) -> float:
    samples = entry.get("samples")
    return samples if isinstance(samples, (int, float)) else 0
