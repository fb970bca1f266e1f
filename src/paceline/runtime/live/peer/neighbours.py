"""A live peer's neighbours: what is said to them and heard from them, parameters included.

Messages go over Unix sockets, one connection for each direction, opened when the first is sent; all that one step of
the machine says to a neighbour is one parcel. Parameters are in slots (`slots.py`); the message names the slot. Those
on other hosts get the same parcels over TCP (`distant.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.core.messages import PeerMessage
from paceline.runtime.driver import handle_of
from paceline.runtime.live import wire
from paceline.runtime.live.across import doors
from paceline.runtime.live.configuration import Door, LiveConfig
from paceline.runtime.live.peer.distant import Distant
from paceline.runtime.live.peer.slots import Mail, Process, Shelf, home_path, peer_path
from paceline.runtime.live.sockets import Link, Listener, Waiter
from paceline.tensors.layout import Layout


class Neighbours:
    """What peer `me` has to do with all others."""

    def __init__(self, folder: Path, me: Process, layout: Layout, config: LiveConfig, waiter: Waiter) -> None:
        readers = config.members.workers
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
        self.distant: Distant | None = None
        """Those on other hosts, in a run that has some."""
        self.homes: dict[Process, Path] = {}
        """The folders of those that another launcher brought to this host."""
        if config.abroad is not None:
            self.distant = Distant(folder, me, config, self.shelf, self.mail)
            self.distant.watch(waiter)

    @property
    def door(self) -> Door | None:
        """Where others find this peer, in a run that crosses hosts."""
        return self.distant.door if self.distant is not None else None

    def change(self, members: dict[int, int], places: Sequence[Door] = ()) -> None:
        """These are the members from now on, and where each is, if the run crosses hosts."""
        self.members = self.shelf.members = members
        for process in [process for process in self.links if members.get(process[0]) != process[1]]:
            self.links.pop(process).close()
        if self.distant is not None:
            self._locate(self.distant, dict(zip(sorted(members.items()), places, strict=True)))

    def _locate(self, distant: Distant, places: dict[Process, Door]) -> None:
        """Find out which members are on this host."""
        far: dict[Process, Door] = {}
        homes: dict[Process, Path] = {}
        for process, door in places.items():
            known = distant.doors.keys() | self.homes.keys()
            home = self.homes.get(process) if process in known else doors.near_folder(self.folder, door)
            if home is None:
                far[process] = door
            else:
                homes[process] = home
        self.homes = homes
        distant.change(far)

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
            if rank not in self.members:
                continue
            process = (rank, self.members[rank])
            if self.distant is not None and process in self.distant.doors:
                self.distant.send(process, letters)
            else:
                self._link(process).send(wire.encode(wire.Parcel(tuple(letters))))
        self.outbox.clear()

    def _link(self, process: Process) -> Link:
        link = self.links.get(process)
        if link is None:
            home = self.homes.get(process, self.folder)
            if home != self.folder:
                there = home_path(home, *self.shelf.owner)
                if not there.is_symlink():
                    there.symlink_to(self.folder)
            link = self.links[process] = Link(peer_path(home, *process), self.name)
        return link

    @property
    def all_heard(self) -> bool:
        """Whether those on other hosts have all that was said to them. On this host they have it at once."""
        return self.distant is None or self.distant.all_heard

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
        if self.distant is not None:
            yield from self.distant.read()

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.listener.close()
        if self.distant is not None:
            self.distant.close()
