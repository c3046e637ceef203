"""A process's memory includes shared memory, counts pages that forks share once, and excludes others' files."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quarantune.host import machine

MB = 1 << 20
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")

HOLDER = r"""
import mmap, os, sys, tempfile
from multiprocessing import resource_tracker, shared_memory
SIZE = 48 << 20
DATA = bytes(1 << 20) * 48

def anonymous():
    kept = mmap.mmap(-1, SIZE)
    kept.write(DATA)
    return kept

def touched_by_a_dead_child():
    kept = mmap.mmap(-1, SIZE)
    if os.fork() == 0:
        kept.write(DATA)
        os._exit(0)
    os.wait()
    return kept

def mapped_twice():
    kept = anonymous()
    if os.fork() == 0:
        kept.seek(0)
        kept.write(DATA)
        os.write(1, b"held\n")
        sys.stdin.read()
        os._exit(0)
    return kept

def memfd():
    fd = os.memfd_create("written")
    os.write(fd, DATA)

def memfd_mapped_and_closed():
    fd = os.memfd_create("mapped")
    os.write(fd, DATA)
    kept = mmap.mmap(fd, SIZE)
    os.close(fd)
    return kept

def shared_memory_of_multiprocessing():
    kept = shared_memory.SharedMemory(create=True, size=SIZE)
    kept.buf[:] = DATA
    kept.unlink()
    return kept

def file_in_dev_shm():
    kept = tempfile.NamedTemporaryFile(dir="/dev/shm")
    kept.write(DATA)
    kept.flush()
    return kept

def mapped_under_an_odd_name():
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="q \v\r\x1c\u2028\udcff ") as file:
        file.write(DATA)
        file.flush()
        return mmap.mmap(file.fileno(), SIZE)

def pool_of_forks():
    for _ in range(4):
        if os.fork() == 0:
            os.write(1, b"held\n")
            sys.stdin.read()
            os._exit(0)

kept = globals()[sys.argv[1]]()
os.write(1, b"held\n")
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(kind: str, lines: int = 1, *, fds: tuple[int, ...] = ()) -> Iterator[list[int]]:
    """Yields the processes of a program that holds 48 MB, its main process first."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds
    ) as process:
        assert process.stdout is not None
        try:
            assert [process.stdout.readline() for _ in range(lines)] == [b"held\n"] * lines
            yield [process.pid, *machine.descendants(process.pid)]
        finally:
            process.communicate(timeout=280)


def weigh(family: list[int], **about: object) -> int:
    asked = {"baseline_bytes": 0, "limit_bytes": 1 << 40, "foreign": set, "exactly": True, **about}
    return machine.MemoryMeter().held_bytes(family, **asked)  # type: ignore[arg-type]


SHARED = {
    "anonymous": 1,
    "touched_by_a_dead_child": 1,
    "mapped_twice": 2,
    "memfd": 1,
    "memfd_mapped_and_closed": 1,
    "shared_memory_of_multiprocessing": 1,
    "file_in_dev_shm": 1,
    "mapped_under_an_odd_name": 1,
}


@pytest.mark.parametrize(("kind", "lines"), SHARED.items())
def test_shared_memory_of_every_kind_counts_once(kind: str, lines: int) -> None:
    since = time.time() - 5
    with holder(kind, lines) as family:
        assert 48 * MB <= machine.shared_bytes(family, since=since, foreign=()) < 52 * MB


@pytest.mark.parametrize("kind", ["anonymous", "mapped_twice", "memfd_mapped_and_closed", "mapped_under_an_odd_name"])
def test_mapped_files_that_cannot_be_read_count_by_pages(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_stat_mapped", lambda *_: None)
    with holder(kind, SHARED[kind]) as family:
        assert 48 * MB <= machine.shared_bytes(family, since=time.time(), foreign=()) < 52 * MB


def test_earlier_files_and_those_of_others_do_not_count() -> None:
    fd = os.memfd_create("ours")
    try:
        os.write(fd, bytes(4 * MB))
        with holder("anonymous", fds=(fd,)) as family:
            ours = {machine.file_id(fd)}
            counted = machine.shared_bytes(family, since=0, foreign=()) - machine.shared_bytes(
                family, since=0, foreign=ours
            )
            assert counted == 4 * MB
            assert ours < machine.shared_files(family)
    finally:
        os.close(fd)
    with holder("file_in_dev_shm") as family:
        assert machine.shared_bytes(family, since=time.time() + 5, foreign=()) == 0


def test_data_that_a_pool_of_forks_shares_counts_once() -> None:
    with holder("pool_of_forks", lines=5) as family:
        assert len(family) == 5
        assert sum(machine.resident_bytes(pid)[0] for pid in family) > 5 * 48 * MB, "each process seems to hold it"
        assert 48 * MB < weigh(family) < 2 * 48 * MB
        assert 48 * MB < weigh(family, limit_bytes=100 * MB, exactly=False) < 2 * 48 * MB, "also near the limit"


def test_a_cheap_measurement_keeps_the_exact_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"baseline_bytes": 0, "limit_bytes": 1 << 40, "foreign": set}
    with holder("pool_of_forks", lines=5) as family:
        meter = machine.MemoryMeter()
        exact = meter.held_bytes(family, exactly=True, **about)  # type: ignore[arg-type]
        monkeypatch.delattr(machine, "shared_bytes")
        monkeypatch.delattr(machine, "proportional_bytes")
        assert abs(meter.held_bytes(family, exactly=False, **about) - exact) < MB  # type: ignore[arg-type]


def test_fast_growth_of_shared_pages_is_measured_exactly() -> None:
    meter = machine.MemoryMeter()

    def look() -> int:
        return meter.held_bytes([os.getpid()], baseline_bytes=0, limit_bytes=1 << 40, foreign=set, exactly=False)

    before = look()
    with mmap.mmap(-1, 48 * MB) as taken:
        taken.write(bytes(48 * MB))
        assert look() - before > 40 * MB


def test_processes_that_are_gone_hold_no_memory() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    assert gone.wait(timeout=280) == 0
    assert weigh([gone.pid]) == 0
    assert weigh([]) == 0
