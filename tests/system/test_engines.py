"""Whatever dies in a sweep on Dask, Ray or thread pools, no trial is lost or repeated and no process is left."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engine_kernels
import jax.numpy as jnp
import psutil
import pytest
from aftermath import MARK, carriers, eventually

import quarantune
from quarantune.engine import remote
from quarantune.host.process import SANDBOX_MARK
from quarantune.values.trial import Outcome

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # warnings of other libraries
]

X = jnp.ones((8, 128))
_OURS = f"engines-{os.getpid()}"


@dataclasses.dataclass
class Engine(Executor):
    """An executor of an engine that notes the tasks that it gets.

    Attributes:
        executor: the executor.
        is_apart: whether its workers are other processes.
        tasks: the shards that were submitted.
    """

    executor: Executor
    is_apart: bool
    tasks: list[Any] = dataclasses.field(default_factory=list)
    client: Any = None

    __hash__ = object.__hash__

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if fn is remote.run:
            self.tasks.append(args[0])
        return self.executor.submit(fn, *args, **kwargs)


@contextlib.contextmanager
def _dask() -> Iterator[Engine]:
    distributed = pytest.importorskip("distributed")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield Engine(client.get_executor(pure=False), is_apart=True, client=client)


@contextlib.contextmanager
def _ray() -> Iterator[Engine]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        yield Engine(quarantune.ray.executor(), is_apart=True)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _ray_client() -> Iterator[Engine]:
    """Runs a Ray cluster whose tasks a client by `ray://` submits."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("grpc", reason="Ray's client needs grpcio")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["start", "--head", "--block", "--port=0", f"--ray-client-server-port={port}", "--num-cpus=2"]
    words += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    with (
        # Otherwise the address of this cluster stays where others look for a cluster.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as place,
        subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words, f"--temp-dir={place}"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # a client does not send its path
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as head,
    ):
        try:
            for is_last in (False, False, True):
                with contextlib.suppress(*[] if is_last else [ConnectionError]):  # each waits for the head for a while
                    ray.init(f"ray://127.0.0.1:{port}", log_to_driver=False, logging_level=logging.CRITICAL)
                    break
            yield Engine(quarantune.ray.executor(), is_apart=True)
        finally:
            ray.shutdown()
            head.terminate()


@contextlib.contextmanager
def _threads() -> Iterator[Engine]:
    with ThreadPoolExecutor(2) as executor:
        yield Engine(executor, is_apart=False)


@pytest.fixture(
    params=[_dask, _ray, _ray_client, _threads], ids=["dask", "ray", "ray-client", "threads"], scope="module"
)
def shared_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, _OURS)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with request.param() as engine:
            yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    shared_engine.tasks.clear()
    return shared_engine


@pytest.fixture
def mortal(engine: Engine) -> Engine:
    if not engine.is_apart:
        pytest.skip("a dead worker would be this process")
    return engine


def sandboxes(owner: int | None = None, *, with_own: bool = False) -> list[int]:
    """Returns the processes in the sandboxes of an engine's workers, or of one of them.

    Args:
        owner: the worker; None for all.
        with_own: whether to count the sandboxes of this process, without the template, which stays.
    """
    found = []
    for pid in carriers(MARK, _OURS):
        with contextlib.suppress(psutil.Error):
            its_owner = psutil.Process(pid).environ().get(SANDBOX_MARK, "").partition("-")[0]
            is_other = its_owner != str(os.getpid()) or (with_own and psutil.Process(pid).ppid() != os.getpid())
            if its_owner and is_other and owner in (None, int(its_owner)):
                found.append(pid)
    return found


def notes(place: Path) -> list[tuple[int, int]]:
    """Returns the configs that were traced, each with the engine's worker."""
    if not (place / "notes").exists():
        return []
    return [(int(n), int(pid)) for n, pid in (line.split() for line in (place / "notes").read_text().splitlines())]


class Following:
    """Counts the ends of configs, and acts at one of them."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        self.ended: list[int] = []
        self._at, self._then = at, then

    def __call__(self, index: int, phase: str) -> None:
        if phase == "end":
            self.ended.append(index)
            if len(self.ended) == self._at:
                self._then()


def test_a_large_sweep_returns_each_config_once(engine: Engine) -> None:
    space = {"n": list(range(64))}
    seen = Following(0, lambda: None)
    tuner = quarantune.AutoTuner(engine_kernels.plain, space, on_progress=seen, rep=3, name="large")
    result = tuner.run(X, executor=engine)
    assert sorted(seen.ended) == list(range(64))
    assert [trial.config["n"] for trial in result.trials] == list(range(64))
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}
    *shards, final = engine.tasks
    assert sorted(index for task in shards for index, _ in task["configs"]) == list(range(64))
    assert all(16 <= len(task["configs"]) <= 64 for task in shards)
    assert not any(task["is_whole"] for task in shards)
    assert final["is_whole"]
    assert len(final["configs"]) <= 17
    assert {trial.device.partition(" on ")[0] for trial in result.trials} == {"cpu"}
    assert result.default_time_ms is not None
    with quarantune.settings(disable_cache=True):
        local = quarantune.AutoTuner(engine_kernels.plain, {"n": [0, 1, 20]}, rep=3).run(X)
    assert result.best_config == local.best_config == {"n": 0}
    again = tuner.run(X, executor=engine)
    assert (again.from_cache, again.best_config) == (True, result.best_config)
    assert engine.tasks[-1] is final


def test_a_worker_killed_in_a_sweep_leaves_no_orphan_or_gap(mortal: Engine, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill() -> None:
        killed.append(notes(tmp_path)[-1][1])
        os.kill(killed[0], signal.SIGKILL)

    seen = Following(5, kill)
    tuner = quarantune.AutoTuner(
        engine_kernels.noted, {"n": list(range(20))}, on_progress=seen, rep=2, ref_fn=None, name="mid"
    )
    result = tuner.run(X, str(tmp_path), executor=mortal)
    assert sorted(seen.ended) == list(range(20))
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert killed
    assert eventually(lambda: not sandboxes(killed[0]), timeout_s=30)
    repeated = [task for task in mortal.tasks[2:] if not task["is_whole"]]
    assert sum(len(task["configs"]) for task in repeated) <= 10


def test_a_worker_killed_after_its_result_costs_nothing(mortal: Engine, tmp_path: Path) -> None:
    (tmp_path / "shut-1").touch()  # the shard of the odd configs waits

    def kill() -> None:
        even = next(pid for n, pid in notes(tmp_path) if n % 2 == 0)
        os.kill(even, signal.SIGKILL)
        (tmp_path / "shut-1").unlink()

    seen = Following(10, kill)
    tuner = quarantune.AutoTuner(
        engine_kernels.noted, {"n": list(range(20))}, on_progress=seen, rep=2, ref_fn=None, name="after"
    )
    result = tuner.run(X, str(tmp_path), executor=mortal)
    assert [index % 2 for index in seen.ended] == [0] * 10 + [1] * 10
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}
    assert [task["is_whole"] for task in mortal.tasks[:3]] in ([False, False], [False, False, True])  # and the final
    assert len(mortal.tasks) <= 3


def test_a_shard_that_always_kills_its_worker_ends_as_crashed(mortal: Engine) -> None:
    tuner = quarantune.AutoTuner(engine_kernels.deadly, {"n": list(range(20))}, rep=2, ref_fn=None, name="deadly")
    result = tuner.run(X, executor=mortal)
    outcomes = collections.Counter(trial.outcome for trial in result.trials)
    assert result.trials[9].outcome is Outcome.CRASHED
    # Twice alone, and before that possibly among others that were under way.
    assert re.search("engine that ran it died (twice|3 times): on", result.trials[9].message)
    assert outcomes[Outcome.CRASHED] <= 3
    assert outcomes.keys() <= {Outcome.OK, Outcome.SLOW, Outcome.CRASHED}, result.table()


def test_cancelling_leaves_nothing_alive(engine: Engine, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    seen = Following(3, interrupt)

    def run() -> quarantune.TuningResult:
        return quarantune.AutoTuner(
            engine_kernels.noted, {"n": list(range(20))}, on_progress=seen, rep=2, ref_fn=None, name="cancelled"
        ).run(X, str(tmp_path), executor=engine)

    with pytest.raises(KeyboardInterrupt):
        run()
    began = time.monotonic()
    assert eventually(lambda: not sandboxes(with_own=True), timeout_s=30)
    print(f"nothing was alive after {time.monotonic() - began:.2f} s")
    traced = len(notes(tmp_path))
    result = run()  # a new run works, and continues from the journal
    assert sorted(seen.ended) == list(range(20))
    assert len(result.trials) == 20
    assert len({n for n, _ in notes(tmp_path)[traced:]}) <= 20


def test_the_same_call_submitted_twice_sweeps_once(engine: Engine) -> None:
    results: list[quarantune.TuningResult] = []

    def run() -> None:
        tuner = quarantune.AutoTuner(engine_kernels.plain, {"n": [0, 4, 8]}, rep=2, ref_fn=None, name="twice")
        results.append(tuner.run(X, executor=engine))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.best_config for result in results] == [{"n": 0}] * 2
    assert sorted(result.from_cache for result in results) == [False, True]
    assert [task["is_whole"] for task in engine.tasks] == [True]


def test_a_scheduler_that_restarts_loses_nothing(engine: Engine) -> None:
    if engine.client is None:
        pytest.skip("only Dask's scheduler can restart here")
    seen = Following(3, lambda: engine.client.restart(wait_for_workers=False))
    tuner = quarantune.AutoTuner(
        engine_kernels.plain, {"n": list(range(20))}, on_progress=seen, rep=2, ref_fn=None, name="restarted"
    )
    result = tuner.run(X, executor=engine)
    assert sorted(seen.ended) == list(range(20))
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
