"""Resources of kernels on NVIDIA GPUs are read from the texts of ptxas, XLA and Mosaic GPU as data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quarantune.devices import targets
from quarantune.sandbox import contain
from quarantune.values.trial import NO_FIGURES, CompilerFigures, CompileTarget
from quarantune.worker.compiler_figures import compiled, read

H100 = targets.packaged("nvidia_h100").config_text
STARTED = """\
001: kCustomKernel [source | next=002 (1)] product grid: [8, 8, 1] threads: [128, 1, 1]  shared_memory: 32768 bytes
002: kWhile [prev=001 (1) | sink        ]
    003: kCustomKernel [source | sink] sum__1 grid: [8, 1, 1] threads: [1024, 1, 1]  shared_memory: 0 bytes
"""
LLVM = """\
define void @stages_init(ptr %0, ptr %1) {{
  %3 = call ptr @mosaic_gpu_module_load(ptr @stages_kernel_binary)
  %4 = call ptr @mosaic_gpu_get_function(ptr %3, ptr @stages_name, i32 {memory}, i32 1)
}}
declare void @mosaic_gpu_launch_kernel(ptr, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, ptr, ptr)
declare ptr @mosaic_gpu_get_function(ptr, ptr, i32, i32)
  call void @mosaic_gpu_launch_kernel(ptr %0, i32 132, i32 1, i32 1, i32 0, i32 0, i32 0, i32 384, i32 1, i32 1, i32 \
{memory}, ptr %1, ptr %185)
"""
LLVM_OF_0_12 = """\
declare void @mosaic_gpu_build_kernel_spec(ptr, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, ptr, ptr)
define void @stages(ptr %0, ptr %1) {{
  call void @mosaic_gpu_build_kernel_spec(ptr %0, i32 132, i32 1, i32 1, i32 0, i32 0, i32 0, i32 384, i32 1, i32 1, \
i32 {memory}, i32 0, i32 1, ptr %337, ptr %339)
  ret void
}}
define void @_mlir_ciface_stages(ptr %0, ptr %1) {{
  call void @stages(ptr %0, ptr %1)
}}
"""
MOSAIC = 'custom_call_target="mosaic_gpu_v2", backend_config={{kernel_hash = "C\\E8\\15{}", module = "ML"}}'


def told(name: str, registers: int, spilled: int = 0, rest: str = "", arch: str = "sm_90a") -> str:
    """Returns XLA's log of a kernel."""
    warning = (
        f"ptxas warning : Registers are spilled to local memory in function '{name}', {spilled} bytes spill stores\n"
    )
    return (
        "I1123 20:23:02.892067   25204 subprocess_compilation.cc:182] Looking for /usr/local/bin/ptxas\n"
        f"{warning if spilled else ''}ptxas info    : 0 bytes gmem\n"
        f"ptxas info    : Compiling entry function '{name}' for '{arch}'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    {spilled} bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers{rest}\n"
        "ptxas info    : Compile time = 44.543 ms\n\n"
    )


def test_the_most_demanding_of_several_kernels_counts() -> None:
    log = told("product", 168, 8, ", 8 bytes cumulative stack size") + told("sum__1", 31, rest=", 8320 bytes smem")
    figures = CompilerFigures(registers=168, spilled_bytes=8, shared_bytes=32768, occupancy=12 / 64)
    assert read(log, STARTED, "", H100) == figures


@pytest.mark.parametrize(("name", "host"), [("stages", LLVM), ("stages_kernel", LLVM_OF_0_12)], ids=["0.10", "0.12"])
def test_kernels_of_mosaic_gpu_with_one_name_stay_apart(name: str, host: str) -> None:
    log = "".join(told(name, 168, rest=", 1 bytes smem") + host.format(memory=kib << 10) for kib in (112, 152))
    program = "\n".join(map(MOSAIC.format, "abb"))
    figures = CompilerFigures(registers=168, spilled_bytes=0, shared_bytes=(152 << 10) + 1, occupancy=12 / 64)
    assert read(log, "001: kCustomCall [source | sink] kCustomCall", program, H100) == figures


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "arch", "occupancy"),
    [
        (32, 128, 0, "sm_90a", 1.0),
        (33, 128, 0, "sm_90a", 48 / 64),  # threads get registers in units of 8: 12 warps in each partition
        (168, 384, 0, "sm_90a", 12 / 64),
        (255, 128, 0, "sm_90a", 8 / 64),
        (32, 128, 226 << 10, "sm_90a", 4 / 64),
        (32, 128, (114 << 10) - 1024, "sm_90", 8 / 64),  # two blocks, each with 1 KiB for the system
        (32, 128, (114 << 10) - 1023, "sm_90", 4 / 64),
        (16, 32, 0, "sm_90a", 32 / 64),  # the largest number of blocks
        (16, 32, 0, "sm_86", 16 / 64),
        (16, 32, 0, "sm_75", None),
    ],
)
def test_the_occupancy_equals_nvidias_calculator(
    registers: int, threads: int, shared: int, arch: str, occupancy: float | None
) -> None:
    started = f"kKernel [source | sink] k grid: [1, 1, 1] threads: [{threads}, 1, 1]  shared_memory: {shared} bytes"
    assert read(told("k", registers, arch=arch), started, "", H100).occupancy == occupancy
    assert read(told("k", registers, arch=arch), started, "", "").occupancy is None


@pytest.mark.parametrize(
    ("log", "started", "program"),
    [
        ("", "", ""),
        (told("product", 168), "", ""),
        (told("product", 168), STARTED, ""),
        ("", "", MOSAIC.format("a")),
        (told("stages", 168) + LLVM.format(memory=8), "", MOSAIC.format("a") + MOSAIC.format("b")),
    ],
    ids=["nothing", "not started", "a kernel is missing", "compiled before", "one was compiled before"],
)
def test_one_unknown_kernel_leaves_all_figures_unknown(log: str, started: str, program: str) -> None:
    assert read(log, started, program, H100) == NO_FIGURES


@pytest.mark.parametrize(
    "log", [told("k", 168)[:-80], told("k", 168).replace("168", "9" * 30), told("k", 1).replace("k", "")]
)
def test_torn_or_hostile_logs_are_refused(log: str) -> None:
    with pytest.raises(ValueError, match="the log of ptxas does not show the needs of a kernel"):
        read(log, STARTED, "", H100)


@pytest.mark.parametrize(
    "writes", [None, "damage", "Kernel [source] k grid: [1] threads: [1, 1, 1]  shared_memory: 0 bytes"]
)
def test_missing_figures_do_not_cost_the_verdict(writes: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    program, directories = SimpleNamespace(as_text=lambda: ""), list[Path]()

    def compile_one(compiler_options: Mapping[str, str] | None = None) -> Any:
        if compiler_options is not None and writes is not None:
            directories.append(Path(compiler_options["xla_dump_to"]))
            (directories[-1] / "module_0001.jit_f.thunk_sequence.txt").write_text(writes)
        return program

    if writes is None:
        monkeypatch.setattr(contain, "_SHARED_MEMORY", "/nowhere")  # no room for the files
    target = CompileTarget(platform="cuda", config_text=H100, device_kind="H100", num_cores=132)
    assert compiled(SimpleNamespace(compile=compile_one), target) == (program, NO_FIGURES)
    assert not any(directory.exists() for directory in directories)
    assert "MOSAIC_GPU_DUMP_HOST_LLVM" not in os.environ


@pytest.mark.parametrize("occupancy", [0.0, 1.0])
def test_figures_travel_with_the_least_and_the_largest_occupancy(occupancy: float) -> None:
    figures = CompilerFigures(registers=24, spilled_bytes=0, shared_bytes=0, occupancy=occupancy)
    assert CompilerFigures.from_json(figures.to_json()) == figures
