"""The simulated clock: a heap of what will happen, keyed (time, priority, sequence).

Equal times are settled by priority, then by the order of scheduling, so a run is the same every time. Links
have a latency; a server moves one transfer at a time in each direction, so large slices and many workers queue
up at it. Messages from one node to another keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

FAULT, MESSAGE, COMPUTE, TIMER = 0, 1, 2, 3
"""Priorities at equal times: faults strike first, then messages arrive, then computations end, timers fire last."""

Callback = Callable[[Any], None]


class Engine:
    """Calls what is scheduled, in the order of simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self.over = False
        """Whether nobody is left to train, so that only what is on its way still arrives."""
        self.heap: list[tuple[float, int, int, Callback, Any]] = []
        self.sequence = 0
        self.missed = 0
        """How many callbacks were due after the end."""

    @property
    def happened(self) -> int:
        """The number of callbacks called so far."""
        return self.sequence - self.missed - len(self.heap)

    def schedule(self, time: float, priority: int, callback: Callback, argument: object) -> None:
        """Calls `callback(argument)` at `time`. (A closure for each would cost more than an argument.)"""
        self.sequence = sequence = self.sequence + 1
        heappush(self.heap, (time, priority, sequence, callback, argument))

    def postpone(self, owner: object, by_s: float) -> None:
        """Postpones the computations under way whose callback is a method of `owner`."""
        for i, (time, priority, sequence, callback, argument) in enumerate(self.heap):
            if priority == COMPUTE and getattr(callback, "__self__", None) is owner:
                self.heap[i] = (time + by_s, priority, sequence, callback, argument)
        heapify(self.heap)

    def stop(self) -> None:
        """Ends the run after what is happening now."""
        self.stopped = True

    def wind_up(self) -> None:
        """Ends the run with the last message on its way: timers and faults that affect nobody any more take no time."""
        self.over = True

    def run(self) -> None:
        """Calls everything that is scheduled, and what that schedules, until nothing is left or `stop` is called."""
        heap = self.heap
        while heap and not self.stopped:
            time, priority, _, callback, argument = heappop(heap)
            if self.over and priority != MESSAGE:
                self.missed += 1
                continue
            self.now = time
            callback(argument)


class Wire:
    """One direction of one node's connection: transfers go one after the other."""

    def __init__(self, latency_s: float, bandwidth: float) -> None:
        self.latency_s = latency_s
        self.seconds_per_byte = 1.0 / bandwidth
        self.free_at = 0.0

    def arrival(self, now: float, nbytes: int) -> float:
        """Returns when something of `nbytes` sent now has arrived whole; the wire is busy until then."""
        ready = now + self.latency_s
        start = ready if ready > self.free_at else self.free_at
        self.free_at = arrival = start + nbytes * self.seconds_per_byte
        return arrival
