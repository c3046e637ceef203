"""A job's profile as the command line shows it: the device time of tuned calls, and winners in their place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quarantune.answers.layers import open_store
from quarantune.answers.recording import RecordedCall
from quarantune.cache import entries
from quarantune.cache.entries import CacheRecord
from quarantune.cache.file_names import safe_name
from quarantune.cache.store import Store
from quarantune.cli.output import InputError, Output, counted, input_errors, wrapped
from quarantune.functions.profile_scope import call_id, config_id
from quarantune.measure.xspace import read_file
from quarantune.results.job_profile import JobTime, TunedWork, WorkTime, job_time
from quarantune.values.codec import JsonObject
from quarantune.values.configs import format_config
from quarantune.values.settings import Settings
from quarantune.values.texts import call_text, columns, printable
from quarantune.values.trial import Findings

_DEFAULTS = config_id(None)
_WINS, _LOSES, _SAME = "wins", "loses in place", "is the defaults"


@dataclasses.dataclass(frozen=True)
class Row:
    """A tuned call in a profile, with all that is known of it.

    Attributes:
        work: its names in the profile.
        time: its device time.
        share: its share of the job's device time.
        saved: the newest saved result of the call; None without one.
        recorded: its record; None without one.
        is_ambiguous: whether several calls have its id.
    """

    work: TunedWork
    time: WorkTime
    share: float
    saved: CacheRecord | None
    recorded: RecordedCall | None
    is_ambiguous: bool

    @property
    def findings(self) -> Findings:
        """The findings of the saved result."""
        return Findings.from_json({} if self.saved is None else self.saved.entry)

    @property
    def runs_winner(self) -> bool:
        """Whether the job ran the saved config."""
        return self.saved is not None and config_id(self.saved.entry.get("config")) == self.work.config

    @property
    def call(self) -> str:
        """The call as text; its id if neither the cache nor a record knows it."""
        if self.is_ambiguous or (self.saved is None and self.recorded is None):
            return f"call {self.work.call}"
        return call_text(self.saved.entry.get("key_values") if self.saved else self.recorded and self.recorded.readable)

    @property
    def origin(self) -> str:
        """The config that the job ran, and where it came from."""
        if self.work.config == _DEFAULTS:
            return "the defaults, not tuned"
        if self.runs_winner and self.saved is not None:
            config = self.saved.entry.get("config")
            text = format_config(config) if isinstance(config, dict) else str(config)
            return f"{text}, saved" + (" as an estimate" if self.findings.is_estimate else "")
        return f"config {self.work.config}, of an earlier result or another cache"

    @property
    def gain(self) -> str:
        """The gain of tuning that is known."""
        if self.is_ambiguous:
            return "several calls have this id"
        if self.saved is None:
            return "recorded, to be tuned" if self.recorded else "neither saved nor recorded"
        ratio = (self.findings.default_time_ms or 0.0) / self.findings.time_ms
        known = f"{ratio:.3g}x" if ratio > 0 else "unknown"
        return f"has {known}" if self.runs_winner else f"{known} with the saved result"

    def to_dict(self) -> JsonObject:
        """Returns the row as JSON."""
        return {
            "function": self.work.name,
            "call": self.call,
            "time_ms": self.time.time_ms,
            "share": self.share,
            "calls": self.time.calls or None,
            "each_ms": self.time.each_ms,
            "origin": self.origin,
            "gain": self.gain,
        }


@dataclasses.dataclass(frozen=True)
class Job:
    """A job's profile, with the tuned calls in the order of their device time."""

    time: JobTime
    rows: Sequence[Row]

    def to_tune(self, calls: Sequence[RecordedCall]) -> list[RecordedCall]:
        """Returns the recorded calls in the profile, in the order of their device time."""
        wanted = {call.identity: call for row in self.rows if not row.is_ambiguous and (call := row.recorded)}
        return [call for call in wanted.values() if call in calls]

    def show(self, out: Output) -> None:
        """Prints the table of tuned calls, and below it the rest by category."""
        total = self.time.total_ms
        out.line(f"{total:.4g} ms of device time in the profile")
        rows = [
            (printable(row.work.name), f"{row.time.time_ms:.4g}", f"{row.share:.1%}", row.gain, row.origin, row.call)
            for row in self.rows
        ]
        titles = ("function", "ms", "share", "known gain", "config", "call")
        if rows:
            out.line("\n".join(columns(wrapped([titles, *rows], out.width))))
        else:
            out.line("no tuned call is in it: they have names if QUARANTUNE_PROFILE_SCOPES was on when JAX traced them")
        rest = [("where the rest goes", "ms", "share")]
        rest += [(printable(name), f"{ms:.4g}", f"{ms / total:.1%}") for name, ms in self.time.rest_ms.items()]
        out.line("\n" + "\n".join(columns(rest)))

    def to_dict(self) -> JsonObject:
        """Returns the profile as JSON."""
        calls = [row.to_dict() for row in self.rows]
        return {"total_ms": self.time.total_ms, "calls": calls, "rest_ms": dict(self.time.rest_ms)}


def read(path: str, settings: Settings, calls: Sequence[RecordedCall] = ()) -> Job:
    """Reads a job's profile, and finds its calls in the cache and among recorded calls.

    Raises:
        InputError: There is no whole profile, or it has no device time.
    """
    with input_errors(ValueError):
        time = job_time(read_file(Path(os.path.expanduser(path))))
    saved: dict[tuple[str, str], list[CacheRecord]] = {}
    for record in _saved(settings):
        key = record.key
        about = call_id(key.kernel_type, key.device, record.entry.get("key_values"))
        saved.setdefault((key.kernel_type, about), []).append(record)
    met: dict[tuple[str, str], list[RecordedCall]] = {}
    for call in calls:
        name = safe_name(call.name)
        met.setdefault((name, call_id(name, call.device, call.readable)), []).append(call)
    rows = [
        _row(work, spent, time, saved.get(work[:2], []), met.get(work[:2], [])) for work, spent in time.tuned.items()
    ]
    return Job(time, sorted(rows, key=lambda row: -row.time.time_ms))


def _saved(settings: Settings) -> Iterator[CacheRecord]:
    yield from entries.records(open_store(settings))
    for directory in settings.cache_path:
        if directory.is_dir():
            yield from entries.records(Store(directory, read_only=True))


def _row(
    work: TunedWork, spent: WorkTime, job: JobTime, saved: Sequence[CacheRecord], met: Sequence[RecordedCall]
) -> Row:
    texts = {call_text(record.entry.get("key_values")) for record in saved} | {call_text(it.readable) for it in met}
    # Of results for several versions of the code, the one that the job ran counts, else the newest.
    ran = [record for record in saved if config_id(record.entry.get("config")) == work.config]
    best = max(ran or saved, key=lambda record: str(record.entry.get("created", "")), default=None)
    share = spent.time_ms / job.total_ms if job.total_ms else 0.0
    return Row(work, spent, share, best, next(iter(met), None), is_ambiguous=len(texts) > 1)


def verify(path: str, settings: Settings, out: Output) -> tuple[bool, list[JsonObject]]:
    """Compares the time of each winner in a job with its times in the sweep.

    Returns:
        Whether all winners that the profile shows win in their place too, and the verdicts as JSON.

    Raises:
        InputError: There is no whole profile, or none of its calls ran a saved config.
    """
    job = read(path, settings)
    winners = [row for row in job.rows if row.runs_winner and not row.is_ambiguous]
    if not winners:
        raise InputError(
            f"no call in {path!r} ran a saved config: profile the job after tuning, with the same QUARANTUNE_CACHE_DIR"
        )
    in_place = {row.work[:2]: row.time.each_ms for row in job.rows if row.work.config == _DEFAULTS}
    verdicts = [_verdict(row, in_place) for row in winners]
    titles = ("function", "in the job ms", "in the sweep ms", "defaults ms", "verdict", "call")
    cells = [
        (
            printable(it["function"]),
            *(_ms(it[name]) for name in ("job_ms", "sweep_ms", "default_ms")),
            it["verdict"],
            it["call"],
        )
        for it in verdicts
    ]
    out.line("\n".join(columns(wrapped([titles, *cells], out.width))))
    lost = [it for it in verdicts if it["verdict"] == _LOSES]
    for it in lost:
        out.line(
            f"{printable(it['function'])}({it['call']}) takes {_ms(it['job_ms'])} ms in the job, and the defaults "
            f"{_ms(it['default_ms'])} ms: tune it in its place with quarantune.contextual_autotune, give it a `supply` "
            "that makes arguments like the job's, or measure it with cold caches"
        )
    out.line(f"{counted(len(verdicts), 'winner')} in the profile, {len(lost)} that do not win in their place")
    return not lost, verdicts


def _verdict(row: Row, in_place: Mapping[tuple[str, str], float | None]) -> JsonObject:
    found, job_ms = row.findings, row.time.each_ms
    default_ms = in_place.get(row.work[:2]) or found.default_time_ms
    if found.time_ms == found.default_time_ms:
        verdict = _SAME
    elif job_ms is None or default_ms is None:
        verdict = "unknown"
    else:
        verdict = _LOSES if job_ms > default_ms else _WINS
    times = {"job_ms": job_ms, "sweep_ms": found.time_ms, "default_ms": default_ms}
    return {"function": row.work.name, "call": row.call, **times, "verdict": verdict}


def _ms(time_ms: float | None) -> str:
    return "unknown" if time_ms is None else f"{time_ms:.4g}"
