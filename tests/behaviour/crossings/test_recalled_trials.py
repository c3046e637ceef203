"""Which trials of earlier sweeps count: pairs with other lists, references, inputs, settings, limits and objectives."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ends
from tuned_functions import here

import quarantune
from quarantune import Outcome, Trial, TuningResult
from quarantune.answers.answer import Situation
from quarantune.answers.layers import save
from quarantune.cache.entries import CacheKey
from quarantune.calls.key import keyed
from quarantune.results import from_cache
from quarantune.tuning.job import TuningJob
from quarantune.tuning.outcome import entry_for
from quarantune.values import blocks
from quarantune.values.trial import Findings

X = np.linspace(-1, 1, 64, dtype=np.float32)
QUICK: dict[str, Any] = {"rep": 2, "warmup": 0}


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.originalname)


def turning(name: str, configs: Any = ({"n": 1}, {"n": 2}), default: int = 3, **options: Any) -> Any:
    """Returns a function with a static argument that its programs do not depend on."""

    @quarantune.autotune(list(configs), **{**QUICK, "name": name, **options})
    @functools.partial(jax.jit, static_argnames=["n", "tag"])
    def turned(x: Any, tag: int = 0, n: int = default) -> Any:
        for _ in range(n):
            x = jnp.sort(jax.lax.optimization_barrier(-x))
        return jnp.sort(jnp.abs(x))

    return turned


def records_of(fn: Any, *args: Any) -> Any:
    call = keyed(fn._tuner.bind(args or (X,), {}))
    return TuningJob(call, Situation.of(call.call), fn._tuner.rungs.tuning)._records, call.call.configs


def ended(n: int, outcome: Outcome, time_ms: float | None = None) -> Trial:
    return Trial(config={"n": n}, outcome=outcome, time_ms=time_ms, own_ms=time_ms)


# --- trials that were stopped early -------------------------------------------------------------------------------


def test_a_trial_stopped_early_needs_its_faster_config(name: str) -> None:
    records, configs = records_of(turning(name, [{"n": 1}, {"n": 30}, {"n": 40}]))
    for trial in (ended(1, Outcome.OK, 1.0), ended(30, Outcome.SLOW, 8.0), ended(40, Outcome.SLOW, 9.0)):
        records.append(trial, reference=None)
    assert [trial.config["n"] for trial in records.read(configs).values()] == [1, 30, 40]
    shorter, configs = records_of(turning(name, [{"n": 30}, {"n": 40}]))
    assert shorter.read(configs) == {}
    pruned = turning(name, [{"n": 1}, {"n": 30}, {"n": 40}], prune_fn=lambda config, x: config["n"] > 1)
    others, configs = records_of(pruned)
    for trial in (ended(1, Outcome.OK, 1.0), ended(30, Outcome.SLOW, 8.0)):
        others.append(trial, reference=None)
    assert [trial.config["n"] for trial in others.read(configs).values()] == [1]


@pytest.mark.slow
def test_programs_stopped_early_run_if_the_faster_is_pruned(name: str) -> None:
    configs = [{"n": 1}, {"n": 60}, {"n": 80}]
    turned = turning(name, configs, 90, prune_fn=lambda config, x, tag=0: tag == 0 or config["n"] > 1)
    x = jax.random.normal(jax.random.key(0), (64, 64))
    assert turned.tune(x, 0).best_config == {"n": 1}
    result = turned.tune(x, 1, resume=True)
    assert result.best_config in configs[1:]


# --- other terms --------------------------------------------------------------------------------------------------


def test_terms_hold_whatever_may_change_a_trial(name: str) -> None:
    plain = turning(name)
    terms = records_of(plain)[0]._terms
    assert records_of(plain, X, 1)[0]._terms == terms, "the program tells whether the argument matters"
    with jax.default_matmul_precision("float32"):
        assert records_of(plain)[0]._terms != terms
    with quarantune.set_autotune_inputs(-X):
        assert records_of(plain)[0]._terms != terms
    for options in ({"ref_fn": lambda x, tag: x}, {"check_fn": lambda *outputs: True}):
        judged = turning(name, **options)
        assert records_of(judged)[0]._terms == records_of(judged, X)[0]._terms
        assert records_of(judged)[0]._terms != records_of(judged, X, 1)[0]._terms, "it also gets the other arguments"


def test_given_inputs_judge_outputs_anew(name: str) -> None:
    @quarantune.autotune([{"n": 1}, {"n": 2}], **QUICK, name=name)
    @functools.partial(jax.jit, static_argnames=["n", "tag"])
    def ordered(x: Any, tag: int = 0, n: int = 1) -> Any:
        return jnp.sort(x) if n == 1 else x  # right for inputs in order only

    with here():
        assert ends(ordered.tune(X, 0).trials) == ["ok", "ok"]
        with quarantune.set_autotune_inputs(-X, 1):
            again = ordered.tune(X, 1, resume=True)
    assert again.trials[1].outcome is Outcome.WRONG


def test_an_oom_does_not_count_under_a_larger_limit(name: str) -> None:
    turned = turning(name)
    with quarantune.settings(memory_limit="900MB"):
        records, configs = records_of(turned)
        records.append(ended(2, Outcome.OOM), reference=None)
        assert [trial.outcome for trial in records.read(configs).values()] == [Outcome.OOM]
    for limit, counts in ((None, 0), ("8GB", 0), ("800MB", 1)):
        with quarantune.settings(memory_limit=limit):
            records, configs = records_of(turned)
            assert len(records.read(configs)) == counts, limit


def test_a_report_shows_no_trials_of_another_call_of_a_key(name: str, cache_dir: Path) -> None:
    turned = turning(name, key_fn=lambda x, tag=0: "all")
    call = keyed(turned._tuner.bind((X,), {}))
    for x, trial in ((X, ended(1, Outcome.OK, 5.0)), (X[:8], ended(2, Outcome.OK, 1.0))):
        records_of(turned, x)[0].append(trial, reference=None)
    save(blocks.current(), call.id, entry_for(call, {"n": 1}, Findings(5.0, None), {"name": "all"}))
    shown = from_cache.cached_result(cache_dir, CacheKey(call.id.name, call.id.key, call.id.device))
    assert shown is not None
    assert [(trial.config, trial.time_ms) for trial in shown.result.trials] == [({"n": 1}, 5.0)]


# --- objectives, and gradients ------------------------------------------------------------------------------------


def test_scores_are_of_the_config_and_of_the_final(name: str) -> None:
    @quarantune.autotune([{"n": 2}, {"n": 1}], **QUICK, name=name, objective=lambda trial: trial.config["n"] * 1000.0)
    @functools.partial(jax.jit, static_argnames=["n", "tag"])
    def one_program(x: Any, tag: int = 0, n: int = 2) -> Any:
        return jnp.sort(x)

    timed = turning(f"{name} timed", objective=lambda trial: 1000 * trial.time_ms)
    with here():
        for tag in (0, 1):
            result = one_program.tune(X, tag, resume=True)
            assert (result.best_config, result.score) == ({"n": 1}, 1000.0)
        for _ in range(2):
            result = timed.tune(X, resume=True)
            assert result.score == pytest.approx(1000 * result.time_ms, rel=0.5)


@pytest.mark.slow
def test_a_saved_winner_returns_the_output_without_gradients(name: str, tmp_path: Path) -> None:
    @quarantune.autotune([{"unroll": 1}, {"unroll": 2}], **QUICK, name=name, time_grad=True)
    @functools.partial(jax.jit, static_argnames=["unroll"])
    def stepped(x: Any, unroll: int = 1) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, None, length=8, unroll=unroll)[0]

    x = jnp.ones((64, 64))
    stepped.tune(x).save(tmp_path / "saved")
    found = TuningResult.load(tmp_path / "saved", trusted=True).fn(x)
    assert jnp.shape(found) == x.shape
