"""Machines that cannot connect are named early and lose nothing, and a lost machine's configs wait again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from quarantune.engine import contact, remote, shards
from quarantune.engine.contact import Address
from quarantune.scheduler.plan import NOTHING_MORE, Proof
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.limits import SweepLimits
from quarantune.values.errors import EngineError
from quarantune.values.settings import Listen, Settings
from quarantune.values.trial import AGAIN, END, Outcome, Trial

CONFIGS: dict[int, Any] = {index: {"n": index} for index in range(64)}
"""Four shards."""
PATIENCE_S = 60.0


class Machines(Executor):
    """An engine with one thread for each machine.

    Args:
        *hosts: the names of the machines.
        cut: the machines that get an address at which nobody listens.
    """

    def __init__(self, *hosts: str, cut: tuple[str, ...] = ()) -> None:
        self._pool = ThreadPoolExecutor(len(hosts))
        self._idle = [*hosts]
        self._cut = cut
        with socket.create_server(("127.0.0.1", 0)) as closed:
            self.port = closed.getsockname()[1]

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(self._run, fn, *args)

    def _run(self, fn: Callable[..., Any], task: Any) -> Any:
        HERE.host = host = self._idle.pop()
        nowhere = Address("another machine", ("127.0.0.1",), self.port, task["address"]["token"])
        try:
            return fn({**task, "address": nowhere.to_json() if host in self._cut else task["address"]})
        finally:
            self._idle.append(host)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


HERE = threading.local()
"""The machine of this thread."""


def measured(index: int) -> Trial:
    samples_ms = (1.0,) * 4
    return Trial(config=CONFIGS[index], outcome=Outcome.OK, time_ms=1.0, own_ms=1.0, samples_ms=samples_ms)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """Lets shards run without a sandbox; a machine first calls its function in the returned dictionary."""
    first: dict[str, Callable[[], Any]] = {}

    class Quick:
        def __init__(self, task: Any, line: contact.Contact, host: str) -> None:
            self._task, self._line = task, line
            self.trials: list[remote.ConfigEnded] = []

        def run(self) -> remote.End:
            first.get(HERE.host, lambda: None)()
            for index, _ in self._task["configs"]:
                self.trials.append(remote.ConfigEnded(index=index, trial=measured(index).to_json()))
                self._line.say(self.trials[-1].to_json())
            return remote.End(end=remote.DONE)

    monkeypatch.setattr(remote, "_ShardRun", Quick)
    monkeypatch.setattr(remote, "_unreached", type(remote._unreached)(maxlen=64))
    monkeypatch.setattr(socket, "gethostname", lambda: HERE.host)
    return first


def request_of(ledger: Ledger, **settings: Any) -> Any:
    limits = SweepLimits(
        compile_timeout_s=1000.0, timeout_s=20.0, memory_limit_bytes=None, compile_slots=1, configs_per_worker=None
    )
    return SimpleNamespace(
        problem=SimpleNamespace(name="kernel"), limits=limits, target=None, troubled=(), ledger=ledger,
        settings=Settings(**settings),
    )  # fmt: skip


def sweep(
    engine: Executor,
    trials: dict[int, Trial],
    *listeners: Listener,
    check: Callable[[], None] = lambda: None,
    **settings: Any,
) -> None:
    """Sweeps all configs on an engine."""
    ledger = Ledger(*listeners)

    def end(index: int, trial: Trial) -> None:
        assert index not in trials
        trials[index] = trial
        ledger.end(index, trial)

    given = shards.Shards(engine, b"", CONFIGS, request_of(ledger, **settings), Proof(), check=check)
    with engine, contextlib.closing(given):
        given.run(shards.partition([*CONFIGS]), end, NOTHING_MORE)


def test_a_machine_behind_a_firewall_is_named_once(
    begin: dict[str, Callable[[], Any]], caplog: pytest.LogCaptureFixture
) -> None:
    has_begun = threading.Event()
    begin |= {"cut": has_begun.set, "open": lambda: has_begun.wait(PATIENCE_S)}
    engine, trials = Machines("open", "cut", cut=("cut",)), dict[int, Trial]()
    sweep(engine, trials)
    assert {index: trial.outcome for index, trial in trials.items()} == dict.fromkeys(CONFIGS, Outcome.OK)
    (told,) = [message for message in caplog.messages if "cannot connect" in message]
    assert told.startswith("kernel: cut cannot connect to this process (from 127.0.0.1, 127.0.0.1:")
    assert f"127.0.0.1:{engine.port}: Connection refused)" in told
    assert "allow TCP connections from there to a port of this machine, and choose it here, as in QUARANTUNE_L" in told


def test_a_firewall_before_all_machines_costs_no_config(
    begin: dict[str, Callable[[], Any]], caplog: pytest.LogCaptureFixture
) -> None:
    trials = dict[int, Trial]()
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = Listen("127.0.0.1", other.getsockname()[1], min(other.getsockname()[1] + 40, 65_535))
        sweep(Machines("a", cut=("a",)), trials, listen=at)
    assert {index: trial.outcome for index, trial in trials.items()} == dict.fromkeys(CONFIGS, Outcome.OK)
    (told,) = [message for message in caplog.messages if "cannot connect" in message]
    assert f"{told.rpartition(' to port ')[2].split()[0]}" in map(str, range(at.first, at.last + 1))


def test_a_silent_machine_in_mid_shard_is_waited_for(
    begin: dict[str, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One machine connects and ends its shards. The other works without a connection for longer than an engine may."""
    has_begun, may_end = threading.Event(), threading.Event()
    begin["open"] = lambda: has_begun.wait(PATIENCE_S)
    begin["cut"] = lambda: (has_begun.set(), may_end.wait(PATIENCE_S))
    late_s, ticks, trials = [0.0], [0], dict[int, Trial]()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0], sleep=time.sleep)
    monkeypatch.setattr(shards, "time", clock)

    def on_tick() -> None:
        if len(trials) == len(CONFIGS) - shards.LEAST:
            ticks[0] += 1
            late_s[0] = shards._ENDS_S + 60
            if ticks[0] > 3:
                may_end.set()

    try:
        sweep(Machines("open", "cut", cut=("cut",)), trials, Listener(on_tick=on_tick))
    finally:
        may_end.set()
    assert len(trials) == len(CONFIGS)
    assert "without a connection, cut can report only at the end of a shard" in caplog.text
    assert "has begun to work" not in caplog.text


def test_a_port_that_cannot_be_had_ends_the_call_before_any_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        advice = rf"cannot listen at QUARANTUNE_LISTEN=127.0.0.1:{port}: .*in use.* give an address of this machine and"
        with pytest.raises(EngineError, match=advice):
            sweep(Machines("a"), {}, listen=Listen("127.0.0.1", port, port))


def test_sweeps_of_one_process_take_turns_at_one_port(begin: dict[str, Callable[[], Any]]) -> None:
    waits = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        first = contact.Contacts(lambda *_: True, at=Listen("127.0.0.1", port, min(port + 40, 65_535)))
    at = Listen("127.0.0.1", first.address.port, first.address.port)
    ends: list[dict[int, Trial]] = [{}, {}, {}]

    def check() -> None:
        waits.set()

    with ThreadPoolExecutor(3) as sweeps:
        running = [sweeps.submit(sweep, Machines("a"), trials, check=check, listen=at) for trials in ends]
        assert waits.wait(PATIENCE_S)
        assert ends == [{}, {}, {}]
        first.close()
        for done in running:
            done.result()
    assert [len(trials) for trials in ends] == [len(CONFIGS)] * 3
    assert begin == {}


def test_configs_of_a_lost_machine_wait_again() -> None:
    """The machine dies in the first config of its first shard; the engine repeats nothing."""
    events: list[tuple[int, str]] = []
    deaths = [0]

    def machine(task: Any) -> Any:
        line = contact.reach(Address.from_json(task["address"]), task["shard"], {"host": "mortal"})
        assert line
        first, *_ = task["configs"]
        line.say({"phase": [first[0], "compile"]})
        if not deaths[0]:
            deaths[0] += 1
            line.close()
            return remote.End(end=remote.STOPPED).to_json()
        trials = tuple(remote.ConfigEnded(index=index, trial=measured(index).to_json()) for index, _ in task["configs"])
        for ended in trials:
            line.say(ended.to_json())
        line.say(remote.End(end=remote.DONE).to_json())
        line.close()
        return remote.End(end=remote.DONE, trials=trials).to_json()

    class Mortal(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            return super().submit(machine, *args)

    trials: dict[int, Trial] = {}
    sweep(Mortal(1), trials, Listener(on_phase=lambda *event: events.append(event)))
    assert len(trials) == len(CONFIGS)
    lost = events[0][0]
    of_lost = [phase for index, phase in events if index == lost]
    assert of_lost[:2] == ["compile", AGAIN]
    assert of_lost[-1] == END


class Cancelling(Executor):
    """The executor of a client that has lost its scheduler."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


def test_a_lost_scheduler_is_named_when_work_is_cancelled() -> None:
    advice = (
        r"could not run a shard, twice; the last time the engine cancelled it .*lost the scheduler; see that it runs"
    )
    with pytest.raises(EngineError, match=advice):
        sweep(Cancelling(), {})


def test_a_process_that_cannot_listen_says_so(
    begin: dict[str, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no ports here")

    engine, trials = Machines("a"), dict[int, Trial]()
    monkeypatch.setattr(socket, "create_server", refuse)
    sweep(engine, trials)
    assert (len(trials), begin) == (len(CONFIGS), {})
    assert "cannot listen for shards (no ports here): trials arrive only when a shard ends" in caplog.text
