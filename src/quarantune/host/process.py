"""State of this whole process: its sandbox, its environment variables, and its garbage collector."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping

SANDBOX_MARK = "QUARANTUNE_SANDBOX"
"""The environment variable of every process of a sandbox; its value is the token of the template."""


def in_sandbox() -> bool:
    """Returns whether this process runs in a sandbox; tuning in it must not start another sandbox."""
    return SANDBOX_MARK in os.environ


@contextlib.contextmanager
def environment_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables within the block, and restores them afterwards.

    Args:
        values: the variables by name; None unsets one.
    """
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keeps Python from searching for garbage, which would traverse all of JAX's objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
