"""Slots: who may write to which, when they are free again, and what is averaged out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.messages import Handle
from paceline.runtime.live.peer import parameter_slots
from paceline.runtime.live.peer.parameter_slots import Inbox, SlotPool
from paceline.runtime.live.peer.peer_parameters import PeerParameters
from paceline.tensors.layout import layout_of

SIZE = 5


def handle(serial: int, source: int = 0) -> Handle:
    return Handle(source, 0, serial, serial, 0)


@pytest.fixture
def tensors() -> list[Tensor]:
    return [torch.zeros(2), torch.zeros(3)]


@pytest.fixture
def slot_pool(tmp_path: Path, tensors: list[Tensor]) -> SlotPool:
    layout = layout_of([("a", tensors[0], 0), ("b", tensors[1], 0)])
    slot_pool = SlotPool(tmp_path, (0, 0), layout, readers=3)
    slot_pool.members = {0: 0, 1: 0, 2: 0}
    return slot_pool


def inbox_of(slot_pool: SlotPool, reader: int) -> Inbox:
    return Inbox(slot_pool.folder, reader, slot_pool.layout, 3)


def send(slot_pool: SlotPool, values: PeerParameters, serial: int, *readers: int) -> int:
    number = values.publish(serial)
    for reader in readers:
        slot_pool.lend(number, reader)
    return number


def test_what_is_lent_is_not_written_to_until_all_have_released_it(slot_pool: SlotPool, tensors: list[Tensor]) -> None:
    values = PeerParameters(tensors, slot_pool)
    values.slot.values.fill_(1.0)
    values.load()
    first, second = inbox_of(slot_pool, 1), inbox_of(slot_pool, 2)
    number = send(slot_pool, values, 1, 1, 2)
    for inbox in (first, second):
        assert inbox.receive(handle(1), number)
    values.step(lambda: tensors[0].add_(1.0))
    assert first.held[handle(1)].values.tolist() == [1.0] * SIZE, "the step went elsewhere"
    assert values.fetch().tolist() == [2.0, 2.0, 1.0, 1.0, 1.0]
    first.release(handle(1))
    assert not slot_pool.is_free(number)
    second.release(handle(1))
    assert slot_pool.is_free(number)
    assert len(slot_pool.slots) == 2
    send(slot_pool, values, 2, 1)
    values.step(lambda: tensors[0].add_(1.0))
    assert len(slot_pool.slots) == 2, "the slot that is free again is used"


def test_who_is_gone_reads_nothing(slot_pool: SlotPool, tensors: list[Tensor]) -> None:
    values = PeerParameters(tensors, slot_pool)
    number = send(slot_pool, values, 1, 1, 2)
    inbox_of(slot_pool, 1).receive(handle(1), number)
    slot_pool.members = {0: 0, 1: 1}
    assert slot_pool.is_free(number), "1 is another incarnation, 2 is no member"


def test_one_slot_has_one_serial_number_at_a_time(slot_pool: SlotPool, tensors: list[Tensor]) -> None:
    """A reader that is sent the same parameters twice, and lets the second go first, still reads the first."""
    values = PeerParameters(tensors, slot_pool)
    reader = inbox_of(slot_pool, 1)
    numbers = [send(slot_pool, values, serial, 1) for serial in (1, 2)]
    for serial, number in zip((1, 2), numbers, strict=True):
        reader.receive(handle(serial), number)
    reader.release(handle(2))
    assert numbers[0] != numbers[1]
    assert not slot_pool.is_free(numbers[0])
    assert slot_pool.is_free(numbers[1])


def test_a_slot_that_is_gone_is_not_received(slot_pool: SlotPool, tensors: list[Tensor]) -> None:
    values = PeerParameters(tensors, slot_pool)
    number = send(slot_pool, values, 1, 1, 2)
    early, late = inbox_of(slot_pool, 1), inbox_of(slot_pool, 2)
    assert early.receive(handle(1), number)
    parameter_slots.remove(slot_pool.folder, 0, 0)
    assert not late.receive(handle(1), number)
    assert early.held[handle(1)].values.tolist() == [0.0] * SIZE, "mapped is mapped"


@pytest.mark.parametrize("in_place", [True, False])
def test_average_is_own_plus_the_others_by_weight(slot_pool: SlotPool, tensors: list[Tensor], in_place: bool) -> None:
    values = PeerParameters(tensors, slot_pool)
    values.in_place = in_place
    values.slot.values.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    values.load()
    others = []
    for rank, number in ((1, 10.0), (2, 100.0)):
        other = SlotPool(slot_pool.folder, (rank, 0), slot_pool.layout, readers=3)
        other.claim()
        other.slots[0].values.fill_(number)
        others.append(other.slots[0])
    values.average(0.5, others, (0.3, 0.2))
    wanted = [0.5 * number + 3 + 20 for number in (1, 2, 3, 4, 5)]
    assert torch.cat(tensors).tolist() == pytest.approx(wanted)
    assert values.fetch().tolist() == pytest.approx(wanted)
    values.step(lambda: tensors[0].zero_())
    assert values.fetch().tolist() == pytest.approx([0.0, 0.0, *wanted[2:]])
    values.slot.values.fill_(float("nan"))
    values.average(0.0, others, (0.5, 0.5))
    assert torch.cat(tensors).tolist() == pytest.approx([55.0] * SIZE), "nothing is left of what joined with NaN"


@pytest.mark.parametrize("in_place", [True, False])
def test_an_average_stays_where_it_is_once_all_have_read_it(
    slot_pool: SlotPool, tensors: list[Tensor], in_place: bool
) -> None:
    values = PeerParameters(tensors, slot_pool)
    values.in_place = in_place
    values.slot.values.fill_(1.0)
    values.load()
    other = SlotPool(slot_pool.folder, (1, 0), slot_pool.layout, readers=3)
    theirs = other.slots[other.claim()]
    theirs.values.fill_(3.0)
    readers = inbox_of(slot_pool, 1), inbox_of(slot_pool, 2)
    number = send(slot_pool, values, 1, 1, 2)
    for inbox in readers:
        inbox.receive(handle(1), number)
    readers[0].release(handle(1))
    values.average(0.5, [theirs], (0.5,))
    assert values.number != number, "one of two reads it still"
    assert readers[1].held[handle(1)].values.tolist() == [1.0] * SIZE
    assert torch.cat(tensors).tolist() == [2.0] * SIZE
    second = send(slot_pool, values, 2, 1)
    readers[0].receive(handle(2), second)
    readers[0].release(handle(2))
    values.average(0.5, [theirs], (0.5,))
    assert values.number == second
    assert torch.cat(tensors).tolist() == [2.5] * SIZE
    assert len(slot_pool.slots) == 2
    assert send(slot_pool, values, 3, 1) == second
    assert not slot_pool.is_free(second), "what was read under another serial number is not read under this one"


@pytest.mark.parametrize("in_place", [True, False])
def test_while_the_script_computes_averages_leave_the_model_alone(
    slot_pool: SlotPool, tensors: list[Tensor], in_place: bool
) -> None:
    values = PeerParameters(tensors, slot_pool)
    values.in_place = in_place
    values.slot.values.fill_(1.0)
    values.load()
    values.begin_computation(averages_meanwhile=True)
    other = SlotPool(slot_pool.folder, (1, 0), slot_pool.layout, readers=3)
    other.claim()
    other.slots[0].values.fill_(3.0)
    places = [tensor.data_ptr() for tensor in tensors]
    first = send(slot_pool, values, 1, 1)
    for expected in (2.0, 2.5):
        values.average(0.5, other.slots, (0.5,))
        assert values.fetch().tolist() == [expected] * SIZE
    second = send(slot_pool, values, 2, 2)
    assert second != first
    assert slot_pool.slots[first].values.tolist() == [1.0] * SIZE, "lent, and computed on"
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 2, [1.0] * 3]
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert values.first_changed() is None
    values.end_computation()
    assert [tensor.tolist() for tensor in tensors] == [[2.5] * 2, [2.5] * 3]
    values.step(lambda: tensors[0].add_(1.0))
    assert values.fetch().tolist() == [3.5, 3.5, 2.5, 2.5, 2.5]
    assert slot_pool.slots[second].values.tolist() == [2.5] * SIZE, "lent"
    inbox = inbox_of(slot_pool, 1)
    assert inbox.receive(handle(1), first)
    inbox.release(handle(1))
    assert slot_pool.is_free(first), "the script computes on it no more"
