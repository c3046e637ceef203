"""Anonymous files for data that travels between processes; they leave nothing behind, however a process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Sequence

from quarantune.host import machine, shared_files

_MEMORY_SHARE = 4
"""Divisor of the free memory: a file that takes less than this share lies in memory, any other on the disk."""
_LOG_CAP_BYTES = 1 << 20
_LOG_KEPT_BYTES = 16 << 10
_BLOCK_BYTES = 16 << 20
_ALIGNMENT = 64

write = shared_files.write_all


def create(label: str, *, size_bytes: int = 0) -> int:
    """Returns a descriptor of a new anonymous file.

    The file lies in memory if there is room, and else under TMPDIR. It has no name in either place, so that not even
    SIGKILL leaves it behind.

    Args:
        label: the file's name in the system's tools.
        size_bytes: the size that it will have.

    Raises:
        OSError: neither place has room for the file.
    """
    small = size_bytes <= _LOG_CAP_BYTES
    if hasattr(os, "memfd_create") and (small or size_bytes < machine.available_memory_bytes() // _MEMORY_SHARE):
        with contextlib.suppress(OSError):  # a filter on system calls refuses it
            return os.memfd_create(f"quarantune-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix="quarantune-") as file:
        return os.dup(file.fileno())


def read(fd: int) -> bytes:
    """Returns the whole content of a file.

    Raises:
        ValueError: somebody has enlarged the file without writing to it.
    """
    return os.pread(fd, _written_bytes(fd), 0)


def _written_bytes(fd: int) -> int:
    """Returns the size of a file without holes; a config may have enlarged its files to any size."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes and os.lseek(fd, 0, os.SEEK_HOLE) < size_bytes:
        raise ValueError(f"the file was enlarged to {size_bytes} bytes, and not written")
    return size_bytes


def write_parts(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """Writes byte strings for `read_parts`, each at a place where an array of any type may begin."""
    lengths = [len(part) for part in parts]
    write(fd, struct.pack(f"<{1 + len(parts)}Q", len(parts), *lengths))
    place = 8 + 8 * len(parts)
    for part in parts:
        write(fd, bytes(-place % _ALIGNMENT))
        write(fd, part)
        place += -place % _ALIGNMENT + len(part)


def read_parts(fd: int) -> list[bytes]:
    """Returns the byte strings that `write_parts` wrote.

    Raises:
        ValueError: the file is not from `write_parts`; a worker may have written anything to it.
    """
    return [bytes(part) for part in map_parts(fd)]


def map_parts(fd: int) -> list[memoryview]:
    """Returns the byte strings that `write_parts` wrote, without a copy if nobody can change them.

    Raises:
        ValueError: the file is not from `write_parts`; a worker may have written anything to it.
    """
    size = _written_bytes(fd)
    data = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size and _is_sealed(fd) else read(fd))
    try:
        (count,) = struct.unpack_from("<Q", data)
        lengths = struct.unpack_from(f"<{count}Q", data, 8)
    except (struct.error, MemoryError, OverflowError) as error:
        raise ValueError("the file does not hold a sequence of byte strings") from error
    parts, place = [], 8 + 8 * count
    for length in lengths:
        place += -place % _ALIGNMENT
        parts.append(data[place : place + length])
        place += length
    if place != len(data):
        raise ValueError("the file does not hold a sequence of byte strings")
    return parts


def _is_sealed(fd: int) -> bool:
    with contextlib.suppress(OSError, AttributeError):  # it lies on the disk, so its writer may cut it
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
    return False


def protect(fd: int) -> int:
    """Returns a read-only descriptor of the file, which no config can then change.

    This seals a file in memory for good; if a process with write access prevents that, it seals a copy instead. A file
    on the disk it only reopens for reading.

    Raises:
        ValueError: somebody has enlarged the file without writing to it.
    """
    _written_bytes(fd)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EBUSY, errno.EPERM):
            return _protected_copy(fd)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(fd)


def _protected_copy(fd: int) -> int:
    size_bytes = _written_bytes(fd)
    copy = create("copy", size_bytes=size_bytes)
    try:
        start = 0
        while block := os.pread(fd, min(_BLOCK_BYTES, size_bytes - start), start):
            write(copy, block)
            start += len(block)
        return protect(copy)
    finally:
        os.close(copy)


def create_log() -> int:
    """Returns a descriptor of a new anonymous file that several processes may append to, and none may protect."""
    fd = create("log")
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    with contextlib.suppress(OSError, AttributeError):  # it lies on the disk
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return fd


def trim_log(fd: int) -> None:
    """Frees the memory of all but the last lines of a log that has grown over its size cap.

    The file keeps its length, with a hole at its start: cutting it would lose lines that a process writes just then.
    """
    stat = os.fstat(fd)
    if min(stat.st_size, stat.st_blocks * 512) <= _LOG_CAP_BYTES:
        return
    hole_bytes = (stat.st_size - _LOG_KEPT_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        with mmap.mmap(fd, hole_bytes) as hole:
            hole.madvise(mmap.MADV_REMOVE)
    except (OSError, ValueError, AttributeError):
        # A system without holes, or the config has cut the file just now: this may lose a few lines, but no memory.
        kept = os.pread(fd, _LOG_KEPT_BYTES, stat.st_size - _LOG_KEPT_BYTES)
        os.ftruncate(fd, 0)
        os.write(fd, b"[...]\n" + kept)


def read_log(fd: int, *, last_bytes: int = _LOG_CAP_BYTES) -> str:
    """Returns the end of a log as text."""
    size = os.fstat(fd).st_size
    end = os.pread(fd, last_bytes, max(0, size - last_bytes))
    kept = end.lstrip(b"\0")  # a hole reads as zeros
    return ("[...]\n" if len(kept) < len(end) else "") + kept.decode("utf-8", "backslashreplace")
