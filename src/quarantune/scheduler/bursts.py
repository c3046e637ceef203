"""Decides when a further config may be compiled, and when compiling and measuring alternate in bursts."""

from __future__ import annotations

import itertools

from quarantune.scheduler.run import Run
from quarantune.scheduler.steps import RouteSteps
from quarantune.scheduler.workers import DeviceState, WorkerState

_PARKED_S = 5.0
"""Seconds that a compiled config may wait for those before it: a config with a result is not lost with the sweep."""
_PARKED_SHARE = 0.25
"""The share of the memory, free without them, that compiled configs may hold while others are compiled."""
_ASKED_AT_ONCE = 8
"""Configs that a source is asked for at once where compiling and measuring do not alternate. Asking `surrogate` for one
config took 13 ms of CPU at 400 trials, for eight 24 ms (on a CPU with 2 cores)."""
_MAX_READY = 64
"""Executables that wait to be measured; each holds a descriptor."""


class Bursts:
    """Admits configs to be compiled and to be measured."""

    def __init__(self, run: Run, route: RouteSteps) -> None:
        self._run = run
        self._route = route
        self._waiting_since: float | None = None
        self._is_measuring = False

    def update(self) -> None:
        """Where compiling and measuring alternate, decides which of the two may go on."""
        run = self._run
        if not run.plan.exclusive:
            return
        if run.jobs.default_is_pending():
            self._is_measuring = False
            self._make_way()
            return
        waiting = self._route.waiting()
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = run.clock()
        if self._is_measuring:
            self._is_measuring = bool(waiting) or run.workers.measuring() > 0
        elif waiting and not run.workers.compiling():
            self._is_measuring = not (self.has_room() and self._is_any_pending())

    def _make_way(self) -> None:
        """Ends workers that wait for the defaults where these must run alone; their configs are compiled again."""
        jobs = self._run.jobs
        for worker in self._run.workers.in_state(WorkerState.PARKED) if jobs.pending[0].is_alone else ():
            if worker.job is not None:
                jobs.release_same_program(worker.job)
                jobs.pending.append(worker.job)
            self._run.workers.retire(worker)

    def may_compile(self) -> bool:
        """Whether one more config may begin to compile now."""
        run, pending, workers = self._run, self._run.jobs.pending, self._run.workers
        if self._is_measuring or not run.devices or workers.compiling() >= run.plan.slots:
            return False
        if (run.plan.exclusive and run.reference.is_coming) or not self._is_any_pending():
            return False
        if not self._route.may_begin(pending[0]):
            return False
        is_awaited = run.jobs.default_is_pending() and run.jobs.may_be_compared(pending[0])
        if not is_awaited and (run.scarcity.is_full or (run.scarcity.most == 1 and run.jobs.ready)):
            return False
        if self._suspect_runs() or (pending[0].was_lost and (workers.compiling() or workers.measuring())):
            return False
        if not run.plan.exclusive and self._suspect_waits():
            return False
        if self._runs_alone() or (pending[0].is_alone and not self._is_quiet()):
            return False
        if run.plan.exclusive:
            return not workers.measuring() and self.has_room()
        return len(run.jobs.ready) < _MAX_READY or run.jobs.default_is_pending()

    def _is_any_pending(self) -> bool:
        """Returns whether a config is pending; the source is asked once one could begin now.

        The later a search is asked, the more trials it has learnt from. Within a burst of compiling there are no new
        trials, so that a whole burst is asked at once.
        """
        run = self._run
        if run.jobs.pending or not run.jobs.may_grow:
            return bool(run.jobs.pending)
        compiling = run.workers.compiling()
        parked = run.plan.parked
        if not run.plan.exclusive:
            # Many configs compile in the time that a worker takes to initialise its device, or `ref_fn` to run; no slot
            # idles until then, nor while those configs are measured.
            is_early = run.reference.is_coming or not run.workers.in_state(WorkerState.IDLE, WorkerState.MEASURING)
            parked = max(parked, (2 if is_early else 1) * run.plan.slots)
        room = parked - self._route.waiting() - (compiling if run.plan.exclusive else 0)
        if room <= 0 or (run.plan.exclusive and (run.workers.measuring() or not self.has_room())):
            return False
        return run.jobs.refill(room if run.plan.exclusive else max(_ASKED_AT_ONCE, run.plan.slots - compiling))

    def may_measure(self, device: DeviceState) -> bool:
        """Whether a device may be assigned now; if not, and configs compile, its lease is released."""
        run = self._run
        if device.measuring is not None or run.plan.compile_only or run.reference.is_coming:
            return False
        if run.reference.is_open and run.workers.measuring():
            return False  # while none is known to be right, outputs are compared one after another
        if self._suspect_runs() or (self._suspect_waits() and (run.workers.measuring() or run.workers.compiling())):
            return False
        if run.plan.exclusive and (run.workers.compiling() or not self._is_measuring):
            if not self._is_measuring:
                device.lease.release()
            return False
        return True

    def has_room(self) -> bool:
        """Whether one more config may wait, compiled, to be measured."""
        run, pending = self._run, self._run.jobs.pending
        if run.jobs.default_is_pending():
            return True
        waiting = self._route.waiting() + run.workers.compiling()
        is_long = self._waiting_since is not None and run.clock() - self._waiting_since > _PARKED_S
        if waiting and (self._runs_alone() or (pending and pending[0].is_alone)):
            return False
        is_heavy = waiting > 1 and run.memory.held_share > _PARKED_SHARE
        is_late = not self._route.waits_in_files and (is_long or is_heavy)
        return waiting < min(run.plan.parked, run.scarcity.most) and not is_late

    def _suspect_runs(self) -> bool:
        """Whether a config runs that was killed, and may kill others: it runs alone, so that none is lost with it."""
        return any(
            worker.job is not None and worker.job.was_lost and worker.state is not WorkerState.PARKED
            for worker in self._run.workers
        )

    def _suspect_waits(self) -> bool:
        """Whether such a config waits, compiled, until nothing else runs."""
        run = self._run
        waiting = [
            *itertools.islice(run.jobs.ready, 1),
            *(worker.job for worker in run.workers.in_state(WorkerState.PARKED)),
        ]
        return any(job is not None and job.was_lost and run.jobs.may_be_compared(job) for job in waiting)

    def _runs_alone(self) -> bool:
        """Whether a config runs, or waits, that may use the memory of all."""
        return any(job.is_alone for job in [*self._run.jobs.ready, *self._run.workers.jobs()])

    def _is_quiet(self) -> bool:
        """Whether no config waits to be measured and no worker lives but those made ready ahead."""
        run = self._run
        is_none_ready = not run.jobs.ready or run.jobs.default_is_pending()
        return is_none_ready and all(worker.is_standby for worker in run.workers)
