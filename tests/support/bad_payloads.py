"""A tuned kernel with results that misbehave when the measuring worker builds them; this module has no tests.

An executable compiled in another process runs Python code only to build its results: JAX makes a named tuple by
calling its class.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import misdeeds
import numpy as np

import quarantune
from quarantune.host.process import in_sandbox

CRASHES = "BAD_PAYLOADS_CRASHES"
"""Environment variable with the path of a file; every process adds its id to the file before it crashes."""
ACTS = ("good", "good again", "poison", "victim", "segfault", "hang", "exit", "fail", "starve")
_is_poisoned = False


class Pair(NamedTuple):
    act: Any
    value: Any


class Result(Pair):
    """Two arrays; the first selects the act that happens when JAX builds the result."""

    def __new__(cls, act: Any, value: Any) -> Result:
        if isinstance(act, (jax.Array, np.ndarray)) and not isinstance(act, jax.core.Tracer):
            assert in_sandbox(), "misdeeds are for workers only"
            _do(ACTS[int(act)])
        return super().__new__(cls, act, value)


def _do(act: str) -> None:
    global _is_poisoned
    match act:
        case "poison":
            _is_poisoned = True
        case "victim" if _is_poisoned:
            raise RuntimeError("an earlier config spoiled this process")
        case "segfault":
            if path := os.environ.get(CRASHES):
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"{os.getpid()}\n")
            misdeeds.segfault()
        case "hang":
            misdeeds.hang_holding_the_gil()
        case "exit":
            misdeeds.exit_with_0()
        case "fail":
            misdeeds.fail()
        case "starve":
            misdeeds.starve()


@quarantune.autotune(
    lambda x, space, **_: [{"act": act} for act in space],
    warmup=0,
    rep=1,
    timeout=30,
    compile_timeout=30,
    memory_limit="200MB",
    ref_fn=None,  # results differ by their act
)
@functools.partial(jax.jit, static_argnames=["space", "act"])
def kernel(x, space=(), act: str = "good"):
    """Doubles `x` in a result that performs `act` when it is built; `space` is a tuple of the acts to try."""
    return Result(jnp.int32(ACTS.index(act)), 2 * x)
