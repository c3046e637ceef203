"""Lines that mypy --strict and pyright must refuse: each line marked `refused`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import quarantune


@quarantune.autotune({"block": [1, 2]})
@quarantune.jit(static_argnames=["block"])
def scale(x: jax.Array, factor: float = 1.0, *, block: int = 1) -> jax.Array:
    return x * factor


class Layer:
    @quarantune.autotune({"block": [1, 2]})
    @quarantune.jit(static_argnames=["self", "block"])
    def apply(self, x: jax.Array, block: int = 1) -> jax.Array:
        return x


@quarantune.contextual_autotune
def model(x: jax.Array) -> jax.Array:
    return scale(x)


x = jnp.ones(4)
scale()  # refused
scale(x, "two")  # refused
scale(x, blok=2)  # refused
scale(x, block="two")  # refused
scale.tune(x, factr=2.0)  # refused
scale.lookup(x, factor="two")  # refused
scale.default(x, 1.0, 2)  # refused
text: str = scale(x)  # refused
Layer().apply(x, blok=2)  # refused
Layer().apply()  # refused
model(x, x)  # refused
model.tune()  # refused

quarantune.autotune(3)  # refused
quarantune.autotune([1, 2])  # refused
quarantune.autotune({"block": [1]}, timout=5)  # refused
quarantune.autotune({"block": [1]}, timeout="5 s")  # refused
quarantune.autotune({"block": [1]}, prune_fn=True)  # refused
quarantune.contextual_autotune(prune_fn=None)  # refused
quarantune.AutoTuner(scale, {"block": [1]}, serach="random")  # refused
quarantune.AutoTuner(scale, {"block": [1]}, rep="many")  # refused
quarantune.settings(timout=5)  # refused
quarantune.settings(cache_dir=3)  # refused
quarantune.settings(on_miss="never")  # refused
quarantune.settings(isolation="docker")  # refused
quarantune.settings(cpu_count=2)  # refused
quarantune.contextual_autotune(n_repeat=2)  # refused
scale.tune("text")  # refused
quarantune.settings(executor="threads")  # refused
