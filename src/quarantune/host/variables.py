"""Environment variables of this process, set for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def given(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables within the block; afterwards, they are as they were.

    Args:
        values: the variables by name; None for those that are not set.
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
