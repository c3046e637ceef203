"""The device that a program is compiled for, and the arrays that it returns."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, TypeAlias

from quarantune.values.codec import Record, within
from quarantune.values.json_object import JsonObject


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """A device that programs are compiled for in a process that does not hold it.

    Attributes:
        platform: `cuda`, `rocm` or `tpu`.
        device_kind: JAX's name of the device.
        topology: the name of a TPU's topology; empty for other devices.
        config_text: XLA's description of a GPU; empty for other devices.
        num_cores: the number of its cores; None where JAX does not know it.
        estimates: whether the compiler is asked, too, how many cycles a program takes.
    """

    platform: str
    device_kind: str
    topology: str = ""
    config_text: str = dataclasses.field(default="", repr=False)
    num_cores: int | None = None
    estimates: bool = False


@dataclasses.dataclass(frozen=True)
class OutputArray:
    """An array of a program's output.

    Attributes:
        shape: its shape.
        dtype: the name of its dtype.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedDevice:
    """One device.

    Attributes:
        platform: `cpu`, `cuda`, `rocm` or `tpu`.
        kind: JAX's name of it.
        index: its position among JAX's devices.
        num_cores: the number of its cores; None where JAX does not know it.
    """

    platform: str
    kind: str
    index: int
    num_cores: int | None


_Bytes: TypeAlias = Annotated[int, within(0, 1 << 63)]
_Estimate: TypeAlias = Annotated[float, within(0, math.inf)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CycleEstimate(Record):
    """What the TPU compiler expects a program to cost, by its static schedule.

    Attributes:
        cycles: clock cycles of one core, of all operations one after another.
        kernel_cycles: of these, those of Pallas kernels; None where the program has none.
        moved_bytes: what the kernels' pipelines read and write in main memory.
    """

    cycles: _Estimate
    kernel_cycles: _Estimate | None = None
    moved_bytes: _Estimate = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerFigures(Record):
    """The compiler's figures about one program; None for those that it does not state.

    Compilers that do not hold a GPU state sizes only; the compiler for TPUs states all of them.

    Attributes:
        argument_bytes: device memory of the arguments.
        output_bytes: device memory of the output.
        temporary_bytes: device memory for intermediate arrays.
        aliased_bytes: device memory of donated arguments that the output takes over, counted in both.
        code_bytes: the size of the program.
        vmem_bytes: the most VMEM that a kernel of the program uses, on a TPU.
        registers: the most registers that a thread of a kernel uses, in a compile check for an NVIDIA GPU, as the next.
        spilled_bytes: the most that a thread of a kernel stores for lack of registers.
        shared_bytes: the most shared memory that a block of a kernel uses.
        occupancy: the smallest share of a multiprocessor's warps that can run at a time, by a kernel's needs.
        flops: floating-point operations of one call, by the compiler's estimate; None, too, where it does not count
            all of them, as those of a kernel whose author does not state them, or of all turns of a loop.
        moved_bytes: bytes that one call reads and writes in device memory, likewise.
        estimate: what it expects the program to cost; None where that was not asked, or is not to be had.
        no_estimate: why there is none, where it was asked for.
    """

    argument_bytes: _Bytes | None = None
    output_bytes: _Bytes | None = None
    temporary_bytes: _Bytes | None = None
    aliased_bytes: _Bytes | None = None
    code_bytes: _Bytes | None = None
    vmem_bytes: _Bytes | None = None
    registers: _Bytes | None = None
    spilled_bytes: _Bytes | None = None
    shared_bytes: _Bytes | None = None
    occupancy: Annotated[float, within(0, math.nextafter(1, 2))] | None = None
    flops: _Estimate | None = None
    moved_bytes: _Estimate | None = None
    estimate: CycleEstimate | None = None
    no_estimate: str = ""

    def to_json(self) -> JsonObject:
        """Returns those that are known as JSON-able data."""
        return {name: value for name, value in super().to_json().items() if value not in (None, "")}

    @property
    def device_bytes(self) -> int | None:
        """Device memory of the arguments, the output and intermediate arrays together."""
        argument, output, temporary = self.argument_bytes, self.output_bytes, self.temporary_bytes
        if argument is None or output is None or temporary is None:
            return None
        return argument + output + temporary - (self.aliased_bytes or 0)


NO_FIGURES = CompilerFigures()
"""Those of a program whose figures are not known."""
