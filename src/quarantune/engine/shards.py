"""The shards of one sweep on an engine: submits and follows them, repeats dead ones, and ends all together."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from quarantune.engine import remote
from quarantune.engine.contact import MOST_UNKNOWN, Contacts
from quarantune.engine.remote import ConfigEnded, ConfigEntered, ConfigTraced, End
from quarantune.host import machine
from quarantune.scheduler.plan import ConfigSource, Proof
from quarantune.sweep.request import SweepRequest
from quarantune.values.codec import DamageError, JsonObject, as_json
from quarantune.values.configs import Config
from quarantune.values.errors import EngineError
from quarantune.values.trial import AGAIN, END, READY, Outcome, Trial

_logger = logging.getLogger("quarantune")

_ON_THIS_MACHINE = (ThreadPoolExecutor, ProcessPoolExecutor)
"""Executors whose tasks run on this machine, unless a subclass overrides `submit`."""
_PARTS = 4
"""Number of parts in which to repeat the configs that may have killed a shard, until each is alone."""
_MOST_DEATHS = 2
_MOST_FAILURES = 2
_MOST_REFUSALS = 6
_APPEARS_S = 60.0
"""Seconds to wait for machines with the device while others refuse shards: they may just be starting."""
_WAITING = 64
"""Least number of shards to keep waiting in the engine's queue; if more run, as many wait as run."""
_UNSEEN, _UNSEEN_OF_SEARCH = 256, 2
"""Most submitted shards until a machine reaches this process: with all configs known, and in a search.

With more shards, a search would choose configs from less knowledge.
"""
_ALIKE = "give all machines the same versions, modules and kind of device"
_TICK_S = 0.1
_GRACE_S = 30.0


class Shards:
    """Runs shards on an executor until every config has its trial."""

    def __init__(
        self,
        executor: Executor,
        parcel: bytes,
        configs: Mapping[int, Config],
        request: SweepRequest,
        proof: Proof,
        *,
        check: Callable[[], None],
    ) -> None:
        """Begins to listen for shards, without submitting any.

        Args:
            executor: the engine.
            parcel: the packed call.
            configs: the configs by index.
            request: the sweep.
            proof: compares the program of one config with the caller's.
            check: runs many times a second; its errors end all shards.

        Raises:
            EngineError: this process cannot listen at the address of its settings.
        """
        self._executor = executor
        self._proof, self._check = proof, check
        self._parcel = parcel
        self._configs = dict(configs)
        self._request = request
        self._name = request.problem.name
        self._versions = remote.versions_here()
        self._pending: collections.deque[Shard] = collections.deque()
        self._shards: dict[int, Shard] = {}
        self._ends: list[tuple[Shard, End]] = []
        self._refused: dict[str, str] = {}
        self._refusing: set[str] = set()
        self._refused_at = self._took_part_at = self._resumes_at = 0.0
        self._is_heard = False
        self._unreached: set[str] = set()
        self._numbers = itertools.count()
        is_local = is_on_this_machine(executor)
        self._listen = None if is_local else request.settings.listen
        self._contacts = self._listening(is_local=is_local)
        self._address = self._contacts.address.to_json()
        self._silence = Silence(executor)
        self._most = most_at_a_time()

    def run(
        self, shards: Sequence[Shard], on_trial: Callable[[int, Trial], None], source: ConfigSource
    ) -> list[tuple[Shard, End]]:
        """Runs shards to their ends.

        Args:
            shards: the shards.
            on_trial: receives each config's trial, once.
            source: gives further configs.

        Returns:
            The shards that ran to their ends, with these ends.

        Raises:
            EngineError: the engine, or its machines, cannot run shards.
            ReferenceFailedError, ValueError, TypeError: a machine found a fault of the call itself.
            DifferentProgramError: the machines run another program than this process.
        """
        self._pending += shards
        self._largest = largest(sum(len(shard.indices) for shard in self._pending))
        self._ends, self._on_trial, self._source = [], on_trial, source
        self._silence.broken()
        while True:
            self._submit_some()
            if not self._shards and not self._pending:
                return self._ends
            for event in self._contacts.poll(_TICK_S, expected=len(self._shards) - len(self._running())):
                shard = self._shards.get(event.number)
                if shard is None:
                    continue
                if isinstance(event.message, DamageError):
                    self._die(shard)
                else:
                    self._hear(shard, event.message)
            self._collect()
            self._look_at_the_clock()
            self._check()
            self._request.ledger.tick()
            if reason := self._source.reason_to_stop():
                self._give_up(reason)

    def _deadline_s(self, count: int) -> float:
        """Returns the longest time in seconds that a sweep of a number of configs can take."""
        limits = self._request.limits
        return limits.compile_timeout_s + limits.longest_sweep_s(count)

    def close(self) -> None:
        """Stops all shards."""
        for shard in list(self._shards.values()):
            self._release(shard)
        self._contacts.close()

    def _listening(self, *, is_local: bool) -> Contacts:
        """Begins to listen.

        Raises:
            EngineError: this process cannot listen at the chosen address.
        """
        try:
            contacts = Contacts(self._greet, is_local=is_local, at=self._listen, check=self._check)
        except OSError as error:
            raise EngineError(
                f"{self._name}: cannot listen at QUARANTUNE_LISTEN={self._listen}: {error.strerror or error}; give "
                f"an address of this machine and free ports, as in ':8790-8799'"
            ) from error
        if contacts.fault:
            text = "%s: cannot listen for shards (%s): trials arrive only when a shard ends"
            _logger.warning(text, self._name, contacts.fault)
        return contacts

    # Giving out

    def _submit_some(self) -> None:
        while self._may_submit() and (shard := self._next()) is not None:
            shard.number, shard.given = next(self._numbers), tuple(shard.indices)
            task = self._task(shard)
            try:
                shard.future = self._executor.submit(remote.run, task)
            except Exception as error:
                raise self._exhausted(error) from error
            self._shards[shard.number] = shard

    def _exhausted(self, error: Exception) -> EngineError:
        return EngineError(
            f"{self._name}: {_shown(self._executor)} takes no further work: {type(error).__name__}: {error}; "
            f"call again with a working executor: the trials so far are kept"
        )

    def _may_submit(self) -> bool:
        if time.monotonic() < self._resumes_at:
            return False
        if len(self._shards) >= self._most:
            if self._pending:
                warn_of_descriptors(self._name, self._most)
            return False
        running = len(self._running())
        waiting = len(self._shards) - running
        if not self._source.is_closed:
            return waiting < (1 if self._is_heard else _UNSEEN_OF_SEARCH)
        return waiting < (max(_WAITING, running) if self._is_heard else _UNSEEN)

    def _next(self) -> Shard | None:
        """Returns the next shard; None if none is ready."""
        if self._pending:
            return joined(self._pending, self._largest, len(self._running()))
        if self._source.is_closed:
            return None
        taken = self._source.take(LEAST)
        self._configs |= taken
        return Shard(indices=list(taken)) if taken else None

    def _task(self, shard: Shard) -> JsonObject:
        return {
            "versions": self._versions,
            "address": self._address,
            "shard": shard.number,
            "parcel": self._parcel,
            "configs": [[index, as_json(self._configs[index])] for index in shard.indices],
            "troubled": [index for index in shard.indices if index in self._request.troubled],
            "is_whole": shard.is_whole,
            "refusals": shard.refusals,
            "may_be_silent": shard.may_be_silent,
            "deadline_s": self._deadline_s(len(shard.indices)),
        }

    # Following

    def _greet(self, number: int, about: JsonObject) -> bool:
        """Returns whether a shard may begin: False if it was given up before."""
        shard = self._shards.get(number)
        if shard is None:
            return False
        shard.began, shard.host = time.monotonic(), str(about.get("host", ""))[:100]
        shard.process, shard.address = f"{shard.host} {about.get('pid', '')}"[:200], about["address"]
        self._is_heard = True
        return True

    def _hear(self, shard: Shard, message: JsonObject) -> None:
        try:
            match remote.read(message):
                case End() as end:
                    self._finish(shard, end)
                case ConfigEntered(phase=(index, phase)):
                    shard.is_accepted = True
                    if index in shard.indices:
                        (shard.running.discard if phase == READY else shard.running.add)(index)
                        if phase != END and index not in self._request.ledger.trials:  # finalists run again
                            self._request.ledger.enter(index, phase)
                case ConfigTraced(program=(config, lines)):
                    self._proof.show(config, lines)
                case ConfigEnded() as ended:
                    self._note(shard, ended)
        except DamageError as error:
            _logger.warning("%s: a shard on %s sent a damaged message: %s", self._name, shard.host, error)
            self._die(shard)

    def _note(self, shard: Shard, ended: ConfigEnded) -> None:
        """Keeps the trial of a config, unless the config has one already."""
        trial = ended.read(self._configs, is_check=self._request.target is not None)
        self._took_part_at = time.monotonic()
        if ended.index in shard.indices:
            self._end(shard, ended.index, trial)

    def _end(self, shard: Shard, index: int, trial: Trial) -> None:
        shard.indices.remove(index)
        self._on_trial(index, trial)
        self._source.ended(index, trial)

    def _collect(self) -> None:
        """Takes the results of futures that are done; a shard in contact has reported its end already."""
        for shard in [shard for shard in self._shards.values() if shard.future is not None and shard.future.done()]:
            future = shard.future
            assert future is not None
            error = concurrent.futures.CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                self._fail(shard, error)
                continue
            try:
                end = End.from_json(future.result())
                for ended in end.trials:
                    self._note(shard, ended)
                if end.end == remote.STOPPED:  # perhaps the engine repeated it while the first run continues
                    raise DamageError("its process was ordered to stop")
                shard.host = shard.host or end.host[:100]
                self._finish(shard, end)
            except DamageError as damage:
                self._fail(shard, damage)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        running = self._running()
        for shard in running:
            assert shard.began is not None
            if now > shard.began + self._deadline_s(len(shard.given)) + _GRACE_S:
                self._die(shard)
        if running:
            self._silence.broken()
        elif self._shards:  # without connections, running shards are silent
            most = max(len(shard.indices) for shard in self._shards.values())
            may_be_silent = bool(self._unreached) or not self._is_heard
            self._silence.check(works_s=self._deadline_s(most) if may_be_silent else 0.0, unreached=self._unreached)

    def _running(self) -> list[Shard]:
        return [shard for shard in self._shards.values() if shard.began is not None]

    # Ending

    def _release(self, shard: Shard) -> None:
        """Forgets a shard, and stops it if it still runs."""
        self._shards.pop(shard.number, None)
        for index in shard.indices:
            if index not in self._request.ledger.trials:
                self._request.ledger.enter(index, AGAIN)
        self._contacts.stop(shard.number)
        if shard.future is not None:
            # Parsl cannot cancel futures; the end of its connection stops the shard.
            with contextlib.suppress(NotImplementedError):
                shard.future.cancel()
            shard.future = None

    def _finish(self, shard: Shard, end: End) -> None:
        """Ends a shard according to its machine's report."""
        self._silence.broken()
        if end.end == remote.REFUSED:
            shard.future = None  # no cancel: the engine would take the machine for idle, and give it the next shard
        self._release(shard)
        if end.unreached:
            self._tell_unreached(end)
        if end.end == remote.UNREACHED:
            self._pending.appendleft(again(shard, may_be_silent=True))
        elif end.end == remote.DONE and not shard.indices:
            self._ends.append((shard, end))
        elif end.end == remote.REFUSED:
            self._refuse(shard, end.error)
        elif end.kind:
            raise remote.ERRORS[end.kind](f"{end.error} (on {shard.host})")
        elif end.end == remote.FAILED or shard.began is None:  # unheard: no evidence against its configs
            self._repeat_failed(shard, f"on {shard.host}: {end.error or end.end}")
        else:
            self._repeat_dead(shard, " (past its deadline)" if end.end == remote.LATE else "")

    def _tell_unreached(self, end: End) -> None:
        """Warns, once for each machine, that it cannot connect to this process."""
        if end.host in self._unreached:
            return
        self._unreached.add(end.host)
        at = f"port {self._address['port']} of this machine"
        if self._listen is None:
            at = "a port of this machine, and choose it here, as in QUARANTUNE_LISTEN=:8790"
        _logger.warning(
            "%s: %s cannot connect to this process (%s), so its trials arrive only when a shard ends: allow TCP "
            "connections from there to %s",
            *(self._name, end.host, end.unreached, at),
        )

    def _die(self, shard: Shard) -> None:
        """Ends a shard whose process is gone or does not answer."""
        self._release(shard)
        self._repeat_dead(shard)

    def _repeat_dead(self, shard: Shard, how: str = "") -> None:
        """Repeats the configs of a dead shard that have no trial; a lone suspect of a second death has crashed.

        The suspects are the configs that ran when the shard died; if none is known to have run, all configs are.

        Args:
            shard: the shard.
            how: an addition to the host's name in messages.
        """
        deaths = (*shard.deaths, (shard.host or "an unknown host") + how)
        if shard.is_final:
            self._repeat_failed(shard, f"it died on {deaths[-1]}")
            return
        _logger.warning("%s: a shard died on %s; %d configs had no trial", self._name, deaths[-1], len(shard.indices))
        suspects = [index for index in shard.indices if index in shard.running] or shard.indices
        others = [index for index in shard.indices if index not in suspects]
        if len(suspects) == 1 and len(deaths) >= _MOST_DEATHS:
            times = "twice" if len(deaths) == 2 else f"{len(deaths)} times"
            message = f"the process of the engine that ran it died {times}: on {' and on '.join(deaths)}"
            index = suspects[0]
            self._end(shard, index, Trial(config=self._configs[index], outcome=Outcome.CRASHED, message=message))
        else:
            divided = [suspects[first::_PARTS] for first in range(_PARTS)]
            self._pending.extend(Shard(indices=part, deaths=deaths) for part in divided if part)
        if others:
            self._pending.appendleft(Shard(indices=others, is_whole=shard.is_whole))

    def _fail(self, shard: Shard, error: BaseException) -> None:
        """Ends a shard after the engine has reported an error: a dead worker, or a shard that it cannot run.

        A shard that has begun continues: its connection reports its end. An engine may give up work while the process
        lives, for example after its scheduler has died.
        """
        shard.future = None
        if shard.began is not None:
            return
        self._release(shard)
        if isinstance(error, concurrent.futures.BrokenExecutor):
            # A broken pool stays broken, and may accept work for a moment longer. It is not the fault of a config.
            raise self._exhausted(error) from error
        text = remote.cannot_import(error)
        if text is not None or (self._is_heard and remote.means_death(error)):
            # Its worker ended before the shard began, and would end the next shards in the same way.
            # Give the other machines time to take some.
            self._resumes_at = time.monotonic() + remote.REFUSAL_S
            shard.host = shard.process = f"a worker of {_shown(self._executor)}"
            ended = f"it ends before it begins to work; perhaps it {remote.lacks_package(str(error))}"
            self._refuse(shard, ended if text is None else f"it {remote.lacks_package(text)}")
        else:
            self._repeat_failed(shard, remote.reason_of(error))

    def _repeat_failed(self, shard: Shard, reason: str) -> None:
        """Repeats, once, a shard that could not run or a final that died.

        Raises:
            EngineError: the shard failed for the second time.
        """
        if shard.failures + 1 >= _MOST_FAILURES:
            if shard.is_final:
                return  # trials from other machines remain
            raise EngineError(
                f"{self._name}: {_shown(self._executor)} could not run a shard, twice; the last time {reason}; the "
                f"trials so far are kept"
            )
        _logger.warning("%s: a shard could not run and is repeated: %s", self._name, reason)
        self._pending.appendleft(again(shard, failures=shard.failures + 1))

    def _refuse(self, shard: Shard, reason: str) -> None:
        """Gives a shard to another machine after a refusal."""
        if shard.host not in self._refused:
            host = f"{shard.host} ({shard.address})" if shard.address else shard.host
            _logger.warning("%s: %s takes no part: %s; %s", self._name, host, reason, _ALIKE)
        self._refused[shard.host] = reason
        self._refusing.add(shard.process)
        self._refused_at = self._refused_at or time.monotonic()
        if shard.refusals + 1 >= _MOST_REFUSALS and not self._may_be_taken():
            there = "; ".join(f"{host}: {reason}" for host, reason in sorted(self._refused.items()))
            raise EngineError(
                f"{self._name}: no machine of {_shown(self._executor)} can take part ({there}); {_ALIKE}; the trials "
                f"so far are kept"
            )
        self._pending.append(again(shard, refusals=shard.refusals + 1))

    def _may_be_taken(self) -> bool:
        """Returns whether a machine with the device is at work and can take a shard later, or may still appear."""
        others = self._shards.values()
        if any(
            other.is_accepted or (other.began is not None and other.process not in self._refusing) for other in others
        ):
            return True
        may_appear = bool(others) or self._took_part_at > 0.0
        return may_appear and time.monotonic() < max(self._refused_at, self._took_part_at) + _APPEARS_S

    def _give_up(self, reason: str) -> None:
        """Ends all configs that have no trial."""
        left = [*self._shards.values(), *self._pending]
        self._pending.clear()
        for shard in left:
            self._release(shard)
            for index in list(shard.indices):
                trial = Trial(config=self._configs[index], outcome=Outcome.NOT_RUN, message=reason)
                self._end(shard, index, trial)


def is_on_this_machine(executor: Executor) -> bool:
    """Returns whether all tasks of an executor run on this machine."""
    return any(type(executor).submit is kind.submit for kind in _ON_THIS_MACHINE)


def _shown(executor: Executor) -> str:
    return f"the executor {type(executor).__name__}"


LEAST, MOST = 16, 64
"""Bounds of the configs in a shard, if the sweep has enough: a shard costs a sandbox and one run of the defaults."""
_SHARDS = 16
"""Least number of shards of a sweep with enough configs: many machines can take part, and a death repeats little."""
_PER_MACHINE = 2
"""Number of waiting shards per machine below which shards stay small, so that all machines end at about one time."""
_KEPT_DESCRIPTORS = 64
"""Descriptors to leave to the journal, the engine and the user's program."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Shard:
    """Some configs to try on one machine.

    Attributes:
        indices: the configs that have no trial yet.
        is_whole: whether the machine also compares the fastest of them.
        is_final: whether they have trials from other machines. A final is repeated as a whole: a part is useless.
        may_grow: whether configs of other shards may join it; only before anything has happened to its configs.
        deaths: the hosts on which shards with these configs died.
        failures: the number of shards with these configs that could not run.
        refusals: the number of machines that refused it.
        may_be_silent: whether a machine that cannot connect to this process should run it nevertheless.
        given: its configs when it was submitted.
        number: its number among the shards of the sweep.
        future: the engine's handle of it; None before its submission.
        host: the machine that it runs on; empty if unknown.
        address: the address of this machine; empty if unknown.
        process: the machine and the process that it runs in; empty if unknown.
        began: when it began, by the monotonic clock; None if unknown.
        is_accepted: whether the machine has confirmed that it has the device.
        running: the configs that its process works on, and the ended ones.
    """

    indices: list[int]
    is_whole: bool = False
    is_final: bool = False
    may_grow: bool = False
    deaths: tuple[str, ...] = ()
    failures: int = 0
    refusals: int = 0
    may_be_silent: bool = False
    given: tuple[int, ...] = dataclasses.field(default=(), init=False)
    number: int = dataclasses.field(default=0, init=False)
    future: Future[Any] | None = dataclasses.field(default=None, init=False)
    host: str = dataclasses.field(default="", init=False)
    address: str = dataclasses.field(default="", init=False)
    process: str = dataclasses.field(default="", init=False)
    began: float | None = dataclasses.field(default=None, init=False)
    is_accepted: bool = dataclasses.field(default=False, init=False)
    running: set[int] = dataclasses.field(default_factory=set, init=False)


def partition(indices: Sequence[int], last: Sequence[int] = ()) -> list[Shard]:
    """Divides configs into small shards of about equal duration: each has configs from everywhere in the list.

    Args:
        indices: the configs.
        last: the configs that hung or crashed before; they come last, in separate shards.
    """
    troubled = set(last)
    shards: list[Shard] = []
    fresh = [index for index in indices if index not in troubled]
    for part, may_grow in ((fresh, True), ([*last], False)):
        count = -(-len(part) // LEAST)
        shards += [Shard(indices=list(part[first::count]), may_grow=may_grow) for first in range(count)]
    return shards


def again(shard: Shard, **counts: Any) -> Shard:
    """Returns a shard to run again; a final runs again as a whole.

    Args:
        shard: the shard.
        **counts: the new values of `failures`, `refusals` or `may_be_silent`.
    """
    indices = list(shard.given) if shard.is_final else shard.indices
    # `replace` resets the fields about one run, because they are not arguments of the constructor.
    return dataclasses.replace(shard, indices=indices, may_grow=False, **counts)


def largest(configs: int) -> int:
    """Returns the most configs that a shard of a sweep has.

    Args:
        configs: the number of configs of the sweep.
    """
    return min(MOST, max(LEAST, -(-configs // _SHARDS)))


def joined(pending: collections.deque[Shard], most: int, running: int) -> Shard:
    """Returns the next shard, joined with those after it while enough are left for every machine.

    Args:
        pending: the shards, at least one; the returned ones are removed.
        most: the largest number of configs of one shard.
        running: the number of machines that run a shard now; 0 before the first has reported.
    """
    shard = pending.popleft()
    enough = _PER_MACHINE * (running or _SHARDS)
    while (
        len(pending) > enough
        and shard.may_grow
        and pending[0].may_grow
        and len(shard.indices) + len(pending[0].indices) <= most
    ):
        shard.indices += pending.popleft().indices
    return shard


def most_at_a_time() -> int:
    """Returns the most shards that an engine may have at a time: each that runs has a connection to this process."""
    left = machine.descriptors_left()
    return max(LEAST, left - _KEPT_DESCRIPTORS - MOST_UNKNOWN)


@functools.cache
def warn_of_descriptors(name: str, most: int) -> None:
    """Warns once that more machines could take part."""
    _logger.warning(
        "%s: at most %d machines take part at a time, since each has a connection to this process: raise the limit of "
        "open descriptors first, for example with `ulimit -n 8192`",
        name,
        most,
    )


_SAYS_S = 20.0
"""Seconds after which a silence is reported; each further report comes after twice the time."""
_ENDS_S = 600.0
"""Seconds without a sign of life of the engine after which the call ends: its machines may be gone for good."""


class Silence:
    """The time since an engine gave its last sign of life."""

    def __init__(self, executor: Executor) -> None:
        """Begins to wait.

        Args:
            executor: the engine.
        """
        self._kind = type(executor).__name__
        self.broken()

    def broken(self) -> None:
        """Notes a sign of life."""
        self._since, self._says_s = time.monotonic(), _SAYS_S

    def check(self, *, works_s: float = 0.0, unreached: Collection[str] = ()) -> None:
        """Warns of a long silence.

        Args:
            works_s: the longest silence of a working machine.
            unreached: the machines that cannot connect to this process.

        Raises:
            EngineError: the silence has lasted too long.
        """
        silent_s = time.monotonic() - self._since
        about = (
            f"no machine of the executor {self._kind} has begun to work for {silent_s:.0f} s: see whether its "
            f"scheduler and its workers run, and whether they are busy with other work"
        )
        if unreached:
            about = (
                f"no word from the machines of the executor {self._kind} for {silent_s:.0f} s: without a connection, "
                f"{', '.join(sorted(unreached))} can report only at the end of a shard"
            )
        if silent_s > _ENDS_S + works_s:
            raise EngineError(f"{about}; call again when they are there: the trials so far are kept")
        if silent_s > self._says_s:
            self._says_s *= 2
            _logger.warning("%s", about)
