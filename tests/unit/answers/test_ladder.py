"""The ladder of answers: its order, its lock, and what happens when no rung has an answer."""

from __future__ import annotations

import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import quarantune
from quarantune import CacheMissError, TuningFailedError
from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.api.tuner import Tuner
from quarantune.cache.store import Store
from quarantune.calls.call import TunedFunction
from quarantune.calls.key import KeyedCall, keyed
from quarantune.results.result import TuningResult
from quarantune.values import blocks
from quarantune.values.options import Options

X = np.zeros(4, np.float32)


def function(name: str = "rung", **options: Any) -> TunedFunction:
    @functools.partial(jax.jit, static_argnames=["n"])
    def fn(x: Any, n: int = 1) -> Any:
        return x + 0 * n

    return TunedFunction.of(fn, [{"n": 1}, {"n": 2}], Options(name=name, **options))


class Jobs:
    """Stands for the tuning job: counts its calls and ends as `end` does."""

    def __init__(self, end: Callable[[KeyedCall], TuningResult]) -> None:
        self.situations: list[Situation] = []
        self._end = end

    def __call__(self, call: KeyedCall, now: Situation, tuning: Any, **_: Any) -> Any:
        self.situations.append(now)
        return types.SimpleNamespace(run=lambda: self._end(call))


def found(call: KeyedCall, n: int = 2) -> TuningResult:
    return TuningResult(best_config={"n": n}, time_ms=1.0, trials=(), key=call.id.key, device=call.id.device)


def failing(call: KeyedCall) -> TuningResult:
    raise TuningFailedError("All 2 configs failed", trials=(), key=call.id.key)


def save(tuner: Tuner, n: int, x: Any = X, **fields: Any) -> None:
    call = keyed(tuner.bind((x,), {}))
    entry = {"config": {"n": n}, "time_ms": 1.0, "space": None, "key_values": call.readable, **fields}
    Store(blocks.current().cache_dir).put(*call.id, entry)


def choose(tuner: Tuner, x: Any = X) -> Answer:
    return tuner.choice(tuner.bind((x,), {}))


def test_a_saved_result_comes_before_a_sweep_and_lasts() -> None:
    tuner = Tuner(function(), make_job=(jobs := Jobs(found)))
    save(tuner, 1)
    answer = choose(tuner)
    assert (answer.origin, answer.config, answer.lasts) == (Origin.SAVED, {"n": 1}, True)
    assert not jobs.situations


def test_a_miss_is_tuned_once_and_then_remembered(cache_dir: Any) -> None:
    tuner = Tuner(function(), make_job=(jobs := Jobs(found)))
    assert (choose(tuner).origin, choose(tuner).origin) == (Origin.MEASURED, Origin.SAVED)
    assert choose(tuner).config == {"n": 2}
    assert len(jobs.situations) == 1


def test_a_failure_is_repeated_and_not_tuned_again() -> None:
    tuner = Tuner(function(), make_job=(jobs := Jobs(failing)))
    for _ in range(2):
        with pytest.raises(TuningFailedError, match="All 2 configs failed"):
            choose(tuner)
    assert len(jobs.situations) == 1


def test_always_tune_starts_over_once_for_each_block() -> None:
    tuner = Tuner(function(), make_job=(jobs := Jobs(found)))
    save(tuner, 1)
    for _ in range(2):
        with quarantune.settings(always_tune=True):
            assert [choose(tuner).origin for _ in range(3)] == [Origin.MEASURED, Origin.SAVED, Origin.SAVED]
    assert [now.start_over for now in jobs.situations] == [True, True]


def test_one_of_several_waiting_threads_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(call: KeyedCall) -> TuningResult:
        begun.set()
        assert may_end.wait(60)
        return found(call)

    tuner = Tuner(function(), make_job=(jobs := Jobs(slow)))
    answers: list[Answer] = []

    def call() -> None:
        answers.append(choose(tuner))

    monkeypatch.setenv("QUARANTUNE_ALWAYS_TUNE", "1")
    threads = [threading.Thread(target=call) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    while threads[1].is_alive() and not waits_for_a_lock(threads[1]):
        threads[1].join(0.01)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 2
    assert len(jobs.situations) == 1


def waits_for_a_lock(thread: threading.Thread) -> bool:
    """Returns whether a thread is in `Ladder.answer_of`; it can only be waiting there."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == "answer_of"


def test_the_config_of_a_near_call_does_not_outlive_its_block() -> None:
    tuner = Tuner(function(), make_job=Jobs(found))
    near = keyed(tuner.bind((np.zeros(8, np.float32),), {}))
    save(tuner, 2, np.zeros(8, np.float32), space=near.call.space)
    with quarantune.settings(on_miss="nearest"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process warns once
        answer = choose(tuner)
    assert (answer.origin, answer.config, answer.lasts) == (Origin.NEAREST, {"n": 2}, False)


def test_the_defaults_run_or_a_message_says_what_is_missing() -> None:
    tuner = Tuner(function(), make_job=(jobs := Jobs(found)))
    with quarantune.settings(on_miss="default"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process warns once
        answer = choose(tuner)
    assert (answer.origin, answer.config, answer.lasts) == (Origin.DEFAULTS, None, False)
    with quarantune.settings(on_miss="error"), pytest.raises(CacheMissError, match="nothing is cached for"):
        choose(tuner)
    assert not jobs.situations


def test_forgetting_the_result_keeps_the_measured_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarantune.answers.memory._MOST_REMEMBERED", 2)
    tuner = Tuner(function(), make_job=Jobs(found))
    choose(tuner)
    for size in range(5, 9):
        save(tuner, 1, np.zeros(size, np.float32))
        choose(tuner, np.zeros(size, np.float32))
    assert keyed(tuner.bind((X,), {})).id in tuner.rungs.memory.answers
    assert len(tuner.rungs.memory.answers) <= 3


def test_a_worker_runs_the_defaults_and_refuses_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarantune.answers.answer.in_sandbox", lambda: True)
    monkeypatch.setattr("quarantune.tuning.job.in_sandbox", lambda: True)
    tuner = Tuner(function())
    assert choose(tuner).origin is Origin.DEFAULTS
    call = tuner.bind((X,), {})
    with pytest.raises(RuntimeError, match="was asked to tune"):
        tuner.result(call)
    with quarantune.settings(on_miss="default"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process warns once
        assert tuner.result(call).from_cache == "default"


def test_an_unknown_call_reads_each_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda store, *key, **how: reads.append(store.label) or get(store, *key, **how))
    tuner = Tuner(function())
    with quarantune.settings(on_miss="default"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process warns once
        assert choose(tuner).origin is Origin.DEFAULTS
    assert len(reads) == 1
    assert tuner.lookup(tuner.bind((X,), {})) is None
    assert len(reads) == 2
