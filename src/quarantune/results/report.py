"""Tables of trials, and the message for a sweep whose configs all failed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from quarantune import device_table
from quarantune.measure import observing
from quarantune.results import times
from quarantune.results.report_data import PlainResult
from quarantune.values.codec import JsonObject, as_json, equal, text_of
from quarantune.values.configs import Config, ConfigValue, format_config, format_value
from quarantune.values.errors import TuningFailedError
from quarantune.values.texts import cut, printable, shown
from quarantune.values.trial import (
    ENERGY,
    NO_FIGURES,
    SAME_PROGRAM,
    TIME,
    Outcome,
    Trial,
    count_outcomes,
    interval_text,
    ranked_by,
    ratio_text,
)

if TYPE_CHECKING:
    from quarantune.devices.targets import Target

_REASON_ROWS = 20
_ALL_ROWS, _SHORT_ROWS = 40, 20
"""The most configs of which a table shows all by default, and its rows with more of them."""
_MOST_REASON_CHARS = 1500
_LEAST_CONFIG_WIDTH = 16
_COMPILE_HEADING, _OVER = "compile s", ("over VMEM", "over shared memory")
_DISPENSABLE = (_COMPILE_HEADING, "device MiB", "temp MiB", "GFLOP", *_OVER)
"""The columns of numbers that a narrow table leaves out, in this order."""
_OWN_LINE = re.compile(r"^  (\S.*):(\d+), in ", re.MULTILINE)
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d[\d.,]*")
_GAP = "  "
UNSET: JsonObject = {"$unset": None}
"""Stands for the value of a key that a config lacks; the function's default then holds."""
Figures: TypeAlias = Mapping[str, Sequence[str]]
"""Columns of numbers as texts, by heading."""
_MOST_NAMED = 4
_WHY = {
    "total": "has the least total time over the calls below",
    "worst": "is never far behind the best for any of the calls below",
}


def table(
    result: PlainResult,
    trials: Sequence[Trial],
    *,
    width: int | None = None,
    rows: int | None = None,
    flops: float | None = None,
    moved_bytes: float | None = None,
) -> str:
    """Returns trials of a result as a table, with notes below it.

    The notes say why the winner won, and why configs failed; one note covers all configs with the same reason.

    Args:
        result: the result, whose winner gets a star.
        trials: its trials, in the order of the rows.
        width: columns, as far as the texts can be broken; None for the width of the terminal, 120 without one.
        rows: the most rows; a line tells of the others. None for all of up to 40 configs, and the first 20 of more.
        flops: floating-point operations of one call, for a column of TFLOP/s.
        moved_bytes: bytes that one call must move, for a column of GB/s.

    Raises:
        TypeError: `width` or `rows` is not a whole number.
    """
    marks = ["*" if result.is_best(trial) else "=" if result.is_tie(trial) else "" for trial in trials]
    figures = _figures(trials, result, flops, moved_bytes)
    return _with_notes(trials, marks, figures, columns_for(width), explain(trials, result), rows=rows_of(trials, rows))


def rows_of(trials: Sequence[Trial], rows: int | None) -> int:
    """Returns the number of rows of a table of trials, at least 1; None means all of up to 40, and 20 of more.

    Raises:
        TypeError: the number is not a whole number.
    """
    try:
        few = len(trials) if len(trials) <= _ALL_ROWS else _SHORT_ROWS
        return few if rows is None else max(operator.index(rows), 1)
    except TypeError:
        raise TypeError(f"rows is {shown(rows)}: give a whole number of rows, or None for a short table") from None


def _with_notes(
    trials: Sequence[Trial],
    marks: Sequence[str],
    figures: Figures,
    width: int,
    notes: Iterable[str] = (),
    rows: int = sys.maxsize,
) -> str:
    """Returns a table of trials; the rows left out, notes, and the reasons of all failures follow below it."""
    alike = _alike(trials)
    if left := trials[rows:]:
        ends = ", ".join(f"{count:,} {outcome}" for outcome, count in count_outcomes(left).items())
        notes = [f"and {len(left):,} more ({ends}): rows={len(trials)} shows all", *notes]
        figures = {heading: cells[:rows] for heading, cells in figures.items()}
        trials, marks = trials[:rows], marks[:rows]
    below = [_wrapped(note, "  ", width) for note in map(printable, notes)]
    below += [_wrapped(note, "    ", width) for note in itertools.starmap(_note, enumerate(alike, 1))]
    return "\n".join([*_grid(trials, marks, figures, alike, width), *([""] if below else []), *below])


def columns_for(width: int | None) -> int:
    """Returns the columns that a table may fill, at least 1; None means the width of the terminal, 120 without one.

    Raises:
        TypeError: the width is not a whole number.
    """
    try:
        return shutil.get_terminal_size((120, 24)).columns if width is None else max(operator.index(width), 1)
    except TypeError:
        raise TypeError(f"width is {shown(width)}: give a whole number of columns, or None for the terminal") from None


def _figures(trials: Sequence[Trial], result: PlainResult, flops: float | None, moved_bytes: float | None) -> Figures:
    """Returns the table's columns of numbers, by heading; device memory has a column if it differs."""
    figures = {"ms": [times.text_of_time(trial) for trial in trials]}
    if any(trial.is_ruled_out for trial in trials):
        figures["cheap ms"] = [_number(trial.cheap_ms) for trial in trials]
    figures |= {heading: list(map(_number, values)) for heading, _, values in beside_time(trials).values()}
    if result.default_time_ms is not None or result.default_config is not None:
        figures["speed-up"] = [_speedup_text(trial, result) for trial in trials]
    if any(trial.compile_s is not None for trial in trials):
        figures[_COMPILE_HEADING] = [_number(trial.compile_s, form=".2f") for trial in trials]
    if len({trial.device_memory_bytes for trial in trials} - {None}) > 1:
        figures["device MiB"] = [_number(trial.device_memory_bytes or None, 1 << 20) for trial in trials]
    for name in ("bits", "batch"):
        if len({getattr(trial, name) for trial in trials} - {None}) > 1:
            figures[name] = [getattr(trial, name) or "" for trial in trials]
    for heading, amount in (("TFLOP/s", flops and flops / 1e12), ("GB/s", moved_bytes and moved_bytes / 1e9)):
        if amount is not None:
            known = [trial.time_ms if trial.outcome is Outcome.OK else None for trial in trials]
            figures[heading] = [_number(amount / (1e-3 * time_ms) if time_ms else None) for time_ms in known]
    return figures


def _speedup_text(trial: Trial, result: PlainResult) -> str:
    speedup = result.speedup_of(trial)
    return "defaults" if result.is_default(trial) else "" if speedup is None else ratio_text(speedup)


def _number(value: float | None, unit: float = 1, form: str = ".4g") -> str:
    return "" if value is None else format(value / unit, form)


def _numbers(values: Sequence[float | None], unit: float = 1, form: str = ".4g") -> list[str]:
    """Returns a column of numbers; empty if all are zero or unknown."""
    return [_number(value, unit, form) for value in values] if any(values) else []


def beside_time(trials: Sequence[Trial]) -> dict[str, tuple[str, str, list[float | None]]]:
    """Returns figures other than times that some trial has: by name a heading, a sentence, and each trial's value."""
    about = dict(figure for name in observing.OBSERVERS for figure in observing.named(name).FIELDS.items())
    if any(ranked_by(trial) not in (TIME, ENERGY) for trial in trials):  # a score by energy is already in a column
        about["score"] = "objective", "the value of the author's objective"
    columns = {name: [getattr(trial, name, trial.observed.get(name)) for trial in trials] for name in about}
    return {name: (*about[name], values) for name, values in columns.items() if values.count(None) < len(values)}


def _alike(trials: Iterable[Trial]) -> list[list[Trial]]:
    """Groups the trials that have a reason by it; messages that differ only in numbers are one reason."""
    groups: dict[tuple[object, ...], list[Trial]] = {}
    trials = list(trials)
    # A reason that configs share because their program is the same is told once, without the name of the other config.
    own = {_reason(trial) for trial in trials if not trial.message.startswith(SAME_PROGRAM)} - {""}
    for trial in trials:
        if (message := _reason(trial)) and (trial.outcome is not Outcome.SLOW or trial.is_ruled_out):
            if message.startswith(SAME_PROGRAM):
                message = next((reason for reason in own if message.endswith(f": {reason}")), message)
            groups.setdefault((trial.outcome, trial.phase, _NUMBER.sub("#", message)), []).append(trial)
    return [sorted(group, key=lambda trial: trial.message.startswith(SAME_PROGRAM)) for group in groups.values()]


def _note(number: int, alike: Sequence[Trial]) -> str:
    """Returns the note on trials with the same reason."""
    one = alike[0]
    how_many = f", {len(alike)} configs" if len(alike) > 1 else ""
    reasons = {_reason(trial) for trial in alike if not trial.message.startswith(SAME_PROGRAM)}
    first = f", for {format_config(one.config)}" if len(reasons) > 1 else ""
    text = cut(_reason(one), _MOST_REASON_CHARS)
    return f"[{number}] {_ending(one)}{how_many}{first}: {text}{_place(one)}"


def _ending(trial: Trial) -> str:
    """Returns the outcome of a trial and its phase."""
    return f"{trial.outcome.value}{f' ({trial.phase.value})' if trial.phase is not None else ''}"


def _grid(
    trials: Sequence[Trial], marks: Sequence[str], figures: Figures, alike: Sequence[Sequence[Trial]], width: int
) -> list[str]:
    """Returns the lines of the table itself: tunables with one value in a line above it, the others in columns.

    In a narrow table each row takes several lines, and several tunables share a column.
    """
    notes = {id(trial): f" [{number}]" for number, group in enumerate(alike, 1) for trial in group}
    names = list(dict.fromkeys(name for trial in trials for name in trial.config))
    values = {name: column_text([trial.config.get(name, UNSET) for trial in trials], "") for name in names}
    same = [name for name in names if len(trials) > 1 and len(set(values[name])) == 1]
    above = [_wrapped(f"all: {' '.join(f'{printable(name)}={values[name][0]}' for name in same)}", "  ", width)]
    varied = [[printable(name), *values[name]] for name in names if name not in same]
    outcomes = ["outcome", *(f"{trial.outcome.value}{notes.get(id(trial), '')}" for trial in trials)]
    sizes = {heading: _width(cells) for heading, cells in figures.items()}
    for per_row, dropped, is_broken in itertools.product(
        range(len(varied) or 1, 0, -1), range(len(_DISPENSABLE) + 1), (False, True)
    ):
        titles = {
            heading: textwrap.fill(heading, sizes[heading] or 1, break_long_words=False) if is_broken else heading
            for heading in figures
            if heading not in _DISPENSABLE[:dropped]
        }
        groups = [[["", *marks]], *(varied[at::per_row] for at in range(per_row) if varied), [outcomes]]
        widths = [max(map(_width, group)) for group in groups]
        widths += [max(sizes[heading], _width([title])) for heading, title in titles.items()]
        over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
        if over <= 0:
            break
    if over > 0 and varied:
        widths[1] = max(_LEAST_CONFIG_WIDTH, widths[1] - over)
    columns = [["\n".join(cells) for cells in zip(*group, strict=True)] for group in groups]
    columns += [[title, *figures[heading]] for heading, title in titles.items()]
    rows = [line for cells in zip(*columns, strict=True) for line in _lines(cells, widths, len(titles))]
    return [*above, *rows] if same else rows


def column_text(values: Sequence[ConfigValue], unset: str) -> list[str]:
    """Returns the values of one tunable as text; as JSON if some would look the same, such as 1 and "1"."""
    words, texts = ([unset if value is UNSET else form(value) for value in values] for form in (format_value, text_of))
    return texts if len({*texts}) > len({*words}) else words


def _width(column: Iterable[str]) -> int:
    return max((len(line) for cell in column for line in cell.split("\n")), default=0)


def _lines(cells: Sequence[str], widths: Sequence[int], figures: int) -> list[str]:
    """Returns a row's lines; a value that is too long for its column continues in the next line."""
    parts = [
        [part for line in cell.split("\n") for part in textwrap.wrap(line, max(width, 1)) or [""]]
        for cell, width in zip(cells, widths, strict=True)
    ]
    sides = "<" * (len(cells) - figures) + ">" * figures
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return [_GAP.join(map(format, line, forms)).rstrip() for line in itertools.zip_longest(*parts, fillvalue="")]


def _wrapped(note: str, indent: str, width: int) -> str:
    return textwrap.fill(note, max(width, 2 * len(indent)), subsequent_indent=indent)


def failure_message(name: str, trials: Sequence[Trial]) -> str:
    """Returns the message for a sweep without a usable config."""
    if not trials:
        return (
            f"{name}: the search asked for no config, so nothing has run: prune_fn may drop all; "
            f"let it keep at least one, or search in another way"
        )
    if all(trial.outcome is Outcome.PRUNED for trial in trials):
        return (
            f"{name}: prune_fn dropped all {len(trials)} configs, so there is nothing to run; "
            f"let it keep at least one, or add configs that it accepts"
        )
    lines = [f"All {len(trials)} configs failed for {name}:"]
    alike = _alike(trials)
    for first, *others in alike[:_REASON_ROWS]:
        more = f" and {len(others)} more" if others else ""
        text = f"{_ending(first)} {cut(_reason(first), 400)}".rstrip()
        lines.append(f"  {format_config(first.config)}{more}: {text}{_place(first)}")
    if len(alike) > _REASON_ROWS:
        lines.append(f"  ... and {len(alike) - _REASON_ROWS} other reasons")
    if log := next((trial.log_tail for trial in trials if trial.log_tail.strip()), ""):
        lines += ["The first one's last output:", *(f"  | {printable(line)}" for line in log.splitlines()[-12:])]
    return "\n".join(lines)


def _reason(trial: Trial) -> str:
    """Returns the message of a trial on one line that any terminal can show."""
    return printable(" ".join(trial.message.split()))


def _place(trial: Trial) -> str:
    """Returns the line of the author's file that raised the exception, from the trial's log; empty if unknown."""
    found = _OWN_LINE.search(trial.log_tail) if trial.outcome is Outcome.ERROR else None
    return f" ({os.path.basename(found[1])}:{found[2]})" if found else ""


def explain(trials: Sequence[Trial], result: PlainResult) -> list[str]:
    """Returns sentences to put below a table: why the winner won, and how the defaults did.

    Args:
        trials: the trials of the table.
        result: their result.
    """
    notes = []
    best = next(filter(result.is_best, trials), None)
    if best is not None and (why := why_best(trials, result)):
        notes.append(f"* {format_config(best.config)} {why}")
    default = next(filter(result.is_default, trials), None)
    if default is not None and default.outcome.is_failure:
        notes.append(f"{result.default_label} ended as {default.outcome.value}, so there is no speed-up")
    elif default is None and result.default_config is not None and equal(result.default_config, result.best_config):
        own = f"{result.default_label} ({format_config(result.default_config)})"
        notes.append(f"{own} beat every config: calls run with them")
    elif default is None and result.default_time_ms is not None:
        notes.append(f"speed-up: against {result.default_label}: {result.default_time_ms:.4g} ms")
    timed = next(filter(result.is_default, result.finalists), None)
    if timed is not None and best is not None and not result.is_default(best):
        if len(timed.samples_ms) < len(best.samples_ms):
            rounds = f"{len(timed.samples_ms)} of the {len(best.samples_ms)} rounds of the final"
            notes.append(f"{result.default_label} are far behind, so they took part in {rounds}")
        if interval := result.speedup_interval:
            notes.append(f"speed-up of *: {interval_text(interval)} in 95 of 100 later runs")
    notes += result.bits().lines
    if any(trial.is_ruled_out for trial in trials):
        notes.append("cheap ms: the time of a cheaply compiled program, to find the configs that may win")
    if any(trial.is_bound for trial in trials):
        notes.append("> stopped early: every run took at least this long")
    return notes


def why_best(trials: Sequence[Trial], result: PlainResult) -> str:
    """Returns the reason why the winner won, as the rest of a sentence about it; empty if it has no time."""
    best = next(filter(result.is_best, trials), None)
    if best is None or best.time_ms is None:
        return ""
    if why := _WHY.get(result.by):
        return why
    following, unsettled = times.rivals(trials, result)
    what = ranked_by(best)
    if result.tie:
        return _why_of_equals(best, trials, result, [it for it in (following, unsettled) if it is not None])
    if following is None or following.figure is None:
        return f"is the only config that was measured to the end{_beside(best, unsettled)}"
    other, figure = format_config(following.config), best.figure or 0.0
    if what != TIME and figure <= following.figure:
        return f"has the lowest {what}: {figure:.4g}, where {other} has {following.figure:.4g}"
    if figure <= following.figure:
        is_sure = unsettled is None or figure <= (unsettled.figure or 0.0)
        fastest = "is the fastest" if is_sure else "is the fastest that was measured to the end"
        longer = _percent(following.figure / best.time_ms - 1)
        return f"{fastest}; the next, {other}, takes {longer} longer{_beside(best, unsettled)}"
    lower = "time" if what == TIME else what
    if not result.finalists and not result.from_cache:
        return (
            f"had the fastest run; {other} has the lower median" if what == TIME and _ran_fastest(best, trials) else ""
        )
    when = "with cold caches" if result.is_finalist(following) and best.clock == "device" else "before it"
    return f"won the final, in which the fastest are timed in turn; the lower {lower} of {other} was taken {when}"


def _why_of_equals(best: Trial, trials: Sequence[Trial], result: PlainResult, others: Sequence[Trial]) -> str:
    """Returns the reason why the winner won among configs that tie with it."""
    what, named, figure = ranked_by(best), _named(result.tie), best.figure or 0.0
    level = f"is as fast as {named} (=) as far as the noise tells"
    if what != TIME:
        return f"ties with {named} (=) in its {what}: {figure:.4g}"
    if result.is_default(best):
        return f"{level}; among equals the function's own defaults win"
    if all(figure <= (other.figure or 0.0) for other in others):
        return f"{level}, and has the lowest time"
    lower = [at for at, trial in enumerate(trials) if result.is_tie(trial) and (trial.figure or math.inf) < figure]
    if not lower:
        return f"{level}, and has the lowest time of them"
    places = {id(trial): at for at, trial in enumerate(result.trials)}
    is_first = all(places[id(best)] < places[id(trials[at])] for at in lower)
    return f"{level}; among equals the first config wins" if is_first else level


def _beside(best: Trial, unsettled: Trial | None) -> str:
    """Returns what is known of a config that was stopped early, as the end of a sentence; empty without one."""
    if unsettled is None or unsettled.time_ms is None or best.time_ms is None:
        return ""
    name, longer = format_config(unsettled.config), unsettled.time_ms / best.time_ms - 1
    if longer <= 0:
        return f"; {name} was stopped early, before its time was known"
    return f"; {name}, stopped early, takes at least {_percent(longer, is_bound=True)} longer"


def _percent(share: float, *, is_bound: bool = False) -> str:
    """Returns a share as text, with one decimal below 10%; a bound is rounded down."""
    decimals = 1 if share < 0.1 else 0
    shown = math.floor(share * 10 ** (2 + decimals)) / 10 ** (2 + decimals) if is_bound else share
    return f"{shown:.{decimals}%}"


def _ran_fastest(best: Trial, trials: Sequence[Trial]) -> bool:
    merits = [trial.merit for trial in trials if trial.is_usable and trial.merit is not None]
    return best.merit is not None and best.merit <= min(merits, default=math.inf)


def _named(configs: Sequence[Config]) -> str:
    names = [format_config(config) for config in configs[:_MOST_NAMED]]
    if (more := len(configs) - len(names)) > 0:
        names.append(f"{more} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


Row: TypeAlias = dict[str, Any]


def to_dicts(result: PlainResult) -> list[Row]:
    """Returns a flat dict for each trial; all have the same keys, even for figures that only some have.

    Args:
        result: the result with the trials.
    """
    trials = result.trials
    beside = {name: values for name, (_, _, values) in beside_time(trials).items()}
    parts = [_fields(trial, result) | {name: beside[name][at] for name in beside} for at, trial in enumerate(trials)]
    own = parts[0].keys() if parts else frozenset()
    names = list(dict.fromkeys(name for trial in trials for name in trial.config))
    columns = {name: f"config.{name}" if name in own else name for name in names}
    return [
        {column: as_json(trial.config[name]) if name in trial.config else None for name, column in columns.items()}
        | part
        for trial, part in zip(trials, parts, strict=True)
    ]


def _fields(trial: Trial, result: PlainResult) -> Row:
    data = trial.to_json() | {"device_memory_bytes": trial.device_memory_bytes}

    def own(*names: str) -> Row:
        return {name: data[name] for name in names}

    roles = ("is_finalist", "is_best", "is_tie", "is_default")
    return {
        **own("outcome", "phase", "time_ms"),
        "time_kind": times.kind_of(trial, result),
        "speedup": result.speedup_of(trial),
        **{name: getattr(result, name)(trial) for name in roles},
        **own("samples_ms", "own_ms", "compile_s", "peak_memory_bytes", "device_memory_bytes"),
        "flops": (trial.figures or NO_FIGURES).flops,
        "moved_bytes": (trial.figures or NO_FIGURES).moved_bytes,
        "bits": trial.bits,
        "batch": trial.batch,
        **own("device", "clock", "route", "ended_s", "message", "log_tail"),
    }


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_AMOUNT = re.compile(r"([\d.]+)([KMG]?)")
_OVERFLOWS = (
    (re.compile(r"Scoped allocation with size ([\d.]+[KMG]?) and limit ([\d.]+[KMG]?) exceeded scoped vmem"), "VMEM"),
    (re.compile(r"memory space vmem.*?Used ([\d.]+[KMG]?) of ([\d.]+[KMG]?) vmem", re.DOTALL), "VMEM"),
    (re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?space=vmem", re.DOTALL), "VMEM"),
    (re.compile(r"Shared memory size limit exceeded: requested (\d+), available: (\d+)"), "shared memory"),
    (re.compile(r"exceeds available shared memory: smem_bytes=(\d+) > max_smem_bytes=(\d+)"), "shared memory"),
)
"""Compilers' complaints about on-chip memory, with the amounts needed and available."""
_LARGE_BYTES = 4 << 20
"""Size of the memory from which amounts are in MiB, not KiB."""
_CYCLES = "Mcycles"
_SIZES = (
    ("VMEM MiB", "vmem_bytes", 1 << 20, ".4g"),
    ("regs", "registers", 1, ".0f"),
    ("spilled B", "spilled_bytes", 1, ".0f"),
    ("shared KiB", "shared_bytes", 1 << 10, ".4g"),
    ("occupancy", "occupancy", 1, ".0%"),
    ("temp MiB", "temporary_bytes", 1 << 20, ".4g"),
    ("GFLOP", "flops", 1e9, ".4g"),
)
"""The figures in a compile check's table: heading, the figure's name, its unit and its format."""
_HONESTLY = (
    "Estimated by the compiler from its static schedule and the bytes to move, for comparing configs; nothing ran."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """The result of compiling a function's configs for one device.

    Attributes:
        name: the function's name in the cache.
        target: the device.
        trials: the trial of every config, in their order; configs that compiled have `compile_s` and `figures`.
        key: the cache key of a sweep of the same call on that device.
        known: the number of configs that were not compiled, because an earlier job has the verdict for the same code,
            device and versions.
    """

    name: str
    target: Target
    trials: tuple[Trial, ...]
    key: str
    known: int = 0

    @property
    def ok(self) -> bool:
        """Whether every config compiles, except those that `prune_fn` dropped."""
        return not any(trial.outcome.is_failure for trial in self.trials)

    @property
    def compiled(self) -> tuple[Config, ...]:
        """The configs that compile, in their order."""
        return tuple(trial.config for trial in self.trials if trial.outcome is Outcome.OK)

    def estimated_ms(self, trial: Trial) -> float | None:
        """Returns the compiler's estimate of a config's time in milliseconds; None if unknown.

        It is the larger of two times: the cycles at the target's clock, as if all operations ran one after another; and
        the time that main memory takes to move the bytes that the program reads and writes.
        """
        return device_table.estimated_ms(trial.figures, self.target.device_kind)

    @property
    def ranked(self) -> tuple[Trial, ...]:
        """The trials by their estimates, the fastest first; then those without an estimate, in their order."""
        kind = self.target.device_kind
        return tuple(sorted(self.trials, key=lambda trial: device_table.estimated_order(trial.figures, kind)))

    @property
    def failures(self) -> dict[str, int]:
        """The number of configs with each failing outcome that occurred."""
        return count_outcomes([trial for trial in self.trials if trial.outcome.is_failure])

    def raise_if_all_failed(self) -> None:
        """Raises if no config compiles.

        Raises:
            TuningFailedError: no config compiles; the message lists the reasons.
        """
        if not self.compiled:
            message = failure_message(f"{self.name} on {self.target.name}", self._briefly())
            raise TuningFailedError(message, trials=self.trials, key=self.key)

    def table(self, *, width: int | None = None) -> str:
        """Returns a table of the configs: outcome, compile time, the compiler's figures, and reason for a failure.

        The config with the least estimated time comes first, if there are estimates.

        Args:
            width: columns, as far as the texts can be broken; None for the width of the terminal, 120 without one.
        """
        trials, columns, same = self._briefly(), self._columns(), []
        notes = [_HONESTLY] if _CYCLES in columns else []
        for heading, cells in [*columns.items()]:
            known = [cell for cell in cells if cell]
            if len(known) > len({*known}) == 1 and heading not in (_COMPILE_HEADING, *_OVER):
                same.append(f"{heading} {known[0]}")
                del columns[heading]
        above = [f"all that compile: {', '.join(same)}"] if same else []
        text = "\n".join([*above, _with_notes(trials, [""] * len(trials), columns, columns_for(width)), *notes])
        if self.known:
            text += f"\n{self.known} of {len(self.trials)} known from earlier checks or sweeps, and not compiled again"
        return text

    def _briefly(self) -> tuple[Trial, ...]:
        return tuple(
            dataclasses.replace(trial, message=briefly(trial.message) or (why and f"no estimate: {why}"))
            for trial in self.ranked
            for why in [(trial.figures or NO_FIGURES).no_estimate]
        )

    def _columns(self) -> dict[str, list[str]]:
        """Returns the table's columns of numbers by heading, without empty ones."""
        trials = self.ranked
        figures = [trial.figures or NO_FIGURES for trial in trials]
        columns = {
            "est. ms": _numbers([self.estimated_ms(trial) for trial in trials]),
            _CYCLES: _numbers([it.estimate.cycles if it.estimate else None for it in figures], 1e6),
            _COMPILE_HEADING: [_number(trial.compile_s, form=".2f") for trial in trials],
        }
        columns |= {
            title: _numbers([getattr(it, name) for it in figures], unit, form) for title, name, unit, form in _SIZES
        }
        # Amounts are columns: one note below the table covers all configs that fail alike.
        overflows = [_overflow(trial.message).partition(": ") for trial in trials]
        for memory in filter(None, dict.fromkeys(memory for memory, *_ in overflows)):
            columns[f"over {memory}"] = [amounts if name == memory else "" for name, _, amounts in overflows]
        return {heading: cells for heading, cells in columns.items() if cells}


def briefly(message: str) -> str:
    """Returns a compiler's message; if it reports too little memory, the amounts come first."""
    over = _overflow(message)
    return f"over {over}; {message}" if over and not message.startswith(f"over {over}; ") else message


def _overflow(message: str) -> str:
    """Returns the memory that a config exceeds, such as `VMEM: 73.39 of 16.00 MiB`; empty if it exceeds none."""
    for pattern, memory in _OVERFLOWS:
        if (found := pattern.search(message)) is not None:
            wanted, there = (float(number) * _UNITS[unit] for number, unit in _AMOUNT.findall(" ".join(found.groups())))
            if wanted > there:  # else only several allocations together do not fit
                unit, size, form = ("KiB", 1 << 10, ".4g") if there < _LARGE_BYTES else ("MiB", 1 << 20, ".2f")
                return f"{memory}: {wanted / size:{form}} of {there / size:{form}} {unit}"
    return ""
