"""Devices are shared, exclusive ones have one owner at a time, and devices that fail workers are withdrawn."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import signal
import uuid
from collections.abc import Mapping, Sequence

import pytest
from scripted import (
    ROUTES,
    SLOTS,
    TARGET,
    Act,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    fake_devices,
    for_config,
    gets_ready,
    immortal,
    lacks_device_memory,
    measures,
    plan_for,
    run,
    when,
)

from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
from quarantune.sandbox.workforce import Said
from quarantune.scheduler.plan import STARTUP_DEADLINE_S
from quarantune.scheduler.routes.apart import Cheaply
from quarantune.values import codec
from quarantune.values.codec import DamageError
from quarantune.values.configs import Config
from quarantune.values.errors import SandboxError
from quarantune.values.trial import Outcome, Route, Trial

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


KILL_DEADLINE_S = 10.0
ROUTES_OF_ONE_OWNER = pytest.mark.parametrize("route", [Route.TOGETHER, Route.APART])


class OneOwner(FakeSandbox):
    """A sandbox with a device for one worker at a time; workers take long to die."""

    def __init__(self, clock: Clock, act: Act, *, is_together: bool) -> None:
        super().__init__(clock, act, kill_s=0.5)
        self.is_together = is_together
        self.owners: set[int] = set()
        self.owned = 0

    def start(
        self, task: codec.JsonObject, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None
    ) -> int:
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
def test_a_devices_owner_ends_before_others_use_the_device(route: Route) -> None:
    is_together = route is Route.TOGETHER
    clock = Clock()
    sandbox = OneOwner(clock, lambda worker: None, is_together=is_together)
    devices = (Device("tpu", f"fake {uuid.uuid4()}"),)
    plan = plan_for(route, slots=1, parked=1, devices=devices)
    scheduler = plan.scheduler(sandbox, on_trial=lambda index, trial, log: None, clock=clock)
    configs = {index: {"id": index} for index in range(3)}
    scheduler.run(configs)
    assert scheduler.compare(configs).rounds_ms
    scheduler.run({3: {"id": 3}})
    scheduler.free_devices()
    assert not [owner for owner in sandbox.owners if owner in sandbox.workers]
    scheduler.close()


@ROUTES
def test_another_tuner_has_turns_though_configs_always_wait(route: Route, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    plan = plan_for(route, parked=60, timeout_s=10.0, configs_per_worker=1 if route is Route.TOGETHER else 100)
    rival, turns = Lease(plan.devices[0]), []

    def asks() -> None:
        now = clock() - 1000.0
        if not 40 < now < 90:
            rival.release()
        elif rival.acquire(now):
            turns.append(now)
            rival.release()

    act = when("Measure", lambda worker: measures(worker, seconds=2.0))
    assert run(plan, 60, act, clock=clock, on_tick=asks).outcomes == ["ok"] * 60
    assert len(turns) > 4
    assert "measuring at the same time" not in caplog.text


@ROUTES
def test_two_devices_share_the_configs(route: Route) -> None:
    plan = plan_for(route, devices=fake_devices(2), parked=8, timeout_s=10.0)
    result = run(plan, 16, when("Measure", lambda worker: measures(worker, seconds=3.0)))
    assert result.outcomes == ["ok"] * 16
    used = collections.Counter(worker.device for worker in result.given("Measure"))
    assert set(used) == {device.token for device in plan.devices}
    assert min(used.values()) >= 5


@ROUTES
def test_an_unkillable_worker_costs_its_device_not_the_sweep(route: Route) -> None:
    plan = plan_for(route, devices=fake_devices(2), parked=8)
    result = run(plan, 12, for_config(1, when("Measure", immortal)))
    assert result.outcomes == ["ok", "timeout", *["ok"] * 10]
    assert "does not die" in result.trials[1].message
    stuck = result.given("Measure", 1)[0].device
    given_up = [worker.trial for worker in result.given("Measure")].index(1)
    later = result.given("Measure")[given_up + 3 :]
    assert any(worker.device != stuck for worker in later)


@ROUTES
def test_every_config_ends_when_the_last_device_is_withdrawn(route: Route) -> None:
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
def test_a_device_whose_workers_never_get_ready_is_withdrawn(configs_per_worker: int) -> None:
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
def test_without_a_worker_on_the_last_device_configs_say_why(
    configs_per_worker: int, exclusive: bool, status: int | None, outcome: str
) -> None:
    plan = plan_for(Route.APART, configs_per_worker=configs_per_worker, exclusive=exclusive)
    result = run(plan, 9, when("Prepare", lambda worker: [(0.1, worker.ends(status))]))
    assert result.outcomes == [outcome] * 9
    assert all("no worker could be made ready" in trial.message for trial in result.trials.values())


@pytest.mark.parametrize("configs_per_worker", [1, 4])
def test_standby_workers_memory_costs_a_config_only_a_retry(configs_per_worker: int) -> None:
    plan = plan_for(Route.APART, configs_per_worker=configs_per_worker)
    once = for_config(1, when("Measure", lambda worker: None if worker.starts else lacks_device_memory(worker)))
    result = run(plan, 12, once)
    assert result.outcomes == ["ok"] * 12
    again = [worker.trial for worker in result.sandbox.given if worker.do != "Compile"]
    since = again[len(again) - again[::-1].index(1) - 1 :]
    # From then on at most one standby worker is made ready at a time.
    assert all(since[at + 1] is not None for at in range(len(since) - 1) if since[at] is None)


@pytest.mark.parametrize("configs_per_worker", [1, 4])
def test_a_config_that_lacks_memory_alone_is_device_oom(configs_per_worker: int) -> None:
    plan = plan_for(Route.APART, configs_per_worker=configs_per_worker)
    result = run(plan, 6, for_config(1, when("Measure", lacks_device_memory)))
    assert result.outcomes == ["ok", "device_oom", "ok", "ok", "ok", "ok"]
    assert len(result.given("Measure", 1)) == 2


def test_standby_workers_that_lack_memory_cost_no_device() -> None:
    starts = itertools.count()

    def act(worker: FakeWorker) -> list[Step] | None:
        return lacks_device_memory(worker) if worker.do == "Prepare" and next(starts) in (1, 2, 3, 4) else None

    assert run(plan_for(Route.APART, configs_per_worker=1), 6, act).outcomes == ["ok"] * 6


@pytest.mark.parametrize("fault", ["damage", "deadline"])
def test_a_dying_standby_worker_is_blamed_on_its_device(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    prepared = itertools.count()

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Prepare" and next(prepared) == 1:
            return [] if fault == "deadline" else [(0.1, Said(worker.number, DamageError("no frame")))]
        if worker.do == "Measure" and worker.trial == 0 and not worker.starts:
            # It lacks memory while the standby worker is dying.
            return [
                (0.05, worker.says("PhaseEntered", "check")),
                (delay_s, worker.says("PhaseEntered", "measure")),
                *lacks_device_memory(worker),
            ]
        return None

    delay_s = STARTUP_DEADLINE_S if fault == "deadline" else 1.0
    clock = Clock()
    plan = plan_for(Route.APART, configs_per_worker=1, timeout_s=2 * STARTUP_DEADLINE_S)
    result = run(plan, 3, clock=clock, sandbox=FakeSandbox(clock, act, kill_s=5.0))
    assert result.outcomes == ["ok"] * 3
    assert "no measuring worker on" in caplog.text
    assert ("damaged its own connection" if fault == "damage" else "not up within") in caplog.text


@pytest.mark.parametrize("do", ["Compile", "Prepare", "Measure"])
def test_a_device_with_room_for_one_worker_runs_every_config(do: str) -> None:
    def lacks_memory(worker: FakeWorker) -> list[Step] | None:
        is_alone = [*sandbox.workers] == [worker.number]
        return lacks_device_memory(worker) if worker.do == do and not is_alone else None

    clock = Clock()
    sandbox = FakeSandbox(clock, lacks_memory)
    plan = plan_for(Route.HANDED_OVER, compiles_per_worker=8, configs_per_worker=4, slots=2)
    assert run(plan, 12, clock=clock, sandbox=sandbox).outcomes == ["ok"] * 12


def test_a_device_without_memory_for_one_worker_is_withdrawn() -> None:
    result = run(plan_for(Route.APART, configs_per_worker=1), 6, when("Prepare", lacks_device_memory))
    assert result.outcomes == ["device_oom"] * 6


def test_one_failed_standby_worker_does_not_withdraw_a_device() -> None:
    starts = itertools.count()

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Prepare" and next(starts) % 2 == 0:
            return [(0.1, worker.ends(1))]
        return None

    result = run(plan_for(Route.APART, configs_per_worker=2), 8, act)
    assert result.outcomes == ["ok"] * 8


def workers_of_two_routes(route: Route, standby: Act = lambda worker: None) -> dict[str, set[int]]:
    """Runs three configs unfit for the split route on another route; returns the workers of each task."""

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        is_unfit = worker.do == "Compile" and not worker.starts
        return [(0.1, worker.raises("compile", "unfit"))] if is_unfit else standby(worker)

    trials: dict[int, Trial] = {}

    def on_trial(index: int, trial: Trial, log: str) -> None:
        trials[index] = trial

    clock = Clock()
    sandbox = FakeSandbox(clock, act)
    first = plan_for(Route.APART)
    earlier = first.scheduler(sandbox, on_trial=on_trial, clock=clock)
    left = earlier.run({index: {"id": index} for index in range(3)})
    assert list(left.unfit) == [0, 1, 2]
    later = plan_for(route, devices=first.devices).scheduler(sandbox, on_trial=on_trial, clock=clock)
    later.take_standby_workers(earlier)
    later.run(left.unfit)
    assert [trials[index].outcome for index in range(3)] == ["ok"] * 3
    given = collections.defaultdict(set)
    for worker in sandbox.given:
        given[worker.do].add(worker.number)
    for scheduler in (earlier, later):
        scheduler.close()
    return given


@pytest.mark.parametrize("route", [Route.HANDED_OVER, Route.TOGETHER])
def test_a_later_route_takes_an_earlier_ones_ready_worker(route: Route) -> None:
    given = workers_of_two_routes(route)
    assert len(given["Prepare"]) == 1
    assert (given["Prepare"] == given["Measure"]) == (route is Route.HANDED_OVER)


def test_a_worker_that_dies_in_a_later_route_is_replaced() -> None:
    def dies(worker: FakeWorker) -> Sequence[Step] | None:
        is_first = worker.do == "Prepare" and not worker.starts
        return [*gets_ready(worker), (0.3, worker.ends(None))] if is_first else None

    given = workers_of_two_routes(Route.HANDED_OVER, dies)
    assert len(given["Prepare"]) == 2
    assert given["Measure"] == given["Prepare"] - {min(given["Prepare"])}


@pytest.mark.parametrize("ends", ["well", "lost", "crashed"])
def test_full_compile_workers_take_the_device_among_cheap_ones(ends: str) -> None:
    dies = ends != "well"

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        status = None if ends == "lost" else -11
        steps = [(0.1, worker.says("PhaseEntered", "load")), (0.1, worker.ends(status))]
        return steps if dies and worker.do == "Prepare" and worker.task.compiles else None

    clock, trials = Clock(), dict[int, Trial]()
    sandbox = FakeSandbox(clock, act)
    scenario = plan_for(Route.HANDED_OVER, configs_per_worker=16)
    ranking = dataclasses.replace(scenario, make_route=lambda: Cheaply(scenario.numbers, target=TARGET))

    def on_trial(index: int, trial: Trial, log: str) -> None:
        trials[index] = trial

    configs: dict[int, Config] = {index: {"id": index} for index in range(6)}
    earlier = ranking.scheduler(sandbox, on_trial=on_trial, clock=clock)
    assert earlier.run(configs).unfit == {}
    cheaply = {worker.number for worker in sandbox.given if worker.do == "Compile"}
    ready = {worker.number for worker in sandbox.given if worker.do == "Prepare" and worker.task.compiles}
    assert len(ready) == 4
    later = scenario.scheduler(sandbox, on_trial=on_trial, clock=clock)
    later.take_standby_workers(earlier)
    later.run({index: configs[index] for index in range(4)})
    assert [trials[index].outcome for index in configs] == ["ok"] * 6
    fully = {worker.number for worker in sandbox.given if worker.do == "Compile"} - cheaply
    assert fully.isdisjoint(ready) if dies else fully <= ready
    measuring = {worker.number for worker in sandbox.given if worker.do == "Measure"}
    assert measuring.isdisjoint(ready)
    assert len(measuring) == 1
    for scheduler in (earlier, later):
        scheduler.close()


def test_an_exception_in_the_caller_frees_the_devices() -> None:
    plan = plan_for(Route.APART)
    clock = Clock()

    def on_trial(index: int, trial: Trial, log: str) -> None:
        raise SandboxError("the caller has had enough")

    fds = len(os.listdir("/proc/self/fd"))
    scheduler = plan.scheduler(FakeSandbox(clock, lambda worker: None), on_trial=on_trial, clock=clock)
    with pytest.raises(SandboxError, match="had enough"):
        scheduler.run({index: {"id": index} for index in range(6)})
    assert len(os.listdir("/proc/self/fd")) == fds
    lease = Lease(plan.devices[0])
    assert lease.acquire(clock())
    lease.release()
