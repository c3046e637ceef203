"""Servers with objects of results: a web server of the standard library, S3 by moto, and an emulator of GCS."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quarantune.buckets import orders
from quarantune.cache import problems
from quarantune.cache.entry_file import SCHEMA, Contents, encode
from quarantune.values.store_url import StoreURL

CHUNK = bytes(1 << 20)


def entry(n: int, **fields: Any) -> dict[str, Any]:
    return {"schema": SCHEMA, "config": {"n": n}, "time_ms": 1.0, "created": "2026-01-01T00:00:00Z", **fields}


def results(*keys: str, n: int = 1, **fields: Any) -> Contents:
    """Returns entries for keys on a CPU."""
    return {"cpu": {key: entry(n, **fields) for key in keys}}


class WebStore(ThreadingHTTPServer):
    """A web server with objects.

    Attributes:
        objects: the objects by name of file.
        requests: the paths and headers of the requests so far.
        answer: answers instead of the objects.
        is_over: set at the end, for answers that never end.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, objects: Mapping[str, bytes], answer: Callable[[BaseHTTPRequestHandler], None] | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects, self.answer = dict(objects), answer
        self.requests: list[tuple[str, Mapping[str, str]]] = []
        self.is_over = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def url(self) -> StoreURL:
        return StoreURL.parse(f"http://{self.host}/tuned")

    def handle_error(self, *_: Any) -> None:
        """Ignores clients that leave."""


class _Handler(BaseHTTPRequestHandler):
    server: WebStore

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers.items())))
        if self.server.answer is not None:
            self.server.answer(self)
            return
        data = self.server.objects.get(self.path.partition("?")[0].removeprefix("/tuned/"))
        if data is None:
            self.send_error(404)
            return
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        is_known = self.headers.get("If-None-Match") == tag
        self.send_response(304 if is_known else 200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(0 if is_known else len(data)))
        self.end_headers()
        if not is_known:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def web_store(
    objects: Mapping[str, bytes | Contents] | None = None,
    answer: Callable[[BaseHTTPRequestHandler], None] | None = None,
) -> Iterator[WebStore]:
    """Runs a web server for a block.

    Args:
        objects: the objects by name of file.
        answer: answers instead of the objects.
    """
    found = {name: data if isinstance(data, bytes) else encode(data) for name, data in (objects or {}).items()}
    server = WebStore(found, answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def of(data: bytes, status: int = 200, length: int | None = None) -> Callable[[BaseHTTPRequestHandler], None]:
    """Returns an answer with given bytes."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(data) if length is None else length))
        request.end_headers()
        request.wfile.write(data)

    return answer


def new_job() -> None:
    """Forgets what this process has fetched, as a new job would begin."""
    orders._agent(os.getpid())._end()
    orders._agent.cache_clear()
    problems._reported.clear()


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreURL]:
    """Runs an S3 server, and returns the URL of an empty bucket."""
    server_of = pytest.importorskip("moto.server", reason="needs moto: pip install '.[clients]'")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs: pip install '.[clients]'")
    server = server_of.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key-of-tests",
            "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(tmp_path / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        bucket = f"bucket-{tmp_path.name.lower().replace('_', '-')}"[:60].rstrip("-")
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
        yield StoreURL.parse(f"s3://{bucket}/tuned")
    finally:
        server.stop()
