"""A tuned kernel whose results misbehave where they are made, in the process that measures; no test in here.

An executable that was compiled elsewhere brings no Python of its own into the process that runs it but what builds its
results: JAX makes a named tuple by calling its class.
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
from quarantune.sandbox import template

CRASHES = "BAD_PAYLOADS_CRASHES"
"""Names a file to which every process that is about to crash adds its id."""
ACTS = ("good", "good again", "poison", "victim", "segfault", "hang", "exit", "fail", "starve")
_is_poisoned = False


class Pair(NamedTuple):
    act: Any
    value: Any


class Result(Pair):
    """Two arrays; the first one tells what to do as they come out of the device."""

    def __new__(cls, act: Any, value: Any) -> Result:
        if isinstance(act, (jax.Array, np.ndarray)) and not isinstance(act, jax.core.Tracer):
            assert template.is_inside(), "misdeeds are for workers only"
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
    ref_fn=None,  # the result says which act it is of
)
@functools.partial(jax.jit, static_argnames=["space", "act"])
def kernel(x, space=(), act: str = "good"):
    """Doubles `x`, in a result that does `act` when it is made. `space` is a tuple of the acts to try."""
    return Result(jnp.int32(ACTS.index(act)), 2 * x)
