"""Reads the compiler's figures about a program."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from quarantune.values.compiler_figures import CompilerFigures

_USED = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_VMEM = re.compile(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"')
"""A kernel's use of memory space 1, VMEM, in the text of a program for a TPU, which has the limits beside it."""
_LARGEST = 1 << 62


def read_figures(compiled: Any) -> CompilerFigures:
    """Returns the compiler's figures about a program; a compiler that states none raises no error here.

    Args:
        compiled: a `jax.stages.Compiled`.
    """
    memory, costs = _answer(compiled.memory_analysis), _answer(compiled.cost_analysis)
    costs, text = costs if isinstance(costs, dict) else {}, _answer(compiled.as_text) or ""
    used = [int(found[1]) + int(found[2]) for part in _USED.finditer(text) for found in _VMEM.finditer(part[1])]
    return CompilerFigures(
        argument_bytes=_size(memory, "argument_size_in_bytes"),
        output_bytes=_size(memory, "output_size_in_bytes"),
        temporary_bytes=_size(memory, "temp_size_in_bytes"),
        code_bytes=_size(memory, "generated_code_size_in_bytes"),
        vmem_bytes=max(used, default=None),
        flops=_amount(costs, "flops"),
        moved_bytes=_amount(costs, "bytes accessed"),
    )


def _answer(question: Callable[[], Any]) -> Any:
    """Returns the answer of a compiler; None where this one does not implement the question."""
    try:
        return question()
    except Exception:
        return None


def _size(memory: Any, name: str) -> int | None:
    value = getattr(memory, name, None)
    return value if isinstance(value, int) and 0 <= value < _LARGEST else None


def _amount(costs: dict[str, Any], name: str) -> float | None:
    value = costs.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 < value < _LARGEST else None
