"""Tunes one Pallas kernel that computes the first half of a gated MLP, silu(x @ gate) * (x @ up)."""

from __future__ import annotations

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import quarantune


def tile(x_ref, gate_ref, up_ref, out_ref, *, BK: int) -> None:
    """Computes one BM x BN tile of the result; both products share each block of BK columns of `x`."""

    def add_block(step, totals):
        k = pl.ds(step * BK, BK)
        x = x_ref[:, k]
        gated, linear = totals
        return (
            gated + jnp.dot(x, gate_ref[k, :], preferred_element_type=jnp.float32),
            linear + jnp.dot(x, up_ref[k, :], preferred_element_type=jnp.float32),
        )

    zeros = jnp.zeros(out_ref.shape, jnp.float32)
    gated, linear = jax.lax.fori_loop(0, x_ref.shape[1] // BK, add_block, (zeros, zeros))
    out_ref[...] = (jax.nn.silu(gated) * linear).astype(out_ref.dtype)


def reference(x, gate, up, *, interpret: bool = False):
    """Returns the same in plain JAX, as the expected output; `interpret` has no effect."""
    gated = jnp.dot(x, gate, preferred_element_type=jnp.float32)
    linear = jnp.dot(x, up, preferred_element_type=jnp.float32)
    return (jax.nn.silu(gated) * linear).astype(x.dtype)


# Warps and stages only matter on a GPU. Interpreted configs that differ only in them are the same program, run once.
SPACE = {"BM": [64, 128], "BN": [64, 128], "BK": [32, 64], "warps": [4, 8], "stages": [2, 3]}


@quarantune.autotune(SPACE, ref_fn=reference, rtol=2e-2, atol=2e-2)
@functools.partial(jax.jit, static_argnames=["interpret", *SPACE])
def gated_mlp(
    x, gate, up, *, interpret: bool, BM: int = 64, BN: int = 64, BK: int = 32, warps: int = 4, stages: int = 2
):
    """Returns silu(x @ gate) * (x @ up); the matrices' sizes must be multiples of the tile sizes."""
    (m, k), n = x.shape, gate.shape[1]
    columns = pl.BlockSpec((k, BN), lambda i, j: (0, j))
    return pl.pallas_call(
        functools.partial(tile, BK=BK),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // BM, n // BN),
        in_specs=[pl.BlockSpec((BM, k), lambda i, j: (i, 0)), columns, columns],
        out_specs=pl.BlockSpec((BM, BN), lambda i, j: (i, j)),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(x, gate, up)


def main() -> None:
    """Tunes, prints the outcome of every config and the gain over the defaults, and checks the winner."""
    interpret = jax.default_backend() == "cpu"
    (m, k, n), dtype = ((256, 256, 512), jnp.float32) if interpret else ((4096, 4096, 8192), jnp.bfloat16)
    shapes = [(m, k), (k, n), (k, n)]
    x, gate, up = (jax.random.normal(jax.random.key(seed), shape, dtype) for seed, shape in enumerate(shapes))
    gate, up = gate / k**0.5, up / k**0.5  # keeps both products about as large as `x`

    result = gated_mlp.tune(x, gate, up, interpret=interpret)
    print(result.table())
    parameters = inspect.signature(gated_mlp).parameters
    defaults = {name: parameters[name].default for name in result.best_config}
    default_ms = next(trial.time_ms for trial in result.trials if trial.config == defaults)
    print(f"the defaults take {default_ms / result.time_ms:.2f}x the tuned config's time")

    out = gated_mlp(x, gate, up, interpret=interpret)  # the winner, without tuning again
    expected = reference(x, gate, up)
    error = jnp.max(jnp.abs(out - expected)) / jnp.max(jnp.abs(expected))
    if not error <= 0.01:
        sys.exit(f"the result is off by {error:.1%} of its largest element")
    print(f"agrees with plain JAX to {error:.1e} of its largest element")


if __name__ == "__main__":
    main()
