"""The reference and the defaults come before the configs that are compared with them."""

from __future__ import annotations

import collections
import contextlib
import signal
from collections.abc import Callable, Sequence

import pytest
from scripted import (
    EVERY_WAY,
    ROUTES,
    TARGET,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    agrees,
    compiles,
    computes_reference,
    fake_devices,
    measured,
    plan_for,
    run,
    when,
)

from quarantune.devices.leases import Lease
from quarantune.sandbox import spool
from quarantune.sandbox.workforce import Said
from quarantune.scheduler.reference import Reference
from quarantune.values import codec
from quarantune.values.codec import DamageError
from quarantune.values.errors import ReferenceFailedError
from quarantune.values.trial import ArrayKind, Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


@pytest.mark.parametrize(
    ("steps", "complaint", "tries"),
    [
        (lambda w: [(0.1, w.raises("check", message="no reference"))], "error: ValueError: no reference", 1),
        (lambda w: [(0.1, w.ends(-int(signal.SIGSEGV)))], "crashed: the process was killed by SIGSEGV", 2),
        (lambda w: [(0.1, w.ends(None))], "lost: ", 2),
        (lambda w: [(0.1, w.says("PhaseEntered", "check"))], "timeout: it took longer than 7 s", 1),
        (lambda w: [(0.1, Said(w.number, DamageError("garbage")))], "crashed: .*garbage", 2),
    ],
)
@pytest.mark.parametrize("route", [Route.APART, Route.TOGETHER])
def test_a_reference_that_fails_says_why(
    steps: Callable[[FakeWorker], list[Step]], complaint: str, tries: int, route: Route
) -> None:
    plan = plan_for(route)
    with pytest.raises(ReferenceFailedError, match=complaint):
        run(plan, 3, when("ComputeReference", steps), reference=awaited(), tries=tries)
    lease = Lease(plan.devices[0])
    assert lease.acquire(1000)
    lease.release()


def awaited() -> Reference:
    reference = Reference()
    reference.is_coming = True
    return reference


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_reference_delays_compiling_only_if_exclusive(exclusive: bool) -> None:
    compiled_at, measured_at, given_at, clock = [], [], [], Clock()
    reference = awaited()

    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do in ("Compile", "Measure"):
            (compiled_at if worker.do == "Compile" else measured_at).append(clock())
            assert worker.do == "Compile" or reference.fds, "comparisons need a reference"
        if worker.do == "ComputeReference":
            given_at.append(clock() + 3.1)
            return computes_reference(worker, 3.0)
        return None

    with contextlib.closing(reference):
        plan = plan_for(Route.TOGETHER if exclusive else Route.APART, exclusive=exclusive)
        result = run(plan, 6, act, clock=clock, reference=reference)
        assert result.outcomes == ["ok"] * 6
        assert len(reference.fds) == 1
    assert min(measured_at) > given_at[0]
    assert (min(compiled_at) > given_at[0]) == exclusive
    if not exclusive:
        assert len([at for at in compiled_at if at < given_at[0]]) == 6, "all six compile before the reference"


def test_a_reference_of_other_shapes_ends_the_sweep() -> None:
    act = when("ComputeReference", lambda worker: computes_reference(worker, differs="one has 2 axes"))
    reference = awaited()
    with (
        contextlib.closing(reference),
        pytest.raises(ReferenceFailedError, match="one has 2 axes; return arrays of the"),
    ):
        run(plan_for(Route.APART), 3, act, reference=reference)


@pytest.mark.parametrize("status", [-int(signal.SIGSEGV), None])
def test_a_function_that_exits_when_traced_keeps_its_reference(status: int | None) -> None:
    act = when("ComputeReference", lambda worker: [*computes_reference(worker)[:2], (0.1, worker.ends(status))])
    with contextlib.closing(awaited()) as reference:
        assert run(plan_for(Route.APART), 3, act, reference=reference).outcomes == ["ok"] * 3


def test_shapes_that_take_too_long_are_not_waited_for() -> None:
    with contextlib.closing(awaited()) as reference:
        act = when("ComputeReference", lambda worker: computes_reference(worker)[:2])
        result = run(plan_for(Route.APART), 3, act, reference=reference)
        assert result.outcomes == ["ok"] * 3
        assert 5 < result.seconds < 20  # the deadline for compiling applies


def test_the_references_error_is_reported_without_any_config() -> None:
    def act(worker: FakeWorker) -> list[Step] | None:
        if worker.do == "Compile":
            return [(0.1, worker.raises("compile"))]
        fails = [(9.0, worker.raises("check", message="no reference"))]
        return fails if worker.do == "ComputeReference" else None

    with pytest.raises(ReferenceFailedError, match="no reference"):
        run(plan_for(Route.APART, timeout_s=20.0), 3, act, reference=awaited())


@EVERY_WAY
def test_the_defaults_are_measured_before_all_other_configs(
    route: Route, exclusive: bool, reference: Reference
) -> None:
    result = run(plan_for(route, exclusive=exclusive), 8, when("Measure", agrees), reference=reference)
    assert result.outcomes == ["ok"] * 8
    first, *others = result.given("Measure")
    assert first.trial == 5
    assert (first.task.references, first.task.standard, first.task.keeps) == (0, None, True)
    assert {(other.task.references, other.task.standard) for other in others} == {(1, 0)}


def test_standby_workers_learn_the_outputs_they_compare(reference: Reference) -> None:
    outputs = [{"shape": [4, 8], "dtype": "float16"}]

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Prepare":
            return [(3.0, worker.says("Ready", "load", modules=[]))]
        if worker.do == "Compile":
            lowered = worker.says("Lowered", "compile", program=f"program {worker.trial}", outputs=outputs)
            _, enters, _, *compiled = compiles(worker)
            return [enters, (0.2, lowered), *compiled]
        return agrees(worker) if worker.do == "Measure" else None

    plan = plan_for(Route.APART, target=TARGET, configs_per_worker=4)
    result = run(plan, 8, act, reference=reference)
    assert result.outcomes == ["ok"] * 8
    orders = collections.defaultdict(list)
    for worker in result.sandbox.given:
        orders[worker.number].append(worker.do)
    standby = [order for order in orders.values() if order[0] == "Prepare"]
    assert [order[:3] for order in standby] == [["Prepare", "Expect", "Measure"]] * len(standby)
    assert {worker.task.outputs for worker in result.given("Expect")} == {(ArrayKind((4, 8), "float16"),)}


def test_later_standby_workers_get_compiled_comparisons(reference: Reference) -> None:
    lowered = {"outputs": [{"shape": [4, 8], "dtype": "float16"}]}

    loaded_by_expect: list[int] = []

    class Writing(FakeSandbox):
        def _give(self, worker: FakeWorker, frame: codec.JsonObject, fds: Sequence[int]) -> None:
            super()._give(worker, frame, fds)
            if worker.do == "Expect" and fds:
                loaded_by_expect.append(worker.number)
                spool.write(fds[0], b"programs")

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile":
            _, enters, _, *compiled = compiles(worker)
            return [enters, (0.2, worker.says("Lowered", "compile", program=f"{worker.trial}", **lowered)), *compiled]
        return agrees(worker) if worker.do == "Measure" else None

    clock = Clock()
    sandbox = Writing(clock, act)
    plan = plan_for(Route.APART, target=TARGET, configs_per_worker=1)
    assert run(plan, 16, clock=clock, sandbox=sandbox, reference=reference).outcomes == ["ok"] * 16
    prepared = [given.task.has_programs for given in sandbox.given if given.do == "Prepare"]
    assert prepared == sorted(prepared), "workers that start before the programs compile their own"
    assert 0 < sum(prepared) < 16
    assert len(loaded_by_expect) <= 16 - sum(prepared), "no worker loads them twice"


def test_a_worker_that_dies_after_its_sweep_leaves_no_file_open(reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do != "Measure":
            return None
        if worker.task.checked:
            return [(0.2, measured(worker))]
        first_run = {"run_ms": 1.0, "cpu_ms": 1.0, "is_disturbed": False, "judgement": {"group": 0}}
        return [(0.2, worker.says("FirstRun", "check", **first_run))]

    clock = Clock()
    sandbox = FakeSandbox(clock, act, kill_s=100.0)
    result = run(plan_for(Route.TOGETHER), 2, clock=clock, sandbox=sandbox, reference=reference)
    assert result.outcomes == ["ok"] * 2  # and `run` checks the number of descriptors


@EVERY_WAY
def test_lost_defaults_run_first_again(route: Route, exclusive: bool, reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial == 5 and worker.starts == 0:
            return [(20.0, worker.ends(None))]  # all places for waiting configs are taken then
        return agrees(worker) if worker.do == "Measure" else None

    plan = plan_for(route, exclusive=exclusive, parked=2)
    result = run(plan, 12, act, reference=reference)
    assert result.outcomes == ["ok"] * 12
    assert result.given("Measure")[0].trial == 5


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_outputs_are_compared_singly_if_the_defaults_fail(route: Route, do: str, reference: Reference) -> None:
    clock = Clock()
    at_once: list[int] = []

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Measure":
            at_once.append(len(sandbox._measuring))
        if worker.trial == 5 and worker.do == do:
            return [(0.1, worker.raises("compile" if do == "Compile" else "check"))]
        return agrees(worker) if worker.do == "Measure" else None

    sandbox = FakeSandbox(clock, act)
    plan = plan_for(route, devices=fake_devices(2), parked=8)
    result = run(plan, 8, clock=clock, sandbox=sandbox, reference=reference)
    assert result.outcomes == ["ok"] * 5 + ["error"] + ["ok"] * 2
    assert set(at_once) == {1}
    tasks = [worker.task for worker in result.given("Measure") if worker.trial != 5]
    assert {task.standard for task in tasks} == {None}
    assert {task.best_median_ms for task in tasks} == {None}, "the fastest may be wrong"


def test_other_configs_continue_without_unfit_defaults(reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial == 5:
            return [(3.0, worker.raises("compile", outcome="unfit", message="its dots"))]
        return agrees(worker) if worker.do == "Measure" else None

    result = run(plan_for(Route.APART), 6, act, reference=reference)
    assert 5 in result.leftovers.unfit
    assert set(result.outcomes) == {"ok"}


def test_a_config_with_the_defaults_program_replaces_them(reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial in (0, 5):
            return compiles(worker, 2.0 if worker.trial == 5 else 1.0, program="theirs")
        return agrees(worker) if worker.do == "Measure" else None

    result = run(plan_for(Route.TOGETHER), 6, act, reference=reference)
    assert result.outcomes == ["ok"] * 6
    assert result.given("Measure")[0].trial == 0
    assert not result.given("Measure", 5)


@pytest.mark.parametrize("group", [7, -3, "0", 0.0, [0]])
def test_a_config_that_agrees_with_a_missing_output_crashed(group: object, reference: Reference) -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do != "Measure":
            return None
        return [(0.2, measured(worker, judgement={"group": group if worker.trial == 2 else 0}))]

    result = run(plan_for(Route.TOGETHER), 6, act, reference=reference)
    assert result.outcomes == ["ok", "ok", "crashed", "ok", "ok", "ok"]
    assert "invalid message" in result.trials[2].message
