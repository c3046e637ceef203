"""Errors raised without the device are confirmed on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from scripted import (
    TARGET,
    Act,
    FakeWorker,
    Scenario,
    Step,
    behaves,
    compiles,
    for_config,
    lacks_device_memory,
    plan_for,
    run,
    when,
)

from quarantune.scheduler import side_tasks
from quarantune.scheduler.plan import ConfigSource, Leftovers, Unconfirmed
from quarantune.values.configs import Config
from quarantune.values.trial import Outcome, Phase, Route, Trial

pytestmark = pytest.mark.usefixtures("worker_memory")  # scripted workers are not processes


def test_an_error_without_a_device_waits_for_confirmation() -> None:
    act = for_config(1, when("Compile", lambda worker: [(0.1, worker.raises("compile"))]))
    result = run(plan_for(Route.APART, target=TARGET, confirms=True), 3, act)
    assert set(result.trials) == {0, 2}
    error = result.leftovers.unconfirmed[1]
    assert error.trial.outcome is Outcome.ERROR
    assert error.log.startswith("log of ")

    without_target = run(plan_for(Route.APART), 3, act)
    assert without_target.outcomes == ["ok", "error", "ok"]


def test_an_error_raised_on_the_device_needs_no_confirmation() -> None:
    act = for_config(1, when("Measure", lambda worker: [(0.1, worker.raises("check"))]))
    result = run(plan_for(Route.APART, target=TARGET), 3, act)
    assert result.outcomes == ["ok", "error", "ok"]


def confirming(
    on_device: Callable[[FakeWorker], Sequence[Step]], *failing: int, places: Mapping[int, str] | None = None
) -> Act:
    """Makes some configs fail without a device; the workers that confirm them do `on_device`."""
    places = places or dict.fromkeys(failing, "here")

    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial is None:
            return on_device(worker)
        if worker.do == "Compile" and worker.trial in failing:
            raises = worker.raises("compile", place=places[worker.trial])
            return [(0.1, worker.says("PhaseEntered", "compile")), (0.1, raises)]
        return None

    return act


def confirming_plan(**changes: Any) -> Scenario:
    return plan_for(
        Route.APART, **{"target": TARGET, "confirms": True, "slots": 2, "configs_per_worker": 32, **changes}
    )


def raises_on_the_device(worker: FakeWorker, place: str = "here") -> list[Step]:
    return [
        (1.0, worker.says("PhaseEntered", "compile")),
        (0.2, worker.raises("compile", message="bad on the device", place=place)),
    ]


def test_the_first_error_is_confirmed_while_configs_continue() -> None:
    plan = confirming_plan()
    result = run(plan, 8, confirming(raises_on_the_device, 1, 3))
    assert result.leftovers.confirmed == {"here"}
    (only,) = [worker for worker in result.given("Compile") if worker.trial is None]
    assert only.device
    assert only.task.target is None
    begun = [worker.trial for worker in result.given("Compile")]
    assert 0 < begun.index(None) < len(begun) - 1
    first, second = (result.leftovers.unconfirmed[index].trial for index in begun if index in (1, 3))
    assert (first.route, first.device, first.message) == (
        Route.TOGETHER,
        plan.devices[0].name,
        "ValueError: bad on the device",
    )
    assert (second.route, second.device, second.message) == (Route.APART, "", "ValueError: bad")


def test_an_error_raised_last_is_confirmed_before_the_end() -> None:
    result = run(confirming_plan(), 3, confirming(raises_on_the_device, 2))
    assert result.leftovers.confirmed == {"here"}


def test_one_error_of_each_place_is_confirmed() -> None:
    def on_device(worker: FakeWorker) -> list[Step]:
        return compiles(worker) if worker.task.config["id"] == 1 else raises_on_the_device(worker, places[2])

    places = {1: "KeyError at a.py:1", 2: "ValueError at b.py:2", 4: "KeyError at a.py:1", 5: "ValueError at b.py:2"}
    result = run(confirming_plan(), 40, confirming(on_device, *places, places=places))
    workers = [worker.task.config["id"] for worker in result.given("Compile") if worker.trial is None]
    assert sorted(workers) == [1, 2]
    left = result.leftovers
    assert left.first_at == {places[1]: 1, places[2]: 2}
    assert left.confirmed == {places[2]}
    assert {index: error.place for index, error in left.unconfirmed.items()} == places


def test_the_config_of_the_same_program_fails_at_the_same_place() -> None:
    def act(worker: FakeWorker) -> Sequence[Step] | None:
        if worker.do == "Compile" and worker.trial is not None:
            lowered = worker.says("Lowered", "compile", program="the same")
            return [
                (0.1, worker.says("PhaseEntered", "compile")),
                (0.1, lowered),
                (0.5, worker.raises("compile", place="x")),
            ]
        return raises_on_the_device(worker) if worker.do == "Compile" else None

    result = run(confirming_plan(), 4, act)
    assert [error.place for error in result.leftovers.unconfirmed.values()] == ["x"] * 4


@pytest.mark.parametrize(
    "on_device",
    [
        pytest.param(compiles, id="it compiles there"),
        pytest.param(lambda worker: raises_on_the_device(worker, "elsewhere"), id="it fails elsewhere there"),
        pytest.param(lambda worker: [(0.1, worker.ends(-11))], id="it crashes there"),
        pytest.param(lambda worker: [(0.1, worker.says("PhaseEntered", "compile"))], id="it hangs there"),
        pytest.param(lambda worker: [(0.1, worker.raises("load"))], id="it cannot be loaded there"),
        pytest.param(lambda worker: [(0.1, worker.raises("load", outcome="device_oom"))], id="it lacks memory there"),
        pytest.param(lambda worker: [(0.1, worker.raises("compile", outcome="unfit"))], id="it reports nonsense there"),
    ],
)
def test_an_error_the_device_does_not_raise_is_not_confirmed(on_device: Callable[[FakeWorker], Sequence[Step]]) -> None:
    result = run(confirming_plan(), 5, confirming(on_device, 1, 3))
    assert not result.leftovers.confirmed
    assert {error.trial.route for error in result.leftovers.unconfirmed.values()} == {Route.APART}
    assert set(result.leftovers.unconfirmed) == {1, 3}
    assert result.outcomes == ["ok"] * 3


def test_a_config_that_lacked_the_confirmers_memory_runs_again() -> None:
    hangs = confirming(lambda worker: [(0.1, worker.says("PhaseEntered", "compile"))], 0)
    starved = for_config(1, lacks_device_memory, behaves)
    plan = confirming_plan(slots=1, compile_timeout_s=1000.0)
    result = run(plan, 3, lambda worker: hangs(worker) or (starved(worker) if worker.do == "Measure" else None))
    assert [result.trials[index].outcome for index in (1, 2)] == [Outcome.OK] * 2
    assert not result.leftovers.confirmed
    assert result.seconds < 100


@pytest.mark.parametrize("changes", [{"confirms": False}, {"target": None}], ids=str)
def test_without_a_plan_or_target_nothing_is_confirmed(changes: dict[str, Any]) -> None:
    result = run(confirming_plan(**changes), 3, confirming(raises_on_the_device, 1))
    assert all(worker.trial is not None for worker in result.given("Compile"))
    assert not result.leftovers.confirmed
    assert not result.leftovers.unconfirmed
    assert result.outcomes == ["ok", "error", "ok"]


def unconfirmed(**places: str) -> Leftovers:
    """Returns leftover configs that failed without the device, each at its place."""
    left = Leftovers()
    for name, place in places.items():
        config = {"id": int(name[1:])}
        trial = Trial(config=config, outcome=Outcome.ERROR, phase=Phase.COMPILE, message="without", route=Route.APART)
        left.add_unconfirmed(config["id"], Unconfirmed(trial, "log", place))
    return left


def settled(
    left: Leftovers, ends: Mapping[int, tuple[Outcome, Phase]], **elsewhere: str
) -> tuple[dict[int, Trial], list[list[int]]]:
    """Settles configs with the device outcomes `ends`; returns their trials and the configs of each run there.

    Errors of compiling keep their place there, except for configs in `elsewhere`.
    """
    trials: dict[int, Trial] = {}
    runs: list[list[int]] = []

    def finish(index: int, trial: Trial, log: str) -> None:
        trials.setdefault(index, trial)

    def run_there(configs: dict[int, Config], source: ConfigSource) -> Leftovers:
        runs.append(sorted(configs))
        places = {
            index: elsewhere.get(f"c{index}", left.unconfirmed[index].place)
            for index in configs
            if ends[index] == (Outcome.ERROR, Phase.COMPILE)
        }
        for index, config in configs.items():
            outcome, phase = ends[index]
            finish(index, Trial(config=config, outcome=outcome, phase=phase, message="with", route=Route.TOGETHER), "")
        return Leftovers(raised_at=places)

    side_tasks.settle_errors(left, finish, run_there)
    return trials, runs


def test_a_confirmed_error_makes_errors_of_its_place_final() -> None:
    error, ok = (Outcome.ERROR, Phase.COMPILE), (Outcome.OK, Phase.MEASURE)
    left = unconfirmed(c0="a", c1="b", c2="a", c3="b", c4="sure")
    left.confirmed = {"sure"}
    trials, runs = settled(left, {0: error, 1: ok, 3: ok})
    assert runs == [[0, 1], [3]]
    assert left.confirmed == {"sure", "a"}
    assert {index: (trial.outcome.value, trial.message) for index, trial in trials.items()} == {
        0: ("error", "with"),
        1: ("ok", "with"),
        2: ("error", "without"),
        3: ("ok", "with"),
        4: ("error", "without"),
    }


def test_another_error_on_the_device_confirms_nothing() -> None:
    error, ok = (Outcome.ERROR, Phase.COMPILE), (Outcome.OK, Phase.MEASURE)
    left = unconfirmed(c0="a", c1="a", c2="a")
    trials, runs = settled(left, {0: error, 1: ok, 2: error}, c0="b", c2="b")
    assert runs == [[0], [1, 2]]
    assert left.confirmed == set()
    assert [(trials[index].outcome.value, trials[index].message) for index in range(3)] == [
        ("error", "with"),
        ("ok", "with"),
        ("error", "with"),
    ]


def test_an_error_of_running_confirms_no_error_of_compiling() -> None:
    ran = (Outcome.ERROR, Phase.CHECK)
    trials, runs = settled(unconfirmed(c0="a", c1="a"), {0: ran, 1: ran})
    assert runs == [[0], [1]]
    assert all(trial.message == "with" for trial in trials.values())


def test_nothing_runs_if_every_error_is_confirmed() -> None:
    assert settled(Leftovers(), {}) == ({}, [])
    left = unconfirmed(c0="a")
    left.confirmed = {"a"}
    assert settled(left, {})[1] == []
