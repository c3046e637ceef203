"""Formats results as Markdown tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_REASON_WIDTH = 100

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""For each contender, the results of its jobs; a failed job has only `error`, the reason."""


def sweeps(runs: Runs, oracle: Mapping[str, Any], *, baseline: str) -> str:
    """Returns a table of each contender's sweep time and of its regret: by how much its choice is slower than the best.

    Args:
        runs: `sweep_s` and `config` of each run.
        oracle: `configs` and `times_ms`.
        baseline: the contender to compare the others' times with.
    """
    medians = [(statistics.median(times), config) for times, config in _timed(oracle)]
    best_ms = min(median for median, _ in medians)

    def regret(chosen: Mapping[str, Any]) -> float:
        return next((median / best_ms - 1 for median, config in medians if config == chosen), math.inf)

    baseline_s = _median(runs[baseline], "sweep_s")
    rows = [["contender", "sweep", "shortest to longest", f"over {baseline}'s", "regret", "worst regret"]]
    for contender, of_one in runs.items():
        finished, failed = _split(of_one)
        if not finished:
            rows.append([contender, _failure(failed), "", "", "", ""])
            continue
        times = [run["sweep_s"] for run in finished]
        regrets = [regret(run["config"]) for run in finished]
        sweep_s = statistics.median(times)
        rows.append(
            [
                f"{contender}, {_failure(failed)}" if failed else contender,
                f"{sweep_s:.2f} s",
                f"{min(times):.2f} to {max(times):.2f} s",
                _ratio(sweep_s, baseline_s),
                f"{statistics.median(regrets):.1%}",
                f"{max(regrets):.1%}",
            ]
        )
    return _markdown(rows)


def about(oracle: Mapping[str, Any]) -> str:
    """Describes a space in sentences, with the size of differences that are only noise."""
    timed = [(statistics.median(times), times, config) for times, config in _timed(oracle)]
    best_ms, _, best = min(timed, key=lambda entry: entry[0])
    worst_ms, _, _ = max(timed, key=lambda entry: entry[0])
    rounds = max(len(times) for _, times, _ in timed)
    # Only configs close to the best have a time of every round.
    halves = [(times[::2], times[1::2]) for _, times, _ in timed if len(times) == rounds]
    noise = statistics.median(abs(statistics.median(a) / statistics.median(b) - 1) for a, b in halves)
    named = ", ".join(f"{name}={value}" for name, value in best.items())
    return (
        f"{len(timed)} of {len(oracle['configs'])} configs work. The best, {named}, takes {best_ms:.4g} ms; the worst "
        f"takes {worst_ms / best_ms:.1f} times as long. A config's times in two halves of the rounds differ by "
        f"{noise:.1%}: regrets that small mean nothing."
    )


def cached_calls(runs: Runs) -> str:
    """Returns a table of the cost of a cached call."""
    rows = [["contender", "cached call", "bare jit", "over bare jit"]]
    for contender, of_one in runs.items():
        finished, failed = _split(of_one)
        if not finished:
            rows.append([contender, _failure(failed), "", ""])
            continue
        tuned_us, bare_us = _median(finished, "tuned_us"), _median(finished, "bare_us")
        assert tuned_us is not None
        rows.append([contender, f"{tuned_us:.1f} us", f"{bare_us:.1f} us", _ratio(tuned_us, bare_us)])
    return _markdown(rows)


def sandbox(costs: Mapping[str, Any]) -> str:
    """Returns a table of the cost per config of each way of sweeping; the first way uses no sandbox."""
    medians = {way: statistics.median(times) for way, times in costs["per_config_ms"].items()}
    bare_ms = next(iter(medians.values()))
    rows = [["trials", "per config", "more than in process", "over in process"]]
    rows += [
        [way, f"{cost_ms:.1f} ms", f"{cost_ms - bare_ms:+.1f} ms", _ratio(cost_ms, bare_ms)]
        for way, cost_ms in medians.items()
    ]
    return f"{_markdown(rows)}\n\nThe first sweep of a process takes {costs['start_s']:.2f} s more than a later one."


def _timed(oracle: Mapping[str, Any]) -> list[tuple[list[float], Mapping[str, Any]]]:
    """Returns the times in milliseconds of each working config, together with the config."""
    pairs = zip(oracle["times_ms"], oracle["configs"], strict=True)
    return [(times, config) for times, config in pairs if times]


def _split(runs: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    return [run for run in runs if "error" not in run], [run["error"] for run in runs if "error" in run]


def _failure(reasons: Sequence[str]) -> str:
    reason = " ".join(reasons[0].split()).replace("|", "/")
    return f"{len(reasons)} failed: {reason[:_REASON_WIDTH]}"


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [run[name] for run in runs if "error" not in run]
    return statistics.median(values) if values else None


def _ratio(value: float, base: float | None) -> str:
    return "" if base is None else f"{value / base:.2f} x"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
