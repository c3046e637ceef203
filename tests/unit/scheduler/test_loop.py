"""The scheduler keeps its order and its bursts, and every config ends in exactly one outcome."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    EVERY_WAY,
    GB,
    GOOD,
    ROUTES,
    SLOTS,
    TARGET,
    Act,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    behaves,
    compiles,
    fake_devices,
    plan_for,
    run,
    when,
)

from quarantune import scheduler as scheduler_package
from quarantune.sandbox.workforce import Event, Said
from quarantune.scheduler.workers import Worker, WorkerState
from quarantune.values.codec import DamageError
from quarantune.values.trial import Outcome, Phase, Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


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


def test_a_run_without_configs_ends_at_once() -> None:
    assert run(plan_for(Route.APART), 0).seconds == 0


@ROUTES
def test_configs_start_in_the_order_they_are_given(route: Route) -> None:
    result = run(plan_for(route), 8)
    assert [worker.trial for worker in result.given("Compile")] == list(range(8))


@pytest.mark.parametrize("troubled", [(), (17,)])
def test_configs_like_those_that_compile_for_long_begin_next(troubled: tuple[int, ...]) -> None:
    def is_long(index: int) -> bool:
        return index % 6 == 5

    plan = plan_for(Route.APART, troubled=troubled)
    act = when("Compile", lambda worker: compiles(worker, compile_s=4.0 if is_long(worker.trial or 0) else 0.5))
    result = run(plan, 30, act, config_of=lambda index: {"stages": index // 6, "tile": index % 6})
    begun = [worker.trial or 0 for worker in result.given("Compile")]
    assert begun[:6] == list(range(6)), "compile times are still unknown"
    long = [place for place, index in enumerate(begun) if is_long(index) and index not in troubled]
    assert max(long) < 24, "configs not known to be long come last"
    assert {begun.index(index) for index in troubled} <= {17}, "a troubled config keeps its place"


@ROUTES
def test_configs_that_compile_equally_long_keep_their_order(route: Route) -> None:
    result = run(plan_for(route), 24, when("Compile", lambda worker: compiles(worker, compile_s=0.5)))
    assert [worker.trial for worker in result.given("Compile")] == list(range(24))


def test_on_the_route_apart_compiling_continues_in_measuring() -> None:
    result = run(plan_for(Route.APART, slots=2), 10)
    assert result.sandbox.compiled_while_measuring
    assert result.seconds < 10 / 2 * 1.3 + 2  # measuring overlaps with compiling


@ROUTES
def test_an_exclusive_device_alternates_compile_and_measure(route: Route) -> None:
    result = run(plan_for(route, exclusive=True, parked=4, slots=2), 8)
    turns = [(turn, len(list(group))) for turn, group in itertools.groupby(result.sandbox.turns)]
    assert turns == [("compile", 4), ("measure", 4), ("compile", 4), ("measure", 4)]


def test_single_use_standby_workers_are_made_ready_ahead() -> None:
    plan = plan_for(Route.APART, configs_per_worker=1)
    result = run(plan, 8, when("Prepare", lambda worker: [(2.0, worker.says("Ready", "load", modules=[]))]))
    assert result.outcomes == ["ok"] * 8
    assert len(result.given("Prepare")) == 8
    assert result.seconds < 8 * 2.0


def test_configs_for_the_callers_process_compile_as_one_batch() -> None:
    plan = plan_for(Route.COMPILED_APART, configs_per_worker=1, parked=8, slots=1)
    result = run(plan, 8, when("Compile", lambda worker: compiles(worker, compile_s=2.0)))
    assert result.sandbox.turns == ["compile"] * 8 + ["measure"] * 8
    assert {trial.route for trial in result.trials.values()} == {Route.COMPILED_APART}
    assert all(worker.task.as_data for worker in result.given("Compile"))


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
                end = Said(worker.number, DamageError("garbage"))
            steps.append((generator.random() * 3, end))
        return [(delay * generator.choice([0, 1, 1, 1, 8]), event) for delay, event in steps]

    return act


@pytest.mark.parametrize("seed", range(60))
def test_every_config_ends_in_exactly_one_outcome(seed: int, worker_memory: dict[int, int]) -> None:
    generator = random.Random(seed)
    routes = [Route.TOGETHER, Route.APART, Route.HANDED_OVER, Route.COMPILED_APART]
    route, exclusive = generator.choice([*((route, True) for route in routes), (Route.APART, False)])
    plan = plan_for(
        route,
        exclusive=exclusive,
        slots=generator.randrange(1, 5),
        parked=generator.randrange(1, 8),
        devices=fake_devices(generator.randrange(1, 4)),
        configs_per_worker=generator.choice([1, 2, 32]),
        target=generator.choice([None, TARGET]) if route is Route.APART else None,
        confirms=generator.random() < 0.5,
        compiles_per_worker=generator.choice([1, 2, 100]),
    )
    clock = Clock()
    scripted = anything(generator)

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        some = generator.choice([0, 0, 0, 0, 0, 2 * GB if generator.random() < 0.1 else 1])
        # The scheduler refuses a limit below a worker's least need.
        worker_memory[worker.number] = 0 if worker.do == "Prepare" else some
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


def worker_in(state: WorkerState) -> Worker:
    return Worker(1, None, None, 0.0, state)


@pytest.mark.parametrize("state", WorkerState)
def test_a_worker_may_die_in_any_state_and_does_nothing_more(state: WorkerState) -> None:
    worker = worker_in(state)
    worker.transition(WorkerState.DYING)
    assert worker.state is WorkerState.DYING
    for other in set(WorkerState) - {WorkerState.DYING}:
        with pytest.raises(RuntimeError, match="cannot go from DYING"):
            worker.transition(other)


@pytest.mark.parametrize(
    ("state", "other"),
    [
        (WorkerState.COMPILING, WorkerState.MEASURING),
        (WorkerState.PREPARING, WorkerState.MEASURING),
        (WorkerState.PARKED, WorkerState.IDLE),
        (WorkerState.BETWEEN, WorkerState.IDLE),
        (WorkerState.SIDE_TASK, WorkerState.IDLE),
    ],
)
def test_a_worker_refuses_an_illegal_move(state: WorkerState, other: WorkerState) -> None:
    worker = worker_in(state)
    with pytest.raises(RuntimeError, match=f"from {state.name} to {other.name}"):
        worker.transition(other)
    assert worker.state is state
