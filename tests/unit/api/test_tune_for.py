"""One config for several calls that share a key: the least total time, or the least slowdown in any of them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import isolated

import quarantune
from quarantune import Outcome, Trial, TuningFailedError, TuningResult
from quarantune.api.tuner import Tuner
from quarantune.cli.entry_point import main

SMALL, LARGE = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
TIMES: Mapping[int, Mapping[int, float | None]] = {
    4: {1: 1.0, 2: 3.0, 3: 1.5, 4: 0.5},
    64: {1: 40.0, 2: 10.0, 3: 14.0, 4: None},
}
"""Milliseconds by the length of x and by n; n=4 fails for the longer x."""


def scale(**options: Any) -> Any:
    @quarantune.autotune({"n": [1, 2, 3, 4]}, **{"key_fn": lambda x: "all", "name": "scale", **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 1) -> Any:
        if n == 4 and len(x) > 4:
            raise ValueError("it does not fit")
        return x * 2 + 0 * n

    return scale


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sweeps end with the times above."""

    def tune(resolver: Any, call: Any, *, resume: bool) -> TuningResult:
        trials = [
            Trial(
                config={"n": n},
                outcome=Outcome.ERROR if ms is None else Outcome.OK,
                time_ms=ms,
                message="" if ms else "no",
            )
            for n, ms in TIMES[len(jax.tree.leaves((call.args, call.kwargs))[0])].items()
        ]
        best = min((trial for trial in trials if trial.time_ms), key=lambda trial: trial.time_ms or 0)
        return TuningResult(
            best_config=best.config,
            time_ms=best.time_ms or 0,
            default_config={"n": 1},
            default_time_ms=trials[0].time_ms,
            trials=tuple(trials),
            key=f"{call.args}",
            device="cpu",
            stopped="exhausted",
            seen=4,
            space_size=4,
        )

    monkeypatch.setattr(Tuner, "tune", tune)


@pytest.mark.usefixtures("scripted", "no_process")
@pytest.mark.parametrize(
    ("weights", "by", "best", "mean_ms", "ratios"),
    [
        (None, "total", 2, 6.5, [6.0, 1.0]),
        ([100, 1], "total", 1, (100 + 40) / 101, [2.0, 4.0]),
        (None, "worst", 3, 7.75, [3.0, 1.4]),
    ],
)
def test_the_config_has_the_least_total_time_or_slowdown(
    weights: Any, by: Any, best: int, mean_ms: float, ratios: list[float], cache_dir: Path
) -> None:
    tuned = scale()
    result = tuned.tune_for([(SMALL,), {"x": LARGE}], weights, by=by)
    assert (result.best_config, result.by) == ({"n": best}, by)
    assert result.time_ms == pytest.approx(mean_ms)
    assert [share.time_ms / share.best_ms for share in result.calls] == pytest.approx(ratios)
    assert [(share.call, share.weight) for share in result.calls] == [
        ("x f32[4]", (weights or [1, 1])[0]),
        ("x f32[64]", 1),
    ]
    failed = {trial.config["n"]: trial for trial in result.trials}[4]
    assert (failed.outcome, failed.message) == (Outcome.ERROR, "for x f32[64]: no")
    table = result.table(width=100)
    assert f"* n={best} has the least total time" in table or by == "worst"
    assert f"x f32[64]: {result.calls[1].time_ms:.4g} ms, {ratios[1]:.2f}x of its own best, weight 1" in table
    for later in (tuned, scale()):
        assert later.lookup(jax.ShapeDtypeStruct((8,), jnp.float32)) == {"n": best}, "the whole bucket uses the config"
    ((entry,),) = (each.values() for each in json.loads((cache_dir / "scale.json").read_text()).values())
    assert [share["time_ms"] / share["best_ms"] for share in entry["calls"]] == pytest.approx(ratios)
    assert entry["search"]["name"] == f"tune_for by {by}"


@pytest.mark.usefixtures("scripted", "no_process")
def test_reports_and_files_name_the_calls_of_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # pytest-xdist sets it to 80
    monkeypatch.setattr("quarantune.tuning.outcome.commit_of", lambda function: f"that of {function.__name__}")
    result = scale().tune_for([(SMALL,), (LARGE,)])
    assert result.commit == "that of scale"
    assert main(["cache", "show", "scale"]) == 0
    assert "call x f32[64], weight 1" in capsys.readouterr().out
    assert TuningResult.from_json(json.loads(json.dumps(result.to_json()))).calls == result.calls
    result.report(tmp_path / "scale.html")
    assert "x f32[4]: 3 ms, 6.00x of its own best" in (tmp_path / "scale.html").read_text()


@pytest.mark.usefixtures("scripted", "no_process")
def test_recorded_calls_weigh_as_often_as_they_were_met() -> None:
    with quarantune.recording() as calls, pytest.warns(quarantune.CacheWarning, match="to be tuned later"):
        scale()(jnp.ones(4))
    often, tuned = dataclasses.replace(calls[0], count=100), scale()
    assert tuned.tune_for([often, (LARGE,)]).best_config == {"n": 1}
    assert tuned.tune_for([often, (LARGE,)], [1, 1]).best_config == {"n": 2}


@pytest.mark.usefixtures("scripted", "no_process")
def test_a_config_that_fits_no_common_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TIMES", {4: {1: None, 2: 1.0}, 64: {1: 1.0, 2: None}})
    with pytest.raises(
        TuningFailedError, match=r"no config works for all 2 calls: for x f32\[4\]: no; for x f32\[64\]"
    ):
        scale(ref_fn=None).tune_for([(SMALL,), (LARGE,)])


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("calls", "options", "error", "words"),
    [
        (
            [(SMALL,), (LARGE,)],
            {"key_fn": None},
            ValueError,
            r"share no key.*x f32\[4\]; and x f32\[64\]. Give .*key_fn",
        ),
        ([(SMALL,)], {"weights": [1, 2]}, ValueError, "a weight above 0 for each"),
        ([(SMALL,)], {"weights": [0]}, ValueError, "a weight above 0 for each"),
        ([], {}, ValueError, "0 calls"),
        ([(SMALL,)], {"by": "mean"}, ValueError, "by='mean' is not valid: give 'total' or 'worst'"),
        ([SMALL], {}, TypeError, "is not a call: give a tuple"),
        ([{"x": SMALL, "n": 2}], {}, TypeError, "n is tuned here"),
    ],
)
def test_calls_that_cannot_be_tuned_for_are_refused_first(
    calls: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    tuned = scale(**{name: options.pop(name) for name in ("key_fn",) if name in options})
    with pytest.raises(error, match=words):
        tuned.tune_for(calls, **options)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("search", [{}, {"search": "random", "max_trials": 3}])
def test_each_call_tries_the_same_configs_and_trials_count(search: dict[str, Any]) -> None:
    calls = [(jnp.ones(4),), (jnp.ones(64),)]
    with isolated("none"):
        first = scale(rep=2, **search).tune_for(calls)
        again = scale(rep=2, **search).tune_for(calls)
    tried = {trial.config["n"] for trial in first.trials}
    assert len(tried) == (3 if search else 4)
    assert {trial.config["n"] for trial in first.trials if not trial.outcome.is_failure} == tried - {4}
    assert {trial.config["n"] for trial in again.trials} == tried, "a search resumes from its journal"
    assert [share.call for share in again.calls] == ["x f32[4]", "x f32[64]"]


@pytest.mark.slow
def test_a_searched_space_may_lack_the_defaults() -> None:
    @quarantune.autotune({"n": [1, 2, 3]}, key_fn=lambda x: "all", search="random", max_trials=2, rep=2)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 9) -> Any:
        return x * 2 + 0 * n

    with isolated("none"):
        result = scale.tune_for([(jnp.ones(4),), (jnp.ones(64),)])
    assert len(result.calls) == 2
    assert {9} < {trial.config["n"] for trial in result.trials} < {1, 2, 3, 9}


def test_an_equal_config_does_not_give_the_defaults_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def tune(self: Tuner, call: Any, **_: Any) -> TuningResult:
        times = ((True, 5.0), (1, 3.0))
        trials = tuple(Trial(config={"n": n}, outcome=Outcome.OK, time_ms=ms) for n, ms in times)
        return TuningResult(
            best_config={"n": 1},
            time_ms=3.0,
            default_config={"n": 1},
            trials=trials,
            key=f"{call.args}",
            device="cpu",
            seen=2,
            space_size=2,
        )

    monkeypatch.setattr(Tuner, "tune", tune)
    assert scale().tune_for([(SMALL,), (LARGE,)]).default_time_ms == 3.0
