"""The interval of a speed-up holds later runs, although few processes have measured it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from quarantune.measure import intervals
from quarantune.measure.finals import Final
from quarantune.measure.model import BETWEEN

RUNS = 4000


def held(processes: int, draw: Callable[[], float]) -> float:
    """Returns the share of later runs whose figure lies in the interval of earlier ones."""
    found = 0
    for _ in range(RUNS):
        low, high = intervals.later_run([3 * math.exp(draw()) for _ in range(processes)], "wall")
        found += low <= 3 * math.exp(draw()) <= high
    return found / RUNS


@pytest.mark.parametrize("processes", [1, 2, 3, 9, 12])
def test_the_interval_of_few_processes_holds_a_later_run(processes: int) -> None:
    generator = np.random.default_rng(processes)
    assert held(processes, lambda: generator.normal(0, BETWEEN["wall"])) > 0.945


def test_processes_that_scatter_more_than_usual_widen_the_interval() -> None:
    generator = np.random.default_rng(0)
    shares = [held(processes, lambda: generator.normal(0, 4 * BETWEEN["wall"])) for processes in (1, 3, 9)]
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.9
    alike, apart = intervals.later_run([2.0] * 3, "wall"), intervals.later_run([1.5, 2.0, 2.5], "wall")
    assert apart[0] < alike[0] < 2 < alike[1] < apart[1]


def test_more_processes_that_agree_narrow_the_interval() -> None:
    widths = [math.log(high / low) for low, high in (intervals.later_run([2.0] * n, "wall") for n in range(1, 13))]
    assert widths == sorted(widths, reverse=True)
    assert math.log(np.divide(*reversed(intervals.later_run([2.0], "device")))) < widths[-1]


def test_a_speedup_s_interval_has_a_figure_for_each_process() -> None:
    best, default = [1.0] * 3 + [1.2] * 4, [2.0] * 3 + [2.1] * 4
    apart = intervals.speedup_interval(best, default, clock="wall", processes=(3, 4))
    assert apart == pytest.approx(intervals.later_run([2.0, 2.1 / 1.2], "wall"))
    assert intervals.speedup_interval(best, default, clock="wall") == pytest.approx(
        intervals.later_run([2.1 / 1.2], "wall", within=intervals.standard_error([2.0] * 3 + [2.1 / 1.2] * 4))
    )
    shorter = intervals.speedup_interval(best, default[:3], clock="wall", processes=(3, 4))
    assert shorter is not None
    assert shorter[0] < 2.0 / 1.2 < shorter[1], "the defaults left early: the rounds count as one process's"
    assert intervals.speedup_interval(best, default[:2], clock="wall", processes=(3, 4)) is None


def test_an_interval_encloses_the_typical_times_of_a_busy_machine() -> None:
    quiet = intervals.speedup_interval([1.0] * 5, [9.0] * 5, clock="wall", typical=[9.0])
    busy = intervals.speedup_interval([1.0] * 5, [9.0] * 5, clock="wall", typical=[4.0, 6.25])
    assert quiet is not None
    assert busy is not None
    assert busy[0] == pytest.approx(intervals.later_run([4.0, 6.25], "wall")[0])
    assert busy[1] >= quiet[1]
    assert quiet == pytest.approx(intervals.later_run([9.0], "wall"))


def test_rounds_of_another_process_join_a_final_if_they_fit() -> None:
    final = Final.of([4, 2, 7], [[1.0] * 3, [2.0] * 3, [90.0]], [[], [], []], typical_ms={4: (1.1,), 2: (2.2,)})
    assert (final.counts, final.lasting) == ((3,), [4, 2])
    further = Final.of([4, 2], [[1.5] * 5, [2.5] * 5], [[], []], typical_ms={4: (1.6,), 2: (2.6,)})
    joined = final.joined(further)
    assert joined.rounds_ms == {4: (1.0,) * 3 + (1.5,) * 5, 2: (2.0,) * 3 + (2.5,) * 5, 7: (90.0,)}
    assert (joined.processes, joined.counts, joined.lasting) == ((3, 5), (3, 5), [4, 2])
    assert joined.typical_ms == {4: (1.1, 1.6), 2: (2.2, 2.6)}
    uneven = Final.of([4, 2], [[1.5] * 5, [9.5] * 2], [[], []])
    for other in (uneven, Final(), Final.of([2, 4], [[1.0], [1.0]], [[], []])):
        assert final.joined(other) is final
