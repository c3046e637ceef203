"""The ranks of one `jax.distributed` program run one config for one call: the first answer that any rank offers.

The ranks share only a key-value store. The first writer of a key wins. Its keys, for one call:

    answer       the config that every rank uses for the life of the program. If all ranks are in blocks that forbid
                 tuning, such as `recording()`, it holds inside these blocks; they enter and leave them alike, and the
                 calls after the blocks have another directory
    claim/<k>    the rank that tunes in attempt k, counted from 0
    out/<rank>   the rank does not tune, failed to, or shows no sign of life: its claim is over, and it makes no other

Each rank goes through these states, and every state ends when there is an answer:

    LOOK ──> OFFER           it has a config in its cache
     │
     ├─────> CLAIM ──> TUNE ──> OFFER      nobody tunes
     │                   └────> LOOK       it failed, and is out
     ├─────> WAIT ──> LOOK                 another rank tunes
     └─────> OFFER the defaults            all ranks are out, or the deadline has passed
                                           (with ON_MISS=nearest or rule, a near config if all are out)

A rank never waits for an answer while it has a claim, so ranks cannot wait for each other in a circle. While a rank
waits, it may help the rank that tunes; see `engine/among_ranks.py`. `Member` only decides; its caller supplies the
store, tuning, waiting and the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax

from quarantune.answers.answer import Answer, Origin
from quarantune.calls.key import KeyedCall, ProblemId
from quarantune.host.locks import lazy
from quarantune.jax_internals.jax_backends import Coordination
from quarantune.results.progress import Progress
from quarantune.sweep.limits import SearchLimits, SweepLimits, isolation_of
from quarantune.values.codec import JsonObject, Record, as_json, canonical_json, decode_json, equal
from quarantune.values.errors import TuningFailedError
from quarantune.values.options import AUTO, AUTO_EXHAUSTIVE_MOST, AUTO_MAX_TRIALS
from quarantune.values.settings import Isolation, Settings

if TYPE_CHECKING:
    from quarantune.engine.among_ranks import Board, Pulses

_logger = logging.getLogger("quarantune")

GRACE_S = 10.0
"""Seconds that a rank which cannot tune waits for others. They may have a config or tune, but may never call."""
_PAUSED = "does not tune in this block"
"""Value of `out/<rank>` for a rank that must not tune because of the block of code that it is in."""
_PREFIX = "quarantune/1"
"""Directory of this protocol in the program's key-value store; another protocol gets another number."""
_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 0.25
"""Seconds that a waiting rank sleeps between two looks: longer each time."""
_POLL_S_PER_RANK = 0.001
"""Longest sleep per rank; it matters above 250 ranks. A look takes 4 requests of 0.2 to 0.4 ms on a 2-core machine."""
_MESSAGE_S = 5.0
"""Seconds between two reports of a waiting rank."""
Agreed: TypeAlias = "dict[tuple[Any, ProblemId], _Standing]"
"""Answers so far for the calls of a function, by the program of ranks and the call."""
_Ask: TypeAlias = Callable[[], Answer | None]
_TuneOn: TypeAlias = "Callable[[Board], Answer | None]"
_Help: TypeAlias = "Callable[[Board, Callable[[], str]], None]"


class _Standing(NamedTuple):
    """An answer that this rank knows.

    Attributes:
        answer: the answer.
        round: the number of agreements on the call before this one.
        is_paused: see `Offer`.
    """

    answer: Answer
    round: int
    is_paused: bool


@dataclasses.dataclass(eq=False)
class Agreement:
    """The agreement of this rank with the others on one call.

    Attributes:
        keyed: the call.
        settings: the operator's settings.
        coordination: the means to agree.
        agreed: the answers so far; `agree` and `compare` add new ones.
    """

    keyed: KeyedCall
    settings: Settings
    coordination: Coordination
    agreed: Agreed

    def __post_init__(self) -> None:
        self._problem = self.coordination.client, self.keyed.id
        self._round = 0
        self._poll_s = _FIRST_POLL_S
        self._next_message: tuple[int | None, float] = (None, 0.0)
        self._own: Answer | None = None
        self._help: _Help | None = None
        self._pulses: dict[int, Pulses] = {}
        self._helped: set[int] = set()
        self._who = f"rank {self.coordination.rank} of {self.coordination.ranks}"
        self._label = f"{self.keyed.id.name}: {self._who}"

    def agree(
        self, *, own: _Ask, near: _Ask, tune: _TuneOn | None, help_with: _Help | None = None, is_paused: bool = False
    ) -> Answer:
        """Returns the answer of all ranks.

        Args:
            own: returns the answer of this rank, or None.
            near: returns the answer for a near call, in case no rank has an answer for this call.
            tune: tunes, perhaps with the help of ranks that wait, and returns the answer; None if this rank must not
                tune.
            help_with: helps the rank that tunes, until a function returns why that is over; None if this rank must
                not.
            is_paused: whether this rank must not tune because of the block of code that it is in.
        """
        if (known := self.agreed.get(self._problem)) is not None:
            if tune is None or not known.is_paused:
                return known.answer
            self._round = known.round + 1
        self._own, rank = own(), self.coordination.rank
        if (
            self._own is None
            and isolation_of(self.settings, self.keyed.platform, self.keyed.call.function.fn) is not Isolation.PROCESS
        ):
            # Here the tuning rank uses JAX itself. JAX's first use blocks until every rank has reached it, so every
            # rank does it now.
            jax.local_devices()
        offer = None if self._own is None else _offer(self._own, rank)
        last = Offer(config=None, rank=rank, source=Source.NOBODY)
        self._help = help_with
        if offer is None and tune is not None and self._member.read() is None:
            self._board(rank).beat(0)  # before it may claim: from then on, others listen for beats
        if self._own is None and (nearest := near()) is not None:
            last = _offer(nearest, rank)
        with contextlib.closing(
            Progress(self.keyed.label, name=self.keyed.id.name, shown=self.settings.progress)
        ) as progress:

            def tune_for_all() -> Offer | None:
                assert tune is not None
                progress.say(f"{self._who} tunes it for all")
                board = self._board(rank)
                try:
                    with board.beating():
                        self._own = tune(board)
                except TuningFailedError:  # memory keeps it, and another rank may succeed
                    return None
                return None if self._own is None else _offer(self._own, rank)

            offered = self._member.agree(
                offer,
                last=last,
                tune=None if tune is None else tune_for_all,
                wait=functools.partial(self._wait, progress),
                deadline_s=self._deadline_s(),
                is_paused=is_paused,
            )
        answer = self._outcome(offered)
        if tune is None or not offered.is_paused:
            return answer
        # Another object for this function has agreed on it in a block that has ended since.
        return dataclasses.replace(self).agree(own=own, near=near, tune=tune, help_with=help_with)

    def compare(self, own: _Ask = lambda: None, *, found: Answer | None = None) -> Answer | None:
        """Offers this rank's answer, if it has one, and returns the answer of all ranks or None; never waits.

        Args:
            own: returns the answer of this rank, or None.
            found: a new result of this rank, which it offers instead.
        """
        if (known := self.agreed.get(self._problem)) is not None:
            agreed = known.answer
            if found is not None and agreed.config != found.config and not known.is_paused:
                text = "the defaults" if agreed.config is None else self.keyed.call.function.text_of(agreed.config)
                told = "%s keeps running %s, as all ranks do; its new result is for the next program"
                _logger.info(told, self._label, text)
            return agreed
        self._own = own() if found is None else found
        if self._own is None:
            offered = self._member.read()
        else:
            offered = self._member.offer(_offer(self._own, self.coordination.rank))
        return None if offered is None else self._outcome(offered)

    def _outcome(self, offer: Offer) -> Answer:
        """Turns an offer into this rank's answer, and keeps the answer."""
        if offer.config is None:
            reason = "no rank had a config or could find one"
            if offer.source is Source.LATE:
                reason = f"rank {offer.rank} had not tuned it within the deadline"
            elif offer.is_paused:
                reason = "no rank had a config, and none may tune it here"
            log = _logger.warning if self.settings.on_miss == "tune" else _logger.info
            log("%s runs the defaults, as all ranks do: %s%s", self._label, reason, self._besides())
            return self._kept(offer, Answer(Origin.DEFAULTS, lasts=False, why=reason))
        config = self.keyed.call.function.config_from(offer.config, self.keyed.call)
        if config is None:
            raise RuntimeError(
                f"{self._label}: all ranks run {offer.config!r}, which rank {offer.rank} offers and this rank cannot "
                f"use: start all ranks with the same code and versions"
            )
        is_ours = self._own is not None and equal(self._own.config, config)
        who = "it" if offer.rank == self.coordination.rank else f"rank {offer.rank}"
        told = f"{who} {_HOW[offer.source]}{'' if is_ours else self._besides()}"
        _logger.info("%s runs %s, as all ranks do: %s", self._label, self.keyed.call.function.text_of(config), told)
        origins = {Source.NEAREST: Origin.NEAREST, Source.RULE: Origin.RULE}
        origin = origins.get(offer.source, Origin.SAVED)
        known = self._kept(offer, Answer(origin, config, offer.to_json()))
        return self._own if is_ours and self._own is not None and self._own.result is not None else known

    def _kept(self, offer: Offer, answer: Answer) -> Answer:
        """Keeps the answer of all ranks, and returns it."""
        self.agreed[self._problem] = _Standing(answer, self._round, offer.is_paused)
        return answer

    def _deadline_s(self) -> float:
        """Returns the most seconds that a sweep for the call may take, from the budgets and the deadlines."""
        call, function = self.keyed.call, self.keyed.call.function
        search = SearchLimits.of(function.options, self.settings)
        limits = SweepLimits.of(function.options, self.settings)
        if (configs := function.most_configs) is None and (call.has_unread_configs and search.search == AUTO):
            configs = AUTO_MAX_TRIALS
        configs = len(call.configs) if configs is None else configs
        if search.search == AUTO and configs > AUTO_EXHAUSTIVE_MOST:
            configs = AUTO_MAX_TRIALS
        if search.max_trials is not None:
            configs = min(configs, search.max_trials)
        longest_s = limits.longest_sweep_s(configs)
        if search.time_budget_s is None:
            return longest_s
        return min(longest_s, search.time_budget_s + limits.longest_sweep_s(limits.compile_slots))  # running ones

    def _besides(self) -> str:
        if self._own is None or self._own.config is None:
            return ""
        text = self.keyed.call.function.text_of(self._own.config)
        if self._own.result is None:
            return f"; its own cache has {text}"
        return f"; its own sweep saved {text} for the next program"

    @lazy
    def _member(self) -> Member:
        """This rank's part in the agreement."""
        call = self.keyed.call
        parts = [*self.keyed.id, call.space, *([self._round] if self._round else [])]  # the same for all ranks
        topic = f"{_PREFIX}/{hashlib.sha256(canonical_json(parts).encode()).hexdigest()}"
        return Member(topic, self.coordination)

    def _board(self, leader: int) -> Board:
        from quarantune.engine.among_ranks import Board  # a rank with an answer does not need it

        return Board(self.coordination, self._member.topic, leader, self.keyed.arguments_hash)

    def _why_over(self, tuner: int) -> str:
        """Returns why helping a rank is over; empty while it tunes."""
        if self._member.read() is not None:
            return "the ranks have an answer"
        if self._member.is_out(tuner):
            return f"rank {tuner} has ended its sweep"
        return f"rank {tuner} shows no sign of life" if self._is_silent(tuner) else ""

    def _is_silent(self, tuner: int) -> bool:
        """Returns whether a rank that tunes shows no sign of life."""
        from quarantune.engine.among_ranks import Pulses

        if tuner not in self._pulses:  # a rank that waited before it claimed the call did not beat
            self._pulses[tuner] = Pulses(self.coordination, self._member.topic)
        return str(tuner) in self._pulses[tuner].silent()

    def _wait(self, progress: Progress, tuner: int | None, waited_s: float, most_s: float) -> None:
        if tuner is not None:
            if self._is_silent(tuner) and self._member.exclude(tuner):
                _logger.warning("%s sees no sign of life of rank %d: another rank tunes", self._label, tuner)
                return
            board = self._board(tuner)
            if self._help is not None and tuner not in self._helped and board.work(0) is not None:
                self._helped.add(tuner)
                progress.say(f"{self._who} helps rank {tuner} to tune it")
                self._help(board, functools.partial(self._why_over, tuner))
                return
        before, due_s = self._next_message
        if tuner != before or waited_s >= due_s:
            self._next_message = tuner, waited_s + _MESSAGE_S
            whom = "another rank" if tuner is None else f"rank {tuner}"
            for_what = "have a config for it" if tuner is None else "tune it"
            progress.say(f"{self._who} waits for {whom} to {for_what} ({waited_s:.0f} s, at most {most_s:.0f} s)")
        time.sleep(self._poll_s)
        self._poll_s = min(1.5 * self._poll_s, max(_LONGEST_POLL_S, self.coordination.ranks * _POLL_S_PER_RANK))


def _offer(answer: Answer, rank: int) -> Offer:
    found = answer.findings
    sources = {Origin.MEASURED: Source.TUNED, Origin.NEAREST: Source.NEAREST, Origin.RULE: Source.RULE}
    return Offer(
        config=as_json(answer.config),
        rank=rank,
        source=sources.get(answer.origin, Source.CACHE),
        time_ms=None if math.isnan(found.time_ms) else found.time_ms,
        default_time_ms=found.default_time_ms,
        expected_loss=found.expected_loss,
    )


class Source(enum.Enum):
    """The origin of an offer."""

    CACHE = "cache"
    TUNED = "tuned"
    NEAREST = "nearest"
    """No rank had a config or could tune, and the offering rank has a config for other sizes."""
    RULE = "rule"
    """As `NEAREST`, and the config is from a rule."""
    NOBODY = "nobody"
    """No rank could tune, so the answer is the defaults."""
    LATE = "late"
    """The rank that tuned did not end before the deadline, so the answer is the defaults."""


_HOW = {
    Source.CACHE: "had it in its cache",
    Source.TUNED: "found it by tuning",
    Source.NEAREST: "had it in its cache for a call with other sizes",
    Source.RULE: "has it from a rule",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer(Record):
    """A config that a rank offers to all.

    Attributes:
        config: the config as the cache encodes it; None for the function's own defaults.
        rank: the rank that has the config. For the defaults, the rank that offers them, or the rank that was late.
        source: the origin of the offer.
        time_ms: its time; None if unknown.
        default_time_ms: the time of the function's own defaults; None if unknown.
        expected_loss: the expected loss of a rule's config, as a share; None for others.
        is_paused: whether no rank had a config or may tune in the block of code that it is in. The answer does not
            outlive these blocks.
    """

    config: JsonObject | None
    rank: int
    source: Source
    time_ms: float | None = None
    default_time_ms: float | None = None
    expected_loss: float | None = None
    is_paused: bool = False


_Tune: TypeAlias = Callable[[], Offer | None]
"""Tunes for the call, and returns the offer; None if every config failed."""
_Wait: TypeAlias = Callable[[int | None, float, float], None]
"""Waits for a moment; takes the rank that tunes, or None if no rank tunes, the seconds that this rank has waited, and
the most seconds that it will wait."""


class Member:
    """One rank's part in the agreement on one call."""

    def __init__(self, topic: str, store: Coordination, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Sets up a member; nothing is read.

        Args:
            topic: the directory of the call in the store, the same for all ranks with this call, code and config space.
            store: the key-value store of the program.
            clock: seconds.
        """
        self.topic = topic
        self._store = store
        self._clock = clock
        self._claimed = False

    def read(self) -> Offer | None:
        """Returns the answer, or None."""
        text = self._read("answer")
        return None if text is None else Offer.from_json(decode_json(text))

    def is_out(self, rank: int) -> bool:
        """Returns whether the claim of a rank is over."""
        return self._read(f"out/{rank}") is not None

    def exclude(self, rank: int) -> bool:
        """Ends the claim of a rank that shows no sign of life; returns whether it was this rank that ended it."""
        return self._write(f"out/{rank}", "no sign of life")

    def offer(self, answer: Offer) -> Offer:
        """Offers an answer, and returns the first offer of all ranks."""
        while not self._write("answer", canonical_json(answer.to_json())):
            if (first := self.read()) is not None:
                return first
        return answer

    def agree(
        self,
        own: Offer | None,
        *,
        last: Offer,
        tune: _Tune | None,
        wait: _Wait,
        deadline_s: float,
        is_paused: bool = False,
    ) -> Offer:
        """Returns the answer: an offer of this or another rank, after tuning or waiting if necessary.

        Args:
            own: the answer from this rank's cache; None if the cache has none.
            last: the offer of this rank if no rank has a config or can tune.
            tune: tunes; None if this rank must not tune.
            wait: waits.
            deadline_s: the longest that this rank waits for one rank to tune.
            is_paused: whether this rank must not tune because of the block of code that it is in.
        """
        if own is not None:
            return self.offer(own)
        out = f"out/{self._store.rank}"
        try:
            if tune is None:
                self._write(out, _PAUSED if is_paused else "does not tune")
            elif self._read(out) is not None:
                tune = None
            return self._agree(last, tune, wait, deadline_s)
        except BaseException:
            if self._claimed:  # Ctrl-C, or an error outside the configs: others need not wait for this rank
                self._write(out, "ended by an exception")
            raise

    def _agree(self, last: Offer, tune: _Tune | None, wait: _Wait, deadline_s: float) -> Offer:
        attempt, since, before = 0, self._clock(), ""
        claim: str | None = None
        while (answer := self.read()) is None:
            claim = claim or self._read(f"claim/{attempt}")
            if (state := f"{attempt} {claim}") != before:
                since, before = self._clock(), state
            waited_s = self._clock() - since
            if claim is None and tune is not None:
                self._claimed = True  # an exception in the write may hide its success
                self._claimed = self._write(f"claim/{attempt}", str(self._store.rank))
                if self._claimed:
                    if (answer := self.read()) is not None:  # offered since the last look
                        return answer
                    if (found := tune()) is not None:
                        return self.offer(found)
                    self._write(f"out/{self._store.rank}", "every config failed")
                    tune = None
            elif claim is None:
                outs = self._store.listed(f"{self.topic}/out").values()
                if len(outs) >= self._store.ranks:
                    return self.offer(dataclasses.replace(last, is_paused=all(each == _PAUSED for each in outs)))
                if waited_s > GRACE_S:
                    return self.offer(last)
                wait(None, waited_s, GRACE_S)
            elif self._read(f"out/{claim}") is not None:
                attempt, claim = attempt + 1, None
            elif waited_s > deadline_s:
                return self.offer(Offer(config=None, rank=int(claim), source=Source.LATE))
            else:
                wait(int(claim), waited_s, deadline_s)
        return answer

    def _read(self, key: str) -> str | None:
        return self._store.read(f"{self.topic}/{key}")

    def _write(self, key: str, text: str) -> bool:
        return self._store.write(f"{self.topic}/{key}", text)
