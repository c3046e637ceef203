"""The steps of a config on its route through workers: which one compiles it, and which checks and measures it."""

from __future__ import annotations

import collections
import contextlib
import os
from typing import Any

from quarantune.sandbox import spool
from quarantune.sandbox.messages import Compile, Compiled, Expect, Failed, FirstRun, Measure, Measured, Prepare
from quarantune.scheduler.plan import MEMORY_SHARE
from quarantune.scheduler.run import Run
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerState, WorkerVerdict
from quarantune.values.codec import as_json
from quarantune.values.trial import READY, ArrayKind, Outcome, Phase, Route

_MOST_LOST = 10
"""Where more than one in so many configs ends the worker that compiles it, each gets one of its own."""
_STANDBY_WORKERS = 10
"""Standby workers of a device where each takes one config, which takes less time than making one ready: on an H100 with
16 cores, 48 matmuls took 14.3, 11.1 and 9.6 s with 4, 6 and 10."""


_comparisons: dict[tuple[object, ...], bytes] = {}
"""The programs that compare outputs, by the kind of device and the outputs, for the later sweeps of this process.

To compile them takes an H200's standby worker 0.7 s beside 14 compile workers, while all compiled configs wait.
"""
_MOST_COMPARISONS = 32


class RouteSteps:
    """Starts the workers of a route, and assigns devices to them.

    Attributes:
        waits_in_files: whether compiled programs wait in files, and no worker holds them, so that a batch is compiled
            as a whole.
    """

    def __init__(self, run: Run, *, saves: bool, pauses: bool) -> None:
        """Sets up a route.

        Args:
            run: the run.
            saves: whether a worker that compiles leaves the executable in a file.
            pauses: whether all configs run once before those that may still win go on.
        """
        self._run = run
        self._saves = saves
        self._pauses = pauses
        self._compiles_on_device = run.plan.route is not Route.APART
        self.waits_in_files = run.plan.measures_here or run.plan.route is Route.HANDED_OVER

    # What differs between routes

    def waiting(self) -> int:
        """Returns how many configs wait, compiled, for a device."""
        raise NotImplementedError

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Takes note that a worker has compiled its job, which is to be measured."""
        raise NotImplementedError

    def on_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Has a job wait again after an informative first run."""
        raise NotImplementedError

    def measure_on(self, device: DeviceState) -> None:
        """Gives the next config that waits a device, if there is one."""
        raise NotImplementedError

    @property
    def prepares_ahead(self) -> bool:
        """Whether standby workers are made ready while others compile: they run nothing on the device yet."""
        return False

    def prepare_on(self, device: DeviceState) -> None:
        """Starts the workers that a device will need, ahead of those that compile."""

    def on_lowered(self, outputs: tuple[ArrayKind, ...]) -> None:
        """Takes note of the outputs that configs have."""

    def measure_again(self, worker: Worker, job: Job, reply: Measured) -> bool:
        """Has a job whose runs were disturbed measured once more; returns whether that is possible."""
        return False

    def on_unfit(self, worker: Worker, reply: Failed) -> bool:
        """Leaves a program that must be compiled on its device to another route.

        Returns:
            Whether it was left; if not, the worker has failed.

        Raises:
            ValueError: no program can be unfit on this route.
        """
        raise ValueError("no program is unfit here")

    def close(self) -> None:
        """Ends the run of this route."""

    # What they share: compiling

    def may_begin(self, job: Job) -> bool:
        """Whether there is a worker for a job, or one may be started."""
        device = self._run.least_used_device() if self._compiles_on_device else None
        return self._run.may_start_on(device) or self.reusable(job) is not None

    def start_compiling(self, job: Job) -> None:
        """Has a job compiled by a worker that is done with others, or by a new one."""
        run, plan = self._run, self._run.plan
        if job.is_alone and plan.may_exceed_alone:
            job.limit_bytes = max(plan.memory_limit_bytes, int(MEMORY_SHARE * run.memory.available_memory()))
        job.close_executable()
        job.first_run, job.held_s, job.was_disturbed = None, 0.0, False
        if self._saves and not plan.is_check:
            job.executable_fd = spool.create("executable")
        worker = self.reusable(job)
        task = Compile(
            trial=job.index,
            config=as_json(job.config),
            target=plan.target,
            last=self._saves and (worker.used if worker else 0) + 1 >= plan.compiles_per_worker,
            must_save=plan.route in (Route.APART, Route.HANDED_OVER) and not plan.is_check,
            as_data=self._saves and (plan.compile_only or plan.measures_here),
            is_check=plan.is_check,
            shows_program=plan.proof.wants(job.index),
            known=() if job.runs else plan.recall.known,
        )
        fds = [job.executable_fd] if job.executable_fd >= 0 else []
        if worker is None:
            device = run.least_used_device() if self._compiles_on_device else None
            run.workers.start(task, WorkerState.COMPILING, job=job, device=device, fds=fds)
        else:
            worker.take(job, run.workers.startup_deadline())
            run.workers.send_next(worker, task, fds)  # it reads the task as soon as it is ready

    def reusable(self, job: Job) -> Worker | None:
        """Returns a worker that is done with other configs and may take a job; None where that needs a fresh one."""
        if job.was_lost or job.needs_fresh or job.is_alone:
            return None
        return next(iter(self._run.workers.in_state(WorkerState.BETWEEN)), None)

    def retire_unneeded(self) -> None:
        """Ends the workers that are done with a config where there is no other that they may take."""
        run, pending = self._run, self._run.jobs.pending
        is_next = self.reusable(pending[0]) is not None if pending else self._compiles_on_device and run.jobs.may_come
        if is_next and run.scarcity.most > 1:
            return
        for worker in run.workers.in_state(WorkerState.BETWEEN):
            run.workers.retire(worker)

    def stopped(self, worker: Worker) -> None:
        """Takes its job from a worker that has only lowered it, so that it may compile another."""
        worker.release()
        worker.transition(WorkerState.BETWEEN)

    def free(self, worker: Worker) -> None:
        """Takes its job and its device from a worker, which may compile another config or ends."""
        run = self._run
        worker.release()
        # Where configs end the workers that compile them, those must be repeated that were not the first.
        few_are_lost = _MOST_LOST * run.jobs.lost_compilers <= run.jobs.compiled
        if worker.used < run.plan.compiles_per_worker and few_are_lost:
            worker.transition(WorkerState.BETWEEN)
        else:
            run.workers.retire(worker)

    # What they share: measuring

    def on_compiled_again(self, worker: Worker, job: Job, reply: Compiled) -> None:
        """Takes note that a job was compiled where it is measured, because its program could not be passed on."""
        if self._run.plan.measures_here:  # it may take as long as in a worker
            job.compile_s, job.route = reply.compile_s, Route.IN_PROCESS
            worker.deadline += job.compile_s

    def on_ended_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Ends a job whose first run was ended, because it took too long."""
        fastest_ms = self._run.race.fastest_ms or reply.run_ms
        message = f"its first run was stopped after {reply.run_ms:.4g} ms, where another config takes {fastest_ms:.4g}"
        self._end_as_slow(worker, job, message, reply.run_ms, reply.cpu_ms, Phase.CHECK)
        self._run.workers.retire(worker)  # the run goes on in it

    def _assign(self, device: DeviceState, worker: Worker, job: Job) -> None:
        """Gives a worker a device to measure its job on; from now on its time counts."""
        run = self._run
        worker.transition(WorkerState.MEASURING)
        device.measuring = worker
        worker.phase = Phase.CHECK
        worker.assigned_at = run.clock()
        worker.deadline = worker.assigned_at + run.plan.timeout_s - job.held_s
        task = Measure(
            trial=job.index,
            config=as_json(job.config),
            load=job.is_saved,
            checked=job.first_run is not None,
            pause=self._pauses,
            stop_ms=self._stop_ms(job),
            # The fastest of those that are wrong must not rule out the right ones.
            best_median_ms=None if run.reference.is_open else run.race.best_median_ms,
            noise=tuple(run.race.noise.runs),
            references=len(run.reference.fds),
            standard=run.reference.standard,
            keeps=run.reference.keeps,
            # One that pauses may have to wait after its first run, so that it is ended later.
            last=not self._pauses and worker.used + 1 >= run.plan.configs_per_worker,
        )
        fds = [job.executable_fd, *run.reference.fds]
        worker.close_output()
        worker.offered = task.references
        if task.keeps:
            worker.output_fd = spool.create("output")
            fds.append(worker.output_fd)
        run.workers.send_next(worker, task, fds)

    def _stop_ms(self, job: Job) -> float | None:
        """Returns how long a job's first run may take; None where its output or its time is needed in any case."""
        run = self._run
        is_needed = run.reference.is_open or run.reference.is_default(job.index)
        may_stop = self._pauses and not job.is_saved and job.first_run is None
        return run.race.stop_ms if may_stop and not is_needed else None

    def _note_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Records the first run of a worker's job, which waits for the device again."""
        job.first_run = (reply.run_ms, reply.cpu_ms)
        job.was_disturbed = job.was_disturbed or reply.is_disturbed
        self._run.race.note_first_run(job.index, *job.first_run)
        self._take_device(worker, job)

    def _take_device(self, worker: Worker, job: Job) -> None:
        job.held_s += self._run.clock() - worker.assigned_at
        self._run.on_phase(job.index, READY)
        worker.return_device()

    def _rule_out(self, worker: Worker, job: Job) -> bool:
        """Ends the job of a worker if its first run was too slow; returns whether it was."""
        run = self._run
        if job.first_run is None or job.was_disturbed or run.reference.is_open:
            return False
        run_ms, cpu_ms = job.first_run
        if (fastest_ms := run.race.hopeless_beside_ms(run_ms, cpu_ms)) is None:
            return False
        message = f"its first run took {run_ms:.4g} ms, where another config takes {fastest_ms:.4g}"
        self._end_as_slow(worker, job, message, run_ms, cpu_ms, Phase.MEASURE)
        return True

    def _end_as_slow(self, worker: Worker, job: Job, message: str, run_ms: float, cpu_ms: float, phase: Phase) -> None:
        times: Any = {"time_ms": run_ms, "samples_ms": (run_ms,), "own_ms": cpu_ms, "clock": "wall"}
        self._run.jobs.finish(job, worker, WorkerVerdict(Outcome.SLOW, message), phase, **times)
        worker.job = None


class CombinedRoute(RouteSteps):
    """One worker compiles a config, parks, and measures it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, saves=run.plan.compile_only, pauses=True)

    def waiting(self) -> int:
        """Returns how many configs wait, compiled, for a device."""
        return len(self._run.workers.in_state(WorkerState.PARKED))

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Parks a worker that has compiled its job."""
        worker.transition(WorkerState.PARKED)

    def on_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Parks a worker again after an informative first run of its job."""
        self._note_first_run(worker, job, reply)
        worker.transition(WorkerState.PARKED)

    def measure_again(self, worker: Worker, job: Job, reply: Measured) -> bool:
        """Parks a worker whose runs were disturbed, to measure its job once more after those that wait."""
        job.unreliable_times, job.was_disturbed = reply, True
        job.first_run = (max(reply.samples_ms), job.first_run[1] if job.first_run else 0.0)
        self._take_device(worker, job)
        worker.transition(WorkerState.PARKED)
        return True

    def measure_on(self, device: DeviceState) -> None:
        """Has the next parked config run: all run once, then those that may still win go on, the fastest first."""
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
                    job.close_executable()  # of an earlier try
                    job.executable_fd = spool.create("executable")
                self._assign(device, worker, job)
            return
        device.lease.release()


class SplitRoute(RouteSteps):
    """One worker compiles a config, and a standby worker, which holds a device, measures it.

    Workers compile without their device, or with it, and then while none measures. XLA tries kernels for a product of
    matrices on the device while it compiles: on an H200 with 16 cores, 24 attention programs took 11.6 s one after
    another in one process, 12.3 and 25.9 s in 4 and 16 threads of it, and 5.8, 6.0 and 6.8 s in 4, 8 and 14 processes.
    The worker that measures is idle meanwhile. To have it load programs then gained nothing that could be seen:
    0.16 s of 9 s, with a standard error of 0.22 s, in 11 pairs of sweeps of these programs on an H100.

    Where the caller's own process measures, it stands for the standby workers, of which each takes one config. All
    configs run once, then those that may still win go on, the fastest first.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run, saves=True, pauses=run.plan.measures_here)
        self._outputs: tuple[ArrayKind, ...] = ()
        self._comparisons_fd = -1

    def waiting(self) -> int:
        """Returns how many configs wait, compiled, for a measuring worker."""
        return len(self._run.jobs.ready)

    @property
    def prepares_ahead(self) -> bool:
        """Whether standby workers are made ready while others compile."""
        plan = self._run.plan
        return plan.route is Route.HANDED_OVER or not (plan.exclusive or plan.compile_only)

    def on_lowered(self, outputs: tuple[ArrayKind, ...]) -> None:
        """Tells the standby workers, while they take their device, which outputs they will compare."""
        run = self._run
        compares = run.reference.compares or run.reference.is_coming
        is_useful = run.plan.target is not None or self.prepares_ahead
        # The caller's own process has compiled the comparison since the first config.
        if outputs and not self._outputs and compares and is_useful and not run.plan.measures_here:
            self._outputs = outputs
            for device in run.devices:
                for worker in run.workers.standby(device):
                    self._expect_outputs(worker)

    def _expect_outputs(self, worker: Worker, *, has_programs: bool = False) -> None:
        """Tells a standby worker of the outputs; the first leaves its programs for other workers and later sweeps."""
        if not self._outputs:
            return
        is_first = self._comparisons_fd < 0
        if is_first:
            self._comparisons_fd = spool.create("comparisons")
            spool.write(self._comparisons_fd, _comparisons.get(self._kind_of_comparisons(), b""))
        fds = [self._comparisons_fd] if is_first or (self._has_comparisons() and not has_programs) else []
        self._run.workers.send(worker, Expect(outputs=self._outputs), fds)

    def _has_comparisons(self) -> bool:
        return self._comparisons_fd >= 0 and os.fstat(self._comparisons_fd).st_size > 0

    def _kind_of_comparisons(self) -> tuple[object, ...]:
        return self._run.plan.devices[0].kind, *self._outputs

    def close(self) -> None:
        """Keeps what a worker has left for later sweeps."""
        if self._comparisons_fd >= 0:
            with contextlib.suppress(OSError, ValueError):
                if len(_comparisons) < _MOST_COMPARISONS and (programs := spool.read(self._comparisons_fd)):
                    _comparisons.setdefault(self._kind_of_comparisons(), programs)
            os.close(self._comparisons_fd)
            self._comparisons_fd = -1

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Takes the executable of a job from a worker, which ends by itself unless the config keeps it from ending."""
        job.protect_executable()
        self.free(worker)
        if reason := self._run.jobs.unloadable:
            self._run.jobs.leave_unfit(job, reason)
        else:
            self._run.jobs.ready.append(job)

    def on_unfit(self, worker: Worker, reply: Failed) -> bool:
        """Leaves a program that must be compiled on its device to another route, unless the worker was used before."""
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
        """Takes its job and its device from a worker; one that has measured may measure another config."""
        run, device = self._run, worker.device
        if worker.state is not WorkerState.MEASURING or device is None:
            super().free(worker)
            return
        worker.release()
        if worker.used >= run.plan.configs_per_worker or run.scarcity.most == 1:
            run.workers.retire(worker)
        else:
            worker.transition(WorkerState.IDLE)

    def on_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Has a job wait again after an informative first run."""
        if self._pauses:
            self._note_first_run(worker, job, reply)
            self._run.jobs.ready.append(job)
            self.free(worker)

    def prepare_on(self, device: DeviceState) -> None:
        """Starts the standby workers that will be needed, since the driver takes long to make a context."""
        run = self._run
        may_prepare = self.prepares_ahead and run.jobs.will_measure and not device.is_cramped
        if not may_prepare or not run.may_start_on(device):
            return
        each = run.plan.configs_per_worker
        most = _STANDBY_WORKERS if each == 1 and not device.device.has_one_owner else 1
        share = -(-self._unmeasured() // len(run.devices))
        waiting = share + self._needs_one_for_final(device)
        waiting -= sum(each - worker.used for worker in run.workers.standby(device))
        if device.measuring is not None:
            waiting -= each - device.measuring.used - 1
        while waiting > 0 and len(run.workers.standby(device)) < most:
            self._start_standby(device)
            waiting -= each

    def _needs_one_for_final(self, device: DeviceState) -> bool:
        """Whether a worker is made ready for the final, too: on the first device, once a compile slot stays idle."""
        run = self._run
        is_idle = not (run.jobs.pending or run.jobs.may_come) and run.workers.compiling() < run.plan.slots
        return run.plan.has_final and is_idle and device is run.devices[0] and len(run.jobs.begun) > 1

    def measure_on(self, device: DeviceState) -> None:
        """Gives the next ready job to a standby worker; where memory is short, those that have compiled end before."""
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
        # Where only one worker can run, a compile worker has to end before.
        is_tight = run.scarcity.most == 1
        is_needed = ready and not run.scarcity.is_full if is_tight else self._unmeasured()
        if is_needed and not run.workers.standby(device) and run.may_start_on(device):
            self._start_standby(device)
        # One that was used before goes first, so that a fresh one stays at hand.
        idle = [worker for worker in run.workers.standby(device) if worker.state is WorkerState.IDLE]
        chosen = max(idle, key=lambda worker: worker.used, default=None)
        if ready and chosen is not None and device.lease.acquire(run.clock()):
            self._give_next(device, chosen)

    def _give_next(self, device: DeviceState, worker: Worker) -> None:
        """Gives a worker the next config; where all run once before others go on, suspects are the last to do so."""
        run = self._run
        if self._pauses and not run.reference.is_awaited:
            begun = {job.index: place for place, job in enumerate(run.jobs.begun)}
            order = sorted(run.jobs.ready, key=lambda job: (job.first_run is not None, job.first_ms, begun[job.index]))
            run.jobs.ready = collections.deque(order)
        worker.job = job = run.jobs.ready.popleft()
        if run.plan.measures_here:
            job.route = job.route or Route.COMPILED_APART
        if not self._rule_out(worker, job):
            self._assign(device, worker, job)

    def _unmeasured(self) -> int:
        """Returns how many jobs have yet to be given to a measuring worker."""
        run = self._run
        to_come = run.plan.slots if run.jobs.may_grow else 0
        return len(run.jobs.ready) + len(run.jobs.pending) + run.workers.compiling() + to_come

    def _start_standby(self, device: DeviceState) -> None:
        run = self._run
        has_programs = self._has_comparisons()
        fds = [*([self._comparisons_fd] if has_programs else []), *run.reference.fds]
        task = Prepare(has_programs=has_programs)
        worker = run.workers.start(task, WorkerState.PREPARING, device=device, fds=fds)
        worker.is_ahead = run.workers.on(device) > 1
        self._expect_outputs(worker, has_programs=has_programs)


def steps_of(run: Run) -> RouteSteps:
    """Returns the steps of the route of a run."""
    is_split = run.plan.measures_here or run.plan.route in (Route.APART, Route.HANDED_OVER)
    return SplitRoute(run) if is_split else CombinedRoute(run)
