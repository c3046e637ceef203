"""The memory that a worker's processes hold, each page counted once: private, copied on write or shared."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from quarantune.host import machine, proc

FileId: TypeAlias = tuple[int, int]
"""The device and the inode of a file."""
_NOTABLE_BYTES = 16 << 20
"""An exact measurement takes milliseconds; it is made if mapped memory grew, or forks hold memory, by so much."""
_BLOCK_BYTES = 512
_FEW_BYTES = 1 << 20
"""Resident shared memory below which the list of a process's maps is not worth the 1.5 ms that reading it takes."""
_THOROUGH_S = 2.0
"""Time between measurements that read the maps in any case: mapped memory need not be resident."""


class MemoryMeter:
    """Measures one worker's memory again and again: cheaply as a rule, exactly on request or near the limit.

    The cheap measurement adds up the private pages of all processes, which counts pages that forks still share once for
    each, and adds the shared memory found by the last exact measurement.
    """

    def __init__(self) -> None:
        self._began = time.time()
        self._next_thorough = time.monotonic() + _THOROUGH_S
        self._mapped = 0
        self._shared = 0
        self._counted_again = 0

    def held_bytes(
        self,
        family: Sequence[int],
        *,
        baseline_bytes: int,
        limit_bytes: int,
        foreign: Callable[[], Collection[FileId]],
        exactly: bool,
    ) -> int:
        """Returns how many bytes a worker's processes hold in addition to those inherited from its template.

        Args:
            family: process ids, the worker's own first; empty while that is not known yet.
            baseline_bytes: the private memory inherited from the template.
            limit_bytes: a sum over this is confirmed by an exact measurement.
            foreign: returns the files in memory that do not count, though the worker has them open.
            exactly: whether to measure exactly in any case.
        """
        if not family:
            return 0
        pages = [machine.resident_bytes(pid) for pid in family]
        private = sum(own for own, _ in pages) - baseline_bytes
        mapped = sum(shared for _, shared in pages)
        suspicious = private - self._counted_again + self._shared > limit_bytes
        if exactly or suspicious or mapped > self._mapped + _NOTABLE_BYTES:
            self._mapped = mapped
            thorough = suspicious or time.monotonic() >= self._next_thorough
            if thorough:
                self._next_thorough = time.monotonic() + _THOROUGH_S
            self._shared = shared_bytes(family, since=self._began, foreign=foreign(), thorough=thorough)
            self._counted_again = _counted_again(family, private, pages[0][0] - baseline_bytes, baseline_bytes)
        return max(0, private - self._counted_again) + self._shared


def _counted_again(family: Sequence[int], private: int, own: int, baseline_bytes: int) -> int:
    """Returns how many bytes of a sum of private pages were counted more than once, because processes share them."""
    if private - max(0, own) < _NOTABLE_BYTES or (exact := proportional_bytes(family)) is None:
        return 0
    return max(0, private - max(own, exact - baseline_bytes))


def proportional_bytes(family: Sequence[int]) -> int | None:
    """Returns the private memory of processes, a page shared by n processes counted as 1/n; None if unknown."""
    total = 0
    for pid in family:
        text = proc.read(f"/proc/{pid}/smaps_rollup")
        if text and b"Pss_Anon:" not in text:
            return None  # a kernel before 5.3
        total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(b"Pss_Anon:"))
    return total or None


def shared_bytes(family: Sequence[int], *, since: float, foreign: Collection[FileId], thorough: bool = True) -> int:
    """Returns the memory of files in memory that processes have open or mapped, each file counted once.

    These are all kinds of shared memory: anonymous maps, memfd, System V's, and files of a tmpfs such as /dev/shm.

    Args:
        family: the processes.
        since: a time in seconds; files with a name that have not changed since then existed before the processes.
        foreign: files that do not count.
        thorough: whether to look at the maps of processes with little resident shared memory, too.
    """
    held: dict[FileId, int] = {}
    pages: dict[FileId, int] = {}
    for pid in family:
        for about in _open_files(pid):
            held[about.st_dev, about.st_ino] = _bytes_of(about, since)
    for pid in family:
        if not thorough and _resident_shared_bytes(pid) < _FEW_BYTES:
            continue
        unknown = set()
        for identity, place, path in _mapped_files(pid):
            if identity in held or identity in foreign or identity in unknown:
                continue
            if (about_map := _stat_mapped(pid, identity, place, path)) is None:
                unknown.add(identity)
            else:
                held[identity] = _bytes_of(about_map, since)
        if unknown:
            for identity, amount in _proportional_maps(pid, unknown).items():
                pages[identity] = pages.get(identity, 0) + amount
    return sum(amount for identity, amount in (pages | held).items() if identity not in foreign)


def shared_files(family: Sequence[int]) -> set[FileId]:
    """Returns the files in memory that processes have open or mapped."""
    opened = {(about.st_dev, about.st_ino) for pid in family for about in _open_files(pid)}
    return opened | {identity for pid in family for identity, _, _ in _mapped_files(pid)}


def file_id(fd: int) -> FileId:
    """Returns the identity of an open file."""
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


@functools.cache
def _devices_in_memory() -> frozenset[int]:
    """Returns the devices whose files are in memory: mounted ones, and the kernel's own for nameless files."""
    found = set()
    with contextlib.suppress(OSError, AttributeError):  # it is refused, or unknown
        probe = os.memfd_create("quarantune-probe", os.MFD_CLOEXEC)
        found.add(os.fstat(probe).st_dev)
        os.close(probe)
    for line in proc.lines("/proc/self/mountinfo"):
        fields, _, kind = line.partition(b" - ")
        if kind.startswith((b"tmpfs ", b"ramfs ")):
            major, _, minor = fields.split()[2].partition(b":")
            found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)


def _resident_shared_bytes(pid: int) -> float:
    """Returns the shared memory that a process has mapped and touched; infinity if the system does not say."""
    _, found, rest = proc.read(f"/proc/{pid}/status").partition(b"\nRssShmem:")
    return int(rest.split(maxsplit=1)[0]) << 10 if found else math.inf


def _open_files(pid: int) -> Iterator[os.stat_result]:
    """Yields the status of each file in memory that a process has open."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # the process is gone
    for name in names:
        with contextlib.suppress(OSError):
            about = os.stat(f"/proc/{pid}/fd/{name}")
            if stat.S_ISREG(about.st_mode) and about.st_dev in _devices_in_memory():
                yield about


def _mapped_files(pid: int) -> Iterator[tuple[FileId, str, str]]:
    """Yields the identity, the address range and the path of each file in memory that a process has mapped."""
    for line in proc.lines(f"/proc/{pid}/maps"):
        place, _, _, device, inode, *path = line.split(maxsplit=5)
        if inode != b"0":
            major, _, minor = device.partition(b":")
            identity = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            if identity[0] in _devices_in_memory():
                yield identity, place.decode(), os.fsdecode(b"".join(path))


def _stat_mapped(pid: int, identity: FileId, place: str, path: str) -> os.stat_result | None:
    """Returns the status of a mapped file; None where only its pages can be counted."""
    # The first needs a capability that root usually has alone; the second needs a file with a name.
    for name in (f"/proc/{pid}/map_files/{place}", path):
        with contextlib.suppress(OSError, ValueError):
            about = os.stat(name)
            if (about.st_dev, about.st_ino) == identity:
                return about
    return None


def _proportional_maps(pid: int, wanted: Collection[FileId]) -> dict[FileId, int]:
    """Returns a process's share of mapped files in bytes, a page mapped by n processes counted as 1/n."""
    found: dict[FileId, int] = {}
    identity = None
    for line in proc.lines(f"/proc/{pid}/smaps"):
        name, _, rest = line.partition(b" ")
        if name == b"Pss:" and identity in wanted and identity is not None:
            found[identity] = found.get(identity, 0) + (int(rest.split()[0]) << 10)
        elif not name.endswith(b":"):
            _, _, device, inode, *_ = rest.split(maxsplit=4)
            major, _, minor = device.partition(b":")
            identity = os.makedev(int(major, 16), int(minor, 16)), int(inode)
    return found


def _bytes_of(about: os.stat_result, since: float) -> int:
    """Returns the memory that a file takes; 0 for a file with a name that existed before."""
    was_there = about.st_nlink > 0 and max(about.st_mtime, about.st_ctime) < since
    return 0 if was_there else about.st_blocks * _BLOCK_BYTES
