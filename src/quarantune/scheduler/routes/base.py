"""The parts that all routes share: starting the workers that compile, and assigning devices to those that measure."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from quarantune.host import machine
from quarantune.sandbox import spool
from quarantune.sandbox.messages import Compile, Compiled, Failed, FirstRun, Measure, Measured
from quarantune.scheduler.bursts import Admission, Bursts
from quarantune.scheduler.plan import Mode, Numbers
from quarantune.scheduler.run_state import RunState
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerState, WorkerVerdict
from quarantune.values.codec import as_json
from quarantune.values.trial import READY, ArrayKind, CompileTarget, Outcome, Phase, Route

_MOST_LOST = 10
"""Least number of compiled configs per lost compile worker; with fewer, each config gets a new worker."""
_CPU_PARKED = 16
"""Number of compiled configs that wait on a CPU, memory permitting, before compiling stops and measuring begins. Among
many, slow configs show sooner."""
_SEARCH_PARKED = 8
"""Replaces `_CPU_PARKED` if a search chooses the configs. In replays of five recorded GPU spaces, searches needed 11 to
65% more trials in batches of 16 than in batches of 8."""
_CPU_SHARES = 4
"""The least number of configs that share the memory of a CPU."""
DEVICE_PARKED = 6
"""Number of workers that compile on each accelerator, and of compiled configs that wait in workers with a context."""
_CONFIGS_PER_ACCELERATOR_WORKER = 32
_CONFIGS_PER_TPU_WORKER = 1000
"""Number of configs that a TPU worker measures. A TPU takes seconds to initialise, and only one worker can own it, so
that no other can get ready ahead."""
_COMPILES_PER_WORKER = 32
"""Number of configs that one compile worker takes for an accelerator. The first config of a worker takes 0.3 s more
than others: on an H200, 648 configs, 59% of them bad, took a second less than with 8 per worker. A worker grows by less
than 1 MB per config."""
_THREADS = "NPROC"
"""Environment variable that XLA reads: the number of cores that it starts threads for."""
_BATCH = 64
"""Number of configs that compile before any is measured; an interrupted sweep loses the work on at most this many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of a sweep that decide which routes it takes, and their numbers.

    Attributes:
        platform: the platform to tune for.
        mode: the steps of a trial, and which of them run in workers.
        is_jitted: whether one process can compile the program for another.
        is_spread: whether one trial needs several devices.
        is_taken: whether this process has the device, and no worker can use it.
        target: the device that workers without it compile for; None if they cannot.
        devices: how many devices measure.
        slots: how many configs compile at a time.
        each: how many configs a measuring worker takes; None chooses by platform.
        ranks: whether a cheap compile may rank the configs, so that only those compile fully that may win.
    """

    platform: str
    mode: Mode
    is_jitted: bool
    is_spread: bool
    is_taken: bool
    target: CompileTarget | None
    devices: int
    slots: int
    each: int | None
    ranks: bool = False

    @property
    def configs_per_worker(self) -> int:
        """How many configs a measuring worker takes."""
        by_platform = {"cpu": 1, "tpu": _CONFIGS_PER_TPU_WORKER}
        return self.each or by_platform.get(self.platform, _CONFIGS_PER_ACCELERATOR_WORKER)

    @property
    def can_hand_over(self) -> bool:
        """Whether a worker may measure several programs that others have compiled."""
        return self.is_jitted and not self.is_spread and self.configs_per_worker > 1

    @property
    def slots_with_device(self) -> int:
        """How many workers compile with the device at a time; only one worker can use a TPU."""
        return 1 if self.platform == "tpu" else self.slots

    @property
    def confirms(self) -> bool:
        """Whether errors without the device need confirming on it; libtpu compiles alike with a TPU and without."""
        return self.target is not None and self.platform != "tpu"

    def in_workers(self, slots: int, *, is_closed: bool, **numbers: int) -> Numbers:
        """Returns the numbers of a route whose workers wait with compiled configs; see `in_files` for `is_closed`."""
        if self.platform == "cpu":
            parked = max(_CPU_PARKED if is_closed else _SEARCH_PARKED, 2 * slots)
            return Numbers(slots=slots, parked=parked, workers=max(_CPU_SHARES, 2 * slots), **numbers)
        parked = self.devices * min(DEVICE_PARKED, slots)
        return Numbers(slots=slots, parked=parked, workers=parked, **numbers)

    def in_files(self, slots: int, *, is_closed: bool, **numbers: int) -> Numbers:
        """Returns the numbers of a route on which compiled programs wait in files.

        Args:
            slots: how many configs compile at a time.
            is_closed: whether no search adds configs.
            **numbers: further numbers.
        """
        parked = _BATCH if is_closed else max(_SEARCH_PARKED, slots)
        return Numbers(slots=slots, parked=parked, workers=slots + self.devices, **numbers)


class TrialRoute:
    """One way of trials through processes: who compiles a config, who measures it, and how many at a time.

    The scheduler asks a route for its next step, and never asks which route it is. Workers compile with their device,
    unless a route derives from `WithoutDevice`.

    Attributes:
        label: the name of the route, which trials show.
        numbers: how many configs and workers the route has at a time.
        confirms: whether an error without the device counts only if it also occurs with the device.
    """

    label: Route
    confirms = False
    _admits: type[Admission] = Bursts
    """How compiling and measuring share the machine; by default, the two alternate."""
    _pauses = True
    """Whether all configs run once before those that may still win continue."""
    _ranks = False
    """Whether times only rank configs, and nothing judges outputs."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self._run: RunState

    def join(self, run: RunState) -> None:
        """Begins to steer a run."""
        self._run = run

    def admission(self) -> Admission:
        """Returns the admission, which decides when the next config may compile or run."""
        return self._admits(self._run, self.waiting, self.may_begin)

    # Differs between routes

    def environ(self) -> dict[str, str]:
        """Returns the environment variables of workers that compile without a device."""
        return {}

    def waiting(self) -> int:
        """Returns how many compiled configs wait for a device."""
        raise NotImplementedError

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Takes note that a worker has compiled its job."""
        raise NotImplementedError

    def on_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Makes a job wait again after an informative first run."""

    def measure_on(self, device: DeviceState) -> None:
        """Gives the next config that waits a device, if there is one."""

    def prepare_on(self, device: DeviceState) -> None:
        """Starts the workers that a device will need, before any that compile."""

    def take_standby(self, earlier: RunState) -> None:
        """Takes over the standby workers of an earlier run of the sweep, if this route needs any."""

    def may_confirm_on(self, device: DeviceState) -> bool:
        """Returns whether a further worker may confirm an error on a device while other configs run."""
        return False

    def on_lowered(self, outputs: tuple[ArrayKind, ...]) -> None:
        """Takes note of the outputs that configs have."""

    def measure_again(self, worker: Worker, job: Job, reply: Measured) -> bool:
        """Repeats a job after disturbed runs, if the route can; returns whether it can."""
        return False

    def on_unfit(self, worker: Worker, reply: Failed) -> bool:
        """Leaves a program that must compile on its device to another route.

        Returns:
            Whether the route left it; if not, the worker has failed.

        Raises:
            ValueError: no program can be unfit on this route.
        """
        raise ValueError("no program is unfit here")

    def on_compiled_again(self, worker: Worker, job: Job, reply: Compiled) -> None:
        """Takes note that the measuring process compiled a job, because it could not load the job's program."""

    def close(self) -> None:
        """Ends the run of this route."""

    # Shared: compiling

    def may_begin(self, job: Job) -> bool:
        """Whether a worker can take a job, or a new worker may start."""
        return self._run.may_start_on(self._compiling_device()) or self.reusable(job) is not None

    def start_compiling(self, job: Job) -> None:
        """Compiles a job in a worker that has finished other jobs, or in a new worker."""
        run = self._run
        job.begin(run.plan.memory.alone_bytes(run.memory.available_memory()) if job.is_alone else None)
        worker = self.reusable(job)
        task = self._task(job, last=(worker.used if worker else 0) + 1 >= self.numbers.compiles_per_worker)
        fds = [job.executable_fd] if job.executable_fd >= 0 else []
        if worker is None:
            run.workers.start(task, WorkerState.COMPILING, job=job, device=self._compiling_device(), fds=fds)
        else:
            worker.take(job, run.workers.startup_deadline())
            run.workers.send_next(worker, task, fds)  # the worker reads the task as soon as it can

    def _task(self, job: Job, *, last: bool) -> Compile:
        """Returns the task to compile a job; `last` means that its worker takes no further config."""
        plan = self._run.plan
        return Compile(
            trial=job.index,
            config=as_json(job.config),
            shows_program=plan.proof.wants(job.index),
            known=() if job.runs else plan.recall.known,
        )

    def _compiling_device(self) -> DeviceState | None:
        """Returns the device of the next worker that compiles; None if that needs no device."""
        return self._run.least_used_device()

    def reusable(self, job: Job) -> Worker | None:
        """Returns a worker that has finished other configs and may take a job; None if the job needs a fresh worker."""
        if job.was_lost or job.needs_fresh or job.is_alone:
            return None
        return next(iter(self._run.workers.in_state(WorkerState.BETWEEN)), None)

    def retire_unneeded(self) -> None:
        """Ends the workers that have finished a config and cannot take another."""
        run, pending = self._run, self._run.jobs.pending
        is_next = self.reusable(pending[0]) is not None if pending else self._may_come()
        if is_next and run.worker_count.most > 1:
            return
        for worker in run.workers.in_state(WorkerState.BETWEEN):
            run.workers.retire(worker)

    def _may_come(self) -> bool:
        """Returns whether workers wait for further configs of the source."""
        return self._run.jobs.may_come

    def stopped(self, worker: Worker) -> None:
        """Takes its job from a worker that has only lowered it, so that the worker may compile another."""
        worker.release()
        worker.transition(WorkerState.BETWEEN)

    def free(self, worker: Worker) -> None:
        """Takes its job and its device from a worker, which then may compile another config, or ends."""
        run = self._run
        worker.release()
        # If configs end the workers that compile them, each config that was not its worker's first must run again.
        few_are_lost = _MOST_LOST * run.jobs.lost_compilers <= run.jobs.compiled
        if worker.used < self.numbers.compiles_per_worker and few_are_lost:
            worker.transition(WorkerState.BETWEEN)
        else:
            run.workers.retire(worker)

    def may_fit_alone(self, worker: Worker) -> bool:
        """Returns whether idle compile workers may hold the device memory that a config in `worker` lacked."""
        is_reused = self.numbers.compiles_per_worker > 1
        return is_reused and worker.device is not None and self._run.workers.on(worker.device) > 1

    # Shared: measuring

    def enter(self, job: Job, phase: str) -> None:
        """Announces the phase that a job enters."""
        self._run.on_phase(job.index, phase)

    def on_ended_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Ends a job whose first run took too long to finish."""
        message = "its first run was stopped, because another config is clearly faster"
        self._end_as_slow(worker, job, message, reply.run_ms, reply.cpu_ms, Phase.CHECK)
        self._run.workers.retire(worker)  # the run still occupies it

    def _assign(self, device: DeviceState, worker: Worker, job: Job) -> None:
        """Gives a worker a device to measure its job on, and starts its clock."""
        run = self._run
        worker.hold(device, run.clock(), run.plan.timeout_s - job.held_s)
        task = Measure(
            trial=job.index,
            config=as_json(job.config),
            load=job.is_saved,
            checked=job.first_run is not None,
            pause=self._pauses,
            stop_ms=self._stop_ms(job),
            # A fast but wrong config must not rule out right ones.
            best_median_ms=None if run.reference.is_open else run.fastest.best_median_ms,
            disturbed=tuple(run.fastest.disturbance.runs),
            references=len(run.reference.fds),
            standard=run.reference.standard,
            keeps=run.reference.keeps,
            saves=run.reference.is_default(job.index),  # the final has them, however slow they are
            ranks=self._ranks,
            last=self._ends_with(worker),
        )
        fds = [job.executable_fd, *run.reference.fds]
        worker.offer(task.references, spool.create("output") if task.keeps else -1)
        if task.keeps:
            fds.append(worker.output_fd)
        run.workers.send_next(worker, task, fds)

    def _ends_with(self, worker: Worker) -> bool:
        """Returns whether a worker ends unasked after its next config; the run retires a worker that may pause."""
        return False

    def _stop_ms(self, job: Job) -> float | None:
        """Returns the milliseconds after which to stop a job's first run; None never stops it."""
        return None

    def _note_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Records the first run of a worker's job, which then waits for the device again."""
        job.ran_first(reply.run_ms, reply.cpu_ms, is_disturbed=reply.is_disturbed)
        self._run.fastest.note_first_run(job.index, reply.run_ms, reply.cpu_ms)
        self._take_device(worker, job)

    def _take_device(self, worker: Worker, job: Job) -> None:
        job.held_device(self._run.clock() - worker.assigned_at)
        self.enter(job, READY)
        worker.return_device()

    def _rule_out(self, worker: Worker, job: Job) -> bool:
        """Ends the job of a worker if its first run was too slow, and returns whether it was."""
        run = self._run
        if job.first_run is None or job.was_disturbed or run.reference.is_open:
            return False
        run_ms, cpu_ms = job.first_run
        if not run.fastest.is_hopeless(run_ms, cpu_ms):
            return False
        message = "it was stopped after its first run, because another config is clearly faster"
        self._end_as_slow(worker, job, message, run_ms, cpu_ms, Phase.MEASURE)
        return True

    def _end_as_slow(self, worker: Worker, job: Job, message: str, run_ms: float, cpu_ms: float, phase: Phase) -> None:
        times: Any = {"time_ms": run_ms, "samples_ms": (run_ms,), "own_ms": cpu_ms, "clock": "wall"}
        keeps = job.executable_fd >= 0 and self._run.reference.is_default(job.index)
        self._run.jobs.finish(job, worker, WorkerVerdict(Outcome.SLOW, message), phase, keeps=keeps, **times)
        worker.give_up()


class WithoutDevice(TrialRoute):
    """A route on which workers compile without their device.

    Attributes:
        target: the device that they compile for; None for the machine itself.
    """

    def __init__(self, numbers: Numbers, *, target: CompileTarget | None = None, confirms: bool = False) -> None:
        super().__init__(numbers)
        self.target = target
        self.confirms = confirms

    def environ(self) -> dict[str, str]:
        """Returns the environment of workers that compile for a device they lack: it limits XLA's threads.

        Workers that compile for the CPU keep all threads, because the program depends on their number.
        """
        if self.target is None or _THREADS in os.environ:
            return {}
        return {_THREADS: str(max(1, machine.available_cpus() // self.numbers.slots))}

    def _task(self, job: Job, *, last: bool) -> Compile:
        return dataclasses.replace(super()._task(job, last=last), target=self.target)

    def _compiling_device(self) -> DeviceState | None:
        return None

    def _may_come(self) -> bool:
        return False

    def may_fit_alone(self, worker: Worker) -> bool:
        """Returns False, because workers without a device hold no device memory."""
        return False


def compiles_apart(given: Conditions) -> int:
    """Returns how many configs a worker compiles without the device."""
    return 1 if given.platform == "cpu" else min(_COMPILES_PER_WORKER, given.configs_per_worker)
