"""Each ending of a worker has its outcome, and kills from outside cost no config."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence

import pytest
from scripted import (
    EVERY_WAY,
    GB,
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

from quarantune.host import machine
from quarantune.sandbox.workforce import Event, Said
from quarantune.values.trial import Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


KILLED = -int(signal.SIGKILL)


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_an_exception_is_an_error_with_its_phase_and_message(route: Route, do: str) -> None:
    phase = "compile" if do == "Compile" else "check"
    act = when(do, lambda worker: [(0.2, worker.raises(phase, error="KeyError", message="'x'"))])
    result = run(plan_for(route), 3, for_config(1, act))
    assert result.outcomes == ["ok", "error", "ok"]
    assert result.trials[1].phase == phase
    assert result.trials[1].message == "KeyError: 'x'"
    assert result.sandbox.killed  # a worker that raised is not used again


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


def test_a_config_whose_worker_dies_waiting_has_crashed() -> None:
    def dies_waiting(worker: FakeWorker) -> list[Step]:
        return [*compiles(worker), (0.1, worker.ends(-int(signal.SIGSEGV)))]

    result = run(plan_for(Route.TOGETHER, slots=1), 3, for_config(0, dies_waiting))
    assert result.outcomes == ["crashed", "ok", "ok"]


def test_a_lingering_compile_worker_is_killed_but_counts() -> None:
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


def test_the_worker_that_took_the_memory_is_oom(worker_memory: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    kills = itertools.count()
    monkeypatch.setattr(machine, "oom_kills", lambda: next(kills))

    def takes_what_the_kernel_does_not_see(worker: FakeWorker) -> list[Step]:
        if worker.starts:  # alone, it is the kernel's only choice
            return dies(worker)
        worker_memory[worker.number] = GB - 1
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


@EVERY_WAY
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_killed_config_is_repeated_alone_before_it_counts(route: Route, exclusive: bool, do: str) -> None:
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
    """A sandbox whose config 2 kills all other workers and then itself whenever it does `do`."""

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
def test_a_worker_dead_before_its_config_began_blames_nothing(route: Route, exclusive: bool) -> None:
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
