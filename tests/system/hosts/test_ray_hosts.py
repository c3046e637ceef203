"""Sweeps by Ray over hosts find the local winner, and name a node that cannot connect to the submitter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_fleets import ROUNDS, RayFleet, assert_won, fleet_of

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

pytest.importorskip("ray")

rounds = pytest.mark.parametrize("round_", ROUNDS)
LISTEN = ":8790-8799"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    with fleet_of(RayFleet, tmp_path_factory.mktemp("fleet"), "submits") as made:
        yield made


@rounds
def test_nodes_of_ray_on_several_hosts_tune_together(fleet: RayFleet, round_: int) -> None:
    swept = fleet.sweep(listen=LISTEN)
    assert_won(swept)
    assert swept.faults == []
    assert swept.machines == sorted(RayFleet.shifts_s)


@rounds
def test_a_firewall_before_one_node_is_named(fleet: RayFleet, round_: int) -> None:
    fleet.net.faults(("a", "submits", {"closed": [(8790, 8799)]}))
    swept = fleet.sweep(listen=LISTEN)
    fleet.heal()
    assert_won(swept)
    fleet.assert_named(swept, "a", remedy="to port 8790 of this machine")


@rounds
def test_a_slow_and_lossy_line_between_nodes_costs_no_config(fleet: RayFleet, round_: int) -> None:
    fleet.net.faults(("*", "*", {"delay_s": 0.05, "loss": 0.01}))
    swept = fleet.sweep()
    fleet.heal()
    assert_won(swept)


@rounds
def test_a_node_that_is_killed_costs_no_config(fleet: RayFleet, round_: int) -> None:
    swept = fleet.sweep(configs=128, at=8, then=fleet.net.hosts["a"].kill)
    fleet.heal("a")
    assert_won(swept, 128)
