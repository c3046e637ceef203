"""Deadlines count a config's own work, and no waiting."""

from __future__ import annotations

import pytest
from scripted import (
    EVERY_WAY,
    ROUTES,
    Act,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    compiles,
    for_config,
    plan_for,
    run,
    when,
)

from quarantune.devices.leases import Lease
from quarantune.sandbox.workforce import Event
from quarantune.scheduler.plan import STARTUP_DEADLINE_S
from quarantune.values.trial import Phase, Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


WAITS_LONG_S = 30.0


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
def test_waiting_for_another_tuners_device_never_counts(route: Route, exclusive: bool) -> None:
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
    assert result.trials[1].message == "compiling took longer than 5 s: raise compile_timeout to allow more"
    assert 55.0 <= result.seconds < 60.0


@ROUTES
def test_repeated_phase_frames_do_not_put_a_deadline_off(route: Route) -> None:
    def lingers(worker: FakeWorker) -> list[Step]:
        return [(0.5, worker.says("PhaseEntered", "compile"))] * 100

    result = run(plan_for(route), 1, lingers)
    assert result.outcomes == ["timeout"]
    assert result.seconds < 6.0


@EVERY_WAY
def test_checking_and_measuring_share_a_deadline(route: Route, exclusive: bool) -> None:
    def slow(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        return [(1.5, worker.says("PhaseEntered", "measure")), (1.0, worker.says("PhaseEntered", "measure"))] * 10

    result = run(plan_for(route, exclusive=exclusive), 3, for_config(0, slow))
    assert result.outcomes == ["timeout", "ok", "ok"]
    assert result.trials[0].phase is Phase.MEASURE
    assert result.trials[0].message == "checking and measuring took longer than 2 s: raise timeout to allow more"
    assert result.trials[0].compile_s == 1.0


class Stopping(FakeSandbox):
    """A sandbox whose caller stops for a while at its `nth` poll."""

    def __init__(self, clock: Clock, act: Act, *, nth: int, seconds: float, frozen: bool) -> None:
        super().__init__(clock, act)
        self.nth, self.seconds, self.frozen = nth, seconds, frozen

    def poll(self, timeout_s: float) -> list[Event]:
        self.nth -= 1
        if self.nth:
            return super().poll(timeout_s)
        self.clock.now += self.seconds
        if self.frozen:  # its workers stop with it, so that their messages come later
            self._agenda = [(due + self.seconds, order, event) for due, order, event in self._agenda]
        return []  # an interrupted poll returns nothing after its timeout


@pytest.mark.parametrize("frozen", [False, True], ids=["alone", "with its workers"])
@EVERY_WAY
def test_a_stopped_caller_reads_first_and_extends_deadlines(route: Route, exclusive: bool, frozen: bool) -> None:
    plain = run(plan_for(route, exclusive=exclusive), 4)
    for nth in range(1, 40, 2):
        clock = Clock()
        sandbox = Stopping(clock, lambda worker: None, nth=nth, seconds=300.0, frozen=frozen)
        result = run(plan_for(route, exclusive=exclusive), 4, clock=clock, sandbox=sandbox)
        assert result.outcomes == ["ok"] * 4, f"the caller stopped at poll {nth}: {result.trials}"
        assert {trial.time_ms for trial in result.trials.values()} == {trial.time_ms for trial in plain.trials.values()}


def test_a_hang_is_still_a_timeout_after_the_caller_was_stopped() -> None:
    clock = Clock()
    act = for_config(1, when("Measure", lambda worker: []))
    sandbox = Stopping(clock, act, nth=60, seconds=300.0, frozen=False)
    result = run(plan_for(Route.TOGETHER), 3, act, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok", "timeout", "ok"]
    assert 300.0 < result.seconds < 300.0 + 2 * WAITS_LONG_S


@ROUTES
def test_a_config_whose_worker_fails_to_start_gets_two_retries(route: Route) -> None:
    silent = when("Compile", lambda worker: [] if worker.starts == 0 else compiles(worker))
    result = run(plan_for(route), 1, silent)
    assert result.outcomes == ["ok"]
    assert STARTUP_DEADLINE_S < result.seconds < STARTUP_DEADLINE_S + 5

    result = run(plan_for(route), 3, for_config(0, lambda worker: []))
    assert result.outcomes == ["lost", "ok", "ok"]
    assert len(result.given("Compile", 0)) == 3
    assert f"not up within {STARTUP_DEADLINE_S:g} s" in result.trials[0].message
