"""The plan of a run: its route, its limits and the constants that all parts of the scheduler share."""

from __future__ import annotations

import dataclasses

from quarantune.devices.device import Device
from quarantune.sandbox.messages import BenchOptions
from quarantune.scheduler.proof import Proof
from quarantune.values.compiling import CompileTarget
from quarantune.values.trial import Config, Route, Trial

STARTUP_DEADLINE_S = 120.0
"""Seconds that a worker may take before its first message; only a broken machine needs them."""
KILL_DEADLINE_S = 10.0
"""Seconds that a worker may take to die after SIGKILL; then its device is withdrawn."""
TICK_S = 0.05
"""Seconds between two looks at everything that sends no events."""
MEMORY_SHARE = 0.9
"""The share of the free memory that workers may take together where nobody set a limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The way in which a scheduler runs its configs.

    Attributes:
        route: whether one worker does both halves of a trial or two do.
        options: the options that every worker gets.
        target: the device that compile workers compile for when they have none; None for the machine's own.
        slots: how many configs compile at a time.
        devices: where to measure; one lease each.
        configs_per_worker: how many configs a worker that only measures may take.
        compiles_per_worker: how many configs a worker that compiles may take.
        exclusive: whether compiling disturbs measuring, so that the two must alternate.
        parked: with `exclusive`, how many compiled configs wait, memory allowing, before a measuring burst begins.
        ahead: whether a worker is made ready for the next config while one compiles.
        compile_timeout_s: seconds for loading, tracing, lowering and compiling one config.
        timeout_s: seconds for checking and measuring one config, from the moment it holds its device.
        memory_limit_bytes: host memory of one worker and its children.
        may_exceed_alone: whether the limit is a share of the free memory, so that a config over it is tried once more,
            alone, with nearly all of it.
        compile_only: whether configs are compiled and not run.
        is_check: whether they are compiled only to find out if they compile; their executables are not kept.
        errors_stand: whether a config that cannot be compiled without the device cannot be compiled on it either.
        proof: compares the program of one config with the caller's.
    """

    route: Route
    options: BenchOptions
    target: CompileTarget | None
    slots: int
    devices: tuple[Device, ...]
    configs_per_worker: int
    compiles_per_worker: int = 1
    exclusive: bool
    parked: int
    ahead: bool = False
    compile_timeout_s: float
    timeout_s: float
    memory_limit_bytes: int
    may_exceed_alone: bool = False
    compile_only: bool = False
    is_check: bool = False
    errors_stand: bool = False
    proof: Proof = dataclasses.field(default_factory=Proof)

    @property
    def is_together(self) -> bool:
        """Whether one worker does both halves of a trial."""
        return self.route is not Route.APART

    @property
    def confirms(self) -> bool:
        """Whether errors raised without the device are repeated on it while other configs go on."""
        return not (self.errors_stand or self.compile_only or self.is_check)


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """Configs that a route could not settle.

    Attributes:
        unfit: why a config's program must be compiled on its device, by the config's index.
        unfit_configs: those configs.
        unconfirmed: the configs that failed where there was no device, by index.
        first_at: of those, the first config of each place where one failed.
        confirmed: the places where that one failed on the device, too, with the same error.
        none_fits: whether all configs are unfit.
        raised_at: the places where configs failed while they were compiled with their device, by index.
    """

    unfit: dict[int, str] = dataclasses.field(default_factory=dict)
    unfit_configs: dict[int, Config] = dataclasses.field(default_factory=dict)
    unconfirmed: dict[int, Unconfirmed] = dataclasses.field(default_factory=dict)
    first_at: dict[str, int] = dataclasses.field(default_factory=dict)
    confirmed: frozenset[str] = frozenset()
    none_fits: bool = False
    raised_at: dict[int, str] = dataclasses.field(default_factory=dict)

    def doubt(self, index: int, error: Unconfirmed) -> None:
        """Adds a config that failed where there was no device."""
        self.unconfirmed[index] = error
        self.first_at.setdefault(error.place, index)
