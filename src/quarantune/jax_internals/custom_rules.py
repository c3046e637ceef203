"""Functions with custom rules, such as `jax.custom_vjp`: their classes, and the derivative rules they were given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax


@functools.cache
def custom_rule_types() -> tuple[type, ...]:
    """Returns the classes of functions with custom rules: `jax.custom_vjp` and the like.

    Private because JAX's list of these classes is. An object of any of them has all its state in its `__dict__`.
    """
    # The last two are imported for their side effect: they add themselves to the list.
    from jax._src import custom_api_util, custom_batching, custom_partitioning  # noqa: F401

    return (jax.custom_vjp, jax.custom_jvp, *custom_api_util._custom_wrapper_types)


def derivative_rules(fn: object) -> Mapping[str, Any]:
    """Returns the derivative rules of a `jax.custom_vjp` or `jax.custom_jvp` function by name; empty for any other.

    Private because JAX has no public way to read the rules back. `defjvps` combines one rule for each argument into a
    function of JAX's, whose closure keeps them.

    Args:
        fn: any object.
    """
    if not issubclass(type(fn), (jax.custom_vjp, jax.custom_jvp)):
        return {}
    rules = {name: getattr(fn, name, None) for name in ("fwd", "bwd", "jvp")}
    jvp = rules["jvp"]
    if inspect.isfunction(jvp) and "jvps" in jvp.__code__.co_freevars and jvp.__module__.startswith("jax."):
        combined = inspect.getclosurevars(jvp).nonlocals["jvps"]
        rules = {f"jvp{index}": rule for index, rule in enumerate(combined)}
    return {name: rule for name, rule in rules.items() if rule is not None}
