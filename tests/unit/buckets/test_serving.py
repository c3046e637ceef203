"""The process that talks to servers keeps copies of usable objects only, whatever a server sends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from store_servers import CHUNK, entry, of, results, web_store

from quarantune.buckets import serving
from quarantune.buckets.objects import StoreError
from quarantune.cache.problems import CacheWriteError
from quarantune.cache.store import Store
from quarantune.values.store_url import StoreURL


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "remote" / "0123456789ab"


def copy_of(directory: Path) -> object:
    return Store(directory, read_only=True).get("scale", "cpu", "key")


def zeros(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(10 << 30))
    request.end_headers()
    for number in range(10 << 10):
        request.wfile.write(CHUNK)
        request.server.requests.append((f"MiB {number}", {}))  # type: ignore[attr-defined]


def endless(request: BaseHTTPRequestHandler) -> None:
    """Sends chunks of no stated length, compressed as it says."""
    request.send_response(200)
    request.send_header("Content-Encoding", "gzip")
    request.end_headers()
    while not request.server.is_over.is_set():  # type: ignore[attr-defined]
        request.wfile.write(CHUNK)


def redirect(request: BaseHTTPRequestHandler) -> None:
    request.send_response(302)
    request.send_header("Location", "file:///etc/hostname")
    request.end_headers()


def to_ftp(request: BaseHTTPRequestHandler) -> None:
    request.send_response(301)
    request.send_header("Location", "ftp://user:secret@127.0.0.1/x")
    request.end_headers()


def to_itself(request: BaseHTTPRequestHandler) -> None:
    request.send_response(302)
    request.send_header("Location", request.path)
    request.end_headers()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (zeros, "larger than 64 MiB"),
        (endless, "larger than 64 MiB"),
        (redirect, "file:///etc/hostname"),
        (to_ftp, "redirects to ftp://***@127.0.0.1/x"),
        (to_itself, "infinite loop"),
        (of(b"<html>log in first</html>"), "/tuned/scale.json' is not JSON"),
        (of(b"\x80\x04K\x01."), "/tuned/scale.json' is not JSON"),
        (of(b"[" * 100_000), "/tuned/scale.json' is not JSON"),
        (of(b""), "/tuned/scale.json' is empty"),
        (of(b'{"cpu": {"key": {"schema": 1, "config": 3}}}'), "its config is 3, not a dict"),
        (of(b'{"cpu": {"key": {"schema": 99, "config": {}}}}'), "has schema 99, newer than"),
        (of(b'{"cpu": {', length=1000), "ended in the middle"),
        (of(b"no", status=403), "HTTP Error 403"),
        (of(b"no", status=500), "HTTP Error 500"),
    ],
    ids=lambda it: getattr(it, "__name__", None),
)
def test_a_bad_answer_leaves_the_copy(
    answer: Callable[[BaseHTTPRequestHandler], None], says: str, directory: Path
) -> None:
    with web_store({"scale.json": results("key")}) as server:
        serving.refresh(server.url, "scale", directory)
        server.answer = answer
        with pytest.raises(StoreError) as caught:
            serving.refresh(server.url, "scale", directory)
        assert says in str(caught.value)
        assert f"http://{server.host}/tuned" in str(caught.value)
        assert copy_of(directory) == entry(1)
        assert len(server.requests) < 200, "little of 10 GB was sent"
    assert sorted(path.name for path in directory.iterdir()) == ["scale.etag", "scale.json"]


def test_an_object_is_sent_again_only_if_it_has_changed(directory: Path) -> None:
    with web_store({"scale.json": results("key")}) as server:
        for _ in range(2):
            serving.refresh(server.url, "scale", directory)
        tag = server.requests[1][1]["If-None-Match"]
        server.objects["scale.json"] = server.objects["scale.json"].replace(b'"n": 1', b'"n": 2')
        serving.refresh(server.url, "scale", directory)
        assert copy_of(directory) == entry(2)
        assert server.requests[2][1]["If-None-Match"] == tag
        del server.objects["scale.json"]
        serving.refresh(server.url, "scale", directory)
        assert copy_of(directory) is None, "results that somebody has removed are not used"


def test_a_copy_that_is_not_whole_is_fetched_again(directory: Path) -> None:
    with web_store({"scale.json": results("key")}) as server:
        serving.refresh(server.url, "scale", directory)
        copy = directory / "scale.json"
        whole = copy.read_bytes()
        for damage in (whole.replace(b'"n": 1', b'"n": 7'), b"", None):
            copy.unlink() if damage is None else copy.write_bytes(damage)
            serving.refresh(server.url, "scale", directory)
            assert copy.read_bytes() == whole
            assert "If-None-Match" not in server.requests[-1][1]


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named(
    scheme: str, package: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    says = rf"{scheme}://bucket/x needs further packages \(.*{package}.*\): pip install 'quarantune\[remote\]'"
    with pytest.raises(StoreError, match=says):
        serving.refresh(StoreURL.parse(f"{scheme}://bucket/x"), "scale", directory)


def test_a_link_in_the_place_of_a_copy_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    directory.symlink_to(tmp_path / "elsewhere")
    with web_store() as server, pytest.raises(CacheWriteError, match="there can be no copy in"):
        serving.refresh(server.url, "scale", directory)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_credentials_are_sent_and_never_kept(directory: Path) -> None:
    with web_store({"scale.json": results("key")}) as server:
        url = StoreURL.parse(f"http://user%40host:hidden@{server.host}/tuned/?sig=hidden&se=1:2")
        serving.refresh(url, "scale", directory)
        path, headers = server.requests[0]
        assert path == "/tuned/scale.json?sig=hidden&se=1:2"
        assert headers["Authorization"] == "Basic dXNlckBob3N0OmhpZGRlbg=="
        assert not [path for path in directory.iterdir() if b"hidden" in path.read_bytes()]
        server.answer = of(b"", status=403)
        with pytest.raises(StoreError) as caught:
            serving.refresh(url, "scale", directory)
        assert str(caught.value) == f"http://***@{server.host}/tuned?***: HTTPError: HTTP Error 403: Forbidden"
        assert caught.value.__suppress_context__, "no traceback shows the error of the library"


def test_credentials_do_not_follow_a_redirect(directory: Path) -> None:
    with web_store({"scale.json": results("key")}) as other, web_store() as server:

        def move(request: BaseHTTPRequestHandler) -> None:
            request.send_response(302)
            request.send_header("Location", f"http://{other.host}/tuned/scale.json")
            request.end_headers()

        server.answer = move
        serving.refresh(StoreURL.parse(f"http://user:hidden@{server.host}/tuned"), "scale", directory)
        assert copy_of(directory) == entry(1)
        assert "Authorization" in server.requests[0][1]
        assert "Authorization" not in other.requests[0][1]
