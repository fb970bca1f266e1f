"""Who is started again, workers and servers, and what is lost: also in random runs in which they end at any moment."""

from __future__ import annotations

import random

import pytest

from paceline.core.control.server_restarts import (
    MOST_RESTARTS,
    AbandonLog,
    CheckpointFound,
    FindCheckpoint,
    RestartServer,
    ServerEnded,
    ServerEvent,
    ServerRestarter,
)
from paceline.core.control.worker_restarts import (
    DropWorker,
    EndRun,
    RestartLater,
    StartWorker,
    TimePassed,
    WorkerEnded,
    WorkerEvent,
    WorkerRestarter,
)

KILLED = -9


def ended(code: int = KILLED, incarnation: int = 0, **more: object) -> WorkerEnded:
    return WorkerEnded(**{"at": 1.0, "rank": 2, "incarnation": incarnation, "code": code, "how": "fell", **more})  # type: ignore[arg-type]


def test_a_worker_is_started_again_while_restarts_are_left() -> None:
    machine = WorkerRestarter(left=1)
    assert machine.handle(ended(1, incarnation=2)) == [RestartLater(2, 2.0, "fell", 0)]
    assert machine.ranks == {2}
    assert machine.handle(TimePassed(2.9, stopping=False)) == []
    assert machine.handle(TimePassed(3.0, stopping=False)) == [StartWorker(2)]
    assert machine.handle(ended(1)) == [DropWorker(2, "fell")]
    assert machine.outcomes.failures == ["worker 2 fell"]


def test_the_scenario_has_it_back_without_using_a_restart() -> None:
    machine = WorkerRestarter(left=1)
    assert machine.handle(ended(back_after_s=0.25)) == [RestartLater(2, 0.25, "fell", None)]
    assert machine.left == 1


def test_nobody_is_started_while_the_run_is_ending_or_the_host_is_away() -> None:
    machine = WorkerRestarter(left=9)
    assert machine.handle(ended(stopping=True)) == [DropWorker(2, "fell")]
    for passed in (TimePassed(9.0, False, frozenset([2])), TimePassed(1.0, stopping=True)):
        machine.handle(ended())
        assert machine.handle(passed) == []
        assert machine.ranks == set()


def test_how_they_count() -> None:
    machine = WorkerRestarter(joined=True)
    for code in (0, 2, KILLED):
        machine.handle(ended(code))
    machine.handle(ended(lost_with="host x"))
    outcomes = machine.outcomes
    assert (outcomes.well, outcomes.refused, outcomes.failures) == (1, 1, [])
    assert outcomes.losses == ["worker 2 fell", "worker 2 fell", "worker 2 was lost with host x"]
    abort = WorkerRestarter(abort=True).handle(ended(1))
    assert abort == [EndRun("worker 2 fell, and the run is to end then")]


class Workers:
    """Workers that end at any moment, in any way, and are started by what the machine orders."""

    def __init__(self, seed: int, machine: WorkerRestarter) -> None:
        self.draw, self.machine, self.budget = random.Random(seed), machine, machine.left
        self.live = dict.fromkeys(range(4), 0)
        self.lives = dict(self.live)
        self.gone: set[int] = set()
        """Ended well, dropped, or lost with their host."""
        self.at, self.started = 0.0, 0
        self.stopping = False

    def deliver(self, event: WorkerEvent) -> None:
        for order in self.machine.handle(event):
            match order:
                case StartWorker(rank):
                    assert not self.stopping, "started while the run is ending"
                    assert rank not in self.live, f"worker {rank} is there"
                    self.lives[rank] += 1
                    self.live[rank] = self.lives[rank]
                    self.started += 1
                case RestartLater(rank, _, _, left):
                    self.gone.discard(rank)
                    assert left is None or left >= 0
                case EndRun() | DropWorker():
                    pass

    def end_one(self) -> None:
        if not self.live:
            return
        rank = self.draw.choice(sorted(self.live))
        incarnation = self.live.pop(rank)
        self.gone.add(rank)
        code = self.draw.choice([0, 1, KILLED, KILLED])
        host = "host x" if code == KILLED and self.draw.random() < 0.2 else ""
        self.deliver(WorkerEnded(self.at, rank, incarnation, code, "fell", host, stopping=self.stopping))

    def pass_time(self, seconds: float) -> None:
        self.at += seconds
        self.deliver(TimePassed(self.at, self.stopping))

    def run(self) -> None:
        self.machine.checks = True
        for _ in range(60):
            (self.end_one if self.draw.random() < 0.3 else lambda: self.pass_time(self.draw.random()))()
            if self.draw.random() < 0.01:
                self.stopping = True
        self.pass_time(60.0)
        assert not self.machine.due, "somebody is due for ever"
        assert self.started <= self.budget, "more restarts than there were"
        outcomes = self.machine.outcomes
        counted = outcomes.well + len(outcomes.failures) + len(outcomes.losses)
        assert self.stopping or set(self.live) | self.gone == set(range(4)), "somebody is forgotten"
        assert self.stopping or counted == len(self.gone), "somebody is not counted"


class Spender(WorkerRestarter):
    """Does not count restarts."""

    def restart(self, event: WorkerEnded) -> None:
        super().restart(event)
        self.left += 1


class Busy(WorkerRestarter):
    """Starts workers although the run is ending."""

    def take(self, event: WorkerEvent) -> None:
        super().take(TimePassed(event.at, False, event.away) if isinstance(event, TimePassed) else event)


class Twice(WorkerRestarter):
    def restart(self, event: WorkerEnded) -> None:
        super().restart(event)
        self.due.append(self.due[-1])


def test_random_runs_of_workers() -> None:
    for seed in range(300):
        Workers(seed, WorkerRestarter(left=seed % 6)).run()


@pytest.mark.parametrize("broken", [Spender, Busy, Twice])
def test_broken_restarts_of_workers_are_noticed(broken: type[WorkerRestarter]) -> None:
    with pytest.raises(AssertionError):
        [Workers(seed, broken(left=seed % 6)).run() for seed in range(300)]


# Servers.


def server(code: int = KILLED, **more: object) -> ServerEnded:
    usual = {"shard": 1, "incarnation": 0, "code": code, "how": "fell", "begun": True, "finishing": False}
    return ServerEnded(**{**usual, "done": False, "configured": True, "logged": False, "given": False, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "source"),
    [({"begun": False, "logged": True}, "start"), ({"logged": True, "given": True}, "log"), ({"given": True}, "given")],
)
def test_what_a_server_starts_from(facts: dict[str, bool], source: str) -> None:
    (order,) = ServerRestarter().handle(server(**facts))
    assert isinstance(order, RestartServer)
    assert order.source == source


@pytest.mark.parametrize(("found", "source"), [("checkpoint 3", "checkpoint"), ("", "beginning")])
def test_what_is_lost_is_said(found: str, source: str) -> None:
    machine = ServerRestarter()
    assert machine.handle(server()) == [FindCheckpoint(1)]
    (order,) = machine.handle(CheckpointFound(1, found))
    assert machine.losses == [order.why]  # type: ignore[union-attr]
    assert order == RestartServer(1, source, machine.losses[0])  # type: ignore[arg-type]
    assert found in order.why


def test_one_that_fails_by_itself_again_ends_the_run() -> None:
    machine = ServerRestarter()
    for facts in ({"begun": False}, {"incarnation": 1, "configured": False}):
        (order,) = machine.handle(server(1, **facts))
        assert isinstance(order, EndRun)
    assert machine.handle(server(1, incarnation=1, configured=False, logged=True)) == [AbandonLog(1)]
    assert isinstance(machine.handle(server(incarnation=MOST_RESTARTS, begun=False))[0], EndRun)


def test_without_its_part_a_run_that_ends_has_failed() -> None:
    machine = ServerRestarter()
    machine.handle(server(finishing=True))
    assert isinstance(machine.handle(CheckpointFound(1, ""))[0], EndRun)
    assert ServerRestarter().handle(server(done=True)) == []


class RunOver(Exception):
    """The machine has ended the run."""


class Servers:
    """Three servers that are killed or fail at any moment, and are back when the machine orders it."""

    def __init__(self, seed: int, machine: ServerRestarter) -> None:
        self.draw, self.machine = random.Random(seed), machine
        self.lives = [0, 0, 0]
        self.live, self.configured, self.done = {0, 1, 2}, {0, 1, 2}, set[int]()
        self.logged = {0, 1, 2} if self.draw.random() < 0.3 else set[int]()
        self.given = {2} if self.draw.random() < 0.5 else set[int]()
        self.begun = self.finishing = False
        self.kept = ""
        self.lost = 0

    def deliver(self, event: ServerEvent) -> None:
        for order in self.machine.handle(event):
            match order:
                case FindCheckpoint(shard):
                    self.deliver(CheckpointFound(shard, self.kept))
                case RestartServer(shard, source, why):
                    assert shard not in self.live | self.done, f"server {shard} is there, or done"
                    allowed = {"log": shard in self.logged, "given": shard in self.given, "checkpoint": self.kept != ""}
                    assert allowed.get(source, True), f"there is no {source}"
                    assert (source == "start") == (not self.begun)
                    self.lost += source in ("checkpoint", "beginning")
                    assert source == "start" or ("lost" in why) or source in ("log", "given")
                    self.lives[shard] += 1
                    self.live.add(shard)
                    self.configured.discard(shard)
                case EndRun() | AbandonLog():
                    raise RunOver

    def end_one(self) -> None:
        shard = self.draw.choice(sorted(self.live))
        self.live.discard(shard)
        code = 0 if shard in self.done else self.draw.choice([1, KILLED, KILLED, KILLED])
        was = shard in self.configured
        self.deliver(
            ServerEnded(
                shard, self.lives[shard], code, "fell", self.begun, self.finishing, shard in self.done, was,
                shard in self.logged, shard in self.given,
            )
        )  # fmt: skip
        assert shard in self.live | self.done, f"server {shard} is forgotten"
        assert len(self.machine.losses) == self.lost, "a loss is not said"

    def step(self) -> None:
        draw = self.draw.random()
        if draw < 0.3 and self.live:
            self.end_one()
        elif draw < 0.6:
            self.configured |= self.live
        elif draw < 0.65:
            self.begun = True
        elif draw < 0.7 and self.begun:
            self.kept = "checkpoint 7"
        elif draw < 0.72:
            self.given.clear()
        elif draw < 0.74 and self.begun:
            self.finishing = True
        elif draw < 0.77 and self.finishing and self.live:
            self.done.add(self.draw.choice(sorted(self.live)))

    def run(self) -> None:
        try:
            for _ in range(300):
                self.step()
        except RunOver:
            return


class Obstinate(ServerRestarter):
    """Starts servers again that have left their parts."""

    def take(self, event: ServerEvent) -> None:
        if isinstance(event, ServerEnded):
            self.on_server_ended(event)
        else:
            super().take(event)


class Silent(ServerRestarter):
    """Says nothing of what is lost."""

    def on_checkpoint_found(self, event: ServerEnded, found: str) -> None:
        super().on_checkpoint_found(event, found)
        self.losses.clear()


class Hopeful(ServerRestarter):
    """Takes what others gave although it may be gone."""

    def on_server_ended(self, event: ServerEnded) -> None:
        if event.begun and not event.logged:
            self.restart(event, "given", "hoping")
        else:
            super().on_server_ended(event)


def test_random_runs_of_servers() -> None:
    for seed in range(300):
        Servers(seed, ServerRestarter()).run()


@pytest.mark.parametrize("broken", [Obstinate, Silent, Hopeful])
def test_broken_restarts_of_servers_are_noticed(broken: type[ServerRestarter]) -> None:
    with pytest.raises(AssertionError):
        [Servers(seed, broken()).run() for seed in range(300)]
