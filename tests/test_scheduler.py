from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import itertools
import json
import os
import random
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quarantune import scheduler as scheduler_package
from quarantune.devices.device import Device
from quarantune.devices.leases import Lease
from quarantune.host import machine
from quarantune.host import memory as memory_module
from quarantune.measure.finals import Final
from quarantune.sandbox import messages, spool
from quarantune.sandbox.events import Damaged, Ended, Event, Said
from quarantune.sandbox.messages import BenchOptions, Raised, Task
from quarantune.scheduler import confirmation
from quarantune.scheduler.jobs import SamePrograms
from quarantune.scheduler.loop import Scheduler
from quarantune.scheduler.plan import NOTHING_MORE, STARTUP_DEADLINE_S, ConfigSource, Leftovers, Plan, Unconfirmed
from quarantune.scheduler.race import Race
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.side_tasks import NoReferenceError
from quarantune.scheduler.workers import Worker, WorkerState
from quarantune.values import codec
from quarantune.values.compiling import CompileTarget, OutputArray
from quarantune.values.tolerance import Tolerance
from quarantune.values.trial import Config, Outcome, Phase, Route, SandboxError, Trial

GB = 1 << 30
SLOTS = 3
TARGET = CompileTarget(platform="cuda", config_text="", device_kind="fake", num_cores=1)
OPTIONS = BenchOptions(
    platform="cpu",
    warmup=0,
    rep=1,
    supply="auto",
    tolerance=Tolerance(rtol=0.0, atol=0.0, max_mismatched_ratio=0.0),
)
KILL_DEADLINE_S = 10.0
WAITS_LONG_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Step = tuple[float, Event]
"""An event, and the seconds between the one before it and this one."""


@dataclasses.dataclass(eq=False)
class FakeWorker:
    """One worker, as the fake sandbox and the scripts see it."""

    number: int
    device: str
    do: str = ""
    trial: int | None = None
    config: Config = dataclasses.field(default_factory=dict)
    task: Any = None
    measured: int = 0
    starts: int = 0
    """The number of workers that got this config for the same task before."""
    ended: bool = False
    doomed: bool = False
    immortal: bool = False

    def says(self, kind: str, phase: str, **more: Any) -> Said:
        return Said(self.number, {"message": kind, "trial": self.trial, "phase": phase, **more})

    def ends(self, status: int | None = 0) -> Ended:
        return Ended(self.number, status)

    def raises(
        self, phase: str, outcome: str = "error", error: str = "ValueError", message: str = "bad", **more: Any
    ) -> Said:
        return self.says("Failed", phase, outcome=outcome, error=error, text=message, **more)


Act = Callable[[FakeWorker], "Sequence[Step] | None"]
"""Returns the steps of a worker after a new task; None for those of a good worker."""


def compiles(worker: FakeWorker, compile_s: float = 1.0, modules: Sequence[str] = (), program: str = "") -> list[Step]:
    steps: list[Step] = [
        (0.1, worker.says("PhaseEntered", "load")),
        (0.1, worker.says("PhaseEntered", "compile")),
        (compile_s / 2, worker.says("Lowered", "compile", program=program or f"program {worker.trial}")),
        (compile_s / 2, worker.says("Compiled", "compile", compile_s=compile_s, modules=list(modules))),
    ]
    return [*steps, (0.01, worker.ends())] if worker.task.last else steps


def measured(worker: FakeWorker, *samples_ms: object, **more: object) -> Said:
    samples = list(samples_ms) or [float(worker.trial or 0) + 1.0] * 3
    ranking_ms = min(sample for sample in samples if isinstance(sample, float))
    return worker.says(
        "Measured",
        "measure",
        **{
            "samples_ms": samples,
            "cpu_ms": samples,
            "ranking_ms": ranking_ms,
            "is_slow": False,
            "clock": "wall",
            **more,
        },
    )


def measures(worker: FakeWorker, seconds: float = 0.2) -> list[Step]:
    return [
        (0.05, worker.says("PhaseEntered", "check")),
        (0.05, worker.says("PhaseEntered", "measure")),
        (seconds, measured(worker)),
    ]


def gets_ready(worker: FakeWorker) -> list[Step]:
    return [(0.1, worker.says("PhaseEntered", "load")), (0.2, worker.says("Ready", "load", modules=[]))]


def compares(worker: FakeWorker) -> list[Step]:
    rounds = [[float(entry.config["id"]) + 1.0] * 5 for entry in worker.task.entries]
    return [
        (0.1, worker.says("PhaseEntered", "check")),
        (1.0, worker.says("Compared", "measure", rounds_ms=rounds, warm_ms=[*rounds[:2], []])),
    ]


def computes_reference(worker: FakeWorker, seconds: float = 0.5, differs: str | None = None) -> list[Step]:
    return [
        (0.1, worker.says("PhaseEntered", "check")),
        (seconds, worker.says("ReferenceComputed", "check")),
        (0.1, worker.says("ShapesChecked", "check", differs=differs)),
    ]


def behaves(worker: FakeWorker) -> list[Step]:
    acts = {
        "Compile": compiles,
        "Prepare": gets_ready,
        "Expect": lambda worker: [],
        "Measure": measures,
        "Compare": compares,
        "ComputeReference": computes_reference,
    }
    return acts[worker.do](worker)


class FakeSandbox:
    """Workers that follow a script on a clock of their own; it counts those that are active at the same time."""

    def __init__(self, clock: Clock, act: Act, *, kill_s: float = 0.02) -> None:
        self.clock = clock
        self.act = act
        self.kill_s = kill_s
        self.workers: dict[int, FakeWorker] = {}
        self.given: list[FakeWorker] = []
        self.killed: list[int] = []
        self.written: dict[int, list[int | None]] = collections.defaultdict(list)
        """The configs of each worker, since its log was cleared."""
        self.shared: list[str] = []
        self.memory: dict[int, int] = {}
        self.baseline_bytes = 0
        self.most_compiling = 0
        self.most_measuring: collections.Counter[str] = collections.Counter()
        self.compiled_while_measuring = False
        self.turns: list[str] = []
        self.patience = 40_000
        self._numbers = itertools.count(1)
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Event]] = []
        self._starts: collections.Counter[tuple[str, Any]] = collections.Counter()
        self._compiling: set[int] = set()
        self._measuring: set[int] = set()

    def start(self, task: codec.Frame, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int:
        worker = FakeWorker(next(self._numbers), (environ or {}).get("CUDA_VISIBLE_DEVICES", ""))
        self.workers[worker.number] = worker
        self._give(worker, task, fds)
        return worker.number

    def send(self, number: int, message: codec.Frame, fds: Sequence[int] = ()) -> None:
        worker = self.workers[number]
        if not worker.ended:
            self._give(worker, message, fds)

    def common_files(self) -> set[tuple[int, int]]:
        return set()

    def finish(self, number: int) -> None:
        worker = self.workers[number]
        if not worker.doomed:
            self._doom(worker, 0, 0.05)

    def kill(self, number: int, *, shows_stack: bool = False) -> None:
        worker = self.workers[number]
        self.killed.append(number)
        self._compiling.discard(number)
        if not worker.doomed or worker.immortal:
            self._doom(worker, -int(signal.SIGKILL), self.kill_s)

    def forget(self, number: int) -> None:
        self._over(self.workers.pop(number))

    def pid(self, number: int) -> int | None:
        return number if number in self.workers else None

    def log(self, number: int) -> str:
        return f"log of {number}: {self.written[number]} "

    def clear_log(self, number: int) -> None:
        self.written[number] = []

    def trim_logs(self) -> None:
        pass

    def share_modules(self, names: Sequence[str]) -> None:
        self.shared += names

    def poll(self, timeout_s: float) -> list[Event]:
        self.patience -= 1
        assert self.patience > 0, "the scheduler does not come to an end"
        assert timeout_s >= 0
        until = self.clock.now + timeout_s
        if self._agenda and self._agenda[0][0] <= until:
            self.clock.now = max(self.clock.now, self._agenda[0][0])
        else:
            self.clock.now = until
        events = []
        while self._agenda and self._agenda[0][0] <= self.clock.now:
            event = heapq.heappop(self._agenda)[2]
            worker = self.workers.get(event.number)
            if worker is not None and not worker.ended:
                self._witness(worker, event)
                events.append(event)
        return events

    def _give(self, worker: FakeWorker, frame: codec.Frame, fds: Sequence[int]) -> None:
        task: Task = codec.decode(json.loads(json.dumps(frame)), *messages.TASKS)
        worker.task, worker.do, worker.trial = task, type(task).__name__, task.trial
        if task.trial is not None:
            self.written[worker.number].append(task.trial)
        for fd in fds:
            os.fstat(fd)  # a descriptor that is given must be open
        key = (worker.do, worker.trial)
        worker.starts, self._starts[key] = self._starts[key], self._starts[key] + 1
        self.given.append(dataclasses.replace(worker))
        if worker.do == "Compile":
            worker.config = worker.task.config
            if worker.trial is not None:  # else it only confirms the error of a config that was compiled before
                self._compiling.add(worker.number)
                self.turns.append("compile")
        elif worker.do == "Measure":
            self._measuring.add(worker.number)
            self.turns.append("measure")
            assert fds, "an executable comes with the task, or a file for one"
        self._count()
        steps = self.act(worker)
        due = self.clock.now
        for delay_s, event in behaves(worker) if steps is None else steps:
            due += delay_s
            heapq.heappush(self._agenda, (due, next(self._order), event))

    def _doom(self, worker: FakeWorker, status: int, delay_s: float) -> None:
        worker.doomed = True
        if not worker.immortal:
            event = worker.ends(status)
            heapq.heappush(self._agenda, (self.clock.now + delay_s, next(self._order), event))

    def _witness(self, worker: FakeWorker, event: Event) -> None:
        if isinstance(event, Ended):
            worker.ended = True
            self._over(worker)
        elif isinstance(event, Said):
            if event.message.get("message") == "Compiled":
                self._compiling.discard(worker.number)
            elif event.message.get("message") == "Measured":
                worker.measured += 1
                self._measuring.discard(worker.number)
            elif event.message.get("message") == "Checked":
                self._measuring.discard(worker.number)

    def _over(self, worker: FakeWorker) -> None:
        self._compiling.discard(worker.number)
        self._measuring.discard(worker.number)

    def _count(self) -> None:
        self.most_compiling = max(self.most_compiling, len(self._compiling))
        self.compiled_while_measuring |= bool(self._compiling and self._measuring)
        on = collections.Counter(self.workers[number].device for number in self._measuring)
        self.most_measuring |= on


@dataclasses.dataclass
class Result:
    trials: dict[int, Trial]
    leftovers: Leftovers
    sandbox: FakeSandbox
    seconds: float

    @property
    def outcomes(self) -> list[str]:
        return [self.trials[index].outcome.value for index in sorted(self.trials)]

    def given(self, do: str, index: int | None = None) -> list[FakeWorker]:
        return [worker for worker in self.sandbox.given if worker.do == do and (index is None or worker.trial == index)]


def fake_devices(count: int) -> tuple[Device, ...]:
    """Devices with names of their own, because leases on devices are machine-wide."""
    return tuple(Device("cuda", "fake", f"test-{uuid.uuid4()}") for _ in range(count))


def plan_for(route: Route, **changes: Any) -> Plan:
    together = route is Route.TOGETHER
    plan = Plan(
        route=route,
        options=OPTIONS,
        target=None,
        slots=SLOTS,
        devices=fake_devices(1),
        configs_per_worker=1 if together else 4,
        exclusive=route is not Route.APART,
        parked=4,
        compile_timeout_s=5.0,
        timeout_s=2.0,
        memory_limit_bytes=GB,
        errors_are_final=True,
    )
    return dataclasses.replace(plan, **changes)


def run(
    plan: Plan,
    count: int,
    act: Act = lambda worker: None,
    *,
    clock: Clock | None = None,
    sandbox: FakeSandbox | None = None,
    available_memory: Callable[[], int] = lambda: 100 * GB,
    on_tick: Callable[[], None] = lambda: None,
    reference: Reference | None = None,
    tries: int | None = None,
    source: ConfigSource = NOTHING_MORE,
) -> Result:
    """Runs configs `{"id": 0}` and so on, and checks the invariants of every sweep."""
    clock = clock or Clock()
    sandbox = sandbox or FakeSandbox(clock, act)
    trials: dict[int, Trial] = {}

    def on_trial(index: int, trial: Trial, log: str) -> None:
        assert index not in trials, f"config {index} has ended twice"
        assert trial.config == {"id": index}
        trials[index] = trial

    fds = len(os.listdir("/proc/self/fd"))
    started = clock()
    scheduler = Scheduler(
        sandbox,
        plan,
        on_trial=on_trial,
        on_tick=on_tick,
        reference=reference,
        source=source,
        clock=clock,
        available_memory=available_memory,
    )
    with contextlib.closing(scheduler) if tries else contextlib.nullcontext():
        try:
            leftovers = scheduler.run({index: {"id": index} for index in range(count)})
        finally:
            assert tries in (None, len([worker for worker in sandbox.given if worker.do == "ComputeReference"]))

    settled = [*trials, *leftovers.unfit, *leftovers.unconfirmed]
    assert sorted(settled) == list(range(count)), "every config ends exactly once"
    assert sandbox.most_compiling <= plan.slots
    assert all(measuring <= 1 for measuring in sandbox.most_measuring.values())
    assert not (plan.exclusive and sandbox.compiled_while_measuring)
    kept = len(reference.fds) if reference else 0
    assert len(os.listdir("/proc/self/fd")) - kept <= fds, "no descriptor stays open"
    for device in plan.devices:
        lease = Lease(device)
        assert lease.acquire(clock() + 1000), f"the lease on {device.name} is free again"
        lease.release()
    return Result(trials, leftovers, sandbox, clock() - started)


def for_config(index: int, *acts: Act) -> Act:
    """Gives the workers of one config an act each, the last act for all further ones; others behave."""

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.trial != index:
            return None
        return acts[min(worker.starts, len(acts) - 1)](worker)

    return act


def when(do: str, act: Callable[[FakeWorker], Sequence[Step]]) -> Act:
    return lambda worker: act(worker) if worker.do == do else None


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The memory that each fake process holds; the process ids of fake workers are their numbers."""
    held: dict[int, int] = {}
    monkeypatch.setattr(machine, "resident_bytes", lambda pid: (held.get(pid, 0), 0))
    monkeypatch.setattr(memory_module, "shared_bytes", lambda family, *, since, foreign, thorough: 0)
    monkeypatch.setattr(memory_module, "proportional_bytes", lambda family: None)
    monkeypatch.setattr(machine, "descendants", lambda pid: [])
    monkeypatch.setattr(machine, "oom_kills", lambda: 0)
    return held


ROUTES = pytest.mark.parametrize("route", [Route.TOGETHER, Route.HANDED_OVER, Route.APART])
ROUTES_OF_ONE_OWNER = pytest.mark.parametrize("route", [Route.TOGETHER, Route.APART])
EVERY_WAY = pytest.mark.parametrize(
    ("route", "exclusive"),
    [(Route.TOGETHER, True), (Route.HANDED_OVER, True), (Route.APART, True), (Route.APART, False)],
)


# --- slots, devices, bursts ---------------------------------------------------------------------------------


@EVERY_WAY
def test_every_config_is_measured_and_exactly_all_slots_are_used(route: Route, exclusive: bool) -> None:
    result = run(plan_for(route, exclusive=exclusive), 12)
    assert result.outcomes == ["ok"] * 12
    assert result.sandbox.most_compiling == SLOTS
    for index, trial in result.trials.items():
        assert trial.time_ms == index + 1.0
        assert trial.samples_ms == (index + 1.0,) * 3
        assert trial.compile_s == 1.0
        assert trial.phase is Phase.MEASURE
        assert trial.route is route
        assert trial.message == ""
        assert trial.log_tail.startswith("log of ")


class OneOwner(FakeSandbox):
    """A sandbox whose device only one worker may use at a time; workers take long to die."""

    def __init__(self, clock: Clock, act: Act, *, is_together: bool) -> None:
        super().__init__(clock, act, kill_s=0.5)
        self.is_together = is_together
        self.owners: set[int] = set()
        self.owned = 0

    def start(self, task: codec.Frame, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int:
        number = super().start(task, fds=fds, environ=environ)
        if self.is_together or task["message"] != "Compile":
            assert not [owner for owner in self.owners if owner in self.workers], "the device has an owner already"
            self.owners.add(number)
            self.owned += 1
        return number


@ROUTES_OF_ONE_OWNER
def test_a_device_with_one_owner_is_never_used_by_two_workers(route: Route) -> None:
    is_together = route is Route.TOGETHER

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Measure" and worker.trial == 3:
            return [(0.1, worker.ends(-11))]
        return None

    clock = Clock()
    sandbox = OneOwner(clock, act, is_together=is_together)
    slots = 1 if is_together else SLOTS
    devices = (Device("tpu", f"fake {uuid.uuid4()}"),)
    plan = plan_for(route, slots=slots, parked=1, devices=devices, configs_per_worker=1 if is_together else 3)
    result = run(plan, 8, act, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok"] * 3 + ["crashed"] + ["ok"] * 4
    assert sandbox.owned >= 3


@ROUTES_OF_ONE_OWNER
def test_the_owner_of_a_device_ends_before_a_side_task_or_another_run(route: Route) -> None:
    is_together = route is Route.TOGETHER
    clock = Clock()
    sandbox = OneOwner(clock, lambda worker: None, is_together=is_together)
    devices = (Device("tpu", f"fake {uuid.uuid4()}"),)
    plan = plan_for(route, slots=1, parked=1, devices=devices)
    scheduler = Scheduler(sandbox, plan, on_trial=lambda index, trial, log: None, clock=clock)
    configs = {index: {"id": index} for index in range(3)}
    scheduler.run(configs)
    assert scheduler.compare(configs).rounds_ms
    scheduler.run({3: {"id": 3}})
    scheduler.free_devices()
    assert not [owner for owner in sandbox.owners if owner in sandbox.workers]
    scheduler.close()


def test_a_run_without_configs_ends_at_once() -> None:
    assert run(plan_for(Route.APART), 0).seconds == 0


@ROUTES
def test_configs_start_in_the_order_they_are_given(route: Route) -> None:
    result = run(plan_for(route), 8)
    assert [worker.trial for worker in result.given("Compile")] == list(range(8))


def test_on_the_route_apart_compiling_goes_on_while_measuring() -> None:
    result = run(plan_for(Route.APART, slots=2), 10)
    assert result.sandbox.compiled_while_measuring
    assert result.seconds < 10 / 2 * 1.3 + 2  # measuring is hidden behind compiling


@ROUTES
def test_on_an_exclusive_device_compile_and_measure_bursts_alternate(route: Route) -> None:
    result = run(plan_for(route, exclusive=True, parked=4, slots=2), 8)
    turns = [(turn, len(list(group))) for turn, group in itertools.groupby(result.sandbox.turns)]
    assert turns == [("compile", 4), ("measure", 4), ("compile", 4), ("measure", 4)]


@ROUTES
def test_two_devices_share_the_configs(route: Route) -> None:
    plan = plan_for(route, devices=fake_devices(2), parked=8, timeout_s=10.0)
    result = run(plan, 16, when("Measure", lambda worker: measures(worker, seconds=3.0)))
    assert result.outcomes == ["ok"] * 16
    used = collections.Counter(worker.device for worker in result.given("Measure"))
    assert set(used) == {device.token for device in plan.devices}
    assert min(used.values()) >= 5


def test_standby_workers_for_one_config_each_are_made_ready_ahead() -> None:
    plan = plan_for(Route.APART, configs_per_worker=1)
    result = run(plan, 8, when("Prepare", lambda worker: [(2.0, worker.says("Ready", "load", modules=[]))]))
    assert result.outcomes == ["ok"] * 8
    assert len(result.given("Prepare")) == 8
    assert result.seconds < 8 * 2.0


def test_parked_configs_are_measured_early_where_they_hold_much_memory(memory: dict[int, int]) -> None:
    def takes(worker: FakeWorker) -> None:
        memory[worker.number] = GB // 2

    turns = run(plan_for(Route.TOGETHER, slots=1), 4, takes, available_memory=lambda: 2 * GB).sandbox.turns
    assert turns == ["compile", "compile", "measure", "measure"] * 2
    turns = run(plan_for(Route.TOGETHER, slots=1), 4, takes, available_memory=lambda: 20 * GB).sandbox.turns
    assert turns == ["compile"] * 4 + ["measure"] * 4


def test_configs_for_the_callers_process_are_compiled_as_one_batch_however_long_that_takes() -> None:
    plan = plan_for(Route.APART, exclusive=True, measures_here=True, configs_per_worker=1, parked=8, slots=1)
    result = run(plan, 8, when("Compile", lambda worker: compiles(worker, compile_s=2.0)))
    assert result.sandbox.turns == ["compile"] * 8 + ["measure"] * 8
    assert {trial.route for trial in result.trials.values()} == {Route.COMPILED_APART}
    assert all(worker.task.as_data for worker in result.given("Compile"))


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_configs_in_the_callers_process_all_run_once_and_the_fastest_goes_on_first(is_disturbed: bool) -> None:
    def act(worker: FakeWorker) -> list[Step]:
        run_ms = 40.0 * (8 - int(worker.trial or 0))
        if worker.task.checked:
            return [(0.2, measured(worker, run_ms, run_ms))]
        about = {"run_ms": run_ms, "cpu_ms": run_ms, "is_disturbed": is_disturbed}
        return [(0.1, worker.says("PhaseEntered", "check")), (0.2, worker.says("Checked", "check", **about))]

    plan = plan_for(Route.APART, exclusive=True, measures_here=True, configs_per_worker=1, parked=8)
    result = run(plan, 8, when("Measure", act))
    again = [worker.trial for worker in result.given("Measure") if worker.task.checked]
    assert [worker.trial for worker in result.given("Measure") if not worker.task.checked] == list(range(8))
    assert again == (list(range(7, -1, -1)) if is_disturbed else again[:1] + sorted(again[1:], reverse=True))
    assert again[0] == 7
    slow = [trial for trial in result.trials.values() if "first run took" in trial.message]
    assert bool(slow) is not is_disturbed
    assert len(slow) + len(again) == 8


def test_the_next_measuring_worker_is_made_ready_while_one_measures() -> None:
    plan = plan_for(Route.APART, configs_per_worker=5)
    result = run(plan, 8, when("Prepare", lambda worker: [(1.4, worker.says("Ready", "load", modules=[]))]))
    assert result.outcomes == ["ok"] * 8
    assert len(result.given("Prepare")) == 2
    assert result.seconds < 1.4 + 8 * 0.3 + 1.4


def test_a_measuring_worker_is_started_before_any_compile_worker() -> None:
    result = run(plan_for(Route.APART, configs_per_worker=100), 3)
    assert result.sandbox.given[0].do == "Prepare"


@pytest.mark.parametrize("configs_per_worker", [1, 3, 100])
def test_a_measuring_worker_takes_as_many_configs_as_it_may(configs_per_worker: int) -> None:
    result = run(plan_for(Route.APART, configs_per_worker=configs_per_worker), 9)
    assert len(result.given("Prepare")) == -(-9 // configs_per_worker)
    taken = collections.Counter(worker.number for worker in result.given("Measure"))
    assert max(taken.values()) == min(configs_per_worker, 9)


@pytest.mark.parametrize("compiles_per_worker", [1, 3, 100])
def test_a_compile_worker_takes_as_many_configs_as_it_may(compiles_per_worker: int) -> None:
    result = run(plan_for(Route.APART, slots=1, compiles_per_worker=compiles_per_worker), 9)
    assert result.outcomes == ["ok"] * 9
    taken = collections.Counter(worker.number for worker in result.given("Compile"))
    assert max(taken.values()) == min(compiles_per_worker, 9)
    assert len(taken) == -(-9 // compiles_per_worker)


@pytest.mark.parametrize("ending", ["raises", "dies", "hangs"])
def test_a_failure_in_a_used_compile_worker_is_repeated_in_a_fresh_one(ending: str) -> None:
    def fails_where_used(worker: FakeWorker) -> list[Step] | None:
        if worker.starts:
            return None
        if ending == "raises":
            failed = worker.says("Failed", "compile", outcome="error", error="E", text="t", traceback="")
            return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, failed)]
        begins = (0.1, worker.says("PhaseEntered", "compile"))
        return [begins] if ending == "hangs" else [begins, (0.1, worker.ends(-11))]

    plan = plan_for(Route.APART, slots=1, compiles_per_worker=100)
    result = run(plan, 4, when("Compile", for_config(2, fails_where_used)))
    assert result.outcomes == ["ok"] * 4
    tries = [worker.number for worker in result.given("Compile") if worker.trial == 2]
    others = [worker.number for worker in result.given("Compile") if worker.trial in (0, 1)]
    assert tries[0] in others
    assert tries[1] not in others


def test_compile_workers_take_one_config_each_where_many_end_theirs() -> None:
    def fails(worker: FakeWorker) -> list[Step] | None:
        if int(worker.trial or 0) % 2 == 0:
            return None
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.ends(-11))]

    result = run(plan_for(Route.APART, slots=1, compiles_per_worker=100), 40, when("Compile", fails))
    assert result.outcomes == ["ok", "crashed"] * 20
    assert len(result.given("Compile")) < 40 + 5, "hardly any failure had to be repeated"


def raising(places: Mapping[int, str]) -> Act:
    """Has configs raise while they are compiled, each at a place; their workers go on if they may."""

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or worker.trial not in places:
            return None
        failed = worker.raises("compile", place=places[worker.trial], goes_on=not worker.task.last, traceback="tb")
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, failed)]

    return act


@pytest.mark.parametrize("compiles_per_worker", [3, 100])
@pytest.mark.parametrize("target", [None, TARGET])
def test_an_exception_at_a_known_place_is_not_repeated_and_does_not_end_its_worker(
    compiles_per_worker: int, target: CompileTarget | None
) -> None:
    plan = plan_for(Route.APART, slots=1, compiles_per_worker=compiles_per_worker, target=target)
    result = run(plan, 40, raising(dict.fromkeys(range(1, 40, 2), "here")))
    left = result.leftovers.unconfirmed
    ended = {index: trial.outcome.value for index, trial in result.trials.items()}
    ended |= {index: error.trial.outcome.value for index, error in left.items()}
    assert [ended[index] for index in range(40)] == ["ok", "error"] * 20
    assert len(result.given("Compile")) == 41, "only the first was repeated, which a used worker had raised"
    taken = collections.Counter(worker.number for worker in result.given("Compile"))
    assert len(taken) == 2 if compiles_per_worker == 100 else 14 <= len(taken) <= 15
    assert result.sandbox.most_compiling == 1
    logs = {index: error.log for index, error in left.items()}
    assert all(log.endswith(f": [{index}] tb") for index, log in logs.items()), "the output of others is not theirs"


@pytest.mark.parametrize("still_works", [True, False])
def test_a_measuring_worker_goes_on_after_an_exception_that_a_fresh_one_has_raised_too(still_works: bool) -> None:
    def fails(worker: FakeWorker) -> list[Step] | None:
        if int(worker.trial or 0) % 2 == 0:
            return None
        goes_on = still_works and not worker.task.last
        failed = worker.raises("check", place="here" if worker.trial != 9 else "there", goes_on=goes_on)
        return [(0.1, worker.says("PhaseEntered", "check")), (0.1, failed)]

    result = run(plan_for(Route.APART, configs_per_worker=100), 20, when("Measure", fails))
    assert result.outcomes == ["ok", "error"] * 10
    tried = collections.Counter(worker.trial for worker in result.given("Measure"))
    repeated = {index for index, times in tried.items() if times == 2}
    assert len(repeated) == 2, "one of each place had to show that no other config was to blame"
    assert 9 in repeated
    workers = {worker.number for worker in result.given("Measure")}
    assert len(workers) == 3 if still_works else len(workers) > 10


@pytest.mark.parametrize("is_check", [True, False])
def test_workers_that_only_compile_take_several_configs(is_check: bool) -> None:
    plan = plan_for(Route.APART, slots=1, compiles_per_worker=4, compile_only=True, is_check=is_check, target=TARGET)
    result = run(plan, 12, raising(dict.fromkeys((2, 5, 7), "here")))
    left = result.leftovers.unconfirmed
    assert sorted(left) == ([] if is_check else [2, 5, 7])
    ended = {index: trial.outcome.value for index, trial in result.trials.items()}
    ended |= {index: error.trial.outcome.value for index, error in left.items()}
    assert [index for index, outcome in ended.items() if outcome == "error"] == [2, 5, 7]
    assert len(ended) == 12
    taken = collections.Counter(worker.number for worker in result.given("Compile"))
    assert sum(taken.values()) == 13, "only the first exception was raised in a used worker, and repeated"
    assert len(taken) == 4
    assert not result.given("Prepare")


def test_an_exception_at_another_place_is_repeated_in_a_fresh_worker() -> None:
    plan = plan_for(Route.APART, slots=1, compiles_per_worker=100)
    result = run(plan, 12, raising({1: "a", 3: "a", 5: "b", 7: "b", 9: "a", 10: ""}))
    assert [index for index, trial in result.trials.items() if trial.outcome is Outcome.ERROR] == [1, 3, 5, 7, 9, 10]
    tries = collections.Counter(worker.trial for worker in result.given("Compile"))
    assert {index: count for index, count in tries.items() if count > 1} == {1: 2, 5: 2, 10: 2}


def test_an_exception_that_ends_its_worker_at_a_known_place_is_not_repeated() -> None:
    def ends_its_worker(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or worker.trial not in (0, 3):
            return None
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.raises("compile", place="here"))]

    result = run(plan_for(Route.APART, slots=1, compiles_per_worker=100), 6, ends_its_worker)
    assert result.outcomes == ["error", "ok", "ok", "error", "ok", "ok"]
    assert len(result.given("Compile")) == 6


def test_a_worker_that_goes_on_after_other_failures_is_ended() -> None:
    def claims(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or worker.trial != 1:
            return None
        failed = worker.raises("load", outcome="device_oom" if worker.starts else "error", place="here", goes_on=True)
        return [(0.1, worker.says("PhaseEntered", "load")), (0.1, failed)]

    result = run(plan_for(Route.APART, slots=1, compiles_per_worker=100), 4, claims)
    assert result.outcomes == ["ok", "device_oom", "ok", "ok"]
    numbers = [worker.number for worker in result.given("Compile") if worker.trial == 1]
    assert set(numbers) <= set(result.sandbox.killed)


def reusing(**changes: Any) -> Plan:
    return plan_for(Route.TOGETHER, **{"compiles_per_worker": 100, "slots": 2, **changes})


def one_device(one_owner: bool) -> tuple[Device, ...]:
    return (Device("tpu", f"fake {uuid.uuid4()}"),) if one_owner else fake_devices(1)


def workers_of(result: Result, trial: int) -> list[int]:
    """Returns the workers that compiled a config, in turn."""
    return [worker.number for worker in result.given("Compile") if worker.trial == trial]


def test_configs_that_are_only_compiled_with_their_device_end_once_each() -> None:
    result = run(plan_for(Route.TOGETHER, compile_only=True, exclusive=False), 8)
    assert result.outcomes == ["ok"] * 8
    assert len(result.given("Compile")) == 8


@pytest.mark.parametrize("one_owner", [False, True])
def test_a_worker_with_its_device_compiles_and_measures_many_configs(one_owner: bool) -> None:
    plan = reusing(devices=one_device(one_owner), slots=1 if one_owner else 2)
    result = run(plan, 40)
    assert result.outcomes == ["ok"] * 40
    assert len({worker.number for worker in result.given("Compile")}) <= (1 if one_owner else plan.parked)


def test_a_worker_with_its_device_takes_no_more_configs_than_it_may() -> None:
    result = run(reusing(compiles_per_worker=5), 40)
    assert result.outcomes == ["ok"] * 40
    numbers = collections.Counter(worker.number for worker in result.given("Compile"))
    assert max(numbers.values()) == 5


@pytest.mark.parametrize("one_owner", [False, True])
@pytest.mark.parametrize("do", ["Compile", "Measure"])
@pytest.mark.parametrize("end", [-11, -9, 0], ids=["SIGSEGV", "SIGKILL", "exit"])
def test_a_config_that_ends_a_used_worker_is_repeated_in_a_fresh_one(do: str, end: int, one_owner: bool) -> None:
    def ends(worker: FakeWorker) -> list[Step] | None:
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.ends(end))] if worker.do == do else None

    plan = reusing(slots=1, parked=1, devices=one_device(one_owner))
    ever = run(plan, 6, for_config(3, ends))
    assert ever.outcomes == ["ok", "ok", "ok", "crashed", "ok", "ok"]
    tries = workers_of(ever, 3)
    assert len({*tries}) == len(tries) >= 2
    assert tries[-1] not in workers_of(ever, 2) + workers_of(ever, 4)
    once = run(plan, 6, for_config(3, ends, behaves))
    assert once.outcomes == ["ok"] * 6


def test_an_exception_at_a_known_place_leaves_its_worker_to_the_next_config() -> None:
    def raises(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or (worker.trial or 0) % 2:
            return None
        failed = worker.raises("compile", place="here", goes_on=True)
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, failed)]

    result = run(reusing(), 20, raises)
    assert result.outcomes == ["error", "ok"] * 10
    assert len(result.given("Compile")) == 20
    assert len({worker.number for worker in result.given("Compile")}) <= 4


@pytest.mark.parametrize("one_owner", [False, True])
def test_a_config_that_lacked_memory_beside_others_runs_when_no_idle_worker_is_left(one_owner: bool) -> None:
    def takes_memory(worker: FakeWorker) -> list[Step] | None:
        if worker.starts or worker.trial != 2 or worker.do != "Compile":
            return None
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.ends(-9))]

    sandbox_kills = iter([0, 1, *[1] * 1000])
    plan = reusing(may_exceed_alone=True, devices=one_device(one_owner), slots=1 if one_owner else 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quarantune.host.machine.oom_kills", lambda: next(sandbox_kills))
        result = run(plan, 8, takes_memory)
    assert result.outcomes == ["ok"] * 8


def test_a_config_that_lacked_device_memory_beside_used_workers_is_tried_alone_once() -> None:
    def lacks_memory(worker: FakeWorker) -> list[Step] | None:
        is_alone = [*sandbox.workers] == [worker.number]
        if worker.do != "Measure" or worker.trial not in (2, 3) or (is_alone and worker.trial == 2):
            return None
        return [(0.1, worker.raises("check", outcome="device_oom")), (0.01, worker.ends(0))]

    clock = Clock()
    sandbox = FakeSandbox(clock, lacks_memory)
    result = run(reusing(), 12, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok"] * 3 + ["device_oom"] + ["ok"] * 8
    assert len(workers_of(result, 3)) == 2


def test_a_config_that_runs_alone_does_not_wait_for_idle_compile_workers() -> None:
    def takes_memory(worker: FakeWorker) -> list[Step] | None:
        if worker.starts:
            return None
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.ends(-9))]

    sandbox_kills = iter([0, 1, *[1] * 1000])
    plan = plan_for(Route.APART, slots=2, compiles_per_worker=100, may_exceed_alone=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quarantune.host.machine.oom_kills", lambda: next(sandbox_kills))
        result = run(plan, 6, when("Compile", for_config(1, takes_memory)))
    assert result.outcomes == ["ok"] * 6


@pytest.mark.parametrize(("configs_per_worker", "shared"), [(1, ["jax.numpy"]), (100, [])])
def test_modules_of_measuring_workers_are_shared_where_there_are_many(
    configs_per_worker: int, shared: list[str]
) -> None:
    plan = plan_for(Route.APART, configs_per_worker=configs_per_worker)
    prepares = when("Prepare", lambda worker: [(0.1, worker.says("Ready", "load", modules=["jax.numpy"]))])
    assert run(plan, 1, prepares).sandbox.shared == shared


def test_modules_that_a_worker_had_to_import_are_shared() -> None:
    result = run(plan_for(Route.TOGETHER), 1, when("Compile", lambda w: compiles(w, modules=["jax.numpy"])))
    assert result.sandbox.shared == ["jax.numpy"]


# --- deadlines ----------------------------------------------------------------------------------------------


@ROUTES
def test_start_up_never_counts_as_compile_time(route: Route) -> None:
    def slow_start(worker: FakeWorker) -> list[Step]:
        (_, first), *rest = compiles(worker)
        return [(STARTUP_DEADLINE_S - 1, first), *rest]

    result = run(plan_for(route, compile_timeout_s=1.5), 2, when("Compile", slow_start))
    assert result.outcomes == ["ok", "ok"]


@ROUTES
def test_waiting_for_a_slot_never_counts(route: Route) -> None:
    result = run(plan_for(route, slots=1, parked=20, compile_timeout_s=1.5), 12)
    assert result.outcomes == ["ok"] * 12
    assert result.seconds > 12


@EVERY_WAY
def test_waiting_for_a_device_that_another_tuner_holds_never_counts(route: Route, exclusive: bool) -> None:
    plan = plan_for(route, exclusive=exclusive)
    clock = Clock()
    other = Lease(plan.devices[0])
    assert other.acquire(clock())

    def let_go() -> None:
        if clock() > 1000 + WAITS_LONG_S:
            other.release()

    result = run(plan, 3, clock=clock, on_tick=let_go)
    assert result.outcomes == ["ok"] * 3
    assert result.seconds > WAITS_LONG_S


@ROUTES
def test_the_compile_deadline_counts_from_the_first_phase_frame(route: Route) -> None:
    def hangs(worker: FakeWorker) -> list[Step]:
        return [(50.0, worker.says("PhaseEntered", "load")), (1.0, worker.says("PhaseEntered", "compile"))]

    result = run(plan_for(route), 4, for_config(1, hangs))
    assert result.outcomes == ["ok", "timeout", "ok", "ok"]
    assert result.trials[1].phase is Phase.COMPILE
    assert result.trials[1].message == "compiling took longer than 5 s"
    assert 55.0 <= result.seconds < 60.0


@ROUTES
def test_repeated_phase_frames_do_not_put_a_deadline_off(route: Route) -> None:
    def lingers(worker: FakeWorker) -> list[Step]:
        return [(0.5, worker.says("PhaseEntered", "compile"))] * 100

    result = run(plan_for(route), 1, lingers)
    assert result.outcomes == ["timeout"]
    assert result.seconds < 6.0


@EVERY_WAY
def test_checking_and_measuring_share_a_deadline_that_begins_with_the_device(route: Route, exclusive: bool) -> None:
    def slow(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        return [(1.5, worker.says("PhaseEntered", "measure")), (1.0, worker.says("PhaseEntered", "measure"))] * 10

    result = run(plan_for(route, exclusive=exclusive), 3, for_config(0, slow))
    assert result.outcomes == ["timeout", "ok", "ok"]
    assert result.trials[0].phase is Phase.MEASURE
    assert result.trials[0].message == "checking and measuring took longer than 2 s"
    assert result.trials[0].compile_s == 1.0


@pytest.mark.parametrize("again_ms", [2.0, 9.0], ids=["quiet by then", "busy still"])
def test_a_config_whose_runs_were_disturbed_is_measured_once_more_after_the_others(again_ms: float) -> None:
    seen: list[int | None] = []

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        seen.append(worker.trial)
        if worker.trial or seen.count(0) > 1:
            return [(0.2, measured(worker, again_ms, again_ms, again_ms))]
        return [(0.2, measured(worker, 8.0, 9.0, 9.0, cpu_ms=[5.0, 6.0, 7.0], ranking_ms=5.0))]

    result = run(plan_for(Route.TOGETHER, parked=8), 3, act)
    assert sorted(seen) == [0, 0, 1, 2]
    assert seen[-1] == 0
    assert result.outcomes == ["ok"] * 3
    assert result.trials[0].own_ms == min(again_ms, 5.0)
    assert result.trials[0].samples_ms == ((2.0,) * 3 if again_ms == 2.0 else (8.0, 9.0, 9.0))


def test_a_disturbed_config_keeps_its_times_where_the_time_is_over_before_it_is_measured_again() -> None:
    is_over: list[bool] = []

    class Ending(type(NOTHING_MORE)):  # type: ignore[misc]
        def reason_to_stop(self) -> str:
            return "the time is over" if is_over else ""

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        is_over.append(True)
        return [(0.2, measured(worker, 8.0, 9.0, 9.0, cpu_ms=[5.0, 6.0, 7.0], ranking_ms=5.0))]

    result = run(plan_for(Route.TOGETHER, parked=8), 3, act, source=Ending())
    assert result.outcomes == ["ok", "not_run", "not_run"]
    assert result.trials[0].own_ms == 5.0


@pytest.mark.parametrize("disturbed", [0, 5], ids=["quiet", "busy"])
def test_an_informative_first_run_rules_configs_out_on_a_quiet_machine_only(disturbed: int) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        run_ms = 100.0 if worker.trial else 40.0
        if worker.do != "Measure":
            return None
        if not worker.task.checked:
            is_disturbed = 0 < (worker.trial or 0) <= disturbed
            cpu_ms = 0.5 * run_ms if is_disturbed else run_ms
            about = {"run_ms": run_ms, "cpu_ms": cpu_ms, "is_disturbed": is_disturbed}
            return [(0.2, worker.says("Checked", "check", **about))]
        return [(0.2, measured(worker, run_ms, run_ms))]

    result = run(plan_for(Route.TOGETHER, parked=8), 8, act)
    assert result.outcomes == ["ok", *["slow" if not disturbed else "ok"] * 7]
    measured_again = [worker.trial for worker in result.given("Measure") if worker.task.checked]
    assert measured_again == ([0] if not disturbed else list(range(8)))
    noise = next(worker.task.noise for worker in result.given("Measure") if worker.task.checked)
    assert sorted(noise) == sorted([(40.0, 40.0), *[(100.0, 50.0)] * disturbed, *[(100.0, 100.0)] * (7 - disturbed)])


def test_a_first_run_that_cannot_win_is_stopped_and_its_config_is_slow() -> None:
    limits: dict[int | None, float | None] = {}

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        if worker.task.checked:
            return [(0.2, measured(worker, 60.0, 60.0))]
        limits[worker.trial] = worker.task.stop_ms
        if worker.trial == 2:
            return [(0.5, worker.says("Stopped", "check", run_ms=520.0, cpu_ms=480.0)), (0.0, worker.ends(0))]
        return [(0.2, worker.says("Checked", "check", run_ms=60.0, cpu_ms=60.0, is_disturbed=False))]

    result = run(plan_for(Route.TOGETHER, parked=8), 4, act, reference=Reference(default=3))
    assert result.outcomes == ["ok", "ok", "slow", "ok"]
    slow = result.trials[2]
    assert (slow.phase, slow.time_ms, slow.own_ms, slow.samples_ms) == ("check", 520.0, 480.0, (520.0,))
    assert slow.message == "its first run was stopped after 520 ms, where another config takes 60"
    assert limits[0] is None, "there is nothing to compare the first one with"
    assert (limits[1], limits[2]) == (4 * 2 * 60.0, 3 * 2 * 60.0), "the more is known of the noise, the sooner"
    assert limits[3] is None, "the time of the function's defaults is of interest in any case"


@pytest.mark.parametrize(("run_ms", "cpu_ms"), [(float("nan"), 1.0), (-1.0, 1.0), (1.0, float("inf"))])
def test_a_stop_that_makes_no_sense_ends_its_worker(run_ms: float, cpu_ms: float) -> None:
    act = when("Measure", lambda worker: [(0.2, worker.says("Stopped", "check", run_ms=run_ms, cpu_ms=cpu_ms))])
    result = run(plan_for(Route.TOGETHER, parked=8), 3, for_config(1, act))
    assert result.outcomes == ["ok", "crashed", "ok"]


class Stopping(FakeSandbox):
    """A sandbox whose caller is stopped for a while when it listens for the `nth` time."""

    def __init__(self, clock: Clock, act: Act, *, nth: int, seconds: float, frozen: bool) -> None:
        super().__init__(clock, act)
        self.nth, self.seconds, self.frozen = nth, seconds, frozen

    def poll(self, timeout_s: float) -> list[Event]:
        self.nth -= 1
        if self.nth:
            return super().poll(timeout_s)
        self.clock.now += self.seconds
        if self.frozen:  # with its workers: what they were about to say comes as much later
            self._agenda = [(due + self.seconds, order, event) for due, order, event in self._agenda]
        return []  # a call that is interrupted by a signal returns nothing once its time is up


@pytest.mark.parametrize("frozen", [False, True], ids=["alone", "with its workers"])
@EVERY_WAY
def test_a_stopped_caller_first_reads_messages_and_extends_all_deadlines(
    route: Route, exclusive: bool, frozen: bool
) -> None:
    plain = run(plan_for(route, exclusive=exclusive), 4)
    for nth in range(1, 40, 2):
        clock = Clock()
        sandbox = Stopping(clock, lambda worker: None, nth=nth, seconds=300.0, frozen=frozen)
        result = run(plan_for(route, exclusive=exclusive), 4, clock=clock, sandbox=sandbox)
        assert result.outcomes == ["ok"] * 4, f"stopped at the poll number {nth}: {result.trials}"
        assert {trial.time_ms for trial in result.trials.values()} == {trial.time_ms for trial in plain.trials.values()}


def test_a_hang_is_still_a_timeout_after_the_caller_was_stopped() -> None:
    clock = Clock()
    act = for_config(1, when("Measure", lambda worker: []))
    sandbox = Stopping(clock, act, nth=60, seconds=300.0, frozen=False)
    result = run(plan_for(Route.TOGETHER), 3, act, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok", "timeout", "ok"]
    assert 300.0 < result.seconds < 300.0 + 2 * WAITS_LONG_S


@ROUTES
def test_the_config_of_a_worker_that_does_not_come_up_is_tried_twice_more(route: Route) -> None:
    silent = when("Compile", lambda worker: [] if worker.starts == 0 else compiles(worker))
    result = run(plan_for(route), 1, silent)
    assert result.outcomes == ["ok"]
    assert STARTUP_DEADLINE_S < result.seconds < STARTUP_DEADLINE_S + 5

    result = run(plan_for(route), 3, for_config(0, lambda worker: []))
    assert result.outcomes == ["lost", "ok", "ok"]
    assert len(result.given("Compile", 0)) == 3
    assert f"not up within {STARTUP_DEADLINE_S:g} s" in result.trials[0].message


# --- replies ------------------------------------------------------------------------------------------------


@ROUTES
def test_messages_about_another_trial_are_dropped(route: Route) -> None:
    def confused(worker: FakeWorker) -> list[Step]:
        steps = behaves(worker)
        if worker.trial is None:
            return steps
        lies = [
            measured(worker, 0.001),
            worker.says("Compiled", "compile", compile_s=9.0, modules=[]),
            worker.raises("compile"),
        ]
        others = [Said(lie.number, {**lie.message, "trial": worker.trial + 1}) for lie in lies]
        others += [Said(lie.number, {**lie.message, "trial": None}) for lie in lies]
        others += [Said(lie.number, {k: v for k, v in lie.message.items() if k != "trial"}) for lie in lies]
        return [*((0.01, lie) for lie in others), *steps]

    result = run(plan_for(route), 4, confused)
    assert [trial.time_ms for _, trial in sorted(result.trials.items())] == [1.0, 2.0, 3.0, 4.0]
    assert {trial.compile_s for trial in result.trials.values()} == {1.0}


@ROUTES
def test_a_measurement_claimed_before_the_device_was_given_is_dropped(route: Route) -> None:
    def claims(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile":
            return None
        lie = measured(worker, 0.001)
        (first, second, *rest) = compiles(worker)
        return [first, (0.01, lie), second, *rest]

    result = run(plan_for(route), 2, claims)
    assert [result.trials[index].time_ms for index in range(2)] == [1.0, 2.0]


@ROUTES
def test_repeated_results_count_once(route: Route) -> None:
    def repeats(worker: FakeWorker) -> list[Step]:
        return [(delay, event) for delay, event in behaves(worker) for _ in range(3 if delay else 1)]

    def echoes(worker: FakeWorker) -> list[Step]:
        return [step for step in repeats(worker) if not isinstance(step[1], Ended)]

    assert run(plan_for(route), 5, echoes).outcomes == ["ok"] * 5


@ROUTES
def test_a_result_that_comes_after_the_deadline_is_too_late(route: Route) -> None:
    clock = Clock()
    act = for_config(0, when("Measure", lambda worker: measures(worker, seconds=2.0)))
    sandbox = FakeSandbox(clock, act, kill_s=1.0)  # the kill takes effect after the result was sent
    result = run(plan_for(route), 2, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["timeout", "ok"]


@EVERY_WAY
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Ready", {"modules": []}),
        ("Compiled", {"compile_s": 1.0, "modules": []}),
        ("PhaseEntered", {}),
        ("Probed", {"devices": [], "config_text": None}),
        ("ReferenceComputed", {}),
    ],
)
def test_no_forged_frame_takes_the_deadline_from_a_measurement(
    route: Route, exclusive: bool, kind: str, more: dict[str, Any]
) -> None:
    def forges(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        forged = worker.says(kind, "measure", **more)
        return [(0.1, forged), (0.1, forged)]

    result = run(plan_for(route, exclusive=exclusive), 3, for_config(1, forges))
    assert result.outcomes == ["ok", "timeout", "ok"]


GOOD: dict[str, dict[str, Any]] = {
    "Measured": {"samples_ms": [1.0], "cpu_ms": [1.0], "ranking_ms": 1.0, "is_slow": False, "clock": "wall"},
    "Failed": {"outcome": "error", "error": "E", "text": ""},
    "PhaseEntered": {},
}
"""Fields of replies that the scheduler accepts."""
IMPLAUSIBLE: list[tuple[object, dict[str, Any]]] = [
    # Three dots stand for a field that is missing.
    ("Measured", {"samples_ms": ...}),
    ("Measured", {"samples_ms": []}),
    ("Measured", {"samples_ms": None}),
    ("Measured", {"samples_ms": 3}),
    ("Measured", {"samples_ms": [1.0, "quick"]}),
    ("Measured", {"samples_ms": [float("nan")]}),
    ("Measured", {"samples_ms": [float("inf")]}),
    ("Measured", {"samples_ms": [-1.0]}),
    ("Measured", {"samples_ms": [0.0]}),
    ("Measured", {"samples_ms": [1.0, 1e-300]}),
    ("Measured", {"samples_ms": [True]}),
    ("Measured", {"ranking_ms": 0.0}),
    ("Measured", {"ranking_ms": None}),
    ("Measured", {"cpu_ms": [0.0]}),
    ("Measured", {"cpu_ms": None}),
    ("Measured", {"samples_ms": [10**400]}),
    ("Measured", {"samples_ms": [[1.0]]}),
    ("Measured", {"modules": []}),
    ("PhaseEntered", {"phase": "lunch"}),
    ("PhaseEntered", {"phase": None}),
    ("PhaseEntered", {"phase": ["load"]}),
    ("PhaseEntered", {"phase": ...}),
    ("Failed", {"outcome": ...}),
    ("Failed", {"error": ...}),
    ("Failed", {"outcome": "broken"}),
    ("Failed", {"outcome": ["error"]}),
    *(("Failed", {"outcome": outcome.value}) for outcome in Outcome if outcome.value not in set(Raised)),
    ("Failed", {"outcome": "unfit"}),
    (["Measured"], {}),
    ("Nonsense", {}),
    (None, {}),
]


@ROUTES
@pytest.mark.parametrize(("kind", "changes"), IMPLAUSIBLE, ids=lambda part: str(part)[:60])
def test_a_forged_frame_that_makes_no_sense_ends_only_its_sender(
    route: Route, kind: object, changes: dict[str, Any]
) -> None:
    def forges(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        good = {"message": kind, "trial": worker.trial, "phase": "measure", **GOOD.get(str(kind), {})}
        forged = {name: value for name, value in {**good, **changes}.items() if value is not ...}
        return [(0.1, Said(worker.number, forged)), *measures(worker)]

    result = run(plan_for(route), 3, for_config(1, forges))
    assert result.outcomes == ["ok", "crashed", "ok"]
    assert "invalid message" in result.trials[1].message


@ROUTES
@pytest.mark.parametrize(
    "forged",
    [
        {"compile_s": "long", "modules": []},
        {"compile_s": float("nan"), "modules": []},
        {"compile_s": float("inf"), "modules": []},
        {"compile_s": 10**400, "modules": []},
        {"compile_s": 1.0},
        {"compile_s": 1.0, "modules": 3},
    ],
    ids=lambda forged: str(forged)[:60],
)
def test_a_forged_compile_result_ends_only_its_sender(route: Route, forged: dict[str, Any]) -> None:
    def forges(worker: FakeWorker) -> list[Step]:
        return [(0.1, worker.says("Compiled", "compile", **forged)), *compiles(worker)]

    result = run(plan_for(route), 3, for_config(1, forges))
    assert result.outcomes == ["ok", "crashed", "ok"]


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_damaged_stream_is_a_crash(route: Route, do: str) -> None:
    act = when(do, lambda worker: [(0.2, Damaged(worker.number, "not a frame"))])
    result = run(plan_for(route), 3, for_config(2, act))
    assert result.outcomes == ["ok", "ok", "crashed"]
    assert "not a frame" in result.trials[2].message


# --- equal programs, slow configs, comparisons ---------------------------------------------------------------


def shares_a_program(worker: FakeWorker) -> list[Step] | None:
    """Even configs lower to one program and odd ones to another."""
    return compiles(worker, program=f"program {(worker.trial or 0) % 2}") if worker.do == "Compile" else None


@EVERY_WAY
def test_configs_that_lower_to_the_same_program_are_run_once(route: Route, exclusive: bool) -> None:
    result = run(plan_for(route, exclusive=exclusive), 10, shares_a_program)
    assert result.outcomes == ["ok"] * 10
    assert len(result.given("Measure")) == 2
    times = {index % 2: trial.time_ms for index, trial in result.trials.items()}
    assert all(trial.time_ms == times[index % 2] for index, trial in result.trials.items())
    assert sum("same program as" in trial.message for trial in result.trials.values()) == 8


@EVERY_WAY
def test_configs_with_the_same_program_share_its_outcome(route: Route, exclusive: bool) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Measure" and worker.trial is not None and worker.trial % 2:
            return [(0.1, worker.ends(-int(signal.SIGSEGV)))]
        return shares_a_program(worker)

    result = run(plan_for(route, exclusive=exclusive), 8, act)
    assert result.outcomes == ["ok", "crashed"] * 4


@EVERY_WAY
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_lost_config_does_not_count_for_the_same_program(route: Route, exclusive: bool, do: str) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.trial == 0 and worker.do == do:
            steps = shares_a_program(worker) or []
            return [*steps[:3], (0.1, worker.ends(None))]
        return shares_a_program(worker)

    result = run(plan_for(route, exclusive=exclusive), 8, act)
    assert result.outcomes == ["lost", *["ok"] * 7]


def lowers(worker: FakeWorker, program: str, *then: Step) -> list[Step]:
    return [
        (0.1, worker.says("PhaseEntered", "compile")),
        (0.1, worker.says("Lowered", "compile", program=program)),
        *then,
    ]


def test_configs_that_wait_for_an_unfit_config_are_left_over_with_it() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or (worker.trial == 0 and worker.starts):
            return None
        if worker.trial == 2:  # lost with its template, like 0, and unfit the next time
            end = (0.1, worker.raises("compile", "unfit")) if worker.starts else (1.6, worker.ends(None))
            return [(0.1, worker.says("PhaseEntered", "compile")), end]
        return compiles(worker, program="same") if worker.trial else lowers(worker, "same", (1.5, worker.ends(None)))

    result = run(plan_for(Route.APART, slots=3), 3, act)  # which checks that every config ends
    assert set(result.trials) | set(result.leftovers.unfit) == {0, 1, 2}


def test_a_lost_config_that_then_lowers_differently_releases_those_that_waited() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile":
            return None
        if worker.trial == 0 and not worker.starts:
            return lowers(worker, "first", (3, worker.ends(None)))
        return compiles(worker, program="first" if worker.trial == 1 else "second")

    assert run(plan_for(Route.APART, slots=3), 3, act).outcomes == ["ok"] * 3


@pytest.mark.parametrize(("lowering_s", "outcome_of_same_program"), [(4.0, "ok"), (1.0, "timeout")])
def test_a_deadline_used_up_by_tracing_does_not_count_for_the_same_program(
    lowering_s: float, outcome_of_same_program: str
) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or worker.trial != 0:
            return compiles(worker, program="same") if worker.do == "Compile" else None
        lowered = (lowering_s, worker.says("Lowered", "compile", program="same"))
        return [(0.1, worker.says("PhaseEntered", "compile")), lowered]  # and compiles for ever

    result = run(plan_for(Route.APART, slots=1), 2, act)
    assert result.outcomes == ["timeout", outcome_of_same_program]


def test_configs_that_wait_for_the_same_program_hold_no_descriptors() -> None:
    most, before = 0, len(os.listdir("/proc/self/fd"))

    def count() -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")) - before)

    run(plan_for(Route.APART), 100, lambda w: compiles(w, program="same") if w.do == "Compile" else None, on_tick=count)
    assert 0 < most < 20


def test_a_program_that_cannot_be_loaded_is_left_to_the_other_route() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        is_hit = worker.do == "Measure" and worker.trial == 1
        return [(0.1, worker.raises("load", "unfit"))] if is_hit else None

    result = run(plan_for(Route.APART), 3, act)
    assert list(result.leftovers.unfit) == [1]
    assert result.outcomes == ["ok"] * 2


def test_a_program_that_a_used_worker_cannot_load_is_given_to_a_fresh_one() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        return [(0.1, worker.raises("load", "unfit"))] if worker.do == "Measure" and worker.measured else None

    result = run(plan_for(Route.APART), 3, act)
    assert result.outcomes == ["ok"] * 3


@ROUTES
def test_configs_with_the_same_program_end_with_the_last_device(route: Route) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        return immortal(worker) if worker.do == "Measure" else shares_a_program(worker)

    result = run(plan_for(route), 10, act)
    assert set(result.outcomes) == {"timeout", "lost"} or set(result.outcomes) == {"timeout"}


@pytest.mark.parametrize("loads", [0, 2])
def test_where_the_first_program_cannot_be_loaded_no_other_is_tried(loads: int) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        begins = (0.1, worker.says("PhaseEntered", "load"))
        if len([given for given in sandbox.given if given.do == "Measure"]) <= loads:
            return [begins, *measures(worker)]
        return [begins, (0.3, worker.raises("load", "unfit", message="Invalid metadata"))]

    clock = Clock()
    sandbox = FakeSandbox(clock, act)
    result = run(plan_for(Route.APART, configs_per_worker=1), 12, clock=clock, sandbox=sandbox)
    left = set(result.leftovers.unfit)
    assert len(left) == 12 - loads
    if not loads:
        assert len(result.given("Measure")) == 1
        assert result.leftovers.why_unfit == "Invalid metadata"


def test_no_config_goes_on_waiting_for_an_unfit_program() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile":
            return None
        delay_s = 0.5 if worker.trial == 0 else 2.0 + (worker.trial or 0)
        unfit = worker.raises("compile", outcome="unfit", message="its executable cannot be serialised")
        lowered = worker.says("Lowered", "compile", program="the same")
        return [(0.1, worker.says("PhaseEntered", "compile")), (delay_s, lowered), (0.1, unfit), (0.01, worker.ends(0))]

    result = run(plan_for(Route.APART, slots=3), 8, act)
    assert set(result.leftovers.unfit) == set(range(8))


@ROUTES
def test_each_config_gets_the_best_time_so_far_and_may_be_slow(route: Route) -> None:
    best_ms: list[float | None] = []

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        best_median_ms = worker.task.best_median_ms
        best_ms.append(best_median_ms)
        samples_ms = [5.0, 3.0, 9.0, 2.0][worker.trial or 0]
        return [(0.1, measured(worker, samples_ms, is_slow=best_median_ms is not None and samples_ms > best_median_ms))]

    result = run(plan_for(route, slots=1), 4, act)
    assert best_ms == [None, 5.0, 3.0, 3.0]
    assert result.outcomes == ["ok", "ok", "slow", "ok"]
    assert "another config takes 3" in result.trials[2].message


def test_a_worker_retired_for_a_known_program_may_die_slowly() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Measure":
            return measures(worker, seconds=8.0)
        if worker.do != "Compile":
            return None
        worker.immortal = worker.trial == 1
        steps = compiles(worker, program="program 0" if worker.trial == 1 else "")
        return steps[:-1] if worker.immortal else steps

    result = run(plan_for(Route.APART, timeout_s=10.0), 6, act)
    assert result.outcomes == ["ok"] * 6
    assert "same program" in result.trials[1].message


def noting_comparisons(act: Act) -> tuple[list[Any], Act]:
    """Returns a list that receives the tasks to compare finalists, and the act that fills it."""
    tasks: list[Any] = []

    def noting(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compare":
            tasks.append(worker.task)
        return act(worker)

    return tasks, noting


def compare(act: Act, count: int = 3, **changes: Any) -> tuple[Final, FakeSandbox, list[Any]]:
    """Runs configs and then compares them, as a sweep does."""
    clock = Clock()
    tasks, noting = noting_comparisons(act)
    sandbox = FakeSandbox(clock, noting)
    plan = plan_for(Route.APART, **changes)
    scheduler = Scheduler(sandbox, plan, on_trial=lambda *_: None, clock=clock, available_memory=lambda: 100 * GB)
    fds = len(os.listdir("/proc/self/fd"))
    configs: dict[int, Config] = {index: {"id": index} for index in range(count)}
    try:
        scheduler.run(configs)
        compared = scheduler.compare(configs)
    finally:
        scheduler.close()
    assert len(os.listdir("/proc/self/fd")) <= fds
    lease = Lease(plan.devices[0])
    assert lease.acquire(clock() + 1000)
    lease.release()
    return compared, sandbox, tasks


def test_finalists_are_compared_in_one_worker() -> None:
    compared, _, tasks = compare(lambda worker: None)
    assert compared.rounds_ms == {index: (index + 1.0,) * 5 for index in range(3)}
    assert compared.warm_ms == {index: (index + 1.0,) * 5 for index in range(2)}
    assert [entry.config for entry in tasks[0].entries] == [{"id": index} for index in range(3)]


class Writing(FakeSandbox):
    """Compile workers leave an executable."""

    def _give(self, worker: FakeWorker, frame: codec.Frame, fds: Sequence[int]) -> None:
        super()._give(worker, frame, fds)
        if worker.do == "Compile" and fds:
            spool.write_parts(fds[0], [b"executable", b"", b""])


def kept_by(*schedulers: Callable[[Clock, FakeSandbox, Race, SamePrograms], Scheduler], act: Act) -> list[bool]:
    """Returns which of four configs' executables are loaded for the final by the last of some schedulers."""
    clock = Clock()
    tasks, noting = noting_comparisons(act)
    sandbox, race, programs = Writing(clock, noting), Race(), SamePrograms()
    configs: dict[int, Config] = {index: {"id": index} for index in range(4)}
    with contextlib.closing(race):
        for number, make in enumerate(schedulers):
            scheduler = make(clock, sandbox, race, SamePrograms(programs.ran_as))
            scheduler.run(configs if number == 0 else {4: {"id": 4}})
        scheduler.compare(configs)
    return [entry.saved for entry in tasks[0].entries]


def one_of(route: Route) -> Callable[[Clock, FakeSandbox, Race, SamePrograms], Scheduler]:
    def make(clock: Clock, sandbox: FakeSandbox, race: Race, programs: SamePrograms) -> Scheduler:
        def on_trial(index: int, trial: Trial, log: str) -> None:
            assert trial.outcome in (Outcome.OK, Outcome.SLOW)

        plan = plan_for(route, target=TARGET if route is Route.APART else None)
        return Scheduler(sandbox, plan, on_trial=on_trial, clock=clock, race=race, programs=programs)

    return make


def test_executables_are_loaded_for_the_final_after_an_error_was_confirmed() -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do != "Compile":
            return None
        return compiles(worker, program="the same" if worker.trial in (1, 3) else "")

    assert kept_by(one_of(Route.APART), one_of(Route.TOGETHER), act=act) == [True] * 4


def test_the_final_needs_no_new_worker_after_an_error_was_confirmed() -> None:
    clock = Clock()
    tasks, noting = noting_comparisons(lambda worker: None)
    sandbox, race, programs = Writing(clock, noting), Race(), SamePrograms()
    configs: dict[int, Config] = {index: {"id": index} for index in range(3)}
    with contextlib.closing(race):
        first = one_of(Route.APART)(clock, sandbox, race, programs)
        first.run(configs)
        last = one_of(Route.TOGETHER)(clock, sandbox, race, SamePrograms(programs.ran_as))
        last.run({4: {"id": 4}})
        assert first.has_idle_worker
        before = set(sandbox.workers)
        assert first.compare(configs).rounds_ms.keys() == configs.keys()
        assert set(sandbox.workers) <= before
        assert len(tasks) == 1


def test_a_worker_that_died_while_another_scheduler_ran_is_not_idle() -> None:
    clock = Clock()
    sandbox, race, programs = Writing(clock, lambda worker: None), Race(), SamePrograms()
    with contextlib.closing(race):
        first = one_of(Route.APART)(clock, sandbox, race, programs)
        first.run({index: {"id": index} for index in range(3)})
        assert first.has_idle_worker
        for number in list(sandbox.workers):
            sandbox.forget(number)
        assert not first.has_idle_worker


def test_slow_configs_push_no_finalist_s_executable_out_where_the_clock_is_exact() -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do != "Measure":
            return None
        is_slow = worker.trial not in (0, 1)
        return [(0.1, measured(worker, 1.0 if worker.trial else 1.14, is_slow=is_slow, clock="device"))]

    assert kept_by(one_of(Route.APART), act=act) == [True, True, False, False]


@pytest.mark.parametrize("status", [-int(signal.SIGSEGV), None, 0])
def test_a_comparing_worker_that_dies_is_replaced_once(status: int | None) -> None:
    def dies(worker: FakeWorker) -> list[Step] | None:
        return [(0.1, worker.ends(status))] if worker.do == "Compare" and worker.starts == 0 else None

    compared, _, tasks = compare(dies)
    assert len(compared.rounds_ms) == 3
    assert len(tasks) == 2

    compared, _, tasks = compare(lambda w: [(0.1, w.ends(status))] if w.do == "Compare" else None)
    assert compared == Final()
    assert len(tasks) == 2


@pytest.mark.parametrize("forged", ["rounds_ms", "warm_ms"])
@pytest.mark.parametrize(
    "rounds_ms",
    [
        None,
        [],
        [[1.0]],
        [[1.0], [1.0, 2.0], [1.0]],
        [[], [], []],
        [[10**400]] * 3,
        [[0.0]] * 3,
        [[1e-300]] * 3,
        [[float("nan")]] * 3,
        [1.0] * 3,
    ],
    ids=lambda rounds_ms: str(rounds_ms)[:40],
)
def test_a_comparison_that_makes_no_sense_is_none(rounds_ms: object, forged: str) -> None:
    if forged == "warm_ms" and rounds_ms == [[], [], []]:
        return  # no final needs warm rounds
    good = [[1.0], [2.0], [3.0]]

    def forges(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compare":
            return None
        return [(0.1, worker.says("Compared", "measure", **{"rounds_ms": good, "warm_ms": good, forged: rounds_ms}))]

    compared, _, _ = compare(forges)
    assert compared == Final()


@pytest.mark.parametrize(
    ("steps", "complaint", "tries"),
    [
        (lambda w: [(0.1, w.raises("check", message="no reference"))], "error: ValueError: no reference", 1),
        (lambda w: [(0.1, w.ends(-int(signal.SIGSEGV)))], "crashed: the process was killed by SIGSEGV", 2),
        (lambda w: [(0.1, w.ends(None))], "lost: ", 2),
        (lambda w: [(0.1, w.says("PhaseEntered", "check"))], "timeout: it took longer than 7 s", 1),
        (lambda w: [(0.1, Damaged(w.number, "garbage"))], "crashed: .*garbage", 2),
    ],
)
@pytest.mark.parametrize("route", [Route.APART, Route.TOGETHER])
def test_a_reference_that_fails_says_why(
    steps: Callable[[FakeWorker], list[Step]], complaint: str, tries: int, route: Route
) -> None:
    plan = plan_for(route)
    with pytest.raises(NoReferenceError, match=complaint):
        run(plan, 3, when("ComputeReference", steps), reference=awaited(), tries=tries)
    lease = Lease(plan.devices[0])
    assert lease.acquire(1000)
    lease.release()


def awaited() -> Reference:
    reference = Reference()
    reference.is_coming = True
    return reference


@pytest.mark.parametrize("exclusive", [True, False])
def test_configs_compile_beside_the_reference_unless_they_would_disturb_it(exclusive: bool) -> None:
    compiled_at, measured_at, given_at, clock = [], [], [], Clock()
    reference = awaited()

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do in ("Compile", "Measure"):
            (compiled_at if worker.do == "Compile" else measured_at).append(clock())
            assert worker.do == "Compile" or reference.fds, "nothing is compared before there is a reference"
        if worker.do == "ComputeReference":
            given_at.append(clock() + 3.1)
            return computes_reference(worker, 3.0)
        return None

    with contextlib.closing(reference):
        plan = plan_for(Route.TOGETHER if exclusive else Route.APART, exclusive=exclusive)
        result = run(plan, 6, act, clock=clock, reference=reference)
        assert result.outcomes == ["ok"] * 6
        assert len(reference.fds) == 1
    assert min(measured_at) > given_at[0]
    assert (min(compiled_at) > given_at[0]) == exclusive
    if not exclusive:
        assert len([at for at in compiled_at if at < given_at[0]]) == 6, "all six took a second"


def test_a_reference_of_other_shapes_ends_the_sweep() -> None:
    act = when("ComputeReference", lambda worker: computes_reference(worker, differs="one has 2 axes"))
    reference = awaited()
    with contextlib.closing(reference), pytest.raises(NoReferenceError, match="one has 2 axes; return arrays of the"):
        run(plan_for(Route.APART), 3, act, reference=reference)


@pytest.mark.parametrize("status", [-int(signal.SIGSEGV), None])
def test_a_function_that_ends_the_process_when_traced_keeps_its_reference(status: int | None) -> None:
    act = when("ComputeReference", lambda worker: [*computes_reference(worker)[:2], (0.1, worker.ends(status))])
    with contextlib.closing(awaited()) as reference:
        assert run(plan_for(Route.APART), 3, act, reference=reference).outcomes == ["ok"] * 3


def test_shapes_that_take_too_long_are_not_waited_for() -> None:
    with contextlib.closing(awaited()) as reference:
        act = when("ComputeReference", lambda worker: computes_reference(worker)[:2])
        result = run(plan_for(Route.APART), 3, act, reference=reference)
        assert result.outcomes == ["ok"] * 3
        assert 5 < result.seconds < 20  # the deadline is that of compiling


def test_an_error_of_the_reference_is_reported_although_no_config_compiles() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Compile":
            return [(0.1, worker.raises("compile"))]
        fails = [(9.0, worker.raises("check", message="no reference"))]
        return fails if worker.do == "ComputeReference" else None

    with pytest.raises(NoReferenceError, match="no reference"):
        run(plan_for(Route.APART, timeout_s=20.0), 3, act, reference=awaited())


def test_a_comparison_that_hangs_ends_at_its_deadline() -> None:
    compared, sandbox, _ = compare(lambda worker: [] if worker.do == "Compare" else None)
    assert compared == Final()
    assert sandbox.killed


# --- how workers end ----------------------------------------------------------------------------------------


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_an_exception_is_an_error_with_its_phase_type_and_message(route: Route, do: str) -> None:
    phase = "compile" if do == "Compile" else "check"
    act = when(do, lambda worker: [(0.2, worker.raises(phase, error="KeyError", message="'x'"))])
    result = run(plan_for(route), 3, for_config(1, act))
    assert result.outcomes == ["ok", "error", "ok"]
    assert result.trials[1].phase == phase
    assert result.trials[1].message == "KeyError: 'x'"
    assert result.sandbox.killed  # whatever it did to itself, it is not used again


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "exited with code 0 without a result"),
        (7, "exited with code 7 without a result"),
        (-int(signal.SIGSEGV), "was killed by SIGSEGV without a result"),
        (-int(signal.SIGKILL), "was killed by SIGKILL without a result"),
    ],
)
def test_a_process_that_ends_without_a_result_has_crashed(route: Route, do: str, status: int, said: str) -> None:
    act = when(do, lambda worker: [(0.1, worker.says("PhaseEntered", "load")), (0.1, worker.ends(status))])
    result = run(plan_for(route), 3, for_config(1, act))
    assert result.outcomes == ["ok", "crashed", "ok"]
    assert said in result.trials[1].message


def test_a_compiled_config_whose_worker_dies_while_it_waits_has_crashed() -> None:
    def dies_waiting(worker: FakeWorker) -> list[Step]:
        return [*compiles(worker), (0.1, worker.ends(-int(signal.SIGSEGV)))]

    result = run(plan_for(Route.TOGETHER, slots=1), 3, for_config(0, dies_waiting))
    assert result.outcomes == ["crashed", "ok", "ok"]


def test_a_compile_worker_that_lingers_is_killed_and_its_result_counts() -> None:
    def stays(worker: FakeWorker) -> list[Step] | None:
        return compiles(worker)[:-1] if worker.do == "Compile" else None

    def keeps_going(worker: FakeWorker) -> list[Step] | None:
        return compiles(worker, compile_s=4.0) if worker.do == "Compile" else None

    lingering = for_config(0, stays)
    act: Act = lambda worker: lingering(worker) if worker.trial == 0 else keeps_going(worker)  # noqa: E731
    result = run(plan_for(Route.APART, slots=1), 6, act)
    assert result.outcomes == ["ok"] * 6
    assert result.given("Compile", 0)[0].number in result.sandbox.killed


@pytest.mark.parametrize(("risen", "outcome"), [(1, "oom"), (0, "crashed")])
def test_sigkill_with_a_risen_counter_of_oom_kills_is_oom(
    monkeypatch: pytest.MonkeyPatch, risen: int, outcome: str
) -> None:
    kills = 5
    monkeypatch.setattr(machine, "oom_kills", lambda: kills)

    def dies(worker: FakeWorker) -> list[Step]:
        nonlocal kills
        kills += risen
        return [(0.1, worker.says("PhaseEntered", "load")), (0.1, worker.ends(-int(signal.SIGKILL)))]

    result = run(plan_for(Route.TOGETHER), 3, for_config(1, dies))
    assert result.outcomes == ["ok", outcome, "ok"]


def test_the_worker_that_took_the_memory_is_oom_and_not_the_killed_one(
    memory: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = itertools.count()
    monkeypatch.setattr(machine, "oom_kills", lambda: next(kills))

    def takes_what_the_kernel_does_not_see(worker: FakeWorker) -> list[Step]:
        if worker.starts:  # alone, it is what the kernel takes
            return dies(worker)
        memory[worker.number] = GB - 1
        return [(0.1, worker.says("PhaseEntered", "compile"))]

    def dies(worker: FakeWorker) -> list[Step]:
        return [(0.1, worker.says("PhaseEntered", "compile")), (1.0, worker.ends(-int(signal.SIGKILL)))]

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial == 1:
            return takes_what_the_kernel_does_not_see(worker)
        return dies(worker) if worker.do == "Compile" and worker.trial == 0 and worker.starts == 0 else None

    result = run(plan_for(Route.TOGETHER), 3, act)
    assert result.outcomes == ["ok", "oom", "ok"]
    assert result.trials[1].peak_memory_bytes == GB - 1
    assert [len(result.given("Compile", index)) for index in range(3)] == [2, 2, 1]


def test_one_oom_kill_does_not_explain_two_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 5
    monkeypatch.setattr(machine, "oom_kills", lambda: kills)

    def dies(worker: FakeWorker) -> list[Step]:
        nonlocal kills
        kills = 6
        return [(0.1, worker.says("PhaseEntered", "load")), (0.1, worker.ends(-int(signal.SIGKILL)))]

    result = run(plan_for(Route.TOGETHER, slots=1, parked=1), 2, dies)
    assert result.outcomes == ["oom", "crashed"]


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_lost_config_is_tried_twice_more_and_then_counts(route: Route, do: str) -> None:
    def is_lost(worker: FakeWorker) -> list[Step] | None:
        return [(0.1, worker.ends(None))] if worker.do == do else None

    def is_fine(worker: FakeWorker) -> None:
        return None

    twice = run(plan_for(route), 3, for_config(1, is_lost, is_lost, is_fine))
    assert twice.outcomes == ["ok"] * 3
    ever = run(plan_for(route), 3, for_config(1, is_lost))
    assert ever.outcomes == ["ok", "lost", "ok"]
    assert len(ever.given(do, 1)) == 3


def test_a_config_lost_while_measured_is_not_compiled_again() -> None:
    def is_lost(worker: FakeWorker) -> list[Step] | None:
        return [(0.1, worker.ends(None))] if worker.do == "Measure" else None

    result = run(plan_for(Route.APART), 2, for_config(0, is_lost, lambda worker: None))
    assert result.outcomes == ["ok", "ok"]
    assert len(result.given("Compile", 0)) == 1


# --- kills from outside, and processes that run out --------------------------------------------------------

KILLED = -int(signal.SIGKILL)


@EVERY_WAY
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_config_that_was_killed_is_repeated_alone_before_it_counts(route: Route, exclusive: bool, do: str) -> None:
    beside: list[int] = []
    clock = Clock()

    def is_killed(worker: FakeWorker) -> list[Step] | None:
        if worker.do != do:
            return None
        if worker.starts:
            beside.extend((sandbox._compiling | sandbox._measuring) - {worker.number})
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.4, worker.ends(KILLED))]

    def is_fine(worker: FakeWorker) -> None:
        is_killed(worker)

    sandbox = FakeSandbox(clock, for_config(1, is_killed, is_killed, is_fine))
    twice = run(plan_for(route, exclusive=exclusive), 6, clock=clock, sandbox=sandbox)
    assert twice.outcomes == ["ok"] * 6
    sandbox = FakeSandbox(clock, for_config(1, is_killed))
    ever = run(plan_for(route, exclusive=exclusive), 6, clock=clock, sandbox=sandbox)
    assert ever.outcomes == ["ok", "crashed", *["ok"] * 4]
    assert "killed by SIGKILL" in ever.trials[1].message
    assert beside == []


class Murderous(FakeSandbox):
    """Config 2 kills all other workers, and then itself, whenever it does `do`."""

    do = ""

    def _witness(self, worker: FakeWorker, event: Event) -> None:
        super()._witness(worker, event)
        if worker.do == self.do and worker.trial == 2 and isinstance(event, Said):
            for other in self.workers.values():
                if not other.doomed:
                    self._doom(other, KILLED, 0.01 if other is not worker else 0.05)


@EVERY_WAY
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_config_that_kills_its_siblings_costs_only_itself(route: Route, exclusive: bool, do: str) -> None:
    clock = Clock()

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.trial == 2 and worker.do == do:
            return [(0.3, worker.says("PhaseEntered", "compile" if do == "Compile" else "check"))]
        return None

    sandbox = Murderous(clock, act)
    sandbox.do = do
    result = run(plan_for(route, exclusive=exclusive), 8, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok", "ok", "crashed", *["ok"] * 5]


@EVERY_WAY
def test_a_config_whose_worker_was_dead_before_it_began_is_not_blamed(route: Route, exclusive: bool) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.trial != 1 or worker.starts > 1:
            return None
        if worker.do == "Measure":
            return [(0.1, worker.ends(KILLED))]
        return (
            [(0.1, worker.says("PhaseEntered", "compile")), (0.4, worker.ends(KILLED))] if not worker.starts else None
        )

    result = run(plan_for(route, exclusive=exclusive), 6, act)
    assert result.outcomes == ["ok"] * 6


class Crowded(FakeSandbox):
    """At most `room` workers can start their threads, or use the device; `tells` are the words of those that cannot."""

    room = 1
    tells = "pthread_create failed: Resource temporarily unavailable"
    failed = 0

    def _give(self, worker: FakeWorker, frame: codec.Frame, fds: Sequence[int]) -> None:
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
def test_where_processes_run_out_fewer_configs_run_and_all_end_well(
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
    """The memory of the device is enough for `room` workers."""

    tells = "RuntimeError: Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA."

    def counts(self, worker: FakeWorker) -> bool:
        return bool(worker.device)


@EVERY_WAY
@pytest.mark.parametrize("room", [1, 2])
def test_where_the_device_has_no_memory_for_further_workers_all_configs_end_well(
    route: Route, exclusive: bool, room: int
) -> None:
    clock = Clock()
    sandbox = Full(clock, lambda worker: None)
    sandbox.room = room
    result = run(plan_for(route, exclusive=exclusive), 12, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok"] * 12
    assert result.seconds < 60


@ROUTES
def test_where_no_worker_can_use_the_device_no_config_is_to_blame(route: Route) -> None:
    clock = Clock()
    began, sandbox = clock(), Full(clock, lambda worker: None)
    sandbox.room = 0
    plan = plan_for(route, target=TARGET if route is Route.APART else None)
    if route is Route.APART:  # it has compiled all the same
        result = run(plan, 12, clock=clock, sandbox=sandbox)
        assert result.outcomes == ["lost"] * 12
        assert "could not use the device" in result.trials[0].message
    else:
        with pytest.raises(OSError, match="No such device"):
            run(plan, 12, clock=clock, sandbox=sandbox)
    assert clock() - began < 30


@ROUTES
def test_where_not_even_one_worker_can_run_the_sweep_ends_with_an_error(route: Route) -> None:
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
def test_a_config_that_exhausts_processes_alone_is_lost_and_costs_no_other(route: Route, words: str) -> None:
    def exhausts(worker: FakeWorker) -> list[Step]:
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.raises("compile", message=words))]

    result = run(plan_for(route), 5, for_config(1, exhausts))
    assert result.outcomes == ["ok", "lost", *["ok"] * 3]
    assert "could not start a process or thread" in result.trials[1].message


def test_errors_that_only_resemble_a_shortage_stand() -> None:
    def is_busy(worker: FakeWorker) -> list[Step]:
        text = "[Errno 11] Resource temporarily unavailable"
        return [(0.1, worker.raises("compile", error="BlockingIOError", message=text))]  # of a file lock

    assert run(plan_for(Route.TOGETHER), 2, for_config(1, is_busy)).outcomes == ["ok", "error"]


@EVERY_WAY
def test_defaults_that_lack_memory_beside_those_that_wait_for_them_run_alone(
    route: Route, exclusive: bool, memory: dict[int, int], reference: Reference
) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial == 5 and not worker.starts:
            memory[worker.number] = 2 * GB
            return [(0.1, worker.says("PhaseEntered", "compile")), (10.0, worker.ends())]
        return agrees(worker) if worker.do == "Measure" else None

    plan = plan_for(route, exclusive=exclusive, may_exceed_alone=True, compile_timeout_s=20.0)
    result = run(plan, 12, act, reference=reference, available_memory=lambda: 3 * GB)
    assert result.outcomes == ["ok"] * 12


# --- used workers -------------------------------------------------------------------------------------------

TROUBLES: dict[str, Callable[[FakeWorker], list[Step]]] = {
    "raises": lambda worker: [(0.1, worker.raises("measure"))],
    "dies": lambda worker: [(0.1, worker.ends(-int(signal.SIGSEGV)))],
    "hangs": lambda worker: [],
    "garbles": lambda worker: [(0.1, Damaged(worker.number, "garbage"))],
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("exclusive", [True, False])
def test_a_failure_in_a_used_worker_counts_only_if_a_fresh_one_repeats_it(
    trouble: str, devices: int, exclusive: bool
) -> None:
    """Configs 2 and 5 fail in any process that has measured something; 7 fails everywhere."""
    plan = plan_for(Route.APART, slots=1, configs_per_worker=100, devices=fake_devices(devices), exclusive=exclusive)

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        fails = worker.trial == 7 or (worker.trial in (2, 5) and worker.measured > 0)
        return TROUBLES[trouble](worker) if worker.do == "Measure" and fails else None

    result = run(plan, 9, act)
    expected = {"raises": "error", "hangs": "timeout"}.get(trouble, "crashed")
    assert result.outcomes == ["ok"] * 7 + [expected, "ok"]
    last_try = result.given("Measure", 7)[-1]
    assert last_try.measured == 0, "the verdict was spoken by a fresh worker"
    assert len(result.given("Measure", 7)) <= 2


@pytest.mark.parametrize("trouble", TROUBLES)
def test_any_trouble_retires_a_measuring_worker(trouble: str) -> None:
    act = for_config(0, when("Measure", TROUBLES[trouble]))
    result = run(plan_for(Route.APART, slots=1, configs_per_worker=100), 3, act)
    assert result.outcomes[1:] == ["ok", "ok"]
    troubled, *others = [worker.number for worker in result.given("Measure")]
    assert troubled not in others


def test_a_used_worker_that_dies_while_idle_is_replaced_without_blaming_its_device() -> None:
    def dies_afterwards(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        return [*measures(worker), (0.3, worker.ends(-int(signal.SIGSEGV)))]

    result = run(plan_for(Route.APART, slots=1, configs_per_worker=100), 6, dies_afterwards)
    assert result.outcomes == ["ok"] * 6

    prepared = itertools.count()

    def its_heir_fails_once(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Prepare" and next(prepared) == 1:
            return [(0.1, worker.ends(1))]
        return dies_afterwards(worker)

    result = run(plan_for(Route.APART, slots=1, configs_per_worker=100), 6, its_heir_fails_once)
    assert result.outcomes == ["ok"] * 6


# --- memory -------------------------------------------------------------------------------------------------


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_worker_over_its_memory_limit_is_oom_with_the_figure(route: Route, do: str, memory: dict[int, int]) -> None:
    def takes(worker: FakeWorker) -> list[Step] | None:
        if worker.do != do:
            return None
        memory[worker.number] = 3 * GB
        return [(0.1, worker.says("PhaseEntered", "compile" if do == "Compile" else "check"))]

    result = run(plan_for(route, configs_per_worker=1), 3, for_config(1, takes))
    assert result.outcomes == ["ok", "oom", "ok"]
    assert "3.22 GB" in result.trials[1].message
    assert "1.07 GB" in result.trials[1].message
    assert result.trials[1].peak_memory_bytes == 3 * GB


def test_memory_of_the_template_does_not_count_against_a_worker(memory: dict[int, int]) -> None:
    clock = Clock()

    def takes(worker: FakeWorker) -> None:
        memory[worker.number] = GB + GB // 2

    sandbox = FakeSandbox(clock, takes)
    sandbox.baseline_bytes = GB
    result = run(plan_for(Route.TOGETHER), 2, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok", "ok"]
    assert result.trials[0].peak_memory_bytes == GB // 2


def test_the_memory_of_descendants_counts(memory: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "descendants", lambda pid: [pid + 1_000_000, pid + 2_000_000])

    def forks(worker: FakeWorker) -> list[Step]:
        memory[worker.number + 1_000_000] = memory[worker.number + 2_000_000] = GB - 1
        return [(0.1, worker.says("PhaseEntered", "load"))]

    result = run(plan_for(Route.TOGETHER), 3, for_config(1, forks))
    assert result.outcomes == ["ok", "oom", "ok"]


@pytest.mark.parametrize(("more_mb", "end"), [(0, "ok"), (300, "oom")])
def test_at_a_shortage_the_largest_worker_is_killed_and_tried_again_alone(
    memory: dict[int, int], more_mb: int, end: str
) -> None:
    sandbox_of: list[FakeSandbox] = []

    def takes(worker: FakeWorker) -> None:
        memory[worker.number] = (100 + (worker.trial or 0) + (more_mb if worker.trial == 2 else 0)) << 20

    def available() -> int:
        alive = [number for number, worker in sandbox_of[0].workers.items() if not worker.ended]
        return (540 << 20) - sum(memory.get(number, 0) for number in alive)

    clock = Clock()
    sandbox_of.append(FakeSandbox(clock, takes, kill_s=0.6))
    result = run(
        plan_for(Route.TOGETHER, slots=3, parked=3), 3, clock=clock, sandbox=sandbox_of[0], available_memory=available
    )
    assert result.outcomes == ["ok", "ok", end]
    assert [len(result.given("Compile", index)) for index in range(3)] == [1, 1, 2]
    assert end == "ok" or "the machine had only" in result.trials[2].message


@EVERY_WAY
@pytest.mark.parametrize(("free", "end"), [(4 * GB, "ok"), (2 * GB, "oom")])
def test_a_config_over_a_default_limit_is_tried_once_more_alone(
    route: Route, exclusive: bool, free: int, end: str, memory: dict[int, int]
) -> None:
    beside: list[int] = []
    clock = Clock()

    def takes(worker: FakeWorker) -> None:
        if worker.do == "Compile" and worker.trial == 1:
            memory[worker.number] = 2 * GB
            if worker.starts:
                beside.extend((sandbox._compiling | sandbox._measuring) - {worker.number})

    sandbox = FakeSandbox(clock, takes)
    plan = plan_for(route, exclusive=exclusive, may_exceed_alone=True)
    result = run(plan, 6, clock=clock, sandbox=sandbox, available_memory=lambda: free)
    assert result.outcomes == ["ok", end, "ok", "ok", "ok", "ok"]
    assert len(result.given("Compile", 1)) == 2
    assert beside == []
    if end == "oom":
        assert "it held 2.15 GB alone, over its memory_limit of 1.93 GB" in result.trials[1].message
    assert result.seconds < 30, "configs wait only for the one that runs alone"


# --- devices and processes that fail ------------------------------------------------------------------------


def immortal(worker: FakeWorker) -> list[Step]:
    worker.immortal = True
    return [(0.1, worker.says("PhaseEntered", "load" if worker.do == "Compile" else "check"))]


@ROUTES
def test_an_unkillable_worker_costs_its_device_and_the_sweep_goes_on_elsewhere(
    route: Route,
) -> None:
    plan = plan_for(route, devices=fake_devices(2), parked=8)
    result = run(plan, 12, for_config(1, when("Measure", immortal)))
    assert result.outcomes == ["ok", "timeout", *["ok"] * 10]
    assert "does not die" in result.trials[1].message
    stuck = result.given("Measure", 1)[0].device
    given_up = [worker.trial for worker in result.given("Measure")].index(1)
    later = result.given("Measure")[given_up + 3 :]
    assert any(worker.device != stuck for worker in later)


@ROUTES
def test_when_the_last_device_is_withdrawn_every_config_still_ends(route: Route) -> None:
    result = run(plan_for(route, slots=2), 12, for_config(1, when("Measure", immortal)))
    assert result.trials[1].outcome is Outcome.TIMEOUT
    assert set(result.outcomes) <= {"ok", "timeout", "lost"}
    assert "lost" in result.outcomes
    assert any("held by a process that does not die" in trial.message for trial in result.trials.values())
    assert result.seconds < KILL_DEADLINE_S + 30


def test_an_unkillable_compile_worker_costs_only_its_config() -> None:
    result = run(plan_for(Route.APART, slots=2), 6, for_config(1, when("Compile", immortal)))
    assert result.outcomes == ["ok", "timeout", "ok", "ok", "ok", "ok"]
    assert "does not die" in result.trials[1].message


@pytest.mark.parametrize("configs_per_worker", [1, 4])
def test_a_device_on_which_no_worker_gets_ready_is_withdrawn(configs_per_worker: int) -> None:
    plan = plan_for(Route.APART, devices=fake_devices(2), configs_per_worker=configs_per_worker)
    broken = plan.devices[0].token

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Prepare" and worker.device == broken:
            return [(0.1, worker.raises("load", error="RuntimeError", message="no context"))]
        return None

    result = run(plan, 6, act)
    assert result.outcomes == ["ok"] * 6
    assert {worker.device for worker in result.given("Measure")} == {plan.devices[1].token}
    assert 2 <= sum(worker.device == broken for worker in result.given("Prepare")) <= 3


@pytest.mark.parametrize("configs_per_worker", [1, 4])
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize(("status", "outcome"), [(-int(signal.SIGSEGV), "crashed"), (None, "lost")])
def test_without_a_ready_worker_on_the_last_device_every_config_says_why(
    configs_per_worker: int, exclusive: bool, status: int | None, outcome: str
) -> None:
    plan = plan_for(Route.APART, configs_per_worker=configs_per_worker, exclusive=exclusive)
    result = run(plan, 9, when("Prepare", lambda worker: [(0.1, worker.ends(status))]))
    assert result.outcomes == [outcome] * 9
    assert all("no worker could be made ready" in trial.message for trial in result.trials.values())


def out_of_memory(worker: FakeWorker) -> list[Step]:
    return [(0.1, worker.raises("check", outcome="device_oom")), (0.01, worker.ends(0))]


@pytest.mark.parametrize("configs_per_worker", [1, 4])
def test_a_config_that_lacked_memory_beside_standby_workers_is_tried_again(
    configs_per_worker: int,
) -> None:
    plan = plan_for(Route.APART, configs_per_worker=configs_per_worker)
    once = for_config(1, when("Measure", lambda worker: None if worker.starts else out_of_memory(worker)))
    result = run(plan, 12, once)
    assert result.outcomes == ["ok"] * 12
    again = [worker.trial for worker in result.sandbox.given if worker.do != "Compile"]
    since = again[len(again) - again[::-1].index(1) - 1 :]
    # From then on a worker is made ready only when there is no other.
    assert all(since[at + 1] is not None for at in range(len(since) - 1) if since[at] is None)


@pytest.mark.parametrize("configs_per_worker", [1, 4])
def test_a_config_that_lacks_device_memory_alone_too_is_device_oom(configs_per_worker: int) -> None:
    plan = plan_for(Route.APART, configs_per_worker=configs_per_worker)
    result = run(plan, 6, for_config(1, when("Measure", out_of_memory)))
    assert result.outcomes == ["ok", "device_oom", "ok", "ok", "ok", "ok"]
    assert len(result.given("Measure", 1)) == 2


def test_standby_workers_that_lack_memory_do_not_withdraw_a_device() -> None:
    starts = itertools.count()

    def act(worker: FakeWorker) -> list[Step] | None:
        return out_of_memory(worker) if worker.do == "Prepare" and next(starts) in (1, 2, 3, 4) else None

    assert run(plan_for(Route.APART, configs_per_worker=1), 6, act).outcomes == ["ok"] * 6


@pytest.mark.parametrize("do", ["Compile", "Prepare", "Measure"])
def test_on_a_device_with_memory_for_one_worker_every_config_is_compiled_and_measured(do: str) -> None:
    def lacks_memory(worker: FakeWorker) -> list[Step] | None:
        is_alone = [*sandbox.workers] == [worker.number]
        return out_of_memory(worker) if worker.do == do and not is_alone else None

    clock = Clock()
    sandbox = FakeSandbox(clock, lacks_memory)
    plan = plan_for(Route.HANDED_OVER, compiles_per_worker=8, configs_per_worker=4, slots=2)
    assert run(plan, 12, clock=clock, sandbox=sandbox).outcomes == ["ok"] * 12


def test_a_device_without_memory_for_one_worker_is_withdrawn() -> None:
    result = run(plan_for(Route.APART, configs_per_worker=1), 6, when("Prepare", out_of_memory))
    assert result.outcomes == ["device_oom"] * 6


def test_one_failed_standby_worker_does_not_withdraw_a_device() -> None:
    starts = itertools.count()

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Prepare" and next(starts) % 2 == 0:
            return [(0.1, worker.ends(1))]
        return None

    result = run(plan_for(Route.APART, configs_per_worker=2), 8, act)
    assert result.outcomes == ["ok"] * 8


def test_an_exception_in_the_caller_ends_the_sweep_and_frees_its_devices() -> None:
    plan = plan_for(Route.APART)
    clock = Clock()

    def on_trial(index: int, trial: Trial, log: str) -> None:
        raise SandboxError("the caller has had enough")

    fds = len(os.listdir("/proc/self/fd"))
    scheduler = Scheduler(FakeSandbox(clock, lambda worker: None), plan, on_trial=on_trial, clock=clock)
    with pytest.raises(SandboxError, match="had enough"):
        scheduler.run({index: {"id": index} for index in range(6)})
    assert len(os.listdir("/proc/self/fd")) == fds
    lease = Lease(plan.devices[0])
    assert lease.acquire(clock())
    lease.release()


# --- leftovers for another route ---------------------------------------------------------------------------


def test_an_unfit_program_is_left_over_with_those_not_yet_begun() -> None:
    def unfit(worker: FakeWorker) -> list[Step]:
        return [
            (0.1, worker.says("PhaseEntered", "compile")),
            (0.5, worker.raises("compile", outcome="unfit", message="XLA tunes its dot_general on the device")),
            (0.01, worker.ends(0)),
        ]

    result = run(plan_for(Route.APART, slots=2, target=TARGET), 8, for_config(1, unfit))
    assert set(result.trials) == {0}  # it was being compiled then, and went its way
    assert set(result.leftovers.unfit) == set(range(1, 8))
    assert result.leftovers.why_unfit == "XLA tunes its dot_general on the device"


def test_an_error_raised_where_there_was_no_device_waits_for_confirmation() -> None:
    act = for_config(1, when("Compile", lambda worker: [(0.1, worker.raises("compile"))]))
    result = run(plan_for(Route.APART, target=TARGET), 3, act)
    assert set(result.trials) == {0, 2}
    error = result.leftovers.unconfirmed[1]
    assert error.trial.outcome is Outcome.ERROR
    assert error.log.startswith("log of ")

    without_target = run(plan_for(Route.APART), 3, act)
    assert without_target.outcomes == ["ok", "error", "ok"]


def test_an_error_raised_on_the_device_needs_no_confirmation() -> None:
    act = for_config(1, when("Measure", lambda worker: [(0.1, worker.raises("check"))]))
    result = run(plan_for(Route.APART, target=TARGET), 3, act)
    assert result.outcomes == ["ok", "error", "ok"]


def confirming(
    on_device: Callable[[FakeWorker], Sequence[Step]], *failing: int, places: Mapping[int, str] | None = None
) -> Act:
    """Has some configs fail where there is no device, and the workers that confirm them do `on_device`."""
    places = places or dict.fromkeys(failing, "here")

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial is None:
            return on_device(worker)
        if worker.do == "Compile" and worker.trial in failing:
            raises = worker.raises("compile", place=places[worker.trial])
            return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, raises)]
        return None

    return act


def confirming_plan(**changes: Any) -> Plan:
    return plan_for(
        Route.APART, **{"target": TARGET, "errors_are_final": False, "slots": 2, "configs_per_worker": 32, **changes}
    )


def raises_on_the_device(worker: FakeWorker, place: str = "here") -> list[Step]:
    return [
        (1.0, worker.says("PhaseEntered", "compile")),
        (0.2, worker.raises("compile", message="bad on the device", place=place)),
    ]


def test_the_first_error_is_confirmed_on_the_device_while_other_configs_go_on() -> None:
    plan = confirming_plan()
    result = run(plan, 8, confirming(raises_on_the_device, 1, 3))
    assert result.leftovers.confirmed == {"here"}
    (only,) = [worker for worker in result.given("Compile") if worker.trial is None]
    assert only.device
    assert only.task.target is None
    begun = [worker.trial for worker in result.given("Compile")]
    assert 0 < begun.index(None) < len(begun) - 1
    first, second = (result.leftovers.unconfirmed[index].trial for index in begun if index in (1, 3))
    assert (first.route, first.device, first.message) == (
        Route.TOGETHER,
        plan.devices[0].name,
        "ValueError: bad on the device",
    )
    assert (second.route, second.device, second.message) == (Route.APART, "", "ValueError: bad")


def test_an_error_that_is_raised_last_is_confirmed_before_the_run_ends() -> None:
    result = run(confirming_plan(), 3, confirming(raises_on_the_device, 2))
    assert result.leftovers.confirmed == {"here"}


def test_one_error_of_each_place_is_confirmed() -> None:
    def on_device(worker: FakeWorker) -> list[Step]:
        return compiles(worker) if worker.task.config["id"] == 1 else raises_on_the_device(worker, places[2])

    places = {1: "KeyError at a.py:1", 2: "ValueError at b.py:2", 4: "KeyError at a.py:1", 5: "ValueError at b.py:2"}
    result = run(confirming_plan(), 40, confirming(on_device, *places, places=places))
    workers = [worker.task.config["id"] for worker in result.given("Compile") if worker.trial is None]
    assert sorted(workers) == [1, 2]
    left = result.leftovers
    assert left.first_at == {places[1]: 1, places[2]: 2}
    assert left.confirmed == {places[2]}
    assert {index: error.place for index, error in left.unconfirmed.items()} == places


def test_the_config_of_the_same_program_fails_at_the_same_place() -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial is not None:
            lowered = worker.says("Lowered", "compile", program="the same")
            return [
                (0.1, worker.says("PhaseEntered", "compile")),
                (0.1, lowered),
                (0.5, worker.raises("compile", place="x")),
            ]
        return raises_on_the_device(worker) if worker.do == "Compile" else None

    result = run(confirming_plan(), 4, act)
    assert [error.place for error in result.leftovers.unconfirmed.values()] == ["x"] * 4


@pytest.mark.parametrize(
    "on_device",
    [
        pytest.param(compiles, id="it compiles there"),
        pytest.param(lambda worker: raises_on_the_device(worker, "elsewhere"), id="it fails elsewhere there"),
        pytest.param(lambda worker: [(0.1, worker.ends(-11))], id="it crashes there"),
        pytest.param(lambda worker: [(0.1, worker.says("PhaseEntered", "compile"))], id="it hangs there"),
        pytest.param(lambda worker: [(0.1, worker.raises("load"))], id="it cannot be loaded there"),
        pytest.param(lambda worker: [(0.1, worker.raises("load", outcome="device_oom"))], id="there is no memory"),
        pytest.param(lambda worker: [(0.1, worker.raises("compile", outcome="unfit"))], id="it says nonsense there"),
    ],
)
def test_an_error_that_is_not_raised_on_the_device_is_not_confirmed(
    on_device: Callable[[FakeWorker], Sequence[Step]],
) -> None:
    result = run(confirming_plan(), 5, confirming(on_device, 1, 3))
    assert not result.leftovers.confirmed
    assert {error.trial.route for error in result.leftovers.unconfirmed.values()} == {Route.APART}
    assert set(result.leftovers.unconfirmed) == {1, 3}
    assert result.outcomes == ["ok"] * 3


def test_a_config_that_lacks_device_memory_beside_the_worker_that_confirms_is_run_again() -> None:
    def lacks_memory(worker: FakeWorker) -> list[Step]:
        return [(0.1, worker.raises("check", outcome="device_oom")), (0.01, worker.ends(0))]

    hangs = confirming(lambda worker: [(0.1, worker.says("PhaseEntered", "compile"))], 0)
    starved = for_config(1, lacks_memory, behaves)
    plan = confirming_plan(slots=1, compile_timeout_s=1000.0)
    result = run(plan, 3, lambda worker: hangs(worker) or (starved(worker) if worker.do == "Measure" else None))
    assert [result.trials[index].outcome for index in (1, 2)] == [Outcome.OK] * 2
    assert not result.leftovers.confirmed
    assert result.seconds < 100


@pytest.mark.parametrize("changes", [{"errors_are_final": True}, {"target": None}], ids=str)
def test_nothing_is_confirmed_where_that_is_not_planned_or_errors_need_it_not(changes: dict[str, Any]) -> None:
    result = run(confirming_plan(**changes), 3, confirming(raises_on_the_device, 1))
    assert all(worker.trial is not None for worker in result.given("Compile"))
    assert not result.leftovers.confirmed


def unconfirmed(**places: str) -> Leftovers:
    """Returns configs that failed without the device, each at a place."""
    left = Leftovers()
    for name, place in places.items():
        config = {"id": int(name[1:])}
        trial = Trial(config=config, outcome=Outcome.ERROR, phase=Phase.COMPILE, message="without", route=Route.APART)
        left.add_unconfirmed(config["id"], Unconfirmed(trial, "log", place))
    return left


def settled(
    left: Leftovers, confirmed: set[str], ends: Mapping[int, tuple[Outcome, Phase]], **elsewhere: str
) -> tuple[dict[int, Trial], list[list[int]]]:
    """Settles configs that end on the device as `ends` says; returns their trials and what ran there.

    Errors of compiling are raised at the same place there, but for those of `elsewhere`.
    """
    trials: dict[int, Trial] = {}
    runs: list[list[int]] = []

    def run_there(
        configs: dict[int, Config], finish: Callable[[int, Trial, str], None], source: ConfigSource
    ) -> Leftovers:
        runs.append(sorted(configs))
        places = {
            index: elsewhere.get(f"c{index}", left.unconfirmed[index].place)
            for index in configs
            if ends[index] == (Outcome.ERROR, Phase.COMPILE)
        }
        for index, config in configs.items():
            outcome, phase = ends[index]
            finish(index, Trial(config=config, outcome=outcome, phase=phase, message="with", route=Route.TOGETHER), "")
        return Leftovers(raised_at=places)

    confirmation.settle(left, confirmed, lambda index, trial, log: trials.setdefault(index, trial), run_there)
    return trials, runs


def test_errors_are_final_where_one_of_their_place_is_raised_on_the_device() -> None:
    error, ok = (Outcome.ERROR, Phase.COMPILE), (Outcome.OK, Phase.MEASURE)
    left = unconfirmed(c0="a", c1="b", c2="a", c3="b", c4="sure")
    confirmed = {"sure"}
    trials, runs = settled(left, confirmed, {0: error, 1: ok, 3: ok})
    assert runs == [[0, 1], [3]]
    assert confirmed == {"sure", "a"}
    assert {index: (trial.outcome.value, trial.message) for index, trial in trials.items()} == {
        0: ("error", "with"),
        1: ("ok", "with"),
        2: ("error", "without"),
        3: ("ok", "with"),
        4: ("error", "without"),
    }


def test_another_error_on_the_device_confirms_nothing() -> None:
    error, ok = (Outcome.ERROR, Phase.COMPILE), (Outcome.OK, Phase.MEASURE)
    confirmed: set[str] = set()
    trials, runs = settled(unconfirmed(c0="a", c1="a", c2="a"), confirmed, {0: error, 1: ok, 2: error}, c0="b", c2="b")
    assert runs == [[0], [1, 2]]
    assert confirmed == set()
    assert [(trials[index].outcome.value, trials[index].message) for index in range(3)] == [
        ("error", "with"),
        ("ok", "with"),
        ("error", "with"),
    ]


def test_an_error_while_running_on_the_device_confirms_no_error_of_compiling() -> None:
    ran = (Outcome.ERROR, Phase.CHECK)
    trials, runs = settled(unconfirmed(c0="a", c1="a"), set(), {0: ran, 1: ran})
    assert runs == [[0], [1]]
    assert all(trial.message == "with" for trial in trials.values())


def test_nothing_runs_where_every_error_is_confirmed() -> None:
    assert settled(Leftovers(), set(), {}) == ({}, [])
    assert settled(unconfirmed(c0="a"), {"a"}, {})[1] == []


# --- anything at all ----------------------------------------------------------------------------------------


def anything(generator: random.Random) -> Act:
    """Workers that mostly behave and sometimes do anything that a worker can do."""

    def forged(worker: FakeWorker) -> Said:
        phases = ["load", "compile", "check", "measure", "measure", "lunch"]
        outcomes = ["error", "device_oom", "ok", "lost", "unfit" if generator.random() < 0.1 else "timeout"]
        modules: list[str] = []
        kinds: dict[str, dict[str, Any]] = {
            "PhaseEntered": {},
            "Ready": {"modules": modules},
            "Compiled": {"compile_s": 0.5, "modules": modules},
            "Lowered": {"program": generator.choice(["program 1", "program 2", "program of nobody"])},
            "Measured": {
                **GOOD["Measured"],
                "samples_ms": generator.choice([[1.0], [], [float("nan")]]),
                "cpu_ms": generator.choice([[1.0], [], [0.5, 2.0], ["many"]]),
            },
            "Compared": {"rounds_ms": [], "warm_ms": []},
            "Failed": {**GOOD["Failed"], "outcome": generator.choice(outcomes), "text": "m"},
            "Nonsense": {},
        }
        kind = generator.choice(list(kinds))
        message = {
            "message": kind,
            "trial": generator.choice([worker.trial] * 4 + [None, 0]),
            "phase": generator.choice(phases),
            **kinds[kind],
        }
        return Said(worker.number, message)

    def act(worker: FakeWorker) -> list[Step] | None:
        steps = behaves(worker)
        if generator.random() < 0.6:
            return steps
        if generator.random() < 0.05:
            worker.immortal = True
        for _ in range(generator.randrange(3)):
            position = generator.randrange(len(steps) + 1)
            steps.insert(position, (generator.random() / 2, forged(worker)))
        if generator.random() < 0.5:
            del steps[generator.randrange(len(steps)) :]
        if generator.random() < 0.5:
            end: Event = worker.ends(generator.choice([0, 1, -9, -11, None]))
            if generator.random() < 0.3:
                end = Damaged(worker.number, "garbage")
            steps.append((generator.random() * 3, end))
        return [(delay * generator.choice([0, 1, 1, 1, 8]), event) for delay, event in steps]

    return act


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_every_config_ends_in_exactly_one_outcome(seed: int, memory: dict[int, int]) -> None:
    generator = random.Random(seed)
    route, exclusive = generator.choice([(Route.TOGETHER, True), (Route.APART, True), (Route.APART, False)])
    plan = plan_for(
        route,
        exclusive=exclusive,
        slots=generator.randrange(1, 5),
        parked=generator.randrange(1, 8),
        devices=fake_devices(generator.randrange(1, 4)),
        configs_per_worker=generator.choice([1, 2, 32]),
        target=generator.choice([None, TARGET]) if route is Route.APART else None,
        errors_are_final=generator.random() < 0.5,
        compiles_per_worker=generator.choice([1, 2, 100]),
    )
    clock = Clock()
    scripted = anything(generator)

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        memory[worker.number] = generator.choice([0, 0, 0, 0, 0, 2 * GB if generator.random() < 0.1 else 1])
        return scripted(worker)

    sandbox = FakeSandbox(clock, act, kill_s=generator.choice([0.01, 0.5]))
    result = run(plan, generator.randrange(1, 25), clock=clock, sandbox=sandbox)

    for trial in result.trials.values():
        assert (trial.time_ms is not None) == (trial.outcome is Outcome.OK)
        assert trial.outcome is Outcome.OK or trial.message
    if route is Route.TOGETHER:
        assert not result.leftovers.unfit


def test_the_scheduler_knows_nothing_of_jax() -> None:
    for module in Path(scheduler_package.__file__).parent.glob("*.py"):
        lines = module.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("import jax", "from jax"))]


# --- states of a worker -------------------------------------------------------------------------------------


def worker_in(state: WorkerState) -> Worker:
    return Worker(1, None, None, 0.0, state)


@pytest.mark.parametrize("state", WorkerState)
def test_a_worker_may_die_in_any_state_and_then_does_nothing_else(state: WorkerState) -> None:
    worker = worker_in(state)
    worker.transition(WorkerState.DYING)
    assert worker.is_dying
    for other in set(WorkerState) - {WorkerState.DYING}:
        with pytest.raises(RuntimeError, match="cannot go from DYING"):
            worker.transition(other)


@pytest.mark.parametrize(
    ("state", "other"),
    [
        (WorkerState.COMPILING, WorkerState.MEASURING),
        (WorkerState.PREPARING, WorkerState.MEASURING),
        (WorkerState.PARKED, WorkerState.IDLE),
        (WorkerState.LEAVING, WorkerState.IDLE),
        (WorkerState.SIDE_TASK, WorkerState.IDLE),
    ],
)
def test_a_worker_refuses_an_illegal_move(state: WorkerState, other: WorkerState) -> None:
    worker = worker_in(state)
    with pytest.raises(RuntimeError, match=f"from {state.name} to {other.name}"):
        worker.transition(other)
    assert worker.state is state


# --- references --------------------------------------------------------------------------------------------


@pytest.fixture
def reference() -> Iterator[Reference]:
    made = Reference(compares=True, default=5)
    yield made
    made.close()


def agrees(worker: FakeWorker) -> list[Step]:
    """Measures a config whose output is that of all others."""
    return [(0.2, measured(worker, agreement={"group": 0}))]


@EVERY_WAY
def test_the_defaults_are_measured_before_all_other_configs(
    route: Route, exclusive: bool, reference: Reference
) -> None:
    result = run(plan_for(route, exclusive=exclusive), 8, when("Measure", agrees), reference=reference)
    assert result.outcomes == ["ok"] * 8
    first, *others = result.given("Measure")
    assert first.trial == 5
    assert (first.task.references, first.task.standard, first.task.keeps) == (0, None, True)
    assert {(other.task.references, other.task.standard) for other in others} == {(1, 0)}


def test_standby_workers_learn_of_the_outputs_that_they_will_compare(reference: Reference) -> None:
    outputs = [{"shape": [4, 8], "dtype": "float16"}]

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Prepare":
            return [(3.0, worker.says("Ready", "load", modules=[]))]
        if worker.do == "Compile":
            lowered = worker.says("Lowered", "compile", program=f"program {worker.trial}", outputs=outputs)
            _, enters, _, *compiled = compiles(worker)
            return [enters, (0.2, lowered), *compiled]
        return agrees(worker) if worker.do == "Measure" else None

    plan = plan_for(Route.APART, target=TARGET, configs_per_worker=4)
    result = run(plan, 8, act, reference=reference)
    assert result.outcomes == ["ok"] * 8
    orders = collections.defaultdict(list)
    for worker in result.sandbox.given:
        orders[worker.number].append(worker.do)
    standby = [order for order in orders.values() if order[0] == "Prepare"]
    assert [order[:3] for order in standby] == [["Prepare", "Expect", "Measure"]] * len(standby)
    assert {worker.task.outputs for worker in result.given("Expect")} == {(OutputArray((4, 8), "float16"),)}


def test_a_worker_that_dies_after_its_sweep_leaves_no_output_file_open(reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do != "Measure":
            return None
        if worker.task.checked:
            return [(0.2, measured(worker))]
        first_run = {"run_ms": 1.0, "cpu_ms": 1.0, "is_disturbed": False, "agreement": {"group": 0}}
        return [(0.2, worker.says("Checked", "check", **first_run))]

    clock = Clock()
    sandbox = FakeSandbox(clock, act, kill_s=100.0)
    result = run(plan_for(Route.TOGETHER), 2, clock=clock, sandbox=sandbox, reference=reference)
    assert result.outcomes == ["ok"] * 2  # and `run` has counted descriptors


@EVERY_WAY
def test_lost_defaults_come_first_again_however_many_configs_wait(
    route: Route, exclusive: bool, reference: Reference
) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial == 5 and worker.starts == 0:
            return [(20.0, worker.ends(None))]  # by then as many wait as there is room for
        return agrees(worker) if worker.do == "Measure" else None

    plan = plan_for(route, exclusive=exclusive, parked=2)
    result = run(plan, 12, act, reference=reference)
    assert result.outcomes == ["ok"] * 12
    assert result.given("Measure")[0].trial == 5


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_where_the_defaults_fail_outputs_are_compared_one_at_a_time(
    route: Route, do: str, reference: Reference
) -> None:
    clock = Clock()
    at_once: list[int] = []

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Measure":
            at_once.append(len(sandbox._measuring))
        if worker.trial == 5 and worker.do == do:
            return [(0.1, worker.raises("compile" if do == "Compile" else "check"))]
        return agrees(worker) if worker.do == "Measure" else None

    sandbox = FakeSandbox(clock, act)
    plan = plan_for(route, devices=fake_devices(2), parked=8)
    result = run(plan, 8, clock=clock, sandbox=sandbox, reference=reference)
    assert result.outcomes == ["ok"] * 5 + ["error"] + ["ok"] * 2
    assert set(at_once) == {1}
    tasks = [worker.task for worker in result.given("Measure") if worker.trial != 5]
    assert {task.standard for task in tasks} == {None}
    assert {task.best_median_ms for task in tasks} == {None}, "the fastest may be wrong"


def test_other_configs_go_on_without_defaults_that_are_unfit(reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial == 5:
            return [(3.0, worker.raises("compile", outcome="unfit", message="its dots"))]
        return agrees(worker) if worker.do == "Measure" else None

    result = run(plan_for(Route.APART), 6, act, reference=reference)
    assert 5 in result.leftovers.unfit
    assert set(result.outcomes) == {"ok"}


def test_a_config_with_the_defaults_program_runs_first_in_their_place(reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial in (0, 5):
            return compiles(worker, 2.0 if worker.trial == 5 else 1.0, program="theirs")
        return agrees(worker) if worker.do == "Measure" else None

    result = run(plan_for(Route.TOGETHER), 6, act, reference=reference)
    assert result.outcomes == ["ok"] * 6
    assert result.given("Measure")[0].trial == 0
    assert not result.given("Measure", 5)


@pytest.mark.parametrize("group", [7, -3, "0", 0.0, [0]])
def test_a_config_that_claims_to_agree_with_a_missing_output_has_crashed(group: object, reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do != "Measure":
            return None
        return [(0.2, measured(worker, agreement={"group": group if worker.trial == 2 else 0}))]

    result = run(plan_for(Route.TOGETHER), 6, act, reference=reference)
    assert result.outcomes == ["ok", "ok", "crashed", "ok", "ok", "ok"]
    assert "invalid message" in result.trials[2].message
