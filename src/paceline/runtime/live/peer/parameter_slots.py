"""Slots: pieces of shared memory through which a peer's parameters reach its neighbours.

A peer's parameters lie in one of its slots. To send them it tells neighbours the number of the slot; all read the same
memory, at the moment they average, and nothing is copied on either side. From then on the slot is lent and must not
be written to: the average of an iteration goes into another one, and the model's tensors are views of that one then,
unless all who were sent the parameters have read them by now.
A slot is a file of its own in the run's folder: the vector, and behind it a word for each reader. A reader that has
used the parameters, or will not use them, writes their serial number into its word, and whoever is no longer a member
reads nothing. So a slot becomes free without a message, and nobody ever waits for one: if all are in use one more is
made. With tokens a reader is at most max_gap iterations behind, so there are few (docs/decisions/0018).
If all models are on GPUs the vectors are segments there (`storage/device_segments.py`), and the file has the words
alone.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.messages import Handle
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.storage import device_segments, shared_memory
from paceline.runtime.live.storage.device_segments import DeviceSegments, MemoryDevice
from paceline.tensors.layout import CACHE_LINE_BYTES, Layout

PART = 1 << 20
"""Elements that are averaged together: four megabytes in float32, so that sums stay in a third-level cache."""
WORD_BYTES = 8
UNPUBLISHED = 0
"""The serial number of parameters that nobody was told of; serial numbers begin with 1."""


def peer_path(folder: Path, rank: int, incarnation: int) -> Path:
    """Returns the path of the socket on which a peer listens to its neighbours."""
    return folder / f"peer-{rank}.{incarnation}"


def folder_link(folder: Path, rank: int, incarnation: int) -> Path:
    """Returns the path of a link to the folder of a peer that another launcher brought to this host.

    The peer itself leaves the link, for its neighbours in `folder`.
    """
    return folder / f"folder-{rank}.{incarnation}"


def slot_path(folder: Path, sender: Process, number: int) -> Path:
    """Returns the path of a peer's slot."""
    return folder / f"slot-{sender[0]}.{sender[1]}-{number}"


def remove(folder: Path, rank: int, incarnation: int) -> None:
    """Removes the files of a peer that was killed; neighbours that still read its slots have them mapped."""
    peer_path(folder, rank, incarnation).unlink(missing_ok=True)
    for path in folder.glob(f"slot-{rank}.{incarnation}-*"):
        path.unlink(missing_ok=True)


def values_path(path: Path) -> Path:
    """Returns the path of the segment of a device with a slot's vector."""
    return path.with_name(f"{path.name}-values")


class Slot:
    """A vector, and a word for each reader."""

    def __init__(self, buffer: mmap.mmap, layout: Layout, readers: int, values: Tensor | None = None) -> None:
        """The buffer has the vector and the words, or the words alone, behind the `values` of a device."""
        begin = 0 if values is not None else words_offset(layout)
        if values is None:
            values = torch.frombuffer(buffer, dtype=layout.torch_dtype, count=layout.numel)
        self.values = values
        self.views = layout.views(self.values)
        self.parts = self.values.split(PART) if begin else (self.values,)
        self.released = memoryview(buffer)[begin : begin + WORD_BYTES * readers].cast("q")
        """By rank: the serial number of the last parameters in this slot that this reader has released."""


def words_offset(layout: Layout) -> int:
    """Returns where the readers' words begin in a slot, in bytes."""
    lines = -(-layout.numel * layout.itemsize // CACHE_LINE_BYTES)
    return max(1, lines) * CACHE_LINE_BYTES


def slot_bytes(layout: Layout, readers: int) -> int:
    """Returns the size of a slot."""
    return words_offset(layout) + WORD_BYTES * readers


class SlotPool:
    """The slots that one peer owns and sends its parameters from."""

    segments: DeviceSegments
    device: MemoryDevice | None = None
    """The device of the vectors; None in shared memory."""

    def __init__(self, folder: Path, owner: Process, layout: Layout, readers: int) -> None:
        self.folder = folder
        self.owner = owner
        self.layout = layout
        self.readers = readers
        self.slots: list[Slot] = []
        self.published: list[tuple[int, list[Process]]] = []
        """Of each slot: the serial number of the parameters in it, and who may still read them."""
        self.members: dict[int, int] = {}
        """The members of the newest view: their incarnations by rank."""
        self.computed_on: int | None = None
        """The slot that the script reads while it computes, if parameters are averaged meanwhile."""

    def claim(self, besides: int | None = None) -> int:
        """Returns a slot that may be written to and is not `besides`; it is a new one if no other is free."""
        for number in range(len(self.slots)):
            if number != besides and self.is_free(number):
                break
        else:
            number = len(self.slots)
            self.slots.append(self._make(slot_path(self.folder, self.owner, number)))
            self.published.append((UNPUBLISHED, []))
        self.publish(number, UNPUBLISHED)
        return number

    def _make(self, path: Path) -> Slot:
        if self.device is None:
            buffer = shared_memory.reserve(path, slot_bytes(self.layout, self.readers))
            return Slot(buffer, self.layout, self.readers)
        values = self.segments.create(values_path(path), self.layout, self.device)
        return Slot(shared_memory.reserve(path, WORD_BYTES * self.readers), self.layout, self.readers, values)

    def publish(self, number: int, serial: int) -> None:
        """Gives the parameters in a slot a serial number; nobody reads them yet."""
        self.published[number] = (serial, [])

    def serial(self, number: int) -> int:
        """Returns the serial number of the parameters in a slot."""
        return self.published[number][0]

    def lend(self, number: int, rank: int) -> None:
        """Lets a member read what is in a slot, until it releases the slot or is no member any more."""
        self.published[number][1].append((rank, self.members[rank]))

    def release(self, number: int, rank: int, serial: int) -> None:
        """Releases a slot in the name of a reader on another host."""
        self.slots[number].released[rank] = serial

    def is_free(self, number: int) -> bool:
        """Returns whether a slot may be written to."""
        return number != self.computed_on and not self.is_lent(number)

    def is_lent(self, number: int) -> bool:
        """Returns whether a neighbour may still read a slot."""
        serial, readers = self.published[number]
        released = self.slots[number].released
        return any(self.members.get(rank) == incarnation and released[rank] != serial for rank, incarnation in readers)


class Inbox:
    """The parameters that neighbours have sent to one peer, until they are averaged or dropped."""

    def __init__(self, folder: Path, reader: int, layout: Layout, readers: int) -> None:
        self.folder = folder
        self.reader = reader
        self.layout = layout
        self.readers = readers
        self.mapped: dict[tuple[Process, int], Slot] = {}
        """The neighbours' slots on this host, by owner and number; each is mapped once."""
        self.held: dict[Handle, Slot] = {}

    def receive(self, handle: Handle, number: int) -> bool:
        """Finds parameters in a neighbour's slot; returns False if they are gone, because the neighbour was killed."""
        key = ((handle.source, handle.incarnation), number)
        slot = self.mapped.get(key)
        if slot is None:
            try:
                slot = self.mapped[key] = self._map(slot_path(self._folder_of(key[0]), *key))
            except FileNotFoundError:
                return False
        self.held[handle] = slot
        return True

    def _map(self, path: Path) -> Slot:
        there = values_path(path)
        values = device_segments.attach(there, self.layout) if there.exists() else None
        descriptor = os.open(path, os.O_RDWR)
        try:
            return Slot(mmap.mmap(descriptor, 0), self.layout, self.readers, values)
        finally:
            os.close(descriptor)

    def _folder_of(self, sender: Process) -> Path:
        link = folder_link(self.folder, *sender)
        return link if link.exists() else self.folder

    def release(self, handle: Handle) -> None:
        """Releases parameters, so that their sender may write over them."""
        self.held.pop(handle).released[self.reader] = handle.version

    def unmap_departed(self, members: dict[int, int]) -> None:
        """Unmaps the slots of those who are no members any more."""
        for key in [key for key in self.mapped if members.get(key[0][0]) != key[0][1]]:
            del self.mapped[key]
