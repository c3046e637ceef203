"""Workers over their limit, and the largest worker in a shortage of memory, are killed and tried alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted import (
    EVERY_WAY,
    GB,
    ROUTES,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    agrees,
    for_config,
    plan_for,
    run,
)

from quarantune.host import machine
from quarantune.scheduler.reference import Reference
from quarantune.values.trial import Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


def test_parked_configs_that_hold_memory_are_measured_early(worker_memory: dict[int, int]) -> None:
    def takes(worker: FakeWorker) -> None:
        worker_memory[worker.number] = GB // 2

    turns = run(plan_for(Route.TOGETHER, slots=1), 4, takes, available_memory=lambda: 2 * GB).sandbox.turns
    assert turns == ["compile", "compile", "measure", "measure"] * 2
    turns = run(plan_for(Route.TOGETHER, slots=1), 4, takes, available_memory=lambda: 20 * GB).sandbox.turns
    assert turns == ["compile"] * 4 + ["measure"] * 4


@EVERY_WAY
def test_defaults_that_lack_memory_beside_others_run_alone(
    route: Route, exclusive: bool, worker_memory: dict[int, int], reference: Reference
) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial == 5 and not worker.starts:
            worker_memory[worker.number] = 2 * GB
            return [(0.1, worker.says("PhaseEntered", "compile")), (10.0, worker.ends())]
        return agrees(worker) if worker.do == "Measure" else None

    plan = plan_for(route, exclusive=exclusive, is_share=True, compile_timeout_s=20.0)
    result = run(plan, 12, act, reference=reference, available_memory=lambda: 3 * GB)
    assert result.outcomes == ["ok"] * 12


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_worker_over_its_memory_limit_is_oom_with_the_figure(
    route: Route, do: str, worker_memory: dict[int, int]
) -> None:
    def takes(worker: FakeWorker) -> list[Step] | None:
        if worker.do != do:
            return None
        worker_memory[worker.number] = 3 * GB
        return [(0.1, worker.says("PhaseEntered", "compile" if do == "Compile" else "check"))]

    result = run(plan_for(route, configs_per_worker=1), 3, for_config(1, takes))
    assert result.outcomes == ["ok", "oom", "ok"]
    assert "3.22 GB" in result.trials[1].message
    assert "1.07 GB" in result.trials[1].message
    assert result.trials[1].peak_memory_bytes == 3 * GB


@ROUTES
def test_a_limit_below_a_workers_least_is_refused_with_it(route: Route, worker_memory: dict[int, int]) -> None:
    def loads(worker: FakeWorker) -> list[Step] | None:
        worker_memory[worker.number] = 3 * GB
        if worker.do == "Prepare":
            return [(0.5, worker.says("Ready", "load", modules=[], held_bytes=3 * GB))]
        return [(0.5, worker.says("PhaseEntered", "compile", held_bytes=3 * GB)), (0.5, worker.ends())]

    says = r"memory_limit=1.07 GB is too little: a worker holds 3.22 GB before a config"
    with pytest.raises(ValueError, match=says):
        run(plan_for(route), 3, loads)


@ROUTES
@pytest.mark.parametrize("said", ["compile", "load"])
def test_a_config_that_forges_a_workers_least_ends_alone(
    route: Route, said: str, worker_memory: dict[int, int]
) -> None:
    def forges(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Prepare":
            return None
        worker_memory[worker.number] = 3 * GB
        phase = "compile" if worker.do == "Compile" else "check"
        forged = [
            worker.says("PhaseEntered", said, held_bytes=99 * GB),
            worker.says("PhaseEntered", phase, held_bytes=99 * GB),
        ]
        return [(0.01, worker.says("PhaseEntered", phase)), *((0.01, step) for step in forged)]

    assert run(plan_for(route, configs_per_worker=1), 3, for_config(1, forges)).outcomes == ["ok", "oom", "ok"]


def test_a_limit_that_is_a_share_refuses_no_worker_its_least(worker_memory: dict[int, int]) -> None:
    def loads(worker: FakeWorker) -> list[Step]:
        return [(0.1, worker.says("PhaseEntered", "compile", held_bytes=3 * GB)), (0.1, worker.ends())]

    assert run(plan_for(Route.TOGETHER, is_share=True), 1, loads).outcomes == ["crashed"]


def test_memory_of_the_template_does_not_count_against_a_worker(worker_memory: dict[int, int]) -> None:
    clock = Clock()

    def takes(worker: FakeWorker) -> None:
        worker_memory[worker.number] = GB + GB // 2

    sandbox = FakeSandbox(clock, takes)
    sandbox.baseline_bytes = GB
    result = run(plan_for(Route.TOGETHER), 2, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok", "ok"]
    assert result.trials[0].peak_memory_bytes == GB // 2


def test_the_memory_of_descendants_counts(worker_memory: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "descendants", lambda pid: [pid + 1_000_000, pid + 2_000_000])

    def forks(worker: FakeWorker) -> list[Step]:
        worker_memory[worker.number + 1_000_000] = worker_memory[worker.number + 2_000_000] = GB - 1
        return [(0.1, worker.says("PhaseEntered", "compile"))]

    result = run(plan_for(Route.TOGETHER), 3, for_config(1, forks))
    assert result.outcomes == ["ok", "oom", "ok"]


@pytest.mark.parametrize(("more_mb", "end"), [(0, "ok"), (300, "oom")])
def test_a_shortage_kills_the_largest_worker_and_repeats_it(
    worker_memory: dict[int, int], more_mb: int, end: str
) -> None:
    sandbox_of: list[FakeSandbox] = []

    def takes(worker: FakeWorker) -> None:
        worker_memory[worker.number] = (100 + (worker.trial or 0) + (more_mb if worker.trial == 2 else 0)) << 20

    def available() -> int:
        alive = [number for number, worker in sandbox_of[0].workers.items() if not worker.ended]
        return (540 << 20) - sum(worker_memory.get(number, 0) for number in alive)

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
    route: Route, exclusive: bool, free: int, end: str, worker_memory: dict[int, int]
) -> None:
    beside: list[int] = []
    clock = Clock()

    def takes(worker: FakeWorker) -> None:
        if worker.do == "Compile" and worker.trial == 1:
            worker_memory[worker.number] = 2 * GB
            if worker.starts:
                beside.extend((sandbox._compiling | sandbox._measuring) - {worker.number})

    sandbox = FakeSandbox(clock, takes)
    plan = plan_for(route, exclusive=exclusive, is_share=True)
    result = run(plan, 6, clock=clock, sandbox=sandbox, available_memory=lambda: free)
    assert result.outcomes == ["ok", end, "ok", "ok", "ok", "ok"]
    assert len(result.given("Compile", 1)) == 2
    assert beside == []
    if end == "oom":
        assert "it held 2.15 GB alone, over its share of the free memory, 1.93 GB" in result.trials[1].message
    assert result.seconds < 30, "configs wait only for the config that runs alone"
