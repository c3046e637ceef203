"""Pushes results into a bucket and pulls them from a store, by the rules of `TuningCache.merge`."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Collection

from quarantune.buckets.objects import LARGEST_OBJECT_BYTES, Bucket, StoredObject, StoreError, open_objects
from quarantune.cache import entries
from quarantune.cache.entries import MergeReport
from quarantune.cache.entry_file import Contents, DamagedError, decode_entries, encode
from quarantune.cache.file_names import safe_name
from quarantune.cache.problems import NewerSchemaError
from quarantune.cache.store import Prefer, Store, joined
from quarantune.values.store_url import StoreURL
from quarantune.values.texts import BUCKET_URL

_MOST_ATTEMPTS = 200
"""Lost races after which a push gives up an object: ten minutes of them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
"""Longest pause after the first lost race for an object, and after any."""

_REMEDY = "Correct the URL, or give names of functions with --only."


def push(url: StoreURL, store: Store, *, names: Collection[str] | None = None, dry_run: bool = False) -> MergeReport:
    """Copies the results of a cache into a bucket. Of jobs that push at once, none loses a result.

    Args:
        url: the bucket.
        store: the cache.
        names: the functions, with `*` for any text; None for all.
        dry_run: whether to write nothing.

    Returns:
        The differences between the cache and the bucket before.

    Raises:
        ValueError: the URL is not a bucket's, or nothing is cached for a name.
        StoreError: the bucket cannot be used, or an object in it is damaged. Functions before it are pushed.
        CacheWriteError: an object would be too large.
    """
    found, bucket = entries.chosen(store, names=names, devices=None), open_objects(url)
    if not isinstance(bucket, Bucket):
        raise ValueError(f"nothing can be pushed to {url}: give {BUCKET_URL}")
    if dry_run:
        return entries.merge(_DryRun(lambda name: decoded(url, name, bucket.read(name))), found)
    if found:
        bucket.check_conditions()
    return entries.merge(_Pushing(bucket, url), found)


def pull(url: StoreURL, store: Store, *, names: Collection[str] | None = None, dry_run: bool = False) -> MergeReport:
    """Copies results at a URL into a cache.

    Args:
        url: the URL.
        store: the cache.
        names: the functions, with `*` for any text; None for all. A web server that has no page of its files needs
            names without `*`.
        dry_run: whether to write nothing.

    Returns:
        The differences between the URL and the cache before.

    Raises:
        ValueError: there is nothing for a name.
        StoreError: the store cannot be used, or an object in it is damaged. Nothing is pulled.
        CacheWriteError: the results could not be saved.
    """
    objects, wanted = open_objects(url), names or ["*"]
    is_listed = "*" in "".join(wanted)
    known = entries.among(wanted, objects.names(), str(url), _REMEDY) if is_listed else map(safe_name, wanted)
    found = {name: contents for name in known if (contents := decoded(url, name, objects.read(name)))}
    entries.among(wanted, found, str(url), _REMEDY)
    return entries.merge(_DryRun(store.read) if dry_run else store, found.items())


def decoded(url: StoreURL, name: str, found: StoredObject | None) -> Contents:
    """Returns the entries in an object; none without an object.

    Raises:
        StoreError: the object is damaged, or a later version of this package wrote it. A push would lose a part of it.
    """
    try:
        return decode_entries(found.data, f"{url}/{name}.json") if found and found.data is not None else {}
    except (DamagedError, NewerSchemaError) as error:
        raise StoreError(f"{error}: it is not used; repair or remove it") from None


@dataclasses.dataclass(frozen=True)
class _DryRun:
    """Takes the place of a cache to merge into, and writes nothing."""

    read: Callable[[str], Contents]

    def merge(self, name: str, contents: Contents, *, prefer: Prefer) -> None:
        joined(contents, prefer, self.read(name))


@dataclasses.dataclass(frozen=True)
class _Pushing:
    """The objects of a bucket as a cache to merge into."""

    bucket: Bucket
    url: StoreURL

    def merge(self, name: str, contents: Contents, *, prefer: Prefer) -> None:
        """Reads an object, merges, and writes it unless it has changed in between; then it begins again.

        Raises:
            StoreError: the object cannot be read or written.
        """
        for attempt in range(_MOST_ATTEMPTS):
            found = self.bucket.read(name)
            both = joined(contents, prefer, present := decoded(self.url, name, found))
            if both == present:
                return
            if len(data := encode(both)) > LARGEST_OBJECT_BYTES:
                raise StoreError(f"{self.url}/{name}.json would be too large for readers: push to another prefix")
            if self.bucket.replace(name, data, found.version if found else ""):
                return
            time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**attempt)))
        raise StoreError(f"other jobs have replaced {self.url}/{name}.json {_MOST_ATTEMPTS} times: push again later")
