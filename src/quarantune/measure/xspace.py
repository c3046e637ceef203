"""Reads profiles of JAX's profiler: files of the protobuf message `XSpace`, as plain data.

`jax.profiler.ProfileData` reads them too, but hides what is needed here. It rounds times to nanoseconds, drops the
statistics of kinds of events (on a TPU the scope and category of an operation) and programs, and takes an empty file
for a profile. A profile may come from anywhere: everything is checked, and nothing is executed.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from quarantune.host.locks import lazy

_T = TypeVar("_T")
Value: TypeAlias = int | float | str | bytes
Fields: TypeAlias = Iterator[tuple[int, int | memoryview]]

MOST_BYTES = 1 << 30
"""Largest profile that is read. A minute of a training step makes some 100 MB."""
_LONGEST_PS = 10**18
"""Longest event: eleven days. A longer one is damage."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class ProfileError(ValueError):
    """A file is not a whole profile, or lacks what was looked for; the message names the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time on a line.

    Attributes:
        name: the kind of the event: a kernel, an operation, a program.
        start_ps: its start in picoseconds, from the same zero for all lines of a profile.
        duration_ps: its length.
        stats: its figures by name, with the figures of its kind.
    """

    name: str
    start_ps: int
    duration_ps: int
    stats: Mapping[str, Value]

    @property
    def end_ps(self) -> int:
        """Its end in picoseconds."""
        return self.start_ps + self.duration_ps


@dataclasses.dataclass(frozen=True)
class Kind:
    """What events of one kind share: their name and figures."""

    name: str
    stats: Mapping[str, Value]


class Plane:
    """A device, or a part of the host.

    Attributes:
        name: its name, such as `/device:TPU:0` or `/host:CPU`.
        kinds: the kinds of its events by number.
    """

    def __init__(self, message: memoryview) -> None:
        """Reads everything but the events.

        Raises:
            ProfileError: The message is damaged.
        """
        found = parsed(message, {2: text, 3: inner, 4: _map_entry, 5: _map_entry})
        self.name: str = last(found, 2, "")
        self._lines = found[3]
        self._named = {key: last(parsed(entry, {2: text}), 2, "") for key, entry in found[5]}
        self.kinds = {key: self._kind(entry) for key, entry in found[4]}

    def _kind(self, entry: memoryview) -> Kind:
        found = parsed(entry, {2: text, 5: self._stat})
        return Kind(last(found, 2, ""), dict(found[5]))

    def _stat(self, message: int | memoryview) -> tuple[str, Value]:
        def named(value: int | memoryview) -> str:
            return self._named.get(whole(value), "")

        found = parsed(
            inner(message),
            {1: named, 2: _double, 3: whole, 4: signed, 5: text, 6: lambda it: bytes(inner(it)), 7: named},
        )
        name = last(found, 1, "")
        return name, next((found[number][-1] for number in range(2, 8) if found[number]), 0)

    @lazy
    def lines(self) -> list[tuple[str, list[Event]]]:
        """Its lines with their events in the order of the file; read on first use.

        Raises:
            ProfileError: A line is damaged.
        """
        return [self._line(parsed(message, {2: text, 3: signed, 4: inner})) for message in self._lines]

    def _line(self, found: Mapping[int, list[Any]]) -> tuple[str, list[Event]]:
        name, zero_ps = last(found, 2, ""), 1000 * last(found, 3, 0)
        return name, [self._event(message, zero_ps, name) for message in found[4]]

    def _event(self, message: memoryview, zero_ps: int, line: str) -> Event:
        found = parsed(message, {1: signed, 2: signed, 3: signed, 4: self._stat, 5: signed})
        number, offset_ps, duration_ps = (last(found, field, 0) for field in (1, 2, 3))
        if found[5]:
            raise ProfileError(f"the line {line!r} holds sums of events, and no single ones")
        if number not in self.kinds:
            raise ProfileError(f"an event of the line {line!r} has an unknown kind: the file is damaged")
        if not (0 <= duration_ps <= _LONGEST_PS and abs(offset_ps) <= 10 * _LONGEST_PS):
            raise ProfileError(f"an event of the line {line!r} takes {duration_ps} ps: the file is damaged")
        kind = self.kinds[number]
        return Event(kind.name, zero_ps + offset_ps, duration_ps, {**kind.stats, **dict(found[4])})


def read_file(path: Path) -> list[Plane]:
    """Reads a profile.

    Args:
        path: a file `*.xplane.pb`, or a directory that the profiler wrote to: its latest profile counts, with the
            files of all hosts.

    Raises:
        ProfileError: There is no such file, or it is too large, cut, damaged, or not a profile.
    """
    try:
        return [plane for file in _files(path) for plane in _planes_of(file)]
    except OSError as error:
        raise ProfileError(f"{os.fspath(path)!r} cannot be read ({error.strerror}): give another file") from error


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    latest = max((file.parent for file in path.rglob("*.xplane.pb")), key=lambda it: (it.name, str(it)), default=None)
    if latest is None:
        raise ProfileError(
            f"there is no profile (*.xplane.pb) in {str(path)!r}: write one there with jax.profiler.trace"
        )
    return sorted(latest.glob("*.xplane.pb"))


def _planes_of(file: Path) -> list[Plane]:
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        about = os.fstat(stream.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ProfileError(f"{os.fspath(file)!r} is not a file")
        if about.st_size > MOST_BYTES:
            raise ProfileError(
                f"{os.fspath(file)!r} has {about.st_size >> 20:,} MiB, and at most {MOST_BYTES >> 20:,} MiB are read: "
                "profile fewer steps"
            )
        data = stream.read(MOST_BYTES + 1)
    try:
        return read(data)
    except ProfileError as error:
        raise ProfileError(f"{os.fspath(file)!r} is not a whole profile: {error}") from error


def read(data: bytes) -> list[Plane]:
    """Reads a serialised `XSpace`; events of a plane are read on first use of its lines.

    Raises:
        ProfileError: The data is cut, damaged, or not a profile.
    """
    found = parsed(memoryview(data), {1: lambda value: Plane(inner(value)), 4: text})
    if not found[1]:
        raise ProfileError("it has no planes")
    if not found[4]:  # the profiler writes the host's name last, and without it whole planes may be missing
        raise ProfileError("its end is missing")
    return found[1]


# --- the wire format of protobuf ---


def fields(message: memoryview) -> Fields:
    """Yields the numbers and values of a message's fields: whole numbers, and bytes for all other types.

    Raises:
        ProfileError: The message is not in the wire format of protobuf.
    """
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ProfileError(f"a field of type {wire}, which profiles do not have")
        if size > end - at:
            raise ProfileError("it ends within a field")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message):
            raise ProfileError("it ends within a number")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        if shift > 63:
            raise ProfileError("a number of more than 64 bits")


def _map_entry(value: int | memoryview) -> tuple[int, memoryview]:
    """Returns the key and the message of an entry of a map."""
    key, message = 0, memoryview(b"")
    for number, field in fields(inner(value)):
        if number == 1:
            key = signed(field)
        elif number == 2:
            message = inner(field)
    return key, message


def parsed(message: memoryview, of: Mapping[int, Callable[[int | memoryview], Any]]) -> defaultdict[int, list[Any]]:
    """Returns the values of a message's fields by their numbers, in the order of the message.

    Args:
        message: the message.
        of: converts the values of a field; fields of other numbers are left out.
    """
    found: defaultdict[int, list[Any]] = defaultdict(list)
    for number, value in fields(message):
        if number in of:
            found[number].append(of[number](value))
    return found


def last(found: Mapping[int, list[Any]], number: int, default: _T) -> _T:
    """Returns the value of a field that a message has at most once."""
    value: _T = found[number][-1] if found[number] else default
    return value


def packed(value: int | memoryview) -> list[int]:
    """Returns the numbers of a repeated field, packed or not."""
    found, at = [value] if isinstance(value, int) else [], 0
    while not isinstance(value, int) and at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def _double(value: int | memoryview) -> float:
    if len(message := inner(value)) != 8:
        raise ProfileError("a number of another length than 64 bits")
    return float(struct.unpack("<d", message)[0])


def inner(value: int | memoryview) -> memoryview:
    """Returns a field that must hold bytes."""
    if isinstance(value, int):
        raise ProfileError("a number in the place of a message")
    return value


def whole(value: int | memoryview) -> int:
    """Returns a field that must hold a number."""
    if not isinstance(value, int):
        raise ProfileError("a message in the place of a number")
    return value


def signed(value: int | memoryview) -> int:
    """Returns a field that must hold a number, which may be negative."""
    number = whole(value)
    return number - (1 << 64) if number >> 63 else number


def text(value: int | memoryview) -> str:
    """Returns a field that must hold text."""
    return bytes(inner(value)).decode("utf-8", "replace")
