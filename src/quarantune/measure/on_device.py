"""Compares arrays on their device: expected arrays are carried there once; counts and the worst element come back.

Floats are compared in float32, so that an element within a rounding error of the edge of its allowance may be judged
differently than on the host; the host compares wider ones. Other dtypes are compared for equality.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from quarantune.measure import rounding
from quarantune.measure.elements import Mismatches, excess_of, is_far, together_of
from quarantune.measure.rounding import Allowance
from quarantune.values.compiling import OutputArray

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
        self._factors: dict[int, tuple[Any, ...]] = {}

    def __call__(self, got: Any, wanted: Any, allowance: Allowance) -> Mismatches | None:
        """Compares two arrays of one shape.

        Args:
            got: the output.
            wanted: the expected output, the same object each time; it is kept.
            allowance: how far apart elements may be, the same object each time.

        Returns:
            How they differ, or None where the host must compare them.
        """
        if not self.takes(got) or not isinstance(wanted, np.ndarray):
            return None
        try:
            return self._compare(got, self._carried(wanted, got), allowance)
        except jax.errors.JaxRuntimeError:
            return None  # most likely out of memory

    @staticmethod
    def takes(array: Any) -> bool:
        """Returns whether an array can be compared on its device."""
        return (
            isinstance(array, jax.Array)
            and 0 < array.size <= _MOST_ELEMENTS
            and len(array.sharding.device_set) == 1
            and not jnp.issubdtype(array.dtype, jax.dtypes.extended)
        )

    @classmethod
    def is_narrow(cls, leaf: Any) -> bool:
        """Returns whether a leaf's noise can be measured on its device."""
        return cls.takes(leaf) and leaf.dtype.name in _NARROW

    def prepare(self, expected: Sequence[Any], allowances: Sequence[Allowance]) -> None:
        """Carries the expected leaves to the device, and compiles their comparison."""
        for wanted, allowance in zip(expected, allowances, strict=True):
            if isinstance(wanted, np.ndarray) and wanted.size:
                there = jax.device_put(wanted)
                self._there[id(wanted)] = (wanted, there)
                self(there, wanted, allowance)

    def expect(self, outputs: Sequence[OutputArray]) -> None:
        """Compiles all that is needed to compare arrays with others like them, which takes a GPU 0.2 s each.

        Args:
            outputs: the arrays.
        """
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        for output in outputs:
            size = math.prod(output.shape)
            if not 0 < size <= _MOST_ELEMENTS or output.dtype not in _NARROW:
                continue
            like = jax.ShapeDtypeStruct(output.shape, output.dtype, sharding=sharding)
            squares = jax.ShapeDtypeStruct(output.shape, "float32", sharding=sharding)
            number, limits = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((3,), "float32")
            smoothed = (squares, like, number, number, number)
            block, column, *_ = jax.eval_shape(rounding.smooth_deviations, *smoothed)
            wanted = [
                (rounding.add_deviations, squares, like, like),
                (rounding.smooth_deviations, *smoothed),
                (_judge, like, like, block, column, limits),
            ]
            with ThreadPoolExecutor(len(wanted)) as pool:  # XLA compiles without holding the interpreter's lock
                list(pool.map(lambda work: self._compiled(*work), wanted))

    def keep(self, output: Sequence[Any], on_host: Sequence[Any]) -> None:
        """Keeps an output on the device, to compare others with it.

        Args:
            output: its leaves.
            on_host: the same with numpy arrays, which stand for those of `output` when outputs are compared.
        """
        for there, wanted in zip(output, on_host, strict=True):
            if isinstance(there, jax.Array) and isinstance(wanted, np.ndarray):
                self._there[id(wanted)] = (wanted, there)

    def run(self, program: Any, *args: Any) -> Any:
        """Runs one of the programs that `expect` compiles, or compiles it now."""
        return self._compiled(program, *args)(*args)

    def _compiled(self, program: Any, *args: Any) -> jax.stages.Compiled:
        devices = frozenset(args[0].sharding.device_set)
        kind = (program, devices, *((np.shape(arg), jnp.result_type(arg)) for arg in args))
        if kind not in self._programs:
            self._programs[kind] = program.lower(*args).compile(_RUNS_NOTHING)
        return self._programs[kind]

    def _carried(self, wanted: Any, got: jax.Array) -> jax.Array:
        kept = self._there.get(id(wanted))
        if kept is None:
            kept = self._there[id(wanted)] = (wanted, jax.device_put(wanted, got.sharding))
        return kept[1]

    def _compare(self, got: jax.Array, wanted: jax.Array, allowance: Allowance) -> Mismatches | None:
        if not all(jnp.issubdtype(array.dtype, jnp.floating) for array in (got, wanted)):
            return Mismatches(0) if got.dtype == wanted.dtype and bool(_are_equal(got, wanted)) else None
        if max(got.dtype.itemsize, wanted.dtype.itemsize) > 4:
            return None
        if id(allowance) not in self._factors:
            factors = (np.asarray(part, np.float32) for part in (allowance.block, allowance.column))
            self._factors[id(allowance)] = (allowance, *(jax.device_put(part, got.sharding) for part in factors))
        _, block, column = self._factors[id(allowance)]
        limits = np.asarray(allowance.for_dtype(got.dtype).limits, np.float32)
        counts, sums = self.run(_judge, got, wanted, block, column, limits)
        count, far = map(int, counts)
        found = Mismatches(count, far=far, together=together_of(np.asarray(sums), got.size, allowance))
        if not found.disagree(got.size, allowance):
            return found
        worst, mine, its, limit = map(np.asarray, _worst(got, wanted, block, column, limits))
        return dataclasses.replace(
            found, worst=int(worst), got=mine[()], wanted=its[()], allowed=float(limit) if allowance.is_exact else None
        )


@jax.jit
def _are_equal(got: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.all(got == wanted)


@jax.jit
def _judge(
    got: jax.Array, wanted: jax.Array, block: jax.Array, column: jax.Array, limits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns how many elements differ by more than their allowances, how many by far, and the sums of `deviations`."""
    excess, limit = _excess(got, wanted, block, column, limits)
    counts = [jnp.sum(excess > 0, dtype=jnp.int32), jnp.sum(is_far(jnp, excess, limit, limits[2]), dtype=jnp.int32)]
    return jnp.stack(counts), rounding.deviations(jnp, got.astype("float32"), wanted.astype("float32"))[1]


@jax.jit
def _worst(
    got: jax.Array, wanted: jax.Array, block: jax.Array, column: jax.Array, limits: jax.Array
) -> tuple[jax.Array, ...]:
    excess, limit = _excess(got, wanted, block, column, limits)
    worst = jnp.argmax(excess)
    return worst, got.reshape(-1)[worst], wanted.reshape(-1)[worst], limit[worst]


def _excess(
    got: jax.Array, wanted: jax.Array, block: jax.Array, column: jax.Array, limits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    mine, its = got.reshape(-1).astype("float32"), wanted.reshape(-1).astype("float32")
    columns = got.shape[-1] if got.ndim else 1
    limit = rounding.allowed(jnp, block, column, limits, its, start=0, columns=columns)
    return excess_of(jnp, mine, its, limit), limit
