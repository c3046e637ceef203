"""The parts that one run of a scheduler is made of, and the steps that both routes share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quarantune.sandbox import spool
from quarantune.sandbox.messages import Compile, Measure
from quarantune.scheduler.jobs import Jobs
from quarantune.scheduler.memory_watch import MemoryWatch
from quarantune.scheduler.plan import MEMORY_SHARE, Plan
from quarantune.scheduler.race import Race
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.scarcity import Scarcity
from quarantune.scheduler.workers import NEVER, DeviceState, Job, Worker, Workers, WorkerState
from quarantune.values.config_values import encode
from quarantune.values.trial import Phase

_MOST_LOST = 10
"""Where more than one in so many configs ends the worker that compiles it, each gets one of its own."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The state of one scheduler, in parts.

    Attributes:
        plan: the plan.
        devices: the devices that were not withdrawn.
        workers: the workers.
        jobs: the jobs.
        race: the times so far.
        reference: the outputs to compare with.
        memory: the watch on workers' memory.
        scarcity: the number of configs that may have a worker, where processes or threads ran out.
        clock: seconds.
        available_memory: bytes of memory that are free now.
        on_phase: called with the index of a config and the phase that it enters.
    """

    plan: Plan
    devices: list[DeviceState]
    workers: Workers
    jobs: Jobs
    race: Race
    reference: Reference
    memory: MemoryWatch
    scarcity: Scarcity
    clock: Callable[[], float]
    available_memory: Callable[[], int]
    on_phase: Callable[[int, str], None]

    def least_used_device(self) -> DeviceState:
        """Returns the device that the fewest workers use."""
        return min(self.devices, key=self.workers.on)

    def may_start_on(self, device: DeviceState | None) -> bool:
        """Whether a further worker may be started: not while another one, even a dying one, owns its device."""
        if self.scarcity.pauses:
            return False
        return device is None or not device.device.has_one_owner or not self.workers.on(device)

    def reusable(self, job: Job) -> Worker | None:
        """Returns a worker that is done with other configs and may take a job; None where that needs a fresh one."""
        if job.was_lost or job.compiles_fresh or job.is_alone:
            return None
        return next((worker for worker in self.workers if worker.state is WorkerState.BETWEEN), None)

    def free(self, worker: Worker) -> bool:
        """Takes its job from a worker that may go on with another one; returns whether it may.

        If that ends it, the config must be repeated.
        """
        worker.release()
        few_are_lost = _MOST_LOST * self.jobs.lost_compilers <= self.jobs.compiled
        if worker.used >= self.plan.compiles_per_worker or not few_are_lost:
            return False
        worker.transition(WorkerState.BETWEEN)
        worker.deadline = NEVER
        return True

    def retire_unneeded(self) -> None:
        """Ends the workers that are done with a config where there is no other that they may take."""
        pending = self.jobs.pending
        is_next = self.reusable(pending[0]) is not None if pending else self.plan.is_together and self.jobs.may_come
        if is_next and self.scarcity.most > 1:
            return
        for worker in self.workers:
            if worker.state is WorkerState.BETWEEN:
                self.workers.retire(worker)

    def compile_task(self, job: Job) -> Compile:
        """Returns the task that compiles a job, whose memory limit is set here where it runs alone."""
        if job.is_alone and self.plan.may_exceed_alone:
            alone_bytes = int(MEMORY_SHARE * self.available_memory())
            job.limit_bytes = max(self.plan.memory_limit_bytes, alone_bytes)
        return Compile(
            trial=job.index,
            config=encode(job.config),
            options=self.plan.options,
            target=self.plan.target,
            is_check=self.plan.is_check,
            shows_program=self.plan.proof.wants(job.index),
        )

    def save_compiled(self, job: Job, device: DeviceState | None, *, worker: Worker | None = None) -> None:
        """Has a job compiled by a worker that leaves the executable, unless it is for a check, in a file.

        A worker without a device may compile further jobs after that.

        Args:
            job: the job.
            device: the device that the worker may use; None for none.
            worker: one that has compiled another job; None starts one.
        """
        plan = self.plan
        job.close_executable()
        if not plan.is_check:
            job.executable_fd = spool.create("executable")
        task = dataclasses.replace(
            self.compile_task(job),
            last=plan.is_together or (worker.used if worker else 0) + 1 >= plan.compiles_per_worker,
            must_save=not (plan.is_together or plan.is_check),
            as_data=plan.compile_only,
        )
        fds = [job.executable_fd] if job.executable_fd >= 0 else []
        if worker is None:
            self.workers.start(task, WorkerState.COMPILING, job=job, device=device, fds=fds)
            return
        worker.take(job, self.workers.startup_deadline())
        self.workers.send_next(worker, task, fds)

    def assign_device(self, device: DeviceState, worker: Worker) -> None:
        """Gives a worker a device to measure its job on; from now on its time counts."""
        job, is_together = worker.job, self.plan.is_together
        assert job is not None
        worker.transition(WorkerState.MEASURING)
        device.measuring = worker
        worker.phase = Phase.CHECK
        is_first = worker.run_ms is None
        worker.assigned_at = self.clock()
        worker.deadline = worker.assigned_at + self.plan.timeout_s - worker.held_s
        if is_together and is_first:
            job.close_executable()  # of an earlier try
            job.executable_fd = spool.create("executable")
        offer = self.reference.offer()
        task = Measure(
            trial=job.index,
            config=encode(job.config),
            load=not is_together,
            checked=not is_first,
            pause=is_together,
            stop_ms=self._stop_ms(job) if is_together and is_first else None,
            # The fastest of those that are wrong must not rule out the right ones.
            best_median_ms=None if self.reference.is_open else self.race.best_median_ms,
            noise=tuple(self.race.noise.runs),
            references=offer.references,
            standard=offer.standard,
            keeps=offer.keeps,
            # One that compiles and measures may have to wait after its first run, so that it is ended later.
            last=not is_together and worker.used + 1 >= self.plan.configs_per_worker,
        )
        fds = [job.executable_fd, *self.reference.fds]
        worker.close_output()
        worker.offered = offer.references
        if offer.keeps:
            worker.output_fd = spool.create("output")
            fds.append(worker.output_fd)
        self.workers.send_next(worker, task, fds)

    def _stop_ms(self, job: Job) -> float | None:
        """Returns how long a job's first run may take; None where its output or its time is needed in any case."""
        is_needed = self.reference.is_open or self.reference.is_default(job.index)
        return None if is_needed else self.race.stop_ms
