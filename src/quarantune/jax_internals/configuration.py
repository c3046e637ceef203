"""JAX's options and contexts, as they stand in a thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax


def config_values() -> Mapping[str, Any]:
    """Returns every JAX option by name, as it stands in this thread (`with jax.enable_x64():` included).

    Private-ish because `jax.config` publishes `update` and single attributes, not the list of them.
    """
    return dict(jax.config.values)


CONTEXTS = (
    "compute_on_context_manager",
    "pallas_tpu_interpret_mode_context_manager",
    "xla_metadata_context_manager",
)
"""What JAX keeps for a thread beside its options, and has in its own key for programs; each is None unless set."""


@functools.cache
def trace_context() -> Callable[[], tuple[Any, ...]]:
    """Returns the function that returns all that JAX has in its own key beside the call, as it stands in this thread.

    Private because nothing public tells whether a program that was traced earlier would be traced alike now.
    """
    from jax._src import config

    read: Callable[[], tuple[Any, ...]] = config.trace_context
    return read


def trace_context_names() -> tuple[str, ...]:
    """Returns a name for each part of what `trace_context` reads; none where JAX does not tell them."""
    from jax._src import config

    with contextlib.suppress(AttributeError, NotImplementedError):
        return tuple(config.trace_context_names())
    return ()


def contexts() -> dict[str, Any]:
    """Returns what is set of `CONTEXTS` in this thread, or in the process.

    Private because JAX has public means to enter them, such as `pltpu.force_tpu_interpret_mode`, and none to read them.
    """
    from jax._src import config

    values = {name: holder.value for name in CONTEXTS if (holder := getattr(config, name, None)) is not None}
    return {name: value for name, value in values.items() if value is not None}


def set_contexts(values: Mapping[str, Any]) -> None:
    """Sets some of `CONTEXTS` for the whole process.

    Args:
        values: what `contexts` returned elsewhere.
    """
    from jax._src import config

    for name, value in values.items():
        getattr(config, name).set_global(value)


def user_contexts() -> list[Any]:
    """Returns the values of the contexts made by `jax.make_user_context`, None where one is not set."""
    named = zip(trace_context_names(), trace_context()(), strict=False)
    return [value for name, value in named if name == "user_context"]
