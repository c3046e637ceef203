"""Sweeps by Dask over hosts find the local winner, and name every fault of the network in time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_fleets import ALL_PORTS, ROUNDS, TOLD_S, DaskFleet, assert_won, fleet_of

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

pytest.importorskip("distributed")

OLD = "import quarantune._version as v\nv.__version__ = '0.0.1'"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskFleet]:
    with fleet_of(DaskFleet, tmp_path_factory.mktemp("fleet"), "head", "submits", "d") as made:
        assert made.sweep(is_here=True).best == 0
        yield made


rounds = pytest.mark.parametrize("round_", ROUNDS)


@rounds
def test_a_whole_network_needs_no_word(fleet: DaskFleet, round_: int) -> None:
    swept = fleet.sweep()
    assert_won(swept)
    assert swept.faults == []


@rounds
def test_a_firewall_before_one_worker_is_named(fleet: DaskFleet, round_: int) -> None:
    fleet.net.faults(("a", "submits", {"closed": [ALL_PORTS]}))
    swept = fleet.sweep()
    fleet.heal()
    assert_won(swept)
    fleet.assert_named(swept, "a")


@rounds
def test_a_firewall_before_all_workers_is_named(fleet: DaskFleet, round_: int) -> None:
    fleet.net.faults(*((name, "submits", {"closed": [ALL_PORTS]}) for name in DaskFleet.shifts_s))
    swept = fleet.sweep()
    fleet.heal()
    assert_won(swept)
    fleet.assert_named(swept, *DaskFleet.shifts_s)


@rounds
def test_a_rule_for_the_chosen_ports_suffices(fleet: DaskFleet, round_: int) -> None:
    fleet.net.faults(*((name, "submits", {"closed": [(1, 8789), (8800, 65_535)]}) for name in DaskFleet.shifts_s))
    swept = fleet.sweep(listen=f"{fleet.net.addresses['submits']}:8790-8799")
    closed = fleet.sweep(listen=":8800-8810")
    fleet.heal()
    assert_won(swept)
    assert swept.faults == []
    assert_won(closed)
    fleet.assert_named(closed, *DaskFleet.shifts_s, remedy="to port 8800 of this machine")


@rounds
def test_a_firewall_in_the_other_direction_is_no_matter(fleet: DaskFleet, round_: int) -> None:
    fleet.net.faults(*(("submits", name, {"closed": [ALL_PORTS]}) for name in DaskFleet.shifts_s))
    swept = fleet.sweep()
    fleet.heal()
    assert_won(swept)
    assert swept.faults == []


@rounds
@pytest.mark.parametrize("fault", [{"delay_s": 0.15}, {"loss": 0.03}, {"delay_s": 0.05, "loss": 0.02}], ids=str)
def test_a_bad_line_costs_no_config(fleet: DaskFleet, round_: int, fault: dict[str, Any]) -> None:
    fleet.net.faults(("*", "*", fault))
    swept = fleet.sweep()
    fleet.heal()
    assert_won(swept)
    assert not swept.about("died")


@rounds
def test_a_partition_that_heals_repeats_nothing(fleet: DaskFleet, round_: int) -> None:
    healed = threading.Timer(6.0, fleet.net.faults)

    def part() -> None:
        fleet.net.apart("submits", "a")
        healed.start()

    swept = fleet.sweep(at=8, then=part)
    healed.join()
    assert_won(swept)
    assert not swept.about("died")


@rounds
def test_a_partition_that_stays_costs_no_config(fleet: DaskFleet, round_: int) -> None:
    swept = fleet.sweep(configs=128, at=8, then=lambda: fleet.net.apart("submits", "a"))
    fleet.heal("a")
    assert_won(swept, 128)


@rounds
def test_a_host_that_loses_power_costs_no_config(fleet: DaskFleet, round_: int) -> None:
    def lose() -> None:
        fleet.net.faults(("a", "*", {"is_cut": True}), ("*", "a", {"is_cut": True}))
        fleet.net.hosts["a"].kill()

    swept = fleet.sweep(configs=128, at=8, then=lose)
    fleet.heal("a")
    assert_won(swept, 128)


@rounds
def test_a_host_whose_processes_are_killed_costs_no_config(fleet: DaskFleet, round_: int) -> None:
    swept = fleet.sweep(configs=128, at=8, then=fleet.net.hosts["b"].kill)
    fleet.heal("b")
    assert_won(swept, 128)


@rounds
def test_a_host_with_another_version_is_named(fleet: DaskFleet, round_: int) -> None:
    fleet.worker("d", OLD)
    swept = fleet.sweep()
    fleet.net.hosts["d"].kill()
    assert_won(swept)
    assert all(at_s < TOLD_S for at_s, _ in swept.about("d takes no part: it has quarantune 0.0.1"))
    assert "d" not in swept.machines


@rounds
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_host_of_another_kind_is_named(fleet: DaskFleet, round_: int) -> None:
    fleet.worker("d", before=("taskset", "-c", str(min(os.sched_getaffinity(0)))))
    swept = fleet.sweep()
    fleet.net.hosts["d"].kill()
    assert_won(swept)
    assert all(at_s < TOLD_S for at_s, _ in swept.about("d takes no part: it has"))
    assert "d" not in swept.machines


def test_hosts_with_ipv6_alone_are_a_fleet(tmp_path: Path) -> None:
    with fleet_of(DaskFleet, tmp_path, "head", "submits", family=6) as fleet:
        for _ in ROUNDS:
            swept = fleet.sweep()
            assert_won(swept)
            assert swept.faults == []
            assert swept.machines == sorted(DaskFleet.shifts_s)


def test_a_lost_scheduler_is_named(tmp_path: Path) -> None:
    with fleet_of(DaskFleet, tmp_path, "head", "submits") as fleet:
        swept = fleet.sweep(configs=128, at=8, then=fleet.net.hosts["head"].kill)
        assert "could not run a shard, twice" not in swept.error or "lost the scheduler" in swept.error, swept
        assert "trials so far are kept" in swept.error
