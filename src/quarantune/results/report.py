"""Tables of trials, and the message for a sweep in which every config failed."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from quarantune.results.standing import Standing, explain
from quarantune.values.findings import ratio_text
from quarantune.values.shown import format_config, format_value
from quarantune.values.texts import printable
from quarantune.values.trial import Outcome, Trial

_REASON_ROWS = 20
_MOST_REASON_CHARS = 1500
_LEAST_CONFIG_WIDTH = 16
_COMPILE_HEADING = "compile s"
_OWN_LINE = re.compile(r"^  (\S.*):(\d+), in ", re.MULTILINE)
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d[\d.,]*")
_GAP = "  "
_NO_STANDING = Standing()

Figures = Mapping[str, Callable[[Trial], str]]


def table(
    trials: Sequence[Trial],
    *,
    standing: Standing = _NO_STANDING,
    width: int | None = None,
    flops: float | None = None,
    moved_bytes: float | None = None,
    figures: Figures | None = None,
) -> str:
    """Returns trials as a table, the fastest first, with notes below it.

    The notes say why the winner won, and why configs failed; one note covers all configs with the same reason.

    Args:
        trials: the trials.
        standing: the winner, which gets a star, its ties and the defaults.
        width: columns; None for those of the terminal, 120 where there is none.
        flops: floating-point operations of one call, for a column of TFLOP/s.
        moved_bytes: bytes that one call must move, for a column of GB/s.
        figures: the columns of numbers by their headings; None for the times and rates of a sweep, sorted by time.
    """
    width = terminal_width() if width is None else width
    ordered = list(trials) if figures is not None else by_time(trials, standing)
    figures = _figures(standing, flops, moved_bytes) if figures is None else figures
    reasons = _Reasons(ordered)
    lines = _grid(ordered, standing, figures, reasons, width)
    notes = [_wrapped(note, "  ", width) for note in map(printable, explain(ordered, standing))]
    notes += [_wrapped(note, "    ", width) for note in reasons.notes()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def terminal_width() -> int:
    """Returns the columns of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def by_time(trials: Iterable[Trial], standing: Standing) -> list[Trial]:
    """Returns the finalists in the order of their times, then the others so, then those without one, by outcome."""
    outcomes = list(Outcome)

    def rank(trial: Trial) -> tuple[bool, bool, float, int]:
        time_ms = shown_ms(trial)
        is_other, place = not standing.is_finalist(trial), outcomes.index(trial.outcome) if time_ms is None else 0
        return (time_ms is None, is_other, time_ms or 0.0, place)

    return sorted(trials, key=rank)


def shown_ms(trial: Trial) -> float | None:
    """Returns the time of a trial in milliseconds; for one that was stopped early, the time of its fastest run."""
    return trial.level_ms if trial.outcome is Outcome.SLOW else trial.time_ms


def time_text(trial: Trial) -> str:
    """Returns the time of a trial as a table shows it, as `> 23.8` for one that was stopped early."""
    time_ms = shown_ms(trial)
    return "" if time_ms is None else f"{'> ' if trial.outcome is Outcome.SLOW else ''}{time_ms:.4g}"


def speedup_text(trial: Trial, standing: Standing) -> str:
    """Returns the speed-up of a trial as a table shows it."""
    speedup = standing.speedup(trial)
    return "defaults" if standing.is_default(trial) else "" if speedup is None else ratio_text(speedup)


def _figures(standing: Standing, flops: float | None, moved_bytes: float | None) -> Figures:
    """Returns the table's columns of numbers, by their headings."""

    def rate(amount: float, unit: float) -> Callable[[Trial], str]:
        return lambda trial: (
            f"{amount / (1e-3 * trial.time_ms) / unit:.4g}" if trial.time_ms and trial.outcome is Outcome.OK else ""
        )

    figures: dict[str, Callable[[Trial], str]] = {"ms": time_text}
    if standing.default_ms is not None or standing.default is not None:
        figures["speed-up"] = lambda trial: speedup_text(trial, standing)
    figures[_COMPILE_HEADING] = lambda trial: "" if trial.compile_s is None else f"{trial.compile_s:.2f}"
    if flops is not None:
        figures["TFLOP/s"] = rate(flops, 1e12)
    if moved_bytes is not None:
        figures["GB/s"] = rate(moved_bytes, 1e9)
    return figures


class _Reasons:
    """The messages of trials, numbered; those that differ in nothing but numbers share one."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._groups: dict[tuple[Outcome, object, str], list[Trial]] = {}
        for trial in trials:
            if (key := self._key(trial)) is not None:
                self._groups.setdefault(key, []).append(trial)
        self._numbers = {key: number for number, key in enumerate(self._groups, 1)}

    @staticmethod
    def _key(trial: Trial) -> tuple[Outcome, object, str] | None:
        message = reason(trial)
        is_told = message and trial.outcome is not Outcome.SLOW
        return (trial.outcome, trial.phase, _NUMBER.sub("#", message)) if is_told else None

    def mark(self, trial: Trial) -> str:
        """Returns the reference to a trial's reason, as ` [1]`; empty where it has none."""
        key = self._key(trial)
        return "" if key is None else f" [{self._numbers[key]}]"

    def groups(self) -> Iterable[tuple[tuple[Outcome, object, str], list[Trial]]]:
        """Returns the trials of each reason, in the order of the first ones."""
        return self._groups.items()

    def notes(self) -> Iterable[str]:
        """Yields the reasons."""
        for key, trials in self.groups():
            outcome, phase, _ = key
            where = f" ({phase})" if phase is not None else ""
            messages = list(dict.fromkeys(map(reason, trials)))
            how_many = f", {len(trials)} configs" if len(trials) > 1 else ""
            first = f", for {format_config(trials[0].config)}" if len(messages) > 1 else ""
            text = _cut(messages[0], _MOST_REASON_CHARS)
            yield f"[{self._numbers[key]}] {outcome.value}{where}{how_many}{first}: {text}{_place(trials[0])}"


def _grid(trials: Sequence[Trial], standing: Standing, figures: Figures, reasons: _Reasons, width: int) -> list[str]:
    """Returns the lines of the table itself: a column for each tunable, or one for all where the width demands it."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.config))
    figures = dict(figures)
    tunables = [
        [format_value(trial.config[name]) if name in trial.config else "" for name in names] for trial in trials
    ]
    titles = [printable(name) for name in names]
    while True:
        ends = [[f"{trial.outcome.value}{reasons.mark(trial)}", *(figure(trial) for figure in figures.values())]
                for trial in trials]  # fmt: skip
        header = ["", *titles, "outcome", *figures]
        marks = ["*" if standing.is_best(trial) else "=" if standing.is_tie(trial) else "" for trial in trials]
        rows = [[mark, *config, *end] for mark, config, end in zip(marks, tunables, ends, strict=True)]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
        if over <= 0:
            break
        if len(titles) != 1 or titles != ["config"]:
            titles, tunables = ["config"], [[format_config(trial.config)] for trial in trials]
        elif figures.pop(_COMPILE_HEADING, None) is None or widths[1] - over >= _LEAST_CONFIG_WIDTH:
            widths[1] = max(_LEAST_CONFIG_WIDTH, widths[1] - over)
            break
    return [line for cells in [header, *rows] for line in _lines(cells, widths, len(figures))]


def _lines(cells: Sequence[str], widths: Sequence[int], figures: int) -> list[str]:
    """Returns a row's lines; a config that is too long for its column goes on in the next line."""
    parts = [textwrap.wrap(cell, width) or [""] if len(cell) > width else [cell]
             for cell, width in zip(cells, widths, strict=True)]  # fmt: skip
    lines = []
    for number in range(max(map(len, parts))):
        at = [part[number] if number < len(part) else "" for part in parts]
        padded = [
            cell.rjust(width) if index >= len(cells) - figures else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(at, widths, strict=True))
        ]
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _wrapped(note: str, indent: str, width: int) -> str:
    return textwrap.fill(note, max(width, 2 * len(indent)), subsequent_indent=indent)


def failure_message(name: str, trials: Sequence[Trial]) -> str:
    """Returns the message for a sweep in which no config was usable."""
    tried = [trial for trial in trials if trial.outcome is not Outcome.PRUNED]
    if not trials:
        return (
            f"{name}: the search asked for no config, so nothing has run: prune_fn may drop all; "
            f"let it keep at least one, or search in another way"
        )
    if not tried:
        return (
            f"{name}: prune_fn dropped all {len(trials)} configs, so there is nothing to run; "
            f"let it keep at least one, or add configs that it accepts"
        )
    lines = [f"All {len(trials)} configs failed for {name}:"]
    alike = [trials for _, trials in _Reasons(trials).groups()]
    for first, *others in alike[:_REASON_ROWS]:
        phase = f" ({first.phase.value})" if first.phase is not None else ""
        more = f" and {len(others)} more" if others else ""
        text = f"{first.outcome.value}{phase} {_cut(reason(first), 400)}".rstrip()
        lines.append(f"  {format_config(first.config)}{more}: {text}{_place(first)}")
    if len(alike) > _REASON_ROWS:
        lines.append(f"  ... and {len(alike) - _REASON_ROWS} other reasons")
    if log := next((trial.log_tail for trial in trials if trial.log_tail.strip()), ""):
        lines += ["The first one's last output:", *(f"  | {printable(line)}" for line in log.splitlines()[-12:])]
    return "\n".join(lines)


def counted(counts: Mapping[str, int]) -> str:
    """Returns numbers of outcomes as text, as `40 ok, 3 error`."""
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def reason(trial: Trial) -> str:
    """Returns the message of a trial on one line that any terminal can show."""
    return printable(" ".join(trial.message.split()))


def _place(trial: Trial) -> str:
    """Returns the line of the author's own files where an exception was raised, as its log tells it."""
    found = _OWN_LINE.search(trial.log_tail) if trial.outcome is Outcome.ERROR else None
    return f" ({os.path.basename(found[1])}:{found[2]})" if found else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
