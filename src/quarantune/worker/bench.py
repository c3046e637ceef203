"""One config in a worker: load, run, check and measure it. Knows nothing of the scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from quarantune.functions.binding import Arguments, jitted_with
from quarantune.host.locks import lazy
from quarantune.host.waits import RunTime, Watch
from quarantune.jax_internals.other_processes import share_what_xla_finds
from quarantune.measure import clocks, device_clock, finals, model, observing, profiler_clock, sampling
from quarantune.sandbox.messages import Judgement, Measurement
from quarantune.sandbox.program_file import ProgramFile
from quarantune.transport import arrays, assignment, differentiation, executable, manual_axes
from quarantune.transport.payload import Call
from quarantune.values.codec import is_plausible_ms, restore
from quarantune.values.configs import Config
from quarantune.values.trial import ArrayKind
from quarantune.worker.arguments import BenchOptions, CallArguments, Program
from quarantune.worker.failures import NeedsDeviceError, check_is_done
from quarantune.worker.judging import Judge, StaleMemory

_ENOUGH_DIGESTS = 2
_SMALL_BYTES = 256 << 10
"""Size of an output up to which hashing it between samples leaves the caches of a core nearly as they were."""
_FLUSH_BYTES = 256 << 20
"""Bytes that a flush writes: several times the L2 cache of any GPU, and as many as Triton's `do_bench` writes."""


class Bench:
    """Loads, runs, checks and times the configs of one call in this process.

    Attributes:
        call: the call.
        options: the options of the sweep.
        arguments: makes the arguments of the call.
        jitted: the function to compile, with its gradient if that is timed.
        judge: compares outputs.
    """

    def __init__(self, call: Call, *, arrays_fd: int, options: BenchOptions) -> None:
        """Sets up the bench.

        Args:
            call: the loaded payload.
            arrays_fd: the file that holds the concrete arrays' bytes; -1 for none.
            options: the sweep's options.
        """
        call = manual_axes.under_shard_map(call)
        self.call = call
        self.options = options
        self.arguments = CallArguments(call, arrays_fd=arrays_fd, supply=options.supply)
        self.jitted: Any = call.fn
        if not self.is_plain and options.time_grad:
            self.jitted = differentiation.with_gradient(call.fn)
        self.judge = Judge(call, self.arguments, options)
        # On a CPU, a worker checks only one config in its memory, unless its tasks say otherwise.
        self._stale = StaleMemory(is_shared=options.platform not in (None, "cpu"))
        self._flush: device_clock.Flush | None = None
        self._attaching: threading.Thread | None = None
        self._said: set[str] = set()
        self._last_run: tuple[weakref.ref[Program], RunTime] | None = None
        self._latest: Any = None  # the output of the latest run, until its bits are noted
        if options.platform == "cpu":
            jax.config.update("jax_platforms", "cpu")  # no context on a device that this worker does not use
        if call.context_mesh is not None:
            jax.set_mesh(arrays.mesh_like(call.context_mesh))

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to compile.

        Then threads may spin: XLA's threads sleep until they have work, unlike other libraries' threads.
        """
        return self.arguments.is_plain

    def take_device(self) -> None:
        """Makes the context on the device, for a worker that uses it: its memory then counts for no config.

        On a GPU, this worker shares XLA's findings with the other workers of the process.
        """
        if self.options.on_gpu and self.options.compilation_cache:
            share_what_xla_finds(self.options.compilation_cache)
        if self.makes_context:
            jax.local_devices()

    @property
    def makes_context(self) -> bool:
        """Whether the device has a context, which takes time and memory to make."""
        return self.options.platform not in (None, "cpu")

    def close(self) -> None:
        """Detaches the profiler from this process, if it was attached; for a process that outlives the bench."""
        self._await_clock()
        if self._flush is not None:
            with contextlib.suppress(Exception):  # an error of a config may have left the device unusable
                self._flush.detach()
            self._flush = None

    def prepare(self, references: Sequence[int] = (), programs: int | None = None) -> None:
        """Takes the device, makes the arguments and prepares the comparison of outputs, ahead of the first config.

        Another thread prepares the clock until the first run. Nothing is traced here: this worker holds the device, and
        tracing may go wrong.

        Args:
            references: descriptors of the files to compare outputs with; see `check`.
            programs: a file with compiled comparisons, or None; see `Judge.expect`.
        """
        jax.block_until_ready(self.arguments.shared())
        self.judge.prepare(references, programs)
        if self._has_own_clock():
            self._attaching = threading.Thread(target=self._attach, daemon=True)
            self._attaching.start()

    def prepare_to_compile(self) -> None:
        """Compiles a small product, so that XLA loads everything that it needs to try kernels.

        Four processes each compiled their first program on an H100. Attention took 2.4 s without this and 2.1 s with
        it, and an MLP 4.3 and 3.6 s.
        """
        with contextlib.suppress(Exception):  # the first config meets the same error
            matrix = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
            jax.jit(jnp.matmul).lower(matrix, matrix).compile()

    def still_works(self) -> bool:
        """Returns whether the device still computes, after an exception: some leave it unusable for this process."""
        with contextlib.suppress(Exception):
            return int(jnp.negative(jax.device_put(1, jax.local_devices()[0]))) == -1
        return False

    def expect(self, outputs: Sequence[ArrayKind], fd: int | None = None) -> None:
        """Compiles the comparison of outputs like these, ahead of the first; see `Judge.expect`."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._stale.expect, outputs)
            self.judge.expect(outputs, fd)

    def _attach(self) -> None:
        with contextlib.suppress(device_clock.NoDeviceClockError):  # the first config meets the same error
            self._flusher()

    def _await_clock(self) -> None:
        """Waits until the clock is ready: it profiles a kernel, and no others may run then."""
        if self._attaching is not None:
            self._attaching.join()
            self._attaching = None

    def save(self, program: Program, fd: int, *, as_data: bool = False) -> None:
        """Writes a program where another worker can load it.

        Args:
            program: the program.
            fd: the file.
            as_data: whether the caller will load it. The caller runs no code from a worker, so a program that needs
                code is not written.

        Raises:
            NeedsDeviceError: the program cannot leave this process.
        """
        if isinstance(self.call.fn, assignment.Runner):
            ProgramFile(self.call.fn.report(program.config)).write(fd)
            return
        if as_data:
            with contextlib.suppress(ValueError):
                ProgramFile(executable.to_data(program.call)).write(fd)
            return
        try:
            blob = executable.to_pickle(program.call)
        except Exception as error:
            raise NeedsDeviceError(f"its executable cannot be serialised: {error}") from error
        entries = dict(program.cache_entries)
        if program.identity is not None and not self.options.time_grad:
            entries[program.identity] = program.call.runtime_executable().serialize()
        ProgramFile(blob, program.coarsest, entries).write(fd)

    def load(self, config: Config, fd: int) -> Program:
        """Loads a config's program that another worker compiled."""
        config, saved = restore(config, self.call.config_values), ProgramFile.read(fd)
        return Program(config, executable.from_pickle(saved.executable), 0.0, coarsest=saved.coarsest)

    def load_data(self, config: Config, blob: bytes) -> Program:
        """Loads a config's program that a worker saved as data, onto the device of the arguments; runs no code of it.

        Raises:
            ValueError: the program cannot be loaded here.
        """
        config = restore(config, self.call.config_values)
        if not all(own is None or executable.is_in_order(own) for own in self.call.own_shardings):
            raise ValueError("its arguments are laid out over the devices in another order than in a worker")
        args, kwargs = self.arguments.dynamic(self.arguments.shared())
        onto = _devices_of((args, kwargs))
        read = executable.from_data(blob, onto=onto.pop() if len(onto) == 1 else None)
        out_tree = read.out_tree
        if out_tree is None:
            # Its outputs hold classes that only the function can name. A worker has traced it without harm.
            jitted, keywords = jitted_with(self.jitted, config)
            out_tree = jitted.trace(*self.arguments.shared()[0], **self.arguments.shared()[1], **keywords).out_tree
        return Program(config, read.with_trees(jax.tree.structure((args, kwargs)), out_tree), 0.0)

    def run(self, program: Program) -> Any:
        """Runs a program once, to its end, on unmodified arguments, and returns its output."""
        self._await_clock()
        self._latest = None
        args, kwargs = self.arguments.dynamic(self.arguments.for_run())
        with Watch(spins=self.is_plain) as watch:
            taken, output = watch.time(lambda: jax.block_until_ready(program.call(*args, **kwargs)))
        if self.is_plain:
            check_is_done(output)
        self._last_run = weakref.ref(program), taken.scaled(1e3)
        self._latest = output
        return output[0] if self.options.time_grad else output

    def check(
        self,
        program: Program,
        *,
        references: Sequence[int] = (),
        standard: int | None = None,
        output_fd: int | None = None,
        limit: contextlib.AbstractContextManager[object] | None = None,
    ) -> Judgement:
        """Runs a program once, inside `limit`, and judges its output; see `Judge.check`."""
        self._stale.overwrite()
        with limit or contextlib.nullcontext():
            output = self.run(program)
        self._stale.note(output)
        last = self._last_run_of(program)
        judgement = self.judge.check(
            program,
            output,
            taken_s=0.0 if last is None else last.whole / 1e3,
            references=references,
            standard=standard,
            output_fd=output_fd,
        )
        if self.options.time_grad:  # the run has returned more than the output that was judged
            self._note_bits(program)
        else:
            program.digests.add(judgement.digest.partition(".")[0])
        return judgement

    def _note_bits(self, program: Program) -> None:
        """Notes the bits of the latest run, with its gradient if that is timed."""
        latest, self._latest = self._latest, None
        if latest is not None and len(program.digests) < _ENOUGH_DIGESTS:
            with contextlib.suppress(Exception):  # too little memory
                program.digests.add(self.judge.digest_of(latest))

    def _last_run_of(self, program: Program) -> RunTime | None:
        """Returns the time of the last run in milliseconds; None if another program has run since."""
        return self._last_run[1] if self._last_run is not None and self._last_run[0]() is program else None

    def clock(self, program: Program, *, is_flushed: bool = True) -> clocks.Clock:
        """Returns the best clock there is for a program.

        Args:
            program: the program.
            is_flushed: whether a device's clock flushes the device's cache before each run.
        """
        call = program.call
        if self.arguments.may_be_overwritten:
            fresh: list[Arguments] = []

            def run_fresh() -> object:
                args, kwargs = fresh[0]
                self._latest = None
                self._latest = output = jax.block_until_ready(call(*args, **kwargs))
                return output

            def refill() -> None:
                fresh.clear()  # here, because freeing the last run's arguments takes time
                fresh.append(self.arguments.dynamic(self.arguments.fresh()))
                if not self.is_plain:  # else they are complete, and may have very many leaves
                    jax.block_until_ready(fresh)

            return clocks.wall_clock(run_fresh, refill, spins=self.is_plain)
        args, kwargs = self.arguments.dynamic(self.arguments.shared())

        def dispatch() -> object:
            self._latest = None  # its memory is free before the next run
            self._latest = output = call(*args, **kwargs)
            return output

        if (own := self._own_clock(dispatch, is_flushed=is_flushed)) is not None:
            return own
        if self.options.platform in ("cuda", "rocm", "tpu"):
            return clocks.queued_clock(dispatch)
        return clocks.wall_clock(lambda: jax.block_until_ready(dispatch()), None)

    def _own_clock(self, dispatch: Callable[[], object], *, is_flushed: bool) -> clocks.Clock | None:
        """Returns the device's own clock for a program; None if nothing here reads it."""
        try:
            # JAX's profiler would also see copies on an NVIDIA GPU, but nobody has run it there yet.
            if self._has_own_clock():
                return device_clock.device_clock(dispatch, self._flusher() if is_flushed else None)
            if self.options.platform in ("rocm", "tpu"):
                flush = self._write if is_flushed and self.options.on_gpu else None
                return profiler_clock.profiler_clock(dispatch, flush)
        except device_clock.NoDeviceClockError as error:
            self._say_once(str(error))
        return None

    def _say_once(self, reason: str) -> None:
        """Writes once into the trial's log why the device's clock is not read."""
        if reason not in self._said:
            self._said.add(reason)
            print(f"quarantune: a clock of the device is not used: {reason}", file=sys.stderr)

    def rank(self, program: Program) -> Measurement:
        """Times a program that need not have run, with few samples, and looks at no output."""
        self._await_clock()
        clock = self.clock(program)
        measured, self._latest = _measurement(sampling.glance(clock.take), clock), None
        return measured

    def measure(
        self, program: Program, *, best_median_ms: float | None, disturbance: sampling.Disturbance | None = None
    ) -> Measurement:
        """Times a program.

        Args:
            program: the program; it has run once.
            best_median_ms: the time of the fastest config so far; None without one.
            disturbance: see `sampling.measure`.

        Returns:
            The samples.
        """
        # It ran once already, for its check. That run does not count as warm if it may have compiled or made something:
        # in Python, or in JAX, to carry an argument to the devices of the others.
        is_warm = not self.is_plain and self.call.devices_needed == 1 and not program.calls_back
        for _ in range(self.options.warmup - is_warm):
            self.run(program)
            is_warm = True
        clock, last = self.clock(program), self._last_run_of(program)

        def take(count: int) -> Sequence[RunTime]:
            samples = clock.take(count)
            size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self._latest))
            if size <= _SMALL_BYTES or self.options.on_gpu:
                self._note_bits(program)
            return samples

        samples = sampling.measure(
            take,
            rep=self.options.rep,
            best_median_ms=best_median_ms,
            margin=model.MARGINS[clock.name],
            before_ms=None if last is None or not is_warm or clock.name != "wall" else last.least,
            last_ms=None if last is None or clock.name != "wall" else last.least,
            is_exact=clock.is_exact,
            disturbance=disturbance,
        )
        self._note_bits(program)
        measured, is_unstable = _measurement(samples, clock), len(program.digests) > 1
        observed = self._observed(program, measured.ranking_ms)
        return dataclasses.replace(measured, observed=observed, is_unstable=is_unstable)

    def _observed(self, program: Program, time_ms: float) -> dict[str, float]:
        """Returns the figures of all observers for one run of about `time_ms`.

        Raises:
            RuntimeError: an observer could not measure.
        """
        if not self.options.observers:
            return {}
        args, kwargs = self.arguments.dynamic(self.arguments.shared())
        device = next(iter(_devices_of((args, kwargs))), jax.local_devices()[0])
        figures: dict[str, float] = {}
        for observer in map(observing.named, self.options.observers):
            figures |= observer.observe(lambda: program.call(*args, **kwargs), device.local_hardware_id, time_ms / 1e3)
        return figures

    def informative_first_run(self, program: Program) -> RunTime | None:
        """Returns the time of the first run if it was long enough to be informative; else None."""
        last = self._last_run_of(program)
        return last if self.times_first_run(program) and last and last.whole > model.LONG_RUN_MS else None

    def times_first_run(self, program: Program) -> bool:
        """Returns whether the time of a long first run shows how fast the config is."""
        return (
            not self.is_plain
            and not self._has_own_clock()
            and self.call.devices_needed == 1
            and not program.calls_back  # Python may make and keep objects in the first run
            and self.options.warmup <= 1  # else its author knows that it takes several
        )

    def compare(
        self, programs: Sequence[Program], budget_s: float | None = None
    ) -> tuple[list[list[float]], list[list[float]], list[float]]:
        """Times programs in turn, round by round, until the fastest is clear or the rounds run out.

        Args:
            programs: the programs.
            budget_s: the most seconds of rounds, after the least that a result needs; None for the usual time.

        Returns:
            The samples of each program in milliseconds, one per round. And the samples with warm device caches, because
            a kernel's input is often the last kernel's output; empty for programs that are clearly slower. And the
            median time of each program, with waits and interruptions.
        """
        each = [self.clock(program) for program in programs]
        is_exact = all(clock.is_exact for clock in each)
        rep = self.options.rep
        heard: list[list[float]] = [[] for _ in programs]
        takes = [_noting(clock.take, whole_ms) for clock, whole_ms in zip(each, heard, strict=True)]
        rounds_ms = finals.take_turns(takes, is_exact=is_exact, budget_s=budget_s, rep=rep)
        warm_ms: list[list[float]] = [[] for _ in programs]
        near = finals.level(dict(enumerate(rounds_ms)))
        if len(near) > 1 and self._has_own_clock():
            contenders = [self.clock(programs[position], is_flushed=False).take for position in near]
            warm = finals.take_turns(contenders, floor=finals.WARM_FLOOR, budget_s=finals.WARM_BUDGET_S, rep=rep)
            for position, samples_ms in zip(near, warm, strict=True):
                warm_ms[position] = samples_ms
        self._latest = None
        return rounds_ms, warm_ms, [statistics.median(whole_ms[1:] or whole_ms) for whole_ms in heard]

    def observe(self, programs: Sequence[Program], times_ms: Sequence[float]) -> list[list[dict[str, float]]]:
        """Returns the figures of observers for each program in each of a few rounds; empty without observers.

        Args:
            programs: the programs.
            times_ms: about the milliseconds that a run of each takes.
        """
        rounds = model.FEW if self.options.observers else 0
        return [[self._observed(*each) for each in zip(programs, times_ms, strict=True)] for _ in range(rounds)]

    def _has_own_clock(self) -> bool:
        # With several devices, the clock would add up their times, with their waits for each other.
        return self.options.on_gpu and jax.local_device_count() == 1

    def _flusher(self) -> device_clock.Flush:
        """Returns the flush of the device's cache, made once.

        Raises:
            NoDeviceClockError: the device's clock cannot be read.
        """
        if self._flush is None:
            self._flush = device_clock.Flush(self._write)
        return self._flush

    @lazy
    def _write(self) -> Callable[[], object]:
        """A program that writes more than the device's cache holds."""
        compiled: Callable[[], object] = jax.jit(lambda: jnp.zeros(_FLUSH_BYTES // 4, jnp.int32)).lower().compile()
        return compiled


_Take: TypeAlias = Callable[[int], Sequence[RunTime]]


def _noting(take: _Take, whole_ms: list[float]) -> _Take:
    """Returns `take`, which then adds the whole time of each plausible sample to a list."""

    def noted(count: int) -> Sequence[RunTime]:
        samples = take(count)
        whole_ms.extend(sample.whole for sample in samples if is_plausible_ms(sample.whole))
        return samples

    return noted


def _measurement(samples: sampling.Sampled, clock: clocks.Clock) -> Measurement:
    return Measurement(
        samples_ms=samples.samples_ms,
        cpu_ms=() if clock.is_exact else samples.cpu_ms,
        ranking_ms=samples.ranking_ms(is_exact=clock.is_exact),
        clock=clock.name,
        is_slow=samples.is_ruled_out,
    )


def _devices_of(arguments: Arguments) -> set[Any]:
    leaves = jax.tree.leaves(arguments)
    return {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
