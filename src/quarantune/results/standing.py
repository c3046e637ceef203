"""The standing of a sweep's configs: the winner, its ties and the function's defaults; and why the winner won."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from quarantune.measure import finals
from quarantune.values.config_values import text_of
from quarantune.values.findings import interval_text
from quarantune.values.shown import format_config
from quarantune.values.trial import Config, Outcome, Trial

_MOST_NAMED = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """The outcome of a sweep as a whole.

    Attributes:
        best: the winner; None where there is none.
        tie: the configs that the noise cannot tell from the winner, without it.
        default: the config that equals the function's own defaults; None where there is none.
        default_ms: the time that speed-ups are relative to, in milliseconds; None where it is not known.
        default_label: a name for the defaults.
        final: the trials of the configs that were timed in turn in the end; empty where that is not known.
    """

    best: Config | None = None
    tie: tuple[Config, ...] = ()
    default: Config | None = None
    default_ms: float | None = None
    default_label: str = "the function's own defaults"
    final: Sequence[Trial] = ()

    def speedup(self, trial: Trial) -> float | None:
        """Returns the time of the defaults divided by a trial's; None unless they were timed side by side."""
        is_alike = trial.outcome is Outcome.OK and (not self.final or self.is_finalist(trial))
        return self.default_ms / trial.time_ms if is_alike and trial.time_ms and self.default_ms else None

    def is_finalist(self, trial: Trial) -> bool:
        """Whether a trial's times are those of the final, where its config or one with its program was in it."""
        return trial.samples_ms in self._final_samples

    @functools.cached_property
    def _final_samples(self) -> frozenset[tuple[float, ...]]:
        return frozenset(trial.samples_ms for trial in self.final)

    def is_best(self, trial: Trial) -> bool:
        """Whether a trial is the winner's."""
        return _same(trial.config, self.best)

    def is_tie(self, trial: Trial) -> bool:
        """Whether the noise cannot tell a trial's config from the winner."""
        return any(_same(trial.config, config) for config in self.tie)

    def is_default(self, trial: Trial) -> bool:
        """Whether a trial is that of the function's own defaults."""
        return _same(trial.config, self.default)


def _same(config: Config, other: Config | None) -> bool:
    """Returns whether two configs are equal; 1 and True differ."""
    return other is not None and config == other and text_of(config) == text_of(other)


def explain(trials: Sequence[Trial], standing: Standing) -> list[str]:
    """Returns sentences for below a table: why the winner won, and how the defaults did.

    Args:
        trials: the trials.
        standing: their standing.
    """
    notes = []
    best = next(filter(standing.is_best, trials), None)
    if best is not None and best.time_ms is not None:
        notes.append(f"* {format_config(best.config)} {_why(best, trials, standing)}")
    default = next(filter(standing.is_default, trials), None)
    if default is not None and default.outcome.is_failure:
        notes.append(f"{standing.default_label} ended as {default.outcome.value}, so there is no speed-up")
    elif default is None and standing.default is not None and standing.default == standing.best:
        own = f"{standing.default_label} ({format_config(standing.default)})"
        notes.append(f"{own} beat every config: calls run with them")
    elif default is None and standing.default_ms is not None:
        notes.append(f"speed-up: against {standing.default_label}: {standing.default_ms:.4g} ms")
    timed = next(filter(standing.is_default, standing.final), None)
    if timed is not None and best is not None and not standing.is_default(best):
        if len(timed.samples_ms) < len(best.samples_ms):
            rounds = f"{len(timed.samples_ms)} of the {len(best.samples_ms)} rounds of the final"
            notes.append(f"{standing.default_label} are far behind, so that they took part in {rounds}")
        if interval := finals.speedup_interval(best.samples_ms, timed.samples_ms):
            notes.append(f"speed-up of *: {interval_text(interval)}, as far as the noise of the final tells")
    if any(trial.outcome is Outcome.SLOW and trial.level_ms is not None for trial in trials):
        notes.append("> even the fastest run took so long, so the config was stopped early")
    return notes


def reason(trials: Sequence[Trial], standing: Standing) -> str:
    """Returns the reason why the winner won, as the rest of a sentence about it; empty where it has no trial."""
    best = next(filter(standing.is_best, trials), None)
    return "" if best is None or best.time_ms is None else _why(best, trials, standing)


def _why(best: Trial, trials: Sequence[Trial], standing: Standing) -> str:
    """Returns the reason why the winner won, as the rest of a sentence about it."""
    assert best.time_ms is not None
    timed = sorted(
        (trial.time_ms, index)
        for index, trial in enumerate(trials)
        if trial.outcome is Outcome.OK and trial.time_ms is not None and not standing.is_best(trial)
        if standing.is_finalist(trial) or not standing.final
    )
    if not timed:
        return "is the only config that was measured to the end"
    next_ms, index = timed[0]
    other = format_config(trials[index].config)
    is_fastest = best.time_ms <= next_ms
    if standing.tie:
        level = f"is as fast as {_named(standing.tie)} (=) as far as the noise tells"
        if standing.is_default(best):
            return f"{level}; among equals the function's own defaults win"
        return f"{level}, and has the lowest time" if is_fastest else f"{level}; among equals the first config wins"
    if is_fastest:
        return f"is the fastest; the next, {other}, takes {_percent(next_ms / best.time_ms - 1)} longer"
    before = "before it, or with cold caches" if best.clock == "device" else "before it"
    return f"won the final, in which the fastest are timed in turn; the lower time of {other} was taken {before}"


def _named(configs: Sequence[Config]) -> str:
    names = [format_config(config) for config in configs[:_MOST_NAMED]]
    if (more := len(configs) - len(names)) > 0:
        names.append(f"{more} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"
