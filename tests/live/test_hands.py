"""Workers' hands and the driver's decks, without processes: random runs with kills, joins, drops, breaks and loaders
that draw ahead. Whatever happens, an epoch that is called finished was trained on, whole."""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import islice
from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler

from paceline.core.messages import Members
from paceline.runtime.driver import Authority
from paceline.runtime.live import wire
from paceline.runtime.live.driver.dealing_out import Decks
from paceline.runtime.live.worker.hands import FEW_STEPS, MANY_STEPS, PARTS, Hands

SAMPLER = 0


class Office:
    """A driver that only deals. What workers send lies in its in-tray until it is read."""

    def __init__(self, workers: int) -> None:
        self.members = Members(workers, 1)
        self.epoch_s = 0.0
        self.keeper = None
        self.authority = Authority()
        self.workers: dict[tuple[int, int], Desk] = {}
        self.in_tray: deque[tuple[Desk, bytes]] = deque()
        self.heard: list[wire.Play] = []
        self.decks = Decks(self)  # type: ignore[arg-type]

    def tell_worker(self, rank: int, incarnation: int, message: wire.ToWorker) -> None:
        self.workers[rank, incarnation].inbox.append(message)

    def read(self) -> None:
        while self.in_tray:
            play = wire.decode_to_driver(self.in_tray.popleft()[1])
            assert isinstance(play, wire.Play)
            self.heard.append(play)
            self.decks.hear(play)

    def admit(self, rank: int) -> Desk:
        incarnation = self.authority.next_incarnation(rank)
        desk = self.workers[rank, incarnation] = Desk(self, rank, incarnation)
        self.decks.announce(self.authority.admit({rank: incarnation}))
        return desk

    def remove(self, desk: Desk, heard: int) -> None:
        """It is gone; of what it has sent so much is heard before, the rest perhaps after."""
        mine = [entry for entry in self.in_tray if entry[0] is desk]
        others = [entry for entry in self.in_tray if entry[0] is not desk]
        self.in_tray = deque(mine[:heard])
        self.read()
        self.decks.announce(self.authority.remove(desk.rank))
        self.in_tray = deque(mine[heard:] + others)


class Desk:
    """What hands need of a live worker."""

    def __init__(self, office: Office, rank: int, incarnation: int) -> None:
        self.office = office
        self.rank = rank
        self.incarnation = incarnation
        self.config = SimpleNamespace(members=office.members)
        self.inbox: deque[wire.ToWorker] = deque()
        self.driver = SimpleNamespace(send=lambda message: office.in_tray.append((self, message)))
        self.hands = Hands(self)  # type: ignore[arg-type]
        self.hands.open()
        self.waits = 0

    def now(self) -> float:
        return 0.0

    def await_driver(self) -> None:
        self.waits += 1
        self.office.read()
        assert self.inbox, "nobody answers"
        self.hear()

    def hear(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            assert isinstance(message, wire.Dealt)
            self.hands.take(message)


class Trainer:
    """A training loop: batches, perhaps drawn ahead, perhaps several in a step, perhaps left early."""

    def __init__(self, desk: Desk, size: int, chance: random.Random, trained: dict[int, Counter[int]]) -> None:
        self.desk = desk
        self.chance = chance
        self.trained = trained
        self.batch = chance.randint(1, 9)
        self.micro_batches = chance.choice([1, 1, 2])
        self.ahead = chance.choice([0, 0, 1, 5])
        self.drop_last = chance.random() < 0.3
        self.leaves_early = chance.choice([0.0, 0.1])
        self.dropped = 0.2
        self.gives_up = chance.choice([0.0, 0.3])
        self.draws_outside = chance.random() < 0.5
        """One batch is drawn before the closure runs, and more in it."""
        per_step = self.batch * self.micro_batches if self.ahead or chance.random() < 0.3 else None
        self.holder = desk.hands.holder(SAMPLER, size, 0, per_step)
        self.drawn: deque[tuple[int, int]] = deque()
        self.loop = self.forever()

    def __iter__(self):
        """As a sampler."""
        for sample in self.holder.draw():
            self.drawn.append((self.holder.in_play.epoch, sample))
            yield sample

    def batches(self):
        """Batches of (epoch, sample)."""
        self.drawn.clear()
        for batch in BatchSampler(self, self.batch, self.drop_last):  # type: ignore[arg-type]
            entries = [self.drawn.popleft() for _ in batch]
            assert [sample for _, sample in entries] == batch
            yield entries

    def loader(self):
        batches = self.batches()
        ready = deque(islice(batches, self.ahead))
        while True:
            ready.extend(islice(batches, 1))
            if not ready:
                return
            yield ready.popleft()

    def forever(self):
        while True:
            loader = self.loader()
            while used := self.compute(loader):
                if self.chance.random() < self.leaves_early:
                    break
                counted = self.chance.random() >= self.dropped
                if counted:
                    for epoch, sample in used:
                        self.trained.setdefault(epoch, Counter())[sample] += 1
                self.desk.hear()
                self.desk.hands.settle(counted)
                yield

    def compute(self, loader):
        """The samples of a step. Its closure may draw some itself, and be given up."""
        outside = 1 if self.draws_outside and self.holder.per_step is None else 0
        used = take(loader, outside)
        self.desk.hands.begin_pass()
        inside = take(loader, self.micro_batches - outside)
        given_up = self.chance.random() < self.gives_up
        self.desk.hands.end_pass(given_up)
        if given_up:
            inside = take(loader, self.micro_batches - outside)
        return used + inside

    def step(self) -> None:
        next(self.loop)


def take(loader, batches: int) -> list[tuple[int, int]]:
    return [entry for batch in islice(loader, batches) for entry in batch]


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_runs_lose_nothing(seed: int, kills: bool) -> None:
    chance = random.Random(seed)
    size, workers = chance.choice([2, 30, 101]), chance.randint(1, 4)
    office = Office(workers)
    trained: dict[int, Counter[int]] = {}
    trainers = [Trainer(office.admit(rank), size, chance, trained) for rank in range(workers)]
    pace = [chance.choice([1, 1, 4]) for _ in range(8)]

    finished: set[int] = set()

    def check() -> None:
        if SAMPLER in office.decks.tables:
            for epoch in set(office.decks.tables[SAMPLER].finished()) - finished:
                assert set(trained[epoch]) == set(range(size)), f"epoch {epoch} is not whole"
                finished.add(epoch)

    for turn in range(600):
        (trainer,) = chance.choices(trainers, [pace[trainer.desk.rank] for trainer in trainers])
        trainer.step()
        if chance.random() < 0.3:
            office.read()
        if kills and turn < 300 and chance.random() < 0.05:
            if len(trainers) > 1 and chance.random() < 0.6:
                victim = trainers.pop(chance.randrange(len(trainers)))
                if chance.random() < 0.3:
                    victim.desk.hands.report()
                office.remove(victim.desk, chance.randint(0, 3))
            elif len(trainers) < 6:
                there = {trainer.desk.rank for trainer in trainers}
                rank = chance.choice([rank for rank in range(8) if rank not in there])
                trainers.append(Trainer(office.admit(rank), size, chance, trained))
        check()
    # Then all is calm, and whatever was begun gets finished.
    for trainer in trainers:
        trainer.dropped = trainer.leaves_early = 0.0
    begun = set(range(office.decks.tables[SAMPLER].deck.unopened))
    for _ in range(600):
        for trainer in trainers:
            trainer.step()
        office.read()
        check()
        if finished >= begun:
            break
    assert finished >= begun
    if not kills:
        assert all(times == 1 for epoch in finished for times in trained[epoch].values())


def test_a_hand_is_asked_for_ahead_and_reports_go_with_requests() -> None:
    office = Office(2)
    desks = [office.admit(rank) for rank in range(2)]
    size, batch = 100_000, 20
    holder = desks[0].hands.holder(SAMPLER, size, 0, None)
    draws = holder.draw()
    for _ in range(2000):
        list(islice(draws, batch))
        office.read()
        desks[0].hear()
        desks[0].hands.settle(counted=True)
    assert desks[0].waits == 1, "only for the first hand"
    messages = 2000 * batch / (MANY_STEPS * batch)
    assert messages <= len(office.heard) <= messages + 4
    held = sum(len(hand.samples) - hand.settled for hand in holder.hands)
    assert held <= MANY_STEPS * batch


def test_a_hand_is_a_small_part_of_a_small_share_and_grows_within_a_large_step() -> None:
    office = Office(2)
    (desk,) = (office.admit(rank) for rank in range(1))
    holder = desk.hands.holder(SAMPLER, 3200, 0, 10)
    next(holder.draw())
    assert holder.hand_size() == 3200 // 2 // PARTS
    small = desk.hands.holder(SAMPLER + 1, 100, 0, 10)
    assert small.hand_size() == FEW_STEPS * 10
    large = desk.hands.holder(SAMPLER + 2, 10**6, 0, None)
    list(islice(large.draw(), 4096))
    assert desk.waits <= 8
    assert large.hand_size() >= FEW_STEPS * 2048


def test_whoever_joins_late_is_dealt_the_current_epoch_at_once() -> None:
    office = Office(2)
    old = office.admit(0)
    holder = old.hands.holder(SAMPLER, 40, 0, None)
    for _ in range(30):
        assert len(list(holder.draw())) == 40
        old.hands.settle(counted=True)
    new = office.admit(1)
    joiner = new.hands.holder(SAMPLER, 40, 0, None)
    next(joiner.draw())
    assert joiner.in_play.epoch == 30
    assert new.waits == 1
