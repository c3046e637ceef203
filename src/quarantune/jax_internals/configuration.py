"""JAX's options and contexts, with their values in this thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax


def config_values() -> Mapping[str, Any]:
    """Returns the value of every JAX option in this thread by its name (`with jax.enable_x64():` included).

    Private because `jax.config` documents `update` and single attributes, not the list of options.
    """
    return dict(jax.config.values)


CONTEXTS = (
    "compute_on_context_manager",
    "pallas_tpu_interpret_mode_context_manager",
    "xla_metadata_context_manager",
)
"""JAX's contexts: values for a thread that are in JAX's key for a program but are not options; None unless set."""


@functools.cache
def trace_context() -> Callable[[], tuple[Any, ...]]:
    """Returns JAX's function for the part of its key for a program that does not come from the call.

    Private because there is no public way to know whether a program traced earlier would be traced the same now.
    """
    from jax._src import config

    read: Callable[[], tuple[Any, ...]] = config.trace_context
    return read


def trace_context_names() -> tuple[str, ...]:
    """Returns a name for each part of the tuple that `trace_context()()` returns; none if JAX does not publish them."""
    from jax._src import config

    with contextlib.suppress(AttributeError, NotImplementedError):
        return tuple(config.trace_context_names())
    return ()


def contexts() -> Mapping[str, Any]:
    """Returns the values of those `CONTEXTS` that are set in this thread or in the process.

    Private because JAX has public ways to enter them (`pltpu.force_tpu_interpret_mode`), but none to read them.
    """
    from jax._src import config

    values = {name: holder.value for name in CONTEXTS if (holder := getattr(config, name, None)) is not None}
    return {name: value for name, value in values.items() if value is not None}


def set_contexts(values: Mapping[str, Any]) -> None:
    """Sets some of `CONTEXTS` for the whole process.

    Args:
        values: the values that `contexts` returned in another process.
    """
    from jax._src import config

    for name, value in values.items():
        getattr(config, name).set_global(value)


def user_contexts() -> list[Any]:
    """Returns the values of the contexts made by `jax.make_user_context`; None for each that is not set."""
    named = zip(trace_context_names(), trace_context()(), strict=False)
    return [value for name, value in named if name == "user_context"]
