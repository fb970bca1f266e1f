"""The run as the page's visitors get it: read twice a second while there are visitors, and not at all otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from paceline.watching.run_reader import RunReader
from paceline.watching.snapshot import Snapshot

EVERY_S = 0.5
MOST_SHARE = 3
"""A run of many workers is read less often, so that it is not read more than a quarter of the time."""
QUIET_S = 15.0
"""So often something is sent to those who have the page of a run that has ended."""


class Broadcast:
    """Reads a run for all visitors together."""

    def __init__(self, folder: Path, iterations: int | None = None) -> None:
        self.folder = folder
        self.reader = RunReader(folder, iterations)
        self.visitors = 0
        self.left_s = time.monotonic()
        """When the last visitor left."""
        self.lock = asyncio.Lock()
        self.read_s = -1e9
        self.took_s = 0.0
        self.view: Snapshot | None = None
        self.encoded = b""

    async def now(self) -> bytes:
        """Returns the run as it is, encoded; what was read within the last moment serves everybody."""
        async with self.lock:
            if time.monotonic() - self.read_s >= max(0.8 * EVERY_S, MOST_SHARE * self.took_s):
                began_s = time.monotonic()
                await asyncio.to_thread(self.read)
                self.took_s = time.monotonic() - began_s
        return self.encoded

    def read(self) -> None:
        self.reader.poll()
        self.view = self.reader.snapshot()
        self.encoded = msgspec.json.encode(self.view)
        self.read_s = time.monotonic()

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of one visitor."""
        self.visitors += 1
        try:
            yield b"retry: 1000\n\n"
            sent = b""
            sent_s = 0.0
            while True:
                encoded = await self.now()
                if encoded != sent:
                    sent, sent_s = encoded, time.monotonic()
                    yield b"data: " + encoded + b"\n\n"
                elif time.monotonic() - sent_s > QUIET_S:
                    sent_s = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(EVERY_S)
        finally:
            self.visitors -= 1
            self.left_s = time.monotonic()

    def is_idle(self, linger_s: float) -> bool:
        """Whether the run has ended, and nobody has had its page open for so long."""
        return not self.visitors and time.monotonic() - self.left_s > linger_s and not self.reader.goes_on()
