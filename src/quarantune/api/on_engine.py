"""The keyword `executor=` of calls that tune."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.values.settings import settings

_OPTION = "executor"


@contextlib.contextmanager
def on_engine(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a call's keyword arguments without `executor=`, which holds like a `settings` block.

    Args:
        signature: of the tuned function; where it has a parameter of that name, the argument is for it.
        kwargs: the keyword arguments.
    """
    if _OPTION not in kwargs or _OPTION in signature.parameters:
        yield dict(kwargs)
        return
    with settings(executor=kwargs[_OPTION]):
        yield {name: value for name, value in kwargs.items() if name != _OPTION}
