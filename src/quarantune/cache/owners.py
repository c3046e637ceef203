"""The process that owns a file: how it is named, and whether it is dead for certain."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from typing import Annotated

from quarantune.cache import content
from quarantune.cache.keys import short_hash
from quarantune.host import proc
from quarantune.values.codec import Record, within


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner(Record):
    """One process of one host.

    Attributes:
        host: a token for the kernel and PID namespace in which `pid` is valid.
        pid: the process.
        started: its start time, in the kernel's ticks; 0 where that is not known.
    """

    host: Annotated[str, content.short_text]
    pid: Annotated[int, within(1, 2**31)]
    started: Annotated[int, within(0, 2**64)]

    @classmethod
    def this_process(cls) -> Owner:
        """Returns the calling process."""
        pid = os.getpid()
        status = _status(pid)
        return cls(host=_host_token(pid), pid=pid, started=status[1] if status else 0)

    def is_dead(self) -> bool:
        """Returns whether the process is dead for certain; False for one on another host."""
        if self.host != this_host():
            return False
        status = _status(self.pid)
        if status is None:
            return not _exists(self.pid)
        state, started = status
        return state in "ZX" or self.started not in (0, started)


def this_host() -> str:
    """Returns the token for this host, as in `Owner.host`."""
    return _host_token(os.getpid())


@functools.lru_cache(maxsize=1)
def _host_token(_pid: int) -> str:
    # Containers can share a host name and have different processes with one PID: the namespace distinguishes them. The
    # PID is the key of this function's cache, because a forked child may be in another namespace.
    return short_hash(f"{platform.node()}|{boot_id()}|{_pid_namespace()}")


def boot_id() -> str:
    """Returns the kernel's identifier of this boot; empty where there is none."""
    return proc.text("/proc/sys/kernel/random/boot_id").strip()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, int] | None:
    fields = proc.status(pid)
    return (fields[0].decode(), int(fields[19])) if fields else None


def _exists(pid: int) -> bool:
    # /proc may hide other users' processes, so a missing entry does not prove that a process is dead.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False  # no process has such a number
    except PermissionError:
        return True
    return True
