"""Pallas kernels for TPUs whose configs `spaces.tpu_configs` makes: our own, and those of JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def _multiply(x: Any, y: Any, out: Any, total: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


@functools.partial(jax.jit, static_argnames=["BLOCK_M", "BLOCK_N", "BLOCK_K"])
def matmul(x: Any, y: Any, BLOCK_M: int = 128, BLOCK_N: int = 128, BLOCK_K: int = 128) -> Any:
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        _multiply,
        grid=(m // BLOCK_M, n // BLOCK_N, k // BLOCK_K),
        in_specs=[
            pl.BlockSpec((BLOCK_M, BLOCK_K), lambda i, j, at: (i, at)),
            pl.BlockSpec((BLOCK_K, BLOCK_N), lambda i, j, at: (at, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK_M, BLOCK_N), lambda i, j, at: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((BLOCK_M, BLOCK_N), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, y)


@functools.partial(jax.jit, static_argnames=["TILE_M", "TILE_N", "TILE_K"])
def grouped_matmul(x: Any, y: Any, sizes: Any, TILE_M: int = 128, TILE_N: int = 128, TILE_K: int = 128) -> Any:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    return gmm(x, y, sizes, preferred_element_type=x.dtype, tiling=(TILE_M, TILE_K, TILE_N))


@functools.partial(jax.jit, static_argnames=["BLOCK_Q", "BLOCK_KV"])
def attention(q: Any, k: Any, v: Any, BLOCK_Q: int = 128, BLOCK_KV: int = 128) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention

    blocks = flash_attention.BlockSizes(block_q=BLOCK_Q, block_k_major=BLOCK_KV, block_k=BLOCK_KV, block_b=1)
    return flash_attention.flash_attention(q, k, v, block_sizes=blocks)


@functools.partial(jax.jit, static_argnames=["BLOCK_M", "BLOCK_N"])
def elementwise(x: Any, BLOCK_M: int = 128, BLOCK_N: int = 128) -> Any:
    def gelu(block: Any, out: Any) -> None:
        out[...] = jax.nn.gelu(block[...])

    spec = pl.BlockSpec((BLOCK_M, BLOCK_N), lambda i, j: (i, j))
    grid = (x.shape[0] // BLOCK_M, x.shape[1] // BLOCK_N)
    return pl.pallas_call(gelu, grid=grid, in_specs=[spec], out_specs=spec, out_shape=x)(x)
