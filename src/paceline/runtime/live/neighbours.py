"""A live peer's neighbours: what is said to them and heard from them, parameters included.

Messages go over Unix sockets, one connection for each direction, opened when the first is sent; all that one step of
the machine says to a neighbour is one parcel. Parameters are in slots (`slots.py`); the message names the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.core.messages import PeerMessage
from paceline.runtime.driver import handle_of
from paceline.runtime.live import wire
from paceline.runtime.live.slots import Mail, Process, Shelf, peer_path
from paceline.runtime.live.sockets import Link, Listener, Waiter
from paceline.tensors.layout import Layout


class Neighbours:
    """What peer `me` has to do with all others; `readers` is how many there may be."""

    def __init__(self, folder: Path, me: Process, layout: Layout, readers: int, waiter: Waiter) -> None:
        self.folder = folder
        self.name = b"%d:%d" % me
        self.shelf = Shelf(folder, me, layout, readers)
        self.mail = Mail(folder, me[0], layout, readers)
        self.waiter = waiter
        self.listener = Listener(peer_path(folder, *me))
        self.waiter.watch(self.listener)
        self.members: dict[int, int] = {}
        self.links: dict[Process, Link] = {}
        self.outbox: dict[int, list[wire.Letter]] = {}

    def change(self, members: dict[int, int]) -> None:
        """These are the members from now on."""
        self.members = self.shelf.members = members
        for process in [process for process in self.links if members.get(process[0]) != process[1]]:
            self.links.pop(process).close()

    def write(self, rank: int, message: PeerMessage, name: Callable[[int], int]) -> None:
        """Put a message into the next parcel. If it names parameters, `name` says which slot they are in."""
        handle = handle_of(message)
        slot = name(handle.version) if handle is not None else None
        if slot is not None and rank in self.members:
            self.shelf.lend(slot, rank)
        self.outbox.setdefault(rank, []).append(wire.Letter(message, slot))

    def post(self) -> None:
        """Send the parcels. What is for somebody who is gone is lost."""
        for rank, letters in self.outbox.items():
            if rank in self.members:
                self._link((rank, self.members[rank])).send(wire.encode(wire.Parcel(tuple(letters))))
        self.outbox.clear()

    def _link(self, process: Process) -> Link:
        link = self.links.get(process)
        if link is None:
            link = self.links[process] = Link(peer_path(self.folder, *process), self.name)
        return link

    @property
    def heard_some(self) -> bool:
        """Something was heard that is not read yet."""
        return bool(self.listener.inbox)

    def hear_all(self) -> None:
        """Hear all that others have said by now, on connections that are not accepted yet too."""
        before = None
        while before != (before := (len(self.listener.streams), len(self.listener.inbox))):
            self.waiter.wait(0.0)

    def read(self) -> Iterator[PeerMessage]:
        """What was heard, less messages whose parameters are gone: their sender was killed, and a view will say so."""
        while (received := self.listener.receive()) is not None:
            for letter in wire.decode_parcel(received[1]).letters:
                handle = handle_of(letter.message)
                if handle is None or letter.slot is None or self.mail.take(handle, letter.slot):
                    yield letter.message

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.listener.close()
