"""Draws the conclusions from a worker's end: for its job, and for its device."""

from __future__ import annotations

import logging

from quarantune.host import machine
from quarantune.sandbox import shortages
from quarantune.sandbox.events import describe_status, was_killed
from quarantune.scheduler.routes import RouteSteps
from quarantune.scheduler.run import Run
from quarantune.scheduler.verdicts import forgive, shortage
from quarantune.scheduler.workers import DeviceState, Job, Verdict, Worker, WorkerState
from quarantune.values.trial import Outcome

_logger = logging.getLogger("quarantune")

_MAX_DEVICE_FAILURES = 2
_LOST_FACTOR = 5
"""So many times as many workers may be lost before that: other processes may have killed them."""
_EXPLICABLE = (Outcome.CRASHED, Outcome.ERROR, Outcome.TIMEOUT, Outcome.LOST)
"""Outcomes that a shortage of processes or threads may have brought about."""


class Endings:
    """Settles the jobs of workers that have ended, and withdraws devices on which workers cannot run."""

    def __init__(self, run: Run, route: RouteSteps) -> None:
        self._run = run
        self._route = route
        self._oom_kills = machine.oom_kills()

    def on_exit(self, worker: Worker, status: int | None) -> None:
        """Concludes from the end of a worker's process, whose status is as for `Ended`."""
        worker.keep_peak()
        if worker.was_spare and not worker.began:
            self._route.on_spare_exit(worker)
            if worker.verdict is None:
                forgive(worker)
                worker.verdict = Verdict(Outcome.LOST, "the process died before it began")
        self._conclude(worker, worker.verdict or self._judge(worker, status))

    def _judge(self, worker: Worker, status: int | None) -> Verdict:
        """Returns the verdict on a worker, and kills another one that took the memory it died for.

        Args:
            worker: the worker.
            status: its exit code, or minus the signal that ended it; None where its template died with it.
        """
        if status is None:
            return Verdict(Outcome.LOST, "it could not be started, or the process that started it died")
        kills = machine.oom_kills()
        if status != -9 or kills <= self._oom_kills:
            forgive(worker)
            may_go_on = worker.job is None or worker.job.may_be_repeated or worker.state is WorkerState.PARKED
            outcome = Outcome.LOST if was_killed(status) and may_go_on else Outcome.CRASHED
            return Verdict(outcome, f"the process {describe_status(status)} without a result")
        self._oom_kills = kills
        if (culprit := self._run.memory.larger_than(worker)) is not None:
            reason = "the kernel ran out of memory, killed another config's process"
            self._run.workers.kill_with_verdict(culprit, shortage(culprit, reason))
            return Verdict(Outcome.LOST, "the kernel killed the process for want of memory that another one held")
        return Verdict(Outcome.OOM, "the kernel's out-of-memory killer took the process")

    def _conclude(self, worker: Worker, verdict: Verdict) -> None:
        """Settles the job of a worker that has ended, or blames its device, and forgets the worker."""
        run, device = self._run, worker.device
        if verdict.outcome in _EXPLICABLE and shortages.lacks_processes(
            f"{verdict.message}\n{run.workers.log(worker)}"
        ):
            message = f"it could not start a process or thread, and {shortages.process_limit()}"
            verdict = Verdict(Outcome.LOST, message, is_shortage=True)
        worker.verdict = verdict
        if verdict.is_shortage and run.devices and not run.scarcity.gives_up(worker):
            self._repeat_beside_fewer(worker)
        elif worker.job is not None:
            self._settle(worker.job, worker, verdict)
        elif (
            device in self._run.devices
            and worker in device.standby
            and not worker.used
            and verdict.outcome is not Outcome.OK
        ):
            self._blame_device(device, worker, verdict)
        self._run.workers.remove(worker)

    def give_up(self, worker: Worker) -> None:
        """Goes on without a worker that SIGKILL does not end, and without its device."""
        assert worker.verdict is not None
        verdict, device = worker.verdict, worker.device
        _logger.error("worker %s does not die after SIGKILL", self._run.workers.pid(worker))
        if worker.job is not None:
            message = f"{verdict.message}; its process does not die"
            self._run.jobs.finish(worker.job, worker, Verdict(verdict.outcome, message), worker.phase)
        self._run.workers.remove(worker)
        if device is not None and device in self._run.devices:
            message = f"{device.device.name} is held by a process that does not die"
            self._withdraw(device, Verdict(Outcome.LOST, message))

    def stop(self, reason: str) -> None:
        """Ends all jobs but those that are being measured."""
        run, verdict = self._run, Verdict(Outcome.NOT_RUN, reason)
        run.jobs.not_run(reason)
        for worker in run.workers:
            is_early = worker.state in (WorkerState.COMPILING, WorkerState.PARKED)
            if worker.job is not None and is_early and worker.job.doubtful is None:
                run.workers.kill_with_verdict(worker, verdict)

    def _settle(self, job: Job, worker: Worker, verdict: Verdict) -> None:
        """Ends a job, or has it tried again where its worker's end may not be its own doing."""
        run, outcome = self._run, verdict.outcome
        is_parked = worker.state is WorkerState.PARKED
        if not run.devices or verdict.is_shortage:
            run.jobs.finish(job, worker, verdict, worker.phase)
        elif outcome is Outcome.LOST and (is_parked or job.may_be_repeated):
            # One that only waited did nothing that could have killed its template.
            job.losses += not is_parked
            run.jobs.again(job)
        elif self._may_fit_alone(job, worker, outcome):
            run.jobs.again_alone(job)
        elif outcome is Outcome.DEVICE_OOM and worker.device and self._make_room(worker.device):
            run.jobs.again(job)
        elif worker.used and outcome.is_failure and not run.jobs.fails_by_itself(job, worker, outcome):
            # An earlier config may have done something to this process: only a fresh one can tell.
            self._route.repeat_fresh(worker, job)
        else:
            run.jobs.finish(job, worker, verdict, worker.phase)

    def _repeat_beside_fewer(self, worker: Worker) -> None:
        """Has the job of a worker that could not start a process or thread tried again, if it had one."""
        run, job = self._run, worker.job
        for device in run.devices:
            device.is_cramped = True
        if run.scarcity.most == 1:
            for other in run.workers:
                if other.is_standby or other.state is WorkerState.BETWEEN:
                    run.workers.retire(other)
        if job is not None:
            (run.jobs.again_alone if run.scarcity.most == 1 else run.jobs.again)(job)

    def _may_fit_alone(self, job: Job, worker: Worker, outcome: Outcome) -> bool:
        """Whether a config that ran out of memory might not have done so without the others."""
        plan = self._run.plan
        if job.is_alone or outcome not in (Outcome.OOM, Outcome.DEVICE_OOM):
            return False
        if outcome is Outcome.DEVICE_OOM:
            return self._route.lacks_memory_beside(worker)
        if job.peak_bytes > plan.memory_limit_bytes:
            return plan.may_exceed_alone
        return any(other is not job for other in self._run.workers.jobs())

    def _make_room(self, device: DeviceState) -> bool:
        """Retires the other workers on a device, whose memory a config lacked; returns whether there were any."""
        beside = [worker for worker in self._run.workers if worker.state is WorkerState.SIDE_TASK]
        others = [*device.standby, *(worker for worker in beside if worker.device is device)]
        for worker in others:
            self._run.workers.retire(worker)
        device.is_cramped = device.is_cramped or bool(others)
        return bool(others)

    def _blame_device(self, device: DeviceState, worker: Worker, verdict: Verdict) -> None:
        """Counts a standby worker that failed before it had a config; its device is withdrawn the second time.

        Workers that were lost count less.
        """
        if verdict.outcome is Outcome.DEVICE_OOM and worker.is_ahead:
            device.is_cramped = True
            return
        name, outcome = device.device.name, verdict.outcome
        device.failures += 1
        _logger.warning("no measuring worker on %s: %s: %s", name, outcome.value, verdict.message)
        if device.failures >= _MAX_DEVICE_FAILURES * (_LOST_FACTOR if outcome is Outcome.LOST else 1):
            message = f"no worker could be made ready on {name}: {verdict.message}"
            self._withdraw(device, Verdict(outcome, message))

    def _withdraw(self, device: DeviceState, verdict: Verdict) -> None:
        """Goes on without a device; without the last one, all jobs end."""
        run = self._run
        device.lease.release()
        run.devices.remove(device)
        if not run.devices:
            run.jobs.fail_waiting(verdict)
        for worker in run.workers:
            if not run.devices:
                run.workers.kill_with_verdict(worker, verdict)
            elif worker.device is device:
                run.workers.kill_with_verdict(worker, Verdict(Outcome.LOST, verdict.message))  # another device will do
