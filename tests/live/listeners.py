"""A far listener and the links to it, all of them waited for together."""

from __future__ import annotations

import contextlib
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from paceline.runtime.live.messaging.greetings import OPEN
from paceline.runtime.live.messaging.remote_links import KeyPair, RemoteLink, RemoteListener, make_keys
from paceline.runtime.live.messaging.unix_sockets import Waiter

Heard = tuple[bytes, bytes, list[memoryview]]


class Ear:
    """`keys` of the listener, `links` to it, and what it `heard` so far."""

    def __init__(
        self, secure: bool = True, port: int = 0, largest: int = 1 << 27, most_waiting: int = 64, threaded: bool = False
    ) -> None:
        self.keys = make_keys() if secure else None
        self.threaded = threaded
        self.waiter = Waiter()
        self.links: list[RemoteLink] = []
        self.heard: list[Heard] = []
        self.gone: list[bytes] = []
        self.listen(port, largest, most_waiting)

    def listen(self, port: int, largest: int = 1 << 27, most_waiting: int = 64) -> None:
        self.listener = RemoteListener("127.0.0.1", (port, port), self.keys, largest, most_waiting, self.threaded)
        self.waiter.watch(self.listener)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.listener.port}"

    @property
    def public(self) -> str:
        return "" if self.keys is None else self.keys.public

    def link(
        self, name: bytes, keys: KeyPair | None = None, enrolled: bool = True, server_key: str = "", **options: Any
    ) -> RemoteLink:
        """A link that says who it is, with a key that is enrolled as that unless it is not to be."""
        if self.keys is not None and keys is None:
            keys = make_keys()
        if keys is not None and enrolled:
            self.listener.enrol(keys.public, name)
        link = RemoteLink(self.address, name, keys, server_key or self.public, threaded=self.threaded, **options)
        self.links.append(link)
        self.waiter.watch(link)
        return link

    def met(self, name: bytes, keys: KeyPair | None = None) -> RemoteLink:
        """A link that the listener has heard."""
        link = self.link(name, keys)
        self.until(lambda: self.listener.connected(name))
        return link

    def until(self, condition: Callable[[], object], limit_s: float = 20.0) -> float:
        """Wait for everything until it is so; how long that took."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() < begin + limit_s, "it took too long"
            self.waiter.wait(0.05)
            while (message := self.listener.receive()) is not None:
                self.heard.append(message)
            self.gone += self.listener.gone()
        return time.monotonic() - begin

    def hear(self, count: int) -> list[Heard]:
        """The next so many messages."""
        self.until(lambda: len(self.heard) >= count)
        heard, self.heard = self.heard[:count], self.heard[count:]
        return heard

    def works(self, link: RemoteLink, name: bytes) -> bool:
        """Whether it is heard under that name, and hears."""
        link.send(b"is anybody there?")
        while (heard := self.hear(1)[0])[1] != b"is anybody there?":
            pass
        assert self.listener.send(name, b"yes")
        return heard[0] == name and link.wait_for(10.0) == (b"yes", [])

    def deafen(self) -> None:
        """The listener is no more; its links are."""
        self.waiter.forget(self.listener.fileno())
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.ExitStack() as everything:
            for each in (self.waiter, self.listener, *self.links):
                everything.callback(each.close)


MakeEar = Callable[..., Ear]


def greeted(name: bytes) -> bytes:
    """What a caller without keys says first."""
    said = OPEN + bytes([len(name)]) + name
    return said + struct.pack("<I", zlib.crc32(said))


def on_the_line(*parts: bytes, number: int = 0) -> bytes:
    """A message without keys, as it travels; `number` is that of its first section."""
    first, *others = parts
    sections = [struct.pack("<2I", len(parts), len(first))]
    sections.append(struct.pack(f"<{len(others)}I", *map(len, others)) + first)
    if others:
        sections.append(b"".join(others))
    return b"".join(section + checksum(section, number + at) for at, section in enumerate(sections))


def checksum(section: bytes, number: int) -> bytes:
    return struct.pack("<I", zlib.crc32(section, number))


HELLO = on_the_line(b"")
AFTER_HELLO = 2
"""The number of the section behind it."""


def cut_up(data: bytes, size: int) -> list[memoryview]:
    return [memoryview(data)[at : at + size] for at in range(0, len(data), size)]


def resident_mb() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
