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
from quarantune.measure.compare import Mismatches, excess_of, is_far
from quarantune.measure.rounding import Allowance
from quarantune.values.compiling import OutputArray

_MOST_ELEMENTS = 2**31 - 1
"""The largest 32-bit count."""
_RUNS_NOTHING: dict[str, bool | str] = {"xla_gpu_autotune_level": "0"}
"""Options that keep XLA from trying kernels while it compiles, since the clock may be timing others meanwhile."""
_NARROW = frozenset({"float32", "bfloat16", "float16"})


class Comparer:
    """Compares one worker's outputs with the expected ones.

    Attributes:
        programs: what it has compiled, by names, numbers of devices, shapes and dtypes.
    """

    def __init__(self) -> None:
        """Sets up a comparer with nothing on the device."""
        self._there: dict[int, tuple[Any, jax.Array]] = {}
        self.programs: dict[Any, Any] = {}

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
            return self._compare(got, self._carried(wanted, got.sharding), allowance)
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
                self(self._carried(wanted), wanted, allowance)

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
            three = jax.ShapeDtypeStruct((3,), "float32")
            noise = (rounding.add_deviations, squares, like, like, three)
            _, _, block, column, *_ = jax.eval_shape(*noise)
            programs = [noise, (rounding.no_squares, like), (_judge, like, like, block, column, three)]
            with ThreadPoolExecutor(3) as pool:  # XLA compiles without holding the interpreter's lock
                list(pool.map(lambda work: self._compiled(*work), programs))

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

    def _compiled(self, program: Any, *args: Any) -> Any:
        devices = tuple(sorted(device.id for device in args[0].sharding.device_set))
        kind = (program.__name__, devices, *((np.shape(arg), str(jnp.result_type(arg))) for arg in args))
        if kind not in self.programs:
            self.programs[kind] = program.lower(*args).compile(_RUNS_NOTHING)
        return self.programs[kind]

    def _carried(self, wanted: Any, sharding: Any = None) -> jax.Array:
        if id(wanted) not in self._there:
            self._there[id(wanted)] = (wanted, jax.device_put(wanted, sharding))
        return self._there[id(wanted)][1]

    def _compare(self, got: jax.Array, wanted: jax.Array, allowance: Allowance) -> Mismatches | None:
        if not all(jnp.issubdtype(array.dtype, jnp.floating) for array in (got, wanted)):
            return Mismatches(0) if got.dtype == wanted.dtype and bool(_are_equal(got, wanted)) else None
        if max(got.dtype.itemsize, wanted.dtype.itemsize) > 4:
            return None
        block, column = (self._carried(part, got.sharding) for part in (allowance.block, allowance.column))
        limits = np.asarray(allowance.for_dtype(got.dtype).limits, np.float32)
        there = np.asarray(self.run(_judge, got, wanted, block, column, limits))
        (count, far, worst), floats = map(int, there[:3]), there[3:].view(np.float32)
        found = Mismatches(count, far=far, together=allowance.reason(floats[:4], got.size))
        if not found.disagree(got.size, allowance):
            return found
        mine, its = floats[4].astype(got.dtype), floats[5].astype(wanted.dtype)
        return dataclasses.replace(found, worst=worst, got=mine, wanted=its, allowed=float(floats[6]))


@jax.jit
def _are_equal(got: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.all(got == wanted)


@jax.jit
def _judge(got: jax.Array, wanted: jax.Array, block: jax.Array, column: jax.Array, limits: jax.Array) -> jax.Array:
    """Compares two arrays.

    Returns:
        In one array, which takes one transfer to the host: how many elements differ by more than their allowances, how
        many by far, and the place of the worst; then, as the bits of floats, the sums of `deviations`, the worst
        element, the expected one, and its allowance.
    """
    mine, its = (array.reshape(-1).astype("float32") for array in (got, wanted))
    columns = got.shape[-1] if got.ndim else 1
    limit = rounding.allowed(jnp, block, column, limits, its, start=0, columns=columns)
    excess = excess_of(jnp, mine, its, limit)
    worst = jnp.argmax(excess)
    counts = jnp.sum(excess > 0), jnp.sum(is_far(jnp, excess, limit, limits[2])), worst
    sums = rounding.deviations(jnp, mine, its)[1]
    floats = jnp.concatenate([sums, jnp.stack([mine[worst], its[worst], limit[worst]])])
    return jnp.concatenate(
        [jnp.stack(counts).astype("int32"), jax.lax.bitcast_convert_type(floats.astype("float32"), "int32")]
    )
