"""Decides when a further config may be compiled, and when a device may measure."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from quarantune.scheduler.run_state import RunState
from quarantune.scheduler.workers import DeviceState, Job, WorkerState

_PARKED_S = 5.0
"""Seconds that a compiled config may wait for configs before it. An interrupted sweep keeps measured configs only."""
_PARKED_SHARE = 0.25
"""Share of the memory, held by workers or free, that compiled configs may hold while others compile."""
_ASKED_AT_ONCE = 8
"""Number of configs to ask a source for at once if compiling and measuring do not alternate. At 400 trials, asking
`surrogate` for one config took 13 ms of CPU, and for eight 24 ms (on a CPU with 2 cores)."""
_MAX_READY = 64
"""Largest number of executables that wait for measuring; each holds a descriptor."""


class Admission:
    """Decides for every route which configs may begin to compile, and which devices may measure."""

    def __init__(self, run: RunState, waiting: Callable[[], int], may_begin: Callable[[Job], bool]) -> None:
        """Sets up the admission.

        Args:
            run: the run.
            waiting: returns how many compiled configs wait for a device.
            may_begin: returns whether a worker can take a job, or a new worker may start.
        """
        self._run = run
        self._waiting = waiting
        self._may_begin = may_begin

    def update(self) -> None:
        """Decides whether to compile or to measure; called before anything starts."""

    def order(self) -> None:
        """Orders the configs that wait for a compile worker."""

    def may_compile(self) -> bool:
        """Whether one more config may begin to compile now."""
        run, pending, workers = self._run, self._run.jobs.pending, self._run.workers
        if not run.devices or workers.compiling() >= run.numbers.slots or not self._is_open():
            return False
        if not self._is_any_pending() or not self._may_begin(pending[0]):
            return False
        is_awaited = run.jobs.default_is_pending() and run.jobs.may_be_compared(pending[0])
        if not is_awaited and (run.worker_count.is_full or (run.worker_count.most == 1 and run.jobs.ready)):
            return False
        if self._suspect_runs() or (pending[0].was_lost and (workers.compiling() or workers.measuring())):
            return False
        if self._runs_alone() or (pending[0].is_alone and not self._is_quiet()):
            return False
        return self._has_place()

    def _is_open(self) -> bool:
        """Returns whether now is a time to compile."""
        raise NotImplementedError

    def _has_place(self) -> bool:
        """Returns whether the next config has a place to wait after compiling."""
        raise NotImplementedError

    def _wanted(self) -> int:
        """Returns how many configs to ask the source for now."""
        raise NotImplementedError

    def _is_any_pending(self) -> bool:
        """Returns whether a config is pending; asks the source if none is and one could begin now.

        A search that chooses later has learnt from more trials. A burst of compiling brings no new trials, so the
        source gives the whole burst at once.
        """
        jobs = self._run.jobs
        if jobs.pending or not jobs.may_grow:
            return bool(jobs.pending)
        wanted = self._wanted()
        return wanted > 0 and jobs.refill(wanted)

    def may_measure(self, device: DeviceState) -> bool:
        """Whether a worker may take a device now."""
        run = self._run
        if device.measuring is not None or run.reference.is_coming:
            return False
        if run.reference.is_open and run.workers.measuring():
            return False  # while no output is known to be right, outputs arrive one after another
        return not (
            self._suspect_runs() or (self._suspect_waits() and (run.workers.measuring() or run.workers.compiling()))
        )

    def _suspect_runs(self) -> bool:
        """Whether a suspect runs: a config whose worker was lost before. It runs alone, as it may kill others."""
        return any(
            worker.job is not None and worker.job.was_lost and worker.state is not WorkerState.PARKED
            for worker in self._run.workers
        )

    def _suspect_waits(self) -> bool:
        """Whether a compiled suspect waits until nothing else runs."""
        run = self._run
        waiting = [
            *itertools.islice(run.jobs.ready, 1),
            *(worker.job for worker in run.workers.in_state(WorkerState.PARKED)),
        ]
        return any(job is not None and job.was_lost and run.jobs.may_be_compared(job) for job in waiting)

    def _runs_alone(self) -> bool:
        """Whether a config that may use all memory runs or waits."""
        return any(job.is_alone for job in [*self._run.jobs.ready, *self._run.workers.jobs()])

    def _is_quiet(self) -> bool:
        """Whether no compiled config waits and only standby workers live."""
        run = self._run
        is_none_ready = not run.jobs.ready or run.jobs.default_is_pending()
        return is_none_ready and all(worker.is_standby for worker in run.workers)


class Stream(Admission):
    """Compiles configs while others are measured."""

    def order(self) -> None:
        """Puts the configs first that will compile longest."""
        self._run.jobs.put_longest_first(self._run.workers.compiling_s())

    def _is_open(self) -> bool:
        return True

    def _has_place(self) -> bool:
        jobs = self._run.jobs
        return not self._suspect_waits() and (len(jobs.ready) < _MAX_READY or jobs.default_is_pending())

    def _wanted(self) -> int:
        """Returns how many configs to ask the source for now.

        Many configs compile while a worker initialises its device, or while `ref_fn` runs. Until then, twice as many
        may wait, so that no slot idles then, nor while a device measures them.
        """
        run, slots = self._run, self._run.numbers.slots
        is_early = run.reference.is_coming or not run.workers.in_state(WorkerState.IDLE, WorkerState.MEASURING)
        if max(run.numbers.parked, (2 if is_early else 1) * slots) <= self._waiting():
            return 0
        return max(_ASKED_AT_ONCE, slots - run.workers.compiling())


class Bursts(Admission):
    """Alternates bursts of compiling and of measuring, because compiling would disturb measuring."""

    def __init__(self, run: RunState, waiting: Callable[[], int], may_begin: Callable[[Job], bool]) -> None:
        super().__init__(run, waiting, may_begin)
        self._waiting_since: float | None = None
        self._is_measuring = False

    def update(self) -> None:
        """Decides whether to compile or to measure now."""
        run = self._run
        if run.jobs.default_is_pending():
            self._is_measuring = False
            self._make_way()
            return
        waiting = self._waiting()
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = run.clock()
        if self._is_measuring:
            self._is_measuring = bool(waiting) or run.workers.measuring() > 0
        elif waiting and not run.workers.compiling():
            self._is_measuring = not (self._has_room() and self._is_any_pending())

    def _make_way(self) -> None:
        """If the defaults must run alone, ends the workers that wait for them; their configs compile again."""
        jobs = self._run.jobs
        for worker in self._run.workers.in_state(WorkerState.PARKED) if jobs.pending[0].is_alone else ():
            if worker.job is not None:
                jobs.release_same_program(worker.job)
                jobs.pending.append(worker.job)
            self._run.workers.retire(worker)

    def _is_open(self) -> bool:
        return not (self._is_measuring or self._run.reference.is_coming)

    def _has_place(self) -> bool:
        return not self._run.workers.measuring() and self._has_room()

    def _wanted(self) -> int:
        return self._run.numbers.parked - self._waiting() - self._run.workers.compiling() if self._has_place() else 0

    def may_measure(self, device: DeviceState) -> bool:
        """Whether a worker may take a device now; while configs compile, releases the device's lease."""
        if not super().may_measure(device):
            return False
        if not self._is_measuring:
            device.lease.release()
        return self._is_measuring and not self._run.workers.compiling()

    def _has_room(self) -> bool:
        """Whether one more compiled config may wait for a device."""
        run, pending = self._run, self._run.jobs.pending
        if run.jobs.default_is_pending():
            return True
        waiting = self._waiting() + run.workers.compiling()
        if waiting and (self._runs_alone() or (pending and pending[0].is_alone)):
            return False
        return waiting < min(run.numbers.parked, run.worker_count.most) and not self._is_late(waiting)

    def _is_late(self, waiting: int) -> bool:
        """Returns whether waiting configs should run before further configs compile."""
        run = self._run
        is_long = self._waiting_since is not None and run.clock() - self._waiting_since > _PARKED_S
        return is_long or (waiting > 1 and run.memory.held_share > _PARKED_SHARE)


class Batches(Bursts):
    """Bursts that compile a whole batch, because compiled programs wait in files and no worker holds them."""

    def order(self) -> None:
        """Puts the configs first that will compile longest."""
        self._run.jobs.put_longest_first(self._run.workers.compiling_s())

    def _is_late(self, waiting: int) -> bool:
        return False
