"""The store: the entries of each function as JSON, `{device: {key: entry}}`, shared by any number of jobs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from quarantune.cache.entry_file import (
    SCHEMA,
    Contents,
    DamagedError,
    Entry,
    EntryFile,
    check_readable,
    decode_entries,
    is_contents,
)
from quarantune.cache.file_names import problem_hash, safe_name
from quarantune.cache.problems import CacheWriteError, NewerSchemaError, change_errors, reason_of, report_once
from quarantune.host.shared_files import Directory, NotAFileError, TooLargeError, paths, side_lock
from quarantune.values.codec import (
    decode_json,
    plain,
)

_MAIN_BYTES = 1 << 19
"""Size above which entries go to further files; a main file of this size takes 5 ms to read on a 2-core machine."""
Prefer: TypeAlias = Callable[[str, str, Entry, Entry], Entry]


class Store:
    """The files of entries in one directory.

    A function has a main file. Entries that do not fit into it are in further files next to it, one file for each
    beginning of the hash of a key, so that look-ups and writes take as long for a hundred thousand entries as for a
    thousand. An entry stays in its file. If both hold it, the main file's version counts.

    Every method takes a function's unmodified name; `safe_name` turns it into the name of a file. Reading takes no
    lock, changes nothing and never raises: it reports an unreadable file once, and counts it as empty.

    When a write returns, the entry is in the file and on the disk, and later writers read it. A write is read back
    before it counts, and repeated if another writer has overwritten it. A crash at any instant leaves the
    old file or the new one.
    """

    def __init__(
        self, directory: Path, *, lock_timeout_s: float = 60.0, read_only: bool = False, label: str = ""
    ) -> None:
        """Makes a store, which touches nothing on disk until the first write.

        Args:
            directory: the directory of the files.
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
        """Returns all entries in a function's usable files."""
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
        """Yields a function's entries that contain a text, each decoded on demand, and no others.

        If somebody has edited a file, all its entries may come.
        """
        for file in self._files(name):
            for line in file.lines_with(text):
                try:
                    (entry,) = decode_entries(b'{"": {%b}}' % line.strip().rstrip(b","), file.path)[""].values()
                except (ValueError, KeyError, DamagedError, NewerSchemaError):
                    yield from (entry for _, _, entry in _each(self._read(file)))
                    break
                yield entry

    def put(self, name: str, device: str, key: str, entry: Mapping[str, Any], *, prefer: Prefer | None = None) -> None:
        """Saves one entry, in place of any earlier one unless `prefer` keeps the earlier one.

        Args:
            name: the function.
            device: the kind of device.
            key: the key of the problem.
            entry: JSON-able data; `schema` is filled in if it is missing.
            prefer: see `merge`.

        Raises:
            CacheWriteError: the entry could not be saved; the message says why.
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
            CacheWriteError: the entries could not be saved; the message says why.
            ValueError: an entry holds NaN or infinity.
            TypeError: an entry holds a value that JSON cannot.
        """
        offered: Contents = {
            device: {key: plain({"schema": SCHEMA} | dict(entry)) for key, entry in entries.items()}
            for device, entries in contents.items()
        }
        for device, key, entry in _each(offered):
            check_readable(self.path(name), {device: {key: entry}})
        with self._lock(name):
            for path, part in self._places(name, offered).items():
                self._file(path).replace(functools.partial(joined, part, prefer))

    def delete(self, name: str, device: str, key: str) -> bool:
        """Removes one entry.

        Returns:
            Whether it was there.

        Raises:
            CacheWriteError: the entry could not be removed; the message says why.
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
            CacheWriteError: the entries could not be removed; the message says why.
        """
        with self._lock(name):
            for file in reversed(list(self._files(name))):  # an entry of the main file may hide another
                file.replace(functools.partial(_without, is_unwanted))

    def clear(self, name: str) -> None:
        """Removes all entries of a function, and its files; a file of a newer schema is left alone.

        Raises:
            CacheWriteError: a file could not be removed; the message says why.
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
        """Returns whether a file is ours, damaged or not: our lock or folder is next to it, or it looks like ours."""
        beside = f".{main.name}.lock", _folder(main).name, f"{main.stem}.trials"
        if any(os.path.lexists(main.with_name(name)) for name in beside):
            return True
        try:
            data = self._file(main)._read()
            # A file of another program may hold empty dicts.
            return data.startswith(b'{\n"') or (is_contents(found := decode_json(data)) and any(found.values()))
        except (NotAFileError, ValueError):
            return False
        except OSError:
            return True

    def _file(self, path: Path) -> EntryFile:
        return EntryFile(path, self.directory, self.read_only, self._lock_timeout_s)

    def _files(self, name: str) -> Iterator[EntryFile]:
        """Yields the files of a function's entries, the main file first; it looks for the others after that."""
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
                f"the cache file {str(file.path)!r} cannot be read ({reason_of(error)}): tuned results are not found"
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
        """Holds the lock that all writers of a function's files queue for; none on a filesystem without locks."""
        assert not self.read_only
        path = self.path(name)
        lock_name = f".{path.name}.lock"
        with (
            change_errors(path),
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
        """Returns the files that entries go to, each with its part of the entries."""
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


def joined(offered: Contents, prefer: Prefer | None, present: Contents) -> Contents:
    """Returns the entries of two files as one; see `Store.merge`."""
    both = {device: dict(entries) for device, entries in present.items()}
    for device, key, entry in _each(offered):
        there = both.setdefault(device, {})
        there[key] = prefer(device, key, there[key], entry) if prefer and key in there else entry
    return both


def _without(is_unwanted: Callable[[str, str, Entry], bool], present: Contents) -> Contents:
    return {
        device: {key: entry for key, entry in entries.items() if not is_unwanted(device, key, entry)}
        for device, entries in present.items()
    }
