"""Divides the configs of a sweep into shards: large ones first, and small ones where the end is near."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from quarantune.engine.contact import MOST_UNKNOWN
from quarantune.host import machine

_logger = logging.getLogger("quarantune")

LEAST, MOST = 16, 64
"""How many configs a shard has, unless there are fewer: a shard costs a sandbox and one run of the defaults."""
_SHARDS = 16
"""A sweep has at least so many shards if it has enough configs: more machines can take part, and little is repeated."""
_PER_MACHINE = 2
"""Shards become small while there are still so many for each machine, so that all machines end at about one time."""
_KEPT_DESCRIPTORS = 64
"""Descriptors that are left to the journal, the engine and the user's program."""


_OF_ONE_RUN = frozenset({"given", "number", "future", "host", "process", "began", "is_accepted", "running"})


@dataclasses.dataclass(eq=False, kw_only=True)
class Shard:
    """Some configs that are tried on one machine.

    Attributes:
        indices: the configs that have no trial yet.
        is_whole: whether the machine also compares the fastest of them.
        is_final: whether they have trials from other machines; a part of it is of no use, so that it is not repeated.
        is_troubled: whether they hung or crashed before.
        deaths: the hosts on which shards with these configs died.
        failures: how many shards with these configs could not run.
        refusals: how many machines did not have the device.
        given: the configs that it was given.
        number: its number among the shards of the sweep.
        future: the engine's handle of it; None before it is submitted.
        host: the machine that it runs on; empty while that is not known.
        process: the machine and the process that it runs in; empty while that is not known.
        began: when it began, by the monotonic clock; None while that is not known.
        is_accepted: whether the machine is known to have the device.
        running: the configs that its process works on, and those that have ended.
    """

    indices: list[int]
    is_whole: bool = False
    is_final: bool = False
    is_troubled: bool = False
    deaths: tuple[str, ...] = ()
    failures: int = 0
    refusals: int = 0
    given: tuple[int, ...] = ()
    number: int = 0
    future: Future[Any] | None = None
    host: str = ""
    process: str = ""
    began: float | None = None
    is_accepted: bool = False
    running: set[int] = dataclasses.field(default_factory=set)

    @property
    def may_grow(self) -> bool:
        """Whether configs of other shards may join it: nothing has happened to its own yet."""
        is_marked = self.is_whole or self.is_final or self.is_troubled
        return not (is_marked or self.deaths or self.failures or self.refusals)


def partition(indices: Sequence[int], last: Sequence[int] = ()) -> list[Shard]:
    """Divides configs into small shards; each has configs from everywhere in the list, so that all take about as long.

    Args:
        indices: the configs.
        last: those of them that hung or crashed before, which come last and in shards of their own.
    """
    troubled = set(last)
    shards: list[Shard] = []
    fresh = [index for index in indices if index not in troubled]
    for part, is_troubled in ((fresh, False), ([*last], True)):
        count = -(-len(part) // LEAST)
        shards += [Shard(indices=list(part[first::count]), is_troubled=is_troubled) for first in range(count)]
    return shards


def again(shard: Shard, **counts: int) -> Shard:
    """Returns a shard to run again, all of it if it is a final.

    Args:
        shard: the shard.
        **counts: the fields that count why.
    """
    indices = list(shard.given) if shard.is_final else shard.indices
    fields = dataclasses.fields(Shard)
    kept = {field.name: getattr(shard, field.name) for field in fields if field.name not in _OF_ONE_RUN}
    return Shard(**{**kept, "indices": indices, **counts})


def largest(configs: int) -> int:
    """Returns how many configs a shard of a sweep has at most.

    Args:
        configs: the configs of the sweep.
    """
    return min(MOST, max(LEAST, -(-configs // _SHARDS)))


def joined(pending: collections.deque[Shard], most: int, running: int) -> Shard:
    """Returns the next shard, joined with those after it while enough are left for every machine.

    Args:
        pending: the shards, at least one; those returned are removed.
        most: the largest number of configs of one shard.
        running: how many machines run a shard now; 0 where none has said so yet.
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
    """Returns how many shards may be with an engine at a time: each that runs has a connection to this process."""
    left = machine.descriptors_left()
    return max(LEAST, left - _KEPT_DESCRIPTORS - MOST_UNKNOWN)


@functools.cache
def warn_of_descriptors(name: str, most: int) -> None:
    """Warns once that more machines could take part."""
    _logger.warning(
        "%s: at most %d machines take part at a time, since each has a connection to this process: raise the limit of "
        "open descriptors first, as with `ulimit -n 8192`",
        name,
        most,
    )
