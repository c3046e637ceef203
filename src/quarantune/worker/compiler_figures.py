"""Reads the compiler's figures about a program."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from quarantune.values.compiling import CompilerFigures

_USED = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_VMEM = re.compile(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"')
"""A kernel's use of memory space 1, VMEM, in the text of a program for a TPU, which has the limits beside it."""
_KERNEL = re.compile(r'custom_call_target="tpu_custom_call"')
_ESTIMATE = re.compile(r'"cost_estimate":\s*\{([^}]*)\}')
_COST = re.compile(r'"(flops|bytes_accessed)":\s*"?(\d+)')
"""What the author of a kernel says of its cost; the compiler itself counts a kernel as nothing."""
_UNCOUNTED = re.compile(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|triton_kernel_call|mosaic_gpu)|\bwhile\(')
"""Kernels on GPUs, which the compiler counts as nothing, too, and loops, of which it counts one turn."""
_LARGEST = 1 << 62


def read_figures(compiled: Any, known: CompilerFigures | None = None) -> CompilerFigures:
    """Returns the compiler's figures about a program; a compiler that states none raises no error here.

    Args:
        compiled: a `jax.stages.Compiled`.
        known: those that are known of it already.
    """
    memory, costs = _answer(compiled.memory_analysis), _answer(compiled.cost_analysis)
    costs, text = costs if isinstance(costs, dict) else {}, _answer(compiled.as_text) or ""
    estimates = [{name: int(cost) for name, cost in _COST.findall(found[1])} for found in _ESTIMATE.finditer(text)]
    has_costs = len(_KERNEL.findall(text)) <= len(estimates) and not _UNCOUNTED.search(text)
    used = [int(found[1]) + int(found[2]) for part in _USED.finditer(text) for found in _VMEM.finditer(part[1])]
    return dataclasses.replace(
        known or CompilerFigures(),
        argument_bytes=_size(memory, "argument_size_in_bytes"),
        output_bytes=_size(memory, "output_size_in_bytes"),
        temporary_bytes=_size(memory, "temp_size_in_bytes"),
        aliased_bytes=_size(memory, "alias_size_in_bytes"),
        code_bytes=_size(memory, "generated_code_size_in_bytes"),
        vmem_bytes=max(used, default=None),
        flops=_cost(costs, "flops", estimates, "flops") if has_costs else None,
        moved_bytes=_cost(costs, "bytes accessed", estimates, "bytes_accessed") if has_costs else None,
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


def _cost(costs: dict[str, Any], name: str, estimates: list[dict[str, int]], estimated: str) -> float | None:
    """Returns the compiler's figure, which may lack what kernels are said to cost, but is never below that."""
    value = costs.get(name)
    if estimates:
        known = value if isinstance(value, (int, float)) else 0
        value = max(known, sum(estimate.get(estimated, 0) for estimate in estimates))
    return float(value) if isinstance(value, (int, float)) and 0 < value < _LARGEST else None
