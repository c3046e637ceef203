"""The routes on which workers compile and nothing runs: for the executables, or to find out what compiles."""

from __future__ import annotations

import dataclasses
from typing import Self

from quarantune.sandbox.messages import Compile, Failed
from quarantune.scheduler.bursts import Admission, Stream
from quarantune.scheduler.plan import Numbers
from quarantune.scheduler.routes.apart import Split, compiles_apart
from quarantune.scheduler.routes.base import Conditions, TrialRoute
from quarantune.scheduler.workers import DeviceState, Job, Worker, WorkerVerdict
from quarantune.values.trial import CompileTarget, Outcome, Phase, Route


class CompiledOnly(Split):
    """Workers compile for this process, and nothing runs."""

    as_data = True

    def __init__(
        self, numbers: Numbers, *, with_device: bool, target: CompileTarget | None = None, confirms: bool = False
    ) -> None:
        super().__init__(numbers, target=target, confirms=confirms)
        self.compiles_with_device = with_device
        self.label = Route.TOGETHER if with_device else Route.APART

    @classmethod
    def of(cls, given: Conditions, *, with_device: bool) -> Self:
        """Returns the route under some conditions; `with_device` says that workers use the device to compile."""
        slots = given.slots_with_device if with_device else given.slots
        return cls(
            _numbers(given, slots, compiles_per_worker=1 if with_device else compiles_apart(given)),
            with_device=with_device,
            target=None if with_device else given.target,
            confirms=given.platform != "tpu",
        )

    def admission(self) -> Admission:
        """Returns what decides when the next config is compiled."""
        return Stream(self._run, self.waiting, self.may_begin)

    def measure_on(self, device: DeviceState) -> None:
        """Measures nothing."""

    def may_confirm_on(self, device: DeviceState) -> bool:
        """Returns False: errors are confirmed once all configs have ended."""
        return False

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Keeps the executable of a job, which ends."""
        self._run.race.keep_compiled(job)
        self._end(worker, job)

    def _end(self, worker: Worker, job: Job) -> None:
        self._run.jobs.finish(job, worker, WorkerVerdict(Outcome.OK, ""), Phase.COMPILE)
        self.free(worker)


class CompileCheck(CompiledOnly):
    """Workers compile for a device that need not exist here, and keep no executable."""

    def __init__(self, numbers: Numbers, target: CompileTarget) -> None:
        super().__init__(numbers, with_device=False, target=target)

    @classmethod
    def for_target(cls, given: Conditions, target: CompileTarget) -> Self:
        """Returns the route under some conditions."""
        # libtpu may take tens of seconds for what does not fit into a TPU. A deadline missed in a used worker must be
        # waited for twice, which is more than used workers save here.
        compiles = 1 if given.platform == "tpu" else compiles_apart(given)
        return cls(_numbers(given, given.slots, compiles_per_worker=compiles), target)

    def _task(self, job: Job, *, last: bool) -> Compile:
        return dataclasses.replace(TrialRoute._task(self, job, last=last), target=self.target, last=last, is_check=True)

    def on_unfit(self, worker: Worker, reply: Failed) -> bool:
        """Raises ValueError: there is no other route."""
        return TrialRoute.on_unfit(self, worker, reply)

    def on_compiled(self, worker: Worker, job: Job) -> None:
        """Ends a job that has compiled."""
        self._end(worker, job)


def _numbers(given: Conditions, slots: int, *, compiles_per_worker: int) -> Numbers:
    return Numbers(slots=slots, parked=slots, workers=slots + given.devices, compiles_per_worker=compiles_per_worker)
