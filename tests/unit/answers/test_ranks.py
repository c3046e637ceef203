"""Ranks agree on an answer in every order of their steps; the store is in memory and the clock is fake."""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import pytest

from quarantune.answers import ranks
from quarantune.answers.ranks import Member, Offer, Source
from quarantune.values.codec import canonical_json

TOPIC = "topic"
DEADLINE_S = 20.0
ADVANCE_S = 6.0
ERROR = "the result of tuning that raises"


class Rank(enum.Enum):
    """What happens when a rank makes the call."""

    WARM = "it has a config in its cache"
    COLD = "it has no config, and tunes successfully"
    FAILS = "every config fails"
    RAISES = "tuning ends with an error that is not about the configs"
    SLOW = "it tunes successfully, but for longer than the others wait"
    STRICT = "it has no config, and must not tune"
    PAUSED = "it has no config, and must not tune in this block of code"
    ABSENT = "it never makes the call"


class State(NamedTuple):
    """A moment of a program: everything its ranks have read, and when."""

    now_s: float
    store: tuple[tuple[str, str], ...]
    pasts: tuple[tuple[tuple[float, Any], ...], ...]
    looked: tuple[tuple[int, float], ...]


class Rerun(NamedTuple):
    """A rank after its past: its next step with the arguments, or its end."""

    step: str
    args: tuple[Any, ...]
    end: Offer | BaseException | None
    state: tuple[Any, ...] = ()


class Pending(BaseException):
    """Stops a rank at the end of its past."""


class Steps:
    """The steps of a rank: each returns its past result; the first new one raises `Pending`."""

    def __init__(self, rank: int, ranks: int, past: tuple[tuple[float, Any], ...]) -> None:
        self.rank = rank
        self.ranks = ranks
        self.now_s = 0.0
        self.next: tuple[str, tuple[Any, ...], Pending] | None = None
        self._past = iter(past)

    def __getattr__(self, step: str) -> Callable[..., Any]:
        def take(*args: Any) -> Any:
            self.now_s, result = next(self._past, (self.now_s, self))
            if result is ERROR:
                raise LookupError("not about the configs")
            if result is self:
                pending = Pending()
                self.next = self.next or (step, args, pending)
                raise pending
            return result

        return take


class Store:
    """The key-value store as one rank sees it."""

    def __init__(self, rank: int, texts: dict[str, str]) -> None:
        self.rank = rank
        self.ranks = 2
        self._texts = texts

    def read(self, key: str) -> str | None:
        return self._texts.get(key)

    def write(self, key: str, text: str) -> bool:
        return self._texts.setdefault(key, text) is text

    def listed(self, directory: str) -> dict[str, str]:
        return {key: text for key, text in self._texts.items() if key.startswith(f"{directory}/")}


def own_answer(rank: int, source: Source) -> Offer:
    return Offer(config={"n": rank}, rank=rank, source=source, time_ms=1.0 + rank)


def nobody(rank: int) -> Offer:
    return Offer(config=None, rank=rank, source=Source.NOBODY)


def rerun(kinds: tuple[Rank, ...], rank: int, state: State) -> Rerun:
    """Runs a rank again through its past."""
    steps: Any = Steps(rank, len(kinds), state.pasts[rank])
    member = Member(TOPIC, steps, clock=lambda: float(steps.now_s))
    own = own_answer(rank, Source.CACHE) if kinds[rank] is Rank.WARM else None
    is_paused = kinds[rank] is Rank.PAUSED
    tune = None if is_paused or kinds[rank] is Rank.STRICT else steps.tune
    try:
        answer = member.agree(
            own, last=nobody(rank), tune=tune, wait=steps.wait, deadline_s=DEADLINE_S, is_paused=is_paused
        )
        return Rerun("", (), answer)
    except LookupError as error:
        return Rerun("", (), error)
    except Pending:
        step, args, pending = steps.next
        return Rerun(step, args, None, (member._claimed, *variables(pending.__traceback__)))


def variables(trace: TracebackType | None) -> tuple[Any, ...]:
    """Returns the positions and variables of a member's functions; ranks with equal ones continue alike."""
    found = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == ranks.__file__:
            local = {name: value for name, value in trace.tb_frame.f_locals.items() if name not in ("self", "own")}
            found.append((trace.tb_lasti, repr({name: callable(value) or value for name, value in local.items()})))
        trace = trace.tb_next
    return tuple(found)


def perform(run: Rerun, kind: Rank, rank: int, texts: dict[str, str]) -> Any:
    if run.step == "tune":
        if kind is Rank.RAISES:
            return ERROR
        return None if kind is Rank.FAILS else own_answer(rank, Source.TUNED)
    return None if run.step == "wait" else getattr(Store(rank, texts), run.step)(*run.args)


def moves(kinds: tuple[Rank, ...], state: State, reruns: dict[int, Rerun]) -> list[State]:
    """Returns the possible next moments: any rank may take its next step."""
    left = [rank for rank, run in reruns.items() if run.end is None]
    store = dict(state.store)
    nexts = []
    for rank in left:
        run = reruns[rank]
        if run.step == "wait":
            claims = [key for key, holder in store.items() if "/claim/" in key and holder == str(rank)]
            assert not claims or f"{TOPIC}/out/{rank}" in store  # a rank with a claim waits for nobody
            if state.looked[rank] == (len(store), state.now_s):
                continue
        if run.step == "tune" and kinds[rank] is Rank.SLOW and left != [rank]:
            continue
        after = dict(store)
        result = perform(run, kinds[rank], rank, after)
        looks = run.step == "read" and run.args[0].endswith("/answer")
        nexts.append(
            State(
                state.now_s,
                tuple(sorted(after.items())),
                replaced(state.pasts, rank, (*state.pasts[rank], (state.now_s, result))),
                replaced(state.looked, rank, (len(store), state.now_s)) if looks else state.looked,
            )
        )
    assert state.now_s < 10 * DEADLINE_S, state
    # Time passes only while nobody can do anything else.
    return nexts or [state._replace(now_s=state.now_s + ADVANCE_S)]


def check_all_orders(kinds: tuple[Rank, ...]) -> None:
    todo, seen = [start(kinds)], set()
    while todo:
        state = todo.pop()
        reruns = now(kinds, state)
        moment = state._replace(pasts=tuple((run.state, repr(run.end)) for run in reruns.values()))
        if moment not in seen:
            seen.add(moment)
            todo += check(kinds, state, reruns)


def check_an_order(kinds: tuple[Rank, ...], pick: random.Random) -> None:
    nexts = [start(kinds)]
    while nexts:
        state = pick.choice(nexts)
        nexts = check(kinds, state, now(kinds, state))


def start(kinds: tuple[Rank, ...]) -> State:
    return State(0.0, (), ((),) * len(kinds), ((-1, -1.0),) * len(kinds))


def now(kinds: tuple[Rank, ...], state: State) -> dict[int, Rerun]:
    return {rank: rerun(kinds, rank, state) for rank, kind in enumerate(kinds) if kind is not Rank.ABSENT}


def check(kinds: tuple[Rank, ...], state: State, reruns: dict[int, Rerun]) -> list[State]:
    """Checks a moment of a program and returns the possible next ones, none if all ranks have ended."""
    tuning = sum(run.step == "tune" for run in reruns.values())
    assert tuning <= 1, (kinds, state)
    if any(run.end is None for run in reruns.values()):
        return moves(kinds, state, reruns)
    raised = sum(isinstance(run.end, LookupError) for run in reruns.values())
    answers = {repr(run.end): run.end for run in reruns.values() if isinstance(run.end, Offer)}
    assert raised <= kinds.count(Rank.RAISES), (kinds, state)
    assert len(answers) == (raised < len(reruns)), (kinds, state)
    for answer in answers.values():
        if answer.source is Source.NOBODY:
            assert not {Rank.WARM, Rank.COLD, Rank.SLOW} & set(kinds), (kinds, state)
        assert not answer.is_paused or set(kinds) == {Rank.PAUSED}, (kinds, state)
        if answer.source is Source.LATE:
            assert Rank.SLOW in kinds, (kinds, state)
    return []


def replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 7.0)


def test_two_ranks_agree_in_every_order_of_their_steps() -> None:
    for kinds in itertools.combinations_with_replacement(Rank, 2):
        check_all_orders(kinds)


@pytest.mark.slow
def test_four_ranks_agree_in_many_orders_of_their_steps() -> None:
    for number, kinds in enumerate(itertools.combinations_with_replacement(Rank, 4)):
        check_an_order(kinds, random.Random(number))


def agree_alone(rank: int, tune: Callable[[], Offer | None], texts: dict[str, str]) -> Offer:
    store: Any = Store(rank, texts)
    member = Member(TOPIC, store, clock=lambda: 0.0)
    return member.agree(None, last=nobody(0), tune=tune, wait=lambda *_: None, deadline_s=DEADLINE_S)


def test_control_c_while_tuning_gives_up_the_claim() -> None:
    store: dict[str, str] = {}

    def interrupted() -> Offer:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agree_alone(0, interrupted, store)
    assert store == {f"{TOPIC}/claim/0": "0", f"{TOPIC}/out/0": "ended by an exception"}
    assert agree_alone(1, lambda: own_answer(1, Source.TUNED), store) == own_answer(1, Source.TUNED)


def test_a_rank_that_tunes_late_takes_the_others_answer() -> None:
    store: dict[str, str] = {}
    defaults = Offer(config=None, rank=0, source=Source.LATE)

    def tune() -> Offer:
        store[f"{TOPIC}/answer"] = canonical_json(defaults.to_json())
        return own_answer(0, Source.TUNED)

    assert agree_alone(0, tune, store) == defaults


def test_answers_survive_their_text_and_other_texts_are_refused() -> None:
    answer = Offer(config={"n": [1, {"x": True}]}, rank=3, source=Source.TUNED, time_ms=0.5, default_time_ms=None)
    store: Any = Store(0, {})
    member = Member(TOPIC, store)
    assert member.offer(answer) == member.read() == answer
    for number, text in enumerate(
        ("[]", "{}", '{"config": 1, "rank": 0, "source": "cache"}', "nonsense", "[" * 100_000)
    ):
        store.write(f"{number}/answer", text)
        with pytest.raises(ValueError, match=r".+"):
            Member(str(number), store).read()
