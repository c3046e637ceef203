"""The keywords `executor=` and `resume=` of calls that tune."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.values.settings import settings


@contextlib.contextmanager
def on_engine(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yields a call's keyword arguments without `executor=`, which holds as a `settings` block, and `resume=`, and it.

    Args:
        signature: of the tuned function; where it has a parameter of such a name, the argument is for it.
        kwargs: the keyword arguments.
    """
    own = {name: kwargs[name] for name in kwargs.keys() & {"executor", "resume"} - signature.parameters.keys()}
    with settings(executor=own["executor"]) if "executor" in own else contextlib.nullcontext():
        yield {name: value for name, value in kwargs.items() if name not in own}, bool(own.get("resume"))
