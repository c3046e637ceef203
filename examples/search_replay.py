"""Compares searches on recorded GPU spaces, without a device: how many trials until the best config is found?

    python examples/search_replay.py                                      # the recordings in examples/spaces
    python examples/search_replay.py my.json.gz cache_dir/matmul.trials   # your recordings, or other tuners'

At the end, one table has a row for each recording. `examples/benchmarks/record_spaces.py` made the recordings in
`examples/spaces` on an NVIDIA H200.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import quarantune
from quarantune import Outcome, Phase, Trial

SPACES = Path(__file__).parent / "spaces"
_MS_PER_UNIT = {
    **dict.fromkeys(("", "ms", "millisecond", "milliseconds", "miliseconds"), 1.0),
    **dict.fromkeys(("s", "second", "seconds"), 1e3),
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1e-3),
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), 1e-6),
}
_ENDS = {
    "correct": (Outcome.OK, Phase.MEASURE),
    "compile": (Outcome.ERROR, Phase.COMPILE),
    "runtime": (Outcome.ERROR, Phase.MEASURE),
    "correctness": (Outcome.WRONG, Phase.CHECK),
    "timeout": (Outcome.TIMEOUT, Phase.MEASURE),
    "Ok": (Outcome.OK, Phase.MEASURE),
    "CompilationFailed": (Outcome.ERROR, Phase.COMPILE),
    "ComputationFailed": (Outcome.ERROR, Phase.MEASURE),
    "DeviceLimitsExceeded": (Outcome.ERROR, Phase.COMPILE),
    "ValidationFailed": (Outcome.WRONG, Phase.CHECK),
}
"""The outcomes of configs, by the words of T4 JSON and KTT."""
_CACHED_ENDS = {
    "CompilationFailedConfig": (Outcome.ERROR, Phase.COMPILE),
    "InvalidConfig": (Outcome.ERROR, Phase.COMPILE),
    "RuntimeFailedConfig": (Outcome.ERROR, Phase.MEASURE),
}
"""The outcomes of configs, by the words of Kernel Tuner's cache files."""


def read(path: Path) -> list[Trial] | Path:
    """Returns the trials of another tuner's file, perhaps compressed; the path of any other recording.

    Args:
        path: a file of T4 JSON, the output of KTT, a cache file of Kernel Tuner, or any input of `quarantune.replay`.

    Raises:
        ValueError: the file is damaged, or from another program.
        OSError: it cannot be read.
    """
    if not path.name.endswith((".json", ".json.gz")):
        return path
    try:
        data = path.read_bytes()
        about = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be decompressed: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    try:
        if isinstance(about, dict) and (trials := _trials(about)) is not None:
            return trials
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    raise ValueError(f"{path} is neither T4 JSON, nor output of KTT, nor a cache file of Kernel Tuner")


def _trials(about: dict[str, Any]) -> list[Trial] | None:
    if "tune_params_keys" in about:
        names, objective = list(about["tune_params_keys"]), str(about.get("objective", "time"))
        return [_cached_trial(row, names, objective) for row in about["cache"].values()]
    if "results" in about:
        unit = str((about.get("metadata") or {}).get("timeunit", ""))
        # Configs that break a constraint were never tried.
        return [_t4_trial(row, unit) for row in about["results"] if row["invalidity"] != "constraints"]
    if "Results" in about:
        unit = str((about.get("Metadata") or {}).get("TimeUnit", ""))
        return [_ktt_trial(row, unit) for row in about["Results"]]
    return None


def _cached_trial(row: dict[str, Any], names: list[str], objective: str) -> Trial:
    config, value = {name: row[name] for name in names}, row[objective]
    if not isinstance(value, (int, float)):
        outcome, phase = _CACHED_ENDS.get(value, (Outcome.ERROR, None))
        return Trial(config=config, outcome=outcome, phase=phase)
    if value < 0 and objective != "time":  # a rate, negated because the smallest value is the best
        value = -1 / value
    if not 0 < value < math.inf:
        raise TypeError(f"the time of {config} is {value}")
    return Trial(config=config, outcome=Outcome.OK, phase=Phase.MEASURE, time_ms=float(value))


def _t4_trial(row: dict[str, Any], unit: str) -> Trial:
    objective = (row.get("objectives") or ["time"])[0]
    measured = {item["name"]: item for item in row.get("measurements") or ()}
    item = measured.get("time") or measured.get(objective) or {}
    return _trial({**row["configuration"]}, row["invalidity"], item.get("value"), item.get("unit") or unit)


def _ktt_trial(row: dict[str, Any], unit: str) -> Trial:
    config = {item["Name"]: item["Value"] for item in row["Configuration"]}
    return _trial(config, row["Status"], row.get("TotalDuration"), unit)


def _trial(config: dict[str, Any], ended: str, value: Any, unit: str) -> Trial:
    outcome, phase = _ENDS.get(ended, (Outcome.ERROR, None))
    time_ms = value * _MS_PER_UNIT[unit.lower()] if outcome is Outcome.OK else None
    return Trial(config=config, outcome=outcome, phase=phase, time_ms=time_ms)


def main() -> None:
    """Prints a table for each recording."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recorded", nargs="*", type=Path, help=f"recordings; by default all in {SPACES}")
    parser.add_argument("--search", help="names of searches, separated by commas")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each search")
    parser.add_argument("--batch", type=int, default=8, help="configs that a search is asked for at a time")
    parser.add_argument("--max-trials", type=int, default=400, help="trials of each run")
    options = parser.parse_args()
    recordings = options.recorded or sorted(SPACES.glob("*.json.gz"))
    if not recordings:
        sys.exit(
            f"there are no recordings in {SPACES}: make them with examples/benchmarks/record_spaces.py, or name some"
        )
    has_optuna = importlib.util.find_spec("optuna") is not None
    searches = options.search.split(",") if options.search else ["surrogate", "random", *["optuna:tpe"] * has_optuna]
    summary = []
    for recorded in recordings:
        result = quarantune.replay(
            read(recorded), searches, seeds=range(options.seeds), max_trials=options.max_trials, batch=options.batch
        )
        print(f"{recorded.name}: {result.table()}\n", flush=True)
        cells = [" / ".join(str(result.evaluations(name, share) or "-") for share in (0.5, 0.9)) for name in searches]
        summary.append([recorded.name.partition(".")[0], f"{result.size:,}", f"{result.invalid:.0%}", *cells])
    print(f"Trials until 50% / 90% of {options.seeds} runs had found a config within 1% of the best:\n")
    header = ["space", "configs", "fail", *searches]
    for row in (header, ["---"] * len(header), *summary):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
