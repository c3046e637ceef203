"""Programs that share products wait for the first of them, because XLA leaves its kernels for the others."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

import pytest
from scripted import ROUTES, Act, FakeWorker, Step, plan_for, run

from quarantune.values.trial import Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes

COMPILE_S = 3.0


def compiles_products(
    products: Mapping[int, Sequence[str]],
    begun: list[int] | None = None,
    ends: Callable[[FakeWorker], list[Step]] | None = None,
) -> Act:
    """Makes configs compile for three seconds once they may proceed.

    Args:
        products: the products of each config.
        begun: receives the configs in the order of their compilations.
        ends: the steps of configs that do not compile.
    """

    def compiled(worker: FakeWorker) -> list[Step]:
        steps: list[Step] = [(COMPILE_S, worker.says("Compiled", "compile", compile_s=COMPILE_S, modules=[]))]
        return [*steps, (0.01, worker.ends())] if worker.task.last else steps

    def act(worker: FakeWorker) -> list[Step] | None:
        index = worker.trial
        if worker.do == "Compile" and index is not None:
            found = list(products[index])
            lowered = worker.says("Lowered", "compile", program=f"program {index}", products=found)
            steps: list[Step] = [(0.1, worker.says("PhaseEntered", "compile")), (0.1 + 0.01 * index, lowered)]
            return steps if found else [*steps, *compiled(worker)]
        if worker.do == "Proceed" and index is not None:
            if begun is not None:
                begun.append(index)
            return (ends or compiled)(worker)
        return None

    return act


@ROUTES
def test_programs_wait_for_the_one_with_most_of_their_products(route: Route) -> None:
    begun: list[int] = []
    result = run(plan_for(route), 3, compiles_products(dict.fromkeys(range(3), ("a", "b", "c")), begun))
    assert result.outcomes == ["ok"] * 3
    assert begun == [0, 1, 2]
    # The other two begin together after the first has compiled.
    assert 2 * COMPILE_S < result.seconds < 3 * COMPILE_S


@ROUTES
@pytest.mark.parametrize("other", [["x", "y", "z"], ["a", "x", "y"], []])
def test_programs_that_share_few_products_do_not_wait(route: Route, other: list[str]) -> None:
    result = run(plan_for(route), 2, compiles_products({0: ["a", "b", "c"], 1: other}))
    assert result.outcomes == ["ok"] * 2
    assert result.seconds < 2 * COMPILE_S


@ROUTES
def test_no_program_waits_for_products_already_tried(route: Route) -> None:
    products = {0: ["a", "b"], 1: ["a", "b"], 2: ["a", "b", "own"], 3: ["a", "b", "own"]}
    result = run(plan_for(route, slots=4), 4, compiles_products(products))
    assert result.outcomes == ["ok"] * 4
    # First 0; then 1 and 2; then 3, which waits for the extra product of 2.
    assert 3 * COMPILE_S < result.seconds < 4 * COMPILE_S


@ROUTES
def test_the_time_of_a_program_that_waits_does_not_count(route: Route) -> None:
    plan = plan_for(route, compile_timeout_s=COMPILE_S + 0.5)
    result = run(plan, 3, compiles_products(dict.fromkeys(range(3), ("a",))))
    assert result.outcomes == ["ok"] * 3


def hangs(worker: FakeWorker) -> list[Step]:
    return []


def crashes(worker: FakeWorker) -> list[Step]:
    return [(0.1, worker.ends(-int(signal.SIGSEGV)))]


def raises(worker: FakeWorker) -> list[Step]:
    return [(0.1, worker.raises("compile"))]


@ROUTES
@pytest.mark.parametrize(("end", "outcome"), [(hangs, "timeout"), (crashes, "crashed"), (raises, "error")])
def test_a_program_that_does_not_compile_delays_others_once(
    route: Route, end: Callable[[FakeWorker], list[Step]], outcome: str
) -> None:
    plan = plan_for(route, slots=4)
    result = run(plan, 4, compiles_products(dict.fromkeys(range(4), ("a",)), ends=end))
    assert result.outcomes == [outcome] * 4
    # The first alone until it ends, then all others at the same time.
    assert result.seconds < 3 * plan.plan.compile_timeout_s
