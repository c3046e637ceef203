"""Gradients of a call: to time them, to compare them between functions, and to explain why a config lacks them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.functions.binding import split_config
from quarantune.functions.description import as_structs
from quarantune.host.interruptions import failure_of
from quarantune.jax_internals import jax_functions, jax_traces
from quarantune.transport.arrays import TILE_ELEMENTS

_WEIGHT_SEED = 20_011


def with_gradient(jitted: Any) -> Any:
    """Returns a jitted function that returns the output of `jitted` and its gradients.

    These are the gradients of half the sum of the squares of the output. Its cotangent is the output itself: it takes
    no time to compute, and unlike a constant it does not let the compiler simplify the backward pass.

    Args:
        jitted: the jitted function. The returned function donates no arguments.
    """
    options = dataclasses.replace(jax_functions.jit_options(jitted), donate_argnums=(), donate_argnames=())
    inner = jax_functions.without_compiler_options(jitted)

    @functools.wraps(jitted.__wrapped__)
    def trained(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        forward, free, _ = _of_floats(inner, args, kwargs, options)
        output, pull_back = jax.vjp(forward, free)
        (gradients,) = pull_back(jax.tree.map(_cotangent, output))
        return output, list(gradients.values())

    return options.rebuild(trained)


def _of_floats(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: jax_functions.JitOptions
) -> tuple[Callable[[dict[int, Any]], Any], dict[int, Any], list[Any]]:
    """Returns a call as a function of its floating leaves, these leaves by number, and the path of each leaf."""
    found, structure = jax.tree_util.tree_flatten_with_path(options.dynamic(args, kwargs))
    paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]

    def call(free: dict[int, Any]) -> Any:
        filled = [free.get(index, leaf) for index, leaf in enumerate(leaves)]
        positional, named = jax.tree.unflatten(structure, filled)
        return fn(*(positional.get(index, arg) for index, arg in enumerate(args)), **{**kwargs, **named})

    return call, {index: leaf for index, leaf in enumerate(leaves) if _is_inexact(leaf)}, paths


def _cotangent(leaf: Any) -> Any:
    return leaf if _is_inexact(leaf) else np.zeros(jnp.shape(leaf), jax.dtypes.float0)


def _is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def explain_failure(
    jitted: Any, config: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str
) -> None:
    """Raises if a config has no gradient although the function's own defaults have one.

    This only traces the function, outside the trace in progress. Without it, JAX's error would not mention the config.

    Args:
        jitted: the function.
        config: the config.
        args: the positional arguments of the call. This does nothing unless JAX is differentiating an argument.
        kwargs: its keyword arguments.
        name: the function's name, for the message.
    """
    if not any(map(jax_traces.is_differentiated, jax.tree.leaves((args, dict(kwargs))))):
        return

    structs, named = as_structs(args, kwargs)
    trained = with_gradient(jitted)
    keywords, _ = split_config(jitted, dict(config))
    with jax_traces.outside_of_traces():
        failure = failure_of(lambda: trained.eval_shape(*structs, **named, **keywords))
        if failure is None or failure_of(lambda: trained.eval_shape(*structs, **named)) is not None:
            return  # the config has a gradient, or the defaults have none either
    failure.add_note(
        f"{name} was tuned by its forward pass alone, and the backward pass fails with the winner {dict(config)}, "
        f"but not with the defaults: tune it with time_grad=True, which times both"
    )
    raise failure


# --- gradients to compare ---


def gradients(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: jax_functions.JitOptions
) -> dict[str, Any]:
    """Returns the gradients of `scalar_of(fn(*args, **kwargs))`.

    Args:
        fn: a jitted or plain function that JAX can differentiate. It uses up the arguments that it donates.
        args: its positional arguments, including static arguments.
        kwargs: its keyword arguments, including static arguments.
        options: jit options that mark the static arguments.

    Returns:
        A gradient for each floating or complex array in the other arguments, by its place, such as `args[0]['w']`.
        Everything else stays fixed.
    """
    call, free, paths = _of_floats(fn, args, kwargs, options)
    found = jax.grad(lambda free: scalar_of(call(free)))(free) if free else {}
    return {
        f"{('args', 'kwargs')[paths[index][0].idx]}{jax.tree_util.keystr(paths[index][1:])}": gradient
        for index, gradient in found.items()
    }


def scalar_of(tree: Any) -> jax.Array:
    """Returns one number that depends on every element of the floating and complex arrays of a pytree.

    It is the sum of the elements times fixed weights, real parts only. The weights have both signs, and stay away from
    zero. Weights of 1 would not do: a softmax always adds up to 1, whatever its gradient is. Complex arrays have
    complex weights, so that imaginary parts count.

    Args:
        tree: the output of a function. Other leaves do not count.
    """
    total = jnp.zeros((), jnp.float32)
    for position, leaf in enumerate(jax.tree_util.tree_leaves(tree)):
        if _is_inexact(leaf):
            wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            weights = _weights(position, leaf.shape, is_complex=jnp.issubdtype(leaf.dtype, jnp.complexfloating))
            total += jnp.sum(jnp.real(wide * weights.astype(wide.dtype)))
    return total


def _weights(position: int, shape: tuple[int, ...], *, is_complex: bool) -> Any:
    generator = np.random.default_rng([_WEIGHT_SEED, position, *shape])

    def tile() -> Any:
        elements = min(math.prod(shape), TILE_ELEMENTS)
        drawn = generator.random(elements, np.float32) - np.float32(0.5)
        return drawn + np.copysign(np.float32(0.5), drawn)

    return np.resize(tile() + 1j * tile() if is_complex else tile(), shape)
