"""Results say which tunables change bits, and what the defaults' bits cost."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from quarantune.results.html_report import page_data
from quarantune.results.report_data import PlainResult, ResultData
from quarantune.values.trial import Outcome, Trial

_KNOWN: Any = [(1, "other"), (2, "same")]


def result(trials: list[Trial], **fields: Any) -> PlainResult:
    best = min(trials, key=lambda trial: trial.time_ms or 9)
    given: dict[str, Any] = {"best_config": best.config, "time_ms": best.time_ms, "device": "cpu", "key": "{}"}
    return PlainResult(trials=tuple(trials), **given | fields)


def grid() -> list[Trial]:
    """Returns trials in which BM never changes bits, BK always does, and `warps` does for BK=64 only."""
    found = []
    for bm, bk, warps in itertools.product((16, 32), (32, 64), (4, 8)):
        digest = f"{bk:x}{warps if bk == 64 else 0}.aa"
        bits: Any = "same" if bk == 32 else "other"
        time_ms = 1.0 if (bm, bk, warps) == (32, 64, 8) else 1.25 if bk == 32 and bm == 16 and warps == 4 else 2.0
        config = {"BM": bm, "BK": bk, "warps": warps}
        found.append(Trial(config=config, outcome=Outcome.OK, time_ms=time_ms, bits=bits, digest=digest))
    return found


def test_tunables_are_told_by_the_pairs_that_differ_in_them_only() -> None:
    report = result(grid()).bits()
    found = {each.name: (each.verdict, each.differ, each.pairs) for each in report.tunables}
    assert found == {"BM": ("never", 0, 4), "BK": ("always", 4, 4), "warps": ("sometimes", 2, 4)}
    assert report.lines[0] == "bits: BM never; BK always; warps sometimes (2 of 4)"


def test_a_search_says_from_how_many_pairs() -> None:
    report = result(grid()[1:], seen=7, space_size=90).bits()
    assert str(report).startswith("bits: BM never (0 of 3); BK always (3 of 3); warps sometimes (2 of 3)")


def test_the_price_is_the_time_of_the_fastest_config_with_the_defaults_bits() -> None:
    report = result(grid(), default_config={"BM": 32, "BK": 32, "warps": 4}).bits()
    assert report.price == 1.25
    assert report.fastest == {"BM": 16, "BK": 32, "warps": 4}
    assert report.lines[1].startswith("the defaults' bits cost 1.25x: BM=16 BK=32 warps=4, the fastest config")
    unlisted = result(grid(), default_config={"BM": 1, "BK": 1, "warps": 1}, default_time_ms=1.1).bits()
    assert (unlisted.price, unlisted.fastest) == (1.1, {"BM": 1, "BK": 1, "warps": 1})
    same = [trial for trial in grid() if trial.bits == "same"]
    assert str(result(same).bits()).endswith("the winner has the defaults' bits")


def test_configs_that_were_stopped_early_count_by_their_fastest_run() -> None:
    trials = grid()
    slow = Trial(config={"BM": 64, "BK": 32, "warps": 4}, outcome=Outcome.SLOW, time_ms=9.0, own_ms=1.2, bits="same")
    assert result([*trials, slow]).bits().fastest_ms == 1.2


def test_unstable_configs_make_no_pairs_and_results_without_bits_say_nothing() -> None:
    unstable = [Trial(config={"n": n}, outcome=Outcome.OK, time_ms=1.0, bits="unstable", digest=f"{n}") for n in (1, 2)]
    assert result(unstable).bits().lines == []
    assert result([Trial(config={"n": 1}, outcome=Outcome.OK, time_ms=1.0)]).bits().lines == []


def test_the_report_has_the_pairs_of_each_tunable_and_the_bits_of_each_trial() -> None:
    (problem,) = page_data([ResultData(result(grid()), {})])["problems"]
    assert problem["bits"] == [["BM", 0, 4], ["BK", 4, 4], ["warps", 2, 4]]
    assert problem["bitsFinding"].startswith("BM never; BK always; warps sometimes (2 of 4)")
    assert problem["trials"]["bits"] == [trial.bits for trial in grid()]


def test_digests_of_an_earlier_sweep_make_no_pairs_with_those_of_this_one() -> None:
    other, same = (
        Trial(config={"n": n}, outcome=Outcome.OK, time_ms=1.0, digest=f"{n}", bits=bits) for n, bits in _KNOWN
    )
    earlier = dataclasses.replace(other, config={"n": 3}, digest="3", recalled_from=1.0)
    (tunable,) = result([other, same, earlier]).bits().tunables
    assert (tunable.pairs, tunable.differ) == (1, 1)
    (tunable,) = (
        result([same, dataclasses.replace(same, config={"n": 3}, digest="3", recalled_from=1.0)]).bits().tunables
    )
    assert (tunable.pairs, tunable.differ) == (1, 0), "both have the defaults' bits"
