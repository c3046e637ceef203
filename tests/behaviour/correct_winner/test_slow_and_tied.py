"""A slow config cannot win, and of equally fast configs the default or the first wins."""

from __future__ import annotations

import re
import statistics

import pytest
from tuned_functions import X, after, here, tuned

from quarantune import Outcome
from quarantune.measure import finals
from quarantune.sweep.request import Swept

pytestmark = pytest.mark.usefixtures("two_slots")


def test_a_config_ruled_out_by_its_first_samples_cannot_win(findings: list[Swept]) -> None:
    # The factor is larger than any disturbance on a busy machine.
    result = tuned(lambda x, do: after(do, x), [20, 100_000], rep=20).tune(X)
    fast, slow = result.trials
    assert (fast.outcome, slow.outcome) == (Outcome.OK, Outcome.SLOW)
    assert 1 <= len(slow.samples_ms) <= 20
    assert re.search(r"stopped.*, because another config is clearly faster", slow.message)
    assert slow.time_ms is not None
    assert slow.time_ms <= min(slow.samples_ms), "it is a bound"
    assert result.best_config == fast.config
    assert slow.config not in result.tie
    # A busy machine may give the config a second look, which changes nothing.
    assert findings[0].final == finals.Final() or len(slow.samples_ms) < 4


def test_samples_are_kept_raw_with_the_clock_that_took_them() -> None:
    (only,) = tuned(lambda x, do: x + do, [1], rep=7).tune(X).trials
    assert only.clock == "wall"
    assert 3 <= len(only.samples_ms) <= 7
    assert len(set(only.samples_ms)) > 1
    assert only.time_ms == statistics.median(only.samples_ms)
    with here():
        assert tuned(lambda x, do: x + do, [2]).tune(X).trials[0].clock == "wall"


@pytest.mark.parametrize(("default", "winner"), [(3, 3), (9, 1)], ids=["the default", "the first"])
def test_among_ties_the_default_wins_or_else_the_first_config(default: int, winner: int) -> None:
    result = tuned(lambda x, do: x + 1, [1, 2, 3], default=default).tune(X)
    assert result.best_config == {"do": winner}
    assert result.tie == tuple({"do": do} for do in (1, 2, 3) if do != winner)


def test_equal_programs_tie_and_beat_slower_ones() -> None:
    result = tuned(lambda x, do: after(3000 if do < 2 else 100, x), [0, 1, 2, 3, 4], default=4).tune(X)
    assert result.best_config == {"do": 4}
    assert [config["do"] for config in result.tie] == [2, 3]
    assert len({trial.samples_ms for trial in result.trials[2:]}) == 1
