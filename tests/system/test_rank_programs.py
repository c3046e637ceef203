"""Ranks of one `jax.distributed` program always run the same config, whatever their separate caches hold."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from aftermath import MARK, carriers, eventually
from helpers import PROGRAMS, child_environ, pass_time
from rank_store import Client
from tuned_functions import here

import quarantune
from quarantune.answers import ranks
from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.answers.layers import open_store
from quarantune.cache.journal import read
from quarantune.calls.call import space_of
from quarantune.calls.key import keyed
from quarantune.engine import among_ranks
from quarantune.jax_internals import jax_backends
from quarantune.results import progress
from quarantune.tuning.outcome import call_result
from quarantune.values import blocks
from quarantune.values.trial import Findings

RANKS = 4


def start(directory: Path, *cases: str, hung_s: float = 240) -> list[int]:
    """Runs some or all cases of `ranks_program.py`, and returns the exit codes of the ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = PROGRAMS / "ranks_program.py"
    processes = []
    for rank in range(RANKS):
        own = {"QUARANTUNE_CACHE_DIR": str(directory / f"cache {rank}"), "HUNG_S": str(hung_s), MARK: str(directory)}
        with open(directory / f"output {rank}", "w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, program, str(rank), str(port), directory, *cases],
                    env=child_environ(JAX_PLATFORMS="cpu", **own),
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                )
            )
    try:
        return [process.wait(timeout=2 * hung_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(directory: Path) -> list[dict[str, Any]]:
    """Runs all cases, and returns the results of each rank."""
    codes = start(directory)
    bad = [rank for rank, code in enumerate(codes) if code or not (directory / f"results {rank}").exists()]
    assert not bad, (directory / f"output {bad[0]}").read_text()[-5000:]
    return [json.loads((directory / f"results {rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_four_ranks_with_caches_of_their_own_agree_in_every_case(tmp_path: Path) -> None:
    results = run(tmp_path)

    def of(case: str) -> list[Any]:
        return [result.get(case) for result in results]

    def same(case: str) -> Any:
        assert [result == results[0][case] for result in of(case)] == [True] * RANKS, (case, of(case))
        return results[0][case]

    assert same("one_is_warm") == [2, 2]
    assert same("all_differ") == same("all_differ again")
    assert of("own") == [1, 2, 3, 1]  # yet each has a different config in its cache
    for case in ("all_are_cold", "one_is_late", "the_tuner_fails", "the_tuner_raises", "one_tunes_explicitly"):
        assert same(case) in (1, 2, 3), case
    assert same("all_fail") == [0, 0]
    assert same("all_fail error") == "TuningFailedError"
    assert same("the_tuner_is_slow") == 0
    assert results[0]["the_tuner_is_slow saved"]
    first, absent, second, _ = of("only_some_ranks_call")
    assert first == second
    assert first in (1, 2, 3)
    assert absent is None
    assert same("interrupted_while_waiting") in (1, 2, 3)
    assert same("nobody_may_tune") == "CacheMissError"
    of_kinds = of("kinds_differ")
    assert of_kinds[:3] == [of_kinds[0]] * 3
    assert of_kinds[3] == 2
    assert same("contextual") in (1, 2, 3)
    assert len(same("collectives_depend_on_it")) == 3
    assert same("without_workers") == "without_workers: with QUARANTUNE_ISOLATION=none"
    assert results[2]["executables_run_here"] == [1, 2]
    logs = [(tmp_path / f"log {rank}").read_text() for rank in range(RANKS)]
    for rank, log in enumerate(logs):
        assert f"all_differ: rank {rank} of 4 runs n={results[0]['all_differ']}, as all ranks do: " in log
    assert any("all_are_cold: rank 0 of 4 " in line for line in logs[0].splitlines())
    assert sum("all_are_cold: best of 3" in log for log in logs) == 1  # one rank tuned for all
    assert "interrupted_while_waiting: rank 1 of 4 waits for rank 0 to tune it" in logs[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_waiting_ranks_end_when_the_coordinator_dies(tmp_path: Path) -> None:
    codes = start(tmp_path, "coordinator_dies")
    assert codes[0] == -signal.SIGKILL
    for rank in range(1, RANKS):
        output = (tmp_path / f"output {rank}").read_text()
        assert codes[rank] != 0
        assert "JAX distributed service detected fatal errors" in output or "did not answer" in output
        assert "Timeout (" not in output  # it was not our watchdog
    assert eventually(lambda: not carriers(MARK, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tuning_rank_loses_no_trial_if_the_coordinator_dies(tmp_path: Path) -> None:
    codes = start(tmp_path, "coordinator_dies_while_another_tunes")
    assert codes[0] == -signal.SIGKILL
    assert 0 not in codes
    assert "Timeout (" not in (tmp_path / "output 1").read_text()  # it was not our watchdog
    assert eventually(lambda: not carriers(MARK, str(tmp_path))), "no worker outlives its rank"
    (journal,) = (tmp_path / "cache 1" / "left_alone.trials").glob("*.jsonl")
    outcomes = [record["trial"]["outcome"] for record in read(journal)]
    assert "ok" in outcomes, "the next program continues from here"


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Makes this process rank 0 of two, with a private store."""
    from jax._src import distributed

    jax.devices()  # otherwise JAX makes its CPU devices with this client
    client = Client()
    monkeypatch.setattr(distributed.global_state, "client", client)
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)
    return client


def tuner(**options: Any) -> quarantune.AutoTuner:
    configs = [{"n": 1}, {"n": 2}]
    return quarantune.AutoTuner(lambda x, n: x, configs, name="one of two", ref_fn=None, rep=1, **options)


def test_a_service_that_does_not_answer_is_named_in_one_line(one_of_two: Client, no_process: None) -> None:
    one_of_two.error = "UNAVAILABLE: connection refused\nmore"
    with pytest.raises(RuntimeError, match=r"did not answer.*\(UNAVAILABLE: connection refused\).*QUARANTUNE_AGREE=0"):
        tuner().run(1)


def test_a_config_that_no_rank_may_offer_is_refused(one_of_two: Client, no_process: None) -> None:
    acts = (set_out(one_of_two) for _ in range(1))

    def prune(*_: Any) -> bool:
        return next(acts, False)

    with pytest.raises(quarantune.TuningFailedError):  # only this rank is left
        tuner(prune_fn=prune).run(1)
    (answer,) = (key for key in one_of_two.values if key.endswith("/answer"))
    one_of_two.values[answer] = '{"config":{"n":"evil"},"rank":1,"source":"cache"}'
    with pytest.raises(RuntimeError, match=r"rank 0 of 2: all ranks run \{'n': 'evil'\}, which rank 1 offers"):
        tuner(prune_fn=prune).run(1)


@pytest.mark.parametrize(("isolation", "starts"), [("none", True), ("compile", True), ("process", False)])
def test_ranks_that_may_measure_start_jax_before_any_waits(
    isolation: str, starts: bool, one_of_two: Client, monkeypatch: pytest.MonkeyPatch, no_process: None
) -> None:
    stores: list[dict[str, str]] = []
    monkeypatch.setattr(jax, "local_devices", lambda **_: stores.append(dict(one_of_two.values)))
    with quarantune.settings(isolation=isolation), pytest.raises(quarantune.TuningFailedError):
        tuner(prune_fn=lambda *_: set_out(one_of_two)).run(1)
    assert stores == ([{}] if starts else [])


def set_out(client: Client) -> bool:
    (claim,) = (key for key in client.values if key.endswith("/claim/0"))
    client.values[claim.replace("claim/0", "out/1")] = "every config failed"
    return False


def test_ranks_without_a_tuner_share_a_near_config(
    one_of_two: Client, monkeypatch: pytest.MonkeyPatch, no_process: None
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.0)
    autotuner = tuner()
    described = keyed(autotuner._tuner.bind((np.zeros(8),), {}))
    space = space_of(described.call.configs)
    entry = {"config": {"n": 2}, "time_ms": 1.0, "key_values": described.readable, "space": space}
    open_store(blocks.current()).put("one of two", described.id.device, described.id.key, entry)
    with quarantune.settings(on_miss="nearest"), pytest.warns(quarantune.CacheWarning):
        result = autotuner.run(np.zeros(16))
    assert (result.best_config, result.from_cache) == ({"n": 2}, "nearest")
    assert [json.loads(text)["source"] for key, text in one_of_two.values.items() if "/answer" in key] == ["nearest"]


@pytest.mark.parametrize("is_alive", [True, False])
def test_another_rank_tunes_if_the_tuning_rank_falls_silent(
    is_alive: bool, one_of_two: Client, monkeypatch: pytest.MonkeyPatch, no_process: None
) -> None:
    monkeypatch.setattr(among_ranks, "SILENCE_S", 1000.0 if is_alive else 0.0)
    waits: list[str] = []
    real = ranks.Agreement._wait

    def wait(self: ranks.Agreement, *args: Any) -> None:
        topic = self._member.topic
        waits.append(topic)
        if is_alive and len(waits) > 5:
            one_of_two.values[f"{topic}/answer"] = '{"config":{"n":2},"rank":1,"source":"tuned"}'
        real(self, *args)

    def claim(self: ranks.Agreement, *args: Any, **more: Any) -> Any:
        one_of_two.values[f"{self._member.topic}/claim/0"] = "1"
        one_of_two.values[f"{self._member.topic}/beat/1"] = "7"
        return agree(self, *args, **more)

    agree = ranks.Agreement.agree
    monkeypatch.setattr(ranks.Agreement, "agree", claim)
    monkeypatch.setattr(ranks.Agreement, "_wait", wait)
    if is_alive:
        assert tuner().run(1).best_config == {"n": 2}
    else:
        with pytest.raises(quarantune.TuningFailedError):  # this rank tunes, and no rank is left
            tuner(prune_fn=lambda *_: False).run(1)
    claims = sorted(key.rpartition("/")[2] for key in one_of_two.values if "/claim/" in key)
    assert claims == (["0"] if is_alive else ["0", "1"])


def test_a_rank_that_has_waited_long_may_tune(
    one_of_two: Client, monkeypatch: pytest.MonkeyPatch, no_process: None
) -> None:
    call = keyed(tuner()._tuner.bind((1,), {}))
    coordination = jax_backends.coordination()
    assert coordination is not None
    agreement = ranks.Agreement(call, blocks.current(), coordination, {})
    for rank in (1, 2):
        one_of_two.values[f"{agreement._member.topic}/beat/{rank}"] = "0"  # each as it begins to wait
    assert not agreement._is_silent(1)
    pass_time(monkeypatch, 1000)
    assert agreement._is_silent(1)
    assert not agreement._is_silent(2), "it has claimed the call just now"


def test_a_later_result_of_a_rank_does_not_change_the_answer(
    one_of_two: Client, caplog: pytest.LogCaptureFixture, no_process: None
) -> None:
    resolver = tuner()._tuner
    described = keyed(resolver.bind((1,), {}))
    with caplog.at_level("INFO", logger="quarantune"):
        for n in (1, 2):
            found = call_result(described, {"n": n}, Findings(1.0, None))
            answer = Answer(Origin.MEASURED, {"n": n}, found.findings.to_json(), result=found)
            resolver.rungs.share(described, answer, Situation.of(described.call))
            agreed = resolver.rungs.agreed(described, Situation.of(described.call, only_looks=True))
            assert agreed.config == {"n": 1}
    assert resolver.lookup(resolver.bind((1,), {})) == {"n": 1}
    assert caplog.messages == [
        "one of two: rank 0 of 2 runs n=1, as all ranks do: it found it by tuning",
        "one of two: rank 0 of 2 keeps running n=1, as all ranks do; its new result is for the next program",
    ]


@pytest.mark.parametrize("forbids", ["recording", "default", "nearest"])
def test_ranks_agree_anew_after_blocks_that_forbid_tuning(
    forbids: Any, one_of_two: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_in_the_block = ranks.Member.agree

    def agree(self: ranks.Member, *args: Any, is_paused: bool, **more: Any) -> Any:
        if is_paused:
            one_of_two.values[f"{self.topic}/out/1"] = ranks._PAUSED
        return both_are_in_the_block(self, *args, is_paused=is_paused, **more)

    monkeypatch.setattr(ranks.Member, "agree", agree)
    autotuner = quarantune.autotune([{"n": 1}, {"n": 2}], name=f"after {forbids}", ref_fn=None, rep=1)(
        jax.jit(lambda x, n=1: x + 0 * n, static_argnames=["n"])
    )
    block: Any = quarantune.recording() if forbids == "recording" else quarantune.settings(on_miss=forbids)
    listed: Any = []
    for _ in range(2):
        with block as calls, warnings.catch_warnings(action="ignore"):
            autotuner(np.ones(4))
            autotuner(np.ones(4))
            assert autotuner.lookup(np.ones(4)) is None
        listed = listed or calls
        block = quarantune.settings(on_miss="default")
    assert len([key for key in one_of_two.values if key.endswith("/answer")]) == 1, "one agreement for both blocks"
    with here():
        if forbids == "recording":
            assert quarantune.tune_many(listed)[0].from_cache is False
        autotuner(np.ones(4))
    assert autotuner.lookup(np.ones(4)) is not None


@pytest.mark.parametrize("setting", ["on_miss", "record"])
def test_ranks_that_never_tune_agree_for_the_whole_program(
    setting: str, one_of_two: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.0)
    monkeypatch.setenv(f"QUARANTUNE_{setting.upper()}", "default" if setting == "on_miss" else str(tmp_path / "calls"))
    with quarantune.settings(on_miss="default"):
        assert not Situation.of(tuner()._tuner.bind((1,), {})).is_paused


def test_a_rank_raises_if_prune_fn_drops_what_all_ranks_run(one_of_two: Client, no_process: None) -> None:
    autotuner = tuner(key_fn=lambda x: "all", prune_fn=lambda config, x: len(x) % config["n"] == 0)
    resolver = autotuner._tuner
    even = keyed(resolver.bind((np.ones(4),), {}))
    found = call_result(even, {"n": 2}, Findings(1.0, None))
    resolver.rungs.share(even, Answer(Origin.MEASURED, {"n": 2}, found.findings.to_json()), Situation.of(even.call))
    assert autotuner.run(np.ones(8)).best_config == {"n": 2}
    coordination = jax_backends.coordination()
    assert coordination is not None
    assert ranks.Agreement(even, blocks.current(), coordination, {})._board(1).arguments == even.arguments_hash != ""
    with pytest.raises(
        RuntimeError, match=r"prune_fn drops the config of that key, n=2.*all ranks must run one config"
    ):
        autotuner.run(np.ones(3))


def test_a_lookup_leaves_no_progress_on_the_screen(one_of_two: Client, no_process: None) -> None:
    def shown() -> list[Any]:
        return [sweep for screen in progress._shared.values() for sweep in screen.sweeps]

    resolver, before = tuner()._tuner, shown()
    with quarantune.settings(progress=True):
        assert resolver.lookup(resolver.bind((1,), {})) is None
    assert shown() == before


def test_agree_0_and_programs_of_one_process_ask_no_other_rank(
    one_of_two: Client, monkeypatch: pytest.MonkeyPatch, no_process: None
) -> None:
    one_of_two.error = "not to be asked"
    with quarantune.settings(agree=0, on_miss="error"), pytest.raises(quarantune.CacheMissError):
        tuner().run(1)
    from jax._src import distributed

    monkeypatch.setattr(distributed.global_state, "num_processes", 1)
    with quarantune.settings(on_miss="error"), pytest.raises(quarantune.CacheMissError):
        tuner().run(1)


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")  # the fork only looks
def test_a_fork_of_a_rank_does_not_use_its_client(one_of_two: Client) -> None:
    assert jax_backends.coordination() is not None
    if not (fork := os.fork()):
        found: Any = "an exception"
        try:
            found = jax_backends.coordination()
        finally:
            os._exit(found is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0


def test_a_jax_without_the_store_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed

    monkeypatch.setattr(distributed, "global_state", object())
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.warns(RuntimeWarning, match="no key-value store in jax.distributed") as caught:
        assert jax_backends.coordination() is jax_backends.coordination() is None
    assert len(caught) == 1


def test_ranks_wait_for_the_longest_sweep_allowed() -> None:
    def deadline_s(count: int, **options: Any) -> float:
        configs = [{"n": n} for n in range(count)]
        autotuner = quarantune.AutoTuner(lambda x, n: x, configs, name="n", compile_timeout=100, timeout=10, **options)
        resolver = autotuner._tuner
        with quarantune.settings(num_workers=1):
            call = keyed(resolver.bind((1,), {}))
            one_of_two: Any = SimpleNamespace(client=None, rank=0, ranks=2)
            return ranks.Agreement(call, blocks.current(), one_of_two, {})._deadline_s()

    assert deadline_s(6) == 20 * 110
    assert deadline_s(6, max_trials=2) == 12 * 110
    assert deadline_s(1000) == 808 * 110  # a search of a large space has at most 400 trials
    assert deadline_s(1000, time_budget=60) == 60 + 10 * 110
