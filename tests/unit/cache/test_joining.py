"""Entries of one key are joined in one way, so that each program keeps its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quarantune import TuningCache
from quarantune.cache.joining import is_conflict, joined_by_export, joined_by_merge, joined_by_sweep, results_in
from quarantune.cache.store import Store


def result(n: int, program: str | None, **fields: Any) -> dict[str, Any]:
    """Returns an entry with one result."""
    recorded = {} if program is None else {"program": {"winner": f"program:{program}.{program}"}}
    return {"config": {"n": n}, "time_ms": 1.0, **recorded, **fields}


def several(*results: dict[str, Any]) -> dict[str, Any]:
    first, *others = results
    return {**first, "other_programs": others}


def held(entry: dict[str, Any]) -> list[tuple[int, str]]:
    """Returns the config and the program of each result."""
    return [(each["config"]["n"], each.get("program", {}).get("winner", "")[-1:]) for each in results_in(entry)]


@pytest.mark.parametrize("joined", [joined_by_sweep, joined_by_merge, joined_by_export])
def test_every_way_of_joining_keeps_each_programs_result(joined: Callable[..., dict[str, Any]]) -> None:
    a, b, c = (result(n, name, created=str(n)) for n, name in enumerate("abc"))
    assert held(joined("", "", a, b)) == [(1, "b"), (0, "a")]
    assert held(joined("", "", several(a, b), c)) == [(2, "c"), (0, "a"), (1, "b")]
    assert sorted(held(joined("", "", a, several(b, c)))) == [(0, "a"), (1, "b"), (2, "c")]
    assert joined("", "", several(b, a), b) == several(b, a), "nothing is new"


@pytest.mark.parametrize("joined", [joined_by_sweep, joined_by_merge, joined_by_export])
def test_one_program_under_two_configs_has_two_results(joined: Callable[..., dict[str, Any]]) -> None:
    assert held(joined("", "", result(1, "a"), result(2, "a", created="1"))) == [(2, "a"), (1, "a")]


def test_a_result_of_an_unknown_program_is_replaced() -> None:
    old, new = result(1, None), result(2, "a", created="1")
    assert joined_by_sweep("", "", old, new) == new
    assert held(joined_by_sweep("", "", several(result(1, "a"), result(2, "b")), result(3, None))) == [
        (3, ""),
        (1, "a"),
        (2, "b"),
    ]


def test_the_latest_eight_programs_are_kept() -> None:
    entry = result(0, "a")
    for n, name in enumerate("bcdefghijkl", 1):
        entry = joined_by_sweep("", "", entry, result(n, name))
    assert "".join(name for _, name in held(entry)) == "lkjihgfe"


@pytest.mark.parametrize(
    "differing", [{"calls": [{"call": "x f32[4]"}]}, {"arguments": [{"x": {"shape": [4]}}]}, {"space": {"configs": 2}}]
)
def test_results_for_other_calls_do_not_compare_their_times(differing: dict[str, Any]) -> None:
    thorough = result(1, "a", search={"stopped": "exhausted", "seen": 9, "space_size": 9})
    quick = result(2, "a", search={"stopped": "max_trials", "seen": 2, "space_size": 9}) | {"time_ms": 2.0}
    assert held(joined_by_sweep("", "", thorough, quick))[0] == (1, "a")
    assert held(joined_by_sweep("", "", thorough, quick | differing))[0] == (2, "a")


def test_a_merge_chooses_for_each_program() -> None:
    mine = several(result(1, "a", created="5"), result(2, "b", samples=3))
    theirs = several(result(2, "b", samples=9, created="4"), result(1, "a", samples=1))
    joined = joined_by_merge("", "", mine, theirs)
    assert held(joined) == [(1, "a"), (2, "b")]
    assert [each.get("samples") for each in results_in(joined)] == [None, 9]


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [("d", True), ("e", False), (None, True)],
    ids=["one function", "two functions", "an unknown function"],
)
def test_two_choices_for_one_function_are_a_conflict(theirs: str | None, expected: bool) -> None:
    mine, other = (result(n, program) for n, program in ((1, "a"), (2, "b")))
    mine["program"]["defaults"] = "program:d.d"
    if theirs:
        other["program"]["defaults"] = f"program:{theirs}.{theirs}"
    assert is_conflict(mine, other) is expected
    assert not is_conflict(mine, several(other, mine))


def test_merged_caches_report_no_conflict_between_programs(tmp_path: Path) -> None:
    mine, theirs = TuningCache(tmp_path / "mine"), TuningCache(tmp_path / "theirs")
    a, b = result(2, "a", created="2025-01-01"), result(1, "b", created="2025-01-02")
    Store(mine.directory).put("f", "cpu", "[1]", a)
    Store(theirs.directory).put("f", "cpu", "[1]", several(b, a))
    report = mine.merge(theirs)
    assert (len(report.updated), len(report.conflicts)) == (1, 0), report
    ((key, entry),) = mine
    assert held(entry) == [(1, "b"), (2, "a")], "the newer comes first"
    assert len(mine.merge(theirs).unchanged) == 1
    assert theirs.export(tmp_path / "mine") == [key]
    assert held(TuningCache(tmp_path / "mine").entry(*key) or {}) == [(1, "b"), (2, "a")], "exported results come first"
