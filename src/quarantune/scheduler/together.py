"""The route on which one worker compiles a config, parks, and measures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quarantune.sandbox.messages import Checked, Stopped, Warm
from quarantune.scheduler.jobs import Timing
from quarantune.scheduler.run import Run
from quarantune.scheduler.verdicts import checked_duration, checked_ms
from quarantune.scheduler.workers import NEVER, DeviceState, Job, Verdict, Worker, WorkerState
from quarantune.values.trial import Outcome, Phase


class Together:
    """Starts the workers of this route, and assigns devices to them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._makes_spares = run.plan.ahead

    def waiting(self) -> Sequence[Worker]:
        """Returns the workers that wait, compiled, for a device."""
        return self._run.workers.parked()

    def start_compiling(self, job: Job) -> None:
        """Has a job compiled by a worker that is done with others, by the spare one, or by a new one."""
        run = self._run
        if (worker := run.reusable(job) or self._spare()) is not None:
            worker.take(job, run.workers.startup_deadline())
            run.workers.send_next(worker, run.compile_task(job))  # it reads the task as soon as it is ready
        elif run.plan.compile_only:
            run.save_compiled(job, run.least_used_device())
        else:
            task, device = run.compile_task(job), run.least_used_device()
            run.workers.start(task, WorkerState.COMPILING, job=job, device=device)

    def warm_spare(self, has_room: Callable[[], bool]) -> None:
        """Starts a worker for the next config while another one compiles."""
        run = self._run
        if not self._makes_spares or not (run.jobs.pending or run.jobs.may_grow) or not run.workers.compiling():
            return
        if self._spare() is None and has_room():
            run.workers.start(Warm(options=run.plan.options), WorkerState.SPARE, device=run.least_used_device())

    def on_spare_exit(self, worker: Worker) -> None:
        """Starts no more spare workers after one has died before it began with a config.

        No config was the cause. A cause that lies in the function will also end the worker that begins with a config.
        """
        self._makes_spares = False
        spare = self._spare()
        if spare is not None and spare is not worker:
            self._run.workers.retire(spare)  # it would end in the same way, with the config that was just lost

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Parks a worker that has compiled its job."""
        worker.transition(WorkerState.PARKED)
        worker.deadline = NEVER

    def after_measuring(self, worker: Worker, device: DeviceState) -> None:
        """Takes its job from a worker that has measured it, which may take another one or ends."""
        self.free(worker)

    def free(self, worker: Worker) -> None:
        """Takes its job from a worker, which may take another one or ends."""
        if not self._run.free(worker):
            self._run.workers.retire(worker)

    def on_checked(self, worker: Worker, device: DeviceState, reply: Checked) -> None:
        """Parks a worker again after an informative first run of its job."""
        worker.run_ms, worker.cpu_ms = checked_ms(reply.run_ms), checked_duration(reply.cpu_ms)
        worker.was_disturbed = worker.was_disturbed or reply.is_disturbed
        if worker.job is not None:
            self._run.race.note_first_run(worker.job.index, worker.run_ms, worker.cpu_ms)
        self._park_again(worker, device)

    def _park_again(self, worker: Worker, device: DeviceState) -> None:
        worker.held_s += self._run.clock() - worker.assigned_at
        worker.transition(WorkerState.PARKED)
        worker.deadline, device.measuring = NEVER, None

    def on_stopped(self, worker: Worker, reply: Stopped) -> None:
        """Ends a job whose first run was stopped, because it took too long."""
        run_ms, cpu_ms = checked_ms(reply.run_ms), checked_duration(reply.cpu_ms)
        fastest_ms = self._run.race.fastest_ms or run_ms
        message = f"its first run was stopped after {run_ms:.4g} ms, where another config takes {fastest_ms:.4g}"
        self._end_as_slow(worker, message, run_ms, cpu_ms, Phase.CHECK)
        self._run.workers.retire(worker)  # the run goes on in it

    def repeat(self, worker: Worker, device: DeviceState, run_ms: float) -> None:
        """Parks a worker whose runs were disturbed, to measure its job once more after those that wait."""
        worker.run_ms, worker.was_disturbed = run_ms, True
        self._park_again(worker, device)

    def measure_on(self, device: DeviceState) -> None:
        """Has the next parked config run: all run once, then those that may still win go on, the fastest first."""
        run = self._run
        parked = [
            worker
            for worker in run.workers.parked()
            if worker.device is device and run.jobs.may_be_compared(worker.job)
        ]
        for worker in sorted(parked, key=lambda worker: worker.run_ms or 0.0):
            if self._rule_out(worker):
                continue
            if device.lease.acquire(run.clock()):
                run.assign_device(device, worker)
            return
        device.lease.release()

    def _rule_out(self, worker: Worker) -> bool:
        """Ends a job whose first run was too slow; returns whether it was."""
        run, run_ms = self._run, worker.run_ms
        if run_ms is None or worker.job is None or worker.was_disturbed or run.reference.is_open:
            return False
        if (fastest_ms := run.race.hopeless_beside_ms(run_ms, worker.cpu_ms)) is None:
            return False
        message = f"its first run took {run_ms:.4g} ms, where another config takes {fastest_ms:.4g}"
        self._end_as_slow(worker, message, run_ms, worker.cpu_ms, Phase.MEASURE)
        self.free(worker)
        return True

    def _end_as_slow(self, worker: Worker, message: str, run_ms: float, cpu_ms: float, phase: Phase) -> None:
        run, job = self._run, worker.job
        if job is not None:
            timing = Timing(time_ms=run_ms, samples_ms=(run_ms,), cpu_ms=cpu_ms, clock="wall")
            worker.keep_peak()
            run.jobs.finish(job, worker, Verdict(Outcome.SLOW, message), phase, timing)
            worker.job = None

    def _spare(self) -> Worker | None:
        return next((worker for worker in self._run.workers if worker.state is WorkerState.SPARE), None)
