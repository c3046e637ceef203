"""A journal keeps every acknowledged record of an interrupted sweep, whatever happens to its files."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quarantune.cache import journal as journal_module
from quarantune.cache.file_names import problem_hash
from quarantune.cache.journal import Journal, remember_trouble, troublesome
from quarantune.cache.problems import CacheWarning, CacheWriteError
from quarantune.host.shared_files import Directory


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, "m.make.<locals>.f", "cpu", "key")


def file_of(journal: Journal) -> Path:
    (path,) = journal.directory.glob("*.jsonl")
    return path


def test_another_journal_object_reads_the_records_in_order(tmp_path: Path, journal: Journal) -> None:
    assert journal.records() == []
    records = [{"config": {"BM": n}, "outcome": "ok", "samples_ms": (0.1, n)} for n in range(3)]
    for record in records:
        journal.append(record)
    found = Journal(tmp_path, "m.make.<locals>.f", "cpu", "key").records()
    assert found == [record | {"samples_ms": list(record["samples_ms"])} for record in records]  # type: ignore[call-overload]


def test_problems_devices_and_functions_have_own_journals(tmp_path: Path, journal: Journal) -> None:
    journal.append({"n": 1})
    for name, device, key in (("g", "cpu", "key"), ("m.f", "gpu", "key"), ("m.f", "cpu", "key2")):
        assert Journal(tmp_path, name, device, key).records() == []


def test_nothing_is_made_before_the_first_record(tmp_path: Path, journal: Journal) -> None:
    journal.records()
    journal.discard()
    assert list(tmp_path.iterdir()) == []


def test_discard_starts_over(journal: Journal) -> None:
    journal.append({"n": 1})
    journal.discard()
    assert journal.records() == []
    journal.append({"n": 2})
    assert journal.records() == [{"n": 2}]


def test_a_file_that_cannot_be_removed_keeps_no_other_file(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = Directory.remove

    def remove_own(place: Directory, name: str) -> None:
        if name.startswith("a"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        remove(place, name)

    monkeypatch.setattr(Directory, "remove", remove_own)
    journal.directory.mkdir(parents=True)
    files = [journal.directory / name for name in ("a1", "b", "a2", "c")]
    for path in files:
        path.touch()
    with pytest.raises(
        CacheWriteError, match=r"a1' could not be removed \(Operation not permitted\): make .* remove it"
    ):
        journal_module.remove(journal.directory.parent, files)
    assert {path.name for path in journal.directory.iterdir()} == {"a1", "a2"}


def test_a_torn_tail_is_left_out_and_the_next_record_is_whole(journal: Journal) -> None:
    journal.append({"n": 1})
    journal.append({"n": 2})
    path = file_of(journal)
    path.write_bytes(path.read_bytes()[:-5])
    assert journal.records() == [{"n": 1}]
    journal.append({"n": 3})
    with pytest.warns(CacheWarning, match="1 damaged line"):
        assert journal.records() == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize(
    "damage",
    [b"\x00\xff garbage", b"{}", b"00000000 {}", b'8b3f4a3c {"n": 1}', b"zzzzzzzz []", b" ", b"\r"],
)
def test_damaged_lines_are_left_out_and_reported_once(journal: Journal, damage: bytes) -> None:
    journal.append({"n": 1})
    path = file_of(journal)
    path.write_bytes(damage + b"\n" + path.read_bytes() + damage + b"\n")
    with pytest.warns(CacheWarning, match="2 damaged lines of the journal") as caught:
        assert [journal.records() for _ in range(2)] == [[{"n": 1}]] * 2
    assert len(caught) == 1


def test_a_changed_digit_is_noticed(journal: Journal) -> None:
    journal.append({"time_ms": 1234})
    path = file_of(journal)
    path.write_bytes(path.read_bytes().replace(b"1234", b"1235"))
    with pytest.warns(CacheWarning, match="damaged"):
        assert journal.records() == []


def test_nan_in_a_record_becomes_none(journal: Journal) -> None:
    journal.append({"time_ms": math.nan, "samples_ms": [np.float32("inf"), np.float64("nan"), 1.0]})
    assert journal.records() == [{"time_ms": None, "samples_ms": [None, None, 1.0]}]


def test_newlines_and_odd_text_in_a_record_stay_in_its_line(journal: Journal) -> None:
    record = {"message": "a\nb\r\n\u2028\0\udce4 é"}
    journal.append(record)
    assert journal.records() == [record]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_record_that_cannot_be_written_is_a_typed_error(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(CacheWriteError, match=os.strerror(code)):
        journal.append({"n": 1})


def test_a_record_cut_short_by_a_full_disk_harms_no_other(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.append({"n": 1})
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
        with pytest.raises(CacheWriteError, match="only 7 bytes"):
            journal.append({"n": 2})
    journal.append({"n": 3})
    with pytest.warns(CacheWarning, match="1 damaged line"):
        assert journal.records() == [{"n": 1}, {"n": 3}]


def test_a_file_in_place_of_the_directory_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "f.trials").write_text("")
    journal = Journal(tmp_path, "f", "cpu", "key")
    assert journal.records() == []
    with pytest.raises(CacheWriteError, match="not recorded"):
        journal.append({"n": 1})


@pytest.mark.parametrize("largest", [1 << 28, 40_000], ids=["one file", "many files"])
def test_concurrent_appends_lose_no_acknowledged_record(tmp_path: Path, largest: int) -> None:
    script = """
import sys
import warnings
from pathlib import Path
from quarantune.cache import journal
from quarantune.cache.journal import Journal
journal.LARGEST_JOURNAL_BYTES = int(sys.argv[4])
journal = Journal(Path(sys.argv[1]), "f", "cpu", "key")
for number in range(int(sys.argv[3])):
    journal.append({"writer": sys.argv[2], "number": number, "filling": "x" * (number % 50) * 100})
    print(number, flush=True)
"""

    def start(name: str, records: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(tmp_path), name, str(records), str(largest)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start("victim", 10**9) as victim, start("a", 200) as one, start("b", 200) as other:
        assert victim.stdout is not None
        acknowledged = -1
        while acknowledged < 100:
            acknowledged = int(victim.stdout.readline())
        victim.kill()
        acknowledged = max([acknowledged, *map(int, victim.stdout.read().split())])
        one.communicate(timeout=280)
        other.communicate(timeout=280)
    found: dict[str, list[int]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)  # the killed process may have left a torn line
        records = Journal(tmp_path, "f", "cpu", "key").records()
    for record in records:
        found.setdefault(record["writer"], []).append(record["number"])
    assert found["a"] == found["b"] == list(range(200))
    assert found["victim"][: acknowledged + 1] == list(range(acknowledged + 1))
    sizes = [path.stat().st_size for path in tmp_path.glob("f.trials/*.jsonl")]
    assert max(sizes) <= largest
    assert (len(sizes) > 5) is (largest == 40_000)


def test_each_host_appends_to_its_own_file_and_all_are_read(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.append({"n": 1})
    monkeypatch.setattr("quarantune.cache.journal.this_host", lambda: "0123456789ab")
    journal.append({"n": 2})
    assert len(list(journal.directory.glob("*.jsonl"))) == 2
    assert sorted(record["n"] for record in journal.records()) == [1, 2]
    journal.discard()
    assert journal.records() == []


def test_a_journal_that_becomes_large_continues_in_a_new_file(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "LARGEST_JOURNAL_BYTES", 2000)
    monkeypatch.setattr(journal_module, "LARGEST_READ_JOURNAL_BYTES", 2000)
    records = [{"n": n, "filling": "x" * (n * 37 % 400)} for n in range(100)]
    for record in records:
        journal.append(record)
    files = sorted(journal.directory.glob("*.jsonl"))
    assert len(files) > 10
    assert max(path.stat().st_size for path in files) <= 2000
    assert journal.records() == records
    files[3].write_bytes(files[3].read_bytes()[:-5])
    assert journal_module.damage(tmp_path) == []  # a torn last line is not damage
    assert len(journal.records()) == 99
    assert [path.name.partition(".")[0] for path in files] == [problem_hash("cpu", "key")] * len(files)
    journal.discard()
    assert list(journal.directory.glob("*")) == []
    for number in range(300):
        remember_trouble(tmp_path, "f", "cpu", {"BM": number % 7}, "timeout" if number % 2 else "crashed")
    assert len(list(tmp_path.glob("f.trials/*.jsonl"))) > 5
    last = {number % 7: "timeout" if number % 2 else "crashed" for number in range(300)}
    assert troublesome(tmp_path, "f", "cpu") == {f'{{"BM":{n}}}': outcome for n, outcome in last.items()}


def test_a_small_journal_is_read_when_little_memory_is_left(tmp_path: Path) -> None:
    Journal(tmp_path, "f", "cpu", "k").append({"n": 1})
    script = """
import pathlib, resource, sys
from quarantune.cache.journal import Journal
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(Journal(pathlib.Path(sys.argv[1]), "f", "cpu", "k").records())
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "[{'n': 1}]\n", done.stderr


def test_trouble_is_remembered_for_a_device_and_all_its_problems(tmp_path: Path) -> None:
    assert troublesome(tmp_path, "f", "cpu") == {}
    remember_trouble(tmp_path, "f", "cpu", {"BN": 1, "BM": np.int64(2)}, "crashed")
    remember_trouble(tmp_path, "f", "cpu", {"BM": (4,)}, "timeout")
    assert troublesome(tmp_path, "f", "cpu") == {'{"BM":2,"BN":1}': "crashed", '{"BM":[4]}': "timeout"}
    assert troublesome(tmp_path, "f", "gpu") == {}
    assert troublesome(tmp_path, "g", "cpu") == {}


def test_crashes_and_timeouts_are_kept_until_a_good_outcome(tmp_path: Path) -> None:
    for outcome in ("ok", "error", "wrong", "pruned"):
        remember_trouble(tmp_path, "f", "cpu", {"BM": 1}, outcome)
    assert list(tmp_path.iterdir()) == []
    for _ in range(3):
        remember_trouble(tmp_path, "f", "cpu", {"BM": 1}, "crashed")
    (path,) = tmp_path.rglob("*.jsonl")
    assert path.read_bytes().count(b"\n") == 1
    remember_trouble(tmp_path, "f", "cpu", {"BM": 1}, "ok")
    assert troublesome(tmp_path, "f", "cpu") == {}
