"""First runs and the best time so far rule configs out; configs that were disturbed are measured again."""

from __future__ import annotations

import pytest
from scripted import ROUTES, FakeWorker, Step, for_config, measured, plan_for, run, when

from quarantune.sandbox.workforce import Said
from quarantune.scheduler.plan import NOTHING_MORE
from quarantune.scheduler.reference import Reference
from quarantune.values.trial import Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


def first_run(worker: FakeWorker, run_ms: float, cpu_ms: float, *, is_disturbed: bool = False, **more: bool) -> Said:
    return worker.says("FirstRun", "check", run_ms=run_ms, cpu_ms=cpu_ms, is_disturbed=is_disturbed, **more)


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_in_the_callers_process_the_fastest_continues_first(is_disturbed: bool) -> None:
    def act(worker: FakeWorker) -> list[Step]:
        run_ms = 40.0 * (8 - int(worker.trial or 0))
        if worker.task.checked:
            return [(0.2, measured(worker, run_ms, run_ms))]
        told = first_run(worker, run_ms, run_ms, is_disturbed=is_disturbed)
        return [(0.1, worker.says("PhaseEntered", "check")), (0.2, told)]

    plan = plan_for(Route.COMPILED_APART, configs_per_worker=1, parked=8)
    result = run(plan, 8, when("Measure", act))
    again = [worker.trial for worker in result.given("Measure") if worker.task.checked]
    assert [worker.trial for worker in result.given("Measure") if not worker.task.checked] == list(range(8))
    assert again == (list(range(7, -1, -1)) if is_disturbed else again[:1] + sorted(again[1:], reverse=True))
    assert again[0] == 7
    slow = [trial for trial in result.trials.values() if "after its first run" in trial.message]
    assert bool(slow) is not is_disturbed
    assert len(slow) + len(again) == 8


@pytest.mark.parametrize("again_ms", [2.0, 9.0], ids=["quiet then", "still busy"])
def test_a_config_with_disturbed_runs_is_measured_again_last(again_ms: float) -> None:
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


def test_a_disturbed_config_keeps_its_times_when_time_is_over() -> None:
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
def test_first_runs_rule_configs_out_on_a_quiet_machine_only(disturbed: int) -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        run_ms = 100.0 if worker.trial else 40.0
        if worker.do != "Measure":
            return None
        if not worker.task.checked:
            is_disturbed = 0 < (worker.trial or 0) <= disturbed
            cpu_ms = 0.5 * run_ms if is_disturbed else run_ms
            return [(0.2, first_run(worker, run_ms, cpu_ms, is_disturbed=is_disturbed))]
        return [(0.2, measured(worker, run_ms, run_ms))]

    result = run(plan_for(Route.TOGETHER, parked=8), 8, act)
    assert result.outcomes == ["ok", *["slow" if not disturbed else "ok"] * 7]
    measured_again = [worker.trial for worker in result.given("Measure") if worker.task.checked]
    assert measured_again == ([0] if not disturbed else list(range(8)))
    noise = next(worker.task.disturbed for worker in result.given("Measure") if worker.task.checked)
    assert sorted(noise) == sorted([(40.0, 40.0), *[(100.0, 50.0)] * disturbed, *[(100.0, 100.0)] * (7 - disturbed)])


def test_a_first_run_that_cannot_win_is_stopped_as_slow() -> None:
    limits: dict[int | None, float | None] = {}

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        if worker.task.checked:
            return [(0.2, measured(worker, 60.0, 60.0))]
        limits[worker.trial] = worker.task.stop_ms
        if worker.trial == 2:
            return [(0.5, first_run(worker, 520.0, 480.0, was_ended=True)), (0.0, worker.ends(0))]
        return [(0.2, first_run(worker, 60.0, 60.0))]

    result = run(plan_for(Route.TOGETHER, parked=8), 4, act, reference=Reference(default=3))
    assert result.outcomes == ["ok", "ok", "slow", "ok"]
    slow = result.trials[2]
    assert (slow.phase, slow.time_ms, slow.own_ms, slow.samples_ms) == ("check", 480.0, 480.0, (520.0,))
    assert slow.message == "its first run was stopped, because another config is clearly faster"
    assert limits[0] is None, "the first config has no rival yet"
    assert (limits[1], limits[2]) == (4 * 2 * 60.0, 3 * 2 * 60.0), "more knowledge of the noise ends runs sooner"
    assert limits[3] is None, "the defaults always get a time"


@pytest.mark.parametrize(("run_ms", "cpu_ms"), [(float("nan"), 1.0), (-1.0, 1.0), (1.0, float("inf"))])
def test_an_impossible_stop_ends_its_worker(run_ms: float, cpu_ms: float) -> None:
    act = when("Measure", lambda worker: [(0.2, first_run(worker, run_ms, cpu_ms, was_ended=True))])
    result = run(plan_for(Route.TOGETHER, parked=8), 3, for_config(1, act))
    assert result.outcomes == ["ok", "crashed", "ok"]


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
    assert "another config is clearly faster" in result.trials[2].message
