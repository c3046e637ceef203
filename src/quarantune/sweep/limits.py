"""Limits, search and isolation of one sweep. The operator's settings override the author's options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from quarantune.host import machine
from quarantune.jax_internals import jax_backends, jax_functions
from quarantune.values.amounts import parse_memory, unwrapped
from quarantune.values.codec import JsonObject, is_whole
from quarantune.values.options import (
    AUTO,
    AUTO_EXHAUSTIVE_MOST,
    AUTO_MAX_TRIALS,
    EXHAUSTIVE,
    LEAST_GAIN,
    SURROGATE,
    Options,
    Search,
)
from quarantune.values.settings import Isolation, Settings
from quarantune.values.space import Space


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepLimits:
    """How long and how large the trials of one sweep may be, and how many compile at a time.

    Attributes:
        compile_timeout_s: seconds for loading the function, and for compiling one config.
        timeout_s: seconds for checking and measuring one config.
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
            ValueError: `num_workers` is not a whole number of at least 1.
        """
        if num_workers is not None and not is_whole(unwrapped(num_workers), 1):
            raise ValueError(
                f"num_workers={num_workers!r} is not valid: give a whole number of at least 1, or leave it out"
            )
        memory_limit = settings.memory_limit if settings.memory_limit is not None else options.memory_limit
        return cls(
            compile_timeout_s=settings.compile_timeout or float(options.compile_timeout),
            timeout_s=settings.timeout or float(options.timeout),
            memory_limit_bytes=None if memory_limit is None else parse_memory(memory_limit),
            compile_slots=machine.compile_slots(settings.num_workers if num_workers is None else num_workers),
            configs_per_worker=settings.configs_per_worker,
        )

    def compiling_as_it_runs(self) -> SweepLimits:
        """Returns the limits for a function that compiles during its first run: one deadline covers both phases."""
        return dataclasses.replace(self, timeout_s=self.compile_timeout_s + self.timeout_s)

    def longest_sweep_s(self, configs: int) -> float:
        """Returns the longest time in seconds that a sweep may take by these deadlines.

        Loading the function, the reference, checking shapes and the finals count like four more configs. Everything may
        run twice. One config per slot compiles at a time; one config at a time runs.

        Args:
            configs: how many configs it tries.
        """
        runs = 2 * (configs + 4)
        return math.ceil(runs / self.compile_slots) * self.compile_timeout_s + runs * self.timeout_s

    def deadlines(self) -> dict[str, float]:
        """Returns the deadlines in seconds as a journal records them."""
        return {"compile_timeout_s": self.compile_timeout_s, "timeout_s": self.timeout_s}


EXHAUSTED, MAX_TRIALS, TIME_BUDGET, PATIENCE = "exhausted", "max_trials", "time_budget", "patience"
NO_GAIN = "no_gain"
"""Why a search has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """The search of one sweep and its budgets.

    Attributes:
        search: a name, or an object of the user's; never `auto` after `resolved`.
        max_trials: how many configs it tries, including the journal's; None for no limit.
        time_budget_s: seconds from the start of the sweep; None for no limit.
        patience: how many trials without a gain end the search; None for no limit.
        seed: the same seed and the same trials give the same search.
        ends_without_hope: whether the search ends when its model expects no gain.
    """

    search: str | Search
    max_trials: int | None
    time_budget_s: float | None
    patience: int | None
    seed: int
    ends_without_hope: bool = False

    @classmethod
    def of(cls, options: Options, settings: Settings) -> SearchLimits:
        """Returns the limits that the author's options and the operator's settings set together."""
        return cls(
            search=options.search if settings.search is None else settings.search,
            max_trials=options.max_trials if settings.max_trials is None else settings.max_trials,
            time_budget_s=options.time_budget if settings.time_budget is None else settings.time_budget,
            patience=options.patience,
            seed=options.seed,
        )

    def resolved(self, configs: Space) -> SearchLimits:
        """Returns the limits for a space: `auto` tries all configs of a small one, and searches in a larger one."""
        if self.search != AUTO:
            return self
        most = AUTO_EXHAUSTIVE_MOST
        if self.max_trials is not None:
            most = min(most, self.max_trials)
        if not configs.has_more_than(most):
            return dataclasses.replace(self, search=EXHAUSTIVE)
        return dataclasses.replace(
            self,
            search=SURROGATE,
            max_trials=self.max_trials or AUTO_MAX_TRIALS,
            ends_without_hope=self.patience is None,
        )

    @property
    def tries_all(self) -> bool:
        """Whether it is certain from the start that the search tries all configs."""
        return self.search == EXHAUSTIVE and not (self.max_trials or self.time_budget_s or self.patience)

    def budget(self, stopped: str) -> float | None:
        """Returns the budget that ended a search, as a number of trials or of seconds; None for other ends."""
        return {MAX_TRIALS: self.max_trials, TIME_BUDGET: self.time_budget_s}.get(stopped)

    @property
    def time_budget_text(self) -> str:
        """The time budget with its unit, in three digits or whole seconds; it may be a remainder of another one."""
        budget_s = self.time_budget_s or 0.0
        return f"{budget_s:.3g} s" if budget_s < 100 else f"{budget_s:.0f} s"

    def why_ended(self, stopped: str) -> str:
        """Returns in words why a search has ended; empty if it continues, or has tried all configs."""
        ends = {
            MAX_TRIALS: f"{self.max_trials} trials",
            TIME_BUDGET: self.time_budget_text,
            PATIENCE: f"{self.patience} trials without a gain",
            NO_GAIN: f"its model expected no gain of {LEAST_GAIN:.1%}",
        }
        return f"the search ended after {ends[stopped]}" if stopped in ends else ""

    @property
    def label(self) -> str:
        """The name of the search."""
        return self.search if isinstance(self.search, str) else type(self.search).__qualname__

    def share(self, among: int, *, spent_trials: int, spent_s: float) -> SearchLimits:
        """Returns the limits of the next of several searches that divide the budgets evenly.

        Args:
            among: how many searches remain, including the next one.
            spent_trials: how many trials the earlier searches had.
            spent_s: how many seconds have passed.
        """
        trials, seconds = self.max_trials, self.time_budget_s
        return dataclasses.replace(
            self,
            max_trials=None if trials is None else max(1, (trials - spent_trials) // among),
            time_budget_s=None if seconds is None else max(1e-3, (seconds - spent_s) / among),
        )

    def to_json(self) -> JsonObject:
        """Returns the limits as JSON-able data."""
        return {
            "search": self.label,
            "seed": self.seed,
            "max_trials": self.max_trials,
            "time_budget": self.time_budget_s,
            "patience": self.patience,
        }


def isolation_of(settings: Settings, platform: str, fn: Callable[..., Any]) -> Isolation:
    """Returns the isolation of a sweep, by the setting, the platform, and whether there is anything to compile.

    Only one process can use a TPU, so workers cannot measure on a TPU that this process holds.
    """
    setting = settings.isolation
    if setting == AUTO:
        is_held = platform == "tpu" and jax_backends.backends_initialized()
        setting = (Isolation.COMPILE if is_held else Isolation.PROCESS).value
    if setting == Isolation.COMPILE.value and not jax_functions.is_jitted(fn):
        return Isolation.NONE
    return Isolation(setting)
