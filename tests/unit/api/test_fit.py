"""`fit` on calls with scripted times, and what programs then do with the rule."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import python

import quarantune
from quarantune import Outcome, Trial, TuningResult
from quarantune.answers import recording
from quarantune.api.fit import FitReport
from quarantune.api.tuner import Tuner
from quarantune.cli.entry_point import main
from quarantune.rules.rule import FIELD
from quarantune.values import blocks

SIZES = (64, 100, 256, 900, 2048, 5000)
CONFIGS = {"n": [1, 2, 3, 4]}
LARGE = {"n": list(range(1, 61))}


def best_for(size: int) -> int:
    return 2 if size <= 512 else 4


def scale(configs: Any = None, **options: Any) -> Any:
    @quarantune.autotune(configs or CONFIGS, name="scale", **options)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 1) -> Any:
        return x * 2 + 0 * n

    return scale


def calls(*sizes: int) -> list[Any]:
    return [(jax.ShapeDtypeStruct((size,), jnp.float32),) for size in sizes or SIZES]


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Makes sweeps end at once, each with the size of its call and the number of its trials."""
    done: list[tuple[int, int]] = []

    def tune(tuner: Tuner, call: Any, **_: Any) -> TuningResult:
        size = call.args[0].shape[0]
        most = blocks.current().max_trials or 10_000
        listed = sorted(call.configs.listed(), key=lambda index: (abs(index - size % 7), index))
        configs = [call.configs[index] for index in listed if call.configs.keeps(index)][:most]
        times = [1.0 + 0.3 * abs(best_for(size) - config["n"]) for config in configs]
        trials = [Trial(config=it, outcome=Outcome.OK, time_ms=ms) for it, ms in zip(configs, times, strict=True)]
        done.append((size, len(trials)))
        best = min(trials, key=lambda trial: trial.time_ms or 0)
        return TuningResult(
            best_config=best.config,
            time_ms=best.time_ms or 0,
            trials=tuple(trials),
            finalists=tuple(trials),
            key="",
            device="",
        )

    monkeypatch.setattr(Tuner, "tune", tune)
    monkeypatch.setattr(Tuner, "result", tune)
    return done


def answer_of(fn: Any, size: int) -> Any:
    """Returns the answer for a call."""
    return fn._tuner.choice(fn._tuner.bind((jnp.ones(size),), {}))


@contextlib.contextmanager
def by_rule(**settings: Any) -> Iterator[list[str]]:
    """Answers misses by rules, and yields the warnings."""
    messages = list[str]()
    with quarantune.settings(on_miss="rule", **settings), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in told]


@pytest.mark.usefixtures("sweeps", "no_process")
def test_a_rule_answers_calls_that_nobody_tuned() -> None:
    fn = scale()
    report = fn.fit(calls())
    assert isinstance(report, FitReport)
    assert [config["n"] for config in report.rules[0].configs] == [2, 4]
    with by_rule() as told:
        answers = {size: answer_of(fn, size) for size in (80, 400, 1500, 9000)}
    assert {size: answer.config["n"] for size, answer in answers.items()} == {80: 2, 400: 2, 1500: 4, 9000: 4}
    assert {answer.origin.value for answer in answers.values()} == {"rule"}
    assert all(answer.findings.expected_loss == 0.0 for answer in answers.values())
    assert "leave-one-out over 6 calls" in answers[80].why
    (message,) = told
    assert "x f32[80]" in message
    assert "expected loss 0.0%" in message


@pytest.mark.usefixtures("sweeps", "no_process")
def test_beyond_its_bounds_a_rule_does_not_answer() -> None:
    fn = scale()
    fn.fit(calls())
    with by_rule() as told:
        assert answer_of(fn, 20_000).origin.value == "defaults"
        assert fn(jnp.ones(20_000))[0] == 2
    assert any("x.shape[0] is 20000, and the rule is for 32 to 10000" in each for each in told)


@pytest.mark.usefixtures("sweeps", "no_process")
def test_a_measured_result_always_wins() -> None:
    fn = scale()
    fn.fit(calls())
    key = fn._tuner.bind((jnp.ones(80),), {})
    from quarantune.calls.key import keyed

    id = keyed(key).id
    quarantune.TuningCache().put(id.name, id.key, id.device, {"n": 3})
    with by_rule():
        answer = answer_of(fn, 80)
    assert (answer.config, answer.origin.value) == ({"n": 3}, "saved")


@pytest.mark.usefixtures("sweeps", "no_process")
def test_forbidden_configs_are_never_answered() -> None:
    scale().fit(calls())
    fn = scale(prune_fn=lambda config, x: config["n"] != 4 or x.shape[0] != 1500)
    fn.fit(calls())
    with by_rule():
        assert answer_of(fn, 1500).config == {"n": 2}
        assert answer_of(fn, 1501).config == {"n": 4}


@pytest.mark.usefixtures("sweeps", "no_process")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("device", "is for another device, 'NVIDIA H900', and not for"),
        ("code", r"is for other code \(code changed since\)"),
        ("damage", "is damaged"),
        ("kind", "calls with other parameters, ranks or JAX settings"),
        ("none", "none is fitted: use fit"),
    ],
)
def test_a_rule_for_something_else_is_refused_by_name(cache_dir: Path, change: str, match: str) -> None:
    fn = scale()
    if change != "none":
        fn.fit(calls())
        text = (cache_dir / "scale.json").read_text()
        ((device, entries),) = json.loads(text).items()
        ((key, entry),) = [each for each in entries.items() if FIELD in each[1]]
        if change == "device":
            device = "NVIDIA H900"
        elif change == "code":
            key = key.replace(json.loads(key)["code"], "0123456789ab")
            entry["fingerprint"]["code"] = "0123456789ab"
        elif change == "damage":
            entry[FIELD]["nodes"][0]["yes"] = 0
            entry[FIELD]["nodes"][0]["ask"] = "size"
        (cache_dir / "scale.json").write_text(json.dumps({device: {key: entry}}))
    x = jnp.ones((80, 2)) if change == "kind" else jnp.ones(80)
    with by_rule() as told:
        assert (fn(x) == 2).all()
    assert any(re.search(match, message) for message in told)


@pytest.mark.usefixtures("no_process")
def test_fitting_measures_a_fifth_of_a_large_space(sweeps: list[tuple[int, int]]) -> None:
    report = scale(LARGE).fit(calls(*range(64, 5064, 250)))
    assert report.trials <= 0.25 * 20 * 60
    assert sum(trials for _, trials in sweeps) <= 0.25 * 20 * 60 + 20 * 4  # and the best again, next to others
    assert len(report.rules[0].calls) == 20


@pytest.mark.usefixtures("no_process")
def test_calls_with_one_key_are_tuned_once_and_their_weights_add_up(sweeps: list[tuple[int, int]]) -> None:
    report = scale().fit(calls(*SIZES, 64, 64), weights=[1, 1, 1, 1, 1, 1, 3, 5])
    assert sorted(size for size, _ in sweeps)[: len(SIZES)] == sorted(SIZES)
    assert {call.sizes: call.weight for call in report.rules[0].calls}[64,] == 9.0


@pytest.mark.usefixtures("sweeps", "no_process")
def test_calls_of_two_kinds_get_two_rules() -> None:
    squares = [(jax.ShapeDtypeStruct((size, size), jnp.float32),) for size in (8, 16, 64, 256)]
    report = scale().fit([*calls(), *squares, (jax.ShapeDtypeStruct((2, 2, 2), jnp.float32),)])
    assert [len(rule.calls) for rule in report.rules] == [6, 4]
    assert len(report.skipped) == 1
    assert "x f32[2,2,2]" in report.skipped[0]


@pytest.mark.usefixtures("sweeps", "no_process")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_configs": 0}, "max_configs=0"),
        ({"max_configs": 33}, "from 1 to 32"),
        ({"max_configs": True}, "max_configs=True"),
        ({"max_loss": "3"}, "as '3%', or a share"),
        ({"max_loss": "x%"}, "max_loss='x%'"),
        ({"max_loss": "-3%"}, "max_loss='-3%'"),
        ({"max_loss": -0.1}, "max_loss=-0.1"),
        ({"max_loss": float("nan")}, "max_loss=nan"),
        ({"weights": [1]}, "a weight above 0 for each"),
        ({"time_budget": -1}, "time_budget=-1"),
    ],
)
def test_bad_input_is_refused_before_any_work(options: Any, match: str, sweeps: list[Any]) -> None:
    with pytest.raises(ValueError, match=match):
        scale().fit(calls(), **options)
    assert not sweeps


@pytest.mark.usefixtures("no_process")
def test_calls_that_no_rule_can_come_from_are_refused(sweeps: list[Any]) -> None:
    with pytest.raises(ValueError, match="needs 3 different calls with the same parameters, not 2"):
        scale().fit(calls(64, 64, 128))
    with pytest.raises(ValueError, match="give calls"):
        scale().fit([])
    with pytest.raises(TypeError, match="is not a call"):
        scale().fit([3])
    with pytest.raises(TypeError, match="n is tuned here"):
        scale().fit([{"x": jnp.ones(4), "n": 2}] * 3)
    with pytest.raises(ValueError, match="fit compares times"):
        scale(objective=lambda trial: trial.time_ms).fit(calls())
    with quarantune.settings(disable_cache=True), pytest.raises(ValueError, match="no rule could be saved"):
        scale().fit(calls())
    assert not sweeps


@pytest.mark.usefixtures("sweeps", "no_process")
def test_a_rule_is_shown_listed_merged_and_kept_apart_from_results(
    cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale().fit(calls())
    assert main(["cache", "show", "scale"]) == 0
    shown = capsys.readouterr().out
    assert "  if x.shape[0] <= " in shown
    assert "    n=2\n  else:\n    n=4\n" in shown
    assert main(["cache", "list"]) == 0
    assert "a rule  for x.shape[0] 32 to 10000" in capsys.readouterr().out
    other = quarantune.TuningCache(tmp_path / "other")
    assert len(other.merge(cache_dir).added) == 1
    assert not other.diff(cache_dir).different
    ((entry,),) = [[record.entry for record in other if FIELD in record.entry]]
    assert entry[FIELD]["configs"] == [{"n": 2}, {"n": 4}]
    assert quarantune.TuningCache(cache_dir).verify(scale()).entries == ()


@pytest.mark.usefixtures("sweeps", "no_process")
def test_a_shipped_table_holds_rules(cache_dir: Path, tmp_path: Path) -> None:
    scale().fit(calls())
    quarantune.TuningCache(cache_dir).export(tmp_path / "shipped")
    with by_rule(cache_dir=tmp_path / "empty", cache_path=tmp_path / "shipped") as told:
        assert answer_of(scale(), 80).config == {"n": 2}
    assert "shipped" in told[0]


@pytest.mark.usefixtures("sweeps", "no_process")
def test_answered_calls_are_noted_once_each_for_verify(cache_dir: Path) -> None:
    fn = scale()
    fn.fit(calls())
    with by_rule():
        for size in (80, 81, 80):
            answer_of(fn, size)
    recording._flush()
    noted = recording.read(cache_dir, recording.RULED)
    assert {call.arguments["x"]["shape"][0]: call.count for call in noted} == {80: 2, 81: 1}
    assert recording.read(cache_dir) == []
    quarantune.TuningCache(cache_dir).clear("scale")
    assert recording.read(cache_dir, recording.RULED) == []


def test_a_search_begins_with_the_answer_of_a_rule(sweeps: list[Any]) -> None:
    from quarantune.answers.answer import Situation
    from quarantune.calls.key import keyed
    from quarantune.tuning.starts import starts

    fn = scale(LARGE)
    fn.fit(calls())
    call = keyed(fn._tuner.bind((jnp.ones(3000),), {}))
    assert starts(call, fn._tuner.rungs.layers, Situation.of(call.call))[0] == {"n": 4}


MODULE = """
import functools, jax, jax.numpy as jnp, quarantune

@quarantune.autotune({"n": [1, 2, 300]}, name="scale", rep=3)
@functools.partial(jax.jit, static_argnames=["n"])
def scale(x, n: int = 300):
    return jax.lax.fori_loop(0, n, lambda i, y: y + jnp.tanh(x) * 0, x * 2)
"""


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_fit_recorded_calls_and_sample_the_true_loss(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(MODULE)
    use = "import jax.numpy as jnp, kernels, sys\nfor n in map(int, sys.argv[1:]): kernels.scale(jnp.ones(n))\n"
    (tmp_path / "use.py").write_text(use)

    def run(*words: str, **variables: str) -> str:
        settings = {f"QUARANTUNE_{name.upper()}": value for name, value in variables.items()}
        return python(*words, cwd=tmp_path, path=[tmp_path], **settings)

    run("use.py", "64", "256", "1024", "4096", record="recorded")
    fitted = run("-m", "quarantune", "fit", "--recorded", "recorded", "--max-loss", "50")
    assert "leave-one-out over 4 calls" in fitted
    run("use.py", "100", "700", on_miss="rule")
    sampled = run("-m", "quarantune", "cache", "verify", "kernels:scale", "--sample", "5")
    assert "2 calls that a rule answered and nobody tuned: true loss" in sampled
    assert "expected loss" in sampled
