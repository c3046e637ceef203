"""The files of a saved result, which may be damaged or anything else; and single files that a user names.

`result.json` names the other files, whose names are new for every save, and takes its place last. So a directory holds
one whole result at any time, whoever saves to it and whatever ends a save.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from quarantune.host import shared_files
from quarantune.host.shared_files import Directory
from quarantune.values.codec import JsonObject, decode_json

JSON = "result.json"
FUNCTION, WINNER = "function", "winner"
_SCHEMA = 2
"""The version of the layout of `TuningResult.save`; in the first, the files had the same names in every save."""
_PART = re.compile(rf"({FUNCTION}|{WINNER})(-[0-9a-f]+)?\.bin")
_NEW_PART = rf"({FUNCTION}|{WINNER})-[0-9a-f]{{16}}\.bin"
_REMAINS = re.compile(rf"{_NEW_PART}|\.({_NEW_PART}|{re.escape(JSON)})\.[0-9a-f]+\.tmp")
"""The names that a save makes, and no other: a user may have a `function.bin` or a `winner-2.bin` there."""
_LARGEST_BYTES = 1 << 31
_IRREPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""A file cannot be replaced: its directory is not writable, or it is a mount."""
_SAVING_S = 24 * 3600.0
"""No save takes longer than this, in seconds, whatever the clocks of its host and of this one."""


class SavedResultError(ValueError):
    """A directory holds no saved result, or a damaged one; the message says how it is damaged."""


class ForeignFileError(SavedResultError):
    """The JSON file of a directory is from another program, so that it is not replaced."""


def load(folder: Path) -> tuple[JsonObject, dict[str, bytes]]:
    """Returns the content of a result's JSON file, and that of its other files by `FUNCTION` and `WINNER`.

    Raises:
        SavedResultError: one is missing, damaged, or of a newer version.
    """
    while True:
        about = _read_json(folder / JSON)
        try:
            return about, {kind: _read_checked(folder / name, digest) for kind, name, digest in _parts(folder, about)}
        except SavedResultError:
            if _read_json(folder / JSON) == about:
                raise  # else it was saved again meanwhile


def save(folder: Path, about: JsonObject, parts: Mapping[str, bytes]) -> None:
    """Makes a result that of a directory, all of it or nothing.

    Args:
        folder: the directory, made if necessary.
        about: the content of the JSON file, without `schema` and `files`.
        parts: the content of the other files, by `FUNCTION` and `WINNER`.

    Raises:
        ForeignFileError: the JSON file is there, and from another program.
        OSError: the directory cannot be written to; an earlier result is as it was.
    """
    token = secrets.token_hex(8)
    named = {f"{kind}-{token}.bin": part for kind, part in parts.items()}
    digests = {name: hashlib.sha256(part).hexdigest() for name, part in named.items()}
    text = json.dumps({"schema": _SCHEMA, **about, "files": digests}, indent=1)
    with Directory(folder, make=True) as place:
        earlier, long_ago, unneeded = _names(folder) or set(), time.time() - _SAVING_S, {*named}
        try:
            for name, part in named.items():
                place.replace(name, part)
            place.replace(JSON, text.encode())
            unneeded |= earlier
            with contextlib.suppress(OSError):
                # Those that are not of the earlier result are left by a process that was killed.
                remains = [name for name in place.names() if _REMAINS.fullmatch(name)]
                unneeded.update(name for name in remains if place.status(name).st_mtime < long_ago)
        finally:
            # If it failed, only ours: the result that is there may be of a newer version, with files of unknown names.
            with contextlib.suppress(OSError, ForeignFileError):
                if (needed := _names(folder)) is not None:
                    for name in unneeded - needed:
                        place.remove(name)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Makes `content` that of a file which a user names, all of it or none; a link leads to the file to replace.

    A pipe or a terminal takes the bytes as they come, and so does a file that no other can take the place of, because
    its directory is not writable or it is mounted alone into a container.

    Raises:
        OSError: the file cannot be written; one that can be replaced is as it was.
    """
    try:
        if not os.path.exists(path) or os.path.isfile(path):
            try:
                file = Path(os.path.realpath(path))
                with Directory(file.parent, shares=False) as place:
                    place.replace(file.name, content)
                return
            except OSError as error:
                if error.errno not in _IRREPLACEABLE or not os.path.exists(path):
                    raise
        Path(path).write_bytes(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # not with the name of the draft


def _names(folder: Path) -> set[str] | None:
    """Returns the names of the other files of the result that is there; None if the disk does not say.

    A damaged result, or one of a newer version, has no files that are known.

    Raises:
        ForeignFileError: the JSON file is from another program.
    """
    try:
        return {name for _, name, _ in _parts(folder, _read_json(folder / JSON))}
    except ForeignFileError:
        raise
    except SavedResultError as error:
        return None if isinstance(error.__cause__, OSError) else set()


def _parts(folder: Path, about: JsonObject) -> list[tuple[str, str, str]]:
    files = about.get("files")
    found = [(_PART.fullmatch(name), digest) for name, digest in files.items()] if isinstance(files, dict) else []
    parts = [(match[1], match[0], str(digest)) for match, digest in found if match]
    if len(parts) < len(found) or FUNCTION not in [kind for kind, _, _ in parts]:
        raise SavedResultError(f"{folder / JSON} is damaged: its files are {files!r:.200}; save the result again")
    return parts


def _read_json(path: Path) -> JsonObject:
    """Returns the content of a result's JSON file.

    Raises:
        SavedResultError: it is missing, damaged, or of a newer version.
    """
    found = _read(path, f"{path.parent} holds no saved result: there is no {path.name} in it")
    try:
        about = decode_json(found)
    except ValueError as error:
        raise SavedResultError(f"{path} cannot be read: {error}; save the result again") from error
    schema = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(schema, int):
        raise ForeignFileError(f"{path} is not from TuningResult.save: give another directory, or remove the file")
    if schema > _SCHEMA:
        raise SavedResultError(f"{path} was saved by a newer quarantune (schema {schema}): install that one")
    return dict(about)


def _read_checked(path: Path, digest: str) -> bytes:
    """Returns the content of a file, if its SHA-256 checksum is the given one.

    Raises:
        SavedResultError: it is missing or damaged.
    """
    found = _read(path, f"{path} is missing: save the result again")
    if hashlib.sha256(found).hexdigest() != digest:
        raise SavedResultError(f"{path} is damaged: its checksum is not what was saved; save the result again")
    return found


def _read(path: Path, if_missing: str) -> bytes:
    """Returns the content of a file of the directory, which may hold anything.

    Raises:
        SavedResultError: the file is a link, not a regular file, unreadable or missing.
    """
    try:
        return shared_files.read(path, below=path.parent, largest_bytes=_LARGEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise SavedResultError(if_missing) from None
    except OSError as error:
        raise SavedResultError(f"{path} cannot be read: {error.strerror}; save the result again") from error
