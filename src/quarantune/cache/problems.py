"""Problems of the cache on disk, as warnings and errors that name a remedy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from quarantune.host.frames import warn_once
from quarantune.host.shared_files import advice


@contextlib.contextmanager
def write_errors(failure: str, remedy: str = "set QUARANTUNE_CACHE_DIR to another directory") -> Iterator[None]:
    """Turns an OSError of the block, which writes a file, into `CacheWriteError`.

    Args:
        failure: the failure, with the path.
        remedy: the last remedy, after the one for the kind of error.
    """
    try:
        yield
    except OSError as error:
        raise CacheWriteError(f"{failure} ({reason_of(error)}): {advice(error)}, or {remedy}") from error


@contextlib.contextmanager
def change_errors(path: Path) -> Iterator[None]:
    """Turns errors of the block, which changes a file, into `CacheWriteError` with a remedy."""
    try:
        yield
    except OSError as error:
        fix = advice(error)
        if isinstance(error, PermissionError) and os.access(path.parent, os.W_OK):
            fix = "it belongs to another user, who can let others write to it and to the lock next to it (chmod a+w)"
        raise CacheWriteError(
            f"nothing was saved in {str(path)!r} ({reason_of(error)}): {fix}, or set QUARANTUNE_CACHE_DIR to another "
            "directory"
        ) from error
    except NewerSchemaError as error:
        raise CacheWriteError(str(error)) from None


def reason_of(error: OSError) -> str:
    """Returns a few words on why a file cannot be read or written."""
    return error.strerror or type(error).__name__


class NewerSchemaError(Exception):
    """A later version of this package wrote the file."""


class CacheWarning(UserWarning):
    """The cache on disk has a problem; the call continues without it."""


class CacheWriteError(RuntimeError):
    """A result could not be saved; the message names the result, the reason and a remedy."""


def report_once(message: str, *, topic: str | None = None) -> None:
    """Warns about a problem, the first time that it occurs in this process.

    Args:
        message: the problem and its remedy; the same message is the same problem.
        topic: identifies a problem that has several messages; by default, the message does.
    """
    warn_once(message, CacheWarning, topic=topic)
