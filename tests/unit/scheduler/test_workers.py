"""Workers take as many configs as they may, and a used worker's failure is repeated in a fresh one."""

from __future__ import annotations

import collections
import itertools
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from scripted import (
    TARGET,
    Act,
    Clock,
    FakeSandbox,
    FakeWorker,
    Result,
    Scenario,
    Step,
    behaves,
    compiled_only,
    compiles,
    fake_devices,
    for_config,
    lacks_device_memory,
    measures,
    plan_for,
    run,
    when,
)

from quarantune.devices.discovery import Device
from quarantune.sandbox.messages import CompileAlone
from quarantune.sandbox.workforce import Said
from quarantune.values.codec import DamageError
from quarantune.values.trial import CompileTarget, Outcome, Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


def test_the_next_worker_is_made_ready_while_one_measures() -> None:
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
def test_a_used_compile_workers_failure_is_repeated_fresh(ending: str) -> None:
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


def test_compile_workers_that_often_end_take_one_config_each() -> None:
    def fails(worker: FakeWorker) -> list[Step] | None:
        if int(worker.trial or 0) % 2 == 0:
            return None
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.ends(-11))]

    result = run(plan_for(Route.APART, slots=1, compiles_per_worker=100), 40, when("Compile", fails))
    assert result.outcomes == ["ok", "crashed"] * 20
    assert len(result.given("Compile")) < 40 + 5, "few failures are repeated"


def raising(places: Mapping[int, str]) -> Act:
    """Makes configs raise while they compile, each at a place; their workers continue if they may."""

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or worker.trial not in places:
            return None
        failed = worker.raises("compile", place=places[worker.trial], goes_on=not worker.task.last, traceback="tb")
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, failed)]

    return act


@pytest.mark.parametrize("compiles_per_worker", [3, 100])
@pytest.mark.parametrize("target", [None, TARGET])
def test_an_exception_at_a_known_place_is_not_repeated(compiles_per_worker: int, target: CompileTarget | None) -> None:
    plan = plan_for(Route.APART, slots=1, compiles_per_worker=compiles_per_worker, target=target)
    result = run(plan, 40, raising(dict.fromkeys(range(1, 40, 2), "here")))
    left = result.leftovers.unconfirmed
    ended = {index: trial.outcome.value for index, trial in result.trials.items()}
    ended |= {index: error.trial.outcome.value for index, error in left.items()}
    assert [ended[index] for index in range(40)] == ["ok", "error"] * 20
    assert len(result.given("Compile")) == 41, "only the first, raised in a used worker, is repeated"
    taken = collections.Counter(worker.number for worker in result.given("Compile"))
    assert len(taken) == 2 if compiles_per_worker == 100 else 14 <= len(taken) <= 15
    assert result.sandbox.most_compiling == 1
    logs = {index: error.log for index, error in left.items()}
    assert all(log.endswith(f": [{index}] tb") for index, log in logs.items()), "a log has only its config's output"


@pytest.mark.parametrize("still_works", [True, False])
def test_a_measuring_worker_survives_a_repeated_exception(still_works: bool) -> None:
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
    assert len(repeated) == 2, "one failure of each place is repeated"
    assert 9 in repeated
    workers = {worker.number for worker in result.given("Measure")}
    assert len(workers) == 3 if still_works else len(workers) > 10


@pytest.mark.parametrize("is_check", [True, False])
def test_workers_that_only_compile_take_several_configs(is_check: bool) -> None:
    plan = compiled_only(is_check=is_check, slots=1, compiles_per_worker=4, target=TARGET, confirms=not is_check)
    result = run(plan, 12, raising(dict.fromkeys((2, 5, 7), "here")))
    left = result.leftovers.unconfirmed
    assert sorted(left) == ([] if is_check else [2, 5, 7])
    ended = {index: trial.outcome.value for index, trial in result.trials.items()}
    ended |= {index: error.trial.outcome.value for index, error in left.items()}
    assert sorted(index for index, outcome in ended.items() if outcome == "error") == [2, 5, 7]
    assert len(ended) == 12
    assert all(isinstance(worker.task, CompileAlone) is is_check for worker in result.given("Compile"))
    taken = collections.Counter(worker.number for worker in result.given("Compile"))
    assert sum(taken.values()) == 13, "only the first exception, raised in a used worker, is repeated"
    assert len(taken) == 4
    assert not result.given("Prepare")


def test_an_exception_at_another_place_is_repeated_fresh() -> None:
    plan = plan_for(Route.APART, slots=1, compiles_per_worker=100)
    result = run(plan, 12, raising({1: "a", 3: "a", 5: "b", 7: "b", 9: "a", 10: ""}))
    assert sorted(i for i, trial in result.trials.items() if trial.outcome is Outcome.ERROR) == [1, 3, 5, 7, 9, 10]
    tries = collections.Counter(worker.trial for worker in result.given("Compile"))
    assert {index: count for index, count in tries.items() if count > 1} == {1: 2, 5: 2, 10: 2}


def test_a_fatal_exception_at_a_known_place_is_not_repeated() -> None:
    def ends_its_worker(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or worker.trial not in (0, 3):
            return None
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.raises("compile", place="here"))]

    result = run(plan_for(Route.APART, slots=1, compiles_per_worker=100), 6, ends_its_worker)
    assert result.outcomes == ["error", "ok", "ok", "error", "ok", "ok"]
    assert len(result.given("Compile")) == 6


def test_a_worker_that_survives_another_failure_is_ended() -> None:
    def claims(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile" or worker.trial != 1:
            return None
        failed = worker.raises("load", outcome="device_oom" if worker.starts else "error", place="here", goes_on=True)
        return [(0.1, worker.says("PhaseEntered", "load")), (0.1, failed)]

    result = run(plan_for(Route.APART, slots=1, compiles_per_worker=100), 4, claims)
    assert result.outcomes == ["ok", "device_oom", "ok", "ok"]
    numbers = [worker.number for worker in result.given("Compile") if worker.trial == 1]
    assert set(numbers) <= set(result.sandbox.killed)


def reusing(**changes: Any) -> Scenario:
    return plan_for(Route.TOGETHER, **{"compiles_per_worker": 100, "slots": 2, **changes})


def one_device(one_owner: bool) -> tuple[Device, ...]:
    return (Device("tpu", f"fake {uuid.uuid4()}"),) if one_owner else fake_devices(1)


def workers_of(result: Result, trial: int) -> list[int]:
    """Returns the workers that compiled a config, in order."""
    return [worker.number for worker in result.given("Compile") if worker.trial == trial]


def test_configs_compiled_with_their_device_end_once_each() -> None:
    result = run(compiled_only(with_device=True), 8)
    assert result.outcomes == ["ok"] * 8
    assert len(result.given("Compile")) == 8


@pytest.mark.parametrize("one_owner", [False, True])
def test_one_worker_with_its_device_runs_many_configs(one_owner: bool) -> None:
    plan = reusing(devices=one_device(one_owner), slots=1 if one_owner else 2)
    result = run(plan, 40)
    assert result.outcomes == ["ok"] * 40
    assert len({worker.number for worker in result.given("Compile")}) <= (1 if one_owner else plan.numbers.parked)


def test_a_worker_with_its_device_takes_a_limited_number() -> None:
    result = run(reusing(compiles_per_worker=5), 40)
    assert result.outcomes == ["ok"] * 40
    numbers = collections.Counter(worker.number for worker in result.given("Compile"))
    assert max(numbers.values()) == 5


@pytest.mark.parametrize("one_owner", [False, True])
@pytest.mark.parametrize("do", ["Compile", "Measure"])
@pytest.mark.parametrize("end", [-11, -9, 0], ids=["SIGSEGV", "SIGKILL", "exit"])
def test_a_config_that_ends_a_used_worker_is_repeated_fresh(do: str, end: int, one_owner: bool) -> None:
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


def test_a_known_exception_leaves_its_worker_to_the_next_config() -> None:
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
def test_a_config_that_lacked_memory_runs_without_idle_workers(one_owner: bool) -> None:
    def takes_memory(worker: FakeWorker) -> list[Step] | None:
        if worker.starts or worker.trial != 2 or worker.do != "Compile":
            return None
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.ends(-9))]

    sandbox_kills = iter([0, 1, *[1] * 1000])
    plan = reusing(is_share=True, devices=one_device(one_owner), slots=1 if one_owner else 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quarantune.host.machine.oom_kills", lambda: next(sandbox_kills))
        result = run(plan, 8, takes_memory)
    assert result.outcomes == ["ok"] * 8


def test_a_config_that_lacked_device_memory_runs_alone_once() -> None:
    def lacks_memory(worker: FakeWorker) -> list[Step] | None:
        is_alone = [*sandbox.workers] == [worker.number]
        if worker.do != "Measure" or worker.trial not in (2, 3) or (is_alone and worker.trial == 2):
            return None
        return lacks_device_memory(worker)

    clock = Clock()
    sandbox = FakeSandbox(clock, lacks_memory)
    result = run(reusing(), 12, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["ok"] * 3 + ["device_oom"] + ["ok"] * 8
    assert len(workers_of(result, 3)) == 2


def test_a_config_alone_does_not_wait_for_compile_workers() -> None:
    def takes_memory(worker: FakeWorker) -> list[Step] | None:
        if worker.starts:
            return None
        return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, worker.ends(-9))]

    sandbox_kills = iter([0, 1, *[1] * 1000])
    plan = plan_for(Route.APART, slots=2, compiles_per_worker=100, is_share=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quarantune.host.machine.oom_kills", lambda: next(sandbox_kills))
        result = run(plan, 6, when("Compile", for_config(1, takes_memory)))
    assert result.outcomes == ["ok"] * 6


@pytest.mark.parametrize(("configs_per_worker", "shared"), [(1, ["jax.numpy"]), (100, [])])
def test_many_measuring_workers_share_their_modules(configs_per_worker: int, shared: list[str]) -> None:
    plan = plan_for(Route.APART, configs_per_worker=configs_per_worker)
    prepares = when("Prepare", lambda worker: [(0.1, worker.says("Ready", "load", modules=["jax.numpy"]))])
    assert run(plan, 1, prepares).sandbox.shared == shared


def test_modules_that_a_worker_had_to_import_are_shared() -> None:
    result = run(plan_for(Route.TOGETHER), 1, when("Compile", lambda w: compiles(w, modules=["jax.numpy"])))
    assert result.sandbox.shared == ["jax.numpy"]


TROUBLES: dict[str, Callable[[FakeWorker], list[Step]]] = {
    "raises": lambda worker: [(0.1, worker.raises("measure"))],
    "dies": lambda worker: [(0.1, worker.ends(-int(signal.SIGSEGV)))],
    "hangs": lambda worker: [],
    "garbles": lambda worker: [(0.1, Said(worker.number, DamageError("garbage")))],
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("exclusive", [True, False])
def test_a_used_workers_failure_counts_if_a_fresh_one_repeats_it(trouble: str, devices: int, exclusive: bool) -> None:
    """Configs 2 and 5 fail in processes that have measured another; 7 fails everywhere."""
    plan = plan_for(Route.APART, slots=1, configs_per_worker=100, devices=fake_devices(devices), exclusive=exclusive)

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        fails = worker.trial == 7 or (worker.trial in (2, 5) and worker.measured > 0)
        return TROUBLES[trouble](worker) if worker.do == "Measure" and fails else None

    result = run(plan, 9, act)
    expected = {"raises": "error", "hangs": "timeout"}.get(trouble, "crashed")
    assert result.outcomes == ["ok"] * 7 + [expected, "ok"]
    last_try = result.given("Measure", 7)[-1]
    assert last_try.measured == 0, "a fresh worker decides"
    assert len(result.given("Measure", 7)) <= 2


@pytest.mark.parametrize("trouble", TROUBLES)
def test_any_trouble_retires_a_measuring_worker(trouble: str) -> None:
    act = for_config(0, when("Measure", TROUBLES[trouble]))
    result = run(plan_for(Route.APART, slots=1, configs_per_worker=100), 3, act)
    assert result.outcomes[1:] == ["ok", "ok"]
    troubled, *others = [worker.number for worker in result.given("Measure")]
    assert troubled not in others


def test_a_used_worker_that_dies_idle_does_not_blame_its_device() -> None:
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
