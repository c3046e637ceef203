"""One sweep that ranks of a `jax.distributed` program share: each rank measures configs on its own device.

The rank that has claimed the call leads: it lists the configs, collects the trials, and holds the final. The ranks that
wait for it help. They share only the program's key-value store. Its keys, below the directory of the call:

    beat/<rank>               a number that changes while a rank that leads or helps is alive
    <leader>/work/<n>         the n-th list of configs; the last list is marked
    <leader>/taken/<config>   the rank that measures a config, by first writer wins
    <leader>/trial/<config>   the trial of a config; `not_run` if a helper returned the config
    <leader>/device/<name>    the rank that measures on a device, by first writer wins

An index names the same config for all ranks. Each rank begins with its own part of a list, the same in every run. Then
it takes configs from the ends of the other parts, fewer at a time towards the end of the list. So a rank that is late
or slow measures less. A taken config runs again on the leader if its rank is silent, or if it takes much longer than
the others did. If the leader is silent, another rank claims the call and uses the trials so far.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated

from quarantune.host.machine import boot_id
from quarantune.jax_internals.jax_backends import Coordination
from quarantune.scheduler.plan import ConfigSource, Mode
from quarantune.sweep import sweep
from quarantune.sweep.ledger import Listener
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.values.codec import Record, canonical_json, decode_json, within
from quarantune.values.configs import Config
from quarantune.values.options import AUTO
from quarantune.values.settings import SHARE
from quarantune.values.space import Space
from quarantune.values.trial import UNSETTLED, Outcome, Trial

_logger = logging.getLogger("quarantune")

FEWEST = 17
"""Least number of configs that ranks share with `AGREE=auto`: fewer are measured by the time that a rank has begun."""
_MOST_CHARS = 200_000
"""Longest text of a trial. A longer one is not sent and not read: the leader measures the config."""
_ASKED = 8
"""Number of configs to take when a run begins."""
SILENCE_S = 20.0
"""Seconds without a beat after which a rank counts as dead."""
_BEAT_S = 1.0
"""Seconds between two beats of a rank that leads or helps."""
_POLL_S, _POLL_S_PER_RANK, _POLL_SHARE = 0.1, 0.002, 0.1
"""Least seconds between two looks at the store, for a program and for each of its ranks, and the share of the time that
the leader's looks may take. A look of a helper takes 2 to 4 requests of 0.2 to 0.4 ms."""
_PATIENCE, _LEAST_S = 3.0, 5.0
"""Multiple of the longest time of a config so far, and least seconds, that the leader waits for a taken config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkList(Record):
    """A list of configs to measure.

    Attributes:
        indices: the configs.
        is_last: whether no further list comes.
    """

    indices: tuple[Annotated[int, within(0, 2**63)], ...]
    is_last: bool


@dataclasses.dataclass(frozen=True)
class Board:
    """The part of the store for one shared sweep.

    Attributes:
        store: the key-value store of the program.
        topic: the directory of the call.
        leader: the rank that leads.
    """

    store: Coordination
    topic: str
    leader: int

    def beat(self, count: int) -> None:
        """Shows that this rank is alive."""
        self.store.put(f"{self.topic}/beat/{self.store.rank}", str(count))

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Shows during the block that this rank is alive, whatever its main thread does."""
        is_over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # the service is gone, and the main thread also notices it
                for count in itertools.count(1):
                    self.beat(count)
                    if is_over.wait(_BEAT_S):
                        return

        threading.Thread(target=beat, name="quarantune-beat", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def publish(self, number: int, work: WorkList) -> None:
        """Publishes a list of configs."""
        self.store.write(self._key(f"work/{number}"), canonical_json(work.to_json()))

    def work(self, number: int) -> WorkList | None:
        """Returns a list of configs; None before it is published."""
        text = self.store.read(self._key(f"work/{number}"))
        return None if text is None else WorkList.from_json(decode_json(text))

    def take(self, index: int) -> bool:
        """Takes a config for this rank, and returns whether it is the first to do so."""
        return self.store.write(self._key(f"taken/{index}"), str(self.store.rank))

    def taken(self) -> dict[int, str]:
        """Returns the ranks that have taken configs, by config."""
        return {int(index): rank for index, rank in self.store.listed(self._key("taken")).items() if index.isdecimal()}

    def join(self, device: str) -> bool:
        """Joins the sweep, and returns whether no other rank has joined with this device."""
        return self.store.write(self._key(f"device/{device}"), str(self.store.rank))

    def helpers(self) -> int:
        """Returns the number of ranks that help."""
        return self.store.count(self._key("device")) - 1

    def say(self, index: int, trial: Trial) -> None:
        """Publishes the trial of a config that this rank has taken; an unsettled one returns it to the leader."""
        device = f"{trial.device} on rank {self.store.rank}" if trial.device else ""
        # Another rank has other data, whose outputs have other bits: only a comparison counts there.
        text = canonical_json(dataclasses.replace(trial, device=device, digest="").to_json())
        self.store.write(self._key(f"trial/{index}"), text if len(text) <= _MOST_CHARS else "")

    def heard(self, index: int, config: Config) -> Trial | None:
        """Returns the trial of a config; `lost` if it is damaged, and None before it is published."""
        text = self.store.read(self._key(f"trial/{index}"))
        return None if text is None else _read(text, config)

    def earlier(self, configs: Mapping[int, Config]) -> dict[int, Trial]:
        """Returns the usable trials that ranks have published for any leader."""
        found = {}
        for key, text in self.store.listed(self.topic).items():
            index = key.partition("/trial/")[2]
            if index.isdecimal() and int(index) in configs:
                found[int(index)] = _read(text, configs[int(index)])
        return {index: trial for index, trial in found.items() if trial.is_usable}

    def _key(self, name: str) -> str:
        return f"{self.topic}/{self.leader}/{name}"


class Pulses:
    """The beats of the ranks, and when this rank heard them."""

    def __init__(self, store: Coordination, topic: str) -> None:
        """Hears nothing yet.

        Args:
            store: the key-value store of the program.
            topic: the directory of the call.
        """
        self._store = store
        self._directory = f"{topic}/beat"
        self._heard: dict[str, tuple[str, float]] = {}
        self._next_look = 0.0

    def silent(self) -> set[str]:
        """Returns the ranks that have shown no sign of life for `SILENCE_S` seconds, although they did before."""
        now = time.monotonic()
        is_due = now >= self._next_look
        self._next_look = now + _BEAT_S if is_due else self._next_look
        for rank, beat in self._store.listed(self._directory).items() if is_due else ():
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = beat, now
        return {rank for rank, (_, since) in self._heard.items() if now - since > SILENCE_S}


def _read(text: str, config: Config) -> Trial:
    """Returns the trial of a config from its text; `lost` if the text is damaged."""
    try:
        return dataclasses.replace(Trial.from_json(decode_json(text[:_MOST_CHARS])), config=config)
    except ValueError as error:
        return Trial(config=config, outcome=Outcome.LOST, message=str(error))


class _Taker(ConfigSource):
    """The configs that one rank takes from the lists."""

    def __init__(self, board: Board, configs: Sequence[Config]) -> None:
        self._board = board
        self._configs = configs
        self._open: collections.deque[int] = collections.deque()
        self._taken: dict[int, float] = {}

    def take(self, count: int) -> dict[int, Config]:
        """Takes configs: first those of this rank's own part, and fewer at a time towards the end."""
        if self._open:
            self._leave(self._board.taken())
        count = min(count, max(1, len(self._open) // (2 * self._board.store.ranks)))
        taken: dict[int, Config] = {}
        while self._open and len(taken) < count:
            index = self._open.popleft()
            if self._board.take(index):
                taken[index] = self._configs[index]
        self._taken |= dict.fromkeys(taken, time.monotonic())
        return taken

    def _add(self, indices: Sequence[int]) -> None:
        """Adds a list: this rank's part of it in order, then the other parts from their ends."""
        own = indices[self._board.store.rank :: self._board.store.ranks]
        self._open.extend(dict.fromkeys([*own, *reversed(indices)]))

    def _leave(self, taken: Collection[int]) -> None:
        """Forgets configs that some rank has taken."""
        self._open = collections.deque(index for index in self._open if index not in taken)


class _Leader(_Taker):
    """The part of the rank that leads, and its view of the other parts."""

    def __init__(self, board: Board, request: SweepRequest, space: Space) -> None:
        super().__init__(board, space)
        self._request = request
        self._ledger, self._inner = request.ledger, request.source
        self._listed: set[int] = set()
        self._numbers = itertools.count()
        self._has_ended = False
        self._elsewhere: dict[int, tuple[str, float]] = {}
        self._returned: list[int] = []
        self._longest_s = 0.0
        self._next_look = 0.0
        self._pulses = Pulses(board.store, board.topic)

    def begin(self, configs: Mapping[int, Config]) -> dict[int, Config]:
        """Lists configs, and returns the first ones for this rank; uses trials that an earlier leader's ranks left."""
        for index, trial in self._board.earlier(configs).items():
            self._ledger.end(index, trial)
        left = [index for index in configs if index not in self._ledger.trials]
        default = self._request.problem.default
        first = [default] if default is not None and default in left else left[:1]
        # A config that has crashed or hung before runs last, and here: its next end may be the end of a rank.
        self._returned = [index for index in left if index in self._request.troubled and index not in first]
        kept = {*first, *self._returned}
        self._publish([index for index in left if index not in kept])
        taken = {index: configs[index] for index in first}
        self._taken |= dict.fromkeys(taken, time.monotonic())
        return taken | super().take(_ASKED)

    @property
    def is_closed(self) -> bool:
        """Whether all configs are taken, and the search has ended."""
        return not self._open and self._inner.is_closed

    @property
    def _awaited(self) -> set[int]:
        """The listed configs that have no trial, and that this rank has not taken."""
        return self._listed - self._taken.keys() - self._ledger.trials.keys()

    def take(self, count: int) -> dict[int, Config]:
        """Takes configs from the search, else from the lists."""
        taken = dict(self._inner.take(count))
        self._taken |= dict.fromkeys(taken, time.monotonic())
        return taken | super().take(count - len(taken))

    def ended(self, index: int, trial: Trial) -> None:
        """Passes a trial to the search."""
        self._inner.ended(index, trial)

    def why_late(self) -> str:
        """Returns why the time of the search is over; empty while it is not."""
        return self._inner.why_late()

    def reason_to_stop(self) -> str:
        """Returns why the search has stopped; empty while it continues."""
        return self._inner.reason_to_stop()

    def rest(self) -> dict[int, Config]:
        """Waits for the trials of the other ranks; returns configs that run again here as soon as there are any."""
        while True:
            self._ledger.tick()
            if taken := self._again() or self.take(_ASKED):
                return taken
            if self.is_closed and not self._awaited:
                return {}
            time.sleep(_POLL_S)

    def note(self, index: int, trial: Trial) -> None:
        """Publishes a trial of this rank, in case it dies."""
        if index in self._taken and trial.outcome not in UNSETTLED:
            self._longest_s = max(self._longest_s, time.monotonic() - self._taken[index])
            self._board.say(index, trial)

    def look(self) -> None:
        """Collects the trials of the other ranks, and lists the search's next configs for them."""
        if (now := time.monotonic()) < self._next_look:
            return
        taken = self._board.taken()
        self._leave(taken)
        for index in sorted(taken.keys() & self._awaited):
            self._elsewhere.setdefault(index, (taken[index], now))
        for index, (_, since) in [*self._elsewhere.items()]:
            trial = self._board.heard(index, self._configs[index])
            if trial is not None and trial.outcome in UNSETTLED:
                del self._elsewhere[index]
                self._returned.append(index)
            elif trial is not None:
                del self._elsewhere[index]
                self._longest_s = max(self._longest_s, now - since)
                self._ledger.end(index, trial)
                self._inner.ended(index, trial)
        if not self._has_ended:
            more = self._inner.take(max(0, 2 * self._board.helpers() - len(self._open)))
            if more or self._inner.is_closed:
                self._publish([*more])
        self._next_look = time.monotonic() + max(_POLL_S, (time.monotonic() - now) / _POLL_SHARE)

    def _publish(self, indices: Sequence[int]) -> None:
        self._has_ended = self._inner.is_closed
        self._listed.update(indices)
        self._add(indices)
        self._board.publish(next(self._numbers), WorkList(indices=tuple(indices), is_last=self._has_ended))

    def _again(self) -> dict[int, Config]:
        """Returns the configs that other ranks have returned, or should have measured by now.

        When the search has stopped, these are all: they end here at once, and nobody waits for their trials.
        """
        now, limits, silent = time.monotonic(), self._request.limits, self._pulses.silent()
        longest_s = _PATIENCE * self._longest_s or limits.compile_timeout_s + limits.timeout_s
        due = now if self.reason_to_stop() else now - max(_LEAST_S, longest_s)
        elsewhere = self._elsewhere.items()
        late = [index for index, (rank, since) in elsewhere if rank in silent or since < due]
        if late:
            text = "%s: %d configs that other ranks have begun have no trial yet: they run here"
            _logger.info(text, self._request.problem.name, len(late))
        again = {index: self._configs[index] for index in [*self._returned, *late]}
        self._returned = []
        self._elsewhere = {index: about for index, about in elsewhere if index not in again}
        self._taken |= dict.fromkeys(again, now)
        return again


class _Helper(_Taker):
    """The part of a rank that helps."""

    def __init__(self, board: Board, space: Space, why_over: Callable[[], str]) -> None:
        super().__init__(board, space)
        self._why_over = why_over
        self._poll_s = max(_POLL_S, board.store.ranks * _POLL_S_PER_RANK)
        self._reason = ""
        self._next_look = 0.0
        self._number = 0
        self._is_last = False
        self._is_unfit = False
        self._said: set[int] = set()

    @property
    def is_closed(self) -> bool:
        """Whether all configs are taken and no further list comes, or the work is over."""
        return bool(self._reason) or (self._is_last and not self._open)

    def take(self, count: int) -> dict[int, Config]:
        """Takes configs from the lists so far."""
        while not self._is_last and (listed := self._board.work(self._number)) is not None:
            self._number, self._is_last = self._number + 1, listed.is_last
            self._add(listed.indices)
        return {} if self.reason_to_stop() else super().take(count)

    def rest(self) -> dict[int, Config]:
        """Waits for configs and takes them; empty when no further ones come."""
        while not self.is_closed:
            if taken := self.take(_ASKED):
                return taken
            time.sleep(self._poll_s)
        return {}

    def reason_to_stop(self) -> str:
        """Returns why the work is over; empty while it continues."""
        if not self._reason and (now := time.monotonic()) >= self._next_look:
            self._next_look = now + self._poll_s
            self._reason = self._why_over()
        return self._reason

    def note(self, index: int, trial: Trial) -> None:
        """Publishes a trial."""
        if not self._is_unfit:
            self._board.say(index, trial)
            self._said.add(index)

    def note_default(self, trial: Trial) -> None:
        """Ends the work if the defaults fail here: then only all outputs together show which are right."""
        if trial.outcome.is_failure:
            self._is_unfit, self._reason = True, "the defaults failed on this rank"

    def return_left(self) -> None:
        """Returns the configs without a trial to the leader."""
        for index in self._taken.keys() - self._said:
            self._board.say(index, Trial(config={}, outcome=Outcome.NOT_RUN))


def lead(request: SweepRequest, configs: Mapping[int, Config], board: Board, space: Space) -> Swept:
    """Runs a sweep with the help of other ranks if it is worth that, otherwise alone.

    Args:
        request: the sweep.
        configs: its first configs by index.
        board: the place in the store; this rank leads.
        space: all configs by index.

    Returns:
        Everything that the sweep found except its trials.
    """
    if not _is_shared(request, len(configs)):
        return sweep.run(request, configs)
    board.join(_device(request, board))
    leader = _Leader(board, request, space)
    request.ledger.listen(Listener(on_trial=leader.note, on_tick=leader.look))
    first = leader.begin(configs)
    swept = sweep.run(dataclasses.replace(request, source=leader, space=space), first)
    if left := {index: config for index, config in configs.items() if index not in request.ledger.trials}:
        return sweep.run(request, left)  # the function did not load here, and this tells why
    elsewhere = sum(bool(trial.machine) for trial in request.ledger.trials.values())
    _logger.info("%s: other ranks measured %d of its configs", request.problem.name, elsewhere)
    return swept


def help_with(request: SweepRequest, board: Board, why_over: Callable[[], str]) -> None:
    """Measures configs for the leader until none are left; an error ends the help, not the program.

    Args:
        request: the sweep as this rank would run it, with its space.
        board: the place in the store.
        why_over: returns why the work is over; empty while the leader works.
    """
    assert request.space is not None
    if not (_is_shared(request, FEWEST) and board.join(_device(request, board))):
        return
    helper = _Helper(board, request.space, why_over)
    request.ledger.listen(Listener(on_trial=helper.note, on_default=helper.note_default))
    try:
        with board.beating():
            if first := helper.rest():
                sweep.run(dataclasses.replace(request, source=helper, has_final=False), first)
    except Exception as error:
        text = "%s: rank %d cannot help rank %d: %s"
        _logger.warning(text, request.problem.name, board.store.rank, board.leader, error)
    finally:
        helper.return_left()


def _is_shared(request: SweepRequest, count: int) -> bool:
    """Returns whether ranks share a sweep with a number of first configs."""
    agree, has_reference = request.settings.agree, request.problem.untuned is not None
    is_long = agree == SHARE or (agree == AUTO and count + request.source.total >= FEWEST)
    # Without the defaults' output, only all outputs together show which are right.
    is_judged = has_reference or not request.options.compares_outputs
    # If a config ends the process that measures it, only the journal of this process shows that.
    return is_long and is_judged and request.mode is Mode.IN_WORKERS


def _device(request: SweepRequest, board: Board) -> str:
    """Returns the name of the device of this rank: the ranks of one machine have one CPU, and would disturb each other.

    With `AGREE=share`, all ranks take part.
    """
    is_common = request.problem.platform == "cpu" and request.settings.agree != SHARE
    return boot_id() if is_common else str(board.store.rank)
