"""Tables, exports and messages are sorted and explained, and no config or message garbles a terminal."""

from __future__ import annotations

import csv
import dataclasses
import html.parser
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_results import first_words, result_of, table_of, trial

from quarantune import ContextualResult, KernelChoice, TuningResult
from quarantune.results import report
from quarantune.values.trial import Outcome, Trial

CLEAR = "\x1b[2J\x1b]0;title\x07"


def hostile() -> list[Trial]:
    return [
        Trial(
            config={"mode": f"a\udc80{CLEAR}"},
            outcome=Outcome.ERROR,
            message=f"no\ud800 \u202e{CLEAR}\nmore",
            log_tail=CLEAR,
        ),
        Trial(config={"mode": (CLEAR, {"\x1b": "\r"})}, outcome=Outcome.CRASHED, message="\x00"),
        Trial(config={"mode": "naïve ✓"}, outcome=Outcome.OK, time_ms=1.0),
    ]


SWEEP = [
    trial(
        4,
        "slow",
        30.0,
        "it was stopped early, because another config is clearly faster",
        own_ms=23.8,
        samples_ms=(23.8, 36.2),
    ),
    trial(8, "error", message="ValueError: 300 KiB of 227 KiB"),
    trial(2, time_ms=7.75, samples_ms=(7.75,)),
    trial(1, time_ms=2.5, samples_ms=(2.5,)),
    trial(3, time_ms=25.0, samples_ms=(25.0,)),
    trial(9, "error", message="ValueError: 600 KiB of 227 KiB"),
    trial(7, "timeout", message="no end within 5 s " * 12),
]


def test_a_table_is_sorted_by_time_and_shows_the_defaults() -> None:
    result = result_of(*SWEEP, default_time_ms=7.75, default_config={"n": 2})
    assert first_words(result.table(width=100)) == [
        ["*", "1", "ok", "2.5"],
        ["2", "ok", "7.75", "defaults"],
        ["4", "slow", ">", "23.8"],
        ["3", "ok", "25", "0.31x"],
        ["8", "error", "[1]"],
        ["9", "error", "[1]"],
        ["7", "timeout", "[2]"],
    ]
    assert "3.10x" in result.table(width=100).splitlines()[1]


def test_reasons_are_whole_and_shared_below_the_table() -> None:
    result = result_of(*SWEEP, default_time_ms=7.75, default_config={"n": 2})
    for width in (40, 60, 200):
        table = result.table(width=width)
        assert max(map(len, table.splitlines())) <= width
        notes = " ".join(table.split("\n\n")[1].split())
        assert "* n=1 is the fastest; the next, n=2, takes 210% longer" in notes
        assert "> stopped early: every run took at least this long" in notes
        assert "[1] error (compile), 2 configs, for n=8: ValueError: 300 KiB of 227 KiB" in notes
        assert f"[2] timeout (measure): {('no end within 5 s ' * 12).strip()}" in notes
        assert "..." not in table
        assert "because another" not in table


def test_a_reason_is_told_once_for_all_configs_of_one_program() -> None:
    dump = "INTERNAL: " + "a long dump of the compiler " * 9
    shared = [trial(n, "error", message=f"the same program as n=8: {dump}") for n in (5, 6)]
    table = table_of(
        [*shared, trial(8, "error", message=dump), trial(1, time_ms=2.0)], width=10**4, best_config={"n": 1}
    )
    assert table.count(dump.strip()) == 1
    assert f"[1] error (compile), 3 configs: {dump.strip()}" in table
    assert table.count("error [1]") == 3


@pytest.mark.parametrize(
    ("best", "tie", "default", "expected"),
    [
        (1, (2,), 3, "* n=1 is as fast as n=2 (=) as far as the noise tells, and has the lowest time"),
        (2, (1,), 2, "* n=2 is as fast as n=1 (=) as far as the noise tells; among equals the function's own defaults"),
        (2, (1, 3), 9, "* n=2 is as fast as n=1 and n=3 (=) as far as the noise tells; among equals the first config"),
        (2, (), 9, "* n=2 won the final, in which the fastest are timed in turn; the lower time of n=1 was taken bef"),
    ],
)
def test_the_reason_for_the_winners_star_is_in_words(
    best: int, tie: tuple[int, ...], default: int, expected: str
) -> None:
    trials = [trial(n, time_ms=1 + n / 1000, samples_ms=(1.0,)) for n in (3, 2, 1)]
    others = {
        "finalists": (trials[3 - best],),
        "tie": tuple({"n": n} for n in tie),
        "default_config": {"n": default},
        "default_time_ms": 1.0,
    }
    table = table_of(trials, width=300, best_config={"n": best}, **others)
    assert expected in table
    marks = dict(re.findall(r"^([*=]?) +(\d)  ok", table, re.MULTILINE))
    assert {mark for mark in marks if mark} == ({"*", "="} if tie else {"*"})


def test_a_config_too_long_for_its_column_is_wrapped_not_cut() -> None:
    long = Trial(config={"tiles": "of eight by a hundred and twenty-eight"}, outcome=Outcome.OK, time_ms=1.0)
    table = table_of([long], width=40, best_config=long.config)
    assert max(map(len, table.splitlines())) <= 40
    rows = table.split("\n\n")[0].splitlines()[1:]
    assert " ".join(re.sub("ok.*", "", line[3:]).strip() for line in rows) == long.config["tiles"]


def test_eight_tunables_have_columns_and_constants_one_line() -> None:
    names = ["BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_SIZE_M", "num_warps", "num_stages", "split_k", "layout"]
    fixed = {"GROUP_SIZE_M": 8, "layout": "row"}
    trials = [
        Trial(config=dict.fromkeys(names, 32 << n) | fixed, outcome=Outcome.OK, time_ms=1.0 + n, compile_s=0.5)
        for n in range(3)
    ]
    roles = {"best_config": trials[1].config, "finalists": (trials[1],), "default_config": trials[0].config}
    wide, narrow = (table_of(trials, width, default_time_ms=1.0, **roles).splitlines() for width in (120, 60))
    assert wide[0] == narrow[0] == "all: GROUP_SIZE_M=8 layout=row"
    assert wide[1].split()[:7] == ["BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "split_k", "outcome"]
    assert wide[2].split()[:8] == ["*", *["64"] * 6, "ok"]  # the winner, though not the lowest time
    assert max(map(len, narrow)) <= 60
    assert [line.split() for line in narrow[1:5]] == [
        ["BLOCK_M", "BLOCK_N", "BLOCK_K", "outcome", "ms", "speed-up"],
        ["num_warps", "num_stages", "split_k"],
        ["*", "64", "64", "64", "ok", "2", "0.50x"],
        ["64", "64", "64"],
    ]


def test_a_results_repr_is_two_lines_and_says_where_it_is_from() -> None:
    result = result_of(*SWEEP, default_time_ms=7.75, default_config={"n": 2}, tie=({"n": 3},))
    result = dataclasses.replace(result, counts={"ok": 3, "slow": 1, "error": 2, "timeout": 1})
    first, second = repr(result).splitlines()
    assert first == "TuningResult: n=1, 3.10x faster than the defaults (2.5 ms against 7.75 ms)"
    assert second == "  7 configs: 3 ok, 1 slow, 2 error, 1 timeout; 1 tie with the winner; H200"


def test_a_cached_results_table_says_what_is_cached() -> None:
    swept = result_of(*SWEEP, default_time_ms=7.75, created="2026-11-22T09:30:00+00:00")
    counts = {"ok": 1, "slow": 2, "error": 2, "pruned": 1, "not_run": 3}
    assert dataclasses.replace(swept, trials=(), counts=counts).failures == {"error": 2, "pruned": 1}
    cached = dataclasses.replace(swept, trials=(), from_cache=True, counts={"ok": 3, "error": 2}, space_size=1000)
    text = " ".join(cached.table(width=60).split())
    assert text.startswith(
        "* n=1, 3.10x faster than the defaults (2.5 ms against 7.75 ms) 5 of 1,000 configs: 3 ok, 2 error; H200; tuned "
    )
    assert "tuned 2026-11-22T09:30:00+00:00; from the cache" in text
    assert cached.failures == {"error": 2}
    assert [row["n"] for row in cached.to_dicts()] == [1]


class Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_view_in_a_notebook_escapes_all_texts() -> None:
    bad = Trial(config={"n": "</table><script>alert(1)</script>"}, outcome=Outcome.ERROR, message="<b>no</b>")
    result = result_of(*SWEEP, bad, default_time_ms=7.75)
    cells = Cells()
    cells.feed(result._repr_html_())
    assert cells.tags == ["pre"]
    assert "<script>alert(1)</script>" in cells.text
    assert result.table(width=120) in cells.text


def test_the_view_in_a_notebook_has_the_fastest_of_many_configs() -> None:
    html = result_of(*(trial(n, time_ms=float(n)) for n in range(1, 51)))._repr_html_()
    assert "\n   20  ok" in html.replace("*", " ")
    assert "\n   21  ok" not in html
    assert "and 30 more (30 ok): rows=50 shows all" in html


def test_a_table_of_many_configs_is_short_unless_more_rows_are_asked_for() -> None:
    trials = [
        *(trial(n, time_ms=float(n)) for n in range(1, 31)),
        *(trial(n, "error", message="no") for n in range(31, 51)),
    ]
    result = result_of(*trials)
    lines = result.table(width=100).split("\n\n")
    assert len(lines[0].splitlines()) == 21
    assert lines[1].startswith("and 30 more (10 ok, 20 error): rows=50 shows all\n")
    assert "[1] error (compile), 20 configs: no" in lines[1], "reasons are told of rows that are left out, too"
    assert len(result.table(rows=np.int64(50)).split("\n\n")[0].splitlines()) == 51
    assert "and 49 more" in result.table(rows=0)
    assert "more (" not in result_of(*trials[:40]).table()
    with pytest.raises(TypeError, match="rows is '5': give a whole number of rows, or None for a short table"):
        result.table(rows="5")  # type: ignore[arg-type]


def test_trials_are_exported_as_dicts_csv_and_a_data_frame(tmp_path: Path) -> None:
    trials = [
        dataclasses.replace(trial(1, time_ms=2.5), config={"n": 1, "outcome": "mine", "shape": (8, 128)}),
        dataclasses.replace(hostile()[0], config={"n": 2, "outcome": "a,b\n"}),
    ]
    result = TuningResult(
        best_config=trials[0].config,
        time_ms=2.5,
        trials=tuple(trials),
        key="",
        device="",
        fn=print,
        default_time_ms=5.0,
    )
    first, second = result.to_dicts()
    assert (first["n"], first["config.outcome"], first["shape"]) == (1, "mine", [8, 128])
    assert (first["outcome"], first["speedup"], first["is_best"], second["is_best"]) == ("ok", 2.0, True, False)
    assert list(first) == list(second)
    assert second["shape"] is None
    result.to_csv(tmp_path / "trials.csv")
    with open(tmp_path / "trials.csv", newline="", encoding="utf-8") as file:
        one, two = csv.DictReader(file)
    assert (one["shape"], one["is_best"], one["time_ms"]) == ("[8, 128]", "true", "2.5")
    assert (two["config.outcome"], two["shape"], two["message"]) == ("a,b\n", "", f"no\\ud800 \u202e{CLEAR}\nmore")


def test_a_whole_functions_choices_are_the_best_of_its_rows() -> None:
    tried = [Trial(config={"mm": f"BM={n}", "norm": ""}, outcome=Outcome.OK, time_ms=64 / n) for n in (32, 64)]
    names = {"m.mm": {"BM": 64}, "m.norm": {}}
    result = ContextualResult(
        best_config={"kernel configs": "{...}"},
        time_ms=1.0,
        trials=tuple(tried),
        key="{}",
        device="cpu",
        kernels=tuple(KernelChoice(name=name, key="", config=config, time_ms=1.0) for name, config in names.items()),
        baseline_ms=4.0,
    )
    assert [(row["is_best"], row["speedup"]) for row in result.to_dicts()] == [(False, 2.0), (True, 4.0)]
    assert "\n*  BM=64  ok" in result._repr_html_()
    (cached,) = dataclasses.replace(result, trials=()).to_dicts()
    assert (cached["mm"], cached["norm"], cached["is_best"], cached["time_ms"]) == ("BM=64", "", True, 1.0)


def test_without_pandas_a_data_frame_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install pandas, or use to_dicts\(\)"):
        result_of(*SWEEP).to_dataframe()


@pytest.mark.clients
def test_a_data_frame_has_a_column_for_each_tunable() -> None:
    pytest.importorskip("pandas")
    frame = result_of(*SWEEP, default_time_ms=7.75).to_dataframe()
    assert list(frame["n"]) == [4, 8, 2, 1, 3, 9, 7]
    assert frame.loc[frame["is_best"], "speedup"].item() == pytest.approx(3.1)


def test_a_table_shows_surrogates_and_terminal_escapes_as_text() -> None:
    shown = table_of(hostile(), width=200)
    assert all(line.isprintable() for line in shown.splitlines())
    print(shown, file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert "a\\udc80\\x1b[2J" in shown
    assert "no\\ud800 \\u202e\\x1b[2J" in shown
    assert "naïve ✓" in shown


def test_the_message_of_a_failed_sweep_is_shown_as_text() -> None:
    message = report.failure_message("f", hostile()[:2])
    assert all(line.isprintable() for line in message.splitlines())
    assert len(message.splitlines()) == 5


# --- values that look or compare alike ---


def of(value: Any, time_ms: float) -> Trial:
    return Trial(config={"n": value}, outcome=Outcome.OK, time_ms=time_ms)


ALIKE = [(1, True), (1, 1.0), (True, 1.0), (1, "1"), (None, "None"), ((1,), (True,)), (0.1, 0.1 + 1e-9)]


@pytest.mark.parametrize(("best", "own"), ALIKE)
def test_a_table_shows_how_similar_values_differ(best: Any, own: Any) -> None:
    roles = {"best_config": {"n": best}, "default_config": {"n": own}, "default_time_ms": 2.0}
    heading, first, second, *_ = table_of([of(best, 1.0), of(own, 2.0)], width=100, **roles).splitlines()
    assert "all: " not in heading
    assert (first[0], first.split()[-1]) == ("*", "2.00x")
    assert second.split()[-1] == "defaults"
    assert first.split()[1] != second.split()[0]


@pytest.mark.parametrize(("best", "own"), ALIKE)
def test_unlisted_defaults_do_not_win_by_equality_in_python(best: Any, own: Any) -> None:
    roles = {"best_config": {"n": best}, "default_config": {"n": own}, "default_time_ms": 2.0}
    text = table_of([of(best, 1.0)], **roles)
    assert "speed-up: against the function's own defaults: 2 ms" in text
    assert "beat every config" not in text


TABLES = [
    TuningResult(best_config={"n": 1}, device="cpu", key="k", trials=()),
    TuningResult(best_config={"n": 1}, device="cpu", key="k", trials=(of(1, 1.0), of(2, 2.0))),
    ContextualResult(best_config={"n": 1}, device="cpu", key="k", trials=()),
]


@pytest.mark.parametrize("result", TABLES)
@pytest.mark.parametrize("width", [0, -1, 1, 10**9, np.int64(80), True])
def test_a_table_of_any_whole_width_has_all_its_words(result: TuningResult, width: Any) -> None:
    def words(text: str) -> str:
        return "".join(sorted(text.replace(" ", "").replace("\n", "")))

    assert words(result.table(width=width)) == words(result.table(width=100))


@pytest.mark.parametrize("result", TABLES)
@pytest.mark.parametrize("width", [math.nan, math.inf, "80", 80.0])
def test_a_fractional_width_is_refused_by_name(result: TuningResult, width: Any) -> None:
    with pytest.raises(TypeError, match=rf"width is {width!r}: give a whole number of columns"):
        result.table(width=width)
