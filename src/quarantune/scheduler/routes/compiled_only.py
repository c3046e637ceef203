"""The routes on which workers compile and nothing runs: for the executables, or to find out what compiles."""

from __future__ import annotations

import dataclasses
from typing import Self

from quarantune.sandbox.messages import Compile, Failed
from quarantune.scheduler.bursts import Admission, Stream
from quarantune.scheduler.plan import Numbers
from quarantune.scheduler.routes.base import Conditions, TrialRoute, WithoutDevice, compiles_apart
from quarantune.scheduler.routes.split import Split
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerVerdict
from quarantune.values.trial import Outcome, Phase, Route


class CompiledOnly(Split):
    """Workers compile with the device, for this process, and nothing runs."""

    label = Route.TOGETHER
    as_data = True

    @classmethod
    def of(cls, given: Conditions) -> Self:
        """Returns the route under some conditions."""
        return cls(_numbers(given, given.slots_with_device))

    def admission(self) -> Admission:
        """Returns what decides when the next config is compiled."""
        return Stream(self._run, self.waiting, self.may_begin)

    def measure_on(self, device: DeviceState) -> None:
        """Measures nothing."""

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Keeps the executable of a job, which ends."""
        self._run.fastest.keep_compiled(job)
        self._end(worker, job)

    def _end(self, worker: Worker, job: Job) -> None:
        self._run.jobs.finish(job, worker, WorkerVerdict(Outcome.OK, ""), Phase.COMPILE)
        self.free(worker)


class CompiledOnlyApart(WithoutDevice, CompiledOnly):
    """The same with workers that compile without the device."""

    label = Route.APART

    @classmethod
    def of(cls, given: Conditions) -> Self:
        """Returns the route under some conditions."""
        numbers = _numbers(given, given.slots, compiles_per_worker=compiles_apart(given))
        return cls(numbers, target=given.target, confirms=given.confirms)


class CompileCheck(CompiledOnlyApart):
    """Workers compile for a device that need not exist here, and keep no executable."""

    @classmethod
    def of(cls, given: Conditions) -> Self:
        """Returns the route under some conditions."""
        # libtpu may take tens of seconds for what does not fit into a TPU. A deadline missed in a used worker must be
        # waited for twice, which is more than used workers save here.
        compiles = 1 if given.platform == "tpu" else compiles_apart(given)
        return cls(_numbers(given, given.slots, compiles_per_worker=compiles), target=given.target)

    def _task(self, job: Job, *, last: bool) -> Compile:
        return dataclasses.replace(TrialRoute._task(self, job, last=last), target=self.target, last=last, is_check=True)

    def on_unfit(self, worker: Worker, reply: Failed) -> bool:
        """Raises ValueError: there is no other route."""
        return TrialRoute.on_unfit(self, worker, reply)

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Ends a job that has compiled."""
        self._end(worker, job)


def _numbers(given: Conditions, slots: int, **numbers: int) -> Numbers:
    return Numbers(slots=slots, parked=slots, workers=slots + given.devices, **numbers)
