"""Ranks share a sweep through a store in memory. Threads play the ranks, and a function plays their workers."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from aftermath import eventually
from helpers import pass_time
from rank_store import Client

import quarantune
from quarantune.calls.key import keyed
from quarantune.engine import among_ranks
from quarantune.engine.among_ranks import Board, WorkList
from quarantune.jax_internals.jax_backends import Coordination
from quarantune.scheduler.plan import ConfigSource
from quarantune.sweep import sweep
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.values import blocks
from quarantune.values.codec import canonical_json
from quarantune.values.configs import Config
from quarantune.values.trial import Outcome, Trial, with_bits

RANKS = 4


class Program:
    """A program of ranks that tunes one call; each rank notes the configs that its workers measure.

    Attributes:
        measured: the configs that each rank has measured, in order.
        on_config: called with the rank and the index before a config is measured.
    """

    def __init__(self, count: int, *, agree: str | int = "share", **options: Any) -> None:
        self.client = Client()
        self.measured: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}
        self.on_config: Callable[[int, int], None] = lambda rank, index: None
        self.options = {"ref_fn": None, **options}
        self.count, self.agree = count, agree

    def request(self, rank: int) -> SweepRequest:
        """Returns the request of a rank, with the space; `run` finds the rank by its ledger."""
        configs = [{"n": n} for n in range(self.count)]
        tuner = quarantune.AutoTuner(lambda x, n: x, configs, name="shared", **self.options)
        with quarantune.settings(agree=self.agree):
            call = keyed(tuner._tuner.bind((1,), {}))
            request = SweepRequest.of(call, blocks.current(), RankLedger(rank))
        return dataclasses.replace(request, space=call.call.configs)

    def board(self, rank: int, leader: int = 0) -> Board:
        return Board(Coordination(client=self.client, rank=rank, ranks=RANKS), "topic", leader)

    def run(self, request: SweepRequest, configs: Mapping[int, Config]) -> Swept:
        """Plays the workers of one rank."""
        assert isinstance(request.ledger, RankLedger)
        rank = request.ledger.rank
        while configs:
            for index, config in configs.items():
                trial = ok(config)
                if reason := request.source.reason_to_stop():
                    trial = Trial(config=config, outcome=Outcome.NOT_RUN, message=reason)
                else:
                    self.on_config(rank, index)
                    self.measured[rank].append(index)
                request.source.ended(index, trial)
                request.ledger.end(index, trial)
                request.ledger.tick()
            configs = request.source.take(4) or dict(request.source.rest())
        return Swept()

    def lead(self, rank: int = 0, **changes: Any) -> Mapping[int, Trial]:
        """Leads a sweep on a rank, and returns its trials."""
        request = dataclasses.replace(self.request(rank), **changes)
        assert request.space is not None
        among_ranks.lead(request, dict(enumerate(request.space)), self.board(rank, rank), request.space)
        return request.ledger.trials

    def help(self, rank: int, why_over: Callable[[], str] = str, **changes: Any) -> None:
        among_ranks.help_with(dataclasses.replace(self.request(rank), **changes), self.board(rank), why_over)


class RankLedger(Ledger):
    """The ledger of a rank."""

    def __init__(self, rank: int, *listeners: Listener) -> None:
        super().__init__(*listeners)
        self.rank = rank


def ok(config: Config) -> Trial:
    return Trial(config=config, outcome=Outcome.OK, time_ms=1.0, samples_ms=(1.0,), device="cpu:0")


def trial_text(**fields: Any) -> str:
    return canonical_json(dataclasses.replace(ok({"n": 0}), **fields).to_json())


def test_a_rank_says_nothing_of_the_bits_of_its_own_data() -> None:
    program = Program(1)
    for known in (None, "other"):
        board = program.board(rank=1, leader=1 if known else 0)
        board.say(0, dataclasses.replace(ok({"n": 0}), bits=known, digest="12.34"))
        heard = program.board(rank=0, leader=1 if known else 0).heard(0, {"n": 0})
        assert heard is not None
        assert (heard.bits, heard.digest, heard.machine) == (known, "", "rank 1")
        assert with_bits(heard, "56.78").bits == known


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(among_ranks, "_POLL_S", 0.001)
    monkeypatch.setattr(among_ranks, "_POLL_S_PER_RANK", 0.0)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, no_process: None) -> Callable[..., Program]:
    def make(count: int = 40, **options: Any) -> Program:
        made = Program(count, **options)
        monkeypatch.setattr(sweep, "run", made.run)
        return made

    return make


def test_each_config_is_measured_once_and_every_rank_takes_part(program: Callable[..., Program]) -> None:
    shared = program()
    met = threading.Barrier(RANKS, timeout=60)

    def meet(rank: int, index: int) -> None:
        if not shared.measured[rank]:
            met.wait()  # all ranks have taken a config

    shared.on_config = meet
    helpers = [threading.Thread(target=shared.help, args=(rank,)) for rank in range(1, RANKS)]
    for helper in helpers:
        helper.start()
    trials = shared.lead()
    for helper in helpers:
        helper.join()
    assert sorted(trials) == [*range(40)]
    assert [trials[index].config["n"] for index in trials] == [*trials]
    assert sorted(itertools.chain(*shared.measured.values())) == [*range(40)]
    assert all(shared.measured.values())
    by_rank = {rank: [index for index in trials if trials[index].machine == f"rank {rank}"] for rank in range(1, RANKS)}
    assert by_rank == {rank: sorted(shared.measured[rank], key=[*trials].index) for rank in by_rank}


def test_each_rank_begins_with_the_same_part_in_every_run(program: Callable[..., Program]) -> None:
    for _ in range(2):
        shared = program(41)
        leader = among_ranks._Leader(shared.board(0), request := shared.request(0), request.space)
        first = leader.begin(dict(enumerate(request.space)))
        assert [*first] == [0, 1, 5, 9, 13, 17]  # the first config, then the first of its part
        for rank, count in ((1, 4), (2, 3), (3, 3)):  # fewer, as fewer are left
            helper = among_ranks._Helper(shared.board(rank), request.space, str)
            assert [*helper.rest()] == [rank + 1 + RANKS * step for step in range(count)]


def test_a_rank_that_comes_late_costs_nothing(program: Callable[..., Program]) -> None:
    shared = program()
    assert len(shared.lead()) == 40
    shared.help(3)
    assert (len(shared.measured[0]), shared.measured[3]) == (40, [])


def test_the_leader_takes_over_from_a_rank_that_dies(
    program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(among_ranks, "_LEAST_S", 0.01)
    shared = program()

    def die(rank: int, index: int) -> None:
        if rank == 0 and not shared.measured[0]:  # the lists are there
            assert [*among_ranks._Helper(shared.board(2), shared.request(2).space, str).take(8)] == [3, 7, 11, 15]

    shared.on_config = die
    assert len(shared.lead()) == 40
    assert shared.measured[0][-4:] == [3, 7, 11, 15], "last: they might still have come"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        '{"outcome": "ok"}',
        trial_text(time_ms=None),
        trial_text(message="x" * among_ranks._MOST_CHARS),
        trial_text(outcome=Outcome.LOST),
        '{"config": {}, "outcome": "ok", "time_ms": -1}',
    ],
)
def test_a_config_with_a_bad_trial_runs_on_the_leader(text: str, program: Callable[..., Program]) -> None:
    shared = program()

    def send(rank: int, index: int) -> None:
        if not shared.measured[0]:
            assert shared.board(1).take(39)
            shared.client.values["topic/0/trial/39"] = text

    shared.on_config = send
    assert len(shared.lead()) == 40
    assert shared.measured[0][-1] == 39


def test_a_trial_brings_no_config_of_its_own(program: Callable[..., Program]) -> None:
    shared = program()

    def send(rank: int, index: int) -> None:
        if not shared.measured[0]:
            assert shared.board(1).take(39)
            shared.client.values["topic/0/trial/39"] = trial_text(config={"n": "evil"}, device="cpu:0 on rank 1")

    shared.on_config = send
    assert shared.lead()[39].config == {"n": 39}
    assert 39 not in shared.measured[0]


def test_a_rank_that_leads_next_uses_the_trials_so_far(program: Callable[..., Program]) -> None:
    shared = program()

    def die(rank: int, index: int) -> None:
        if len(shared.measured[0]) == 15 and rank == 0:
            raise KeyboardInterrupt

    shared.on_config = die
    with pytest.raises(KeyboardInterrupt):
        shared.lead()
    assert len(shared.lead(rank=1)) == 40
    assert sorted(shared.measured[0] + shared.measured[1]) == [*range(40)]


def test_a_helper_that_fails_returns_its_configs(
    program: Callable[..., Program], caplog: pytest.LogCaptureFixture
) -> None:
    shared = program()

    def fail(rank: int, index: int) -> None:
        if rank == 0 and not shared.measured[0]:
            shared.help(1)
        if rank == 1 and len(shared.measured[1]) == 2:
            raise OSError("no space left")

    shared.on_config = fail
    assert len(shared.lead()) == 40
    assert sorted(shared.measured[0] + shared.measured[1]) == [*range(40)]
    assert "shared: rank 1 cannot help rank 0: no space left" in caplog.messages


def test_a_helper_whose_defaults_fail_sends_no_trial(program: Callable[..., Program]) -> None:
    shared = program()
    helper = among_ranks._Helper(shared.board(1), shared.request(1).space, str)
    shared.board(0).publish(0, WorkList(indices=tuple(range(8)), is_last=True))
    taken = helper.take(1)
    helper.note_default(Trial(config={}, outcome=Outcome.CRASHED))
    for index, config in taken.items():
        helper.note(index, ok(config))
    assert helper.is_closed
    helper.return_left()
    trials = [shared.board(0).heard(index, config) for index, config in taken.items()]
    assert [trial and trial.outcome for trial in trials] == [Outcome.NOT_RUN]


def test_a_helper_ends_when_the_ranks_have_an_answer(program: Callable[..., Program]) -> None:
    shared = program()
    shared.board(0).publish(0, WorkList(indices=tuple(range(40)), is_last=False))
    shared.help(1, lambda: "the ranks have an answer" if len(shared.measured[1]) > 2 else "")
    assert 2 < len(shared.measured[1]) < 40


class Asked(ConfigSource):
    """A search that gives a number of configs, each after the trial of one before it."""

    def __init__(self, configs: Mapping[int, Config], is_over: Callable[[], bool] = lambda: False) -> None:
        self.left, self.told = dict(configs), dict[int, Trial]()
        self.given = 1
        self.is_over = is_over

    @property
    def is_closed(self) -> bool:
        return not self.left or self.is_over()

    @property
    def total(self) -> int:
        return len(self.left)

    def take(self, count: int) -> dict[int, Config]:
        count = min(count, 6 - self.given + len(self.told), len(self.left))
        taken = {index: self.left.pop(index) for index in [*self.left][: max(0, count)]}
        self.given += len(taken)
        return taken

    def ended(self, index: int, trial: Trial) -> None:
        assert index not in self.told
        self.told[index] = trial

    def why_late(self) -> str:
        return "the time is over" if self.is_over() else ""


def lead_search(shared: Program, is_over: Callable[[], bool] = lambda: False) -> tuple[Mapping[int, Trial], Asked]:
    request = shared.request(0)
    first, *others = enumerate(request.space)
    asked = Asked(dict(others), is_over)
    request = dataclasses.replace(request, source=asked)
    among_ranks.lead(request, dict([first]), shared.board(0), request.space)
    return request.ledger.trials, asked


def test_ranks_share_the_configs_of_a_search(program: Callable[..., Program]) -> None:
    shared = program()
    helper = threading.Thread(target=shared.help, args=(1,))
    shared.on_config = lambda rank, index: helper.join(0.001 if rank == 0 and not shared.measured[1] else 0)
    shared.board(0).publish(0, WorkList(indices=(), is_last=False))  # as the leader does
    helper.start()
    while shared.board(0).helpers() < 0:  # the leader has not joined yet
        pass
    trials, asked = lead_search(shared)
    helper.join()
    assert sorted(trials) == sorted(asked.told) == [*range(40)]
    assert sorted(shared.measured[0] + shared.measured[1]) == [*range(40)]


def test_a_search_whose_time_is_over_waits_for_no_rank(program: Callable[..., Program]) -> None:
    shared = program()
    shared.board(0).publish(0, WorkList(indices=(), is_last=False))
    assert shared.board(1).join("1")
    assert shared.board(2).join("2")
    # The first two configs that are listed for the others.
    shared.on_config = lambda rank, index: [shared.board(1).take(other) for other in (1, 2)]
    trials, _ = lead_search(shared, lambda: len(shared.measured[0]) > 9)
    ends = [trial.outcome for trial in trials.values()]
    assert set(ends) == {Outcome.OK, Outcome.NOT_RUN}
    assert ends.count(Outcome.OK) == len(shared.measured[0])
    assert {trial.message for trial in trials.values()} == {"", "the time is over"}


@pytest.mark.parametrize(
    ("count", "agree", "options", "is_shared"),
    [
        (17, "auto", {}, True),
        (16, "auto", {}, False),
        (2, "share", {}, True),
        (40, 1, {}, False),
        (40, "share", {"ref_fn": "defaults"}, False),  # there are no defaults, so outputs are compared with each other
    ],
)
def test_long_sweeps_are_shared_and_all_with_agree_share(
    count: int, agree: str | int, options: dict[str, Any], is_shared: bool, program: Callable[..., Program]
) -> None:
    shared = program(count, agree=agree, **options)
    assert len(shared.lead()) == count
    assert bool(shared.client.values) == is_shared


def test_configs_that_hung_before_stay_on_the_leader(program: Callable[..., Program]) -> None:
    shared = program()
    assert len(shared.lead(troubled=[5, 6])) == 40
    assert shared.measured[0][-2:] == [5, 6]
    assert not shared.client.values.keys() & {"topic/0/taken/5", "topic/0/taken/6"}


@pytest.mark.parametrize(("agree", "takes_part"), [("auto", False), ("share", True)])
def test_of_ranks_with_one_cpu_only_the_leader_measures(
    agree: str, takes_part: bool, program: Callable[..., Program]
) -> None:
    shared = program(agree=agree)

    def meet(rank: int, index: int) -> None:
        if rank == 0 and not shared.measured[0]:
            shared.help(1)

    shared.on_config = meet
    assert len(shared.lead()) == 40
    assert bool(shared.measured[1]) == takes_part


def test_a_leader_that_cannot_load_the_function_fails_as_alone(
    program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = program()

    def fail(request: SweepRequest, configs: Mapping[int, Config]) -> Swept:
        for index, config in configs.items():
            request.ledger.end(index, Trial(config=config, outcome=Outcome.ERROR, message="no module"))
        return Swept()

    monkeypatch.setattr(sweep, "run", fail)
    assert {trial.message for trial in shared.lead().values()} == {"no module"}
    assert len(shared.client.values) > 1


def test_ranks_without_beats_are_silent(program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(among_ranks, "_BEAT_S", 0.001)
    shared = program()
    pulses = among_ranks.Pulses(shared.board(0).store, "topic")
    assert pulses.silent() == set()
    shared.board(1).beat(0)
    shared.board(2).beat(0)
    with shared.board(1).beating():
        assert eventually(lambda: int(shared.client.values["topic/beat/1"]) > 3)
        assert eventually(lambda: not pulses.silent() and pulses._heard.keys() == {"1", "2"})
    pass_time(monkeypatch, 1000)
    assert "2" in pulses.silent()
    shared.board(2).beat(1)
    assert eventually(lambda: "2" not in pulses.silent()), "it was only stopped"
    shared.client.error = "UNAVAILABLE"  # the thread ends quietly
    with shared.board(1).beating():
        pass


def test_the_configs_of_a_dead_rank_run_at_once(
    program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = program()

    def die(rank: int, index: int) -> None:
        if rank == 0 and not shared.measured[0]:
            shared.board(2).beat(1)
            assert shared.board(2).take(39)
        if rank == 0 and len(shared.measured[0]) == 38:
            monkeypatch.setattr(among_ranks, "SILENCE_S", 0.0)

    shared.on_config = die
    assert len(shared.lead()) == 40
    assert shared.measured[0][-1] == 39
