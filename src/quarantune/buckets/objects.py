"""The objects of one store: reads them, lists them and, in a bucket, replaces them under a condition."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote, urlunsplit

from quarantune.cache.file_names import safe_name
from quarantune.values.store_url import StoreURL
from quarantune.values.texts import cut, first_line, without_secrets

LARGEST_OBJECT_BYTES = 1 << 26
"""Largest object that is read or written: about 30,000 results, which take 1 to 2 s to decode."""
_SILENCE_S = 30.0
"""Seconds without any data after which a web server's answer is given up."""
_PROBE = ".probe"
"""Name of the object that shows whether a server keeps to conditions. No function has a safe name like this."""
_LOST_RACE = frozenset({"409", "412"})
"""Status codes of answers to a write whose condition does not hold."""
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


def open_objects(url: StoreURL) -> WebServer | Bucket:
    """Opens a store for reading.

    Raises:
        StoreError: a package is missing, or the store's credentials are not usable.
    """
    return Bucket.open(url) if url.is_bucket else WebServer(url)


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


def _check_size(size_bytes: int) -> None:
    if size_bytes > LARGEST_OBJECT_BYTES:
        raise StoreError(f"an object is larger than {LARGEST_OBJECT_BYTES >> 20} MiB, and is not read")


def _of_functions(files: Iterator[str]) -> list[str]:
    """Returns the safe names of functions among the names of files, which may be anything."""
    stems = {file.removesuffix(".json") for file in files if file.endswith(".json")}
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
        text = "" if page is None or page.data is None else page.data.decode(errors="replace")
        return _of_functions(f"{unquote(stem)}.json" for stem in _LINK.findall(text))

    def read(self, name: str, known: str = "") -> StoredObject | None:
        """Returns the object of a function, or None; see `Bucket.read`."""
        return self._get(f"{name}.json", known)

    def _get(self, file: str, known: str) -> StoredObject | None:
        parts = self._url.parts
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path}/{file}")
        request = urllib.request.Request(urlunsplit(address), headers={"User-Agent": "quarantune"})
        if known:
            request.add_header("If-None-Match", known)
        if parts.username is not None:  # not sent to another host if the server redirects
            word = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(word.encode()).decode()}")
        with _reasons(self._url):
            try:
                with self._opener.open(request, timeout=_SILENCE_S) as response:
                    data: bytes = response.read(LARGEST_OBJECT_BYTES + 1)
                    _check_size(len(data))
                    if response.length:
                        raise StoreError("the connection ended in the middle of an object")
                    return StoredObject(data, response.headers.get("ETag", ""))
            except HTTPError as error:
                error.close()
                if error.code == http.client.NOT_MODIFIED:
                    return StoredObject(None, known)
                if error.code not in (http.client.NOT_FOUND, http.client.GONE):
                    raise
        return None


class Bucket:
    """The objects below a URL of a bucket, through fsspec.

    Attributes:
        never_a_version: a version that no object ever has.
    """

    never_a_version = f'"{32 * "0"}"'

    def __init__(self, url: StoreURL) -> None:
        """Finds the credentials of the bucket; see `open`."""
        with _reasons(url):
            self._files = self._filesystem(use_listings_cache=False, skip_instance_cache=True)
        self._url = url
        self._bucket, self._prefix = url.parts.netloc, url.parts.path.lstrip("/")

    @staticmethod
    def open(url: StoreURL) -> Bucket:
        """Opens a bucket.

        Raises:
            StoreError: a package is missing, or the credentials are not usable.
        """
        return (Bucket if url.parts.scheme == "s3" else _GoogleBucket)(url)

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
        with _reasons(self._url), self._nothing_there():
            files = self._files.ls(f"{self._bucket}/{self._prefix}", detail=False)
            return _of_functions(file.rpartition("/")[2] for file in files)
        return []

    def read(self, name: str, known: str = "") -> StoredObject | None:
        """Returns the object of a function, or None.

        Args:
            name: the safe name of the function.
            known: the version that the caller has; empty for none.

        Raises:
            StoreError: the object cannot be read.
        """
        path = f"{self._bucket}/{self._key(name)}"
        with _reasons(self._url), self._nothing_there():
            # The version comes first: if another process replaces the object in between, this version is too old, and
            # a write on this condition is refused.
            about = self._files.info(path)
            version = str(about.get("ETag") or about.get("generation") or "")
            if version and version == known:
                return StoredObject(None, known)
            _check_size(about["size"])
            return StoredObject(self._content(self._key(name)), version)
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
        with _reasons(self._url):
            try:
                self._write(self._key(name), data, version)
            except Exception as error:
                is_gone = bool(version) and isinstance(error, FileNotFoundError) and not self._lacks_bucket(error)
                if not is_gone and not isinstance(error, FileExistsError) and _status(error) not in _LOST_RACE:
                    raise
                return False
        return True

    def _filesystem(self, **options: bool) -> Any:
        from s3fs import S3FileSystem

        return S3FileSystem(max_concurrency=1, **options)  # parts of an object could be of two versions

    def _content(self, key: str) -> bytes:
        content: bytes = self._files.cat_file(f"{self._bucket}/{key}")
        return content

    def _write(self, key: str, data: bytes, version: str) -> None:
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        # In one request: a larger object than a chunk would be sent in parts.
        self._files.pipe_file(f"{self._bucket}/{key}", data, chunksize=2 * LARGEST_OBJECT_BYTES, **condition)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}.json".lstrip("/")

    @contextlib.contextmanager
    def _nothing_there(self) -> Iterator[None]:
        """Ends the block if an object does not exist, but not if the bucket does not."""
        try:
            yield
        except FileNotFoundError as error:
            if self._lacks_bucket(error):
                raise

    def _lacks_bucket(self, error: FileNotFoundError) -> bool:
        """Returns whether the bucket does not exist. Google's answer does not tell."""
        return "bucket" in str(error).lower().replace(self._bucket.lower(), "")


class _GoogleBucket(Bucket):
    """A bucket of Google Cloud Storage. The files of gcsfs are read in parts, and replaced without a condition."""

    never_a_version = "1"

    def _filesystem(self, **options: bool) -> Any:
        # Otherwise gcsfs imports clients for other kinds of buckets, and asks the server for the kind of this one.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        from gcsfs import GCSFileSystem

        return GCSFileSystem(**options)

    def _content(self, key: str) -> bytes:
        content: bytes = self._files.call("GET", "b/{}/o/{}", self._bucket, key, alt="media")[1]
        return content

    def _write(self, key: str, data: bytes, version: str) -> None:
        address = self._files.base.replace("/storage/v1/", "/upload/storage/v1/") + f"b/{self._bucket}/o"
        head = b"--part\r\nContent-Type: application/json\r\n\r\n"  # no line of JSON begins with `--part`
        body = head + json.dumps({"name": key}).encode() + b"\r\n" + head + data + b"\r\n--part--"
        kind = {"Content-Type": "multipart/related; boundary=part"}
        options = {"uploadType": "multipart", "ifGenerationMatch": version or "0"}
        self._files.call("POST", address, headers=kind, data=body, **options)


def _status(error: Exception) -> str:
    """Returns the status code of the server's answer behind an error of s3fs or gcsfs; empty if there is none."""
    response = getattr(error.__cause__ or error, "response", None)  # botocore's
    if isinstance(response, Mapping):
        return str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    return str(getattr(error, "code", ""))
