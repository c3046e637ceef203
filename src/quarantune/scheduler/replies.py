"""Applies the replies of workers to their jobs."""

from __future__ import annotations

import math
import statistics

from quarantune.measure.sampling import is_doubtful
from quarantune.sandbox.messages import (
    REPLIES,
    Checked,
    Compared,
    Compiled,
    Failed,
    Lowered,
    Measured,
    PhaseEntered,
    Raised,
    Ready,
    ReferenceComputed,
    Reply,
    ShapesChecked,
    Stopped,
    Traced,
)
from quarantune.scheduler.routes import RouteSteps
from quarantune.scheduler.run import Run
from quarantune.scheduler.verdicts import (
    checked_duration,
    checked_ms,
    checked_samples,
    forged,
    raised,
    too_large,
)
from quarantune.scheduler.workers import NEVER, DeviceState, Job, Verdict, Worker, WorkerState
from quarantune.values import codec
from quarantune.values.trial import READY, Outcome, Phase


class Replies:
    """Takes the replies of all workers."""

    def __init__(self, run: Run, route: RouteSteps) -> None:
        self._run = run
        self._route = route

    def on_message(self, worker: Worker, frame: codec.Frame) -> None:
        """Applies a worker's reply; one that cannot be true ends the worker."""
        expected = None if worker.job is None else worker.job.index
        if worker.verdict is not None or frame.get("trial") != expected:
            return  # late, or of a trial that is over
        worker.was_heard = True
        try:
            self._apply(worker, codec.decode(frame, *REPLIES))
        except (TypeError, ValueError, ArithmeticError) as error:
            self._run.workers.kill_with_verdict(worker, forged(error))

    def _apply(self, worker: Worker, reply: Reply) -> None:
        worker.phase = reply.phase
        job, device, state = worker.job, worker.device, worker.state
        if job is not None and isinstance(reply, (Checked, Measured, Failed)) and reply.agreement is not None:
            group, noise = reply.agreement.group, reply.agreement.noise
            self._run.reference.note(job.index, group, offered=worker.offered, fd=worker.output_fd, noise=noise)
            worker.close_output()
        match reply:
            case PhaseEntered():
                self._run.jobs.has_loaded |= state is WorkerState.MEASURING and worker.phase is not Phase.LOAD
                self._begin(worker)
            case Ready() if device is not None and worker.is_standby:
                self._on_ready(worker, device, reply)
            case Traced() if state is WorkerState.COMPILING and job is not None:
                self._run.plan.proof.show(job.config, reply.lines)
            case Lowered() if state is WorkerState.COMPILING and job is not None:
                self._on_lowered(worker, job, reply)
            case Compiled() if state is WorkerState.COMPILING and job is not None:
                self._on_compiled(worker, job, reply)
            case Compiled() if state is WorkerState.MEASURING and job is not None:
                job.figures = reply.figures
                self._route.on_compiled_again(worker, job, reply)
                if (verdict := too_large(job, self._run.plan)) is not None:
                    self._run.jobs.finish(job, worker, verdict, Phase.COMPILE)
                    worker.job = None
                    self._run.workers.retire(worker)
            case Checked() if state is WorkerState.MEASURING and device is not None:
                self._route.on_checked(worker, device, reply)
            case Stopped() if state is WorkerState.MEASURING:
                self._route.on_stopped(worker, reply)
            case Measured() if state is WorkerState.MEASURING and job is not None and device is not None:
                self._on_measured(worker, job, device, reply)
            case ReferenceComputed() if state is WorkerState.SIDE_TASK:
                worker.reply = reply  # comparing shapes comes next
            case ShapesChecked() | Compared() if state is WorkerState.SIDE_TASK:
                worker.reply = reply
                self._run.workers.retire(worker)
            case Failed():
                self._on_failed(worker, reply)

    def _begin(self, worker: Worker) -> None:
        """Starts the clock of a worker whose time counts from its first phase on."""
        if worker.job is not None:
            self._run.on_phase(worker.job.index, worker.phase.value)
        if worker.state in (WorkerState.COMPILING, WorkerState.SIDE_TASK) and not worker.began:
            worker.began = True
            worker.deadline = self._run.clock() + (worker.side_task_s or self._run.plan.compile_timeout_s)

    def _on_ready(self, worker: Worker, device: DeviceState, reply: Ready) -> None:
        worker.transition(WorkerState.IDLE)
        worker.deadline, device.failures = NEVER, 0
        if self._run.plan.configs_per_worker == 1:  # there will be many more
            self._run.workers.share_modules(reply.modules)

    def _on_lowered(self, worker: Worker, job: Job, reply: Lowered) -> None:
        """Ends a worker whose config lowered to the program of another one: one of them is enough to run."""
        job.slack_s = worker.deadline - self._run.clock()
        self._route.on_lowered(reply.outputs)
        first = self._run.jobs.programs.first(reply.program, job)
        if first is not job:
            self._run.reference.join(job.index, first.index)
            self._run.on_phase(job.index, READY)
            worker.job = None
            self._run.workers.retire(worker)
            self._run.jobs.join_same_program(job, first)

    def _on_compiled(self, worker: Worker, job: Job, reply: Compiled) -> None:
        job.compile_s, job.figures = checked_duration(reply.compile_s), reply.figures
        self._run.jobs.compiled += 1
        self._run.on_phase(job.index, READY)
        self._run.workers.share_modules(reply.modules)
        if (verdict := too_large(job, self._run.plan)) is not None:
            self._end_compiling(worker, job, verdict)
            return
        if not self._run.plan.compile_only:
            self._route.on_compiled(worker, job)
            return
        if not self._run.plan.is_check:
            self._run.race.keep_compiled(job)
        self._end_compiling(worker, job, Verdict(Outcome.OK, ""))

    def _end_compiling(self, worker: Worker, job: Job, verdict: Verdict) -> None:
        """Ends a job while it is compiled; its worker may go on with another."""
        worker.keep_peak()
        self._run.jobs.finish(job, worker, verdict, Phase.COMPILE)
        self._route.free(worker)

    def _on_measured(self, worker: Worker, job: Job, device: DeviceState, reply: Measured) -> None:
        run, race = self._run, self._run.race
        samples_ms, cpu_ms = checked_samples(reply.samples_ms), checked_ms(reply.cpu_ms)
        worker.keep_peak()
        if reply.own_ms:
            race.noise.add(checked_samples(reply.own_ms), min(reply.own_ms))
        if job.first_run is not None and not job.was_disturbed:
            race.noise.add_first_run(job.first_run[1], cpu_ms)
        if job.doubtful is not None:
            reply = min(job.doubtful, reply, key=lambda measured: measured.cpu_ms)
            samples_ms, cpu_ms = checked_samples(reply.samples_ms), reply.cpu_ms
        elif (
            not reply.is_slow
            and is_doubtful(samples_ms, reply.own_ms)
            and self._route.on_doubtful(worker, device, reply)
        ):
            race.note_time(job.index, cpu_ms)  # it takes no longer than that
            return
        verdict = Verdict(Outcome.OK, "")
        if reply.is_slow:
            message = f"at best {min(samples_ms):.4g} ms, where another config takes {race.best_median_ms:.4g}"
            verdict = Verdict(Outcome.SLOW, message)
        else:
            race.note_time(job.index, cpu_ms)
        is_default = run.reference.is_default(job.index)
        # Other slow configs may be in the final, if they were disturbed.
        is_kept = is_default or not (reply.is_slow and reply.clock == "device")
        run.jobs.finish(
            job,
            worker,
            verdict,
            Phase.MEASURE,
            (lambda merit: race.keep_executable(job, -math.inf if is_default else merit)) if is_kept else None,
            time_ms=statistics.median(samples_ms),
            samples_ms=tuple(samples_ms),
            own_ms=cpu_ms,
            clock=reply.clock,
            energy_mj=reply.energy_mj,
            watts=reply.watts,
        )
        device.measuring = None
        self._route.after_measuring(worker, device)

    def _on_failed(self, worker: Worker, reply: Failed) -> None:
        """Ends a worker whose task raised, and with it all that its config did to the process."""
        run = self._run
        if reply.outcome is Raised.UNFIT and self._route.on_unfit(worker, reply):
            return
        worker.traceback, worker.raised_at, job, verdict = reply.traceback, reply.place, worker.job, raised(reply)
        if job is not None:
            job.raised_at = reply.place
            if reply.goes_on and run.jobs.fails_by_itself(job, worker, verdict.outcome):
                device = worker.device
                if worker.state is WorkerState.MEASURING and device is not None:
                    worker.keep_peak()
                    run.jobs.finish(job, worker, verdict, worker.phase)
                    device.measuring = None
                    self._route.after_measuring(worker, device)
                    return
                if worker.is_compiling and run.plan.compiles_per_worker > 1:
                    self._end_compiling(worker, job, verdict)
                    return
        run.workers.kill_with_verdict(worker, verdict)
