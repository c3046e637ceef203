"""The jobs of a run: which wait, which compile, which share a program, and how each ends."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from quarantune.host.frames import folded
from quarantune.measure.objective import scored
from quarantune.scheduler.compile_times import CompileTimes
from quarantune.scheduler.fastest import Fastest
from quarantune.scheduler.plan import ConfigSource, Finish, Leftovers, Plan, Unconfirmed
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.verdicts import with_diagnostic
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerVerdict
from quarantune.values.configs import Config, format_config
from quarantune.values.trial import SAME_PROGRAM, UNTUNED, Outcome, Phase, Route, Trial

_LOG_TAIL_CHARS = 2000


class Jobs:
    """The jobs of one run.

    Attributes:
        pending: jobs that have yet to compile.
        ready: compiled jobs that wait for another worker to measure them.
        unfinished: the number of jobs without an outcome.
        leftovers: configs that another route must settle.
        compile_times: the compile times so far.
        begun: all jobs so far.
        compiled: the number of jobs that have compiled.
        lost_compilers: the number of jobs that ended the worker that compiled them.
        has_loaded: whether a worker has loaded a program that another compiled.
        will_measure: whether any config needs measuring; False while every program so far has an earlier trial.
        unloadable: why workers cannot load programs that others compiled; empty while they may.
    """

    def __init__(
        self,
        plan: Plan,
        reference: Reference,
        devices: Sequence[DeviceState],
        on_trial: Finish,
        log_of: Callable[[Worker], str],
        source: ConfigSource,
        fastest: Fastest,
        label: Route,
        *,
        confirms: bool,
    ) -> None:
        self.pending: collections.deque[Job] = collections.deque()
        self.ready: collections.deque[Job] = collections.deque()
        self.unfinished = 0
        self.leftovers = Leftovers()
        self.compile_times = CompileTimes()
        self.begun: list[Job] = []
        self.compiled = 0
        self.lost_compilers = 0
        self.has_loaded = False
        self.will_measure = not plan.recall.known
        self.unloadable = ""
        self._source = source
        self._first_with: dict[str, Job] = {}
        self._held: list[Job] = []
        self._defaults_left: set[int] = set()
        self._is_measuring = False
        self._places: set[str] = set()
        self._source_waits = False
        self._plan = plan
        self._reference = reference
        self._devices = devices
        self._on_trial = on_trial
        self._log_of = log_of
        self._fastest = fastest
        self._label = label
        self._confirms = confirms

    def begin(self, configs: Mapping[int, Config]) -> None:
        """Makes a job of each config; the function's defaults come first if others wait for them."""
        jobs = [Job(index, config) for index, config in configs.items()]
        reference = self._reference
        jobs.sort(key=lambda job: not (reference.is_awaited and reference.is_default(job.index)))
        self._add(jobs)

    @property
    def may_grow(self) -> bool:
        """Whether the source may have further configs now."""
        return self.may_come and not self._source_waits

    @property
    def may_come(self) -> bool:
        """Whether the source may have further configs, now or later."""
        return not (self._source.is_closed or self.leftovers.unfit) and bool(self._devices)

    @property
    def ended(self) -> int:
        """The number of jobs with an outcome."""
        return len(self.begun) - self.unfinished

    def refill(self, room: int) -> bool:
        """Takes configs from the source, and returns whether it gave any.

        Args:
            room: how many more configs may begin to compile.
        """
        taken = self._source.take(room)
        self._source_waits = len(taken) < room
        self._add([Job(index, config) for index, config in taken.items()])
        return bool(taken)

    def put_longest_first(self, compiling_s: Mapping[Job, float]) -> None:
        """Orders the pending jobs by their predicted compile times, once some compile times are known.

        The function's defaults, configs that hung or crashed before, and repeated configs keep their places.

        Args:
            compiling_s: the seconds that other jobs have compiled so far.
        """
        movable = [job for job in self.pending if self._may_move(job)]
        if len(movable) > 1 and self.compile_times.is_news:
            ordered = iter(self.compile_times.longest_first(movable, compiling_s))
            self.pending = collections.deque(next(ordered) if self._may_move(job) else job for job in self.pending)

    def _may_move(self, job: Job) -> bool:
        is_repeated = job.was_lost or job.is_alone or job.needs_fresh
        return not (is_repeated or job.index in self._plan.troubled or self._reference.is_default(job.index))

    def fails_by_itself(self, job: Job, worker: Worker, outcome: Outcome) -> bool:
        """Whether earlier configs of the same worker cannot have caused an error.

        They cannot if the worker is new, or if a config that had a worker to itself raised an exception at that place.
        """
        if outcome is not Outcome.ERROR or worker.is_compiling is not (worker.phase is Phase.COMPILE):
            return False
        return not worker.used or (bool(job.raised_at) and job.raised_at in self._places)

    def default_is_pending(self) -> bool:
        """Whether the defaults, whose output all others wait for, have yet to compile, perhaps again."""
        reference = self._reference
        return reference.is_awaited and any(reference.is_default(job.index) for job in self.pending)

    def may_be_compared(self, job: Job) -> bool:
        """Whether a config need not wait for the defaults."""
        return not self._reference.is_awaited or self._reference.is_default(job.index)

    def again(self, job: Job) -> None:
        """Repeats a job from the last step that it finished."""
        if job.is_saved:
            self.ready.appendleft(job)
        else:
            self.release_same_program(job)  # it may end in another way, or lower to another job's program
            self.pending.appendleft(job)

    def again_alone(self, job: Job) -> None:
        """Repeats a job when no other runs."""
        job.wants_memory()
        self.release_same_program(job)
        if self._reference.is_awaited and self.may_be_compared(job):
            self.pending.appendleft(job)
        else:
            self.pending.append(job)

    def first_with(self, program: str, job: Job) -> Job:
        """Returns the job that runs a program: an earlier job, or `job`."""
        if job.runs:
            self._first_with[program] = job
        return self._first_with.setdefault(program, job)

    def join_same_program(self, job: Job, first: Job) -> None:
        """Gives a job the outcome of another job, now or when that ends."""
        job.close_executable()
        if first.end is not None:
            self._finish_as(job, first)
        else:
            first.same_program.append(job)

    def note_program(self, job: Job) -> bool:
        """Records a lowered job, and returns whether an earlier sweep has measured its program.

        If so, its worker has stopped.
        """
        recall, is_default = self._plan.recall, self._reference.is_default(job.index)
        if is_default and recall.reference is None:
            recall.reference = job.program
        is_known = recall.knows(job.program) and not job.runs
        self.will_measure |= not is_known
        self._is_measuring |= not (is_known or is_default)
        return is_known

    def hold(self, job: Job) -> None:
        """Keeps a job without a worker, until `settle_held` knows whether its earlier trial counts."""
        job.close_executable()
        self._held.append(job)

    def settle_held(self) -> None:
        """Ends the held jobs whose earlier trials count, and runs the others.

        A trial that was stopped early counts if this sweep has a faster config, too; its job waits until that is known.
        The defaults run if another config needs measuring, or may yet need it, because it needs their output.
        """
        recall = self._plan.recall
        defaults = [job for job in self._held if self._reference.is_default(job.index)]
        if recall.reference is not None or not self._defaults_left:
            found = [(job, recall.trial(job.program)) for job in self._held if job not in defaults]
            for job, trial in found:
                if trial is None or not trial.is_bound:
                    self._end_held(job, trial)
            if self.unfinished == sum(1 + len(job.same_program) for job in self._held):
                best_ms = self._best_ms(defaults)
                for job, trial in found:
                    if trial is not None and trial.is_bound:
                        self._end_held(job, trial if (trial.own_ms or 0) > best_ms else None)
        runs = self._is_measuring or self.may_come
        if runs or self.unfinished == sum(1 + len(job.same_program) for job in defaults):
            for job in defaults:
                self._end_held(job, None if runs else recall.trial(job.program))

    def _best_ms(self, held: Sequence[Job]) -> float:
        """Returns the time of the fastest config so far, or of a held one that may win."""
        trials = [self._plan.recall.trial(job.program) for job in held if job.index != UNTUNED]
        times = [trial.own_ms for trial in trials if trial is not None and trial.is_usable]
        return min((ms for ms in (self._fastest.best_median_ms, *times) if ms is not None), default=math.inf)

    def _end_held(self, job: Job, trial: Trial | None) -> None:
        self._held.remove(job)
        if trial is None:
            job.must_run()
            self.will_measure = True
            self._is_measuring |= not self._reference.is_default(job.index)
            self.again(job)
            return
        trial = scored(dataclasses.replace(trial, config=job.config, score=None), self._plan.objective)
        if trial.is_usable and trial.own_ms is not None:
            self._fastest.note_time(job.index, trial.own_ms)
        job.ended(trial, "")
        self._settle_as(job, trial, "")
        for other in job.same_program:
            self._finish_as(other, job)

    def finish(
        self,
        job: Job,
        worker: Worker | None,
        verdict: WorkerVerdict,
        phase: Phase | None,
        keeps: bool = False,
        observed: Mapping[str, float] | None = None,
        **times: Any,
    ) -> None:
        """Ends a job, and all jobs that wait for its outcome.

        Args:
            job: the job.
            worker: its worker; None if it has none.
            verdict: its outcome.
            phase: the phase that it ended in.
            keeps: whether to keep its executable for the final, in case the job is among the best.
            observed: the figures of observers.
            **times: fields of its trial.
        """
        log = ""
        if worker is not None:
            worker.keep_peak()
            log = self._log_of(worker)
        trial = Trial(
            config=job.config,
            outcome=verdict.outcome,
            phase=phase,
            message=with_diagnostic(verdict.message, log),
            compile_s=job.compile_s,
            figures=job.figures,
            program=job.program,
            peak_memory_bytes=job.peak_bytes or None,
            log_tail=_informative_part(log),
            route=job.route or self._label,
            device="" if worker is None or worker.device is None else worker.device.device.name,
            **job.found,
            **times,
        )
        trial = scored(trial.with_observed(observed or {}), self._plan.objective)
        outcome = trial.outcome
        if keeps and trial.merit is not None:
            is_default = self._reference.is_default(job.index)
            self._fastest.keep_executable(job, -math.inf if is_default else trial.merit)
        job.close_executable()
        if outcome is Outcome.ERROR:
            self._places.add(job.raised_at)
        # A job with figures did compile, and failed a limit afterwards.
        lost_compiler = phase is Phase.COMPILE and outcome.is_failure and outcome is not Outcome.ERROR
        self.lost_compilers += lost_compiler and job.figures is None
        self._settle_as(job, trial, log)
        was_slow_to_lower = job.slack_s < self._plan.compile_timeout_s / 2
        if (outcome is Outcome.LOST and self._devices) or (
            (outcome, phase) == (Outcome.TIMEOUT, Phase.COMPILE) and was_slow_to_lower
        ):
            self.release_same_program(job)  # the machinery or its own tracing failed, not its program
            return
        job.ended(trial, log)
        for other in job.same_program:
            self._finish_as(other, job)

    def leave_unfit(self, job: Job, reason: str) -> None:
        """Leaves a job to another route, with the jobs not yet begun: their programs are of the same kind."""
        ready = list(self.ready) if self.unloadable else []
        left = [job, *ready, *self._held]
        unfits = [*left, *(same for each in left for same in each.same_program), *self.pending]
        self._forget_programs(unfits)
        self.leftovers.why_unfit = reason
        for unfit in unfits:
            self.leftovers.unfit[unfit.index] = unfit.config
            self._reference.ended(unfit.index)
            self._defaults_left.discard(unfit.index)
            self.unfinished -= 1
            unfit.close_executable()
        self.pending.clear()
        self._held.clear()
        if ready:
            self.ready.clear()

    def end_waiting(self, verdict: WorkerVerdict, phase: Phase | None) -> None:
        """Ends all jobs that no worker has."""
        waiting = [*self.ready, *self.pending, *self._held]
        self.ready.clear()
        self.pending.clear()
        self._held.clear()
        for job in waiting:
            self.finish(job, None, verdict, phase)

    def release_same_program(self, job: Job) -> None:
        """Queues the jobs that wait for a job's outcome, so that each runs."""
        self._forget_programs([job])
        self.pending.extend(job.release_same_program())

    def _forget_programs(self, jobs: Collection[Job]) -> None:
        """Forgets which programs belong to jobs that will have no result."""
        self._first_with = {program: first for program, first in self._first_with.items() if first not in jobs}

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs if self._plan.runs_all else ():
            job.must_run()
        self.begun.extend(jobs)
        self.pending.extend(jobs)
        self._defaults_left |= {job.index for job in jobs if self._reference.is_default(job.index)}
        self.unfinished += len(jobs)

    def _finish_as(self, job: Job, first: Job) -> None:
        assert first.end is not None
        trial, log = first.end
        self._fastest.ran_as[job.index] = first.index
        same = f"{SAME_PROGRAM}{'the defaults' if first.index == UNTUNED else format_config(first.config)}"
        message = f"{same}: {trial.message}" if trial.message else same
        trial = scored(
            dataclasses.replace(trial, config=job.config, message=message, program=job.program), self._plan.objective
        )
        self._reference.join(job.index, first.index)
        job.failed_like(first)
        self._settle_as(job, trial, log)

    def _settle_as(self, job: Job, trial: Trial, log: str) -> None:
        self.unfinished -= 1
        self._reference.ended(job.index)
        self._defaults_left.discard(job.index)
        self._source_waits = False
        self._source.ended(job.index, trial)
        is_error = trial.outcome is Outcome.ERROR and trial.phase is Phase.COMPILE
        if is_error and self._confirms:
            self.leftovers.add_unconfirmed(job.index, Unconfirmed(trial, log, job.raised_at))
        else:
            if is_error:
                self.leftovers.raised_at[job.index] = job.raised_at
            self._on_trial(job.index, trial, log)


def _informative_part(log: str) -> str:
    """Returns a log's end, or the text around the start of faulthandler's report, which has the latest call first."""
    log = folded(log)
    report = max(log.rfind("Fatal Python error"), log.rfind("(most recent call first):"))
    start = len(log) - _LOG_TAIL_CHARS if report < 0 else report - _LOG_TAIL_CHARS // 4
    return log[max(0, start) :][:_LOG_TAIL_CHARS]
