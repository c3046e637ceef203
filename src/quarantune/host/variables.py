"""Environment variables of this process, set for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def given(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables within the block; afterwards, they are as they were.

    Args:
        values: the variables by name.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
