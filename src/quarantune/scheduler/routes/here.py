"""The routes on which this process measures programs that workers have compiled, or that it compiles itself."""

from __future__ import annotations

import collections
import dataclasses
from typing import Self

from quarantune.sandbox.messages import Compiled, FirstRun
from quarantune.scheduler.bursts import Batches
from quarantune.scheduler.routes.base import Conditions, WithoutDevice, compiles_apart
from quarantune.scheduler.routes.split import Split
from quarantune.scheduler.routes.together import Together
from quarantune.scheduler.workers import DeviceState, Job, Worker
from quarantune.values.trial import READY, Route


class MeasuredHere(Split):
    """Workers compile with the device, and this process acts as a standby worker that takes one config.

    All configs run once. Then those that may still win continue, the fastest first.
    """

    label = Route.TOGETHER
    _admits = Batches
    _pauses = True
    as_data = True

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions; `is_closed` says that no search adds configs."""
        return cls(given.in_files(given.slots_with_device, is_closed=is_closed))

    def on_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Makes a job wait again after an informative first run."""
        self._note_first_run(worker, job, reply)
        self._run.jobs.ready.append(job)
        self.free(worker)

    def on_compiled_again(self, worker: Worker, job: Job, reply: Compiled) -> None:
        """Records that this process compiled a job, and allows it the time that compiling took."""
        job.compiled_by(Route.IN_PROCESS, reply.compile_s)
        worker.extend(reply.compile_s)

    def _ends_with(self, worker: Worker) -> bool:
        return False

    def _give_next(self, device: DeviceState, worker: Worker) -> None:
        """Gives this process the next config. Configs that hung or crashed before have their first run last."""
        run = self._run
        if not run.reference.is_awaited:
            begun = {job.index: place for place, job in enumerate(run.jobs.begun)}
            order = sorted(run.jobs.ready, key=lambda job: (job.first_run is not None, job.first_ms, begun[job.index]))
            run.jobs.ready = collections.deque(order)
        run.jobs.ready[0].measured_on(Route.COMPILED_APART)
        super()._give_next(device, worker)


class CompiledApart(WithoutDevice, MeasuredHere):
    """Like `MeasuredHere`, but workers compile without the device."""

    label = Route.APART

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions; `is_closed` says that no search adds configs."""
        numbers = given.in_files(given.slots, is_closed=is_closed, compiles_per_worker=compiles_apart(given))
        return cls(numbers, target=given.target, confirms=given.confirms)


class Here(Together):
    """This process compiles each config and measures it."""

    label = Route.IN_PROCESS

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions."""
        numbers = given.in_workers(1, is_closed=is_closed, configs_per_worker=given.configs_per_worker)
        return cls(dataclasses.replace(numbers, parked=1))

    def enter(self, job: Job, phase: str) -> None:
        """Announces the phase that a job enters, except `READY`: nothing waits if configs compile one by one."""
        if phase != READY:
            super().enter(job, phase)

    def _stop_ms(self, job: Job) -> float | None:
        """Returns None, because stopping a run would end this process."""
        return None
