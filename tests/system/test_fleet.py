"""The submitter of a sweep on many machines costs little per config, needs little memory, and lets no machine wait."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest
from helpers import ROOT, python

from quarantune.engine import shards

SCRIPT = ROOT / "examples" / "benchmarks" / "fleet.py"
MEASURE = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import fleet
print(json.dumps(dataclasses.asdict(fleet.measure(workers=40, configs=18_000, trial_s=0.02))))
"""


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(300)
def test_a_sweep_on_many_machines_costs_its_submitter_little(tmp_path: Path) -> None:
    if not SCRIPT.exists():
        pytest.skip("a source distribution may leave the benchmarks out")
    report = json.loads(python("-c", MEASURE, SCRIPT.parent, JAX_PLATFORMS="cpu"))
    assert report["configs"] == 18_000, "each has exactly one trial"
    assert report["is_best"], "the final on one machine finds the fastest of all"
    assert report["cpu_ms"] < 2
    assert report["growth_bytes"] < 5 * report["record_bytes"], "memory holds the trials and little else"
    # Further shards wait in the engine's queue, so that no machine waits for the submitter. One process measures both
    # times, so a busy machine delays both alike.
    assert report["idle_s"] <= report["start_s"] + report["longest_round_trip_s"]


@pytest.mark.parametrize(
    ("configs", "machines", "largest", "last"), [(64, 2, 16, 16), (300, 10, 16, 15), (100_000, 1000, 64, 16)]
)
def test_shards_are_large_at_first_and_small_at_the_end(configs: int, machines: int, largest: int, last: int) -> None:
    pending = collections.deque(shards.partition(range(configs)))
    given: list[shards.Shard] = []
    while pending:
        given.append(shards.joined(pending, shards.largest(configs), min(machines, len(given))))
    sizes = [len(shard.indices) for shard in given]
    assert (sizes[0], sizes[-1]) == (largest, last)
    assert sorted(index for shard in given for index in shard.indices) == list(range(configs))
    assert sum(sizes[-machines:]) <= shards.LEAST * machines


def test_configs_that_hung_before_have_separate_shards() -> None:
    pending = collections.deque(shards.partition(range(200), last=range(100, 200)))
    given = [shards.joined(pending, shards.MOST, 1) for _ in range(len(pending)) if pending]
    assert all(len({index >= 100 for index in shard.indices}) == 1 for shard in given)
    assert max(len(shard.indices) for shard in given if shard.indices[0] >= 100) <= shards.LEAST


def test_few_descriptors_limit_the_machines_and_not_the_journal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quarantune.host.machine.descriptors_left", lambda: 1000)
    assert shards.most_at_a_time() == 904
    monkeypatch.setattr("quarantune.host.machine.descriptors_left", lambda: 20)
    assert shards.most_at_a_time() == shards.LEAST
    shards.warn_of_descriptors("some kernel", 904)
    shards.warn_of_descriptors("some kernel", 904)
    assert len(caplog.messages) == 1
    assert "ulimit -n" in caplog.messages[0]
