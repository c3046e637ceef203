"""The device that a program is compiled for, and the arrays that it returns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """A device that programs are compiled for in a process that does not hold it.

    Attributes:
        platform: `cuda`, `rocm` or `tpu`.
        config_text: XLA's description of the device; empty for a TPU.
        device_kind: JAX's name of the device.
        num_cores: the number of its cores; None where JAX does not know it.
        topology: the name of a TPU's topology; empty for other devices.
    """

    platform: str
    config_text: str
    device_kind: str
    num_cores: int | None
    topology: str = ""


@dataclasses.dataclass(frozen=True)
class OutputArray:
    """An array of a program's output.

    Attributes:
        shape: its shape.
        dtype: the name of its dtype.
    """

    shape: tuple[int, ...]
    dtype: str
