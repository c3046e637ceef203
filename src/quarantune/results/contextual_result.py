"""The result of tuning kernels inside the function that calls them."""

from __future__ import annotations

import dataclasses
import os

from quarantune.results import report
from quarantune.results.report import Standing
from quarantune.results.result import ResultData, TuningResult
from quarantune.values import shown
from quarantune.values.codec import IN_MEMORY
from quarantune.values.trial import Config, Trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The choice for one kernel, called in one way.

    Attributes:
        name: the kernel's name in the cache.
        key: the key of its call, as canonical JSON.
        config: the config it uses inside the function.
        time_ms: the median time of the whole function once this kernel was decided, in milliseconds.
        trials: the trials of the kernel's configs there; empty for a result from the cache.
        tie: the configs that the noise cannot tell from the chosen one, without it.
    """

    name: str
    key: str
    config: Config
    time_ms: float
    trials: tuple[Trial, ...] = ()
    tie: tuple[Config, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ContextualResult(TuningResult):
    """The result of tuning a function's kernels in their context.

    `trials` holds every trial in order; in its configs each kernel has an entry with the config that it used. All times
    are those of the whole function.

    Attributes:
        kernels: the choice for each kernel, in the order of the decisions.
        baseline_ms: the median time with every kernel at the first of its configs; None where that failed.
    """

    kernels: tuple[KernelChoice, ...] = dataclasses.field(default=(), metadata=IN_MEMORY)
    baseline_ms: float | None = dataclasses.field(default=None, metadata=IN_MEMORY)

    def table(self, *, width: int | None = None, flops: float | None = None, bytes: float | None = None) -> str:
        """Returns a table for each kernel, with a star at its choice, and the gain of the whole function.

        Args:
            width: columns; None for those of the terminal, 120 where there is none.
            flops: floating-point operations of one call of the whole function, for a column of TFLOP/s.
            bytes: bytes that one such call must move, for a column of GB/s.
        """
        parts = [
            f"{name}\n{self._part(choice, width, flops, bytes)}"
            if choice.trials
            else f"{name}: {shown.format_config(choice.config)}"
            for name, choice in zip(self.labels, self.kernels, strict=True)
        ]
        was = "" if self.baseline_ms is None else f", {self.baseline_ms:.4g} ms with every kernel's first config"
        return "\n\n".join([*parts, f"the whole function: {self.time_ms:.4g} ms{was}"])

    def _part(self, choice: KernelChoice, width: int | None, flops: float | None, moved_bytes: float | None) -> str:
        standing = Standing(
            best=choice.config,
            tie=choice.tie,
            default_ms=self.baseline_ms,
            default_label="the whole function with every kernel's first config",
        )
        return report.table(choice.trials, standing=standing, width=width, flops=flops, moved_bytes=moved_bytes)

    @property
    def config_text(self) -> str:
        """The choices for all kernels as people read them."""
        named = zip(self.labels, self.kernels, strict=True)
        return "; ".join(f"{name}: {shown.format_config(choice.config)}" for name, choice in named)

    def _report_data(self) -> ResultData:
        """Returns the data of the report: kernels are tunables, and the defaults are their first configs."""
        data, named = super()._report_data(), zip(self.labels, self.kernels, strict=True)
        result = dataclasses.replace(
            data.result,
            best_config={name: shown.format_config(choice.config) for name, choice in named},
            default_config=None,
            default_time_ms=self.baseline_ms,
            speedup_interval=None,
            finalists=(),
        )
        return dataclasses.replace(data, result=result)

    @property
    def labels(self) -> list[str]:
        """A short and unique name for each of `kernels`."""
        return labels([choice.name for choice in self.kernels])

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, trusted: bool = False) -> TuningResult:
        """Reads a result that `save` wrote, which describes the whole function and not each kernel."""
        return TuningResult.load(directory, trusted=trusted)


def labels(names: list[str]) -> list[str]:
    """Returns the last part of each name, with a number where several are equal."""
    short = [name.rpartition(".")[2] for name in names]
    return [
        f"{name} #{short[: at + 1].count(name)}" if short.count(name) > 1 else name for at, name in enumerate(short)
    ]
