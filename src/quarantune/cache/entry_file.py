"""One file of entries, `{device: {key: entry}}`: its content, damage, and writers that exclude each other."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

from quarantune.cache.owner import Owner
from quarantune.cache.problems import CacheWriteError, NewerSchemaError, change_errors, reason_of, report_once
from quarantune.host import shared_files
from quarantune.host.shared_files import Directory, NotAFileError, TooLargeError, directory_of
from quarantune.values.codec import (
    JsonObject,
    decode_json,
    is_plausible_ms,
)

SCHEMA = 1
"""The version of an entry's layout. A file with an entry of a later version is neither used nor changed."""
LARGEST_ENTRIES_BYTES = 1 << 28
"""Largest size of a file of entries that we write."""
LARGEST_READ_ENTRIES_BYTES = 1 << 29
"""Largest size of a file of entries that we read: earlier versions wrote larger files."""
_SEARCHED_BYTES = 1 << 20
"""Size of a file above which a look-up of one entry does not decode the others."""
_STALE_S = 30.0
"""Seconds after which a writer's draft no longer counts; writing a file takes milliseconds."""
_ANNOUNCEMENT = re.compile(r"(?P<host>[0-9a-f]+)-(?P<pid>\d+)-(?P<started>\d+)-\d+\.tmp")

Entry: TypeAlias = JsonObject
Contents: TypeAlias = dict[str, dict[str, Entry]]
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


@dataclasses.dataclass(frozen=True)
class EntryFile:
    """One file of entries.

    Attributes:
        path: the file.
        directory: the cache directory.
        is_read_only: whether it is only read; then it may be a link, for example in a mounted or an installed table.
        timeout_s: the longest wait for other writers, in seconds.
    """

    path: Path
    directory: Path
    is_read_only: bool
    timeout_s: float

    def load(self, *, afresh: bool = False) -> Contents:
        """Returns the entries; without a file, none.

        Damage counts only if a second reading also finds it: a network filesystem that caches sizes cuts a file that
        another host has replaced, or reports ESTALE.

        Args:
            afresh: whether to ignore this machine's cached data of the file; see `Directory.read_afresh`.

        Raises:
            DamagedError: the file holds something other than valid entries.
            NewerSchemaError: a later version of this package wrote the file.
            OSError: the file cannot be read; `TooLargeError` if it is too large, as earlier versions could leave it.
        """
        try:
            return decode_entries(self._read(afresh=afresh), self.path)
        except NotAFileError as error:
            raise DamagedError(f"the cache file {str(self.path)!r} cannot be used: {error.strerror}") from None
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (DamagedError, OSError) as error:
            if afresh or getattr(error, "errno", errno.ESTALE) != errno.ESTALE:
                raise
            return self.load(afresh=True)

    def find(self, device: str, key: str) -> Entry | None:
        """Returns an entry of a large file that `encode` wrote, without decoding the others; None if it finds none.

        Of 20,000 entries, decoding and checking all takes 0.25 s on a 2-core machine, and finding one 0.01 s.
        """
        with contextlib.suppress(OSError, ValueError, DamagedError, NewerSchemaError):
            if self.path.stat().st_size > _SEARCHED_BYTES:
                data, name = self._read(), json.dumps(device).encode()
                first = data.index(b"\n%b: {\n" % name)
                begin = data.index(f"\n  {json.dumps(key)}: {{".encode(), first)
                line = data[begin : data.index(b"\n", begin + 1)].rstrip(b",")
                if data.find(b"\n}", first, begin) < 0:
                    return decode_entries(b"{%b: {%b}}" % (name, line), self.path).get(device, {}).get(key)
        return None

    def lines_with(self, text: str) -> list[bytes]:
        """Returns the lines that contain a text; `encode` writes one for each entry. Without a file, none."""
        with contextlib.suppress(OSError):
            return [line for line in self._read().splitlines() if text.encode() in line]
        return []

    def problems(self) -> list[str]:
        """Returns a sentence for each fault of the file and its entries; changes nothing."""
        try:
            self.load()
        except OSError as error:
            return [f"the cache file {str(self.path)!r} cannot be read ({reason_of(error)})"]
        except DamagedError as error:
            return error.faults or [str(error)]
        except NewerSchemaError as error:
            return [str(error)]
        return []

    def load_or_set_aside(self) -> Contents:
        """Returns the entries, and sets damage aside. The caller holds the lock of the writers.

        Raises:
            OSError: the file cannot be read.
            NewerSchemaError: a later version of this package wrote the file.
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
                # If `load` had to read the old name, this one may show a whole file, which then gets its name back.
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
        """Replaces the file. The caller holds the lock of the writers.

        Args:
            change: takes the present entries, and returns the entries to write; called again if others overwrite them.

        Raises:
            CacheWriteError: the file could not be replaced; the message says why.
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
                    f"another program kept overwriting {str(self.path)!r} for {self.timeout_s:g} s: "
                    "see which program writes there"
                )

    def remove(self) -> None:
        """Removes the file; sets damage aside, and leaves a file of a newer schema. The caller holds the writers' lock.

        Raises:
            CacheWriteError: the file could not be removed; the message says why.
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

        In case that lock has no effect, a writer also announces itself. It first creates its draft, then looks for
        drafts of other writers, and backs off if there is one. It reads only once it is alone. Of two writers one
        created its draft before the other looked, so at most one continues. This relies only on the order of operations
        in a directory. A draft is removed if its writer's process is gone, or if this process has seen it for 30 s. If
        that writer lives after all, its replacement fails without the draft, and it starts over.

        Raises:
            CacheWriteError: the wait was too long, or the directory cannot be written to.
        """
        deadline = time.monotonic() + self.timeout_s
        name = self.path.name
        with change_errors(self.path), directory_of(self.path, below=self.directory, make=True) as place:
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
                        "see whether that writer hangs, or set QUARANTUNE_LOCK_TIMEOUT higher"
                    )
                time.sleep(random.uniform(0.2, 1.0) * 0.001 * 2 ** min(attempt, 6))


def decode_entries(data: bytes, path: Path | str) -> Contents:
    """Returns the entries in the content of a file.

    Args:
        data: the content.
        path: the file or its URL, for messages.

    Raises:
        DamagedError: the content holds something other than valid entries.
        NewerSchemaError: a later version of this package wrote it.
    """
    if not data.strip():
        raise DamagedError(f"the cache file {str(path)!r} is empty")
    try:
        contents = decode_json(data)
    except ValueError as error:
        raise DamagedError(f"the cache file {str(path)!r} is not JSON ({error})") from None
    if not is_contents(contents):
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


def is_contents(value: Any) -> bool:
    """Returns whether a value has the form `{device: {key: {}}}`."""
    return isinstance(value, dict) and all(
        isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values())
        for entries in value.values()
    )


def encode(contents: Contents) -> bytes:
    """Returns the content of a file of entries.

    Raises:
        CacheWriteError: the content would be larger than any file may be.
    """
    # One line for each entry: people can read and grep it, and the fast encoder works for each.
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


def check_readable(path: Path, offered: Contents) -> None:
    """Raises if readers would take new entries for damage, and set aside the file that holds them.

    Raises:
        CacheWriteError: readers would not accept the entries.
    """
    try:
        decode_entries(encode(offered), path)
    except (DamagedError, NewerSchemaError) as error:
        raise CacheWriteError(f"nothing was saved, because no reader would accept it: {error}") from None


def _other_writer(place: Directory, target: str, own: str) -> str | None:
    """Returns the draft of another live writer, or None; removes drafts of dead writers."""
    names, prefix = place.names(), f".{target}."
    if own not in names:
        return "a writer that removed our draft"
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
    """Returns when this process first saw a draft, in seconds of its clock. No two drafts ever have the same name."""
    return time.monotonic()


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
