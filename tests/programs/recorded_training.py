"""One of two processes that train a flax model with three tuned kernels; `test_recording.py` starts them.

    python recorded_training.py RANK PORT

Prints the config that each kernel has, or None.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental import pallas as pl

import quarantune

QUICK: Any = {"warmup": 0, "rep": 1, "time_grad": False}


@quarantune.autotune({"block": [8, 16]}, prune_fn=lambda config, x: len(x) % config["block"] == 0, **QUICK)
@functools.partial(jax.jit, static_argnames=["block"])
def square(x: jax.Array, block: int = 4) -> jax.Array:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * x_ref[...]

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(kernel, shape, grid=(len(x) // block,), in_specs=[spec], out_specs=spec, interpret=True)
    return call(x)


@quarantune.autotune({"chunk": [2, 4]}, **QUICK)
@functools.partial(jax.jit, static_argnames=["chunk", "negate"])
def project(x: jax.Array, w: jax.Array, negate: bool = False, chunk: int = 1) -> jax.Array:
    y = jax.lax.map(lambda row: row @ w, x, batch_size=chunk)
    return -y if negate else y


@quarantune.autotune({"parts": [2, 4]}, **QUICK)
@functools.partial(jax.jit, static_argnames=["parts"])
def mean(x: jax.Array, parts: int = 1) -> jax.Array:
    return x.reshape(parts, -1).sum(axis=1).sum() / x.size


class Model(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        return project(nn.Dense(self.features)(x), jnp.eye(self.features)) + project(x, w, negate=True)


def main(rank: int, port: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    model, x = Model(8), np.ones((16, 8), np.float32)
    params = model.init(jax.random.key(rank), x)

    @jax.jit
    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda params: mean(model.apply(params, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    for _ in range(5):
        params, loss = step(params, x)
        mean(square(np.full((16, 8), loss, np.float32)))
    assert np.isfinite(loss)
    eye = np.eye(8, dtype=np.float32)
    print([square.lookup(x), project.lookup(x, eye), project.lookup(x, eye, negate=True), mean.lookup(x)])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
