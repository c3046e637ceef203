"""Checks that everything told of a result agrees with its trials: the table, its sentences, the page, JSON and CSV.

The checks compute each figure anew from the trials, so they share no code with the modules that tell it. A sentence
that no check knows fails: whoever adds one adds its check.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from quarantune.results import html_report
from quarantune.results.report_data import PlainResult, ResultData
from quarantune.results.result import ContextualResult, TuningResult
from quarantune.values.codec import canonical_json, equal, text_of
from quarantune.values.configs import Config, format_config, format_value
from quarantune.values.trial import Outcome, Trial

MOST_RESULTS, MOST_TRIALS = 50, 1000
"""The most results of one test that are checked, and the most trials of each."""
_COMPLETIONS = 8
_MORE = (1.0, 1.01, 1.5, 40.0)
"""How many times longer than its bound a config that was stopped early might have taken."""


def without_objects(result: PlainResult) -> PlainResult:
    """Returns a result without the function and the call, which a test may expect to be freed."""
    if not isinstance(result, TuningResult):
        return result
    return dataclasses.replace(result, fn=print, call=((), {}), structs=None, executable=None)


def check(result: TuningResult, folder: Path) -> None:
    """Asserts that all that a result tells agrees with its trials.

    Args:
        result: the result.
        folder: a directory for a file.
    """
    shown = result._shown
    for trial in shown.trials:
        _check_time(trial)
    _check_rows(result, shown, folder)
    check_data(result._report_data())
    if isinstance(result, ContextualResult):
        assert f"the whole function: {result.time_ms:.4g} ms" in result.table()
    elif shown.trials:
        _check_table(result)
    else:
        assert f"* {format_config(result.best_config)}, " in result.table(width=10**6)


def has_one_trial_per_config(result: PlainResult) -> bool:
    """Returns whether no config has two trials, as a kernel's config has that is timed again in its context."""
    return len({text_of(trial.config) for trial in result.trials}) == len(result.trials)


def check_any(result: PlainResult, folder: Path, *, is_real: bool) -> None:
    """Asserts the same of a result of any class.

    Args:
        result: the result.
        folder: a directory for a file.
        is_real: whether a sweep or the cache gave it. Then the winner's time is that of its trial.
    """
    shown = result._shown if isinstance(result, TuningResult) else result
    best = _best(shown)
    if is_real and best is not None and not math.isnan(shown.time_ms):
        assert best.time_ms == shown.time_ms, f"two times for the winner: {best.time_ms} and {shown.time_ms}"
    if isinstance(result, TuningResult):
        check(result, folder)
    else:
        check_data(ResultData(result, {}))


def check_data(data: ResultData) -> None:
    """Asserts that the page of a result agrees with its trials."""
    page = html_report.page_data([data])
    _check_problem(page["problems"][0], data.result, page)


# --- times ---


def _least(trial: Trial) -> float | None:
    """Returns the time of a trial, or its bound."""
    return trial.time_ms if trial.outcome in (Outcome.OK, Outcome.SLOW) else None


def _is_bound(trial: Trial) -> bool:
    return trial.outcome is Outcome.SLOW and trial.time_ms is not None


def _most(trial: Trial) -> float:
    return math.inf if trial.time_ms is None or trial.outcome is not Outcome.OK else trial.time_ms


def _check_time(trial: Trial) -> None:
    if _is_bound(trial):
        assert trial.time_ms is not None
        assert all(trial.time_ms <= sample for sample in trial.samples_ms), f"not a bound: {trial}"
        assert trial.own_ms is None or trial.time_ms <= trial.own_ms, f"not a bound: {trial}"
        assert not re.search(r"\d+(\.\d+)? ?ms", trial.message), "a second time for the same config"


def _is_finalist(trial: Trial, result: PlainResult) -> bool:
    return any(
        equal(trial.config, it.config) or (it.samples_ms and it.samples_ms == trial.samples_ms)
        for it in result.finalists
    )


def _kind(trial: Trial, result: PlainResult) -> str:
    if _least(trial) is None:
        return ""
    if _is_bound(trial):
        return "at least"
    return "final" if _is_finalist(trial, result) else "mean" if result.calls else "median"


def _best(result: PlainResult) -> Trial | None:
    return next((trial for trial in result.trials if equal(trial.config, result.best_config)), None)


def _near(told: float | str | None, true: float | None, digits: int = 4) -> None:
    """Asserts that a number was told with so many digits."""
    told = None if told in ("", None) else float(told)  # type: ignore[arg-type]
    if told is None or true is None:
        assert told == true, (told, true)
    else:
        assert math.isclose(told, true, rel_tol=0.51 * 10 ** (1 - digits), abs_tol=1e-12), (told, true)


def _at_most(told: float, true: float, digits: int = 4) -> None:
    """Asserts that a bound was rounded down, by no more than its digits need."""
    assert told <= true * (1 + 1e-12), f"{told} is no bound of {true}"
    assert told >= true * (1 - 1.01 * 10 ** (1 - digits)), (told, true)


# --- the table ---


def _check_table(result: TuningResult) -> None:
    text = result.table(width=10**6, rows=len(result.trials))
    grid, _, below = text.partition("\n\n")
    lines = grid.splitlines()
    above = lines.pop(0) if len(lines) == len(result.trials) + 2 else ""
    head, rows = lines[0], lines[1:]
    assert len(rows) == len(result.trials), text
    ends = {
        found[0]: found.end() for found in re.finditer(r"\S+(?: \S+)*", head) if found.start() > head.rfind("outcome")
    }
    names = ["outcome", *ends]
    stops = [head.rfind("outcome"), *ends.values()]
    left = list(result.trials)
    last: tuple[bool, bool, float] | None = None
    for row in rows:
        cells = {name: row[start:stop].strip() for name, start, stop in zip(names[1:], stops, stops[1:], strict=False)}
        found = re.match(r"(\w+)(?: \[\d+\])?\s*(.*)", cells[names[1]])
        assert found is not None, row
        outcome, cells[names[1]] = found.groups()
        words = {*row[: stops[0]].split(), *re.split(r"[ =]", above)}
        trial = _trial_of(row, cells, outcome, (it for it in left if _is_in(it.config, words)), result)
        left.remove(trial)
        place = (not _is_best(trial, result), _least(trial) is None, 0.0)
        assert last is None or place[:2] >= last[:2], f"out of order: {row}"
        last = place
    if len(result.trials) > 40:
        short = result.table(width=10**6)
        assert f"and {len(result.trials) - 20:,} more (" in short
        assert len(short.partition("\n\n")[0].splitlines()) == len(grid.splitlines()) - len(result.trials) + 20
    calls = [str(call) for call in result.calls]
    for note in below.splitlines():
        if note.strip() not in calls:
            check_sentence(note, result)


def _is_in(config: Config, words: set[str]) -> bool:
    """Returns whether the words of a row are the values of a config."""
    return all(
        {*format_value(value).split()} <= words or {*text_of(value).split()} <= words for value in config.values()
    )


def _is_best(trial: Trial, result: PlainResult) -> bool:
    return equal(trial.config, result.best_config)


def _trial_of(row: str, cells: dict[str, str], outcome: str, left: Iterable[Trial], result: PlainResult) -> Trial:
    """Returns the trial of a row: the one whose mark, outcome and numbers it shows."""
    mark = row[0].strip()
    complaints = []
    for trial in left:
        if trial.outcome.value != outcome or (mark == "*") is not _is_best(trial, result):
            continue
        try:
            _check_cells(cells, trial, result)
            return trial
        except AssertionError as error:
            complaints.append(error)
    raise AssertionError(f"no trial is as this row tells: {row!r}") from next(iter(complaints), None)


def _check_cells(cells: dict[str, str], trial: Trial, result: PlainResult) -> None:
    time_ms = _least(trial)
    if _is_bound(trial):
        assert cells["ms"].startswith("> ")
        _at_most(float(cells["ms"][2:]), time_ms or 0.0)
    else:
        assert not cells["ms"].startswith(">")
        _near(cells["ms"], time_ms)
    if "speed-up" in cells and cells["speed-up"] != "defaults":
        _near(cells["speed-up"].rstrip("x"), _speedup(trial, result), 2)
    if "compile s" in cells and trial.compile_s is not None:
        assert abs(float(cells["compile s"]) - trial.compile_s) < 0.0051
    if "cheap ms" in cells:
        _near(cells["cheap ms"], trial.cheap_ms)


def _speedup(trial: Trial, result: PlainResult) -> float | None:
    """Returns the speed-up of a trial that was timed side by side with the defaults."""
    if trial.outcome is not Outcome.OK or not trial.time_ms or not result.default_time_ms:
        return None
    return result.default_time_ms / trial.time_ms if not result.finalists or _is_finalist(trial, result) else None


# --- sentences ---


def check_sentence(text: str, result: PlainResult) -> None:
    """Asserts that a sentence below a table is true."""
    for pattern, rule in _SENTENCES.items():
        if found := re.fullmatch(pattern, text, re.DOTALL):
            rule(result, *found.groups())
            return
    raise AssertionError(f"no check knows this sentence: {text!r}")


def _check_why(result: PlainResult, name: str, why: str) -> None:
    assert name == format_config(result.best_config), name
    check_reason(why, result)


def check_reason(why: str, result: PlainResult) -> None:
    """Asserts that the reason for a winner is true."""
    best = _best(result)
    assert best is not None
    for pattern, rule in _REASONS.items():
        if found := re.fullmatch(pattern, why, re.DOTALL):
            rule(result, best, *found.groups())
            return
    raise AssertionError(f"no check knows this reason: {why!r}")


def _others(result: PlainResult, best: Trial) -> list[Trial]:
    return [trial for trial in result.trials if trial is not best and not _is_best(trial, result)]


def _named(name: str, among: Sequence[Trial]) -> Trial:
    return next(trial for trial in among if format_config(trial.config) == name)


def _finished(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.outcome is Outcome.OK and trial.figure is not None]


def _share(percent: str) -> float:
    return float(percent) / 100


def _the_fastest(
    result: PlainResult, best: Trial, limited: str, name: str, percent: str, stopped: str, bound: str, unknown: str
) -> None:
    others = _others(result, best)
    done = _finished(others)
    assert best.time_ms is not None
    least = min(trial.figure or 0.0 for trial in done)
    assert (_named(name, done).figure or 0.0) == least, f"{name} is not the next"
    assert best.figure is not None
    assert best.figure <= least
    assert abs(least / best.time_ms - 1 - _share(percent)) <= (0.0051 if float(percent) >= 10 else 0.00051)
    bounds = [trial for trial in others if _is_bound(trial) and (trial.time_ms or 0.0) < least]
    assert bool(limited) is any((trial.time_ms or 0.0) < best.time_ms for trial in bounds)
    _check_beside(best, bounds, stopped, bound, unknown)


def _the_only(result: PlainResult, best: Trial, stopped: str, bound: str, unknown: str) -> None:
    others = _others(result, best)
    assert not _finished(others)
    _check_beside(best, [trial for trial in others if _is_bound(trial)], stopped, bound, unknown)


def _check_beside(best: Trial, bounds: Sequence[Trial], stopped: str, bound: str, unknown: str) -> None:
    """Asserts that the end of a sentence names the stopped config with the least bound, if it may be the next."""
    assert best.time_ms is not None
    if not bounds:
        assert not stopped
        assert not unknown
        return
    least = min(trial.time_ms or 0.0 for trial in bounds)
    assert _named(stopped or unknown, bounds).time_ms == least
    longer = least / best.time_ms - 1
    if stopped:
        assert _share(bound) <= longer + 1e-9
        assert _share(bound) >= longer - 0.0101
    else:
        assert longer <= 0


def _level(result: PlainResult, best: Trial, named: str, rule: str) -> None:
    for config in result.tie[:4]:
        assert format_config(config) in named
    assert (f"{len(result.tie) - 4} more" in named) is (len(result.tie) > 4)
    others = _others(result, best)
    tied = [trial for trial in others if any(equal(trial.config, config) for config in result.tie)]
    lower = [trial for trial in tied if trial.figure is not None and trial.figure < (best.figure or 0.0)]
    if rule == ", and has the lowest time":
        assert all((best.figure or 0.0) <= (trial.figure or 0.0) for trial in others if _least(trial) is not None)
    elif rule == ", and has the lowest time of them":
        assert not lower
    elif rule == "; among equals the function's own defaults win":
        assert result.default_config is not None
        assert equal(best.config, result.default_config)
    elif rule == "; among equals the first config wins":
        place = [*map(id, result.trials)].index
        assert lower
        assert all(place(id(best)) < place(id(trial)) for trial in lower)


def _won_the_final(result: PlainResult, best: Trial, name: str, when: str) -> None:
    assert result.finalists or result.from_cache
    other = _named(name, _finished(_others(result, best)))
    assert (other.figure or 0.0) < (best.figure or 0.0)
    assert (when == "with cold caches") is (_is_finalist(other, result) and best.clock == "device")


def _ran_fastest(result: PlainResult, best: Trial, name: str) -> None:
    done = _finished(_others(result, best))
    assert not result.finalists
    assert (_named(name, done).figure or 0.0) < (best.figure or 0.0)
    assert all((best.merit or 0.0) <= (trial.merit or 0.0) for trial in done)


def _lowest_score(result: PlainResult, best: Trial, _: str, score: str, name: str, other: str) -> None:
    done = _finished(_others(result, best))
    least = min(trial.figure or 0.0 for trial in done)
    assert _named(name, done).figure == least
    _near(score, best.score)
    _near(other, least)
    assert (best.score or 0.0) <= least


def _tied_score(result: PlainResult, best: Trial, named: str, _: str, score: str) -> None:
    assert format_config(result.tie[0]) in named
    _near(score, best.score)


_BESIDE = (
    r"(?:; (.*), stopped early, takes at least ([\d.]+)% longer|; (.*) was stopped early, before its time was known)?"
)
_REASONS: dict[str, Callable[..., None]] = {
    r"has the least total time over the calls below": lambda result, best: _is_by(result, "total"),
    r"is never far behind the best for any of the calls below": lambda result, best: _is_by(result, "worst"),
    rf"is the only config that was measured to the end{_BESIDE}": _the_only,
    rf"is the fastest( that was measured to the end)?; the next, (.*), takes ([\d.]+)% longer{_BESIDE}": _the_fastest,
    r"is as fast as (.*) \(=\) as far as the noise tells(.*)": _level,
    r"won the final, in which the fastest are timed in turn; the lower \w+ of (.*) was taken (.*)": _won_the_final,
    r"had the fastest run; (.*) has the lower median": _ran_fastest,
    r"has the lowest (\w+): (\S+), where (.*) has (\S+)": _lowest_score,
    r"ties with (.*) \(=\) in its (\w+): (\S+)": _tied_score,
}


def _is_by(result: PlainResult, by: str) -> None:
    assert result.by == by


def _failed_defaults(result: PlainResult, label: str, outcome: str) -> None:
    assert label == result.default_label
    assert Outcome(outcome).is_failure
    assert outcome in {it.outcome for it in result.trials if equal(it.config, result.default_config)}


def _defaults_beat_all(result: PlainResult, label: str, name: str) -> None:
    assert label == result.default_label
    assert name == format_config(result.default_config or {}) == format_config(result.best_config)


def _against(result: PlainResult, label: str, time_ms: str) -> None:
    assert label == result.default_label
    _near(time_ms, result.default_time_ms)


def _far_behind(result: PlainResult, label: str, few: str, many: str) -> None:
    rounds = {len(trial.samples_ms) for trial in result.finalists}
    assert label == result.default_label
    assert {int(few), int(many)} <= rounds | {len(best.samples_ms) for best in [_best(result)] if best}


def _interval(result: PlainResult, low: str, high: str) -> None:
    assert float(low) <= float(high)
    best, own = _best(result), next(it for it in result.finalists if equal(it.config, result.default_config))
    assert best is not None
    told = statistics.median(own.samples_ms) / statistics.median(best.samples_ms)
    assert float(low) * 0.99 <= told <= float(high) * 1.01


def _cheap(result: PlainResult) -> None:
    assert any(it.cheap_ms is not None and it.time_ms is None for it in result.trials)


def _bounds(result: PlainResult) -> None:
    assert any(map(_is_bound, result.trials))


def _reasons(result: PlainResult, outcome: str, count: str | None, _: str) -> None:
    assert sum(it.outcome.value == outcome for it in result.trials) >= int((count or "1").replace(",", ""))


def _changed_bits(result: PlainResult, told: str) -> None:
    groups = re.findall(r"([^,;()]+?) (never|always|sometimes)(?: \((\d+) of (\d+)\))?(?=[,;]|$)", told)
    assert groups, told
    for name, verdict, differ, pairs in groups:
        assert verdict in ("never", "always", "sometimes"), name
        assert not pairs or 0 <= int(differ) <= int(pairs)
        assert verdict != "sometimes" or 0 < int(differ) < int(pairs)


def _has_bits(result: PlainResult) -> None:
    best = _best(result)
    assert best is None or best.bits == "same"


def _price_of_bits(result: PlainResult, bound: str | None, price: str, name: str, time_ms: str) -> None:
    among = [*result.trials, *result.finalists]
    priced = next((it for it in among if format_config(it.config) == name and it.bits == "same"), None)
    assert priced is not None
    assert bool(bound) is (priced.outcome is Outcome.SLOW)
    _near(time_ms, priced.time_ms)
    assert result.time_ms
    assert math.isclose(float(price), float(time_ms) / result.time_ms, rel_tol=0.02)


_SENTENCES: dict[str, Callable[..., None]] = {
    r"bits: (.*)": _changed_bits,
    r"the winner has the defaults' bits": _has_bits,
    r"the defaults' bits cost (at least )?([\d.e+-]+)x: (.*), the fastest config with them, takes (?:at least )?(\S+) "
    r"ms": _price_of_bits,
    r"\[\d+\] (\w+)(?: \(\w+\))?(?:, ([\d,]+) configs)?(?:, for .*?)?: (.*)": _reasons,
    r"cheap ms: the time of a cheaply compiled program, to find the configs that may win": _cheap,
    r"> stopped early: every run took at least this long": _bounds,
    r"(.*) ended as (\w+), so there is no speed-up": _failed_defaults,
    r"(.*?) \((.*)\) beat every config: calls run with them": _defaults_beat_all,
    r"speed-up: against (.*): (\S+) ms": _against,
    r"(.*) are far behind, so they took part in (\d+) of the (\d+) rounds of the final": _far_behind,
    r"speed-up of \*: ([\d.e+-]+)x to ([\d.e+-]+)x,? .*": _interval,
    r"\* (.*?) ((?:is|has|won|had|ties) .*)": _check_why,
}


# --- JSON and CSV ---


def _check_rows(result: TuningResult, shown: PlainResult, folder: Path) -> None:
    rows = result.to_dicts()
    trials = shown.trials or (None,)
    assert len(rows) == len(trials)
    for row, trial in zip(rows, trials, strict=True):
        if trial is None:
            assert row["is_best"]
            assert row["time_ms"] is None or row["time_ms"] == result.time_ms
            continue
        assert row["outcome"] == trial.outcome.value
        assert row["time_ms"] == trial.time_ms
        assert row["time_kind"] == _kind(trial, shown)
        assert row["speedup"] == _speedup(trial, shown)
        assert row["is_best"] is _is_best(trial, shown)
        assert row["is_finalist"] is _is_finalist(trial, shown)
        assert row["is_tie"] is any(equal(trial.config, config) for config in shown.tie)
        assert row["samples_ms"] == list(trial.samples_ms)
    if rows:
        path = folder / "all-told.csv"
        result.to_csv(path)
        text = path.read_bytes().decode()
        for row, cells in zip(rows, csv.DictReader(io.StringIO(text, newline="")), strict=True):
            assert cells["time_ms"] == ("" if row["time_ms"] is None else str(row["time_ms"]))
            assert (cells["time_kind"], cells["outcome"]) == (row["time_kind"], row["outcome"])
            assert json.loads(cells["samples_ms"]) == row["samples_ms"]


# --- the page ---


def _check_problem(problem: Any, result: PlainResult, page: Any) -> None:
    trials: Sequence[Trial] = result.trials if problem["trials"]["n"] else ()
    columns = problem["trials"]
    assert columns["n"] == len(trials)
    _near(problem["bestMs"], None if math.isnan(result.time_ms) else result.time_ms, 6)
    _near(problem["defaultMs"], result.default_time_ms, 6)
    outcomes = [name for name, _ in page["outcomes"]]
    for at, trial in enumerate(trials):
        assert outcomes[columns["outcome"][at]] == trial.outcome.value
        assert columns["kind"][at] == _kind(trial, result)
        if _is_bound(trial):
            _at_most(columns["ms"][at], trial.time_ms or 0.0, 6)
        else:
            _near(columns["ms"][at], _least(trial), 6)
        assert page["texts"][columns["message"][at]][:20] or not trial.message.strip("\n")
    if problem["why"] and trials:
        check_reason(problem["why"], result)
    assert (problem["best"] is None) is (_best(result) is None or not trials)
    _check_effects(problem, trials)
    _check_best_so_far(problem["bestSoFar"], trials)
    _check_front([trials[at] for at in problem["pareto"]], trials)
    for at, _, is_default, samples in problem["finalists"]:
        if at is not None and _kind(trials[at], result) == "final":
            assert len(samples) == len(trials[at].samples_ms)
        assert not is_default or result.default_config is not None
    if problem["compared"] and result.score is None:
        _check_gain(problem["compared"], result)


def _check_gain(text: str, result: PlainResult) -> None:
    """Asserts that the gain is the quotient of the two times that are told beside it."""
    assert result.default_time_ms is not None
    speedup = result.default_time_ms / result.time_ms
    if found := re.match(r"([\d.e+]+)x (faster|slower) than the defaults", text):
        _near(found[1], max(speedup, 1 / speedup), 2)
        assert (found[2] == "faster") is (speedup > 1)


def _check_effects(problem: Any, trials: Sequence[Trial]) -> None:
    rng = random.Random(len(trials))
    timed = [(at, trial) for at, trial in enumerate(trials) if _least(trial) is not None]
    for tunable, effect, values in zip(
        problem["tunables"], problem["effects"], problem["trials"]["config"], strict=True
    ):
        least, most = effect["factor"][0], math.inf if effect["factor"][1] is None else effect["factor"][1]
        assert len(effect["best"]) == len(tunable["values"])
        for _ in range(_COMPLETIONS if timed else 0):
            best: dict[int, float] = {}
            for at, trial in timed:
                own = (trial.time_ms or 0.0) * (rng.choice(_MORE) if _is_bound(trial) else 1.0)
                best[values[at]] = min(own, best.get(values[at], math.inf))
            factor = max(best.values()) / min(best.values())
            assert least * (1 - 1e-5) <= factor <= most * (1 + 1e-5), (tunable["name"], least, factor, most)
            for value, ends in enumerate(effect["best"]):
                assert (ends is None) is (value not in best)
                if ends is not None:
                    high = math.inf if ends[1] is None else ends[1]
                    assert ends[0] * (1 - 1e-5) <= best[value] <= high * (1 + 1e-5)
        if not any(_is_bound(trial) for _, trial in timed):
            assert least == most, "nothing is uncertain"
        _check_effect_text(effect["text"], least, most)


def _check_effect_text(text: str, least: float, most: float) -> None:
    low, high = re.search(r"at least ([\d.e+]+)x", text), re.search(r"at most ([\d.e+]+)x", text)
    if low:
        _at_most(float(low[1]), least, 3)
    if high:
        _at_most(most, float(high[1]), 3)
    if exact := re.fullmatch(r"([\d.e+]+)x as long", text):
        _near(exact[1], least, 2)
        assert math.isclose(least, most)
    assert (
        low
        or high
        or exact
        or (most < 1.0501 and text == "hardly matters")
        or (most == math.inf and text == "not known")
    )


def _check_best_so_far(places: Sequence[int], trials: Sequence[Trial]) -> None:
    known = [_most(trial) for trial in trials]
    assert [known[at] for at in places] == sorted({known[at] for at in places}, reverse=True)
    if any(time_ms < math.inf for time_ms in known):
        assert known[places[-1]] == min(known)
    if all(trial.ended_s is not None for trial in trials):
        ended = [trial.ended_s or 0.0 for trial in trials]
        for at in places:
            assert all(known[other] > known[at] for other in range(len(trials)) if ended[other] < ended[at])


def _check_front(front: Sequence[Trial], trials: Sequence[Trial]) -> None:
    """Asserts that no config of the front is known to be beaten, and that no finished config off it is unbeaten."""
    sized = [trial for trial in trials if trial.time_ms is not None and trial.device_memory_bytes is not None]

    def beats(other: Trial, trial: Trial) -> bool:
        mine, theirs = (
            (_least(trial) or 0.0, trial.device_memory_bytes or 0),
            (_most(other), other.device_memory_bytes or 0),
        )
        return theirs[0] <= mine[0] and theirs[1] <= mine[1] and theirs != mine

    assert not [trial for trial in front if any(beats(other, trial) for other in sized)]
    for trial in sized:
        if not _is_bound(trial) and not any(map(equal, [it.config for it in front], [trial.config] * len(front))):
            own = (trial.time_ms, trial.device_memory_bytes)
            alike = any((it.time_ms, it.device_memory_bytes) == own for it in front)
            assert alike or any(beats(other, trial) for other in sized), trial
    assert len({canonical_json(text_of(it.config)) for it in front}) == len(front)
    assert Counter(map(_is_bound, front))[True] <= len(front)
