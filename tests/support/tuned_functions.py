"""Functions to tune with configs that a test chooses; this file contains no test."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quarantune
from quarantune import Trial

X = np.linspace(-1, 1, 1000, dtype=np.float32)
SOON = {"warmup": 0, "rep": 3}


class Notes:
    """A file for notes of workers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def add(self, *words: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            print(*words, file=file)

    def lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8").splitlines()


@contextlib.contextmanager
def here() -> Iterator[None]:
    """Runs configs in this process, which is quicker, for tests that need no worker."""
    with quarantune.settings(isolation="none"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def after(turns: int, x: Any) -> Any:
    """Returns x, after this number of turns of work."""
    worked = jax.lax.fori_loop(0, turns, lambda _, y: jnp.sin(y), x)
    return x + 0 * worked


_numbers = itertools.count()


def tuned(body: Callable[[Any, Any], Any], configs: list[Any], *, default: Any = None, **options: Any) -> Any:
    """Returns a function of x; the tunable is the second argument of `body`."""

    space = [{"do": config} for config in configs]

    # Without `ref_fn`: most of these functions have no working defaults, or configs with different outputs.
    @quarantune.autotune(space, **{**SOON, "name": f"kernel-{next(_numbers)}", "ref_fn": None, **options})
    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(x: Any, do: Any = default) -> Any:
        return body(x, do)

    return kernel


host = np.asarray
"""Copies a worker's array before a check reads it, because JAX would compile every operation of the check."""


def by_config(trials: tuple[Trial, ...]) -> dict[Any, Trial]:
    return {trial.config["do"]: trial for trial in trials}


def boom(x: Any) -> Any:
    raise ArithmeticError("there is no reference today")
