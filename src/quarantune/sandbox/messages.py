"""Every message between the scheduler and the workers, one frozen dataclass for each.

`values.codec` encodes and decodes them. The scheduler gives a worker tasks, and the worker answers with replies. Each
message documents the descriptors that travel with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from quarantune.sandbox.template_messages import ErrorDescription
from quarantune.values.codec import within
from quarantune.values.trial import (
    ArrayKind,
    Batch,
    Bits,
    ClockName,
    CompilerFigures,
    CompileTarget,
    Milliseconds,
    Observed,
    Phase,
    Samples,
)

EncodedConfig: TypeAlias = Mapping[str, Any]
"""A config as `values.codec.as_json` returns it, and `restore` takes it."""
_Duration: TypeAlias = Annotated[float, within(0, math.inf)]


# --- from the scheduler to a worker: tasks ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One thing for a worker to do.

    Attributes:
        trial: the index of the config; None for a task without a config.
        last: whether the worker ends after it.
    """

    trial: int | None = None
    last: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe(Task):
    """Initialise a backend and describe its devices; answered by `Probed`.

    Attributes:
        platforms: the caller's `jax_platforms`; None for JAX's own choice.
    """

    platforms: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare(Task):
    """Take the device and make the arguments; answered by `Ready`, unless the worker will compile.

    Its descriptors are the outputs to compare with. A file with programs, described at `Expect`, may come first.

    Attributes:
        has_programs: whether a file with programs comes first.
        compiles: whether the worker will compile, and needs the device alone.
    """

    has_programs: bool = False
    compiles: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expect(Task):
    """Compile the comparison of outputs, ahead of the first output; the worker does not answer.

    Descriptor, at most one: a file with the programs that an earlier worker has compiled, or an empty file to leave
    them in. The worker that leaves them has run no code of a config.

    Attributes:
        outputs: the arrays of each config's output.
    """

    outputs: tuple[ArrayKind, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(Task):
    """Compile one config; answered by `Traced` if requested, `Lowered` and `Compiled`.

    Its descriptor, if any, is the file for the executable, which another worker runs.

    Attributes:
        config: the config.
        target: the device to compile for; None for the worker's own.
        as_data: whether the executable travels as data, so that the caller loads it without running a worker's code.
        is_cheap: whether XLA chooses kernels for the target without trying any, so that no product needs the device.
        shows_program: whether `Traced` reports the traced program.
        known: the last digits of the identities of programs that need no compilation: for these, `Lowered` ends the
            task.
    """

    config: EncodedConfig
    target: CompileTarget | None = None
    as_data: bool = False
    is_cheap: bool = False
    shows_program: bool = False
    known: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileAlone(Compile):
    """Find out if one config compiles, perhaps for a device that is not here; nobody will run the program."""


def tail_of(program: str) -> str:
    """Returns the last digits of a program's `lowered_half`, which distinguish it from all others in one sweep."""
    return program[-12:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proceed(Task):
    """Compile the program that `Lowered` has announced with its products; `Compiled` follows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure(Task):
    """Check one config and time it; answered by `FirstRun` or `Measured`.

    Its descriptors are the file of the executable, the outputs to compare with, and, if `keeps` is true, a file for the
    config's own output.

    Attributes:
        config: the config.
        load: whether to load the executable from its file; else the worker has compiled it and saves it there.
        checked: whether an earlier task has checked the config.
        pause: whether the worker stops after an informative first run, with `FirstRun`.
        stop_ms: milliseconds, without waits, after which the worker ends the first run; None for no limit.
        best_median_ms: milliseconds of the fastest config so far; None before the first.
        disturbed: the latest samples of the sweep, each with the fastest of its config, in milliseconds.
        references: the number of outputs to compare with.
        standard: the position of the output that is right; None if unknown.
        keeps: whether to keep an output that differs from all of them.
        saves: whether the worker saves the executable even if the config turns out slow, for the final.
        ranks: whether the time only ranks the config: nothing judges its output, and few samples suffice.
    """

    config: EncodedConfig
    load: bool
    checked: bool = False
    pause: bool = False
    stop_ms: float | None = None
    best_median_ms: float | None = None
    disturbed: tuple[tuple[float, ...], ...] = ()
    references: int = 0
    standard: int | None = None
    keeps: bool = False
    saves: bool = False
    ranks: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeReference(Task):
    """Write the output of `ref_fn` to the descriptor, then compare its shapes with the shapes of the function's output.

    Answered by `ReferenceComputed`, after each of the two.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finalist:
    """A config of a comparison.

    Attributes:
        config: the config.
        saved: whether its executable is among the descriptors; else the worker compiles it again.
        index: the index of the config.
    """

    config: EncodedConfig
    saved: bool
    index: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(Task):
    """Time configs in turn; answered by `Compared`. Its descriptors are the executables of saved finalists.

    Attributes:
        entries: the configs.
        budget_s: the most seconds of rounds, after the least that a result needs; None for the usual time.
    """

    entries: tuple[Finalist, ...]
    budget_s: _Duration | None = None


TASKS = (Probe, Prepare, Expect, Compile, CompileAlone, Proceed, Measure, ComputeReference, Compare)
"""Every task, for `codec.decode`."""


# --- from a worker to the scheduler: replies ---


Raised: TypeAlias = Literal["error", "wrong", "device_oom", "unfit"]
"""The outcomes that a worker reports itself; all others show outside the worker. `error`, `wrong` and `device_oom` are
outcomes of a config that raised. `unfit` means that only its device can compile a program."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The judgement of a config's output.

    Attributes:
        group: the position of the output that it agrees with; the number of outputs if the worker has kept it; None if
            it differs from all and the worker has not kept it, or if nothing has compared it.
        noise: the RMS by which the kept output moves when its inputs do, relative to the output's RMS; None if not
            measured.
        wrong: one sentence on how the output, or a gradient, is wrong; None if both are right.
        bits: how its bits compare with those of the defaults' output; None if unknown.
        digest: see `Trial`, like the next.
        batch: whether half of the batch has the bits of the whole.
        is_harmless: whether it is wrong for its bits alone, so that its worker may take another config.
    """

    group: int | None = None
    noise: float | None = None
    wrong: str | None = None
    bits: Bits | None = None
    digest: str = ""
    batch: Batch | None = None
    is_harmless: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer of a worker.

    Attributes:
        trial: the `trial` of the task that it answers.
        phase: the phase that the worker is in.
        held_bytes: the private memory of its process.
    """

    trial: int | None
    phase: Phase
    held_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged(Reply):
    """A reply that may hold the judgement of an output.

    Attributes:
        judgement: the result of comparing the config's output with others; None if it was not compared.
    """

    judgement: Judgement | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probed(Reply):
    """The devices that the worker has found, in JAX's order."""

    devices: tuple[CompileTarget, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEntered(Reply):
    """The worker has entered `phase`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready(Reply):
    """The worker has its device and waits for a config.

    Attributes:
        modules: the names of the modules that the worker had to import.
    """

    modules: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced(Reply):
    """The config was traced, and is about to be lowered.

    Attributes:
        lines: the lines of its program, as `transport.programs` makes them, with the number of each.
    """

    lines: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered(Reply):
    """The config was lowered. The worker compiles it next; if it has products, it waits for `Proceed` first.

    Attributes:
        program: the identity of the program, as `transport.programs` makes it.
        outputs: the arrays of its output.
        products: names of the operations that XLA tries kernels for on the device, from `worker.deviceless.products`;
            empty in a check, and if workers do not share XLA's findings.
    """

    program: str
    outputs: tuple[ArrayKind, ...] = ()
    products: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled(Reply):
    """The config was compiled.

    Attributes:
        modules: the names of the modules that the worker had to import.
        compile_s: seconds spent tracing, lowering and compiling it.
        figures: the compiler's figures; None for a function that is not jitted.
    """

    modules: tuple[str, ...]
    compile_s: _Duration
    figures: CompilerFigures | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstRun(Judged):
    """The config's first run was long enough to be informative, or too long; then its worker ended with it.

    Attributes:
        run_ms: milliseconds that the run has taken.
        cpu_ms: the same without its waits for a CPU.
        is_disturbed: whether it waited too long for its time to count.
        was_ended: whether the worker cut the run off, so that nothing has compared its output.
    """

    run_ms: Milliseconds
    cpu_ms: _Duration
    is_disturbed: bool
    was_ended: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The times of one config.

    Attributes:
        samples_ms: milliseconds of each run.
        cpu_ms: the same without waits for a CPU; empty if other processes do not affect the clock.
        ranking_ms: the time that decides which configs become finalists.
        is_slow: whether sampling stopped because another config is faster beyond doubt.
        clock: `device`, `queued` or `wall`.
        observed: the figures of observers.
        is_unstable: whether the bits of its output differ between its runs.
    """

    samples_ms: Samples
    cpu_ms: tuple[Milliseconds, ...]
    ranking_ms: Milliseconds
    is_slow: bool
    clock: ClockName
    observed: Observed = dataclasses.field(default_factory=dict)
    is_unstable: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Measurement, Judged):
    """The config was timed; `FirstRun` may have given its judgement."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceComputed(Reply):
    """The reference is in its file.

    Attributes:
        is_compared: whether the worker has also compared its shapes.
        differs: one sentence on how they differ; None if they agree or are unknown.
    """

    is_compared: bool = False
    differs: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared(Reply):
    """The finalists were timed in turn.

    Attributes:
        rounds_ms: the samples of each, in milliseconds.
        warm_ms: the same with warm caches; empty for finalists that are far behind.
        typical_ms: the median time of each, with waits and interruptions.
        observed: for each round, the observers' figures for each finalist; empty without observers.
    """

    rounds_ms: tuple[Samples, ...]
    warm_ms: tuple[tuple[Milliseconds, ...], ...]
    typical_ms: tuple[Milliseconds, ...] = ()
    observed: tuple[tuple[Observed, ...], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed(Judged, ErrorDescription):
    """The task raised an exception. The worker ends, unless others have compiled its config, or will measure it.

    Attributes:
        outcome: the kind of failure.
        place: its type and where it was raised, as `worker.failures.place_of` returns it.
        goes_on: whether the worker waits for another config.
    """

    outcome: Raised
    place: str = ""
    goes_on: bool = False


_OF_TRIALS = (PhaseEntered, Lowered, Compiled, FirstRun, Measured, Ready, Failed)
REPLIES = (*_OF_TRIALS, Traced, ReferenceComputed, Compared, Probed)
"""Every reply, for `codec.decode`; the most frequent first."""
