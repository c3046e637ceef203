"""Sweeps without a result in the form for tables and pages: those that run, were interrupted, or failed altogether."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quarantune.cache.sweeps import Sweep, SweepState
from quarantune.cache.sweeps import latest as latest_sweeps
from quarantune.measure import finals
from quarantune.results.report_data import PlainResult, ResultData
from quarantune.values.codec import equal
from quarantune.values.configs import Config
from quarantune.values.trial import Findings, Trial, count_outcomes, failed_text

_MINUTE_S, _HOUR_S = 60.0, 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FailedSweep:
    """A sweep whose configs all failed, for `TuningFailedError`.

    Attributes:
        name: the function's name in the cache.
        device: the kind of device.
        key: the key of the problem.
        key_values: the description of the call.
        trials: the trials.
        default: the function's own defaults; None if it cannot run with them.
        versions: the versions of JAX and other packages.
    """

    name: str
    device: str
    key: str
    key_values: Any
    trials: tuple[Trial, ...]
    default: Config | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def table(self, *, width: int | None = None) -> str:
        """Returns the trials as a table, as `TuningFailedError.table` documents it."""
        from quarantune.results import report, times  # only somebody who looks at a failure needs them

        result = self.data().result
        return report.table(result, times.in_order(result), width=width)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the trials as a page, as `TuningFailedError.report` documents it."""
        from quarantune.results import html_report

        html_report.write(path, [self.data()])

    def data(self) -> ResultData:
        """Returns the sweep in the form for a page."""
        result = _result(
            self.trials,
            name=self.name,
            device=self.device,
            key=self.key,
            default_config=self.default,
            versions=dict(self.versions),
        )
        return ResultData(result, self.key_values, state=SweepState.FAILED, progress=failed_text(self.trials))


def without_result(directory: Path, name: str, *, device: str | None = None) -> list[Sweep]:
    """Returns the sweeps of a function that run, were interrupted, or failed altogether.

    Args:
        directory: the cache directory; it is only read.
        name: the function's name in the cache, or the stem of its file.
        device: the kind of device; None for all.
    """
    found = [sweep for sweep in latest_sweeps(directory, name) if device in (None, sweep.beginning.device)]
    return [sweep for sweep in found if sweep.state is not SweepState.DONE]


def data_of(sweep: Sweep) -> ResultData:
    """Returns a sweep without a result in the form for a page: the best config so far stands for the winner."""
    about, trials = sweep.beginning, sweep.trials()
    result = _result(
        trials,
        name=about.name,
        device=about.device,
        key=about.key,
        default_config=about.default,
        versions=about.versions,
        created=_iso(about.began_s),
    )
    return ResultData(
        result, about.call, note_on(sweep), state=sweep.state.value, progress=progress_text(sweep, trials)
    )


def progress_text(sweep: Sweep, trials: tuple[Trial, ...]) -> str:
    """Returns how far a sweep has come, such as `20 of 40 configs`."""
    if sweep.state is SweepState.FAILED:
        return failed_text(trials)
    done, total = sweep.done(trials), sweep.beginning.total
    if total is None:
        return f"{done:,} configs" if done else "no config recorded"
    return f"{min(done, total):,} of {'at most ' if sweep.beginning.is_bound else ''}{total:,} configs"


def note_on(sweep: Sweep) -> str:
    """Returns a sentence on what became of a sweep."""
    if sweep.state is SweepState.RUNNING:
        doing = f" Now: {sweep.now}." if sweep.now else ""
        return f"Tuned for {duration_of(sweep)} by {sweep.holder}.{doing} Another config may still win."
    if sweep.state is SweepState.INTERRUPTED:
        return "The sweep was interrupted, and nothing was chosen. Tuning the call again continues from these trials."
    return "No config worked. Tuning the call again tries all of them again."


def duration_of(sweep: Sweep) -> str:
    """Returns how long ago a sweep has begun, such as `2 min`."""
    gone_s = max(0.0, time.time() - sweep.beginning.began_s)
    if gone_s < _MINUTE_S:
        return f"{gone_s:.0f} s"
    return f"{gone_s / _MINUTE_S:.0f} min" if gone_s < _HOUR_S else f"{gone_s / _HOUR_S:.1f} h"


def best_of(trials: Sequence[Trial], default: Config | None) -> tuple[Trial, Trial | None] | None:
    """Returns the best config so far and the trial of the defaults; None if no config has worked yet.

    Args:
        trials: the trials so far.
        default: the function's own defaults.
    """
    if not any(trial.is_usable for trial in trials):
        return None
    at = next((index for index, trial in enumerate(trials) if equal(trial.config, default)), None)
    settled, (winner, *_) = finals.conclude(dict(enumerate(trials)), finals.Final(), default=at)
    return settled[winner], None if at is None else settled[at]


def _result(trials: Sequence[Trial], *, default_config: Config | None, created: str = "", **fields: Any) -> PlainResult:
    """Returns a sweep as a result; without a config that works, it has no winner."""
    found = best_of(trials, default_config)
    findings = Findings() if found is None else Findings.of(*found)
    return PlainResult.of(
        dataclasses.replace(findings, created=created, trials=count_outcomes(trials)),
        best_config={} if found is None else found[0].config,
        has_winner=found is not None,
        default_config=default_config,
        from_cache=True,
        trials=tuple(trials),
        **fields,
    )


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
