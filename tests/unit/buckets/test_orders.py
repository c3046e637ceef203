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
from store_servers import entry, new_job, results, web_store

from quarantune.buckets import orders
from quarantune.cache import CacheWarning
from quarantune.host.process import SANDBOX_MARK
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
        new_job()
        assert looked_up(server.url, tmp_path) == entry(1)
        assert [path for path, _ in server.requests] == 2 * ["/tuned/scale.json"]
        assert "If-None-Match" in server.requests[1][1]
    assert {path.parts[-3] for path in tmp_path.rglob("*.etag")} == {"remote"}


def test_without_a_server_the_copy_of_an_earlier_job_is_used(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key")}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        url, port = server.url, server.server_port
    with socket.socket() as taken:  # so that no other server gets the port; it does not listen
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        new_job()
        assert in_trouble(url, tmp_path, "Connection refused>; an earlier copy is used") == entry(1)
        new_job()
        assert in_trouble(url, tmp_path / "empty", "Connection refused>; its results are not found") is None


def drip(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    while not request.server.is_over.wait(0.2):  # type: ignore[attr-defined]
        request.wfile.write(b" ")


def silent(request: BaseHTTPRequestHandler) -> None:
    request.server.is_over.wait()  # type: ignore[attr-defined]


@pytest.mark.parametrize("answer", [drip, pytest.param(silent, marks=pytest.mark.slow)])
def test_a_slow_server_costs_the_time_of_one_look_up(
    answer: Callable[[BaseHTTPRequestHandler], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "FETCHING_S", 1.0)
    with web_store(answer=answer) as server:
        assert in_trouble(server.url, tmp_path, "timed out; its results are not found") is None
        assert len(server.requests) <= 1, "no time was left for another function"


@pytest.mark.slow
def test_a_server_that_never_accepts_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "FETCHING_S", 1.0)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        url = StoreURL.parse(f"http://127.0.0.1:{listening.getsockname()[1]}/x")
        assert in_trouble(url, tmp_path, "timed out") is None


@pytest.mark.slow
def test_a_name_server_that_hangs_does_not_delay_the_end(tmp_path: Path) -> None:
    """The look-up hangs where nothing in Python can interrupt it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket, time\nsocket.getaddrinfo = lambda *_, **__: time.sleep(600)"
    )
    program = """
import sys, warnings
from pathlib import Path
from quarantune.buckets import orders
from quarantune.values.store_url import StoreURL
warnings.simplefilter("error")
orders.FETCHING_S = 1.0
try:
    orders.layer(StoreURL.parse("https://store.example/x"), "scale", Path(sys.argv[1]))
except Warning as warning:
    print(warning)
"""
    started = time.monotonic()
    done = run_python("-c", program, tmp_path / "cache", path=[tmp_path])
    assert done.stdout.startswith("https://store.example/x: timed out; its results are not found"), done.stderr
    assert done.returncode == 0
    assert time.monotonic() - started < BOUND_S


def test_a_signature_that_changes_keeps_the_copy(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key")}) as server:
        for word in ("hidden", "other"):
            url = StoreURL.parse(f"http://user:{word}@{server.host}/tuned?sig={word}")
            assert looked_up(url, tmp_path) == entry(1)
            assert orders.layer(url, "scale", tmp_path).label == f"http://***@{server.host}/tuned?***"
        assert len(server.requests) == 1


def test_a_cache_that_cannot_keep_a_copy_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with web_store({"scale.json": results("key")}) as server:
        assert in_trouble(server.url, tmp_path / "file", "there can be no copy in") is None


def test_a_worker_uses_the_copy_and_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with web_store({"scale.json": results("key"), "double.json": results("key")}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        monkeypatch.setenv(SANDBOX_MARK, "1")
        new_job()
        assert looked_up(server.url, tmp_path) == entry(1)
        assert looked_up(server.url, tmp_path, "double") is None
        assert len(server.requests) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_fork_has_a_process_of_its_own(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key"), "double.json": results("key", n=2)}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        mine = orders._agent(os.getpid())._process
        if (pid := os.fork()) == 0:
            try:
                found = looked_up(server.url, tmp_path, "double")
                orders._agent(os.getpid()).end()
                os._exit(0 if found == entry(2) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert mine is not None
        assert mine.poll() is None, "the fork has not ended the process of its parent"
        assert looked_up(server.url, tmp_path, "double") == entry(2)


@pytest.mark.slow
def test_a_process_that_has_ended_is_started_again(tmp_path: Path) -> None:
    with web_store({"scale.json": results("key"), "double.json": results("key", n=2)}) as server:
        assert looked_up(server.url, tmp_path) == entry(1)
        process = orders._agent(os.getpid())._process
        assert process is not None
        process.kill()
        process.wait()
        assert looked_up(server.url, tmp_path, "double") == entry(2)
