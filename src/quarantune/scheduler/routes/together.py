"""One worker compiles a config, waits, and measures it."""

from __future__ import annotations

from typing import Self

from quarantune.sandbox.messages import FirstRun, Measured
from quarantune.scheduler.routes.base import Conditions, TrialRoute
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerState
from quarantune.values.trial import Route


class Together(TrialRoute):
    """One worker compiles a config, parks, and measures it."""

    label = Route.TOGETHER

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions; `is_closed` says that no search adds configs."""
        each = given.configs_per_worker
        # A plain callable may change its process, so no other config may run there.
        compiles = each if given.is_jitted else 1
        numbers = {"configs_per_worker": each, "compiles_per_worker": compiles}
        return cls(given.in_workers(given.slots_with_device, is_closed=is_closed, **numbers))

    def waiting(self) -> int:
        """Returns how many compiled configs wait for a device."""
        return len(self._run.workers.in_state(WorkerState.PARKED))

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Parks a worker that has compiled its job."""
        worker.transition(WorkerState.PARKED)

    def on_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Parks a worker again after its job's informative first run."""
        self._note_first_run(worker, job, reply)
        worker.transition(WorkerState.PARKED)

    def measure_again(self, worker: Worker, job: Job, reply: Measured) -> bool:
        """Parks a worker after disturbed runs, to measure its job once more after the jobs that wait."""
        job.was_unreliable(reply)
        self._take_device(worker, job)
        worker.transition(WorkerState.PARKED)
        return True

    def measure_on(self, device: DeviceState) -> None:
        """Runs the next parked config: all run once, then those that may still win continue, the fastest first."""
        run = self._run
        parked = [
            (worker, job)
            for worker in run.workers.in_state(WorkerState.PARKED)
            if worker.device is device and (job := worker.job) is not None and run.jobs.may_be_compared(job)
        ]
        for worker, job in sorted(parked, key=lambda pair: pair[1].first_ms):
            if self._rule_out(worker, job):
                self.free(worker)
                continue
            if device.lease.acquire(run.clock()):
                if job.first_run is None:
                    job.make_executable()
                self._assign(device, worker, job)
            return
        device.lease.release()

    def _stop_ms(self, job: Job) -> float | None:
        """Returns the milliseconds after which to stop a job's first run; None if it must give an output or a time."""
        run = self._run
        is_needed = job.first_run is not None or run.reference.is_open or run.reference.is_default(job.index)
        return None if is_needed else run.fastest.stop_ms
