"""Asserts that a sweep leaves processes, descriptors, threads, files and the environment unchanged; has no tests."""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quarantune.host.process import SANDBOX_MARK
from quarantune.sandbox import template

MARK = "AFTERMATH_MARK"
"""Environment variable that marks a program of a test, to find all of its descendants."""
_PATIENCE_S = 60.0


def eventually(condition: Callable[[], object], *, timeout_s: float = _PATIENCE_S) -> bool:
    """Returns whether a condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def carriers(name: str, value: str) -> list[int]:
    """Returns the processes that started with an environment variable, and their forks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def running_templates() -> list[psutil.Process]:
    """Returns the children of this process that are templates: at most one, unless something is wrong."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if SANDBOX_MARK in child.environ():
                found.append(child)
    return found


def strays() -> list[str]:
    """Describes every process in the sandboxes of this process except its template, with orphans."""
    templates = running_templates()
    allowed = {child.pid for child in templates[:1]}
    pids = {child.pid for child in psutil.Process().children(recursive=True) if not is_of_multiprocessing(child)}
    for child in templates:
        pids.update(carriers(SANDBOX_MARK, child.environ()[SANDBOX_MARK]))
    return [_describe(pid) for pid in sorted(pids - allowed)]


def left_of(process: psutil.Process) -> list[int]:
    """Returns the running descendants of a process, except for Python's resource tracker."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and not is_of_multiprocessing(child):
                found.append(child.pid)
    return found


def is_of_multiprocessing(process: psutil.Process) -> bool:
    """Returns whether a process is Python's resource tracker, which stays after the use of a pool."""
    with contextlib.suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


def _describe(pid: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        return f"{pid} ({process.name()}, {process.status()}, child of {process.ppid()})"
    return f"{pid} (going)"


_PLACE = "q-"
"""Start of the names of the tests' directories for temporary files."""


@pytest.fixture
def quiet_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives the test a new TMPDIR, and starts the template."""
    with contextlib.suppress(ImportError):  # the first import of a GPU plugin sets environment variables
        importlib.import_module("jax.experimental.mosaic.gpu")
    # `tmp_path` is too long for the socket of a multiprocessing server.
    with tempfile.TemporaryDirectory(prefix=_PLACE, ignore_cleanup_errors=True) as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        template.shared()
        yield


@contextlib.contextmanager
def nothing_is_left() -> Iterator[None]:
    """Asserts that the block leaves this process and its surroundings unchanged.

    The template must run before the block, because it remains afterwards.
    """
    # The environment of a process is empty for a moment after an exec.
    assert eventually(running_templates), (
        "start the template before this block, so that it does not look like a leftover"
    )
    before, place, shared, files = _belongings(), _place(), set(shared_memory()), set(_temporary())
    yield
    assert eventually(lambda: not strays()), strays()
    assert eventually(lambda: _belongings() == before), _differences(before, _belongings())
    # Other tests run at the same time and may remove their files.
    assert eventually(lambda: set(_temporary()) <= files), f"{set(_temporary()) - files}"
    assert eventually(lambda: set(shared_memory()) <= shared), f"{shared} -> {shared_memory()}"
    assert _place() == place, _differences(place, _place())


def _place() -> dict[str, object]:
    variables = {f"${name}": value for name, value in os.environ.items()}
    return {"directory": os.getcwd(), "sys.path": list(sys.path), **variables}


def _belongings() -> dict[str, object]:
    return {
        "descriptors": descriptors(),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _temporary() -> list[str]:
    """Returns the names in the directory for temporary files, except for the directories of other tests."""
    return [name for name in _names(Path(tempfile.gettempdir())) if not name.startswith(_PLACE)]


def descriptors() -> dict[str, int]:
    """Returns how many descriptors of each kind this process holds."""
    kinds: collections.Counter[str] = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed
            kinds[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}"))] += 1
    return dict(sorted(kinds.items()))


def shared_memory() -> list[str]:
    """Returns the names in /dev/shm, except for semaphores of `multiprocessing` and files of browsers.

    The whole machine shares it: other tests make and remove files there at the same time. A file with the number of a
    living process in its name is left out, unless that is this process or its descendant.
    """
    names = [name for name in _names(Path("/dev/shm")) if not name.startswith(("sem.mp-", ".org.chromium."))]
    return [name for name in names if not _is_of_another(name)]


def _is_of_another(name: str) -> bool:
    owner = re.match(r"(?:sem\.)?quarantune-(\d+)-", name)
    if owner is None or not psutil.pid_exists(pid := int(owner[1])):
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return os.getpid() not in [pid, *(each.pid for each in psutil.Process(pid).parents())]
    return False


def _names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def _differences(before: dict[str, object], after: dict[str, object]) -> str:
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return "; ".join(f"{name}: {before.get(name)} -> {after.get(name)}" for name in names)
