"""One sweep on the machines of an engine: their device, its shards, and the final of their fastest configs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from typing import Any

from quarantune.devices import discovery
from quarantune.devices.targets import Target
from quarantune.engine import remote, shards
from quarantune.engine.remote import End
from quarantune.engine.shards import Shard, Shards, Silence
from quarantune.measure import finals
from quarantune.measure.finals import Final
from quarantune.scheduler.plan import NOTHING_MORE, Proof
from quarantune.sweep.proof import comparison
from quarantune.sweep.request import Problem, SweepRequest, Swept
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config
from quarantune.values.errors import EngineError
from quarantune.values.options import AUTO
from quarantune.values.settings import Isolation
from quarantune.values.trial import UNTUNED, Trial

_logger = logging.getLogger("quarantune")


def run(request: SweepRequest, configs: Mapping[int, Config]) -> Swept:
    """Runs every config on the machines of an engine, then times the fastest together on one machine.

    Args:
        request: the request for `sweep.run`; its settings name the engine.
        configs: the configs by index.

    Returns:
        Everything a sweep returns except its trials.

    Raises:
        TypeError: a part of the call cannot travel to another process; nothing was submitted.
        ValueError: the settings demand trials in this process, or the objective is not time.
        EngineError: the engine, or its machines, cannot run the sweep.
    """
    problem, source = request.problem, request.source
    executor, isolation = request.settings.executor, request.settings.isolation
    assert executor is not None
    if request.target is None and not request.options.is_by_time:
        raise ValueError(f"{problem.name}: with executor=, time is the only objective: leave out one of them")
    if isolation not in (AUTO, Isolation.PROCESS.value):
        raise ValueError(
            f"QUARANTUNE_ISOLATION={isolation} runs configs in this process, and executor= on other machines: "
            f"unset one of them"
        )
    whole = executor if isinstance(executor, WholeSweeps) else None
    packed, call = remote.pack(request, request.possible(configs))
    measured = request.ledger.trials
    given = Shards(
        executor if whole is None else whole.executor,
        packed,
        dict(configs) | {index: trial.config for index, trial in measured.items()},
        request,
        Proof(comparison(request, call)),
        check=(lambda: None) if whole is None else whole.check,
    )
    is_small = whole is not None or len(configs) <= shards.LEAST
    is_all = bool(configs) and source.is_closed and _has_all(configs, problem, measured)
    is_whole = is_small and is_all and request.target is None
    first = [Shard(indices=[*configs], is_whole=True)]
    if not is_whole:
        first = shards.partition([*configs], [index for index in configs if index in request.troubled])
    with contextlib.closing(given):
        ends = given.run(first, request.ledger.end, source)
        if request.target is not None:
            return Swept()
        if is_whole and len(ends) == 1 and _has_all(ends[0][0].given, problem, measured):
            return ends[0][1].swept
        return _final(given, problem, measured, next((end.complaint for _, end in ends if end.complaint), ""))


def _has_all(indices: Collection[int], problem: Problem, trials: Mapping[int, Trial]) -> bool:
    """Returns whether a shard with these configs has all that the final needs: possible winners and defaults.

    A shard that died, or an earlier sweep, may have measured other possible winners.
    """
    needed = {index for index, trial in trials.items() if trial.is_usable}
    needed.add(finals.default_among(trials, problem.default))
    return needed <= {*indices, UNTUNED}


def _final(given: Shards, problem: Problem, measured: Mapping[int, Trial], complaint: str) -> Swept:
    """Runs the finalists once more as a local sweep on one machine, and returns the result of this final.

    With many machines, several of them first compare groups of the fastest configs.

    Args:
        given: runs the shards.
        problem: the call.
        measured: the trials of all configs.
        complaint: the disagreement of outputs in a shard; else empty.
    """
    default = problem.default if finals.default_among(measured, problem.default) == problem.default else None
    has_untuned = problem.default is None and problem.untuned is not None  # it runs with the finalists
    groups = of_machines(measured)
    if not groups:
        return Swept(complaint=complaint)
    while True:
        compared = next_groups(groups, default)
        if len(compared) == 1 and len(compared[0]) == 1 and not has_untuned:
            return Swept(_alone(compared[0][0], measured), complaint=complaint)
        trials: dict[int, Trial] = {}
        runs = [Shard(indices=[*group], is_whole=True, is_final=True) for group in compared]
        ends = given.run(runs, trials.__setitem__, NOTHING_MORE)
        winners = [winner for shard, end in ends if (winner := _winner(shard, end, trials)) is not None]
        if not winners:
            fastest = groups[0][0]
            _logger.warning(
                "%s: the finalists could not be compared on one machine, so the winner is the fastest of %s",
                problem.name,
                measured[fastest].machine or "an earlier sweep",
            )
            return Swept(_alone(fastest, measured), complaint=complaint)
        if len(compared) == 1:
            end = ends[0][1]
            ran = trials if end.untuned is None else {**trials, UNTUNED: end.untuned}
            fastest = finals.conclude(ran, Final(), default=None)[1][0]
            final = end.swept.final if end.rounds_ms else _alone(fastest, ran)
            return dataclasses.replace(end.swept, final=final, complaint=end.complaint or complaint, retimed=trials)
        ended = [[*shard.given] for shard, _ in ends]
        groups = [[winner] for winner in winners] + [group[:1] for group in compared if group not in ended]


def _winner(shard: Shard, end: End, trials: Mapping[int, Trial]) -> int | None:
    """Returns the fastest config of a group; None if none could run."""
    group = {index: trials[index] for index in shard.given if index in trials}
    if not any(trial.is_usable for trial in group.values()):
        return None
    return finals.conclude(group, end.swept.final, default=None)[1][0]


def _alone(index: int, trials: Mapping[int, Trial]) -> Final:
    return Final({index: trials[index].samples_ms})


MOST = 16
"""Number of finalists: the machine of the final compiles, checks and measures each of them again."""


def of_machines(trials: Mapping[int, Trial]) -> list[list[int]]:
    """Returns the possible winners of each machine, in the order of their times on that machine."""
    machines = finals.by_machine(trials)
    share = max(1, MOST // max(1, len(machines)))
    ranked = [finals.finalists(group, count=share)[:share] for group in machines]
    return [group for group in ranked if group]


def next_groups(groups: Sequence[Sequence[int]], default: int | None) -> list[list[int]]:
    """Returns the configs to compare next: one list is the final; the winners of several lists meet in later rounds.

    Args:
        groups: the candidates of each machine, the fastest first.
        default: the config of the function's own defaults, which joins the final to get its time there; None if it
            cannot take part.
    """
    if len(groups) > MOST:
        leaders = [group[0] for group in groups]
        count = -(-len(leaders) // MOST)
        return [leaders[first::count] for first in range(count)]
    chosen = [index for group in groups for index in group][:MOST]
    return [chosen if default is None or default in chosen else [*chosen, default]]


class WholeSweeps(Executor):
    """Takes the place of an engine in the settings; each machine of the engine then gets whole sweeps.

    Attributes:
        executor: the engine.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._is_over = threading.Event()

    def interrupt(self) -> None:
        """Ends the running sweeps."""
        self._is_over.set()

    def check(self) -> None:
        """Raises `CancelledError` after an interruption of the sweeps."""
        if self._is_over.is_set():
            raise CancelledError


# --- the device of an engine's machines -----------------------------------------------------------------------

_MOST_ASKED = 6
"""Number of questions to the machines of an engine about their device."""
_STAYS_S = 0.1
"""Seconds for which a machine that answers stays busy, so that another machine gets the next question."""
_HEARS_S = 1.0
"""Seconds to wait for further answers after the first."""
_LOOK_S = 0.2
"""Time within which Ctrl-C ends a wait for an engine."""

_devices: weakref.WeakKeyDictionary[Executor, Target] = weakref.WeakKeyDictionary()


def device(executor: Executor) -> Target:
    """Returns the device of an engine's machines: of this process's kind if any has it, else of the most common kind.

    Raises:
        EngineError: the engine cannot run anything, or its machines cannot take part.
    """
    executor = executor.executor if isinstance(executor, WholeSweeps) else executor
    try:
        known = _devices.get(executor)
    except TypeError:  # it has no hash, or no weak references
        return _ask(executor)
    if known is None:  # without a lock: one engine may take minutes to answer, another may answer at once
        known = _devices[executor] = _ask(executor)
    return known


def _ask(executor: Executor) -> Target:
    """Asks several machines for their device, and chooses one.

    Raises:
        EngineError: no machine answered, or no machine that answered can take part.
    """
    is_one = shards.is_on_this_machine(executor)
    try:
        futures = [
            executor.submit(remote.describe, 0.0 if is_one else _STAYS_S) for _ in range(1 if is_one else _MOST_ASKED)
        ]
    except Exception as error:
        raise _unable(executor, error) from error
    faults: dict[str, None] = {}
    found: dict[str, JsonObject] = {}
    silence, ends_at, waiting = Silence(executor), math.inf, set(futures)
    while waiting and time.monotonic() < ends_at:
        done, waiting = wait(waiting, _LOOK_S, FIRST_COMPLETED)
        for future in filter(done.__contains__, futures):
            try:
                about = _description(executor, future)
            except EngineError as error:
                faults[str(error)] = None
                continue
            found.setdefault(str(about["host"]), about)
            ends_at = min(ends_at, time.monotonic() + _HEARS_S)
        if not found:
            silence.check()
    for future in waiting:
        with contextlib.suppress(NotImplementedError):  # Parsl cannot cancel futures
            future.cancel()
    if not found:
        raise EngineError("; ".join(faults))
    return _chosen(executor, found)


def _chosen(executor: Executor, found: Mapping[str, JsonObject]) -> Target:
    """Returns the device to tune for.

    Args:
        executor: the engine.
        found: the descriptions of machines by host, at least one.
    """
    hosts: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for host, about in found.items():
        hosts[about["platform"], about["kind"]].append(host)
    platform, kind = max(hosts, key=lambda each: len(hosts[each]))  # of equals, the first that answered
    if len(hosts) > 1:
        why = "most of the machines that answered have it"
        with contextlib.suppress(Exception):  # this process may have no device
            if (ours := discovery.platform_and_kind(None)) in hosts:
                (platform, kind), why = ours, "this process has the same kind"
        _logger.warning(
            "the executor %s has machines of several kinds (%s), and tunes for %s, because %s: machines of other kinds "
            "take no part",
            type(executor).__name__,
            "; ".join(f"{name} on {', '.join(sorted(on))}" for (_, name), on in hosts.items()),
            *(kind, why),
        )
    return Target(name=kind, platform=platform, device_kind=kind, origin=hosts[platform, kind][0])


def _description(executor: Executor, future: Future[Any]) -> JsonObject:
    """Returns a machine's description of itself if the machine can take part."""
    try:
        found: JsonObject = future.result()
    except Exception as error:
        if (text := remote.cannot_import(error)) is None:
            raise _unable(executor, error) from error
        raise EngineError(f"a worker of the executor {type(executor).__name__} {remote.lacks_package(text)}") from error
    remote.check_description(found)
    return found


def _unable(executor: Executor, error: Exception) -> EngineError:
    reason = remote.reason_of(error)
    if remote.means_death(error):
        reason = f"its worker ended; perhaps it {remote.lacks_package(reason)}"
    return EngineError(f"the executor {type(executor).__name__} could not run a first task: {reason}")
