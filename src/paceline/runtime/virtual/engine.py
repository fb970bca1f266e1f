"""The simulated clock: a heap of what will happen, keyed (time, priority, sequence).

Equal times are settled by priority, then by the order of scheduling, so a run is the same every time. Links
have a latency; a server moves one transfer at a time in each direction, so large slices and many workers queue
up at it. Messages from one node to another keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

FAULT, MESSAGE, COMPUTE, TIMER = 0, 1, 2, 3
"""Priorities at equal times: faults strike first, then messages arrive, then computations end, timers fire last."""

Happening = Callable[[], None]


class Engine:
    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self.over = False
        """There is nobody left to train: only what is on its way still arrives."""
        self.heap: list[tuple[float, int, int, Callable[..., None], Any]] = []
        self.sequence = 0
        self.missed = 0
        """What was to happen after the end."""

    @property
    def happened(self) -> int:
        """How much has happened."""
        return self.sequence - self.missed - len(self.heap)

    def at(self, time: float, priority: int, happening: Happening) -> None:
        self.sequence += 1
        heappush(self.heap, (time, priority, self.sequence, happening, None))

    def tell(self, time: float, priority: int, whom: Callable[[Any], None], what: object) -> None:
        """The same for `whom(what)`: most of what happens is that somebody is told something, and a closure costs."""
        self.sequence = sequence = self.sequence + 1
        heappush(self.heap, (time, priority, sequence, whom, what))

    def stop(self) -> None:
        """End the run after what is happening now."""
        self.stopped = True

    def wind_up(self) -> None:
        """End the run with the last message on its way: timers and faults that nobody lives to see take no time."""
        self.over = True

    def run(self) -> None:
        heap = self.heap
        while heap and not self.stopped:
            time, priority, _, happening, what = heappop(heap)
            if self.over and priority != MESSAGE:
                self.missed += 1
                continue
            self.now = time
            if what is None:
                happening()
            else:
                happening(what)


class Wire:
    """One direction of one server's connection: transfers go one after the other."""

    def __init__(self, latency_s: float, bandwidth: float) -> None:
        self.latency_s = latency_s
        self.seconds_per_byte = 1.0 / bandwidth
        self.free_at = 0.0

    def arrival(self, now: float, nbytes: int) -> float:
        """When something of `nbytes` sent now has arrived whole; the wire is busy until then."""
        ready = now + self.latency_s
        start = ready if ready > self.free_at else self.free_at
        self.free_at = arrival = start + nbytes * self.seconds_per_byte
        return arrival
