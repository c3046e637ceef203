"""A result in a few words: its repr, its view in a notebook, and its text where it comes from the cache."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from quarantune.results import report
from quarantune.values.shown import format_config
from quarantune.values.trial import Outcome, Trial

if TYPE_CHECKING:
    from quarantune.results.result import TuningResult

_MOST_ROWS = 30
_STYLE = "text-align:left;font-variant-numeric:tabular-nums"


def text(result: TuningResult) -> str:
    """Returns two lines: the winner against the defaults, and the sweep."""
    return f"{type(result).__name__}: {_winner(result)}\n  {_sweep(result)}"


def _winner(result: TuningResult) -> str:
    """Returns the winner with its time and its speed-up."""
    return f"{result.config_text}, {times_text(result)}"


def times_text(result: TuningResult) -> str:
    """Returns the times of the winner and of the defaults as text."""
    return result.findings.text(is_default=result.best_config == result.default_config)


def _sweep(result: TuningResult) -> str:
    """Returns how many configs there were with which outcome, and where the result is from."""
    parts = []
    if result.counts:
        total = sum(result.counts.values())
        of = f" of {result.space_size:,}" if result.space_size is not None and result.space_size > total else ""
        parts.append(f"{total:,}{of} configs: {report.counted(result.counts)}")
    elif result.seen is not None:
        parts.append(f"{result.seen:,} configs")
    if result.tie:
        parts.append(f"{len(result.tie)} tie with the winner")
    parts.append(result.device)
    if result.created:
        parts.append(f"tuned {result.created}")
    if result.from_cache == "nearest":
        parts.append("the config of the nearest call in the cache")
    elif result.from_cache == "default":
        parts.append("not tuned: the function's own defaults")
    elif result.from_cache:
        parts.append("from the cache")
    return "; ".join(parts)


def cached_text(result: TuningResult, *, width: int | None) -> str:
    """Returns the text of a result without trials: its winner, its sweep, and where the trials are.

    Args:
        result: the result.
        width: columns; None for those of the terminal.
    """
    columns = report.terminal_width() if width is None else width
    more = "the cache keeps the winner; tune() tries the configs again"
    lines = [f"* {_winner(result)}", _sweep(result), more]
    return "\n".join(textwrap.fill(line, columns, subsequent_indent="  ") for line in lines)


def winner(result: TuningResult) -> Trial:
    """Returns the winner of a result as a trial."""
    known = None if math.isnan(result.time_ms) else result.time_ms
    return Trial(config=result.best_config, outcome=Outcome.OK, time_ms=known, device=result.device)


def html_text(result: TuningResult) -> str:
    """Returns the result as HTML for a notebook: two lines, and the fastest trials as a table."""
    import html  # needed here only, and no part of the import of this package

    head = "<br>".join(html.escape(line.strip()) for line in text(result).splitlines())
    if not result.trials:
        return f"<div>{head}</div>"
    standing, trials = result.standing, report.by_time(result.trials, result.standing)
    body = []
    for trial in trials[:_MOST_ROWS]:
        cells = [
            "★" if standing.is_best(trial) else "=" if standing.is_tie(trial) else "",
            format_config(trial.config),
            trial.outcome.value,
            report.time_text(trial),
            report.speedup_text(trial, standing),
            report.reason(trial) if trial.outcome is not Outcome.SLOW else "",
        ]
        body.append("".join(f'<td style="{_STYLE}">{html.escape(cell)}</td>' for cell in cells))
    titles = ["", "config", "outcome", "ms", "speed-up", "reason"]
    header = "".join(f'<th scope="col" style="{_STYLE}">{title}</th>' for title in titles)
    rest = len(trials) - _MOST_ROWS
    more = f"<div>and {rest:,} more: see table()</div>" if rest > 0 else ""
    rows = "".join(f"<tr>{row}</tr>" for row in body)
    return f"<div>{head}<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>{more}</div>"
