"""The routes on which this process measures: what workers have compiled, or what it compiles itself."""

from __future__ import annotations

import collections
from typing import Self

from quarantune.sandbox.messages import Compiled, FirstRun
from quarantune.scheduler.bursts import Admission, Batches
from quarantune.scheduler.plan import Numbers
from quarantune.scheduler.routes.apart import Split, compiles_apart
from quarantune.scheduler.routes.base import Conditions
from quarantune.scheduler.routes.together import Together
from quarantune.scheduler.workers import DeviceState, Job, Worker
from quarantune.values.trial import READY, CompileTarget, Route


class MeasuredHere(Split):
    """Workers compile, and this process stands for a standby worker that takes one config.

    All configs run once, then those that may still win go on, the fastest first.
    """

    _pauses = True
    as_data = True

    def __init__(
        self, numbers: Numbers, *, with_device: bool, target: CompileTarget | None = None, confirms: bool = False
    ) -> None:
        super().__init__(numbers, target=target, confirms=confirms)
        self.compiles_with_device = with_device
        self.label = Route.TOGETHER if with_device else Route.APART

    @classmethod
    def of(cls, given: Conditions, *, with_device: bool, is_closed: bool) -> Self:
        """Returns the route under some conditions.

        Args:
            given: the conditions.
            with_device: whether workers use the device to compile.
            is_closed: whether no search adds configs.
        """
        slots = given.slots_with_device if with_device else given.slots
        compiles = 1 if with_device else compiles_apart(given)
        return cls(
            given.in_files(slots, is_closed=is_closed, configs_per_worker=1, compiles_per_worker=compiles),
            with_device=with_device,
            target=None if with_device else given.target,
            confirms=given.platform != "tpu",
        )

    def admission(self) -> Admission:
        """Returns what decides when the next config is compiled or measured: in batches."""
        return Batches(self._run, self.waiting, self.may_begin)

    def on_first_run(self, worker: Worker, job: Job, reply: FirstRun) -> None:
        """Has a job wait again after an informative first run."""
        self._note_first_run(worker, job, reply)
        self._run.jobs.ready.append(job)
        self.free(worker)

    def on_compiled_again(self, worker: Worker, job: Job, reply: Compiled) -> None:
        """Takes note that a job was compiled here, which may take as long as in a worker."""
        job.compile_s, job.route = reply.compile_s, Route.IN_PROCESS
        worker.deadline += job.compile_s

    def _give_next(self, device: DeviceState, worker: Worker) -> None:
        """Gives this process the next config. Configs that hung or crashed before run last."""
        run = self._run
        if not run.reference.is_awaited:
            begun = {job.index: place for place, job in enumerate(run.jobs.begun)}
            order = sorted(run.jobs.ready, key=lambda job: (job.first_run is not None, job.first_ms, begun[job.index]))
            run.jobs.ready = collections.deque(order)
        run.jobs.ready[0].route = run.jobs.ready[0].route or Route.COMPILED_APART
        super()._give_next(device, worker)


class Here(Together):
    """This process compiles each config and measures it."""

    label = Route.IN_PROCESS

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions."""
        shares, each = given.shares(1, 1), given.configs_per_worker
        return cls(Numbers(slots=1, parked=1, workers=shares, configs_per_worker=each))

    def enter(self, job: Job, phase: str) -> None:
        """Announces the phase that a job enters; nothing waits if configs are compiled one by one."""
        if phase != READY:
            super().enter(job, phase)

    def _stop_ms(self, job: Job) -> float | None:
        """Returns None: to end a run would end this process."""
        return None
