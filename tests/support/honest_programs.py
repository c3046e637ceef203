"""Functions that workers and callers trace to equal programs, or to programs that differ in no value; has no tests.

This module makes no arrays, so that workers are forked with it."""

from __future__ import annotations

import functools
import os
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from honest_tuning import tuned
from jax.experimental import pallas as pl

import quarantune

X = np.ones((4, 4), np.float32)


def _double(x_ref: Any, o_ref: Any, *, n: int) -> None:
    o_ref[...] = x_ref[...] * 2 + n


@tuned(X)
def interpreted_pallas(x, n: int = 1):
    spec = pl.BlockSpec((n, 4), lambda i: (i, 0))
    call = pl.pallas_call(
        functools.partial(_double, n=n),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4 // n,),
        in_specs=[spec],
        out_specs=spec,
        interpret=True,
    )
    return call(x)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.LayerNorm()(linen.gelu(linen.Dense(4)(x)))


_KERNEL = {"kernel": np.ones((4, 4), np.float32), "bias": np.zeros(4, np.float32)}
PARAMETERS = {
    "params": {"Dense_0": _KERNEL, "LayerNorm_0": {"scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32)}}
}
OPTIMIZER = optax.adamw(optax.cosine_decay_schedule(1e-3, 100))


@tuned(PARAMETERS, X)
def linen_training_step(parameters, x, n: int = 1):
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean(Dense().apply(p, x) ** 2) * n)(parameters)
    updates, _ = OPTIMIZER.update(gradients, OPTIMIZER.init(parameters), parameters)
    return optax.apply_updates(parameters, updates), loss


@jax.custom_vjp
def _sine(x):
    return jnp.sin(x)


_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@tuned(X)
def control_flow(x, n: int = 1):
    scanned, _ = jax.lax.scan(lambda carry, row: (carry + row, jax.nn.relu(row)), x[0], x)
    kept = jax.checkpoint(lambda v: jnp.sin(v) @ v)(x)
    chosen = jax.lax.cond(x[0, 0] > 0, lambda v: v * 2, lambda v: v - 1, x)
    looped = jax.lax.while_loop(lambda v: v.sum() < 10, lambda v: v + n, chosen)
    return scanned, kept, looped, jax.grad(lambda v: _sine(v).sum())(x), jnp.linalg.svd(x)[1]


LETTERS = {"alpha", "beta", "gamma", "delta", "epsilon"}


@tuned(X)
def order_of_a_set(x, n: int = 1):
    for letter in LETTERS:
        x = x * len(letter) + jnp.sum(x) * n
    return x


@tuned(X)
def devices_of_the_process(x, n: int = 1):
    # Workers and callers may have different devices; the process number stands for that here.
    return x * jax.device_count() * (os.getpid() % 10_000) * n


@tuned(X)
def drawn_numbers(x, n: int = 1):
    return x * random.random() + time.time() * n


TRACES: list[int] = []


@tuned(X)
def a_number_of_traces(x, n: int = 1):
    TRACES.append(n)
    return x * len(TRACES) * n


@quarantune.autotune({"m": [3, 4]}, rep=1, warmup=0)
@functools.partial(jax.jit, static_argnames=["m"])
def inner(x, m: int = 3):
    return x * m / m


@tuned(X)
def another_tuned_function(x, n: int = 1):
    return inner(x) * n


@tuned(X)
def callbacks(x, n: int = 1):
    jax.debug.callback(lambda value: None, x)
    return jax.pure_callback(lambda value: value, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * n


@tuned(X)
def mapped_over_one_device(x, n: int = 1):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(lambda v: v * n + jax.lax.psum(v, "d"), mesh=mesh, in_specs=spec, out_specs=spec)(x)
