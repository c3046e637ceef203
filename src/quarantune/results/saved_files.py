"""The files of a saved result, which may be damaged or anything else."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from quarantune.cache import content
from quarantune.host import shared_files
from quarantune.values.json_object import JsonObject

SCHEMA = 1
"""The version of the layout of `TuningResult.save`."""
_LARGEST_BYTES = 1 << 31


class SavedResultError(ValueError):
    """A directory holds no saved result, or a damaged one; the message says how it is damaged."""


def read_json(path: Path) -> JsonObject:
    """Returns the content of a result's JSON file.

    Raises:
        SavedResultError: it is missing, damaged, or of a newer version.
    """
    try:
        about = content.decode(_read(path))
    except FileNotFoundError:
        raise SavedResultError(f"{path.parent} holds no saved result: there is no {path.name} in it") from None
    except ValueError as error:
        if isinstance(error, SavedResultError):
            raise
        raise SavedResultError(f"{path} cannot be read: {error}; save the result again") from error
    schema = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(schema, int):
        raise SavedResultError(f"{path} is not from TuningResult.save")
    if schema > SCHEMA:
        raise SavedResultError(f"{path} was saved by a newer quarantune (schema {schema}): install that one")
    return dict(about)


def read_checked(path: Path, digest: str) -> bytes:
    """Returns the content of a file, if its SHA-256 checksum is the given one.

    Raises:
        SavedResultError: it is missing or damaged.
    """
    try:
        found = _read(path)
    except FileNotFoundError:
        raise SavedResultError(f"{path} is missing: save the result again") from None
    if hashlib.sha256(found).hexdigest() != digest:
        raise SavedResultError(f"{path} is damaged: its checksum is not what was saved; save the result again")
    return found


def _read(path: Path) -> bytes:
    """Returns the content of a file of the directory, which may hold anything.

    Raises:
        SavedResultError: the file is a link out of the directory, not a regular file, or unreadable.
        FileNotFoundError: there is no such file.
    """
    try:
        if path.resolve().parent != path.parent.resolve():
            raise SavedResultError(f"{path} is not within its directory: put the file itself there")
        return shared_files.read(path, largest_bytes=_LARGEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(*error.args) from None
    except (OSError, RuntimeError) as error:  # a link to itself is a RuntimeError to some versions of Python
        reason = error.strerror if isinstance(error, OSError) else "it is no regular file"
        raise SavedResultError(f"{path} cannot be read: {reason}; save the result again") from error


def write(path: Path, data: bytes) -> None:
    """Replaces a file in one step."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
