"""A peer's parameters: which slot they are in, what the model's tensors show, and how they are averaged and stepped.

The model's tensors are views of a slot (`peer/parameter_slots.py`), unless they are on a GPU and the slots in shared
memory: then they are copied from and to it.
Under AD-PSGD a peer averages while its script computes. The model then keeps the slot that it had when the computation
began, and nobody writes to that one; averages go to other slots, and the model gets the newest with the next step
(docs/decisions/0031).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.runtime.live.peer.parameter_slots import Slot, SlotPool
from paceline.tensors.layout import flatten


class PeerParameters:
    """The parameters of one peer, in one of its slots."""

    def __init__(self, tensors: Sequence[Tensor], slot_pool: SlotPool) -> None:
        self.tensors = tensors
        self.slot_pool = slot_pool
        here = slot_pool.device.place if slot_pool.device is not None else torch.device("cpu")
        self.in_place = all(tensor.device == here for tensor in tensors)
        """Whether the model's tensors are views of a slot."""
        self.current = True
        """Whether the slot holds what the model does."""
        self.number = slot_pool.claim()
        self.loaded = self.number
        """The slot that the model was last loaded from."""
        self.load_is_due = False
        """Whether the model has yet to be loaded from the slot, because the script computes."""
        self.computing = False
        """Whether the script computes and parameters are averaged meanwhile: the model's tensors stay as they are."""
        self.versions: list[int] = []
        """How often each tensor had been written to when the script's computation began."""

    @property
    def slot(self) -> Slot:
        """The slot that holds the parameters."""
        return self.slot_pool.slots[self.number]

    def load(self) -> None:
        """Has the model hold what is in the slot, and on the CPU be the slot; later, if the script computes."""
        self.load_is_due = self.computing
        if self.load_is_due:
            return
        self.loaded = self.number
        if self.in_place:
            for tensor, view in zip(self.tensors, self.slot.views, strict=True):
                tensor.data = view
        else:
            torch._foreach_copy_([tensor.detach() for tensor in self.tensors], self.slot.views)

    def begin_computation(self, averages_meanwhile: bool) -> None:
        """The script gets the model. With `averages_meanwhile` the model stays as it is until `end_computation`."""
        if averages_meanwhile:
            self.fetch()
            self.settle()
            self.computing = True
            self.slot_pool.computed_on = self.loaded if self.in_place else None
        self.versions = [tensor._version for tensor in self.tensors]

    def end_computation(self) -> None:
        """The script has computed: the model gets what was averaged meanwhile."""
        self.computing = False
        self.slot_pool.computed_on = None
        if self.load_is_due:
            self.load()

    def first_changed(self) -> int | None:
        """Returns the first tensor that the script has written to, or given other memory."""
        views = self.slot_pool.slots[self.loaded].views
        for index, tensor in enumerate(self.tensors):
            moved = self.in_place and tensor.data_ptr() != views[index].data_ptr()
            if moved or tensor._version != self.versions[index]:
                return index
        return None

    def fetch(self) -> Tensor:
        """Returns the parameters as they are now."""
        if not self.current:
            if not self.slot_pool.is_free(self.number):
                self.number = self.slot_pool.claim(self.number)
            flatten(self.tensors, self.slot.views)
            self.current = True
        return self.slot.values

    def publish(self, serial: int) -> int:
        """Returns the slot of the parameters as they are now, published under this serial number.

        A slot has one serial number at a time.
        """
        self.fetch()
        if self.slot_pool.serial(self.number) != serial:
            if self.slot_pool.is_lent(self.number):
                self.move()
            self.slot_pool.publish(self.number, serial)
            self.settle()
        return self.number

    def settle(self) -> None:
        """Returns when the slot holds what it is to hold, and what it was made of is read: a device works by itself."""
        if self.slot_pool.device is not None:
            self.slot_pool.device.settle()

    def move(self) -> None:
        """Copies the parameters to a slot that nobody reads."""
        before = self.slot
        self.number = self.slot_pool.claim(self.number)
        self.slot.values.copy_(before.values)
        if self.in_place:
            self.load()

    def step(self, optimizer_step: Callable[[], None]) -> None:
        """Has the optimizer change the model."""
        if self.in_place and not self.slot_pool.is_free(self.number):
            self.move()
        optimizer_step()
        self.current = self.in_place

    def average(self, own: float, slots: Sequence[Slot], weights: Sequence[float]) -> None:
        """Replaces the parameters by `own` times themselves plus the slots', each times its weight; these sum to 1."""
        self.fetch()
        steps, total = [], own
        for slot, weight in zip(slots, weights, strict=True):
            total += weight
            if weight:
                steps.append((slot.parts, weight / total))
        if not steps:
            return
        source = self.slot.parts
        if not self.slot_pool.is_free(self.number):  # all may have read it by now: then it is averaged where it lies
            self.number = self.slot_pool.claim(self.number)
        for index, part in enumerate(self.slot.parts):
            mixed = source[index]
            for parts, share in steps:
                if share == 1.0:
                    part.copy_(parts[index])  # whatever was here before, NaN too, has no share in it
                else:
                    torch.lerp(mixed, parts[index].to(part.device), share, out=part)
                mixed = part
        self.settle()
        self.load()
