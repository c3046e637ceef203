"""The route on which one worker compiles a config and a standby worker, which holds a device, measures it."""

from __future__ import annotations

from collections.abc import Collection

from quarantune.sandbox.messages import Expect, Prepare
from quarantune.scheduler.plan import KILL_DEADLINE_S
from quarantune.scheduler.run import Run
from quarantune.scheduler.workers import NEVER, DeviceState, Job, Worker, WorkerState
from quarantune.values.compiling import OutputArray

_STANDBY_WORKERS = 6
"""Standby workers of a device where each takes one config, which takes less time than making one ready."""


class Apart:
    """Starts the workers of this route, and assigns devices to them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._outputs: tuple[OutputArray, ...] = ()

    def waiting(self) -> Collection[Job]:
        """Returns the jobs that wait, compiled, for a measuring worker."""
        return self._run.jobs.ready

    def start_compiling(self, job: Job) -> None:
        """Has a job compiled by a worker without a device: by one that has compiled others, or by a new one."""
        self._run.save_compiled(job, None, worker=self._run.reusable(job))

    def on_lowered(self, outputs: tuple[OutputArray, ...]) -> None:
        """Tells the standby workers, while they take their device, which outputs they will compare."""
        run = self._run
        compares = run.reference.compares or run.reference.is_coming
        if outputs and not self._outputs and compares and run.plan.target is not None:
            self._outputs = outputs
            for device in run.devices:
                for worker in device.standby:
                    self._expect_outputs(worker)

    def _expect_outputs(self, worker: Worker) -> None:
        if self._outputs:
            self._run.workers.send(worker, Expect(options=self._run.plan.options, outputs=self._outputs))

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Takes the executable of a job from a worker, which ends by itself unless the config keeps it from ending."""
        job.protect_executable()
        self.free(worker)
        if reason := self._run.jobs.unloadable:
            self._run.jobs.leave_unfit(job, reason)
        else:
            self._run.jobs.ready.append(job)

    def free(self, worker: Worker) -> None:
        """Takes its job from a worker that has compiled it, which may compile another one or ends by itself."""
        if not self._run.free(worker):
            worker.transition(WorkerState.LEAVING)
            worker.deadline = self._run.clock() + KILL_DEADLINE_S

    def after_measuring(self, worker: Worker, device: DeviceState) -> None:
        """Takes its job from a worker that has measured it, which may measure another one or ends."""
        run = self._run
        worker.release()
        if worker.used >= run.plan.configs_per_worker or run.scarcity.most == 1:
            run.workers.retire(worker)
        else:
            worker.transition(WorkerState.IDLE)
            worker.deadline = NEVER
            device.standby.append(worker)

    def prepare_standby(self, device: DeviceState) -> None:
        """Starts the standby workers that will be needed, since the driver takes long to make a context."""
        run = self._run
        if run.plan.exclusive or run.plan.compile_only or device.is_cramped or not run.may_start_on(device):
            return
        each = run.plan.configs_per_worker
        most = _STANDBY_WORKERS if each == 1 and not device.device.has_one_owner else 1
        share = -(-self._unmeasured() // len(run.devices))
        waiting = share - sum(each - worker.used for worker in device.standby)
        if device.measuring is not None:
            waiting -= each - device.measuring.used - 1
        while waiting > 0 and len(device.standby) < most:
            self._start_standby(device)
            waiting -= each

    def measure_on(self, device: DeviceState) -> None:
        """Gives the next ready job to a standby worker."""
        run, ready = self._run, self._run.jobs.ready
        if run.reference.is_awaited:
            default = next((job for job in ready if run.jobs.may_be_compared(job)), None)
            if default is None:
                return
            ready.remove(default)
            ready.appendleft(default)
        if not ready:
            device.lease.release()
        if ready and ready[0].needs_fresh:
            for used in [worker for worker in device.standby if worker.used]:
                run.workers.retire(used)
        # Where only one worker can run, a compile worker has to end before.
        is_tight = run.scarcity.most == 1
        is_needed = ready and not run.scarcity.is_full if is_tight else self._unmeasured()
        if is_needed and not device.standby and run.may_start_on(device):
            self._start_standby(device)
        # One that was used before goes first, so that a fresh one stays at hand.
        idle = [worker for worker in device.standby if worker.state is WorkerState.IDLE]
        worker = max(idle, key=lambda worker: worker.used, default=None)
        if ready and worker is not None and device.lease.acquire(run.clock()):
            worker.job = ready.popleft()
            device.standby.remove(worker)
            run.assign_device(device, worker)

    def _unmeasured(self) -> int:
        """Returns how many jobs have yet to be given to a measuring worker."""
        run = self._run
        to_come = run.plan.slots if run.jobs.may_grow else 0
        return len(run.jobs.ready) + len(run.jobs.pending) + run.workers.compiling() + to_come

    def _start_standby(self, device: DeviceState) -> None:
        run = self._run
        is_ahead = run.workers.on(device) > 0
        task = Prepare(options=run.plan.options)
        worker = run.workers.start(task, WorkerState.PREPARING, device=device, fds=run.reference.fds)
        worker.is_ahead = is_ahead
        device.standby.append(worker)
        self._expect_outputs(worker)
