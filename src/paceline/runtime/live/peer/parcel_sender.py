"""How a peer sends parcels to neighbours on other hosts, with its parameters as frames behind them.

Parcels are numbered and kept until the neighbour acknowledges them (`messaging/reliable_channel.py`); a connection that
broke is opened again and what is not acknowledged is retransmitted, so that every parcel, tokens too, comes once and in
order, or the driver's view says that the neighbour is gone. Nothing is retransmitted because time has passed: a
neighbour that computes does not read, and is not to get its parameters twice.

The frames are the slot's own memory, and a thread sends from there while the script computes. The slot stays lent until
the neighbour has the parcel, since it may have to be sent again; then this side releases the slot in the neighbour's
name, and from there on all is as with a neighbour of this host. If parameters travel in half precision, a rounded copy
is sent instead, the same one to all, and the slot is free at once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from paceline.runtime.execution import handle_of
from paceline.runtime.live.messaging.reliable_channel import ReliableChannel
from paceline.runtime.live.messaging.remote_links import FRAME, KeyPair, RemoteLink
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.messaging.unix_sockets import Waiter
from paceline.runtime.live.peer.parameter_slots import SlotPool
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.agent_messages import decode_numbered
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.tensors import wire_precision

logger = logging.getLogger(__name__)

REOPEN_S = 0.2
WARN_S = 10.0
"""How long a neighbour cannot be reached before a warning says so."""


def process_name(process: Process) -> bytes:
    """Returns the name under which a peer speaks on connections between hosts."""
    return b"%d:%d" % process


def session_name(run: str, to: Process) -> str:
    """Returns the session of all channels to this peer in this run; the connection says from whom."""
    return f"{run}>{to[0]}:{to[1]}"


class RemoteNeighbour:
    """The connection to one neighbour on another host, and what is on its way there."""

    def __init__(self, link: RemoteLink, session: str) -> None:
        self.link = link
        self.channel = ReliableChannel(session, link.send, lambda: link.is_idle)
        self.lent: deque[tuple[int, int, int]] = deque()
        """(number of the parcel, slot, serial number) of parameters that are not known to have arrived."""
        self.connected_s = time.monotonic()
        self.warned = False

    def acknowledged(self) -> Iterator[tuple[int, int]]:
        """Reads which parcels have arrived; yields (slot, serial number) of the parameters in them."""
        while (received := self.link.receive()) is not None:
            try:
                numbered = decode_numbered(received[0])
            except wire.BAD_MESSAGE:
                self.link.disconnect()
                break
            if numbered.session == self.channel.session:
                self.channel.accept(numbered)
        unacknowledged = self.channel.unacknowledged[0][0] if self.channel.unacknowledged else sys.maxsize
        while self.lent and self.lent[0][0] < unacknowledged:
            yield self.lent.popleft()[1:]

    def reconnect(self) -> None:
        """Opens a connection that broke again, and retransmits what is not acknowledged."""
        if self.link.gone and time.monotonic() - self.connected_s > REOPEN_S:
            self.connected_s = time.monotonic()
            self.link.reopen()
            self.channel.retransmit()

    def is_unreachable(self) -> bool:
        """Returns True once for each time that the neighbour cannot be reached for long."""
        if self.link.is_connected:
            self.connected_s, self.warned = time.monotonic(), False
        elif not self.warned and time.monotonic() - self.connected_s > WARN_S:
            self.warned = True
            return True
        return False

    def close(self) -> None:
        """Closes the connection; what has not left yet is dropped."""
        self.link.close(discard=True)


class ParcelSender:
    """Sends the parcels of peer `me` to members on other hosts."""

    def __init__(
        self, run: str, me: Process, keys: KeyPair | None, slot_pool: SlotPool, dtype: torch.dtype, waiter: Waiter
    ) -> None:
        """`dtype` is the precision in which parameters travel."""
        self.run = run
        self.me = me
        self.keys = keys
        self.slot_pool = slot_pool
        self.dtype = dtype
        self.waiter = waiter
        self.endpoints: dict[Process, Endpoint] = {}
        """The endpoints of the members on other hosts."""
        self.neighbours: dict[Process, RemoteNeighbour] = {}
        """Those of them to whom something was sent."""
        self.rounded: tuple[int, list[memoryview]] = (0, [])
        """(serial number, frames) of the parameters that were rounded last."""
        self.frames: dict[int, list[memoryview]] = {}
        """The memory of each slot, in frames."""

    def change(self, members: Mapping[Process, Endpoint]) -> None:
        """Takes the members on other hosts from a new view."""
        for process in self.neighbours.keys() - members.keys():
            self._close(process)
        self.endpoints = dict(members)

    def send(self, process: Process, letters: Sequence[wire.Letter]) -> None:
        """Sends these letters to a member, in parcels that bring parameters once at most."""
        to = self.neighbour(process)
        parcel: list[wire.Letter] = []
        for letter in letters:
            parcel.append(letter)
            handle = handle_of(letter.message)
            if handle is not None and letter.slot is not None:
                to.channel.send(wire.encode(wire.Parcel(tuple(parcel))), self._frames(letter.slot, handle.version))
                parcel.clear()
                if self.dtype == self.slot_pool.layout.torch_dtype:
                    to.lent.append((to.channel.number, letter.slot, handle.version))
                else:
                    self.slot_pool.release(letter.slot, process[0], handle.version)
        if parcel:
            to.channel.send(wire.encode(wire.Parcel(tuple(parcel))))

    def neighbour(self, process: Process) -> RemoteNeighbour:
        """Returns the connection to this member, which is opened if there is none."""
        to = self.neighbours.get(process)
        if to is None:
            endpoint = self.endpoints[process]
            link = RemoteLink(endpoint.address, process_name(self.me), self.keys, endpoint.key, threaded=True)
            to = self.neighbours[process] = RemoteNeighbour(link, session_name(self.run, process))
            self.waiter.watch(link)
        return to

    def _frames(self, slot: int, serial: int) -> list[memoryview]:
        values, longest = self.slot_pool.slots[slot].values, FRAME // self.dtype.itemsize
        if self.dtype != values.dtype:
            if self.rounded[0] != serial:
                self.rounded = (serial, wire_precision.memory_of(values.to(self.dtype).split(longest)))
            return self.rounded[1]
        if slot not in self.frames:
            self.frames[slot] = wire_precision.memory_of(values.split(longest))
        return self.frames[slot]

    def maintain(self) -> None:
        """Releases slots whose parameters have arrived, opens broken connections again, and warns of unreachable
        neighbours."""
        for process, to in self.neighbours.items():
            for slot, serial in to.acknowledged():
                self.slot_pool.release(slot, process[0], serial)
            to.reconnect()
            if to.is_unreachable():
                why = to.link.refused or "it does not answer"
                logger.warning(f"peer {self.me[0]} cannot reach peer {process[0]} at {to.link.address}: {why}")

    @property
    def all_arrived(self) -> bool:
        """Whether every neighbour has all that was sent to it."""
        return not any(to.channel.unacknowledged for to in self.neighbours.values())

    def _close(self, process: Process) -> None:
        to = self.neighbours.pop(process)
        self.waiter.forget(to.link.fileno())
        to.close()

    def close(self) -> None:
        """Closes all connections."""
        for process in list(self.neighbours):
            self._close(process)
