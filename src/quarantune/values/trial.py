"""The record of a trial, the findings of a sweep, and the figures of compilers."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

from quarantune.values.codec import (
    LONGEST_MS,
    SHORTEST_MS,
    DamageError,
    JsonObject,
    Record,
    as_json,
    frozen,
    one_of,
    within,
)
from quarantune.values.configs import Config
from quarantune.values.texts import printable

TIME, ENERGY = "time", "energy"
"""Objectives with a name."""
UNTUNED = -1
"""Index of the function's own defaults if they are not one of the configs."""

END, READY, AGAIN = "end", "ready", "again"
"""Events reported like phases. `END`: the trial is over. `READY`: the config is compiled and waits for a device.
`AGAIN`: the machine that ran the config is gone, and the config waits to run again."""

_LARGEST_NUMBER = 2**63
ESTIMATED = "estimated"
"""Value of `Searched.stopped` if nothing was measured and a compiler estimated the configs."""
SAME_PROGRAM = "the same program as "
"""Begins the message of a config that lowered to another config's program, which ran for both."""
_LONGEST_TEXT = 40
_MOST_OBSERVED = 16
SCORES = ("score", "default_score", "energy_mj")
"""Fields that results and entries have only if the objective is not time."""
_Count: TypeAlias = Annotated[int, within(0, 1 << 53)]
"""A count that a float can hold exactly."""


class Outcome(enum.StrEnum):
    """How one config ended. Every config has exactly one outcome."""

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
        """Whether the config was tried and is unusable."""
        return self not in _NOT_FAILURES


_NOT_FAILURES = frozenset({Outcome.OK, Outcome.SLOW, Outcome.PRUNED, Outcome.NOT_RUN})


class Phase(enum.StrEnum):
    """The last phase of a trial."""

    LOAD = "load"
    COMPILE = "compile"
    CHECK = "check"
    MEASURE = "measure"


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
    """No worker: the caller's own process ran it, by the operator's choice or because the program cannot leave it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """The description of a device for processes that compile for it without holding it.

    Attributes:
        platform: `cpu`, `cuda`, `rocm` or `tpu`.
        device_kind: JAX's name of the device.
        topology: the name of a TPU's topology; empty for other devices.
        config_text: XLA's description of a GPU; empty for other devices.
        num_cores: the number of its cores; None if JAX does not know it.
        estimates: whether the compiler also estimates the cycles of a program.
    """

    platform: str
    device_kind: str
    topology: str = ""
    config_text: str = dataclasses.field(default="", repr=False)
    num_cores: int | None = None
    estimates: bool = False


@dataclasses.dataclass(frozen=True)
class ArrayKind:
    """The kind of an array: a program's output, or an array that the command line names.

    Attributes:
        shape: its shape.
        dtype: NumPy's name of its dtype.
    """

    shape: tuple[int, ...]
    dtype: str


_Bytes: TypeAlias = Annotated[int, within(0, _LARGEST_NUMBER)]
_Estimate: TypeAlias = Annotated[float, within(0, math.inf)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CycleEstimate(Record):
    """The cost of a program by the TPU compiler's static schedule.

    Attributes:
        cycles: clock cycles of one core for all operations, one after another.
        kernel_cycles: the part of `cycles` that Pallas kernels take; None if the program has no Pallas kernel.
        moved_bytes: bytes that the kernels' pipelines read and write in main memory.
    """

    cycles: _Estimate
    kernel_cycles: _Estimate | None = None
    moved_bytes: _Estimate = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerFigures(Record):
    """The compiler's figures about one program. None means that the compiler does not state the figure.

    Compilers without a GPU state sizes only. The compiler for TPUs states all figures.

    Attributes:
        argument_bytes: device memory of the arguments.
        output_bytes: device memory of the output.
        temporary_bytes: device memory for intermediate arrays.
        aliased_bytes: device memory of donated arguments that the output takes over; both figures include it.
        code_bytes: the size of the program.
        vmem_bytes: the most VMEM that a kernel of the program uses, on a TPU.
        registers: the most registers that a thread of a kernel uses. A compile check for an NVIDIA GPU states this
            figure and the next three.
        spilled_bytes: the most bytes that a thread of a kernel stores for lack of registers.
        shared_bytes: the most shared memory that a block of a kernel uses.
        occupancy: the smallest share of a multiprocessor's warps that can run at a time, by a kernel's needs.
        flops: floating-point operations of one call, by the compiler's estimate. None if it cannot count them all, for
            example in a kernel whose author does not state them, or in a loop.
        moved_bytes: bytes that one call reads and writes in device memory; None under the same conditions.
        estimate: the expected cost of the program; None if nobody asked for it, or the compiler gave none.
        no_estimate: the reason why a requested estimate is missing.
    """

    argument_bytes: _Bytes | None = None
    output_bytes: _Bytes | None = None
    temporary_bytes: _Bytes | None = None
    aliased_bytes: _Bytes | None = None
    code_bytes: _Bytes | None = None
    vmem_bytes: _Bytes | None = None
    registers: _Bytes | None = None
    spilled_bytes: _Bytes | None = None
    shared_bytes: _Bytes | None = None
    occupancy: Annotated[float, within(0, math.nextafter(1, 2))] | None = None
    flops: _Estimate | None = None
    moved_bytes: _Estimate | None = None
    estimate: CycleEstimate | None = None
    no_estimate: str = ""

    def to_json(self) -> JsonObject:
        """Returns the known figures as JSON-able data."""
        return {name: value for name, value in super().to_json().items() if value not in (None, "")}

    @property
    def device_bytes(self) -> int | None:
        """Device memory of the arguments, the output and intermediate arrays together; None if unknown."""
        argument, output, temporary = self.argument_bytes, self.output_bytes, self.temporary_bytes
        if argument is None or output is None or temporary is None:
            return None
        return argument + output + temporary - (self.aliased_bytes or 0)


NO_FIGURES = CompilerFigures()
"""The figures of a program about which nothing is known."""


def lowered_half(program: str) -> str:
    """Returns the half of an identity that describes the whole program: programs that share it share a trial.

    It is empty if the program's text does not show the whole program; see `transport.programs.identity`.
    """
    return program.partition(".")[2]


def is_same_program(program: str, other: str) -> bool:
    """Returns whether two identities belong to one program, as far as they are comparable."""
    (traced, _, lowered), (other_traced, _, other_lowered) = program.partition("."), other.partition(".")
    return lowered == other_lowered if lowered and other_lowered else traced == other_traced


def _not_empty(samples_ms: tuple[float, ...]) -> tuple[float, ...]:
    if not samples_ms:
        raise ValueError("there are no samples")
    return samples_ms


def _few_names(observed: Mapping[str, float]) -> Mapping[str, float]:
    if len(observed) > _MOST_OBSERVED or max(map(len, observed), default=0) > _LONGEST_TEXT:
        raise ValueError(f"it has more than {_MOST_OBSERVED} names, or a long one")
    return observed


Milliseconds: TypeAlias = Annotated[float, within(SHORTEST_MS, LONGEST_MS)]
Samples: TypeAlias = Annotated[tuple[Milliseconds, ...], _not_empty]
_Seconds: TypeAlias = Annotated[float, within(0, _LARGEST_NUMBER)]
Score: TypeAlias = Annotated[float, within(-1e308, 1e308)]
Millijoules: TypeAlias = Annotated[float, within(0, _LARGEST_NUMBER)]
Watts: TypeAlias = Annotated[float, within(0, _LARGEST_NUMBER)]
SAME, OTHER, UNSTABLE = "same", "other", "unstable"
INVARIANT, VARIES = "invariant", "varies"
Bits: TypeAlias = Annotated[str, one_of(SAME, OTHER, UNSTABLE)]
"""How the bits of an output compare with those of the defaults' output; see `Trial`."""
Batch: TypeAlias = Annotated[str, one_of(INVARIANT, VARIES)]
Observed: TypeAlias = Annotated[Mapping[str, Annotated[float, within(0, _LARGEST_NUMBER)]], _few_names]
"""Figures of observers, by name."""
ClockName: TypeAlias = Annotated[str, one_of("", "device", "queued", "wall")]
_OF_BITS = ("bits", "digest", "batch")
_LATER_FIELDS = "figures", "energy_mj", "watts", "observed", "score", "program", "cheap_ms", "recalled_from", *_OF_BITS
"""Fields that JSON holds only if they have a value, so that other trials look the same as in earlier versions."""


UNSETTLED = frozenset({Outcome.LOST, Outcome.NOT_RUN, Outcome.PRUNED})
"""Outcomes of a journal's trials that settle nothing: the config runs again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Record):
    """The result of one config. None means unknown or not measured.

    Attributes:
        config: the config tried.
        outcome: how it ended.
        phase: the phase it ended in; None if it never started.
        time_ms: median time of one call in milliseconds; for a finalist, the median of the final. The time of a `slow`
            config is a bound: no sample was shorter.
        samples_ms: the samples behind the time, in milliseconds.
        own_ms: the time in milliseconds that ranks finalists: the fastest sample without its waits for a CPU, or the
            median of a device's own clock.
        compile_s: seconds spent tracing, lowering and compiling.
        peak_memory_bytes: the largest observed host memory of its process.
        message: the reason for the outcome, one sentence; empty if all went well.
        log_tail: the last lines the trial wrote to stdout or stderr.
        route: the processes that ran it; None if it never started.
        device: the device that measured it, such as `cuda:0`; empty without a measurement.
        clock: the clock that timed it: `device`, `queued` or `wall`; empty without a measurement.
        ended_s: when it ended, in seconds of Unix time.
        figures: the compiler's figures about its program; None also if it did not compile.
        energy_mj: the energy of the GPU for one call, in millijoules, by NVML's counter of its total energy.
        watts: the mean power of the GPU during the measurement of the energy. The GPU may run slower then than during
            the measurement of the time.
        observed: the figures of other observers, by name.
        score: the value of the author's objective, less being better; None if the objective is time.
        program: the identity of its program; empty if lowering failed, or the program has no identity.
        cheap_ms: the time in milliseconds of its cheaply compiled program, which only ranks it. If this is the only
            time, nobody measured the fully compiled program.
        recalled_from: when an earlier sweep measured the same program, in seconds of Unix time; None if this one did.
        bits: how the bits of its output compare with those of the defaults' output: `same` on every input tried,
            `other`, or `unstable` if its own repeated runs differ; None if unknown.
        digest: hashes of the bits of its output, one for each input tried: the call's own, then moved ones.
        batch: whether its output for half of the batch has the bits of the whole: `invariant` or `varies`; None
            without `check_batch`, or if the half could not be compared.
    """

    config: Annotated[Config, frozen]
    outcome: Outcome
    phase: Phase | None = None
    time_ms: Milliseconds | None = None
    samples_ms: tuple[Milliseconds, ...] = ()
    own_ms: Milliseconds | None = None
    compile_s: _Seconds | None = None
    peak_memory_bytes: _Bytes | None = None
    message: str = ""
    log_tail: str = ""
    route: Route | None = None
    device: str = ""
    clock: ClockName = ""
    ended_s: _Seconds | None = dataclasses.field(default=None, compare=False)
    figures: CompilerFigures | None = None
    energy_mj: Millijoules | None = None
    watts: Watts | None = None
    observed: Observed = dataclasses.field(default_factory=dict)
    score: Score | None = None
    program: str = ""
    cheap_ms: Milliseconds | None = None
    recalled_from: _Seconds | None = dataclasses.field(default=None, compare=False)
    bits: Bits | None = None
    digest: str = ""
    batch: Batch | None = None

    def __post_init__(self) -> None:
        # Here, so that the journals of earlier versions, which hold a median, give the bound too.
        if self.is_bound:
            known = (self.time_ms, self.own_ms, *self.samples_ms)
            object.__setattr__(self, "time_ms", min(each for each in known if each is not None))

    def to_json(self) -> JsonObject:
        """Returns the trial as JSON-able data."""
        data = super().to_json() | {"config": as_json(self.config), "observed": self.observed or None}
        return {name: value for name, value in data.items() if value not in (None, "") or name not in _LATER_FIELDS}

    def with_observed(self, figures: Mapping[str, float]) -> Self:
        """Returns the trial with observers' figures, in the fields of their names or else in `observed`."""
        others = {**self.observed, **figures}
        energy_mj, watts = others.pop("energy_mj", self.energy_mj), others.pop("watts", self.watts)
        return dataclasses.replace(self, energy_mj=energy_mj, watts=watts, observed=others)

    @property
    def device_memory_bytes(self) -> int | None:
        """Device memory that its program takes: arguments, output and intermediate arrays; None if unknown."""
        return (self.figures or NO_FIGURES).device_bytes

    @property
    def machine(self) -> str:
        """The machine or rank that measured it for this sweep; empty for the machine of the sweep itself."""
        return self.device.partition(" on ")[2]

    def without_times(self, outcome: Outcome, message: str, **changes: Any) -> Trial:
        """Returns the trial with another outcome and without its times.

        Args:
            outcome: the outcome.
            message: the reason for it.
            **changes: further fields.
        """
        changes |= {"time_ms": None, "own_ms": None, "samples_ms": ()}
        return dataclasses.replace(self, outcome=outcome, message=message, **changes)

    @property
    def is_usable(self) -> bool:
        """Whether its config worked and has a time, so that it may win."""
        return self.outcome is Outcome.OK and self.time_ms is not None

    @property
    def is_bound(self) -> bool:
        """Whether its time is a bound: it was stopped early, and takes at least that long."""
        return self.outcome is Outcome.SLOW and self.time_ms is not None

    @property
    def is_ruled_out(self) -> bool:
        """Whether its cheap time showed that it cannot win. It was not compiled fully."""
        return self.outcome is Outcome.SLOW and self.time_ms is None and self.cheap_ms is not None

    @property
    def merit(self) -> float | None:
        """The figure for choosing finalists, less being better: the score, or a time in milliseconds.

        The time is the median for a trial from an older version's journal.
        """
        return next((each for each in (self.score, self.own_ms, self.time_ms) if each is not None), None)

    @property
    def figure(self) -> float | None:
        """The figure for choosing the winner, less being better: the score, or the median time."""
        return self.time_ms if self.score is None else self.score

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Returns the trial that `to_json` described, its config as JSON returns it.

        Raises:
            DamageError: the data does not describe a trial, or its times are impossible.
        """
        trial = super().from_json(data)
        if trial.outcome is Outcome.OK and trial.time_ms is None:
            raise DamageError("its outcome is ok, but it has no time")
        return trial


def have_same_bits(one: str, other: str) -> bool | None:
    """Returns whether two digests agree for all inputs that both cover; None if one of them is unknown."""
    pairs = [*zip(one.split("."), other.split("."), strict=False)] if one and other else []
    return all(mine == its for mine, its in pairs) if pairs else None


def with_bits(trial: Trial, defaults: str) -> Trial:
    """Returns a trial of this sweep with its `bits`, if they were unknown and both digests are known.

    Args:
        trial: the trial.
        defaults: the digest of the defaults' output.
    """
    if trial.bits is not None or trial.recalled_from or (is_same := have_same_bits(trial.digest, defaults)) is None:
        return trial
    return dataclasses.replace(trial, bits=SAME if is_same else OTHER)


def ranked_by(found: Trial | Findings) -> str:
    """Returns the kind of figure for choosing a winner: `time`, `energy` or `objective`."""
    return TIME if found.score is None else ENERGY if found.score == found.energy_mj else "objective"


def pruned_trial(config: Config) -> Trial:
    """Returns the trial of a config that `prune_fn` drops."""
    return Trial(config=config, outcome=Outcome.PRUNED, message="prune_fn dropped it")


def failed_text(trials: Sequence[Trial]) -> str:
    """Returns that no config of a sweep has worked, for a line of a display."""
    which = "the only config" if len(trials) == 1 else f"all {len(trials):,} configs"
    is_pruned = trials and all(trial.outcome is Outcome.PRUNED for trial in trials)
    return f"prune_fn dropped {which}" if is_pruned else f"{which} failed"


def count_outcomes(trials: Sequence[Trial]) -> dict[str, int]:
    """Returns how many trials ended in each outcome that occurred."""
    return dict(collections.Counter(trial.outcome.value for trial in trials))


def _interval(ends: tuple[float, float]) -> tuple[float, float]:
    if not 0.0 <= ends[0] <= ends[1] < math.inf:
        raise ValueError("it is not an interval")
    return ends


def _counts(found: Mapping[str, int]) -> dict[str, int]:
    return {outcome.value: found[outcome] for outcome in Outcome if found.get(outcome, 0) > 0}


def _shortened(text: str) -> str:
    return printable(text[:_LONGEST_TEXT])


Interval: TypeAlias = Annotated[tuple[float, float], _interval]
Counts: TypeAlias = Annotated[dict[str, int], _counts]


@dataclasses.dataclass(frozen=True)
class Searched(Record):
    """How thoroughly a search covered a space.

    Attributes:
        stopped: why the search ended: `exhausted`, `no_gain`, `max_trials`, `time_budget` or `patience`; `estimated`
            if there was no search; empty if unknown, for results of earlier versions.
        seen: how many configs the search tried, or `prune_fn` dropped.
        space_size: how many configs there are.
        budget: the budget that ended the search, in trials or seconds; None if it ended in another way.
    """

    IS_LENIENT = True

    stopped: str = ""
    seen: _Count | None = None
    space_size: _Count | None = None
    budget: _Count | float | None = None

    @property
    def thoroughness(self) -> float:
        """A number that is larger for a more thorough search. A result of an earlier version comes from all configs."""
        if self.stopped == ESTIMATED:
            return 0.0
        is_whole = self.seen is None or self.seen == self.space_size
        return math.inf if self.seen is None or is_whole else self.seen


@dataclasses.dataclass(frozen=True)
class Findings(Record):
    """The result of a sweep as the cache saves it.

    Fields of an entry that are missing or malformed keep their defaults: None or empty means unknown, NaN an unknown
    time. Times are for one call, in milliseconds, and come from measurements side by side.

    Attributes:
        time_ms: the time of the best config.
        default_time_ms: the time of the function's own defaults.
        speedup_interval: the speed-ups of 95 of 100 later runs.
        created: when it was saved, as ISO text.
        commit: the commit of the user's repository.
        trials: how many configs ended in each outcome.
        search: how thorough the search was.
        baseline_ms: the time with every kernel's first config; None except for kernels tuned in their context.
        score: the value of the author's objective for the winner, less being better; None if the objective is time.
        default_score: the value of the objective for the defaults.
        energy_mj: the energy of one call with the winner, in millijoules.
        bits: how the bits of the winner's output compare with those of the defaults' output; None if unknown.
        expected_loss: how much longer than the best config a rule's config takes, as a share; None for other configs.
    """

    IS_LENIENT = True

    time_ms: Milliseconds = math.nan
    default_time_ms: Milliseconds | None = None
    speedup_interval: Interval | None = None
    created: Annotated[str, _shortened] = ""
    commit: Annotated[str, _shortened] = ""
    trials: Counts = dataclasses.field(default_factory=dict)
    search: Searched = dataclasses.field(default_factory=Searched)
    baseline_ms: Milliseconds | None = None
    score: Score | None = None
    default_score: Score | None = None
    energy_mj: Millijoules | None = None
    bits: Bits | None = None
    expected_loss: Score | None = None

    @classmethod
    def of(cls, best: Trial, default: Trial | None, **fields: Any) -> Findings:
        """Returns the figures of a winner and of the defaults, with further fields.

        Args:
            best: the trial of the winner.
            default: the trial of the defaults, ignored unless it is `ok`; None if they did not run.
            **fields: the further fields.
        """
        if default is not None and default.is_usable:
            fields = {"default_time_ms": default.time_ms, "default_score": default.score} | fields
        return cls(best.time_ms or math.nan, score=best.score, energy_mj=best.energy_mj, bits=best.bits, **fields)

    @property
    def figure(self) -> float:
        """The figure behind the choice of the winner, less being better: the score, or the time."""
        return self.time_ms if self.score is None else self.score

    @property
    def is_estimate(self) -> bool:
        """Whether the config is an estimate that nobody measured."""
        return self.search.stopped == ESTIMATED

    @property
    def speedup(self) -> float | None:
        """The time of the defaults divided by the time of the best config; None if one of them is unknown."""
        return self.default_time_ms / self.time_ms if self.default_time_ms and self.time_ms > 0 else None

    def text(self) -> str:
        """Returns the times as text, such as `2.02x faster than the defaults (0.0077 ms against 0.0155 ms)`."""
        if not self.time_ms > 0:
            told = "time not known" if self.expected_loss is None else f"expected loss {self.expected_loss:.1%}"
            return "estimated, never measured" if self.is_estimate else told
        best, against, more = f"{self.time_ms:.4g} ms", f"{self.default_time_ms or 0.0:.4g} ms", ""
        if self.score is not None:
            best, against, more = *map(self.amount, (self.score, self.default_score or 0.0)), f"; {best}"
        # The defaults win a tie with a config.
        if (self.time_ms, self.score) == (self.default_time_ms, self.default_score):
            return f"the defaults are best ({best}{more})"
        return f"{self.compared} ({best} against {against}{more})" if self.compared else f"{best}{more}"

    def amount(self, score: float) -> str:
        """Returns a value of the objective as text, such as `3.2 mJ`."""
        return f"{score:.4g} mJ" if ranked_by(self) == ENERGY else f"objective {score:.4g}"

    @property
    def compared(self) -> str:
        """The gain in words, such as `2.02x faster than the defaults`; empty if unknown."""
        if self.score is not None:
            what = ENERGY if ranked_by(self) == ENERGY else "of the objective"
            return "" if self.default_score is None else _compared(self.score, self.default_score, what)
        if (speedup := self.speedup) is None:
            return ""
        low, high = self.speedup_interval or (speedup, speedup)
        if low <= 1.0 <= high:
            return "no clear gain over the defaults"
        return f"{ratio_text(max(speedup, 1 / speedup))} {'faster' if speedup > 1 else 'slower'} than the defaults"


def _compared(score: float, default: float, what: str) -> str:
    ratio = f"{ratio_text(max(default / score, score / default))} " if min(score, default) > 0 else ""
    return f"{ratio}{'less' if score < default else 'more'} {what} than the defaults"


def ratio_text(ratio: float) -> str:
    """Returns a ratio of times as text, such as `2.02x` or `31.5x`."""
    return f"{ratio:.2f}x" if 0.1 <= ratio < 9.995 else f"{ratio:.3g}x"


def interval_text(interval: tuple[float, float] | None) -> str:
    """Returns an interval of ratios as text, such as `1.95x to 2.10x`; empty for None."""
    return "" if interval is None else " to ".join(map(ratio_text, interval))
