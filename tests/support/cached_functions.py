"""A function to tune, and its entry in the cache; this file contains no test."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import quarantune
from quarantune import CacheWarning

X = np.arange(4, dtype=np.float32)
CONFIGS = ({"n": 1}, {"n": 2})


def scaled(name: str, configs: Any = CONFIGS, *, factor: float = 1.0, **options: Any) -> quarantune.Autotuned:
    """Returns a new function. Its only good config is n=2; with its default, n=0, it returns its argument."""

    @quarantune.autotune(configs, **{"rep": 1, "name": name, "ref_fn": None, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 0) -> Any:
        if n not in (0, 2):
            raise ArithmeticError(f"n={n} is bad")
        return x * n * factor if n else x

    return scale


def cache_file(cache_dir: Path) -> Path:
    (file,) = cache_dir.glob("*.json")
    return file


def edit(cache_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the only entry of the only cache file."""
    file = cache_file(cache_dir)
    contents = json.loads(file.read_text())
    ((entry,),) = [entries.values() for entries in contents.values()]
    change(entry)
    file.write_text(json.dumps(contents))


def entry_of(cache_dir: Path) -> dict[str, Any]:
    contents = json.loads(cache_file(cache_dir).read_text())
    ((entry,),) = [entries.values() for entries in contents.values()]
    return dict(entry)


@contextlib.contextmanager
def one_warning(*parts: str) -> Iterator[None]:
    """Asserts that the block emits exactly one warning of the cache, with all these texts."""
    with pytest.warns(CacheWarning) as caught:
        yield
    (warning,) = [str(warning.message) for warning in caught]
    assert [part for part in parts if part not in warning] == [], warning
