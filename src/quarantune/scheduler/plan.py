"""The plan of a run: its limits, where further configs come from, and the proof of its programs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, TypeAlias

from quarantune.devices.discovery import Device
from quarantune.measure.objective import Objective
from quarantune.scheduler.recall import Recall
from quarantune.values.amounts import memory_text
from quarantune.values.configs import Config
from quarantune.values.trial import TIME, Trial

Finish: TypeAlias = Callable[[int, Trial, str], None]
"""Receives the index of a config, its trial and its output, once the trial is over."""
CompareProgram: TypeAlias = Callable[[Config, Mapping[str, int]], None]
"""Compares a config's program, given as `Traced.lines`, with the caller's program; raises if they differ."""


@dataclasses.dataclass(eq=False)
class Proof:
    """Compares one program that a worker of a sweep has traced with the caller's program.

    Attributes:
        compare: the comparison; None after it ran, or if no proof is needed.
        only: the indices of the configs to choose from; empty for all.
    """

    compare: CompareProgram | None = None
    only: Collection[int | None] = ()

    @property
    def is_due(self) -> bool:
        """Whether a comparison is still due."""
        return self.compare is not None

    def wants(self, index: int) -> bool:
        """Returns whether to compare the program of a config."""
        return self.is_due and (not self.only or index in self.only)

    def show(self, config: Config, lines: Mapping[str, int]) -> None:
        """Compares the program of a config, unless an earlier program was compared."""
        compare, self.compare = self.compare, None
        if compare is not None:
            compare(config, lines)


class ConfigSource:
    """Gives further configs to a run, or to several runs one after another, and receives their trials.

    This base class gives none: all configs of its run are known from the start.
    """

    @property
    def is_closed(self) -> bool:
        """Whether it gives no further configs."""
        return True

    def take(self, count: int) -> Mapping[int, Config]:
        """Returns at most `count` further configs by index; fewer if it waits for trials, or at its end."""
        return {}

    @property
    def total(self) -> int:
        """The most configs that it may give."""
        return 0

    def rest(self) -> Mapping[int, Config]:
        """Returns configs for one more run after a run has ended; waits for them. Empty if no run need follow."""
        return {}

    def ended(self, index: int, trial: Trial) -> None:
        """Receives the trial of any config of a run, as soon as it has ended."""

    def reason_to_stop(self) -> str:
        """Returns why configs that no device measures should stop; empty while they should continue."""
        return self.why_late()

    def why_late(self) -> str:
        """Returns why the time for further configs is over; empty while it is not."""
        return ""


NOTHING_MORE = ConfigSource()


STARTUP_DEADLINE_S = 120.0
"""Seconds that a worker may take before its first message; only a broken machine needs them."""
KILL_DEADLINE_S = 10.0
"""Seconds that a worker may take to die after SIGKILL, before the run withdraws its device."""
TICK_S = 0.05
"""Seconds between two looks at everything that sends no events."""
_MOST_BARE_BYTES = 4 << 30
"""Memory that a worker may hold before a config begins, even over a limit, so that it can report how much it needs."""
MEMORY_SHARE = 0.9
"""The share of the free memory that workers may take together if nobody set a limit."""


class Mode(enum.Enum):
    """The steps of a sweep's trials, and which of them run in workers."""

    IN_WORKERS = enum.auto()
    """Workers do all steps."""
    MEASURING_HERE = enum.auto()
    """Workers compile, and this process measures."""
    HERE = enum.auto()
    """This process does all steps."""
    COMPILING = enum.auto()
    """Workers compile, and nothing runs."""
    CHECKING = enum.auto()
    """Workers compile for a device that need not exist here, and keep no program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """The memory that the configs of a run may take, set by the user.

    Attributes:
        worker_bytes: host memory of one worker and its children.
        device_bytes: the most device memory of a config's program; None for no bound.
        grows_alone: whether a config that runs alone may take more.
    """

    grows_alone: ClassVar[bool] = False
    worker_bytes: int
    device_bytes: int | None = None

    def alone_bytes(self, available_bytes: int) -> int | None:
        """Returns the limit of a config that runs alone, given the free memory; None if the usual limit holds."""
        return None

    def bare_bytes(self, limit_bytes: int) -> int:
        """Returns the limit of a worker before a config begins in it; it must be able to report how much it needs."""
        return max(limit_bytes, _MOST_BARE_BYTES)

    def check(self, bare_bytes: int) -> None:
        """Checks that the limit exceeds the memory that a worker holds before a config begins in it.

        Raises:
            ValueError: the limit is too low.
        """
        if bare_bytes > self.worker_bytes:
            limit, bare = (memory_text(amount, self.worker_bytes) for amount in (self.worker_bytes, bare_bytes))
            raise ValueError(
                f"memory_limit={limit} is too little: a worker holds {bare} before a config begins. Set twice that or "
                "more, or no limit for a share of the free memory"
            )

    def over(self, limit: str) -> str:
        """Returns which limit a worker is over that holds more than `limit`, and the remedy."""
        return f"over its memory_limit of {limit}: raise memory_limit if it may take more"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedMemoryLimits(MemoryLimits):
    """A share of the free memory for each worker, if nobody has set a limit.

    A config over its share runs once more, alone, with nearly all of the memory.
    """

    grows_alone: ClassVar[bool] = True

    def alone_bytes(self, available_bytes: int) -> int:
        """Returns nearly all of the free memory."""
        return max(self.worker_bytes, int(MEMORY_SHARE * available_bytes))

    def bare_bytes(self, limit_bytes: int) -> int:
        """Returns the limit unchanged."""
        return limit_bytes

    def check(self, bare_bytes: int) -> None:
        """Checks nothing, because nobody has set a limit."""

    def over(self, limit: str) -> str:
        """Returns that a worker is over its share, and the remedy."""
        return f"over its share of the free memory, {limit}: free some, or let prune_fn drop the config"


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
    """The purpose and the limits of a run, on any route.

    Attributes:
        devices: the devices that measure; each has one lease.
        compile_timeout_s: seconds for loading, tracing, lowering and compiling one config.
        timeout_s: seconds for checking and measuring one config, counted from when it holds its device.
        memory: the limits of memory.
        has_final: whether a final compares the fastest configs at the end.
        troubled: the indices of configs that hung or crashed before, and come last.
        proof: compares the program of one config with the caller's.
        objective: the author's objective, which ranks trials.
        recall: the trials of earlier sweeps, by program.
        runs_all: whether each config runs, even one whose program another config has run.
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
    runs_all: bool = False

    def ranking(self) -> Plan:
        """Returns the plan of a run that only ranks configs."""
        return dataclasses.replace(self, has_final=False, proof=Proof(), recall=self.recall.ranked())


@dataclasses.dataclass
class Unconfirmed:
    """An error raised in a worker without the device.

    Attributes:
        trial: the config's trial.
        log: the worker's output.
        place: the exception's type and the code that raised it, from `worker.failures.place_of`.
    """

    trial: Trial
    log: str
    place: str


@dataclasses.dataclass
class Leftovers:
    """Configs that a route could not settle.

    Attributes:
        unfit: the configs whose programs must compile on their device, by index.
        why_unfit: why the last of them must.
        unconfirmed: the configs that failed without the device, by index.
        first_at: the index of the first unconfirmed config that failed at each place.
        confirmed: the places whose first config also failed on the device, with the same error.
        none_fits: whether all configs are unfit.
        raised_at: the places where configs failed while they compiled with their device, by index.
    """

    unfit: dict[int, Config] = dataclasses.field(default_factory=dict)
    why_unfit: str = ""
    unconfirmed: dict[int, Unconfirmed] = dataclasses.field(default_factory=dict)
    first_at: dict[str, int] = dataclasses.field(default_factory=dict)
    confirmed: set[str] = dataclasses.field(default_factory=set)
    none_fits: bool = False
    raised_at: dict[int, str] = dataclasses.field(default_factory=dict)

    def add_unconfirmed(self, index: int, error: Unconfirmed) -> None:
        """Adds a config that failed without the device."""
        self.unconfirmed[index] = error
        self.first_at.setdefault(error.place, index)
