"""The record of a trial: outcomes, phases, routes; and the errors that public functions raise."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import Annotated, Any, Self, TypeAlias, TypeGuard

from quarantune.values.codec import DamageError, Record, one_of, within
from quarantune.values.compiling import NO_FIGURES, CompilerFigures
from quarantune.values.config_values import encode, freeze
from quarantune.values.json_object import JsonObject

ConfigValue: TypeAlias = Any
"""A number, a string, a boolean or None; an enum's member or a dtype; or a tuple, `FrozenDict` or dataclass of them."""
Config: TypeAlias = dict[str, ConfigValue]

UNTUNED = -1
"""The index under which the function's own defaults run where they are not one of the configs."""

_SHORTEST_MS = 1e-6
"""No call takes less than a nanosecond."""
_LONGEST_MS = 1e8
"""Longer samples are errors of the clock: a device clock has returned nearly 2^64 ns."""


class Outcome(enum.StrEnum):
    """How one config ended; every config ends in exactly one of these."""

    OK = "ok"
    SLOW = "slow"
    PRUNED = "pruned"
    ERROR = "error"
    WRONG = "wrong"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    OOM = "oom"
    DEVICE_OOM = "device_oom"
    LOST = "lost"
    NOT_RUN = "not_run"

    @property
    def is_failure(self) -> bool:
        """Whether the config was tried and cannot be used."""
        return self not in _NOT_FAILURES


_NOT_FAILURES = frozenset({Outcome.OK, Outcome.SLOW, Outcome.PRUNED, Outcome.NOT_RUN})


class Phase(enum.StrEnum):
    """The phase in which a trial ended."""

    LOAD = "load"
    COMPILE = "compile"
    CHECK = "check"
    MEASURE = "measure"


END, READY = "end", "ready"
"""Reported like a phase: a trial is over; its config was compiled, and waits for its turn on a device."""

_LARGEST_NUMBER = 2**63


class Route(enum.StrEnum):
    """The processes that ran a trial."""

    TOGETHER = "together"
    """One worker compiled and measured."""
    APART = "apart"
    """One worker compiled without the device, another measured on it."""
    HANDED_OVER = "handed_over"
    """One worker compiled with the device, another measured on it."""
    COMPILED_APART = "compiled_apart"
    """One worker compiled, the caller's own process measured."""
    IN_PROCESS = "in_process"
    """No worker: the caller's own process, as the operator chose, or where the program cannot leave its process."""


def frozen(config: Config) -> Config:
    """Returns a config as JSON holds it with values that jit can hash."""
    return {name: freeze(value) for name, value in config.items()}


def _not_empty(samples_ms: tuple[float, ...]) -> tuple[float, ...]:
    if not samples_ms:
        raise ValueError("there are no samples")
    return samples_ms


Milliseconds: TypeAlias = Annotated[float, within(_SHORTEST_MS, _LONGEST_MS)]
Samples: TypeAlias = Annotated[tuple[Milliseconds, ...], _not_empty]
_Seconds: TypeAlias = Annotated[float, within(0, _LARGEST_NUMBER)]
Score: TypeAlias = Annotated[float, within(-1e308, 1e308)]
Millijoules: TypeAlias = Annotated[float, within(0, _LARGEST_NUMBER)]
Watts: TypeAlias = Annotated[float, within(0, _LARGEST_NUMBER)]
_LATER_FIELDS = ("figures", "energy_mj", "watts", "score")
"""Fields that JSON holds only where they have a value, so that other trials are as earlier versions wrote them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Record):
    """The result of one config.

    Attributes:
        config: the config tried.
        outcome: how it ended.
        phase: the phase it ended in; None where it never started.
        time_ms: median time of one call in milliseconds; None unless measured.
        samples_ms: the samples behind the median, in milliseconds.
        own_ms: the time by which finalists are ranked: that of the fastest sample without its waits for a CPU, or the
            median of a device's own clock; None unless measured.
        compile_s: seconds spent tracing, lowering and compiling.
        peak_memory_bytes: the largest host memory that its process was observed to hold.
        message: the reason for the outcome, one sentence; empty where all went well.
        log_tail: the last lines the trial wrote to stdout or stderr.
        route: which processes ran it; None where it never started.
        device: the device it was measured on, as `cuda:0`; empty where it was not measured.
        clock: the clock that timed it: `device`, `queued` or `wall`; empty where it was not timed.
        ended_s: when it ended, in seconds of Unix time; None where that was not noted.
        figures: the compiler's figures about its program; None where it has none, or did not compile.
        energy_mj: the energy that the GPU took for one call, in millijoules, by NVML's counter of its total energy;
            None where that was not measured.
        watts: the mean power of the GPU while that was measured; it may run slower then than when it is timed.
        score: what the author's objective made of it, less being better; None where that is time.
    """

    config: Annotated[Config, frozen]
    outcome: Outcome
    phase: Phase | None = None
    time_ms: Milliseconds | None = None
    samples_ms: tuple[Milliseconds, ...] = ()
    own_ms: Milliseconds | None = None
    compile_s: _Seconds | None = None
    peak_memory_bytes: Annotated[int, within(0, _LARGEST_NUMBER)] | None = None
    message: str = ""
    log_tail: str = ""
    route: Route | None = None
    device: str = ""
    clock: Annotated[str, one_of("", "device", "queued", "wall")] = ""
    ended_s: _Seconds | None = dataclasses.field(default=None, compare=False)
    figures: CompilerFigures | None = None
    energy_mj: Millijoules | None = None
    watts: Watts | None = None
    score: Score | None = None

    def to_json(self) -> JsonObject:
        """Returns the trial as JSON-able data."""
        data = super().to_json() | {"config": encode(self.config)}
        return {name: value for name, value in data.items() if value is not None or name not in _LATER_FIELDS}

    @property
    def device_memory_bytes(self) -> int | None:
        """Device memory that its program takes: arguments, output and intermediate arrays; None where not known."""
        return (self.figures or NO_FIGURES).device_bytes

    @property
    def merit(self) -> float | None:
        """The figure by which finalists are chosen, less being better: the score, or a time in milliseconds.

        Of a trial from an older version's journal, that is the median.
        """
        return next((each for each in (self.score, self.own_ms, self.time_ms) if each is not None), None)

    @property
    def figure(self) -> float | None:
        """The figure by which the winner is chosen, less being better: the score, or the median time."""
        return self.time_ms if self.score is None else self.score

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Returns the trial that `to_json` described, its config as JSON returns it.

        Raises:
            DamageError: this describes no trial, or one with impossible times.
        """
        trial = super().from_json(data)
        if trial.outcome is Outcome.OK and trial.time_ms is None:
            raise DamageError("it is ok, and has no time")
        return trial


def pruned_trial(config: Config) -> Trial:
    """Returns the trial of a config that `prune_fn` drops."""
    return Trial(config=config, outcome=Outcome.PRUNED, message="prune_fn dropped it")


def is_plausible_ms(time_ms: object) -> TypeGuard[float]:
    """Returns whether a value can be the time of one call in milliseconds; files may hold anything."""
    # Compared without conversion: a huge integer does not fit a float.
    return isinstance(time_ms, (int, float)) and not isinstance(time_ms, bool) and _SHORTEST_MS <= time_ms < _LONGEST_MS


def count_outcomes(trials: Sequence[Trial]) -> dict[str, int]:
    """Returns how many trials ended in each outcome that occurred."""
    return dict(collections.Counter(trial.outcome.value for trial in trials))


class TuningFailedError(RuntimeError):
    """Every config failed.

    Attributes:
        trials: every trial, in the order of the configs.
        key: the cache key of the problem.
    """

    def __init__(self, message: str, *, trials: Sequence[Trial], key: str) -> None:
        super().__init__(message)
        self.trials = tuple(trials)
        self.key = key


class CacheMissError(LookupError):
    """Nothing is cached for this call, and `ON_MISS` is `error`."""


class ReferenceFailedError(RuntimeError):
    """`ref_fn` itself failed, so that no config can be judged."""


class DifferentProgramError(RuntimeError):
    """Workers trace another program than the caller, so that nothing that they find is true of the caller's."""

    def __init__(self, name: str, difference: str) -> None:
        super().__init__(
            f"{name}: workers run another program than this process: {difference}. A value that this program has set "
            f"is not set in workers, because the function's code does not name it: pass it to the function as an "
            f"argument, or set it where the function's module is imported. To tune in this process instead, set "
            f"QUARANTUNE_ISOLATION=none"
        )


class SandboxError(RuntimeError):
    """The sandbox itself failed: no worker could be started, or none stayed alive."""


class EngineError(RuntimeError):
    """An executor, or every machine that it offered, could not run a sweep."""
