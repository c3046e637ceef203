"""What people look at: tables of trials, and the message when every config failed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quarantune.outcomes import Config, Outcome, Trial

_WIDTH = 80
_REASON_ROWS = 20


def format_config(config: Config) -> str:
    """Returns a config on one line, as `BM=32 BN=64`."""
    return " ".join(f"{name}={_short(value)}" for name, value in config.items())


def table(trials: Sequence[Trial], *, best: Config | None = None, width: int = _WIDTH) -> str:
    """Returns trials as a table that fits `width` columns: config, outcome, time, and why it failed.

    Args:
        trials: in the order to show.
        best: the config to mark with a star.
        width: columns.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.config))
    header = ["", *names, "outcome", "ms", "compile s"]
    rows = [
        [
            "*" if best is not None and trial.config == best else "",
            *(_short(trial.config.get(name)) for name in names),
            trial.outcome.value,
            "" if trial.time_ms is None else f"{trial.time_ms:.4g}",
            "" if trial.compile_s is None else f"{trial.compile_s:.2f}",
        ]
        for trial in trials
    ]
    if sum(max(map(len, column)) + 2 for column in zip(header, *rows, strict=True)) > width:
        header = ["", "config", "outcome", "ms", "compile s"]
        rows = [[row[0], format_config(trial.config), *row[-3:]] for row, trial in zip(rows, trials, strict=True)]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    if (over := sum(widths) + 2 * len(widths) - width) > 0:
        widths[1] = max(8, widths[1] - over)
    lines = [_line(header, widths, "")]
    lines += [_line(row, widths, _reason(trial)) for row, trial in zip(rows, trials, strict=True)]
    return "\n".join(_cut(line, width).rstrip() for line in lines)


def failure_message(name: str, trials: Sequence[Trial]) -> str:
    """Returns the message for a sweep in which no config was usable."""
    tried = [trial for trial in trials if trial.outcome is not Outcome.PRUNED]
    if not tried:
        return (
            f"{name}: prune_fn dropped all {len(trials)} configs, so there is nothing to run; "
            f"let it keep at least one, or add configs that it accepts"
        )
    lines = [f"All {len(trials)} configs failed for {name}:"]
    for trial in trials[:_REASON_ROWS]:
        phase = f" ({trial.phase.value})" if trial.phase is not None else ""
        reason = " ".join(trial.message.split())
        lines.append(f"  {format_config(trial.config)}: {trial.outcome.value}{phase} {_cut(reason, 200)}".rstrip())
    if len(trials) > _REASON_ROWS:
        lines.append(f"  ... and {len(trials) - _REASON_ROWS} more")
    if log := next((trial.log_tail for trial in trials if trial.log_tail.strip()), ""):
        lines += ["The first one's last output:", *(f"  | {line}" for line in log.splitlines()[-12:])]
    return "\n".join(lines)


def _short(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return json.dumps(value, separators=(",", ":"))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _reason(trial: Trial) -> str:
    return " ".join(trial.message.split())


def _line(cells: Sequence[str], widths: Sequence[int], reason: str) -> str:
    padded = [
        _cut(cell, width).ljust(width) if index < 2 or index < len(cells) - 2 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join([*padded, reason])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
