"""Times a jitted function together with its gradient, and explains why a config has no gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quarantune import jax_internals
from quarantune.transport import binding


def with_gradient(jitted: Any) -> Any:
    """Returns a jitted function that returns the output of `jitted` and its gradients.

    These are the gradients of half the sum of the squares of the output: the output is its own cotangent, which takes
    no time to compute and is no constant by which the compiler could simplify the backward pass.

    Args:
        jitted: the jitted function. The arguments that it donates are not donated.
    """
    options = dataclasses.replace(jax_internals.jit_options(jitted), donate_argnums=(), donate_argnames=())
    inner = jax_internals.without_compiler_options(jitted)

    @functools.wraps(jitted.__wrapped__)
    def trained(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        return _output_and_gradients(inner, options, args, kwargs)

    return options.rebuild(trained)


def _output_and_gradients(
    jitted: Callable[..., Any], options: jax_internals.JitOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Any]]:
    is_static = [options.is_static_position(index, len(args)) for index in range(len(args))]
    dynamic = (
        [arg for arg, static in zip(args, is_static, strict=True) if not static],
        {name: arg for name, arg in kwargs.items() if name not in options.static_argnames},
    )
    leaves, structure = jax.tree.flatten(dynamic)
    free = {index: leaf for index, leaf in enumerate(leaves) if _is_inexact(leaf)}

    def forward(free: dict[int, Any]) -> Any:
        filled, named = jax.tree.unflatten(structure, [free.get(index, leaf) for index, leaf in enumerate(leaves)])
        rest = iter(filled)
        all_args = [arg if static else next(rest) for arg, static in zip(args, is_static, strict=True)]
        return jitted(*all_args, **{**kwargs, **named})

    output, pull_back = jax.vjp(forward, free)
    (gradients,) = pull_back(jax.tree.map(_cotangent, output))
    return output, list(gradients.values())


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
    if not any(map(jax_internals.is_differentiated, jax.tree.leaves((args, dict(kwargs))))):
        return

    def struct(leaf: Any) -> Any:
        if not isinstance(leaf, jax.core.Tracer):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))

    structs, named = jax.tree.map(struct, (args, dict(kwargs)))
    trained = with_gradient(jitted)
    keywords, _ = binding.split(jitted, dict(config))
    with jax_internals.outside_of_traces():
        try:
            trained.eval_shape(*structs, **named, **keywords)
            return
        except Exception as error:
            failure = error
        try:
            trained.eval_shape(*structs, **named)
        except Exception:
            return  # the function has no gradient with its defaults either
    failure.add_note(
        f"{name} was tuned by its forward pass alone, and the backward pass fails with the winner {dict(config)}, "
        f"though not with the defaults: tune it with time_grad=True, which times both"
    )
    raise failure
