"""The connections of running shards to the submitter: trials one way, and the order to stop the other.

Engines differ in how they report a dead worker, and most cannot stop work that runs. A connection does both alike on
all of them: its end tells the submitter that the shard's process is gone, and the shard that it should stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Literal

from quarantune.host import machine
from quarantune.sandbox.pool import Said
from quarantune.values.codec import DamageError, JsonObject, Record, decode_json

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 2.0
"""The longest wait for a connection to one address; a firewall may answer nothing."""
_REPLY_S = 30.0
_MOST_BYTES = 16 << 20
"""The longest message."""
_UNKNOWN_MOST_BYTES = 1 << 14
"""The longest message of a peer that has not named a shard."""
MOST_UNKNOWN = 32
"""How many peers may be connected that have not named a shard; of more, the first to come are dropped."""
_GREETS_S = 10.0
"""How long a peer may take to name its shard, which shards do at once."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""After half a minute without a sign of the other machine, a connection has ended."""
_BACKLOG = 1024


@functools.cache
def machine_id() -> str:
    """Returns an id of this machine, or of the container with a network of its own."""
    try:
        return f"{machine.boot_id()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


@dataclasses.dataclass(frozen=True)
class Address(Record):
    """The addresses of a submitter, as its shards get them.

    Attributes:
        machine: the id of its machine.
        hosts: the addresses of its machine.
        port: its port; 0 where it cannot be reached.
        token: the secret by which it knows its shards.
    """

    machine: str
    hosts: tuple[str, ...]
    port: int
    token: str


class Contacts:
    """The submitter's side: the connections of all shards of one sweep."""

    def __init__(self, may_go: Callable[[int, JsonObject], bool], *, is_local: bool = False) -> None:
        """Begins to listen.

        Args:
            may_go: receives the number of a shard that begins, and the description of its process; returns whether it
                should run.
            is_local: whether all shards run on this machine, so that no other one need reach this process.
        """
        self._may_go = may_go
        self._is_local = is_local
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        with contextlib.suppress(OSError):  # without connections, shards stop at their deadlines
            self._listener = socket.create_server((_LOOPBACK if is_local else "", 0), backlog=_BACKLOG)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def address(self) -> Address:
        """Where shards find this process."""
        port = self._listener.getsockname()[1] if self._listener is not None else 0
        hosts = () if self._is_local else _own_addresses()
        return Address(machine_id(), hosts, port, self._token)

    def poll(self, timeout_s: float) -> list[Said]:
        """Returns what shards have said, in order; of one whose connection ends, that is damage.

        It waits for the first of it.

        Args:
            timeout_s: the longest wait.
        """
        ready = [key.data for key, _ in self._selector.select(timeout_s)]
        events = [said for peer in ready if peer is not None for said in self._read(peer)]
        self._drop_unknown()  # only now, when those that have named a shard are known
        if None in ready:  # the listener's
            self._accept()
        return events

    def stop(self, shard: int) -> None:
        """Has a shard stop, if it runs."""
        for peer in self._peers():
            if peer.shard == shard:
                self._drop(peer)

    def close(self) -> None:
        """Has all shards stop, and listens no longer."""
        for peer in self._peers():
            self._drop(peer)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _peers(self) -> list[_Peer]:
        """Returns those that are connected, the first to connect first."""
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            for _ in range(MOST_UNKNOWN // 2):  # each is read before it may be dropped
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                _keep_alive(connection)
                self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _drop_unknown(self) -> None:
        """Drops peers that have not named a shard in time, or that take the place of new ones."""
        unknown = [peer for peer in self._peers() if peer.shard is None]
        for place, peer in enumerate(reversed(unknown)):
            if place >= MOST_UNKNOWN // 2 or time.monotonic() > peer.since + _GREETS_S:
                self._drop(peer)

    def _read(self, peer: _Peer) -> Iterator[Said]:
        for message in peer.receive():
            if peer.shard is not None:
                yield Said(peer.shard, message)
            elif not self._greet(peer, message):
                break
        if peer.is_over:
            self._drop(peer)
            if peer.shard is not None:
                yield Said(peer.shard, DamageError("its connection has ended"))

    def _greet(self, peer: _Peer, message: JsonObject) -> bool:
        """Answers the first message of a shard; returns whether it may go."""
        token, shard, about = message.get("token"), message.get("shard"), message.get("about")
        is_ours = isinstance(token, str) and hmac.compare_digest(
            token.encode(errors="backslashreplace"), self._token.encode()
        )
        if is_ours and isinstance(shard, int) and isinstance(about, dict) and self._may_go(shard, about):
            peer.shard = shard  # it has begun: where it cannot be answered, that is its end
            with contextlib.suppress(OSError):
                peer.connection.send(b'{"go": true}\n')
                return True
        peer.is_over = True
        return False

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()


@dataclasses.dataclass(eq=False)
class _Peer:
    """One connection to a shard.

    Attributes:
        connection: its socket.
        shard: the number of the shard; None until it has said so.
        since: when it connected, by the monotonic clock.
        is_over: whether the connection has ended, or something other than messages came through it.
    """

    connection: socket.socket
    shard: int | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)
    is_over: bool = False
    _data: bytes = b""

    def receive(self) -> Iterator[JsonObject]:
        """Yields the messages that have arrived."""
        most = _UNKNOWN_MOST_BYTES if self.shard is None else _MOST_BYTES
        try:
            while len(self._data) <= most and not self.is_over:
                received = self.connection.recv(1 << 18)
                self._data += received
                self.is_over = not received
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True
        *lines, rest = self._data.split(b"\n")
        self._data = rest
        for line in lines:
            try:
                message = decode_json(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.is_over = True
                return
            yield message
        if len(rest) > most:
            self.is_over = True


class Contact:
    """The shard's side of its connection; where there is none, nobody hears it, and it goes on."""

    def __init__(self, connection: socket.socket | None) -> None:
        """Takes a connection over; use `reach`."""
        self._connection = connection

    def say(self, message: JsonObject) -> bool:
        """Sends a message; returns whether the shard should go on."""
        if self._connection is None:
            return True
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    @property
    def is_over(self) -> bool:
        """Whether the submitter wants the shard to stop, or is gone."""
        if self._connection is None:
            return False
        waiting = select.poll()  # select() cannot take descriptors above 1023
        try:
            waiting.register(self._connection, select.POLLIN)
            return bool(waiting.poll(0))  # it says nothing after its first reply
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            self._connection.close()


def reach(address: Address, shard: int, about: JsonObject) -> Contact | Literal[False]:
    """Connects a shard with its submitter.

    Args:
        address: the submitter's address.
        shard: the number of the shard.
        about: the description of this process.

    Returns:
        The connection, without one where the submitter cannot be reached from here; False if the shard should not run.
    """
    is_here = address.machine == machine_id()
    hosts = address.hosts if address.port else ()
    for host in (_LOOPBACK, *hosts) if is_here else hosts:
        try:
            connection = socket.create_connection((host, address.port), timeout=_CONNECT_S)
        except OSError:
            continue
        contact = Contact(connection)
        try:
            connection.settimeout(_REPLY_S)
            _keep_alive(connection)
            if contact.say({"token": address.token, "shard": shard, "about": about}) and connection.recv(64):
                return contact
        except TimeoutError:
            contact.close()
            return Contact(None)
        except OSError:
            pass
        contact.close()
        return False
    return False if is_here and address.port else Contact(None)


def _keep_alive(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _own_addresses() -> tuple[str, ...]:
    import psutil

    addresses = [each for of_one in psutil.net_if_addrs().values() for each in of_one]
    ours = [each.address for each in addresses if each.family == socket.AF_INET]
    return tuple(address for address in ours if not address.startswith("127."))
