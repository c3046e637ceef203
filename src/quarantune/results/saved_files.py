"""The files of a saved result, whose content is checked; and single files that a user names.

`result.json` names the other files. Every save gives them new names and replaces `result.json` last. So a directory
holds one whole result at any time, even if several processes save to it or a save is cut short.
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
"""The version of the layout of `TuningResult.save`; in version 1, files had the same names in every save."""
_PART = re.compile(rf"({FUNCTION}|{WINNER})(-[0-9a-f]+)?\.bin")
_NEW_PART = rf"({FUNCTION}|{WINNER})-[0-9a-f]{{16}}\.bin"
_REMAINS = re.compile(rf"{_NEW_PART}|\.({_NEW_PART}|{re.escape(JSON)})\.[0-9a-f]+\.tmp")
"""The names that a save creates. Only these are removed: a user may have a `function.bin` or a `winner-2.bin`."""
_LARGEST_BYTES = 1 << 31
_IRREPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors for a file that cannot be replaced: its directory is not writable, or it is a mount."""
_SAVING_S = 24 * 3600.0
"""Seconds after which a save has surely ended, even if its host's clock differs from ours."""


class SavedResultError(ValueError):
    """A directory holds no saved result, or a damaged one; the message names the damage."""


class ForeignFileError(SavedResultError):
    """The JSON file of a directory is from another program, so it is not replaced."""


def load(folder: Path) -> tuple[JsonObject, dict[str, bytes]]:
    """Returns the content of a result's JSON file, and the contents of its other files by `FUNCTION` and `WINNER`.

    Raises:
        SavedResultError: a file is missing, damaged, or of a newer version.
    """
    while True:
        about = _read_json(folder / JSON)
        try:
            return about, {kind: _read_checked(folder / name, digest) for kind, name, digest in _parts(folder, about)}
        except SavedResultError:
            if _read_json(folder / JSON) == about:
                raise  # otherwise another save replaced the files: read them again


def save(folder: Path, about: JsonObject, parts: Mapping[str, bytes]) -> None:
    """Replaces the result in a directory as a whole, or not at all.

    Args:
        folder: the directory; created if necessary.
        about: the content of the JSON file, without `schema` and `files`.
        parts: the contents of the other files, by `FUNCTION` and `WINNER`.

    Raises:
        ForeignFileError: the directory has a JSON file from another program.
        OSError: the directory cannot be written to; an earlier result is unchanged.
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
                # Old files outside the earlier result are leftovers of killed processes.
                remains = [name for name in place.names() if _REMAINS.fullmatch(name)]
                unneeded.update(name for name in remains if place.status(name).st_mtime < long_ago)
        finally:
            # After a failure, only our files: the result may be of a newer version, with files that we do not know.
            with contextlib.suppress(OSError, ForeignFileError):
                if (needed := _names(folder)) is not None:
                    for name in unneeded - needed:
                        place.remove(name)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces the content of a file that a user names, as a whole or not at all; it follows a link.

    It writes directly into a pipe, a terminal, or a file that cannot be replaced. Such files are in a directory that is
    not writable, or are mounted alone into a container.

    Raises:
        OSError: the file cannot be written; it is unchanged if it can be replaced.
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
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # without the temporary file's name


def _names(folder: Path) -> set[str] | None:
    """Returns the names of the other files of the directory's result; None if the JSON file cannot be read.

    The names are empty for a damaged result or a result of a newer version.

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
        raise SavedResultError(f"{path} was saved by a newer quarantune (schema {schema}): install that version")
    return dict(about)


def _read_checked(path: Path, digest: str) -> bytes:
    """Returns the content of a file, if it has the given SHA-256 checksum.

    Raises:
        SavedResultError: it is missing or damaged.
    """
    found = _read(path, f"{path} is missing: save the result again")
    if hashlib.sha256(found).hexdigest() != digest:
        raise SavedResultError(f"{path} is damaged: its checksum differs from the saved one; save the result again")
    return found


def _read(path: Path, if_missing: str) -> bytes:
    """Returns the content of a file of the directory.

    Raises:
        SavedResultError: the file is a link, not a regular file, unreadable or missing.
    """
    try:
        return shared_files.read(path, below=path.parent, largest_bytes=_LARGEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise SavedResultError(if_missing) from None
    except OSError as error:
        raise SavedResultError(f"{path} cannot be read: {error.strerror}; save the result again") from error
