"""The process that owns a file: which host and process wrote it, and whether that process still lives."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from typing import Annotated

from quarantune.host.machine import boot_id, process_status
from quarantune.values.codec import (
    Record,
    short_hash,
    within,
)

_LONGEST_TEXT = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner(Record):
    """One process of one host.

    Attributes:
        host: a token for the kernel and PID namespace in which `pid` is valid.
        pid: the process.
        started: its start time, in the kernel's ticks; 0 if unknown.
    """

    host: Annotated[str, short_text]
    pid: Annotated[int, within(1, 2**31)]
    started: Annotated[int, within(0, 2**64)]

    @classmethod
    def this_process(cls) -> Owner:
        """Returns the calling process."""
        status = process_status(os.getpid())
        return cls(host=this_host(), pid=os.getpid(), started=int(status[19]) if status else 0)

    def __str__(self) -> str:
        """Returns the owner as a part of names."""
        return f"{self.host}-{self.pid}-{self.started}"

    def is_dead(self) -> bool:
        """Returns whether the process is dead for certain; False for a process on another host."""
        if self.host != this_host():
            return False
        if status := process_status(self.pid):
            return status[0] in (b"Z", b"X") or self.started not in (0, int(status[19]))
        try:
            os.kill(self.pid, 0)  # /proc may hide other users' processes
        except PermissionError:
            return False
        except (ProcessLookupError, OverflowError):  # no process has a number that is too large
            return True
        return False


def this_host() -> str:
    """Returns the token for this host; see `Owner.host`."""
    # Containers can share a host name and have different processes with one PID: the namespace distinguishes them.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return short_hash(f"{platform.node()}|{boot_id()}|{namespace}")


def short_text(value: str) -> str:
    """Returns a text that a message can show.

    Raises:
        ValueError: the text is too long, or has characters that no terminal shows.
    """
    if len(value) > _LONGEST_TEXT or not value.isprintable():
        raise ValueError("it is not a short text")
    return value
