"""Confirms on the device, while other configs go on, the first error that was raised where there was no device."""

from __future__ import annotations

import dataclasses

from quarantune.sandbox.messages import Compile
from quarantune.scheduler.plan import Leftovers
from quarantune.scheduler.run import Run
from quarantune.scheduler.workers import Worker, WorkerState
from quarantune.values.config_values import encode
from quarantune.values.trial import Outcome, Phase, Route


class Confirmation:
    """Has a worker with the device compile one config that failed without it; that worker runs nothing."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._worker: Worker | None = None

    def start(self) -> None:
        """Starts the worker, once there is an error to confirm and room for it."""
        run, unconfirmed = self._run, self._run.jobs.leftovers.unconfirmed
        if not run.plan.confirms or self._worker is not None or not unconfirmed or not run.devices:
            return
        device = run.least_used_device()
        if device.is_cramped or not run.may_start_on(device):
            return
        trial, _ = next(iter(unconfirmed.values()))
        task = Compile(config=encode(trial.config), options=run.plan.options, is_check=True, last=True)
        self._worker = run.workers.start(task, WorkerState.SIDE_TASK, device=device)

    @property
    def is_under_way(self) -> bool:
        """Whether the worker has yet to end."""
        return self._worker is not None and self._worker.verdict is None

    def leftovers(self) -> Leftovers:
        """Returns the configs that another route must settle, the first error as it was raised on the device."""
        left, worker = self._run.jobs.leftovers, self._worker
        if worker is None or worker.verdict is None or worker.device is None:
            return left
        if (worker.verdict.outcome, worker.phase) != (Outcome.ERROR, Phase.COMPILE):
            return left
        index, (trial, log) = next(iter(left.unconfirmed.items()))
        raised = dataclasses.replace(
            trial, message=worker.verdict.message, route=Route.TOGETHER, device=worker.device.device.name
        )
        unconfirmed = {**left.unconfirmed, index: (raised, log)}
        return dataclasses.replace(left, unconfirmed=unconfirmed, is_confirmed=True)
