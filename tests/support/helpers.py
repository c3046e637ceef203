"""Helpers that several test files share; this file contains no test."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import quarantune
from quarantune.host.frames import told
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.values.configs import Config
from quarantune.values.trial import Outcome, Trial

SOURCE = Path(quarantune.__file__).parents[1]
"""The directory on the import path that makes quarantune importable."""

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
PROGRAMS = SUPPORT.with_name("programs")
"""The directory of scripts that tests start."""

everywhere = pytest.mark.parametrize(
    "isolation", ["process", "none", pytest.param("compile", marks=[pytest.mark.slow, pytest.mark.long])]
)
"""Runs a test with configs in workers, with configs in this process, and compiled there but measured here."""


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Returns the values of a parameter in this session's tests of the fixture's module."""
    items = (item for item in request.session.items if item.path == request.path)
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return sorted({param[parameter] for param in params if parameter in param})


@contextlib.contextmanager
def isolated(isolation: str) -> Iterator[None]:
    """Runs configs in workers (`process`, in part `compile`), or in this process (`none`), which must warn."""
    told.clear()
    warns = pytest.warns(RuntimeWarning, match="in this process") if isolation == "none" else contextlib.nullcontext()
    with quarantune.settings(isolation=isolation), warns:
        yield


def ends(trials: Iterable[Trial]) -> list[str]:
    """Returns the outcomes of trials, with `ok` for `slow`, because a busy machine can make any config slow."""
    return ["ok" if trial.outcome is Outcome.SLOW else trial.outcome.value for trial in trials]


def change_version(directory: Path, package: str, version: str) -> None:
    """Makes all files of a cache state another version of a package."""
    for file in filter(Path.is_file, directory.rglob("*")):
        text = re.sub(rf'("{package}": ?)"[^"]*"', rf'\1"{version}"', file.read_text())
        # A record of a journal starts with its checksum.
        text = re.sub(r"(?m)^[0-9a-f]{8} (.*)$", lambda line: f"{zlib.crc32(line[1].encode()):08x} {line[1]}", text)
        file.write_text(text)


def deadline_s(quiet_s: float) -> float:
    """Returns a deadline that ordinary configs meet: longer on a busy machine."""
    return round(quiet_s * max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1))), 1)


@contextlib.contextmanager
def refused(path: Path, mode: int) -> Iterator[None]:
    """Gives a path permissions that bind this process in the block, even if it runs as root."""
    user, before = os.geteuid(), path.stat().st_mode
    ways = {parent: parent.stat().st_mode for parent in path.parents if parent.stat().st_mode & 0o011 != 0o011}
    for parent, way in ways.items():
        parent.chmod(way | 0o011)
    path.chmod(mode)
    if user == 0:
        os.chown(path, 65534, 65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        os.chown(path, user, -1)
        path.chmod(before)
        for parent, way in ways.items():
            parent.chmod(way)


class SweepWatch:
    """Functions to call with the request and the configs of every sweep, and with its findings."""

    def __init__(self) -> None:
        self.on_begin: list[Callable[[SweepRequest, Mapping[int, Config]], object]] = []
        self.on_end: list[Callable[[Swept], object]] = []


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Sets this process's clock forward."""
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + seconds)


def child_environ(*path: Path | str, **changes: str | None) -> dict[str, str]:
    """Returns the environment for a program of a test.

    Args:
        *path: further directories on its import path.
        **changes: variables; None removes a variable.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, *path))), **changes}
    return {name: value for name, value in environ.items() if value is not None}


def compiling_once(directory: Path) -> dict[str, str]:
    """Returns variables of processes that compile each program once, and keep it for each other in a directory."""
    limits = {"MIN_COMPILE_TIME_SECS": "0", "MIN_ENTRY_SIZE_BYTES": "-1"}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        **{f"JAX_PERSISTENT_CACHE_{name}": value for name, value in limits.items()},
    }


def run_python(
    *arguments: object,
    path: Iterable[Path | str] = (),
    before: Iterable[str] = (),
    cwd: Path | None = None,
    timeout_s: float = 280,
    **changes: str | None,
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a new process, and waits until it succeeds or fails.

    Args:
        *arguments: the command line after `python`: options, a file or a program, and its arguments.
        path: further directories on its import path.
        before: a command that runs the command after it, as `unshare` does.
        cwd: its working directory.
        timeout_s: the longest time for it; a test has 300 s.
        **changes: variables of its environment; None removes a variable.
    """
    return subprocess.run(
        [*before, sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=child_environ(*path, **changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def python(*arguments: object, **options: Any) -> str:
    """Runs Python as `run_python` does, asserts that it succeeds, and returns its output."""
    done = run_python(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
