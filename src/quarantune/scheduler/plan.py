"""The plan of a run: its limits, where further configs come from, and the proof of its programs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, TypeAlias

from quarantune.devices.discovery import Device
from quarantune.measure.objective import Objective
from quarantune.scheduler.recall import Recall
from quarantune.values.configs import Config
from quarantune.values.trial import TIME, Trial

Finish: TypeAlias = Callable[[int, Trial, str], None]
"""Receives the index of a config, its trial and its output, once the trial is over."""
CompareProgram: TypeAlias = Callable[[Config, Mapping[str, int]], None]
"""Compares the program of a config, as `Traced` tells it, with the caller's; raises where it is another one."""


@dataclasses.dataclass(eq=False)
class Proof:
    """Has one program that a worker of a sweep has traced compared with that of the caller.

    Attributes:
        compare: the comparison; None where a program was compared, or for no proof.
        only: the indices of the configs that may be compared; empty for all.
    """

    compare: CompareProgram | None = None
    only: Collection[int | None] = ()

    @property
    def is_due(self) -> bool:
        """Whether a program is still to be compared."""
        return self.compare is not None

    def wants(self, index: int) -> bool:
        """Returns whether the program of a config is to be compared."""
        return self.is_due and (not self.only or index in self.only)

    def show(self, config: Config, lines: Mapping[str, int]) -> None:
        """Compares the program of a config, unless one was compared before."""
        compare, self.compare = self.compare, None
        if compare is not None:
            compare(config, lines)


class ConfigSource:
    """Gives further configs to a run, or to several runs one after another, and receives their trials.

    The base is the source of a run whose configs are all known from the start.
    """

    @property
    def is_closed(self) -> bool:
        """Whether it gives no further configs."""
        return True

    def take(self, count: int) -> Mapping[int, Config]:
        """Returns at most `count` further configs by index; fewer where it waits for trials, or at its end."""
        return {}

    def ended(self, index: int, trial: Trial) -> None:
        """Receives the trial of any config of a run, as soon as it has ended."""

    def reason_to_stop(self) -> str:
        """Returns why configs that are not being measured should not go on; empty while they should."""
        return self.why_late()

    def why_late(self) -> str:
        """Returns that the time is over in which configs may be tried; empty while it is not."""
        return ""


NOTHING_MORE = ConfigSource()


STARTUP_DEADLINE_S = 120.0
"""Seconds that a worker may take before its first message; only a broken machine needs them."""
KILL_DEADLINE_S = 10.0
"""Seconds that a worker may take to die after SIGKILL; then its device is withdrawn."""
TICK_S = 0.05
"""Seconds between two looks at everything that sends no events."""
_MOST_BARE_BYTES = 4 << 30
"""A worker in which no config has begun may exceed a limit up to this, so that it can report how much it needs."""
MEMORY_SHARE = 0.9
"""The share of the free memory that workers may take together where nobody set a limit."""


class Mode(enum.Enum):
    """Which steps of a sweep's trials there are, and which of them run in workers."""

    IN_WORKERS = enum.auto()
    """Workers do all steps."""
    MEASURING_HERE = enum.auto()
    """Workers compile, and this process measures."""
    HERE = enum.auto()
    """This process does all steps."""
    COMPILING = enum.auto()
    """Workers compile, and nothing runs."""
    CHECKING = enum.auto()
    """Workers compile for a device that need not exist here, and no program is kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """How much memory the configs of a run may take, as the user has set it.

    Attributes:
        worker_bytes: host memory of one worker and its children.
        device_bytes: the most device memory of a config's program; None for no bound.
        grows_alone: whether a config that runs alone may take more.
    """

    grows_alone: ClassVar[bool] = False
    worker_bytes: int
    device_bytes: int | None = None

    def alone_bytes(self, available_bytes: int) -> int | None:
        """Returns the limit of a config that runs alone, with so much memory free; None for the same as for others."""
        return None

    def bare_bytes(self, limit_bytes: int) -> int:
        """Returns the limit of a worker in which no config has begun, so that it can report how much it needs."""
        return max(limit_bytes, _MOST_BARE_BYTES)

    def check(self, bare_bytes: int) -> None:
        """Checks that a worker may hold what it holds before a config begins in it.

        Raises:
            ValueError: the limit is too low.
        """
        if bare_bytes > self.worker_bytes:
            raise ValueError(
                f"memory_limit={self.worker_bytes:,} bytes is too little: a worker holds {bare_bytes:,} bytes before a "
                "config begins. Set twice that or more, or no limit for a share of the free memory"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedMemoryLimits(MemoryLimits):
    """A share of the free memory for each worker, as nobody has set a limit.

    A config over it is tried once more, alone, with nearly all of the memory.
    """

    grows_alone: ClassVar[bool] = True

    def alone_bytes(self, available_bytes: int) -> int:
        """Returns nearly all of the free memory."""
        return max(self.worker_bytes, int(MEMORY_SHARE * available_bytes))

    def bare_bytes(self, limit_bytes: int) -> int:
        """Returns the same limit as for others."""
        return limit_bytes

    def check(self, bare_bytes: int) -> None:
        """Checks nothing: nobody has set the limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """How many configs and workers a route has at a time.

    Attributes:
        slots: how many configs compile.
        parked: how many compiled configs wait, memory allowing, before they are measured.
        workers: how many workers share the memory.
        configs_per_worker: how many configs a worker that only measures may take.
        compiles_per_worker: how many configs a worker that compiles may take.
    """

    slots: int
    parked: int
    workers: int
    configs_per_worker: int = 1
    compiles_per_worker: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a scheduler runs its configs for, and within which limits, on whichever route.

    Attributes:
        devices: where to measure; one lease each.
        compile_timeout_s: seconds for loading, tracing, lowering and compiling one config.
        timeout_s: seconds for checking and measuring one config, from the moment it holds its device.
        memory: the limits of memory.
        has_final: whether the fastest configs are compared at the end.
        troubled: the indices of configs that hung or crashed before, and come last.
        proof: compares the program of one config with the caller's.
        objective: the author's objective, by which trials are ranked.
        recall: the trials of earlier sweeps, by program.
    """

    devices: tuple[Device, ...]
    compile_timeout_s: float
    timeout_s: float
    memory: MemoryLimits
    has_final: bool = False
    troubled: Collection[int] = ()
    proof: Proof = dataclasses.field(default_factory=Proof)
    objective: Objective = TIME
    recall: Recall = dataclasses.field(default_factory=Recall)

    def ranking(self) -> Plan:
        """Returns the plan of a run that only ranks configs."""
        return dataclasses.replace(self, has_final=False, proof=Proof(), recall=self.recall.ranked())


@dataclasses.dataclass
class Unconfirmed:
    """An error that was raised where there was no device.

    Attributes:
        trial: the config's trial.
        log: the worker's output.
        place: the exception's type and where it was raised, as `worker.failures.place_of` returns it.
    """

    trial: Trial
    log: str
    place: str


@dataclasses.dataclass
class Leftovers:
    """Configs that a route could not settle.

    Attributes:
        unfit: the configs whose programs must be compiled on their device, by index.
        why_unfit: why the last of them must.
        unconfirmed: the configs that failed where there was no device, by index.
        first_at: of those, the first config of each place where one failed.
        confirmed: the places where that one failed on the device, too, with the same error.
        none_fits: whether all configs are unfit.
        raised_at: the places where configs failed while they were compiled with their device, by index.
    """

    unfit: dict[int, Config] = dataclasses.field(default_factory=dict)
    why_unfit: str = ""
    unconfirmed: dict[int, Unconfirmed] = dataclasses.field(default_factory=dict)
    first_at: dict[str, int] = dataclasses.field(default_factory=dict)
    confirmed: set[str] = dataclasses.field(default_factory=set)
    none_fits: bool = False
    raised_at: dict[int, str] = dataclasses.field(default_factory=dict)

    def add_unconfirmed(self, index: int, error: Unconfirmed) -> None:
        """Adds a config that failed where there was no device."""
        self.unconfirmed[index] = error
        self.first_at.setdefault(error.place, index)
