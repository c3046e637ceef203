"""Verdicts on workers: from a missed deadline, from an exit status, and from replies that may be forged."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quarantune.host import machine
from quarantune.sandbox.events import describe_status, was_killed
from quarantune.sandbox.messages import Failed, Raised
from quarantune.scheduler.memory_watch import MemoryWatch, shortage
from quarantune.scheduler.plan import STARTUP_DEADLINE_S, Plan
from quarantune.scheduler.workers import Verdict, Worker, Workers, WorkerState
from quarantune.values.trial import Outcome, is_plausible_ms

_UNTOLD = "Pass pipeline failed"
"""All that Mosaic's message may say; its diagnostic is in the log."""
_DIAGNOSTIC = re.compile(r"\berror: (\S.*)")
_MOST_FORGIVEN = 5
"""So often may workers of one config be killed before they begin with it, until that counts against the config."""


def overdue(worker: Worker, plan: Plan) -> Verdict:
    """Returns the verdict on a worker whose deadline has passed."""
    if worker.side_task_s is not None and worker.began:
        return Verdict(Outcome.TIMEOUT, f"it took longer than {worker.side_task_s:g} s")
    if worker.side_task_s is None and worker.holds_device:
        return Verdict(Outcome.TIMEOUT, f"checking and measuring took longer than {plan.timeout_s:g} s")
    if worker.began:
        return Verdict(Outcome.TIMEOUT, f"compiling took longer than {plan.compile_timeout_s:g} s")
    return Verdict(Outcome.LOST, f"the worker was not up within {STARTUP_DEADLINE_S:g} s")


def forged(error: Exception) -> Verdict:
    """Returns the verdict on a worker that sent a reply that cannot be true: a config can forge one."""
    return Verdict(Outcome.CRASHED, f"it sent a message that makes no sense: {error!r}")


def raised(reply: Failed) -> Verdict:
    """Returns the verdict on a worker whose task raised."""
    if reply.outcome is Raised.WRONG:
        return Verdict(Outcome.WRONG, reply.text)
    outcome = Outcome.ERROR if reply.outcome is Raised.UNFIT else Outcome(reply.outcome.value)
    return Verdict(outcome, f"{reply.error}: {reply.text}" if reply.text else reply.error)


def forgive(worker: Worker) -> None:
    """Forgets an earlier loss of a config whose worker was killed before it began with the config.

    The kill is then another's doing, and the earlier one may have been, too.
    """
    job = worker.job
    if job is not None and not worker.was_heard and job.forgiven < _MOST_FORGIVEN:
        job.was_lost = False
        job.forgiven += 1


def with_diagnostic(message: str, log: str) -> str:
    """Returns a compiler's message, with the diagnostic from the log where it says only that something failed."""
    found = _DIAGNOSTIC.search(log) if message.endswith(_UNTOLD) else None
    return f"{message}: {found[1]}" if found else message


class Exits:
    """Judges processes that ended by themselves: one that ends without a result did not succeed."""

    def __init__(self, workers: Workers, memory: MemoryWatch) -> None:
        self._workers = workers
        self._memory = memory
        self._oom_kills = machine.oom_kills()

    def judge(self, worker: Worker, status: int | None) -> Verdict:
        """Returns the verdict on a worker, and kills another one that took the memory it died for.

        Args:
            worker: the worker.
            status: its exit code, or minus the signal that ended it; None where its template died with it.
        """
        if status is None:
            return Verdict(Outcome.LOST, "it could not be started, or the process that started it died")
        kills = machine.oom_kills()
        if status != -9 or kills <= self._oom_kills:
            forgive(worker)
            is_first = worker.job is None or not worker.job.was_lost or worker.state is WorkerState.PARKED
            outcome = Outcome.LOST if was_killed(status) and is_first else Outcome.CRASHED
            return Verdict(outcome, f"the process {describe_status(status)} without a result")
        self._oom_kills = kills
        if (culprit := self._memory.larger_than(worker)) is not None:
            reason = "the kernel ran out of memory, killed another config's process"
            self._workers.kill_with_verdict(culprit, shortage(culprit, reason))
            return Verdict(Outcome.LOST, "the kernel killed the process for want of memory that another one held")
        return Verdict(Outcome.OOM, "the kernel's out-of-memory killer took the process")


def checked_duration(duration: float) -> float:
    """Returns a duration in any unit, if it can be one.

    Raises:
        ValueError: it cannot.
    """
    if not 0.0 <= duration < float("inf"):
        raise ValueError(f"{duration} is no duration")
    return duration


def checked_ms(run_ms: float) -> float:
    """Returns the milliseconds of a run, if a run can take so long.

    Raises:
        ValueError: it cannot.
    """
    if not is_plausible_ms(run_ms):
        raise ValueError(f"{run_ms!r} ms is no time that a call can take")
    return run_ms


def checked_samples(samples_ms: Sequence[float]) -> list[float]:
    """Returns samples in milliseconds, if runs can take so long.

    Raises:
        ValueError: they cannot, or there are none.
    """
    if not samples_ms:
        raise ValueError("no samples")
    return [checked_ms(sample_ms) for sample_ms in samples_ms]
