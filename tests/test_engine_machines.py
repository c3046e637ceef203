"""Machines of a Dask cluster that fail are no configs that fail: scheduler, workers and their environments break."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_kernels
import jax.numpy as jnp
import pytest
from aftermath import eventually
from helpers import SOURCE

import quarantune
from quarantune.engine import silence
from quarantune.values.trial import EngineError, Outcome

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # those of other people's libraries
]

X = jnp.ones((8, 128))
TESTS = Path(__file__).parent


class Cluster:
    """A Dask cluster, each part of which is a process of its own.

    Args:
        place: a directory for its files.
        ending: ends its processes.
    """

    def __init__(self, place: Path, ending: contextlib.ExitStack) -> None:
        self._place, self._ending = place, ending
        self._file = place / "scheduler.json"
        self.scheduler = self.start("scheduler", "--port", "0", "--host", "127.0.0.1")
        assert eventually(self._file.exists, timeout_s=60)

    def start(self, role: str, *arguments: str, prelude: str = "", **environ: str) -> subprocess.Popen[bytes]:
        """Starts a part of the cluster.

        Args:
            role: `scheduler` or `worker`.
            *arguments: of its command line.
            prelude: a program that runs in the process first.
            **environ: environment variables.
        """
        path = os.pathsep.join([str(SOURCE), str(TESTS)])
        program = f"{prelude}\nimport sys\nfrom distributed.cli.dask_{role} import main\nmain()"
        command = [*(sys.executable, "-W", "ignore", "-c", program, "--scheduler-file", str(self._file)), *arguments]
        process = subprocess.Popen(
            [*command, "--no-dashboard"],
            env={**os.environ, "PYTHONPATH": path, **environ},
            stdout=subprocess.DEVNULL,
            stderr=(self._place / f"{role}.log").open("ab"),
            start_new_session=True,
        )
        self._ending.callback(self.end, process)
        return process

    def worker(self, **about: Any) -> subprocess.Popen[bytes]:
        """Starts a worker of one thread, without a nanny."""
        return self.start(
            "worker",
            "--nthreads",
            "1",
            "--no-nanny",
            "--local-directory",
            str(self._place),
            "--death-timeout",
            "20",
            **about,
        )

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        """Kills a part of the cluster with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)

    @contextlib.contextmanager
    def executor(self, workers: int) -> Iterator[Any]:
        """Yields an executor once so many workers are there."""
        distributed = pytest.importorskip("distributed")
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        client = distributed.Client(scheduler_file=str(self._file), timeout=15)
        try:
            if workers:
                client.wait_for_workers(workers, timeout=60)
            yield client.get_executor(pure=False)
        finally:
            client.close(timeout=1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("distributed")
    with contextlib.ExitStack() as ending:
        yield Cluster(tmp_path, ending)


class Following:
    """Notes which configs end, and does something when the sweep has come to a point."""

    def __init__(self, then: Callable[[], None], *, phases: int = 0, ends: int = 0) -> None:
        self.ended: list[int] = []
        self._phases, self._then = 0, then
        self._at = (phases, ends)
        self._is_done = False

    def __call__(self, index: int, phase: str) -> None:
        self._phases += 1
        if phase == "end":
            self.ended.append(index)
        if not self._is_done and self._phases >= self._at[0] and len(self.ended) >= self._at[1]:
            self._is_done = True
            self._then()


def tuner(name: str, space: int = 40, **options: Any) -> quarantune.AutoTuner:
    return quarantune.AutoTuner(
        engine_kernels.plain, {"n": list(range(space))}, rep=2, ref_fn=None, name=name, **options
    )


def goes_on_here(name: str, ended: list[int]) -> None:
    """Asserts that a call on this machine tries the configs without a trial, and finds the winner."""
    seen = Following(lambda: None, phases=1 << 30)
    result = tuner(name, on_progress=seen).run(X)
    assert sorted(seen.ended + ended) == list(range(40))
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert result.best_config["n"] <= 1


@pytest.mark.parametrize(("phases", "ends"), [(1, 0), (1, 3), (1, 20)])
def test_no_config_is_blamed_for_a_scheduler_that_dies(
    cluster: Cluster, phases: int, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        cluster.worker()
    seen = Following(lambda: cluster.end(cluster.scheduler), phases=phases, ends=ends)
    with cluster.executor(2) as executor:
        monkeypatch.setattr(silence, "_ENDS_S", 20.0)
        # The scheduler may die so late that all is known, and only its last answer is missing.
        with pytest.raises(EngineError, match=r"trials so far are kept"):
            tuner("scheduler", on_progress=seen).run(X, executor=executor)
    goes_on_here("scheduler", seen.ended)


HIDES = """
import sys
class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hiding())
"""


def hiding(directory: Path, name: str) -> str:
    """Returns an import path with which Python does not find a module, as on a machine without it."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(HIDES.format(name=name))
    return os.pathsep.join([str(directory), str(SOURCE), str(TESTS)])


OLD = "import quarantune._version as v\nv.__version__ = '0.0.1'"


@pytest.mark.parametrize("fault", ["no module", "other version"])
def test_a_machine_that_cannot_take_part_is_named_and_the_others_go_on(
    fault: str, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = hiding(tmp_path / "hidden", "engine_kernels")
    bad: dict[str, Any] = {"PYTHONPATH": path} if fault == "no module" else {"prelude": OLD}
    reason = "No module named 'engine_kernels'" if fault == "no module" else "it has quarantune 0.0.1"
    cluster.worker(**bad)
    with cluster.executor(1) as executor:
        with pytest.raises(EngineError, match=reason):
            tuner("nowhere", space=20).run(X, executor=executor)
        cluster.worker()
        executor._client.wait_for_workers(2, timeout=60)
        caplog.clear()
        result = tuner("nowhere", space=40).run(X, executor=executor)
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert result.best_config["n"] <= 1


def test_a_cluster_without_workers_is_named_and_waited_for_with_a_bound(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(silence, "_SAYS_S", 0.5)
    monkeypatch.setattr(silence, "_ENDS_S", 3.0)
    with cluster.executor(0) as executor:
        with pytest.raises(EngineError, match=r"no machine of the executor ClientExecutor has begun .*workers run"):
            tuner("nobody").run(X, executor=executor)
        assert "see whether its scheduler and its workers run" in caplog.text
    monkeypatch.setattr(silence, "_ENDS_S", 100.0)
    with cluster.executor(0) as executor:
        threading.Timer(2.0, cluster.worker).start()  # it comes late
        assert tuner("late", space=4).run(X, executor=executor).best_config["n"] <= 1


def test_workers_that_leave_in_mid_sweep_are_waited_for_with_a_bound(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cluster.worker()
    seen = Following(lambda: cluster.end(worker), phases=1, ends=3)
    with cluster.executor(1) as executor:
        monkeypatch.setattr(silence, "_ENDS_S", 5.0)
        with pytest.raises(EngineError, match="trials so far are kept"):
            tuner("left", on_progress=seen).run(X, executor=executor)
    goes_on_here("left", seen.ended)
