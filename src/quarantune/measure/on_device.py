"""Compares arrays on their device: expected arrays are carried there once; counts and the worst element come back.

Floats of up to 32 bits are compared in float32, wider ones in float64, so that an element within a rounding error of
the edge of its tolerance may be judged differently than on the host. Other dtypes are compared for equality.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from quarantune.measure.elements import Mismatches
from quarantune.values.compiling import OutputArray
from quarantune.values.tolerance import Tolerance

_MOST_ELEMENTS = 2**31 - 1
"""The largest 32-bit count."""
_RUNS_NOTHING: dict[str, bool | str] = {"xla_gpu_autotune_level": "0"}
"""Options with which XLA tries no kernels while it compiles: the clock may be timing its own beside it."""
_NARROW = frozenset({"float32", "bfloat16", "float16"})


class Comparer:
    """Compares one worker's outputs with the expected ones."""

    def __init__(self) -> None:
        """Sets up a comparer with nothing on the device."""
        self._there: dict[int, tuple[Any, jax.Array]] = {}
        self._programs: dict[Any, jax.stages.Compiled] = {}

    def __call__(self, got: Any, wanted: Any, tolerance: Tolerance) -> Mismatches | None:
        """Compares two arrays of one shape.

        Args:
            got: the output.
            wanted: the expected output, the same object each time; it is kept.
            tolerance: how far apart elements may be.

        Returns:
            How they differ, or None where the host must compare them.
        """
        if not isinstance(got, jax.Array) or not isinstance(wanted, np.ndarray) or not 0 < got.size <= _MOST_ELEMENTS:
            return None
        if len(got.sharding.device_set) > 1 or jnp.issubdtype(got.dtype, jax.dtypes.extended):
            return None
        try:
            return self._compare(got, self._carried(wanted, got), tolerance)
        except jax.errors.JaxRuntimeError:
            return None  # most likely out of memory

    def prepare(self, expected: Any, tolerance: Tolerance) -> None:
        """Carries the expected outputs to the device, and compiles their comparison."""
        for wanted in jax.tree.leaves(expected):
            if isinstance(wanted, np.ndarray) and wanted.size:
                there = jax.device_put(wanted)
                self._there[id(wanted)] = (wanted, there)
                self(there, wanted, tolerance)

    def expect(self, outputs: Sequence[OutputArray]) -> None:
        """Compiles the comparison of arrays with others like them, which takes a GPU 0.2 s.

        Args:
            outputs: the arrays.
        """
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        limits = jax.ShapeDtypeStruct((2,), "float32")
        for output in outputs:
            if not 0 < math.prod(output.shape) <= _MOST_ELEMENTS or output.dtype not in _NARROW:
                continue
            like = jax.ShapeDtypeStruct(output.shape, output.dtype, sharding=sharding)
            kind = _kind(like, like)
            if kind not in self._programs:
                lowered = _count.lower(like, like, limits, wide="float32")
                self._programs[kind] = lowered.compile(_RUNS_NOTHING)

    def keep(self, output: Any, on_host: Any) -> None:
        """Keeps an output on the device, to compare others with it.

        Args:
            output: a pytree with arrays.
            on_host: the same with numpy arrays, which stand for those of `output` when outputs are compared.
        """
        for there, wanted in zip(jax.tree.leaves(output), jax.tree.leaves(on_host), strict=True):
            if isinstance(there, jax.Array) and isinstance(wanted, np.ndarray):
                self._there[id(wanted)] = (wanted, there)

    def _carried(self, wanted: Any, got: jax.Array) -> jax.Array:
        kept = self._there.get(id(wanted))
        if kept is None:
            kept = self._there[id(wanted)] = (wanted, jax.device_put(wanted, got.sharding))
        return kept[1]

    def _compare(self, got: jax.Array, wanted: jax.Array, tolerance: Tolerance) -> Mismatches | None:
        if not all(jnp.issubdtype(array.dtype, jnp.floating) for array in (got, wanted)):
            return Mismatches(0) if got.dtype == wanted.dtype and bool(_are_equal(got, wanted)) else None
        is_wide = max(got.dtype.itemsize, wanted.dtype.itemsize) > 4
        wide = "float64" if is_wide else "float32"
        limits = np.asarray([tolerance.rtol, tolerance.atol], wide)
        program = self._programs.get(_kind(got, wanted)) or functools.partial(_count, wide=wide)
        count = int(program(got, wanted, limits))
        if count / got.size <= tolerance.max_mismatched_ratio:
            return Mismatches(count)
        worst, mine, its = _worst(got, wanted, limits, wide=wide)
        return Mismatches(count, int(worst), np.asarray(mine)[()], np.asarray(its)[()])


def _kind(got: Any, wanted: Any) -> Any:
    return got.shape, got.dtype, wanted.dtype, frozenset(got.sharding.device_set | wanted.sharding.device_set)


@jax.jit
def _are_equal(got: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.all(got == wanted)


@functools.partial(jax.jit, static_argnames=["wide"])
def _count(got: jax.Array, wanted: jax.Array, limits: jax.Array, *, wide: str) -> jax.Array:
    return jnp.sum(_excess(got, wanted, limits, wide) > 0, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=["wide"])
def _worst(got: jax.Array, wanted: jax.Array, limits: jax.Array, *, wide: str) -> tuple[jax.Array, ...]:
    worst = jnp.argmax(_excess(got, wanted, limits, wide).reshape(-1))
    return worst, got.reshape(-1)[worst], wanted.reshape(-1)[worst]


def _excess(got: jax.Array, wanted: jax.Array, limits: jax.Array, wide: str) -> jax.Array:
    """Returns by how much each difference exceeds its tolerance, as `elements` does on the host."""
    got, wanted = got.astype(wide), wanted.astype(wide)
    excess = jnp.abs(got - wanted) - (limits[1] + limits[0] * jnp.abs(wanted))
    same = (got == wanted) | (jnp.isnan(got) & jnp.isnan(wanted))
    finite = jnp.isfinite(got) & jnp.isfinite(wanted)
    return jnp.where(same, jnp.zeros_like(excess), jnp.where(finite, excess, jnp.full_like(excess, jnp.inf)))
