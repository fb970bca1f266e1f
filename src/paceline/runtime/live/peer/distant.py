"""A peer's neighbours on other hosts: the same parcels, over TCP, with the parameters as frames behind them.

A peer listens, and has a link to each neighbour it says something to. Parcels are numbered and kept until the neighbour
has said that it has them (`steady.py`); a connection that broke is opened anew and what was not heard is said again, so
that everything comes once and in order, tokens too, or the driver's view says that the neighbour is gone. Nothing is
said again for a lapse of time: a neighbour that computes hears nothing, and is not to get its parameters twice.

The frames are the slot's own memory, and a thread sends from there while the script computes.
The slot stays lent until the neighbour has the parcel, since it may have to be sent again; then this side writes the
neighbour's word into the slot, and from there on all is as with a neighbour of this host. As halves, a rounded copy
travels instead, the same one for all, and the slot is free at once. What comes is written into private memory that
looks like a slot; there is as much of it as there are parameters waiting to be averaged.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from paceline.core.messages import Handle, Offer, PeerMessage, Reply, Update
from paceline.runtime.driver import handle_of
from paceline.runtime.live import wire
from paceline.runtime.live.across import doors
from paceline.runtime.live.across.abroad import find_keys
from paceline.runtime.live.across.addresses import routable
from paceline.runtime.live.across.dispatch import Numbered, decode_numbered
from paceline.runtime.live.across.far import FRAME, FarLink, FarListener
from paceline.runtime.live.across.steady import Steady
from paceline.runtime.live.configuration import Door, LiveConfig
from paceline.runtime.live.peer.slots import Mail, Process, Shelf, Slot, slot_bytes
from paceline.runtime.live.server.receiving import LINES, Refused, process_of
from paceline.runtime.live.sockets import Waiter
from paceline.tensors import halves
from paceline.tensors.layout import Layout

REOPEN_S = 0.2
TELL_S = 10.0
"""After so long a neighbour that cannot be reached is told of."""


class Box(Slot):
    """Memory of this peer's own, in place of a slot of a neighbour on another host."""

    def __init__(self, layout: Layout, readers: int, dtype: torch.dtype) -> None:
        buffer = mmap.mmap(-1, slot_bytes(layout, readers), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        super().__init__(buffer, layout, readers)
        self.places = self.values.split(FRAME // dtype.itemsize)


class Correspondence:
    """What is said to one neighbour on another host."""

    def __init__(self, link: FarLink, stay: str) -> None:
        self.link = link
        self.steady = Steady(stay, link.send)
        self.lent: deque[tuple[int, int, int]] = deque()
        """(number of the parcel, slot, serial number) of parameters that are not known to have arrived."""
        self.opened_s = time.monotonic()
        self.told = False

    def hear(self) -> Iterator[tuple[int, int]]:
        """Take what the neighbour has said, which is how far it has heard; (slot, serial number) of what it has."""
        while (received := self.link.receive()) is not None:
            numbered = decode_numbered(received[0])
            if numbered.stay == self.steady.stay:
                self.steady.take(numbered)
        unheard = self.steady.unheard[0][0] if self.steady.unheard else sys.maxsize
        while self.lent and self.lent[0][0] < unheard:
            yield self.lent.popleft()[1:]

    def mend(self) -> None:
        """If the connection broke, open it anew and say again what was not heard."""
        if self.link.gone and time.monotonic() - self.opened_s > REOPEN_S:
            self.opened_s = time.monotonic()
            self.link.reopen()
            self.steady.say_again()

    def close(self) -> None:
        """What has not left yet is for nobody any more."""
        self.link.post.shut(0)
        self.link.close()


class Distant:
    """All that peer `me` has to do with peers on other hosts."""

    def __init__(self, folder: Path, me: Process, config: LiveConfig, shelf: Shelf, mail: Mail) -> None:
        abroad = config.abroad
        assert abroad is not None
        layout = shelf.layout
        self.me = me
        self.name = name_of(me)
        self.run = config.run
        self.shelf = shelf
        self.mail = mail
        self.keys = find_keys(folder, *me) if abroad.keys else None
        largest = layout.numel * layout.itemsize + FRAME
        self.listener = FarListener(abroad.host, abroad.ports, self.keys, largest, aside=True)
        address = f"tcp://{abroad.advertise or routable(abroad.host)}:{self.listener.port}"
        key = self.keys.public if self.keys is not None else ""
        self.door = Door(me[1], str(folder), doors.read_nonce(folder), address, key)
        self.dtype = halves.travelling(abroad.wire, layout.torch_dtype)
        self.rounded: tuple[int, list[memoryview]] = (0, [])
        """The serial number of the parameters that were rounded last, and they."""
        self.framed: dict[int, list[memoryview]] = {}
        """The memory of each slot, in frames."""
        self.waiter: Waiter | None = None
        self.doors: dict[Process, Door] = {}
        """Of the members on other hosts."""
        self.said: dict[Process, Correspondence] = {}
        self.heard: dict[Process, Steady] = {}
        self.boxes: list[Box] = []
        self.refusals: Counter[bytes] = Counter()

    def watch(self, waiter: Waiter) -> None:
        self.waiter = waiter
        waiter.watch(self.listener)

    def change(self, members: Mapping[Process, Door]) -> None:
        """These are the members on other hosts from now on. Nobody else is let in."""
        for process in self.doors.keys() - members.keys():
            self.listener.expel(name_of(process))
            self.heard.pop(process, None)
            if process in self.said:
                self._end(process)
        self.doors = dict(members)
        if self.keys is not None:
            for process, door in self.doors.items():
                self.listener.enrol(door.key, name_of(process))

    # Saying.

    def send(self, process: Process, letters: Sequence[wire.Letter]) -> None:
        """Send these to a member on another host, in parcels that bring parameters once at most."""
        to = self._correspondence(process)
        parcel: list[wire.Letter] = []
        for letter in letters:
            parcel.append(letter)
            handle = handle_of(letter.message)
            if handle is not None and letter.slot is not None:
                to.steady.say(wire.encode(wire.Parcel(tuple(parcel))), self._frames(letter.slot, handle.version))
                parcel.clear()
                if self.dtype == self.shelf.layout.torch_dtype:
                    to.lent.append((to.steady.number, letter.slot, handle.version))
                else:
                    self.shelf.give_back(letter.slot, process[0], handle.version)
        if parcel:
            to.steady.say(wire.encode(wire.Parcel(tuple(parcel))))

    def _correspondence(self, process: Process) -> Correspondence:
        to = self.said.get(process)
        if to is None:
            door = self.doors[process]
            link = FarLink(door.address, self.name, self.keys, door.key, aside=True)
            to = self.said[process] = Correspondence(link, self._stay(process))
            if self.waiter is not None:
                self.waiter.watch(link)
        return to

    def _frames(self, slot: int, serial: int) -> list[memoryview]:
        values, longest = self.shelf.slots[slot].values, FRAME // self.dtype.itemsize
        if self.dtype != values.dtype:
            if self.rounded[0] != serial:
                self.rounded = (serial, halves.frames_of(values.to(self.dtype).split(longest)))
            return self.rounded[1]
        if slot not in self.framed:
            self.framed[slot] = halves.frames_of(values.split(longest))
        return self.framed[slot]

    @property
    def all_heard(self) -> bool:
        """Whether every neighbour has all that was said to it."""
        return not any(to.steady.unheard for to in self.said.values())

    # Hearing.

    def read(self) -> Iterator[PeerMessage]:
        """What was heard, with its parameters where the mail has them."""
        for process, to in self.said.items():
            for slot, serial in to.hear():
                self.shelf.give_back(slot, process[0], serial)
            to.mend()
            self._tell_unreached(process, to)
        while (received := self.listener.receive()) is not None:
            yield from self._take(*received)
        self.listener.gone()  # who comes back says what was lost again

    def _take(self, name: bytes, message: bytes, frames: Sequence[memoryview]) -> Sequence[PeerMessage]:
        """A message of another host: refused in one line, or the messages in it, if they are new."""
        said: list[PeerMessage] = []
        try:
            sender, numbered = process_of(name), decode_numbered(message)
            if numbered.stay != self._stay(self.me):
                raise Refused("it was for another run, or another peer")
            if self._steady(sender).take(numbered) and numbered.number:
                said = self._unpack(sender, numbered, frames)
        except (*wire.BAD_MESSAGE, halves.WrongFrames, Refused) as error:
            self._refuse(name, str(error))
            return ()
        self._steady(sender).mention(b"")
        return said

    def _unpack(self, sender: Process, numbered: Numbered, frames: Sequence[memoryview]) -> list[PeerMessage]:
        letters = wire.decode_parcel(numbered.body).letters
        brought: list[Handle] = []
        for letter in letters:
            if any(process != sender for process in senders_of(letter.message)):
                raise Refused("it speaks for another peer")
            if letter.slot is not None and (handle := handle_of(letter.message)) is not None:
                brought.append(handle)
        if len(brought) > 1:
            raise Refused("it brings parameters twice")
        for handle in brought:
            box = self._empty_box()
            halves.check_frames(frames, box.places, self.dtype)
            halves.fill(box.places, frames, self.dtype)
            self.mail.held[handle] = box
        return [letter.message for letter in letters]

    def _empty_box(self) -> Box:
        for box in self.boxes:
            if not any(held is box for held in self.mail.held.values()):
                return box
        self.boxes.append(Box(self.shelf.layout, self.shelf.readers, self.dtype))
        return self.boxes[-1]

    def _steady(self, sender: Process) -> Steady:
        steady = self.heard.get(sender)
        if steady is None:
            name = name_of(sender)
            steady = Steady(self._stay(self.me), lambda message, frames: self.listener.send(name, message, frames))
            self.heard[sender] = steady
        return steady

    def _stay(self, to: Process) -> str:
        """What is said to this peer in this run. The connection says by whom."""
        return f"{self.run}>{to[0]}:{to[1]}"

    def _tell_unreached(self, process: Process, to: Correspondence) -> None:
        if to.link.stands:
            to.opened_s, to.told = time.monotonic(), False
        elif not to.told and time.monotonic() - to.opened_s > TELL_S:
            to.told = True
            why = to.link.refused or "it does not answer"
            print(f"peer {self.me[0]} cannot reach peer {process[0]} at {to.link.address}: {why}", file=sys.stderr)

    def _refuse(self, name: bytes, reason: str) -> None:
        self.refusals[name] += 1
        if self.refusals[name] <= LINES:
            print(f"peer {self.me[0]}: refused a message of {name!r}: {reason}", file=sys.stderr)

    # Ending.

    def _end(self, process: Process) -> None:
        to = self.said.pop(process)
        if self.waiter is not None:
            self.waiter.forget(to.link.fileno())
        to.close()

    def close(self) -> None:
        """All that matters was heard by others: a peer that is done has waited for that."""
        for process in list(self.said):
            self._end(process)
        if self.waiter is not None:
            self.waiter.forget(self.listener.fileno())
        self.listener.post.shut(0)
        self.listener.close()


def name_of(process: Process) -> bytes:
    return b"%d:%d" % process


def senders_of(message: PeerMessage) -> Iterator[Process]:
    """Whom a message says it is from."""
    if not isinstance(message, Update | Offer):
        yield message.peer, message.incarnation
    handle = message.handle if isinstance(message, Update | Offer | Reply) else None
    if handle is not None:
        yield handle.source, handle.incarnation
