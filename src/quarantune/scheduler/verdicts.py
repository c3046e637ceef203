"""Verdicts on workers whose deadline passed, whose program is too large, or whose task raised."""

from __future__ import annotations

import re

from quarantune.sandbox.messages import Failed
from quarantune.scheduler.plan import STARTUP_DEADLINE_S, Plan
from quarantune.scheduler.workers import Job, Worker, WorkerVerdict
from quarantune.values.amounts import memory_text, too_long
from quarantune.values.trial import NO_FIGURES, Outcome, Phase

_UNTOLD = "Pass pipeline failed"
"""The end of a message from Mosaic whose diagnostic is only in the log."""
_DIAGNOSTIC = re.compile(r"\berror: (\S.*)")


def overdue(worker: Worker, plan: Plan) -> WorkerVerdict:
    """Returns the verdict on a worker whose deadline has passed."""
    if worker.side_task_s is not None and worker.began_at is not None:
        return WorkerVerdict(Outcome.TIMEOUT, too_long("it", worker.side_task_s, "timeout"))
    if worker.side_task_s is None and worker.holds_device and worker.phase is not Phase.COMPILE:
        return WorkerVerdict(Outcome.TIMEOUT, too_long("checking and measuring", plan.timeout_s, "timeout"))
    if worker.began_at is not None or worker.phase is Phase.COMPILE:
        return WorkerVerdict(Outcome.TIMEOUT, too_long("compiling", plan.compile_timeout_s, "compile_timeout"))
    return WorkerVerdict(Outcome.LOST, f"the worker was not up within {STARTUP_DEADLINE_S:g} s")


def too_large(job: Job, plan: Plan) -> WorkerVerdict | None:
    """Returns the verdict on a config whose program needs more device memory than it may; None if it does not."""
    needed, most = (job.figures or NO_FIGURES).device_bytes, plan.memory.device_bytes
    if needed is None or most is None or needed <= most:
        return None
    text = f"its program needs {memory_text(needed, most)} of device memory, over max_device_memory of "
    return WorkerVerdict(Outcome.DEVICE_OOM, f"{text}{memory_text(most, most)}: raise it if it may take more")


def raised(reply: Failed) -> WorkerVerdict:
    """Returns the verdict on a worker whose task raised."""
    if reply.outcome == "wrong":
        return WorkerVerdict(Outcome.WRONG, reply.text)
    outcome = Outcome.ERROR if reply.outcome == "unfit" else Outcome(reply.outcome)
    return WorkerVerdict(outcome, reply.message)


def with_diagnostic(message: str, log: str) -> str:
    """Returns a compiler's message, with the diagnostic from the log if it says only that something failed."""
    found = _DIAGNOSTIC.search(log) if message.endswith(_UNTOLD) else None
    return f"{message}: {found[1]}" if found else message
