"""A failure of a Dask cluster's scheduler, workers or environments is not a failure of a config."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import select
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
from helpers import SOURCE, SUPPORT, child_environ

import quarantune
from quarantune.engine import shards
from quarantune.values.errors import EngineError
from quarantune.values.trial import Outcome

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # warnings of other libraries
]

X = jnp.ones((8, 128))


class Cluster:
    """A Dask cluster whose parts are separate processes.

    Args:
        place: a directory for its files.
        ending: ends its processes.
    """

    def __init__(self, place: Path, ending: contextlib.ExitStack) -> None:
        self.place, self._ending = place, ending
        self.file = place / "scheduler.json"
        self.scheduler = self.start("scheduler", "--port", "0", "--host", "127.0.0.1")
        assert eventually(self.file.exists, timeout_s=60)

    def start(self, role: str, *arguments: str, prelude: str = "", **environ: str) -> subprocess.Popen[bytes]:
        """Starts a part of the cluster.

        Args:
            role: `scheduler` or `worker`.
            *arguments: the arguments of its command line.
            prelude: a program that runs in the process first.
            **environ: environment variables.
        """
        program = f"{prelude}\nimport sys\nfrom distributed.cli.dask_{role} import main\nmain()"
        return self.python(program, "--scheduler-file", str(self.file), *arguments, "--no-dashboard", **environ)

    def python(
        self, program: str, *arguments: str, stdin: int | None = None, stdout: int = subprocess.DEVNULL, **environ: str
    ) -> subprocess.Popen[bytes]:
        """Starts a Python program that ends with the cluster."""
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, *arguments],
            env=child_environ(SUPPORT, **environ),
            stdin=stdin,
            stdout=stdout,
            stderr=(self.place / "log").open("ab"),
            start_new_session=True,
        )
        self._ending.callback(self.end, process)
        return process

    def worker(self, *, has_nanny: bool = False, **about: Any) -> subprocess.Popen[bytes]:
        """Starts a worker of one thread; its nanny restarts it whenever it ends."""
        return self.start(
            "worker",
            *("--nthreads", "1", "--nanny" if has_nanny else "--no-nanny"),
            *("--local-directory", str(self.place), "--death-timeout", "20"),
            **about,
        )

    @property
    def log(self) -> str:
        """The logs of all parts."""
        return (self.place / "log").read_text()

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        """Kills a part of the cluster and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)

    @contextlib.contextmanager
    def executor(self, workers: int) -> Iterator[Any]:
        """Yields an executor once this number of workers has joined."""
        distributed = pytest.importorskip("distributed")
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        client = distributed.Client(scheduler_file=str(self.file), timeout=15)
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


SUBMITTER = """
import json, os, sys
import distributed, jax.numpy as jnp
import engine_kernels, quarantune

configs = {"n": list(range(40))}
fn = quarantune.autotune(configs, rep=2, ref_fn=None, name="submitted")(engine_kernels.noted)
executor = distributed.Client(scheduler_file=sys.argv[1], timeout=15).get_executor(pure=False)
print("ready", flush=True)
for line in sys.stdin:
    os.environ["QUARANTUNE_CACHE_DIR"] = line.strip()
    result = fn.tune(jnp.ones((8, 128)), line.strip(), executor=executor)
    print(json.dumps({"n": result.best_config["n"], "from_cache": result.from_cache}), flush=True)
"""


class Submitter:
    """A process that tunes one call on a cluster, once for each directory that it gets."""

    def __init__(self, cluster: Cluster) -> None:
        self.process = cluster.python(SUBMITTER, str(cluster.file), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._line() == "ready"

    def tune(self, place: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{place}\n".encode())
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return dict(json.loads(self._line()))

    def _line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 120)[0], "no answer within two minutes"
        return self.process.stdout.readline().decode().strip()


class Following:
    """Notes the configs that end, and acts at a chosen point of the sweep."""

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
    """Asserts that a call on this machine runs only the configs without a trial, and finds the winner."""
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
        monkeypatch.setattr(shards, "_ENDS_S", 20.0)
        # The scheduler may die late, when only its last answer is missing.
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
    """Returns an import path that hides a module from Python, as on a machine without it."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(HIDES.format(name=name))
    return os.pathsep.join([str(directory), str(SOURCE), str(SUPPORT)])


OLD = "import quarantune._version as v\nv.__version__ = '0.0.1'"
OTHER_JAX = "import jax\njax.__version__ = '0.9.9'"


def misfit(fault: str, directory: Path) -> tuple[dict[str, Any], str]:
    """Returns the options for a worker that cannot take part, and the reason in the message."""
    if fault == "no package":  # Dask's worker ends on reading a task
        return {"PYTHONPATH": hiding(directory, "quarantune"), "has_nanny": True}, ""
    if fault == "no module":
        return {"PYTHONPATH": hiding(directory, "engine_kernels")}, "No module named 'engine_kernels'"
    prelude, reason = (OTHER_JAX, "it has jax 0.9.9") if fault == "other jax" else (OLD, "it has quarantune 0.0.1")
    return {"prelude": prelude}, reason


@pytest.mark.parametrize("fault", ["no module", "other version", "other jax"])
def test_a_machine_that_cannot_take_part_is_named(
    fault: str, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, reason = misfit(fault, tmp_path / "hidden")
    cluster.worker(**bad)
    with cluster.executor(1) as executor:
        with pytest.raises(EngineError, match=reason):
            tuner("nowhere", space=20).run(X, executor=executor)
        cluster.worker()
        assert eventually(lambda: cluster.log.count("Registered to") >= 2, timeout_s=60)
        caplog.clear()
        result = tuner("nowhere", space=40).run(X, executor=executor)
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert result.best_config["n"] <= 1


@pytest.mark.parametrize("fault", ["no module", "other jax", "no package"])
def test_a_late_machine_that_cannot_take_part_costs_nothing(
    fault: str, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, reason = misfit(fault, tmp_path / "hidden")
    cluster.worker()
    with cluster.executor(1) as executor:

        def join() -> None:
            cluster.worker(**bad)
            assert eventually(lambda: cluster.log.count("Registered to") >= 2, timeout_s=60)

        seen = Following(join, phases=1, ends=3)
        result = tuner("late", space=96, on_progress=seen).run(X, executor=executor)
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert result.best_config["n"] <= 1
    assert sorted(seen.ended) == list(range(96))
    assert reason in caplog.text


def test_the_wait_for_a_cluster_without_workers_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shards, "_SAYS_S", 0.5)
    monkeypatch.setattr(shards, "_ENDS_S", 3.0)
    with cluster.executor(0) as executor:
        with pytest.raises(EngineError, match=r"no machine of the executor ClientExecutor has begun .*workers run"):
            tuner("nobody").run(X, executor=executor)
        assert "see whether its scheduler and its workers run" in caplog.text
    monkeypatch.setattr(shards, "_ENDS_S", 100.0)
    with cluster.executor(0) as executor:
        threading.Timer(2.0, cluster.worker).start()  # the worker comes late
        assert tuner("late", space=4).run(X, executor=executor).best_config["n"] <= 1


def test_the_wait_for_workers_that_leave_is_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = cluster.worker()
    seen = Following(lambda: cluster.end(worker), phases=1, ends=3)
    with cluster.executor(1) as executor:
        monkeypatch.setattr(shards, "_ENDS_S", 5.0)
        with pytest.raises(EngineError, match="trials so far are kept"):
            tuner("left", on_progress=seen).run(X, executor=executor)
    goes_on_here("left", seen.ended)


def journalled(place: Path) -> list[int]:
    """Returns the n of each trial in the call's journal in a cache directory."""
    lines = [line for file in place.glob("submitted.trials/*.jsonl") for line in file.read_text().splitlines()]
    records = [json.loads(line.partition(" ")[2]) for line in lines]
    return [record["trial"]["config"]["n"] for record in records]


ROUNDS = 3


def test_submitters_of_one_call_tune_it_once(cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(2):
        cluster.worker()
    submitters = [Submitter(cluster) for _ in range(3)]
    for round_ in range(ROUNDS):
        place = tmp_path / f"round-{round_}"
        place.mkdir()
        for submitter in submitters:
            submitter.tune(place)
        if is_deadly := round_ % 3 == 1:
            assert eventually(lambda place=place: len(journalled(place)) >= 3, timeout_s=60)
            (claim,) = place.glob("submitted.trials/*.claim")
            leader = json.loads(claim.read_text())["owner"]["pid"]
            (dead,) = [submitter for submitter in submitters if submitter.process.pid == leader]
            cluster.end(dead.process)
            submitters.remove(dead)
        answers = [submitter.answer() for submitter in submitters]
        assert [answer["from_cache"] for answer in answers].count(False) == 1, answers
        assert len({answer["n"] for answer in answers}) == 1
        assert answers[0]["n"] <= 1
        assert collections.Counter(journalled(place)) == dict.fromkeys(range(40), 1)
        if is_deadly:
            submitters.append(Submitter(cluster))
