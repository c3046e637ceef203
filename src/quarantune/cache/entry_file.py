"""One file of entries, `{device: {key: entry}}` as JSON: reads and validates it, and replaces it as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from quarantune.cache import content, file_lease
from quarantune.cache.errors import CacheWriteError, report_once
from quarantune.cache.file_lease import LeaseLostError
from quarantune.host import shared_files
from quarantune.host.shared_files import NotAFileError, TooLargeError, directory_of
from quarantune.values.json_object import JsonObject

SCHEMA = 1
"""The version of an entry's layout; an entry of a later one makes its file untouchable for us."""

_LARGE_BYTES = 1 << 20

Entry: TypeAlias = JsonObject
Contents: TypeAlias = dict[str, dict[str, Entry]]


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

    def load(self) -> Contents:
        """Returns the entries; none if there is no file.

        Raises:
            DamagedError: it holds something other than valid entries.
            NewerSchemaError: it was written by a later version of this package.
            OSError: it cannot be read; `TooLargeError` if it is too large, as earlier versions could leave it.
        """
        for attempts_left in (2, 1, 0):
            try:
                return _decode(self._read(), self.path)
            except NotAFileError as error:
                raise DamagedError(f"the cache file {str(self.path)!r} cannot be used: {error.strerror}") from None
            except (FileNotFoundError, NotADirectoryError):
                return {}
            except OSError as error:
                # A network filesystem reports ESTALE when the file is replaced while it is read.
                if error.errno != errno.ESTALE or not attempts_left:
                    raise
        raise AssertionError("unreachable")

    def find(self, device: str, key: str) -> Entry | None:
        """Returns an entry of a large file as `encode` writes it, without decoding the others; None elsewhere.

        Of 20,000 entries, decoding and checking all takes 0.25 s on a 2-core machine, and finding one 0.01 s.
        """
        with contextlib.suppress(OSError, ValueError):
            if self.path.stat().st_size > _LARGE_BYTES:
                data = self._read()
                first = data.index(f"\n{json.dumps(device)}: {{\n".encode())
                begin = data.index(f"\n  {json.dumps(key)}: {{".encode(), first)
                line = data[begin : data.index(b"\n", begin + 1)].rstrip(b",")
                entry: Entry = content.decode(b"{%b}" % line)[key]
                if data.find(b"\n}", first, begin) < 0 and not [*content.faults(entry)] and entry["schema"] <= SCHEMA:
                    return entry
        return None

    def problems(self) -> list[str]:
        """Returns a sentence for each fault of the file and its entries; changes nothing."""
        try:
            self.load()
        except OSError as error:
            return [f"the cache file {str(self.path)!r} cannot be read ({reason(error)})"]
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
            return self.load()
        except DamagedError as error:
            aside = self._set_aside(keep=bool(error.usable))
            report_once(f"{error}; it was set aside as {str(aside)!r}: look at it, or delete it")
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
            with contextlib.suppress(LeaseLostError), self._announced() as write:
                wanted = encode(change(self.load_or_set_aside()))
                if not self._holds(wanted):
                    write(wanted)
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
            return self._read() == data
        return False

    def _read(self) -> bytes:
        below = None if self.is_read_only else self.directory
        return shared_files.read(self.path, below=below, largest_bytes=content.LARGEST_READ_ENTRIES_BYTES)

    @contextlib.contextmanager
    def _announced(self) -> Iterator[Callable[[bytes], None]]:
        announced = file_lease.announced(self.path, below=self.directory, timeout_s=self.timeout_s)
        with typed_errors(self.path), announced as write:
            yield write

    def _set_aside(self, *, keep: bool) -> Path:
        """Renames a damaged file; with `keep` it also keeps its name, until its usable entries replace it."""
        with directory_of(self.path, below=self.directory) as place:
            aside = place.free_name(self.path.name)
            if keep:
                with contextlib.suppress(OSError):
                    place.link(self.path.name, aside)
                    return place.path / aside
            place.rename(self.path.name, aside)
            return place.path / aside


def _decode(data: bytes, path: Path) -> Contents:
    if not data.strip():
        raise DamagedError(f"the cache file {str(path)!r} is empty")
    try:
        contents = content.decode(data)
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
            if found := list(content.faults(entry)):
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
    if len(encoded) > content.LARGEST_ENTRIES_BYTES:
        raise CacheWriteError(
            f"a file of results would pass {content.LARGEST_ENTRIES_BYTES >> 20} MiB, and was not written: remove old "
            "results with `quarantune cache prune --older-than`, or export fewer devices at a time"
        )
    return encoded


@contextlib.contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Turns errors of the block, which changes a file, into `CacheWriteError` with a remedy."""
    try:
        yield
    except OSError as error:
        fix = "make the directory writable"
        if isinstance(error, PermissionError) and os.access(path.parent, os.W_OK):
            fix = "it belongs to another user, who can let others write to it and to the lock beside it (chmod a+w)"
        raise CacheWriteError(
            f"nothing was saved in {str(path)!r} ({reason(error)}): {fix}, or set QUARANTUNE_CACHE_DIR to one that is "
            "writable"
        ) from error
    except NewerSchemaError as error:
        raise CacheWriteError(str(error)) from None


def reason(error: OSError) -> str:
    """Returns a few words on why a file cannot be read or written."""
    return error.strerror or type(error).__name__
