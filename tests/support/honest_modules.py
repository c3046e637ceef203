"""Library modules whose parameters are made on import of this file; see `honest_programs`."""

from __future__ import annotations

import equinox
import jax
import numpy as np
from flax import nnx
from honest_tuning import tuned

X = np.ones((4, 4), np.float32)
LINEAR = nnx.Linear(4, 3, rngs=nnx.Rngs(0))


@tuned(X)
def nnx_module(x, n: int = 1):
    return LINEAR(x) * n


MLP = equinox.nn.MLP(4, 2, 4, 2, key=jax.random.key(0))


@tuned(X)
def equinox_module(x, n: int = 1):
    return jax.vmap(MLP)(x) * n
