"""Lines that mypy --strict and pyright must accept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import quarantune
from quarantune import Autotuned, AutoTuner, TuningResult


@quarantune.autotune({"block": [1, 2], "mode": ["a", "b"]}, timeout=5, memory_limit="8GB", search="random")
@quarantune.jit(static_argnames=["block", "mode"])
def scale(x: jax.Array, factor: float = 1.0, *, block: int = 1, mode: str = "a") -> jax.Array:
    return x * factor


@quarantune.autotune([{"block": 1}, {"block": 2, "mode": "b"}])
@jax.jit(static_argnames=["block", "mode"])
def untyped(x: jax.Array, block: int = 1, mode: str = "a") -> jax.Array:
    return x


@quarantune.autotune({"block": [1, 2]})
@quarantune.jit(static_argnames=["block"])
def matmul(a: jax.Array, b: jax.Array, block: int = 1) -> jax.Array:
    return a @ b


class Layer:
    @quarantune.autotune({"block": [1, 2]})
    @quarantune.jit(static_argnames=["self", "block"])
    def apply(self, x: jax.Array, block: int = 1) -> jax.Array:
        return x


@quarantune.contextual_autotune
def model(x: jax.Array) -> jax.Array:
    return scale(x)


@quarantune.contextual_autotune(rep=3, timeout=5)
def model_with_options(x: jax.Array) -> jax.Array:
    return scale(x)


def plain(x: jax.Array, block: int = 1) -> float:
    return 0.0


x = jnp.ones(4)
assert_type(scale(x), jax.Array)
assert_type(scale(x, 2.0, block=2, mode="b"), jax.Array)
assert_type(scale.default(x), jax.Array)
assert_type(scale.tune(x, 2.0), TuningResult)
best: dict[str, Any] | None = scale.lookup(x, factor=2.0)
assert_type(Layer().apply(x, block=2), jax.Array)
assert_type(model(x), jax.Array)
assert_type(model_with_options(x), jax.Array)
untyped(x, block=3, mode="b")
untyped.tune(x)
array, described = np.ones(4, np.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
assert_type(scale.tune(described), TuningResult)
assert_type(scale.tune(array, 2.0), TuningResult)
assert_type(matmul.tune(x, described), TuningResult)
found: dict[str, Any] | None = matmul.lookup(array, array)
model.tune(described)
Layer().apply.tune(x)
gradient = jax.jit(jax.grad(lambda x: scale(x).sum()))


def use(kernel: Autotuned[..., jax.Array], executor: ThreadPoolExecutor) -> None:
    kernel(x)
    scale.tune(x, executor=executor)
    AutoTuner(plain, lambda x: [{"block": n} for n in range(4)], rep=5).run(x)
    AutoTuner(plain, ({"block": n} for n in range(4))).run(x, executor=executor)
    AutoTuner(plain, quarantune.grid(block=[1, 2])).run(x)
    with quarantune.settings(timeout=5, cache_dir=Path("here"), on_miss="default", always_tune=True, num_workers="50%"):
        quarantune.tune_many([(scale, (x,))], executor=executor)
