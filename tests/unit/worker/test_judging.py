"""Free memory keeps no outputs of earlier configs, which could pass as outputs of a config that writes none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quarantune.values.trial import ArrayKind
from quarantune.worker.judging import StaleMemory, fill_value


class Recorded(StaleMemory):
    """Records the arrays it makes."""

    def __init__(self, *, is_shared: bool = True) -> None:
        super().__init__(is_shared=is_shared)
        self.made: list[jax.Array] = []
        self.raises: Exception | None = None

    def _filled(self, kind: Any) -> jax.Array:
        if self.raises is not None:
            raise self.raises
        self.made.append(super()._filled(kind))
        return self.made[-1]


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "complex64", "int8", "int32", "uint16"]
)
def test_memory_is_filled_with_a_value_that_no_output_has(dtype: str) -> None:
    memory = Recorded()
    memory.note({"out": jnp.ones((4, 8), dtype), "flags": jnp.zeros(3, bool), "key": jax.random.key(0), "n": 3})
    memory.overwrite()
    assert {(array.shape, array.dtype.name) for array in memory.made} == {((4, 8), dtype)}
    assert len({array.unsafe_buffer_pointer() for array in memory.made}) == len(memory.made) == 3
    for array in memory.made:
        values = np.asarray(array.astype(jnp.float32)) if jnp.issubdtype(dtype, jnp.floating) else np.asarray(array)
        is_filled = np.isnan(values) if jnp.issubdtype(dtype, jnp.inexact) else values == np.iinfo(dtype).max
        assert is_filled.all()


def test_expected_outputs_are_overwritten_by_earlier_programs() -> None:
    memory = StaleMemory(is_shared=True)
    memory.expect([ArrayKind((4, 8), "bfloat16"), ArrayKind((3,), "bool")])
    compiled = dict(memory._fills)
    memory.note({"out": jnp.ones((4, 8), "bfloat16"), "flags": jnp.zeros(3, bool)})
    memory.overwrite()
    assert memory._fills == compiled
    assert len(compiled) == 1


def test_types_without_a_filling_value_are_left_alone() -> None:
    assert [fill_value(dtype) for dtype in (jnp.bool_, jax.random.key(0).dtype)] == [None, None]


def test_memory_unshared_or_before_an_output_is_not_filled() -> None:
    memory, alone = Recorded(), Recorded(is_shared=False)
    alone.note(jnp.ones(8))
    for each in (memory, alone):
        each.overwrite()
        assert not each.made


def test_large_outputs_are_overwritten_fewer_times_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarantune.worker.judging._MOST_STALE_BYTES", 80)
    for length, copies in {8: 2, 20: 1, 21: 0}.items():
        memory = Recorded()
        memory.note(jnp.ones(length, jnp.float32))
        memory.overwrite()
        assert len(memory.made) == copies


def test_memory_is_filled_even_if_the_author_expects_nan() -> None:
    memory = Recorded()
    memory.note(jnp.ones(8))
    with jax.debug_nans(True):
        memory.overwrite()
        memory.overwrite()
    assert len(memory.made) == 6


def test_a_lack_of_memory_is_tried_once_and_raises_nothing() -> None:
    memory = Recorded()
    memory.note(jnp.ones(8))
    memory.raises = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    memory.overwrite()
    memory.raises = None
    memory.note(jnp.ones(8))
    memory.overwrite()
    assert not memory.made
