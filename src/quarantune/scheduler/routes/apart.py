"""One worker compiles a config without its device, and a standby worker, which holds the device, measures it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Self

from quarantune.host import machine
from quarantune.sandbox import spool
from quarantune.sandbox.messages import Compile, Expect, Failed, Prepare
from quarantune.scheduler.bursts import Admission, Bursts, Stream
from quarantune.scheduler.plan import Numbers
from quarantune.scheduler.routes.base import Conditions, TrialRoute
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerState
from quarantune.values.trial import ArrayKind, CompileTarget, Phase, Route

_STANDBY_WORKERS = 10
"""Standby workers of a device where each takes one config, which takes less time than making one ready: on an H100 with
16 cores, 48 matmuls took 14.3, 11.1 and 9.6 s with 4, 6 and 10."""
_COMPILES_PER_WORKER = 32
"""How many configs one compile worker takes for an accelerator. The first takes 0.3 s more than others: on an H200, 648
configs, 59% of them bad, take a second less than with 8 for each worker, which grows by less than 1 MB per config."""
_THREADS = "NPROC"
"""Read by XLA: it starts threads for so many cores."""


_comparisons: dict[tuple[object, ...], bytes] = {}
"""The programs that compare outputs, by the kind of device and the outputs, for the later sweeps of this process.

To compile them takes an H200's standby worker 0.7 s beside 14 compile workers, while all compiled configs wait.
"""
_MOST_COMPARISONS = 32


class Split(TrialRoute):
    """One worker compiles a config and leaves it in a file, and another process measures it.

    Attributes:
        target: the device that compile workers compile for; None for the machine's own.
        as_data: whether the executable is for this process, which runs no code of a worker to load it.
    """

    _pauses = False
    as_data = False

    def __init__(self, numbers: Numbers, *, target: CompileTarget | None = None, confirms: bool = False) -> None:
        super().__init__(numbers)
        self.target = target
        self.confirms = confirms and target is not None
        self._outputs: tuple[ArrayKind, ...] = ()
        self._comparisons_fd = -1

    def environ(self) -> dict[str, str]:
        """Returns the environment of workers that compile for a device they do not have: threads for their share.

        Where the cores are the device, fewer threads would make another program.
        """
        return threads_for(self.numbers.slots) if self.target is not None else {}

    def _task(self, job: Job, *, last: bool) -> Compile:
        job.executable_fd = spool.create("executable")
        task = super()._task(job, last=last)
        return dataclasses.replace(task, target=self.target, last=last, as_data=self.as_data)

    def waiting(self) -> int:
        """Returns how many configs wait, compiled, for a measuring worker."""
        return len(self._run.jobs.ready)

    def on_lowered(self, outputs: tuple[ArrayKind, ...]) -> None:
        """Tells the standby workers, while they take their device, which outputs they will compare."""
        run = self._run
        compares = run.reference.compares or run.reference.is_coming
        if outputs and not self._outputs and compares and self.prepares_ahead:
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
        if worker.used >= self.numbers.configs_per_worker or run.scarcity.most == 1:
            run.workers.retire(worker)
        else:
            worker.transition(WorkerState.IDLE)

    def prepare_on(self, device: DeviceState) -> None:
        """Starts the standby workers that will be needed, since the driver takes long to make a context."""
        run, each = self._run, self.numbers.configs_per_worker
        may_prepare = self.prepares_ahead and run.jobs.will_measure and not device.is_cramped
        if not may_prepare or not run.may_start_on(device):
            return
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
        is_idle = not (run.jobs.pending or run.jobs.may_come) and run.workers.compiling() < self.numbers.slots
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
        """Gives a worker the next config."""
        worker.job = job = self._run.jobs.ready.popleft()
        if not self._rule_out(worker, job):
            self._assign(device, worker, job)

    def _unmeasured(self) -> int:
        """Returns how many jobs have yet to be given to a measuring worker."""
        run = self._run
        to_come = self.numbers.slots if run.jobs.may_grow else 0
        return len(run.jobs.ready) + len(run.jobs.pending) + run.workers.compiling() + to_come

    def _start_standby(self, device: DeviceState) -> None:
        run = self._run
        has_programs = self._has_comparisons()
        fds = [*([self._comparisons_fd] if has_programs else []), *run.reference.fds]
        task = Prepare(has_programs=has_programs)
        worker = run.workers.start(task, WorkerState.PREPARING, device=device, fds=fds)
        worker.is_ahead = run.workers.on(device) > 1
        self._expect_outputs(worker, has_programs=has_programs)


class Apart(Split):
    """Workers compile without their device, and standby workers measure.

    Where the device is the machine, compiling and measuring alternate.
    """

    label = Route.APART
    compiles_with_device = False

    def __init__(
        self,
        numbers: Numbers,
        *,
        target: CompileTarget | None = None,
        confirms: bool = False,
        alternates: bool = False,
    ) -> None:
        super().__init__(numbers, target=target, confirms=confirms)
        self._alternates = alternates
        self.prepares_ahead = not alternates

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions; `is_closed` says that no search adds configs."""
        slots, alternates = given.slots, given.target is None
        parked = given.parked(slots, is_closed=is_closed)
        return cls(
            Numbers(
                slots=slots,
                parked=parked,
                workers=given.shares(slots, parked) if alternates else slots + given.devices,
                configs_per_worker=given.configs_per_worker,
                compiles_per_worker=compiles_apart(given),
            ),
            target=given.target,
            confirms=given.platform != "tpu",  # libtpu compiles alike with its device and without it
            alternates=alternates,
        )

    def admission(self) -> Admission:
        """Returns what decides when the next config is compiled or measured."""
        return (Bursts if self._alternates else Stream)(self._run, self.waiting, self.may_begin)

    def may_confirm_on(self, device: DeviceState) -> bool:
        """Returns whether a further worker may confirm an error on a device while other configs go on."""
        return self.confirms and not device.is_cramped and self._run.may_start_on(device)


def compiles_apart(given: Conditions) -> int:
    """Returns how many configs a worker compiles without the device."""
    return 1 if given.platform == "cpu" else min(_COMPILES_PER_WORKER, given.configs_per_worker)


def threads_for(slots: int) -> dict[str, str]:
    """Returns the environment of a compiler that shares the cores with others, unless the user has set it."""
    return {} if _THREADS in os.environ else {_THREADS: str(max(1, machine.available_cpus() // slots))}
