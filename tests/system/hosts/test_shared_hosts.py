"""Hosts with wrong clocks and separate users share one directory, and ranks on several hosts agree."""

from __future__ import annotations

import collections
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aftermath import eventually
from emulated_fleets import ROUNDS
from emulated_hosts import Network, network
from helpers import SUPPORT, child_environ

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

SHIFTS_S = {"a": 0.0, "b": 3600.0, "c": -3600.0}
CONFIGS = 32
rounds = pytest.mark.parametrize("round_", ROUNDS)

JOB = """
import json, sys
import jax.numpy as jnp
import engine_kernels, quarantune

space = {"n": [30, 20, 10, 0], "same": list(range(8))}
tuned = quarantune.autotune(space, ref_fn=None, rep=2, name=sys.argv[1])(engine_kernels.plain)
print(json.dumps("ready"), flush=True)
sys.stdin.readline()
result = tuned.tune(jnp.ones((8, 128)))
print(json.dumps({"n": result.best_config["n"], "from_cache": result.from_cache}), flush=True)
"""

RANK = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
import jax.numpy as jnp
import engine_kernels, quarantune

space = {"n": [30, 20, 10, 0], "same": [0, 1]}
tuned = quarantune.autotune(space, ref_fn=None, rep=2, name=sys.argv[1])(engine_kernels.plain)
tuned(jnp.ones((8, 128)))
print(json.dumps(tuned.lookup(jnp.ones((8, 128)))), flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def programs(net: Network, text: str, name: str, **arguments: list[str]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Runs a program on each host, with its cache in the shared directory for jobs, and in an own one for ranks."""
    directory = Path(net.hosts["a"].names).with_name(f"logs of {name}")
    directory.mkdir()
    started = {}
    with contextlib.ExitStack() as running:
        for host, shift_s in SHIFTS_S.items():
            environ = child_environ(
                SUPPORT / "shifted_clock", SUPPORT, JAX_PLATFORMS="cpu", HOME=f"/tmp/home-of-{host}", TMPDIR=None,
                QUARANTUNE_PROGRESS="0", QUARANTUNE_CACHE_DIR="/mnt/cache" if text is JOB else "/tmp/cache",
                CLOCK_SHIFT_S=str(shift_s), QUARANTUNE_COMPILE_TIMEOUT="20",  # a lost claim ends a minute after it
            )  # fmt: skip
            words = [sys.executable, "-c", text, name, *arguments.get(host, [])]
            log = running.enter_context((directory / host).open("w"))
            started[host] = running.enter_context(
                net.hosts[host].popen(*words, stdin=-1, stdout=-1, stderr=log, env=environ)
            )
        try:
            yield started
        finally:
            for host in SHIFTS_S:
                net.hosts[host].kill()
            for process in started.values():
                process.kill()


def answer_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("shared"), *SHIFTS_S) as made:
        shared = Path(made.hosts["a"].names).with_name("shared") / "cache"
        shared.mkdir()
        shared.chmod(0o777)
        yield made


def journalled(net: Network, name: str) -> list[str]:
    """Returns the config of each trial in the journal of a call."""
    shared = Path(net.hosts["a"].names).with_name("shared") / "cache"
    files = shared.glob(f"{name}.trials/*.jsonl")
    records = [json.loads(line.partition(" ")[2]) for file in files for line in file.read_text().splitlines()]
    return [json.dumps(record["trial"]["config"]) for record in records if "trial" in record]


@rounds
def test_hosts_with_wrong_clocks_tune_a_shared_call_once(net: Network, round_: int) -> None:
    with programs(net, JOB, name := f"shared{round_}") as jobs:
        assert [answer_of(job) for job in jobs.values()] == ["ready"] * 3
        for job in jobs.values():
            go(job)
        answers = [answer_of(job) for job in jobs.values()]
    assert sorted(answer["from_cache"] for answer in answers) == [False, True, True]
    assert {answer["n"] for answer in answers} == {0}
    assert collections.Counter(journalled(net, name)).most_common(1)[0][1] == 1
    assert len(journalled(net, name)) == CONFIGS


@rounds
@pytest.mark.parametrize("first", SHIFTS_S)
def test_another_host_continues_after_a_power_loss(net: Network, first: str, round_: int) -> None:
    """The first host's clock is right, an hour fast, or an hour slow."""
    with programs(net, JOB, name := f"lost-{first}{round_}") as jobs:
        assert [answer_of(job) for job in jobs.values()] == ["ready"] * 3
        go(jobs[first])
        assert eventually(lambda: len(journalled(net, name)) >= 3)
        others = [job for host, job in jobs.items() if host != first]
        for job in others:
            go(job)
        net.hosts[first].kill()
        answers = [answer_of(job) for job in others]
    assert sorted(answer["from_cache"] for answer in answers) == [False, True]
    assert {answer["n"] for answer in answers} == {0}
    assert len(set(journalled(net, name))) == CONFIGS
    assert collections.Counter(journalled(net, name)).most_common(1)[0][1] == 1


@rounds
@pytest.mark.parametrize("fault", [{}, {"delay_s": 0.1}, {"loss": 0.02}], ids=str)
def test_ranks_on_three_hosts_agree(net: Network, fault: dict[str, Any], round_: int) -> None:
    net.faults(("*", "*", fault))
    port = 7000 + len(list(Path(net.hosts["a"].names).parent.glob("logs of *")))
    where = f"{net.addresses['a']}:{port}"
    ranks = {host: [where, "3", str(rank)] for rank, host in enumerate(SHIFTS_S)}
    with programs(net, RANK, f"ranks{port}", **ranks) as running:
        answers = [answer_of(rank) for rank in running.values()]
    net.faults()
    assert answers == [answers[0]] * 3
    assert answers[0]["n"] == 0


def test_ranks_agree_by_ipv6_alone(tmp_path: Path) -> None:
    with network(tmp_path, *SHIFTS_S, family=6) as net:
        where = f"[{net.addresses['a']}]:7000"
        ranks = {host: [where, "3", str(rank)] for rank, host in enumerate(SHIFTS_S)}
        with programs(net, RANK, "ranks6", **ranks) as running:
            answers = [answer_of(rank) for rank in running.values()]
    assert answers == [answers[0]] * 3
    assert answers[0]["n"] == 0
