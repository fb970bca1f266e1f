"""Peers on different hosts: the same runs, over TCP. Here all are on one, and are made to believe that they are not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import paceline
from paceline import policies
from paceline.cluster import Fault, load
from paceline.core.actions import Apply
from paceline.core.messages import Members, PeerMessage
from paceline.core.topology import neighbours
from paceline.runtime.live.messaging.remote_links import RemoteLink
from paceline.runtime.live.peer.peer import LivePeer
from paceline.runtime.live.peer.remote_neighbours import RemoteNeighbours
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.storage import endpoints
from paceline.session import world
from tests.live.test_peers import step
from tests.live.test_remote_workers import LOCAL, digits, live
from tests.reference import largest_difference, train_alone

SERIAL = "hop:graph=complete,order=serial"


@pytest.fixture(autouse=True)
def everybody_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "shared_folder", lambda folder, endpoint: None)


def breaking(work: Callable[[], object], every: int) -> Callable[[], None]:
    """The same work over connections that break again and again."""

    def run() -> None:
        read, calls = RemoteNeighbours.read, 0

        def break_and_read(self: RemoteNeighbours) -> Iterator[PeerMessage]:
            nonlocal calls
            calls += 1
            for name in list(self.listener.connections.named) if calls % every == 0 else ():
                self.listener.connections.disconnect(name)
            return read(self)

        RemoteNeighbours.read = break_and_read  # type: ignore[method-assign]
        work()

    return run


@pytest.mark.parametrize("multihost", [LOCAL, MultihostOptions("127.0.0.1", "", keys=False)], ids=["keys", "none"])
def test_complete_standard_serial_over_tcp_equals_single_process(multihost: MultihostOptions) -> None:
    run = live(digits(50), SERIAL, multihost, members=Members(3, 0))
    assert run.failures == []
    alone = train_alone("digits-mlp", 3, 50, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert run.replay() == []


def test_connections_that_break_change_nothing() -> None:
    run = live(breaking(digits(30), every=20), SERIAL, members=Members(3, 0))
    assert run.failures == []
    alone = train_alone("digits-mlp", 3, 30, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5


def slowly(work: Callable[[], object], after: int, delay_s: float) -> Callable[[], None]:
    """The same work, but peer 0's parcels, after the first ones, take long: the driver's words overtake them."""

    def run() -> None:
        read, say, sent = RemoteNeighbours.read, RemoteLink.send, 0
        under_way: deque[tuple[float, Callable[[], None]]] = deque()

        def say_later(link: RemoteLink, message: bytes, frames: Sequence[memoryview] = ()) -> None:
            nonlocal sent
            sent += 1
            under_way.append((time.monotonic() + delay_s * (sent > after), partial(say, link, message, frames)))

        def deliver_and_read(self: RemoteNeighbours) -> Iterator[PeerMessage]:
            while under_way and under_way[0][0] <= time.monotonic():
                under_way.popleft()[1]()
            return read(self)

        if paceline.init().rank == 0:
            RemoteNeighbours.read, RemoteLink.send = deliver_and_read, say_later  # type: ignore[method-assign]
        work()

    return run


def test_who_is_done_is_waited_for_until_all_it_said_was_heard() -> None:
    run = live(slowly(digits(6), after=2 * 5, delay_s=0.5), SERIAL, members=Members(3, 0))
    alone = train_alone("digits-mlp", 3, 6, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5


def test_as_halves_it_is_nearly_the_same() -> None:
    half = MultihostOptions("127.0.0.1", "", wire="bfloat16")
    run = live(digits(30), SERIAL, half, members=Members(3, 0))
    alone = train_alone("digits-mlp", 3, 30, "sgd:lr=0.1", torch.float32)
    assert 0.0 < largest_difference(run.parameters, alone) < 0.01


@pytest.mark.parametrize("policy", ["hop:graph=ring", SERIAL, "adpsgd:graph=complete"])
def test_a_script_may_give_peers_unequal_numbers_of_iterations(policy: str) -> None:
    def work() -> None:
        rank = paceline.init().rank
        model = nn.Linear(4, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for _ in range(5 + 10 * rank):
            step(opt, model, torch.ones(2, 4))

    run = live(work, policy, members=Members(4, 0))
    assert run.failures == []
    assert run.evaluated.endswith("the average of 4 peers")
    assert run.replay() == []


@pytest.mark.parametrize("policy", ["hop:graph=ring-based,backup=1,max_gap=4,skip=3", "adpsgd:graph=ring"])
def test_a_peer_dies_and_returns(policy: str) -> None:
    restart = Fault("restart", 2, at_iteration=5, for_s=0.05)
    cluster = replace(load("random-slowdown:factor=6,compute_s=0.01"), faults=(restart,))
    run = live(digits(60), policy, members=Members(4, 0), cluster=cluster)
    assert run.failures == []
    assert run.replay() == []
    back = (r for r in run.trace if r.node == ("peer", 2) and r.incarnation == 1)
    assert any(isinstance(action, Apply) for record in back for action in record.actions)


def test_on_one_host_a_hierarchical_graph_is_complete() -> None:
    run = live(digits(10), "hop:graph=hierarchical,order=serial", members=Members(3, 0))
    assert run.policy == "hop:graph=hierarchical,order=serial,machines=3"
    alone = train_alone("digits-mlp", 3, 10, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5


def test_memory_of_a_peer_stays_within_the_bound_when_one_is_slow() -> None:
    """In vectors: its slots, what came and was not averaged, and a gradient.

    It never needs the most of both at once, but it gives neither back: max_gap more than on one host.
    """
    policy = "hop:graph=ring-based,backup=1,max_gap=2"

    def work() -> None:
        model = nn.Linear(50, 20)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        while opt.global_step < 40:
            step(opt, model, torch.ones(4, 50))
        peer = world().live
        assert isinstance(peer, LivePeer)
        assert peer.neighbours.remote is not None
        vectors = len(peer.neighbours.slot_pool.slots) + len(peer.neighbours.remote.slots) + 1
        paceline.log(loss=vectors, accuracy=peer.run.rank)

    run = live(work, policy, members=Members(6, 0), cluster=load("one-slow:factor=8,compute_s=0.005"))
    parsed = policies.parse(policy)
    assert isinstance(parsed, policies.CATALOGUE["hop"])
    ins = neighbours(parsed.topology(6), frozenset(range(6))).ins
    assert len(run.history) == 6
    for point in run.history:
        assert 3 <= (point.loss or 0) <= len(ins[int(point.accuracy or 0)]) * (1 + 2) + 2 + 3
