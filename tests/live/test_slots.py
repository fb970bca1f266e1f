"""Slots: who may write to which, when they are free again, and what is averaged out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.messages import Handle
from paceline.runtime.live.peer import slots
from paceline.runtime.live.peer.slots import Mail, Shelf, Values
from paceline.tensors.layout import layout_of

SIZE = 5


def handle(serial: int, source: int = 0) -> Handle:
    return Handle(source, 0, serial, serial, 0)


@pytest.fixture
def tensors() -> list[Tensor]:
    return [torch.zeros(2), torch.zeros(3)]


@pytest.fixture
def shelf(tmp_path: Path, tensors: list[Tensor]) -> Shelf:
    layout = layout_of([("a", tensors[0], 0), ("b", tensors[1], 0)])
    shelf = Shelf(tmp_path, (0, 0), layout, readers=3)
    shelf.members = {0: 0, 1: 0, 2: 0}
    return shelf


def mail_of(shelf: Shelf, reader: int) -> Mail:
    return Mail(shelf.folder, reader, shelf.layout, 3)


def send(shelf: Shelf, values: Values, serial: int, *readers: int) -> int:
    number = values.name(serial)
    for reader in readers:
        shelf.lend(number, reader)
    return number


def test_what_is_lent_is_not_written_to_until_all_have_let_go(shelf: Shelf, tensors: list[Tensor]) -> None:
    values = Values(tensors, shelf)
    values.slot.values.fill_(1.0)
    values.load()
    first, second = mail_of(shelf, 1), mail_of(shelf, 2)
    number = send(shelf, values, 1, 1, 2)
    for mail in (first, second):
        assert mail.take(handle(1), number)
    values.step(lambda: tensors[0].add_(1.0))
    assert first.held[handle(1)].values.tolist() == [1.0] * SIZE, "the step went elsewhere"
    assert values.fetch().tolist() == [2.0, 2.0, 1.0, 1.0, 1.0]
    first.let_go(handle(1))
    assert not shelf.is_free(number)
    second.let_go(handle(1))
    assert shelf.is_free(number)
    assert len(shelf.slots) == 2
    send(shelf, values, 2, 1)
    values.step(lambda: tensors[0].add_(1.0))
    assert len(shelf.slots) == 2, "the slot that is free again is used"


def test_who_is_gone_reads_nothing(shelf: Shelf, tensors: list[Tensor]) -> None:
    values = Values(tensors, shelf)
    number = send(shelf, values, 1, 1, 2)
    mail_of(shelf, 1).take(handle(1), number)
    shelf.members = {0: 0, 1: 1}
    assert shelf.is_free(number), "1 has another life, 2 has none"


def test_one_slot_has_one_name_at_a_time(shelf: Shelf, tensors: list[Tensor]) -> None:
    """A reader that is sent the same parameters twice, and lets the second go first, still reads the first."""
    values = Values(tensors, shelf)
    reader = mail_of(shelf, 1)
    numbers = [send(shelf, values, serial, 1) for serial in (1, 2)]
    for serial, number in zip((1, 2), numbers, strict=True):
        reader.take(handle(serial), number)
    reader.let_go(handle(2))
    assert numbers[0] != numbers[1]
    assert not shelf.is_free(numbers[0])
    assert shelf.is_free(numbers[1])


def test_a_slot_that_is_gone_is_no_mail(shelf: Shelf, tensors: list[Tensor]) -> None:
    values = Values(tensors, shelf)
    number = send(shelf, values, 1, 1, 2)
    early, late = mail_of(shelf, 1), mail_of(shelf, 2)
    assert early.take(handle(1), number)
    slots.remove(shelf.folder, 0, 0)
    assert not late.take(handle(1), number)
    assert early.held[handle(1)].values.tolist() == [0.0] * SIZE, "mapped is mapped"


@pytest.mark.parametrize("in_place", [True, False])
def test_average_is_own_plus_the_others_by_weight(shelf: Shelf, tensors: list[Tensor], in_place: bool) -> None:
    values = Values(tensors, shelf)
    values.in_place = in_place
    values.slot.values.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    values.load()
    others = []
    for rank, number in ((1, 10.0), (2, 100.0)):
        other = Shelf(shelf.folder, (rank, 0), shelf.layout, readers=3)
        other.find_free(None)
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
    shelf: Shelf, tensors: list[Tensor], in_place: bool
) -> None:
    values = Values(tensors, shelf)
    values.in_place = in_place
    values.slot.values.fill_(1.0)
    values.load()
    other = Shelf(shelf.folder, (1, 0), shelf.layout, readers=3)
    theirs = other.slots[other.find_free(None)]
    theirs.values.fill_(3.0)
    readers = mail_of(shelf, 1), mail_of(shelf, 2)
    number = send(shelf, values, 1, 1, 2)
    for mail in readers:
        mail.take(handle(1), number)
    readers[0].let_go(handle(1))
    values.average(0.5, [theirs], (0.5,))
    assert values.number != number, "one of two reads it still"
    assert readers[1].held[handle(1)].values.tolist() == [1.0] * SIZE
    assert torch.cat(tensors).tolist() == [2.0] * SIZE
    second = send(shelf, values, 2, 1)
    readers[0].take(handle(2), second)
    readers[0].let_go(handle(2))
    values.average(0.5, [theirs], (0.5,))
    assert values.number == second
    assert torch.cat(tensors).tolist() == [2.5] * SIZE
    assert len(shelf.slots) == 2
    assert send(shelf, values, 3, 1) == second
    assert not shelf.is_free(second), "what was read under another name is not read under this one"
