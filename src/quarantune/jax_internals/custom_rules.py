"""Functions with custom rules, such as `jax.custom_vjp`: their classes, and the rules they were given."""

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


def custom_rules(fn: object) -> Mapping[str, Any]:
    """Returns the rules of a function of one of these classes, such as its derivative, by name; empty for any other.

    Private because JAX has no public way to read the rules back. A rule is a callable, or a dict of plain values for
    a sharding rule that was given as text. `fun` is the function itself, where `__wrapped__` does not lead to it.

    Args:
        fn: any object.
    """
    from jax._src import custom_api_util

    kind = type(fn)
    if issubclass(kind, (jax.custom_vjp, jax.custom_jvp)):
        return _derivative_rules(fn)
    if not issubclass(kind, tuple(custom_api_util._custom_wrapper_types)):
        return {}
    # `custom_vmap`, `custom_partitioning` and the like keep each rule, and the function itself, in an attribute.
    state = dict(vars(fn))
    if state.pop("__wrapped__", None) is not None:
        state.pop("fun", None)
    text_rule = state.get("sharding_rule")
    if text_rule is not None and not callable(text_rule):
        state["sharding_rule"] = vars(text_rule)
    return {name: rule for name, rule in state.items() if callable(rule) or isinstance(rule, dict)}


def _derivative_rules(fn: object) -> Mapping[str, Any]:
    """Returns the rules of a `jax.custom_vjp` or `jax.custom_jvp` function.

    `defjvps` combines one rule for each argument into a function of JAX's, whose closure keeps them.
    """
    rules = {name: getattr(fn, name, None) for name in ("fwd", "bwd", "jvp")}
    jvp = rules["jvp"]
    if inspect.isfunction(jvp) and "jvps" in jvp.__code__.co_freevars and jvp.__module__.startswith("jax."):
        combined = inspect.getclosurevars(jvp).nonlocals["jvps"]
        rules = {f"jvp{index}": rule for index, rule in enumerate(combined)}
    return {name: rule for name, rule in rules.items() if rule is not None}
