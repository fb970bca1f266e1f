"""Who becomes a member: how a run begins, who joins later, who is refused; also in random runs with deaths."""

from __future__ import annotations

import random

import pytest

from paceline.core.control.admission import (
    AdmissionEvent,
    Admitter,
    AdmitWorker,
    BeginRun,
    ChangeEnded,
    ChooseModel,
    FailToBegin,
    ModelChosen,
    ModelRefused,
    Process,
    RefuseWorker,
    StopWorker,
    TellMissing,
    WorkerDescribed,
    WorkersThere,
)
from paceline.core.machine import InvariantViolated


def there(*live: int, **more: object) -> WorkersThere:
    usual = {"at": 0.0, "lead": 0, "due": False, "servers_there": True, "servers_configured": False}
    return WorkersThere(**{**usual, "live": tuple((rank, 0) for rank in live), **more})  # type: ignore[arg-type]


def described(machine: Admitter, *ranks: int) -> None:
    for rank in ranks:
        assert machine.handle(WorkerDescribed(rank, 0, "mine")) == []


def begun(*members: int, places: int | None = None) -> Admitter:
    machine = Admitter(0.0)
    described(machine, *members)
    assert machine.handle(there(*members)) == [ChooseModel(0, 0)]
    assert machine.handle(ModelChosen("mine", places)) == []
    everybody = tuple((rank, 0) for rank in members)
    assert machine.handle(there(*members, servers_configured=True)) == [BeginRun(everybody)]
    return machine


@pytest.mark.parametrize("obstacle", [{"due": True}, {"servers_there": False}, {"live": ((0, 0), (1, 0), (2, 0))}])
def test_nothing_is_chosen_before_all_are_there(obstacle: dict[str, object]) -> None:
    machine = Admitter(0.0, needed=2)
    described(machine, 0, 1)
    assert machine.handle(there(0, 1, **obstacle)) == []
    assert machine.handle(there(0)) == [], "two are needed"
    assert machine.handle(there(0, 1)) == [ChooseModel(0, 0)]


def test_without_worker_0_there_is_no_model() -> None:
    machine = Admitter(0.0)
    described(machine, 0, 1)
    assert machine.handle(there(1, lead=1)) == [FailToBegin()], "its last incarnation has described nothing"


def test_one_whose_model_cannot_be_has_to_describe_another() -> None:
    machine = Admitter(0.0)
    described(machine, 0)
    machine.handle(there(0))
    machine.handle(ModelRefused(0, 0))
    assert machine.handle(there(0)) == []


def test_who_is_missing_is_said_once() -> None:
    machine = Admitter(0.0)
    described(machine, 0)
    assert machine.handle(there(0, 1, at=19.0)) == []
    assert machine.handle(there(0, 1, at=21.0)) == [TellMissing((1,))]
    assert machine.handle(there(0, 1, at=22.0)) == []


def test_those_with_another_model_do_not_begin() -> None:
    machine = Admitter(0.0)
    described(machine, 0)
    machine.handle(WorkerDescribed(1, 0, "another"))
    machine.handle(there(0, 1))
    machine.handle(ModelChosen("mine", None))
    orders = machine.handle(there(0, 1, servers_configured=True))
    assert orders == [RefuseWorker(1, 0, "differs"), BeginRun(((0, 0),))]


def test_who_comes_later() -> None:
    machine = begun(0, 1, places=2)
    assert machine.handle(WorkerDescribed(1, 1, "mine")) == [AdmitWorker(1, 1)]
    assert machine.handle(WorkerDescribed(1, 2, "another")) == [RefuseWorker(1, 2, "differs")]
    assert machine.handle(WorkerDescribed(2, 0, "mine")) == [RefuseWorker(2, 0, "full")]
    assert machine.handle(WorkerDescribed(1, 3, "mine", stopping=True, changing=True)) == [StopWorker(1, 3)]


def test_while_the_servers_change_whoever_comes_waits() -> None:
    machine = begun(0)
    for rank in (1, 2):
        assert machine.handle(WorkerDescribed(rank, 0, "mine", changing=True)) == []
    assert machine.handle(ChangeEnded(((0, 0), (2, 0)), stopping=False)) == [AdmitWorker(2, 0)], "1 has died"
    assert machine.handle(ChangeEnded(((0, 0), (2, 0)), stopping=False)) == []


class World:
    """Workers that start, describe a model and die at any moment; servers that come and go."""

    def __init__(self, seed: int, machine: Admitter) -> None:
        self.draw, self.machine = random.Random(seed), machine
        self.at = 0.0
        self.live: dict[int, int] = dict.fromkeys(range(4), 0)
        self.lives = dict(self.live)
        self.model: dict[Process, str] = {}
        """What each has described."""
        self.chosen: str | None = None
        self.members: set[Process] = set()
        self.refused: set[Process] = set()
        self.begun = self.changing = False
        self.servers_there = self.servers_configured = False
        self.failed = False

    def processes(self) -> tuple[Process, ...]:
        return tuple(self.live.items())

    def deliver(self, event: AdmissionEvent) -> None:
        for order in self.machine.handle(event):
            match order:
                case ChooseModel(rank, incarnation):
                    assert self.chosen is None, "there is a model"
                    assert set(self.processes()) <= set(self.model), "somebody has not said what it trains"
                    assert self.servers_there
                    self.chosen = self.model[rank, incarnation]
                    self.deliver(ModelChosen(self.chosen, 6))
                case BeginRun(members):
                    assert not self.begun, "it has begun"
                    assert self.servers_configured
                    assert set(members) <= set(self.processes()), "somebody is dead"
                    assert {self.model[process] for process in members} <= {self.chosen}
                    self.begun = True
                    self.members = set(members)
                case AdmitWorker(rank, incarnation):
                    assert self.begun
                    assert not self.changing, "the servers change"
                    assert (rank, incarnation) in self.processes(), "it is dead"
                    assert (rank, incarnation) not in self.members, "it is a member"
                    assert self.model[rank, incarnation] == self.chosen
                    self.members.add((rank, incarnation))
                case RefuseWorker(rank, incarnation, why):
                    assert rank >= 6 if why == "full" else self.model[rank, incarnation] != self.chosen
                    self.refused.add((rank, incarnation))
                    self.live.pop(rank, None)
                case FailToBegin():
                    self.failed = True

    def describe(self, process: Process) -> None:
        self.model[process] = "another" if process[0] and self.draw.random() < 0.1 else "mine"
        self.deliver(WorkerDescribed(*process, self.model[process], changing=self.changing))

    def end_change(self) -> None:
        self.changing = False
        self.deliver(ChangeEnded(self.processes(), stopping=False))

    def look(self) -> None:
        facts = (not self.live, self.servers_there, self.servers_configured)
        self.deliver(WorkersThere(self.at, self.processes(), self.lives[0], *facts))

    def step(self, deaths: float) -> None:
        self.at += self.draw.random()
        draw, silent = self.draw.random(), [process for process in self.processes() if process not in self.model]
        if draw < 0.3 and silent:
            self.describe(self.draw.choice(silent))
        elif draw < 0.5:
            self.look()
        elif draw < 0.6:
            self.servers_there = True
            self.servers_configured = self.chosen is not None and (self.begun or self.draw.random() < 0.5)
        elif draw < 0.7 and self.begun and deaths:
            if self.changing:
                self.end_change()
            else:
                self.changing = True
        elif draw < 0.85 and len(self.live) > 1 and self.draw.random() < deaths:
            rank = self.draw.choice([rank for rank in sorted(self.live) if rank or self.begun] or [0])
            self.members.discard((rank, self.live.pop(rank)))
        elif draw < 0.95 and self.draw.random() < (deaths if self.begun else deaths / 3):
            rank = self.draw.randrange(7)
            if rank not in self.live:
                self.lives[rank] = self.lives.get(rank, -1) + 1
                self.live[rank] = self.lives[rank]

    def run(self) -> None:
        self.machine.checks = True
        for _ in range(150):
            self.step(0.5)
            if self.failed:
                return
        for _ in range(200):
            self.step(0.0)
        self.end_change()
        self.look()
        assert self.begun or self.failed, "it never begins"
        assert self.members == set(self.processes()), "somebody waits for ever"


class Eager(Admitter):
    """Does not wait while the servers change."""

    def take(self, event: AdmissionEvent) -> None:
        if isinstance(event, WorkerDescribed):
            event = WorkerDescribed(event.rank, event.incarnation, event.digest, event.stopping)
        super().take(event)


class Lax(Admitter):
    """Looks at no model."""

    def fits(self, process: Process) -> bool:
        return True


class Necromancer(Admitter):
    """Admits those who died while they waited."""

    def take(self, event: AdmissionEvent) -> None:
        super().take(ChangeEnded(tuple(self.waiting), event.stopping) if isinstance(event, ChangeEnded) else event)


class Amnesiac(Admitter):
    """Forgets the models of all when it has begun: who comes later is compared with nothing."""

    def take(self, event: AdmissionEvent) -> None:
        super().take(event)
        if self.stage == "begun" and isinstance(event, WorkersThere):
            self.described.clear()


class Forgetful(Admitter):
    """Forgets those who came while the servers changed."""

    def take(self, event: AdmissionEvent) -> None:
        super().take(event)
        self.waiting.clear()


def test_a_model_that_no_worker_has_described_is_noticed() -> None:
    machine = Admitter(0.0)
    machine.checks = True
    described(machine, 0)
    machine.handle(there(0))
    with pytest.raises(InvariantViolated, match="no worker has described the run's model"):
        machine.handle(ModelChosen("nobody's", None))


def test_random_runs() -> None:
    for seed in range(300):
        World(seed, Admitter(0.0)).run()


@pytest.mark.parametrize("broken", [Eager, Lax, Necromancer, Amnesiac, Forgetful])
def test_broken_ones_are_noticed(broken: type[Admitter]) -> None:
    with pytest.raises(AssertionError):
        [World(seed, broken(0.0)).run() for seed in range(300)]
