"""Sweeps as other processes see them: records of their beginnings and ends, with their claims and journals."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from quarantune.cache.claims import Claim, Holder
from quarantune.cache.file_names import safe_name
from quarantune.cache.journal import PROBLEM, Journal, read
from quarantune.host.shared_files import paths
from quarantune.values.codec import DamageError, JsonObject, Record, canonical_json, frozen, text_of, within
from quarantune.values.texts import printable
from quarantune.values.trial import Outcome, Trial

_SUFFIX = ".sweep"
_LONGEST_STEP = 1000
_LAST_S = 1e11
"""Bound above all times, in seconds of Unix time, that a calendar shows."""
_Count: TypeAlias = Annotated[int, within(0, 1 << 53)]


class SweepState(enum.StrEnum):
    """What became of a sweep."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    """Every config failed."""
    DONE = "done"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning(Record):
    """The record that a sweep leaves when it begins.

    Attributes:
        name: the function.
        device: the kind of device.
        key: the key of the problem.
        call: the description of the call, as in an entry.
        total: the number of configs to settle; None if unknown.
        is_bound: whether the total is only an upper limit of a search.
        settled: the number of configs that were settled before, or dropped by `prune_fn`.
        default: the function's own defaults; None if it cannot run with them.
        versions: the versions of JAX and other packages.
        began_s: the time, in seconds of Unix time.
    """

    name: str
    device: str
    key: str
    call: Any = dataclasses.field(default_factory=dict)
    total: _Count | None = None
    is_bound: bool = False
    settled: _Count = 0
    default: Annotated[JsonObject, frozen] | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    began_s: Annotated[float, within(0, _LAST_S)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment(Record):
    """The record of what a sweep does at a moment, as text for people."""

    now: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending(Record):
    """The record that a sweep leaves when it ends.

    Attributes:
        ended: what became of it.
        trials: the trials of a sweep whose configs all failed; empty for others.
    """

    ended: SweepState
    trials: tuple[Trial, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The latest sweep of a problem.

    Attributes:
        directory: the cache directory.
        beginning: the record of its beginning.
        state: what became of it.
        holder: the process that runs it; None unless it is running.
        failed: the trials of a sweep whose configs all failed; empty for others.
        now: what it did when it last said so, as text; empty unless it is running.
    """

    directory: Path
    beginning: Beginning
    state: SweepState
    holder: Holder | None = None
    failed: tuple[Trial, ...] = ()
    now: str = ""

    def trials(self) -> tuple[Trial, ...]:
        """Returns the trial of each config that has ended, in the order of the ends."""
        if self.state is SweepState.FAILED:
            return self.failed
        about, latest = self.beginning, dict[str, Trial]()
        for trial in Journal(self.directory, about.name, about.device, about.key).trials():
            text = text_of(trial.config)
            latest.pop(text, None)
            # A config that runs in the tuning process itself is `lost` until it has ended.
            if trial.outcome not in (Outcome.LOST, Outcome.NOT_RUN):
                latest[text] = trial
        return tuple(latest.values())

    def done(self, trials: tuple[Trial, ...]) -> int:
        """Returns how many configs are settled, of those in `beginning.total`.

        Args:
            trials: its trials.
        """
        if self.state is SweepState.FAILED:
            return len(trials)
        fresh = sum((trial.ended_s or 0.0) >= self.beginning.began_s for trial in trials)
        return self.beginning.settled + fresh


def log(directory: Path, name: str, device: str, key: str) -> Journal:
    """Returns the journal in which a problem's latest sweep records its beginning and its end.

    A record is a `Moment` or an `Ending`, or has a `Beginning` under `sweep`.
    """
    return Journal(directory, name, device, key, suffix=_SUFFIX)


def latest(directory: Path, name: str | None = None) -> list[Sweep]:
    """Returns the latest sweep of each problem that has a record of it, by the time of their beginnings.

    Args:
        directory: the cache directory; it is only read.
        name: the function's name; None for all functions.
    """
    folder = "*" if name is None else safe_name(name)
    found: dict[str, Sweep] = {}
    for path in paths(directory, f"{folder}.trials/{PROBLEM}.*{_SUFFIX}"):
        for sweep in _in_file(directory, path):
            problem = canonical_json([sweep.beginning.name, sweep.beginning.device, sweep.beginning.key])
            if problem not in found or found[problem].beginning.began_s <= sweep.beginning.began_s:
                found[problem] = sweep
    chosen = [
        sweep for sweep in found.values() if name in (None, sweep.beginning.name, safe_name(sweep.beginning.name))
    ]
    return sorted(chosen, key=lambda sweep: sweep.beginning.began_s)


def _in_file(directory: Path, path: Path) -> Iterator[Sweep]:
    """Yields the sweep in a file of records, unless the record of its beginning is missing or damaged."""
    beginning, end, now = None, None, ""
    with contextlib.suppress(OSError):
        for record in read(path, below=directory):
            with contextlib.suppress(DamageError):
                if "sweep" in record:
                    beginning, end, now = Beginning.from_json(record["sweep"]), None, ""
                elif "now" in record:
                    now = printable(Moment.from_json(record).now[:_LONGEST_STEP])
                else:
                    end = Ending.from_json(record)
    if beginning is None or path.parent.name != f"{safe_name(beginning.name)}.trials":
        return  # the claim and the journal would be in another folder
    if end is not None:
        yield Sweep(directory=directory, beginning=beginning, state=end.ended, failed=end.trials)
        return
    holder = Claim(directory, beginning.name, beginning.device, beginning.key).holder()
    if holder is None or holder.owner.is_dead():
        yield Sweep(directory=directory, beginning=beginning, state=SweepState.INTERRUPTED)
    else:
        yield Sweep(directory=directory, beginning=beginning, state=SweepState.RUNNING, holder=holder, now=now)
