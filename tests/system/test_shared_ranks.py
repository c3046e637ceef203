"""The ranks of a real `jax.distributed` program share a sweep: all get its config, whatever happens to some of them."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aftermath import MARK, carriers, eventually
from helpers import PROGRAMS, child_environ

from quarantune.cache.journal import read
from quarantune.values.trial import Outcome

RANKS = 4
CONFIGS = 64
RUN_MS = 50
ROUNDS = 20
_PATIENCE_S = 240.0


class RanksProgram:
    """A running program. Each rank has a machine of its own, as far as the leases on devices show."""

    def __init__(
        self, directory: Path, *, ranks: int, configs: int, run_ms: int, environs: Mapping[int, Mapping[str, str]]
    ) -> None:
        self.directory = directory
        self.ranks = ranks
        directory.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        words = str(ranks), str(port), str(directory), str(configs), str(run_ms)
        self.processes = []
        for rank in range(ranks):
            environ = {
                "JAX_PLATFORMS": "cpu",
                "QUARANTUNE_AGREE": "share",
                "QUARANTUNE_CACHE_DIR": str(directory / "cache"),
                "_QUARANTUNE_LEASE_NAMESPACE": uuid.uuid4().hex,
                MARK: str(directory),
                **environs.get(rank, {}),
            }
            with open(directory / f"output {rank}", "w") as output:
                command = [sys.executable, str(PROGRAMS / "shared_ranks_program.py"), str(rank), *words]
                self.processes.append(
                    subprocess.Popen(
                        command, env=child_environ(**environ), stdout=output, stderr=output, stdin=subprocess.DEVNULL
                    )
                )

    def await_files(self, name: str, *, ranks: list[int] | None = None) -> None:
        """Waits until ranks have written a file."""
        wanted = [self.directory / f"{name} {rank}" for rank in (range(self.ranks) if ranks is None else ranks)]
        ends = [self.processes[int(path.name.split()[-1])] for path in wanted]
        assert eventually(
            lambda: all(path.exists() for path in wanted) or any(end.poll() for end in ends), timeout_s=_PATIENCE_S
        ), [path.name for path in wanted if not path.exists()]
        failed = [rank for rank in range(self.ranks) if self.processes[rank].poll() not in (None, -signal.SIGKILL)]
        assert not failed, (self.directory / f"output {failed[0]}").read_text()[-3000:]

    def go(self, *names: object) -> None:
        for name in names:
            (self.directory / f"go {name}").touch()

    def results(self, *, without: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Returns the results of the ranks, once all have one."""
        ranks = [rank for rank in range(self.ranks) if rank not in without]
        self.await_files("result", ranks=ranks)
        return [json.loads((self.directory / f"result {rank}").read_text()) for rank in ranks]

    def has_logged(self, text: str) -> bool:
        return text in self.log()

    def log(self) -> str:
        return "\n".join((self.directory / f"log {rank}").read_text() for rank in range(self.ranks))

    def end(self) -> None:
        (self.directory / "end").touch()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            process.kill()
            process.wait()


@contextlib.contextmanager
def program(
    directory: Path,
    *,
    ranks: int = RANKS,
    configs: int = CONFIGS,
    run_ms: int = RUN_MS,
    environs: Mapping[int, Mapping[str, str]] | None = None,
) -> Iterator[RanksProgram]:
    """Runs a program until all of its ranks are about to call; it leaves no process."""
    running = RanksProgram(directory, ranks=ranks, configs=configs, run_ms=run_ms, environs=environs or {})
    try:
        running.await_files("begun")
        yield running
    finally:
        running.end()
        assert eventually(lambda: not carriers(MARK, str(directory)))


def agreed(results: list[dict[str, Any]]) -> None:
    """Asserts that all ranks run the fastest config."""
    assert {result["n"] for result in results} == {results[0]["best"]}


def trials(*caches: Path) -> list[dict[str, Any]]:
    """Returns the trials of all journals."""
    journals = [journal for cache in caches for journal in (cache / "wait.trials").glob("*.jsonl")]
    return [record["trial"] for journal in journals for record in read(journal) if "trial" in record]


def is_whole(cache: Path, configs: int = CONFIGS) -> bool:
    """Returns whether a cache holds what one rank alone would have left: a result, and one trial for each config."""
    found = trials(cache)
    usable = {Outcome.OK.value, Outcome.SLOW.value}
    has_all = sorted(trial["config"]["n"] for trial in found) == [*range(configs)]
    entries = json.loads((cache / "wait.json").read_text())
    return has_all and {trial["outcome"] for trial in found} <= usable and len(entries) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_share_a_sweep_and_one_of_them_is_killed(tmp_path: Path) -> None:
    with program(tmp_path, configs=40, run_ms=20) as running:
        running.go("all", 0)
        assert eventually(lambda: running.has_logged("rank 0 of 4 tunes it for all"))
        running.go(1, 2)
        assert eventually(lambda: any("on rank 2" in trial["device"] for trial in trials(tmp_path / "cache")))
        running.processes[2].kill()
        running.go(3)  # it comes when the others have measured some configs
        agreed(running.results(without=(2,)))
        assert is_whole(tmp_path / "cache", 40)
        parts = [trial["device"].partition(" on ")[2] for trial in trials(tmp_path / "cache")]
        assert 0 < parts.count("rank 2") < 40
        assert parts.count("") < 40
        assert running.log().count("best of 40 is") == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("leads", [False, True])
def test_ranks_agree_although_some_are_killed_late_or_apart(leads: bool, tmp_path: Path) -> None:
    """One rank is killed at any moment, one is 20 s late, and one has a cache of its own."""
    choice = random.Random(leads)
    for number in range(ROUNDS):
        killed = choice.randrange(1, RANKS)  # rank 0 has the store
        late, apart = choice.sample([rank for rank in range(RANKS) if rank != killed], 2)
        directory = tmp_path / str(number)
        caches = [directory / "cache", directory / "own"]
        with program(directory, environs={apart: {"QUARANTUNE_CACHE_DIR": str(caches[1])}}) as running:
            if leads:
                running.go("all", killed)
                claimed = f"rank {killed} of 4 tunes it for all"
                assert eventually(functools.partial(running.has_logged, claimed))
            running.go("all", *(rank for rank in range(RANKS) if rank != late))
            kill_s = choice.uniform(0, 15)
            time.sleep(kill_s)
            running.processes[killed].kill()
            time.sleep(20 - kill_s)
            running.go(late)
            results = running.results(without=(killed,))
            print(number, f"{killed=} after {kill_s:.1f} s {late=} {apart=}", results)
            agreed(results)
            (whole,) = [cache for cache in caches if (cache / "wait.json").exists()]
            assert is_whole(whole)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_four_ranks_take_a_third_of_the_time_of_one(tmp_path: Path) -> None:
    seconds: dict[str, list[float]] = {"1": [], "share": []}
    for number in range(3):
        for agree in seconds:
            # The best config is too near to the others to end their measurements.
            environ = {"QUARANTUNE_AGREE": agree, "SHORTER": "0.9", "IS_WARM": "1"}
            environs = dict.fromkeys(range(RANKS), environ)
            with program(tmp_path / f"{agree} {number}", environs=environs) as running:
                running.go("all", *range(RANKS))
                results = running.results()
                agreed(results)
                seconds[agree].append(max(result["seconds"] for result in results))
    print(seconds)
    assert min(seconds["share"]) <= 0.5 * min(seconds["1"])  # 0.35 on a quiet machine


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rank_with_a_result_ends_the_sweep_of_the_others(tmp_path: Path) -> None:
    warm = {"QUARANTUNE_CACHE_DIR": str(tmp_path / "warm")}
    slow = {"configs": 40, "run_ms": 200}  # so that rank 3 comes while the others measure
    with program(tmp_path / "before", **slow, environs=dict.fromkeys(range(RANKS), warm)) as running:
        running.go("all", *range(RANKS))
        agreed(running.results())
    with program(tmp_path / "after", **slow, environs={3: warm}) as running:
        running.go("all", 0, 1, 2)
        cache = tmp_path / "after" / "cache"
        assert eventually(lambda: any("on rank" in trial["device"] for trial in trials(cache)))
        running.go(3)
        agreed(running.results())
        assert "rank 3 had it in its cache" in running.log()


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.skipif(len(list(Path("/dev").glob("nvidia[0-9]*"))) < 2, reason="needs two GPUs")
def test_two_gpus_take_much_less_time_than_one(tmp_path: Path) -> None:
    seconds: dict[str, list[float]] = {"1": [], "share": []}
    for number in range(3):
        for agree in seconds:
            own = {"QUARANTUNE_AGREE": agree, "JAX_PLATFORMS": "", "IS_WARM": "1"}
            environs = {rank: {**own, "CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)}
            with program(tmp_path / f"{agree} {number}", ranks=2, configs=48, run_ms=0, environs=environs) as running:
                running.go("all", 0, 1)
                results = running.results()
                assert results[0]["n"] == results[1]["n"]
                seconds[agree].append(max(result["seconds"] for result in results))
    print(seconds)
    assert min(seconds["share"]) <= 0.6 * min(seconds["1"])
