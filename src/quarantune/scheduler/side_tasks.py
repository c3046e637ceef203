"""Side tasks, which are no trials: comparing the finalists, and computing the output of `ref_fn`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence

from quarantune.host import stops
from quarantune.measure import finals
from quarantune.sandbox import spool
from quarantune.sandbox.messages import (
    CheckShapes,
    Compare,
    Compared,
    ComputeReference,
    Finalist,
    ReferenceComputed,
    ShapesChecked,
    Task,
)
from quarantune.scheduler.plan import TICK_S
from quarantune.scheduler.reference import unlike
from quarantune.scheduler.run import Run
from quarantune.scheduler.verdicts import checked_samples
from quarantune.scheduler.workers import DeviceState, Verdict, Worker, WorkerState
from quarantune.values.config_values import encode
from quarantune.values.trial import Config, Outcome

_logger = logging.getLogger("quarantune")

_TRIES = 2


class SideTaskError(Exception):
    """A worker did not do a side task."""


class SideTasks:
    """Has workers with a device do something that is no trial."""

    def __init__(self, run: Run, stops: stops.Stops, step: Callable[[float | None], object]) -> None:
        """Sets up side tasks.

        Args:
            run: the state of the scheduler.
            stops: notices when this process is stopped.
            step: handles the next events, waiting for at most so many seconds, or until the next deadline for None.
        """
        self._run = run
        self._stops = stops
        self._step = step

    def compare(self, configs: Mapping[int, Config]) -> finals.Final:
        """Times configs in turn in one worker, so that only their programs differ.

        The executables that the race has kept are loaded; other configs are compiled again.

        Args:
            configs: the configs by index.

        Returns:
            The result; empty where they could not be compared.
        """
        ran_as = self._run.jobs.programs.ran_as
        kept = [self._run.race.kept_fd(ran_as.get(index, index)) for index in configs]
        entries = tuple(
            Finalist(config=encode(config), saved=fd is not None, index=index)
            for (index, config), fd in zip(configs.items(), kept, strict=True)
        )
        task = Compare(options=self._run.plan.options, entries=entries, last=True)
        try:
            reply = self._do(task, [fd for fd in kept if fd is not None], configs=len(configs))
            rounds_ms = [checked_samples(samples_ms) for samples_ms in reply.rounds_ms]
            warm_ms = [checked_samples(samples_ms) if samples_ms else [] for samples_ms in reply.warm_ms]
            energy_mj = dict(zip(configs, zip(*reply.energy_mj, strict=True), strict=False))
            of = finals.Final.of(configs, rounds_ms, warm_ms)
            return dataclasses.replace(of, energy_mj=energy_mj, objective=self._run.plan.objective)
        except (SideTaskError, TypeError, ValueError, ArithmeticError) as error:
            _logger.warning("the finalists could not be compared, so their first measurements count: %s", error)
            return finals.Final()

    @property
    def has_idle_worker(self) -> bool:
        """Whether a side task finds a worker that is ready."""
        idle = filter(None, map(_idle, self._run.devices))
        return any(self._run.workers.pid(worker) is not None for worker in idle)

    def _do(self, task: Compare, fds: Sequence[int], *, configs: int) -> Compared:
        """Has a worker compare the finalists; one that dies is replaced once.

        Args:
            task: the task.
            fds: descriptors that go with it.
            configs: the number of configs whose deadlines it may take.

        Returns:
            The worker's reply.

        Raises:
            SideTaskError: it was not done.
        """
        run = self._run
        verdict = Verdict(Outcome.LOST, "its process vanished")
        for _ in range(_TRIES):
            if not run.devices:
                raise SideTaskError("no device is left")
            self._stops.begin()
            try:
                worker = self._start(run.devices[0], task, fds)
                worker.side_task_s = configs * (run.plan.compile_timeout_s + run.plan.timeout_s)
                # A process with a device takes a third of a second to die after its reply.
                while worker.reply is None and run.workers.get(worker.number) is not None:
                    self._step(None)
            finally:
                for device in run.devices:
                    device.lease.release()
            if isinstance(worker.reply, Compared):
                return worker.reply
            verdict = worker.verdict or verdict
            if verdict.outcome not in (Outcome.LOST, Outcome.CRASHED):
                break  # the same would only happen again
        raise SideTaskError(f"{verdict.outcome.value}: {verdict.message}")

    def _start(self, device: DeviceState, task: Task, fds: Sequence[int]) -> Worker:
        while (worker := start_on(self._run, device, task, fds)) is None:
            self._step(TICK_S)
        return worker


def start_on(run: Run, device: DeviceState, task: Task, fds: Sequence[int]) -> Worker | None:
    """Has a standby worker that is ready, or else a new one, do a side task; returns None while neither can begin."""
    if not device.lease.acquire(run.clock()):
        return None
    worker = _idle(device)
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


def _idle(device: DeviceState) -> Worker | None:
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
