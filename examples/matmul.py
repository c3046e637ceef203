"""Tunes the tiles of a Pallas matmul: interpreted on a CPU, compiled by Triton on a GPU."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import quarantune


def tile(a_ref, b_ref, out_ref, *, BK: int) -> None:
    """Computes one BM x BN tile of the product, BK columns of `a` at a time."""

    def add_block(step, total):
        k = pl.ds(step * BK, BK)
        return total + jnp.dot(a_ref[:, k], b_ref[k, :], preferred_element_type=jnp.float32)

    zeros = jnp.zeros(out_ref.shape, jnp.float32)
    total = jax.lax.fori_loop(0, a_ref.shape[1] // BK, add_block, zeros)
    out_ref[...] = total.astype(out_ref.dtype)


@quarantune.autotune({"BM": [32, 64, 128], "BN": [32, 128], "BK": [32, 64]})
@functools.partial(jax.jit, static_argnames=["interpret", "BM", "BN", "BK"])
def matmul(a, b, *, interpret: bool, BM: int = 32, BN: int = 32, BK: int = 32):
    """Multiplies two matrices whose sizes are multiples of the tile sizes."""
    (m, k), n = a.shape, b.shape[1]
    return pl.pallas_call(
        functools.partial(tile, BK=BK),
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(m // BM, n // BN),
        in_specs=[pl.BlockSpec((BM, k), lambda i, j: (i, 0)), pl.BlockSpec((k, BN), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((BM, BN), lambda i, j: (i, j)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(a, b)


def main() -> None:
    """Tunes, prints the outcome of every config, and checks the winner."""
    interpret = jax.default_backend() == "cpu"
    size, dtype = (512, jnp.float32) if interpret else (2048, jnp.bfloat16)
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))

    print(matmul.tune(a, b, interpret=interpret).table())

    product = matmul(a, b, interpret=interpret)  # the winner, without tuning again
    expected = jnp.dot(a, b, preferred_element_type=jnp.float32)
    error = jnp.max(jnp.abs(product - expected)) / jnp.max(jnp.abs(expected))
    if not error <= 0.01:
        sys.exit(f"the product is off by {error:.1%} of its largest element")
    print(f"agrees with a @ b to {error:.1e} of its largest element")


if __name__ == "__main__":
    main()
