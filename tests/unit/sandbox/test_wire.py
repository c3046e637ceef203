"""Frames and descriptors arrive whole and in order, and everything else is damage."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator

import pytest

from quarantune.sandbox import wire
from quarantune.sandbox.template_messages import Kill, Started
from quarantune.sandbox.wire import Connection, WireClosedError, connection_pair, encode
from quarantune.values.codec import DamageError, JsonObject


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection that never blocks, and the raw socket at its other end."""
    ours, theirs = wire.connection_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def frame_of(body: bytes, *, magic: bytes = b"qtf1", size: int | None = None, crc: int | None = None) -> bytes:
    """Returns a forged frame."""
    size = len(body) if size is None else size
    return struct.pack("<4sII", magic, size, zlib.crc32(body) if crc is None else crc) + body


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


MESSAGES: list[JsonObject] = [
    {"type": "phase", "trial": 3, "phase": "load"},
    {},
    {"text": "ümläut \ud800 \x00", "deep": [[1, 2.5, None, True], {"a": {}}]},
    {"long": "x" * 300_000},
]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 16])
def test_messages_survive_any_splitting_of_the_stream(chunk_bytes: int) -> None:
    messages = MESSAGES if chunk_bytes > 1 else MESSAGES[:3]
    stream = b"".join(encode(message) for message in messages)
    ours, theirs = connection_pair()
    received: list[JsonObject] = []
    with theirs, contextlib.closing(ours):
        for start in range(0, len(stream), chunk_bytes):
            theirs.sendall(stream[start : start + chunk_bytes])
            received += [message for message, _ in ours.receive()]
    assert received == messages


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_not_sent(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode({"samples_ms": [number]})


def test_a_message_over_the_size_cap_is_not_sent() -> None:
    with pytest.raises(ValueError, match="over the wire's limit"):
        encode({"text": "x" * wire.MAX_FRAME_BYTES})


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"\xff" * 4096, "not a frame"),
        (b"a line that a config printed to the wrong descriptor\n", "not a frame"),
        (frame_of(b"{}", magic=b"qtf2"), "not a frame"),
        (frame_of(b"{}", size=wire.MAX_FRAME_BYTES + 1), "not a frame"),
        (frame_of(b"{}", size=0xFFFFFFFF), "not a frame"),
        (frame_of(b"{}", crc=zlib.crc32(b"{}") ^ 1), "checksum"),
        (frame_of(b""), "not JSON"),
        (frame_of(b"{"), "not JSON"),
        (frame_of(b"\xff\xfe"), "not JSON"),
        (frame_of(b"[" * 200_000), "not JSON"),
        (frame_of(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "not JSON"),
        (frame_of(b"9" * 10_000), "not JSON"),
        (frame_of(b'["no","object"]'), "no message"),
        (frame_of(b"null"), "no message"),
        (frame_of(b'{"fds":1}'), "descriptors"),
        (frame_of(b'{"fds":-1}'), "descriptors"),
        (frame_of(b'{"fds":"0"}'), "descriptors"),
        (frame_of(b'{"fds":null}'), "descriptors"),
    ],
)
def test_invalid_frames_are_damage(ends: tuple[Connection, socket.socket], stream: bytes, reason: str) -> None:
    ours, theirs = ends
    theirs.setblocking(False)

    def send_and_receive(unsent: bytes) -> None:
        while unsent:
            with contextlib.suppress(BlockingIOError):
                unsent = unsent[theirs.send(unsent) :]
            ours.receive()
        ours.receive()

    with pytest.raises(DamageError, match=reason):
        send_and_receive(stream)


def test_messages_before_the_damage_are_received(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    theirs.send(encode({"type": "phase"}) + encode({"type": "lowered"}) + b"garbage that is no frame")
    assert [message for message, _ in ours.receive()] == [{"type": "phase"}, {"type": "lowered"}]
    for _ in range(2):
        with pytest.raises(DamageError, match="not a frame"):
            ours.receive()


def test_a_message_with_too_many_descriptors_harms_no_other(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    null = os.open(os.devnull, os.O_RDONLY)
    before = len(open_fds())
    socket.send_fds(theirs, [encode({"type": "good", "fds": 1}) + encode({"type": "forged", "fds": 5})], [null])
    ((message, fds),) = ours.receive()
    assert message == {"type": "good"}
    assert os.path.samestat(os.fstat(fds[0]), os.stat(os.devnull))
    with pytest.raises(DamageError, match="descriptors"):
        ours.receive()
    wire.close_all([*fds, null])
    assert len(open_fds()) == before - 1


def test_messages_before_an_unexpected_one_are_received(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    other = Connection(theirs)
    null = os.open(os.devnull, os.O_RDONLY)
    other.send_message(Kill(1))
    other.send_message(Started(number=1, pid=2), [null])
    other.send_message(Kill(2), [null])
    before = len(open_fds())
    assert ours.receive_messages(Kill) == [(Kill(1), [])]
    assert len(open_fds()) == before, "descriptors behind the damage are closed"
    with pytest.raises(DamageError, match="'Started' arrived where one of these was expected: Kill"):
        ours.receive_messages(Kill)
    os.close(null)


def test_a_flipped_bit_never_makes_another_message() -> None:
    message = {"type": "measured", "samples_ms": [1.25, 1.5], "trial": 7, "phase": "measure"}
    frame = encode(message)
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        ours, theirs = connection_pair()
        with theirs, contextlib.closing(ours), contextlib.suppress(DamageError, WireClosedError):
            theirs.sendall(damaged)
            assert ours.receive() == []


def test_random_garbage_raises_only_wire_errors() -> None:
    generator = random.Random(0)
    frames = [encode(message) for message in MESSAGES[:3]]
    for _ in range(500):
        stream = bytearray(b"".join(generator.choices(frames, k=3)))
        for _ in range(generator.randrange(1, 4)):
            position = generator.randrange(len(stream))
            stream[position : position + generator.randrange(3)] = generator.randbytes(generator.randrange(4))
        ours, theirs = connection_pair()
        with theirs, contextlib.closing(ours), contextlib.suppress(DamageError, WireClosedError):
            theirs.sendall(stream)
            ours.receive()


def test_a_message_and_its_descriptors_arrive_together(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    other = Connection(theirs)
    files = [os.memfd_create(f"file-{number}") for number in range(5)]
    sent = [("none", []), ("two", files[:2]), ("none again", []), ("three", files[2:]), ("last", [])]
    for name, fds in sent:
        other.send({"name": name}, fds)

    received: list[tuple[str, list[int]]] = []
    while len(received) < len(sent):
        received += [(message["name"], fds) for message, fds in ours.receive()]

    assert [name for name, _ in received] == [name for name, _ in sent]
    for (_, before), (_, after) in zip(sent, received, strict=True):
        assert [os.fstat(fd).st_ino for fd in after] == [os.fstat(fd).st_ino for fd in before]
        assert not any(os.get_inheritable(fd) for fd in after)
        wire.close_all(after)
    wire.close_all(files)


def test_a_large_message_keeps_its_own_descriptors(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    other = Connection(theirs)
    first, second = os.memfd_create("first"), os.memfd_create("second")
    inodes = [os.fstat(first).st_ino, os.fstat(second).st_ino]

    def send() -> None:
        other.send({"text": "x" * 500_000}, [first])
        other.send({"text": "short"}, [second])

    sender = threading.Thread(target=send)
    sender.start()
    received: list[tuple[JsonObject, list[int]]] = []
    while len(received) < 2:
        received += ours.receive()
    sender.join()

    assert [os.fstat(fds[0]).st_ino for _, fds in received] == inodes
    wire.close_all([first, second, *(fd for _, fds in received for fd in fds)])


def test_unexpected_descriptors_are_closed(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    before = open_fds()
    null = os.open(os.devnull, os.O_RDONLY)
    whole = encode({"fds": 1})
    socket.send_fds(theirs, [whole], [null])
    socket.send_fds(theirs, [frame_of(b'{"fds":9}')], [null, null])

    def take_all() -> None:
        while True:
            for _, fds in ours.receive():
                wire.close_all(fds)

    with pytest.raises(DamageError, match="descriptors"):
        take_all()
    ours.close()
    os.close(null)
    assert len(open_fds()) == len(before) - 1


def test_a_flood_of_descriptors_without_messages_is_damage(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    null = os.open(os.devnull, os.O_RDONLY)
    before = len(open_fds())

    def flood() -> None:
        for byte in encode({"text": "x" * 200}):
            socket.send_fds(theirs, [bytes([byte])], [null])
            ours.receive()

    with pytest.raises(DamageError, match="descriptors"):
        flood()
    assert len(open_fds()) <= before + 64
    ours.close()
    os.close(null)
    assert len(open_fds()) == before - 2


def test_an_incomplete_frame_is_damage_after_its_deadline(
    ends: tuple[Connection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    theirs.send(encode({"type": "measured"})[:-1])
    assert ours.receive() == []
    now += wire.FRAME_DEADLINE_S - 0.1
    assert ours.receive() == []
    now += 0.2
    with pytest.raises(DamageError, match="never finished"):
        ours.receive()


def test_slow_bytes_do_not_extend_the_deadline_of_a_frame(
    ends: tuple[Connection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def send_slowly() -> None:
        nonlocal now
        for byte in encode({"text": "x" * 100}):
            theirs.send(bytes([byte]))
            ours.receive()
            now += wire.FRAME_DEADLINE_S / 4

    with pytest.raises(DamageError, match="never finished"):
        send_slowly()
    assert now < 100.0 + 2 * wire.FRAME_DEADLINE_S


def test_each_frame_has_its_own_deadline(
    ends: tuple[Connection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    frame = encode({"type": "phase"})
    theirs.send(frame[:5])
    received = []
    for _ in range(8):  # always one incomplete frame, but a new one each time
        received += ours.receive()
        now += wire.FRAME_DEADLINE_S / 2
        theirs.send(frame[5:] + frame[:5])
    assert len(received) == 7


def test_a_closed_connection_is_noticed_after_its_last_message(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    theirs.send(encode({"type": "measured"}))
    theirs.close()
    assert ours.receive() == [({"type": "measured"}, [])]
    with pytest.raises(WireClosedError):
        ours.receive()
    with pytest.raises(WireClosedError):
        ours.send({"do": "measure"})


def test_a_large_message_that_arrived_is_received_in_one_call(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    message = {"samples_ms": [0.125] * 12_000}
    assert len(encode(message)) < theirs.send(encode(message)) + 1
    assert ours.receive() == [(message, [])]


def test_a_hang_up_is_noticed_even_if_a_fork_holds_a_copy() -> None:
    ours, theirs = wire.connection_pair()
    copy = os.dup(ours.fileno())
    ours.hang_up()
    theirs.settimeout(5)
    assert theirs.recv(1) == b""
    os.close(copy)
    theirs.close()


def test_a_peer_that_does_not_read_never_blocks_the_sender(ends: tuple[Connection, socket.socket]) -> None:
    ours, _ = ends
    started = time.monotonic()

    def send_much() -> None:
        for _ in range(10_000):
            ours.send({"text": "x" * 4000})

    with pytest.raises(WireClosedError, match="cannot send"):
        send_much()
    with pytest.raises(WireClosedError, match="cannot send"):
        ours.send({"text": "x" * (1 << 20)})
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("where", ["in the caller", "in the worker", "in both"])
def test_the_programs_default_timeout_ends_no_wait(where: str) -> None:
    try:
        socket.setdefaulttimeout(None if where == "in the worker" else 0.01)
        ours, theirs = connection_pair()
        socket.setdefaulttimeout(None if where == "in the caller" else 0.01)
        other = Connection(socket.socket(fileno=theirs.detach()))
    finally:
        socket.setdefaulttimeout(None)
    assert ours.receive() == []
    later = threading.Timer(0.2, ours.send, [{"do": "measure"}])
    later.start()
    assert other.receive() == [({"do": "measure"}, [])]
    later.join()
    ours.close()
    other.close()


def test_receiving_nothing_never_waits(ends: tuple[Connection, socket.socket]) -> None:
    ours, _ = ends
    assert ours.receive() == []
