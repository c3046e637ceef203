"""Refuses functions and arguments with which every config would fail, before any worker starts."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from quarantune import jax_internals
from quarantune.transport import binding
from quarantune.values.configs import Config, check_parameters


def check_is_jitted(fn: Callable[..., Any], name: str, *, for_what: str) -> None:
    """Raises where a function is not jitted.

    Args:
        fn: the function.
        name: its name in messages.
        for_what: the function of ours that compiles it.

    Raises:
        TypeError: it is not jitted.
    """
    if not jax_internals.is_jitted(fn):
        raise TypeError(
            f"{for_what} compiles what jax.jit has wrapped, and {name!r} is not jitted: "
            "wrap it, with the tunables among its static_argnames"
        )


def check_jit_options(fn: Callable[..., Any], name: str) -> None:
    """Raises where a jitted function has options with which it cannot be tuned.

    Args:
        fn: the jitted function.
        name: its name in messages.

    Raises:
        TypeError: the function accepts no config, or cannot be rebuilt in a worker.
    """
    options = jax_internals.jit_options(fn)
    if options.takes_no_keywords:
        raise TypeError(
            f"{name}: jax.jit accepts no keyword arguments with in_shardings, and that is how the tunables are passed: "
            "leave in_shardings out and lay out the arguments (jax.device_put(x, sharding)), or call "
            "jax.lax.with_sharding_constraint inside the function"
        )
    if options.cannot_travel:
        from quarantune.transport import importable  # few functions need it

        if not importable.may_travel_by_name(fn):
            options.check_can_travel(name)


def check_configs(
    fn: Callable[..., Any],
    configs: Sequence[Config],
    *,
    name: str,
    signature: inspect.Signature,
    need_defaults: bool,
) -> None:
    """Raises where a function cannot take the keys of its configs.

    Args:
        fn: the function.
        configs: its configs, or a few in which every value occurs.
        name: its name in messages.
        signature: its signature.
        need_defaults: whether every tunable must have a default, because the function is also called without it.

    Raises:
        TypeError: a key is no parameter that can be passed by keyword, or has no default.
        ValueError: a key is not static.
    """
    is_jitted = jax_internals.is_jitted(fn)
    # Configs are passed by keyword, so parameters that jit knows as static only by position do not count.
    static_names = frozenset(jax_internals.jit_options(fn).static_argnames) if is_jitted else None
    check_parameters(
        configs, parameters=signature, static_names=static_names, fn_name=name, need_defaults=need_defaults
    )
    if is_jitted:
        binding.check(fn, configs, name=name)


def check_no_references(arguments: Mapping[str, Any], name: str) -> None:
    """Raises where an argument is a mutable array: every config would write to it, and each in another process.

    Args:
        arguments: the arguments by parameter.
        name: the function's name in messages.

    Raises:
        TypeError: an argument is, or contains, a `jax.Ref`.
    """
    for parameter, value in arguments.items():
        if any(isinstance(leaf, jax.Ref) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"{name}: argument {parameter!r} is a jax.Ref, to which every config would write: tune a function that "
                f"takes its value and returns the new one, as in {parameter}[...] = fn({parameter}[...]), or give the "
                f"tunables by hand"
            )


def check_arguments(arguments: Mapping[str, Any], name: str) -> None:
    """Raises where `jax.jit` would refuse an argument.

    Args:
        arguments: the arguments that are not static, by parameter.
        name: the function's name in messages.

    Raises:
        TypeError: an argument is, or contains, something that is neither array nor number.
    """
    for parameter, value in arguments.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            if (reason := _why_not_dynamic(leaf)) is not None:
                where = f"argument {parameter!r}" if not path else f"{parameter}{jax.tree_util.keystr(path)}"
                raise TypeError(
                    f"{name}: {where} is {reprlib.repr(leaf)}, which jax.jit does not take as a dynamic argument "
                    f"({reason}): {_remedy(parameter, leaf, is_inside=bool(path))}"
                )


def has_symbolic_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an argument's shape is symbolic, as `jax.export` makes them: no data has such a shape."""
    leaves = jax.tree_util.tree_leaves((args, dict(kwargs)))
    arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))]
    return any(not isinstance(size, (int, np.integer)) for array in arrays for size in array.shape)


def _why_not_dynamic(leaf: Any) -> str | None:
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, bool, int, float, complex)):
        return None
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError):
        return f"dtype {leaf.dtype}" if isinstance(leaf, (np.ndarray, np.generic)) else type(leaf).__name__
    return None


def _remedy(parameter: str, leaf: Any, *, is_inside: bool) -> str:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return "give an array of numbers"
    static = (
        f"pass it as a static argument of its own, or make it a static field of the pytree that {parameter!r} is"
        if is_inside
        else f"make it static with static_argnames=[{parameter!r}] in jax.jit"
    )
    kind = type(leaf)
    if kind.__module__ == "builtins":
        return static
    return f"{static}, or register {kind.__qualname__} as a pytree (jax.tree_util.register_dataclass)"
