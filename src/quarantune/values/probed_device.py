"""A device as a process that uses it describes it."""

from __future__ import annotations

import dataclasses


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
