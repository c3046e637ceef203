"""The report of a compile check: which configs of a function compile for a device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quarantune.results import report
from quarantune.values.compiling import CompilerFigures
from quarantune.values.trial import Config, Outcome, Trial, TuningFailedError, count_outcomes

if TYPE_CHECKING:
    from quarantune.devices.targets import Target

_AMOUNT = r"(\d+|[\d.]+[KMG])"
_OVERFLOWS = (
    (re.compile(f"Scoped allocation with size {_AMOUNT} and limit {_AMOUNT} exceeded scoped vmem"), "VMEM"),
    (re.compile(f"memory space vmem.*?Used {_AMOUNT} of {_AMOUNT} vmem", re.DOTALL), "VMEM"),
    (re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?space=vmem", re.DOTALL), "VMEM"),
    (re.compile(r"Shared memory size limit exceeded: requested (\d+), available: (\d+)"), "shared memory"),
    (re.compile(r"exceeds available shared memory: smem_bytes=(\d+) > max_smem_bytes=(\d+)"), "shared memory"),
)
"""The complaints of compilers about memory on the chip, with the amounts that were needed and there."""
_LARGE_BYTES = 4 << 20
"""Amounts in bytes are told in MiB from here on, and else in KiB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """The result of compiling a function's configs for one device.

    Attributes:
        name: the function's name in the cache.
        target: the device.
        trials: the trial of every config, in their order; `compile_s` and `figures` are set where it compiled.
        key: the key that a sweep of the same call on that device has in the cache.
        known: how many of the configs were not compiled, because an earlier job has the verdict on the same code,
            device and versions.
    """

    name: str
    target: Target
    trials: tuple[Trial, ...]
    key: str
    known: int = 0

    @property
    def ok(self) -> bool:
        """Whether every config compiles that `prune_fn` did not drop."""
        return not any(trial.outcome.is_failure for trial in self.trials)

    @property
    def compiled(self) -> tuple[Config, ...]:
        """The configs that compile, in their order."""
        return tuple(trial.config for trial in self.trials if trial.outcome is Outcome.OK)

    @property
    def failures(self) -> dict[str, int]:
        """How many configs failed with each outcome that occurred."""
        return count_outcomes([trial for trial in self.trials if trial.outcome.is_failure])

    def raise_if_all_failed(self) -> None:
        """Raises where no config compiles.

        Raises:
            TuningFailedError: no config compiles; the message has the reason of each.
        """
        if not self.compiled:
            message = report.failure_message(f"{self.name} on {self.target.name}", self._briefly())
            raise TuningFailedError(message, trials=self.trials, key=self.key)

    def table(self, *, width: int | None = None) -> str:
        """Returns a table of the configs: outcome, compile time, the compiler's figures, and reason for a failure.

        Args:
            width: columns; None for those of the terminal, 120 where there is none.
        """
        columns = list(_columns(self.trials))
        table = report.table(self._briefly(), width=width, figures=dict(columns))
        if self.known:
            table += f"\n{self.known} of {len(self.trials)} known from earlier checks or sweeps, and not compiled again"
        return table

    def _briefly(self) -> tuple[Trial, ...]:
        return tuple(dataclasses.replace(trial, message=briefly(trial.message)) for trial in self.trials)


def briefly(message: str) -> str:
    """Returns a compiler's message, or the gist of it in front where that is at its end."""
    over = _overflow(message)
    return f"over {over}; {message}" if over and not message.startswith(f"over {over}; ") else message


def _overflow(message: str) -> str:
    """Returns the memory that a config needs more of than there is, as `VMEM: 73.39 of 16.00 MiB`; empty for others."""
    for pattern, memory in _OVERFLOWS:
        if (found := pattern.search(message)) is not None and not _fits(*found.groups()):
            (wanted, unit), (there, other) = (_readable(amount) for amount in found.groups())
            return f"{memory}: {wanted}{'' if unit == other else f' {unit}'} of {there} {other}"
    return ""


def _fits(wanted: str, there: str) -> bool:
    """Returns whether an amount is no more than there is: it was one of several that do not fit together."""
    return wanted.isdigit() and there.isdigit() and int(wanted) <= int(there)


def _readable(amount: str) -> tuple[str, str]:
    """Returns the number and unit of an amount in a compiler's message, which is in bytes or has a unit as `16.00M`."""
    if not amount.isdigit():
        return amount[:-1], f"{amount[-1]}iB"
    if int(amount) < _LARGE_BYTES:
        return f"{int(amount) / 1024:.4g}", "KiB"
    return f"{int(amount) / 2**20:.2f}", "MiB"


def _columns(trials: tuple[Trial, ...]) -> Iterator[tuple[str, Callable[[Trial], str]]]:
    """Yields the table's columns of numbers with their headings; those of which nothing is known are left out."""

    def column(name: str, unit: float) -> Callable[[Trial], str]:
        def cell(trial: Trial) -> str:
            value = getattr(trial.figures, name, None)
            return "" if value is None else f"{value / unit:.4g}"

        return cell

    yield "compile s", lambda trial: "" if trial.compile_s is None else f"{trial.compile_s:.2f}"
    for heading, name, unit in (
        ("VMEM MiB", "vmem_bytes", 1 << 20),
        ("temp MiB", "temporary_bytes", 1 << 20),
        ("GFLOP", "flops", 1e9),
    ):
        if any(getattr(trial.figures or CompilerFigures(), name) for trial in trials):
            yield heading, column(name, unit)
    # Each config's own, because one note below the table covers all that fail alike.
    if any(_overflow(trial.message) for trial in trials):
        yield "over", lambda trial: _overflow(trial.message)
