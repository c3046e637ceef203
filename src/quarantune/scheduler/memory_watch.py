"""The memory that workers hold, and the workers that hold too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quarantune.host import machine
from quarantune.sandbox.messages import Reply
from quarantune.sandbox.workforce import Workforce
from quarantune.scheduler.plan import Plan
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.workers import Worker, Workers, WorkerState, WorkerVerdict
from quarantune.values.amounts import memory_text
from quarantune.values.trial import Outcome, Phase

_LOOK_S = 0.1
_CLOSE_LOOK_S = 0.25
_WAITING_LOOK_S = 1.0
_FREE_LOOK_S = 1.0
_FAST_BYTES = 64 << 20
_FLOOR_BYTES = 256 << 20
_WAITING = (WorkerState.PARKED, WorkerState.IDLE, WorkerState.AHEAD)


class MemoryWatch:
    """Looks at the memory of all workers now and then.

    Attributes:
        available_memory: returns the bytes of memory that are free now.
    """

    def __init__(
        self,
        workforce: Workforce,
        plan: Plan,
        workers: Workers,
        reference: Reference,
        available_memory: Callable[[], int],
    ) -> None:
        self._workforce = workforce
        self._plan = plan
        self._workers = workers
        self._reference = reference
        self.available_memory = available_memory
        self._bare_bytes = 0
        self._next_look = 0.0
        self._next_close_look = 0.0
        self._next_waiting_look = 0.0
        self._next_free_look = 0.0
        self._total_bytes = 0
        self._free_bytes = available_memory()

    @property
    def held_share(self) -> float:
        """The share that workers hold of the memory that would be free without them."""
        whole = self._total_bytes + self._free_bytes
        return self._total_bytes / whole if whole else 0.0

    def note(self, worker: Worker, reply: Reply) -> None:
        """Takes note of the memory that a worker reports before a config begins in it."""
        if worker.is_bare:
            self._bare_bytes = max(self._bare_bytes, reply.held_bytes - self._workforce.baseline_bytes)
            worker.loaded(is_bare=reply.phase is Phase.LOAD)

    def over(self, now: float) -> list[tuple[Worker, WorkerVerdict]]:
        """Returns the workers that hold too much, each with its verdict.

        This measures active workers each time. Looking for their descendants and at the machine's free memory costs a
        hundred times more, so it happens less often, and as soon as workers take memory fast. Waiting workers are
        measured when they begin to wait, and then seldom: many may wait, and nothing runs in them.

        Args:
            now: the time in seconds.
        """
        if now < self._next_look:
            return []
        self._next_look = now + _LOOK_S
        watched = self._alive()
        is_fast = self._look(watched, now)
        over = [(worker, self._verdict(worker)) for worker in watched if worker.used_bytes > self._limit_bytes(worker)]
        if over or any(worker.verdict and worker.verdict.outcome is Outcome.OOM for worker in self._workers):
            return over  # dying workers have yet to return their memory
        if not is_fast and now < self._next_free_look:
            return []
        self._next_free_look = now + _FREE_LOOK_S
        self._free_bytes = self.available_memory()
        if self._free_bytes < _FLOOR_BYTES and (largest := self.largest()) is not None:
            return [(largest, shortage(largest, f"the machine had only {_gigabytes(self._free_bytes)} left"))]
        return []

    def check_limit(self) -> None:
        """Checks that the limit is not less than a worker holds before a config begins in it.

        Raises:
            ValueError: the limit is less, and the user has set it.
        """
        self._plan.memory.check(self._bare_bytes)

    def largest(self) -> Worker | None:
        """Returns the worker that holds the most memory now."""
        watched = self._alive()
        self._measure(watched, self._workforce.baseline_bytes, exactly=True)
        return max(watched, key=lambda worker: worker.used_bytes, default=None)

    def larger_than(self, dead: Worker) -> Worker | None:
        """Returns a worker that holds much more than a dead worker did, or None.

        The kernel does not see which process holds memory that is shared and not mapped, and kills another.
        """
        largest = self.largest()
        return largest if largest is not None and largest.used_bytes > dead.peak_bytes + _FAST_BYTES else None

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.verdict is None]

    def _look(self, watched: Sequence[Worker], now: float) -> bool:
        """Measures workers; returns whether they take memory fast."""
        baseline = self._workforce.baseline_bytes
        busy = [worker for worker in watched if worker.state not in _WAITING]
        self._measure(busy, baseline)
        is_fast = sum(worker.used_bytes for worker in watched) > self._total_bytes + _FAST_BYTES
        if is_fast or now >= self._next_close_look:
            self._next_close_look = now + _CLOSE_LOOK_S
            for worker in busy:
                pid = self._workforce.pid(worker.number)
                worker.has_descendants([] if pid is None else machine.descendants(pid))
            self._measure([*busy, *self._due(watched, now)], baseline, exactly=True)
            self._total_bytes = sum(worker.used_bytes for worker in watched)
        return is_fast

    def _due(self, watched: Sequence[Worker], now: float) -> list[Worker]:
        """Returns the waiting workers to look at: all of them now and then, else those that have just begun to wait."""
        is_all = now >= self._next_waiting_look
        if is_all:
            self._next_waiting_look = now + _WAITING_LOOK_S
        waiting = [worker for worker in watched if worker.state in _WAITING]
        return [worker for worker in waiting if is_all or worker.measured_as is not worker.state]

    def _measure(self, workers: Sequence[Worker], baseline: int, *, exactly: bool = False) -> None:
        """Records the memory that the process tree of each worker holds now."""
        for worker in workers:
            pid = self._workforce.pid(worker.number)
            used_bytes = worker.memory_meter.held_bytes(
                [] if pid is None else [pid, *worker.descendants],
                baseline_bytes=baseline,
                limit_bytes=self._limit_bytes(worker),
                foreign=self._foreign_files,
                exactly=exactly,
            )
            worker.weigh(used_bytes)

    def _foreign_files(self) -> set[machine.FileId]:
        """Returns the files in memory that count toward no worker."""
        return {*map(machine.file_id, self._reference.fds)} | self._workforce.common_files()

    def _limit_bytes(self, worker: Worker) -> int:
        own = None if worker.job is None else worker.job.limit_bytes
        memory = self._plan.memory
        limit = memory.worker_bytes if own is None else own
        return memory.bare_bytes(limit) if worker.is_bare else limit

    def _verdict(self, worker: Worker) -> WorkerVerdict:
        memory = self._plan.memory
        used, limit = (
            memory_text(amount, memory.worker_bytes) for amount in (worker.used_bytes, self._limit_bytes(worker))
        )
        alone = " alone" if worker.job and worker.job.is_alone else ""
        return WorkerVerdict(Outcome.OOM, f"it held {used}{alone}, {memory.over(limit)}")


def shortage(worker: Worker, reason: str) -> WorkerVerdict:
    """Returns the verdict on the largest worker when memory runs out."""
    text = f"{reason} and it held {_gigabytes(worker.used_bytes)}, the most of all"
    return WorkerVerdict(Outcome.OOM, f"{text}: free memory, or run fewer configs at a time (QUARANTUNE_NUM_WORKERS)")


def _gigabytes(amount: int) -> str:
    return f"{amount / 1e9:.2f} GB"
