"""The compiler's figures about a program, and what its kernels need on an NVIDIA GPU, without any GPU.

ptxas logs the registers and spills of each kernel, and XLA adds that to this worker's own log. XLA writes each kernel's
threads and shared memory into a directory; Mosaic GPU writes them into the log. The texts are read as data. Figures
that a version of them lacks are unknown.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quarantune.host import shared_files
from quarantune.host.process import environment_variables
from quarantune.sandbox import contain
from quarantune.values.trial import NO_FIGURES, CompilerFigures, CompileTarget

_USED = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_VMEM = re.compile(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"')
"""A kernel's use of memory space 1, VMEM, inside a match of `_USED`: the text of a TPU program also has the limits."""
_KERNEL = re.compile(r'custom_call_target="tpu_custom_call"')
_ESTIMATE = re.compile(r'"cost_estimate":\s*\{([^}]*)\}')
_COST = re.compile(r'"(flops|bytes_accessed)":\s*"?(\d+)')
"""A kernel's cost as its author states it; the compiler itself counts a kernel as nothing."""
_UNCOUNTED = re.compile(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|triton_kernel_call|mosaic_gpu)|\bwhile\(')
"""Kernels on GPUs, which the compiler also counts as nothing, and loops, which it counts as one turn."""
_LARGEST = 1 << 62


def read_figures(program: Any, known: CompilerFigures | None = None) -> CompilerFigures:
    """Returns the compiler's figures about a program; a compiler that has none causes no error.

    Args:
        program: a `jax.stages.Compiled`.
        known: the figures that are already known.
    """
    memory, costs = _answer(program.memory_analysis), _answer(program.cost_analysis)
    costs, text = costs if isinstance(costs, dict) else {}, _answer(program.as_text) or ""
    stated = [dict(_COST.findall(found[1])) for found in _ESTIMATE.finditer(text)]
    has_costs = len(_KERNEL.findall(text)) <= len(stated) and not _UNCOUNTED.search(text)
    used = [int(found[1]) + int(found[2]) for part in _USED.finditer(text) for found in _VMEM.finditer(part[1])]

    def cost(name: str) -> float | None:
        """Returns the compiler's figure, or the cost that kernels state if it is larger: the compiler may omit it."""
        of_kernels = sum(int(each.get(name.replace(" ", "_"), 0)) for each in stated)
        value = max(of_kernels, found if isinstance(found := costs.get(name), (int, float)) else 0)
        return float(value) if has_costs and 0 < value < _LARGEST else None

    return dataclasses.replace(
        known or CompilerFigures(),
        argument_bytes=_size(memory, "argument_size_in_bytes"),
        output_bytes=_size(memory, "output_size_in_bytes"),
        temporary_bytes=_size(memory, "temp_size_in_bytes"),
        aliased_bytes=_size(memory, "alias_size_in_bytes"),
        code_bytes=_size(memory, "generated_code_size_in_bytes"),
        vmem_bytes=max(used, default=None),
        flops=cost("flops"),
        moved_bytes=cost("bytes accessed"),
    )


def _answer(question: Callable[[], Any]) -> Any:
    """Returns the answer of a compiler; None if it does not implement the question."""
    try:
        return question()
    except Exception:
        return None


def _size(memory: Any, name: str) -> int | None:
    value = getattr(memory, name, None)
    return value if isinstance(value, int) and 0 <= value < _LARGEST else None


# --- kernels on NVIDIA GPUs -----------------------------------------------------------------------------------

_MOST_BYTES = 4 << 20
"""Most bytes to read of each text; a kernel of Mosaic GPU takes 0.2 MB, another 1 KB."""
_NUMBER = r"(\d{1,9})"
_COMPILED = re.compile(
    rf"'([\w$.]+)' for 'sm_{_NUMBER}\w?'\n(?:.*\n)*?.* Function properties for \1\n"
    rf".* {_NUMBER} bytes spill stores, .*\n(?:.*\n)*?.*: Used {_NUMBER} registers(?:.*?{_NUMBER} bytes smem)?"
)
_STARTED = re.compile(
    rf"Kernel \[[^\]\n]*\] ([\w$.]+) grid: .* threads: \[{_NUMBER}, {_NUMBER}, {_NUMBER}\] +shared_memory: {_NUMBER} "
)
_SIZES = rf"\(ptr %\w+(?:, i32 %?\w+){{6}}{f', i32 {_NUMBER}' * 4},"
_STARTED_BY_MOSAIC = re.compile(
    rf"@mosaic_gpu_get_function\(ptr %\w+, ptr @([\w$.]+)_name, (?s:.*?)@mosaic_gpu_launch_kernel{_SIZES}"
)
_SPECIFIED_BY_MOSAIC = re.compile(
    rf"^define void @([\w$.]+)\(.*\n(?s:.*?)@mosaic_gpu_build_kernel_spec{_SIZES}", re.MULTILINE
)
"""`_STARTED_BY_MOSAIC` for jaxlib 0.12; the kernel's name lacks its suffix `_kernel`."""
_HASH = re.compile(r'kernel_hash = "(?:[^"\\\n]|\\.)*"')
"""Marks a kernel of Mosaic GPU, which compiles kernels with equal hashes once in a process."""
_LIMIT = re.compile(r"^ *(threads|registers|shared_memory)_per_core(?:_limit)?: ([1-9]\d{1,8})$", re.MULTILINE)
_BLOCKS = {80: 32, 86: 16, 87: 16, 89: 24, 90: 32, 100: 32, 103: 32, 120: 24, 121: 24}
"""Blocks on a multiprocessor by compute capability, from the "CUDA C++ Programming Guide"."""


def compiled(lowered: Any, target: CompileTarget) -> tuple[Any, CompilerFigures]:
    """Compiles a program for a GPU; returns it, and the needs of its kernels.

    Args:
        lowered: a `jax.stages.Lowered`.
        target: the GPU.
    """
    program = None
    try:
        with contain.directory() as directory, environment_variables({"MOSAIC_GPU_DUMP_HOST_LLVM": "1"}):
            start = os.fstat(2).st_size  # of the log
            program = lowered.compile(compiler_options={"xla_dump_to": directory})
            (path,) = Path(directory).glob("*.thunk_sequence.txt")
            started = shared_files.read(path, largest_bytes=_MOST_BYTES).decode(errors="replace")
            log = os.pread(2, _MOST_BYTES, start).decode(errors="replace")
            return program, read(log, started, program.as_text(), target.config_text)
    except (OSError, ValueError):  # no room, or this version of XLA writes something else
        return program or lowered.compile(), NO_FIGURES


def read(log: str, started: str, program: str, gpu: str) -> CompilerFigures:
    """Returns the largest needs of a program's kernels, and the least occupancy; no figures if a kernel is unknown.

    Args:
        log: the log of its compilation.
        started: XLA's text about the kernels that it starts.
        program: the text of the compiled program.
        gpu: XLA's description of the GPU.

    Raises:
        ValueError: a text is torn.
    """
    by_xla, known, needs = _STARTED.findall(started), 0, list[tuple[int, int, int, float | None]]()
    for part in log.split("Compiling entry function ")[1:]:
        if (kernel := _COMPILED.match(part)) is None:
            raise ValueError(f"the log of ptxas does not show the needs of a kernel: {part[:80]!r}")
        capability, spilled, registers, static = map(int, kernel.groups("0")[1:])
        by_mosaic = [(f"{name}_kernel", *sizes) for name, *sizes in _SPECIFIED_BY_MOSAIC.findall(part)]
        starts = [start for start in by_xla + _STARTED_BY_MOSAIC.findall(part) + by_mosaic if start[0] == kernel[1]]
        known += bool(starts)
        for _, *sizes in starts:
            x, y, z, dynamic = map(int, sizes)
            occupancy = _occupancy(capability, x * y * z, registers, static + dynamic, gpu)
            needs.append((registers, spilled, static + dynamic, occupancy))
    if not known or known != len({name for name, *_ in by_xla} | set(_HASH.findall(program))):
        return NO_FIGURES
    used, spills, shared, occupancies = zip(*needs, strict=True)
    least = None if None in occupancies else min(occupancies)
    return CompilerFigures(registers=max(used), spilled_bytes=max(spills), shared_bytes=max(shared), occupancy=least)


def _occupancy(capability: int, threads: int, registers: int, shared_bytes: int, gpu: str) -> float | None:
    """Returns the share of a multiprocessor's warps that can run at a time; None if its limits are unknown.

    As in NVIDIA's occupancy calculator, a warp gets registers in units of 256, from one of four partitions, and a
    block gets shared memory in units of 128 bytes, 1 KiB of it for the system.
    """
    limits = {name: int(limit) for name, limit in _LIMIT.findall(gpu)}
    if capability not in _BLOCKS or len(limits) < 3 or not threads or not registers:
        return None
    most_warps, warps = limits["threads"] // 32, -(-threads // 32)
    by_registers = limits["registers"] // 4 // (-(-registers * 32 // 256) * 256) * 4 // warps
    by_memory = limits["shared_memory"] // (-(-(shared_bytes + 1024) // 128) * 128)
    return min(_BLOCKS[capability], most_warps // warps, by_registers, by_memory) * warps / most_warps
