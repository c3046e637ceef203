"""Functions whose results an earlier version has recorded in `golden_cache`; nothing in here may change."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from golden_helpers import shifted
from jax.experimental import pallas as pl

SCALE = 2.0
TABLE = {"a": (1, 2), "b": frozenset({"u", "v"})}


class Layout:
    size = 3

    def look(self, x: Any) -> Any:
        return x * self.size


def helper(x: Any) -> Any:
    return x * SCALE + TABLE["a"][0]


@functools.partial(jax.jit, static_argnames=["mode", "block"])
def plain(x: Any, mode: str = "fast", block: int = 8) -> Any:
    return helper(x) if mode == "fast" else Layout().look(x)


def make(factor: int, function: Any) -> Any:
    def closing(x: Any, block: int = 8) -> Any:
        return function(jnp.sin(x)) * factor

    return jax.jit(closing, static_argnames=["block"])


closing = make(3, lambda x: x + 1)


@functools.partial(jax.jit, static_argnames=["block"])
def by_name(x: Any, block: int = 8) -> Any:
    return shifted(x)


def body(x_ref: Any, o_ref: Any, *, block: int) -> None:
    o_ref[...] = x_ref[...] * SCALE


@functools.partial(jax.jit, static_argnames=["block"])
def pallas(x: Any, block: int = 8) -> Any:
    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        functools.partial(body, block=block),
        grid=(x.shape[0] // block,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(x)


def reference(x: Any) -> Any:
    return x * SCALE


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "closing": {},
    "by_name": {"key_fn": lambda x: {"n": x.shape[0]}},
    "pallas": {"ref_fn": reference, "rtol": 0.5, "supply": "ones"},
}
SPACE = {"block": [4, 8]}
