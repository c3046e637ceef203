"""Loading a result from any directory works or reports the damage in one line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quarantune
from quarantune import SavedResultError

ABOUT: dict[str, Any] = {
    "schema": 1,
    "best_config": {"n": 1},
    "time_ms": 0.5,
    "device": "cpu",
    "versions": {},
    "tie": [],
    "key": "key",
    "from_cache": False,
    "files": {"function.bin": hashlib.sha256(b"function").hexdigest()},
    "trials": [],
}


def say(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "result.json").write_text(json.dumps(ABOUT | changes))


def replace(name: str, by: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        by(folder / name)

    return change


def link_outside(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.write_bytes(b"function" if path.name == "function.bin" else json.dumps(ABOUT).encode())
    path.symlink_to(outside)


TROUBLE: dict[str, Callable[[Path], Any]] = {
    "function missing": lambda folder: (folder / "function.bin").unlink(),
    "function is a pipe": replace("function.bin", os.mkfifo),
    "function is a directory": replace("function.bin", lambda path: path.mkdir()),
    "function is a link outside": replace("function.bin", link_outside),
    "function is a link to itself": replace("function.bin", lambda path: path.symlink_to(path.name)),
    "function is a device": replace("function.bin", lambda path: path.symlink_to("/dev/zero")),
    "function is huge": lambda folder: os.truncate(folder / "function.bin", 1 << 40),
    "function was changed": lambda folder: (folder / "function.bin").write_bytes(b"other"),
    "result is missing": lambda folder: (folder / "result.json").unlink(),
    "result is a pipe": replace("result.json", os.mkfifo),
    "result is a directory": replace("result.json", lambda path: path.mkdir()),
    "result is a link outside": replace("result.json", link_outside),
    "result is deep": lambda folder: (folder / "result.json").write_text("[" * 100_000),
    "result is not UTF-8": lambda folder: (folder / "result.json").write_bytes(b"\xff\xfe\xff"),
    "result is a list": lambda folder: (folder / "result.json").write_text("[]"),
    "files lead elsewhere": say(files={"../function.bin": "0"}),
    "files hold null bytes": say(files={"function.bin": "0", "a\x00b": "0"}),
    "no function among the files": say(files={}),
    "files are a number": say(files=3),
    "time is huge": say(time_ms=10**400),
    "trials are numbers": say(trials=[3]),
    "config is a list": say(best_config=[1]),
}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("name", TROUBLE)
def test_damage_in_a_saved_result_is_reported_in_one_line(tmp_path: Path, name: str, trusted: bool) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    say()(folder)
    (folder / "function.bin").write_bytes(b"function")
    assert quarantune.TuningResult.load(folder).best_config == {"n": 1}
    TROUBLE[name](folder)
    with pytest.raises(SavedResultError) as told:
        quarantune.TuningResult.load(folder, trusted=trusted)
    assert str(folder) in str(told.value)
    assert "\n" not in str(told.value)


def test_a_saved_result_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    clear = "\x1b[2J"
    share = {"call": clear, "weight": 1.0, "time_ms": 1.0, "best_ms": 1.0}
    trial = {"config": {"n": 1}, "outcome": "ok", "time_ms": 1.0, "device": clear, "message": clear}
    texts = dict.fromkeys(("name", "device", "created", "commit", "stopped", "by"), clear)
    (tmp_path / "function.bin").write_bytes(b"function")
    for trials in ([], [trial]):
        say(**texts, calls=[share], trials=trials)(tmp_path)
        result = quarantune.TuningResult.load(tmp_path)
        for text in (repr(result), result.table(), result._repr_html_()):
            assert text.replace("\n", "").isprintable()
