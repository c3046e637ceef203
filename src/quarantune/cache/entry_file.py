"""One file of entries, `{device: {key: entry}}` as JSON: reads and validates it, and replaces it as a whole."""

from __future__ import annotations

import contextlib
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
from quarantune.host.shared_files import NotAFileError, TooLargeError
from quarantune.values.json_object import JsonObject

SCHEMA = 1
"""The version of an entry's layout; an entry of a later one makes its file untouchable for us."""

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


def problems(path: Path, *, below: Path | None) -> list[str]:
    """Returns a sentence for each fault of a file and its entries; changes nothing."""
    try:
        load(path, below=below)
    except OSError as error:
        return [f"the cache file {str(path)!r} cannot be read ({reason(error)})"]
    except DamagedError as error:
        return error.faults or [str(error)]
    except NewerSchemaError as error:
        return [str(error)]
    return []


def load(path: Path, *, below: Path | None) -> Contents:
    """Returns the entries of a file; none if there is no file.

    Args:
        path: the file.
        below: the cache directory; None where the file may be a link, as in a mounted or an installed table.

    Raises:
        DamagedError: it holds something other than valid entries.
        NewerSchemaError: it was written by a later version of this package.
        OSError: it cannot be read; `TooLargeError` if it is too large, as earlier versions could leave it.
    """
    for attempts_left in (2, 1, 0):
        try:
            return _decode(_read(path, below), path)
        except TooLargeError:
            raise
        except NotAFileError as error:
            raise DamagedError(f"the cache file {str(path)!r} cannot be used: {error.strerror}") from None
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            # A network filesystem reports ESTALE when the file is replaced while it is read.
            if error.errno != errno.ESTALE or not attempts_left:
                raise
    raise AssertionError("unreachable")


def _read(path: Path, below: Path | None) -> bytes:
    return shared_files.read(path, below=below, largest_bytes=content.LARGEST_READ_ENTRIES_BYTES)


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


def update(
    path: Path,
    change: Callable[[Contents], Any],
    is_there: Callable[[Contents, Any], bool],
    *,
    below: Path,
    timeout_s: float,
) -> None:
    """Replaces a file; the caller holds the lock of its writers.

    Args:
        path: the file; its folder is made if necessary.
        change: changes the entries, and returns a description of the wanted ones for `is_there`.
        is_there: takes the entries as they were read back and that description; returns whether the change is in them.
        below: the cache directory.
        timeout_s: the longest wait for other writers, in seconds.

    Raises:
        CacheWriteError: it could not be replaced; the message says why.
    """
    deadline = time.monotonic() + timeout_s
    with typed_errors(path):
        while True:
            with contextlib.suppress(LeaseLostError):
                if _write_once(path, change, is_there, below, timeout_s):
                    return
            if time.monotonic() > deadline:
                raise CacheWriteError(
                    f"what was written to {str(path)!r} was overwritten for {timeout_s:g} s: "
                    "see which other program writes there"
                )


def _write_once(
    path: Path,
    change: Callable[[Contents], Any],
    is_there: Callable[[Contents, Any], bool],
    below: Path,
    timeout_s: float,
) -> bool:
    with file_lease.announced(path, below=below, timeout_s=timeout_s) as lease:
        contents = load_or_set_aside(path, below=below)
        wanted = change(contents)
        written = encode(contents)
        if len(written) > content.LARGEST_ENTRIES_BYTES:
            raise CacheWriteError(
                f"nothing was saved in {str(path)!r}, which would pass {content.LARGEST_ENTRIES_BYTES >> 20} MiB: "
                "remove old results with `quarantune cache prune --older-than`"
            )
        lease.replace(written)
        with contextlib.suppress(FileNotFoundError, DamagedError):
            found = _read(path, below)
            return found == written or is_there(_decode(found, path), wanted)
        return False


def load_or_set_aside(path: Path, *, below: Path) -> Contents:
    """Returns the entries of a file; one with damage is set aside, and its usable entries are returned.

    Raises:
        OSError: it cannot be read.
        NewerSchemaError: it was written by a later version of this package.
    """
    try:
        return load(path, below=below)
    except DamagedError as error:
        aside = _set_aside(path, below, keep=bool(error.usable))
        report_once(f"{error}; it was set aside as {str(aside)!r}: look at it, or delete it")
        return error.usable


def _set_aside(path: Path, below: Path, *, keep: bool) -> Path:
    """Renames a damaged file; with `keep` it also keeps its name, until its usable entries replace it."""
    with shared_files.directory_of(path, below=below) as place:
        aside = place.free_name(path.name)
        if keep:
            with contextlib.suppress(OSError):
                place.link(path.name, aside)
                return place.path / aside
        place.rename(path.name, aside)
        return place.path / aside


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
