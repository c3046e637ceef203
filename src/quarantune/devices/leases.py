"""Device leases: the tuners of one user on one machine take turns at measuring on a device."""

from __future__ import annotations

import logging
import os
import socket
import struct
import weakref
from collections.abc import Iterable, Sequence

from quarantune.devices.discovery import Device
from quarantune.host import machine

_logger = logging.getLogger("quarantune")

_NAMESPACE = "_QUARANTUNE_LEASE_NAMESPACE"
"""Environment variable with a prefix for the names of leases, so that parallel tests do not wait for each other."""
_PATIENCE_S = 60.0
"""Seconds after which a lease that another tuner holds counts as stuck."""
_TURN_S = 5.0
"""Seconds after which a measuring tuner asks whether others wait; well below their patience."""
_YIELD_S = 0.12
"""Seconds for which a tuner leaves the lease to waiting tuners after a turn: over two of their polling intervals."""
_CHECK_S = 0.5
"""Seconds between a waiting tuner's checks of the holder; it passes over a holder that is stopped at two in a row."""
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


class Lease:
    """The right to measure on a device; other tuners of this user, in any process or thread, wait for it.

    The lease on a group of devices covers all of them or none, so that no two tuners wait for each other.

    A lease is a name in Linux's abstract socket namespace: the kernel frees the name when its holder dies, for whatever
    reason, and leaves no file behind. A second name shows that a tuner waits, so that a busy tuner gives others a turn.
    The holder listens on its socket, so that a waiting tuner can ask the kernel for the holder's process.

    A tuner passes over a holder that does not release the lease: it warns once and then measures at the same time, for
    the lifetime of this object, which is one sweep.
    """

    def __init__(self, device: Device, *, thread: int | None = None) -> None:
        """Prepares a lease without taking it.

        Args:
            device: the device. If it has no platform, JAX chooses it in the caller's process, and it needs no lease.
            thread: the thread that runs the sweep. A sweep in a callback of another sweep of the same thread does not
                wait for the outer sweep, which cannot continue before the inner one ends.
        """
        self._device = device
        self._thread = thread
        self._held: list[socket.socket] = []
        self._waiting: dict[str, socket.socket] = {}
        self._waits_since: float | None = None
        self._had_turn = False
        self._turn_ends = 0.0
        self._not_before = 0.0
        self._is_passed_over = False
        self._next_check = 0.0
        self._last_reason = ""

    def acquire(self, now: float) -> bool:
        """Takes the lease if it is free; never waits.

        Call it before each measurement. After a whole turn, it gives up the lease if other tuners wait.

        Args:
            now: seconds on any monotonic clock.

        Returns:
            Whether measuring may begin: this object holds the lease now, or passes over its holder.
        """
        if not self._device.platform:
            return True
        if self._held:
            if now < self._turn_ends:
                return True
            self.release()
        if self._had_turn:
            self._had_turn = False
            probes = _bind_all(self._names("queue"))
            _close_all(probes)
            self._not_before = now if probes else now + _YIELD_S  # others wait
        if now < self._not_before:
            return False
        self._held = _bind_all(self._names("lease"))
        if self._held:
            self._turn_ends = now + _TURN_S
            for claimed in self._held:
                claimed.listen(_BACKLOG)
            if self._thread is not None:
                _threads.update(dict.fromkeys(self._names("lease"), self._thread))
            self._stop_waiting()
            return True
        if not self._is_passed_over:
            self._wait(now)
        return self._is_passed_over

    def release(self) -> None:
        """Releases the lease, if this object holds it."""
        self._stop_waiting()
        if self._held:
            if self._thread is not None:
                for name in self._names("lease"):
                    _threads.pop(name, None)
            _close_all(self._held)
            self._held = []
            self._had_turn = True

    def _wait(self, now: float) -> None:
        """Queues up for the lease, and passes over a holder that is not worth waiting for."""
        if self._thread is not None and self._thread in map(_threads.get, self._names("lease")):
            self._is_passed_over = True
            _logger.debug("a sweep that waits for this one holds %s", self._device.name)
            return
        for name in self._names("queue"):
            if name not in self._waiting and (place := _bind(name)) is not None:
                self._waiting[name] = place
        if self._waits_since is None:
            self._waits_since = self._next_check = now
            _logger.info("waiting for %s: another tuner is measuring on it", self._device.name)
        if now - self._waits_since > _PATIENCE_S:
            self._pass(f"another tuner has held {self._device.name} for over {_PATIENCE_S:g} s")
        elif now >= self._next_check:
            self._next_check = now + _CHECK_S
            holders = [_holder(name) for name in self._names("lease")]
            reason = next((reason for reason, _ in holders if reason), "")
            if reason and (reason == self._last_reason or any(is_foreign for _, is_foreign in holders)):
                self._pass(f"{self._device.name} is held by {reason}")
            self._last_reason = reason

    def _pass(self, reason: str) -> None:
        _logger.warning("%s; measuring at the same time", reason)
        self._is_passed_over = True
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._waits_since = None
        self._last_reason = ""
        _close_all(self._waiting.values())
        self._waiting.clear()

    def _names(self, role: str) -> list[str]:
        owner = f"{os.environ.get(_NAMESPACE, '')}{os.geteuid()}"
        return [f"\0quarantune-{role}-{owner}-{device.name}" for device in self._device.members]


def _holder(name: str) -> tuple[str, bool]:
    """Returns a reason not to wait for the process that holds a name, and whether the process is another user's.

    The reason describes the process, and is empty if waiting makes sense. Another user's process is not our tuner.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except ConnectionRefusedError:
            # The holder may have gone, or may not listen yet, so this counts only if the next check finds the same.
            return "a process that does not listen, as tuners do", False
        except OSError:
            return "", False
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        return f"process {pid} of another user ({user})", True
    return (f"process {pid}, which is stopped" if pid and machine.is_stopped(pid) else ""), False


def _bind(name: str) -> socket.socket | None:
    """Returns a socket that owns `name`; None if another socket owns it."""
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claimed.bind(name)
    except OSError:
        claimed.close()
        return None
    _claimed.add(claimed)
    return claimed


def _bind_all(names: Sequence[str]) -> list[socket.socket]:
    """Returns sockets that own all of the names; an empty list if another socket owns one."""
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
"""For each lease that this process holds, the thread whose sweep holds it."""


def _close_in_fork() -> None:
    """Closes, in a fork, the copies of the parent's sockets, which would keep the names in use."""
    for claimed in list(_claimed):
        claimed.close()
    _threads.clear()


os.register_at_fork(after_in_child=_close_in_fork)
