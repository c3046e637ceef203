"""The limits of one sweep, decided once: the operator's settings override the author's options."""

from __future__ import annotations

import dataclasses
import math
import numbers

from quarantune.host import machine
from quarantune.values.settings import Options, Settings, parse_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepLimits:
    """How long and how large the trials of one sweep may be, and how many compile at a time.

    Attributes:
        compile_timeout_s: for loading the function, and for compiling one config.
        timeout_s: for checking and measuring one config.
        memory_limit_bytes: host memory of one worker and its children; None for a fair share of the free memory.
        compile_slots: how many configs compile at a time.
        configs_per_worker: how many configs one measuring worker takes; None chooses by platform.
    """

    compile_timeout_s: float
    timeout_s: float
    memory_limit_bytes: int | None
    compile_slots: int
    configs_per_worker: int | None

    @classmethod
    def of(cls, options: Options, settings: Settings, *, num_workers: int | None = None) -> SweepLimits:
        """Returns the limits that the author's options and the operator's settings set together.

        Args:
            options: the author's options.
            settings: the operator's settings, which override them.
            num_workers: how many configs the caller wants to compile at a time; None follows the settings.

        Raises:
            ValueError: `num_workers` is no whole number of at least 1.
        """
        is_whole = isinstance(num_workers, numbers.Integral) and not isinstance(num_workers, bool)
        if num_workers is not None and not (is_whole and num_workers >= 1):
            raise ValueError(
                f"num_workers={num_workers!r} is not valid: give a whole number of at least 1, or leave it out"
            )
        memory_limit = settings.memory_limit if settings.memory_limit is not None else options.memory_limit
        return cls(
            compile_timeout_s=settings.compile_timeout or float(options.compile_timeout),
            timeout_s=settings.timeout or float(options.timeout),
            memory_limit_bytes=None if memory_limit is None else parse_memory(memory_limit),
            compile_slots=machine.compile_slots(
                utilization=settings.cpu_utilization,
                count=settings.cpu_count if num_workers is None else num_workers,
                max_count=settings.max_cpu_count,
            ),
            configs_per_worker=settings.configs_per_worker,
        )

    def compiling_as_it_runs(self) -> SweepLimits:
        """Returns the limits for a function that compiles during its first run: one deadline covers both phases."""
        return dataclasses.replace(self, timeout_s=self.compile_timeout_s + self.timeout_s)

    def longest_sweep_s(self, configs: int) -> float:
        """Returns the longest time in seconds that a sweep may take by these deadlines.

        Loading the function, the reference, checking shapes and the finals count like four more configs. Everything may
        run twice. As many configs as there are slots compile at a time; one at a time is measured.

        Args:
            configs: how many configs it tries.
        """
        runs = 2 * (configs + 4)
        return math.ceil(runs / self.compile_slots) * self.compile_timeout_s + runs * self.timeout_s

    def deadlines(self) -> dict[str, float]:
        """Returns the deadlines in seconds as a journal records them."""
        return {"compile_timeout_s": self.compile_timeout_s, "timeout_s": self.timeout_s}
