"""The conditions of a sweep decide the order of its routes."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import TARGET

from quarantune.scheduler.plan import Mode
from quarantune.scheduler.routes import choosing
from quarantune.scheduler.routes.base import Conditions
from quarantune.values.trial import Route


def conditions(platform: str, mode: Mode = Mode.IN_WORKERS, **changes: Any) -> Conditions:
    given: dict[str, Any] = {
        "is_jitted": True,
        "is_spread": False,
        "is_taken": False,
        "target": None if platform == "cpu" else TARGET,
        "devices": 1,
        "slots": 4,
        "each": None,
    }
    return Conditions(platform=platform, mode=mode, **given | changes)


def routes_of(
    given: Conditions, *, unfit: tuple[Route, ...] = (), count: int = 8, is_closed: bool = True
) -> tuple[str | None, list[str]]:
    """Returns the names of the route without the device and of the routes with it."""
    apart = choosing.without_device(given, unfit, is_closed=is_closed)
    later = choosing.with_device(given, unfit, count=count, is_closed=is_closed)
    return None if apart is None else type(apart).__name__, [type(route).__name__ for route in later]


@pytest.mark.parametrize(
    ("platform", "changes", "expected"),
    [
        ("cuda", {}, ("Apart", ["HandedOver", "Together"])),
        ("cuda", {"target": None}, (None, ["HandedOver", "Together"])),
        ("cuda", {"each": 1}, ("Apart", ["Together"])),
        ("cuda", {"is_jitted": False}, (None, ["Together"])),
        ("cuda", {"is_spread": True, "devices": 2}, (None, ["Together"])),
        ("tpu", {}, ("Apart", ["Together"])),
        ("cpu", {}, (None, ["Together"])),
        ("cpu", {"each": 4}, ("ApartInTurns", ["Together"])),
    ],
)
def test_workers_take_the_routes_that_their_device_allows(
    platform: str, changes: dict[str, Any], expected: tuple[str | None, list[str]]
) -> None:
    assert routes_of(conditions(platform, **changes)) == expected


@pytest.mark.parametrize(
    ("platform", "mode", "changes", "expected"),
    [
        ("cpu", Mode.MEASURING_HERE, {}, ("CompiledApart", ["MeasuredHere"])),
        ("cuda", Mode.MEASURING_HERE, {}, ("CompiledApart", ["MeasuredHere"])),
        ("cuda", Mode.MEASURING_HERE, {"target": None}, (None, ["MeasuredHere"])),
        ("tpu", Mode.MEASURING_HERE, {"is_taken": True}, ("CompiledApart", ["Here"])),
        ("cpu", Mode.HERE, {}, (None, ["Here"])),
        ("cpu", Mode.COMPILING, {}, ("CompiledOnlyApart", ["CompiledOnly"])),
        ("tpu", Mode.COMPILING, {"is_taken": True}, ("CompiledOnlyApart", [])),
    ],
)
def test_the_mode_decides_what_this_process_does(
    platform: str, mode: Mode, changes: dict[str, Any], expected: tuple[str | None, list[str]]
) -> None:
    assert routes_of(conditions(platform, mode, **changes)) == expected


@pytest.mark.parametrize("is_spread", [False, True])
def test_a_check_compiles_for_one_device(is_spread: bool) -> None:
    apart, _ = routes_of(conditions("cuda", Mode.CHECKING, is_spread=is_spread))
    assert apart == "CompileCheck"


def test_a_route_that_no_config_could_take_is_not_tried_again() -> None:
    assert routes_of(conditions("cuda"), unfit=(Route.APART,)) == (None, ["HandedOver", "Together"])
    assert routes_of(conditions("cuda"), unfit=(Route.APART, Route.HANDED_OVER)) == (None, ["Together"])


def test_a_lone_config_is_handed_over_only_in_a_search() -> None:
    assert routes_of(conditions("cuda"), count=1)[1] == ["Together"]
    assert routes_of(conditions("cuda"), count=1, is_closed=False)[1] == ["HandedOver", "Together"]


@pytest.mark.parametrize(
    ("platform", "changes", "count", "expected"),
    [
        ("cuda", {}, 8, "Cheaply"),
        ("cuda", {}, 7, None),
        ("cuda", {"ranks": False}, 8, None),
        ("cuda", {"target": None}, 8, None),
        ("cuda", {"each": 1}, 8, None),
        ("cuda", {"is_spread": True, "devices": 2}, 8, None),
        ("cuda", {"is_jitted": False}, 8, None),
        ("cuda", {"mode": Mode.MEASURING_HERE}, 8, None),
        ("cuda", {"mode": Mode.COMPILING}, 8, None),
        ("rocm", {}, 8, None),
        ("tpu", {}, 8, None),
        ("cpu", {"each": 4}, 8, None),
    ],
)
def test_ranking_needs_workers_that_compile_for_nvidia(
    platform: str, changes: dict[str, Any], count: int, expected: str | None
) -> None:
    given = conditions(platform, **{"ranks": True, **changes})
    route = choosing.cheaply(given, (), count=count, is_closed=True)
    assert (None if route is None else type(route).__name__) == expected
    search = choosing.cheaply(given, (), count=1, is_closed=False)
    assert (search is None) is (expected is None and count == 8)


def test_programs_that_cannot_leave_their_process_are_not_ranked() -> None:
    given = conditions("cuda", ranks=True)
    assert choosing.cheaply(given, [Route.APART], count=9, is_closed=True) is not None
    assert choosing.cheaply(given, [Route.HANDED_OVER], count=9, is_closed=True) is None


def test_errors_of_ranking_need_no_confirmation() -> None:
    given = conditions("cuda", ranks=True)
    apart, cheaply = (
        choosing.without_device(given, (), is_closed=True),
        choosing.cheaply(given, (), count=9, is_closed=True),
    )
    assert apart is not None
    assert cheaply is not None
    assert (apart.confirms, cheaply.confirms) == (True, False)
