"""The caller's own process as a worker: it does the tasks that need the device, one step at each poll.

Workers of a sandbox compile for it, unless it does everything. It unpickles nothing that they send: programs come as
data. Nothing can end the work of this process from outside, so a deadline takes effect after the step. Until then a
warning names the config that hangs. The journal names the config that runs, so that the next sweep leaves out a fatal
one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax

from quarantune.devices.discovery import Device
from quarantune.host import machine
from quarantune.host.interruptions import Stops, is_interruption
from quarantune.jax_internals import jax_traces
from quarantune.measure import finals
from quarantune.sandbox import messages, wire
from quarantune.sandbox.messages import Reply, Task
from quarantune.sandbox.program_file import ProgramFile
from quarantune.sandbox.template_messages import Ended
from quarantune.sandbox.workforce import Event, Said, Workforce
from quarantune.sweep.request import SweepRequest
from quarantune.transport.payload import Call
from quarantune.values import codec
from quarantune.values.amounts import too_long
from quarantune.values.codec import JsonObject, restore
from quarantune.values.configs import format_config
from quarantune.values.trial import UNTUNED, Outcome, Phase, Route, Trial
from quarantune.worker.arguments import BenchOptions, Program
from quarantune.worker.bench import Bench
from quarantune.worker.compiling import compile_here
from quarantune.worker.failures import NeedsDeviceError, readable
from quarantune.worker.main import TaskRunner

_logger = logging.getLogger("quarantune")


_BEGINS = "the process that ran it has ended"
_LOOK_S = 0.1
"""Seconds between two looks at the work; a longer gap than `Stops` allows means that this process stood still."""


class _LocalRunner(TaskRunner):
    """A worker in this process."""

    def __init__(self, number: int, place: ThisProcess) -> None:
        self.number = number
        self.tasks: collections.deque[tuple[Task, list[int]]] = collections.deque()
        self.said: list[Reply] = []
        self._place = place
        self._replies: Iterator[Reply] | None = None
        super().__init__()

    @property
    def begins(self) -> bool:
        """Whether its task has yet to begin."""
        return self._replies is None

    @property
    def task(self) -> Task:
        """The task that it does, or does next."""
        return self.tasks[0][0]

    def step(self) -> None:
        """Does the next step of its task."""
        task, fds = self.tasks[0]
        self._replies = self._replies or self.do(task, fds)
        reply = next(self._replies, None)
        if reply is None:
            self.end_task()
        else:
            self.said.append(reply)

    def end_task(self) -> None:
        """Drops its task, so that the next one, if any, can begin."""
        self._replies = None
        wire.close_all(self.tasks.popleft()[1])

    def send(self, reply: Reply) -> None:
        """Keeps a reply until the step has ended."""
        self.said.append(reply)

    def held_bytes(self) -> int:
        """Returns 0: the memory of this process does not count as a worker's."""
        return 0

    def new_modules(self) -> tuple[str, ...]:
        """Returns nothing: the imports of this process are not a guide for workers."""
        return ()

    def bench_for(self, task: Task) -> Bench:
        """Returns the bench of this process."""
        return self._place.bench()

    def load(self, bench: Bench, config: messages.EncodedConfig, fd: int) -> Generator[Reply, None, Program]:
        """Loads a program that came as data, without running its code; compiles a program that cannot come as data."""
        index = self.task.trial
        if (begun := self._place.begun.pop(index, None)) is not None:
            self.program = begun
            return begun
        yield self.entered(Phase.LOAD)
        try:
            self.program = program = bench.load_data(dict(config), ProgramFile.read(fd).executable)
            return program
        except ValueError as error:
            if index is None:
                raise NeedsDeviceError(f"it cannot be loaded: {error}") from error
        yield self.entered(Phase.COMPILE)
        self._place.report_compiling(index, config)
        self.program = program = compile_here(bench, dict(config))
        yield self.compiled(bench, program)
        return program

    def compile_again(self, bench: Bench, entry: messages.Finalist) -> Program:
        """Compiles a finalist, such as an earlier sweep's, unless this process has kept its program."""
        if entry.index in self._place.fastest:
            return self._place.fastest[entry.index][1]
        self._place.note(entry.index, entry.config, Outcome.LOST, _BEGINS)
        program = super().compile_again(bench, entry)
        self._place.note(entry.index, entry.config, Outcome.NOT_RUN, "it waits to be compared")
        return program

    def save_finalist(self, bench: Bench, program: Program, fd: int) -> None:
        """Saves nothing: the final compiles this process's programs again."""


class ThisProcess:
    """This process in the place of all workers; each `poll` does one step of a task.

    Its workers have negative numbers. It sets no deadline, and notes no trial, because the next sweep could not leave
    out a config.

    Attributes:
        begun: programs that have run once and wait for their further runs, by config index.
        fastest: the fastest of the programs that cannot come as data, each with its time, by config index.
    """

    @property
    def baseline_bytes(self) -> int:
        """Returns 0: the memory of this process does not count as a worker's."""
        return 0

    def __init__(
        self, request: SweepRequest, call: Call, device: Device, stops: Stops, options: BenchOptions, arrays_fd: int
    ) -> None:
        """Sets up the workforce.

        Args:
            request: the sweep.
            call: the call, with the caller's own function.
            device: the device to measure on; if it has no platform, JAX chooses the device.
            stops: receives the durations of this process's work, which are not stops.
            options: the options of its bench.
            arrays_fd: the file that holds the bytes of its arrays; -1 for none.
        """
        self.begun: dict[int | None, Program] = {}
        self.fastest: dict[int | None, tuple[float, Program]] = {}
        self._request = request
        self._call = call
        self._device = device
        self._stops = stops
        # A bench for "cpu" would keep this process from its other devices.
        platform = None if device.platform in ("", "cpu") else device.platform
        options = dataclasses.replace(options, platform=platform, compilation_cache=None)
        self._make_bench = functools.partial(Bench, call, arrays_fd=arrays_fd, options=options)
        self._bench: Bench | None = None
        self._here: dict[int, _LocalRunner] = {}
        self._numbers = itertools.count(-1, -1)
        self._ended: list[Event] = []
        self._spent_s = collections.defaultdict[int | None, float](float)
        self._has_compiled = False

    def open(self, *, load_timeout_s: float | None) -> None:
        """Does nothing: this process has the call."""

    def start(self, task: JsonObject, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int:
        """Starts a worker here."""
        if task["message"] == messages.Compile.__name__:
            self.begun.clear()  # configs of the last batch; all have ended
        number = next(self._numbers)
        self._here[number] = _LocalRunner(number, self)
        self.send(number, task, fds)
        return number

    def send(self, number: int, message: JsonObject, fds: Sequence[int] = ()) -> None:
        """Gives a worker a further task."""
        if (worker := self._here.get(number)) is not None:
            worker.tasks.append((codec.decode(message, *messages.TASKS), [os.dup(fd) for fd in fds]))

    def finish(self, number: int) -> None:
        """Ends a worker and drops the bench, so that no config finds leftovers of another."""
        if number in self._here:
            self._end(number)
            self._drop_bench()

    def _end(self, number: int) -> None:
        self._drop_tasks(self._here.pop(number))
        self._ended.append(Ended(number, 0))

    def kill(self, number: int, *, shows_stack: bool = False) -> None:
        """Ends a worker."""
        self.finish(number)

    def poll(self, timeout_s: float) -> list[Event]:
        """Returns the events since the last call; if there are none, and there is time, does a step here."""
        worker = next((worker for worker in self._here.values() if worker.tasks), None) if timeout_s > 0 else None
        events = self._heard(0.0 if worker or self._ended else timeout_s) + self._ended
        self._ended = []
        return events if events or worker is None else self._step(worker)

    def _heard(self, timeout_s: float) -> list[Event]:
        """Waits, and returns no events: no worker is elsewhere."""
        time.sleep(timeout_s)
        return []

    def close(self) -> None:
        """Ends all workers, and drops everything that this process keeps for them."""
        for number in list(self._here):
            self._end(number)
        self._drop_bench()
        self.begun.clear()
        self.fastest.clear()

    def forget(self, number: int) -> None:
        """Does nothing: an ended worker leaves nothing behind."""

    def pid(self, number: int) -> int | None:
        """Returns None: no worker has a process."""
        return None

    def log(self, number: int) -> str:
        """Returns nothing: the output of this process stays the caller's."""
        return ""

    def clear_log(self, number: int) -> None:
        """Does nothing: there is no log."""

    def trim_logs(self) -> None:
        """Does nothing: there is no log."""

    def share_modules(self, names: Sequence[str]) -> None:
        """Does nothing: all workers share the modules of this process."""

    def common_files(self) -> set[machine.FileId]:
        """Returns nothing: no worker has files."""
        return set()

    def bench(self) -> Bench:
        """Returns the bench; the first call makes it."""
        if self._bench is None:
            self._bench = self._make_bench()
        return self._bench

    def _drop_bench(self) -> None:
        if self._bench is not None:
            self._bench.close()
            self._bench = None

    def _drop_tasks(self, worker: _LocalRunner) -> None:
        while worker.tasks:
            worker.end_task()

    # A step of a task

    def _step(self, worker: _LocalRunner) -> list[Event]:
        """Does a step of a worker's task; if it ends after its deadline, its replies do not count."""
        task, index, phase = worker.task, worker.task.trial, worker.phase
        config = task.config if isinstance(task, (messages.Compile, messages.Measure)) else {}
        limit_s, label = self._limit(task, phase)
        is_compile = phase is Phase.COMPILE
        doing, option = ("compiling", "compile_timeout") if is_compile else ("checking and measuring", "timeout")

        def report(taken_s: float) -> None:
            _logger.warning(
                "%s: %s has run for %.1f s in this process, which cannot end it; the limit is %.1f s. If it never "
                "ends, end this process; if results are saved, the next sweep leaves it out",
                self._request.problem.name,
                label,
                taken_s,
                limit_s,
            )
            self.note(index, config, Outcome.TIMEOUT, too_long(doing, limit_s, option), phase)

        with self._on_device(), Watched(limit_s - self._spent_s[index], report) as watched:
            if worker.begins:
                self.note(index, config, Outcome.LOST, _BEGINS, phase)
            try:
                with _interruptible():
                    worker.step()
            except BaseException as error:
                is_the_configs = issubclass(type(error), (Exception, SystemExit)) and not is_interruption(error)
                if not is_the_configs:
                    self.note(index, config, Outcome.NOT_RUN, "the sweep was interrupted")
                    raise
                worker.said.append(worker.failure(readable(error)))
            if worker.said and isinstance(worker.said[-1], messages.Failed):
                self._drop_tasks(worker)
                self._drop_bench()  # its arguments may be damaged
        self._stops.worked(watched.taken_s)
        said, worker.said = worker.said, []
        if watched.is_overdue:
            self._drop_tasks(worker)  # its deadline comes next
            return []
        self._spent_s[index] += 0.0 if index is None else watched.taken_s
        for reply in said:
            self._on_reply(worker, reply, config)
        return [Said(worker.number, codec.encode(reply)) for reply in said]

    def _on_reply(self, worker: _LocalRunner, reply: Reply, config: messages.EncodedConfig) -> None:
        index = reply.trial
        if isinstance(reply, messages.Compiled):
            self._spent_s[index] = 0.0
        elif isinstance(reply, messages.FirstRun):
            self.begun[index] = worker.program
            self.note(index, config, Outcome.NOT_RUN, "it waits for its further runs")
        elif isinstance(reply, (messages.Measured, messages.Failed)):
            self.note(index, config, Outcome.NOT_RUN, "it waits for the outputs of others")
        if isinstance(reply, messages.Measured) and worker.program.compile_s:  # nobody can load it again
            self.fastest[index] = (reply.ranking_ms, worker.program)
            if len(self.fastest) > finals.MOST_FINALISTS:
                del self.fastest[max(self.fastest, key=lambda index: self.fastest[index][0])]

    def _limit(self, task: Task, phase: Phase) -> tuple[float, str]:
        """Returns the seconds that a task may take, here without limit, and its name in reports."""
        return math.inf, ""

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Runs a step outside of the caller's traces, compiled even if the caller has disabled jit."""
        with jax.disable_jit(False), jax_traces.outside_of_traces():
            yield

    def note(
        self,
        index: int | None,
        config: messages.EncodedConfig,
        outcome: Outcome,
        message: str,
        phase: Phase | None = None,
    ) -> None:
        """Notes the trial that a config gets if this process ends before the config's next note."""

    def report_compiling(self, index: int | None, config: messages.EncodedConfig) -> None:
        """Warns, once in a sweep, that this process compiles a config without containment."""
        if not self._has_compiled:
            self._has_compiled = True
            _logger.warning(
                "%s: %s is compiled in this process, without containment, because its program cannot come from a "
                "worker; so are others whose route is %r",
                self._request.problem.name,
                self._label(index, config),
                Route.IN_PROCESS.value,
            )

    def _label(self, index: int | None, config: messages.EncodedConfig) -> str:
        shown = format_config(restore(config, self._call.config_values))
        return f"the function with its defaults ({shown})" if index == UNTUNED else f"the config {shown}"


class MeasuringProcess(ThisProcess):
    """This process in the place of the workers that have a device. Workers of a sandbox compile for it."""

    def __init__(self, compilers: Workforce, *about: Any) -> None:
        """Sets up the workforce.

        Args:
            compilers: the workers that compile.
            *about: the arguments of `ThisProcess`.
        """
        super().__init__(*about)
        self._compilers = compilers

    def start(self, task: JsonObject, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int:
        """Starts a worker: in the sandbox if it leaves its program in a file, else here."""
        if task["message"] == messages.Compile.__name__ and fds:
            self.begun.clear()  # configs of the last batch; all have ended
            return self._compilers.start(task, fds=fds, environ=environ)
        return super().start(task, fds=fds, environ=environ)

    def send(self, number: int, message: JsonObject, fds: Sequence[int] = ()) -> None:
        """Gives a worker a further task."""
        if number > 0:
            self._compilers.send(number, message, fds)
        else:
            super().send(number, message, fds)

    def finish(self, number: int) -> None:
        """Ends a worker; a worker of this process leaves its bench to the next."""
        if number > 0:
            self._compilers.finish(number)
        elif number in self._here:
            self._end(number)

    def kill(self, number: int, *, shows_stack: bool = False) -> None:
        """Ends a worker."""
        if number > 0:
            self._compilers.kill(number, shows_stack=shows_stack)
        else:
            self.finish(number)

    def _heard(self, timeout_s: float) -> list[Event]:
        return self._compilers.poll(timeout_s)

    @property
    def baseline_bytes(self) -> int:
        """Private memory that a worker has from the start."""
        return self._compilers.baseline_bytes

    def open(self, *, load_timeout_s: float | None) -> None:
        """Makes ready for workers that compile."""
        self._compilers.open(load_timeout_s=load_timeout_s)

    def forget(self, number: int) -> None:
        """Removes a worker that has ended."""
        self._compilers.forget(number)

    def pid(self, number: int) -> int | None:
        """Returns the process id of a worker that compiles."""
        return self._compilers.pid(number)

    def log(self, number: int) -> str:
        """Returns the output of a worker that compiles."""
        return self._compilers.log(number)

    def clear_log(self, number: int) -> None:
        """Removes the output of a worker so far."""
        self._compilers.clear_log(number)

    def trim_logs(self) -> None:
        """Shortens the logs that have grown too large."""
        self._compilers.trim_logs()

    def share_modules(self, names: Sequence[str]) -> None:
        """Imports modules that a worker lacked, for later workers."""
        self._compilers.share_modules(names)

    def common_files(self) -> set[machine.FileId]:
        """Returns the files in memory that every worker has open or mapped and that no worker has made."""
        return self._compilers.common_files()

    def _limit(self, task: Task, phase: Phase) -> tuple[float, str]:
        """Returns the seconds that a task may take, and its name in reports."""
        limits = self._request.limits
        each_s = limits.compile_timeout_s + limits.timeout_s
        match task:
            case messages.Compile(trial=index, config=config) | messages.Measure(trial=index, config=config):
                limit_s = limits.compile_timeout_s if phase is Phase.COMPILE else limits.timeout_s
                return limit_s, self._label(index, config)
            case messages.ComputeReference():
                return each_s, "ref_fn"
            case messages.Compare(entries=entries):
                return len(entries) * each_s, "the comparison of the fastest configs"
        return math.inf, ""

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Runs a step outside of the caller's traces, compiled even if the caller has disabled jit, on the device.

        In a process with several kinds of devices, the device may differ from JAX's default.
        """
        with contextlib.ExitStack() as stack:
            if self._call.devices_needed == 1:
                devices = jax.local_devices(backend=self._device.platform)
                stack.enter_context(jax.default_device(devices[self._device.position(os.environ)]))
            stack.enter_context(super()._on_device())
            yield

    def note(
        self,
        index: int | None,
        config: messages.EncodedConfig,
        outcome: Outcome,
        message: str,
        phase: Phase | None = None,
    ) -> None:
        """Notes the trial that a config gets if this process ends before the config's next note."""
        if index is None or index == UNTUNED:
            return
        trial = Trial(
            config=restore(config, self._call.config_values),
            outcome=outcome,
            message=message,
            phase=phase,
            route=Route.COMPILED_APART,
            device=self._device.name,
        )
        self._request.ledger.provisional(index, trial)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt if JAX reports a Ctrl-C during a host callback as the callback's error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if re.search(r"^KeyboardInterrupt\b", str(error), re.MULTILINE):
            raise KeyboardInterrupt from error
        raise


class Watched:
    """Watches the work of a `with` statement; reports it when it is overdue, and again each time its duration doubles.

    Nothing can end work of this process from outside, but a report can name the config that hangs.

    Attributes:
        taken_s: seconds that the work has taken, without stops of this process.
        is_overdue: whether it has taken longer than it may.
    """

    def __init__(self, limit_s: float, report: Callable[[float], None]) -> None:
        """Prepares to watch.

        Args:
            limit_s: the seconds that the work may take.
            report: called, in another thread, with the seconds that the work has taken.
        """
        self.taken_s, self.is_overdue = 0.0, False
        self._next_report_s, self._report = max(limit_s, _LOOK_S), report
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="quarantune-watchdog", daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        pauses, before, is_over = Stops(time.monotonic), time.monotonic(), False
        while not is_over:
            is_over = self._over.wait(_LOOK_S)
            now = time.monotonic()
            self.taken_s += now - before - pauses.lost_s()
            before = now
            if self.taken_s >= self._next_report_s:
                self.is_overdue = True
                self._next_report_s *= 2
                self._report(self.taken_s)
