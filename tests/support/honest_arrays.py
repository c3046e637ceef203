"""Functions of arrays that are made on import of this module; see `honest_programs`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from honest_tuning import tuned

X = np.ones((4, 4), np.float32)
KEY = jax.random.key(1)


@tuned(KEY, X)
def random_numbers(key, x, n: int = 1):
    return jax.random.normal(key, x.shape) * n + jax.random.bernoulli(KEY, shape=x.shape)


TABLE, SCALE, SHIFTS = jnp.arange(4.0), jnp.float32(3), np.arange(4)


@tuned(X)
def constants(x, n: int = 1):
    return x + TABLE * SCALE + SHIFTS + jnp.array([1, 2, 3, 4]) + np.sqrt(7) * n


LATER = 1.0


@jax.jit
def _helper(x):
    return x * LATER


_helper(X)
LATER = 2.0


@tuned(X)
def an_inner_function_that_was_traced_before(x, n: int = 1):
    return _helper(x) * n
