"""A function that computes the same for every config, in a time that the config sets."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quarantune

X = np.arange(64.0 * 64, dtype=np.float32).reshape(64, 64) / 4096


def chained(configs: Any = ({"n": 300}, {"n": 400}), default: Any = 3, **options: Any) -> quarantune.Autotuned:
    """Returns a function that computes the same for every n, in about n times the time."""

    @quarantune.autotune(configs, **{"name": "chained", "timeout": 60, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def chain(x: Any, n: Any = default) -> Any:
        turns = getattr(n, "value", n)
        return x + 0 * jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ x), x)

    return chain
