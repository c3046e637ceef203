"""One worker compiles a config and leaves it in a file, and another process measures it."""

from __future__ import annotations

import dataclasses

from quarantune.sandbox.messages import Compile, Failed, Prepare
from quarantune.scheduler.routes.base import TrialRoute
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerState
from quarantune.values.trial import Phase


class Split(TrialRoute):
    """One worker compiles a config and leaves it in a file, and a standby worker measures it.

    Standby workers are started once a compiled config waits.

    Attributes:
        as_data: whether the executable is for this process, which loads it without running code from a worker.
    """

    _pauses = False
    as_data = False

    def _task(self, job: Job, *, last: bool) -> Compile:
        job.make_executable()
        return dataclasses.replace(super()._task(job, last=last), last=last, as_data=self.as_data)

    def _ends_with(self, worker: Worker) -> bool:
        return worker.used + 1 >= self.numbers.configs_per_worker

    def waiting(self) -> int:
        """Returns how many compiled configs wait for a measuring worker."""
        return len(self._run.jobs.ready)

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Takes the executable of a job and frees its worker, which ends unasked after its last config, if it can."""
        job.protect_executable()
        self.free(worker)
        if reason := self._run.jobs.unloadable:
            self._run.jobs.leave_unfit(job, reason)
        else:
            self._run.jobs.ready.append(job)

    def on_unfit(self, worker: Worker, reply: Failed) -> bool:
        """Leaves a program that must compile on its device to another route, unless the worker had other configs."""
        run = self._run
        if not (worker.is_compiling or worker.phase is Phase.LOAD):
            raise ValueError("no program is unfit here")
        if worker.job is None or worker.used:
            return False
        if worker.phase is Phase.LOAD and not run.jobs.has_loaded:
            run.jobs.unloadable = reply.text
        run.jobs.leave_unfit(worker.job, reply.text)
        run.workers.retire(worker)
        return True

    def free(self, worker: Worker) -> None:
        """Takes its job and its device from a worker; a measuring worker may then measure another config."""
        run, device = self._run, worker.device
        if worker.state is not WorkerState.MEASURING or device is None:
            super().free(worker)
            return
        worker.release()
        if worker.used >= self.numbers.configs_per_worker or run.worker_count.most == 1:
            run.workers.retire(worker)
        else:
            worker.transition(WorkerState.IDLE)

    def measure_on(self, device: DeviceState) -> None:
        """Gives the next ready job to a standby worker; if memory is short, idle compile workers end before."""
        run, ready = self._run, self._run.jobs.ready
        if device.is_cramped and not run.workers.standby(device):
            for worker in run.workers.in_state(WorkerState.BETWEEN):
                if worker.device is device:
                    run.workers.retire(worker)
        if run.reference.is_awaited:
            default = next((job for job in ready if run.jobs.may_be_compared(job)), None)
            if default is None:
                return
            ready.remove(default)
            ready.appendleft(default)
        if not ready:
            device.lease.release()
        if ready and ready[0].needs_fresh:
            for used in [worker for worker in run.workers.standby(device) if worker.used]:
                run.workers.retire(used)
        # If only one worker can run, the compile worker must end first.
        is_tight = run.worker_count.most == 1
        is_needed = ready and not run.worker_count.is_full if is_tight else self._unmeasured()
        if is_needed and not run.workers.standby(device) and run.may_start_on(device):
            self._start_standby(device)
        # A used worker goes first, so that a fresh one stays at hand.
        idle = [worker for worker in run.workers.standby(device) if worker.state is WorkerState.IDLE]
        chosen = max(idle, key=lambda worker: worker.used, default=None)
        if ready and chosen is not None and device.lease.acquire(run.clock()):
            self._give_next(device, chosen)

    def _give_next(self, device: DeviceState, worker: Worker) -> None:
        """Gives a worker the next config."""
        worker.load(job := self._run.jobs.ready.popleft())
        if not self._rule_out(worker, job):
            self._assign(device, worker, job)

    def _unmeasured(self) -> int:
        """Returns how many jobs have yet to reach a measuring worker."""
        run = self._run
        to_come = self.numbers.slots if run.jobs.may_grow else 0
        return len(run.jobs.ready) + len(run.jobs.pending) + run.workers.compiling() + to_come

    def _start_standby(self, device: DeviceState) -> None:
        self._prepare(device, Prepare())

    def _prepare(self, device: DeviceState, task: Prepare, *fds: int) -> Worker:
        """Starts a standby worker, with the descriptors of its task and of the outputs to compare with."""
        run = self._run
        worker = run.workers.start(task, WorkerState.PREPARING, device=device, fds=[*fds, *run.reference.fds])
        worker.started_beside(run.workers.on(device) - 1)
        return worker
