"""Has a worker compute the output of `ref_fn`, while configs are compiled where that disturbs nobody."""

from __future__ import annotations

import os

from quarantune.sandbox import spool
from quarantune.sandbox.messages import CheckShapes, ComputeReference, ReferenceComputed, ShapesChecked
from quarantune.scheduler.reference import unlike
from quarantune.scheduler.run import Run
from quarantune.scheduler.side_tasks import start_on
from quarantune.scheduler.workers import Verdict, Worker
from quarantune.values.trial import Outcome

_TRIES = 2
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
        worker = start_on(run, run.devices[0], ComputeReference(options=options), [self._fd])
        if worker is not None:
            self._worker = worker
            self._tries += 1
            worker.side_task_s = run.plan.compile_timeout_s + run.plan.timeout_s
            run.workers.send(worker, CheckShapes(options=options, last=True), [self._fd])

    def _on_end(self, worker: Worker) -> None:
        if self._is_computed:
            self._give(None)  # the function may have ended the process while it was traced: its configs may do better
            return
        verdict = worker.verdict or Verdict(Outcome.LOST, "its process vanished")
        if verdict.outcome not in (Outcome.LOST, Outcome.CRASHED) or self._tries == _TRIES:
            raise _failed(verdict)
        self._worker = None

    def _give(self, differs: str | None) -> None:
        worker, reference = self._worker, self._run.reference
        if worker is not None and worker.device is not None and worker.device.measuring is worker:
            worker.device.measuring = None  # a process with a device takes a third of a second to die
        reference.give(self._fd)
        self.close()
        if differs:
            raise NoReferenceError(unlike(differs))


def _failed(verdict: Verdict) -> NoReferenceError:
    return NoReferenceError(f"ref_fn failed, so no config can be judged: {verdict.outcome.value}: {verdict.message}")
