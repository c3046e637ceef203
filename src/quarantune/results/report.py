"""Tables of trials, and the message for a sweep in which every config failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quarantune.values.shown import format_config, format_value
from quarantune.values.texts import printable
from quarantune.values.trial import Config, Outcome, Trial

_WIDTH = 80
_REASON_ROWS = 20


def table(
    trials: Sequence[Trial],
    *,
    best: Config | None = None,
    width: int = _WIDTH,
    flops: float | None = None,
    moved_bytes: float | None = None,
    figures: Mapping[str, Callable[[Trial], str]] | None = None,
) -> str:
    """Returns trials as a table that fits `width` columns: config, outcome, time, and reason for a failure.

    Args:
        trials: the trials, in the order of the rows.
        best: the config to mark with a star.
        width: columns.
        flops: floating-point operations of one call, for a column of TFLOP/s.
        moved_bytes: bytes that one call must move, for a column of GB/s.
        figures: the columns of numbers by their headings; None for the times and rates of a sweep.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.config))
    figures = figures if figures is not None else _figures(flops, moved_bytes)
    header = ["", *map(printable, names), "outcome", *figures]
    rows = [
        [
            "*" if best is not None and trial.config == best else "",
            *(format_value(trial.config.get(name)) for name in names),
            trial.outcome.value,
            *(figure(trial) for figure in figures.values()),
        ]
        for trial in trials
    ]
    if sum(max(map(len, column)) + 2 for column in zip(header, *rows, strict=True)) > width:
        tail = len(figures) + 1
        header = ["", "config", "outcome", *figures]
        rows = [[row[0], format_config(trial.config), *row[-tail:]] for row, trial in zip(rows, trials, strict=True)]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    if (over := sum(widths) + 2 * len(widths) - width) > 0:
        widths[1] = max(8, widths[1] - over)
    lines = [_line(header, widths, "", len(figures))]
    lines += [_line(row, widths, _reason(trial), len(figures)) for row, trial in zip(rows, trials, strict=True)]
    return "\n".join(_cut(line, width).rstrip() for line in lines)


def _figures(flops: float | None, moved_bytes: float | None) -> dict[str, Callable[[Trial], str]]:
    """Returns the table's columns of numbers, by their headings."""

    def rate(amount: float, unit: float) -> Callable[[Trial], str]:
        return lambda trial: f"{amount / (1e-3 * trial.time_ms) / unit:.4g}" if trial.time_ms else ""

    figures: dict[str, Callable[[Trial], str]] = {
        "ms": lambda trial: "" if trial.time_ms is None else f"{trial.time_ms:.4g}",
        "compile s": lambda trial: "" if trial.compile_s is None else f"{trial.compile_s:.2f}",
    }
    if flops is not None:
        figures["TFLOP/s"] = rate(flops, 1e12)
    if moved_bytes is not None:
        figures["GB/s"] = rate(moved_bytes, 1e9)
    return figures


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
        lines.append(
            f"  {format_config(trial.config)}: {trial.outcome.value}{phase} {_cut(_reason(trial), 200)}".rstrip()
        )
    if len(trials) > _REASON_ROWS:
        lines.append(f"  ... and {len(trials) - _REASON_ROWS} more")
    if log := next((trial.log_tail for trial in trials if trial.log_tail.strip()), ""):
        lines += ["The first one's last output:", *(f"  | {printable(line)}" for line in log.splitlines()[-12:])]
    return "\n".join(lines)


def _reason(trial: Trial) -> str:
    return printable(" ".join(trial.message.split()))


def _line(cells: Sequence[str], widths: Sequence[int], reason: str, figures: int) -> str:
    padded = [
        cell.rjust(width) if index >= len(cells) - figures else _cut(cell, width).ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join([*padded, reason])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
