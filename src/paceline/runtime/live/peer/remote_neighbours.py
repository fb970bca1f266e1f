"""A peer's neighbours on other hosts: the same parcels, over TCP, with the parameters as frames behind them.

A peer listens to its neighbours, and has a connection to each one that it sends something to (`peer/parcel_sender.py`).
The parameters that come are written into private memory that looks like a slot. There is as much of it as there were
parameters waiting to be averaged at one time.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from paceline.core.messages import Handle, Offer, PeerMessage, Reply, Update
from paceline.runtime.execution import handle_of
from paceline.runtime.live.messaging.addresses import routable
from paceline.runtime.live.messaging.reliable_channel import ReliableChannel
from paceline.runtime.live.messaging.remote_links import FRAME, RemoteListener
from paceline.runtime.live.messaging.senders import LINES, MessageRefused, Process, process_of
from paceline.runtime.live.messaging.unix_sockets import Waiter
from paceline.runtime.live.peer.parameter_slots import Inbox, Slot, SlotPool, slot_bytes
from paceline.runtime.live.peer.parcel_sender import ParcelSender, process_name, session_name
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.agent_messages import Numbered, decode_numbered
from paceline.runtime.live.protocol.configuration import Endpoint, LiveConfig
from paceline.runtime.live.storage import endpoints
from paceline.runtime.live.storage.process_keys import find_keys
from paceline.tensors import wire_precision
from paceline.tensors.layout import Layout
from paceline.tensors.wire_codecs import WrongFrames

logger = logging.getLogger(__name__)


class RemoteSlot(Slot):
    """Memory of this peer's own, in place of a slot of a neighbour on another host."""

    def __init__(self, layout: Layout, readers: int, dtype: torch.dtype) -> None:
        buffer = mmap.mmap(-1, slot_bytes(layout, readers), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        super().__init__(buffer, layout, readers)
        self.places = self.values.split(FRAME // dtype.itemsize)
        """Where each frame goes."""


class RemoteNeighbours:
    """Exchanges parcels between peer `me` and the members on other hosts; each comes once and in order."""

    def __init__(
        self, folder: Path, me: Process, config: LiveConfig, slot_pool: SlotPool, inbox: Inbox, waiter: Waiter
    ) -> None:
        multihost = config.multihost
        assert multihost is not None
        layout = slot_pool.layout
        keys = find_keys(folder, *me) if multihost.keys else None
        self.me = me
        self.session = session_name(config.run, me)
        self.inbox = inbox
        self.dtype = wire_precision.dtype_of_peers(multihost.wire, layout.torch_dtype)
        """The precision in which parameters travel."""
        self.waiter = waiter
        largest = layout.numel * layout.itemsize + FRAME
        self.listener = RemoteListener(multihost.host, multihost.ports, keys, largest, threaded=True)
        waiter.watch(self.listener)
        address = f"tcp://{multihost.advertise or routable(multihost.host)}:{self.listener.port}"
        key = keys.public if keys is not None else ""
        self.endpoint = Endpoint(me[1], str(folder), endpoints.read_nonce(folder), address, key)
        """Where others find this peer."""
        self.sender = ParcelSender(config.run, me, keys, slot_pool, self.dtype, waiter)
        self.channels: dict[Process, ReliableChannel] = {}
        """What each member has sent."""
        self.slots: list[RemoteSlot] = []
        self.refusals: Counter[bytes] = Counter()
        """How many messages of each sender were refused."""

    def change(self, members: Mapping[Process, Endpoint]) -> None:
        """Takes the members on other hosts from a new view; nobody else is let in."""
        for process in self.sender.endpoints.keys() - members.keys():
            self.listener.expel(process_name(process))
            self.channels.pop(process, None)
        self.sender.change(members)
        if self.listener.keys is not None:
            for process, endpoint in members.items():
                self.listener.enrol(endpoint.key, process_name(process))

    def read(self) -> Iterator[PeerMessage]:
        """Yields the messages that have come, once their parameters are in the inbox."""
        self.sender.maintain()
        while (received := self.listener.receive()) is not None:
            yield from self._receive(*received)
        self.listener.gone()  # who comes back says what was lost again

    def _receive(self, name: bytes, message: bytes, frames: Sequence[memoryview]) -> Sequence[PeerMessage]:
        """Returns the new messages in what another host has sent; what is wrong is refused in one line."""
        said: list[PeerMessage] = []
        try:
            sender, numbered = process_of(name), decode_numbered(message)
            if numbered.session != self.session:
                raise MessageRefused("it was for another run, or another peer")
            if self._channel(sender).accept(numbered) and numbered.number:
                said = self._unpack(sender, numbered, frames)
        except (*wire.BAD_MESSAGE, WrongFrames, MessageRefused) as error:
            self._refuse(name, str(error))
            if not isinstance(error, MessageRefused):
                self.listener.disconnect(name)
            return ()
        self._channel(sender).send_unreliable(b"")
        return said

    def _unpack(self, sender: Process, numbered: Numbered, frames: Sequence[memoryview]) -> list[PeerMessage]:
        letters = wire.decode_parcel(numbered.body).letters
        brought: list[Handle] = []
        for letter in letters:
            if any(process != sender for process in claimed_senders(letter.message)):
                raise MessageRefused("it speaks for another peer")
            if letter.slot is not None and (handle := handle_of(letter.message)) is not None:
                brought.append(handle)
        if len(brought) > 1:
            raise MessageRefused("it brings parameters twice")
        for handle in brought:
            slot = self._unused_slot()
            wire_precision.check_frames(frames, slot.places, self.dtype)
            wire_precision.fill(slot.places, frames, self.dtype)
            self.inbox.held[handle] = slot
        return [letter.message for letter in letters]

    def _unused_slot(self) -> RemoteSlot:
        for slot in self.slots:
            if not any(held is slot for held in self.inbox.held.values()):
                return slot
        self.slots.append(RemoteSlot(self.inbox.layout, self.inbox.readers, self.dtype))
        return self.slots[-1]

    def _channel(self, sender: Process) -> ReliableChannel:
        if sender not in self.channels:
            name = process_name(sender)
            self.channels[sender] = ReliableChannel(
                self.session, lambda message, frames: self.listener.send(name, message, frames)
            )
        return self.channels[sender]

    def _refuse(self, name: bytes, reason: str) -> None:
        self.refusals[name] += 1
        if self.refusals[name] <= LINES:
            logger.warning(f"peer {self.me[0]}: refused a message of {name!r}: {reason}")

    def close(self) -> None:
        """Closes all connections. A peer that is done has waited until what matters had arrived."""
        self.sender.close()
        self.waiter.forget(self.listener.fileno())
        self.listener.close(discard=True)


def claimed_senders(message: PeerMessage) -> Iterator[Process]:
    """Yields the peers that a message says it is from."""
    if not isinstance(message, Update | Offer):
        yield message.peer, message.incarnation
    handle = message.handle if isinstance(message, Update | Offer | Reply) else None
    if handle is not None:
        yield handle.source, handle.incarnation
