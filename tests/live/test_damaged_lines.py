"""Lines that damage what they carry: nothing damaged is believed, nobody waits for ever, and all arrives in the end."""

from __future__ import annotations

import contextlib
import random
import socket
import time
import zlib
from collections.abc import Iterator
from functools import cache

import msgspec
import pytest
import torch

from paceline.core.messages import Members
from paceline.run import Run
from paceline.runtime.live.messaging import checksum
from paceline.runtime.live.messaging.greetings import OPEN
from paceline.runtime.live.messaging.reliable_channel import ReliableChannel
from paceline.runtime.live.messaging.remote_links import FRAME, RemoteLink
from paceline.runtime.live.protocol.agent_messages import decode_numbered
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.storage import endpoints
from tests.live.damaging_line import Damaging
from tests.live.listeners import AFTER_HELLO, HELLO, Ear, MakeEar, greeted, on_the_line
from tests.live.test_remote_workers import LOCAL, digits, far, live

PARTS = (b"a message", b"", bytes(range(40)), b"the last part")


@pytest.fixture
def ear() -> Iterator[Ear]:
    with Ear(secure=False) as ear:
        yield ear


def flipped(data: bytes, bit: int) -> bytes:
    spoilt = bytearray(data)
    spoilt[bit // 8] ^= 1 << bit % 8
    return bytes(spoilt)


def test_a_listener_believes_no_message_of_which_a_bit_is_flipped(ear: Ear) -> None:
    """Whichever it is: the connection ends at once, though nothing more comes. Lengths do not make it wait."""
    other, hello, message = ear.met(b"2:0"), greeted(b"1:0") + HELLO, on_the_line(*PARTS, number=AFTER_HELLO)
    connections = []
    for bit in range(8 * len(message)):
        connections.append(socket.create_connection(("127.0.0.1", ear.listener.port)))
        connections[-1].sendall(hello + flipped(message, bit))
        ear.until(lambda: ear.gone)
        assert ear.gone == [b"1:0"], bit
        ear.gone.clear()
    assert ear.heard == []
    assert ear.works(other, b"2:0")
    for connection in connections:
        connection.close()


def test_a_listener_takes_nobody_for_another_because_a_bit_of_a_greeting_is_flipped(ear: Ear) -> None:
    other, hello = ear.met(b"2:0"), greeted(b"1:0")
    for bit in range(8 * len(hello)):
        with socket.create_connection(("127.0.0.1", ear.listener.port)) as connection:
            connection.sendall(flipped(hello, bit) + HELLO + on_the_line(b"who am I?", number=AFTER_HELLO))
            connection.shutdown(socket.SHUT_WR)
            before = time.monotonic()
            ear.until(lambda: len(ear.listener.connections.open) == 1)
            assert time.monotonic() - before < 2.0
    assert ear.heard == []
    assert ear.gone == []
    assert ear.works(other, b"2:0")


def test_a_caller_believes_no_message_of_which_a_bit_is_flipped() -> None:
    message = on_the_line(*PARTS)
    acceptor = socket.create_server(("127.0.0.1", 0))
    link = RemoteLink(f"tcp://127.0.0.1:{acceptor.getsockname()[1]}", b"1:0", None, "")
    with acceptor, contextlib.closing(link):
        for bit in range(0, 8 * len(message), 3):
            connection, _ = acceptor.accept()
            with connection:
                connection.sendall(OPEN + flipped(message, bit))
                assert link.wait_for(10.0) is None
                assert link.gone, bit
            link.reopen()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 511, 4095, 4096, 70_001])
def test_the_checksum_is_zlibs_wherever_it_begins_and_ends(size: int) -> None:
    """Or hosts with and without a compiler would not understand each other."""
    noise = random.Random(size)
    for _ in range(50):
        data, first, begin = noise.randbytes(size + 8), noise.randrange(9), noise.randrange(1 << 32)
        piece = memoryview(data)[first : first + size]
        assert checksum.crc32(piece, begin) == zlib.crc32(piece, begin)
        cut = noise.randrange(size + 1)
        assert checksum.crc32(piece[cut:], checksum.crc32(piece[:cut])) == zlib.crc32(piece)


@pytest.mark.parametrize("threaded", [False, True], ids=["plain", "threaded"])
@pytest.mark.parametrize("secure", [True, False], ids=["keys", "plain"])
def test_a_conversation_over_a_damaging_line_loses_nothing(make_ear: MakeEar, secure: bool, threaded: bool) -> None:
    """Both sides say again what was not heard; frames are what they were."""
    ear, noise = make_ear(secure, threaded=threaded), random.Random(0)
    line = Damaging(ear.listener.port, 0.03)
    link = ear.link(b"1:0")
    link.address = line.address
    link.reopen()
    ours = ReliableChannel("stay", link.send)
    theirs = ReliableChannel("stay", lambda message, frames: ear.listener.send(b"1:0", message, frames))
    said = [noise.randbytes(noise.choice((1, 300, FRAME >> 5))) for _ in range(60)]
    heard: dict[ReliableChannel, list[bytes]] = {ours: [], theirs: []}
    for number, frame in enumerate(said):
        ours.send(b"%d" % number, [frame])
        theirs.send(b"%d" % number, [frame])
    until, opened_s = time.monotonic() + 60.0, time.monotonic()
    while ours.unacknowledged or theirs.unacknowledged:
        assert time.monotonic() < until, (len(heard[ours]), len(heard[theirs]))
        ear.waiter.wait(0.02)
        received: list[tuple[ReliableChannel, bytes, list[memoryview]]] = []
        while (message := link.receive()) is not None:
            received.append((ours, *message))
        while (caught := ear.listener.receive()) is not None:
            received.append((theirs, *caught[1:]))
        for side, body, frames in received:
            numbered = decode_numbered(body)
            if side.accept(numbered) and numbered.number:
                assert numbered.body == b"%d" % len(heard[side])
                heard[side].append(bytes(frames[0]))
        for side in {side for side, _, _ in received}:
            side.send_unreliable(b"")
        if ear.listener.gone():
            theirs.progress_s = 0.0
        if ear.listener.connected(b"1:0"):
            theirs.tick(b"")
        if link.gone and time.monotonic() - opened_s > 0.02:
            opened_s = time.monotonic()
            link.reopen()
            ours.retransmit()
        elif link.is_connected:
            ours.tick(b"")
    assert heard == {ours: said, theirs: said}
    assert line.damaged
    line.close()


class Lines:
    """Damaging lines to all ports that listeners of a run use, and what the run is to be told of them."""

    def __init__(self, multihost: MultihostOptions, chance: float) -> None:
        here = "127.0.0.9"
        self.lines: list[Damaging] = []
        while len(self.lines) < 4:
            first = self.lines[0].target[1] if self.lines else free_port()
            port = first + len(self.lines)
            try:
                socket.create_server(("127.0.0.1", port)).close()
                self.lines.append(Damaging(port, chance, port, (here, port)))
            except OSError:
                self.close()
        ports = (self.lines[0].target[1], self.lines[-1].target[1])
        self.multihost = msgspec.structs.replace(multihost, advertise=here, ports=ports)

    @property
    def damaged(self) -> int:
        return sum(line.damaged for line in self.lines)

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self.lines.clear()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as acceptor:
        return int(acceptor.getsockname()[1])


@contextlib.contextmanager
def damaging(multihost: MultihostOptions, chance: float) -> Iterator[Lines]:
    lines = Lines(multihost, chance)
    try:
        yield lines
    finally:
        lines.close()


@cache
def undisturbed(policy: str, servers: int) -> dict[str, torch.Tensor]:
    multihost = msgspec.structs.replace(LOCAL, keys=False)
    return live(far(digits(60, "sgd:lr=0.05,momentum=0.9")), policy, multihost, members=Members(2, servers)).parameters


def check_same(run: Run, policy: str, servers: int) -> None:
    assert run.parameters.keys() == undisturbed(policy, servers).keys()
    for name, values in undisturbed(policy, servers).items():
        assert torch.equal(run.parameters[name], values), name


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "open"])
def test_a_run_over_damaging_lines_ends_with_the_same_parameters(keys: bool) -> None:
    with damaging(msgspec.structs.replace(LOCAL, keys=keys), 0.02) as lines:
        work = far(digits(60, "sgd:lr=0.05,momentum=0.9"))
        run = live(work, "bsp", lines.multihost, members=Members(2, 2))
        assert lines.damaged > 2
    check_same(run, "bsp", 2)


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "open"])
def test_peers_over_damaging_lines_end_with_the_same_parameters(keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "shared_folder", lambda folder, acceptor: None)
    policy = "hop:graph=complete,order=serial"
    with damaging(msgspec.structs.replace(LOCAL, keys=keys), 0.02) as lines:
        work = digits(60, "sgd:lr=0.05,momentum=0.9")
        run = live(work, policy, lines.multihost, members=Members(2, 0))
        assert lines.damaged > 2
    check_same(run, policy, 0)
