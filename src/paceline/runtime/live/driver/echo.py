"""What workers print, line by line, when the terminal shows something else: their output comes through the driver."""

from __future__ import annotations

import os
from collections.abc import Callable

from paceline.runtime.live.sockets import Waiter

AT_ONCE = 1 << 16


class Echo:
    def __init__(self, waiter: Waiter, say: Callable[[str], None]) -> None:
        self.waiter = waiter
        self.say = say
        self.begun: dict[int, bytes] = {}
        """Of each pipe: the line that has begun."""

    def listen(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self.begun[pipe] = b""
        self.waiter.watch(pipe)

    def hear(self, pipe: int) -> None:
        """Say the lines that are there."""
        try:
            data = os.read(pipe, AT_ONCE)
        except BlockingIOError:
            return
        *lines, self.begun[pipe] = (self.begun[pipe] + data).split(b"\n")
        for line in lines:
            self._say(line)
        if not data:
            self.close(pipe)

    def _say(self, line: bytes) -> None:
        """As a terminal would show it in the end: a progress bar writes over what it wrote before."""
        self.say(line.removesuffix(b"\r").rpartition(b"\r")[2].decode(errors="replace"))

    def close(self, pipe: int) -> None:
        rest = self.begun.pop(pipe)
        if rest:
            self._say(rest)
        self.waiter.forget(pipe)
        os.close(pipe)

    def close_all(self) -> None:
        """Say what is left."""
        for pipe in list(self.begun):
            while pipe in self.begun:
                try:
                    before = len(self.begun[pipe])
                    self.hear(pipe)
                    if pipe in self.begun and len(self.begun[pipe]) == before:
                        self.close(pipe)
                except OSError:
                    self.close(pipe)
