"""The device time of a job by tuned call, from a profile that the job wrote."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from quarantune.functions.profile_scope import SCOPE
from quarantune.measure.xspace import Event, Plane, ProfileError, Value, inner, last, packed, parsed, signed, text

_CONTAINERS = frozenset({"while", "conditional", "call"})
"""Operations whose time is that of the operations inside, which a profile shows too."""
_IN_LOOP = re.compile(r"/while/(?:body|cond)/")
_NUMBER = re.compile(r"[.\d]+$")
_PROGRAM = re.compile(r"\((\d+)\)$")


class TunedWork(NamedTuple):
    """A tuned call with a config, as profiles name it: the parts of its scope."""

    name: str
    call: str
    config: str


@dataclasses.dataclass
class WorkTime:
    """The device time of a tuned call in a profile.

    Attributes:
        forward_ps: picoseconds of each run of each operation of the call itself, by the operation's name.
        backward_ps: picoseconds of its gradient.
        looped: the operations that may run several times in one call, because they are in its loops.
    """

    forward_ps: defaultdict[str, list[int]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    backward_ps: int = 0
    looped: set[str] = dataclasses.field(default_factory=set)

    @property
    def time_ms(self) -> float:
        """Milliseconds of the call and its gradient."""
        return (sum(map(sum, self.forward_ps.values())) + self.backward_ps) / 1e9

    @property
    def calls(self) -> int:
        """How often the call ran: as often as the rarest of its operations outside loops; 0 if there is none."""
        return min((len(runs) for name, runs in self.forward_ps.items() if name not in self.looped), default=0)

    @property
    def each_ms(self) -> float | None:
        """Milliseconds of one call without its gradient, by medians; None if the number of calls is unknown."""
        typical_ps = sum(statistics.median(runs) * len(runs) for runs in self.forward_ps.values())
        return typical_ps / 1e9 / self.calls if self.calls else None


@dataclasses.dataclass(frozen=True)
class JobTime:
    """The device time of a job, over all devices of its profile.

    Attributes:
        tuned: the time of each tuned call and config.
        rest_ms: milliseconds of all other operations, by category of HLO.
    """

    tuned: Mapping[TunedWork, WorkTime]
    rest_ms: Mapping[str, float]

    @property
    def total_ms(self) -> float:
        """Milliseconds of all operations."""
        return sum(work.time_ms for work in self.tuned.values()) + sum(self.rest_ms.values())


def job_time(planes: Sequence[Plane]) -> JobTime:
    """Sums the device time of a profile by tuned call.

    Args:
        planes: the profile; see `xspace.read_file`.

    Raises:
        ProfileError: The profile is damaged, or has no operations of a device.
    """
    programs = _Programs(planes)
    tuned: defaultdict[TunedWork, WorkTime] = defaultdict(WorkTime)
    rest_ps: Counter[str] = Counter()
    for events in _lines(planes):
        for event, own_ps in _own_times(events):
            name, category = programs.operation(event)
            if category in _CONTAINERS:
                own_ps = 0
            if (found := SCOPE.search(name)) is None:
                rest_ps[category] += own_ps
                continue
            work = tuned[TunedWork(*found.groups())]
            if "transpose(" in name[: found.start()]:
                work.backward_ps += own_ps
                continue
            work.forward_ps[name].append(own_ps)
            # XLA removes loops of a single trip, but the names still have them.
            if _IN_LOOP.search(name, found.end()) and programs.may_loop(event, found[0]):
                work.looped.add(name)
    return JobTime(dict(tuned), {category: ps / 1e9 for category, ps in rest_ps.most_common() if ps})


def _lines(planes: Sequence[Plane]) -> list[list[Event]]:
    """Returns the operations of each line of a device; on a CPU, of each thread."""
    found: list[list[Event]] = []
    for plane in planes:
        is_tpu = plane.name.startswith("/device:TPU:")
        if is_tpu or plane.name.startswith("/device:GPU:"):
            start = "XLA Ops" if is_tpu else "Stream"
            wanted = [line for name, line in plane.lines if name.startswith(start)]
            if not wanted and any(line for _, line in plane.lines):
                names = ", ".join(repr(name) for name, _ in plane.lines)
                raise ProfileError(f"{plane.name!r} has no line of operations: its lines are {names}")
            found += wanted
    if not any(found):
        host = [line for plane in planes if plane.name == "/host:CPU" for _, line in plane.lines]
        found = [[event for event in line if "hlo_op" in event.stats] for line in host]
    if not any(found):
        names = ", ".join(repr(plane.name) for plane in planes)
        raise ProfileError(f"the profile has no operations of a device (its parts are {names}): profile running steps")
    return found


def _own_times(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """Yields the events of a line, each with its time outside of the events within it."""
    open_events: list[tuple[Event, list[int]]] = []  # with the time of the events directly within
    for event in sorted(events, key=lambda it: (it.start_ps, -it.duration_ps)):
        while open_events and open_events[-1][0].end_ps <= event.start_ps:
            ended, within = open_events.pop()
            yield ended, ended.duration_ps - sum(within)
        if open_events:
            holder, within = open_events[-1]
            within.append(min(event.end_ps, holder.end_ps) - event.start_ps)
        open_events.append((event, []))
    yield from ((event, event.duration_ps - sum(within)) for event, within in reversed(open_events))


class _Operation(NamedTuple):
    """An operation of a program: the name that JAX gave it, with its scopes, and its category."""

    name: str
    category: str


class _Programs:
    """Finds the operations of events: from the figures of an event, else from the program that the profile holds."""

    def __init__(self, planes: Sequence[Plane]) -> None:
        kinds = [kind for plane in planes if plane.name == "/host:metadata" for kind in plane.kinds.values()]
        self._protos: dict[str, bytes] = {}
        self._named: defaultdict[str, list[str]] = defaultdict(list)
        self._read: dict[str, Mapping[str, _Operation]] = {}
        self._loops: dict[tuple[str, str], bool] = {}
        for kind in kinds:
            proto = next((value for value in kind.stats.values() if isinstance(value, bytes)), None)
            if proto is not None and (number := _PROGRAM.search(kind.name)):
                self._protos[number[1]] = proto
                self._named[kind.name[: number.start()]].append(number[1])

    def operation(self, event: Event) -> _Operation:
        """Returns the operation of an event."""
        stats = event.stats
        instruction = str(stats.get("hlo_op") or event.name.partition(" = ")[0].removeprefix("%"))
        kind = _NUMBER.sub("", instruction)
        known = self._operations(self._number(stats)).get(instruction, _Operation("", kind))
        return _Operation(str(stats.get("tf_op") or known.name), str(stats.get("hlo_category") or known.category))

    def may_loop(self, event: Event, scope: str) -> bool:
        """Returns whether a scope has loops in the program of an event; True if the profile lacks the program."""
        place = self._number(event.stats), scope
        if place not in self._loops:
            operations = self._operations(place[0]).values()
            loops = (it for it in operations if it.category == "while" and scope in it.name)
            self._loops[place] = not operations or any(loops)
        return self._loops[place]

    def _number(self, stats: Mapping[str, Value]) -> str:
        """Returns the number of an event's program; empty if the profile lacks it, or has several of its name."""
        if (number := str(stats.get("program_id", ""))) in self._protos:
            return number
        alike = self._named.get(_PROGRAM.sub("", str(stats.get("hlo_module", ""))), [])
        return alike[0] if len(alike) == 1 else ""

    def _operations(self, number: str) -> Mapping[str, _Operation]:
        if number and number not in self._read:
            self._read[number] = _operations_of(self._protos[number])
        return self._read.get(number, {})


def _operations_of(proto: bytes) -> Mapping[str, _Operation]:
    """Returns the operations of a program, the protobuf message `HloProto`, by the names of their instructions."""
    modules = parsed(memoryview(proto), {1: inner})[1]
    computations = [
        parsed(it, {2: _instruction, 5: signed}) for module in modules for it in parsed(module, {3: inner})[3]
    ]
    within = {last(it, 5, 0): [name for _, (name, _), _ in it[2]] for it in computations}
    found: dict[str, _Operation] = {}
    for instruction, (name, opcode), calls in itertools.chain.from_iterable(it[2] for it in computations):
        if not name and opcode == "fusion":  # it has the first scope within
            name = next((it for call in calls for it in within.get(call, ()) if SCOPE.search(it)), "")
        found[instruction] = _Operation(name, opcode)
    return found


def _instruction(value: int | memoryview) -> tuple[str, _Operation, list[int]]:
    """Returns the name of an instruction, its operation, and the computations that it calls."""
    found = parsed(inner(value), {1: text, 2: text, 7: lambda it: parsed(inner(it), {2: text}), 38: packed})
    name = last(last(found, 7, defaultdict(list)), 2, "")
    return last(found, 1, ""), _Operation(name, last(found, 2, "")), [*itertools.chain.from_iterable(found[38])]
