"""Messages over Unix sockets: names, sizes, and peers that go away."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.runtime.live.messaging import unix_sockets
from paceline.runtime.live.messaging.unix_sockets import Link, Listener, Waiter


class Ear:
    """A listener and its waiter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener, self.waiter = Listener(path), Waiter()
        self.waiter.watch(self.listener)

    def hear(self, count: int) -> list[tuple[bytes, bytes]]:
        """The next so many messages."""
        messages: list[tuple[bytes, bytes]] = []
        until = time.monotonic() + 10
        while len(messages) < count and time.monotonic() < until:
            self.waiter.wait(0.1)
            while (message := self.listener.receive()) is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        self.listener.close()
        self.waiter.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    ear = Ear(tmp_path / "here")
    yield ear
    ear.close()


def call(ear: Ear) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(5.0)
    raw.connect(str(ear.path))
    return raw


def test_messages_keep_their_borders_whatever_their_size(ear: Ear) -> None:
    link = Link(ear.path, b"me")
    sizes = [0, 1, 3, 4, 5, 100, 100_000, 7]  # all fit the kernel's buffer, so nobody has to read meanwhile
    for size in sizes:
        link.send(bytes(size))
    assert [(peer, len(message)) for peer, message in ear.hear(len(sizes))] == [(b"me", size) for size in sizes]
    assert ear.listener.send(b"me", b"one")
    assert ear.listener.send(b"me", b"two")
    assert [link.wait_for(1.0), link.receive(), link.receive()] == [b"one", b"two", None]
    link.close()


def test_a_message_that_comes_in_crumbs_is_whole(ear: Ear) -> None:
    with call(ear) as raw:
        for byte in b"\x02\x00\x00\x00me\x05\x00\x00\x00hello\x01\x00":
            raw.send(bytes([byte]))
        assert ear.hear(1) == [(b"me", b"hello")]


def test_a_peer_that_is_gone_is_no_error(ear: Ear) -> None:
    link = Link(ear.path, b"me")
    link.send(b"hello")
    ear.hear(1)
    link.close()
    assert not ear.listener.send(b"me", b"x")
    assert not ear.listener.send(b"nobody", b"x")


def test_a_link_notices_that_its_listener_is_gone_and_comes_back(tmp_path: Path) -> None:
    ear = Ear(tmp_path / "here")
    link = Link(ear.path, b"me")
    assert not link.gone
    ear.close()
    assert link.wait_for(5.0) is None
    assert link.gone
    link.send(b"lost")
    link.reopen()
    assert link.gone
    ear.path.unlink()
    again = Ear(tmp_path / "here")
    link.reopen()
    link.send(b"hello")
    assert again.hear(1) == [(b"me", b"hello")]
    link.close()
    again.close()


def test_a_length_beyond_all_reason_ends_the_connection(ear: Ear) -> None:
    with call(ear) as raw:
        raw.sendall(b"\x02\x00\x00\x00me\x01\x00\x00\x00x")
        assert ear.hear(1) == [(b"me", b"x")]
        raw.sendall((unix_sockets.LARGEST + 1).to_bytes(4, "little"))
        ear.waiter.wait(5.0)
        assert ear.listener.streams == {}
        assert raw.recv(1) == b""


def test_a_peer_that_does_not_read_is_cut_off(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "PATIENCE_S", 0.05)
    link = Link(ear.path, b"me")
    link.send(b"hello")
    ear.hear(1)
    assert not all(ear.listener.send(b"me", bytes(1 << 16)) for _ in range(100))
    assert ear.listener.streams == {}
    link.close()


def test_watching_a_link_to_nobody_says_so(tmp_path: Path) -> None:
    waiter = Waiter()
    with pytest.raises(ConnectionError, match="nobody listens at"):
        waiter.watch(Link(tmp_path / "nobody", b"me"))
    waiter.close()
