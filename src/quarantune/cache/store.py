"""The store: one JSON file per function, `{device: {key: entry}}`, shared by any number of jobs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from quarantune.cache import content, file_lease
from quarantune.cache.errors import CacheWriteError, report_once
from quarantune.cache.file_lease import LeaseLostError
from quarantune.cache.keys import plain, safe_name
from quarantune.values.json_object import JsonObject

SCHEMA = 1
"""The version of an entry's layout; an entry of a later one makes its file untouchable for us."""

Entry: TypeAlias = JsonObject
Contents: TypeAlias = dict[str, dict[str, Entry]]

_SET_ASIDE_TIMEOUT_S = 2.0


class Store:
    """The files of entries in one directory.

    Every method takes a function's unmodified name; `safe_name` turns it into the name of a file. Reading takes no
    lock and never raises: an unreadable file is reported once and counts as empty.

    When a write returns, the entry is in the file and on the disk, and later writers read it. A write is read back
    before it counts, and repeated if another writer has overwritten it nevertheless. A crash at any instant leaves the
    old file or the new one.
    """

    def __init__(self, directory: Path, *, lock_timeout_s: float = 60.0, read_only: bool = False) -> None:
        """Makes a store; nothing is touched on disk until the first write.

        Args:
            directory: where the files are.
            lock_timeout_s: the longest wait for other writers of the same file, in seconds.
            read_only: whether nothing in the directory ever changes: a damaged file is not set aside either.
        """
        self.directory = directory
        self._read_only = read_only
        self._lock_timeout_s = lock_timeout_s

    def path(self, name: str) -> Path:
        """Returns the file that holds a function's entries, whether or not it exists."""
        return self.directory / f"{safe_name(name)}.json"

    def names(self) -> list[str]:
        """Returns the safe names of all functions that have a file."""
        with contextlib.suppress(OSError):
            files = os.listdir(self.directory)
            return sorted(file[:-5] for file in files if file.endswith(".json") and file[0] != ".")
        return []

    def read(self, name: str) -> Contents:
        """Returns all entries in a function's file; none if there is no usable file."""
        path = self.path(name)
        try:
            return _load(path)
        except OSError as error:
            report_once(f"the cache file {str(path)!r} cannot be read ({_reason(error)}): tuned results are not found")
        except _NewerSchemaError as error:
            report_once(str(error))
        except _DamagedError as error:
            if not self._read_only:
                return self._read_damaged(path, error.usable)
            report_once(f"{error}; the rest of this file is used, and the file stays, because it is only read")
            return error.usable
        return {}

    def get(self, name: str, device: str, key: str) -> Entry | None:
        """Returns one entry, or None."""
        return self.read(name).get(device, {}).get(key)

    def put(self, name: str, device: str, key: str, entry: Mapping[str, Any]) -> None:
        """Saves one entry, in place of any earlier one.

        Args:
            name: the function.
            device: the kind of device.
            key: the key of the problem.
            entry: JSON-able data; `schema` is filled in if it is missing.

        Raises:
            CacheWriteError: it could not be saved; the message says why.
            ValueError: the entry holds NaN or infinity.
            TypeError: the entry holds a value that JSON cannot.
        """
        self.merge(name, {device: {key: dict(entry)}})

    def merge(
        self,
        name: str,
        contents: Mapping[str, Mapping[str, Entry]],
        *,
        prefer: Callable[[str, str, Entry, Entry], Entry] = lambda device, key, present, offered: offered,
    ) -> None:
        """Saves many entries at once.

        Args:
            name: the function.
            contents: the entries, by device and key.
            prefer: takes the device, the key, the present entry and the offered one; returns the entry to keep.

        Raises:
            CacheWriteError: they could not be saved; the message says why.
            ValueError: an entry holds NaN or infinity.
            TypeError: an entry holds a value that JSON cannot.
        """
        offered: Contents = {
            device: {key: plain({"schema": SCHEMA} | dict(entry)) for key, entry in entries.items()}
            for device, entries in contents.items()
        }

        def change(present: Contents) -> Contents:
            wanted: Contents = {}
            for device, entries in offered.items():
                there = present.setdefault(device, {})
                wanted[device] = {
                    key: prefer(device, key, there[key], entry) if key in there else entry
                    for key, entry in entries.items()
                }
                there.update(wanted[device])
            return wanted

        def is_there(found: Contents, wanted: Contents) -> bool:
            return all(
                found.get(device, {}).get(key) == entry
                for device, entries in wanted.items()
                for key, entry in entries.items()
            )

        self._update(name, change, is_there)

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

        def unwanted(contents: Contents) -> list[tuple[str, str]]:
            return [
                (device, key)
                for device, entries in contents.items()
                for key, entry in entries.items()
                if is_unwanted(device, key, entry)
            ]

        def change(present: Contents) -> None:
            for device, key in unwanted(present):
                del present[device][key]

        self._update(name, change, lambda found, _: not unwanted(found))

    def clear(self, name: str) -> None:
        """Removes all entries of a function, and its file; a file of a newer schema is left alone.

        Raises:
            CacheWriteError: it could not be removed; the message says why.
        """
        path = self.path(name)
        if os.path.lexists(path):
            with _typed_errors(path), file_lease.acquire(path, timeout_s=self._lock_timeout_s):
                self._load_or_set_aside(path)
                path.unlink(missing_ok=True)

    def problems(self, name: str) -> list[str]:
        """Returns a sentence for each fault of a function's file and its entries; changes nothing."""
        try:
            _load(self.path(name))
        except OSError as error:
            return [f"the cache file {str(self.path(name))!r} cannot be read ({_reason(error)})"]
        except _DamagedError as error:
            return error.faults or [str(error)]
        except _NewerSchemaError as error:
            return [str(error)]
        return []

    def _update(
        self,
        name: str,
        change: Callable[[Contents], Any],
        is_there: Callable[[Contents, Any], bool],
    ) -> None:
        assert not self._read_only
        path = self.path(name)
        deadline = time.monotonic() + self._lock_timeout_s
        with _typed_errors(path):
            while True:
                with contextlib.suppress(LeaseLostError):
                    if self._write_once(path, change, is_there):
                        return
                if time.monotonic() > deadline:
                    raise CacheWriteError(
                        f"what was written to {str(path)!r} was overwritten for {self._lock_timeout_s:g} s: "
                        "see which other program writes there"
                    )

    def _write_once(
        self, path: Path, change: Callable[[Contents], Any], is_there: Callable[[Contents, Any], bool]
    ) -> bool:
        with file_lease.acquire(path, timeout_s=self._lock_timeout_s) as lease:
            contents = self._load_or_set_aside(path)
            wanted = change(contents)
            written = encode(contents)
            lease.replace(written)
            with contextlib.suppress(FileNotFoundError, _DamagedError):
                found = content.read_bounded(path, largest_bytes=content.LARGEST_ENTRIES_BYTES)
                return found == written or is_there(_decode(found, path), wanted)
            return False

    def _load_or_set_aside(self, path: Path) -> Contents:
        try:
            return _load(path)
        except _DamagedError as error:
            aside = content.free_name(path)
            _set_aside(path, aside, keep=bool(error.usable))
            report_once(f"{error}; it was set aside as {str(aside)!r}: look at it, or delete it")
            return error.usable

    def _read_damaged(self, path: Path, usable: Contents) -> Contents:
        # Only under our own lease is the file that is moved aside certain to be the damaged one, not its successor.
        try:
            with (
                _typed_errors(path),
                file_lease.acquire(path, timeout_s=min(self._lock_timeout_s, _SET_ASIDE_TIMEOUT_S)) as lease,
            ):
                found = self._load_or_set_aside(path)
                if found:
                    lease.replace(encode(found))
                return found
        except (CacheWriteError, LeaseLostError) as error:
            report_once(f"{str(path)!r} is damaged and could not be set aside: {error}")
            return usable


def _set_aside(path: Path, aside: Path, *, keep: bool) -> None:
    """Renames a damaged file; with `keep` it also keeps its name, until its usable entries replace it."""
    if keep:
        with contextlib.suppress(OSError):
            os.link(path, aside)
            return
    path.rename(aside)


class _DamagedError(Exception):
    """The file holds something other than valid entries.

    Attributes:
        usable: its valid entries.
        faults: a sentence about each of the others.
    """

    def __init__(self, message: str, *, usable: Contents | None = None, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.usable = usable or {}
        self.faults = list(faults)


class _NewerSchemaError(Exception):
    """The file was written by a later version of this package."""


def _load(path: Path) -> Contents:
    for attempts_left in (2, 1, 0):
        try:
            return _decode(content.read_bounded(path, largest_bytes=content.LARGEST_ENTRIES_BYTES), path)
        except content.NotAFileError as error:
            raise _DamagedError(f"the cache file {str(path)!r} cannot be used: {error.strerror}") from None
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            # A network filesystem reports ESTALE when the file is replaced while it is read.
            if error.errno != errno.ESTALE or not attempts_left:
                raise
    raise AssertionError("unreachable")


def _decode(data: bytes, path: Path) -> Contents:
    if not data.strip():
        raise _DamagedError(f"the cache file {str(path)!r} is empty")
    try:
        contents = content.decode(data)
    except ValueError as error:
        raise _DamagedError(f"the cache file {str(path)!r} is not JSON ({error})") from None
    if not _is_contents(contents):
        raise _DamagedError(f"the cache file {str(path)!r} does not hold {{device: {{key: entry}}}}")
    faults: list[str] = []
    usable: Contents = {}
    for device, entries in contents.items():
        for key, entry in entries.items():
            schema = entry.get("schema")
            if isinstance(schema, int) and schema > SCHEMA:
                raise _NewerSchemaError(
                    f"the cache file {str(path)!r} has schema {schema}, newer than {SCHEMA}: it is left "
                    "alone and not used; upgrade quarantune, or set QUARANTUNE_CACHE_DIR to another directory"
                )
            if found := list(content.faults(entry)):
                faults += [f"{str(path)!r}, device {device!r:.80}, key {key!r:.200}: {fault}" for fault in found]
            else:
                usable.setdefault(device, {})[key] = entry
    if faults:
        more = f", and {len(faults) - 1} faults more" if len(faults) > 1 else ""
        raise _DamagedError(f"{faults[0]}{more}", usable=usable, faults=faults)
    return contents  # type: ignore[no-any-return]


def _is_contents(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values())
        for entries in value.values()
    )


def encode(contents: Contents) -> bytes:
    """Returns the content of a file of entries."""
    # One line for each entry: people can read and grep it, and the fast encoder can be used for each.
    text_of = json.JSONEncoder(allow_nan=False).encode
    devices = (
        f"{text_of(device)}: {{\n"
        + ",\n".join(f"  {text_of(key)}: {text_of(entry)}" for key, entry in entries.items())
        + "\n}"
        for device, entries in contents.items()
        if entries
    )
    return ("{\n" + ",\n".join(devices) + "\n}\n").encode("ascii")


@contextlib.contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "make the directory writable"
        if isinstance(error, PermissionError) and os.access(path.parent, os.W_OK):
            fix = "it belongs to another user, who can let others write to it and to the lock beside it (chmod a+w)"
        raise CacheWriteError(
            f"nothing was saved in {str(path)!r} ({_reason(error)}): {fix}, or set QUARANTUNE_CACHE_DIR to one that is "
            "writable"
        ) from error
    except _NewerSchemaError as error:
        raise CacheWriteError(str(error)) from None


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
