"""The connections between the scheduler, the templates and the workers: checksummed JSON frames and descriptors.

A frame is a magic word, a length, a CRC-32 and that many bytes of JSON. Nothing is ever unpickled. Bytes that do not
parse are damage: a config can write anything to any descriptor it finds, this connection included.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quarantune.values import codec
from quarantune.values.codec import DamageError, JsonObject

_HEADER = struct.Struct("<4sII")
_MAGIC = b"qtf1"
MAX_FRAME_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_MAX_FDS = 16
FRAME_DEADLINE_S = 10.0
"""Seconds after its first byte at which an incomplete frame counts as damage."""


_Expected = TypeVar("_Expected")


class WireClosedError(RuntimeError):
    """The other end is closed, or does not read."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Returns the frame that carries `message`.

    Raises:
        ValueError: the message is larger than `MAX_FRAME_BYTES`, or holds NaN or an infinity.
    """
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is over the wire's limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(_MAGIC, len(body), zlib.crc32(body)) + body


class Connection:
    """One end of a socket pair that carries messages and descriptors.

    Descriptors arrive with the first byte of their message, so a queue of descriptors and a count in each message are
    enough to match them.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # the program's `socket.setdefaulttimeout` may have set a timeout
        self._socket = sock
        self._buffer = bytearray()
        self._damage: DamageError | None = None
        self._fds: list[int] = []
        self._partial_since: float | None = None

    def fileno(self) -> int:
        """Returns the socket's descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """Whether this end is open."""
        return self.fileno() >= 0

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = (), *, within_s: float = 0.0) -> None:
        """Sends a message and descriptors.

        Args:
            message: the message.
            fds: descriptors that go with it.
            within_s: the longest wait, on a non-blocking socket, for the other end to read; 0 if it may be hostile.

        Raises:
            WireClosedError: the other end is closed, or does not read, so that its buffer stays full.
        """
        frame = encode({**message, "fds": len(fds)} if fds else message)
        deadline = time.monotonic() + within_s
        sent = 0
        while sent < len(frame):
            try:
                if fds and not sent:
                    sent = socket.send_fds(self._socket, [frame], list(fds))
                else:
                    sent += self._socket.send(frame[sent:])
            except BlockingIOError as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WireClosedError("cannot send: the other end does not read") from error
                waiting = select.poll()  # select() cannot take descriptors above 1023
                waiting.register(self._socket, select.POLLOUT)
                waiting.poll(1e3 * left_s)
            except OSError as error:
                raise WireClosedError(f"cannot send: {error.strerror or error}") from error

    def receive(self) -> list[tuple[JsonObject, list[int]]]:
        """Returns the messages that have arrived as frames, each with its descriptors; see `receive_messages`.

        Raises:
            WireClosedError: the other end is closed.
            DamageError: the stream is damaged, or an incomplete frame is over its deadline.
        """
        return self._receive(lambda frame: frame)

    def receive_messages(self, *expected: type[_Expected]) -> list[tuple[_Expected, list[int]]]:
        """Returns the messages that have arrived, decoded, each with its descriptors.

        This waits for data on a blocking socket only. If whole frames have arrived, it returns at least the first.

        Args:
            *expected: the message classes that may arrive here.

        Raises:
            WireClosedError: the other end is closed.
            DamageError: the stream is damaged, an incomplete frame is over its deadline, or a frame holds none of the
                expected messages. The messages before the damage come first, and the next call raises.
        """
        return self._receive(lambda frame: codec.decode(frame, *expected))

    def _receive(self, read: Callable[[JsonObject], _Expected]) -> list[tuple[_Expected, list[int]]]:
        if self._damage is not None:
            raise self._damage
        while True:
            try:
                data, fds = _receive_with_fds(self._socket)
            except BlockingIOError:
                if self._partial_since is not None and time.monotonic() - self._partial_since > FRAME_DEADLINE_S:
                    raise DamageError("a frame was begun and never finished") from None
                return []
            except OSError as error:
                raise WireClosedError(f"cannot receive: {error.strerror or error}") from error
            self._fds += fds
            if not data:
                raise WireClosedError("the other end is closed")
            if len(self._fds) > 2 * _MAX_FDS:  # more than an incomplete message and the next one have
                raise DamageError("more descriptors came than messages name")
            received = self._decoded(data, read)
            self._note_partial(is_new=bool(received))
            if received or self._socket.getblocking():
                return received

    def send_message(self, message: object, fds: Sequence[int] = (), *, within_s: float = 0.0) -> None:
        """Sends a message dataclass; takes the arguments of `send`, and raises its exceptions."""
        self.send(codec.encode(message), fds, within_s=within_s)

    def _decoded(self, data: bytes, read: Callable[[JsonObject], _Expected]) -> list[tuple[_Expected, list[int]]]:
        """Returns the messages that further bytes complete; the next call raises damage behind them."""
        self._buffer += data
        received: list[tuple[_Expected, list[int]]] = []
        try:
            while (frame := self._next()) is not None:
                count = frame.pop("fds", 0)
                message = read(frame)
                received.append((message, self._take(count)))
        except DamageError as error:
            self._damage = error
            self._close_fds()  # descriptors behind the damage
            if not received:
                raise
        return received

    def _next(self) -> JsonObject | None:
        if len(self._buffer) < _HEADER.size:
            return None
        magic, size, checksum = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or size > MAX_FRAME_BYTES:
            raise DamageError("the stream holds bytes that are not a frame")
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        if zlib.crc32(body) != checksum:
            raise DamageError("a frame's checksum does not match its bytes")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DamageError("a frame is not JSON") from error
        if not isinstance(message, dict):
            raise DamageError("a frame holds no message")
        return message

    def _note_partial(self, *, is_new: bool) -> None:
        """Starts the deadline of an incomplete frame, which further bytes of the same frame do not extend."""
        if not self._buffer:
            self._partial_since = None
        elif is_new or self._partial_since is None:
            self._partial_since = time.monotonic()

    def _take(self, count: object) -> list[int]:
        if not isinstance(count, int) or not 0 <= count <= len(self._fds):
            raise DamageError("a message names descriptors that did not come with it")
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    def hang_up(self) -> None:
        """Shuts the connection down, which the other end notices even if a fork of this process holds a copy."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Closes this copy of the socket and the descriptors that arrived and belong to no message yet."""
        self._close_fds()
        self._socket.close()

    def _close_fds(self) -> None:
        close_all(self._fds)
        self._fds = []


def _receive_with_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    # MSG_CMSG_CLOEXEC: a descriptor that arrives between another thread's fork and exec must not leak.
    fds = array.array("i")
    room = socket.CMSG_LEN(_MAX_FDS * fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def connection_pair() -> tuple[Connection, socket.socket]:
    """Returns a `Connection` that never blocks, and the socket at its other end, for another process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(ours)
    ours.setblocking(False)
    return connection, theirs


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors, and ignores those that are closed already."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
