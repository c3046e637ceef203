"""Tunes two Pallas kernels, an RMSNorm and a matmul, by the time of the function that calls both.

The best config of a kernel alone need not be the best next to another kernel: kernels share the device's caches.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import quarantune


def norm_rows(x_ref, scale_ref, out_ref) -> None:
    """Normalises a block of rows."""
    x = x_ref[...].astype(jnp.float32)
    rms = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
    out_ref[...] = (x * rms * scale_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


@quarantune.autotune({"ROWS": [8, 32, 128]})
@functools.partial(jax.jit, static_argnames=["interpret", "ROWS"])
def normalize(x, scale, *, interpret: bool, ROWS: int = 8):
    """Returns the rows of `x` divided by their root mean square, times `scale`."""
    m, n = x.shape
    rows = pl.BlockSpec((ROWS, n), lambda i: (i, 0))
    return pl.pallas_call(
        norm_rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(m // ROWS,),
        in_specs=[rows, pl.BlockSpec((1, n), lambda i: (0, 0))],
        out_specs=rows,
        interpret=interpret,
    )(x, scale[None])


def tile(x_ref, w_ref, out_ref) -> None:
    """Computes one BM x BN tile of the product."""
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(out_ref.dtype)


@quarantune.autotune({"BM": [32, 128], "BN": [32, 128]})
@functools.partial(jax.jit, static_argnames=["interpret", "BM", "BN"])
def project(x, w, *, interpret: bool, BM: int = 32, BN: int = 32):
    """Returns x @ w."""
    (m, k), n = x.shape, w.shape[1]
    return pl.pallas_call(
        tile,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // BM, n // BN),
        in_specs=[pl.BlockSpec((BM, k), lambda i, j: (i, 0)), pl.BlockSpec((k, BN), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((BM, BN), lambda i, j: (i, j)),
        interpret=interpret,
    )(x, w)


@quarantune.contextual_autotune(warmup=1, rep=5)
@functools.partial(jax.jit, static_argnames=["interpret"])
def layer(x, scale, w, *, interpret: bool):
    """Calls both kernels: `normalize` is tuned first, then `project` together with the best config of `normalize`."""
    return x + jax.nn.silu(project(normalize(x, scale, interpret=interpret), w, interpret=interpret))


def main() -> None:
    """Tunes, prints the outcome of each kernel's configs within the layer, and checks the winners."""
    interpret = jax.default_backend() == "cpu"
    m, n = (256, 256) if interpret else (4096, 128)
    x, w = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(m, n), (n, n)]))
    scale, w = jnp.linspace(0.5, 1.5, n), w / n**0.5

    result = layer.tune(x, scale, w, interpret=interpret)
    print(result.table())

    out = layer(x, scale, w, interpret=interpret)  # runs the winners, without tuning again
    rms = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
    expected = x + jax.nn.silu(jnp.dot(x * rms * scale, w))
    error = jnp.max(jnp.abs(out - expected)) / jnp.max(jnp.abs(expected))
    if not error <= 0.01:
        sys.exit(f"the result is off by {error:.1%} of its largest element")
    print(f"agrees with plain JAX to {error:.1e} of its largest element")


if __name__ == "__main__":
    main()
