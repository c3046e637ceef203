"""Tunes a Pallas fp8 matmul with one scale per matrix: interpreted on a CPU, compiled on a GPU that supports fp8."""

from __future__ import annotations

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import quarantune

BK = 128  # one row of a tile is then 128 bytes, the width of all shared-memory banks of a GPU together


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
    """Returns the product computed in float32 by plain JAX, as the expected output."""
    wide = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32).T, precision="highest")
    return (wide * (a_scale * b_scale)).astype(jnp.bfloat16)


# float16 represents every float8_e4m3fn value, so the kernel may multiply in either type. The faster one depends on the
# device: on Hopper, Triton converts fp8 to float16 anyway, but without the warp-group instructions it uses for float16.
# Warps only matter on a GPU. Interpreted configs that differ only in warps are the same program and run once.
SPACE = {"BM": [64, 128], "BN": [64, 128], "via": ["float8_e4m3fn", "float16"], "warps": [4, 8]}


# The products are exact in float32. Only their sums and the bfloat16 output are rounded, the output by up to 2**-8 of
# its value. The tolerances allow for this rounding, and no element may exceed them.
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
    """Returns (a * a_scale) @ (b * b_scale).T in bfloat16; `b` is (n, k), the layout that tensor cores need for fp8."""
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
    """Returns x in fp8, scaled so that its largest element is the largest fp8 number, and the inverse scale."""
    scale = jnp.max(jnp.abs(x)) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    return (x / scale).astype(jnp.float8_e4m3fn), scale


def main() -> None:
    """Tunes, prints the outcome of every config and the gain over the defaults, and checks the winner."""
    interpret = jax.default_backend() == "cpu"
    size = 128 if interpret else 4096
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
