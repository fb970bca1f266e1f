"""What reaches a far listener's port and should not: strangers, garbage, too much, and what no paceline ever sends."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.fuzz_remote import Samples
from paceline.runtime.live.messaging.greetings import CALL, KEYED, OPEN
from paceline.runtime.live.messaging.remote_links import FRAME
from paceline.runtime.live.messaging.transport import HANDSHAKE_S
from tests.live.listeners import AFTER_HELLO, HELLO, Ear, MakeEar, checksum, cut_up, greeted, on_the_line, resident_mb


@pytest.fixture(params=[True, False], ids=["keys", "plain"])
def anyone(request: pytest.FixtureRequest) -> Iterator[Ear]:
    with Ear(request.param) as ear:
        yield ear


def test_fifty_silent_connections_are_closed_and_disturb_nobody(anyone: Ear) -> None:
    link = anyone.met(b"1:0")
    before_mb = resident_mb()
    silent = [socket.create_connection(("127.0.0.1", anyone.listener.port)) for _ in range(50)]
    open_ones = set(silent)
    begin = time.monotonic()
    while open_ones:
        assert anyone.works(link, b"1:0")
        assert time.monotonic() - begin < 3 * HANDSHAKE_S
        for connection in list(open_ones):
            connection.settimeout(0.001)
            try:
                if not connection.recv(1 << 10):  # after the greeting
                    open_ones.discard(connection)
            except TimeoutError:
                pass
            except ConnectionResetError:
                open_ones.discard(connection)
    for connection in silent:
        connection.close()
    anyone.until(lambda: len(anyone.listener.connections.open) == 1)
    assert resident_mb() - before_mb < 10


CALLED = KEYED + random.Random(1).randbytes(CALL - len(KEYED))


@pytest.mark.parametrize(
    "begin",
    [b"", OPEN, greeted(b"new"), greeted(b"new") + HELLO, KEYED, CALLED],
    ids=["none", "open", "named", "heard", "keyed", "called"],
)
@pytest.mark.parametrize("secure", [True, False], ids=["keys", "plain"])
def test_garbage_is_cut_off_and_disturbs_nobody(make_ear: MakeEar, secure: bool, begin: bytes) -> None:
    ear = make_ear(secure)
    link = ear.met(b"1:0")
    noise = random.Random(0)
    for _ in range(25):
        with socket.create_connection(("127.0.0.1", ear.listener.port)) as connection:
            connection.sendall(begin + noise.randbytes(noise.randrange(1, 5000)))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            drain(ear, connection)
        assert ear.works(link, b"1:0")
    ear.until(lambda: len(ear.listener.connections.open) == 1)
    assert b"1:0" not in ear.gone
    assert ear.heard == []


@pytest.mark.parametrize("pieces", [1, 7, 1000], ids=["byte by byte", "by sevens", "by thousands"])
def test_what_comes_in_pieces_is_one_message(make_ear: MakeEar, pieces: int) -> None:
    ear = make_ear(secure=False)
    noise = random.Random(0)
    parts = [b"hello", noise.randbytes(50), b"", noise.randbytes(3000)]
    said = greeted(b"1:0") + HELLO + on_the_line(*parts, number=AFTER_HELLO)
    with socket.create_connection(("127.0.0.1", ear.listener.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(said), pieces):
            connection.sendall(said[at : at + pieces])
            ear.waiter.wait(0.0)
        assert ear.hear(1) == [(b"1:0", parts[0], [memoryview(part) for part in parts[1:]])]
    ear.until(lambda: ear.gone == [b"1:0"])


def counted(count: int, first: int = 0) -> bytes:
    """The first section of a message of so many parts."""
    section = struct.pack("<2I", count, first)
    return section + checksum(section, 0)


@pytest.mark.parametrize(
    "head",
    [
        counted(0),
        counted(1 << 31),
        counted((1 << 32) - 1),
        counted(1, FRAME + 1),
        on_the_line(b"12345", bytes(FRAME + 1))[:25],
        struct.pack("<4I", 1, 0, 1, 0),
        on_the_line(b"message")[:-1] + b"x",
    ],
    ids=[
        "none",
        "too many",
        "far too many",
        "the first too large",
        "one too large",
        "no checksums",
        "a wrong checksum",
    ],
)
def test_what_can_be_no_message_ends_the_connection(make_ear: MakeEar, head: bytes) -> None:
    ear = make_ear(secure=False)
    other, before_mb = ear.met(b"2:0"), resident_mb()
    with socket.create_connection(("127.0.0.1", ear.listener.port)) as connection:
        connection.sendall(greeted(b"1:0") + head)
        drain(ear, connection)
    assert ear.works(other, b"2:0")
    assert ear.heard == []
    assert resident_mb() - before_mb < 10


def drain(ear: Ear, connection: socket.socket) -> None:
    """Read, while the listener is waited for, until it is closed or broken."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while connection.recv(1 << 10):
                pass

    reading = threading.Thread(target=read)
    reading.start()
    ear.until(lambda: not reading.is_alive())


def test_a_frame_that_is_too_large_ends_the_connection(anyone: Ear) -> None:
    link, other = anyone.met(b"1:0"), anyone.met(b"2:0")
    link.send(b"push", [bytes(FRAME + 1)])
    anyone.until(lambda: link.gone)
    anyone.until(lambda: anyone.gone == [b"1:0"])
    assert anyone.works(other, b"2:0")
    assert anyone.heard == []
    link.reopen()
    assert anyone.works(link, b"1:0")


@pytest.mark.parametrize("frames", [(FRAME, 5), (1, 2000)], ids=["bytes", "number"])
@pytest.mark.parametrize("secure", [True, False], ids=["keys", "plain"])
def test_a_message_of_too_much_is_not_read(
    make_ear: MakeEar, frames: tuple[int, int], secure: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    size, count = frames
    ear = make_ear(secure, largest=4 * FRAME)
    link, other = ear.met(b"1:0"), ear.met(b"2:0")
    for _ in range(3):
        link.send(b"push", count * [bytes(size)])
    assert ear.works(link, b"1:0")
    assert ear.works(other, b"2:0")
    assert ear.heard == []
    assert capsys.readouterr().err == f"paceline: 1:0 sent more than {4 * FRAME} bytes at once: not read\n"


@pytest.mark.parametrize("secure", [True, False], ids=["keys", "plain"])
def test_who_does_not_read_is_cut_off(make_ear: MakeEar, secure: bool) -> None:
    """Its messages would pile up here for ever."""
    ear = make_ear(secure, most_waiting=2)
    link, other = ear.met(b"1:0"), ear.met(b"2:0")
    ear.waiter.forget(link.fileno())
    frames = cut_up(bytes(8 * FRAME), FRAME)
    sent = 0
    while ear.listener.send(b"1:0", b"parameters", frames):
        sent += 1
        assert sent < 200
    assert not ear.listener.connected(b"1:0")
    ear.until(lambda: ear.gone == [b"1:0"])
    assert ear.works(other, b"2:0")
    while link.wait_for(5.0) is not None:
        pass
    assert link.gone


def test_strange_parts_are_no_message_and_do_no_harm(anyone: Ear) -> None:
    link, stranger, noise = anyone.met(b"1:0"), anyone.met(b"2:0"), random.Random(0)
    for count in range(300):
        parts = [noise.randbytes(noise.choice((0, 0, 1, 4, 9))) for _ in range(1 + count % 6)]
        stranger.outbox.append((parts, False))
    stranger.send(b"over")
    while anyone.hear(1)[0][1] != b"over":
        pass
    assert anyone.works(link, b"1:0")


def test_ten_thousand_mutated_messages(anyone: Ear) -> None:
    """A hundred thousand: `python benchmarks/fuzz_remote.py`."""
    link = anyone.met(b"1:0")
    samples = Samples(0)
    rounds_mb: list[float] = []
    for _ in range(10):
        for _ in range(1000):
            link.send(*samples.mutated())
        for name, message, frames in anyone.hear(1000):
            assert name == b"1:0"
            samples.read(message, frames)
        rounds_mb.append(resident_mb())
    assert samples.refused > 5000
    assert samples.understood > 100
    assert max(rounds_mb[1:]) - rounds_mb[0] < 10, rounds_mb
    assert anyone.works(link, b"1:0")


@pytest.mark.parametrize("threaded", [False, True], ids=["plain", "threaded"])
def test_where_the_kernel_has_no_room_it_is_tried_again_later(
    make_ear: MakeEar, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = make_ear(secure=False, threaded=threaded)
    refused = 0

    def refuse(*passed: object) -> None:
        nonlocal refused
        refused += 1
        assert refused < 1000, "it goes round and round"
        raise OSError(errno.EMFILE, "too many")

    with monkeypatch.context() as full:
        full.setattr(socket.socket, "accept", refuse)
        link = ear.link(b"1:0")
        began = time.monotonic()
        ear.until(lambda: time.monotonic() - began > 1.2)
        assert 0 < refused < 10
        full.setattr(socket, "socket", refuse)
        link.reopen()
        ear.until(lambda: link.refused)
    assert ear.works(link, b"1:0")
