"""Configs predicted to compile for long begin first, even if their values are opaque."""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quarantune.scheduler.compile_times import CompileTimes
from quarantune.scheduler.workers import Job
from quarantune.sweep.routes import _from_both_ends
from quarantune.values.configs import Config

SLOTS = 6
REPLAYS = 60


class Kind(enum.Enum):
    SMALL = "z"
    LARGE = "a"
    HUGE = "m"


def last_end_s(configs: Sequence[Config], times_s: Sequence[float], *, model: CompileTimes | None) -> float:
    """Returns the time of the last compilation; without a model, configs begin in a sweep's initial order."""
    jobs = [Job(index, config) for index, config in enumerate(configs)]
    waiting = [*_from_both_ends(dict(enumerate(jobs)), ()).values()]
    running: list[tuple[float, int, float]] = []
    now = 0.0
    while waiting or running:
        if model is not None and len(waiting) > 1 and model.is_news:
            waiting = model.longest_first(waiting, {jobs[index]: now - began for _, index, began in running})
        while waiting and len(running) < SLOTS:
            job = waiting.pop(0)
            heapq.heappush(running, (now + times_s[job.index], job.index, now))
        now, index, began = heapq.heappop(running)
        if model is not None:
            model.add(jobs[index], now - began)
    return now


def gain(configs: Sequence[Config], draw_s: Callable[[np.random.Generator], np.ndarray]) -> tuple[float, float]:
    """Returns the mean logarithm of the ratio of the ends with and without the model, and its standard error."""
    logs = []
    for seed in range(REPLAYS):
        times_s = [float(each) for each in draw_s(np.random.default_rng(seed))]
        with_it, without = (last_end_s(configs, times_s, model=model) for model in (CompileTimes(), None))
        logs.append(math.log(with_it / without))
    return statistics.fmean(logs), statistics.stdev(logs) / REPLAYS**0.5


PLACES: list[Config] = [{"place": place} for place in range(48)]
GRID: list[Config] = [
    {"BM": block, "kind": kind, "stages": stages}
    for block, kind, stages in itertools.product((32, 64, 128, 256), Kind, (1, 2, 3, 4))
]


def scattered(rng: np.random.Generator, spread: float = 0.2) -> np.ndarray:
    return np.exp(spread * rng.standard_normal(len(PLACES)))


def families(rng: np.random.Generator) -> np.ndarray:
    return np.repeat(np.exp(rng.standard_normal(6)), 8) * scattered(rng)


def hill(rng: np.random.Generator) -> np.ndarray:
    place = rng.uniform(0.3, 0.7)
    return np.exp(2 * np.exp(-(((np.arange(48) / 48 - place) / 0.1) ** 2))) * scattered(rng)


def grid(rng: np.random.Generator) -> np.ndarray:
    effects = [rng.standard_normal(count) * 0.5 for count in (4, 3, 4)]
    return np.exp([sum(parts) for parts in itertools.product(*effects)]) * scattered(rng)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configs", "draw_s", "most"), [(PLACES, families, 0.98), (PLACES, hill, 0.97), (GRID, grid, 0.95)]
)
def test_compiling_ends_sooner_if_neighbours_take_alike(
    configs: list[Config], draw_s: Callable[[np.random.Generator], np.ndarray], most: float
) -> None:
    log, error = gain(configs, draw_s)
    assert math.exp(log + 2 * error) < most, (log, error)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_compiling_ends_no_later_if_places_predict_nothing(spread: float) -> None:
    log, error = gain(PLACES, lambda rng: scattered(rng, spread))
    assert log < 3 * error, (log, error)


def test_neighbours_are_numbers_by_size_and_others_by_order() -> None:
    numbers = [Job(index, {"place": place}) for index, place in enumerate([9, 1, 5, 2, 8])]
    model = CompileTimes()
    model.add(numbers[0], 8.0)
    model.add(numbers[1], 1.0)
    assert model.longest_first(numbers[2:], {}) == [numbers[4], numbers[2], numbers[3]]

    kinds = [Job(index, {"kind": kind}) for index, kind in enumerate(Kind)]
    model = CompileTimes()
    model.add(kinds[0], 1.0)
    model.add(kinds[1], 2.0)
    late = [Job(3, {"kind": Kind.HUGE}), Job(4, {"kind": Kind.SMALL}), Job(5, {"kind": Kind.LARGE})]
    assert [job.config["kind"] for job in model.longest_first(late, {})] == [Kind.LARGE, Kind.HUGE, Kind.SMALL]


def test_ordering_thousands_of_configs_solves_few_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, solve = [], np.linalg.solve
    monkeypatch.setattr(np.linalg, "solve", lambda normal, right: (sizes.append(len(normal)), solve(normal, right))[1])
    jobs = [Job(index, {"place": index, "flag": index % 2 == 0}) for index in range(4000)]
    model = CompileTimes()
    for job in jobs[:20]:
        model.add(job, 1.0 + job.index)
    ordered = model.longest_first(jobs[20:], {})
    assert sorted(job.index for job in ordered) == list(range(20, 4000))
    assert sizes == [66]
