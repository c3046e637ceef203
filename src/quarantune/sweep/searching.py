"""Gives the configs that a search asks to a sweep, wherever its trials run, and ends the search with its budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from quarantune.scheduler.plan import ConfigSource
from quarantune.search import searches
from quarantune.sweep.limits import EXHAUSTED, MAX_TRIALS, NO_GAIN, PATIENCE, TIME_BUDGET, SearchLimits
from quarantune.values.configs import Config
from quarantune.values.options import LEAST_GAIN
from quarantune.values.space import Space
from quarantune.values.trial import Outcome, Phase, Trial

_FINAL_S, _FINAL_SHARE = 3.0, 0.2
"""Seconds of the time budget to keep for the final, which takes up to 2.4 s, and the largest share of the budget."""


class Searching(ConfigSource):
    """The search of one sweep, as the source of its configs.

    The search ends when only the time for the final remains, or when its model expects no gain. Configs in measurement
    then finish, and the others do not run. If no config is usable when the time is over, those in progress continue
    until one is, for at most the time of one trial. The first config begins however short the time is.
    """

    def __init__(
        self,
        limits: SearchLimits,
        space: Space,
        *,
        defaults: int | None = None,
        starts: Iterable[Config] = (),
        known: Mapping[int, Trial] | None = None,
        failures: Mapping[int, Trial] | None = None,
        trial_s: float = 0.0,
        run_as: Sequence[Config] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins a search, and its time.

        Args:
            limits: the search and its budgets.
            space: the configs.
            defaults: the index of the function's own defaults, which come first; None if they are not in the space.
            starts: the configs to try next.
            known: the trials so far, in the order of their ends; their configs count as tried.
            failures: the trials of further configs, which need no try, because they certainly fail.
            trial_s: seconds that one trial may take.
            run_as: by index, the config that runs in place of each; None for the configs themselves.
            clock: returns seconds.
        """
        self._limits = limits
        self._space = space
        self._clock = clock
        self._trial_s = trial_s
        self._run_as = run_as
        budget_s = float("inf") if limits.time_budget_s is None else limits.time_budget_s
        self._ends_at = clock() + budget_s - min(_FINAL_S, _FINAL_SHARE * budget_s)
        first = [] if defaults is None else [space[defaults]]
        self._search = searches.make(limits.search, space, seed=limits.seed, starts=[*first, *starts])
        self._pending: set[int] = set()
        self._ended: set[int] = set()
        self._tried = 0
        self._best: float | None = None
        self._is_usable = False
        self._without_gain = 0
        self._stopped = ""
        self._has_begun = bool(known)
        self._failures = len(failures or {})
        for index, trial in (failures or {}).items():
            self._ended.add(index)
            self._search.tell(space[index], trial)
        for index, trial in (known or {}).items():
            self.ended(index, trial)

    @property
    def stopped(self) -> str:
        """Why the search has ended; empty while it continues."""
        if self._stopped in (MAX_TRIALS, PATIENCE, NO_GAIN) and self.saw_all:
            return EXHAUSTED
        return self._stopped

    @property
    def saw_all(self) -> bool:
        """Whether no config remains: each has run, was dropped, or certainly fails. A search may end before that."""
        size = self._space.size
        return size is not None and self._tried + self._failures + self._space.dropped >= size

    @property
    def time_budget_s(self) -> float | None:
        """Seconds after which the search ends; None for no limit."""
        return self._limits.time_budget_s

    @property
    def total(self) -> int:
        """The most configs that the search may try."""
        most = self._limits.max_trials
        size = self._space.whole() if most is None else self._space.reach(most)
        return size if most is None else min(size, most)

    @property
    def is_closed(self) -> bool:
        """Whether the search asks for no further configs."""
        limits = self._limits
        if self._stopped:
            return True
        if limits.max_trials is not None and self._tried + len(self._pending) >= limits.max_trials:
            self._stopped = MAX_TRIALS
        elif limits.patience is not None and self._without_gain >= limits.patience:
            self._stopped = PATIENCE
        elif limits.ends_without_hope and not getattr(self._search, "expects_gain", True):
            self._stopped = NO_GAIN
        elif self._has_begun and self._clock() >= self._ends_at:
            self._stopped = TIME_BUDGET
        return bool(self._stopped)

    def take(self, count: int) -> dict[int, Config]:
        """Returns configs to try next by index; fewer than `count` if the search waits for trials, or ends."""
        if self.is_closed:
            return {}
        if self._limits.max_trials is not None:
            count = min(count, self._limits.max_trials - self._tried - len(self._pending))
        taken: dict[int, Config] = {}
        for config in self._search.ask(count):
            index = self._space.find(config)
            assert index is not None  # a search asks only configs of its space
            taken[index] = config if self._run_as is None else self._run_as[index]
        if self.is_closed:  # asking the search has ended it
            return {}
        self._pending |= taken.keys()
        self._has_begun = True
        if not taken and not self._pending:
            self._stopped = EXHAUSTED
        return taken

    def ended(self, index: int, trial: Trial) -> None:
        """Passes a trial to the search, once."""
        if index < 0 or index in self._ended:  # the defaults, if they are not in the space
            return
        self._pending.discard(index)
        if trial.outcome is Outcome.PRUNED:
            return
        self._ended.add(index)
        if self._run_as is not None:
            trial = dataclasses.replace(trial, config=self._space[index])
        self._search.tell(trial.config, trial)
        if trial.outcome is Outcome.NOT_RUN:
            if self._stopped == MAX_TRIALS:
                self._stopped = TIME_BUDGET  # which has cut off the last of these trials
            return
        self._tried += 1
        is_cheap = trial.outcome is Outcome.ERROR and trial.phase is Phase.COMPILE
        self._without_gain += self._best is not None and not is_cheap
        if trial.outcome is Outcome.OK and (figure := trial.merit) is not None:
            self._is_usable = True
            if self._best is None or figure < self._best - LEAST_GAIN * abs(self._best):
                self._best, self._without_gain = figure, 0

    def reason_to_stop(self) -> str:
        """Returns why configs that are not in measurement should stop; empty while they should continue."""
        if self._stopped == NO_GAIN and self._is_usable:
            return f"the search expected no gain of {LEAST_GAIN:.1%}"
        return self.why_late()

    def why_late(self) -> str:
        """Returns that the time budget is over; empty before that, and one trial longer if no config has worked."""
        now = self._clock()
        if now < self._ends_at or not (self._is_usable or now >= self._ends_at + self._trial_s):
            return ""
        self._stopped = self._stopped or TIME_BUDGET
        return f"the time budget of {self._limits.time_budget_text} was over"
