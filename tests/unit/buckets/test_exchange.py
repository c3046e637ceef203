"""Pushes merge under conditions and pulls merge into the cache, by the rules of a merge."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store_servers import entry, results, web_store

from quarantune.buckets import exchange, objects
from quarantune.buckets.objects import Bucket, StoredObject, StoreError
from quarantune.cache.entry_file import decode_entries, encode
from quarantune.cache.store import Store
from quarantune.values.store_url import StoreURL

URL = StoreURL.parse("s3://bucket/tuned")


class MemoryBucket(Bucket):
    """A bucket in memory whose server keeps to conditions, unless a test changes that."""

    def __init__(self) -> None:
        self._url = URL
        self.content: dict[str, StoredObject] = {}
        self.writes = 0
        self.before_write: Callable[[str], None] = lambda name: None
        self.ignores: set[str] = set()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return sorted(name for name in self.content if not name.startswith("."))

    def read(self, name: str, known: str = "") -> StoredObject | None:
        return self.content.get(name)

    def replace(self, name: str, data: bytes, version: str) -> bool:
        self.before_write(name)
        with self._lock:
            present = self.content[name].version if name in self.content else ""
            if present != version and ("match" if version else "none") not in self.ignores:
                return False
            self.writes += 1
            self.content[name] = StoredObject(data, f'"{self.writes}"')
            return True

    def results(self, name: str) -> object:
        data = self.content[name].data
        assert data is not None
        return decode_entries(data, name)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    made = MemoryBucket()
    real = exchange.open_objects
    monkeypatch.setattr(exchange, "open_objects", lambda url: made if url.is_bucket else real(url))
    monkeypatch.setattr(exchange, "_FIRST_PAUSE_S", 1e-4)
    return made


def cache(directory: Path, **contents: object) -> Store:
    store = Store(directory)
    for name, found in contents.items():
        store.merge(name, found)  # type: ignore[arg-type]
    return store


def test_a_push_adds_to_the_bucket_by_the_rules_of_a_merge(tmp_path: Path, bucket: MemoryBucket) -> None:
    bucket.replace("scale", encode({"cpu": {"old": entry(1), "new": entry(1), "same": entry(1, samples=5)}}), "")
    older, newer = {"created": "2025-01-01T00:00:00Z"}, {"created": "2027-01-01T00:00:00Z"}
    offered = {"old": entry(2, **older), "new": entry(2, **newer), "same": entry(1, samples=9), "more": entry(3)}
    store = cache(tmp_path, scale={"cpu": offered}, double=results("key"))
    for dry_run in (True, False):
        before = dict(bucket.content)
        report = exchange.push(URL, store, dry_run=dry_run)
        assert [key[:2] for key in report.added] == [("double", "key"), ("scale", "more")]
        assert [key.problem_size for key in report.updated] == ["same"]
        assert {pair.key.problem_size: pair.kept["config"]["n"] for pair in report.conflicts} == {"old": 1, "new": 2}
        assert (bucket.content == before) is dry_run
    assert bucket.results("scale") == {
        "cpu": {"old": entry(1), "new": offered["new"], "same": offered["same"], "more": entry(3)}
    }
    writes = bucket.writes
    report = exchange.push(URL, store)
    assert (len(report.unchanged), bucket.writes) == (4, writes), "nothing new, so nothing is written"


def test_only_named_functions_are_pushed(tmp_path: Path, bucket: MemoryBucket) -> None:
    store = cache(tmp_path, **dict.fromkeys(("kernels.scale", "kernels.double", "other"), results("key")))
    exchange.push(URL, store, names=["kernels.s*"])
    assert bucket.names() == ["kernels.scale"]
    with pytest.raises(ValueError, match=r"nothing is cached for 'kernel\.scale'.*Did you mean 'kernels\.scale'"):
        exchange.push(URL, store, names=["kernel.scale"])
    with pytest.raises(ValueError, match="nothing can be pushed to https://host/x: give s3://BUCKET/PREFIX or gs://"):
        exchange.push(StoreURL.parse("https://host/x"), store)


def test_a_result_written_in_between_is_kept(tmp_path: Path, bucket: MemoryBucket) -> None:
    def another(name: str) -> None:
        if name == "scale" and bucket.writes < 4:
            bucket.before_write = lambda name: None
            exchange.push(URL, cache(tmp_path / f"job {bucket.writes}", scale=results(f"key {bucket.writes}")))
            bucket.before_write = another

    bucket.before_write = another
    report = exchange.push(URL, cache(tmp_path / "mine", scale=results("mine")))
    found = bucket.results("scale")
    assert isinstance(found, dict)
    assert len(found["cpu"]) == 3 + 1
    assert [key.problem_size for key in report.added] == ["mine"]


def test_threads_that_push_at_once_lose_nothing(tmp_path: Path, bucket: MemoryBucket) -> None:
    bucket.before_write = lambda name: threading.Event().wait(random.uniform(0, 0.002)) and None
    stores = [cache(tmp_path / str(job), scale=results(f"{job} a", f"{job} b")) for job in range(16)]
    threads = [threading.Thread(target=exchange.push, args=(URL, store)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bucket.results("scale") == results(*sorted(f"{job} {part}" for job in range(16) for part in "ab"))


@pytest.mark.parametrize("ignored", [{"none"}, {"match"}, {"none", "match"}])
def test_a_server_that_ignores_conditions_is_refused(ignored: set[str], tmp_path: Path, bucket: MemoryBucket) -> None:
    bucket.ignores = ignored
    bucket.content["scale"] = StoredObject(encode(results("theirs")), '"7"')
    store = cache(tmp_path, scale=results("mine"))
    for _ in range(2):  # also when an earlier push has left the probe
        with pytest.raises(StoreError, match="s3://bucket/tuned: its server ignores the conditions of writes"):
            exchange.push(URL, store)
    assert bucket.results("scale") == results("theirs")
    assert bucket.names() == ["scale"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"torn", "is not JSON"),
        (encode(results("key")).replace(b'{"n": 1}', b"3"), "its config is 3"),
        (encode(results("key")).replace(b'"schema": 1', b'"schema": 99'), "has schema 99, newer than"),
    ],
)
def test_a_damaged_object_is_neither_replaced_nor_pulled(
    data: bytes, says: str, tmp_path: Path, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.content["scale"] = StoredObject(data, '"7"')
    store = cache(tmp_path, scale=results("mine"))
    for move in (exchange.push, exchange.pull):
        with pytest.raises(StoreError, match=f"s3://bucket/tuned/scale.json'.*{says}.*it is not used; repair or"):
            move(URL, store)
    assert bucket.content["scale"].data == data
    assert store.read("scale") == results("mine")


def test_an_object_that_would_be_too_large_is_not_written(
    tmp_path: Path, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LARGEST_OBJECT_BYTES", 100)
    with pytest.raises(StoreError, match=r"scale\.json would be too large for readers: push to another prefix"):
        exchange.push(URL, cache(tmp_path, scale=results("mine")))
    assert bucket.names() == []


def test_a_push_gives_up_an_object_that_always_changes(
    tmp_path: Path, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_MOST_ATTEMPTS", 3)
    bucket.content[objects._PROBE] = StoredObject(b"{}", '"0"')
    monkeypatch.setattr(bucket, "replace", lambda name, data, version: False)
    with pytest.raises(StoreError, match=r"other jobs have replaced s3://bucket/tuned/scale\.json 3 times: push again"):
        exchange.push(URL, cache(tmp_path, scale=results("mine")))


def test_a_pull_adds_to_the_cache_by_the_rules_of_a_merge(tmp_path: Path, bucket: MemoryBucket) -> None:
    exchange.push(URL, cache(tmp_path / "theirs", scale=results("a", "b", n=2), double=results("a")))
    store = cache(tmp_path / "mine", scale=results("b", "c", created="2027-01-01T00:00:00Z"))
    for dry_run in (True, False):
        report = exchange.pull(URL, store, dry_run=dry_run)
        assert [key[:2] for key in report.added] == [("double", "a"), ("scale", "a")]
        assert [pair.key.problem_size for pair in report.conflicts] == ["b"]
        assert store.names() == (["scale"] if dry_run else ["double", "scale"])
    assert store.get("scale", "cpu", "a") == entry(2)
    assert store.get("scale", "cpu", "b") == entry(1, created="2027-01-01T00:00:00Z")
    with pytest.raises(
        ValueError, match=r"nothing is cached for 'unknown\*' in 's3://bucket/tuned'\. Correct the URL, or give names"
    ):
        exchange.pull(URL, store, names=["unknown*"])
    with pytest.raises(ValueError, match=r"nothing is cached for 'triple' in 's3://bucket/tuned'\. Correct the URL"):
        exchange.pull(URL, store, names=["triple"])


def test_a_web_server_is_pulled_by_its_page_or_by_name(tmp_path: Path) -> None:
    page = b"""<a href="../">up</a> <a href="scale.json">s</a><a href='./double.json?x'>d</a> <a href="i.html">i</a>
    <a href="..%2fetc.json">e</a> <a href="/root.json">r</a> <a href="Odd%20name.json">o</a>"""
    contents = {name: encode(results("key")) for name in ("scale.json", "double.json")}
    with web_store({"": page, **contents}) as server:
        store = Store(tmp_path / "all")
        assert len(exchange.pull(server.url, store).added) == 2
        assert store.names() == ["double", "scale"]
        asked = [path for path, _ in server.requests]
        assert asked == ["/tuned/", "/tuned/double.json", "/tuned/scale.json"], "no other name is asked for"
    with web_store(contents) as server:
        with pytest.raises(ValueError, match=r"nothing is cached for '\*' in 'http://"):
            exchange.pull(server.url, Store(tmp_path / "none"))
        exchange.pull(server.url, Store(tmp_path / "one"), names=["scale"])
        assert Store(tmp_path / "one").names() == ["scale"]
