"""A wire in memory that joins real machines, so that a test can work the numbers of a run out by hand.

Every message takes `latency_s`; worker w computes iteration i in `compute_s(w, i)`. Things at the same time
happen in the order they were sent. `views` are told to everybody at once; `kill` silences a worker without
telling anyone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import pytest

from paceline.core.actions import Answer, Compute, Send
from paceline.core.events import (
    Event,
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    PushRejected,
    ViewChanged,
)
from paceline.core.machine import Machine
from paceline.core.messages import Members, Node, Push, View
from paceline.core.trace import Header, Record, Trace
from paceline.policies import parse

GRADIENT_BYTES = 10
SLICE_BYTES = 100


class Wire:
    def __init__(self, policy: str, workers: int, servers: int, compute_s, latency_s: float) -> None:
        self.policy = parse(policy)
        self.members = Members(workers, servers)
        self.compute_s = compute_s
        self.latency_s = latency_s
        slices = tuple(SLICE_BYTES * (shard + 1) for shard in range(servers))
        self.trace = Trace(Header("virtual", policy, self.members, 0, slices))
        self.machines: dict[tuple[Node, int], Machine] = {}
        self.silenced: dict[tuple[int, int], float] = {}
        self.rejected: set[tuple[int, int, int]] = set()
        self.queue: list[tuple[float, int, Node, int, Event]] = []
        self.sequence = 0
        self.view = View(0, ())

    def send(self, at: float, node: Node, incarnation: int, event: Event) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (at, self.sequence, node, incarnation, event))

    def change_view(self, at: float, members: tuple[tuple[int, int], ...]) -> None:
        self.view = View(self.view.number + 1, members)
        for shard in range(self.members.servers):
            self.send(at, Node("server", shard), 0, ViewChanged(at, self.view))
        for rank, incarnation in members:
            self.send(at, Node("worker", rank), incarnation, ViewChanged(at, self.view))

    def run(self, until_s: float) -> Trace:
        while self.queue and self.queue[0][0] <= until_s:
            at, _, node, incarnation, event = heapq.heappop(self.queue)
            if node.role == "worker" and at >= self.silenced.get((node.rank, incarnation), until_s + 1):
                continue
            self.step(at, node, incarnation, event)
        return self.trace

    def step(self, at: float, node: Node, incarnation: int, event: Event) -> None:
        key = (node, incarnation)
        if key not in self.machines:
            self.machines[key] = self.policy.machine(node.role, node.rank, self.members, 0)
            self.machines[key].checks = True
        actions = self.machines[key].handle(event)
        self.trace.records.append(Record(node, incarnation, event, tuple(actions)))
        arrival = at + self.latency_s
        for action in actions:
            if isinstance(action, Compute):
                done = at + self.compute_s(node.rank, action.iteration)
                nbytes = (GRADIENT_BYTES,) * self.members.servers
                self.send(done, node, incarnation, GradientReady(done, action.iteration, 0, nbytes))
            elif isinstance(action, Send):
                self.send(arrival, action.to, 0, self.arrive(arrival, action.to, action.message))
            elif isinstance(action, Answer):
                to = Node("worker", action.parameters.worker)
                answer = ParametersArrived(arrival, action.parameters)
                self.send(arrival, to, action.parameters.incarnation, answer)

    def arrive(self, at: float, to: Node, message) -> Event:
        if not isinstance(message, Push):
            return PullArrived(at, message)
        handle = message.handle
        if (handle.source, handle.iteration, to.rank) in self.rejected:
            return PushRejected(at, message, "not finite")
        return PushArrived(at, message)


def simulate(
    policy: str,
    compute_s: Callable[[int, int], float] | Sequence[float],
    *,
    workers: int | None = None,
    servers: int = 1,
    latency_s: float = 0.0,
    until_s: float,
    views: Sequence[tuple[float, tuple[tuple[int, int], ...]]] = (),
    kill: Sequence[tuple[float, int, int]] = (),
    reject: Sequence[tuple[int, int, int]] = (),
) -> Trace:
    """Run machines of `policy` until `until_s`. All workers are there from the start; `views` change that.

    `kill`: (when, rank, incarnation); `reject`: (source, iteration, shard) of pushes that are not finite.
    """
    times = compute_s if callable(compute_s) else lambda worker, iteration: compute_s[worker]
    count = workers or len(compute_s)
    wire = Wire(policy, count, servers, times, latency_s)
    wire.silenced = {(rank, incarnation): at for at, rank, incarnation in kill}
    wire.rejected = set(reject)
    wire.change_view(0.0, tuple((rank, 0) for rank in range(count)))
    for at, members in views:
        wire.change_view(at, members)
    return wire.run(until_s)


@pytest.fixture(name="simulate")
def simulate_fixture():
    return simulate
