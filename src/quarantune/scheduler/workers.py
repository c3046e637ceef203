"""Jobs, devices and workers: the state of each worker, and the moves between states."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
from quarantune.host import machine
from quarantune.sandbox import spool
from quarantune.sandbox.messages import Measured, Reply, Task
from quarantune.sandbox.workforce import Workforce
from quarantune.scheduler.plan import KILL_DEADLINE_S, STARTUP_DEADLINE_S
from quarantune.values import codec
from quarantune.values.configs import Config
from quarantune.values.trial import CompilerFigures, Outcome, Phase, Route, Trial

NEVER = float("inf")


class WorkerState(enum.Enum):
    """The activity of a worker."""

    COMPILING = enum.auto()
    """It compiles its config."""
    BETWEEN = enum.auto()
    """It has finished a config, and may take the next one."""
    PARKED = enum.auto()
    """It has compiled its config, and perhaps run it once, and waits for its device."""
    PREPARING = enum.auto()
    """It is a standby worker that is not ready yet."""
    IDLE = enum.auto()
    """It is a standby worker that is ready for a config."""
    AHEAD = enum.auto()
    """It takes or holds its device, and will compile on the next route."""
    MEASURING = enum.auto()
    """It checks and measures its config, and holds its device."""
    SIDE_TASK = enum.auto()
    """It does work other than a trial, and holds its device unless it only compiles."""
    DYING = enum.auto()
    """It must end, with a known verdict."""


_MOVES = {
    WorkerState.COMPILING: {WorkerState.PARKED, WorkerState.BETWEEN},
    WorkerState.BETWEEN: {WorkerState.COMPILING},
    WorkerState.PARKED: {WorkerState.MEASURING, WorkerState.BETWEEN},
    WorkerState.PREPARING: {WorkerState.IDLE},
    WorkerState.IDLE: {WorkerState.MEASURING, WorkerState.SIDE_TASK},
    WorkerState.AHEAD: {WorkerState.BETWEEN},
    WorkerState.MEASURING: {WorkerState.PARKED, WorkerState.IDLE, WorkerState.BETWEEN},
    WorkerState.SIDE_TASK: set(),
    WorkerState.DYING: set(),
}
"""Legal moves between states; every worker may also begin to die."""
_RESTING = (WorkerState.BETWEEN, WorkerState.PARKED, WorkerState.IDLE)
"""States without a deadline."""
_STANDBY = (WorkerState.PREPARING, WorkerState.IDLE)


@dataclasses.dataclass(frozen=True)
class WorkerVerdict:
    """The meaning of a worker's end for its config.

    Attributes:
        outcome: the config's outcome, unless it runs again.
        message: the reason, in words.
        lacked: the `errno` if the worker lacked a process or its device; the config then had no part in the end. 0 if
            the worker lacked nothing.
    """

    outcome: Outcome
    message: str
    lacked: int = 0


_MOST_LOSSES = 2
"""Number of times a config runs again, alone, after something killed its worker or template. In a test with 272 random
kills, three of 1,608 configs lost their first worker and the worker of the first repetition."""
_MOST_FORGIVEN = 5
"""Number of workers that may die before they begin with a config, until their deaths count against the config."""


@dataclasses.dataclass(eq=False)
class Job:
    """One config on its way to an outcome.

    Attributes:
        index: the config's index.
        config: the config.
        executable_fd: the file of its executable; -1 for none.
        compile_s: seconds spent tracing, lowering and compiling it.
        figures: the compiler's figures about its program.
        program: the identity of its program, known after lowering.
        peak_bytes: the most memory that its workers held.
        slack_s: seconds of the compile deadline left after lowering.
        losses: how many lost workers count against it.
        forgiven: how many of its workers died before they began with it.
        needs_fresh: whether only a fresh worker may do its next step.
        is_alone: whether it runs when no other config does, because it lacked memory with others running.
        limit_bytes: its own memory limit; None if the plan's limit holds.
        same_program: jobs that lowered to the same program, and get the outcome of this one.
        raised_at: the place of the exception that it failed with, now or at an earlier try.
        unreliable_times: its first times if other processes disturbed them; it then runs once more.
        is_saved: whether its file holds the executable, for a measuring worker.
        first_run: milliseconds of its first run: the wall time, and the time without waits for a CPU. None if the run
            was not informative.
        was_disturbed: whether a disturbance or a pause makes the first run uninformative after all.
        held_s: seconds that it held a device before.
        route: its route; None if it takes the plan's route.
        runs: whether it runs although an earlier sweep has a trial of its program.
        found: fields of its trial on the bits of its output: `bits`, `digest` and `batch`.
        end: its trial and its output, which jobs with the same program share; None until they are known.
    """

    index: int
    config: Config
    executable_fd: int = -1
    compile_s: float | None = None
    figures: CompilerFigures | None = None
    program: str = ""
    peak_bytes: int = 0
    slack_s: float = NEVER
    losses: int = 0
    forgiven: int = 0
    needs_fresh: bool = False
    is_alone: bool = False
    limit_bytes: int | None = None
    same_program: list[Job] = dataclasses.field(default_factory=list)
    raised_at: str = ""
    unreliable_times: Measured | None = None
    is_saved: bool = False
    first_run: tuple[float, float] | None = None
    was_disturbed: bool = False
    held_s: float = 0.0
    route: Route | None = None
    runs: bool = False
    found: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    end: tuple[Trial, str] | None = None

    @property
    def was_lost(self) -> bool:
        """Whether it lost a worker before, and therefore runs alone."""
        return self.losses > 0

    @property
    def may_be_repeated(self) -> bool:
        """Whether it runs again if it loses its worker."""
        return self.losses < _MOST_LOSSES

    def begin(self, limit_bytes: int | None) -> None:
        """Begins as if it had never run, with a memory limit for this job if one is given."""
        self.limit_bytes = limit_bytes
        self.close_executable()
        self.first_run, self.held_s, self.was_disturbed = None, 0.0, False

    def lowered(self, program: str, slack_s: float) -> None:
        """Records its program, and the seconds of the deadline left after lowering."""
        self.program, self.slack_s = program, slack_s

    def compiled(self, compile_s: float, figures: CompilerFigures | None) -> None:
        """Records how long it compiled, and the compiler's figures."""
        self.compile_s, self.figures, self.needs_fresh = compile_s, figures, False

    def ran_first(self, run_ms: float, cpu_ms: float, *, is_disturbed: bool) -> None:
        """Records its first run, which was long enough to be informative."""
        self.first_run = (run_ms, cpu_ms)
        self.was_disturbed |= is_disturbed

    def judged(self, **found: Any) -> None:
        """Records what is known of the bits of its output."""
        self.found = {**self.found, **found}

    def held_device(self, seconds: float) -> None:
        """Adds the seconds that it held a device, which it gives back."""
        self.held_s += seconds

    def compiled_again(self, figures: CompilerFigures | None) -> None:
        """Records figures of the measuring process, which compiled it because it could not load its program."""
        self.figures = figures

    def compiled_by(self, route: Route, compile_s: float) -> None:
        """Records a route other than the plan's that compiled it."""
        self.route, self.compile_s = route, compile_s

    def measured_on(self, route: Route) -> None:
        """Records the route that measures it, unless a route other than the plan's compiled it."""
        self.route = self.route or route

    def lost_worker(self, *, counts: bool) -> None:
        """Records the loss of its worker, which `counts` unless the worker only waited."""
        self.losses += counts

    def wants_fresh(self) -> None:
        """Asks for a fresh worker at its next try."""
        self.needs_fresh = True

    def wants_memory(self) -> None:
        """Asks to run alone at the next try."""
        self.is_alone = True

    def must_run(self) -> None:
        """Makes it run although its program has a trial."""
        self.runs = True

    def ended(self, trial: Trial, log: str) -> None:
        """Records its trial and its output, which jobs with the same program share."""
        self.end = trial, log

    def failed_like(self, first: Job) -> None:
        """Takes the place of the exception from the job whose end it shares."""
        self.raised_at = first.raised_at

    def was_held_up(self) -> None:
        """Records a pause, after which its first run is not informative."""
        self.was_disturbed = True

    def release_same_program(self) -> list[Job]:
        """Returns the jobs that wait for its outcome, and forgets them."""
        released, self.same_program = self.same_program, []
        return released

    def make_executable(self) -> None:
        """Gets a new file for its executable."""
        self.close_executable()
        self.executable_fd = spool.create("executable")

    def take_executable(self) -> int:
        """Returns the file of the executable, which the caller now owns."""
        fd, self.executable_fd = self.executable_fd, -1
        return fd

    def was_unreliable(self, times: Measured) -> None:
        """Records times that other processes disturbed, before it runs once more."""
        self.unreliable_times, self.was_disturbed = times, True
        self.first_run = (max(times.samples_ms), self.first_run[1] if self.first_run else 0.0)

    def forgive(self) -> None:
        """Forgets earlier losses: a worker died before it began, so another program may have killed all of them."""
        if self.forgiven < _MOST_FORGIVEN:
            self.losses, self.forgiven = 0, self.forgiven + 1

    @property
    def first_ms(self) -> float:
        """Milliseconds of its first run; 0.0 if that was not informative."""
        return self.first_run[0] if self.first_run else 0.0

    def close_executable(self) -> None:
        """Closes the file of the executable, if there is one."""
        if self.executable_fd >= 0:
            os.close(self.executable_fd)
            self.executable_fd = -1
        self.is_saved = False

    def protect_executable(self) -> None:
        """Makes the executable read-only, because other workers will load it."""
        fd, self.is_saved = self.executable_fd, True
        self.executable_fd = spool.protect(fd)
        os.close(fd)


@dataclasses.dataclass(eq=False)
class Worker:
    """One worker.

    Attributes:
        number: its number.
        job: its config; None if it has none.
        device: the device that it may use; None if it has none.
        deadline: when the scheduler kills it; once it dies, when it counts as unkillable.
        state: its activity; only `transition` changes it.
        killed_in: its state when the scheduler killed it; None if it lives, or ended after its work.
        phase: the phase of the trial, by its last message.
        is_ahead: whether it started while other workers used the same device.
        began_at: when it announced its first phase, and its deadline began to count; None before.
        was_heard: whether it has sent a message since it got its last task. Before that, the task cannot have ended it.
        side_task_s: seconds that a side task may take after its first phase began.
        reply: the answer to a side task.
        assigned_at: when it got its device.
        used: how many configs it has had before.
        peak_bytes: the most memory that it held.
        used_bytes: the memory that it holds.
        measured_as: its state at the last look at its memory.
        memory_meter: measures the memory of its processes.
        descendants: process ids below its own.
        offered: the number of outputs to compare its own with.
        output_fd: the file for its own output; -1 for none.
        traceback: the last lines of the traceback that its config left.
        raised_at: the place of the exception that its task failed with.
        verdict: the meaning of its end; None while undecided.
        is_bare: whether no config has begun in it.
    """

    number: int
    job: Job | None
    device: DeviceState | None
    deadline: float
    state: WorkerState
    killed_in: WorkerState | None = None
    phase: Phase = Phase.LOAD
    is_ahead: bool = False
    began_at: float | None = None
    was_heard: bool = False
    side_task_s: float | None = None
    reply: Reply | None = None
    assigned_at: float = 0.0
    used: int = 0
    peak_bytes: int = 0
    used_bytes: int = 0
    measured_as: WorkerState | None = None
    memory_meter: machine.MemoryMeter = dataclasses.field(default_factory=machine.MemoryMeter)
    descendants: list[int] = dataclasses.field(default_factory=list)
    offered: int = 0
    output_fd: int = -1
    traceback: str = ""
    raised_at: str = ""
    verdict: WorkerVerdict | None = None
    is_bare: bool = True

    def transition(self, state: WorkerState) -> None:
        """Moves to another state.

        Raises:
            RuntimeError: the worker cannot move from its state to this one.
        """
        if state is not WorkerState.DYING and state not in _MOVES[self.state]:
            raise RuntimeError(f"worker {self.number} cannot go from {self.state.name} to {state.name}")
        self.is_bare &= state is not WorkerState.MEASURING
        self.state = state
        if state in _RESTING:
            self.deadline = NEVER

    def heard(self, phase: Phase | None = None) -> None:
        """Records a message, and its phase if one is given."""
        self.was_heard = True
        self.phase = phase or self.phase

    def begin(self, now: float, limit_s: float) -> None:
        """Begins its task, and starts its deadline."""
        self.began_at = now
        self.deadline = now + (self.side_task_s or limit_s)

    def extend(self, seconds: float) -> None:
        """Adds seconds to its deadline."""
        self.deadline += seconds

    def wait(self) -> None:
        """Waits for permission to continue, without a deadline."""
        self.deadline = NEVER

    def proceed(self, now: float, left_s: float, waited_s: float) -> None:
        """Continues after a wait of `waited_s`; from now on, the task itself may end it."""
        self.deadline, self.was_heard = now + left_s, True
        if self.began_at is not None:
            self.began_at += waited_s

    def hold(self, device: DeviceState, now: float, limit_s: float) -> None:
        """Gets a device for `limit_s` seconds, to measure its job on."""
        self.transition(WorkerState.MEASURING)
        device.measuring = self
        self.phase, self.assigned_at, self.deadline = Phase.CHECK, now, now + limit_s

    def offer(self, count: int, output_fd: int) -> None:
        """Gets `count` outputs to compare its own with, and a file for its own; -1 for no file."""
        self.close_output()
        self.offered, self.output_fd = count, output_fd

    def begin_side_task(self, device: DeviceState, deadline: float, seconds: float) -> None:
        """Gets a device for a task other than a trial, for `seconds` after its first phase began."""
        device.measuring = self
        self.deadline, self.side_task_s = deadline, seconds

    def answer(self, reply: Reply, deadline: float | None = None) -> None:
        """Records an answer to its side task; with a deadline, another answer follows."""
        self.reply = reply
        self.deadline = self.deadline if deadline is None else deadline

    def failed(self, traceback: str, place: str) -> None:
        """Records the exception of its task."""
        self.traceback, self.raised_at = traceback, place
        if self.job is not None:
            self.job.raised_at = place

    def weigh(self, used_bytes: int) -> None:
        """Records the memory that it holds."""
        self.used_bytes, self.measured_as = used_bytes, self.state
        self.peak_bytes = max(self.peak_bytes, used_bytes)

    def take(self, job: Job, deadline: float) -> None:
        """Begins to compile a job, as if it were its first."""
        self.transition(WorkerState.COMPILING)
        self.job, self.deadline, self.phase = job, deadline, Phase.LOAD
        self.began_at, self.peak_bytes = None, 0

    def load(self, job: Job) -> None:
        """Gets a job that another worker has compiled."""
        self.job = job

    def give_up(self) -> None:
        """Drops its job, which has ended."""
        self.job = None

    def started_beside(self, others: int) -> None:
        """Records how many other workers used its device when it started."""
        self.is_ahead = others > 0

    def stood_still(self, seconds: float) -> None:
        """Does not count a time while this process, and perhaps the worker, stood still."""
        self.extend(seconds)
        self.assigned_at += seconds
        if self.job is not None:
            self.job.was_held_up()

    def judged(self, verdict: WorkerVerdict) -> None:
        """Records the verdict on its end."""
        self.verdict = verdict

    def loaded(self, *, is_bare: bool) -> None:
        """Records whether no config had begun in it when it reported its memory."""
        self.is_bare = is_bare

    def has_descendants(self, pids: list[int]) -> None:
        """Records the processes below its own."""
        self.descendants = pids

    def release(self) -> None:
        """Takes its job and its device from it."""
        self.keep_peak()
        self.return_device()
        self.job, self.traceback = None, ""
        self.used += 1

    def return_device(self) -> None:
        """Frees its device for other workers, if it holds the device."""
        if self.device is not None and self.device.measuring is self:
            self.device.measuring = None

    @property
    def is_compiling(self) -> bool:
        """Whether it takes a compile slot, even while it dies."""
        return WorkerState.COMPILING in (self.state, self.killed_in)

    @property
    def is_standby(self) -> bool:
        """Whether it is a standby worker, ready or not."""
        return self.state in _STANDBY

    @property
    def holds_device(self) -> bool:
        """Whether it holds its device."""
        return self.device is not None and self.device.measuring is self

    def keep_peak(self) -> None:
        """Records the memory that its config took."""
        if self.job is not None:
            self.job.peak_bytes = max(self.job.peak_bytes, self.peak_bytes)

    def close_output(self) -> None:
        """Closes the file of its output, if there is one."""
        if self.output_fd >= 0:
            os.close(self.output_fd)
            self.output_fd = -1


@dataclasses.dataclass(eq=False)
class DeviceState:
    """One device.

    Attributes:
        device: the device.
        lease: the machine-wide lease on it.
        measuring: the worker that holds it, even while that worker dies.
        is_cramped: whether its memory was too small for workers that start ahead.
        failures: how many standby workers failed in a row.
    """

    device: Device
    lease: Lease
    measuring: Worker | None = None
    is_cramped: bool = False
    failures: int = 0


class Workers:
    """The workers that live, or whose end is not yet known."""

    def __init__(self, workforce: Workforce, clock: Callable[[], float], compiler_environ: Mapping[str, str]) -> None:
        self._workforce = workforce
        self._clock = clock
        self._compiler_environ = compiler_environ
        self._by_number: dict[int, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._by_number.values()))

    def get(self, number: int) -> Worker | None:
        """Returns a worker by its number; None if it has ended."""
        return self._by_number.get(number)

    def jobs(self) -> list[Job]:
        """Returns the jobs that workers have."""
        return [worker.job for worker in self._by_number.values() if worker.job is not None]

    def in_state(self, *states: WorkerState) -> list[Worker]:
        """Returns the workers in any of the states."""
        return [worker for worker in self._by_number.values() if worker.state in states]

    def compiling(self) -> int:
        """Returns how many workers take a compile slot."""
        return len([worker for worker in self._by_number.values() if worker.is_compiling])

    def compiling_s(self) -> dict[Job, float]:
        """Returns for how many seconds each job has compiled, for the jobs that compile now."""
        now, compiling = self._clock(), self.in_state(WorkerState.COMPILING)
        return {worker.job: now - worker.began_at for worker in compiling if worker.job and worker.began_at is not None}

    def measuring(self) -> int:
        """Returns how many workers hold a device, including workers of withdrawn devices that still die."""
        return sum(worker.holds_device for worker in self._by_number.values())

    def on(self, device: DeviceState) -> int:
        """Returns how many workers use a device."""
        return sum(worker.device is device for worker in self._by_number.values())

    def standby(self, device: DeviceState) -> list[Worker]:
        """Returns the standby workers of a device, including those that still die."""
        return [each for each in self if each.device is device and (each.killed_in or each.state) in _STANDBY]

    def startup_deadline(self) -> float:
        """Returns the time by which a worker that gets a task now must send a message."""
        return self._clock() + STARTUP_DEADLINE_S

    def start(
        self,
        task: Task,
        state: WorkerState,
        *,
        job: Job | None = None,
        device: DeviceState | None = None,
        fds: Sequence[int] = (),
    ) -> Worker:
        """Starts a worker with its first task."""
        environ = self._compiler_environ if device is None else device.device.environ
        number = self._workforce.start(codec.encode(task), fds=fds, environ=environ)
        worker = Worker(number, job, device, self.startup_deadline(), state)
        self._by_number[number] = worker
        return worker

    def send(self, worker: Worker, task: Task, fds: Sequence[int] = ()) -> None:
        """Sends a worker a further task."""
        worker.was_heard = False
        self._workforce.send(worker.number, codec.encode(task), fds)

    def send_next(self, worker: Worker, task: Task, fds: Sequence[int] = ()) -> None:
        """Sends a worker its next config, and forgets the output of earlier configs."""
        if worker.used:
            self._workforce.clear_log(worker.number)
        self.send(worker, task, fds)

    def share_modules(self, names: Sequence[str]) -> None:
        """Imports modules in the template, so that later workers need not import them."""
        self._workforce.share_modules(names)

    def kill_with_verdict(self, worker: Worker, verdict: WorkerVerdict) -> None:
        """Kills a worker, and decides the meaning of its end, unless it is dying."""
        if worker.verdict is None:
            worker.killed_in = worker.state
            self._end(worker, verdict)
            self._workforce.kill(worker.number, shows_stack=verdict.outcome is Outcome.TIMEOUT)

    def retire(self, worker: Worker) -> None:
        """Ends a worker that has no more work, unless it is dying."""
        if worker.verdict is None:
            worker.job = None
            self._end(worker, WorkerVerdict(Outcome.OK, ""))
            self._workforce.finish(worker.number)
            # Nothing in a worker matters here, and closing a device politely would take seconds.
            self._workforce.kill(worker.number)

    def _end(self, worker: Worker, verdict: WorkerVerdict) -> None:
        worker.verdict = verdict
        worker.transition(WorkerState.DYING)
        worker.deadline = self._clock() + KILL_DEADLINE_S

    def give_standby(self, device: DeviceState, to: Workers, as_device: DeviceState) -> None:
        """Moves the standby workers of a device to another run, whose state of that device is `as_device`.

        Workers in state `AHEAD` may now compile.
        """
        for worker in [each for each in self.in_state(*_STANDBY, WorkerState.AHEAD) if each.device is device]:
            worker.device = as_device
            if worker.state is WorkerState.AHEAD:
                worker.transition(WorkerState.BETWEEN)
            to._by_number[worker.number] = self._by_number.pop(worker.number)

    def remove(self, worker: Worker) -> None:
        """Forgets a worker that has ended, or that SIGKILL does not end."""
        worker.return_device()
        worker.close_output()
        del self._by_number[worker.number]
        self._workforce.forget(worker.number)

    def finish_all(self) -> None:
        """Lets idle workers end."""
        for worker in self._by_number.values():
            if worker.verdict is None:
                self._workforce.finish(worker.number)

    def pid(self, worker: Worker) -> int | None:
        """Returns a worker's process id; None while it is unknown."""
        return self._workforce.pid(worker.number)

    def log(self, worker: Worker) -> str:
        """Returns the output of a worker since it got its config, and the config's traceback."""
        return self._workforce.log(worker.number) + worker.traceback
