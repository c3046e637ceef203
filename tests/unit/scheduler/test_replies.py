"""Replies that are impossible, repeated or late end only their sender or are ignored."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from scripted import (
    EVERY_WAY,
    GOOD,
    ROUTES,
    Clock,
    FakeSandbox,
    FakeWorker,
    Step,
    behaves,
    compiles,
    for_config,
    measured,
    measures,
    plan_for,
    run,
    when,
)

from quarantune.sandbox.messages import Raised
from quarantune.sandbox.template_messages import Ended
from quarantune.sandbox.workforce import Said
from quarantune.values.codec import DamageError
from quarantune.values.trial import Outcome, Route

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


@ROUTES
def test_messages_about_another_trial_are_dropped(route: Route) -> None:
    def confused(worker: FakeWorker) -> list[Step]:
        steps = behaves(worker)
        if worker.trial is None:
            return steps
        lies = [
            measured(worker, 0.001),
            worker.says("Compiled", "compile", compile_s=9.0, modules=[]),
            worker.raises("compile"),
        ]
        others = [Said(lie.number, {**lie.message, "trial": worker.trial + 1}) for lie in lies]
        others += [Said(lie.number, {**lie.message, "trial": None}) for lie in lies]
        others += [Said(lie.number, {k: v for k, v in lie.message.items() if k != "trial"}) for lie in lies]
        return [*((0.01, lie) for lie in others), *steps]

    result = run(plan_for(route), 4, confused)
    assert [trial.time_ms for _, trial in sorted(result.trials.items())] == [1.0, 2.0, 3.0, 4.0]
    assert {trial.compile_s for trial in result.trials.values()} == {1.0}


@ROUTES
def test_a_measurement_before_the_device_was_given_is_dropped(route: Route) -> None:
    def claims(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Compile":
            return None
        lie = measured(worker, 0.001)
        (first, second, *rest) = compiles(worker)
        return [first, (0.01, lie), second, *rest]

    result = run(plan_for(route), 2, claims)
    assert [result.trials[index].time_ms for index in range(2)] == [1.0, 2.0]


@ROUTES
def test_repeated_results_count_once(route: Route) -> None:
    def repeats(worker: FakeWorker) -> list[Step]:
        return [(delay, event) for delay, event in behaves(worker) for _ in range(3 if delay else 1)]

    def echoes(worker: FakeWorker) -> list[Step]:
        return [step for step in repeats(worker) if not isinstance(step[1], Ended)]

    assert run(plan_for(route), 5, echoes).outcomes == ["ok"] * 5


@ROUTES
def test_a_result_that_comes_after_the_deadline_is_too_late(route: Route) -> None:
    clock = Clock()
    act = for_config(0, when("Measure", lambda worker: measures(worker, seconds=2.0)))
    sandbox = FakeSandbox(clock, act, kill_s=1.0)  # the kill takes effect after the result
    result = run(plan_for(route), 2, clock=clock, sandbox=sandbox)
    assert result.outcomes == ["timeout", "ok"]


@EVERY_WAY
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Ready", {"modules": []}),
        ("Compiled", {"compile_s": 1.0, "modules": []}),
        ("PhaseEntered", {}),
        ("Probed", {"devices": []}),
        ("ReferenceComputed", {}),
    ],
)
def test_no_forged_frame_takes_the_deadline_from_a_measurement(
    route: Route, exclusive: bool, kind: str, more: dict[str, Any]
) -> None:
    def forges(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        forged = worker.says(kind, "measure", **more)
        return [(0.1, forged), (0.1, forged)]

    result = run(plan_for(route, exclusive=exclusive), 3, for_config(1, forges))
    assert result.outcomes == ["ok", "timeout", "ok"]


IMPLAUSIBLE: list[tuple[object, dict[str, Any]]] = [
    # Three dots stand for a field that is missing.
    ("Measured", {"samples_ms": ...}),
    ("Measured", {"samples_ms": []}),
    ("Measured", {"samples_ms": None}),
    ("Measured", {"samples_ms": 3}),
    ("Measured", {"samples_ms": [1.0, "quick"]}),
    ("Measured", {"samples_ms": [float("nan")]}),
    ("Measured", {"samples_ms": [float("inf")]}),
    ("Measured", {"samples_ms": [-1.0]}),
    ("Measured", {"samples_ms": [0.0]}),
    ("Measured", {"samples_ms": [1.0, 1e-300]}),
    ("Measured", {"samples_ms": [True]}),
    ("Measured", {"ranking_ms": 0.0}),
    ("Measured", {"ranking_ms": None}),
    ("Measured", {"cpu_ms": [0.0]}),
    ("Measured", {"cpu_ms": None}),
    ("Measured", {"clock": "sundial"}),
    ("Measured", {"samples_ms": [10**400]}),
    ("Measured", {"samples_ms": [[1.0]]}),
    ("Measured", {"modules": []}),
    ("PhaseEntered", {"phase": "lunch"}),
    ("PhaseEntered", {"phase": None}),
    ("PhaseEntered", {"phase": ["load"]}),
    ("PhaseEntered", {"phase": ...}),
    ("Failed", {"outcome": ...}),
    ("Failed", {"error": ...}),
    ("Failed", {"outcome": "broken"}),
    ("Failed", {"outcome": ["error"]}),
    *(("Failed", {"outcome": outcome.value}) for outcome in Outcome if outcome.value not in get_args(Raised)),
    ("Failed", {"outcome": "unfit"}),
    (["Measured"], {}),
    ("Nonsense", {}),
    (None, {}),
]


@ROUTES
@pytest.mark.parametrize(("kind", "changes"), IMPLAUSIBLE, ids=lambda part: str(part)[:60])
def test_an_impossible_forged_frame_ends_only_its_sender(route: Route, kind: object, changes: dict[str, Any]) -> None:
    def forges(worker: FakeWorker) -> list[Step] | None:
        if worker.do != "Measure":
            return None
        good = {"message": kind, "trial": worker.trial, "phase": "measure", **GOOD.get(str(kind), {})}
        forged = {name: value for name, value in {**good, **changes}.items() if value is not ...}
        return [(0.1, Said(worker.number, forged)), *measures(worker)]

    result = run(plan_for(route), 3, for_config(1, forges))
    assert result.outcomes == ["ok", "crashed", "ok"]
    assert "invalid message" in result.trials[1].message


@ROUTES
@pytest.mark.parametrize(
    "forged",
    [
        {"compile_s": "long", "modules": []},
        {"compile_s": float("nan"), "modules": []},
        {"compile_s": float("inf"), "modules": []},
        {"compile_s": 10**400, "modules": []},
        {"compile_s": 1.0},
        {"compile_s": 1.0, "modules": 3},
    ],
    ids=lambda forged: str(forged)[:60],
)
def test_a_forged_compile_result_ends_only_its_sender(route: Route, forged: dict[str, Any]) -> None:
    def forges(worker: FakeWorker) -> list[Step]:
        return [(0.1, worker.says("Compiled", "compile", **forged)), *compiles(worker)]

    result = run(plan_for(route), 3, for_config(1, forges))
    assert result.outcomes == ["ok", "crashed", "ok"]


@ROUTES
@pytest.mark.parametrize("do", ["Compile", "Measure"])
def test_a_damaged_stream_is_a_crash(route: Route, do: str) -> None:
    act = when(do, lambda worker: [(0.2, Said(worker.number, DamageError("not a frame")))])
    result = run(plan_for(route), 3, for_config(2, act))
    assert result.outcomes == ["ok", "ok", "crashed"]
    assert "not a frame" in result.trials[2].message
