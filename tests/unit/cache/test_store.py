"""The store loses no saved entry to crashes, damage, full disks or other writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import pass_time, python

from quarantune.api.tuning_cache import TuningCache
from quarantune.cache.claims import Claim
from quarantune.cache.entry_file import SCHEMA
from quarantune.cache.journal import Journal
from quarantune.cache.owner import Owner
from quarantune.cache.problems import CacheWarning, CacheWriteError
from quarantune.cache.store import Store
from quarantune.host import shared_files

ENTRY = {"config": {"BM": 32}, "time_ms": 0.5}
STORED = {"schema": SCHEMA, **ENTRY}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", lock_timeout_s=20)


def announcement(store: Store, *, host: str, pid: int, started: int = 1) -> Path:
    """Makes the file that announces another writer."""
    store.directory.mkdir(exist_ok=True)
    path = store.directory / f".f.json.{host}-{pid}-{started}-0.tmp"
    path.write_text("half of an en")
    return path


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_another_store_of_the_directory_gets_a_saved_entry(store: Store) -> None:
    store.put("f", "cpu", "k", ENTRY)
    store.put("f", "cpu", "k2", {"config": {"BM": 64}})
    store.put("f", "gpu", "k", {"config": {"BM": 128}})
    other = Store(store.directory)
    assert other.get("f", "cpu", "k") == STORED
    assert other.get("f", "gpu", "k") == {"schema": SCHEMA, "config": {"BM": 128}}
    assert other.get("f", "cpu", "absent") is None
    assert other.get("f", "tpu", "k") is None
    assert other.get("g", "cpu", "k") is None


def test_a_file_maps_devices_and_keys_to_one_entry_per_line(store: Store) -> None:
    store.put("f", "cpu", "k1", ENTRY)
    store.put("f", "cpu", "k2", ENTRY)
    text = store.path("f").read_text()
    assert json.loads(text) == {"cpu": {"k1": STORED, "k2": STORED}}
    assert sum("config" in line for line in text.splitlines()) == 2


def test_a_later_put_replaces_an_earlier_one(store: Store) -> None:
    store.put("f", "cpu", "k", ENTRY)
    store.put("f", "cpu", "k", {"config": {"BM": 64}})
    assert store.get("f", "cpu", "k") == {"schema": SCHEMA, "config": {"BM": 64}}


def test_delete_removes_one_entry_and_says_whether_it_was_there(store: Store) -> None:
    store.put("f", "cpu", "k", ENTRY)
    store.put("f", "cpu", "k2", ENTRY)
    assert store.delete("f", "cpu", "k")
    assert not store.delete("f", "cpu", "k")
    assert store.read("f") == {"cpu": {"k2": STORED}}
    assert store.delete("f", "cpu", "k2")
    assert store.read("f") == {}


def test_merge_keeps_the_entry_that_prefer_returns(store: Store) -> None:
    store.put("f", "cpu", "a", ENTRY | {"n": 1})
    store.merge(
        "f",
        {"cpu": {"a": ENTRY | {"n": 2}, "b": ENTRY | {"n": 3}}},
        prefer=lambda device, key, present, offered: present,
    )
    found = store.read("f")["cpu"]
    assert {key: entry["n"] for key, entry in found.items()} == {"a": 1, "b": 3}


def test_clear_removes_the_file_of_one_function(store: Store) -> None:
    store.put("f", "cpu", "k", ENTRY)
    store.put("g", "cpu", "k", ENTRY)
    store.clear("f")
    store.clear("never there")
    assert store.names() == ["g"]


def test_names_lists_the_files_names(store: Store) -> None:
    assert store.names() == []
    for name in ("m.f", "m.make.<locals>.f", "../up", "M.f"):
        store.put(name, "cpu", "k", ENTRY)
    assert len(store.names()) == 4
    assert all(store.get(name, "cpu", "k") == STORED for name in store.names())
    assert {path.parent for path in store.directory.parent.rglob("*.json")} == {store.directory}


def test_reading_leaves_no_trace(store: Store) -> None:
    assert store.get("f", "cpu", "k") is None
    assert not store.directory.exists()
    store.put("f", "cpu", "k", ENTRY)
    before = sorted(os.listdir(store.directory))
    assert store.get("f", "cpu", "k") == STORED
    assert sorted(os.listdir(store.directory)) == before == [".f.json.lock", "f.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), [-math.inf]])
def test_no_nan_or_infinity_reaches_the_file(store: Store, value: Any) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        store.put("f", "cpu", "k", {"time_ms": value})
    assert not store.path("f").exists()


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"config": 3}, "its config is 3, not a dict"),
        ({"config": {"n": functools.reduce(lambda inner, _: [inner], range(150), 1)}}, "nested more than 100 deep"),
        ({"config": {"n": 1}, "time_ms": -1.0}, "its time_ms is -1.0, not a time"),
        ({"config": {"n": 1}, "schema": SCHEMA + 1}, "newer than"),
    ],
)
def test_an_entry_no_reader_accepts_is_refused_alone(store: Store, entry: dict[str, Any], fault: str) -> None:
    store.put("f", "cpu", "k", ENTRY)
    with pytest.raises(CacheWriteError, match=fault):
        store.put("f", "cpu", "k2", entry)
    assert store.read("f") == {"cpu": {"k": STORED}}
    assert sorted(os.listdir(store.directory)) == [".f.json.lock", "f.json"]


def test_numpy_values_are_stored_as_plain_ones(store: Store) -> None:
    store.put("f", "cpu", "k", {"config": {"BM": np.int32(8)}, "shape": (1, np.int64(2))})
    assert store.get("f", "cpu", "k") == {"schema": SCHEMA, "config": {"BM": 8}, "shape": [1, 2]}


DAMAGED = {
    "empty": b"",
    "blank": b"\n",
    "torn": b'{"cpu": {"k": {"config": {"BM": 3',
    "not JSON": b"hello",
    "not UTF-8": b"\xff\xfe\x00",
    "NaN": b'{"cpu": {"k": {"time_ms": NaN}}}',
    "a list": b"[1, 2]",
    "null": b"null",
    "a foreign dict": b'{"version": 1, "results": []}',
    "foreign entries": b'{"cpu": {"k": 3}}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_a_miss_and_later_set_aside(store: Store, content: bytes) -> None:
    store.directory.mkdir()
    store.path("f").write_bytes(content)
    with pytest.warns(CacheWarning, match="next write sets it aside as '.*f.json.corrupt-<time>'") as caught:
        assert [store.get("f", "cpu", "k") for _ in range(2)] == [None, None]
    assert len(caught) == 1
    assert store.path("f").read_bytes() == content, "a look-up changes nothing"
    store.put("f", "cpu", "k", ENTRY)
    (aside,) = store.directory.glob("f.json.corrupt-*")
    assert store.get("f", "cpu", "k") == STORED
    assert aside.read_bytes() == content


def test_a_write_first_sets_a_damaged_file_aside(store: Store) -> None:
    store.directory.mkdir()
    for number, content in enumerate((b"{", b"[", b"{")):
        store.path("f").write_bytes(content)
        with pytest.warns(CacheWarning, match="set aside") if number < 2 else contextlib.nullcontext():
            store.put("f", "cpu", f"k{number}", ENTRY)
        assert list(store.read("f")["cpu"]) == [f"k{number}"]
    assert sorted(path.read_bytes() for path in store.directory.glob("f.json.corrupt-*")) == [
        b"[",
        b"{",
        b"{",
    ]


NEWER = json.dumps({"cpu": {"a": STORED, "k": {"schema": SCHEMA + 1, "config": {"BM": 1}}}})


def test_a_file_of_a_newer_schema_is_reported_and_kept(store: Store) -> None:
    store.directory.mkdir()
    store.path("f").write_text(NEWER)
    with pytest.warns(CacheWarning, match=f"schema {SCHEMA + 1}, newer than {SCHEMA}.*upgrade"):
        assert store.get("f", "cpu", "a") is None
    assert store.get("f", "cpu", "a") is None
    with pytest.raises(CacheWriteError, match="upgrade"):
        store.put("f", "cpu", "k", ENTRY)
    with pytest.raises(CacheWriteError, match="upgrade"):
        store.clear("f")
    assert "newer" in "".join(store.problems("f"))
    assert store.path("f").read_text() == NEWER


def test_an_unreadable_file_is_a_miss_and_never_overwritten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("f", "cpu", "k", ENTRY)
    written, real = store.path("f").read_bytes(), os.open

    def failing(path: Any, *how: Any, **where: Any) -> int:
        if store.path("f").name in Path(path).name and how[0] & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *how, **where)

    monkeypatch.setattr(os, "open", failing)
    with pytest.warns(CacheWarning, match="cannot be read") as caught:
        assert [store.get("f", "cpu", "k") for _ in range(2)] == [None, None]
    assert len(caught) == 1
    with pytest.raises(CacheWriteError, match="QUARANTUNE_CACHE_DIR"):
        store.put("f", "cpu", "k", ENTRY)
    monkeypatch.undo()
    assert store.path("f").read_bytes() == written


def test_a_lock_held_by_another_for_too_long_is_a_typed_error(store: Store) -> None:
    store.put("f", "cpu", "k", ENTRY)
    with open(store.directory / ".f.json.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CacheWriteError, match=r"held by others for 0.05 s.*QUARANTUNE_LOCK_TIMEOUT"):
            Store(store.directory, lock_timeout_s=0.05).put("f", "cpu", "k2", ENTRY)
        assert store.get("f", "cpu", "k") == STORED
    store.put("f", "cpu", "k2", ENTRY)


def test_a_dead_writer_delays_nobody_and_leaves_no_file(store: Store) -> None:
    stale = announcement(store, host=Owner.this_process().host, pid=dead_pid())
    store.put("f", "cpu", "k", ENTRY)
    assert not stale.exists()


def test_a_reused_process_number_is_not_the_dead_writer(store: Store) -> None:
    stale = announcement(store, host=Owner.this_process().host, pid=os.getpid(), started=1)
    store.put("f", "cpu", "k", ENTRY)
    assert not stale.exists()


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_another_hosts_writer_is_removed_after_half_a_minute(
    store: Store, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    other = announcement(store, host="0123456789ab", pid=1)
    os.utime(other, (there := time.time() + 3600 * hours, there))  # the clocks of hosts may differ
    with pytest.raises(CacheWriteError, match=r"kept .* busy for 0.05 s"):
        Store(store.directory, lock_timeout_s=0.05).put("f", "cpu", "k", ENTRY)
    assert other.exists()
    pass_time(monkeypatch, 31)
    store.put("f", "cpu", "k", ENTRY)
    assert not other.exists()


def test_a_live_writer_of_this_host_is_waited_for(store: Store) -> None:
    me = Owner.this_process()
    other = announcement(store, host=me.host, pid=me.pid, started=me.started)
    threading.Timer(0.2, other.unlink).start()
    store.put("f", "cpu", "k", ENTRY)
    assert store.get("f", "cpu", "k") == STORED
    assert not other.exists()


def test_a_writer_taken_for_dead_starts_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rival = Store(store.directory, lock_timeout_s=20)
    real_fsync, slept = os.fsync, []

    def slow_fsync(fd: int) -> None:
        real_fsync(fd)
        if not slept:
            slept.append(True)
            # Now a writer without working locks withdraws our announcement and writes.
            monkeypatch.setattr("quarantune.cache.store.side_lock", lambda *_: contextlib.nullcontext())
            (announced,) = store.directory.glob(".f.json.*.tmp")
            announced.unlink()
            rival.put("f", "cpu", "rival", ENTRY)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    store.put("f", "cpu", "ours", ENTRY)
    assert store.read("f") == {"cpu": {"rival": STORED, "ours": STORED}}


def test_a_writer_withdrawn_before_its_look_starts_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, withdrawn = os.close, []

    def close(fd: int) -> None:
        real(fd)
        for announced in [] if withdrawn else store.directory.glob(".f.json.*.tmp"):
            withdrawn.append(announced)
            announced.unlink()

    monkeypatch.setattr(os, "close", close)
    store.put("f", "cpu", "k", ENTRY)
    assert len(withdrawn) == 1
    assert store.read("f") == {"cpu": {"k": STORED}}


def test_a_write_that_was_overwritten_is_repeated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("f", "cpu", "old", ENTRY)
    stale_copy, real_replace, overwritten = store.path("f").read_bytes(), os.replace, []

    def replace(source: Any, target: Any, **where: Any) -> None:
        real_replace(source, target, **where)
        if not overwritten:
            overwritten.append(True)
            store.path("f").write_bytes(stale_copy)

    monkeypatch.setattr(os, "replace", replace)
    store.put("f", "cpu", "new", ENTRY)
    assert overwritten
    assert store.read("f") == {"cpu": {"old": STORED, "new": STORED}}


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EBUSY, errno.EIO, errno.EROFS, errno.ESTALE, errno.EDQUOT])
def test_any_disk_error_is_a_typed_error_and_the_old_file_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    store.put("f", "cpu", "k", ENTRY)
    real = getattr(os, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if name == "open" and ".tmp" not in str(args[0]):
            return real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        if name == "write":
            patch.setattr("quarantune.cache.store.os.fdopen", fail)
        with pytest.raises(CacheWriteError, match=os.strerror(code)):
            store.put("f", "cpu", "k2", ENTRY)
    assert store.read("f") == {"cpu": {"k": STORED}}
    assert list(store.directory.glob(".f.json.*.tmp")) == []


ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "quota",
    errno.EROFS: "mount",
    errno.ENAMETOOLONG: "shorter path",
    errno.EMFILE: "ulimit -n",
    errno.EFBIG: "ulimit -f",
    errno.EIO: "see whether its disk works",
    errno.EACCES: "make the directory writable",
}


@pytest.mark.parametrize("code", ADVICE)
def test_the_advice_fits_the_error(store: Store, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store.put("f", "cpu", "k", ENTRY)
    real = os.open

    def fail(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT or Path(path).name == ".f.json.lock":
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(os, "access", lambda *_: False)
    for work in (
        lambda: store.put("f", "cpu", "k2", ENTRY),
        lambda: Claim(store.directory, "g", "cpu", "k").try_acquire(),
        lambda: Journal(store.directory, "g", "cpu", "k").append({"n": 1}),
        lambda: TuningCache(store.directory).export(store.directory.with_name("table")),
    ):
        with pytest.raises(CacheWriteError) as caught:
            work()
        assert f"{os.strerror(code)})" in str(caught.value)
        assert ADVICE[code] in str(caught.value)
        assert ("writable" in str(caught.value)) == (code == errno.EACCES)


@contextlib.contextmanager
def mounted_tmpfs(directory: Path, options: str) -> Iterator[Callable[[str], None]]:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small filesystem is not allowed here")
    try:
        yield (lambda new: subprocess.run(["mount", "-o", f"remount,{new}", str(directory)], check=True) and None)
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_full_disk_keeps_the_old_file_and_names_the_result(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "size=64k"):
        store = Store(tmp_path / "small", lock_timeout_s=5)
        store.put("f", "cpu", "k", ENTRY)
        with pytest.raises(CacheWriteError, match=r"nothing was saved in .*f\.json.*No space left.*: make room on"):
            store.put("f", "cpu", "big", {"config": {"x": "x" * 100_000}})
        assert store.read("f") == {"cpu": {"k": STORED}}
        store.put("f", "cpu", "k2", ENTRY)
        assert set(store.read("f")["cpu"]) == {"k", "k2"}
        journal = Journal(store.directory, "f", "cpu", "k")
        with pytest.raises(CacheWriteError, match=r"not recorded in .*only \d+ bytes could be written.*: make room on"):
            journal.append({"x": "x" * 100_000})
        assert journal.records() == []


def test_a_read_only_filesystem_is_read_and_not_written(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "frozen", "size=1m") as remount:
        store = Store(tmp_path / "frozen", lock_timeout_s=5)
        store.put("f", "cpu", "k", ENTRY)
        store.path("damaged").write_text("{")
        remount("ro")
        assert store.get("f", "cpu", "k") == STORED
        with pytest.raises(CacheWriteError, match="Read-only file system"):
            store.put("f", "cpu", "k", ENTRY)
        with pytest.warns(CacheWarning, match="is not JSON"):
            assert store.read("damaged") == {}


def test_a_file_size_limit_raises_and_keeps_the_old_file(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from quarantune.cache.problems import CacheWriteError
from quarantune.cache.store import Store
store = Store(Path(sys.argv[1]))
store.put("f", "cpu", "k", {"config": {}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    store.put("f", "cpu", "big", {"config": {"x": "x" * 10_000}})
except CacheWriteError as error:
    print(error, list(store.read("f")["cpu"]), len(list(store.directory.glob(".*.tmp"))))
"""
    said = python("-c", script, tmp_path)
    assert "File too large" in said
    assert said.endswith("['k'] 0\n")


def test_a_file_in_the_directorys_place_misses_and_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for store in (Store(tmp_path / "file"), Store(tmp_path / "file" / "below")):
        assert store.get("f", "cpu", "k") is None
        assert store.names() == []
        with pytest.raises(CacheWriteError, match="nothing was saved"):
            store.put("f", "cpu", "k", ENTRY)


def test_a_directory_that_vanished_is_made_again(store: Store) -> None:
    store.put("f", "cpu", "k", ENTRY)
    store.directory.rename(store.directory.with_name("gone"))
    assert store.get("f", "cpu", "k") is None
    store.put("f", "cpu", "k2", ENTRY)
    assert store.read("f") == {"cpu": {"k2": STORED}}


def test_a_directory_that_vanishes_in_mid_write_is_made_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("f", "cpu", "k", ENTRY)
    gone, real = store.directory.with_name("gone"), os.fsync

    def vanish(fd: int) -> None:
        real(fd)
        if not gone.exists():
            store.directory.rename(gone)

    monkeypatch.setattr(os, "fsync", vanish)
    store.put("f", "cpu", "k2", ENTRY)
    assert store.read("f") == {"cpu": {"k2": STORED}}
    assert not list(gone.glob(".*.tmp"))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_without_flock_writers_keep_apart_by_their_announcements(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_flock(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    store.put("f", "cpu", "k", ENTRY)
    other = announcement(store, host="0123456789ab", pid=1)
    with pytest.raises(CacheWriteError, match=r"kept .* busy"):
        Store(store.directory, lock_timeout_s=0.05).put("f", "cpu", "k2", ENTRY)
    other.unlink()
    store.put("f", "cpu", "k2", ENTRY)
    assert set(store.read("f")["cpu"]) == {"k", "k2"}
    assert sorted(os.listdir(store.directory)) == [".f.json.lock", "f.json"]


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("is_newer", [False, True])
def test_a_file_cut_under_its_name_is_not_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch, has_links: bool, is_newer: bool
) -> None:
    # A network filesystem may give the size of a file that another host has already replaced.
    store.put("f", "cpu", "k", ENTRY)
    if is_newer:
        store.path("f").write_text(NEWER)
    before, real = store.path("f").read_bytes(), shared_files._content

    def cut(fd: int, name: str, largest_bytes: int) -> bytes:
        content = real(fd, name, largest_bytes)
        return content[:-9] if Path(name).name == "f.json" and content == before else content

    def no_links(*names: Any, **where: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(shared_files, "_content", cut)
        if not has_links:
            patch.setattr(os, "link", no_links)
        with pytest.raises(CacheWriteError, match="newer") if is_newer else contextlib.nullcontext():
            store.put("f", "cpu", "k2", ENTRY)
    if is_newer:
        assert store.path("f").read_bytes() == before
    else:
        assert set(store.read("f")["cpu"]) == {"k", "k2"}
    assert list(store.directory.glob("*.corrupt-*")) == []


def test_threads_of_one_process_lose_nothing(store: Store) -> None:
    def write(thread: int) -> None:
        for number in range(10):
            store.put("f", "cpu", f"{thread}/{number}", ENTRY)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.read("f")["cpu"]) == 40


def test_a_stale_network_handle_is_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("f", "cpu", "k", ENTRY)
    real, failures = os.open, [errno.ESTALE]

    def stale_once(path: Any, *how: Any, **where: Any) -> int:
        if failures and Path(path).name == store.path("f").name:
            raise OSError(failures.pop(), "stale")
        return real(path, *how, **where)

    monkeypatch.setattr(os, "open", stale_once)
    assert store.get("f", "cpu", "k") == STORED
    assert failures == []


def test_only_a_writer_imports_filelock(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
import quarantune
from quarantune.cache.store import Store
store = Store(Path(sys.argv[1]))
store.get("f", "cpu", "k")
print("filelock" in sys.modules, end=" ")
store.put("f", "cpu", "k", {"config": {}})
print("filelock" in sys.modules)
"""
    assert python("-c", script, tmp_path) == "False True\n"


def test_a_look_up_takes_no_lock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("f", "cpu", "k", ENTRY)
    monkeypatch.setattr(fcntl, "flock", None)
    assert store.get("f", "cpu", "k") == STORED
    assert store.get("f", "cpu", "absent") is None


def test_a_hundred_writes_leave_no_descriptor_and_no_file_behind(store: Store) -> None:
    store.put("f", "cpu", "k", ENTRY)
    before = sorted(os.listdir("/proc/self/fd")), sorted(os.listdir(store.directory))
    for number in range(100):
        store.put("f", "cpu", "k", ENTRY | {"number": number})
    assert (sorted(os.listdir("/proc/self/fd")), sorted(os.listdir(store.directory))) == before


def test_a_warning_made_an_error_leaves_the_store_usable(store: Store) -> None:
    store.directory.mkdir()
    store.path("f").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CacheWarning):
            store.get("f", "cpu", "k")
        store.put("f", "cpu", "k", ENTRY)
    assert store.get("f", "cpu", "k") == STORED


def test_a_lock_timeout_of_zero_saves_if_nobody_else_writes(tmp_path: Path) -> None:
    store = Store(tmp_path, lock_timeout_s=0)
    store.put("f", "cpu", "k", ENTRY)
    assert store.get("f", "cpu", "k") is not None
