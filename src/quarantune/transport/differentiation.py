"""Gradients of a call: to time with it, to compare with those of another function, and why a config has none."""

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

    These are the gradients of half the sum of the squares of the output: the output is its own cotangent, which takes
    no time to compute and is no constant that would let the compiler simplify the backward pass.

    Args:
        jitted: the jitted function. The arguments that it donates are not donated.
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

    The function is only traced, outside the trace in progress. Without this, JAX's error would not mention the config.

    Args:
        jitted: the function.
        config: the config.
        args: the positional arguments of the call. Nothing is done unless JAX is differentiating it.
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
            return  # in the second case, the function has no gradient with its defaults either
    failure.add_note(
        f"{name} was tuned by its forward pass alone, and the backward pass fails with the winner {dict(config)}, "
        f"though not with the defaults: tune it with time_grad=True, which times both"
    )
    raise failure


# --- gradients to compare ---


def gradients(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: jax_functions.JitOptions
) -> dict[str, Any]:
    """Returns the gradients of `scalar_of(fn(*args, **kwargs))`.

    Args:
        fn: a jitted or plain function that JAX can differentiate. The arguments it donates are used up.
        args: its positional arguments, the static ones included.
        kwargs: its keyword arguments, the static ones included.
        options: tells which of them are static.

    Returns:
        A gradient for each floating or complex array among the arguments that are not static, by its place,
        such as `args[0]['w']`. All else is held fixed.
    """
    call, free, paths = _of_floats(fn, args, kwargs, options)
    found = jax.grad(lambda free: scalar_of(call(free)))(free) if free else {}
    return {
        f"{('args', 'kwargs')[paths[index][0].idx]}{jax.tree_util.keystr(paths[index][1:])}": gradient
        for index, gradient in found.items()
    }


def scalar_of(tree: Any) -> jax.Array:
    """Returns one number that depends on every element of the floating and complex arrays of a pytree.

    It is the sum of the elements times fixed weights, real parts only. The weights have both signs and none
    is near zero. All ones would not do: a softmax always adds up to 1, whatever its gradient is. Those of
    complex arrays are complex, so that imaginary parts count too.

    Args:
        tree: the output of a function; its other leaves are left out.
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
