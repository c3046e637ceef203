"""Leases: the right to measure on a device, for which the tuners of one user and machine take turns."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import struct
import sys
import weakref
from collections.abc import Iterable, Sequence

from quarantune.devices.device import Device
from quarantune.host import machine

_logger = logging.getLogger("quarantune")

_NAMESPACE = "_QUARANTUNE_LEASE_NAMESPACE"
"""Prefixes the names of leases, so that test processes that run side by side do not wait for one another's turns."""
_PATIENCE_S = 60.0
"""A lease held by another tuner for this long is taken for stuck."""
_YIELD_S = 0.12
"""After a turn, a lease is left alone this long where somebody else waits: more than two of their polls."""
_LOOK_S = 0.5
"""How often a waiting tuner looks at the holder; one that is stopped at two looks will not go on by itself."""
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


class Lease:
    """The right to measure on a device: other tuners of this user, in any process or thread, wait for it.

    That of a group is the right to every device in it, taken whole or not at all, so that no two wait for each other.
    It is a name in Linux's abstract socket namespace: the kernel frees it with its holder, whatever that dies of, and
    there is no file to be left behind. A second name says that somebody waits, so that a busy tuner lets others have a
    turn. The holder listens, so that those who wait can ask the kernel who it is. Where there are no such names every
    tuner has its way at once.

    A holder that will not let go is passed over: measuring goes on beside it, with one warning, for the life of this
    object, which is that of a sweep.
    """

    def __init__(self, device: Device, *, thread: int | None = None) -> None:
        """Sets up a lease, held by nobody.

        Args:
            device: the device.
            thread: the thread whose sweep this is for. One that is started from a callback of another sweep of the same
                thread does not wait for that one, which cannot go on meanwhile.
        """
        self._device = device
        self._thread = thread
        self._held: list[socket.socket] = []
        self._waiting: dict[str, socket.socket] = {}
        self._waits_since: float | None = None
        self._had_turn = False
        self._not_before = 0.0
        self._passes = False
        self._next_look = 0.0
        self._suspicion = ""

    def acquire(self, now: float) -> bool:
        """Takes the lease if it is free; never waits.

        Args:
            now: the time in seconds on any steady clock.

        Returns:
            Whether to measure now: the lease is held, or its holder is passed over.
        """
        if self._held or sys.platform != "linux":
            return True
        if self._had_turn:
            self._had_turn = False
            self._not_before = now + _YIELD_S if self._somebody_waits() else now
        if now < self._not_before:
            return False
        self._held = _bind_all(self._names("lease"))
        if self._held:
            for claimed in self._held:
                claimed.listen(_BACKLOG)
            if self._thread is not None:
                _threads.update(dict.fromkeys(self._names("lease"), self._thread))
            self._stop_waiting()
            return True
        if not self._passes:
            self._wait(now)
        return self._passes

    def release(self) -> None:
        """Gives the lease up; one that is not held is no harm."""
        self._stop_waiting()
        if self._held:
            if self._thread is not None:
                for name in self._names("lease"):
                    _threads.pop(name, None)
            _close_all(self._held)
            self._held = []
            self._had_turn = True

    def _wait(self, now: float) -> None:
        """Queues up, unless there is no point in waiting."""
        if self._thread is not None and self._thread in map(_threads.get, self._names("lease")):
            self._passes = True
            _logger.debug("a sweep that waits for this one holds %s", self._device.name)
            return
        for name in self._names("queue"):
            if name not in self._waiting and (place := _bind(name)) is not None:
                self._waiting[name] = place
        if self._waits_since is None:
            self._waits_since = self._next_look = now
            _logger.info("waiting for %s: another tuner is measuring on it", self._device.name)
        if now - self._waits_since > _PATIENCE_S:
            self._pass(f"another tuner has held {self._device.name} for over {_PATIENCE_S:g} s")
        elif now >= self._next_look:
            self._next_look = now + _LOOK_S
            holders = [_holder(name) for name in self._names("lease")]
            complaints = [complaint for holder in holders if (complaint := holder.complaint)]
            if complaints and (complaints[0] == self._suspicion or any(holder.is_foreign for holder in holders)):
                self._pass(f"{self._device.name} is held by {complaints[0]}")
            self._suspicion = complaints[0] if complaints else ""

    def _pass(self, reason: str) -> None:
        _logger.warning("%s; measuring beside it", reason)
        self._passes = True
        self._stop_waiting()

    def _somebody_waits(self) -> bool:
        probes = _bind_all(self._names("queue"))
        _close_all(probes)
        return not probes

    def _stop_waiting(self) -> None:
        self._waits_since = None
        self._suspicion = ""
        _close_all(self._waiting.values())
        self._waiting.clear()

    def _names(self, role: str) -> list[str]:
        owner = f"{os.environ.get(_NAMESPACE, '')}{os.geteuid()}"
        return [f"\0quarantune-{role}-{owner}-{device.name}" for device in self._device.members]


@dataclasses.dataclass(frozen=True)
class _Holder:
    """Who holds a name.

    Attributes:
        complaint: why not to wait for it; empty where there is no reason.
        is_foreign: whether it is a process of another user, which no tuner of this user's can be.
    """

    complaint: str = ""
    is_foreign: bool = False


def _holder(name: str) -> _Holder:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except ConnectionRefusedError:
            # Nobody, by now, or one that has yet to listen: it is asked once more before it counts.
            return _Holder("a process that is no tuner, as it does not listen")
        except OSError:
            return _Holder()
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        return _Holder(f"process {pid} of another user ({user})", is_foreign=True)
    if pid and machine.is_stopped(pid):
        return _Holder(f"process {pid}, which is stopped")
    return _Holder()


def _bind(name: str) -> socket.socket | None:
    """Returns a socket that owns `name`, or None where another one does."""
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claimed.bind(name)
    except OSError:
        claimed.close()
        return None
    _claimed.add(claimed)
    return claimed


def _bind_all(names: Sequence[str]) -> list[socket.socket]:
    """Returns sockets that own all the names, or none where another one owns any."""
    bound: list[socket.socket] = []
    for name in names:
        if (claimed := _bind(name)) is None:
            _close_all(bound)
            return []
        bound.append(claimed)
    return bound


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for claimed in sockets:
        claimed.close()


_claimed: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_threads: dict[str, int] = {}
"""The thread whose sweep holds a lease of this process, by name."""


def _disclaim() -> None:
    """Closes, in a fork, the copies of what its parent holds: they would keep it from ever being free again."""
    for claimed in list(_claimed):
        claimed.close()
    _threads.clear()


os.register_at_fork(after_in_child=_disclaim)
