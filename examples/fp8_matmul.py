"""Tunes an fp8 matmul with a scale per matrix: Pallas, interpreted on a CPU, compiled on a GPU with fp8."""

from __future__ import annotations

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import quarantune

BK = 128  # a tile's row is then 128 bytes, as wide as all banks of a GPU's shared memory together


def tile(a_ref, b_ref, a_scale_ref, b_scale_ref, out_ref, *, via: str) -> None:
    """Computes one BM x BN tile of the product, BK columns of `a` and `b` at a time, and scales it."""

    def add_block(step, total):
        k = pl.ds(step * BK, BK)
        a, b = a_ref[:, k].astype(via), b_ref[:, k].astype(via)
        return total + jnp.dot(a, b.T, preferred_element_type=jnp.float32)

    zeros = jnp.zeros(out_ref.shape, jnp.float32)
    total = jax.lax.fori_loop(0, a_ref.shape[1] // BK, add_block, zeros)
    out_ref[...] = (total * (a_scale_ref[...] * b_scale_ref[...])).astype(out_ref.dtype)


def reference(a, b, a_scale, b_scale, *, interpret: bool = False):
    """The product in plain JAX and float32, which the kernel must agree with."""
    wide = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32).T, precision="highest")
    return (wide * (a_scale * b_scale)).astype(jnp.bfloat16)


# float16 holds every float8_e4m3fn, so that either may be multiplied. Which is faster, the device decides: on
# Hopper, Triton makes float16 of fp8 in any case, but without the warp-group instructions that float16 gets.
# Warps are the GPU's: interpreted, configs that differ in nothing else are one program, run once.
SPACE = {"BM": [64, 128], "BN": [64, 128], "via": ["float8_e4m3fn", "float16"], "warps": [4, 8]}


# The products are exact in float32, so that only their sums and the bfloat16 output are rounded, the latter
# by up to 2**-8 of itself. These tolerances leave room for that: not one element may be beyond them.
@quarantune.autotune(SPACE, ref_fn=reference, rtol=2e-2, atol=1e-2, max_mismatched_ratio=0.0)
@functools.partial(jax.jit, static_argnames=["interpret", *SPACE])
def fp8_matmul(
    a,
    b,
    a_scale,
    b_scale,
    *,
    interpret: bool,
    BM: int = 64,
    BN: int = 64,
    via: str = "float8_e4m3fn",
    warps: int = 4,
):
    """Returns (a * a_scale) @ (b * b_scale).T in bfloat16; `b` is (n, k), as the tensor cores want fp8."""
    (m, k), n = a.shape, b.shape[0]
    scalar = pl.BlockSpec((), lambda i, j: ())
    return pl.pallas_call(
        functools.partial(tile, via=via),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(m // BM, n // BN),
        in_specs=[
            pl.BlockSpec((BM, k), lambda i, j: (i, 0)),
            pl.BlockSpec((BN, k), lambda i, j: (j, 0)),
            scalar,
            scalar,
        ],
        out_specs=pl.BlockSpec((BM, BN), lambda i, j: (i, j)),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=3),
        interpret=interpret,
    )(a, b, a_scale, b_scale)


def quantize(x):
    """Returns x in fp8, its largest element as the largest number there is, and the scale that undoes it."""
    scale = jnp.max(jnp.abs(x)) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    return (x / scale).astype(jnp.float8_e4m3fn), scale


def main() -> None:
    """Tunes, prints every config's fate and what the best gains over the defaults, and checks the winner."""
    interpret = jax.default_backend() == "cpu"
    size = 256 if interpret else 4096
    a, a_scale = quantize(jax.random.normal(jax.random.key(0), (size, size)))
    b, b_scale = quantize(jax.random.normal(jax.random.key(1), (size, size)) / size**0.5)

    result = fp8_matmul.tune(a, b, a_scale, b_scale, interpret=interpret)
    print(result.table())
    parameters = inspect.signature(fp8_matmul).parameters
    defaults = {name: parameters[name].default for name in result.best_config}
    default_ms = next(trial.time_ms for trial in result.trials if trial.config == defaults)
    print(f"the defaults take {default_ms / result.time_ms:.2f}x the tuned config's time")

    product = fp8_matmul(a, b, a_scale, b_scale, interpret=interpret)  # the winner, without tuning again
    expected = reference(a, b, a_scale, b_scale)
    error = jnp.max(jnp.abs(product - expected)) / jnp.max(jnp.abs(expected))
    if not error <= 0.01:
        sys.exit(f"the product is off by {error:.1%} of its largest element")
    print(f"agrees with plain JAX to {error:.1e} of its largest element")


if __name__ == "__main__":
    main()
