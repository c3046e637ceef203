"""Results at a URL are a layer. No server holds a job up, fails it, or makes it show credentials."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from helpers import run_python
from store_servers import CHUNK, entry, new_job, results, web_store

from quarantune.buckets import orders
from quarantune.cache import CacheWarning
from quarantune.values.store_url import StoreURL

BOUND_S = 30.0
"""A generous bound for a look-up that may take `FETCHING_S`, on a busy machine."""


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives servers that answer more time than a busy machine needs."""
    monkeypatch.setattr(orders, "FETCHING_S", 60.0)
    new_job()
    yield
    new_job()


def looked_up(url: StoreURL, directory: Path, name: str = "scale") -> object:
    return orders.layer(url, name, directory).read(name).get("cpu", {}).get("key")


def in_trouble(url: StoreURL, directory: Path, says: str) -> object:
    """Looks up twice, expects one warning, and returns the entry."""
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = looked_up(url, directory), looked_up(url, directory)
        looked_up(url, directory, "another")
    assert time.monotonic() - started < BOUND_S
    assert [it.category for it in caught] == [CacheWarning], [str(it.message) for it in caught]
    assert says in str(caught[0].message)
    assert found[0] == found[1]
    return found[0]


def test_an_object_is_fetched_once_and_kept_with_its_etag(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key")}) as server:
        for _ in range(3):
            assert looked_up(server.url, tmp_path) == entry(1)
        assert [path for path, _ in server.requests] == ["/tuned/scale.json"]
        new_job()
        assert looked_up(server.url, tmp_path) == entry(1), "the server has answered 304"
        tag = server.requests[1][1]["If-None-Match"]
        server.objects["scale.json"] = server.objects["scale.json"].replace(b'"n": 1', b'"n": 2')
        new_job()
        assert looked_up(server.url, tmp_path) == entry(2)
        assert server.requests[2][1]["If-None-Match"] == tag, "what the copy has"
        del server.objects["scale.json"]
        new_job()
        assert looked_up(server.url, tmp_path) is None, "results that somebody has removed are not used"
    assert {path.parts[-3] for path in tmp_path.rglob("*.etag")} == {"remote"}


def test_a_copy_that_is_not_whole_is_fetched_again(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key")}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        (copy,) = tmp_path.rglob("scale.json")
        whole = copy.read_bytes()
        for damage in (whole.replace(b'"n": 1', b'"n": 7'), b"", None):
            copy.unlink() if damage is None else copy.write_bytes(damage)
            new_job()
            assert looked_up(server.url, tmp_path) == entry(1)
            assert "If-None-Match" not in server.requests[-1][1]


def test_without_a_server_the_copy_of_an_earlier_job_is_used(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key")}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        url = server.url
    new_job()
    assert in_trouble(url, tmp_path, "Connection refused>; an earlier copy is used") == entry(1)
    new_job()
    assert in_trouble(url, tmp_path / "empty", "Connection refused>; its results are not found") is None


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


def drip(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    while not request.server.is_over.wait(0.2):  # type: ignore[attr-defined]
        request.wfile.write(b" ")


def silent(request: BaseHTTPRequestHandler) -> None:
    request.server.is_over.wait()  # type: ignore[attr-defined]


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


def of(data: bytes, status: int = 200, length: int | None = None) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(data) if length is None else length))
        request.end_headers()
        request.wfile.write(data)

    return answer


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
def test_a_bad_answer_costs_a_warning(
    answer: Callable[[BaseHTTPRequestHandler], None], says: str, tmp_path: Path
) -> None:
    with web_store({"scale.json": results("key")}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        new_job()
        server.answer = answer
        assert in_trouble(server.url, tmp_path, says) == entry(1), "the copy stays"
        assert len(server.requests) < 200, "few of 10 GB were sent"


@pytest.mark.parametrize("answer", [drip, silent])
def test_a_slow_server_costs_the_time_of_one_look_up(
    answer: Callable[[BaseHTTPRequestHandler], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "FETCHING_S", 2.0)
    with web_store(answer=answer) as server:
        assert in_trouble(server.url, tmp_path, "no answer within 2 s; its results are not found") is None
        assert len(server.requests) <= 1, "no time was left for another function"


def test_a_server_that_never_accepts_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "FETCHING_S", 2.0)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        url = StoreURL.parse(f"http://127.0.0.1:{listening.getsockname()[1]}/x")
        assert in_trouble(url, tmp_path, "no answer within 2 s") is None


def test_a_name_server_that_hangs_does_not_delay_the_end(tmp_path: Path) -> None:
    """The look-up hangs where nothing in Python can interrupt it."""
    (tmp_path / "sitecustomize.py").write_text("import socket, time\nsocket.getaddrinfo = lambda *_, **__: time.sleep(600)")
    program = """
import sys, warnings
from pathlib import Path
from quarantune.buckets import orders
from quarantune.values.store_url import StoreURL
warnings.simplefilter("error")
try:
    orders.layer(StoreURL.parse("https://store.example/x"), "scale", Path(sys.argv[1]))
except Warning as warning:
    print(warning)
"""
    started = time.monotonic()
    done = run_python("-c", program, tmp_path / "cache", path=[tmp_path])
    assert done.stdout.startswith("https://store.example/x: no answer within 5 s; its results are not found"), done.stderr
    assert done.returncode == 0
    assert time.monotonic() - started < BOUND_S


def test_credentials_are_sent_and_never_shown(tmp_path: Path) -> None:
    def wary(request: BaseHTTPRequestHandler) -> None:
        of(b"", status=403)(request)

    with web_store({"scale.json": results("key")}) as server:
        url = StoreURL.parse(f"http://user%40host:hidden@{server.host}/tuned/?sig=hidden&se=1:2")
        assert looked_up(url, tmp_path) == entry(1)
        path, headers = server.requests[0]
        assert path == "/tuned/scale.json?sig=hidden&se=1:2"
        assert headers["Authorization"] == "Basic dXNlckBob3N0OmhpZGRlbg=="
        assert "hidden" not in repr(orders.layer(url, "scale", tmp_path).label)
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hidden" in path.read_bytes()]
        renewed = StoreURL.parse(str(url).replace("***@", "user:other@").replace("***", "sig=other"))
        assert orders.layer(renewed, "scale", tmp_path).directory == orders.layer(url, "scale", tmp_path).directory
        new_job()
        server.answer = wary
        assert in_trouble(url, tmp_path, f"http://***@{server.host}/tuned?***: HTTP Error 403") == entry(1)


def test_credentials_do_not_follow_a_redirect(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key")}) as other, web_store() as server:

        def move(request: BaseHTTPRequestHandler) -> None:
            request.send_response(302)
            request.send_header("Location", f"http://{other.host}/tuned/scale.json")
            request.end_headers()

        server.answer = move
        assert looked_up(StoreURL.parse(f"http://user:hidden@{server.host}/tuned"), tmp_path) == entry(1)
        assert "Authorization" in server.requests[0][1]
        assert "Authorization" not in other.requests[0][1]


def test_a_cache_that_cannot_keep_a_copy_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with web_store({"scale.json": results("key")}) as server:
        assert in_trouble(server.url, tmp_path / "file", "there can be no copy in") is None


def test_a_fork_has_a_process_of_its_own(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key"), "double.json": results("key", n=2)}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        mine = orders._agent(os.getpid())._process
        if (pid := os.fork()) == 0:
            try:
                found = looked_up(server.url, tmp_path, "double")
                orders._agent(os.getpid())._finish(os.getpid())
                os._exit(0 if found == entry(2) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert mine is not None
        assert mine.poll() is None, "the fork has not ended the process of its parent"
        assert looked_up(server.url, tmp_path, "double") == entry(2)


def test_a_process_that_has_ended_is_started_again(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key"), "double.json": results("key", n=2)}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        process = orders._agent(os.getpid())._process
        assert process is not None
        process.kill()
        process.wait()
        assert looked_up(server.url, tmp_path, "double") == entry(2)
