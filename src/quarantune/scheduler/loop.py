"""The event loop of one sweep. It knows nothing of JAX, of search or of files.

A job compiles and then runs on a device; its route (`scheduler.routes`) chooses the workers for both steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
from quarantune.host import machine
from quarantune.host.interruptions import Stops
from quarantune.measure import finals
from quarantune.sandbox.messages import Compare, Compared, Finalist, PhaseEntered
from quarantune.sandbox.template_messages import Ended
from quarantune.sandbox.workforce import Event, Said, Workforce
from quarantune.scheduler.fastest import Fastest
from quarantune.scheduler.gemm_cache import GemmCache
from quarantune.scheduler.jobs import Jobs
from quarantune.scheduler.memory_watch import MemoryWatch
from quarantune.scheduler.plan import NOTHING_MORE, TICK_S, ConfigSource, Finish, Leftovers, Plan
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.replies import Replies
from quarantune.scheduler.routes.base import TrialRoute
from quarantune.scheduler.run_state import RunState
from quarantune.scheduler.side_tasks import SideTasks, idle_on, may_be_repeated, start_on
from quarantune.scheduler.verdicts import overdue
from quarantune.scheduler.worker_count import WorkerCount
from quarantune.scheduler.workers import DeviceState, Workers, WorkerVerdict
from quarantune.values.codec import as_json
from quarantune.values.configs import Config
from quarantune.values.trial import Outcome

_logger = logging.getLogger("quarantune")

_ROUNDS_SHARE = 0.3
"""Share of the time for a further comparison that its rounds may take; the rest is for its worker to start and load."""


class Scheduler:
    """Runs the configs of one sweep along one route."""

    def __init__(
        self,
        workforce: Workforce,
        plan: Plan,
        route: TrialRoute,
        *,
        on_trial: Finish,
        on_tick: Callable[[], None] = lambda: None,
        on_phase: Callable[[int, str], None] = lambda index, phase: None,
        reference: Reference | None = None,
        source: ConfigSource = NOTHING_MORE,
        fastest: Fastest | None = None,
        clock: Callable[[], float] = time.monotonic,
        available_memory: Callable[[], int] = machine.available_memory_bytes,
        lease_on: Callable[[Device], Lease] = Lease,
        stops: Stops | None = None,
    ) -> None:
        """Sets up a scheduler.

        Args:
            workforce: starts and kills workers.
            plan: the devices, the limits, and how trials are ranked.
            route: the route of the trials; no other scheduler may use it.
            on_trial: called once for each config that ended, with its index, its trial and its output.
            on_tick: called many times a second while the sweep lives.
            on_phase: called with the index of a config and the phase that it enters.
            reference: the outputs to compare with, in this run and others of the sweep; None for none.
            source: gives further configs, in addition to the arguments of `run`.
            fastest: the times and kept executables of this run and others of the sweep; None begins without any.
                Closed with this scheduler.
            clock: returns the time in seconds.
            available_memory: returns the bytes of memory that are free now.
            lease_on: returns the lease on a device: a new one, or the sweep's.
            stops: notices when this process stood still; the default also counts this process's own work as such.
        """
        self._workforce = workforce
        self._on_tick, self._source, self._clock = on_tick, source, clock
        self._next_tick = 0.0
        self._stops = stops or Stops(clock)
        devices = [DeviceState(device, lease_on(device)) for device in plan.devices]
        workers = Workers(workforce, clock, route.environ())
        reference, fastest = reference or Reference(), fastest or Fastest()
        jobs = Jobs(
            plan, reference, devices, on_trial, workers.log, source, fastest, route.label, confirms=route.confirms
        )
        self._run = run = RunState(
            plan=plan,
            numbers=route.numbers,
            devices=devices,
            workers=workers,
            jobs=jobs,
            fastest=fastest,
            reference=reference,
            memory=MemoryWatch(workforce, plan, workers, reference, available_memory),
            gemm_cache=GemmCache(workers, clock),
            worker_count=WorkerCount(workers, jobs, clock),
            clock=clock,
            on_phase=on_phase,
        )
        self._route = route
        route.join(run)
        self._admission = route.admission()
        self._replies = Replies(run, route)
        self._side_tasks = SideTasks(run, route)

    def run(self, configs: Mapping[int, Config]) -> Leftovers:
        """Runs every config to its outcome, including the source's configs.

        Args:
            configs: the configs by index, in the order of their start. The function's defaults start first if the
                others wait for their output.

        Returns:
            The configs that another route must settle.

        Raises:
            ReferenceFailedError: `ref_fn` gave no output that a config could agree with.
        """
        run = self._run
        run.reference.begin(configs.keys())
        run.jobs.begin(configs)
        self._stops.begin()
        try:
            is_news = True
            while run.jobs.unfinished or run.jobs.may_grow:
                if is_news:
                    self._start_workers()
                    if not run.jobs.unfinished and not run.jobs.may_grow:
                        break
                is_news = self._step()
            while self._side_tasks.is_confirming or run.reference.is_coming:
                self._side_tasks.update_reference()
                self._step()
        finally:
            self._route.close()
            for device in run.devices:
                device.lease.release()
            for job in run.jobs.begun:
                job.close_executable()
            for worker in run.workers:  # a retired worker may still be dying
                worker.close_output()
        return self._side_tasks.leftovers()

    def take_standby_workers(self, earlier: Scheduler) -> None:
        """Takes over the standby workers of an earlier run of the sweep, if this run needs any."""
        self._route.take_standby(earlier._run)

    @property
    def has_idle_worker(self) -> bool:
        """Whether a worker with its device waits for a task."""
        run = self._run
        idle = filter(None, (idle_on(run, device) for device in run.devices))
        return any(run.workers.pid(worker) is not None for worker in idle)

    def compare(self, configs: Mapping[int, Config], budget_s: float | None = None) -> finals.Final:
        """Times configs in turn in one worker, so that only their programs differ.

        The worker loads the executables that were kept, and compiles the other configs again.

        Args:
            configs: the configs by index.
            budget_s: the most seconds of rounds, after the least that a result needs; None for the usual time.

        Returns:
            The result; empty if the comparison failed.
        """
        try:
            return self._compared(configs, budget_s)
        except ValueError as error:
            _logger.warning("the finalists could not be compared, so their first measurements count: %s", error)
            return finals.Final()

    def compare_again(self, configs: Mapping[int, Config], ends_at: float) -> finals.Final:
        """Times finalists in turn in one further worker, which is killed if it takes too long.

        Args:
            configs: the configs by index.
            ends_at: when to stop, by the scheduler's clock.

        Returns:
            The result; empty without one in time.
        """
        try:
            return self._compared(configs, max(0.0, _ROUNDS_SHARE * (ends_at - self._clock())), ends_at)
        except ValueError as error:
            _logger.info("the finalists were not compared in a further process: %s", error)
            return finals.Final()

    def free_devices(self) -> None:
        """Ends the workers that own a device and waits for their end, so that another process can use it."""
        owners = [worker for worker in self._run.workers if worker.device and worker.device.device.has_one_owner]
        for worker in owners:
            self._run.workers.retire(worker)
        while any(worker in owners for worker in self._run.workers):
            self._step(TICK_S)

    def close(self) -> None:
        """Lets idle workers end, and closes the executables kept for a comparison."""
        self._side_tasks.close()
        self._run.workers.finish_all()
        self._run.fastest.close()

    def _compared(
        self, configs: Mapping[int, Config], budget_s: float | None, ends_at: float | None = None
    ) -> finals.Final:
        """Makes a worker compare configs; if the worker dies, and nothing ends the comparison, another tries once.

        Raises:
            ValueError: the comparison failed.
        """
        run = self._run
        kept = [run.fastest.kept_fd(index) for index in configs]
        entries = tuple(
            Finalist(config=as_json(config), saved=fd is not None, index=index)
            for (index, config), fd in zip(configs.items(), kept, strict=True)
        )
        fds = [fd for fd in kept if fd is not None]
        task = Compare(entries=entries, budget_s=budget_s, last=True)
        seconds = len(entries) * (run.plan.compile_timeout_s + run.plan.timeout_s)
        tries = 0
        while run.devices:
            tries, device = tries + 1, run.devices[0]
            self._stops.begin()
            try:
                while (worker := start_on(run, device, task, fds, seconds)) is None:
                    self._check_time(ends_at)
                    self._step(TICK_S)
                # A process with a device takes a third of a second to die after its reply.
                while not isinstance(worker.reply, Compared) and run.workers.get(worker.number) is not None:
                    if self._is_late(ends_at):
                        run.workers.retire(worker)
                    self._step(None if ends_at is None else TICK_S)
            finally:
                for each in run.devices:
                    each.lease.release()
            if isinstance(reply := worker.reply, Compared):
                rounds = reply.rounds_ms, reply.warm_ms, reply.observed
                typical_ms = {index: (ms,) for index, ms in zip(configs, reply.typical_ms, strict=False)}
                return finals.Final.of(configs, *rounds, typical_ms=typical_ms, objective=run.plan.objective)
            self._check_time(ends_at)
            assert worker.verdict is not None
            if ends_at is not None or not may_be_repeated(run, worker.verdict, tries):
                raise ValueError(f"{worker.verdict.outcome.value}: {worker.verdict.message}")
        raise ValueError("no device is left")

    def _is_late(self, ends_at: float | None) -> bool:
        return ends_at is not None and self._clock() >= ends_at

    def _check_time(self, ends_at: float | None) -> None:
        """Raises ValueError if the time is over."""
        if self._is_late(ends_at):
            raise ValueError("it would have taken too long")

    def _start_workers(self) -> None:
        """Starts all tasks that may start now."""
        run, admission, route = self._run, self._admission, self._route
        self._side_tasks.update_reference()
        admission.update()
        for device in run.devices:
            route.prepare_on(device)
        admission.order()
        while admission.may_compile():
            route.start_compiling(run.jobs.pending.popleft())
        route.retire_unneeded()
        self._side_tasks.confirm_next()
        for device in run.devices:
            if admission.may_measure(device):
                route.measure_on(device)

    def _step(self, timeout_s: float | None = None) -> bool:
        """Handles the next events, then everything that sends none.

        Args:
            timeout_s: seconds to wait for an event; None waits until the next deadline.

        Returns:
            Whether a task may start now.
        """
        events = self._workforce.poll(self._until_next_deadline() if timeout_s is None else timeout_s)
        for event in events:
            self._handle(event)
        self._run.jobs.settle_held()
        self._run.gemm_cache.update()
        self._watch()
        return not events or not all(map(_is_progress, events))

    def _handle(self, event: Event) -> None:
        worker = self._run.workers.get(event.number)
        if worker is None:
            if isinstance(event, Ended):
                self._workforce.forget(event.number)
            return
        match event:
            case Said(message=dict() as message):
                self._replies.on_message(worker, message)
            case Said(message=damage):
                verdict = WorkerVerdict(Outcome.CRASHED, f"it damaged its own connection: {damage}")
                self._run.workers.kill_with_verdict(worker, verdict)
            case Ended():
                self._replies.on_exit(worker, event.status)

    def _until_next_deadline(self) -> float:
        now = self._clock()
        deadlines = [worker.deadline for worker in self._run.workers]
        return max(0.0, min([*deadlines, max(self._next_tick, now + 0.001)]) - now)

    def _watch(self) -> None:
        """Kills workers that are overdue or hold too much memory, and gives up workers that do not die."""
        if lost_s := self._stops.lost_s():
            self._extend_deadlines(lost_s)
        now, workers = self._clock(), self._run.workers
        if any(now >= worker.deadline for worker in workers):
            # A message that came in time counts, however late this process reads it.
            for event in self._workforce.poll(0.0):
                self._handle(event)
        for worker in workers:
            if now >= worker.deadline:
                if worker.verdict is None:
                    workers.kill_with_verdict(worker, overdue(worker, self._run.plan))
                else:
                    self._replies.give_up(worker)
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._on_tick()
            self._workforce.trim_logs()
            if reason := self._source.reason_to_stop():
                self._replies.stop(reason)
            for worker, verdict in self._run.memory.over(now):
                workers.kill_with_verdict(worker, verdict)

    def _extend_deadlines(self, lost_s: float) -> None:
        """Adds to all deadlines the time while this process, and perhaps its workers, stood still."""
        _logger.info("this process was stopped for %.1f s: deadlines are extended by it", lost_s)
        for worker in self._run.workers:
            worker.stood_still(lost_s)


def _is_progress(event: Event) -> bool:
    """Returns whether an event only announces a phase, so that nothing can start for it."""
    frame = event.message if isinstance(event, Said) else None
    return isinstance(frame, dict) and frame.get("message") == PhaseEntered.__name__
