"""The submitter of a sweep listens where it was told, hears crowds, and shards say why they cannot reach it."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aftermath import eventually

from quarantune.engine import contact
from quarantune.engine.contact import Address, Contacts
from quarantune.sandbox.workforce import Said
from quarantune.values.settings import Listen

CROWD = 300
"""Shards that greet at once, far more than may be unknown without being expected."""


class Shard:
    """A shard whose messages a test sends one by one."""

    def __init__(self, address: Address, number: int) -> None:
        self.line = socket.create_connection(("127.0.0.1", address.port), timeout=20)
        self._token, self._number = address.token, number
        self._nonce = secrets.token_hex(16)

    def greets(self) -> None:
        self.line.sendall(json.dumps({"nonce": self._nonce}).encode() + b"\n")

    def proves(self) -> None:
        """Reads the challenge, and sends the proof."""
        prove = functools.partial(contact._proof, self._token, self._nonce, self._read()["nonce"])
        self._go = prove("go")
        about = {"shard": self._number, "run": "a", "about": {}, "machine": "another"}
        self.line.sendall(json.dumps({"proof": prove("shard"), **about}).encode() + b"\n")

    def may_go(self) -> bool:
        return bool(self._read().get("proof") == self._go)

    def _read(self) -> Any:
        received = b""
        while not received.endswith(b"\n"):
            received += (more := self.line.recv(4096))
            assert more, "the submitter ended the connection"
        return json.loads(received)


def reached(contacts: Contacts, address: Address) -> Any:
    """Returns what a shard finds while the submitter listens."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(contact.reach(address, 1, {})))
    thread.start()
    while thread.is_alive():
        assert contacts.poll(0.01) == []
    return found[0]


@contextlib.contextmanager
def taken(host: str = "127.0.0.1") -> Iterator[int]:
    """Yields a port that something else uses."""
    with socket.create_server((host, 0)) as other:
        yield other.getsockname()[1]


def test_hundreds_of_slow_shards_that_greet_at_once_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for longer than a peer may while others wait in vain."""
    late_s = [0.0]
    monkeypatch.setattr(contact, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0]))
    begun: list[int] = []
    with (
        contextlib.closing(Contacts(lambda number, about: begun.append(number) is None)) as contacts,
        contextlib.ExitStack() as lines,
    ):
        crowd = [Shard(contacts.address, number) for number in range(CROWD)]
        for shard in crowd:
            lines.callback(shard.line.close)
            shard.greets()
        challenged = 0

        def all_challenged() -> bool:
            nonlocal challenged
            contacts.poll(0.01, expected=CROWD)
            challenged = sum(peer.proof is not None for peer in contacts._peers())
            return challenged == CROWD

        assert eventually(all_challenged), challenged
        late_s[0] = 2 * contact._CHALLENGED_S
        for shard in crowd:
            shard.proves()
        assert eventually(lambda: contacts.poll(0.01, expected=CROWD - len(begun)) or len(begun) == CROWD)
        assert all(shard.may_go() for shard in crowd)
    assert sorted(begun) == list(range(CROWD))


def test_a_full_submitter_that_nobody_waits_for_drops_no_slow_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    late_s = [0.0]
    monkeypatch.setattr(contact, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0]))
    with contextlib.closing(Contacts(lambda *_: True)) as contacts, contextlib.ExitStack() as lines:
        crowd = [Shard(contacts.address, number) for number in range(contact.MOST_UNKNOWN)]
        for shard in crowd:
            lines.callback(shard.line.close)
        assert eventually(lambda: contacts.poll(0.01) or len(contacts._peers()) == len(crowd))
        late_s[0] = 2 * contact._CHALLENGED_S
        assert contacts.poll(0.01) == []
        assert len(contacts._peers()) == len(crowd)


def test_a_shard_that_found_no_room_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "_RETURN_PAUSE_S", 0.01)
    make_room, full = Contacts._make_room, []

    def without_room(contacts: Contacts, *most: Any, is_asked: bool) -> None:
        make_room(contacts, *most, is_asked=is_asked)
        for peer in contacts._peers() if len(full) < contact._TRIES - 1 else []:
            full.append(peer)
            contacts._drop(peer)

    monkeypatch.setattr(Contacts, "_make_room", without_room)
    with contextlib.closing(Contacts(lambda *_: True, is_local=True)) as contacts:
        line = reached(contacts, contacts.address)
        assert (line.unreached, len(full)) == ("", contact._TRIES - 1)
        assert line.say({"phase": [0, "end"]})
        assert contacts.poll(5.0) == [Said(1, {"phase": [0, "end"]})]
        line.close()


def test_a_shard_says_which_addresses_it_tried_from_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    line = contact.reach(Address("another machine", ("127.0.0.1",), port, "secret"), 1, {})
    assert line
    assert line.unreached == f"from 127.0.0.1, 127.0.0.1:{port}: Connection refused"
    nowhere = contact.reach(Address("another machine", (), 0, "secret"), 1, {})
    assert nowhere
    assert nowhere.unreached == "", "the submitter does not listen, and knows it"


def test_addresses_that_never_answer_delay_a_shard_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes longer than the test may."""
    monkeypatch.setattr(contact, "_CONNECT_S", 10_000.0)
    with contextlib.ExitStack() as full, contextlib.closing(Contacts(lambda *_: True, is_local=True)) as contacts:
        mine = contacts.address
        silent = []
        for number in range(2, 5):  # a listener whose queue is full answers no request for a connection
            listener = full.enter_context(socket.socket())
            listener.bind((f"127.0.0.{number}", mine.port))
            listener.listen(0)
            for _ in range(2):
                other = full.enter_context(socket.socket())
                other.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    other.connect(listener.getsockname())
            silent.append(f"127.0.0.{number}")
        line = reached(contacts, Address("another machine", (*silent, "127.0.0.1"), mine.port, mine.token))
        assert line.unreached == ""
        line.close()


def test_the_first_free_port_of_a_range_is_used() -> None:
    with taken() as port:
        at = Listen("127.0.0.1", port, min(port + 40, 65_535))
        with contextlib.closing(Contacts(lambda *_: True, at=at)) as contacts:
            assert contacts.address.hosts == ("127.0.0.1",)
            assert port < contacts.address.port <= at.last
            line = reached(contacts, contacts.address)
            assert line.unreached == ""
            line.close()
        with pytest.raises(OSError, match="in use"):
            Contacts(lambda *_: True, at=Listen("127.0.0.1", port, port))


def test_a_sweep_waits_for_the_port_of_another_sweep() -> None:
    with taken() as port:
        at = Listen("127.0.0.1", port, min(port + 40, 65_535))
        first = Contacts(lambda *_: True, at=at)
        only = Listen("127.0.0.1", first.address.port, first.address.port)
        with contextlib.closing(Contacts(lambda *_: True, at=only, check=first.close)) as second:
            assert second.address.port == only.first


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        Contacts(lambda *_: True, at=Listen("192.0.2.1", 8790, 8790))


@pytest.mark.parametrize("host", ["::1", ""], ids=["alone", "dual"])
def test_shards_come_by_ipv6(host: str) -> None:
    try:
        with taken("::1" if socket.has_ipv6 else "127.0.0.1"):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken() as port:
        at = Listen(host, port, min(port + 40, 65_535)) if host else None
        with contextlib.closing(Contacts(lambda *_: True, at=at)) as contacts:
            mine = contacts.address
            line = reached(contacts, Address("another machine", ("::1",), mine.port, mine.token))
            assert line.unreached == ""
            line.close()


def test_a_machine_without_ipv6_listens_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = socket.socket.bind

    def without(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_INET6:
            raise OSError(99, "Cannot assign requested address")
        bind(self, address)

    class Without(socket.socket):
        bind = without

    monkeypatch.setattr(socket, "socket", Without)
    with contextlib.closing(Contacts(lambda *_: True)) as contacts:
        assert contacts.fault == ""
        mine = contacts.address
        assert not [host for host in mine.hosts if ":" in host]
        line = reached(contacts, Address("another machine", ("127.0.0.1",), mine.port, mine.token))
        assert line.unreached == ""
        line.close()
