"""Confirms on the device, while other configs go on, the errors that were raised where there was no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quarantune.sandbox.messages import Compile
from quarantune.scheduler.plan import NOTHING_MORE, ConfigSource, Leftovers, OnlyStopping
from quarantune.scheduler.run import Run
from quarantune.scheduler.workers import Worker, WorkerState
from quarantune.values.configs import Config, encode
from quarantune.values.trial import Outcome, Phase, Route, Trial


class Confirmation:
    """Has the device compile one config of each place where an error was raised without it, one after another."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._workers: dict[str, Worker] = {}

    def start(self) -> None:
        """Starts a worker for the next place, if there is one, and room for the worker."""
        run, left = self._run, self._run.jobs.leftovers
        if not run.plan.confirms or not run.devices or self.is_under_way:
            return
        place = next((place for place in left.first_at if place not in self._workers), None)
        device = run.least_used_device()
        if place is None or device.is_cramped or not run.may_start_on(device):
            return
        config = left.unconfirmed[left.first_at[place]].trial.config
        task = Compile(config=encode(config), options=run.plan.options, is_check=True, last=True)
        self._workers[place] = run.workers.start(task, WorkerState.SIDE_TASK, device=device)

    @property
    def is_under_way(self) -> bool:
        """Whether a worker has yet to end."""
        return any(worker.verdict is None for worker in self._workers.values())

    def leftovers(self) -> Leftovers:
        """Returns the configs that another route must settle, with errors as they were raised on the device."""
        left = self._run.jobs.leftovers
        unconfirmed, confirmed = dict(left.unconfirmed), set()
        for place, worker in self._workers.items():
            verdict, device = worker.verdict, worker.device
            if verdict is None or device is None or worker.raised_at != place:
                continue
            if (verdict.outcome, worker.phase) != (Outcome.ERROR, Phase.COMPILE):
                continue
            error = unconfirmed[left.first_at[place]]
            trial = dataclasses.replace(
                error.trial, message=verdict.message, route=Route.TOGETHER, device=device.device.name
            )
            unconfirmed[left.first_at[place]] = dataclasses.replace(error, trial=trial)
            confirmed.add(place)
        none_fits = len(left.unfit) == len(self._run.jobs.begun)
        return dataclasses.replace(left, unconfirmed=unconfirmed, confirmed=frozenset(confirmed), none_fits=none_fits)


def settle(
    left: Leftovers,
    confirmed: set[str],
    finish: Callable[[int, Trial, str], None],
    run: Callable[[dict[int, Config], Callable[[int, Trial, str], None], ConfigSource], Leftovers],
    source: ConfigSource = NOTHING_MORE,
) -> None:
    """Settles the configs that failed where there was no device.

    Of each place where an exception was raised, one config is repeated on the device. If the same exception is raised
    at the same place there, the others of that place have failed; if not, they are repeated as well. Another exception
    says nothing of them: the device may have let the config get further.

    Args:
        left: those configs.
        confirmed: the places whose errors are true; more are added.
        finish: receives the trials.
        run: runs configs with the device, gives their trials to a function like `finish`, stops when a source says, and
            returns where exceptions were raised.
        source: says when to stop, but for the configs that confirm others.
    """
    errors = left.unconfirmed
    firsts = {index for place, index in left.first_at.items() if place not in confirmed}
    if firsts:
        configs = {index: error.trial.config for index, error in errors.items() if index in firsts}
        raised_at = run(configs, finish, NOTHING_MORE).raised_at
        confirmed.update(errors[index].place for index in firsts if raised_at.get(index) == errors[index].place)
    again = {}
    for index, error in errors.items():
        if index in firsts:
            continue
        if error.place in confirmed:
            finish(index, error.trial, error.log)
        else:
            again[index] = error.trial.config
    if again:
        run(again, finish, OnlyStopping(source))
