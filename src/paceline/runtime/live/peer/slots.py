"""Parameters on their way from peer to peer: slots, in shared memory, that belong to the peer that sends.

A peer's parameters lie in one of its slots. To send them it tells neighbours the number of the slot; all read the same
memory, at the moment they average, and nothing is copied on either side. From then on the slot is lent and must not
be written to: the average of an iteration goes into another one, and the model's tensors are views of that one then,
unless all who were sent the parameters have read them by now.
A slot is a file of its own in the run's folder: the vector, and behind it a word for each reader. Whoever has used the
parameters, or will not, writes their serial number into its word; who is no member any more reads nothing. So a slot is
free again without a message, and nobody ever waits for one: if all are in use there is one more. With tokens a reader
is at most max_gap iterations behind, so there are few (docs/decisions/0018).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.messages import Handle
from paceline.runtime.live import memory
from paceline.tensors.layout import CACHE_LINE_BYTES, Layout, flatten

PART = 1 << 20
"""Elements that are averaged together: four megabytes in float32, so that sums stay in a third-level cache."""
WORD_BYTES = 8
NOT_NAMED = 0
"""Serial numbers begin with 1."""

Process = tuple[int, int]
"""One life of a peer: its rank and its incarnation."""


def peer_path(folder: Path, rank: int, incarnation: int) -> Path:
    """Where a peer listens to its neighbours."""
    return folder / f"peer-{rank}.{incarnation}"


def home_path(folder: Path, rank: int, incarnation: int) -> Path:
    """A link to the folder of a peer that another launcher brought to this host, left by it for its neighbours."""
    return folder / f"home-{rank}.{incarnation}"


def slot_path(folder: Path, sender: Process, number: int) -> Path:
    return folder / f"slot-{sender[0]}.{sender[1]}-{number}"


def remove(folder: Path, rank: int, incarnation: int) -> None:
    """Give back what a peer that was killed has left: neighbours that still read from it have it mapped."""
    peer_path(folder, rank, incarnation).unlink(missing_ok=True)
    for path in folder.glob(f"slot-{rank}.{incarnation}-*"):
        path.unlink(missing_ok=True)


class Slot:
    """One vector and its readers' words."""

    def __init__(self, buffer: mmap.mmap, layout: Layout, readers: int) -> None:
        self.values = torch.frombuffer(buffer, dtype=layout.torch_dtype, count=layout.numel)
        self.views = layout.views(self.values)
        self.parts = self.values.split(PART)
        begin = words_offset(layout)
        self.words = memoryview(buffer)[begin : begin + WORD_BYTES * readers].cast("q")
        """By rank: the serial number of the last parameters in this slot that it is done with."""


def words_offset(layout: Layout) -> int:
    lines = -(-layout.numel * layout.itemsize // CACHE_LINE_BYTES)
    return max(1, lines) * CACHE_LINE_BYTES


def slot_bytes(layout: Layout, readers: int) -> int:
    return words_offset(layout) + WORD_BYTES * readers


class Shelf:
    """The slots of one peer, as the peer itself sees them."""

    def __init__(self, folder: Path, owner: Process, layout: Layout, readers: int) -> None:
        self.folder = folder
        self.owner = owner
        self.layout = layout
        self.readers = readers
        self.slots: list[Slot] = []
        self.lent: list[tuple[int, list[Process]]] = []
        """Of each slot: the serial number of the parameters in it, and who may still read them."""
        self.members: dict[int, int] = {}

    def find_free(self, besides: int | None) -> int:
        """A slot that nobody reads, and not this one; a new one if there is none."""
        for number in range(len(self.slots)):
            if number != besides and self.is_free(number):
                break
        else:
            number = len(self.slots)
            buffer = memory.reserve(slot_path(self.folder, self.owner, number), slot_bytes(self.layout, self.readers))
            self.slots.append(Slot(buffer, self.layout, self.readers))
            self.lent.append((NOT_NAMED, []))
        self.lent[number] = (NOT_NAMED, [])
        return number

    def lend(self, number: int, rank: int) -> None:
        """This member may read what is in the slot."""
        self.lent[number][1].append((rank, self.members[rank]))

    def give_back(self, number: int, rank: int, serial: int) -> None:
        """Write the word of a reader on another host."""
        self.slots[number].words[rank] = serial

    def is_free(self, number: int) -> bool:
        serial, readers = self.lent[number]
        words = self.slots[number].words
        return all(self.members.get(rank) != life or words[rank] == serial for rank, life in readers)


class Mail:
    """What neighbours have sent to one peer and it has not averaged yet."""

    def __init__(self, folder: Path, reader: int, layout: Layout, readers: int) -> None:
        self.folder = folder
        self.reader = reader
        self.layout = layout
        self.readers = readers
        self.known: dict[tuple[Process, int], Slot] = {}
        """Neighbours' slots, mapped once."""
        self.held: dict[Handle, Slot] = {}

    def take(self, handle: Handle, number: int) -> bool:
        """Parameters are in a neighbour's slot. False if they are not: the neighbour was killed, and a view says so."""
        key = ((handle.source, handle.incarnation), number)
        slot = self.known.get(key)
        if slot is None:
            try:
                descriptor = os.open(slot_path(self._home(key[0]), *key), os.O_RDWR)
            except FileNotFoundError:
                return False
            try:
                buffer = mmap.mmap(descriptor, slot_bytes(self.layout, self.readers))
            finally:
                os.close(descriptor)
            slot = self.known[key] = Slot(buffer, self.layout, self.readers)
        self.held[handle] = slot
        return True

    def _home(self, sender: Process) -> Path:
        """The folder of a neighbour on this host."""
        elsewhere = home_path(self.folder, *sender)
        return elsewhere if elsewhere.exists() else self.folder

    def let_go(self, handle: Handle) -> None:
        """This peer is done with them; their sender may write over them."""
        self.held.pop(handle).words[self.reader] = handle.version

    def keep_only(self, members: dict[int, int]) -> None:
        """Unmap the slots of those who are gone."""
        for key in [key for key in self.known if members.get(key[0][0]) != key[0][1]]:
            del self.known[key]


class Values:
    """A peer's parameters, in a slot. On the CPU the model's tensors are views of it; others are copied."""

    def __init__(self, tensors: Sequence[Tensor], shelf: Shelf) -> None:
        self.tensors = tensors
        self.shelf = shelf
        self.in_place = all(tensor.device.type == "cpu" for tensor in tensors)
        self.current = True
        """The slot holds what the model does."""
        self.number = shelf.find_free(None)

    @property
    def slot(self) -> Slot:
        return self.shelf.slots[self.number]

    @property
    def views(self) -> list[Tensor]:
        """The model's tensors in the slot."""
        return self.slot.views

    def load(self) -> None:
        """Have the model hold what is in the slot, and on the CPU be the slot."""
        if self.in_place:
            for tensor, view in zip(self.tensors, self.views, strict=True):
                tensor.data = view
        else:
            torch._foreach_copy_([tensor.detach() for tensor in self.tensors], self.views)

    def moved(self, index: int) -> bool:
        """Whether the script has given this tensor other memory."""
        return self.in_place and self.tensors[index].data_ptr() != self.views[index].data_ptr()

    def fetch(self) -> Tensor:
        """The parameters as they are now."""
        if not self.current:
            if not self.shelf.is_free(self.number):
                self.number = self.shelf.find_free(self.number)
            flatten(self.tensors, self.views)
            self.current = True
        return self.slot.values

    def name(self, serial: int) -> int:
        """The slot of the parameters as they are now, to be lent under this serial number. It has one at a time."""
        self.fetch()
        if self.shelf.lent[self.number][0] != serial:
            self.make_writable()
            self.shelf.lent[self.number] = (serial, [])
        return self.number

    def make_writable(self) -> None:
        """Leave a slot that others may read: the parameters go on in another one."""
        if not self.shelf.is_free(self.number):
            before = self.slot
            self.number = self.shelf.find_free(self.number)
            self.slot.values.copy_(before.values)
            if self.in_place:
                self.load()

    def step(self, optimizer_step: Callable[[], None]) -> None:
        """Have the optimizer change the model."""
        if self.in_place:
            self.make_writable()
        optimizer_step()
        self.current = self.in_place

    def average(self, own: float, slots: Sequence[Slot], weights: Sequence[float]) -> None:
        """Replace the parameters by `own` times themselves plus the slots', each times its weight; these sum to 1."""
        self.fetch()
        steps, total = [], own
        for slot, weight in zip(slots, weights, strict=True):
            total += weight
            if weight:
                steps.append((slot.parts, weight / total))
        if not steps:
            return
        source = self.slot.parts
        if not self.shelf.is_free(self.number):  # all may have read it by now: then it is averaged where it lies
            self.number = self.shelf.find_free(self.number)
        for index, part in enumerate(self.slot.parts):
            mixed = source[index]
            for parts, share in steps:
                if share == 1.0:
                    part.copy_(parts[index])  # whatever was here before, NaN too, has no share in it
                else:
                    torch.lerp(mixed, parts[index], share, out=part)
                mixed = part
        self.load()
