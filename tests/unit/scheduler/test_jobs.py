"""Configs that lower to one program share a trial; programs that are unfit for a route are left over."""

from __future__ import annotations

import os
import signal

import pytest
from scripted import (
    EVERY_WAY,
    ROUTES,
    TARGET,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    compiles,
    for_config,
    immortal,
    measures,
    plan_for,
    run,
)

from quarantune.values.trial import Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


def shares_a_program(worker: FakeWorker) -> list[Step] | None:
    """Even configs lower to one program, odd configs to another."""
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


def test_configs_waiting_for_an_unfit_config_are_left_over() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or (worker.trial == 0 and worker.starts):
            return None
        if worker.trial == 2:  # lost with its template like 0, then unfit
            end = (0.1, worker.raises("compile", "unfit")) if worker.starts else (1.6, worker.ends(None))
            return [(0.1, worker.says("PhaseEntered", "compile")), end]
        return compiles(worker, program="same") if worker.trial else lowers(worker, "same", (1.5, worker.ends(None)))

    result = run(plan_for(Route.APART, slots=3), 3, act)  # `run` checks that every config ends
    assert set(result.trials) | set(result.leftovers.unfit) == {0, 1, 2}


def test_a_config_that_lowers_anew_releases_its_waiters() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile":
            return None
        if worker.trial == 0 and not worker.starts:
            return lowers(worker, "first", (3, worker.ends(None)))
        return compiles(worker, program="first" if worker.trial == 1 else "second")

    assert run(plan_for(Route.APART, slots=3), 3, act).outcomes == ["ok"] * 3


@pytest.mark.parametrize(("lowering_s", "outcome_of_same_program"), [(4.0, "ok"), (1.0, "timeout")])
def test_a_deadline_spent_tracing_fails_no_equal_program(lowering_s: float, outcome_of_same_program: str) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or worker.trial != 0:
            return compiles(worker, program="same") if worker.do == "Compile" else None
        lowered = (lowering_s, worker.says("Lowered", "compile", program="same"))
        return [(0.1, worker.says("PhaseEntered", "compile")), lowered]  # compiles for ever

    result = run(plan_for(Route.APART, slots=1), 2, act)
    assert result.outcomes == ["timeout", outcome_of_same_program]


def test_configs_waiting_for_one_program_hold_no_descriptors() -> None:
    most, before = 0, len(os.listdir("/proc/self/fd"))

    def count() -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")) - before)

    run(plan_for(Route.APART), 100, lambda w: compiles(w, program="same") if w.do == "Compile" else None, on_tick=count)
    assert 0 < most < 20


def test_an_unloadable_program_is_left_to_the_other_route() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        is_hit = worker.do == "Measure" and worker.trial == 1
        return [(0.1, worker.raises("load", "unfit"))] if is_hit else None

    result = run(plan_for(Route.APART), 3, act)
    assert list(result.leftovers.unfit) == [1]
    assert result.outcomes == ["ok"] * 2


def test_a_program_a_used_worker_cannot_load_gets_a_fresh_one() -> None:
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
def test_if_the_first_program_cannot_be_loaded_none_is_tried(loads: int) -> None:
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


def test_no_config_keeps_waiting_for_an_unfit_program() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile":
            return None
        delay_s = 0.5 if worker.trial == 0 else 2.0 + (worker.trial or 0)
        unfit = worker.raises("compile", outcome="unfit", message="its executable cannot be serialised")
        lowered = worker.says("Lowered", "compile", program="the same")
        return [(0.1, worker.says("PhaseEntered", "compile")), (delay_s, lowered), (0.1, unfit), (0.01, worker.ends(0))]

    result = run(plan_for(Route.APART, slots=3), 8, act)
    assert set(result.leftovers.unfit) == set(range(8))


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


def test_an_unfit_program_is_left_over_with_those_not_yet_begun() -> None:
    def unfit(worker: FakeWorker) -> list[Step]:
        return [
            (0.1, worker.says("PhaseEntered", "compile")),
            (0.5, worker.raises("compile", outcome="unfit", message="XLA tunes its dot_general on the device")),
            (0.01, worker.ends(0)),
        ]

    result = run(plan_for(Route.APART, slots=2, target=TARGET), 8, for_config(1, unfit))
    assert set(result.trials) == {0}  # config 0 was already compiling
    assert set(result.leftovers.unfit) == set(range(1, 8))
    assert result.leftovers.why_unfit == "XLA tunes its dot_general on the device"
