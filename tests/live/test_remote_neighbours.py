"""Parcels between peers of different hosts, here in one process: each comes once, in order, from whom it says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.messages import Handle, Members, PeerMessage, Token, Update
from paceline.runtime.live.messaging.remote_links import RemoteLink, make_keys
from paceline.runtime.live.messaging.unix_sockets import Waiter
from paceline.runtime.live.peer.neighbours import Neighbours
from paceline.runtime.live.peer.parcel_sender import REOPEN_S, session_name
from paceline.runtime.live.peer.peer_parameters import PeerParameters
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import LiveConfig, MultihostOptions
from paceline.runtime.live.storage import endpoints
from paceline.runtime.live.storage.process_keys import write_keys
from paceline.tensors.layout import layout_of

SIZE = 600_000
"""More than one frame."""


class Peer:
    """A peer without a machine."""

    def __init__(self, folder: Path, rank: int, way: str = "float32", run: str = "run") -> None:
        multihost = MultihostOptions("127.0.0.1", "", wire=way)
        config = LiveConfig(Members(3, 0), 0, None, "", "eps", run=run, multihost=multihost)
        tensors: list[Tensor] = [torch.zeros(SIZE)]
        layout = layout_of([("a", tensors[0], 0)])
        write_keys(folder, rank, 0)
        self.rank = rank
        self.waiter = Waiter()
        self.neighbours = Neighbours(folder, (rank, 0), layout, config, self.waiter)
        self.values = PeerParameters(tensors, self.neighbours.slot_pool)
        self.serial = 0
        self.heard: list[PeerMessage] = []

    @property
    def remote(self):
        return self.neighbours.remote

    def meet(self, *others: Peer) -> None:
        everybody = sorted([self, *others], key=lambda peer: peer.rank)
        self.neighbours.change({peer.rank: 0 for peer in everybody}, [peer.neighbours.endpoint for peer in everybody])

    def send(self, to: int, value: float) -> Handle:
        """Send parameters that are all this."""
        self.serial += 1
        if not self.neighbours.slot_pool.is_free(self.values.number):
            self.values.move()
        self.values.slot.values.fill_(value)
        handle = Handle(self.rank, 0, self.serial, self.serial, 0)
        self.neighbours.write(to, Update(handle), self.values.publish)
        self.neighbours.flush()
        return handle

    def say(self, to: int, iteration: int) -> None:
        self.neighbours.write(to, Token(self.rank, 0, iteration), self.values.publish)
        self.neighbours.flush()

    def hear(self) -> None:
        self.waiter.wait(0.01)
        self.heard += self.neighbours.read()

    @property
    def tokens(self) -> list[int]:
        return [message.iteration for message in self.heard if isinstance(message, Token)]

    def close(self) -> None:
        self.neighbours.close()
        self.waiter.close()


def until(happened: Callable[[], object], *peers: Peer, timeout_s: float = 20.0) -> None:
    limit = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < limit, "it did not come about"
        for peer in peers:
            peer.hear()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Peer, Peer]]:
    monkeypatch.setattr(endpoints, "shared_folder", lambda folder, endpoint: None)
    with contextlib.closing(Peer(tmp_path, 0)) as a, contextlib.closing(Peer(tmp_path, 1)) as b:
        a.meet(b)
        b.meet(a)
        yield a, b


def break_off(listener: Peer, rank: int) -> None:
    """Cut the connection of a peer, as a network does."""
    assert listener.remote.listener.connections.disconnect(b"%d:0" % rank)


def test_parameters_arrive_and_the_slot_is_lent_until_they_have(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    handle = a.send(1, 2.5)
    slot = a.values.number
    assert not a.neighbours.slot_pool.is_free(slot)
    until(lambda: b.heard, a, b)
    assert b.heard == [Update(handle)]
    assert b.neighbours.inbox.held[handle].values.eq(2.5).all()
    until(lambda: a.neighbours.all_arrived, a)
    assert a.neighbours.slot_pool.is_free(slot), "before it was averaged: the receiver has it in memory of its own"
    box = b.neighbours.inbox.held[handle]
    b.neighbours.inbox.release(handle)
    again = a.send(1, 3.5)
    until(lambda: again in b.neighbours.inbox.held, a, b)
    assert b.neighbours.inbox.held[again] is box, "memory is used again"
    assert len(a.neighbours.slot_pool.slots) == 1


def test_connections_that_break_lose_nothing_and_bring_nothing_twice(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    sent: dict[Handle, float] = {}
    for number in range(30):
        sent[a.send(1, number)] = number
        a.say(1, number)
        if number % 5 == 4:
            until(lambda: b.remote.listener.connected(b"0:0"), a, b)
            break_off(b, 0)
            if number % 10 == 4:
                time.sleep(REOPEN_S)
    until(lambda: len(b.tokens) == 30 and a.neighbours.all_arrived, a, b)
    assert b.tokens == list(range(30))
    assert [message.handle for message in b.heard if isinstance(message, Update)] == list(sent)
    for handle, value in sent.items():
        assert b.neighbours.inbox.held[handle].values.eq(value).all(), (
            "what was sent is what was there when it was sent"
        )
    assert all(a.neighbours.slot_pool.is_free(number) for number in range(len(a.neighbours.slot_pool.slots)))


def test_who_is_no_member_any_more_is_not_heard_and_not_waited_for(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    a.say(1, 1)
    until(lambda: b.tokens == [1], a, b)
    b.neighbours.change({1: 0}, [b.neighbours.endpoint])
    handle = a.send(1, 1.0)
    for _ in range(30):
        a.hear()
        b.hear()
    assert Update(handle) not in b.heard
    assert not a.neighbours.all_arrived
    a.neighbours.change({0: 0}, [a.neighbours.endpoint])
    assert a.neighbours.all_arrived
    assert a.neighbours.slot_pool.is_free(a.values.number)


@pytest.mark.parametrize("way", ["bfloat16", "float16"])
def test_halves_are_rounded_once_and_free_the_slot_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(endpoints, "shared_folder", lambda folder, endpoint: None)
    peers = [Peer(tmp_path, rank, way) for rank in range(3)]
    try:
        for peer in peers:
            peer.meet(*(other for other in peers if other is not peer))
        a, b, c = peers
        a.values.slot.values.fill_(1 / 3)
        handle = Handle(0, 0, 1, 1, 0)
        for to in (1, 2):
            a.neighbours.write(to, Update(handle), a.values.publish)
        a.neighbours.flush()
        assert a.neighbours.slot_pool.is_free(a.values.number)
        frames = [to.channel.unacknowledged[0][2] for to in a.remote.sender.neighbours.values()]
        assert all(mine.obj is theirs.obj for mine, theirs in zip(*frames, strict=True)), "one copy for all"
        a.values.slot.values.fill_(9.0)
        until(lambda: b.heard and c.heard, *peers)
        expected = torch.tensor(1 / 3).to(getattr(torch, way)).float()
        assert b.neighbours.inbox.held[handle].values.eq(expected).all()
    finally:
        for peer in peers:
            peer.close()


def test_what_speaks_for_another_or_has_wrong_frames_is_refused(
    pair: tuple[Peer, Peer], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    a.neighbours.write(1, Token(2, 0, 7), a.values.publish)
    a.neighbours.flush()
    handle = Handle(0, 0, 1, 1, 0)
    parcel = wire.encode(wire.Parcel((wire.Letter(Update(handle), 0),)))
    a.remote.sender.neighbour((1, 0)).channel.send(parcel, [memoryview(b"too short")])
    a.remote.sender.neighbour((1, 0)).channel.send(b"\xff\xff")
    a.remote.sender.neighbour((1, 0)).channel.session = "another run>1:0"
    a.say(1, 8)
    a.remote.sender.neighbour((1, 0)).channel.session = session_name("run", (1, 0))
    until(lambda: b.remote.refusals[b"0:0"] == 4, a, b)
    assert b.heard == []
    assert b.neighbours.inbox.held == {}
    said = capsys.readouterr().err
    assert "it speaks for another peer" in said
    assert "frames came" in said or "bytes" in said


def test_a_key_that_no_view_has_named_is_not_let_in(pair: tuple[Peer, Peer]) -> None:
    _, b = pair
    endpoint = b.neighbours.endpoint
    assert endpoint is not None
    link = RemoteLink(endpoint.address, b"0:0", make_keys(), endpoint.key)
    try:
        link.send(b"hello")
        until(lambda: link.receive() is None and link.refused, b)
        assert "does not know this key" in link.refused
    finally:
        link.close()
    assert b.heard == []
    assert not b.remote.listener.connected(b"0:0")
