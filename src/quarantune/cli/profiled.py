"""A job's profile as the command line shows it: the device time of tuned calls, and winners in their place."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quarantune.answers.layers import open_store
from quarantune.answers.recording import RecordedCall
from quarantune.cache import entries
from quarantune.cache.entry_file import Entry
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


class CallRow(NamedTuple):
    """A tuned call in a profile, with all that is known of it.

    Attributes:
        work: its names in the profile.
        time: its device time.
        entry: the newest saved result of the call, or the one that the job ran; empty without one.
        recorded: its record; None without one.
    """

    work: TunedWork
    time: WorkTime
    entry: Entry
    recorded: RecordedCall | None

    @property
    def runs_winner(self) -> bool:
        """Whether the job ran the saved config."""
        return bool(self.entry) and config_id(self.entry.get("config")) == self.work.config

    @property
    def call(self) -> str:
        """The call as text; its id if neither the cache nor a record knows it."""
        known = self.entry.get("key_values") or (self.recorded and self.recorded.readable)
        return call_text(known) if known else f"call {self.work.call}"

    def to_dict(self, total_ms: float) -> JsonObject:
        """Returns the row as JSON."""
        found, config = Findings.from_json(self.entry), self.entry.get("config")
        origin = f"config {self.work.config}, of an earlier result or another cache"
        if self.work.config == _DEFAULTS:
            origin = "the defaults, not tuned"
        elif self.runs_winner:
            text = format_config(config) if isinstance(config, dict) else str(config)
            origin = f"{text}, {'estimated' if found.is_estimate else 'saved'}"
        gain = "neither saved nor recorded" if self.recorded is None else "recorded, to be tuned"
        if self.entry:
            ratio = f"{found.default_time_ms / found.time_ms:.3g}x" if found.default_time_ms else "unknown"
            gain = f"has {ratio}" if self.runs_winner else f"{ratio} with the saved result"
        return {
            "function": printable(self.work.name),
            "time_ms": self.time.time_ms,
            "share": self.time.time_ms / total_ms if total_ms else 0.0,
            "gain": gain,
            "origin": origin,
            "call": self.call,
            "calls": self.time.calls or None,
            "each_ms": self.time.each_ms,
        }


class JobProfile(NamedTuple):
    """A job's profile, with the tuned calls in the order of their device time."""

    time: JobTime
    rows: Sequence[CallRow]

    def to_tune(self) -> list[RecordedCall]:
        """Returns the recorded calls in the profile, in the order of their device time."""
        return [*{call.identity: call for row in self.rows if (call := row.recorded)}.values()]

    def show(self, out: Output) -> JsonObject:
        """Prints the table of tuned calls, and below it the rest by category; returns both as JSON."""
        total_ms = self.time.total_ms
        calls = [row.to_dict(total_ms) for row in self.rows]
        out.line(f"{total_ms:.4g} ms of device time in the profile")
        rows = [
            (it["function"], f"{it['time_ms']:.4g}", f"{it['share']:.1%}", it["gain"], it["origin"], it["call"])
            for it in calls
        ]
        if rows:
            titles = ("function", "ms", "share", "known gain", "config", "call")
            out.line("\n".join(columns(wrapped([titles, *rows], out.width))))
        else:
            out.line("no tuned call is in it: they have names if QUARANTUNE_PROFILE_SCOPES was on when JAX traced them")
        rest = [(printable(name), f"{ms:.4g}", f"{ms / total_ms:.1%}") for name, ms in self.time.rest_ms.items() if ms]
        out.line("\n" + "\n".join(columns([("where the rest goes", "ms", "share"), *rest])))
        return {"total_ms": total_ms, "calls": calls, "rest_ms": dict(self.time.rest_ms)}


def read(path: str, settings: Settings, calls: Sequence[RecordedCall] = ()) -> JobProfile:
    """Reads a job's profile, and finds its calls in the cache and among recorded calls.

    Raises:
        InputError: There is no whole profile, or it has no device time.
    """
    with input_errors(ValueError):
        time = job_time(read_file(Path(os.path.expanduser(path))))
    others = [Store(directory, read_only=True) for directory in settings.read_directories if directory.is_dir()]
    saved: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    for (name, _, device), entry in itertools.chain.from_iterable(
        map(entries.records, [open_store(settings), *others])
    ):
        saved[name, call_id(name, device, entry.get("key_values"))].append(entry)
    names = [(safe_name(call.name), call) for call in calls]
    met = {(name, call_id(name, call.device, call.readable)): call for name, call in names}

    def row(work: TunedWork, spent: WorkTime) -> CallRow:
        # Of results for several versions of the code, the one that the job ran counts, else the newest.
        known = saved[work[:2]]
        ran = [entry for entry in known if config_id(entry.get("config")) == work.config]
        entry = max(ran or known, key=lambda entry: str(entry.get("created", "")), default={})
        return CallRow(work, spent, entry, met.get(work[:2]))

    return JobProfile(time, sorted((row(*each) for each in time.tuned.items()), key=lambda it: -it.time.time_ms))


def verify(path: str, settings: Settings, out: Output) -> tuple[bool, list[JsonObject]]:
    """Compares the time of each winner in a job with its times in the sweep.

    Returns:
        Whether all winners that the profile shows win in their place too, and the verdicts as JSON.

    Raises:
        InputError: There is no whole profile, or none of its calls ran a saved config.
    """
    job = read(path, settings)
    in_place = {row.work[:2]: row.time.each_ms for row in job.rows if row.work.config == _DEFAULTS}
    verdicts = [_verdict(row, in_place.get(row.work[:2])) for row in job.rows if row.runs_winner]
    if not verdicts:
        raise InputError(
            f"no call in {path!r} ran a saved config: profile the job after tuning, with the same QUARANTUNE_CACHE_DIR"
        )
    titles = ("function", "in the job ms", "in the sweep ms", "defaults ms", "verdict", "call")
    cells = [[f"{it:.4g}" if isinstance(it, float) else it or "unknown" for it in each.values()] for each in verdicts]
    out.line("\n".join(columns(wrapped([titles, *cells], out.width))))
    lost = [it for it in verdicts if it["verdict"] == _LOSES]
    for it in lost:
        out.line(
            f"{it['function']}({it['call']}) takes {it['job_ms']:.4g} ms in the job, and the defaults "
            f"{it['default_ms']:.4g} ms: tune it in its place with quarantune.contextual_autotune, give it a `supply` "
            "that makes arguments like the job's, or measure it with cold caches"
        )
    out.line(f"{counted(len(verdicts), 'winner')} in the profile, {len(lost)} that do not win in their place")
    return not lost, verdicts


def _verdict(row: CallRow, default_in_place_ms: float | None) -> JsonObject:
    found, job_ms = Findings.from_json(row.entry), row.time.each_ms
    default_ms = default_in_place_ms or found.default_time_ms
    verdict = "unknown" if job_ms is None or default_ms is None else _LOSES if job_ms > default_ms else _WINS
    if found.time_ms == found.default_time_ms:
        verdict = _SAME
    times = {"job_ms": job_ms, "sweep_ms": found.time_ms, "default_ms": default_ms}
    return {"function": printable(row.work.name), **times, "verdict": verdict, "call": row.call}
