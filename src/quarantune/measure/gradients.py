"""Gradients of a function with respect to its floating arguments, so that two functions' gradients can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.measure.elements import has_dtype

_Array: TypeAlias = "np.ndarray[Any, Any]"

_WEIGHT_SEED = 20_011
_WEIGHT_TILE_ELEMENTS = 1_000_003
"""Weights are drawn once for a tile and repeated; a prime, so that it fits no block of a kernel."""


def gradients(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the gradients of `scalar_of(fn(*args, **kwargs))`.

    Args:
        fn: a jitted or plain function that JAX can differentiate. The arguments it donates are used up.
        args: its positional arguments, the static ones included.
        kwargs: its keyword arguments, the static ones included.
        static_argnums: positions of static arguments; negative ones count from the end.
        static_argnames: names of static keyword arguments.

    Returns:
        A gradient for each floating or complex array among the arguments that are not static, by its place,
        such as `args[0]['w']`. All else is held fixed.
    """
    dynamic_args = {
        index: arg
        for index, arg in enumerate(args)
        if index not in static_argnums and index - len(args) not in static_argnums
    }
    dynamic_kwargs = {name: arg for name, arg in kwargs.items() if name not in static_argnames}
    dynamic = {"args": dynamic_args, "kwargs": dynamic_kwargs}
    found, structure = jax.tree_util.tree_flatten_with_path(dynamic)
    free = {index: leaf for index, (_, leaf) in enumerate(found) if has_dtype(leaf, np.inexact)}

    def loss(free: dict[int, Any]) -> jax.Array:
        leaves = [free.get(index, leaf) for index, (_, leaf) in enumerate(found)]
        filled = jax.tree_util.tree_unflatten(structure, leaves)
        all_args = [filled["args"].get(index, arg) for index, arg in enumerate(args)]
        return scalar_of(fn(*all_args, **{**kwargs, **filled["kwargs"]}))

    found_gradients = jax.grad(loss)(free) if free else {}
    return {_place(found[index][0]): gradient for index, gradient in found_gradients.items()}


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
        if has_dtype(leaf, np.inexact):
            wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            weights = _weights(position, leaf.shape, is_complex=has_dtype(leaf, np.complexfloating))
            total += jnp.sum(jnp.real(wide * weights.astype(wide.dtype)))
    return total


def _weights(position: int, shape: tuple[int, ...], *, is_complex: bool) -> _Array:
    generator = np.random.default_rng([_WEIGHT_SEED, position, *shape])

    def tile() -> _Array:
        elements = min(math.prod(shape), _WEIGHT_TILE_ELEMENTS)
        drawn: _Array = generator.random(elements, np.float32) - np.float32(0.5)
        return drawn + np.copysign(np.float32(0.5), drawn)

    return np.resize(tile() + 1j * tile() if is_complex else tile(), shape)


def _place(path: tuple[Any, ...]) -> str:
    return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
