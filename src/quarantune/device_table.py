"""Limits and peaks of devices, by JAX's `device_kind`: one table for `spaces` and `metrics`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quarantune.values.trial import CompilerFigures


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """The most that one block (a workgroup, a program instance) may use; None means unknown.

    Attributes:
        shared_memory_per_block_bytes: on-chip memory that the kernel manages: shared memory, LDS, or a TPU core's VMEM.
        registers_per_block: 32-bit registers of all its threads together.
        registers_per_thread: 32-bit registers of one thread.
        threads_per_block: threads.
    """

    shared_memory_per_block_bytes: int | None = None
    registers_per_block: int | None = None
    registers_per_thread: int | None = None
    threads_per_block: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePeaks:
    """The peaks of a device, from its vendor's data sheet.

    Attributes:
        gbps: memory bandwidth in 10^9 bytes per second.
        tflops: matrix arithmetic in 10^12 operations per second, without sparsity, by dtype; `float8` for every 8-bit
            float, and for `float32` on NVIDIA the TF32 rate, as JAX's default precision multiplies with it.
        ghz: the clock of a TPU in 10^9 cycles per second; None if unknown.
    """

    gbps: float
    tflops: Mapping[str, float]
    ghz: float | None = None


def limits_of(kind: str) -> DeviceLimits:
    """Returns the limits of a kind of device; all None for a kind that the table lacks.

    Args:
        kind: JAX's `device_kind`. A slice of a GPU (`... MIG 1g.10gb`) has the limits of the whole GPU: its
            multiprocessors are fewer, but not smaller.
    """
    limits, _ = _TABLE.get(kind.partition(" MIG ")[0], _UNKNOWN)
    return limits


def peaks_of(kind: str) -> DevicePeaks | None:
    """Returns the peaks of a kind of device; None for a kind that the table lacks.

    Args:
        kind: JAX's exact `device_kind`, so that neither a slice of a device nor a similar device gets its peaks.
    """
    _, peaks = _TABLE.get(kind, _UNKNOWN)
    return peaks


def estimated_ms(figures: CompilerFigures | None, kind: str) -> float | None:
    """Returns the time that a compiler estimates for a program on a kind of device; None if unknown.

    It is the larger of two times. One is the cycles at the device's clock, as if all operations ran one after another.
    The other is the time in which its main memory moves the program's reads and writes.
    """
    peaks = peaks_of(kind)
    if figures is None or figures.estimate is None or peaks is None or peaks.ghz is None:
        return None
    moved = max(figures.estimate.moved_bytes, (figures.argument_bytes or 0) + (figures.output_bytes or 0))
    return max(figures.estimate.cycles / peaks.ghz, moved / peaks.gbps) / 1e6


def estimated_order(figures: CompilerFigures | None, kind: str) -> tuple[float, float]:
    """Returns the sort key of programs for a kind of device: time and cycles, infinite if unknown."""
    estimate = None if figures is None else figures.estimate
    return estimated_ms(figures, kind) or math.inf, math.inf if estimate is None else estimate.cycles


def _gpu(shared_memory_kib: int, registers_per_block: int = 65536, registers_per_thread: int = 255) -> DeviceLimits:
    return DeviceLimits(
        shared_memory_per_block_bytes=shared_memory_kib * 1024,
        registers_per_block=registers_per_block,
        registers_per_thread=registers_per_thread,
        threads_per_block=1024,
    )


def _tpu(vmem_mib: int) -> DeviceLimits:
    return DeviceLimits(shared_memory_per_block_bytes=vmem_mib * 1024 * 1024)


def _tflops(of_16_bits: float, **others: float) -> Mapping[str, float]:
    """Returns peaks by dtype; the two 16-bit floats share a peak."""
    return {"bfloat16": of_16_bits, "float16": of_16_bits, **others}


# NVIDIA's "CUDA C++ Programming Guide", technical specifications per compute capability. A block gets 48 KiB of shared
# memory by default; these are the limits on request, and compilers do request them.
_TURING = _gpu(64)
_AMPERE_DATA_CENTRE = _gpu(163)
_AMPERE_AND_ADA = _BLACKWELL_GEFORCE = _gpu(99)
_HOPPER = _BLACKWELL_DATA_CENTRE = _gpu(227)
# AMD's "GPU specifications" for ROCm (64 KiB of LDS and 512 KiB of vector registers in a compute unit) and the CDNA3
# instruction set (512 vector registers a lane).
_CDNA3_LIMITS = _gpu(64, registers_per_block=512 * 1024 // 4, registers_per_thread=512)
# JAX's "TPU Hardware Reference". The compiler's default limit for a kernel is lower.
_TPU_V4_LIMITS, _TPU_V5E_LIMITS, _TPU_V5P_LIMITS, _TPU_V6E_LIMITS = _tpu(16), _tpu(128), _tpu(64), _tpu(128)
_TPU_7X_LIMITS = _tpu(64)

# Dense rates: half of the rate "with sparsity" if a datasheet has no other.
# NVIDIA's H100, H200, A100, L4 and L40S datasheets; for GeForce its "Ada GPU Architecture" whitepaper, at FP32
# accumulation.
_HOPPER_SXM = _tflops(989.4, float64=67.0, float32=494.7, float8=1978.9, int8=1978.9)
_HOPPER_PCIE = _tflops(756.0, float64=51.0, float32=378.0, float8=1513.0, int8=1513.0)
_HOPPER_NVL = _tflops(835.5, float64=60.0, float32=417.5, float8=1670.5, int8=1670.5)
_A100 = _tflops(312.0, float64=19.5, float32=156.0, int8=624.0)
_L4 = _tflops(121.0, float32=60.0, float8=242.5, int8=242.5)
_L40S = _tflops(362.0, float32=183.0, float8=733.0, int8=733.0)
_RTX_4090 = _tflops(165.2, float32=82.6, float8=330.3, int8=660.6)
# "AMD Instinct MI300X Accelerator" and "MI325X" data sheets.
_CDNA3_TFLOPS = _tflops(1307.4, float64=163.4, float32=163.4, float8=2614.9, int8=2614.9)
_MI300X = DevicePeaks(gbps=5300.0, tflops=_CDNA3_TFLOPS)
# Google's Cloud TPU documentation, "System architecture" of each version, per chip: from v4 on, JAX's device is a chip.
# The clocks are these rates divided by two operations for each cell of the matrix units: 8 units of 128 x 128 on a v4
# and v5p, 4 on a v5e, and as many cells as 16 of them on a v6e.
_TPU_V4 = DevicePeaks(gbps=1200.0, tflops={"bfloat16": 275.0, "int8": 275.0}, ghz=1.05)
_TPU_V5E = DevicePeaks(gbps=819.0, tflops={"bfloat16": 197.0, "int8": 393.0}, ghz=1.5)
_TPU_V5P = DevicePeaks(gbps=2765.0, tflops={"bfloat16": 459.0}, ghz=1.75)
_TPU_V6E = DevicePeaks(gbps=1638.0, tflops={"bfloat16": 918.0, "int8": 1836.0}, ghz=1.75)

_UNKNOWN: tuple[DeviceLimits, DevicePeaks | None] = DeviceLimits(), None
_TABLE: Mapping[str, tuple[DeviceLimits, DevicePeaks | None]] = {
    "Tesla T4": (_TURING, None),
    "NVIDIA A100-SXM4-40GB": (_AMPERE_DATA_CENTRE, DevicePeaks(gbps=1555.0, tflops=_A100)),
    "NVIDIA A100-SXM4-80GB": (_AMPERE_DATA_CENTRE, DevicePeaks(gbps=2039.0, tflops=_A100)),
    "NVIDIA A100-PCIE-40GB": (_AMPERE_DATA_CENTRE, DevicePeaks(gbps=1555.0, tflops=_A100)),
    "NVIDIA A100 80GB PCIe": (_AMPERE_DATA_CENTRE, DevicePeaks(gbps=1935.0, tflops=_A100)),
    "NVIDIA A10": (_AMPERE_AND_ADA, None),
    "NVIDIA A10G": (_AMPERE_AND_ADA, None),
    "NVIDIA GeForce RTX 3090": (_AMPERE_AND_ADA, None),
    "NVIDIA L4": (_AMPERE_AND_ADA, DevicePeaks(gbps=300.0, tflops=_L4)),
    "NVIDIA L40": (_AMPERE_AND_ADA, None),
    "NVIDIA L40S": (_AMPERE_AND_ADA, DevicePeaks(gbps=864.0, tflops=_L40S)),
    "NVIDIA GeForce RTX 4090": (_AMPERE_AND_ADA, DevicePeaks(gbps=1008.0, tflops=_RTX_4090)),
    "NVIDIA H100 80GB HBM3": (_HOPPER, DevicePeaks(gbps=3350.0, tflops=_HOPPER_SXM)),
    "NVIDIA H100 PCIe": (_HOPPER, DevicePeaks(gbps=2000.0, tflops=_HOPPER_PCIE)),
    "NVIDIA H100 NVL": (_HOPPER, DevicePeaks(gbps=3900.0, tflops=_HOPPER_NVL)),
    "NVIDIA H200": (_HOPPER, DevicePeaks(gbps=4800.0, tflops=_HOPPER_SXM)),
    "NVIDIA H200 NVL": (_HOPPER, DevicePeaks(gbps=4800.0, tflops=_HOPPER_NVL)),
    "NVIDIA GH200 480GB": (_HOPPER, None),
    "NVIDIA B200": (_BLACKWELL_DATA_CENTRE, None),
    "NVIDIA GB200": (_BLACKWELL_DATA_CENTRE, None),
    "NVIDIA GeForce RTX 5090": (_BLACKWELL_GEFORCE, None),
    "AMD Instinct MI300X": (_CDNA3_LIMITS, _MI300X),
    "AMD Instinct MI300X OAM": (_CDNA3_LIMITS, _MI300X),
    "AMD Instinct MI325X": (_CDNA3_LIMITS, DevicePeaks(gbps=6000.0, tflops=_CDNA3_TFLOPS)),
    "TPU v4": (_TPU_V4_LIMITS, _TPU_V4),
    "TPU v5 lite": (_TPU_V5E_LIMITS, _TPU_V5E),
    "TPU v5e": (_TPU_V5E_LIMITS, _TPU_V5E),
    "TPU v5": (_TPU_V5P_LIMITS, _TPU_V5P),
    "TPU v5p": (_TPU_V5P_LIMITS, _TPU_V5P),
    "TPU v6 lite": (_TPU_V6E_LIMITS, _TPU_V6E),
    "TPU v6e": (_TPU_V6E_LIMITS, _TPU_V6E),
    "TPU7x": (_TPU_7X_LIMITS, None),
}
