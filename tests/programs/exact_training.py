"""Trains a flax model with three kernels, tuned and untuned, and prints whether the parameters have the same bits."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import quarantune

IS_CPU = jax.default_backend() == "cpu"
LABELS = jax.nn.one_hot(jnp.asarray(np.random.default_rng(1).integers(0, 64, 64)), 64)
X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)


def tile(x_ref: Any, w_ref: Any, out_ref: Any, *, bk: int) -> None:
    total = jnp.zeros(out_ref.shape, jnp.float32)
    for k in range(0, x_ref.shape[1], bk):
        total += jnp.dot(x_ref[:, pl.ds(k, bk)], w_ref[pl.ds(k, bk), :], preferred_element_type=jnp.float32)
    out_ref[...] = total.astype(out_ref.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x: Any, w: Any, bm: int, bk: int) -> Any:
    (m, k), n = x.shape, w.shape[1]
    return pl.pallas_call(
        functools.partial(tile, bk=bk),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // bm,),
        in_specs=[pl.BlockSpec((bm, k), lambda i: (i, 0)), pl.BlockSpec((k, n), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((bm, n), lambda i: (i, 0)),
        interpret=IS_CPU,
        compiler_params=None if IS_CPU else triton.CompilerParams(num_warps=4, num_stages=1),
    )(x, w)


product.defvjp(
    lambda x, w, bm, bk: (product(x, w, bm, bk), (x, w)),
    lambda bm, bk, saved, cotangent: (cotangent @ saved[1].T, saved[0].T @ cotangent),
)


@quarantune.autotune({"bm": [16, 32, 64], "bk": [16, 32, 64]}, rep=5)
@functools.partial(jax.jit, static_argnames=["bm", "bk"])
def matmul(x: Any, w: Any, bm: int = 16, bk: int = 16) -> Any:
    return product(x, w, bm, bk)


@quarantune.autotune({"chunk": [8, 16, 64]}, rep=5)
@functools.partial(jax.jit, static_argnames=["chunk"])
def norm(x: Any, chunk: int = 8) -> Any:
    def add(sums: Any, part: Any) -> Any:
        return sums + (part * part).sum(1), None

    parts = x.reshape(x.shape[0], -1, chunk).transpose(1, 0, 2)
    squares, _ = jax.lax.scan(add, jnp.zeros(x.shape[0], x.dtype), parts)
    return x * jax.lax.rsqrt(squares / x.shape[1] + 1e-6)[:, None]


@quarantune.autotune({"chunk": [16, 32, 64], "unroll": [1, 2]}, rep=5)
@functools.partial(jax.jit, static_argnames=["chunk", "unroll"])
def cross_entropy(logits: Any, labels: Any, chunk: int = 16, unroll: int = 1) -> Any:
    def add(total: Any, part: Any) -> Any:
        return total - (jax.nn.log_softmax(part[0]) * part[1]).sum(), None

    parts = tuple(array.reshape(-1, chunk, array.shape[1]) for array in (logits, labels))
    return jax.lax.scan(add, jnp.float32(0), parts, unroll=unroll)[0] / logits.shape[0]


class Model(nn.Module):
    """Two residual layers."""

    is_tuned: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for index in range(2):
            w = self.param(f"w{index}", nn.initializers.lecun_normal(), (64, 64))
            x = x + jax.nn.gelu(kernel(matmul, self.is_tuned)(kernel(norm, self.is_tuned)(x), w))
        return x


def kernel(tuned: Any, is_tuned: bool) -> Any:
    return tuned if is_tuned else tuned.__wrapped__


def trained(is_tuned: bool, steps: int) -> Any:
    model, optimizer = Model(is_tuned), optax.adam(1e-3)
    params = model.init(jax.random.key(0), X)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss(params: Any) -> Any:
            return kernel(cross_entropy, is_tuned)(model.apply(params, X), LABELS)

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return jax.device_get(params)


if __name__ == "__main__":
    tuned, plain = (trained(is_tuned, int(sys.argv[1])) for is_tuned in (True, False))
    same = jax.tree.map(lambda mine, its: bool((mine.view(np.uint8) == its.view(np.uint8)).all()), tuned, plain)
    print(matmul.lookup(X, X), norm.lookup(X), cross_entropy.lookup(X, LABELS), "on", jax.default_backend())
    print("same bits" if all(jax.tree.leaves(same)) else f"other bits: {same}")
