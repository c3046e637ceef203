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
        """Returns whether a further worker may confirm an error on a device while other configs run."""
        return not device.is_cramped and self._run.may_start_on(device)


class Cheaply(Apart):
    """Like `Apart`, but programs compile cheaply; their times rank the configs, and are never a result.

    Once the measuring worker has the device, this route also starts the workers that will compile fully on the next
    route, so that they take the device early. On an H100, each then lowers its config within 0.1 s; a worker that
    started while others compiled took 2.1 s.
    """

    _ranks = True

    def __init__(self, numbers: Numbers, *, target: CompileTarget | None = None, confirms: bool = False) -> None:
        # The full compile meets an error again.
        super().__init__(numbers, target=target, confirms=False)
        self._ahead_on = set[DeviceState]()

    def _task(self, job: Job, *, last: bool) -> Compile:
        return dataclasses.replace(super()._task(job, last=last), is_cheap=True)

    def prepare_on(self, device: DeviceState) -> None:
        """Starts the standby workers that this route and the next will need."""
        super().prepare_on(device)
        run = self._run
        is_first_ready = any(worker.state is WorkerState.IDLE for worker in run.workers.standby(device))
        if is_first_ready and device not in self._ahead_on and not (device.is_cramped or run.worker_count.waits):
            self._ahead_on.add(device)
            for _ in range(self.numbers.parked // len(run.devices)):
                run.workers.start(Prepare(compiles=True), WorkerState.AHEAD, device=device).wait()


class ApartInTurns(WithoutDevice, Split):
    """Like `Apart` if the device is the machine's CPU: compiling and measuring alternate."""

    label = Route.APART

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions; `is_closed` says that no search adds configs."""
        return cls(_numbers(given, is_closed=is_closed))


def _numbers(given: Conditions, *, is_closed: bool) -> Numbers:
    each, compiles = given.configs_per_worker, compiles_apart(given)
    return given.in_workers(given.slots, is_closed=is_closed, configs_per_worker=each, compiles_per_worker=compiles)
