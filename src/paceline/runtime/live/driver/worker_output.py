"""What workers print: it comes through the driver (or a host's agent), line by line, under the worker's rank.

Were they to write to the terminal or the file themselves, lines of several would run into each other: an unbuffered
`print` writes its text and the end of its line apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.messaging.unix_sockets import Waiter

AT_ONCE = 1 << 16
LONGEST_LINE = 1 << 20
"""Bytes without an end of line that are kept back; then they are said as a line."""


class WorkerOutput:
    """Reads the pipes of children. `say` gets their lines, `say_error` those of a separate stderr."""

    def __init__(self, waiter: Waiter, say: Callable[[str], None], say_error: Callable[[str], None]) -> None:
        self.waiter = waiter
        self.says = (say, say_error)
        self.begun: dict[int, bytes] = {}
        """Of each pipe: the line that has begun."""
        self.sources: dict[int, tuple[str, Callable[[str], None]]] = {}
        """Of each pipe: whose it is, in words, and who gets its lines."""

    def listen(self, child: Child) -> None:
        """Follow what this child prints, if that comes through here."""
        for pipe, say in zip(child.outputs, self.says, strict=False):
            os.set_blocking(pipe, False)
            self.begun[pipe] = b""
            self.sources[pipe] = (str(child), say)
            self.waiter.watch(pipe)

    def hear_all(self, ready: Iterable[object]) -> None:
        """Say the lines that are there in those of the pipes that are ready."""
        for pipe in self.begun.keys() & set(ready):
            self.hear(pipe)

    def hear(self, pipe: int) -> None:
        """Say the lines that are there."""
        try:
            data = os.read(pipe, AT_ONCE)
        except BlockingIOError:
            return
        *lines, rest = (self.begun[pipe] + data).split(b"\n")
        for line in lines:
            self._say(pipe, line)
        # A progress bar has written over all that stands before its last return to the beginning of the line.
        rest = rest[rest.rfind(b"\r", 0, len(rest) - 1) + 1 :]
        if len(rest) > LONGEST_LINE:
            self._say(pipe, rest)
            rest = b""
        self.begun[pipe] = rest
        if not data:
            self.close(pipe)

    def hear_last(self, child: Child) -> None:
        """Say what a child that has ended has left."""
        for pipe in child.outputs:
            if pipe in self.begun:
                self.hear(pipe)

    def _say(self, pipe: int, line: bytes) -> None:
        """As a terminal would show it in the end."""
        source, say = self.sources[pipe]
        text = line.removesuffix(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        # What paceline says in a worker's process names the worker already.
        say(text if text.startswith((f"{source}:", f"{source} ")) else f"{source}: {text}")

    def close(self, pipe: int) -> None:
        rest = self.begun.pop(pipe)
        if rest:
            self._say(pipe, rest)
        del self.sources[pipe]
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


def print_error(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr)
