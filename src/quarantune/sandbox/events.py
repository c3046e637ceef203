"""Events about the workers of a sandbox."""

from __future__ import annotations

import dataclasses
import signal
from typing import TypeAlias

from quarantune.values.codec import Frame


@dataclasses.dataclass(frozen=True)
class Said:
    """A worker sent a message.

    Attributes:
        number: the worker.
        message: the message's frame, not yet decoded.
    """

    number: int
    message: Frame


@dataclasses.dataclass(frozen=True)
class Damaged:
    """The data from a worker is damaged, so nothing more is read from it.

    Attributes:
        number: the worker.
        reason: the damage, in words.
    """

    number: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """A worker's process is gone, along with every process that it had started.

    Attributes:
        number: the worker.
        status: its exit code, or minus the signal that ended it; None where its template died, or could not start it.
    """

    number: int
    status: int | None


Event: TypeAlias = Said | Damaged | Ended


def was_killed(status: int | None) -> bool:
    """Returns whether a process was ended by a signal that no fault of its own raises.

    Args:
        status: as in `Ended`.
    """
    return status is not None and -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def describe_status(status: int | None) -> str:
    """Returns, in words, how a process ended.

    Args:
        status: as in `Ended`.
    """
    if status is None:
        return "was lost"
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
