"""The compiler's own figures about one compiled config."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, TypeAlias

from quarantune.values.codec import Record, within

_Bytes: TypeAlias = Annotated[int, within(0, math.inf)]
_Estimate: TypeAlias = Annotated[float, within(0, math.inf)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerFigures(Record):
    """The compiler's figures about one program; None for those that it does not state.

    Compilers for GPUs state sizes only; the compiler for TPUs states all of them.

    Attributes:
        argument_bytes: device memory of the arguments.
        output_bytes: device memory of the output.
        temporary_bytes: device memory for intermediate arrays.
        code_bytes: the size of the program.
        vmem_bytes: the most VMEM that a kernel of the program uses, on a TPU.
        flops: floating-point operations of one call, by the compiler's estimate.
        moved_bytes: bytes that one call reads and writes in device memory, by the compiler's estimate.
    """

    argument_bytes: _Bytes | None = None
    output_bytes: _Bytes | None = None
    temporary_bytes: _Bytes | None = None
    code_bytes: _Bytes | None = None
    vmem_bytes: _Bytes | None = None
    flops: _Estimate | None = None
    moved_bytes: _Estimate | None = None
