"""One worker loads the finalists' executables and compares them."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted import (
    GB,
    TARGET,
    Act,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    behaves,
    compiles,
    measured,
    plan_for,
    run,
    when,
)

from quarantune.devices.leases import Lease
from quarantune.measure.finals import Final
from quarantune.sandbox import spool
from quarantune.scheduler.fastest import Fastest
from quarantune.scheduler.loop import Scheduler
from quarantune.values import codec
from quarantune.values.configs import Config
from quarantune.values.trial import Outcome, Route, Trial

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


def noting_comparisons(act: Act) -> tuple[list[Any], Act]:
    """Returns a list for the tasks that compare finalists, and the act that fills it."""
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
    scheduler = plan.scheduler(sandbox, on_trial=lambda *_: None, clock=clock, available_memory=lambda: 100 * GB)
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


@pytest.mark.parametrize("count", [0, 3])
def test_a_final_without_processes_keeps_the_results(count: int) -> None:
    def lacks_a_thread(worker: FakeWorker) -> list[Step]:
        error = worker.raises("check", error="RuntimeError", message="can't start new thread")
        return [(0.1, worker.says("PhaseEntered", "check")), (0.1, error)]

    compared, _, tasks = compare(when("Compare", lacks_a_thread), count)
    assert compared == Final()
    assert 2 < len(tasks) < 10


def test_finalists_are_compared_in_one_worker() -> None:
    compared, _, tasks = compare(lambda worker: None)
    assert compared.rounds_ms == {index: (index + 1.0,) * 5 for index in range(3)}
    assert compared.warm_ms == {index: (index + 1.0,) * 5 for index in range(2)}
    assert [entry.config for entry in tasks[0].entries] == [{"id": index} for index in range(3)]


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("each", [1, 4])
def test_the_finals_worker_is_made_ready_in_an_idle_slot(each: int, count: int) -> None:
    def sweep(*, has_final: bool) -> tuple[Final, float, dict[str, list[int]]]:
        def starts_slowly(worker: FakeWorker) -> Sequence[Step] | None:
            numbers[worker.do].append(worker.number)
            is_fresh = worker.do == "Prepare" or (worker.do == "Compare" and worker.number not in numbers["Prepare"])
            (delay_s, first), *others = behaves(worker)
            return [(delay_s + 1.0, first), *others] if is_fresh else None

        numbers = collections.defaultdict[str, list[int]](list)
        compared, sandbox, _ = compare(starts_slowly, count, configs_per_worker=each, has_final=has_final)
        return compared, sandbox.clock.now, numbers

    (compared, end_s, numbers), (compared_late, late_s, numbers_late) = sweep(has_final=True), sweep(has_final=False)
    assert compared == compared_late
    assert numbers["Compare"] == numbers["Prepare"][-1:]
    if count % each:  # a measuring worker may take one more task
        assert (end_s, numbers) == (late_s, numbers_late)
    else:
        assert late_s - end_s > 0.5
        assert len(numbers["Prepare"]) == len(numbers_late["Prepare"]) + 1
        assert numbers["Prepare"][-1] > numbers["Compile"][-1], "no config waited for the final's worker"


def test_a_final_that_compares_nothing_gets_no_ready_worker() -> None:
    for count, has_final in ((1, True), (5, False)):
        result = run(plan_for(Route.APART, configs_per_worker=1, has_final=has_final), count)
        assert len(result.given("Prepare")) == count


def test_the_final_waits_for_a_nearly_ready_worker() -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Prepare" and worker.starts == 3:
            return [(3.0, worker.says("PhaseEntered", "load")), (0.1, worker.says("Ready", "load", modules=[]))]
        return None

    compared, sandbox, _ = compare(act, configs_per_worker=1, has_final=True)
    assert len(compared.rounds_ms) == 3
    fresh = [g.number for g in sandbox.given if g.do == "Prepare"][3]
    assert [g.number for g in sandbox.given if g.do == "Compare"] == [fresh]


@pytest.mark.parametrize("end", [-11, 1, None])
def test_the_final_takes_place_though_its_standby_worker_dies(end: int | None) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        return [(2.0, worker.ends(end))] if worker.do == "Prepare" and worker.starts == 3 else None

    compared, _, _ = compare(act, configs_per_worker=1, has_final=True)
    assert len(compared.rounds_ms) == 3


class Writing(FakeSandbox):
    """A sandbox whose compile workers leave an executable."""

    def _give(self, worker: FakeWorker, frame: codec.JsonObject, fds: Sequence[int]) -> None:
        super()._give(worker, frame, fds)
        if worker.do == "Compile" and fds:
            spool.write_parts(fds[0], [b"executable", b""])


def kept_by(*schedulers: Callable[[Clock, FakeSandbox, Fastest], Scheduler], act: Act) -> list[bool]:
    """Returns for four configs whether the last scheduler's final loads their executables."""
    clock = Clock()
    tasks, noting = noting_comparisons(act)
    sandbox, fastest = Writing(clock, noting), Fastest()
    configs: dict[int, Config] = {index: {"id": index} for index in range(4)}
    with contextlib.closing(fastest):
        for number, make in enumerate(schedulers):
            scheduler = make(clock, sandbox, fastest)
            scheduler.run(configs if number == 0 else {4: {"id": 4}})
        scheduler.compare(configs)
    return [entry.saved for entry in tasks[0].entries]


def one_of(route: Route) -> Callable[[Clock, FakeSandbox, Fastest], Scheduler]:
    def make(clock: Clock, sandbox: FakeSandbox, fastest: Fastest) -> Scheduler:
        def on_trial(index: int, trial: Trial, log: str) -> None:
            assert trial.outcome in (Outcome.OK, Outcome.SLOW)

        plan = plan_for(route, target=TARGET if route is Route.APART else None)
        return plan.scheduler(sandbox, on_trial=on_trial, clock=clock, fastest=fastest)

    return make


def test_the_final_loads_executables_after_a_confirmed_error() -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do != "Compile":
            return None
        return compiles(worker, program="the same" if worker.trial in (1, 3) else "")

    assert kept_by(one_of(Route.APART), one_of(Route.TOGETHER), act=act) == [True] * 4


def test_the_final_needs_no_new_worker_after_a_confirmation() -> None:
    clock = Clock()
    tasks, noting = noting_comparisons(lambda worker: None)
    sandbox, fastest = Writing(clock, noting), Fastest()
    configs: dict[int, Config] = {index: {"id": index} for index in range(3)}
    with contextlib.closing(fastest):
        first = one_of(Route.APART)(clock, sandbox, fastest)
        first.run(configs)
        last = one_of(Route.TOGETHER)(clock, sandbox, fastest)
        last.run({4: {"id": 4}})
        assert first.has_idle_worker
        before = set(sandbox.workers)
        assert first.compare(configs).rounds_ms.keys() == configs.keys()
        assert set(sandbox.workers) <= before
        assert len(tasks) == 1


def test_a_worker_that_died_under_another_scheduler_is_not_idle() -> None:
    clock = Clock()
    sandbox, fastest = Writing(clock, lambda worker: None), Fastest()
    with contextlib.closing(fastest):
        first = one_of(Route.APART)(clock, sandbox, fastest)
        first.run({index: {"id": index} for index in range(3)})
        assert first.has_idle_worker
        for number in list(sandbox.workers):
            sandbox.forget(number)
        assert not first.has_idle_worker


def test_with_an_exact_clock_slow_configs_evict_no_finalist() -> None:
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
def test_an_impossible_comparison_is_discarded(rounds_ms: object, forged: str) -> None:
    if forged == "warm_ms" and rounds_ms == [[], [], []]:
        return  # no final needs warm rounds
    good = [[1.0], [2.0], [3.0]]

    def forges(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compare":
            return None
        return [(0.1, worker.says("Compared", "measure", **{"rounds_ms": good, "warm_ms": good, forged: rounds_ms}))]

    compared, _, _ = compare(forges)
    assert compared == Final()


def test_a_comparison_that_hangs_ends_at_its_deadline() -> None:
    compared, sandbox, _ = compare(lambda worker: [] if worker.do == "Compare" else None)
    assert compared == Final()
    assert sandbox.killed


def compare_again(act: Act, *, ends_s: float, count: int = 3) -> tuple[Final, FakeSandbox, list[Any], float]:
    """Runs and compares configs, then compares them again for at most `ends_s` seconds; returns those it took too."""
    clock = Clock()
    tasks, noting = noting_comparisons(act)
    sandbox = FakeSandbox(clock, noting)
    plan = plan_for(Route.APART)
    scheduler = plan.scheduler(sandbox, on_trial=lambda *_: None, clock=clock, available_memory=lambda: 100 * GB)
    configs: dict[int, Config] = {index: {"id": index} for index in range(count)}
    try:
        scheduler.run(configs)
        scheduler.compare(configs)
        tasks.clear()
        began_s = clock()
        again = scheduler.compare_again(configs, began_s + ends_s)
        taken_s = clock() - began_s
    finally:
        scheduler.close()
    lease = Lease(plan.devices[0])
    assert lease.acquire(clock() + 1000)
    lease.release()
    return again, sandbox, tasks, taken_s


def test_a_final_is_repeated_in_a_fresh_worker_with_little_time() -> None:
    numbers: list[int] = []

    def noting(worker: FakeWorker) -> None:
        if worker.do == "Compare":
            numbers.append(worker.number)

    again, _, (task,), _ = compare_again(noting, ends_s=100)
    assert again.rounds_ms == {index: (index + 1.0,) * 5 for index in range(3)}
    assert len(set(numbers)) == len(numbers) == 2, "two workers, each fresh"
    assert 0 < task.budget_s < 100


def test_a_repeated_final_that_takes_too_long_or_fails_is_dropped() -> None:
    compared = list[int]()

    def second(steps: Callable[[FakeWorker], list[Step]]) -> Act:
        compared.clear()

        def act(worker: FakeWorker) -> list[Step] | None:
            if worker.do != "Compare":
                return None
            compared.append(worker.number)
            return steps(worker) if len(compared) > 1 else None

        return act

    again, sandbox, tasks, taken_s = compare_again(second(lambda worker: []), ends_s=3)
    assert (again, len(tasks)) == (Final(), 1)
    assert 3 <= taken_s < 3.5, "it hangs, and ends in time"
    assert sandbox.killed
    again, _, tasks, _ = compare_again(second(lambda worker: [(0.1, worker.ends(-9))]), ends_s=50)
    assert (again, len(tasks)) == (Final(), 1), "one try"
