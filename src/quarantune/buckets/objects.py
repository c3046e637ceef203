"""The objects of one store: reads them, lists them and, in a bucket, replaces them under a condition."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote

from quarantune.cache.file_names import safe_name
from quarantune.values.store_url import StoreURL
from quarantune.values.texts import cut, first_line, without_secrets

LARGEST_OBJECT_BYTES = 1 << 26
"""Largest object that is read or written: about 30,000 results, which take 1 to 2 s to decode."""
_SILENCE_S = 30.0
"""Seconds without any data after which a web server's answer is given up."""
_PROBE = ".probe"
"""Name of the object that shows whether a server keeps to conditions. No function has a safe name like this."""
_NOT_MODIFIED = 304
_TOO_LARGE = f"an object is larger than {LARGEST_OBJECT_BYTES >> 20} MiB, and is not read"
_MOST_SHOWN = 300
_LINK = re.compile(r"""href=["']?(?:\./)?([^"'?#/>]+)\.json["'?#>]""", re.IGNORECASE)


class StoreError(RuntimeError):
    """A store cannot be used; the message gives the reason, without credentials."""


class StoredObject(NamedTuple):
    """An object of a store.

    Attributes:
        data: its content; None if it still has the version that the reader knows.
        version: its ETag or generation; empty if the server gives none.
    """

    data: bytes | None
    version: str


@contextlib.contextmanager
def _reasons(url: StoreURL) -> Iterator[None]:
    """Turns every error of the block into `StoreError`."""
    try:
        yield
    except StoreError as error:
        raise StoreError(f"{url}: {error}") from None
    except ImportError as error:
        raise StoreError(f"{url} needs further packages ({error}): pip install 'quarantune[remote]'") from None
    except Exception as error:  # of many packages; a traceback could show credentials
        text = without_secrets(f"{type(error).__name__}: {first_line(error)}")
        raise StoreError(f"{url}: {cut(text, _MOST_SHOWN)}") from None


def _of_functions(files: Iterable[str]) -> list[str]:
    """Returns the safe names of functions among the names of files, which may be anything."""
    stems = {file.rpartition("/")[2].removesuffix(".json") for file in files if file.endswith(".json")}
    return sorted(stem for stem in stems if safe_name(stem) == stem)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers only, and not from HTTPS to plain HTTP."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if newurl.partition(":")[0].lower() not in ("https", req.type):
            fp.close()
            raise StoreError(f"the server redirects to {without_secrets(newurl)}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class WebServer:
    """The objects below a URL of a web server, which are only read."""

    def __init__(self, url: StoreURL) -> None:
        """Connects to nothing yet."""
        self._url = url
        self._opener = urllib.request.build_opener(_Redirects)

    def names(self) -> list[str]:
        """Returns the safe names of the functions on the server's page of files."""
        page = self._get("", "")
        text = (page.data or b"").decode(errors="replace") if page else ""
        return _of_functions(f"{stem}.json" for stem in _LINK.findall(text))

    def read(self, name: str, known: str = "") -> StoredObject | None:
        """Returns the object of a function, or None; see `Bucket.read`."""
        return self._get(f"{name}.json", known)

    def _get(self, file: str, known: str) -> StoredObject | None:
        parts = self._url.parts
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path}/{file}").geturl()
        request = urllib.request.Request(address, headers={"User-Agent": "quarantune"})
        if known:
            request.add_header("If-None-Match", known)
        if parts.username is not None:  # not sent to another host if the server redirects
            word = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(word).decode()}")
        with _reasons(self._url):
            try:
                with self._opener.open(request, timeout=_SILENCE_S) as response:
                    data: bytes = response.read(LARGEST_OBJECT_BYTES + 1)
                    if len(data) > LARGEST_OBJECT_BYTES:
                        raise StoreError(_TOO_LARGE)
                    if response.length:
                        raise StoreError("the connection ended in the middle of an object")
                    return StoredObject(data, response.headers.get("ETag", ""))
            except HTTPError as error:
                error.close()
                if error.code not in (_NOT_MODIFIED, 404, 410):
                    raise
                return StoredObject(None, known) if error.code == _NOT_MODIFIED else None


class Bucket:
    """The objects below a URL of a bucket, through fsspec's files: here of S3.

    Attributes:
        never_a_version: a version that no object ever has.
    """

    never_a_version = f'"{32 * "0"}"'

    def __init__(self, url: StoreURL) -> None:
        """Finds the credentials of the bucket; see `open_objects`."""
        self._url, self._bucket = url, url.parts.netloc
        with _reasons(url):
            self._files = self._filesystem(use_listings_cache=False, skip_instance_cache=True)

    def check_conditions(self) -> None:
        """Makes sure that the server keeps to the conditions of writes.

        Raises:
            StoreError: it does not, so that jobs would overwrite each other's results; or it cannot be used.
        """
        is_made_twice = self.replace(_PROBE, b"{}\n", "") and self.replace(_PROBE, b"{}\n", "")
        if is_made_twice or self.replace(_PROBE, b"{}\n", self.never_a_version):
            raise StoreError(
                f"{self._url}: its server ignores the conditions of writes (If-Match, If-None-Match, "
                "ifGenerationMatch), so that jobs would overwrite each other's results: nothing was pushed; use "
                "another server, or a shared directory"
            )

    def names(self) -> list[str]:
        """Returns the safe names of the functions that have an object.

        Raises:
            StoreError: the bucket cannot be listed.
        """
        with self._asking():
            return _of_functions(self._files.ls(self._bucket + self._url.parts.path, detail=False))
        return []

    def read(self, name: str, known: str = "") -> StoredObject | None:
        """Returns the object of a function, or None.

        Args:
            name: the safe name of the function.
            known: the version that the caller has; empty for none.

        Raises:
            StoreError: the object cannot be read.
        """
        with self._asking():
            # The version comes first: if another process replaces the object in between, this version is too old, and
            # a write on this condition is refused.
            about = self._files.info(f"{self._bucket}/{self._key(name)}")
            version = str(about.get("ETag") or about.get("generation") or "")
            if about["size"] > LARGEST_OBJECT_BYTES:
                raise StoreError(_TOO_LARGE)
            is_known = bool(version) and version == known
            return StoredObject(None if is_known else self._content(self._key(name)), version)
        return None

    def replace(self, name: str, data: bytes, version: str) -> bool:
        """Writes the object of a function, unless another process has changed it.

        Args:
            name: the safe name of the function.
            data: the new content.
            version: the version that it replaces; empty if there must be no object yet.

        Returns:
            Whether it was written.

        Raises:
            StoreError: the server refused for another reason, or gave no answer.
        """
        with self._asking(is_new=not version):
            try:
                self._write(self._key(name), data, version)
                return True
            except Exception as error:
                if not isinstance(error, FileExistsError) and _status(error) not in (409, 412):
                    raise
        return False

    def _filesystem(self, **options: bool) -> Any:
        from s3fs import S3FileSystem

        return S3FileSystem(max_concurrency=1, **options)  # parts of an object could be of two versions

    def _content(self, key: str) -> bytes:
        return bytes(self._files.cat_file(f"{self._bucket}/{key}"))

    def _write(self, key: str, data: bytes, version: str) -> None:
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        # In one request: a larger object than a chunk would be sent in parts.
        self._files.pipe_file(f"{self._bucket}/{key}", data, chunksize=2 * LARGEST_OBJECT_BYTES, **condition)

    def _key(self, name: str) -> str:
        return f"{self._url.parts.path}/{name}.json".lstrip("/")

    @contextlib.contextmanager
    def _asking(self, *, is_new: bool = False) -> Iterator[None]:
        """Ends the block if an object does not exist, and turns other errors into `StoreError`.

        Args:
            is_new: whether there need not be an object, so that its bucket is missing.
        """
        with _reasons(self._url):
            try:
                yield
            except FileNotFoundError as error:
                if is_new or self._lacks_bucket(error):
                    raise

    def _lacks_bucket(self, error: FileNotFoundError) -> bool:
        return "bucket" in str(error).lower().replace(self._bucket.lower(), "")


class _GoogleBucket(Bucket):
    """A bucket of Google Cloud Storage. The files of gcsfs are read in parts, and replaced without a condition."""

    never_a_version = "1"

    def _filesystem(self, **options: bool) -> Any:
        # Otherwise gcsfs imports clients for other kinds of buckets, and asks the server for the kind of this one.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        from gcsfs import GCSFileSystem

        return GCSFileSystem(**options)

    def _lacks_bucket(self, error: FileNotFoundError) -> bool:
        # gcsfs drops the server's reason. Whoever may not list the bucket gets another error than a missing one.
        with contextlib.suppress(OSError):
            try:
                self._files.call("GET", "b/{}/o", self._bucket, maxResults="1")
            except FileNotFoundError:
                raise StoreError("the bucket does not exist") from None
        return False

    def _content(self, key: str) -> bytes:
        return bytes(self._files.call("GET", "b/{}/o/{}", self._bucket, key, alt="media")[1])

    def _write(self, key: str, data: bytes, version: str) -> None:
        address = self._files.base.replace("/storage/v1/", "/upload/storage/v1/") + f"b/{self._bucket}/o"
        head = b"--part\r\nContent-Type: application/json\r\n\r\n"  # no line of JSON begins with `--part`
        body = head + json.dumps({"name": key}).encode() + b"\r\n" + head + data + b"\r\n--part--"
        kind = {"Content-Type": "multipart/related; boundary=part"}
        options = {"uploadType": "multipart", "ifGenerationMatch": version or "0"}
        self._files.call("POST", address, headers=kind, data=body, **options)


def open_objects(url: StoreURL) -> WebServer | Bucket:
    """Opens a store, which is a `Bucket` if its URL is a bucket's.

    Raises:
        StoreError: a package is missing, or the store's credentials are not usable.
    """
    return {"s3": Bucket, "gs": _GoogleBucket}.get(url.parts.scheme, WebServer)(url)


def _status(error: Exception) -> int:
    """Returns the status code of the server's answer behind an error of s3fs; 0 if there is none."""
    response = getattr(error.__cause__, "response", {})  # botocore's
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
