"""How the ranks of one program come to use one config for one call: the first answer that any of them offers.

The ranks share nothing but a key-value store in which the first writer of a key wins. Its keys, for one call:

    answer       the config that every rank uses for the life of the program
    claim/<k>    the rank that tunes in attempt k, counted from 0
    out/<rank>   the rank does not tune, or failed to: its claim is over, and it makes no other

Each rank goes through these states, and every one of them ends when there is an answer:

    LOOK ──> OFFER           it has a config in its cache
     │
     ├─────> CLAIM ──> TUNE ──> OFFER      nobody tunes
     │                   └────> LOOK       it failed, and is out
     ├─────> WAIT ──> LOOK                 another rank tunes
     └─────> OFFER the defaults            all ranks are out, or the deadline has passed
                                           (with ON_MISS=nearest, a near config if all are out)

A rank never waits while it has a claim, so ranks cannot wait for each other in a circle. This module only decides:
`Member.settle` yields one operation at a time, and `drive` has it performed.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from quarantune.values.codec import JsonObject, Record

_T = TypeVar("_T")

GRACE_S = 10.0
"""How long ranks that cannot tune wait for others, which may have a config or be able to tune, but never call."""


class Source(enum.Enum):
    """How an answer came about."""

    CACHE = "cache"
    TUNED = "tuned"
    NEAREST = "nearest"
    """No rank had a config or could tune, and this one has a config of a call with other sizes."""
    NOBODY = "nobody"
    """No rank could tune, so the answer is the defaults."""
    LATE = "late"
    """The rank that tuned did not end before the deadline, so the answer is the defaults."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Record):
    """A config that a rank offers to all.

    Attributes:
        config: the config as the cache encodes it; None for the function's own defaults.
        rank: the rank that has the config; without one, the rank that offers the defaults, or that was late.
        source: how it came about.
        time_ms: its time; None where it is unknown.
        default_time_ms: the time of the function's own defaults; None where it is unknown.
    """

    config: JsonObject | None
    rank: int
    source: Source
    time_ms: float | None = None
    default_time_ms: float | None = None

    def encode(self) -> str:
        """Returns the answer as the store holds it: JSON, which nothing executes."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def decode(cls, text: str) -> Answer:
        """Returns the answer that the store holds.

        Raises:
            ValueError: it holds something else.
        """
        return cls.from_json(json.loads(text))


@dataclasses.dataclass(frozen=True)
class Read:
    """Read a key of the store; its result is the text, or None."""

    key: str


@dataclasses.dataclass(frozen=True)
class Write:
    """Write a key of the store unless it is there; its result is whether it was not."""

    key: str
    text: str


@dataclasses.dataclass(frozen=True)
class Count:
    """Count the keys of a directory; its result is their number."""

    directory: str


@dataclasses.dataclass(frozen=True)
class Tune:
    """Tune for the call; its result is an answer, or None where every config failed."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """Wait for a moment.

    Attributes:
        tuner: the rank that tunes; None where none does.
        waited_s: how long this rank has waited for that.
        most_s: how long it will wait at most.
    """

    tuner: int | None
    waited_s: float
    most_s: float


Steps: TypeAlias = Generator[Read | Write | Count | Tune | Wait, Any, _T]
"""Operations to perform, which receive their results, and at last return a value."""


class Member:
    """One rank's part in the agreement on one call."""

    def __init__(self, topic: str, *, rank: int, ranks: int, deadline_s: float, clock: Callable[[], float]) -> None:
        """Sets up a member; nothing is read.

        Args:
            topic: the directory of the call in the store, the same for all ranks.
            rank: the number of this rank.
            ranks: how many ranks the program has.
            deadline_s: the longest that this rank waits for one rank to tune.
            clock: seconds.
        """
        self._topic = topic
        self._rank = rank
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._clock = clock
        self._claimed = False

    def read(self) -> Steps[Answer | None]:
        """Returns the answer, if there is one."""
        text = yield Read(f"{self._topic}/answer")
        return None if text is None else Answer.decode(text)

    def offer(self, answer: Answer) -> Steps[Answer]:
        """Offers an answer, and returns the one that was offered first."""
        while not (yield Write(f"{self._topic}/answer", answer.encode())):
            if (first := (yield from self.read())) is not None:
                return first
        return answer

    def settle(self, own: Answer | None, *, last: Answer, may_tune: bool) -> Steps[Answer]:
        """Returns the answer, by whichever way it comes about.

        Args:
            own: the answer that this rank has already, from its cache.
            last: the answer that it offers where no rank has one or can tune.
            may_tune: whether this rank tunes if it has to.
        """
        if own is not None:
            return (yield from self.offer(own))
        out = f"{self._topic}/out/{self._rank}"
        try:
            if not may_tune:
                yield Write(out, "does not tune")
            elif (yield Read(out)) is not None:
                may_tune = False
            return (yield from self._settle(last, may_tune=may_tune))
        except GeneratorExit:
            raise
        except BaseException:
            if self._claimed:  # an error that is not about the configs, or Ctrl-C: others need not wait for this rank
                yield Write(out, "ended by an exception")
            raise

    def _settle(self, last: Answer, *, may_tune: bool) -> Steps[Answer]:
        attempt, since, before = 0, self._clock(), ""
        claim: str | None = None
        while (answer := (yield from self.read())) is None:
            claim = claim or (yield Read(f"{self._topic}/claim/{attempt}"))
            if (state := f"{attempt} {claim}") != before:
                since, before = self._clock(), state
            waited_s = self._clock() - since
            if claim is None and may_tune:
                self._claimed = True  # an exception may hide that it has
                self._claimed = yield Write(f"{self._topic}/claim/{attempt}", str(self._rank))
                if self._claimed:
                    if (found := (yield from self._tune())) is not None:
                        return found
                    may_tune = False
            elif claim is None:
                if waited_s > GRACE_S or (yield Count(f"{self._topic}/out")) >= self._ranks:
                    return (yield from self.offer(last))
                yield Wait(None, waited_s, GRACE_S)
            elif (yield Read(f"{self._topic}/out/{claim}")) is not None:
                attempt, claim = attempt + 1, None
            elif waited_s > self._deadline_s:
                return (yield from self.offer(Answer(config=None, rank=int(claim), source=Source.LATE)))
            else:
                yield Wait(int(claim), waited_s, self._deadline_s)
        return answer

    def _tune(self) -> Steps[Answer | None]:
        """Tunes with the claim held, and returns the answer; None where this rank failed and is out."""
        if (answer := (yield from self.read())) is not None:  # offered since the last look
            return answer
        found = yield Tune()
        if found is not None:
            return (yield from self.offer(found))
        yield Write(f"{self._topic}/out/{self._rank}", "every config failed")
        return None


def drive(steps: Steps[_T], perform: Callable[[Read | Write | Count | Tune | Wait], Any]) -> _T:
    """Performs steps until they return, and returns their value.

    Whatever is raised meanwhile, by an operation or by Ctrl-C between two of them, is raised inside the steps, which
    may have more to do.
    """
    result: Any = None
    raised: BaseException | None = None
    while True:
        try:
            step = steps.send(result) if raised is None else steps.throw(raised)
            raised = None
            result = perform(step)
        except BaseException as error:
            if inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED:
                raised = error
            elif isinstance(error, StopIteration):
                value: _T = error.value
                return value
            else:
                raise
