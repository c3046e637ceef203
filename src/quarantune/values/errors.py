"""The errors of public functions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from quarantune.values.trial import Trial


class ShownSweep(Protocol):
    """A sweep without a winner that can be shown; `results` has the class."""

    def table(self, *, width: int | None = None) -> str:
        """Returns the trials as a table."""

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the trials as a page."""


class TuningFailedError(RuntimeError):
    """Every config failed.

    Attributes:
        trials: every trial, in the order of the configs.
        key: the cache key of the problem.
        sweep: the sweep that `table` and `report` show; None if nothing has run.
    """

    def __init__(self, message: str, *, trials: Sequence[Trial], key: str, sweep: ShownSweep | None = None) -> None:
        super().__init__(message)
        self.trials = tuple(trials)
        self.key = key
        self.sweep = sweep

    def table(self, *, width: int | None = None) -> str:
        """Returns the trials as a table, with the reason for each failure; the message if nothing has run.

        Args:
            width: columns, as far as the texts can be broken; None for the width of the terminal, 120 without one.
        """
        return str(self) if self.sweep is None else self.sweep.table(width=width)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the trials as one self-contained HTML page, with their messages and logs.

        Args:
            path: the file, such as `matmul.html`; an earlier one is replaced.

        Raises:
            ValueError: nothing has run, so there is nothing to show.
            OSError: the file cannot be written; an earlier one is unchanged.
        """
        if self.sweep is None:
            raise ValueError(f"nothing has run, so there is nothing to report on: {self}")
        self.sweep.report(path)


class CacheMissError(LookupError):
    """Nothing is cached for this call, and `ON_MISS` is `error`."""


class ReferenceFailedError(RuntimeError):
    """`ref_fn` itself failed, so that no config can be judged."""


class DifferentProgramError(RuntimeError):
    """Workers trace another program than the caller, so their findings do not apply to the caller's program."""

    def __init__(self, name: str, difference: str) -> None:
        super().__init__(
            f"{name}: workers run another program than this process: {difference}. A value that this program has set "
            f"is not set in workers, because the function's code does not name it: pass it to the function as an "
            f"argument, or set it when the function's module is imported. To tune in this process instead, set "
            f"QUARANTUNE_ISOLATION=none"
        )


class SandboxError(RuntimeError):
    """The sandbox itself failed: no worker started, or none stayed alive."""


class EngineError(RuntimeError):
    """An executor, or every machine that it offered, could not run a sweep."""
