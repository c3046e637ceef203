"""Writes reports: one HTML file with the data, the styles and the program that draws the charts."""

from __future__ import annotations

import base64
import collections
import functools
import hashlib
import html
import importlib.resources
import itertools
import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from quarantune import device_table
from quarantune.results import report, saved_files, times
from quarantune.results.report_data import ResultData
from quarantune.values.codec import JsonObject, as_json, canonical_json, is_number, text_of
from quarantune.values.configs import Config, format_config, format_value
from quarantune.values.texts import call_size, call_text, printable
from quarantune.values.trial import NO_FIGURES, TIME, Findings, Outcome, Trial, interval_text, ranked_by

_SCRIPTS = [
    *("base", "model", "summary", "finals", "scatter", "progress"),
    *("map", "effects", "bits", "parallel", "table", "shapes", "rules", "main", "live"),
]
"""The parts of the page's program, each after the parts that it needs."""
_DTYPE = re.compile(r'"dtype":"(float8|\w+)')
"""Finds dtypes in the description of a call; the table of devices has one name for all dtypes of 8 bits."""
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def render(results: Sequence[ResultData], rules: Sequence[JsonObject] = (), *, reload_s: float | None = None) -> str:
    """Returns the report on some problems of one function as one self-contained HTML page.

    The page needs no network, and its content policy forbids it. Texts of configs, messages and logs reach it as JSON,
    and it inserts them as text.

    Args:
        results: at least one problem.
        rules: the rules of the function in the form for the page; see `from_cache.page_rules`.
        reload_s: seconds after which the page loads itself again, because the file is written again; None for a page
            that stays as it is.

    Raises:
        ValueError: `results` is empty.
    """
    if not results:
        raise ValueError("there is no result to report on: give at least one")
    written_s = time.time()
    reload = {} if reload_s is None else {"reloadS": reload_s, "writtenS": written_s}
    data = page_data(results) | {"rules": rules} | reload
    state = state_of(results)
    parts = "".join(_read(f"{name}.js") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    slots = {
        "title": html.escape(" · ".join(filter(None, (state, data["title"], "tuning report")))),
        "state": html.escape(f" · {state}" if state else ""),
        "reload": ""
        if reload_s is None
        else f'<noscript><meta http-equiv="refresh" content="{reload_s:g}"></noscript>',
        "summary": html.escape(_in_words(data)),
        "style": _read("page.css"),
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "data": _embedded(data),
    }
    return _SLOT.sub(lambda match: slots[match[1]], _read("page.html"))


def write(
    path: str | os.PathLike[str],
    results: Sequence[ResultData],
    rules: Sequence[JsonObject] = (),
    *,
    reload_s: float | None = None,
) -> None:
    """Writes the report on some problems of one function into a file; see `render`.

    Raises:
        ValueError: `results` is empty.
        OSError: the file cannot be written; an earlier one is unchanged.
    """
    saved_files.write(path, render(results, rules, reload_s=reload_s).encode())


def state_of(results: Sequence[ResultData]) -> str:
    """Returns what became of sweeps without a result, for a page's title; empty if all have one."""
    states = collections.Counter(data.state for data in results if data.state)
    if len(results) == 1 and states:
        return ": ".join(filter(None, (results[0].state, results[0].progress)))
    return ", ".join(f"{count} {state}" for state, count in states.items())


def _embedded(data: JsonObject) -> str:
    """Returns JSON that cannot end the script element around it, or begin a comment in it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _in_words(data: JsonObject) -> str:
    """Returns the choices in words, for browsers that run no scripts."""
    parts = []
    for problem in data["problems"]:
        factor, unit = data["unit"]
        best = "" if problem["bestMs"] is None else f", {problem['bestMs'] * factor:.3g} {unit}"
        so_far = f" ({problem['state']}: {problem['progress']})" if problem["state"] else ""
        choice = problem["bestText"] or "no config has worked"
        parts.append(f"{problem['label']}: {choice}{best}{so_far}")
    return "; ".join(parts)


@functools.cache
def _read(name: str) -> str:
    return (importlib.resources.files("quarantune.results") / "page" / name).read_text(encoding="utf-8")


_TEXT_BYTES = 1_200_000
"""Most bytes of messages and logs in one report. Beyond this, the longest texts are cut."""
_VALUE_BYTES = 300_000
"""Most bytes of the texts of config values in one report. Beyond this, the longest are cut."""
_LONGEST_LABEL = 300
_DIGITS = 6
"""Significant digits of most numbers in a report."""
_MOST_SAMPLES = 100_000
"""Most samples in one report, not counting finalists'. Beyond this, the slowest configs lose theirs."""
_MOST_TRIALS = 20_000
"""Most trials in one report. Beyond this, problems are shown with their choice only."""
_PAUSE_S = 60.0
"""Time without the end of a trial that counts as a pause of the sweep, if it is also `_PAUSE_GAPS` typical gaps."""
_PAUSE_GAPS = 20.0

_TAGS = ("$enum", "$dtype", "$type")
"""Keys of names in JSON. Enum members, dtypes and objects without fields have no other keys."""


def page_data(results: Sequence[ResultData]) -> JsonObject:
    """Returns the data of a report on some problems of one function, sorted by device and size."""
    texts: _Texts = {"": 0}
    trials_left, samples_left = _MOST_TRIALS, _MOST_SAMPLES
    ordered = sorted(results, key=lambda data: (data.result.device, call_size(data.key_values)))
    is_of_one_device = len({data.result.device for data in ordered}) == 1
    unit, factor = times.unit_of(data.result.time_ms for data in ordered)
    problems = []
    for data in ordered:
        problem = _problem(data, texts, trials_left, samples_left, names_device=not is_of_one_device)
        calls = [call.text(unit, factor) for call in data.result.calls]
        problem["note"] = printable("; ".join(filter(None, (problem["note"], *calls))))
        problems.append(problem)
        trials_left -= problem["trials"]["n"]
        samples_left -= sum(map(len, problem["trials"]["samples"]))
    return {
        "title": _label(ordered[0].result.name or "a tuned function"),
        "unit": [factor, unit],
        "outcomes": [[outcome.value, outcome.is_failure] for outcome in Outcome],
        "problems": problems,
        "texts": _fitted(list(texts), _TEXT_BYTES),
    }


_Texts: TypeAlias = dict[str, int]
"""Positions of texts in the report, which has each text once."""


def _index(texts: _Texts, text: str) -> int:
    """Returns the position of a text; a new text is added."""
    shown = "\n".join(map(printable, text.strip("\n").split("\n")))
    return texts.setdefault(shown, len(texts))


def _problem(data: ResultData, texts: _Texts, trials_left: int, samples_left: int, *, names_device: bool) -> JsonObject:
    """Returns the data of one problem, within the trials and samples that the report has left."""
    result, notes = data.result, [data.note] if data.note else []
    trials: Sequence[Trial] = result.trials
    if len(trials) > trials_left:
        trials = ()
        notes.append(f"Its {len(result.trials)} trials are left out, because the report would be too large.")
    places = {text_of(trial.config): index for index, trial in enumerate(trials)}
    final = {text_of(trial.config): trial for trial in result.finalists if trial.samples_ms}
    finalists = {places[text] for text in final.keys() & places.keys()}
    own = None if result.default_config is None else text_of(result.default_config)
    is_by_time, bits = ranked_by(result.findings) == TIME, result.bits()
    label = call_text(data.key_values) or "all calls"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    tunables, columns = _columns(trials)
    labels = _labels([trial.config for trial in final.values()], result.best_config)
    return {
        "label": _label(", ".join(filter(None, (f"{label} on {result.device}" if names_device else label, data.when)))),
        "when": data.when,
        "device": _label(result.device),
        "size": call_size(data.key_values),
        "best": places.get(text_of(result.best_config)) if result.has_winner else None,
        "choice": [[_label(name), _label(format_value(value))] for name, value in _flat(result.best_config).items()],
        "bestText": (_label(format_config(result.best_config)) or "the only config") if result.has_winner else "",
        "why": printable(report.why_best(trials, result)),
        "bestMs": _rounded(result.time_ms),
        "default": None if own is None else places.get(own),
        "defaultMs": _rounded(result.default_time_ms),
        "defaultsWin": result.has_winner and own == text_of(result.best_config),
        "compared": result.findings.compared if is_by_time else _scores(result.findings),
        "interval": interval_text(result.speedup_interval if is_by_time else None),
        "tie": _places(result.tie, places),
        "finalists": [
            [places.get(text), label, text == own, _samples(trial)]
            for (text, trial), label in zip(final.items(), labels, strict=True)
        ],
        "stopped": _label(result.stopped),
        "seen": result.seen,
        "space": result.space_size,
        "versions": _label(versions),
        "created": _label(result.created),
        "commit": _label(result.commit),
        "note": printable(" ".join(notes)),
        "state": data.state,
        "progress": data.progress,
        "peaks": _peaks(data),
        "bits": [[_label(each.name), each.differ, each.pairs] for each in bits.tunables if each.pairs],
        "bitsFinding": printable("; ".join(bits.lines).removeprefix("bits: ")),
        "pareto": _places([trial.config for trial in result.pareto()], places),
        "figures": [[name, *about] for name, (*about, _) in report.beside_time(trials).items()],
        "tunables": tunables,
        "effects": [_effect(values, len(it["values"]), trials) for it, values in zip(tunables, columns, strict=True)],
        "bestSoFar": times.best_so_far(trials),
        "trials": _encoded(trials, columns, texts, samples_left, finalists)
        | {"kind": [times.kind_of(trial, result) for trial in trials]},
    }


def _effect(values: Sequence[int], count: int, trials: Sequence[Trial]) -> JsonObject:
    """Returns the effect of a tunable: its factor, in numbers and words, and the range of the best time by value."""
    found = times.effect(values, count, trials)
    ends = [None if known is None else _ends(known) for known in found.by_value]
    return {"factor": _ends(found.factor), "text": found.text, "notable": found.is_notable, "best": ends}


def _ends(known: times.Range) -> list[float | None]:
    """Returns the ends of a range, rounded outwards unless it is known; None for an infinite one."""
    if known.is_known:
        return [_rounded(known.least)] * 2
    return [
        times.rounded(known.least, _DIGITS, up=False),
        None if known.most == math.inf else times.rounded(known.most, _DIGITS, up=True),
    ]


def _labels(configs: Sequence[Config], best: Config) -> list[str]:
    """Returns a label for each finalist: where it differs from the winner, and of the winner what varies."""
    flat, won = list(map(_flat, configs)), _flat(best)
    alike = {text_of(values) for values in flat} == {text_of(won)}

    def told(values: JsonObject) -> JsonObject:
        others = flat if text_of(values) == text_of(won) else [won]
        names = dict.fromkeys(name for each in (values, *others) for name in each)
        return {
            name: values.get(name, "unset")
            for name in names
            if any(text_of(values.get(name, report.UNSET)) != text_of(it.get(name, report.UNSET)) for it in others)
        }

    return [_label(format_config(values if alike else told(values))) for values in flat]


def _scores(found: Findings) -> str:
    """Returns how the winner compares with the defaults by an objective that is not time."""
    if found.score is None or not found.compared:
        return "" if found.score is None else found.amount(found.score)
    return f"{found.compared} ({found.amount(found.score)} against {found.amount(found.default_score or 0.0)})"


def _peaks(data: ResultData) -> JsonObject | None:
    """Returns the peaks of the device; TFLOP/s only if the dtypes of the call have one peak. None if unknown."""
    if (peaks := device_table.peaks_of(data.result.device)) is None:
        return None
    names = _DTYPE.findall(canonical_json(data.key_values))
    rates = {peaks.tflops[name]: name for name in names if name in peaks.tflops}
    tflops, dtype = next(iter(rates.items())) if len(rates) == 1 else (None, "")
    return {"gbps": peaks.gbps, "tflops": tflops, "dtype": dtype}


def _places(configs: Iterable[Config], places: Mapping[str, int]) -> list[int]:
    return [places[text] for config in configs if (text := text_of(config)) in places]


def _columns(trials: Sequence[Trial]) -> tuple[list[JsonObject], list[list[int]]]:
    """Returns the tunables with their values in order, and the positions of the trials' values for each tunable."""
    flat = [_flat(trial.config) for trial in trials]
    names = list(dict.fromkeys(name for values in flat for name in values))
    tunables, columns = [], []
    for name in names:
        column = [values.get(name, report.UNSET) for values in flat]
        by_text = {text_of(value): value for value in column}
        ordered = sorted(by_text, key=lambda text: _order(by_text[text]))
        positions = {text: index for index, text in enumerate(ordered)}
        shown = _fitted(report.column_text([by_text[text] for text in ordered], "unset"), _VALUE_BYTES // len(names))
        numeric = all(map(is_number, by_text.values()))
        json_texts = _fitted(ordered, _VALUE_BYTES // len(names))
        tunables.append({"name": _label(name), "values": shown, "json": json_texts, "numeric": numeric})
        columns.append([positions[text_of(value)] for value in column])
    return tunables, columns


def _flat(config: Mapping[str, Any], prefix: str = "", depth: int = 0) -> JsonObject:
    """Returns a config with the parts of dicts and dataclasses as tunables."""
    values: JsonObject = {}
    for name, value in config.items():
        plain = as_json(value)
        parts = {key: item for key, item in plain.items() if key not in _TAGS} if isinstance(plain, Mapping) else {}
        if parts and depth < 4:
            values |= _flat(parts, f"{prefix}{name}.", depth + 1)
        else:
            values[f"{prefix}{name}"] = plain
    return values


def _order(value: Any) -> tuple[int, float, str]:
    """Returns a sort key: numbers by size, then booleans, then other values."""
    if is_number(value):
        return 0, value, ""  # compared without conversion: a huge integer does not fit a float
    return (3 if value is report.UNSET else 1 if isinstance(value, bool) else 2), 0.0, text_of(value)


def _encoded(
    trials: Sequence[Trial], columns: list[list[int]], texts: _Texts, samples_left: int, finalists: set[int]
) -> JsonObject:
    """Returns trials column by column, to take less space than row by row."""
    outcomes = list(Outcome)
    ended_s, paused_s = _ended(trials)
    return {
        "n": len(trials),
        "config": columns,
        "outcome": [outcomes.index(trial.outcome) for trial in trials],
        "phase": [trial.phase.value if trial.phase is not None else "" for trial in trials],
        "ms": [None if (known := times.range_of(trial)) is None else _ends(known)[0] for trial in trials],
        "compile": [_rounded(trial.compile_s, 4) for trial in trials],
        "memory": [trial.peak_memory_bytes for trial in trials],
        "deviceMemory": [trial.device_memory_bytes for trial in trials],
        "flops": [_rounded((trial.figures or NO_FIGURES).flops) for trial in trials],
        "moved": [_rounded((trial.figures or NO_FIGURES).moved_bytes) for trial in trials],
        "message": [_index(texts, trial.message) for trial in trials],
        "log": [_index(texts, trial.log_tail) for trial in trials],
        "device": [_index(texts, trial.device) for trial in trials],
        "clock": [trial.clock for trial in trials],
        "bits": [trial.bits or "" for trial in trials],
        "batch": [trial.batch or "" for trial in trials],
        "samples": _kept_samples(trials, samples_left, finalists),
        "ended": ended_s,
        "paused": paused_s,
    } | {name: list(map(_rounded, values)) for name, (_, _, values) in report.beside_time(trials).items()}


def _kept_samples(trials: Sequence[Trial], samples_left: int, finalists: set[int]) -> list[list[float | None]]:
    """Returns the samples of the fastest trials within the budget; the samples of finalists are elsewhere."""
    kept: list[list[float | None]] = [[] for _ in trials]
    for index in sorted(range(len(trials)), key=lambda index: trials[index].time_ms or math.inf):
        if index not in finalists and len(trials[index].samples_ms) <= samples_left:
            kept[index] = _samples(trials[index])
            samples_left -= len(kept[index])
    return kept


def _samples(trial: Trial) -> list[float | None]:
    return [_rounded(sample_ms, 5) for sample_ms in trial.samples_ms]


def _ended(trials: Sequence[Trial]) -> tuple[list[float | None], float]:
    """Returns when trials ended, in seconds since the first began without pauses, and the seconds of the pauses."""
    known = sorted((trial.ended_s, index) for index, trial in enumerate(trials) if trial.ended_s is not None)
    ended: list[float | None] = [None] * len(trials)
    if not known:
        return ended, 0.0
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(known)]
    longest_s = max(_PAUSE_S, _PAUSE_GAPS * statistics.median(gaps)) if gaps else _PAUSE_S
    # The first trial began at least its compile time before it ended.
    passed_s, paused_s, last_s = trials[known[0][1]].compile_s or 0.0, 0.0, known[0][0]
    for ended_s, index in known:
        gap_s = ended_s - last_s
        if gap_s > longest_s:
            paused_s, gap_s = paused_s + gap_s, 0.0
        passed_s, last_s = passed_s + gap_s, ended_s
        ended[index] = _rounded(passed_s)
    return ended, round(paused_s)


def _rounded(value: float | None, digits: int = _DIGITS) -> float | None:
    """Returns a number with few significant digits; None if it is unknown or not finite."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def _label(text: str) -> str:
    shown = printable(" ".join(text.split()))
    return shown if len(shown) <= _LONGEST_LABEL else f"{shown[: _LONGEST_LABEL - 1]}…"


def _fitted(texts: Sequence[str], budget_bytes: int) -> list[str]:
    """Returns texts; the longest are cut so that all together fit a number of bytes."""
    sizes = [len(text.encode()) for text in texts]
    if sum(sizes) <= budget_bytes:
        return list(texts)
    left_bytes, limit = budget_bytes, 0
    for rank, size in enumerate(sorted(sizes)):
        limit = left_bytes // (len(sizes) - rank)
        if size > limit:
            break
        left_bytes -= size
    return [text if size <= limit else _cut(text, limit) for text, size in zip(texts, sizes, strict=True)]


def _cut(text: str, limit_bytes: int) -> str:
    """Returns the beginning and the end of a text, its most useful parts."""
    half = max(0, limit_bytes - 5) // 2
    data = text.encode()
    tail = data[len(data) - half :].decode(errors="ignore") if half else ""
    return f"{data[:half].decode(errors='ignore')} … {tail}"
