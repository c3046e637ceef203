"""Objects are read, listed and replaced on real servers: S3, Google Cloud Storage and the web."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import PROGRAMS, python, run_python
from store_servers import NEEDED, google_store, new_job, results, s3_store

from quarantune.buckets import orders
from quarantune.buckets.objects import Bucket, StoredObject, StoreError, open_objects
from quarantune.cache.entry_file import decode_entries, encode
from quarantune.cache.store import Store
from quarantune.cli import entry_point
from quarantune.values.store_url import StoreURL

pytestmark = pytest.mark.clients


@pytest.fixture(params=[s3_store, google_store], ids=["s3", "gs"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreURL]:
    """Runs a server with a new bucket, and returns its URL."""
    fsspec = pytest.importorskip("fsspec", reason=NEEDED)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})  # other processes read it from `variables`
    with request.param(tmp_path) as (url, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield url


def opened(url: StoreURL) -> Bucket:
    bucket = open_objects(url)
    assert isinstance(bucket, Bucket)
    return bucket


def missing(url: StoreURL) -> StoreURL:
    return StoreURL.parse(str(url).replace("results-", "missing-"))


def test_an_object_is_replaced_only_in_the_version_that_was_read(url: StoreURL) -> None:
    bucket = opened(url)
    assert bucket.read("scale") is None
    assert bucket.names() == []
    for _ in range(2):
        bucket.check_conditions()
    assert [bucket.replace("scale", data, "") for data in (b"one", b"two")] == [True, False]
    found = bucket.read("scale")
    assert found is not None
    assert found.data == b"one"
    assert bucket.read("scale", found.version) == StoredObject(None, found.version)
    assert not bucket.replace("scale", b"three", bucket.never_a_version)
    assert [bucket.replace("scale", data, found.version) for data in (b"four", b"five")] == [True, False]
    changed = open_objects(url).read("scale", found.version)
    assert changed is not None
    assert changed.data == b"four"
    assert bucket.replace("gone", b"six", found.version) is False, "an object that somebody has removed"
    assert bucket.names() == ["scale"], "without the probe"


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_large_objects_are_of_one_version(url: StoreURL) -> None:
    bucket, data = opened(url), os.urandom(12 << 20)
    assert bucket.replace("scale", data, "")
    found = bucket.read("scale")
    assert found is not None
    assert found.data == data


def test_a_bucket_that_does_not_exist_takes_nothing(url: StoreURL) -> None:
    with pytest.raises(StoreError, match="FileNotFoundError: "):
        opened(missing(url)).replace("scale", b"one", "")


def test_reading_a_bucket_that_does_not_exist_says_so(url: StoreURL) -> None:
    for ask in (lambda bucket: bucket.read("scale"), lambda bucket: bucket.names()):
        with pytest.raises(StoreError, match=f"{missing(url)}: .*bucket does not exist"):
            ask(opened(missing(url)))


def test_a_bucket_is_a_layer(url: StoreURL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "FETCHING_S", 60.0)
    new_job()
    assert opened(url).replace("scale", encode(results("key")), "")
    assert orders.layer(url, "scale", tmp_path).read("scale") == results("key")
    assert orders.layer(url, "double", tmp_path).read("double") == {}
    new_job()


def test_commands_push_and_pull(url: StoreURL, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: object) -> str:
        assert entry_point.main(["cache", *map(str, words)]) == 0
        return capsys.readouterr().out

    Store(tmp_path / "mine").merge("kernels.scale", results("a", "b"))
    Store(tmp_path / "mine").merge("other", results("a"))
    words = "push", url, "--cache-dir", tmp_path / "mine", "--only", "kernels.*"
    assert run(*words, "--dry-run").splitlines() == [
        f"{url}: 2 added, 0 updated, 0 unchanged, 0 in conflict",
        "nothing was written (--dry-run)",
    ]
    assert run(*words) == f"{url}: 2 added, 0 updated, 0 unchanged, 0 in conflict\n"
    assert '"dry_run": false' in run(*words, "--json")
    assert run("pull", url, "--cache-dir", tmp_path / "theirs").startswith(f"{url}: 2 added")
    assert Store(tmp_path / "theirs").read("kernels.scale") == results("a", "b")
    assert Store(tmp_path / "theirs").names() == ["kernels.scale"]


JOB = """
import quarantune
from quarantune.buckets import orders

orders.PUSHING_S = 200.0  # more than a busy machine needs
quarantune.AutoTuner(lambda x, n: x, [{"n": 1}, {"n": 2}], warmup=0, rep=1, name="plain").run(1.0)
print("done")
"""


def run_job(url: StoreURL, directory: Path) -> str:
    """Runs a job that tunes, and returns its stderr."""
    changes = {"QUARANTUNE_PUSH": str(url), "QUARANTUNE_CACHE_DIR": str(directory), "QUARANTUNE_ISOLATION": "none"}
    done = run_python("-c", JOB, **changes)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    return done.stderr


@pytest.mark.parametrize("url", [s3_store], ids=["s3"], indirect=True)
def test_a_job_pushes_its_results_when_it_ends(url: StoreURL, tmp_path: Path) -> None:
    Store(tmp_path / "cache").merge("another", results("key"))
    assert "not pushed" not in run_job(url, tmp_path / "cache")
    assert opened(url).names() == ["plain"], "results of this job only"
    found = opened(url).read("plain")
    assert found is not None
    assert found.data == encode(Store(tmp_path / "cache").read("plain"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("url", [s3_store], ids=["s3"], indirect=True)
def test_a_push_that_fails_is_a_line_in_the_log(url: StoreURL, tmp_path: Path) -> None:
    said = run_job(missing(url), tmp_path / "more")
    assert f"{missing(url)}: FileNotFoundError: The specified bucket does not exist: results stay in" in said
    assert f"push them with `quarantune cache push {missing(url)}`" in said
    assert Store(tmp_path / "more").names() == ["plain"]


def test_nothing_is_pushed_to_a_server_that_ignores_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with s3_store(tmp_path, keeps_conditions=False) as (url, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        Store(tmp_path / "mine").merge("scale", results("mine"))
        assert entry_point.main(["cache", "push", str(url), "--cache-dir", str(tmp_path / "mine")]) == 1
        assert f"{url}: its server ignores the conditions of writes" in capsys.readouterr().err
        assert opened(url).names() == []


@pytest.mark.parametrize(
    ("jobs", "killed"),
    [pytest.param(8, 4), pytest.param(50, 30, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_jobs_that_push_at_once_lose_nothing(
    jobs: int, killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in range(jobs):
        Store(tmp_path / str(job)).merge("scale", results(*(f"{job} {part}" for part in "abcd"), n=job))
    with s3_store(tmp_path) as (url, variables):
        done = json.loads(python(PROGRAMS / "pushers.py", url, tmp_path, jobs, killed, 7, **variables))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found = opened(url).read("scale")
    assert found is not None
    entries = decode_entries(found.data or b"", "scale")["cpu"]  # nothing is torn
    assert done["failed"] == done["killed"], "nobody but the killed has failed"
    assert len(done["done"]) >= jobs - killed
    for job in range(jobs):
        mine = {key: entry for key, entry in entries.items() if key.startswith(f"{job} ")}
        assert mine in ({}, results(*(f"{job} {part}" for part in "abcd"), n=job)["cpu"]), "all or none"
        assert mine or job not in done["done"], "an acknowledged push is lost"
