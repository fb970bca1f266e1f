"""A live peer's neighbours: the messages that are exchanged with them, and the parameters that these bring.

Messages go over Unix sockets, one connection for each direction, opened when the first is sent; all that one step of
the machine says to a neighbour is one parcel. Parameters are in slots (`peer/parameter_slots.py`); the message names
the slot. Those on other hosts get the same parcels over TCP (`peer/remote_neighbours.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.core.messages import PeerMessage
from paceline.runtime.execution import handle_of
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.messaging.unix_sockets import Link, Listener, Waiter
from paceline.runtime.live.peer.parameter_slots import Inbox, SlotPool, folder_link, peer_path
from paceline.runtime.live.peer.remote_neighbours import RemoteNeighbours
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import Endpoint, LiveConfig
from paceline.runtime.live.storage import endpoints
from paceline.tensors.layout import Layout


class Neighbours:
    """Exchanges messages and parameters between peer `me` and all other members."""

    def __init__(self, folder: Path, me: Process, layout: Layout, config: LiveConfig, waiter: Waiter) -> None:
        readers = config.members.workers
        self.folder = folder
        self.name = b"%d:%d" % me
        self.slot_pool = SlotPool(folder, me, layout, readers)
        self.inbox = Inbox(folder, me[0], layout, readers)
        self.waiter = waiter
        self.listener = Listener(peer_path(folder, *me))
        self.waiter.watch(self.listener)
        self.members: dict[int, int] = {}
        self.links: dict[Process, Link] = {}
        self.outbox: dict[int, list[wire.Letter]] = {}
        self.folders: dict[Process, Path] = {}
        """In a run that crosses hosts: the run's folder as each member on this host has it."""
        self.remote: RemoteNeighbours | None = None
        """The members on other hosts, in a run that crosses hosts."""
        if config.multihost is not None:
            self.remote = RemoteNeighbours(folder, me, config, self.slot_pool, self.inbox, waiter)

    @property
    def endpoint(self) -> Endpoint | None:
        """Where others find this peer, in a run that crosses hosts."""
        return self.remote.endpoint if self.remote is not None else None

    def change(self, members: dict[int, int], places: Sequence[Endpoint] = ()) -> None:
        """Takes the members from a new view, and the endpoint of each if the run crosses hosts."""
        self.members = self.slot_pool.members = members
        self.inbox.unmap_departed(members)
        for process in [process for process in self.links if members.get(process[0]) != process[1]]:
            self.links.pop(process).close()
        if self.remote is not None:
            self._locate(self.remote, dict(zip(sorted(members.items()), places, strict=True)))

    def _locate(self, remote: RemoteNeighbours, places: dict[Process, Endpoint]) -> None:
        """Finds out which members are on this host."""
        elsewhere: dict[Process, Endpoint] = {}
        folders: dict[Process, Path] = {}
        for process, endpoint in places.items():
            folder = self.folders.get(process)
            if folder is None and process not in remote.sender.endpoints:
                folder = endpoints.shared_folder(self.folder, endpoint)
            if folder is None:
                elsewhere[process] = endpoint
            else:
                folders[process] = folder
        self.folders = folders
        remote.change(elsewhere)

    def write(self, rank: int, message: PeerMessage, publish: Callable[[int], int]) -> None:
        """Puts a message into the next parcel. If it names parameters, `publish` tells which slot they are in."""
        handle = handle_of(message)
        slot = publish(handle.version) if handle is not None else None
        if slot is not None and rank in self.members:
            self.slot_pool.lend(slot, rank)
        self.outbox.setdefault(rank, []).append(wire.Letter(message, slot))

    def flush(self) -> None:
        """Sends the parcels; those for peers that are gone are dropped."""
        for rank, letters in self.outbox.items():
            if rank not in self.members:
                continue
            process = (rank, self.members[rank])
            if self.remote is not None and process in self.remote.sender.endpoints:
                self.remote.sender.send(process, letters)
            else:
                self._link(process).send(wire.encode(wire.Parcel(tuple(letters))))
        self.outbox.clear()

    def _link(self, process: Process) -> Link:
        link = self.links.get(process)
        if link is None:
            folder = self.folders.get(process, self.folder)
            if folder != self.folder:
                there = folder_link(folder, *self.slot_pool.owner)
                if not there.is_symlink():
                    there.symlink_to(self.folder)
            link = self.links[process] = Link(peer_path(folder, *process), self.name)
        return link

    @property
    def all_arrived(self) -> bool:
        """Whether those on other hosts have all that was sent to them. On this host it arrives at once."""
        return self.remote is None or self.remote.sender.all_arrived

    @property
    def has_unread(self) -> bool:
        """Whether something was received that is not read yet."""
        return bool(self.listener.inbox)

    def receive_all(self) -> None:
        """Receives all that others have sent by now, also on connections that are not accepted yet."""
        before = None
        while before != (before := (len(self.listener.streams), len(self.listener.inbox))):
            self.waiter.wait(0.0)

    def read(self) -> Iterator[PeerMessage]:
        """Yields the messages received, less those whose sender was killed and has no parameters any more."""
        while (received := self.listener.receive()) is not None:
            for letter in wire.decode_parcel(received[1]).letters:
                handle = handle_of(letter.message)
                if handle is None or letter.slot is None or self.inbox.receive(handle, letter.slot):
                    yield letter.message
        if self.remote is not None:
            yield from self.remote.read()

    def close(self) -> None:
        """Closes all connections."""
        for link in self.links.values():
            link.close()
        self.listener.close()
        if self.remote is not None:
            self.remote.close()
