"""The connections of running shards to the submitter: trials one way, and the order to stop the other.

Engines differ in how they report a dead worker, and most cannot stop running work. A connection does both in the same
way on all of them. A shard listens only to a submitter that has proven to know the secret of the sweep, and only a
proven order stops it: another service may have the submitter's address on the shard's network, and a proxy may end a
connection. After a connection has ended, the shard connects again. If it cannot, the submitter is gone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import hmac
import json
import os
import random
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from quarantune.host import machine
from quarantune.host.locks import new_lock
from quarantune.sandbox.workforce import Said
from quarantune.values.codec import DamageError, JsonObject, Record, decode_json
from quarantune.values.settings import Listen

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 5.0
"""Longest wait for a connection; a firewall may never answer, and a bad line loses the first requests of some."""
_STAGGER_S = 0.25
"""Time after which the next address is tried at the same time."""
_REPLY_S = 20.0
"""Longest wait until the peer takes a message, or until one of the addresses has proven to be the submitter."""
_RETURNS_S, _RETURN_PAUSE_S = 8.0, 0.5
"""Time in which a shard may connect again before both sides give up, and its pause between tries."""
_HELD_PAUSE_S = 0.1
"""Time between two looks for a port that another sweep of this process may free."""
_MOST_BYTES = 16 << 20
"""Longest message."""
_UNKNOWN_MOST_BYTES = 1 << 14
"""Longest message of a peer that has not named a shard."""
MOST_UNKNOWN = 32
"""Most connected peers that have not named a shard, in addition to one for each shard that may begin now. Others wait
until there is room."""
_GREETS_S = 10.0
"""Longest time for a peer to name its shard; shards do it at once."""
_SILENT_S, _CHALLENGED_S = 0.25, 2.0
"""Longest times for a peer's first message, and for its proof after the challenge, while other peers wait."""
_TRIES = 3
"""Number of times that a shard tries an address that ends its connection: the submitter may have had no room."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_USER_TIMEOUT, 20_000))
"""These options end a connection 20 s after the last sign of the other machine, even with unacknowledged data."""
_BACKLOG = 1024
_Connections: TypeAlias = Generator[tuple[str, socket.socket], None, None]
_MayGo: TypeAlias = Callable[[int, JsonObject], bool]
_Check: TypeAlias = Callable[[], None]
_held: set[int] = set()
"""The chosen ports at which sweeps of this process listen."""
_holding = new_lock()


@functools.cache
def machine_id() -> str:
    """Returns an id of this machine, or of this container if it has a separate network."""
    try:
        return f"{machine.boot_id()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


@dataclasses.dataclass(frozen=True)
class Address(Record):
    """The addresses of a submitter, for its shards.

    Attributes:
        machine: the id of its machine.
        hosts: the addresses of its machine.
        port: its port; 0 if it does not listen.
        token: the secret that it and its shards share; they never send it through a connection.
    """

    machine: str
    hosts: tuple[str, ...]
    port: int
    token: str


class Contacts:
    """The submitter's side: the connections of all shards of one sweep."""

    def __init__(
        self, may_go: _MayGo, *, is_local: bool = False, at: Listen | None = None, check: _Check = lambda: None
    ) -> None:
        """Begins to listen.

        Args:
            may_go: receives the number of a shard that begins, and the description of its process with its `address`;
                returns whether it should run.
            is_local: whether all shards run on this machine, so other machines need not reach this process.
            at: the address and the ports to choose from; None for a free port at all addresses. If sweeps of this
                process use all of them, it waits for one of these sweeps to end.
            check: runs many times a second while it waits; its errors end the wait.

        Raises:
            OSError: this process cannot listen at the chosen address, or all chosen ports are in use.
        """
        self._may_go = may_go
        self._is_local = is_local
        self._token = secrets.token_hex(16)
        self._runs: dict[int, str] = {}
        self._lost: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self.fault = ""
        """The reason why this process cannot listen; empty if it listens."""
        try:
            self._listener = _listener(_LOOPBACK if is_local else "", 0) if at is None else _first_free(at, check)
        except OSError as error:  # without connections, shards stop at their deadlines
            if at is not None:
                raise
            self.fault = str(error)
        else:
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def address(self) -> Address:
        """The address at which shards find this process."""
        if self._listener is None or self._is_local:
            hosts: tuple[str, ...] = ()
        elif (host := self._listener.getsockname()[0]) in ("::", "0.0.0.0"):
            hosts = tuple(each for each in _own_addresses() if host == "::" or ":" not in each)
        else:
            hosts = (host,)
        return Address(machine_id(), hosts, 0 if self._listener is None else self._port, self._token)

    @property
    def _port(self) -> int:
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def poll(self, timeout_s: float, *, expected: int = 0) -> list[Said]:
        """Waits for messages of shards, and returns them in order.

        A shard whose connection has ended for good gives damage. A shard that connects again repeats all its messages.

        Args:
            timeout_s: the longest wait for the first message.
            expected: the number of shards that may connect now; all of them may do so at once.
        """
        ready = [key.data for key, _ in self._selector.select(timeout_s)]
        events = [said for peer in ready if peer is not None for said in self._read(peer)]
        for shard in [shard for shard, until in self._lost.items() if time.monotonic() >= until]:
            self.stop(shard)
            events.append(Said(shard, DamageError("its connection has ended")))
        # Last, because reading shows which peers have named a shard.
        self._make_room(MOST_UNKNOWN + expected, is_asked=None in ready)
        return events

    def stop(self, shard: int) -> None:
        """Stops a shard now if it runs, or once it connects again."""
        self._runs[shard] = ""
        self._lost.pop(shard, None)
        for peer in self._peers():
            if peer.shard == shard:
                self._drop(peer)

    def close(self) -> None:
        """Stops all shards and no longer listens."""
        for peer in self._peers():
            self._drop(peer)
        if self._listener is not None:
            with _holding:
                _held.discard(self._port)
                self._listener.close()
            self._listener = None
        self._selector.close()

    def _peers(self) -> list[_Peer]:
        """Returns the connected peers, the oldest connection first."""
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _make_room(self, most: int, *, is_asked: bool) -> None:
        """Drops peers that do not name a shard in time, and accepts waiting ones until there are `most` without one."""
        unknown = [peer for peer in self._peers() if peer.shard is None]
        now, is_full = time.monotonic(), is_asked and len(unknown) >= most
        for peer in unknown:
            patience_s = _GREETS_S if not is_full else _SILENT_S if peer.proof is None else _CHALLENGED_S
            if now > peer.since + patience_s:
                self._drop(peer)
        with contextlib.suppress(OSError):
            for _ in range(most - sum(not peer.is_over for peer in unknown) if is_asked else 0):
                assert self._listener is not None
                connection, _ = self._listener.accept()
                self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _read(self, peer: _Peer) -> Iterator[Said]:
        if peer.is_over:  # the shard has a newer connection
            return
        for message in peer.receive():
            if peer.shard is not None:
                yield Said(peer.shard, message)
            elif not self._greet(peer, message):
                peer.is_over = True
                break
        if peer.is_over:
            self._drop(peer)
            if peer.shard is not None:
                self._lost[peer.shard] = time.monotonic() + (0.0 if peer.is_here else _RETURNS_S)

    def _greet(self, peer: _Peer, message: JsonObject) -> bool:
        """Answers the challenge, then the proof, of a peer without a shard; returns whether to keep the connection."""
        nonce, shard, run, about = map(message.get, ("nonce", "shard", "run", "about"))
        if peer.proof is None and isinstance(nonce, str):
            ours = secrets.token_hex(16)
            peer.proof, peer.since = functools.partial(_proof, self._token, nonce, ours), time.monotonic()
            peer.say_proof("submitter", nonce=ours)
            return True
        if not (peer.has_proven("shard", message) and isinstance(shard, int) and isinstance(about, dict) and run):
            return False
        about = {**about, "address": peer.address}
        if not (self._runs[shard] == run if shard in self._runs else self._may_go(shard, about)):
            peer.say_proof("stop")
            return False
        self.stop(shard)  # its former connection, which it no longer reads
        self._runs[shard], peer.shard, peer.is_here = run, shard, message.get("machine") == machine_id()
        peer.say_proof("go")  # it has begun: if the answer fails, its connection has ended
        return True

    def _drop(self, peer: _Peer) -> None:
        """Ends a connection and stops its shard. An ended connection gets no order: it might still arrive."""
        if peer.shard is not None and not peer.is_over:
            peer.say_proof("stop")
        peer.is_over = True
        self._selector.unregister(peer.connection)
        peer.connection.close()


@dataclasses.dataclass(eq=False)
class _Peer:
    """The other end of one connection.

    Attributes:
        connection: its socket.
        proof: returns the proof of a statement, such as `stop`; None until both sides have sent a challenge.
        shard: the number of the shard; None until the peer names it, and for the submitter.
        is_here: whether the peer is on this machine, so that only its own end can end the connection.
        since: when it connected or got its challenge, by the monotonic clock.
        is_over: whether the connection has ended, or has carried something other than messages.
    """

    connection: socket.socket
    proof: Callable[[str], str] | None = None
    shard: int | None = None
    is_here: bool = False
    since: float = dataclasses.field(default_factory=time.monotonic)
    is_over: bool = False
    _data: bytearray = dataclasses.field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.connection.setblocking(False)
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_NODELAY, 1), *_KEEPALIVE):
                self.connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def address(self) -> str:
        """The address of the other end; empty if it is gone."""
        with contextlib.suppress(OSError):
            return str(self.connection.getpeername()[0]).removeprefix("::ffff:")
        return ""

    def receive(self) -> Iterator[JsonObject]:
        """Yields the messages that have arrived."""
        most = _UNKNOWN_MOST_BYTES if self.shard is None else _MOST_BYTES
        try:
            while len(self._data) <= most and not self.is_over:
                received = self.connection.recv(1 << 18)
                self._data += received
                self.is_over = not received
        except OSError as error:
            self.is_over = not isinstance(error, BlockingIOError)
        while (end := self._data.find(b"\n")) >= 0:
            line = bytes(self._data[:end])
            del self._data[: end + 1]
            with contextlib.suppress(ValueError):
                if isinstance(message := decode_json(line), dict):
                    yield message
                    continue
            self._data, self.is_over = bytearray(), True
        self.is_over |= len(self._data) > most

    def await_message(self, until: float) -> JsonObject:
        """Waits for a message and returns it; an empty one if none comes in time."""
        waiting = select.poll()  # select() cannot take descriptors above 1023
        waiting.register(self.connection, select.POLLIN)
        while not self.is_over and (left_s := until - time.monotonic()) > 0:
            waiting.poll(1e3 * left_s)
            for message in self.receive():
                return message
        return {}

    def say(self, message: JsonObject, timeout_s: float = 0.0) -> None:
        """Sends a message; if it cannot do so in time, the connection counts as ended."""
        try:
            self.connection.settimeout(timeout_s)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
            self.connection.settimeout(0.0)
        except OSError:
            self.is_over = True

    def say_proof(self, statement: str, **more: Any) -> None:
        """Sends the proof of a statement, with further fields."""
        assert self.proof is not None
        self.say({"proof": self.proof(statement), **more})

    def has_proven(self, statement: str, message: JsonObject) -> bool:
        """Returns whether a message holds the proof of a statement."""
        found = str(message.get("proof")).encode(errors="backslashreplace")
        return self.proof is not None and hmac.compare_digest(found, self.proof(statement).encode())


def _proof(token: str, of_shard: str, of_submitter: str, statement: str) -> str:
    """Returns the proof of a statement; only a holder of the token can make it.

    It is valid for one connection, because both sides have chosen a part of it at random.
    """
    return hmac.new(token.encode(), json.dumps([statement, of_shard, of_submitter]).encode(), "sha256").hexdigest()


class Contact:
    """The shard's end of its connection. Without a connection, it discards messages and the shard continues."""

    def __init__(
        self,
        peer: _Peer | None,
        again: Callable[[], _Peer | Literal[False] | None] = lambda: False,
        unreached: str = "",
    ) -> None:
        """Takes over a connection; call `reach` instead.

        Args:
            peer: the submitter; None if no address reaches it.
            again: connects again after the connection has ended.
            unreached: this machine's address, and the reason at each address of the submitter; empty if one was
                reached, or if the submitter has none.
        """
        self.unreached = unreached
        self._peer = peer
        self._again = again
        self._said: list[JsonObject] = []
        self._is_over = False

    def say(self, message: JsonObject) -> bool:
        """Sends a message; returns whether the shard should continue."""
        if self._peer is None:
            return True
        self._said.append(message)
        self._peer.say(message, _REPLY_S)
        return not (self._peer.is_over and self.is_over)

    @property
    def is_over(self) -> bool:
        """Whether the submitter wants the shard to stop, or is gone."""
        if self._peer is not None and not self._is_over:
            is_told = any(self._peer.has_proven("stop", message) for message in self._peer.receive())
            self._is_over = is_told or (self._peer.is_over and not self._returns())
        return self._is_over

    def _returns(self) -> bool:
        """Connects again and repeats all messages; returns whether it connected in time."""
        until = time.monotonic() + _RETURNS_S
        while (found := self._again()) is None and time.monotonic() < until:
            time.sleep(_RETURN_PAUSE_S)
        if not found:
            return False
        self.close()
        self._peer = found
        for message in self._said:
            found.say(message, _REPLY_S)
        return True

    def close(self) -> None:
        """Ends the connection."""
        if self._peer is not None:
            self._peer.connection.close()


def reach(address: Address, shard: int, about: JsonObject) -> Contact | Literal[False]:
    """Connects a shard with its submitter.

    Args:
        address: the submitter's address.
        shard: the number of the shard.
        about: the description of this process.

    Returns:
        The contact, which has no connection if the submitter is out of reach; False if the shard should not run.
    """
    # The random id distinguishes this run from a repetition of the shard by the engine.
    greeting = {"shard": shard, "run": secrets.token_hex(16), "about": about, "machine": machine_id()}
    reasons: dict[str, str] = {}
    again = functools.partial(_connect, address, greeting, reasons)
    found = again()
    if found is False:
        return False
    return Contact(found, again, "" if found or not reasons else _told(address, reasons))


def _connect(address: Address, greeting: JsonObject, reasons: dict[str, str]) -> _Peer | Literal[False] | None:
    """Returns the first peer that proves to be the submitter; None without one; False if the shard should not run.

    Args:
        address: the submitter's address.
        greeting: the message that names the shard.
        reasons: receives, for each address, the reason why it is not the submitter's.
    """
    is_here, tries = address.machine == machine_id(), 0
    hosts = [*([_LOOPBACK] if is_here else []), *address.hosts] if address.port else []
    reply_s = _REPLY_S / max(1, len(hosts))
    while hosts and (tries := tries + 1) <= _TRIES:
        closing: list[str] = []
        with contextlib.closing(_connections(hosts, address.port, reasons)) as connections:
            for host, connection in connections:
                peer, until, ours = _Peer(connection), time.monotonic() + reply_s, secrets.token_hex(16)
                peer.say({"nonce": ours})
                answer = peer.await_message(until)
                peer.proof = functools.partial(_proof, address.token, ours, str(answer.get("nonce")))
                if peer.has_proven("submitter", answer):
                    peer.say_proof("shard", **greeting)
                    answer = peer.await_message(until)
                if peer.has_proven("go", answer):
                    return peer
                peer.connection.close()
                if peer.has_proven("stop", answer):
                    return False
                reasons[host] = "it ended the connection" if peer.is_over else "it does not answer"
                closing += [host] if peer.is_over else []
        if (hosts := closing) and tries < _TRIES:
            time.sleep(random.uniform(0.5, 1.5) * _RETURN_PAUSE_S)
    return False if is_here and reasons.get(_LOOPBACK) == os.strerror(errno.ECONNREFUSED) else None


def _connections(hosts: Sequence[str], port: int, reasons: dict[str, str]) -> _Connections:
    """Yields connections to addresses as soon as they are made. Addresses behind a firewall delay the others little.

    Args:
        hosts: the addresses, each tried a moment after the one before it.
        port: their port.
        reasons: receives, for each address without a connection, the reason.
    """
    left, starts_at, ends_at = collections.deque(hosts), 0.0, 0.0
    with contextlib.ExitStack() as unused, selectors.DefaultSelector() as pending:
        while left or pending.get_map():
            if left and (time.monotonic() >= starts_at or not pending.get_map()):
                host = left.popleft()
                starts_at, ends_at = time.monotonic() + _STAGGER_S, time.monotonic() + _CONNECT_S
                try:
                    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                    unused.callback(connection.close)
                    connection.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        connection.connect((host, port))
                    pending.register(connection, selectors.EVENT_WRITE, (host, connection))
                except OSError as error:
                    reasons[host] = error.strerror or str(error)
                    continue
            ready = pending.select(max(0.0, (starts_at if left else ends_at) - time.monotonic()))
            for host, connection in [key.data for key, _ in ready]:
                pending.unregister(connection)
                if fault := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    reasons[host] = os.strerror(fault)
                else:
                    yield host, socket.socket(fileno=connection.detach())
            if not ready and not left:
                reasons.update({key.data[0]: "timed out" for key in pending.get_map().values()})
                return


def _told(address: Address, reasons: dict[str, str]) -> str:
    """Returns this machine's address, and the reason at each address of the submitter."""
    ours = ""
    for host in reasons:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, address.port))  # sends nothing, but chooses the address to send from
            ours = ours or probe.getsockname()[0]
    tried = "; ".join(f"{Listen(host, address.port, 0)}: {reason}" for host, reason in reasons.items())
    return f"{f'from {ours}, ' if ours else ''}{tried}"


def _listener(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Args:
        host: an address or a name of this machine; empty for all addresses of both families.
        port: the port; 0 for a free one.

    Raises:
        OSError: this process cannot listen there.
    """
    if host not in ("", "::"):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # a machine may have switched IPv6 off
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def _first_free(at: Listen, check: _Check) -> socket.socket:
    """Returns a socket that listens at the first free port; waits if this process uses a port and will free it.

    Raises:
        OSError: this process cannot listen there, or others use all ports.
    """
    ports = range(at.first, at.last + 1)
    while True:
        with _holding:
            for port in ports:
                try:
                    found = _listener(at.host, port)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or (port == at.last and _held.isdisjoint(ports)):
                        raise
                else:
                    _held.add(port)
                    return found
        check()
        time.sleep(_HELD_PAUSE_S)


def _own_addresses() -> tuple[str, ...]:
    """Returns the addresses of this machine that others may reach, IPv4 first."""
    import psutil

    addresses = [each for of_one in psutil.net_if_addrs().values() for each in of_one]
    ours = [each.address for family in (socket.AF_INET, socket.AF_INET6) for each in addresses if each.family == family]
    return tuple(host for host in ours if host != "::1" and not host.startswith(("127.", "fe80:")))
