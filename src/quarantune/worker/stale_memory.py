"""Overwrites the memory that earlier outputs have left on an accelerator, before a config is checked.

A kernel that does not write all of its output returns whatever the memory held. In a worker that has run other configs,
that may well be the right values of one of them, and the config would pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from quarantune.values.compiling import OutputArray

_COPIES = 3
"""An allocator may place the next output where it placed any of the last few."""
_MOST_BYTES = 512 << 20


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    device: jax.Device


class StaleMemory:
    """Knows the outputs of the last config, and overwrites free memory of their sizes."""

    def __init__(self, *, is_shared: bool) -> None:
        """Begins without any output.

        Args:
            is_shared: whether configs are checked one after another in the same memory; if not, nothing is done.
        """
        self._is_shared = is_shared
        self._outputs: list[_Kind] = []
        self._fills: dict[_Kind, Callable[[], jax.Array]] = {}

    def note(self, output: Any) -> None:
        """Takes the arrays of an output for those that free memory will hold."""
        arrays = [leaf for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)] if self._is_shared else []
        self._outputs = [
            _Kind(array.shape, array.dtype, next(iter(array.devices())))
            for array in arrays
            if len(array.devices()) == 1 and fill_value(array.dtype) is not None
        ]

    def expect(self, outputs: Sequence[OutputArray]) -> None:
        """Compiles what overwrites such outputs, which takes a GPU 0.06 s each, ahead of the first; raises nothing."""
        with contextlib.suppress(Exception):
            for output in outputs if self._is_shared else ():
                kind = _Kind(output.shape, jnp.dtype(output.dtype), jax.local_devices()[0])
                if fill_value(kind.dtype) is not None:
                    self._compiled(kind)

    def overwrite(self) -> None:
        """Fills free memory with values that outputs do not have, unless it takes too much; raises nothing."""
        size = sum(jnp.dtype(kind.dtype).itemsize * math.prod(kind.shape) for kind in self._outputs)
        copies = min(_COPIES, _MOST_BYTES // size) if size else 0
        try:
            jax.block_until_ready([self._filled(kind) for _ in range(copies) for kind in self._outputs])
        except Exception:
            self._is_shared = False  # there is too little memory, and waiting for more takes seconds each time

    def _filled(self, kind: _Kind) -> jax.Array:
        return self._compiled(kind)()

    def _compiled(self, kind: _Kind) -> Callable[[], jax.Array]:
        if kind not in self._fills:
            value = fill_value(kind.dtype)
            with jax.default_device(kind.device):
                self._fills[kind] = jax.jit(lambda: jnp.full(kind.shape, value, kind.dtype)).lower().compile()
        return self._fills[kind]


def fill_value(dtype: Any) -> Any:
    """Returns a value that outputs of a type hardly ever have; None for a type without one."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    with contextlib.suppress(TypeError, ValueError):
        return jnp.iinfo(dtype).max  # type: ignore[no-untyped-call]
    return None
