"""A result that cannot be saved is returned all the same, with one warning."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cached_functions import X, entry_of, one_warning, scaled

import quarantune
from quarantune.host.process import in_sandbox

pytestmark = pytest.mark.usefixtures("two_slots")


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Makes a directory read-only, even for root."""
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a read-only filesystem")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def a_file(path: Path) -> Iterator[None]:
    path.write_text("I am no directory")
    yield
    assert path.read_text() == "I am no directory"


@pytest.mark.parametrize("obstacle", [read_only, a_file])
def test_an_unsaved_result_is_returned_with_one_warning(
    obstacle: Callable[[Path], contextlib.AbstractContextManager[None]],
    name: str,
    cache_dir: Path,
    swept: list[list[Any]],
) -> None:
    with obstacle(cache_dir):
        fn = scaled(name)
        with one_warning(name, "not saved", str(cache_dir), "QUARANTUNE_CACHE_DIR"):
            for _ in range(2):
                np.testing.assert_array_equal(fn(X), X * 2)
    assert swept == [[1, 2]]


def vandal(name: str, cache_dir: Path, *, leaves_a_file: bool) -> quarantune.Autotuned:
    """Returns a function whose second config removes the cache directory during its trace."""
    directory = str(cache_dir)

    @quarantune.autotune([{"n": 1}, {"n": 2}, {"n": 3}], rep=1, name=name)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 0) -> Any:
        if n == 2 and in_sandbox():
            import os
            import shutil

            os.rename(directory, directory + ".gone")
            if leaves_a_file:
                shutil.copyfile(__file__, directory)
        return x + 0 * n

    return scale


@pytest.mark.filterwarnings("error")
def test_a_directory_that_vanishes_during_a_sweep_is_made_again(name: str, cache_dir: Path) -> None:
    fn = vandal(name, cache_dir, leaves_a_file=False)
    np.testing.assert_array_equal(fn(X), X)
    assert entry_of(cache_dir)["config"] == fn.lookup(X)


def test_a_directory_that_turns_into_a_file_costs_one_warning(name: str, cache_dir: Path) -> None:
    fn = vandal(name, cache_dir, leaves_a_file=True)
    with one_warning("nothing was saved", str(cache_dir), "QUARANTUNE_CACHE_DIR"):
        np.testing.assert_array_equal(fn(X), X)
    assert fn.lookup(X) is not None


def test_a_lock_that_times_out_costs_only_a_warning(name: str, cache_dir: Path) -> None:
    cache_dir.mkdir()
    with open(cache_dir / f".{name}.json.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with quarantune.settings(lock_timeout=0.1), one_warning("held by others for 0.1 s", "QUARANTUNE_LOCK_TIMEOUT"):
            np.testing.assert_array_equal(scaled(name)(X), X * 2)
    assert not list(cache_dir.glob("*.json"))
