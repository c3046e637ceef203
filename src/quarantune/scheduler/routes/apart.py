"""Workers compile without their device, and standby workers, which hold it, measure."""

from __future__ import annotations

import dataclasses
from typing import Self

from quarantune.sandbox.messages import Compile, Prepare
from quarantune.scheduler.bursts import Stream
from quarantune.scheduler.plan import Numbers
from quarantune.scheduler.routes.base import Conditions, WithoutDevice, compiles_apart
from quarantune.scheduler.routes.prepared_ahead import PreparedAhead
from quarantune.scheduler.routes.split import Split
from quarantune.scheduler.workers import DeviceState, Job, WorkerState
from quarantune.values.trial import CompileTarget, Route


class Apart(WithoutDevice, PreparedAhead):
    """Workers compile for an accelerator while standby workers measure on it."""

    label = Route.APART
    _admits = Stream

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions; `is_closed` says that no search adds configs."""
        numbers = _numbers(given, is_closed=is_closed)
        numbers = dataclasses.replace(numbers, workers=given.slots + given.devices)
        return cls(numbers, target=given.target, confirms=given.confirms)

    def may_confirm_on(self, device: DeviceState) -> bool:
        """Returns whether a further worker may confirm an error on a device while other configs go on."""
        return not device.is_cramped and self._run.may_start_on(device)


class Cheaply(Apart):
    """The same with programs that are compiled cheaply; their times rank the configs, and are nobody's result.

    The workers that compile fully next take the device meanwhile, once the one that measures has it. Each then lowers
    its config within 0.1 s. A worker that was started beside the compiles of others took 2.1 s for that, on an H100.
    """

    _ranks = True

    def __init__(self, numbers: Numbers, *, target: CompileTarget | None = None, confirms: bool = False) -> None:
        # An error is met again where the config is compiled fully.
        super().__init__(numbers, target=target, confirms=False)
        self._ahead_on = set[DeviceState]()

    def _task(self, job: Job, *, last: bool) -> Compile:
        return dataclasses.replace(super()._task(job, last=last), is_cheap=True)

    def prepare_on(self, device: DeviceState) -> None:
        """Starts the standby workers that will be needed, here and by the route that follows."""
        super().prepare_on(device)
        run = self._run
        is_first_ready = any(worker.state is WorkerState.IDLE for worker in run.workers.standby(device))
        if is_first_ready and device not in self._ahead_on and not (device.is_cramped or run.worker_count.waits):
            self._ahead_on.add(device)
            for _ in range(self.numbers.parked // len(run.devices)):
                run.workers.start(Prepare(compiles=True), WorkerState.AHEAD, device=device).wait()


class ApartInTurns(WithoutDevice, Split):
    """The same if the device is the machine: compiling and measuring alternate."""

    label = Route.APART

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions; `is_closed` says that no search adds configs."""
        return cls(_numbers(given, is_closed=is_closed))


def _numbers(given: Conditions, *, is_closed: bool) -> Numbers:
    each, compiles = given.configs_per_worker, compiles_apart(given)
    return given.in_workers(given.slots, is_closed=is_closed, configs_per_worker=each, compiles_per_worker=compiles)
