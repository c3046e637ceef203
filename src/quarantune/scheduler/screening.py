"""Ranks configs by a cheap compile, and compiles fully those that may win: branch and bound on cheap times.

XLA tries many kernels on the device while it compiles a product of matrices, and spends most of that time on programs
that lose. Programs compiled without trials rank nearly the same. The sweep measures how nearly: its ratios of full
to cheap time give the bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from quarantune.scheduler.plan import NOTHING_MORE, ConfigSource, Finish
from quarantune.values.configs import Config
from quarantune.values.trial import READY, UNTUNED, Outcome, Trial

MARGIN = 0.8
"""Factor on the smallest ratio of full to cheap time seen so far: an unseen ratio may be smaller by this much.

On an H100 (examples/benchmarks/fidelity_h100.json.gz, 27 programs), half of the compile work is left, and one winner is
more than 1% slower than the best (2.1%, a product with 8 rows). fidelity_replay.py shows the costs of other margins.
"""
_LEAST = 3
"""Number of configs, fastest by cheap time, that compile fully before any is ruled out."""
_WORTH = 0.25
"""Least share of the configs worth ruling out; below it, all compile fully."""
_SAME_AT_EACH_FIDELITY = frozenset({Outcome.TIMEOUT, Outcome.CRASHED, Outcome.OOM})
"""Outcomes before the end of compiling that a full compile would repeat. Errors need confirming on the device."""


class CheapTrials:
    """The trials of cheaply compiled programs; none is the result of its config.

    Attributes:
        trials: the trials that have a time, by index.
        configs: the configs to compile fully or rule out, by index.
    """

    def __init__(self, configs: Mapping[int, Config], finish: Finish, enter: Callable[[int, str], None]) -> None:
        """Begins without trials.

        Args:
            configs: the configs known from the start.
            finish: receives the trials that end a config.
            enter: called with the index of each other config, and `READY`.
        """
        self.trials: dict[int, Trial] = {}
        self.configs = dict(configs)
        self._finish = finish
        self._enter = enter

    def end(self, index: int, trial: Trial, log: str) -> None:
        """Receives the trial of a config."""
        self.configs[index] = trial.config
        if trial.outcome in _SAME_AT_EACH_FIDELITY and not trial.program:
            del self.configs[index]
            self._finish(index, trial, log)
            return
        self._enter(index, READY)
        if trial.outcome in (Outcome.OK, Outcome.SLOW) and trial.time_ms is not None:
            self.trials[index] = trial

    def finish_fully(self, index: int, trial: Trial, log: str) -> None:
        """Receives the trial of a fully compiled config, and adds the config's cheap time."""
        cheap = self.trials.get(index)
        self._finish(index, trial if cheap is None else dataclasses.replace(trial, cheap_ms=cheap.time_ms), log)

    def rule_out(self, screening: Screening) -> None:
        """Ends the configs that did not compile fully.

        Args:
            screening: the screening that chose the others.
        """
        for index, at_least_ms in screening.left.items():
            if at_least_ms:
                message = f"cheap compile: at least {at_least_ms:.3g} ms"
                self._finish(index, _ruled_out(self.trials[index], message), "")
            else:
                config, message = self.configs[index], "the sweep ended before it was compiled fully"
                self._finish(index, Trial(config=config, outcome=Outcome.NOT_RUN, message=message), "")


def _ruled_out(cheap: Trial, message: str) -> Trial:
    """Returns the trial of a config ruled out by its cheap trial, without measurements of its own program."""
    nothing: Any = {"clock": "", "figures": None, "recalled_from": None}
    return cheap.without_times(Outcome.SLOW, message, cheap_ms=cheap.time_ms, **nothing)


class Screening(ConfigSource):
    """Gives configs to compile fully, in the order of their cheap times, until no other config can win.

    A config can win if its cheap time, times the bound, is at most the fastest full time. The bound is the smallest
    ratio of full to cheap time in this sweep, times the margin. Nothing is ruled out before the defaults and the
    fastest configs have their ratios. A config without a cheap time always compiles fully. So does a config whose cheap
    time, times the margin, is at most the shortest cheap time: no ratio can rule it out, so it need not wait.

    Rulings are final only when the source is closed, because any trial may lower the bound.
    """

    def __init__(
        self,
        configs: Mapping[int, Config],
        cheap_ms: Mapping[int, float],
        *,
        defaults: int | None = None,
        known_ms: Mapping[int, float] | None = None,
        best_ms: float = math.inf,
        margin: float = MARGIN,
        source: ConfigSource = NOTHING_MORE,
    ) -> None:
        """Ranks the configs.

        Args:
            configs: the configs by index.
            cheap_ms: the time of each config's cheap program in milliseconds, without those that failed.
            defaults: the index of the function's own defaults; None if they are not among the configs.
            known_ms: the milliseconds of configs whose full programs have a time; they come first, and need no compile.
            best_ms: the time of the fastest config that needs no screening, in milliseconds.
            margin: factor on the smallest ratio, at most 1.
            source: the source of the configs, which decides when the time for them is over.
        """
        self._configs = configs
        self._cheap_ms = {index: cheap_ms[index] for index in configs if index in cheap_ms}
        self._margin = margin
        self._source = source
        ranked = sorted(self._cheap_ms, key=lambda index: self._cheap_ms[index])
        first = [index for index in configs if index == defaults]
        self._known = dict(known_ms or {})
        self._surely = {*first, *ranked[:_LEAST]} - self._known.keys()
        self._waiting = dict.fromkeys([*first, *ranked, *configs])
        self._running: set[int] = set()
        self._ratios = [ms / self._cheap_ms[index] for index, ms in self._known.items()]
        self._best_ms = min([best_ms, *(ms for index, ms in self._known.items() if index != UNTUNED)])
        self._takes_all = False
        # A config that needs no screening may rule out any.
        longest_ms = min(self._cheap_ms.values(), default=0.0) / margin if self._best_ms == math.inf else 0.0
        self._level = {index for index, ms in self._cheap_ms.items() if ms <= longest_ms}

    @property
    def is_closed(self) -> bool:
        """Whether no further config can win, or the time for configs is over."""
        may_lower_the_bound = self._running - self._known.keys()
        is_open = bool(may_lower_the_bound and self._waiting) or bool(self._candidates())
        return not is_open or bool(self.why_late())

    @property
    def left(self) -> dict[int, float]:
        """For each config that was not given, the least time that it takes, in milliseconds; 0 if it may win."""
        return {index: 0.0 if self._can_win(index) else self._bound * self._cheap_ms[index] for index in self._waiting}

    @property
    def why_it_did_not_pay(self) -> str:
        """A message that all configs compiled fully, and why; empty if some were ruled out."""
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
        if index not in self._configs:
            return
        self._waiting.pop(index, None)
        self._running.discard(index)
        if trial.outcome in (Outcome.OK, Outcome.SLOW) and trial.time_ms is not None:
            if trial.outcome is Outcome.OK and index != UNTUNED:
                self._best_ms = min(self._best_ms, trial.time_ms)
            if index in self._cheap_ms:
                self._ratios.append(trial.time_ms / self._cheap_ms[index])
        elif index in self._surely:  # it has no ratio, so the next config takes its place
            others = [other for other in self._waiting if other in self._cheap_ms and other not in self._surely]
            self._surely.update(others[:1])
        self._surely.discard(index)
        if not self._running and not self._candidates():
            self._takes_all = len(self._waiting) < _WORTH * len(self._configs)

    def why_late(self) -> str:
        """Returns why the time for configs is over; empty before a full program has worked."""
        return self._source.why_late() if self._best_ms < math.inf else ""

    @property
    def _bound(self) -> float:
        """The smallest possible ratio of full to cheap time; 0 until all of the first ratios are known."""
        return self._margin * min(self._ratios, default=0.0) if self._has_bound else 0.0

    @property
    def _has_bound(self) -> bool:
        return self._surely.isdisjoint(self._running | self._waiting.keys())

    def _can_win(self, index: int) -> bool:
        return self._needs_no_bound(index) or self._bound * self._cheap_ms[index] <= self._best_ms

    def _needs_no_bound(self, index: int) -> bool:
        return index in self._known or index in self._level or index not in self._cheap_ms

    def _candidates(self) -> list[int]:
        """Returns the configs that may compile fully now, in the order of their cheap times."""
        if not self._has_bound:
            return [index for index in self._waiting if index in self._surely or self._needs_no_bound(index)]
        return [index for index in self._waiting if self._takes_all or self._can_win(index)]
