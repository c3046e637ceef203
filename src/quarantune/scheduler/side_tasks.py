"""Tasks other than trials: computing the output of `ref_fn`, and confirming errors on the device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

from quarantune.sandbox import spool
from quarantune.sandbox.messages import CompileAlone, ComputeReference, ReferenceComputed, Task
from quarantune.scheduler.plan import NOTHING_MORE, ConfigSource, Finish, Leftovers
from quarantune.scheduler.routes.base import TrialRoute
from quarantune.scheduler.run_state import RunState
from quarantune.scheduler.workers import DeviceState, Worker, WorkerState, WorkerVerdict
from quarantune.values.codec import as_json
from quarantune.values.configs import Config
from quarantune.values.errors import ReferenceFailedError
from quarantune.values.trial import Outcome, Phase, Route

_TRIES = 2


def start_on(run: RunState, device: DeviceState, task: Task, fds: Sequence[int], seconds: float) -> Worker | None:
    """Starts a side task in a ready standby worker, or else in a new worker; returns None while neither can begin.

    Args:
        run: the run.
        device: the worker's device.
        task: the task.
        fds: the descriptors that travel with the task.
        seconds: the time limit, counted from the task's first phase.
    """
    if not device.lease.acquire(run.clock()):
        return None
    worker = idle_on(run, device)
    if worker is not None:
        worker.transition(WorkerState.SIDE_TASK)
        run.workers.send(worker, task, fds)
    elif not run.workers.standby(device) and run.may_start_on(device):  # else a standby worker is nearly ready
        worker = run.workers.start(task, WorkerState.SIDE_TASK, device=device, fds=fds)
    else:
        return None
    worker.begin_side_task(device, run.workers.startup_deadline(), seconds)
    return worker


def may_be_repeated(run: RunState, verdict: WorkerVerdict, tries: int) -> bool:
    """Returns whether to repeat a side task after its worker has ended without a reply.

    Args:
        run: the run.
        verdict: the verdict on that worker.
        tries: how many workers have had the task.
    """
    if verdict.lacked and run.worker_count.waits:
        return True
    return verdict.outcome in (Outcome.LOST, Outcome.CRASHED) and tries < _TRIES


def idle_on(run: RunState, device: DeviceState) -> Worker | None:
    """Returns a ready standby worker of a device, if there is one."""
    return next((worker for worker in run.workers.standby(device) if worker.state is WorkerState.IDLE), None)


class SideTasks:
    """The tasks of a run other than its trials.

    One worker with a device computes the reference, then compares its shapes with the shapes of the function's output.
    Further workers, one after another, compile one config for each place that raised an error without the device.
    """

    def __init__(self, run: RunState, route: TrialRoute) -> None:
        self._run = run
        self._route = route
        self._computing: Worker | None = None
        self._tries = 0
        self._fd = -1
        self._confirming: dict[str, Worker] = {}

    def update_reference(self) -> None:
        """Starts computing the reference once a device is free, and handles the replies and the end of its worker.

        Raises:
            ReferenceFailedError: `ref_fn` failed, or returns other shapes than the function.
        """
        run, worker = self._run, self._computing
        if not run.reference.is_coming:
            return
        if worker is None:
            self._compute()
        elif isinstance(worker.reply, ReferenceComputed) and worker.reply.is_compared:
            self._give(worker, worker.reply.differs)
        elif run.workers.get(worker.number) is None:
            self._on_end(worker)

    def close(self) -> None:
        """Closes the file of an incomplete reference."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _compute(self) -> None:
        run = self._run
        if not run.devices:
            raise _failed(WorkerVerdict(Outcome.LOST, "no device is left"))
        self.close()
        self._fd = spool.create("expected")
        seconds = run.plan.compile_timeout_s + run.plan.timeout_s
        self._computing = start_on(run, run.devices[0], ComputeReference(last=True), [self._fd], seconds)
        self._tries += self._computing is not None

    def _on_end(self, worker: Worker) -> None:
        if isinstance(worker.reply, ReferenceComputed):
            self._give(worker, None)  # tracing the function may have ended it; its configs may do better
            return
        assert worker.verdict is not None
        if not may_be_repeated(self._run, worker.verdict, self._tries):
            raise _failed(worker.verdict)
        self._computing = None

    def _give(self, worker: Worker, differs: str | None) -> None:
        worker.return_device()  # a process with a device takes a third of a second to die
        self._run.reference.give(self._fd)
        self.close()
        if differs:
            raise ReferenceFailedError(
                f"with its defaults, the function returns other arrays than ref_fn: {differs}; "
                f"return arrays of the same shapes and kinds from both"
            )

    def confirm_next(self) -> None:
        """Compiles a config of the next place on the device, if there is a next place and room for the worker."""
        run, left = self._run, self._run.jobs.leftovers
        place = next((place for place in left.first_at if place not in self._confirming), None)
        if place is None or self.is_confirming or not run.devices:
            return
        device = run.least_used_device()
        if not self._route.may_confirm_on(device):
            return
        config = left.unconfirmed[left.first_at[place]].trial.config
        task = CompileAlone(config=as_json(config), last=True)
        self._confirming[place] = run.workers.start(task, WorkerState.SIDE_TASK, device=device)

    @property
    def is_confirming(self) -> bool:
        """Whether a worker that confirms an error has yet to end."""
        return any(worker.verdict is None for worker in self._confirming.values())

    def leftovers(self) -> Leftovers:
        """Returns the configs that another route must settle, with the errors that the device confirmed."""
        left = self._run.jobs.leftovers
        for place, worker in self._confirming.items():
            verdict, device = worker.verdict, worker.device
            if verdict is None or device is None or worker.raised_at != place:
                continue
            if (verdict.outcome, worker.phase) != (Outcome.ERROR, Phase.COMPILE):
                continue
            error = left.unconfirmed[left.first_at[place]]
            error.trial = dataclasses.replace(
                error.trial, message=verdict.message, route=Route.TOGETHER, device=device.device.name
            )
            left.confirmed.add(place)
        left.none_fits = len(left.unfit) == len(self._run.jobs.begun)
        return left


def _failed(verdict: WorkerVerdict) -> ReferenceFailedError:
    text = f"ref_fn failed, so no config can be judged: {verdict.outcome.value}: {verdict.message}"
    return ReferenceFailedError(text)


def settle_errors(
    left: Leftovers,
    finish: Finish,
    run: Callable[[dict[int, Config], ConfigSource], Leftovers],
    source: ConfigSource = NOTHING_MORE,
) -> None:
    """Settles the configs that failed without the device.

    For each place that raised an exception, one config runs again on the device. If it raises the same exception at
    the same place, the other configs of that place have failed. If not, they also run again: a different exception does
    not confirm theirs, because the config may have got further with the device.

    Args:
        left: those configs; the function adds the places that it confirms.
        finish: receives the trials of configs that do not run again.
        run: runs configs with the device until a source stops it, and returns where exceptions occurred.
        source: decides when to stop, except for the configs that confirm others; it gives no further configs.
    """
    errors, confirmed = left.unconfirmed, left.confirmed
    firsts = {index for place, index in left.first_at.items() if place not in confirmed}
    if firsts:
        configs = {index: error.trial.config for index, error in errors.items() if index in firsts}
        raised_at = run(configs, NOTHING_MORE).raised_at
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
        run(again, source)
