"""Workers that follow a script on a fake clock, for tests of the scheduler; this file contains no test."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import itertools
import json
import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
from quarantune.sandbox import messages
from quarantune.sandbox.messages import Task
from quarantune.sandbox.template_messages import Ended
from quarantune.sandbox.workforce import Event, Said
from quarantune.scheduler.loop import Scheduler
from quarantune.scheduler.plan import (
    NOTHING_MORE,
    ConfigSource,
    Leftovers,
    MemoryLimits,
    Numbers,
    Plan,
    SharedMemoryLimits,
)
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.routes.apart import Apart, ApartInTurns
from quarantune.scheduler.routes.base import TrialRoute
from quarantune.scheduler.routes.compiled_only import CompileCheck, CompiledOnly, CompiledOnlyApart
from quarantune.scheduler.routes.handed_over import HandedOver
from quarantune.scheduler.routes.here import CompiledApart
from quarantune.scheduler.routes.together import Together
from quarantune.values import codec
from quarantune.values.configs import Config
from quarantune.values.trial import CompileTarget, Route, Trial

GB = 1 << 30
SLOTS = 3
TARGET = CompileTarget(platform="cuda", config_text="", device_kind="fake", num_cores=1)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Step = tuple[float, Event]
"""The seconds since the event before, and an event."""


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
        if "program" in more:  # the half of a program's identity that has its content
            more["program"] = f"traced.{more['program']}" if more["program"] else ""
        return Said(self.number, {"message": kind, "trial": self.trial, "phase": phase, **more})

    def ends(self, status: int | None = 0) -> Ended:
        return Ended(self.number, status)

    def raises(
        self, phase: str, outcome: str = "error", error: str = "ValueError", message: str = "bad", **more: Any
    ) -> Said:
        return self.says("Failed", phase, outcome=outcome, error=error, text=message, **more)


Act = Callable[[FakeWorker], "Sequence[Step] | None"]
"""Returns the steps of a worker after a new task; None for the steps of a good worker."""


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
        (0.1, worker.says("ReferenceComputed", "check", is_compared=True, differs=differs)),
    ]


def behaves(worker: FakeWorker) -> list[Step]:
    acts = {
        "Compile": compiles,
        "Proceed": lambda worker: [],
        "Prepare": gets_ready,
        "Expect": lambda worker: [],
        "Measure": measures,
        "Compare": compares,
        "ComputeReference": computes_reference,
    }
    return acts[worker.do](worker)


class FakeSandbox:
    """Workers that follow a script on a fake clock; it counts the workers that are active at the same time."""

    def __init__(self, clock: Clock, act: Act, *, kill_s: float = 0.02) -> None:
        self.clock = clock
        self.act = act
        self.kill_s = kill_s
        self.workers: dict[int, FakeWorker] = {}
        self.given: list[FakeWorker] = []
        self.killed: list[int] = []
        self.written: dict[int, list[int | None]] = collections.defaultdict(list)
        """The configs of each worker since the log was cleared."""
        self.shared: list[str] = []
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

    def open(self, *, load_timeout_s: float | None) -> None:
        pass

    def start(
        self, task: codec.JsonObject, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None
    ) -> int:
        worker = FakeWorker(next(self._numbers), (environ or {}).get("CUDA_VISIBLE_DEVICES", ""))
        self.workers[worker.number] = worker
        self._give(worker, task, fds)
        return worker.number

    def send(self, number: int, message: codec.JsonObject, fds: Sequence[int] = ()) -> None:
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
        assert self.patience > 0, "the scheduler does not end"
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

    def _give(self, worker: FakeWorker, frame: codec.JsonObject, fds: Sequence[int]) -> None:
        task: Task = codec.decode(json.loads(json.dumps(frame)), *messages.TASKS)
        worker.task, worker.do, worker.trial = task, type(task).__name__.removesuffix("Alone"), task.trial
        if task.trial is not None:
            self.written[worker.number].append(task.trial)
        for fd in fds:
            os.fstat(fd)  # the descriptor must be open
        key = (worker.do, worker.trial)
        worker.starts, self._starts[key] = self._starts[key], self._starts[key] + 1
        self.given.append(dataclasses.replace(worker))
        if worker.do == "Compile":
            worker.config = worker.task.config
            if worker.trial is not None:  # otherwise it only confirms the error of an earlier compile
                self._compiling.add(worker.number)
                self.turns.append("compile")
        elif worker.do == "Measure":
            self._measuring.add(worker.number)
            self.turns.append("measure")
            assert fds, "a task needs an executable, or a file for one"
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
        elif isinstance(event.message, dict):
            if event.message.get("message") == "Compiled":
                self._compiling.discard(worker.number)
            elif event.message.get("message") == "Measured":
                worker.measured += 1
                self._measuring.discard(worker.number)
            elif event.message.get("message") == "FirstRun":
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
    """Devices with unique names, because leases are machine-wide."""
    return tuple(Device("cuda", "fake", f"test-{uuid.uuid4()}") for _ in range(count))


@dataclasses.dataclass
class Scenario:
    """A plan, and a new route for each run.

    Attributes:
        plan: the plan.
        make_route: makes the route.
        alternates: whether compiling and measuring must alternate.
    """

    plan: Plan
    make_route: Callable[[], TrialRoute]
    alternates: bool

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.plan.devices

    @property
    def numbers(self) -> Numbers:
        return self.make_route().numbers

    def scheduler(self, sandbox: Any, **more: Any) -> Scheduler:
        return Scheduler(sandbox, self.plan, self.make_route(), **more)


_NUMBERS = [field.name for field in dataclasses.fields(Numbers)]


def plan_for(
    route: Route,
    *,
    target: CompileTarget | None = None,
    exclusive: bool | None = None,
    confirms: bool = False,
    memory_bytes: int = GB,
    is_share: bool = False,
    device_bytes: int | None = None,
    **changes: Any,
) -> Scenario:
    """Returns a scenario on the route of this name; `changes` are numbers, or parts of the plan."""
    numbers = Numbers(
        **{
            "slots": SLOTS,
            "parked": 4,
            "workers": SLOTS,
            "configs_per_worker": 1 if route in (Route.TOGETHER, Route.COMPILED_APART) else 4,
            **{name: changes.pop(name) for name in _NUMBERS if name in changes},
        }
    )
    alternates = route is not Route.APART if exclusive is None else exclusive
    plan = Plan(
        **{
            "devices": fake_devices(1),
            "compile_timeout_s": 5.0,
            "timeout_s": 2.0,
            "memory": (SharedMemoryLimits if is_share else MemoryLimits)(
                worker_bytes=memory_bytes, device_bytes=device_bytes
            ),
            **changes,
        }
    )

    def make_route() -> TrialRoute:
        if route is Route.COMPILED_APART:
            return CompiledApart(numbers, target=target, confirms=confirms)
        if route is Route.APART:
            kind = ApartInTurns if alternates else Apart
            return kind(numbers, target=target, confirms=confirms and target is not None)
        return {Route.TOGETHER: Together, Route.HANDED_OVER: HandedOver}[route](numbers)

    return Scenario(plan, make_route, alternates)


def compiled_only(
    *, is_check: bool = False, with_device: bool = False, target: CompileTarget | None = None, **changes: Any
) -> Scenario:
    """Returns a scenario that only compiles configs."""
    confirms = changes.pop("confirms", False)
    scenario = plan_for(Route.APART, **changes)

    def make_route() -> TrialRoute:
        if is_check:
            return CompileCheck(scenario.numbers, target=target)
        if with_device:
            return CompiledOnly(scenario.numbers)
        return CompiledOnlyApart(scenario.numbers, target=target, confirms=confirms)

    return dataclasses.replace(scenario, make_route=make_route)


def run(
    plan: Scenario,
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
    config_of: Callable[[int], Config] = lambda index: {"id": index},
) -> Result:
    """Runs configs, by default `{"id": 0}` and so on, and checks the invariants of every sweep."""
    clock = clock or Clock()
    sandbox = sandbox or FakeSandbox(clock, act)
    trials: dict[int, Trial] = {}

    def on_trial(index: int, trial: Trial, log: str) -> None:
        assert index not in trials, f"config {index} has ended twice"
        assert trial.config == config_of(index)
        trials[index] = trial

    fds = len(os.listdir("/proc/self/fd"))
    started = clock()
    scheduler = plan.scheduler(
        sandbox,
        on_trial=on_trial,
        on_tick=on_tick,
        reference=reference,
        source=source,
        clock=clock,
        available_memory=available_memory,
    )
    with contextlib.closing(scheduler) if tries else contextlib.nullcontext():
        try:
            leftovers = scheduler.run({index: config_of(index) for index in range(count)})
        finally:
            assert tries in (None, len([worker for worker in sandbox.given if worker.do == "ComputeReference"]))

    settled = [*trials, *leftovers.unfit, *leftovers.unconfirmed]
    assert sorted(settled) == list(range(count)), "every config should end exactly once"
    assert sandbox.most_compiling <= plan.numbers.slots
    assert len(sandbox.killed) == len(set(sandbox.killed)), "every worker should be killed once"
    assert all(measuring <= 1 for measuring in sandbox.most_measuring.values())
    assert not (plan.alternates and sandbox.compiled_while_measuring)
    kept = len(reference.fds) if reference else 0
    assert len(os.listdir("/proc/self/fd")) - kept <= fds, "no descriptor should stay open"
    for device in plan.devices:
        lease = Lease(device)
        assert lease.acquire(clock() + 1000), f"the lease on {device.name} should be free again"
        lease.release()
    return Result(trials, leftovers, sandbox, clock() - started)


def for_config(index: int, *acts: Act) -> Act:
    """Gives each worker of one config an act, and further workers the last act; other configs behave."""

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.trial != index:
            return None
        return acts[min(worker.starts, len(acts) - 1)](worker)

    return act


def when(do: str, act: Callable[[FakeWorker], Sequence[Step]]) -> Act:
    return lambda worker: act(worker) if worker.do == do else None


ROUTES = pytest.mark.parametrize("route", [Route.TOGETHER, Route.HANDED_OVER, Route.APART])
EVERY_WAY = pytest.mark.parametrize(
    ("route", "exclusive"),
    [(Route.TOGETHER, True), (Route.HANDED_OVER, True), (Route.APART, True), (Route.APART, False)],
)
GOOD: dict[str, dict[str, Any]] = {
    "Measured": {"samples_ms": [1.0], "cpu_ms": [1.0], "ranking_ms": 1.0, "is_slow": False, "clock": "wall"},
    "Failed": {"outcome": "error", "error": "E", "text": ""},
    "PhaseEntered": {},
}
"""Fields of replies that the scheduler accepts."""


def immortal(worker: FakeWorker) -> list[Step]:
    worker.immortal = True
    return [(0.1, worker.says("PhaseEntered", "load" if worker.do == "Compile" else "check"))]


def lacks_device_memory(worker: FakeWorker) -> list[Step]:
    return [(0.1, worker.raises("check", outcome="device_oom")), (0.01, worker.ends(0))]


def agrees(worker: FakeWorker) -> list[Step]:
    """Measures a config with the same output as all others."""
    return [(0.2, measured(worker, judgement={"group": 0}))]
