"""The compiler's own figures about one compiled config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerFigures:
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

    argument_bytes: int | None = None
    output_bytes: int | None = None
    temporary_bytes: int | None = None
    code_bytes: int | None = None
    vmem_bytes: int | None = None
    flops: float | None = None
    moved_bytes: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompilerFigures:
        """Returns the figures that `dataclasses.asdict` has described.

        Raises:
            AttributeError, TypeError, ValueError: these are no figures.
        """
        if not all(value is None or (type(value) in (int, float) and value >= 0) for value in data.values()):
            raise ValueError("these are no figures")
        return cls(**data)
