"""A config that workers have compiled and that this process loads, checks and measures."""

from __future__ import annotations

import dataclasses

from quarantune.values.shown import format_config
from quarantune.values.trial import UNTUNED, Outcome, Trial
from quarantune.worker.bench import Program


@dataclasses.dataclass(eq=False)
class Attempt:
    """A config on its way from its program to its times.

    Attributes:
        index: its index.
        trial: its trial so far.
        log: the output of the worker that compiled it.
        data: its program as data; None where there is none.
        program: its program, once loaded.
        run_ms: the time of its first run where that is informative; else None.
        cpu_ms: the same without the time that it waited for a CPU.
        is_disturbed: whether other processes disturbed that run.
        held_s: seconds of its deadline that it has used.
        is_noted: whether it was reported that it runs.
    """

    index: int
    trial: Trial
    log: str
    data: bytes | None
    program: Program | None = None
    run_ms: float | None = None
    cpu_ms: float = 0.0
    is_disturbed: bool = False
    held_s: float = 0.0
    is_noted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether its outcome is known."""
        return self.trial.outcome is not Outcome.OK or self.trial.time_ms is not None

    def update(self, **changes: object) -> None:
        """Changes fields of its trial."""
        self.trial = dataclasses.replace(self.trial, **changes)  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """Its name in reports."""
        config = format_config(self.trial.config)
        return f"the function with its defaults ({config})" if self.index == UNTUNED else f"the config {config}"

    def provisional(self, outcome: Outcome, message: str) -> Trial:
        """Returns the trial that it has, without times, if this process ends before it goes on."""
        return dataclasses.replace(
            self.trial, outcome=outcome, message=message, time_ms=None, samples_ms=(), own_ms=None, clock=""
        )
