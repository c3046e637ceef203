"""`always_tune` tunes a call once more in a process; `disable_cache` keeps results in memory only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_functions import X, scaled

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")


def test_always_tune_starts_over_once_per_process_and_key(
    name: str, swept: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(name)(X)
    monkeypatch.setenv("QUARANTUNE_ALWAYS_TUNE", "1")
    fn = scaled(name)
    for _ in range(3):
        np.testing.assert_array_equal(fn(X), X * 2)
        np.testing.assert_array_equal(fn.lower(X).compile()(X), X * 2)
    assert swept == [[1, 2], [2]], "a config that failed to compile does not run again"
    fn(X[:2])
    assert len(swept) == 3


def test_always_tune_repeats_neither_a_failure_nor_a_success(
    name: str, swept: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARANTUNE_ALWAYS_TUNE", "1")
    fn = scaled(name, [{"n": 1}])
    for _ in range(2):
        with pytest.raises(quarantune.TuningFailedError):
            fn(X)
    assert swept == [[1]]


def test_disable_cache_touches_no_file_and_remembers_in_memory(
    name: str, swept: list[list[Any]], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(name)(X)
    before = {file: file.read_bytes() for file in cache_dir.rglob("*") if file.is_file()}
    monkeypatch.setenv("QUARANTUNE_DISABLE_CACHE", "1")
    fn = scaled(name)
    assert fn.lookup(X) is None
    for x in (X, X, X[:2]):
        np.testing.assert_array_equal(fn(x), x * 2)
    assert fn.lookup(X) == {"n": 2}
    assert swept == [[1, 2]] * 3
    assert {file: file.read_bytes() for file in cache_dir.rglob("*") if file.is_file()} == before
