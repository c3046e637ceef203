"""The kernels to tune and their spaces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Space = Mapping[str, Sequence[int]]


@functools.partial(jax.jit, static_argnames=["BM", "BN"])
def matmul_cpu(a: jax.Array, b: jax.Array, BM: int = 32, BN: int = 32) -> Any:
    """Multiplies matrices in the Pallas interpreter, one BM x BN tile of the product at a time."""
    (m, k), n = a.shape, b.shape[1]
    return pl.pallas_call(
        _whole_k_tile,
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(m // BM, n // BN),
        in_specs=[pl.BlockSpec((BM, k), lambda i, j: (i, 0)), pl.BlockSpec((k, BN), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((BM, BN), lambda i, j: (i, j)),
        interpret=True,
    )(a, b)


def _whole_k_tile(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.dot(a_ref[...], b_ref[...])


@functools.partial(jax.jit, static_argnames=["bm", "bn", "bk", "warps", "stages"])
def matmul_gpu(
    a: jax.Array, b: jax.Array, bm: int = 64, bn: int = 64, bk: int = 32, warps: int = 4, stages: int = 2
) -> Any:
    """Multiplies matrices by Triton, one bm x bn tile of the product at a time, bk columns of `a` per step."""
    (m, k), n = a.shape, b.shape[1]
    return pl.pallas_call(
        functools.partial(_stepwise_tile, bk=bk),
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(m // bm, n // bn),
        in_specs=[pl.BlockSpec((bm, k), lambda i, j: (i, 0)), pl.BlockSpec((k, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
    )(a, b)


def _stepwise_tile(a_ref: Any, b_ref: Any, out_ref: Any, *, bk: int) -> None:
    def add_step(step: jax.Array, total: jax.Array) -> jax.Array:
        block = pl.ds(step * bk, bk)
        return total + jnp.dot(a_ref[:, block], b_ref[block, :], preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, a_ref.shape[1] // bk, add_step, jnp.zeros(out_ref.shape, jnp.float32))
    out_ref[...] = total.astype(out_ref.dtype)


@functools.partial(jax.jit, static_argnames=["factor"])
def trivial(a: jax.Array, b: jax.Array, factor: int = 1) -> jax.Array:
    """Does next to nothing, so that only overhead is measured; each factor is another program."""
    return a + factor * b


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A kernel and its space.

    Attributes:
        kernel: a jitted function of two square matrices.
        space: the values of each of its tunables; all their combinations are tried.
        dtype: of the matrices.
        sizes: the numbers of rows it is tuned for.
        quick_sizes: the same in quick mode.
    """

    kernel: jax.stages.Wrapped
    space: Space
    dtype: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]

    def arguments(self, size: int) -> tuple[jax.Array, jax.Array]:
        """Returns two matrices of normal numbers, on the device; compiles nothing."""
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((size, size), np.float32).astype(jnp.dtype(self.dtype)) for _ in range(2))
        device = jax.devices()[0]
        placed = jax.device_put(a, device), jax.device_put(b, device)
        jax.block_until_ready(placed)
        return placed


PROBLEMS = {
    "cpu": Problem(
        kernel=matmul_cpu,
        space={"BM": [16, 32, 64, 128], "BN": [32, 64, 128, 256]},
        dtype="float32",
        sizes=(1024,),
        quick_sizes=(256,),
    ),
    "gpu": Problem(
        kernel=matmul_gpu,
        space={"bm": [64, 128], "bn": [64, 128, 256], "bk": [32, 64], "warps": [4, 8], "stages": [2, 3]},
        dtype="bfloat16",
        sizes=(512, 2048, 4096),
        quick_sizes=(512,),
    ),
}


def grid(space: Space) -> list[dict[str, int]]:
    """Returns every combination of the space's values, the last name's changing fastest."""
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
