"""Tunes one Pallas kernel that fuses RMSNorm with the rotary embedding of attention's queries."""

from __future__ import annotations

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import quarantune

EPSILON = 1e-6


def tile(x_ref, weight_ref, cos_ref, sin_ref, out_ref) -> None:
    """Normalises the heads of a few tokens, then rotates each pair (i, i + depth / 2) by its token's angles."""
    depth = x_ref.shape[-1]
    low, high = (..., slice(0, depth // 2)), (..., slice(depth // 2, depth))
    a, b = x_ref[low].astype(jnp.float32), x_ref[high].astype(jnp.float32)
    mean_square = (jnp.sum(a * a, axis=-1, keepdims=True) + jnp.sum(b * b, axis=-1, keepdims=True)) / depth
    scale = jax.lax.rsqrt(mean_square + EPSILON)
    a, b = a * scale * weight_ref[low], b * scale * weight_ref[high]
    cos, sin = cos_ref[...][:, None, :], sin_ref[...][:, None, :]
    out_ref[low] = (a * cos - b * sin).astype(out_ref.dtype)
    out_ref[high] = (b * cos + a * sin).astype(out_ref.dtype)


def reference(x, weight, cos, sin, *, interpret: bool = False):
    """Returns the same in plain JAX, as the expected output; `interpret` has no effect."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPSILON) * weight
    a, b = jnp.split(normed, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


# Warps only matter on a GPU. Interpreted configs that differ only in warps are the same program and run once.
SPACE = {"BT": [1, 4, 16], "BH": [2, 8], "warps": [1, 4, 8]}


@quarantune.autotune(SPACE, ref_fn=reference, rtol=2e-2, atol=2e-2)
@functools.partial(jax.jit, static_argnames=["interpret", *SPACE])
def rmsnorm_rope(x, weight, cos, sin, *, interpret: bool, BT: int = 1, BH: int = 2, warps: int = 4):
    """Normalises and rotates x, (tokens, heads, depth), BT tokens and BH heads at a time."""
    tokens, heads, depth = x.shape
    rows = pl.BlockSpec((BT, BH, depth), lambda i, j: (i, j, 0))
    angles = pl.BlockSpec((BT, depth // 2), lambda i, j: (i, 0))
    return pl.pallas_call(
        tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(tokens // BT, heads // BH),
        in_specs=[rows, pl.BlockSpec((depth,), lambda i, j: (0,)), angles, angles],
        out_specs=rows,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )(x, weight, cos, sin)


def rotations(tokens: int, depth: int):
    """Returns the cosines and sines of each token's angles, (tokens, depth / 2) each."""
    frequencies = 10_000.0 ** (-jnp.arange(0, depth, 2) / depth)
    angles = jnp.arange(tokens)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def main() -> None:
    """Tunes, prints the outcome of every config and the gain over the defaults, and checks the winner."""
    interpret = jax.default_backend() == "cpu"
    shape, dtype = ((256, 8, 64), jnp.float32) if interpret else ((8192, 32, 128), jnp.bfloat16)
    tokens, _, depth = shape
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    weight = jax.random.uniform(jax.random.key(1), (depth,), dtype, 0.5, 1.5)
    cos, sin = rotations(tokens, depth)

    result = rmsnorm_rope.tune(x, weight, cos, sin, interpret=interpret)
    print(result.table())
    parameters = inspect.signature(rmsnorm_rope).parameters
    defaults = {name: parameters[name].default for name in result.best_config}
    default_ms = next(trial.time_ms for trial in result.trials if trial.config == defaults)
    print(f"the defaults take {default_ms / result.time_ms:.2f}x the tuned config's time")

    out = rmsnorm_rope(x, weight, cos, sin, interpret=interpret)  # the winner, without tuning again
    expected = reference(x, weight, cos, sin)
    error = jnp.max(jnp.abs(out - expected)) / jnp.max(jnp.abs(expected))
    if not error <= 0.01:
        sys.exit(f"the result is off by {error:.1%} of its largest element")
    print(f"agrees with plain JAX to {error:.1e} of its largest element")


if __name__ == "__main__":
    main()
