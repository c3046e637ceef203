"""Reads recorded trials: journals, saved results, and the files of other tuners."""

from __future__ import annotations

import dataclasses
import gzip
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quarantune.cache import content, journal
from quarantune.host import shared_files
from quarantune.results.result import TuningResult
from quarantune.values.config_values import text_of
from quarantune.values.json_object import JsonObject
from quarantune.values.texts import shown
from quarantune.values.trial import Config, Outcome, Phase, Trial

_LARGEST_BYTES = 1 << 30
_NOT_TRIED = (Outcome.PRUNED, Outcome.NOT_RUN, Outcome.LOST)
_MS_PER_UNIT = {
    **dict.fromkeys(("", "ms", "millisecond", "milliseconds", "miliseconds"), 1.0),
    **dict.fromkeys(("s", "second", "seconds"), 1e3),
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1e-3),
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), 1e-6),
}
_T4_OUTCOMES = {
    "correct": (Outcome.OK, Phase.MEASURE),
    "compile": (Outcome.ERROR, Phase.COMPILE),
    "runtime": (Outcome.ERROR, Phase.MEASURE),
    "correctness": (Outcome.WRONG, Phase.CHECK),
    "timeout": (Outcome.TIMEOUT, Phase.MEASURE),
}
_KTT_OUTCOMES = {
    "Ok": (Outcome.OK, Phase.MEASURE),
    "CompilationFailed": (Outcome.ERROR, Phase.COMPILE),
    "ComputationFailed": (Outcome.ERROR, Phase.MEASURE),
    "DeviceLimitsExceeded": (Outcome.ERROR, Phase.COMPILE),
    "ValidationFailed": (Outcome.WRONG, Phase.CHECK),
}


def read(recorded: Any) -> list[Trial]:
    """Returns the trials of one problem, each config once, without those that were never tried.

    Args:
        recorded: a `TuningResult`; trials; the directory of a saved result or of a function's journals
            (`<name>.trials`), one of its files, or a file of JSON, perhaps compressed by gzip: T4 as Kernel Tuner
            writes it, Kernel Tuner's own cache file, or the output of KTT.

    Raises:
        TypeError: it is none of these.
        ValueError: there are no times in it, it is damaged, or a directory holds the journals of several problems.
        OSError: it cannot be read.
    """
    if isinstance(recorded, TuningResult):
        trials, source = list(recorded.trials), "the result"
    elif isinstance(recorded, (str, os.PathLike)):
        trials, source = _read_path(Path(recorded)), str(recorded)
    elif isinstance(recorded, Iterable) and not isinstance(recorded, Mapping):
        trials, source = list(recorded), "the list"
        if odd := [trial for trial in trials if not isinstance(trial, Trial)]:
            raise TypeError(f"recorded holds {shown(odd[0])}, which is no quarantune.Trial")
    else:
        raise TypeError(f"recorded is {shown(recorded)}: give a path, a TuningResult or a list of trials")
    last = {text_of(trial.config): trial for trial in trials if trial.outcome not in _NOT_TRIED}
    if not any(trial.outcome is Outcome.OK and trial.level_ms for trial in last.values()):
        raise ValueError(f"{source} holds no trial that was measured, so there is nothing to search for")
    return [dataclasses.replace(trial, config=_plain(trial.config)) for trial in last.values()]


def _read_path(path: Path) -> list[Trial]:
    if path.is_dir():
        if (path / "result.json").exists():
            return list(TuningResult.load(path).trials)
        return _read_journals(path)
    if path.suffix == ".jsonl":
        return _trials_of([path])
    data = shared_files.read(path, largest_bytes=_LARGEST_BYTES)
    if data[:2] == b"\x1f\x8b":
        data = _unzipped(data, path)
    try:
        about = content.decode(data)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    try:
        match about:
            case {"results": list(rows)}:
                return _from_t4(rows, about)
            case {"Results": list(rows)}:
                return _from_ktt(rows, about)
            case {"cache": dict(rows), "tune_params_keys": list(names)}:
                return [_kernel_tuner_trial(row, names, str(about.get("objective", "time"))) for row in rows.values()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    raise ValueError(f"{path} is neither T4 JSON, nor a cache file of Kernel Tuner, nor the output of KTT")


def _read_journals(directory: Path) -> list[Trial]:
    files: dict[str, list[Path]] = {}
    for file in sorted(directory.glob("*.jsonl")):
        if _trials_of([file]):
            files.setdefault(file.name.partition(".")[0], []).append(file)
    if not files:
        raise ValueError(f"{directory} holds neither a saved result nor a journal of trials")
    if len(files) > 1:
        listed = ", ".join(f"{of[0].name} ({len(_trials_of(of))} trials)" for of in files.values())
        raise ValueError(f"{directory} holds the journals of {len(files)} problems; give the path of one: {listed}")
    return _trials_of(next(iter(files.values())))


def _trials_of(files: Iterable[Path]) -> list[Trial]:
    """Returns the trials of journals; other records, such as those of configs that hung, are left out."""
    records = [record["trial"] for file in files for record in journal.read(file) if "trial" in record]
    try:
        return [Trial.from_json(record) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a journal among {', '.join(map(str, files))} is damaged: {error}") from error


def _unzipped(data: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be decompressed: {error}") from error


def _from_t4(rows: Iterable[JsonObject], about: JsonObject) -> list[Trial]:
    unit = str((about.get("metadata") or {}).get("timeunit", ""))
    trials = []
    for row in rows:
        if row["invalidity"] == "constraints":
            continue  # it was never tried
        outcome = _T4_OUTCOMES.get(row["invalidity"], (Outcome.ERROR, None))
        objective = (row.get("objectives") or ["time"])[0]
        measured = {item["name"]: item for item in row.get("measurements") or ()}
        item = measured.get("time") or measured.get(objective) or {}
        trials.append(_trial(row["configuration"], outcome, item.get("value"), item.get("unit") or unit))
    return trials


def _from_ktt(rows: Iterable[JsonObject], about: JsonObject) -> list[Trial]:
    unit = str((about.get("Metadata") or {}).get("TimeUnit", ""))
    return [
        _trial(
            {item["Name"]: item["Value"] for item in row["Configuration"]},
            _KTT_OUTCOMES.get(row["Status"], (Outcome.ERROR, None)),
            row.get("TotalDuration"),
            unit,
        )
        for row in rows
    ]


def _kernel_tuner_trial(row: JsonObject, names: list[str], objective: str) -> Trial:
    value = row[objective]
    is_number = isinstance(value, (int, float))
    outcome = {"CompilationFailedConfig": "compile", "InvalidConfig": "compile"}.get(value, "runtime")
    if is_number and value < 0 and objective != "time":  # a rate, which is negated because the smallest is the best
        value = -1 / value
    return _trial({name: row[name] for name in names}, _T4_OUTCOMES["correct" if is_number else outcome], value, "")


def _trial(config: Config, ended: tuple[Outcome, Phase | None], value: Any, unit: str) -> Trial:
    outcome, phase = ended
    if unit.lower() not in _MS_PER_UNIT:
        raise TypeError(f"the unit of time is {unit!r}")
    if outcome is not Outcome.OK:
        return Trial(config=config, outcome=outcome, phase=phase)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise TypeError(f"the time of {shown(config)} is {shown(value)}")
    return Trial(config=config, outcome=outcome, phase=phase, time_ms=value * _MS_PER_UNIT[unit.lower()])


def _plain(config: Config) -> Config:
    """Returns a config with text in place of values that JSON holds with the name of their class."""
    return {
        name: text_of(value) if isinstance(value, Mapping) and any(key.startswith("$") for key in value) else value
        for name, value in config.items()
    }
