"""Side tasks, which are no trials: how one begins, and the one that computes the output of `ref_fn`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from quarantune.sandbox import spool
from quarantune.sandbox.messages import (
    ComputeReference,
    ReferenceComputed,
    ShapesChecked,
    Task,
)
from quarantune.scheduler.run import Run
from quarantune.scheduler.workers import DeviceState, Verdict, Worker, WorkerState
from quarantune.values.trial import Outcome

_logger = logging.getLogger("quarantune")

TRIES = 2


def start_on(run: Run, device: DeviceState, task: Task, fds: Sequence[int]) -> Worker | None:
    """Has a standby worker that is ready, or else a new one, do a side task; returns None while neither can begin."""
    if not device.lease.acquire(run.clock()):
        return None
    worker = idle_on(device)
    if worker is not None:
        device.standby.remove(worker)
        worker.transition(WorkerState.SIDE_TASK)
        run.workers.send(worker, task, fds)
    elif run.may_start_on(device):
        worker = run.workers.start(task, WorkerState.SIDE_TASK, device=device, fds=fds)
    else:
        return None
    device.measuring = worker
    worker.deadline = run.workers.startup_deadline()
    return worker


def idle_on(device: DeviceState) -> Worker | None:
    """Returns a standby worker that is ready, if there is one."""
    return next((worker for worker in device.standby if worker.state is WorkerState.IDLE), None)


_SHAPES_S = 10.0
"""Seconds for the shapes of outputs, which are only looked at to fail early."""


class NoReferenceError(Exception):
    """There is no output to compare with, or none that any config could agree with; the message says why."""


class ReferenceTask:
    """One worker with a device computes the reference, then compares its shapes with those of the function's output."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._worker: Worker | None = None
        self._tries = 0
        self._is_computed = False
        self._fd = -1

    def update(self) -> None:
        """Starts the worker once its device is free, and draws the conclusions from its replies and its end.

        Raises:
            NoReferenceError: `ref_fn` failed, or returns other shapes than the function.
        """
        if not self._run.reference.is_coming:
            return
        worker = self._worker
        if worker is None:
            self._start()
        elif isinstance(worker.reply, ShapesChecked):
            self._give(worker.reply.differs)
        elif self._run.workers.get(worker.number) is None:
            self._on_end(worker)
        elif isinstance(worker.reply, ReferenceComputed) and not self._is_computed:
            self._is_computed = True
            worker.deadline = self._run.clock() + min(_SHAPES_S, self._run.plan.compile_timeout_s)

    def close(self) -> None:
        """Closes the file of a reference that was not completed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _start(self) -> None:
        run, options = self._run, self._run.plan.options
        if not run.devices:
            raise _failed(Verdict(Outcome.LOST, "no device is left"))
        self.close()
        self._fd = spool.create("expected")
        worker = start_on(run, run.devices[0], ComputeReference(options=options, last=True), [self._fd])
        if worker is not None:
            self._worker = worker
            self._tries += 1
            worker.side_task_s = run.plan.compile_timeout_s + run.plan.timeout_s

    def _on_end(self, worker: Worker) -> None:
        if self._is_computed:
            self._give(None)  # the function may have ended the process while it was traced: its configs may do better
            return
        verdict = worker.verdict or Verdict(Outcome.LOST, "its process vanished")
        if verdict.outcome not in (Outcome.LOST, Outcome.CRASHED) or self._tries == TRIES:
            raise _failed(verdict)
        self._worker = None

    def _give(self, differs: str | None) -> None:
        worker, reference = self._worker, self._run.reference
        if worker is not None and worker.device is not None and worker.device.measuring is worker:
            worker.device.measuring = None  # a process with a device takes a third of a second to die
        reference.give(self._fd)
        self.close()
        if differs:
            raise NoReferenceError(
                f"ref_fn does not return what the function returns with its defaults: {differs}; "
                f"return arrays of the same shapes and kinds from both"
            )


def _failed(verdict: Verdict) -> NoReferenceError:
    return NoReferenceError(f"ref_fn failed, so no config can be judged: {verdict.outcome.value}: {verdict.message}")
