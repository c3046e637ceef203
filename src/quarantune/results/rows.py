"""Trials as rows of plain values: dicts, CSV, a data frame."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from quarantune.results.standing import Standing
from quarantune.values.config_values import encode
from quarantune.values.trial import Trial

Row: TypeAlias = dict[str, Any]


def to_dicts(trials: Sequence[Trial], standing: Standing) -> list[Row]:
    """Returns a flat dict for each trial; all have the same keys.

    Args:
        trials: the trials.
        standing: their standing.
    """
    parts = [_fields(trial, standing) for trial in trials]
    own = parts[0].keys() if parts else frozenset()
    names = list(dict.fromkeys(name for trial in trials for name in trial.config))
    columns = {name: f"config.{name}" if name in own else name for name in names}
    return [
        {column: encode(trial.config[name]) if name in trial.config else None for name, column in columns.items()}
        | part
        for trial, part in zip(trials, parts, strict=True)
    ]


def _fields(trial: Trial, standing: Standing) -> Row:
    return {
        "outcome": trial.outcome.value,
        "phase": None if trial.phase is None else trial.phase.value,
        "time_ms": trial.time_ms,
        "speedup": standing.speedup(trial),
        "is_finalist": standing.is_finalist(trial),
        "is_best": standing.is_best(trial),
        "is_tie": standing.is_tie(trial),
        "is_default": standing.is_default(trial),
        "samples_ms": list(trial.samples_ms),
        "own_ms": trial.own_ms,
        "compile_s": trial.compile_s,
        "peak_memory_bytes": trial.peak_memory_bytes,
        "device": trial.device,
        "clock": trial.clock,
        "route": None if trial.route is None else trial.route.value,
        "ended_s": trial.ended_s,
        "message": trial.message,
        "log_tail": trial.log_tail,
    }


def to_csv(rows: Sequence[Row]) -> bytes:
    """Returns rows as CSV in UTF-8, with a header; a value that is no scalar is JSON, None is empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["outcome"])
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, (Mapping, list, tuple, bool)) else value


def to_dataframe(rows: Sequence[Row]) -> Any:
    """Returns rows as a `pandas.DataFrame`.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_dataframe needs pandas: pip install pandas, or use to_dicts() or to_csv(path)") from error
    return pandas.DataFrame(rows)
