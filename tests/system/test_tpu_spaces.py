"""At least 95% of the configs of the spaces for TPUs compile for each chip; needs the `tpu` extra, but no TPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tpu_kernels

import quarantune
from quarantune import spaces

_S = jax.ShapeDtypeStruct
_CALLS = {
    "matmul": ((4096, 4096, 4096), [_S((4096, 4096), jnp.bfloat16)] * 2),
    "grouped_matmul": (
        (4096, 2048, 2048),
        [_S((4096, 2048), jnp.bfloat16), _S((8, 2048, 2048), jnp.bfloat16), _S((8,), jnp.int32)],
    ),
    "attention": ((4096, 4096), [_S((1, 8, 4096, 128), jnp.bfloat16)] * 3),
    "elementwise": ((4096, 4096), [_S((4096, 4096), jnp.bfloat16)]),
}
_CHIPS = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite", "TPU 7x": "TPU7x"}
_SHARE = 0.95


@pytest.mark.target
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the `tpu` extra")
@pytest.mark.parametrize("kernel", _CALLS)
@pytest.mark.parametrize("chip", _CHIPS)
def test_the_configs_of_a_space_compile_for_the_chip(chip: str, kernel: str, tmp_path: Path) -> None:
    sizes, arguments = _CALLS[kernel]
    configs = spaces.tpu_configs(kernel, sizes, device_kind=_CHIPS[chip])
    # The last configs have the largest blocks, and every eighth shows the others.
    chosen = [*configs[::8], *configs[-4:]]
    with quarantune.settings(cache_dir=tmp_path):
        report = quarantune.compile_check(getattr(tpu_kernels, kernel), chosen, *arguments, target=chip)
    ends = [trial.outcome.value for trial in report.trials]
    assert ends.count("ok") >= _SHARE * len(chosen), [trial.message for trial in report.trials]
