"""Workers' leases and the driver's dispatchers, without processes: random runs with kills, joins, drops, breaks and
loaders that draw ahead. Whatever happens, an epoch that is called finished was trained on, whole."""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import islice
from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler

from paceline.core.messages import Members
from paceline.runtime.execution import Membership
from paceline.runtime.live.driver.sample_dispatchers import SampleDispatchers
from paceline.runtime.live.protocol import lease_messages, wire
from paceline.runtime.live.system.training_end import TrainingEnd
from paceline.runtime.live.trainer.sample_leases import SampleLeases
from paceline.runtime.live.trainer.sampler_leases import FEW_STEPS, MANY_STEPS, PARTS

SAMPLER = 0


class FakeDriver:
    """A driver that only grants leases. What workers send lies in its queue until it is read."""

    def __init__(self, workers: int) -> None:
        self.members = Members(workers, 1)
        self.authority = Membership()
        self.workers: dict[tuple[int, int], FakeWorker] = {}
        self.received: deque[tuple[FakeWorker, bytes]] = deque()
        self.heard: list[lease_messages.LeaseEvents] = []
        self.sample_dispatchers = SampleDispatchers({}, lambda: 0.0, self.tell_worker, lambda: None)

    def tell_worker(self, rank: int, incarnation: int, message: wire.ToWorker) -> None:
        self.workers[rank, incarnation].inbox.append(message)

    def read(self) -> None:
        while self.received:
            message = wire.decode_to_driver(self.received.popleft()[1])
            assert isinstance(message, lease_messages.LeaseEvents)
            self.heard.append(message)
            self.sample_dispatchers.hear(message)

    def admit(self, rank: int) -> FakeWorker:
        incarnation = self.authority.next_incarnation(rank)
        worker = self.workers[rank, incarnation] = FakeWorker(self, rank, incarnation)
        self.sample_dispatchers.announce(self.authority.admit({rank: incarnation}))
        return worker

    def remove(self, worker: FakeWorker, heard: int) -> None:
        """It is gone; of what it has sent so much is heard before, the rest perhaps after."""
        mine = [entry for entry in self.received if entry[0] is worker]
        others = [entry for entry in self.received if entry[0] is not worker]
        self.received = deque(mine[:heard])
        self.read()
        self.sample_dispatchers.announce(self.authority.remove(worker.rank))
        self.received = deque(mine[heard:] + others)


class FakeWorker:
    """What sample leases need of a live worker."""

    def __init__(self, driver: FakeDriver, rank: int, incarnation: int) -> None:
        self.driver = driver
        self.rank = rank
        self.incarnation = incarnation
        self.inbox: deque[wire.ToWorker] = deque()
        self.run = SimpleNamespace(
            rank=rank,
            incarnation=incarnation,
            config=SimpleNamespace(members=driver.members),
            now=lambda: 0.0,
            send=lambda message: driver.received.append((self, wire.encode(message))),
        )
        self.end = TrainingEnd()
        self.leases = SampleLeases(self.run, self.end, self.await_driver)  # type: ignore[arg-type]
        self.waits = 0

    def await_driver(self) -> None:
        self.waits += 1
        self.driver.read()
        assert self.inbox, "nobody answers"
        self.hear()

    def hear(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            assert isinstance(message, lease_messages.LeaseAnswer)
            self.leases.receive(message)


class Trainer:
    """A training loop: batches, perhaps drawn ahead, perhaps several in a step, perhaps left early."""

    def __init__(self, worker: FakeWorker, size: int, chance: random.Random, trained: dict[int, Counter[int]]) -> None:
        self.worker = worker
        self.chance = chance
        self.trained = trained
        self.batch = chance.randint(1, 9)
        self.micro_batches = chance.choice([1, 1, 2])
        self.ahead = chance.choice([0, 0, 1, 5])
        self.drop_last = chance.random() < 0.3
        self.leaves_early = chance.choice([0.0, 0.1])
        self.dropped = 0.2
        self.gives_up = chance.choice([0.0, 0.3])
        self.round = chance.choice([1, 1, 3, 20])
        """The local steps of a round; 1 without local steps."""
        if self.round > 1:
            self.gives_up = 0.0
        worker.leases.by_rounds = self.round > 1
        self.held: list[tuple[int, int]] = []
        """What the steps of the round have used."""
        self.steps = 0
        self.draws_outside = chance.random() < 0.5
        """One batch is drawn before the closure runs, and more in it."""
        per_step = self.batch * self.micro_batches if self.ahead or chance.random() < 0.3 else None
        self.sampler = worker.leases.of_sampler(SAMPLER, size, 0, per_step)
        self.drawn: deque[tuple[int, int]] = deque()
        self.loop = self.forever()

    def __iter__(self):
        """As a sampler."""
        for sample in self.sampler.draw():
            self.drawn.append((self.sampler.leased.current.epoch, sample))
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
                self.held += used
                self.steps += 1
                if self.round > 1:
                    self.worker.leases.hold()
                if self.steps % self.round == 0:
                    self.end_round(counted=self.chance.random() >= self.dropped)
                yield

    def end_round(self, counted: bool) -> None:
        used, self.held = self.held, []
        if counted:
            for epoch, sample in used:
                self.trained.setdefault(epoch, Counter())[sample] += 1
        self.worker.hear()
        self.worker.leases.settle(counted)

    def compute(self, loader):
        """The samples of a step. Its closure may draw some itself, and be given up."""
        outside = 1 if self.draws_outside and self.sampler.per_step is None else 0
        used = take(loader, outside)
        self.worker.leases.begin_pass()
        inside = take(loader, self.micro_batches - outside)
        given_up = self.chance.random() < self.gives_up
        self.worker.leases.end_pass(given_up)
        if given_up:
            inside = take(loader, self.micro_batches - outside)
        return used + inside

    def step(self) -> None:
        next(self.loop)


def take(loader, batches: int) -> list[tuple[int, int]]:
    return [entry for batch in islice(loader, batches) for entry in batch]


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("seed", [*range(14), *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(14, 40))])
def test_random_runs_lose_nothing(seed: int, kills: bool) -> None:
    chance = random.Random(seed)
    size, workers = chance.choice([2, 30, 101]), chance.randint(1, 4)
    driver = FakeDriver(workers)
    trained: dict[int, Counter[int]] = {}
    trainers = [Trainer(driver.admit(rank), size, chance, trained) for rank in range(workers)]
    pace = [chance.choice([1, 1, 4]) for _ in range(8)]

    finished: set[int] = set()

    def check() -> None:
        if SAMPLER in driver.sample_dispatchers.dispatches:
            for epoch in set(driver.sample_dispatchers.dispatches[SAMPLER].finished()) - finished:
                assert set(trained[epoch]) == set(range(size)), f"epoch {epoch} is not whole"
                finished.add(epoch)

    for turn in range(600):
        (trainer,) = chance.choices(trainers, [pace[trainer.worker.rank] for trainer in trainers])
        trainer.step()
        if chance.random() < 0.3:
            driver.read()
        if kills and turn < 300 and chance.random() < 0.05:
            if len(trainers) > 1 and chance.random() < 0.6:
                victim = trainers.pop(chance.randrange(len(trainers)))
                if chance.random() < 0.3:
                    victim.worker.leases.report()
                driver.remove(victim.worker, chance.randint(0, 3))
            elif len(trainers) < 6:
                there = {trainer.worker.rank for trainer in trainers}
                rank = chance.choice([rank for rank in range(8) if rank not in there])
                trainers.append(Trainer(driver.admit(rank), size, chance, trained))
        check()
    # Then all is calm, and whatever was begun gets finished.
    for trainer in trainers:
        trainer.dropped = trainer.leaves_early = 0.0
    begun = set(range(driver.sample_dispatchers.dispatches[SAMPLER].machine.unopened))
    for _ in range(600):
        for trainer in trainers:
            trainer.step()
        driver.read()
        check()
        if finished >= begun:
            break
    assert finished >= begun
    if not kills:
        assert all(times == 1 for epoch in finished for times in trained[epoch].values())


def test_a_lease_is_asked_for_ahead_and_reports_go_with_requests() -> None:
    driver = FakeDriver(2)
    workers = [driver.admit(rank) for rank in range(2)]
    size, batch = 100_000, 20
    sampler = workers[0].leases.of_sampler(SAMPLER, size, 0, None)
    draws = sampler.draw()
    for _ in range(2000):
        list(islice(draws, batch))
        driver.read()
        workers[0].hear()
        workers[0].leases.settle(counted=True)
    assert workers[0].waits == 1, "only for the first lease"
    messages = 2000 * batch / (MANY_STEPS * batch)
    assert messages <= len(driver.heard) <= messages + 4
    held = sum(len(lease.samples) - lease.settled for lease in sampler.leased.leases)
    assert held <= MANY_STEPS * batch


def test_a_lease_is_a_small_part_of_a_small_share_and_grows_within_a_large_step() -> None:
    driver = FakeDriver(2)
    (worker,) = (driver.admit(rank) for rank in range(1))
    sampler = worker.leases.of_sampler(SAMPLER, 3200, 0, 10)
    next(sampler.draw())
    assert sampler.lease_size() == 3200 // 2 // PARTS
    small = worker.leases.of_sampler(SAMPLER + 1, 100, 0, 10)
    assert small.lease_size() == FEW_STEPS * 10
    large = worker.leases.of_sampler(SAMPLER + 2, 10**6, 0, None)
    list(islice(large.draw(), 4096))
    assert worker.waits <= 8
    assert large.lease_size() >= FEW_STEPS * 2048


def test_whoever_joins_late_is_dealt_the_current_epoch_at_once() -> None:
    driver = FakeDriver(2)
    old = driver.admit(0)
    sampler = old.leases.of_sampler(SAMPLER, 40, 0, None)
    for _ in range(30):
        assert len(list(sampler.draw())) == 40
        old.leases.settle(counted=True)
    new = driver.admit(1)
    joiner = new.leases.of_sampler(SAMPLER, 40, 0, None)
    next(joiner.draw())
    assert joiner.leased.current.epoch == 30
    assert new.waits == 1
