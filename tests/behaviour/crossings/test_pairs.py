"""Every pair of features meets in a call that computes what it computes untuned, or is refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crossings
import pytest
from helpers import ROOT, SUPPORT, child_environ, compiling_once
from shared_python import SharedPython

ROWS = crossings.rows()
TRIPLES = crossings.rows(crossings.RISKIEST, strength=3)
COSTLY = {"check_grad", "time_grad", "batch_invariant", "no_jit", "scan", "shard_map", "over300", "rule", "tune_for"}
"""Values of which each makes a row take longer."""
FLAGS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of both processes. Much of a row's time would go into programs that other rows have compiled."""
    return FLAGS | compiling_once(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def processes(flags: dict[str, str]) -> Iterator[list[SharedPython]]:
    """Two processes with two devices each: one tunes, and the other uses what it has saved."""
    both = [SharedPython(environ=child_environ(SUPPORT, **flags)) for _ in range(2)]
    yield both
    for process in both:
        process.close()


@pytest.fixture
def run(
    processes: list[SharedPython], flags: dict[str, str], tmp_path: Path
) -> Callable[[crossings.Row], dict[str, Any]]:
    """Runs a row in both processes, and returns its outcome."""

    def run_row(row: crossings.Row) -> dict[str, Any]:
        outcome: dict[str, Any] = {}
        for process, step in zip(processes, ("first", "second"), strict=True):
            script = tmp_path / f"{step}_process.py"
            place = f"pathlib.Path({str(tmp_path)!r})"
            script.write_text(f"import pathlib, crossed_calls\ncrossed_calls.{step}({row}, {place})\n")
            done = process.run(script, **flags)
            assert done.returncode == 0, f"{crossings.label(row)}\n{done.stdout}{done.stderr}"
            outcome = json.loads((tmp_path / "outcome.json").read_text())
            if outcome.get("config") is None:
                break
        return outcome

    return run_row


def covered(rows: list[crossings.Row], strength: int) -> set[crossings.Pair]:
    return {frozenset(it) for row in rows for it in itertools.combinations(row.items(), strength)}


def quick_rows() -> list[int]:
    """Returns the positions of the cheapest rows that hold a third of the pairs, for the quick tier."""
    pairs, found = crossings.groups(tuple(crossings.FEATURES), 2), list[int]()
    for at in sorted(range(len(ROWS)), key=lambda at: (at > 0, len(COSTLY & {*ROWS[at].values()}))):
        found.append(at)
        if 3 * len(pairs & covered([ROWS[at] for at in found], 2)) > len(pairs):
            break
    return found


QUICK = quick_rows()


def test_the_rows_hold_every_pair_and_triple() -> None:
    pairs, triples = (crossings.groups(it, n) for it, n in ((tuple(crossings.FEATURES), 2), (crossings.RISKIEST, 3)))
    assert pairs <= covered(ROWS, 2)
    assert triples <= covered(TRIPLES, 3)
    assert len(pairs & covered([ROWS[at] for at in QUICK], 2)) > len(pairs) / 3
    assert not [row for row in [*ROWS, *TRIPLES] if not crossings.is_possible(row)]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=str(at), marks=[pytest.mark.slow] * (at not in QUICK)) for at, row in enumerate(ROWS)],
)
def test_a_tuned_call_computes_what_the_untuned_one_does(row: crossings.Row, run: Any) -> None:
    outcome = run(row)
    assert "refused" not in outcome, f"{crossings.label(row)}\n{outcome['refused']}\n{outcome['trace']}"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=str(at)) for at, row in enumerate(TRIPLES)])
def test_triples_of_the_riskiest_features_hold(row: crossings.Row, run: Any) -> None:
    outcome = run(row)
    assert "refused" not in outcome, f"{crossings.label(row)}\n{outcome['refused']}\n{outcome['trace']}"


def _named(pair: crossings.Pair) -> Any:
    is_long = not {("ask", "verify"), ("ask", "recorded")}.isdisjoint(pair)  # these tune first
    return pytest.param(pair, id="-".join(sorted(map("=".join, pair))), marks=[pytest.mark.slow] * is_long)


@pytest.mark.parametrize("pair", [*map(_named, crossings.REFUSED)])
def test_a_refused_pair_is_refused_by_name(pair: crossings.Pair, run: Any) -> None:
    outcome = run(crossings.completed(dict(pair)))
    assert "refused" in outcome, outcome
    assert not [words for words in crossings.REFUSED[pair].says if words not in outcome["refused"]], outcome["refused"]


def test_the_documents_name_every_refused_pair() -> None:
    assert crossings.table() in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
