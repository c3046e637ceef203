"""Chooses which configs are compiled fully after a cheap compile of all: branch and bound on their cheap times.

No sweep does so yet; fidelity_replay.py shows what it would save and cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from quarantune.scheduler.plan import ConfigSource
from quarantune.values.configs import Config
from quarantune.values.trial import Outcome, Trial

MARGIN = 0.8
"""Factor on the smallest ratio of full to cheap time seen so far: an unseen ratio may be smaller by this much.

On an H100 (fidelity_h100.json.gz, 27 programs), it compiles half of the work of all programs, and one winner is more
than 1% slower than the best (2.1%, a product with 8 rows). fidelity_replay.py shows what other margins cost.
"""
_LEAST = 3
"""Number of configs, fastest by cheap time, that are compiled fully before any is ruled out."""
_WORTH = 0.25
"""Share of the configs that must be ruled out, or they are compiled fully as well."""


class Screening(ConfigSource):
    """Gives configs to compile fully, in the order of their cheap times, until no other config can win.

    A config can win if its cheap time, times the bound, is at most the fastest full time. The bound is the smallest
    ratio of full to cheap time in this sweep, times the margin. No config is ruled out before the defaults and the
    fastest configs have their ratios. A config without a cheap time is always compiled fully.

    Rulings are final only when the source is closed: any trial may lower the bound.
    """

    def __init__(
        self,
        configs: Mapping[int, Config],
        cheap_ms: Mapping[int, float],
        *,
        defaults: int | None = None,
        margin: float = MARGIN,
    ) -> None:
        """Ranks the configs.

        Args:
            configs: the configs by index.
            cheap_ms: the time of each config's cheap program in milliseconds, without those that failed.
            defaults: the index of the function's own defaults; None if they are not among the configs.
            margin: factor on the smallest ratio, at most 1.
        """
        self._configs = configs
        self._cheap_ms = {index: cheap_ms[index] for index in configs if index in cheap_ms}
        self._margin = margin
        ranked = sorted(self._cheap_ms, key=lambda index: self._cheap_ms[index])
        first = [index for index in configs if index == defaults]
        self._surely = {*first, *ranked[:_LEAST]}
        self._waiting = dict.fromkeys([*first, *ranked, *configs])
        self._running: set[int] = set()
        self._ratios: list[float] = []
        self._best_ms = math.inf
        self._takes_all = False

    @property
    def is_closed(self) -> bool:
        """Whether no further config can win."""
        return not (self._running and self._waiting) and not self._candidates()

    @property
    def ruled_out(self) -> dict[int, str]:
        """For each config that cannot win, the reason with the least time that it takes."""
        return {
            index: f"cheap compile: at least {self._bound * self._cheap_ms[index]:.3g} ms"
            for index in self._waiting
            if not self._can_win(index)
        }

    @property
    def why_it_did_not_pay(self) -> str:
        """Says that all configs were compiled fully, and why; empty if some were ruled out."""
        if self._waiting or not self._ratios:
            return ""
        spread = f"{min(self._ratios):.2g} to {max(self._ratios):.2g}"
        return (
            f"ranking by a cheap compile did not pay: full programs took {spread} times as long as cheap ones, "
            f"so all {len(self._configs)} configs were compiled fully"
        )

    def take(self, count: int) -> dict[int, Config]:
        """Returns at most `count` configs to compile fully; fewer if the bound waits for trials, or at the end."""
        taken = {index: self._configs[index] for index in self._candidates()[:count]}
        for index in taken:
            del self._waiting[index]
        self._running |= taken.keys()
        return taken

    def ended(self, index: int, trial: Trial) -> None:
        """Learns from the full trial of a config."""
        if index not in self._configs:  # the defaults, if they are not in the list
            return
        self._waiting.pop(index, None)
        self._running.discard(index)
        if trial.outcome in (Outcome.OK, Outcome.SLOW) and trial.time_ms is not None:
            if trial.outcome is Outcome.OK:
                self._best_ms = min(self._best_ms, trial.time_ms)
            if index in self._cheap_ms:
                self._ratios.append(trial.time_ms / self._cheap_ms[index])
        elif index in self._surely:  # it has no ratio, so the next one stands in for it
            others = [other for other in self._waiting if other in self._cheap_ms and other not in self._surely]
            self._surely.update(others[:1])
        self._surely.discard(index)
        if not self._running and not self._candidates():
            self._takes_all = len(self._waiting) < _WORTH * len(self._configs)

    @property
    def _bound(self) -> float:
        """The smallest ratio of full to cheap time that is considered possible."""
        return self._margin * min(self._ratios, default=0.0)

    def _can_win(self, index: int) -> bool:
        return index not in self._cheap_ms or self._bound * self._cheap_ms[index] <= self._best_ms

    def _candidates(self) -> list[int]:
        """Returns the configs that may be compiled fully now, in the order of their cheap times."""
        # The first bound waits for the ratios of all in `_surely`. Configs without a cheap time need no bound.
        if not self._surely.isdisjoint(self._running | self._waiting.keys()):
            return [index for index in self._waiting if index in self._surely or index not in self._cheap_ms]
        return [index for index in self._waiting if self._takes_all or self._can_win(index)]
