"""The store: the entries of each function as JSON, `{device: {key: entry}}`, shared by any number of jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeAlias

from quarantune.host import shared_files
from quarantune.host.machine import boot_id, process_status
from quarantune.host.process import new_lock, warn
from quarantune.host.shared_files import Directory, NotAFileError, TooLargeError, advice, directory_of, paths, side_lock
from quarantune.values.codec import (
    JsonObject,
    Record,
    canonical_json,
    decode_json,
    is_plausible_ms,
    plain,
    short_hash,
    within,
)

SCHEMA = 1
"""The version of an entry's layout; an entry of a later one makes its file untouchable for us."""
LARGEST_ENTRIES_BYTES = 1 << 28
"""The size that no writer lets a file of entries pass."""
LARGEST_READ_ENTRIES_BYTES = 1 << 29
"""The size of the largest file that is read: earlier versions wrote without looking at its size."""
_MAIN_BYTES = 1 << 19
"""The size that a function's main file does not pass; it takes 5 ms to read on a 2-core machine."""
_SEARCHED_BYTES = 1 << 20
"""In a larger file, one entry is looked for without decoding the others."""
_LONGEST_TEXT = 1 << 20
_STALE_S = 30.0
"""A writer's draft that has been there for this long no longer counts; a file is written in milliseconds."""
_ANNOUNCEMENT = re.compile(r"(?P<host>[0-9a-f]+)-(?P<pid>\d+)-(?P<started>\d+)-\d+\.tmp")
_PLAIN_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,99}")
_HASHED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}-[0-9a-f]{12}")

Entry: TypeAlias = JsonObject
Contents: TypeAlias = dict[str, dict[str, Entry]]
Prefer: TypeAlias = Callable[[str, str, Entry, Entry], Entry]
_serial = itertools.count()


class DamagedError(Exception):
    """The file holds something other than valid entries.

    Attributes:
        usable: its valid entries.
        faults: a sentence about each of the others.
    """

    def __init__(self, message: str, *, usable: Contents | None = None, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.usable = usable or {}
        self.faults = list(faults)


class NewerSchemaError(Exception):
    """The file was written by a later version of this package."""


@dataclasses.dataclass(frozen=True)
class EntryFile:
    """One file of entries.

    Attributes:
        path: the file.
        directory: the cache directory.
        is_read_only: whether it is only read; then it may be a link, as in a mounted or an installed table.
        timeout_s: the longest wait for other writers, in seconds.
    """

    path: Path
    directory: Path
    is_read_only: bool
    timeout_s: float

    def load(self, *, afresh: bool = False) -> Contents:
        """Returns the entries; none if there is no file.

        Damage counts if a second reading finds it, too: a network filesystem that keeps sizes cuts a file that another
        host has replaced, or reports ESTALE.

        Args:
            afresh: whether nothing counts that this machine has kept of the file, as in `Directory.read_afresh`.

        Raises:
            DamagedError: it holds something other than valid entries.
            NewerSchemaError: it was written by a later version of this package.
            OSError: it cannot be read; `TooLargeError` if it is too large, as earlier versions could leave it.
        """
        try:
            return _decode_entries(self._read(afresh=afresh), self.path)
        except NotAFileError as error:
            raise DamagedError(f"the cache file {str(self.path)!r} cannot be used: {error.strerror}") from None
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (DamagedError, OSError) as error:
            if afresh or getattr(error, "errno", errno.ESTALE) != errno.ESTALE:
                raise
            return self.load(afresh=True)

    def find(self, device: str, key: str) -> Entry | None:
        """Returns an entry of a large file as `encode` writes it, without decoding the others; None elsewhere.

        Of 20,000 entries, decoding and checking all takes 0.25 s on a 2-core machine, and finding one 0.01 s.
        """
        with contextlib.suppress(OSError, ValueError, DamagedError, NewerSchemaError):
            if self.path.stat().st_size > _SEARCHED_BYTES:
                data, name = self._read(), json.dumps(device).encode()
                first = data.index(b"\n%b: {\n" % name)
                begin = data.index(f"\n  {json.dumps(key)}: {{".encode(), first)
                line = data[begin : data.index(b"\n", begin + 1)].rstrip(b",")
                if data.find(b"\n}", first, begin) < 0:
                    return _decode_entries(b"{%b: {%b}}" % (name, line), self.path).get(device, {}).get(key)
        return None

    def lines_with(self, text: str) -> list[bytes]:
        """Returns the lines that contain a text, of which `encode` writes one for each entry; none of no file."""
        with contextlib.suppress(OSError):
            return [line for line in self._read().splitlines() if text.encode() in line]
        return []

    def problems(self) -> list[str]:
        """Returns a sentence for each fault of the file and its entries; changes nothing."""
        try:
            self.load()
        except OSError as error:
            return [f"the cache file {str(self.path)!r} cannot be read ({_reason(error)})"]
        except DamagedError as error:
            return error.faults or [str(error)]
        except NewerSchemaError as error:
            return [str(error)]
        return []

    def load_or_set_aside(self) -> Contents:
        """Returns the entries; damage is set aside. As for all that follow, the caller holds the lock of the writers.

        Raises:
            OSError: the file cannot be read.
            NewerSchemaError: it was written by a later version of this package.
        """
        try:
            return self.load(afresh=True)
        except DamagedError as error:
            with directory_of(self.path, below=self.directory) as place:
                name, aside = self.path.name, self.path.with_name(place.free_name(self.path.name))
                try:
                    # With usable entries, the file also keeps its name, until they replace it.
                    (place.link if error.usable else place.rename)(name, aside.name)
                except OSError:
                    place.rename(name, aside.name)
                # Where no new name could be read before, this one may show a whole file, which takes its name back.
                with contextlib.ExitStack() as whole:
                    whole.callback(
                        *(place.remove, aside.name) if place.is_there(name) else (place.rename, aside.name, name)
                    )
                    try:
                        return dataclasses.replace(self, path=aside).load()
                    except (DamagedError, OSError):
                        whole.pop_all()
            told = f"{error}; it was set aside as {str(aside)!r}: look at it, or delete it"
            report_once(told, topic=str(error))
            return error.usable

    def replace(self, change: Callable[[Contents], Contents]) -> None:
        """Replaces the file.

        Args:
            change: takes the present entries, and returns those to write; called again where others overwrite them.

        Raises:
            CacheWriteError: it could not be replaced; the message says why.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            with self._announced() as take_place:
                wanted = encode(change(self.load_or_set_aside()))
                if not self._holds(wanted):
                    with contextlib.suppress(FileNotFoundError):  # another writer has withdrawn the draft
                        take_place(wanted)
                if self._holds(wanted):
                    return
            if time.monotonic() > deadline:
                raise CacheWriteError(
                    f"what was written to {str(self.path)!r} was overwritten for {self.timeout_s:g} s: "
                    "see which other program writes there"
                )

    def remove(self) -> None:
        """Removes the file; damage is set aside, and a file of a newer schema stays.

        Raises:
            CacheWriteError: it could not be removed; the message says why.
        """
        with self._announced():
            with contextlib.suppress(TooLargeError):
                self.load_or_set_aside()
            with directory_of(self.path, below=self.directory) as place:
                place.remove(self.path.name)

    def _holds(self, data: bytes) -> bool:
        with contextlib.suppress(FileNotFoundError, NotAFileError):
            return self._read(afresh=True) == data
        return False

    def _read(self, *, afresh: bool = False) -> bytes:
        below = None if self.is_read_only else self.directory
        return shared_files.read(self.path, below=below, largest_bytes=LARGEST_READ_ENTRIES_BYTES, afresh=afresh)

    @contextlib.contextmanager
    def _announced(self) -> Iterator[Callable[[bytes], None]]:
        """Waits until no other writer has announced itself for the file; the caller holds the lock of the writers.

        In case that lock has no effect, a writer also announces itself: it creates its draft first, then looks for
        those of other writers, and backs off if there is one; it reads only when it has found itself alone. Of two
        writers one created its draft before the other looked, so at most one goes on, which relies only on the order of
        operations in a directory. The draft of a writer whose process is gone, or that this process has seen for 30 s,
        is removed. Should that writer live after all, its replacement fails for want of the draft, and it starts over.

        Raises:
            CacheWriteError: the wait was too long, or the directory cannot be written to.
        """
        deadline = time.monotonic() + self.timeout_s
        name = self.path.name
        with _typed_errors(self.path), directory_of(self.path, below=self.directory, make=True) as place:
            for attempt in itertools.count():
                own = f".{name}.{Owner.this_process()}-{next(_serial)}.tmp"
                with place.draft(own, name) as take_place:
                    other = _other_writer(place, name, own)
                    if other is None:
                        yield take_place
                        return
                if time.monotonic() > deadline:
                    raise CacheWriteError(
                        f"other writers kept {str(self.path)!r} busy for {self.timeout_s:g} s, the last by {other!r}: "
                        "see whether that one hangs, or set QUARANTUNE_LOCK_TIMEOUT higher"
                    )
                time.sleep(random.uniform(0.2, 1.0) * 0.001 * 2 ** min(attempt, 6))


def _decode_entries(data: bytes, path: Path) -> Contents:
    if not data.strip():
        raise DamagedError(f"the cache file {str(path)!r} is empty")
    try:
        contents = decode_json(data)
    except ValueError as error:
        raise DamagedError(f"the cache file {str(path)!r} is not JSON ({error})") from None
    if not _is_contents(contents):
        raise DamagedError(f"the cache file {str(path)!r} does not hold {{device: {{key: entry}}}}")
    faults: list[str] = []
    usable: Contents = {}
    for device, entries in contents.items():
        for key, entry in entries.items():
            schema = entry.get("schema")
            if isinstance(schema, int) and schema > SCHEMA:
                raise NewerSchemaError(
                    f"the cache file {str(path)!r} has schema {schema}, newer than {SCHEMA}: it is left "
                    "alone and not used; upgrade quarantune, or set QUARANTUNE_CACHE_DIR to another directory"
                )
            if found := list(_entry_faults(entry)):
                faults += [f"{str(path)!r}, device {device!r:.80}, key {key!r:.200}: {fault}" for fault in found]
            else:
                usable.setdefault(device, {})[key] = entry
    if faults:
        more = f", and {len(faults) - 1} faults more" if len(faults) > 1 else ""
        raise DamagedError(f"{faults[0]}{more}", usable=usable, faults=faults)
    return contents  # type: ignore[no-any-return]


def _is_contents(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values())
        for entries in value.values()
    )


def encode(contents: Contents) -> bytes:
    """Returns the content of a file of entries.

    Raises:
        CacheWriteError: it would be larger than any file may be.
    """
    # One line for each entry: people can read and grep it, and the fast encoder can be used for each.
    text_of = json.JSONEncoder(allow_nan=False).encode
    devices = (
        f"{text_of(device)}: {{\n"
        + ",\n".join(f"  {text_of(key)}: {text_of(entry)}" for key, entry in entries.items())
        + "\n}"
        for device, entries in contents.items()
        if entries
    )
    encoded = ("{\n" + ",\n".join(devices) + "\n}\n").encode("ascii")
    if len(encoded) > LARGEST_ENTRIES_BYTES:
        raise CacheWriteError(
            f"a file of results would pass {LARGEST_ENTRIES_BYTES >> 20} MiB, and was not written: remove old "
            "results with `quarantune cache prune --older-than`, or export fewer devices at a time"
        )
    return encoded


def _check_readable(path: Path, offered: Contents) -> None:
    """Raises where readers would take new entries for damage, and set aside the file that holds them.

    Raises:
        CacheWriteError: they would.
    """
    try:
        _decode_entries(encode(offered), path)
    except (DamagedError, NewerSchemaError) as error:
        raise CacheWriteError(f"nothing was saved, because no reader would accept it: {error}") from None


@contextlib.contextmanager
def write_errors(failure: str, remedy: str = "set QUARANTUNE_CACHE_DIR to another directory") -> Iterator[None]:
    """Turns an OSError of the block, which writes a file, into `CacheWriteError`.

    Args:
        failure: the failure, with the path.
        remedy: the last remedy, after the one for the kind of error.
    """
    try:
        yield
    except OSError as error:
        raise CacheWriteError(f"{failure} ({_reason(error)}): {advice(error)}, or {remedy}") from error


@contextlib.contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    """Turns errors of the block, which changes a file, into `CacheWriteError` with a remedy."""
    try:
        yield
    except OSError as error:
        fix = advice(error)
        if isinstance(error, PermissionError) and os.access(path.parent, os.W_OK):
            fix = "it belongs to another user, who can let others write to it and to the lock beside it (chmod a+w)"
        raise CacheWriteError(
            f"nothing was saved in {str(path)!r} ({_reason(error)}): {fix}, or set QUARANTUNE_CACHE_DIR to another "
            "directory"
        ) from error
    except NewerSchemaError as error:
        raise CacheWriteError(str(error)) from None


def _reason(error: OSError) -> str:
    """Returns a few words on why a file cannot be read or written."""
    return error.strerror or type(error).__name__


class Store:
    """The files of entries in one directory.

    A function has one file, its main file. Entries for which it has no room are in further files beside it, each with
    the entries whose keys have hashes that begin alike, so that look-ups and writes take as long for a hundred thousand
    entries as for a thousand. An entry stays in its file. One that is in both counts as it is in the main file.

    Every method takes a function's unmodified name; `safe_name` turns it into the name of a file. Reading takes no
    lock, changes nothing and never raises: an unreadable file is reported once and counts as empty.

    When a write returns, the entry is in the file and on the disk, and later writers read it. A write is read back
    before it counts, and repeated if another writer has overwritten it nevertheless. A crash at any instant leaves the
    old file or the new one.
    """

    def __init__(
        self, directory: Path, *, lock_timeout_s: float = 60.0, read_only: bool = False, label: str = ""
    ) -> None:
        """Makes a store; nothing is touched on disk until the first write.

        Args:
            directory: where the files are.
            lock_timeout_s: the longest wait for other writers of the same file, in seconds.
            read_only: whether nothing in the directory ever changes: a damaged file is not set aside either.
            label: the store in messages; empty for its directory.
        """
        self.directory = directory
        self.read_only = read_only
        self.label = label or str(directory)
        self._lock_timeout_s = lock_timeout_s

    def path(self, name: str) -> Path:
        """Returns the main file of a function's entries, whether or not it exists."""
        return self.directory / f"{safe_name(name)}.json"

    def names(self) -> list[str]:
        """Returns the safe names of all functions that have a file; files of other programs do not count."""
        mains = [path for path in paths(self.directory, "[!.]*.json") if self._is_ours(path)]
        return sorted({path.stem for path in mains + paths(self.directory, "[!.]*.entries")})

    def read(self, name: str) -> Contents:
        """Returns all entries in a function's files; those in no usable file are left out."""
        files = self._files(name)
        contents = self._read(next(files))
        for file in files:
            for device, key, entry in _each(self._read(file)):
                contents.setdefault(device, {}).setdefault(key, entry)
        return contents

    def get(self, name: str, device: str, key: str, *, afresh: bool = False) -> Entry | None:
        """Returns one entry, or None; for `afresh` see `EntryFile.load`."""
        main = self.path(name)
        for file in map(self._file, (main, _further(main, device, key))):
            entry = None if afresh else file.find(device, key)
            entry = entry or self._read(file, afresh=afresh).get(device, {}).get(key)
            if entry is not None:
                return entry
        return None

    def entries_with(self, name: str, text: str) -> Iterator[Entry]:
        """Yields a function's entries that contain a text, each decoded when it is asked for, and no others.

        Of a file that somebody has edited, all entries may come.
        """
        for file in self._files(name):
            for line in file.lines_with(text):
                try:
                    (entry,) = _decode_entries(b'{"": {%b}}' % line.strip().rstrip(b","), file.path)[""].values()
                except (ValueError, KeyError, DamagedError, NewerSchemaError):
                    yield from (entry for _, _, entry in _each(self._read(file)))
                    break
                yield entry

    def put(self, name: str, device: str, key: str, entry: Mapping[str, Any], *, prefer: Prefer | None = None) -> None:
        """Saves one entry, in place of any earlier one unless `prefer` keeps that.

        Args:
            name: the function.
            device: the kind of device.
            key: the key of the problem.
            entry: JSON-able data; `schema` is filled in if it is missing.
            prefer: as for `merge`.

        Raises:
            CacheWriteError: it could not be saved; the message says why.
            ValueError: the entry holds NaN or infinity.
            TypeError: the entry holds a value that JSON cannot.
        """
        self.merge(name, {device: {key: dict(entry)}}, prefer=prefer)

    def merge(self, name: str, contents: Mapping[str, Mapping[str, Entry]], *, prefer: Prefer | None = None) -> None:
        """Saves many entries at once.

        Args:
            name: the function.
            contents: the entries, by device and key.
            prefer: takes the device, the key, the present entry and the offered one; returns the entry to keep. None
                keeps the offered one.

        Raises:
            CacheWriteError: they could not be saved; the message says why.
            ValueError: an entry holds NaN or infinity.
            TypeError: an entry holds a value that JSON cannot.
        """
        offered: Contents = {
            device: {key: plain({"schema": SCHEMA} | dict(entry)) for key, entry in entries.items()}
            for device, entries in contents.items()
        }
        for device, key, entry in _each(offered):
            _check_readable(self.path(name), {device: {key: entry}})
        with self._lock(name):
            for path, part in self._places(name, offered).items():
                self._file(path).replace(functools.partial(_joined, part, prefer))

    def delete(self, name: str, device: str, key: str) -> bool:
        """Removes one entry.

        Returns:
            Whether it was there.

        Raises:
            CacheWriteError: it could not be removed; the message says why.
        """
        if self.get(name, device, key) is None:
            return False
        self.discard(name, lambda its_device, its_key, _: (its_device, its_key) == (device, key))
        return True

    def discard(self, name: str, is_unwanted: Callable[[str, str, Entry], bool]) -> None:
        """Removes entries of a function.

        Args:
            name: the function.
            is_unwanted: takes the device, the key and an entry as it is at that moment.

        Raises:
            CacheWriteError: they could not be removed; the message says why.
        """
        with self._lock(name):
            for file in reversed(list(self._files(name))):  # an entry of the main file may hide another
                file.replace(functools.partial(_without, is_unwanted))

    def clear(self, name: str) -> None:
        """Removes all entries of a function, and its files; a file of a newer schema is left alone.

        Raises:
            CacheWriteError: one could not be removed; the message says why.
        """
        if any(os.path.lexists(file.path) for file in self._files(name)):
            with self._lock(name):
                for file in reversed(list(self._files(name))):
                    file.remove()
                with contextlib.suppress(OSError):
                    _folder(self.path(name)).rmdir()

    def problems(self, name: str) -> list[str]:
        """Returns a sentence for each fault of a function's files and their entries; changes nothing."""
        return [problem for file in self._files(name) for problem in file.problems()]

    def _is_ours(self, main: Path) -> bool:
        """Returns whether a file is ours, damaged or not: it has our lock or folder beside it, or looks alike."""
        beside = f".{main.name}.lock", _folder(main).name, f"{main.stem}.trials"
        if any(os.path.lexists(main.with_name(name)) for name in beside):
            return True
        try:
            data = self._file(main)._read()
            # A file of another program may hold empty dicts.
            return data.startswith(b'{\n"') or (_is_contents(found := decode_json(data)) and any(found.values()))
        except (NotAFileError, ValueError):
            return False
        except OSError:
            return True

    def _file(self, path: Path) -> EntryFile:
        return EntryFile(path, self.directory, self.read_only, self._lock_timeout_s)

    def _files(self, name: str) -> Iterator[EntryFile]:
        """Yields the files of a function's entries, the main file first; the others are looked for after that."""
        main = self.path(name)
        yield self._file(main)
        folder, pattern = _folder(main), "[0-9a-f][0-9a-f].json"
        found = paths(folder, pattern) if self.read_only else paths(self.directory, f"{folder.name}/{pattern}")
        yield from map(self._file, found)

    def _read(self, file: EntryFile, *, afresh: bool = False) -> Contents:
        try:
            return file.load(afresh=afresh)
        except OSError as error:
            report_once(
                f"the cache file {str(file.path)!r} cannot be read ({_reason(error)}): tuned results are not found"
            )
        except NewerSchemaError as error:
            report_once(str(error))
        except DamagedError as error:
            aside = f"the next write sets it aside as '{file.path}.corrupt-<time>'"
            then = "the file stays, because it is only read" if self.read_only else aside
            report_once(f"{error}; the rest of this file is used, and {then}", topic=str(error))
            return error.usable
        return {}

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Holds the lock that all writers of a function's files queue for; on a filesystem without locks, nothing."""
        assert not self.read_only
        path = self.path(name)
        lock_name = f".{path.name}.lock"
        with (
            _typed_errors(path),
            Directory(self.directory, make=True) as place,
            side_lock(place, lock_name, self._lock_timeout_s) as is_granted,
        ):
            if is_granted is False:
                raise CacheWriteError(
                    f"the lock {str(place.path / lock_name)!r} was held by others for {self._lock_timeout_s:g} s: "
                    "see who holds it, or set QUARANTUNE_LOCK_TIMEOUT higher"
                )
            yield

    def _places(self, name: str, offered: Contents) -> dict[Path, Contents]:
        """Returns the files to which entries are added, each with its part of them."""
        main = self.path(name)
        size = main.stat().st_size if main.exists() else 0
        if not _folder(main).is_dir() and size + len(json.dumps(offered)) <= _MAIN_BYTES:
            return {main: offered}
        Directory(self.directory, _folder(main).name, make=True).close()
        present: Contents = {}
        with contextlib.suppress(TooLargeError):  # a file that is too large stays as it is
            present = self._file(main).load_or_set_aside()
        parts: dict[Path, Contents] = {}
        for device, key, entry in _each(offered):
            path = main if key in present.get(device, {}) else _further(main, device, key)
            parts.setdefault(path, {}).setdefault(device, {})[key] = entry
        return parts


def _folder(main: Path) -> Path:
    """Returns the directory of the entries that do not fit into a main file."""
    return main.with_suffix(".entries")


def _further(main: Path, device: str, key: str) -> Path:
    """Returns the file of an entry that does not fit into the main file."""
    return _folder(main) / f"{problem_hash(device, key)[:2]}.json"


def _each(contents: Contents) -> Iterator[tuple[str, str, Entry]]:
    return ((device, key, entry) for device, entries in contents.items() for key, entry in entries.items())


def _joined(offered: Contents, prefer: Prefer | None, present: Contents) -> Contents:
    joined = {device: dict(entries) for device, entries in present.items()}
    for device, key, entry in _each(offered):
        there = joined.setdefault(device, {})
        there[key] = prefer(device, key, there[key], entry) if prefer and key in there else entry
    return joined


def _without(is_unwanted: Callable[[str, str, Entry], bool], present: Contents) -> Contents:
    return {
        device: {key: entry for key, entry in entries.items() if not is_unwanted(device, key, entry)}
        for device, entries in present.items()
    }


# --- writers ---


def _other_writer(place: Directory, target: str, own: str) -> str | None:
    """Returns the draft of another live writer, or None; removes those of dead ones."""
    names, prefix = place.names(), f".{target}."
    if own not in names:
        return "one that withdrew ours"
    for name in names:
        match = _ANNOUNCEMENT.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None or name == own:
            continue
        owner = Owner(host=match["host"], pid=int(match["pid"]), started=int(match["started"]))
        with contextlib.suppress(PermissionError):
            if not owner.is_dead() and time.monotonic() - _first_seen(name) < _STALE_S:
                return name
            place.remove(name)
    return None


@functools.lru_cache(maxsize=1024)
def _first_seen(draft: str) -> float:
    """Returns when this process first saw a draft, whose name no other ever has, in seconds of the process's clock."""
    return time.monotonic()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner(Record):
    """One process of one host.

    Attributes:
        host: a token for the kernel and PID namespace in which `pid` is valid.
        pid: the process.
        started: its start time, in the kernel's ticks; 0 where that is not known.
    """

    host: Annotated[str, short_text]
    pid: Annotated[int, within(1, 2**31)]
    started: Annotated[int, within(0, 2**64)]

    @classmethod
    def this_process(cls) -> Owner:
        """Returns the calling process."""
        status = process_status(os.getpid())
        return cls(host=this_host(), pid=os.getpid(), started=int(status[19]) if status else 0)

    def __str__(self) -> str:
        """Returns the owner as a part of names."""
        return f"{self.host}-{self.pid}-{self.started}"

    def is_dead(self) -> bool:
        """Returns whether the process is dead for certain; False for one on another host."""
        if self.host != this_host():
            return False
        if status := process_status(self.pid):
            return status[0] in (b"Z", b"X") or self.started not in (0, int(status[19]))
        try:
            os.kill(self.pid, 0)  # /proc may hide other users' processes
        except PermissionError:
            return False
        except (ProcessLookupError, OverflowError):  # no process has a number that is too large
            return True
        return False


def this_host() -> str:
    """Returns the token for this host, as in `Owner.host`."""
    # Containers can share a host name and have different processes with one PID: the namespace distinguishes them.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return short_hash(f"{platform.node()}|{boot_id()}|{namespace}")


# --- content ---


def _entry_faults(entry: JsonObject) -> Iterator[str]:
    """Yields a clause for each fault that makes an entry unusable."""
    if not isinstance(entry.get("schema"), int):
        yield f"its schema is {_shown(entry.get('schema'))}, not a number"
    if not isinstance(entry.get("config"), dict):
        yield f"its config is {_shown(entry.get('config'))}, not a dict"
    for name in ("time_ms", "default_time_ms"):
        if (time_ms := entry.get(name)) is not None and not is_plausible_ms(time_ms):
            yield f"its {name} is {_shown(time_ms)}, not a time"
    for name in ("fingerprint", "versions", "trials", "space"):
        values = entry.get(name)
        if not isinstance(values, (dict, NoneType)):
            yield f"its {name} is {_shown(values)}, not a dict"
        elif values and name in ("fingerprint", "versions") and any(type(text) is not str for text in values.values()):
            yield f"its {name} holds more than texts"
    if not isinstance(entry.get("created", ""), str):
        yield f"its created is {_shown(entry['created'])}, not a time"


def _shown(value: Any) -> str:
    # Python refuses to convert a huge integer to decimal digits.
    return "a huge number" if isinstance(value, int) and abs(value) >= 10**40 else f"{value!r:.80}"


def short_text(value: str) -> str:
    """Returns a text that a message can show.

    Raises:
        ValueError: it is long, or has characters that no terminal shows.
    """
    if len(value) > _LONGEST_TEXT or not value.isprintable():
        raise ValueError("it is no short text")
    return value


# --- keys and names ---


def safe_name(name: str) -> str:
    """Returns a file name stem for a function's name.

    Plain lower-case names are unchanged. All others keep their readable part and end in a hash of the whole name, so
    that names that differ, if only in case, have different files on every filesystem. The result is itself unchanged by
    this function.

    Args:
        name: any text: a qualified name with `<locals>`, a path, a name too long for a file.
    """
    if _PLAIN_NAME.fullmatch(name) or _HASHED_NAME.fullmatch(name):
        return name
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:100]
    if not re.match(r"[A-Za-z0-9_]", readable):
        readable = ("_" + readable)[:100]
    return f"{readable}-{short_hash(name)}"


def problem_hash(device: str, key: str) -> str:
    """Returns the file name stem for one problem on one device."""
    return short_hash(canonical_json([device, key]))


# --- problems ---


class CacheWarning(UserWarning):
    """The cache on disk has a problem; the call goes on without it."""


class CacheWriteError(RuntimeError):
    """A result could not be saved; the message names the result, the reason and a remedy."""


_reported: set[str] = set()
_reported_lock = new_lock()


def report_once(message: str, *, topic: str | None = None) -> None:
    """Warns about a problem, the first time that it occurs in this process.

    Args:
        message: the problem and its remedy; the same message is the same problem.
        topic: stands for the message where further messages tell of the same problem.
    """
    with _reported_lock:
        if (topic or message) in _reported:
            return
        _reported.add(topic or message)
    warn(message, CacheWarning)
