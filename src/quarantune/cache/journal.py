"""Append-only journals of finished trials, and of configs that crashed or hung."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quarantune.cache.file_names import problem_hash, safe_name
from quarantune.cache.owner import this_host
from quarantune.cache.problems import CacheWriteError, report_once, write_errors
from quarantune.host import shared_files
from quarantune.host.shared_files import Directory, NotAFileError, TooLargeError
from quarantune.values.codec import DamageError, JsonObject, canonical_json, decode_json, plain
from quarantune.values.trial import Trial

_Parsed = TypeVar("_Parsed")
LARGEST_JOURNAL_BYTES = 1 << 28
"""Bound on the size of a journal's file that all writers observe."""
LARGEST_READ_JOURNAL_BYTES = 1 << 30
"""Largest size of a journal's file that readers accept. Earlier versions wrote without a bound."""
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND
_LINE = re.compile(rb"(?P<crc>[0-9a-f]{8}) (?P<record>.*)")
RECORDS = ("jsonl", "final", "uncompiled", "failed", "keys", "sweep", "ruled")
"""Suffixes of the files about one problem, other than its entry and the locks and claims of living jobs."""
PROBLEM = "[0-9a-f]" * 12
"""Pattern of a `problem_hash`. The names of all files about a problem begin with it."""
_TURNS = ("", *(f"_{number:04}" for number in range(1, 10_000)))
"""Parts of names that distinguish the successive files of one host."""
_CONSEQUENCE = ": trials that are missing are measured again"
"""Consequence of damage to a journal of the cache, for messages."""
_TROUBLE_KEY = "trouble"
_TROUBLE = frozenset({"crashed", "timeout"})


class Journal:
    """The finished trials of one problem, as JSON records, one checksummed line each.

    Any number of processes may append at once. Each host writes its own file, because appending is atomic only within a
    host. Once `append` returns, a record survives the death of its process. `append` does not force it onto the disk:
    that would slow down every trial, and after a crash of the machine the next sweep repeats only a few trials. Instead
    of appending to a large file, `append` begins another one, so that readers accept all files.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        device: str,
        key: str,
        *,
        suffix: str = ".jsonl",
        arguments: str | None = None,
    ) -> None:
        """Names a journal without touching the disk; the first `append` makes its file.

        Args:
            directory: the cache directory.
            name: the function.
            device: the kind of device.
            key: the key of the problem.
            suffix: the end of its files' names.
            arguments: `KeyedCall.arguments_hash` of the call whose records it reads and appends; None for all calls.
        """
        self._root = directory
        self.directory = directory / trials_folder(name)
        self._suffix = suffix
        self._arguments = arguments
        self._stem = problem_hash(device, key)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one record at the end.

        Args:
            record: JSON-able data; NaN and infinity become None.

        Raises:
            CacheWriteError: the record could not be written. The message says why.
            TypeError: the record holds a value that JSON cannot hold.
        """
        if self._arguments:
            record = {**record, "arguments": self._arguments}
        try:
            # Nearly every record is plain already, and its conversion would take time for every config.
            text = json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii")
        except (TypeError, ValueError):
            plainer = plain(record, finite_only=False)
            text = json.dumps(plainer, separators=(",", ":"), allow_nan=False).encode("ascii")
        line = b"%08x %b\n" % (zlib.crc32(text), text)
        names = (f"{self._stem}.{this_host()}{turn}{self._suffix}" for turn in _TURNS)
        with (
            write_errors(f"a trial, which the next sweep measures again, was not recorded in {str(self.directory)!r}"),
            Directory(self._root, self.directory.name, make=True) as place,
        ):
            next(name for name in names if _append_line(place, name, line))

    def records(self) -> list[JsonObject]:
        """Returns all whole records, each host's in order. It skips damaged lines and reports them once."""
        return list(self.each())

    def each(self) -> Iterator[JsonObject]:
        """Yields the same records as `records`, without holding all of them in memory."""
        for path in self._files():
            for record in _whole(path, _read_lines(path, below=self._root), _CONSEQUENCE):
                if self._arguments is None or record.get("arguments", "") == self._arguments:
                    yield record

    def trials(self) -> Iterator[Trial]:
        """Yields the trials of its records, skipping records without a trial."""
        for record in self.each():
            with contextlib.suppress(DamageError):
                yield Trial.from_json(record.get("trial"))

    def discard(self) -> None:
        """Removes the journal, so that the next sweep starts over.

        Raises:
            CacheWriteError: a file could not be removed. The message says why.
        """
        remove(self._root, self._files())

    def _files(self) -> list[Path]:
        return shared_files.paths(self._root, f"{self.directory.name}/{self._stem}.*{self._suffix}")


def trials_folder(name: str) -> str:
    """Returns the name of the folder of a function's journals and claims, in the cache directory."""
    return f"{safe_name(name)}.trials"


def conclusions(directory: Path, name: str, device: str, key: str) -> Journal:
    """Returns the journal of the ends of one problem's sweeps: their finalists, with the times of the final.

    Reports and `ClaimAndJournal.recall` read it. The journal of trials holds the finalists' first measurements.
    """
    return Journal(directory, name, device, key, suffix=".final")


def keys(directory: Path, name: str, device: str, arrays: str) -> Journal:
    """Returns the journal of the keys of tuned calls with the same arrays, whatever the function's code.

    Args:
        directory: the cache directory.
        name: the function.
        device: the kind of device.
        arrays: the descriptions of the arrays.
    """
    return Journal(directory, name, device, arrays, suffix=".keys")


def discard_all(directory: Path, name: str, problem: str = PROBLEM) -> None:
    """Removes the journals of a function, including those of failed compilations.

    Args:
        directory: the cache directory.
        name: the function.
        problem: the `problem_hash` of one problem. By default, all journals go, including those of troublesome configs.

    Raises:
        CacheWriteError: a file could not be removed. The message says why.
    """
    patterns = [f"{trials_folder(name)}/{problem}.*{suffix}" for suffix in RECORDS]
    remove(directory, shared_files.paths(directory, *patterns))


def remember_trouble(directory: Path, name: str, device: str, config: Mapping[str, Any], outcome: str) -> None:
    """Records how a config ended on a device, for all shapes, if it crashed or hung now or the last time.

    Args:
        directory: the cache directory.
        name: the function.
        device: the kind of device.
        config: the config.
        outcome: how it ended. Any outcome but a crash or a timeout clears the record.

    Raises:
        CacheWriteError: the record could not be written. The message says why.
    """
    text = canonical_json(config)
    known = troublesome(directory, name, device).get(text)
    if known == outcome or (known is None and outcome not in _TROUBLE):
        return
    Journal(directory, name, device, _TROUBLE_KEY).append({"config": text, "outcome": str(outcome)})


def troublesome(directory: Path, name: str, device: str) -> dict[str, str]:
    """Returns the configs whose last run on a device, for any shapes, crashed or hung.

    Returns:
        The outcome of each, by the config's canonical JSON.
    """
    last = {
        str(record.get("config")): str(record.get("outcome"))
        for record in Journal(directory, name, device, _TROUBLE_KEY).records()
    }
    return {config: outcome for config, outcome in last.items() if outcome in _TROUBLE}


def remove(directory: Path, paths: Iterable[Path]) -> None:
    """Removes as many files below a cache directory as it can. A directory in the place of a file is set aside.

    Raises:
        CacheWriteError: a file, such as another user's, could not be removed. The message says why.
    """
    failure: CacheWriteError | None = None
    for path in paths:
        try:
            with (
                write_errors(f"the file {str(path)!r} could not be removed", "remove it by hand"),
                contextlib.suppress(FileNotFoundError),
                shared_files.directory_of(path, below=directory) as place,
            ):
                place.remove(path.name)
        except CacheWriteError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _append_line(place: Directory, name: str, line: bytes) -> bool:
    """Appends a line, unless the file is large; returns whether it did."""
    fd = place.open(name, _APPEND)
    try:
        # A line torn by a full disk lacks its end. Add one, or this record would be lost with it.
        size = os.fstat(fd).st_size
        # Ignore the line's length, so that a short record never goes before an earlier long one.
        if size > LARGEST_JOURNAL_BYTES // 2:
            return False
        separator = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
        written = os.write(fd, separator + line)
        if written < len(separator) + len(line):
            raise OSError(errno.ENOSPC, f"only {written} bytes could be written")
        return True
    finally:
        os.close(fd)


def read(path: Path, *, below: Path | None = None) -> list[JsonObject]:
    """Returns the whole records of a file that the user names. It skips damaged lines and reports them once.

    Args:
        path: the file.
        below: the directory that the user has named instead, below which nothing may be a link.

    Raises:
        OSError: the file is not a regular file, is too large, or cannot be read.
    """
    return list(
        _whole(path, _parsed(shared_files.read(path, below=below, largest_bytes=LARGEST_READ_JOURNAL_BYTES)), "")
    )


def records_below(directory: Path, suffix: str) -> Iterator[JsonObject | None]:
    """Yields the records of all journals with a suffix below a directory; None for each damaged line."""
    for path in shared_files.paths(directory, f"*.trials/{PROBLEM}.*{suffix}"):
        yield from _read_lines(path, below=directory)


def damage(directory: Path) -> list[str]:
    """Returns a sentence for each journal below a cache directory that has damaged lines."""
    paths = shared_files.paths(directory, *(f"*.trials/{PROBLEM}.*{suffix}" for suffix in ("jsonl", "uncompiled")))
    found = {path: sum(record is None for record in _read_lines(path, below=directory)) for path in paths}
    return [f"{_damage_of(path, damaged)}{_CONSEQUENCE}" for path, damaged in found.items() if damaged]


def understood(
    records: Iterable[JsonObject | None], parse: Callable[[Any], _Parsed], complaint: Callable[[int], str]
) -> Iterator[_Parsed]:
    """Yields the content of records. It skips records that it cannot parse, and reports their number once.

    Args:
        records: the records, which anybody may have written.
        parse: returns the content of a record; raises ValueError or KeyError if the record holds something else.
        complaint: takes the number of skipped records, and returns the message about them.
    """
    refused = 0
    for record in records:
        try:
            content = parse(record)
        except (ValueError, KeyError):
            refused += 1
        else:
            yield content
    if refused:
        report_once(complaint(refused))


def _whole(path: Path, records: Iterable[JsonObject | None], consequence: str) -> Iterator[JsonObject]:
    """Yields the whole records of a file, and reports once how many lines are damaged, with the consequence."""
    damaged = 0
    for record in records:
        if record is None:
            damaged += 1
        else:
            yield record
    if damaged:
        report_once(f"{_damage_of(path, damaged)}{consequence}")


def _damage_of(path: Path, damaged: int) -> str:
    lines, are = ("line", "is") if damaged == 1 else ("lines", "are")
    return f"{damaged} damaged {lines} of the journal {str(path)!r} {are} left out"


def _read_lines(path: Path, *, below: Path) -> Iterator[JsonObject | None]:
    """Yields the records of a file, with None for each damaged line. It skips a torn last line."""
    try:
        data = shared_files.read(path, below=below, largest_bytes=LARGEST_READ_JOURNAL_BYTES)
    except (NotAFileError, TooLargeError) as error:
        report_once(f"the journal {str(path)!r} cannot be used: {error.strerror}; look at it, or delete it")
        return
    except OSError:
        return
    yield from _parsed(data)


def _parsed(data: bytes) -> Iterator[JsonObject | None]:
    """Yields the records of a file's content, with None for each damaged line. It skips a torn last line."""
    for line in io.BytesIO(data.removeprefix(codecs.BOM_UTF8)):
        if line.endswith(b"\n") and len(line) > 1:
            yield _parse(line.rstrip(b"\r\n"))


def _parse(line: bytes) -> JsonObject | None:
    match = _LINE.fullmatch(line)
    if match is None or int(match["crc"], 16) != zlib.crc32(match["record"]):
        return None
    try:
        record = decode_json(match["record"])
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
