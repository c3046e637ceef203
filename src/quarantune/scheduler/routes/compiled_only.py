"""The routes on which workers compile and nothing runs: for the executables, or to find out which configs compile."""

from __future__ import annotations

from typing import Self

from quarantune.sandbox.messages import Compile, CompileAlone
from quarantune.scheduler.bursts import Stream
from quarantune.scheduler.plan import Numbers
from quarantune.scheduler.routes.base import Conditions, TrialRoute, WithoutDevice, compiles_apart
from quarantune.scheduler.routes.split import Split
from quarantune.scheduler.run_state import RunState
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerVerdict
from quarantune.values.trial import Outcome, Phase, Route


class CompiledOnly(Split):
    """Workers compile with the device for this process, and nothing runs."""

    label = Route.TOGETHER
    _admits = Stream
    as_data = True

    @classmethod
    def of(cls, given: Conditions) -> Self:
        """Returns the route under some conditions."""
        return cls(_numbers(given, given.slots_with_device))

    def measure_on(self, device: DeviceState) -> None:
        """Measures nothing."""

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Keeps the executable of a job, which ends."""
        self._run.fastest.keep_compiled(job)
        _end(self, self._run, worker, job)


class CompiledOnlyApart(WithoutDevice, CompiledOnly):
    """Like `CompiledOnly`, but workers compile without the device."""

    label = Route.APART

    @classmethod
    def of(cls, given: Conditions) -> Self:
        """Returns the route under some conditions."""
        numbers = _numbers(given, given.slots, compiles_per_worker=compiles_apart(given))
        return cls(numbers, target=given.target, confirms=given.confirms)


class CompileCheck(WithoutDevice):
    """Workers compile for a device that need not exist here, and keep no executable."""

    label = Route.APART
    _admits = Stream

    @classmethod
    def of(cls, given: Conditions) -> Self:
        """Returns the route under some conditions."""
        # libtpu may take tens of seconds for a program that does not fit into a TPU. A config that misses its deadline
        # in a used worker runs twice, which costs more than used workers save here.
        compiles = 1 if given.platform == "tpu" else compiles_apart(given)
        return cls(_numbers(given, given.slots, compiles_per_worker=compiles), target=given.target)

    def _task(self, job: Job, *, last: bool) -> Compile:
        return CompileAlone(**{**vars(super()._task(job, last=last)), "last": last})

    def waiting(self) -> int:
        """Returns 0, because no config waits for a device."""
        return 0

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Ends a job that has compiled."""
        _end(self, self._run, worker, job)


def _end(route: TrialRoute, run: RunState, worker: Worker, job: Job) -> None:
    run.jobs.finish(job, worker, WorkerVerdict(Outcome.OK, ""), Phase.COMPILE)
    route.free(worker)


def _numbers(given: Conditions, slots: int, **numbers: int) -> Numbers:
    return Numbers(slots=slots, parked=slots, workers=slots + given.devices, **numbers)
