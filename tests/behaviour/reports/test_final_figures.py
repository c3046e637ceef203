"""Every final times the defaults, and every number shown comes from the record of the final."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from chains import X, chained
from helpers import isolated
from made_up_results import first_words, result_of, trial
from simulated_machine import MACHINES, Machine

import quarantune
from quarantune import TuningResult
from quarantune.cache.journal import Journal, conclusions
from quarantune.cli import functions
from quarantune.measure import finals
from quarantune.results.from_cache import cached_results
from quarantune.results.html_report import page_data
from quarantune.values.trial import UNTUNED, Findings, Outcome, Trial, ratio_text

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_slots")]


def plain(x: Any) -> Any:
    return x + 0.0


def agrees(output: Any, expected: Any, x: Any) -> bool:
    return bool(np.allclose(output, x))


# --- the defaults are in every final ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("isolation", "options"),
    [("process", {}), ("none", {"ref_fn": None}), ("process", {"ref_fn": plain}), ("none", {"check_fn": agrees})],
    ids=["compared with each other", "without a check", "ref_fn", "check_fn"],
)
def test_unlisted_defaults_are_timed_whatever_the_check(
    isolation: str, options: dict[str, Any], capfd: pytest.CaptureFixture[str], cache_dir: Path, tmp_path: Path
) -> None:
    fn = chained([{"n": 30}, {"n": 900}], default=300, **options)
    with isolated(isolation), quarantune.settings(progress=True):
        result = fn.tune(X)
    assert result.best_config == {"n": 30}
    assert result.default_config == {"n": 300}
    shown_everywhere(result, capfd.readouterr().err, cache_dir, tmp_path)


@pytest.mark.parametrize("isolation", ["process", pytest.param("none", marks=pytest.mark.long)])
@pytest.mark.slow
def test_defaults_that_were_ruled_out_are_timed_in_the_final(
    isolation: str, capfd: pytest.CaptureFixture[str], cache_dir: Path, tmp_path: Path
) -> None:
    fn = chained([{"n": 30}, {"n": 40}, {"n": 3000}, {"n": 2000}], default=3000)
    with isolated(isolation), quarantune.settings(progress=True):
        result = fn.tune(X)
    default = result.trials[2]
    assert default.outcome is Outcome.OK
    assert default in result.finalists
    shown_everywhere(result, capfd.readouterr().err, cache_dir, tmp_path)


def shown_everywhere(result: TuningResult, line: str, cache_dir: Path, directory: Path) -> None:
    """Asserts that a result shows only the numbers of its final, wherever it shows numbers."""
    of = {json.dumps(each.config): each for each in result.finalists}
    best, default = of[json.dumps(result.best_config)], of[json.dumps(result.default_config)]
    best_ms, default_ms = statistics.median(best.samples_ms), statistics.median(default.samples_ms)
    assert (result.time_ms, result.default_time_ms, result.speedup) == (best_ms, default_ms, default_ms / best_ms)
    assert result.speedup_interval is not None
    assert result.speedup_interval[0] < result.speedup < result.speedup_interval[1]
    n = result.best_config["n"]
    is_clear = result.speedup_interval[0] > 1  # not on a machine that was busy in the final
    gain = f"{ratio_text(result.speedup)} faster than" if is_clear else "no clear gain over"
    told = f"{gain} the defaults ({best_ms:.4g} ms against {default_ms:.4g} ms)"
    assert line.splitlines()[-1].endswith(f"best n={n}, {told}; saved")
    assert repr(result).startswith(f"TuningResult: n={n}, {told}\n")
    assert told in result._repr_html_()
    table = result.table(width=200)
    assert re.search(rf"^\* +{n} +ok +{best_ms:.4g} +{ratio_text(result.speedup)} ", table, re.MULTILINE)
    rows = {json.dumps({"n": row["n"]}): row for row in result.to_dicts()}
    for config, finalist in of.items():
        if config in rows:
            assert (rows[config]["is_finalist"], rows[config]["time_ms"]) == (
                True,
                statistics.median(finalist.samples_ms),
            )
            assert rows[config]["speedup"] == default_ms / rows[config]["time_ms"]
    assert [row["speedup"] for config, row in rows.items() if config not in of] == [None] * (len(rows.keys() - of))
    printed, line = functions.told(None, None, result, was_known=False)  # type: ignore[arg-type]
    assert told in line
    assert (printed["speedup"], printed["speedup_interval"]) == (result.speedup, result.speedup_interval)
    result.save(directory / "saved")
    loaded = TuningResult.load(directory / "saved")
    assert loaded.finalists == result.finalists
    assert loaded.speedup_interval == result.speedup_interval
    (cached,) = cached_results(cache_dir, "chained")
    assert (cached.result.time_ms, cached.result.default_time_ms) == (best_ms, default_ms)
    for about in (result._report_data(), loaded._report_data(), cached):
        (problem,) = page_data([about])["problems"]
        drawn = {text: samples for _, text, _, samples in problem["finalists"]}
        rounded = {f"n={each.config['n']}": [float(f"{ms:.5g}") for ms in each.samples_ms] for each in result.finalists}
        assert drawn == rounded
        assert problem["compared"] == f"{gain} the defaults"
        assert problem["interval"] == " to ".join(map(ratio_text, result.speedup_interval))


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize("isolation", ["process", pytest.param("none", marks=pytest.mark.slow)])
def test_defaults_that_fail_leave_a_note_and_no_speedup(isolation: str, capfd: pytest.CaptureFixture[str]) -> None:
    chained(ref_fn=None).tune(X)  # starts the template
    capfd.readouterr()
    with nothing_is_left(), isolated(isolation), quarantune.settings(progress=True):
        result = chained([{"n": 3}, {"n": 300}], default="no number", ref_fn=None).tune(X)
    assert result.best_config == {"n": 3}
    assert [each.outcome.is_failure for each in result.trials] == [False, False]
    assert (result.speedup, result.default_time_ms) == (None, None)
    assert re.search(r", best n=3, \S+ ms, and the defaults ended as error; ", capfd.readouterr().err)


def test_defaults_that_prune_fn_drops_never_run(sweeps: list[str]) -> None:
    result = chained([{"n": 3}, {"n": 30}], default=30, prune_fn=lambda config, x: config["n"] < 30).tune(X)
    assert [each.outcome for each in result.trials] == [Outcome.OK, Outcome.PRUNED]
    assert (result.speedup, result.finalists) == (None, ())


def test_one_line_says_that_the_defaults_won(capfd: pytest.CaptureFixture[str]) -> None:
    with quarantune.settings(progress=True):
        result = chained([{"n": 3}, {"n": 300}]).tune(X)
    assert result.speedup == 1.0
    assert f"best n=3, the defaults are best ({result.time_ms:.4g} ms); saved" in capfd.readouterr().err


@functools.partial(jax.jit, static_argnames=["n"])
def far(x: Any, n: int = 40_000) -> Any:
    return x + 0 * jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y @ x), x)


@pytest.mark.long
@pytest.mark.slow
def test_defaults_far_behind_have_few_rounds_and_a_note() -> None:
    result = quarantune.AutoTuner(far, {"n": [100, 101]}, ref_fn=None, name="far").run(X)
    samples = {each.config["n"]: len(each.samples_ms) for each in result.finalists}
    rounds = max(samples.values())  # a busy machine may rule out one of two close configs
    assert samples[40_000] <= 3 <= rounds
    assert result.speedup is not None
    assert result.speedup > 50
    told = f"are far behind, so they took part in {samples[40_000]} of the {rounds} rounds of the final"
    assert (told in result.table(width=200)) is (samples[40_000] < rounds)


# --- finals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["quiet", "half of all, half told"])
def test_a_contender_far_behind_costs_the_others_nothing(machine: str) -> None:
    def run_final(times_ms: list[float], seed: int) -> tuple[float, list[list[float]]]:
        simulated = Machine(random.Random(seed), *MACHINES[machine])
        rounds = finals.take_turns([simulated.runs(each) for each in times_ms], is_exact=False, clock=simulated)
        return simulated.now, rounds

    for seed in range(20):
        alone_s, _ = run_final([30.0, 30.3], seed)
        beside_s, beside = run_final([30.0, 30.3, 900.0], seed)
        assert len(beside[2]) == 3
        assert len(beside[0]) >= 5
        assert len(beside[0]) == len(beside[1])
        finals.Final.of([0, 1, 2], beside, [[], [], []])
        assert finals.decide(dict(enumerate(beside)), default=2)[0] != 2
        assert beside_s - alone_s < 4 * 1.2 + 3.0
        _, very_long = run_final([30.0, 30.3, 20_000.0], seed)
        assert len(very_long[2]) == 1, "its first run counts"


def test_only_contenders_far_behind_may_have_fewer_rounds() -> None:
    assert finals.Final.of([0, 1], [[1.0] * 5, [9.0] * 2], [[], []]).rounds_ms[1] == [9.0] * 2
    with pytest.raises(ValueError, match="the finalists have different numbers of rounds"):
        finals.Final.of([0, 1], [[1.0] * 5, [1.1] * 2], [[], []])


def test_defaults_that_ran_take_part_in_the_final() -> None:
    def timed(time_ms: float | None, outcome: Outcome = Outcome.OK) -> Trial:
        samples = () if time_ms is None else (time_ms,)
        return Trial(config={}, outcome=outcome, time_ms=time_ms, samples_ms=samples, own_ms=time_ms)

    trials = {0: timed(1.0), 1: timed(1.1), 2: timed(40.0, Outcome.SLOW), 3: timed(None, Outcome.ERROR)}
    assert finals.in_final(trials, None) == [0, 1]
    assert finals.in_final(trials, 2) == [0, 1, 2]
    assert finals.in_final(trials, 0) == [0, 1]
    assert finals.in_final(trials, 3) == [0, 1]
    assert finals.in_final({**trials, UNTUNED: timed(9.0)}, None) == [0, 1, UNTUNED]
    assert finals.in_final({**trials, UNTUNED: timed(None, Outcome.TIMEOUT)}, None) == [0, 1]
    assert finals.in_final({2: trials[2]}, 2) == [], "only usable configs are compared"


# --- shown as it was ------------------------------------------------------------------------------------------


def test_a_table_has_finalists_above_configs_ruled_out() -> None:
    trials = [
        trial(4, "slow", 30.0, own_ms=2.0, samples_ms=(2.0, 36.2)),
        trial(2, time_ms=7.75, samples_ms=(7.5, 7.75, 8.0)),
        trial(1, time_ms=2.5, samples_ms=(2.5, 2.5, 2.6)),
        trial(3, time_ms=2.2, samples_ms=(2.2,)),
    ]
    result = result_of(
        *trials, default_time_ms=7.75, default_config={"n": 2}, finalists=(trials[1], trials[2]),
        speedup_interval=(3.0, 3.2),
    )  # fmt: skip
    assert first_words(result.table(width=100)) == [
        ["*", "1", "ok", "2.5"],
        ["2", "ok", "7.75", "defaults"],
        ["4", "slow", ">", "2"],
        ["3", "ok", "2.2"],
    ]
    assert "speed-up of *: 3.00x to 3.20x in 95 of 100 later runs" in result.table(width=100)
    why = "* n=1 won the final, in which the fastest are timed in turn; the lower time of n=3 was taken before it"
    assert why in " ".join(result.table(width=100).split())
    assert [row["speedup"] for row in result.to_dicts()] == [None, 1.0, 3.1, None]


def test_findings_are_put_into_words() -> None:
    assert Findings(0.0077, 0.0155).text() == "2.01x faster than the defaults (0.0077 ms against 0.0155 ms)"
    assert Findings(2.0, 1.0).text() == "2.00x slower than the defaults (2 ms against 1 ms)"
    assert Findings(1.0, 1.02, (0.99, 1.05)).text() == "no clear gain over the defaults (1 ms against 1.02 ms)"
    assert Findings(1.0, 1.0).text() == "the defaults are best (1 ms)"
    assert Findings(1.0).text() == "1 ms"
    assert Findings(float("nan"), 1.0).text() == "time not known"
    assert [ratio_text(ratio) for ratio in (0.031, 0.31, 9.99, 12.34, 1234.5)] == [
        *("0.031x", "0.31x", "9.99x", "12.3x", "1.23e+03x")
    ]


@pytest.mark.parametrize("value", [None, "1 to 2", [1.0], [1.0, "2"], [2.0, 1.0], [-1.0, 1.0], [1.0, 10**400], {}])
def test_an_interval_in_a_file_may_be_anything(value: Any) -> None:
    entry = {"time_ms": 10**400, "default_time_ms": "1", "speedup_interval": value}
    assert repr(Findings.from_json(entry)) == repr(Findings())  # compares text: NaN is not equal to itself
    assert Findings.from_json({"speedup_interval": [1.0, 2.0]}).speedup_interval == (1.0, 2.0)


def test_results_of_earlier_versions_load_without_a_final(tmp_path: Path) -> None:
    fn = chained([{"n": 3}, {"n": 300}])
    fn.tune(X).save(tmp_path)
    about = json.loads((tmp_path / "result.json").read_text())
    for name in ("finalists", "speedup_interval"):
        del about[name]
    (tmp_path / "result.json").write_text(json.dumps(about))
    loaded = TuningResult.load(tmp_path, trusted=True)
    assert (loaded.finalists, loaded.speedup_interval, loaded.speedup) == ((), None, 1.0)
    assert page_data([loaded._report_data()])["problems"][0]["finalists"] == []


def test_the_final_of_another_winner_is_not_drawn(cache_dir: Path) -> None:
    chained([{"n": 3}, {"n": 30}], default=30).tune(X)
    ((device, entries),) = json.loads((cache_dir / "chained.json").read_text()).items()
    ((key, entry),) = entries.items()
    (told,) = cached_results(cache_dir, "chained")
    assert len(told.result.finalists) == 2
    store = quarantune.cache.Store(cache_dir)
    store.merge("chained", {device: {key: {**entry, "time_ms": entry["time_ms"] / 2}}})
    (other,) = cached_results(cache_dir, "chained")
    assert other.result.finalists == ()
    assert "before the final" in other.note
    assert conclusions(cache_dir, "chained", device, key).records()
    tried = [record["trial"]["config"]["n"] for record in Journal(cache_dir, "chained", device, key).records()]
    assert set(tried) == {3, 30}


@pytest.mark.long
@pytest.mark.slow
def test_a_continued_sweep_has_the_defaults_in_its_final(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finals, "conclude", stopped)
        with pytest.raises(KeyboardInterrupt):
            chained([{"n": 30}, {"n": 40}], default=300, ref_fn=None)(X)
    fn = chained([{"n": 30}, {"n": 40}], default=300, ref_fn=None)
    result = quarantune.AutoTuner(fn, [{"n": 30}, {"n": 40}], name="chained", timeout=60, ref_fn=None).run(X)
    assert {"n": 300} in [each.config for each in result.finalists]
    assert dataclasses.replace(result).speedup == result.speedup
    assert result.speedup is not None


@pytest.mark.long
@pytest.mark.slow
def test_unchecked_unlisted_defaults_are_timed_but_never_win(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with quarantune.settings(progress=True):
        result = chained([{"n": 300}, {"n": 301}], ref_fn=None).tune(X)
    assert result.best_config in ({"n": 300}, {"n": 301})
    assert {"n": 3} in [each.config for each in result.finalists]
    assert result.speedup is not None
    assert result.speedup < 1
    assert re.search(rf", {ratio_text(1 / result.speedup)} slower than the defaults \(", capfd.readouterr().err)
    assert "beat" not in caplog.text
    for options in ({"ref_fn": plain}, {"check_fn": agrees}):
        checked = chained([{"n": 300}, {"n": 301}], name="checked", **options).tune(X)
        assert checked.best_config == {"n": 3}, "a config or default that passes a check may win"
