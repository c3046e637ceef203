"""Which search a sweep uses and when it stops, decided once: the operator's settings override the author's options."""

from __future__ import annotations

import dataclasses

from quarantune.values.codec import JsonObject
from quarantune.values.settings import (
    AUTO,
    AUTO_EXHAUSTIVE_MOST,
    AUTO_MAX_TRIALS,
    AUTO_PATIENCE,
    EXHAUSTIVE,
    SURROGATE,
    Options,
    Search,
    Settings,
)
from quarantune.values.space import Space

EXHAUSTED, MAX_TRIALS, TIME_BUDGET, PATIENCE = "exhausted", "max_trials", "time_budget", "patience"
"""Why a search has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """The search of one sweep and its budgets.

    Attributes:
        search: a name, or an object of the user's; never `auto` once it was resolved.
        max_trials: how many configs are tried, those of the journal included; None for no limit.
        time_budget_s: seconds from the start of the sweep; None for no limit.
        patience: how many trials without a gain end the search; None for no limit.
        seed: the same seed and the same trials give the same search.
    """

    search: str | Search
    max_trials: int | None
    time_budget_s: float | None
    patience: int | None
    seed: int

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
            patience=self.patience or AUTO_PATIENCE,
        )

    @property
    def tries_all(self) -> bool:
        """Whether all configs are known from the start to be tried."""
        return self.search == EXHAUSTIVE and not (self.max_trials or self.time_budget_s or self.patience)

    def budget(self, stopped: str) -> float | None:
        """Returns the budget that a search has ended with, as a number of trials or of seconds; None for other ends."""
        return {MAX_TRIALS: self.max_trials, TIME_BUDGET: self.time_budget_s}.get(stopped)

    def why_ended(self, stopped: str) -> str:
        """Returns why a search has ended in words; empty where it goes on, or has tried all."""
        ends = {
            MAX_TRIALS: f"{self.max_trials} trials",
            TIME_BUDGET: f"{self.time_budget_s} s",
            PATIENCE: f"{self.patience} trials without a gain",
        }
        return f"the search ended after {ends[stopped]}" if stopped in ends else ""

    @property
    def label(self) -> str:
        """The name of the search."""
        return self.search if isinstance(self.search, str) else type(self.search).__qualname__

    def share(self, among: int, *, spent_trials: int, spent_s: float) -> SearchLimits:
        """Returns the limits of the next of several searches that divide the budgets evenly.

        Args:
            among: how many searches are left, the next one included.
            spent_trials: how many trials those before had.
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
