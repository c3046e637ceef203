"""A switch between emulated hosts that delays, loses and refuses frames; a script without tests.

Each host gets TAP devices in its own network namespace, and this process carries every frame between them. So a network
has latency, loss, firewalls and partitions on kernels without traffic control or netfilter. The devices end with this
process.

    python emulated_switch.py '[["HOST", PID, "DEVICE", "SEGMENT"], ...]'

Each line on stdin is a list of rules `[FROM, TO, {FIELD: VALUE}]` that replaces all earlier rules; the answer is `ok`.
`*` stands for every host. The fields are those of `Link`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import struct
import sys
import time

_TUNSETIFF, _TAP, _PLAIN = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 1 << 16
_SYN, _ACK = 0x02, 0x10


@dataclasses.dataclass(frozen=True)
class Link:
    """The way from one host to another.

    Attributes:
        delay_s: the time that each frame takes.
        loss: the share of frames that are lost.
        is_cut: whether no frame arrives.
        closed: ranges of ports to which no new TCP connection is let through.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False
    closed: tuple[tuple[int, int], ...] = ()

    def passes(self, frame: bytes) -> bool:
        """Returns whether a frame arrives."""
        if self.is_cut or (self.loss and random.random() < self.loss):
            return False
        port = new_connection(frame) if self.closed else None
        return port is None or not any(first <= port <= last for first, last in self.closed)


def new_connection(frame: bytes) -> int | None:
    """Returns the port to which a frame asks for a TCP connection; None for any other frame."""
    kind = frame[12:14]
    if kind == b"\x08\x00" and frame[23] == 6:
        tcp = 14 + 4 * (frame[14] & 15)
    elif kind == b"\x86\xdd" and frame[20] == 6:
        tcp = 54
    else:
        return None
    asks = len(frame) > tcp + 13 and frame[tcp + 13] & (_SYN | _ACK) == _SYN
    return int.from_bytes(frame[tcp + 2 : tcp + 4], "big") if asks else None


def tap(pid: int, device: str) -> int:
    """Returns the descriptor of a new device in the network namespace of a process."""
    with open("/proc/self/ns/net") as ours:
        try:
            _enter(f"/proc/{pid}/ns/net")
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP | _PLAIN))
        finally:  # a host that is killed must not take the switch along
            _enter(f"/proc/self/fd/{ours.fileno()}")
    return descriptor


def _enter(space: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(space) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


class Switch:
    """Carries frames between devices."""

    def __init__(self, devices: list[tuple[str, int, str, str]]) -> None:
        self._selector = selectors.DefaultSelector()
        self._hosts: dict[int, str] = {}
        self._segments: dict[str, list[int]] = {}
        self._owners: dict[tuple[str, bytes], int] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        for host, pid, device, segment in devices:
            descriptor = tap(pid, device)
            self._hosts[descriptor] = host
            self._segments.setdefault(segment, []).append(descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, segment)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def run(self) -> None:
        """Carries frames until stdin ends."""
        print("ready", flush=True)
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    if not (line := sys.stdin.readline()):
                        return
                    self._links = {(source, to): Link(**fields) for source, to, fields in json.loads(line)}
                    print("ok", flush=True)
                else:
                    self._receive(key.fd, key.data)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(self._late)
                _write(to, frame)

    def _receive(self, source: int, segment: str) -> None:
        with contextlib.suppress(OSError):  # no more frames, or the device is down
            while frame := os.read(source, _MOST_BYTES):
                self._owners[segment, frame[6:12]] = source
                owner = self._owners.get((segment, frame[:6]))
                everyone = [each for each in self._segments[segment] if each != source]
                for to in everyone if owner is None else [owner]:
                    self._send(source, to, frame)

    def _send(self, source: int, to: int, frame: bytes) -> None:
        link = self._link(self._hosts[source], self._hosts[to])
        if not link.passes(frame):
            return
        if link.delay_s:
            heapq.heappush(self._late, (time.monotonic() + link.delay_s, next(self._order), to, frame))
        else:
            _write(to, frame)

    def _link(self, source: str, to: str) -> Link:
        for names in ((source, to), (source, "*"), ("*", to), ("*", "*")):
            if (found := self._links.get(names)) is not None:
                return found
        return Link()


def _write(to: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the device is down, or its queue is full
        os.write(to, frame)


if __name__ == "__main__":
    Switch(json.loads(sys.argv[1])).run()
