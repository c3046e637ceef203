"""Executors that cannot run sweeps, machines that cannot take part, and other bad input get one clear sentence each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import json
import math
import os
import pickle
import queue
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import engine_kernels
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import eventually
from helpers import SOURCE

import quarantune
from quarantune.cache.journal import Journal
from quarantune.engine import contact, distributed, remote, shards
from quarantune.sandbox.workforce import Said
from quarantune.scheduler.plan import NOTHING_MORE, Proof
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.limits import SweepLimits
from quarantune.values.codec import DamageError
from quarantune.values.errors import EngineError
from quarantune.values.settings import Settings
from quarantune.values.trial import Outcome, Trial

X = jnp.ones((8, 128))


class Refusing(Executor):
    """Refuses work."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise self._error


class Fresh(Executor):
    """Runs each task in a fresh interpreter.

    Args:
        prelude: a program that the interpreter runs first.
        flags: the interpreter's flags.
    """

    def __init__(self, prelude: str, *flags: str) -> None:
        self._command = [
            *(sys.executable, *flags, "-c"),
            f"import sys, pickle\n{prelude}\n"
            "fn, args = pickle.load(sys.stdin.buffer)\nsys.stdout.buffer.write(pickle.dumps(fn(*args)))",
        ]

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = subprocess.run(self._command, input=pickle.dumps((fn, args)), capture_output=True, timeout=280)
        future: Future[Any] = Future()
        if done.returncode:
            future.set_exception(RuntimeError(done.stderr.decode().strip().splitlines()[-1]))
        else:
            future.set_result(pickle.loads(done.stdout))
        return future


def tuner(**options: Any) -> quarantune.AutoTuner:
    return quarantune.AutoTuner(engine_kernels.plain, {"n": [0, 4]}, rep=2, ref_fn=None, **options)


def test_values_that_are_not_executors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"executor=5 is not valid: it must be a concurrent\.futures\.Executor"):
        tuner().run(X, executor=5)
    monkeypatch.setenv("QUARANTUNE_EXECUTOR", "dask")
    with pytest.raises(ValueError, match=r"QUARANTUNE_EXECUTOR='dask' is not valid.*given in Python"):
        tuner().run(X)


def test_an_executor_that_takes_no_work_is_named() -> None:
    executor = Refusing(pickle.PicklingError("cannot pickle this"))
    with pytest.raises(EngineError, match="executor Refusing could not run a first task: PicklingError: cannot pickle"):
        tuner().run(X, executor=executor)


class Breaking(ThreadPoolExecutor):
    """A pool that breaks after its first task, and accepts more tasks before it notices."""

    is_broken = False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not self.is_broken:
            self.is_broken = True
            return super().submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        future.set_exception(BrokenProcessPool("a child process terminated abruptly"))
        return future


class Silent(Executor):
    """Accepts work and does none."""

    def __init__(self) -> None:
        self.taken: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.taken.put(future)
        return future


def test_an_engine_that_does_not_answer_holds_up_no_other_one() -> None:
    silent, found = Silent(), threading.Event()
    waits = threading.Thread(target=lambda: distributed.device(silent))
    waits.start()
    asked = silent.taken.get(timeout=10)
    with ThreadPoolExecutor(1) as pool:
        asks = threading.Thread(target=lambda: (distributed.device(pool), found.set()))
        asks.start()
        try:
            assert found.wait(20)
        finally:
            asked.set_result(remote.describe())
            asks.join()
            waits.join()


def test_a_pool_that_breaks_before_its_shard_blames_no_config() -> None:
    advice = r"Breaking takes no further work: BrokenProcessPool: a child process terminated abruptly"
    with Breaking(1) as pool, pytest.raises(EngineError, match=advice):
        tuner().run(X, executor=pool)


def test_an_executor_excludes_trials_in_this_process() -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        quarantune.settings(isolation="none"),
        pytest.raises(ValueError, match="ISOLATION=none runs configs in this process, and executor="),
    ):
        tuner().run(X, executor=pool)


def test_tune_many_refuses_values_that_are_not_calls() -> None:
    for call, words in [
        (5, "5 is not a call to tune for"),
        ((engine_kernels.plain, (X,)), "neither an autotuned function nor an AutoTuner"),
        ((tuner(), X), "give .function, args."),
    ]:
        with pytest.raises(TypeError, match=words):
            quarantune.tune_many([call])


def test_a_function_may_have_parameters_executor_and_resume() -> None:
    import inspect

    from quarantune.api.autotune import on_engine

    def function(x: Any, executor: int, resume: str, n: int) -> None: ...

    with on_engine(inspect.signature(function), {"executor": 5, "resume": "yes"}) as (kwargs, resume):
        assert (kwargs, resume) == ({"executor": 5, "resume": "yes"}, False)


def test_shards_are_even_and_leave_dangerous_configs_for_last() -> None:
    assert [len(shard.indices) for shard in shards.partition(range(10))] == [10]
    assert [len(shard.indices) for shard in shards.partition(range(64))] == [16] * 4
    sizes = [len(shard.indices) for shard in shards.partition(range(5000))]
    assert sum(sizes) == 5000
    assert max(sizes) == 16
    *others, last = shards.partition(range(100), [3, 5])
    assert last.indices == [3, 5]
    assert sorted(index for each in others for index in each.indices) == [n for n in range(100) if n not in (3, 5)]


def measured(index: int, time_ms: float, host: str) -> Trial:
    samples_ms = (time_ms,) * 4
    return Trial(
        config={"n": index}, outcome=Outcome.OK, time_ms=time_ms, own_ms=time_ms, samples_ms=samples_ms,
        compile_s=0.1 + index, device=f"cpu on {host}",
    )  # fmt: skip


def test_finalists_come_from_every_machine_whatever_its_speed() -> None:
    fast = {index: measured(index, 1.0 + index / 100, "fast") for index in range(20)}
    slow = {index: measured(index, 9.0 + index / 100, "slow") for index in range(20, 40)}
    groups = distributed.of_machines(fast | slow)
    assert groups == [list(range(8)), list(range(20, 28))]
    assert distributed.next_groups(groups, 39) == [[*range(8), *range(20, 28), 39]]
    many = {index: measured(index, 1.0 + index, f"host-{index}") for index in range(40)}
    groups = distributed.next_groups(distributed.of_machines(many), None)
    assert sorted(len(group) for group in groups) == [13, 13, 14]
    assert sorted(index for group in groups for index in group) == list(range(40))


def test_damaged_messages_of_shards_are_refused() -> None:
    good = {"index": 0, "trial": measured(0, 1.0, "a").to_json()}

    def read(message: Any) -> Any:
        found = remote.read(message)
        return found.read({0: {"n": 0}}, is_check=False) if isinstance(found, remote.ConfigEnded) else found

    assert read(good).time_ms == 1.0
    for damage in (
        {}, {**good, "index": 7}, {**good, "index": []}, {**good, "trial": None},
        {**good, "trial": {**good["trial"], "figures": {"flops": "x"}}},
        {**good, "trial": {**good["trial"], "samples_ms": [-1]}},
        {"end": None}, {"end": "done", "rounds_ms": [[0, [1.0]], [1, []]]}, {"end": "done", "rounds_ms": 3},
        {"end": "done", "trials": [5]}, {"end": "done", "trials": 5},
    ):  # fmt: skip
        with pytest.raises(DamageError):
            read(damage)
    assert read({"phase": [0, "check"]}).phase == (0, "check")
    for place in (math.nan, math.inf, 0.0, True, "0", None, [0]):
        with pytest.raises(DamageError):
            read({"phase": [place, "check"]})
    for data in ([0, math.nan], [0, "lunch"], [0], math.inf, None, {"0": "check"}):
        with pytest.raises(DamageError):
            read({"phase": data})


@pytest.mark.slow
@pytest.mark.engines
def test_a_worker_without_quarantune_is_an_error_that_says_so() -> None:
    with pytest.raises(EngineError, match=r"executor Fresh cannot import quarantune .*install quarantune"):
        tuner().run(X, executor=Fresh("", "-I", "-S"))


class KilledWorkerError(Exception):
    """Stands for the error that Dask raises for a task whose workers died."""


class WithMisfit(ThreadPoolExecutor):
    """A pool of one machine. After the first shard, a second machine takes some tasks and runs none."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1)
        self._error = error
        self._is_there = iter([False, *[True] * 6])

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._run, fn, *args, **kwargs)

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if fn is remote.run and next(self._is_there, False):
            raise self._error
        return fn(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ModuleNotFoundError("No module named 'quarantune'"), "it cannot import quarantune"),
        (KilledWorkerError("run-1", "3 workers died"), "it ends before it begins to work; perhaps it cannot import"),
    ],
    ids=["import", "death"],
)
def test_a_worker_that_dies_at_its_start_is_kept_out(
    error: Exception, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    configs = {"n": [0, 1], "same": list(range(18))}
    with WithMisfit(error) as pool:
        result = quarantune.AutoTuner(engine_kernels.plain, configs, rep=2, ref_fn=None).run(X, executor=pool)
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert f"a worker of the executor WithMisfit takes no part: {named}" in caplog.text


class Dying(ThreadPoolExecutor):
    """A pool whose shards die before this process hears from them."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1)
        self._error = error

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if fn is not remote.run:
            return super().submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        if isinstance(self._error, KilledWorkerError):
            future.set_exception(self._error)
        else:
            future.set_result(remote.End(end=str(self._error), host="there").to_json())
        return future


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (KilledWorkerError("run-1"), "KilledWorkerError: run-1"),
        (Exception(remote.STOPPED), "its process was ordered to stop"),
        (Exception(remote.LATE), "on there: late"),
    ],
    ids=["killed", "stopped", "late"],
)
def test_shards_that_were_never_heard_blame_no_config(error: Exception, named: str) -> None:
    advice = f"could not run a shard, twice; the last time .*{named}; the trials so far are kept"
    with Dying(error) as pool, pytest.raises(EngineError, match=advice):
        tuner().run(X, executor=pool)


@pytest.mark.slow
@pytest.mark.engines
def test_a_worker_of_another_version_is_named_with_both() -> None:
    prelude = f"sys.path.insert(0, {str(SOURCE)!r})\nimport quarantune._version as v\nv.__version__ = '0.0.1'\n"
    ours = remote.versions_here()["quarantune"]
    with pytest.raises(EngineError, match=f"it has quarantune 0.0.1, and the submitter {ours}; give all machines"):
        tuner().run(X, executor=Fresh(prelude))


def one_core(is_taken: Any) -> None:
    """Restricts the first worker of a pool to one core, so that it is a different kind of device."""
    with is_taken.get_lock():
        if not is_taken.value:
            is_taken.value = True
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_of_two_kinds_of_devices_the_second_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    context = get_context("spawn")
    space = {"n": list(range(20))}
    kernel = quarantune.autotune(space, rep=2, ref_fn=None, name="kinds")(engine_kernels.plain)
    with ProcessPoolExecutor(2, context, one_core, (context.Value("b", False),)) as pool, settings_of(pool):
        kernel(X)  # for the device of this process
    assert kernel.lookup(X) is not None
    assert "takes no part: it has" in caplog.text
    with ProcessPoolExecutor(1, context, one_core, (context.Value("b", False),)) as pool, settings_of(pool):
        with pytest.raises(
            EngineError, match=r"no machine of .* it has .*\(1 cores\), another kind of device than .* cores\)\); g"
        ):
            quarantune.autotune({"n": [0, 4]}, ref_fn=None, name="other")(engine_kernels.plain)(X)
        # If the result is not for this process, the first machine decides.
        result = tuner().run(X)
    assert result.device.endswith("(1 cores)")
    assert len(result.trials) == 2


@contextlib.contextmanager
def settings_of(executor: Executor) -> Iterator[None]:
    with quarantune.settings(executor=executor):
        yield


def no_files() -> None:
    """Lets this process write no byte to a file, as if the disk were full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.engines
def test_machines_out_of_disk_are_named_and_others_continue() -> None:
    context = get_context("spawn")
    advice = r"ProcessPoolExecutor could not run a shard, twice; the last time on .*File too large"
    with ProcessPoolExecutor(1, context, no_files) as pool, pytest.raises(EngineError, match=advice):
        tuner().run(X, executor=pool)
    with ProcessPoolExecutor(1, context) as pool:
        assert tuner().run(X, executor=pool).best_config == {"n": 0}


@pytest.mark.slow
@pytest.mark.engines
def test_a_broken_pool_is_named_and_its_trials_are_kept(tmp_path: Any) -> None:
    ended: list[int] = []

    def follow(index: int, phase: str) -> None:
        if phase == "end":
            ended.append(index)
            if len(ended) == 3:
                os.kill(int((tmp_path / "notes").read_text().split()[-1]), signal.SIGKILL)

    space = {"n": list(range(8))}
    noted = quarantune.AutoTuner(engine_kernels.noted, space, rep=2, ref_fn=None, name="broken", on_progress=follow)
    advice = "ProcessPoolExecutor takes no further work: BrokenProcessPool"
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, pytest.raises(EngineError, match=advice):
        noted.run(X, str(tmp_path), executor=pool)
    with ThreadPoolExecutor(1) as pool:
        result = noted.run(X, str(tmp_path), executor=pool)
    assert sorted(ended) == list(range(8))
    assert len(result.trials) == 8


@pytest.mark.slow
@pytest.mark.engines
def test_slow_defaults_of_an_interrupted_sweep_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Journal.append

    def append_as_slow(journal: Journal, record: Any) -> None:
        is_trial = "trial" in record  # not a call's key, which has a separate journal
        append(journal, {**record, "trial": {**record["trial"], "outcome": "slow"}} if is_trial else record)

    def interrupt(index: int, phase: str) -> None:
        if (index, phase) == (1, "end"):
            raise KeyboardInterrupt

    begun = quarantune.AutoTuner(engine_kernels.plain, {"n": [0, 1, 2]}, rep=2, name="slow", on_progress=interrupt)
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", append_as_slow)
            with pytest.raises(KeyboardInterrupt):
                begun.run(X, executor=pool)
        left = quarantune.AutoTuner(engine_kernels.plain, {"n": [1, 3, 4]}, rep=2, name="slow")
        result = left.run(X, executor=pool)
    assert [trial.config["n"] for trial in result.trials] == [1, 3, 4]
    assert {trial.config["n"] for trial in result.finalists} >= {1}
    assert result.default_time_ms is not None


def request_of(ledger: Ledger) -> Any:
    """Returns the parts of a sweep that following its shards needs."""
    limits = SweepLimits(
        compile_timeout_s=100.0, timeout_s=20.0, memory_limit_bytes=None, compile_slots=1, configs_per_worker=None
    )
    return SimpleNamespace(
        problem=SimpleNamespace(name="slow"), limits=limits, target=None, troubled=(), ledger=ledger,
        settings=Settings(),
    )  # fmt: skip


def shards_of(pool: Executor, configs: dict[int, Any], request: Any) -> shards.Shards:
    return shards.Shards(pool, b"", configs, request, Proof(), check=lambda: None)


def test_a_slow_shard_within_its_deadline_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    now, looks = [started], [0]
    most_told, may_end = threading.Event(), threading.Event()

    def look() -> float:
        looks[0] += 1
        return now[0]

    def machine_of(task: Any) -> Any:
        line = contact.reach(contact.Address.from_json(task["address"]), task["shard"], {"host": "slow"})
        told = [{"index": index, "trial": measured(index, 1.0, "slow").to_json()} for index, _ in task["configs"]]
        *most, last = told
        assert all(map(line.say, most))
        assert most_told.wait(20)
        now[0] = started + task["deadline_s"] - 1.0
        looks[0] = 0
        assert may_end.wait(20)
        assert line.say(last)
        assert line.say(remote.End(end=remote.DONE).to_json())
        line.close()
        return remote.End(end=remote.DONE).to_json()

    def on_tick() -> None:
        if looks[0] > 50:
            may_end.set()

    def on_trial(index: int, trial: Trial) -> None:
        trials[index] = trial
        if len(trials) == len(configs) - 1:
            most_told.set()

    monkeypatch.setattr(shards, "time", types.SimpleNamespace(monotonic=look))
    monkeypatch.setattr(remote, "run", machine_of)
    configs: dict[int, Any] = {index: {"n": index} for index in range(16)}
    trials: dict[int, Trial] = {}
    request = request_of(Ledger(Listener(on_trial=on_trial, on_tick=on_tick)))
    with ThreadPoolExecutor(1) as pool, contextlib.closing(shards_of(pool, configs, request)) as given:
        ends = given.run([shards.Shard(indices=[*configs])], on_trial, NOTHING_MORE)
    assert [(shard.given, shard.deaths) for shard, _ in ends] == [(tuple(configs), ())]


def test_a_shard_survives_its_stopped_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_collected = threading.Event()

    def work(line: contact.Contact, task: Any) -> None:
        assert is_collected.wait(20)
        for index, _ in task["configs"]:
            assert line.say({"index": index, "trial": measured(index, 1.0, "there").to_json()})
        assert line.say(remote.End(end=remote.DONE).to_json())
        line.close()

    def machine_of(task: Any) -> Any:
        address = contact.Address.from_json(task["address"])
        line = contact.reach(address, task["shard"], {"host": "there"})
        assert contact.reach(address, task["shard"], {"host": "elsewhere"}) is False
        works.submit(work, line, task)
        return remote.End(end=remote.STOPPED, host="elsewhere").to_json()

    def on_tick() -> None:
        if given._shards and all(shard.future is None for shard in given._shards.values()):
            is_collected.set()

    monkeypatch.setattr(remote, "run", machine_of)
    configs: dict[int, Any] = {index: {"n": index} for index in range(4)}
    trials: dict[int, Trial] = {}
    request = request_of(Ledger(Listener(on_trial=trials.__setitem__, on_tick=on_tick)))
    with (
        ThreadPoolExecutor(1) as works,
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(shards_of(pool, configs, request)) as given,
    ):
        ends = given.run([shards.Shard(indices=[*configs])], trials.__setitem__, NOTHING_MORE)
    assert [(shard.host, shard.deaths) for shard, _ in ends] == [("there", ())]
    assert {trial.outcome for trial in trials.values()} == {Outcome.OK}


def test_finalists_of_a_lost_machine_are_compared_elsewhere() -> None:
    trials = {index: measured(index, 1.0 + index, f"host-{index}") for index in range(40)}
    compared: list[list[int]] = []

    class Losing:
        """Loses the machine that compares the fastest config, once."""

        def run(self, runs: list[shards.Shard], on_trial: Callable[[int, Trial], None], source: Any) -> Any:
            is_first = not compared
            compared.extend(shard.indices for shard in runs)
            for shard in runs:
                shard.given = tuple(shard.indices)
            ended = [shard for shard in runs if 0 not in shard.given or not is_first]
            for index in (index for shard in ended for index in shard.given):
                on_trial(index, trials[index])
            return [
                (shard, remote.End(end=remote.DONE, rounds_ms=tuple((n, (1.0 + n,) * 4) for n in shard.given)))
                for shard in ended
            ]

    problem: Any = SimpleNamespace(name="lost", default=None, untuned=None)
    final: Any = distributed._final(Losing(), problem, trials, "")  # type: ignore[arg-type]
    assert len(compared) == 4
    assert 0 in compared[-1]
    assert min(final.final.rounds_ms, key=final.final.rounds_ms.get) == 0


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("failures", [1, 2])
def test_a_final_that_could_not_run_is_repeated_once(failures: int, caplog: pytest.LogCaptureFixture) -> None:
    left = [RuntimeError("no room")] * failures

    class Full(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if fn is not remote.run or not args[0]["is_whole"] or not left:
                return super().submit(fn, *args, **kwargs)
            future: Future[Any] = Future()
            future.set_exception(left.pop())
            return future

    configs = {"n": [0, 1], "same": list(range(10))}
    with Full(2) as pool:
        result = quarantune.AutoTuner(engine_kernels.plain, configs, rep=2, ref_fn=None).run(X, executor=pool)
    assert (len(result.trials), left) == (20, [])
    assert ("the finalists could not be compared on one machine" in caplog.text) == (failures == 2)


class NeverCancelled(Future[Any]):
    def cancel(self) -> bool:
        raise NotImplementedError("Cancel not implemented")


@pytest.mark.slow
@pytest.mark.engines
def test_futures_that_cannot_be_cancelled_do_no_harm() -> None:
    """Parsl's futures cannot be cancelled."""

    class Parsl(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            told = NeverCancelled()
            done = super().submit(fn, *args, **kwargs)
            done.add_done_callback(lambda done: told.set_result(done.result()))
            return told

    with Parsl(2) as pool:
        tuned = quarantune.AutoTuner(engine_kernels.noted, {"n": list(range(8))}, rep=2, ref_fn=None, name="parsl")
        with tempfile.TemporaryDirectory() as notes:
            assert len(tuned.run(X, notes, executor=pool).trials) == 8


def one_thread() -> None:
    """Limits the threads of this process as engines do in their workers."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.mark.slow
@pytest.mark.engines
def test_workers_get_the_limits_of_threads_of_the_submitter(monkeypatch: pytest.MonkeyPatch) -> None:
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, one_thread) as pool:
        for limit in (3, 0):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if limit:
                monkeypatch.setenv("OMP_NUM_THREADS", str(limit))
            threads = quarantune.AutoTuner(engine_kernels.threads_of, {"n": [-1, 1]}, rep=2, ref_fn=None)
            result = threads.run(np.array([limit]), executor=pool)  # a plain callable gets the arrays' values
            assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()


@pytest.mark.slow
@pytest.mark.engines
def test_tune_many_gives_each_machine_a_whole_sweep() -> None:
    kernel = quarantune.autotune({"n": list(range(20))}, rep=2, ref_fn=None, name="many")(engine_kernels.plain)
    calls = [(kernel, (jnp.ones((rows, 128)),)) for rows in (8, 16, 8)]
    tasks: list[Any] = []

    class Noting(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if fn is remote.run:
                tasks.append(args[0])
            return super().submit(fn, *args, **kwargs)

    with Noting(2) as pool:
        results = quarantune.tune_many(calls, executor=pool)
    assert [result.best_config["n"] for result in results] == [0, 0, 0]
    assert [(len(task["configs"]), task["is_whole"]) for task in tasks] == [(20, True)] * 2
    failing = quarantune.AutoTuner(engine_kernels.threads_of, {"n": [1]}, ref_fn=None)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ExceptionGroup, match="1 of 2 problems") as caught:
        quarantune.tune_many([calls[0], (failing, (np.array([77]),))], executor=pool)
    assert isinstance(caught.value.exceptions[0], quarantune.TuningFailedError)


@pytest.mark.slow
@pytest.mark.engines
def test_shards_without_a_connection_report_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no ports here")

    monkeypatch.setattr("socket.create_server", refuse)
    ended: list[int] = []
    unheard = quarantune.AutoTuner(
        engine_kernels.plain,
        {"n": [0, 2], "same": list(range(10))},
        rep=2,
        ref_fn=None,
        on_progress=lambda index, phase: ended.append(index) if phase == "end" else None,
    )
    with ThreadPoolExecutor(2) as pool:
        result = unheard.run(X, executor=pool)
    assert sorted(ended) == list(range(20))
    assert result.best_config["n"] == 0


@pytest.mark.slow
@pytest.mark.engines
def test_a_search_asks_for_shards_in_place_of_trials() -> None:
    space = {"n": [0, 2], "same": list(range(200))}
    searched = quarantune.AutoTuner(
        engine_kernels.plain, space, rep=1, ref_fn=None, search="random", max_trials=30, name="searched"
    )
    with ThreadPoolExecutor(2) as pool:
        result = searched.run(X, executor=pool)
    assert (result.stopped, result.seen, len(result.trials)) == ("max_trials", 30, 30)
    assert len({(trial.config["n"], trial.config["same"]) for trial in result.trials}) == 30
    with ThreadPoolExecutor(2) as pool:
        budgeted = quarantune.AutoTuner(
            engine_kernels.plain, space, rep=1, ref_fn=None, search="random", time_budget=1.5, name="budgeted"
        ).run(X, executor=pool)
    assert budgeted.stopped == "time_budget"
    assert budgeted.best_config is not None


@pytest.mark.slow
@pytest.mark.engines
def test_compile_checks_go_to_machines_without_the_device() -> None:
    with ThreadPoolExecutor(1) as pool, quarantune.settings(executor=pool):
        report = quarantune.compile_check(engine_kernels.plain, {"n": [0, 1]}, X, target=quarantune.targets()[0])
    assert report.ok
    assert all(trial.figures is not None for trial in report.trials)


def reached(contacts: contact.Contacts, number: int, address: contact.Address | None = None) -> Any:
    """Returns what `reach` finds, while the submitter listens."""
    found: list[Any] = []
    there = contacts.address if address is None else address
    thread = threading.Thread(target=lambda: found.append(contact.reach(there, number, {})))
    thread.start()
    while thread.is_alive():
        assert contacts.poll(0.01) == []
    return found[0]


STRANGERS = [
    *(b'{"token": "\\ud800"}\n', b'{"token": NaN, "shard": Infinity}\n', b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\0\n"),
    *(b"[" * 10_000 + b"\n", b'{"token": ' + b"9" * 10_000 + b"}\n", b"\n", b"{}\n", b"x" * 100_000, b"[5]\n"),
    *(b'{"nonce": 5}\n', b'{"nonce": null, "proof": "\\ud800", "shard": 1, "run": "a", "about": {}}\n'),
]


def test_shards_are_heard_whatever_a_stranger_sends() -> None:
    contacts = contact.Contacts(lambda *_: True)
    with contextlib.closing(contacts), contextlib.ExitStack() as open_for_now:
        strangers = []
        for words in STRANGERS:
            stranger = open_for_now.enter_context(socket.create_connection(("127.0.0.1", contacts.address.port)))
            stranger.sendall(words)
            strangers.append(stranger)
        line = reached(contacts, 1)
        assert line.say({"phase": [0, "end"]})
        assert contacts.poll(5.0) == [Said(1, {"phase": [0, "end"]})]
        for stranger in strangers:
            stranger.settimeout(5.0)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
        line.close()


def proof_of(token: str, *said: str) -> str:
    return hmac.new(token.encode(), json.dumps(said).encode(), "sha256").hexdigest()


def introduce(shard: socket.socket, contacts: contact.Contacts, **changes: Any) -> None:
    """Introduces a shard on this machine to the submitter, without waiting for the answer."""
    shard.sendall(b'{"nonce": "mine"}\n')
    received = b""
    while not received.endswith(b"\n"):
        assert contacts.poll(0.01) == []
        with contextlib.suppress(BlockingIOError):
            received += shard.recv(4096, socket.MSG_DONTWAIT)
    nonce, token = json.loads(received)["nonce"], contacts.address.token
    assert json.loads(received)["proof"] == proof_of(token, "submitter", "mine", nonce)
    greeting = {"proof": proof_of(token, "shard", "mine", nonce), "shard": 1, "run": "a", "about": {}}
    shard.sendall(json.dumps(greeting | {"machine": contacts.address.machine} | changes).encode() + b"\n")


def test_a_shard_whose_machine_is_gone_has_ended() -> None:
    begun: list[int] = []
    contacts = contact.Contacts(lambda number, about: begun.append(number) is None)
    with contextlib.closing(contacts):
        shard = socket.create_connection(("127.0.0.1", contacts.address.port))
        introduce(shard, contacts)
        shard.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # `close` resets it
        shard.close()
        heard: list[Said] = []
        assert eventually(lambda: heard.extend(contacts.poll(0.01)) or heard, timeout_s=5)
    assert begun == [1]
    assert [(said.number, str(said.message)) for said in heard] == [(1, "its connection has ended")]


ANSWERS: dict[str, bytes | None] = {
    "closes": b"",
    "says nothing": None,
    "banner": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 11\r\n\r\nBad Request",
    "go": b'{"go": true}\n',
    "false proof": b'{"nonce": "theirs", "proof": "' + b"0" * 64 + b'"}\n{"proof": "' + b"0" * 64 + b'"}\n',
    "no text": b'{"nonce": ["theirs"], "proof": "\\ud800"}\n{"proof": 5}\n',
    "huge line": b"x" * 1_000_000,
    "TLS": bytes.fromhex("1503030002022a") * 3,
    "stop": b'{"stop": true}\n',
}
"""Answers of other services to a shard; None if they only listen."""


@contextlib.contextmanager
def service(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Runs another service on this machine, which answers on a port; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener was closed
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def until_closed(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def elsewhere(port: int, *hosts: str, token: str = "secret") -> contact.Address:
    return contact.Address("another machine", hosts or ("127.0.0.1",), port, token)


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_shard_that_reaches_another_service_runs_unheard(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "_REPLY_S", 0.5)
    heard = bytearray()

    def answer(connection: socket.socket) -> None:
        heard.extend(connection.recv(4096))
        if (says := ANSWERS[kind]) is None:
            until_closed(connection)
        else:
            connection.sendall(says)

    with service(answer) as port:
        line = contact.reach(elsewhere(port), 1, {})
    assert isinstance(line, contact.Contact)
    assert line.say({"phase": [0, "end"]})
    assert not line.is_over
    assert b"secret" not in heard


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("kind", ["closes", "banner", "go", "HTTP"])
@pytest.mark.parametrize("share", [1, 2], ids=["all", "half"])
def test_machines_that_reach_another_service_lose_no_config(kind: str, share: int) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(ANSWERS[kind] or b"")

    class Elsewhere(ThreadPoolExecutor):
        given = 0

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if fn is remote.run:
                self.given += 1
                if self.given % share == 0:
                    args[0]["address"] = elsewhere(port).to_json()
            return super().submit(fn, *args, **kwargs)

    configs = {"n": [30, 0], "same": list(range(12))}
    with service(answer) as port, Elsewhere(2) as pool:
        result = quarantune.AutoTuner(engine_kernels.plain, configs, rep=2, ref_fn=None).run(X, executor=pool)
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert result.best_config["n"] == 0
    assert pool.given >= share


def test_a_slow_service_delays_a_shard_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contact, "_REPLY_S", 0.5)

    def drip(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"x")
            select.select([connection], [], [], 0.02)

    with service(drip) as port:
        began = time.monotonic()
        line = contact.reach(elsewhere(port), 1, {})
        assert time.monotonic() - began < 10
    assert isinstance(line, contact.Contact)
    assert not line.is_over


def test_a_service_that_echoes_is_not_the_submitter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proofs of an earlier connection, or of the shard itself, prove nothing."""
    monkeypatch.setattr(contact, "_REPLY_S", 2.0)
    recorded: list[bytes] = []

    def relay(connection: socket.socket) -> None:
        """Records the submitter's messages."""
        with socket.create_connection(("127.0.0.1", contacts.address.port)) as submitter:
            for _ in range(2):
                submitter.sendall(connection.recv(4096))
                recorded.append(submitter.recv(4096))
                connection.sendall(recorded[-1])
            until_closed(connection)

    def replay(connection: socket.socket) -> None:
        for said in recorded:
            connection.sendall(said)
        until_closed(connection)

    def reflect(connection: socket.socket) -> None:
        while said := connection.recv(4096):
            connection.sendall(said)

    with contextlib.closing(contact.Contacts(lambda *_: True)) as contacts:
        token = contacts.address.token
        with service(relay) as port:
            line = reached(contacts, 1, elsewhere(port, token=token))
            assert isinstance(line, contact.Contact)
            assert line.say({"phase": [0, "end"]})
            line.close()
        assert [b"proof" in said for said in recorded] == [True, True]
        for answer in (replay, reflect):
            with service(answer) as port:
                unheard = contact.reach(elsewhere(port, token=token), 1, {})
            assert isinstance(unheard, contact.Contact)
            assert unheard._peer is None


def test_a_submitter_at_its_second_address_is_found() -> None:
    with contextlib.closing(contact.Contacts(lambda *_: True, is_local=True)) as contacts:
        port = contacts.address.port
        with socket.create_server(("127.0.0.9", port)) as other:
            closing = threading.Thread(target=lambda: other.accept()[0].close())
            closing.start()
            address = elsewhere(port, "127.0.0.9", "127.0.0.1", token=contacts.address.token)
            line = reached(contacts, 1, address)
            closing.join()
        assert line.say({"phase": [0, "end"]})
        assert contacts.poll(5.0) == [Said(1, {"phase": [0, "end"]})]
        contacts.stop(1)
        assert eventually(lambda: line.is_over)
        line.close()


def test_a_shard_without_the_secret_is_refused_and_runs() -> None:
    begun: list[int] = []
    with contextlib.closing(contact.Contacts(lambda number, about: begun.append(number) is None)) as contacts:
        for machine in (contact.machine_id(), "another machine"):
            line = reached(contacts, 1, contact.Address(machine, ("127.0.0.1",), contacts.address.port, "wrong"))
            assert isinstance(line, contact.Contact)
            assert line._peer is None
        assert contact.reach(contact.Address(contact.machine_id(), (), 0, "x"), 1, {})._peer is None
    assert begun == []


class Proxy:
    """Passes connections to the submitter, one at a time, until they are cut."""

    def __init__(self, contacts: contact.Contacts) -> None:
        self._to = ("127.0.0.1", contacts.address.port)
        self.open: list[socket.socket] = []

    def __call__(self, connection: socket.socket) -> None:
        with socket.create_connection(self._to) as there:
            self.open = [connection, there]
            while True:
                for ready in select.select(self.open, [], [])[0]:
                    data = ready.recv(1 << 16)
                    (there if ready is connection else connection).sendall(data)
                    if not data:
                        return

    def cut(self) -> None:
        """Ends both connections, like a proxy that restarts."""
        for connection in self.open:
            with contextlib.suppress(OSError):  # ending the first may have closed the second
                connection.shutdown(socket.SHUT_RDWR)


def test_a_proxy_that_ends_a_connection_loses_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "machine_id", lambda: secrets.token_hex())  # the shard is on another machine
    begun: list[int] = []
    heard: list[Said] = []

    def look(line: contact.Contact, was_heard: threading.Event) -> None:
        """Serves a connection, as a shard does all the time."""
        while not (line.is_over or was_heard.wait(0.01)):
            pass

    def is_heard(told: Said) -> bool:
        heard.extend(contacts.poll(0.01))
        return told in heard

    with contextlib.closing(contact.Contacts(lambda number, about: begun.append(number) is None)) as contacts:
        proxy = Proxy(contacts)
        with service(proxy) as port:
            line = reached(contacts, 1, elsewhere(port, token=contacts.address.token))
            for number in range(3):
                proxy.cut()
                message = {"phase": [number, "end"]}
                assert line.say(message)
                was_heard = threading.Event()
                looks = threading.Thread(target=look, args=(line, was_heard))
                looks.start()
                assert eventually(functools.partial(is_heard, Said(1, message)))
                was_heard.set()
                looks.join()
                assert not line.is_over
            assert begun == [1]
            contacts.stop(1)
            assert eventually(lambda: line.is_over)
            line.close()
    assert not [said for said in heard if isinstance(said.message, DamageError)]


def test_a_stranger_that_never_stops_talking_is_cut_off() -> None:
    contacts = contact.Contacts(lambda *_: True)
    with (
        contextlib.closing(contacts),
        socket.create_connection(("127.0.0.1", contacts.address.port)) as stranger,
    ):
        ended = threading.Event()

        def talk() -> None:
            with contextlib.suppress(OSError):
                while not ended.is_set():
                    stranger.sendall(b"x" * (1 << 20))
            ended.set()

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            assert eventually(lambda: contacts.poll(0.01) or ended.is_set(), timeout_s=10)
        finally:
            ended.set()
            with contextlib.suppress(OSError):  # it was cut off
                stranger.shutdown(socket.SHUT_RDWR)
            thread.join()


IDLE = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) for _ in range(int(sys.argv[2]))]
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_idle_strangers_leave_room_for_shards_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    contacts = contact.Contacts(lambda *_: True)
    command = [sys.executable, "-c", IDLE, str(contacts.address.port), "400"]
    with contextlib.closing(contacts), subprocess.Popen(command, stdin=-1, stdout=-1) as crowd:
        assert crowd.stdout is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 150, limits[1]))
        try:
            while not select.select([crowd.stdout], [], [], 0)[0]:
                assert contacts.poll(0.01) == []
            lines = [reached(contacts, number) for number in range(50)]
            assert all(isinstance(line, contact.Contact) for line in lines)
            assert contacts.poll(0) == []
            assert not any(line.is_over for line in lines)
            with monkeypatch.context() as patch:
                patch.setattr(contact, "_GREETS_S", 0.0)
                assert eventually(
                    lambda: contacts.poll(0.01) or len(os.listdir("/proc/self/fd")) < before + 2 * len(lines) + 10
                )
            assert not any(line.is_over for line in lines)
            assert lines[-1].say({"phase": [0, "end"]})
            assert contacts.poll(5.0) == [Said(49, {"phase": [0, "end"]})]
            for line in lines:
                line.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        crowd.communicate(timeout=20)
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_shards_that_greet_at_once_are_all_heard() -> None:
    """Far more shards than may be unknown at a time: the others wait for their turn."""
    many = 8 * contact.MOST_UNKNOWN
    begun: list[int] = []
    with (
        contextlib.closing(contact.Contacts(lambda number, about: begun.append(number) is None)) as contacts,
        ThreadPoolExecutor(many) as machines,
    ):
        address, start = contacts.address, threading.Barrier(many)
        calls = [
            machines.submit(lambda number: start.wait(30) is not None and contact.reach(address, number, {}), number)
            for number in range(many)
        ]
        assert eventually(lambda: contacts.poll(0.01) or all(call.done() for call in calls))
        lines = [call.result() for call in calls]
        assert [isinstance(line, contact.Contact) and line._peer is not None for line in lines] == [True] * many
        for line in lines:
            assert isinstance(line, contact.Contact)
            line.close()
    assert sorted(begun) == list(range(many))


class Unknown(ThreadPoolExecutor):
    """An executor of an unknown kind, so that its shards may run anywhere."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(fn, *args, **kwargs)


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize(
    ("kind", "hosts"), [(ThreadPoolExecutor, ["127.0.0.1"]), (Unknown, ["127.0.0.1", "127.0.0.2"])]
)
def test_pools_of_this_machine_are_heard_on_the_loopback_alone(
    kind: Callable[[], Executor], hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reach, open_at = contact.reach, []

    def look(address: contact.Address, *args: Any) -> Any:
        for host in ("127.0.0.1", "127.0.0.2"):
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((host, address.port), timeout=5).close()
                open_at.append(host)
        return reach(address, *args)

    monkeypatch.setattr(contact, "reach", look)
    with kind() as executor:
        assert tuner(name=kind.__name__).run(X, executor=executor).best_config == {"n": 0}
    assert open_at == hosts


def test_a_connection_with_a_large_descriptor_is_followed() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    large = 2000
    if limits[1] <= large:
        pytest.skip("the limit of descriptors is too small")
    contacts = contact.Contacts(lambda *_: True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], large + 1), limits[1]))
    try:
        with contextlib.closing(contacts):
            small = reached(contacts, 1)
            copy = socket.socket(fileno=os.dup2(small._peer.connection.fileno(), large))
            line = contact.Contact(dataclasses.replace(small._peer, connection=copy))
            small.close()
            assert not line.is_over
            contacts.stop(1)
            assert line.is_over
            line.close()
            assert line.is_over
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_shard_that_was_given_up_does_not_start() -> None:
    greeted: list[int] = []
    contacts = contact.Contacts(lambda number, about: greeted.append(number) is None and number == 1)
    with contextlib.closing(contacts):
        found: list[Any] = []
        for number in (1, 2):
            thread = threading.Thread(target=lambda n=number: found.append(contact.reach(contacts.address, n, {})))
            thread.start()
            while thread.is_alive():
                contacts.poll(0.01)
        line, refused = found
        assert refused is False
        assert greeted == [1, 2]
        assert line.say({"phase": [0, "end"]})
        assert not line.is_over
        assert contacts.poll(5.0) == [Said(1, {"phase": [0, "end"]})]
        address = contacts.address
        contacts.stop(1)
        assert line.is_over
        line.close()
    assert contact.reach(address, 1, {}) is False  # its submitter is gone


def test_an_interrupt_ends_the_wait_for_the_tasks_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Future[Any]] = [Future(), Future()]
    tasks = (SimpleNamespace(future=lambda end=end: end) for end in ends)
    functions = SimpleNamespace(remote=lambda: next(tasks))
    connected = SimpleNamespace(
        is_initialized=lambda: True, remote=lambda **_: lambda fn: functions, cancel=lambda *_, **__: None
    )
    monkeypatch.setitem(sys.modules, "ray", connected)
    executor = quarantune.ray.executor()
    cancelled, running = executor.submit(print), executor.submit(print)
    assert cancelled.cancel()
    ends[1].set_running_or_notify_cancel()

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "exception", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.shutdown()
