"""Draws conclusions for jobs and devices from the replies of workers, and from how workers end."""

from __future__ import annotations

import logging
import statistics

from quarantune.host import machine
from quarantune.measure.sampling import is_unreliable
from quarantune.sandbox import messages, shortages
from quarantune.sandbox.template_messages import describe_status, was_killed
from quarantune.scheduler.memory_watch import shortage
from quarantune.scheduler.routes.base import TrialRoute
from quarantune.scheduler.run_state import RunState
from quarantune.scheduler.verdicts import raised, too_large
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerState, WorkerVerdict
from quarantune.values import codec
from quarantune.values.trial import READY, SAME, UNSTABLE, Outcome, Phase, lowered_half

_logger = logging.getLogger("quarantune")

_SHAPES_S = 10.0
"""Seconds to compare the shapes of outputs; the only use of this is to fail early."""
_MAX_DEVICE_FAILURES = 2
_LOST_FACTOR = 5
"""Multiple of `_MAX_DEVICE_FAILURES` at which lost workers withdraw a device: another process may have killed them."""
_EXPLICABLE = (Outcome.CRASHED, Outcome.ERROR, Outcome.TIMEOUT, Outcome.LOST)
"""Outcomes that a shortage may have caused."""


class Replies:
    """Applies the replies of workers, ends or repeats the jobs of those that end, and withdraws unusable devices."""

    def __init__(self, run: RunState, route: TrialRoute) -> None:
        self._run = run
        self._route = route
        self._oom_kills = machine.oom_kills()

    # Replies of workers

    def on_message(self, worker: Worker, frame: codec.JsonObject) -> None:
        """Applies a worker's reply; an invalid reply ends the worker."""
        expected = None if worker.job is None else worker.job.index
        if worker.verdict is not None or frame.get("trial") != expected:
            return  # late, or about a trial that has ended
        worker.heard()
        try:
            reply = codec.decode(frame, *messages.REPLIES)
            self._run.memory.note(worker, reply)
            self._apply(worker, reply)
        except (TypeError, ValueError, ArithmeticError) as error:
            self._run.workers.kill_with_verdict(
                worker, WorkerVerdict(Outcome.CRASHED, f"it sent an invalid message: {error!r}")
            )
        self._run.memory.check_limit()  # at once, since a quick config ends before the next look at the memory

    def _apply(self, worker: Worker, reply: messages.Reply) -> None:
        worker.heard(reply.phase)
        job, device, state = worker.job, worker.device, worker.state
        if job is not None and isinstance(reply, messages.Judged) and reply.judgement is not None:
            judged, reference = reply.judgement, self._run.reference
            reference.note(job.index, judged.group, offered=worker.offered, fd=worker.output_fd, noise=judged.noise)
            bits = SAME if judged.digest and reference.is_default(job.index) else judged.bits
            job.judged(bits=bits, digest=judged.digest, batch=judged.batch)
            worker.close_output()
        match reply:
            case messages.PhaseEntered():
                self._run.jobs.has_loaded |= state is WorkerState.MEASURING and worker.phase is not Phase.LOAD
                self._begin(worker)
            case messages.Ready() if state is WorkerState.PREPARING and device is not None:
                self._on_ready(worker, device, reply)
            case messages.Traced() if state is WorkerState.COMPILING and job is not None:
                self._run.plan.proof.show(job.config, reply.lines)
            case messages.Lowered() if state is WorkerState.COMPILING and job is not None:
                self._on_lowered(worker, job, reply)
            case messages.Compiled() if state is WorkerState.COMPILING and job is not None:
                self._on_compiled(worker, job, reply)
            case messages.Compiled() if state is WorkerState.MEASURING and job is not None:
                job.compiled_again(reply.figures)
                self._route.on_compiled_again(worker, job, reply)
                if (verdict := too_large(job, self._run.plan)) is not None:
                    self._run.jobs.finish(job, worker, verdict, Phase.COMPILE)
                    self._run.workers.retire(worker)
            case messages.FirstRun(was_ended=True) if state is WorkerState.MEASURING and job is not None:
                self._route.on_ended_run(worker, job, reply)
            case messages.FirstRun() if state is WorkerState.MEASURING and job is not None:
                self._route.on_first_run(worker, job, reply)
            case messages.Measured() if state is WorkerState.MEASURING and job is not None:
                self._on_measured(worker, job, reply)
            case messages.ReferenceComputed(is_compared=False) if state is WorkerState.SIDE_TASK and not worker.reply:
                # Comparing shapes comes next.
                worker.answer(reply, self._run.clock() + min(_SHAPES_S, self._run.plan.compile_timeout_s))
            case messages.ReferenceComputed() | messages.Compared() if state is WorkerState.SIDE_TASK:
                worker.answer(reply)
                self._run.workers.retire(worker)
            case messages.Failed():
                self._on_failed(worker, reply)

    def _begin(self, worker: Worker) -> None:
        """Starts the clock of a worker whose deadline counts from its first phase."""
        if worker.job is not None:
            self._route.enter(worker.job, worker.phase.value)
        if worker.state in (WorkerState.COMPILING, WorkerState.SIDE_TASK) and worker.began_at is None:
            worker.begin(self._run.clock(), self._run.plan.compile_timeout_s)

    def _on_ready(self, worker: Worker, device: DeviceState, reply: messages.Ready) -> None:
        worker.transition(WorkerState.IDLE)
        device.failures = 0
        if self._run.numbers.configs_per_worker == 1:  # there will be many more
            self._run.workers.share_modules(reply.modules)

    def _on_lowered(self, worker: Worker, job: Job, reply: messages.Lowered) -> None:
        """Ends a worker whose program another config runs, or an earlier sweep measured."""
        job.lowered(reply.program, worker.deadline - self._run.clock())
        self._route.on_lowered(reply.outputs)
        jobs = self._run.jobs
        lowered = lowered_half(reply.program)
        first = jobs.first_with(lowered, job) if lowered else job
        is_known = jobs.note_program(job)
        if is_known or first is not job:
            self._route.enter(job, READY)
            (self._route.stopped if is_known else self._run.workers.retire)(worker)
        if first is not job:
            self._run.reference.join(job.index, first.index)
            jobs.join_same_program(job, first)
        elif is_known:
            jobs.hold(job)
        elif reply.products:
            self._run.gemm_cache.add(worker, job, reply.products)

    def _on_compiled(self, worker: Worker, job: Job, reply: messages.Compiled) -> None:
        job.compiled(reply.compile_s, reply.figures)
        self._run.jobs.compiled += 1
        self._note_compile_time(worker, job)
        self._route.enter(job, READY)
        self._run.workers.share_modules(reply.modules)
        if (verdict := too_large(job, self._run.plan)) is None:
            self._route.on_compiled(worker, job)
        else:
            self._run.jobs.finish(job, worker, verdict, Phase.COMPILE)
            self._route.free(worker)

    def _note_compile_time(self, worker: Worker, job: Job) -> None:
        if worker.is_compiling and worker.began_at is not None:
            self._run.jobs.compile_times.add(job, self._run.clock() - worker.began_at)

    def _on_measured(self, worker: Worker, job: Job, reply: messages.Measured) -> None:
        run, fastest = self._run, self._run.fastest
        if reply.is_unstable:
            job.judged(bits=UNSTABLE)
        if why := run.reference.why_refused(job.index, job.found.get("bits")):
            run.jobs.finish(job, worker, WorkerVerdict(Outcome.WRONG, why), Phase.MEASURE)
            self._route.free(worker)
            return
        if reply.cpu_ms:
            fastest.disturbance.add(reply.cpu_ms, min(reply.cpu_ms))
        if job.first_run is not None and not job.was_disturbed:
            fastest.disturbance.add_first_run(job.first_run[1], reply.ranking_ms)
        if job.unreliable_times is not None:
            reply = min(job.unreliable_times, reply, key=lambda measured: measured.ranking_ms)
        elif (
            not reply.is_slow
            and is_unreliable(reply.samples_ms, reply.cpu_ms)
            and self._route.measure_again(worker, job, reply)
        ):
            fastest.note_time(job.index, reply.ranking_ms)  # an upper bound of its time
            return
        verdict = WorkerVerdict(Outcome.OK, "")
        if reply.is_slow:
            # Without times: the trial has them, and one of another config may change in the final.
            verdict = WorkerVerdict(Outcome.SLOW, "it was stopped early, because another config is clearly faster")
        else:
            fastest.note_time(job.index, reply.ranking_ms)
        run.jobs.finish(
            job,
            worker,
            verdict,
            Phase.MEASURE,
            # A slow config may reach the final if other processes disturbed its runs.
            keeps=run.reference.is_default(job.index) or not (reply.is_slow and reply.clock == "device"),
            time_ms=statistics.median(reply.samples_ms),
            samples_ms=reply.samples_ms,
            own_ms=reply.ranking_ms,
            clock=reply.clock,
            observed=reply.observed,
        )
        self._route.free(worker)

    def _on_failed(self, worker: Worker, reply: messages.Failed) -> None:
        """Ends the job of a worker whose task raised, and the worker unless another config may follow safely."""
        run = self._run
        if reply.outcome == "unfit" and self._route.on_unfit(worker, reply):
            return
        worker.failed(reply.traceback, reply.place)
        job, verdict = worker.job, raised(reply)
        if job is not None:
            self._note_compile_time(worker, job)
            may_compile = worker.is_compiling and run.numbers.compiles_per_worker > 1
            is_reused = may_compile or worker.state is WorkerState.MEASURING
            # A worker goes on after a wrong output if only its bits are wrong.
            is_its_own = verdict.outcome is Outcome.WRONG or run.jobs.fails_by_itself(job, worker, verdict.outcome)
            if reply.goes_on and is_reused and is_its_own and not shortages.lacks_processes(verdict.message):
                run.jobs.finish(job, worker, verdict, worker.phase)
                self._route.free(worker)
                return
        run.workers.kill_with_verdict(worker, verdict)

    # How workers end

    def on_exit(self, worker: Worker, status: int | None) -> None:
        """Ends or repeats the job of a worker that has ended, or blames its device, and forgets the worker.

        Args:
            worker: the worker.
            status: the exit status of its process; see `Ended`.
        """
        worker.keep_peak()
        run, device, verdict = self._run, worker.device, worker.verdict or self._judge(worker, status)
        if verdict.outcome in _EXPLICABLE:
            text = f"{verdict.message}\n{run.workers.log(worker)}"
            lacked, message = shortages.lacking(text, has_device=device is not None)
            verdict = WorkerVerdict(Outcome.LOST, message, lacked) if lacked else verdict
        worker.judged(verdict)
        if verdict.lacked and run.devices and not run.worker_count.gives_up(worker, verdict):
            self._repeat_beside_fewer(worker)
        elif worker.job is not None:
            self._end_or_repeat(worker.job, worker, verdict)
        elif device in self._run.devices and worker in run.workers.standby(device) and not worker.used:
            self._blame_device(device, worker, verdict)
        self._run.workers.remove(worker)

    def _judge(self, worker: Worker, status: int | None) -> WorkerVerdict:
        """Returns the verdict on a worker. If it died for lack of memory that another worker took, kills the other.

        Args:
            worker: the worker.
            status: its exit code, or minus the signal that ended it; None if its template died with it.
        """
        if status is None:
            return WorkerVerdict(Outcome.LOST, "it could not be started, or the process that started it died")
        kills = machine.oom_kills()
        if status != -9 or kills <= self._oom_kills:
            if (job := worker.job) is not None and not worker.was_heard:
                job.forgive()
            may_go_on = job is None or job.may_be_repeated or worker.state is WorkerState.PARKED
            outcome = Outcome.LOST if was_killed(status) and may_go_on else Outcome.CRASHED
            text = f"the process {describe_status(status)} without a result"
            return WorkerVerdict(outcome, f"{text}: see the end of its output, or all of it with `quarantune run`")
        self._oom_kills = kills
        if (culprit := self._run.memory.larger_than(worker)) is not None:
            reason = "the kernel ran out of memory, killed another config's process"
            self._run.workers.kill_with_verdict(culprit, shortage(culprit, reason))
            return WorkerVerdict(Outcome.LOST, "the kernel killed the process because another one held too much memory")
        return WorkerVerdict(
            Outcome.OOM,
            "the kernel's out-of-memory killer took the process: free memory, or run fewer configs at a time "
            "(QUARANTUNE_NUM_WORKERS)",
        )

    def give_up(self, worker: Worker) -> None:
        """Forgets a worker that SIGKILL does not end, and withdraws its device."""
        assert worker.verdict is not None
        verdict, device = worker.verdict, worker.device
        _logger.error("worker %s does not die after SIGKILL", self._run.workers.pid(worker))
        if worker.job is not None:
            message = f"{verdict.message}; its process does not die"
            self._run.jobs.finish(worker.job, worker, WorkerVerdict(verdict.outcome, message), worker.phase)
        self._run.workers.remove(worker)
        if device is not None and device in self._run.devices:
            message = f"{device.device.name} is held by a process that does not die"
            self._withdraw(device, WorkerVerdict(Outcome.LOST, message))

    def stop(self, reason: str) -> None:
        """Ends all jobs except jobs that a device measures, or that wait to repeat disturbed runs."""
        run, verdict = self._run, WorkerVerdict(Outcome.NOT_RUN, reason)
        run.jobs.end_waiting(verdict, None)
        for worker in run.workers:
            is_early = worker.state in (WorkerState.COMPILING, WorkerState.PARKED)
            if worker.job is not None and is_early and worker.job.unreliable_times is None:
                run.workers.kill_with_verdict(worker, verdict)

    def _end_or_repeat(self, job: Job, worker: Worker, verdict: WorkerVerdict) -> None:
        """Ends a job, or repeats it if something else may have ended its worker."""
        run, outcome = self._run, verdict.outcome
        is_parked = worker.state is WorkerState.PARKED
        if not run.devices or verdict.lacked:
            run.jobs.finish(job, worker, verdict, worker.phase)
        elif outcome is Outcome.LOST and (is_parked or job.may_be_repeated):
            # A job that only waited cannot have killed its template.
            job.lost_worker(counts=not is_parked)
            run.jobs.again(job)
        elif self._may_fit_alone(job, worker, outcome):
            run.jobs.again_alone(job)
        elif outcome is Outcome.DEVICE_OOM and worker.device and self._make_room(worker.device):
            run.jobs.again(job)
        elif worker.used and outcome.is_failure and not run.jobs.fails_by_itself(job, worker, outcome):
            # An earlier config may have damaged this process, so a fresh process decides.
            job.wants_fresh()
            run.jobs.again(job)
        else:
            run.jobs.finish(job, worker, verdict, worker.phase)

    def _repeat_beside_fewer(self, worker: Worker) -> None:
        """Repeats the job, if any, of a worker that lacked a process or its device, with fewer workers."""
        run, job = self._run, worker.job
        for device in run.devices:
            device.is_cramped = True
        if run.worker_count.most == 1:
            for other in run.workers:
                if other.is_standby or other.state in (WorkerState.BETWEEN, WorkerState.AHEAD):
                    run.workers.retire(other)
        if job is not None:
            (run.jobs.again_alone if run.worker_count.most == 1 else run.jobs.again)(job)

    def _may_fit_alone(self, job: Job, worker: Worker, outcome: Outcome) -> bool:
        """Whether a config that ran out of memory may fit without the others."""
        memory = self._run.plan.memory
        if job.is_alone or outcome not in (Outcome.OOM, Outcome.DEVICE_OOM):
            return False
        if outcome is Outcome.DEVICE_OOM:
            return self._route.may_fit_alone(worker)
        if job.peak_bytes > memory.worker_bytes:
            return memory.grows_alone
        return any(other is not job for other in self._run.workers.jobs())

    def _make_room(self, device: DeviceState) -> bool:
        """Retires the other workers on a device whose memory did not suffice, and returns whether it had any."""
        beside = self._run.workers.in_state(WorkerState.SIDE_TASK, WorkerState.AHEAD)
        others = [*self._run.workers.standby(device), *(worker for worker in beside if worker.device is device)]
        for worker in others:
            self._run.workers.retire(worker)
        device.is_cramped = device.is_cramped or bool(others)
        return bool(others)

    def _blame_device(self, device: DeviceState, worker: Worker, verdict: WorkerVerdict) -> None:
        """Counts a standby worker that failed before it had a config, and withdraws its device the second time.

        Lost workers count less.
        """
        if verdict.outcome is Outcome.DEVICE_OOM and worker.is_ahead:
            device.is_cramped = True
            return
        name, outcome = device.device.name, verdict.outcome
        device.failures += 1
        _logger.warning("no measuring worker on %s: %s: %s", name, outcome.value, verdict.message)
        is_lost = outcome is Outcome.LOST and not verdict.lacked
        if device.failures >= _MAX_DEVICE_FAILURES * (_LOST_FACTOR if is_lost else 1):
            message = f"no worker could be made ready on {name}: {verdict.message}"
            self._withdraw(device, WorkerVerdict(outcome, message))

    def _withdraw(self, device: DeviceState, verdict: WorkerVerdict) -> None:
        """Removes a device from the run; all jobs end with the last device."""
        run = self._run
        device.lease.release()
        run.devices.remove(device)
        if run.devices:
            verdict = WorkerVerdict(Outcome.LOST, verdict.message)  # another device will do
        else:
            run.jobs.end_waiting(verdict, Phase.CHECK)
        for worker in run.workers:
            if worker.device is device or not run.devices:
                run.workers.kill_with_verdict(worker, verdict)
