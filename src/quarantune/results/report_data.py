"""Results as data alone, for tables and reports."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal, Self, TypeAlias

from quarantune.results.bits_report import BitsReport, bits_of
from quarantune.values.codec import IN_MEMORY, Record, equal, frozen
from quarantune.values.configs import Config
from quarantune.values.texts import printable
from quarantune.values.trial import (
    SAME,
    SCORES,
    Counts,
    Findings,
    Interval,
    Millijoules,
    Milliseconds,
    Outcome,
    Score,
    Searched,
    Trial,
    ratio_text,
)

_SHARED = ("time_ms", "default_time_ms", "speedup_interval", "created", "commit", "expected_loss", *SCORES)
"""The fields of `Findings` that a result has under the same name."""
FromCache: TypeAlias = bool | Literal["nearest", "rule", "default"]
_Config: TypeAlias = Annotated[Config, frozen]


@dataclasses.dataclass(frozen=True)
class CallShare(Record):
    """One of several calls that share a config.

    Attributes:
        call: its arguments as text.
        weight: its weight in the mean.
        time_ms: the time of the shared config in this call, in milliseconds.
        best_ms: the time of the best config for this call alone, in milliseconds.
    """

    call: str
    weight: float
    time_ms: Milliseconds
    best_ms: Milliseconds

    def __str__(self) -> str:
        return self.text("ms", 1.0)

    def text(self, unit: str, factor: float) -> str:
        """Returns the call in words, its time in a unit of which a millisecond has `factor`."""
        times = f"{self.time_ms * factor:.4g} {unit}, {ratio_text(self.time_ms / self.best_ms)} of its own best"
        return f"{printable(self.call)}: {times}, weight {self.weight:g}"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlainResult(Record):
    """The result of tuning one problem as data alone, without the function and its program.

    `TuningResult` documents the fields.

    Attributes:
        default_label: a name for the defaults in tables.
        has_winner: whether `best_config` is a choice; False if no config has worked yet.
    """

    # In the order of the JSON file of a saved result.
    name: str = ""
    best_config: _Config
    time_ms: Milliseconds = math.nan
    default_config: _Config | None = None
    default_time_ms: Milliseconds | None = None
    speedup_interval: Interval | None = None
    noise: float | None = None
    finalists: tuple[Trial, ...] = ()
    counts: Counts = dataclasses.field(default_factory=dict)
    created: str = ""
    commit: str = ""
    device: str
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    stopped: str = ""
    seen: int | None = None
    space_size: int | None = None
    tie: tuple[_Config, ...] = ()
    key: str
    from_cache: FromCache = False
    trials: tuple[Trial, ...]
    score: Score | None = None
    default_score: Score | None = None
    energy_mj: Millijoules | None = None
    calls: tuple[CallShare, ...] = ()
    by: str = ""
    expected_loss: Score | None = dataclasses.field(default=None, metadata=IN_MEMORY)
    default_label: str = dataclasses.field(default="the function's own defaults", metadata=IN_MEMORY)
    has_winner: bool = dataclasses.field(default=True, metadata=IN_MEMORY)

    @classmethod
    def of(cls, findings: Findings, **fields: Any) -> Self:
        """Returns a result with the findings of a sweep, and with further fields."""
        searched = {name: getattr(findings.search, name) for name in ("stopped", "seen", "space_size")}
        shared = {name: getattr(findings, name) for name in _SHARED}
        return cls(counts=dict(findings.trials), **searched, **shared, **fields)

    @property
    def findings(self) -> Findings:
        """The findings of the sweep."""
        searched = Searched(self.stopped, self.seen, self.space_size)
        return Findings(trials=self.counts, search=searched, **{name: getattr(self, name) for name in _SHARED})

    def speedup_of(self, trial: Trial) -> float | None:
        """Returns the time of the defaults divided by a trial's time; None unless they were timed side by side."""
        is_alike = trial.outcome is Outcome.OK and (not self.finalists or self.is_finalist(trial))
        return self.default_time_ms / trial.time_ms if is_alike and trial.time_ms and self.default_time_ms else None

    def is_finalist(self, trial: Trial) -> bool:
        """Whether a trial has times of the final: its config, or another with the same program, took part."""
        own = trial.samples_ms
        return any((own and own == it.samples_ms) or equal(trial.config, it.config) for it in self.finalists)

    def is_best(self, trial: Trial) -> bool:
        """Whether a trial is the winner's."""
        return self.has_winner and equal(trial.config, self.best_config)

    def is_tie(self, trial: Trial) -> bool:
        """Whether a trial's config ties with the winner."""
        return any(equal(trial.config, config) for config in self.tie)

    def is_default(self, trial: Trial) -> bool:
        """Whether a trial ran the function's own defaults."""
        return equal(trial.config, self.default_config)

    def bits(self) -> BitsReport:
        """Returns which tunables change the bits of the output, and what the bits of the defaults' output cost.

        A result from the cache has no trials, so that nothing is known of them; see `TuningResult.with_trials`.
        """
        own = next(filter(self.is_default, [*self.trials, *self.finalists]), None)
        if own is None and self.default_config is not None and any(trial.bits for trial in self.trials):
            own = Trial(config=self.default_config, outcome=Outcome.OK, time_ms=self.default_time_ms, bits=SAME)
        best = next(filter(self.is_best, self.trials), own)
        return bits_of(self.trials, best=best, defaults=own, is_whole=self.seen in (None, self.space_size))

    def pareto(self) -> tuple[Trial, ...]:
        """Returns the configs that no other beats in time and device memory, the fastest first.

        Each further config is slower and takes less memory. A config that was stopped early counts with its bound, and
        beats none that was measured to the end. Configs of unknown device memory are left out; a result from the cache
        has no trials.
        """
        sized = [
            (trial.time_ms, size, trial)
            for trial in self.trials
            if trial.time_ms is not None and (size := trial.device_memory_bytes) is not None
        ]
        kept, least = list[Trial](), {False: math.inf, True: math.inf}
        for _, size, trial in sorted(sized, key=lambda it: it[:2]):
            if size < least[False] and (not trial.is_bound or size < least[True]):
                kept.append(trial)
                least[trial.is_bound] = size
        return tuple(kept)


@dataclasses.dataclass(frozen=True)
class ResultData:
    """The result of tuning one problem, in the form for a report.

    Attributes:
        result: the result; the trials of finalists have the times of the final.
        key_values: the description of the call, as in an entry of the cache.
        note: a sentence on the origin of the data; may be empty.
        when: `before` or `after` in a comparison of two results; else empty.
        state: `running`, `interrupted` or `failed` for a sweep without a result; else empty.
        progress: how far such a sweep has come, such as `20 of 40 configs`.
    """

    result: PlainResult
    key_values: Any
    note: str = ""
    when: str = ""
    state: str = ""
    progress: str = ""
