"""Side tasks, which are no trials: starting them, and comparing the finalists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from quarantune.host import stops
from quarantune.measure import finals
from quarantune.sandbox.messages import Compare, Compared, Finalist, Task
from quarantune.scheduler.plan import TICK_S
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
            Finalist(config=encode(config), saved=fd is not None)
            for config, fd in zip(configs.values(), kept, strict=True)
        )
        task = Compare(options=self._run.plan.options, entries=entries, last=True)
        try:
            reply = self._do(task, [fd for fd in kept if fd is not None], configs=len(configs))
            rounds_ms = [checked_samples(samples_ms) for samples_ms in reply.rounds_ms]
            warm_ms = [checked_samples(samples_ms) if samples_ms else [] for samples_ms in reply.warm_ms]
            return finals.Final.of(configs, rounds_ms, warm_ms)
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
