"""Reads the compiler's figures about a program."""

from __future__ import annotations

import re
from typing import Any

from quarantune.values.compiler_figures import CompilerFigures

_VMEM = re.compile(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"')
"""A kernel's use of memory space 1, VMEM, in the text of a program that was compiled for a TPU."""
_LARGEST = 1 << 62


def read_figures(compiled: Any) -> CompilerFigures:
    """Returns the compiler's figures about a program; a compiler that states none raises no error here.

    Args:
        compiled: a `jax.stages.Compiled`.
    """
    try:
        memory = compiled.memory_analysis()
        costs = compiled.cost_analysis()
        text = compiled.as_text() or ""
    except Exception:  # some compilers implement only some of them
        return CompilerFigures()
    costs = costs if isinstance(costs, dict) else {}
    is_for_tpu = "tpu_custom_call" in text
    return CompilerFigures(
        argument_bytes=_size(memory, "argument_size_in_bytes"),
        output_bytes=_size(memory, "output_size_in_bytes"),
        temporary_bytes=_size(memory, "temp_size_in_bytes"),
        code_bytes=_size(memory, "generated_code_size_in_bytes"),
        vmem_bytes=max((int(found[1]) + int(found[2]) for found in _VMEM.finditer(text)), default=None)
        if is_for_tpu
        else None,
        flops=_amount(costs, "flops"),
        moved_bytes=_amount(costs, "bytes accessed"),
    )


def _size(memory: Any, name: str) -> int | None:
    value = getattr(memory, name, None)
    return value if isinstance(value, int) and 0 <= value < _LARGEST else None


def _amount(costs: dict[str, Any], name: str) -> float | None:
    value = costs.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 < value < _LARGEST else None
