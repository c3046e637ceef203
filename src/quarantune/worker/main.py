"""A worker's main: runs the scheduler's tasks, and replies phase by phase.

It ends with its first failure, because a process cannot be trusted with another config after something went wrong. Only
a worker that compiles for others, or that measures their programs, may continue after an exception: the first unless
JAX's settings have changed, the second if its device still works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn

import jax

from quarantune.host import machine
from quarantune.host.process import SANDBOX_MARK
from quarantune.host.waits import RunTime, run_limit
from quarantune.jax_internals import jax_options
from quarantune.jax_internals.other_processes import load_plugins, shares_what_xla_finds
from quarantune.measure import sampling
from quarantune.sandbox import contain, messages, spool, wire
from quarantune.sandbox.messages import Reply, Task
from quarantune.sandbox.template_messages import WorkerOptions
from quarantune.sandbox.wire import Connection
from quarantune.transport import payload, program_values
from quarantune.transport.programs import ProgramLines
from quarantune.values import codec
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config
from quarantune.values.trial import ArrayKind, CompileTarget, Phase, lowered_half
from quarantune.worker import deviceless
from quarantune.worker.arguments import BenchOptions, Program
from quarantune.worker.bench import Bench
from quarantune.worker.compiler_figures import read_figures
from quarantune.worker.compiling import CompileHooks, check_for, compile_for, compile_here, confirm_here, traced_for
from quarantune.worker.failures import (
    NeedsDeviceError,
    describe_error,
    outcome_of,
    place_of,
    readable,
    shortened,
    without_frames,
)

# A template imports this module, so that no worker has to.
codec.prepare(*messages.TASKS, CompileTarget)

_NICENESS = 10
"""Niceness of compile workers: a worker that measures at the same time gets a CPU whenever it needs one."""
_LONGEST_PROVEN_S = 2.0
"""Seconds of tracing above which the caller does not trace a program: while it traces, it watches nothing."""
_MOST_LINES = 5000


class _KnownProgramError(Exception):
    """An earlier sweep has measured the program of a config."""


def main(connection: Connection, options: WorkerOptions, make_bench: Callable[..., Bench] | None) -> NoReturn:
    """Runs the first task and those that follow it, and never returns."""
    code = 0
    try:
        _serve(connection, options, make_bench)
    except wire.WireClosedError:
        pass  # the scheduler closed the connection: nothing is left to do
    except BaseException:
        code = 1
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: neither atexit handlers nor threads of a config may hold up the end.
        os._exit(code)


def _serve(connection: Connection, options: WorkerOptions, make_bench: Callable[..., Bench] | None) -> None:
    """Runs tasks until one is the last, one fails, or the scheduler closes the connection.

    A worker that only compiles, or only measures, continues after an exception if the scheduler lets it: the next
    config may well raise the same one.
    """
    runner = WorkerRunner(connection, options, make_bench)
    pending = [(options.task, list(options.task_fds))]
    while True:
        for frame, fds in pending:
            if not runner.run(codec.decode(frame, *messages.TASKS), fds):
                return
        pending = connection.receive()


class TaskRunner:
    """Does the tasks of one worker.

    Attributes:
        phase: the current phase of the trial.
        program: the program that it compiled last.
    """

    def __init__(self) -> None:
        self._bench: Bench | None = None
        self.program: Any = None
        self.phase = Phase.LOAD
        self._trial: int | None = None
        self._trace_context: tuple[Any, ...] = ()
        self._modules = set(sys.modules)

    def send(self, reply: Reply) -> None:
        """Sends a reply to the scheduler."""
        raise NotImplementedError

    def await_go(self) -> None:
        """Waits until the scheduler lets this worker compile a program that it announced with its products."""

    def run(self, task: Task, fds: list[int]) -> bool:
        """Does a task, and returns whether another may follow."""
        is_for_others = isinstance(task, messages.CompileAlone) or (isinstance(task, messages.Compile) and bool(fds))
        try:
            for reply in self.do(task, fds):
                self.send(reply)
                if isinstance(reply, messages.Failed):
                    return reply.goes_on
        except BaseException as raised:  # a config may raise anything, SystemExit and KeyboardInterrupt too
            error = readable(raised)
            goes_on = isinstance(error, Exception) and not task.last and self._may_go_on_after(task)
            self.send(self.failure(error, goes_on=goes_on))
            return goes_on
        finally:
            wire.close_all(fds)
        # The next config must find this process as the last one did.
        return not task.last and (not is_for_others or self._is_as_it_was())

    def _may_go_on_after(self, task: Task) -> bool:
        """Returns whether an exception that a task has raised leaves this process fit for another config."""
        match task, self.phase:
            case messages.Compile(), Phase.COMPILE:
                return self._is_as_it_was()
            case messages.Measure(load=True), Phase.CHECK:
                return self._bench is not None and self._bench.still_works()
        return False

    def _is_as_it_was(self) -> bool:
        """Returns whether JAX's settings are as they were before a config compiled here, if one did."""
        return not self._trace_context or self._trace_context == jax_options.trace_context()

    def do(self, task: Task, fds: list[int]) -> Iterator[Reply]:
        """Does a task, step by step; yields its replies, before the step that each announces."""
        self._trial = task.trial
        if isinstance(task, messages.Probe):
            yield messages.Probed(**self._heading(), devices=deviceless.probe(task.platforms))
            return
        self._bench = bench = self.bench_for(task)
        match task:
            case messages.Prepare(compiles=True):
                bench.prepare_to_compile()
            case messages.Prepare():
                bench.prepare(fds[task.has_programs :], fds[0] if task.has_programs else None)
                yield messages.Ready(**self._heading(), modules=self.new_modules())
            case messages.Expect():
                bench.expect(task.outputs, *fds)
            case messages.Compile():
                yield from self._compile(bench, task, fds)
            case messages.Measure():
                yield from self._measure(bench, task, fds)
            case messages.ComputeReference():
                yield self.entered(Phase.CHECK)
                bench.judge.compute_reference(fds[0])
                yield messages.ReferenceComputed(**self._heading())
                differs = bench.judge.shapes_differ(fds[0])
                yield messages.ReferenceComputed(**self._heading(), is_compared=True, differs=differs)
            case messages.Compare():
                yield from self._compare(bench, task, fds)

    def bench_for(self, task: Task) -> Bench:
        """Returns the bench for a task."""
        raise NotImplementedError

    def _compile(self, bench: Bench, task: messages.Compile, fds: list[int]) -> Iterator[Reply]:
        if fds and not self._trace_context:  # the first config of a worker that compiles for others
            with contextlib.suppress(OSError):
                os.nice(_NICENESS)
        yield self.entered(Phase.COMPILE)
        if not self._is_as_it_was():
            raise RuntimeError("an earlier config has changed JAX's settings in this worker")
        self._trace_context = jax_options.trace_context()
        self.program = None  # an earlier config's program, with its memory
        program = self._compiled(bench, task, away=bool(fds))
        if program is None:
            return
        self.program = program
        if fds:
            bench.save(program, fds[0], as_data=task.as_data)
        yield self.compiled(bench, program)

    def _compiled(self, bench: Bench, task: messages.Compile, *, away: bool) -> Program | None:
        """Returns the program of a task; None if it is known, and need not be compiled."""
        config = dict(task.config)
        show = functools.partial(self._show, time.thread_time()) if task.shows_program else lambda jaxpr: None
        hooks = CompileHooks(show, functools.partial(self._announce, task.known))
        with contextlib.suppress(_KnownProgramError):
            match task:
                case messages.CompileAlone(target=CompileTarget() as target):
                    return _checked(bench, config, target, hooks)
                case messages.CompileAlone():
                    return confirm_here(bench, config, hooks)
                case messages.Compile(target=CompileTarget() as target):
                    return compile_for(bench, config, target, hooks, is_cheap=task.is_cheap)
                case _:
                    return compile_here(bench, config, hooks, away=away)
        return None

    def _announce(
        self, known: tuple[str, ...], program: str, outputs: tuple[ArrayKind, ...], products: tuple[str, ...]
    ) -> None:
        """Announces a lowered program. If it has products, waits until it may be compiled.

        Raises:
            _KnownProgramError: the program need not be compiled.
        """
        self.send(messages.Lowered(**self._heading(), program=program, outputs=outputs, products=products))
        if messages.tail_of(lowered_half(program)) in known:
            raise _KnownProgramError
        if products:
            self.await_go()

    def compiled(self, bench: Bench, program: Program) -> Reply:
        """Returns the reply about a program that was compiled here."""
        figures = None if bench.is_plain else read_figures(program.call, program.figures)
        return messages.Compiled(
            **self._heading(), compile_s=program.compile_s, modules=self.new_modules(), figures=figures
        )

    def _show(self, began_s: float, jaxpr: Any) -> None:
        """Sends a traced program, unless it is too large or took too long for the caller to trace it as well."""
        with contextlib.suppress(Exception):  # the config may be fine all the same
            is_quick = time.thread_time() - began_s < _LONGEST_PROVEN_S
            if is_quick and len(lines := ProgramLines(jaxpr).counts) <= _MOST_LINES:
                self.send(messages.Traced(**self._heading(), lines=lines))

    def _measure(self, bench: Bench, task: messages.Measure, fds: list[int]) -> Iterator[Reply]:
        program = (yield from self.load(bench, task.config, fds[0])) if task.load else self.program
        judgement = None
        if not task.checked:
            yield self.entered(Phase.CHECK)
            if task.ranks:
                yield messages.Measured(**self._heading(), **vars(bench.rank(program)))
                return
            judgement = self._check(bench, program, task, fds)
            if judgement.wrong is not None:
                text = shortened(without_frames(judgement.wrong))
                judgement, goes_on = dataclasses.replace(judgement, wrong=None), judgement.is_harmless and not task.last
                about: Any = {"outcome": "wrong", "text": text, "error": "", "goes_on": goes_on}
                yield messages.Failed(**self._heading(), **about, judgement=judgement)
                return
            if task.saves and not task.load and not bench.is_plain:
                self.save_finalist(bench, program, fds[0])
            if task.pause and (run := bench.informative_first_run(program)) is not None:
                # The config may be out of the race already, which only the scheduler knows.
                yield messages.FirstRun(
                    **self._heading(),
                    run_ms=run.whole,
                    cpu_ms=run.least,
                    is_disturbed=run.is_disturbed,
                    judgement=judgement,
                )
                return
        yield self.entered(Phase.MEASURE)
        disturbance = sampling.Disturbance(list(task.disturbed))
        measured = bench.measure(program, best_median_ms=task.best_median_ms, disturbance=disturbance)
        if not task.load and (bench.is_plain or not (measured.is_slow or task.saves)):
            self.save_finalist(bench, program, fds[0])
        yield messages.Measured(**self._heading(), **vars(measured), judgement=judgement)

    def _check(self, bench: Bench, program: Program, task: messages.Measure, fds: list[int]) -> messages.Judgement:
        limit = None
        if task.stop_ms is not None and bench.times_first_run(program):
            limit = run_limit(task.stop_ms, self._report_stop)
        end = 1 + task.references
        return bench.check(
            program,
            references=fds[1:end],
            standard=task.standard,
            output_fd=fds[end] if task.keeps else None,
            limit=limit,
        )

    def _report_stop(self, run: RunTime) -> None:
        times: Any = {"run_ms": run.whole, "cpu_ms": run.cpu, "is_disturbed": run.is_disturbed}
        self.send(messages.FirstRun(**self._heading(), **times, was_ended=True))

    def save_finalist(self, bench: Bench, program: Program, fd: int) -> None:
        """Saves a program that may become a finalist; if that fails, the final compiles it again.

        A plain function leaves at most a report of the programs that it has run.
        """
        try:
            os.ftruncate(fd, 0)  # of an earlier measurement of the same program
            os.lseek(fd, 0, os.SEEK_SET)
            bench.save(program, fd)
        except NeedsDeviceError:
            pass
        except OSError:  # no room for it, or too large a file
            os.ftruncate(fd, 0)

    def load(self, bench: Bench, config: messages.EncodedConfig, fd: int) -> Generator[Reply, None, Program]:
        """Loads a program. If it calls into tables that only tracing fills, it must be compiled where it runs."""
        yield self.entered(Phase.LOAD)
        try:
            return compile_here(bench, dict(config)) if bench.is_plain else bench.load(dict(config), fd)
        except Exception as error:
            if outcome_of(error, self.phase) != "error":
                raise
            raise NeedsDeviceError(f"its executable cannot be loaded: {error}") from error

    def compile_again(self, bench: Bench, entry: messages.Finalist) -> Program:
        """Compiles a finalist whose program was not saved."""
        return compile_here(bench, dict(entry.config))

    def _compare(self, bench: Bench, task: messages.Compare, fds: list[int]) -> Iterator[Reply]:
        yield self.entered(Phase.COMPILE)
        saved, programs = iter(fds), []
        for entry in task.entries:
            program = None
            if entry.saved:
                with contextlib.suppress(NeedsDeviceError):
                    program = yield from self.load(bench, entry.config, next(saved))
            programs.append(program or self.compile_again(bench, entry))
        yield self.entered(Phase.CHECK)
        for program in programs:
            bench.run(program)
        yield self.entered(Phase.MEASURE)
        *rounds, typical_ms = bench.compare(programs, task.budget_s)
        rounds_ms, warm_ms = (tuple(map(tuple, each)) for each in rounds)
        observed = tuple(map(tuple, bench.observe(programs, [*map(min, rounds_ms)])))
        times: Any = {"rounds_ms": rounds_ms, "warm_ms": warm_ms, "typical_ms": tuple(typical_ms)}
        yield messages.Compared(**self._heading(), **times, observed=observed)

    def failure(self, error: BaseException, *, goes_on: bool = False) -> messages.Failed:
        """Returns the reply about an exception that ended the task."""
        about = describe_error(error)
        return messages.Failed(
            **self._heading(),
            **vars(about),
            outcome=outcome_of(error, self.phase),
            place=shortened(place_of(error, about.text, self.phase)),
            goes_on=goes_on,
        )

    def entered(self, phase: Phase) -> messages.PhaseEntered:
        """Enters a phase, and returns the reply that announces it."""
        self.phase = phase
        return messages.PhaseEntered(**self._heading())

    def _heading(self) -> dict[str, Any]:
        """Returns the fields that all replies have."""
        return {"trial": self._trial, "phase": self.phase, "held_bytes": self.held_bytes()}

    def held_bytes(self) -> int:
        """Returns the private memory of this process."""
        return machine.resident_bytes(os.getpid())[0]

    def new_modules(self) -> tuple[str, ...]:
        """Names the modules imported here that the template lacked, so that it can import them for later workers."""
        names = sorted(sys.modules.keys() - self._modules)
        self._modules = set(sys.modules)
        return tuple(names)


class WorkerRunner(TaskRunner):
    """Does the tasks of a worker in a separate process."""

    def __init__(self, connection: Connection, options: WorkerOptions, make_bench: Callable[..., Bench] | None) -> None:
        """Sets up a runner.

        Args:
            connection: the connection to the scheduler.
            options: the options of the worker.
            make_bench: makes the bench of the loaded call; None if the call is to be loaded.
        """
        super().__init__()
        self._connection = connection
        self._options = options
        self._make_bench = make_bench

    def send(self, reply: Reply) -> None:
        """Sends a reply to the scheduler."""
        self._connection.send_message(reply)

    def await_go(self) -> None:
        """Waits until the scheduler lets this worker compile a program that it announced with its products."""
        while not self._connection.receive_messages(messages.Proceed):
            pass  # a part of the message has come

    def bench_for(self, task: Task) -> Bench:
        """Returns the worker's bench, made when the first task needs it."""
        if self._bench is not None:
            return self._bench
        if (make := self._make_bench) is None:
            self.send(self.entered(Phase.LOAD))
            make = self._load_bench(task)
        bench = make(arrays_fd=self._options.arrays_fd)
        if not isinstance(task, messages.Compile) or task.target is None:
            if bench.makes_context and self._make_bench is not None:
                self.send(self.entered(Phase.LOAD))  # the context takes time, and has a deadline
            bench.take_device()
        return bench

    def _load_bench(self, task: Task) -> Callable[..., Bench]:
        """Loads the payload. If a task is for a described device, that device answers questions at import."""
        load = functools.partial(load_bench, self._options.payload_fd, self._options.cwd)
        match task:
            case messages.CompileAlone(target=CompileTarget() as target):
                load = functools.partial(load, keeps_values=lambda: not deviceless.asked_at_import)
                # No other worker could import the modules if this one cannot.
                with contextlib.suppress(NeedsDeviceError), deviceless.answers_at_import(target):
                    return load()
            case messages.Compile(target=CompileTarget() as target):
                with deviceless.answers_at_import(target):
                    return load()
        return load()


def warm_up(task: JsonObject) -> None:
    """Loads JAX's plugins and describes the device to compile for in a template, once for all workers."""
    target = codec.decode(task, CompileTarget)
    load_plugins()
    deviceless.topology(target)


def load_bench(
    payload_fd: int, cwd: str | None, *, keeps_values: Callable[[], bool] = lambda: True
) -> Callable[..., Bench]:
    """Loads a sweep's payload: imports the modules of the caller's function, or unpickles it.

    Values that the caller's program has set in these modules are also set here. The exception is a check whose modules
    have asked for their device: the caller's values come from another device.

    Args:
        payload_fd: the payload.
        cwd: the working directory; None to leave it.
        keeps_values: returns, after the import of the modules, whether to set the values.
    """
    if cwd is not None:
        os.chdir(cwd)
    blob, options = spool.map_parts(payload_fd)
    call = payload.unpack_call(blob)
    if keeps_values():
        program_values.adopt(call.program_values)
    jax.config.update("jax_disable_jit", False)  # if the environment or a module sets it, nothing compiles
    loaded: BenchOptions = pickle.loads(options)
    common = contain.common_directory(os.environ.get(SANDBOX_MARK, ""))
    if loaded.on_gpu and shares_what_xla_finds() and os.path.isdir(common):
        loaded = dataclasses.replace(loaded, compilation_cache=common)
    return functools.partial(Bench, call, options=loaded)


def _checked(bench: Bench, config: Config, target: CompileTarget, hooks: CompileHooks) -> Program:
    """Returns the program of a config for a target, with an estimate of its cycles if the task asks for one."""
    if not target.estimates or bench.is_plain:
        return check_for(bench, config, target, hooks)
    from quarantune.worker import estimates  # few workers need its imports

    # The estimate forks, so it comes before libtpu is loaded here.
    figures = estimates.estimate(
        functools.partial(traced_for, bench, config, target, deviceless.checked_device), target
    )
    program = check_for(bench, config, target, hooks)
    return dataclasses.replace(program, figures=program.figures or figures)
