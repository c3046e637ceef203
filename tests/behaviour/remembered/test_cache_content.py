"""In a shared cache directory, no foreign file blocks a call, is used as a result or is silently overwritten."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import pass_time, python

import quarantune
from quarantune.cache.claims import Claim
from quarantune.cache.entries import problems, prune
from quarantune.cache.entry_file import SCHEMA
from quarantune.cache.journal import Journal
from quarantune.cache.problems import CacheWarning, CacheWriteError
from quarantune.cache.store import Store
from quarantune.values.codec import decode_json
from quarantune.values.trial import Outcome, Trial

ENTRY: dict[str, Any] = {"schema": SCHEMA, "config": {"n": 1}, "time_ms": 0.5, "fingerprint": {}, "versions": {}}
DEEP = '{"a":' * 50_000 + "1" + "}" * 50_000
HUGE = "1" + "0" * 400


def entries(**fields: Any) -> bytes:
    return json.dumps({"cpu": {"k": ENTRY | fields, "good": ENTRY}}).encode()


def put_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def put_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def put_socket(path: Path) -> None:
    import socket

    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


ODD_FILES: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "directory": lambda path: path.mkdir(),
    "full directory": lambda path: (path / "deeper").mkdir(parents=True),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "socket": put_socket,
    "huge": put_sparse,
}
WHOLE: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n",
    "null bytes": b"\x00" * 100,
    "not UTF-8": b'{"cpu": {"k": {"config": "\xff\xfe"}}}',
    "text": b"hello",
    "torn": entries()[:-20],
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "string": b'"x"',
    "device is a list": b'{"cpu": []}',
    "entry is a list": b'{"cpu": {"k": []}}',
    "entry is null": b'{"cpu": {"k": null}}',
    "deep": DEEP.encode(),
    "deep lists": b"[" * 100_000,
    "nested too deeply": ('{"cpu": {"k": ' + "[" * 200 + "]" * 200 + "}}").encode(),
    "NaN": b'{"cpu": {"k": {"time_ms": NaN}}}',
    "infinity": b'{"cpu": {"k": {"time_ms": Infinity}}}',
    "endless number": b'{"cpu": {"k": {"time_ms": ' + b"9" * 5000 + b"}}}",
    "BOM twice": b"\xef\xbb\xbf\xef\xbb\xbf{}",
}
PARTIAL: dict[str, bytes] = {
    "time is huge": entries(time_ms=-1).replace(b'"time_ms": -1', b'"time_ms": ' + HUGE.encode()),
    "time overflows": entries(time_ms=-1).replace(b'"time_ms": -1', b'"time_ms": 1e999'),
    "time of the defaults is huge": entries(default_time_ms=10**400),
    "time of the defaults is text": entries(default_time_ms="slow"),
    "time is negative": entries(time_ms=-5),
    "time is zero": entries(time_ms=0),
    "time is nearly zero": entries(time_ms=1e-300),
    "time is text": entries(time_ms="fast"),
    "time is true": entries(time_ms=True),
    "time is a list": entries(time_ms=[1]),
    "config is a list": entries(config=[]),
    "config is text": entries(config="n=1"),
    "config is null": entries(config=None),
    "fingerprint is text": entries(fingerprint="abc"),
    "fingerprint holds numbers": entries(fingerprint={"code": 3}),
    "versions are a list": entries(versions=["jax"]),
    "versions hold dicts": entries(versions={"jax": {}}),
    "trials are text": entries(trials="ok"),
    "space is a number": entries(space=3),
    "created is a number": entries(created=3),
    "schema is text": entries(schema="1"),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "cache").mkdir()
    return Store(tmp_path / "cache", lock_timeout_s=5)


def aside(store: Store) -> list[Path]:
    return sorted(store.directory.glob("*.corrupt-*"))


@pytest.mark.parametrize("name", sorted((ODD_FILES.keys() - {"huge"}) | WHOLE.keys()))
def test_an_invalid_cache_file_is_set_aside_and_reported_once(store: Store, name: str) -> None:
    path = store.path("f")
    (ODD_FILES[name] if name in ODD_FILES else put_bytes(WHOLE[name]))(path)
    kind = path.lstat().st_mode
    assert store.problems("f")
    with pytest.warns(CacheWarning, match="sets it aside") as told:
        assert [store.get("f", "cpu", "k") for _ in range(2)] == [None, None]
    assert len(told) == 1
    store.put("f", "cpu", "k", ENTRY)
    (kept,) = aside(store)
    assert kept.lstat().st_mode == kind
    assert store.get("f", "cpu", "k") == ENTRY


def test_a_huge_cache_file_stays_and_is_reported_once(store: Store) -> None:
    put_sparse(store.path("f"))
    assert "it is larger than" in "".join(store.problems("f"))
    with pytest.warns(CacheWarning, match="cannot be read") as told:
        assert [store.get("f", "cpu", "k") for _ in range(2)] == [None, None]
    assert len(told) == 1
    store.put("f", "cpu", "k", ENTRY)
    assert store.get("f", "cpu", "k") == ENTRY
    assert store.path("f").stat().st_size == 1 << 40
    assert aside(store) == []


@pytest.mark.parametrize("name", PARTIAL)
def test_an_invalid_entry_is_set_aside_and_the_others_stay(store: Store, name: str) -> None:
    path = store.path("f")
    path.write_bytes(PARTIAL[name])
    assert store.problems("f")
    with pytest.warns(CacheWarning, match="sets it aside") as told:
        assert [store.get("f", "cpu", "k") for _ in range(2)] == [None, None]
    assert len(told) == 1
    assert store.get("f", "cpu", "good") == ENTRY
    store.put("f", "cpu", "k", ENTRY)
    (kept,) = aside(store)
    assert kept.read_bytes() == PARTIAL[name]
    assert store.read("f") == {"cpu": {"k": ENTRY, "good": ENTRY}}


def test_a_file_with_a_byte_order_mark_is_read(store: Store) -> None:
    store.path("f").write_bytes(b"\xef\xbb\xbf" + entries())
    assert store.get("f", "cpu", "k") == ENTRY


# --- journals -----------------------------------------------------------------------------------------------

TRIAL = Trial(config={"n": 1}, outcome=Outcome.OK, time_ms=0.5, samples_ms=(0.5, 0.5)).to_json()


def line(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return b"%08x %b\n" % (zlib.crc32(data), data)


@pytest.mark.parametrize("name", ODD_FILES)
@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")
def test_an_invalid_journal_is_neither_read_nor_written(tmp_path: Path, name: str) -> None:
    journal = Journal(tmp_path, "f", "cpu", "key")
    journal.append({"n": 1})
    (path,) = journal.directory.glob("*.jsonl")
    path.unlink()
    ODD_FILES[name](path)
    assert journal.records() == []
    if name != "huge":
        with pytest.raises(CacheWriteError, match="not recorded"):
            journal.append({"n": 1})
    journal.discard()
    journal.append({"n": 2})
    assert journal.records() == [{"n": 2}]


@pytest.mark.parametrize(
    "text",
    [DEEP, "[" * 100_000, "NaN", '{"n": NaN}', "[]", "3", "null", "{", b"\xff\xfe", "9" * 5000, '{"n": 1'],
    ids=range(11),
)
def test_a_well_formed_line_without_a_record_is_reported_once(tmp_path: Path, text: str | bytes) -> None:
    journal = Journal(tmp_path, "f", "cpu", "key")
    journal.append({"n": 1})
    (path,) = journal.directory.glob("*.jsonl")
    path.write_bytes(line(text) + path.read_bytes())
    with pytest.warns(CacheWarning, match="1 damaged line") as told:
        assert [journal.records() for _ in range(2)] == [[{"n": 1}]] * 2
    assert len(told) == 1


ODD_TRIALS: dict[str, dict[str, Any]] = {
    "time is negative": {"time_ms": -5},
    "time is zero": {"time_ms": 0.0},
    "time is nearly zero": {"time_ms": 1e-300},
    "time is huge": {"time_ms": 10**400},
    "time is text": {"time_ms": "0.1"},
    "time is true": {"time_ms": True},
    "samples are a number": {"samples_ms": 3},
    "samples are texts": {"samples_ms": ["a"]},
    "samples are negative": {"samples_ms": [-1.0, -1.0]},
    "samples are huge": {"samples_ms": [10**400]},
    "config is a list": {"config": ["n"]},
    "outcome is unknown": {"outcome": "splendid"},
    "outcome is a list": {"outcome": []},
    "phase is a number": {"phase": 3},
    "route is a dict": {"route": {}},
    "message is a number": {"message": 3},
    "log is a list": {"log_tail": ["x"]},
    "device is null": {"device": None},
    "clock is unknown": {"clock": "sundial"},
    "clock is a list": {"clock": ["wall"]},
    "compile time is text": {"compile_s": "long"},
    "compile time is huge": {"compile_s": 10**400},
    "memory is text": {"peak_memory_bytes": "much"},
    "ok without a time": {"time_ms": None},
}


@pytest.mark.parametrize("name", ODD_TRIALS)
def test_a_trial_of_wrong_types_is_refused(name: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Trial.from_json(TRIAL | ODD_TRIALS[name])


@pytest.mark.parametrize("odd", [[], None, 3, "x", {}, {"config": {}}])
def test_data_that_does_not_describe_a_trial_is_refused(odd: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Trial.from_json(odd)


# --- claims -------------------------------------------------------------------------------------------------


def claim_of(**fields: Any) -> bytes:
    owner = {"host": "elsewhere", "pid": 1, "started": 0} | fields.pop("owner", {})
    whole = {"token": "t", "host_name": "h", "boot": "b", "locked": False, "worst_case_s": 1.0, "owner": owner}
    return json.dumps(whole | fields).encode()


ODD_CLAIMS: dict[str, Callable[[Path], Any]] = {
    **ODD_FILES,
    "not UTF-8": put_bytes(b"\xff\xfe\xff"),
    "deep": put_bytes(DEEP.encode()),
    "list": put_bytes(b"[]"),
    "number": put_bytes(b"3"),
    "owner is text": put_bytes(b'{"owner": "me"}'),
    "worst case is huge": put_bytes(claim_of(worst_case_s=1e9)),
    "worst case is a huge number": put_bytes(claim_of(worst_case_s=10**400)),
    "worst case is text": put_bytes(claim_of(worst_case_s="long")),
    "worst case is negative": put_bytes(claim_of(worst_case_s=-1)),
    "worst case is NaN": put_bytes(claim_of(worst_case_s=float("nan"))),
    "number of a process is huge": put_bytes(claim_of(owner={"pid": 10**400})),
    "number of a process is negative": put_bytes(claim_of(owner={"pid": -1})),
    "number of a process is text": put_bytes(claim_of(owner={"pid": "1"})),
    "start is text": put_bytes(claim_of(owner={"started": []})),
    "host is a list": put_bytes(claim_of(owner={"host": []})),
    "token is null": put_bytes(claim_of(token=None)),
    "name holds escapes": put_bytes(claim_of(host_name="\x1b[2J")),
}


@pytest.mark.parametrize("name", ODD_CLAIMS)
@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")
def test_an_invalid_claim_delays_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    claim = Claim(tmp_path, "f", "cpu", "key")
    claim._path.parent.mkdir()
    ODD_CLAIMS[name](claim._path)
    assert claim.holder() is None
    assert not claim.try_acquire()
    pass_time(monkeypatch, 3)
    assert claim.try_acquire()
    assert claim.refresh()
    claim.release()
    assert claim.try_acquire()
    claim.release()


def test_a_file_that_was_never_a_claim_is_set_aside_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim(tmp_path, "f", "cpu", "key")
    claim._path.mkdir(parents=True)
    (claim._path / "kept").write_text("kept")
    assert not claim.try_acquire()
    pass_time(monkeypatch, 3)
    with pytest.warns(CacheWarning, match="not a claim of this program"):
        assert claim.try_acquire()
    claim.release()
    (kept,) = claim._path.parent.glob("*.corrupt-*")
    assert (kept / "kept").read_text() == "kept"


def test_an_odd_claim_set_aside_is_a_problem_until_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim(tmp_path, "f", "cpu", "key")
    claim._path.parent.mkdir()
    claim._path.write_bytes(b"x" * 100_000)
    assert not claim.try_acquire()
    pass_time(monkeypatch, 3)
    with pytest.warns(CacheWarning, match="not a claim of this program"), claim:
        assert claim.try_acquire()
    (kept,) = claim._path.parent.glob("*.corrupt-*")
    store = Store(tmp_path)
    assert [problem for problem in problems(store) if "set aside" in problem] == [
        f"{str(kept)!r} was damaged and set aside: look at it, or delete it"
    ]
    assert prune(store) == ([], [kept])
    assert problems(store) == []


@pytest.mark.parametrize("when", [1.0, 4e9])
def test_a_silent_claim_from_another_time_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: float
) -> None:
    claim = Claim(tmp_path, "f", "cpu", "key")
    claim._path.parent.mkdir()
    claim._path.write_bytes(claim_of())
    os.utime(claim._path, (when, when))
    assert not claim.try_acquire()
    pass_time(monkeypatch, 4)
    assert claim.try_acquire()
    claim.release()


# --- calls on damaged files ---------------------------------------------------------------------------------


def test_a_sweep_measures_trials_with_wrong_types_again(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_NUM_WORKERS", "2")

    def times(x: Any, n: int = 1) -> Any:
        return x * n

    tuned = quarantune.autotune({"n": [1, 2]}, rep=2, ref_fn=None)(jax.jit(times, static_argnames=["n"]))
    x = jnp.ones(3)
    tuned.tune(x)
    (path,) = cache_dir.glob("*.trials/*.jsonl")
    (entry,) = cache_dir.glob("*.json")
    records = [json.loads(record.partition(b" ")[2]) for record in path.read_bytes().splitlines()]
    forged = [record | {"trial": record["trial"] | {"time_ms": -5.0}} for record in records]
    deep = dict(records[0], trial=dict(records[0]["trial"], compile_s="x"))
    path.write_bytes(b"".join(line(json.dumps(record)) for record in [*forged, deep, {"trial": 3}, {}]))
    entry.unlink()
    again = quarantune.autotune({"n": [1, 2]}, rep=2, ref_fn=None)(jax.jit(times, static_argnames=["n"]))
    assert again.lookup(x) is None
    with pytest.warns(CacheWarning, match="5 records of the journal"):
        again(x)
    stored = json.loads(entry.read_text())
    ((found,),) = [list(by_key.values()) for by_key in stored.values()]
    assert found["time_ms"] > 0
    assert sum(found["trials"].values()) == 2


@pytest.mark.parametrize(
    "odd",
    [
        {"search": {"budget": 10**309, "seen": 10**309}},
        {"key_values": {"x": {"shape": [10**309, *[10**18] * 30], "dtype": "f"}}},
    ],
)
def test_numbers_too_large_for_a_float_break_nothing(cache_dir: Path, tmp_path: Path, odd: dict[str, Any]) -> None:
    def tuned() -> quarantune.Autotuned:
        wrap = quarantune.autotune({"n": [1, 2]}, rep=2, name="f", search="random", max_trials=2)
        return wrap(jax.jit(lambda x, n=1: x * n / n, static_argnames=["n"]))

    x = jnp.ones(3)
    tuned()(x)
    (path,) = cache_dir.glob("*.json")
    ((device, entries_of),) = json.loads(path.read_text()).items()
    path.write_text(json.dumps({device: {key: entry | odd for key, entry in entries_of.items()}}))
    assert tuned().lookup(x) is not None
    result = tuned().result(((x,), {}))
    assert result.from_cache
    result.report(tmp_path / "report.html")
    from quarantune.cli.entry_point import main

    assert main(["cache", "list"]) == 0
    assert main(["report", "f", "-o", str(tmp_path / "again.html")]) == 0


# --- several users ------------------------------------------------------------------------------------------

TWO_USERS = """
import os, sys
from pathlib import Path
from quarantune.cache.store import Store
from quarantune.cache.claims import Claim
from quarantune.cache.journal import Journal
place = Path(sys.argv[1])
os.umask(0o022)

def use(key):
    Store(place).put("f", "cpu", key, {"config": {"n": 1}})
    Journal(place, "f", "cpu", "one problem").append({"key": key})
    with Claim(place, "f", "cpu", "one problem") as claim:
        assert claim.try_acquire()

use("one")
if not (child := os.fork()):
    try:
        os.setgid(65534)
        os.setuid(65534)
        use("two")
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
use("three")
print(sorted(Store(place).read("f")["cpu"]), len(Journal(place, "f", "cpu", "one problem").records()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_second_user_of_a_shared_directory_saves_results() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        assert python("-c", TWO_USERS, place).strip() == "['one', 'three', 'two'] 3"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_sticky_directorys_owner_saves_despite_foreign_locks(store: Store) -> None:
    store.put("f", "cpu", "k", ENTRY)
    store.directory.chmod(0o1777)
    for path in store.directory.iterdir():
        os.chown(path, 65534, 65534)
    store.put("f", "cpu", "k2", ENTRY)
    assert set(store.read("f")["cpu"]) == {"k", "k2"}


def test_files_of_a_private_directory_stay_private(store: Store) -> None:
    before = os.umask(0o022)
    try:
        store.put("f", "cpu", "k", ENTRY)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in store.directory.iterdir()} == {0o644}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_reading_a_large_file_leaves_the_garbage_collector_alone(is_enabled: bool) -> None:
    large = json.dumps([{"entry": {}} for _ in range(100_000)]).encode()
    rounds: list[str] = []

    def note(phase: str, about: dict[str, int]) -> None:
        rounds.append(phase)

    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    gc.callbacks.append(note)
    try:
        value = decode_json(large)
        seen = len(rounds)
        with pytest.raises(ValueError, match="NaN is not JSON"):
            decode_json(large[:-1] + b", NaN]")
        assert gc.isenabled() is is_enabled
    finally:
        gc.callbacks.remove(note)
        (gc.enable if was_enabled else gc.disable)()
    assert len(value) == 100_000
    assert seen <= 2  # start and end of one collection, once enabled again
