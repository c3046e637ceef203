"""Functions with derivative rules of their own."""

from __future__ import annotations

import functools

import jax


@functools.cache
def custom_rule_types() -> tuple[type, ...]:
    """Returns the classes of functions with custom rules (`jax.custom_vjp` and its kin).

    Private because JAX's list of them is; each keeps all it knows in its `__dict__`.
    """
    # The last two only have to be imported: they add themselves to the first one's list.
    from jax._src import custom_api_util, custom_batching, custom_partitioning  # noqa: F401

    return (jax.custom_vjp, jax.custom_jvp, *custom_api_util._custom_wrapper_types)
