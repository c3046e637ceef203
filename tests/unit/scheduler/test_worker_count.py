"""If processes or device memory run out, fewer configs run at once and all end well."""

from __future__ import annotations

import contextlib
import heapq
import signal
from collections.abc import Sequence

import pytest
from scripted import (
    EVERY_WAY,
    ROUTES,
    TARGET,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    agrees,
    for_config,
    plan_for,
    run,
    when,
)

from quarantune.scheduler.reference import Reference
from quarantune.values import codec
from quarantune.values.errors import ReferenceFailedError
from quarantune.values.trial import Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


class Crowded(FakeSandbox):
    """A sandbox in which `room` workers can start threads or use the device; others fail with the message `tells`."""

    room = 1
    tells = "pthread_create failed: Resource temporarily unavailable"
    failed = 0

    def _give(self, worker: FakeWorker, frame: codec.JsonObject, fds: Sequence[int]) -> None:
        is_new = worker.number not in self.written and not worker.do
        super()._give(worker, frame, fds)
        rivals = [other for other in self.workers.values() if not other.ended and self.counts(other)]
        if is_new and worker in rivals and len(rivals) > self.room:
            self.failed += 1
            self.log_of[worker.number] = self.tells
            self._agenda = [entry for entry in self._agenda if entry[2].number != worker.number]
            heapq.heapify(self._agenda)
            self._doom(worker, -int(signal.SIGABRT), 0.2)

    def counts(self, worker: FakeWorker) -> bool:
        return True

    def log(self, number: int) -> str:
        return super().log(number) + self.log_of.get(number, "")

    @property
    def log_of(self) -> dict[int, str]:
        return self.__dict__.setdefault("_log_of", {})


@EVERY_WAY
@pytest.mark.parametrize("room", [1, 2, 3])
@pytest.mark.parametrize("defaults", [False, True])
def test_a_shortage_of_processes_runs_fewer_configs(
    route: Route, exclusive: bool, room: int, defaults: bool, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    sandbox = Crowded(clock, when("Measure", agrees))
    sandbox.room = room
    result = run(
        plan_for(route, exclusive=exclusive, parked=6),
        12,
        clock=clock,
        sandbox=sandbox,
        reference=reference if defaults else None,
    )
    assert result.outcomes == ["ok"] * 12
    assert sandbox.failed <= 12
    assert result.seconds < 60
    assert len([text for text in caplog.messages if "fewer configs run at a time" in text]) == 1


class Full(Crowded):
    """A sandbox whose device has memory for `room` workers."""

    tells = "RuntimeError: Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA."

    def counts(self, worker: FakeWorker) -> bool:
        return bool(worker.device)


@EVERY_WAY
@pytest.mark.parametrize("room", [1, 2])
def test_a_shortage_of_device_memory_runs_fewer_workers(route: Route, exclusive: bool, room: int) -> None:
    clock = Clock()
    sandbox = Full(clock, lambda worker: None)
    sandbox.room = room
    result = run(plan_for(route, exclusive=exclusive), 12, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok"] * 12
    assert result.seconds < 60


@ROUTES
def test_no_config_is_blamed_if_no_worker_gets_the_device(route: Route) -> None:
    clock = Clock()
    began, sandbox = clock(), Full(clock, lambda worker: None)
    sandbox.room = 0
    plan = plan_for(route, target=TARGET if route is Route.APART else None)
    if route is Route.APART:  # compiling needs no device
        result = run(plan, 12, clock=clock, sandbox=sandbox)
        assert result.outcomes == ["lost"] * 12
        assert "could not use the device" in result.trials[0].message
    else:
        with pytest.raises(OSError, match="No such device"):
            run(plan, 12, clock=clock, sandbox=sandbox)
    assert clock() - began < 30


@ROUTES
def test_a_sweep_without_any_possible_worker_is_an_error(route: Route) -> None:
    clock = Clock()
    sandbox = Crowded(clock, lambda worker: None)
    sandbox.room = 0
    with pytest.raises(BlockingIOError, match="temporarily unavailable"):
        run(plan_for(route), 12, clock=clock, sandbox=sandbox)


@ROUTES
@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: can't start new thread",
        "    pid = os.fork()\n          ^^^^\nBlockingIOError: [Errno 11] Resource temporarily unavailable",
        "terminate called after throwing an instance of 'std::system_error'\n what(): Resource temporarily unavailable",
        "Check failed: ret == 0 (11 vs. 0)Thread tf_XLAEigen creation via pthread_create() failed.",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2: Resource temporarily unavailable",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "sh: 1: Cannot fork",
        "bash: fork: retry: Resource temporarily unavailable",
    ],
)
def test_a_config_that_exhausts_processes_is_lost_alone(route: Route, words: str) -> None:
    def exhausts(worker: FakeWorker) -> list[Step]:
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.raises("compile", message=words))]

    result = run(plan_for(route), 5, for_config(1, exhausts))
    assert result.outcomes == ["ok", "lost", *["ok"] * 3]
    assert "could not start a process or thread" in result.trials[1].message


@ROUTES
@pytest.mark.parametrize("times", [3, 100])
def test_the_reference_waits_for_processes_as_configs_do(route: Route, times: int) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "ComputeReference" and worker.starts < times:
            error = worker.raises("check", error="RuntimeError", message="can't start new thread")
            return [(0.1, worker.says("PhaseEntered", "check")), (0.1, error)]
        return None

    reference = Reference()
    reference.is_coming = True
    with contextlib.closing(reference):
        if times == 3:
            assert run(plan_for(route), 6, act, reference=reference).outcomes == ["ok"] * 6
        else:
            with pytest.raises(ReferenceFailedError, match="lost: it could not start a process or thread"):
                run(plan_for(route), 6, act, reference=reference)


def test_errors_that_only_resemble_a_shortage_stand() -> None:
    def is_busy(worker: FakeWorker) -> list[Step]:
        text = "[Errno 11] Resource temporarily unavailable"
        return [(0.1, worker.raises("compile", error="BlockingIOError", message=text))]  # a file lock raises this

    assert run(plan_for(Route.TOGETHER), 2, for_config(1, is_busy)).outcomes == ["ok", "error"]


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_an_exception_for_want_of_a_thread_blames_no_config(route: Route, do: str) -> None:
    def lacks_a_thread(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do != do or worker.starts:
            return None
        phase = "compile" if do == "Compile" else "check"
        goes_on = do == "Compile" or worker.task.load
        error = worker.raises(phase, error="RuntimeError", message="can't start new thread", place="p", goes_on=goes_on)
        return [(0.1, worker.says("PhaseEntered", phase)), (0.1, error)]

    result = run(plan_for(route, compiles_per_worker=4), 4, for_config(0, lacks_a_thread))
    assert result.outcomes == ["ok"] * 4
