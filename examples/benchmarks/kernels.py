"""The kernels to tune and their spaces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
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


@functools.partial(jax.jit, static_argnames=["rows", "keys"])
def attention(q: jax.Array, k: jax.Array, v: jax.Array, rows: int = 128, keys: int = 128) -> jax.Array:
    """Attention in plain JAX, `rows` queries and `keys` keys at a time, whose products XLA tunes on the device."""
    size = q.shape[-1]

    def of_rows(part: jax.Array) -> jax.Array:
        def step(carry: Any, block: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            top, total, out = carry
            logits = jnp.matmul(part, block[0].T).astype(jnp.float32)
            new = jnp.maximum(top, logits.max(-1))
            weights = jnp.exp(logits - new[:, None])
            keep = jnp.exp(top - new)
            sums = jnp.matmul(weights.astype(v.dtype), block[1]).astype(jnp.float32)
            return (new, total * keep + weights.sum(-1), out * keep[:, None] + sums), None

        start = jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((rows, size))
        (_, total, out), _ = jax.lax.scan(step, start, (k.reshape(-1, keys, size), v.reshape(-1, keys, size)))
        return (out / total[:, None]).astype(q.dtype)

    return jax.lax.map(of_rows, q.reshape(-1, rows, size)).reshape(q.shape)


@functools.partial(jax.jit, static_argnames=["rows", "hidden"])
def mlp(x: jax.Array, up: jax.Array, down: jax.Array, rows: int = 1024, hidden: int = 1024) -> jax.Array:
    """Two layers in plain JAX, `rows` rows and `hidden` hidden units at a time."""
    parts = up.reshape(x.shape[1], -1, hidden).swapaxes(0, 1), down.reshape(-1, hidden, down.shape[1])

    def of_rows(part: jax.Array) -> jax.Array:
        def step(total: jax.Array, layers: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + jnp.matmul(jax.nn.gelu(part @ layers[0]), layers[1]).astype(jnp.float32), None

        total, _ = jax.lax.scan(step, jnp.zeros((rows, down.shape[1])), parts)
        return total.astype(x.dtype)

    return jax.lax.map(of_rows, x.reshape(-1, rows, x.shape[1])).reshape(-1, down.shape[1])


@functools.partial(jax.jit, static_argnames=["rows"])
def step(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, rows: int = 1024) -> jax.Array:
    """The gradients of four layers below an attention over `rows` queries at a time; configs share most products."""

    def loss(layers: tuple[jax.Array, ...]) -> jax.Array:
        hidden = x
        for layer in layers:
            hidden = jax.nn.gelu(hidden @ layer)
        summed = hidden.astype(jnp.float32)  # sums the gradients of all blocks in float32

        def of_rows(part: jax.Array) -> jax.Array:
            keys = summed.astype(hidden.dtype)
            logits = jnp.matmul(part, keys.T).astype(jnp.float32) / keys.shape[1] ** 0.5
            return jax.nn.softmax(logits).astype(keys.dtype) @ keys

        out = jax.lax.map(of_rows, hidden.reshape(-1, rows, hidden.shape[1]))
        return (out.astype(jnp.float32) ** 2).sum()

    return jnp.concatenate([gradient.ravel() for gradient in jax.grad(loss)((a, b, c, d))])


@functools.partial(jax.jit, static_argnames=["factor"])
def trivial(a: jax.Array, b: jax.Array, factor: int = 1) -> jax.Array:
    """Does next to nothing, to measure only overhead; each factor is another program."""
    return a + factor * b


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A kernel and its space.

    Attributes:
        kernel: a jitted function of matrices.
        space: the values of each of its tunables; a sweep tries all combinations.
        dtype: of the matrices.
        sizes: the problem sizes to tune for.
        quick_sizes: the same in quick mode.
        shapes: the shapes of the matrices for a size.
        off_by: the largest difference from the default config's output, as a share of the largest element.
        scale: the standard deviation of the matrices' elements.
    """

    kernel: jax.stages.Wrapped
    space: Space
    dtype: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    shapes: Callable[[int], Sequence[tuple[int, int]]] = lambda size: [(size, size)] * 2
    off_by: float = 0.01
    scale: float = 1.0

    def arguments(self, size: int) -> tuple[jax.Array, ...]:
        """Returns matrices of normal numbers, on the device; compiles nothing."""
        rng = np.random.default_rng(0)
        device = jax.devices()[0]
        placed = tuple(
            jax.device_put((self.scale * rng.standard_normal(shape, np.float32)).astype(jnp.dtype(self.dtype)), device)
            for shape in self.shapes(size)
        )
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
    "attention": Problem(
        kernel=attention,
        space={"rows": [128, 256, 512, 1024], "keys": [64, 128, 256, 512, 1024, 2048]},
        dtype="bfloat16",
        sizes=(4096,),
        quick_sizes=(2048,),
        shapes=lambda size: [(size, 128)] * 3,
        off_by=0.1,  # XLA rounds the logits to bfloat16 in some of the programs
    ),
    "mlp": Problem(
        kernel=mlp,
        space={"rows": [256, 512, 1024, 2048, 4096, 8192], "hidden": [1024, 2048, 8192]},
        dtype="bfloat16",
        sizes=(8192,),
        quick_sizes=(8192,),
        shapes=lambda size: [(size, 2048), (2048, 8192), (8192, 2048)],
    ),
    "step": Problem(
        kernel=step,
        space={"rows": [32, 64, 128, 256, 512, 1024, 2048, 4096]},
        dtype="bfloat16",
        sizes=(4096,),
        quick_sizes=(4096,),
        shapes=lambda size: [(size, 1024), (1024, 1536), (1536, 2048), (2048, 1280), (1280, 1024)],
        off_by=0.1,
        scale=1 / 32,
    ),
}


def grid(space: Space) -> list[dict[str, int]]:
    """Returns every combination of the space's values, the last name's changing fastest."""
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
