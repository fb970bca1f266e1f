"""Another number of servers: what is ordered when, also in random runs in which workers and servers die at any time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from paceline.core.control.server_resizing import (
    AbandonChange,
    AnswerWish,
    ChangeChecked,
    CheckChange,
    GiveParts,
    HoldWorker,
    PartsGiven,
    ResizeEvent,
    ResizeOrder,
    ResumeWorkers,
    ServerDied,
    ServerResizer,
    ServersWanted,
    ShardStands,
    Situation,
    SurveyServers,
    SwitchServers,
    WorkerHeld,
)
from paceline.core.messages import View

AHEAD = 3
"""Iterations a worker of the random runs may be ahead of the slowest one."""


def situation(*members: int, number: int = 1, **more: bool) -> Situation:
    usual = {"begun": True, "stopping": False, "finishing": False, "checkpointing": False, "configured": True}
    return Situation(**{**usual, **more}, view=View(number, tuple((rank, 0) for rank in members)))  # type: ignore[arg-type]


def stands(shard: int, view: int, next_: dict[int, int], waiting: tuple[int, ...] = (), holds: bool = False):
    return ShardStands(1, shard, view, 7, 7 + shard, next_, waiting, holds)


def begun(machine: ServerResizer, now: Situation) -> None:
    assert machine.handle(ServersWanted(3, "somebody")) == []
    assert machine.handle(now) == [CheckChange(3)]
    holds = [HoldWorker(1, *member, 0) for member in now.view.members]
    assert machine.handle(ChangeChecked("")) == [SurveyServers(1), *holds]


@pytest.mark.parametrize("obstacle", ["stopping", "finishing", "checkpointing"])
def test_nothing_is_begun_while_something_else_goes_on(obstacle: str) -> None:
    machine = ServerResizer(2)
    machine.handle(ServersWanted(3))
    assert machine.handle(situation(0, **{obstacle: True})) == []
    assert machine.handle(situation(0, begun=False)) == []
    assert machine.handle(situation(0, configured=False)) == []
    assert machine.handle(situation(0)) == [CheckChange(3)]


def test_an_entry_of_the_scenario_is_wished_for_once() -> None:
    machine = ServerResizer(2)
    for _ in range(2):
        machine.handle(ServersWanted(3, entry=0))
    assert len(machine.wishes) == 1


def test_who_wished_for_it_is_told_why_not() -> None:
    machine = ServerResizer(2)
    for servers, refusal in ((9, "too many"), (2, "")):
        machine.handle(ServersWanted(servers, "somebody"))
        machine.handle(situation(0))
        assert machine.handle(ChangeChecked(refusal)) == [AnswerWish("somebody", servers, False, refusal)]
        assert not machine.under_way


def test_nothing_moves_before_every_shard_has_heard_who_is_there() -> None:
    """Else a push of one that is gone might still be held on a shard that has given its part away."""
    machine = ServerResizer(2)
    begun(machine, situation(0, number=2))
    assert machine.handle(WorkerHeld(1, 0, 0, 7)) == []
    for view, next_ in ((1, 7), (2, 6), (2, 7)):
        for shard in (0, 1):
            assert machine.handle(situation(0, number=2)) == [], (view, next_)
            machine.handle(stands(shard, view, {0: next_}))
    assert machine.handle(situation(0, number=2)) == [GiveParts(1, 3)]
    assert machine.handle(PartsGiven(1, 0, "")) == []
    assert machine.handle(PartsGiven(1, 1, "")) == [SwitchServers(1, 3, (7, 8), 7, ((0, 7),))]
    assert machine.handle(situation(0, number=2, configured=False)) == []
    assert machine.handle(situation(0, number=2)) == [ResumeWorkers(1, ((0, 0),)), AnswerWish("somebody", 3, True, "")]


def test_those_that_others_wait_for_go_on_by_one_iteration() -> None:
    machine = ServerResizer(1)
    begun(machine, situation(0, 1))
    machine.handle(WorkerHeld(1, 1, 0, 6))
    machine.handle(stands(0, 1, {0: 7, 1: 6}, waiting=(0,), holds=True))
    assert machine.handle(situation(0, 1)) == [HoldWorker(1, 1, 0, 7)]
    assert machine.handle(situation(0, 1)) == [], "and then it is on its way"


@pytest.mark.parametrize("phase", ["holding", "giving", "taking"])
def test_a_server_that_dies_before_all_have_given_ends_the_change_for_now(phase: str) -> None:
    machine = ServerResizer(1)
    begun(machine, situation(0))
    if phase != "holding":
        machine.handle(WorkerHeld(1, 0, 0, 7))
        machine.handle(stands(0, 1, {0: 7}))
        assert machine.handle(situation(0)) == [GiveParts(1, 3)]
    if phase == "taking":
        machine.handle(PartsGiven(1, 0, ""))
        assert machine.handle(ServerDied("server 0")) == []
        return
    *goes_on, abandoned = machine.handle(ServerDied("server 0"))
    assert goes_on == [SurveyServers(None), HoldWorker(1, 0, 0, None)]
    assert isinstance(abandoned, AbandonChange)
    assert machine.handle(PartsGiven(1, 0, "")) == [], "of a change that is over"
    assert machine.handle(situation(0, configured=False)) == []
    assert machine.handle(situation(0)) == [CheckChange(3)], "it is begun again"


def test_a_part_that_cannot_be_written_ends_the_change_for_good() -> None:
    machine = ServerResizer(1)
    begun(machine, situation(0))
    machine.handle(WorkerHeld(1, 0, 0, 7))
    machine.handle(stands(0, 1, {0: 7}))
    machine.handle(situation(0))
    orders = machine.handle(PartsGiven(1, 0, "no space"))
    assert isinstance(orders[-1], AnswerWish)
    assert "no space" in orders[-1].refusal
    assert machine.idle


class World:
    """Workers under SSP, servers, and what is on its way between them and the machine, in random order.

    Messages between two of them keep their order; what goes on at all is drawn. A server that dies is back after a
    while, at an earlier iteration, and workers say their last push to it again.
    """

    def __init__(self, seed: int, machine: ServerResizer, faults: int) -> None:
        self.draw = random.Random(seed)
        self.machine = machine
        self.faults = faults
        self.checkpointing = self.stopping = False
        self.wishes = 0
        self.answered: list[AnswerWish] = []
        self.events: dict[object, deque[ResizeEvent]] = {}
        """What is on its way to the machine, by its sender."""
        self.view = View(1, tuple((rank, 0) for rank in range(3)))
        self.at = dict.fromkeys(self.view.members, 0)
        """The iteration each worker computes, or waits to push."""
        self.pushed: dict[tuple[int, int], int] = {}
        self.stop_at: dict[tuple[int, int], int] = {}
        self.said: dict[tuple[int, int], int] = {}
        self.lines: dict[tuple[tuple[int, int], int], deque[int]] = {}
        """Pushes on their way, by worker and shard."""
        self.servers: list[dict[int, int]] = [{}, {}]
        """What each server has of each worker: the iteration after its last push; None while it is down."""
        self.seen = [1, 1]
        """The view each has heard."""
        self.views: list[deque[View]] = [deque(), deque()]
        self.down: set[int] = set()
        self.survey: int | None = None
        self.told: dict[int, ShardStands] = {}
        self.giving: int | None = None
        self.to_give: set[int] = set()
        self.moves = 0

    # What the machine orders.

    def deliver(self, event: ResizeEvent) -> None:
        for order in self.machine.handle(event):
            self.execute(order)

    def execute(self, order: ResizeOrder) -> None:
        match order:
            case CheckChange(servers):
                self.deliver(ChangeChecked("too many" if servers > 4 else ""))
            case SurveyServers(change):
                assert change is None or (not self.down and not self.checkpointing and self.survey is None), order
                assert change is None or self.giving is None, "one change at a time"
                self.survey = change
                self.told.clear()
                self.giving = None
                self.to_give.clear()
            case HoldWorker(change, rank, incarnation, at):
                process = (rank, incarnation)
                self.said.pop(process, None)
                if at is None:
                    self.stop_at.pop(process, None)
                else:
                    self.stop_at[process] = at
            case GiveParts(change, _):
                assert not self.down, "an order to a server that is dead"
                self.check_still()
                assert set(self.seen) == {self.view.number}, "a server has not heard who is there"
                self.giving = change
                self.to_give = set(range(len(self.servers)))
            case SwitchServers(_, servers, _, _, next_):
                assert not self.to_give
                self.check_still()
                known = dict(next_)
                for rank, _ in self.view.members:
                    assert known[rank] == min(there[rank] for there in self.servers), "it has not told of a push"
                self.servers = [dict(known) for _ in range(servers)]
                self.seen = [self.view.number] * servers
                self.views = [deque() for _ in range(servers)]
                self.down = set(range(servers))  # until each has its part
                self.survey = None
                self.lines.clear()
                self.moves += 1
            case ResumeWorkers():
                assert not self.down
                self.giving = None
                self.stop_at.clear()
                self.said.clear()
            case AbandonChange():
                assert self.giving is None
            case AnswerWish():
                self.answered.append(order)

    def check_still(self) -> None:
        """No push of a member is on its way or unanswered."""
        for process in self.view.members:
            for shard in range(len(self.servers)):
                assert not self.lines.get((process, shard)), f"a push of {process} is on its way to {shard}"
        for process, at in self.at.items():
            assert self.stop_at.get(process, at + 1) <= at, f"{process} may push"

    # What happens.

    def send(self, sender: object, event: ResizeEvent) -> None:
        self.events.setdefault(sender, deque()).append(event)

    def waiting(self, shard: int) -> tuple[int, ...]:
        """Under SSP: who has pushed and is too far ahead of the slowest."""
        there = self.servers[shard]
        members = dict(self.view.members)
        slowest = min((there.get(rank, 0) for rank in members), default=0)
        return tuple(sorted(rank for rank in members if there.get(rank, 0) > slowest + AHEAD))

    def step_worker(self, process: tuple[int, int]) -> None:
        at = self.at[process]
        if self.pushed.get(process) == at:  # it waits for its answers
            for shard in range(len(self.servers)):
                if shard in self.down or self.lines.get((process, shard)):
                    return
                if self.servers[shard].get(process[0], 0) <= at or process[0] in self.waiting(shard):
                    return
            self.at[process] = at + 1
        elif self.stop_at.get(process, at + 1) <= at:
            if self.said.get(process) != at:
                self.said[process] = at
                change = self.machine.change
                self.send(process, WorkerHeld(change, *process, at))
        else:
            self.pushed[process] = at
            for shard in range(len(self.servers)):
                self.lines.setdefault((process, shard), deque()).append(at)

    def step_server(self, shard: int) -> None:
        if shard in self.down:
            return
        if self.views[shard] and self.draw.random() < 0.5:
            self.seen[shard] = self.views[shard].popleft().number
        lines = [line for (_, to), line in sorted(self.lines.items()) if to == shard and line]
        if lines:
            process = next(process for (process, to), line in self.lines.items() if line is lines[0] and to == shard)
            at = lines[0].popleft()
            self.servers[shard][process[0]] = max(self.servers[shard].get(process[0], 0), at + 1)
        if self.survey is not None:
            number = self.seen[shard]
            said = ShardStands(
                self.survey, shard, number, 0, 0, dict(self.servers[shard]), self.waiting(shard), holds=False
            )
            if self.told.get(shard) != said:
                self.told[shard] = said
                self.send(shard, said)
        if self.giving is not None and shard in self.to_give:
            self.to_give.discard(shard)
            self.send(shard, PartsGiven(self.giving, shard, "no space" if self.draw.random() < 0.05 else ""))

    def announce(self, members: tuple[tuple[int, int], ...]) -> None:
        self.view = View(self.view.number + 1, members)
        for shard in range(len(self.servers)):
            self.views[shard].append(self.view)

    def lose_worker(self) -> None:
        if len(self.view.members) < 2:
            return
        process = self.draw.choice(self.view.members)
        for kept in (self.at, self.pushed, self.stop_at, self.said):
            kept.pop(process, None)
        self.announce(tuple(member for member in self.view.members if member != process))

    def lose_server(self) -> None:
        shard = self.draw.randrange(len(self.servers))
        if shard in self.down:
            return
        self.down.add(shard)
        self.events.pop(shard, None)
        self.to_give.discard(shard)
        self.told.pop(shard, None)
        self.deliver(ServerDied(f"server {shard}"))

    def server_is_back(self, shard: int) -> None:
        """What it has forgotten is said again; `server_is_back` stands for its whole recovery."""
        self.down.discard(shard)
        self.views[shard].clear()
        self.seen[shard] = self.view.number

    def tell_situation(self) -> None:
        self.deliver(
            Situation(True, self.stopping or not self.view.members, False, self.checkpointing, not self.down, self.view)
        )

    def step(self) -> None:
        draw = self.draw.random()
        if draw < 0.35 and self.view.members:
            self.step_worker(self.draw.choice(self.view.members))
        elif draw < 0.7:
            self.step_server(self.draw.randrange(len(self.servers)))
        elif draw < 0.85:
            senders = [sender for sender, line in self.events.items() if line]
            if senders:
                self.deliver(self.events[self.draw.choice(senders)].popleft())
        elif draw < 0.93:
            self.tell_situation()
        elif draw < 0.96 and self.down:
            self.server_is_back(self.draw.choice(sorted(self.down)))
        elif draw < 0.97 and not self.machine.under_way:
            self.checkpointing = not self.checkpointing
        elif draw < 0.975 and self.wishes < 6:
            self.wishes += 1
            self.deliver(ServersWanted(self.draw.randint(1, 5), "somebody"))
        elif draw < 0.985 and self.faults:
            self.faults -= 1
            (self.lose_worker if self.draw.random() < 0.4 else self.lose_server)()
        elif draw < 0.99 and not self.machine.under_way and self.draw.random() < 0.3:
            new = (max((rank for rank, _ in self.at), default=0) + 1, 0)
            slowest = min(self.at.values(), default=0)
            self.at[new] = slowest
            for there in self.servers:
                there[new[0]] = slowest
            self.announce((*self.view.members, new))


def run_all(make: Callable[[], ServerResizer]) -> int:
    """How often servers were changed in all runs together."""
    return sum(run(seed, make()) for seed in range(40))


def run(seed: int, machine: ServerResizer) -> int:
    world = World(seed, machine, faults=6)
    world.machine.checks = True
    for _ in range(4000):
        world.step()
    world.faults, world.checkpointing = 0, False
    wishes = world.wishes
    for _ in range(20_000):
        world.step()
        world.checkpointing = False
        if len(world.answered) == world.wishes == max(wishes, 6):
            break
    assert len(world.answered) == world.wishes, f"nobody answers: {world.machine.phase}"
    before = dict(world.at)
    for _ in range(3000):
        world.step()
    assert any(world.at.get(process, 0) > at for process, at in before.items()), "nobody goes on"
    return world.moves


def test_random_runs_change_one_thing_at_a_time_and_end() -> None:
    assert run_all(lambda: ServerResizer(2)) > 60


class Hasty(ServerResizer):
    """Does not wait until every shard has heard who is there."""

    def drain(self, now: Situation) -> None:
        self.standing = {
            shard: ShardStands(
                said.change, shard, now.view.number, said.V, said.version, said.next, said.waiting, said.holds
            )
            for shard, said in self.standing.items()
        }
        super().drain(now)


class Stubborn(ServerResizer):
    """Goes on although a server has died."""

    def take(self, event: ResizeEvent) -> None:
        if not isinstance(event, ServerDied):
            super().take(event)


class Impatient(ServerResizer):
    """Begins while servers are restarted or a checkpoint is under way."""

    def on_situation(self, now: Situation) -> None:
        ready = Situation(
            now.begun, now.stopping, now.finishing, False, self.phase != "taking" or now.configured, now.view
        )
        super().on_situation(ready)


class Strict(ServerResizer):
    """Lets nobody go on whom others wait for."""

    def drain(self, now: Situation) -> None:
        super().drain(now)
        self.orders[:] = [order for order in self.orders if not isinstance(order, HoldWorker)]


@pytest.mark.parametrize("broken", [Hasty, Stubborn, Impatient, Strict])
def test_broken_machines_are_noticed(broken: type[ServerResizer]) -> None:
    with pytest.raises(AssertionError):
        run_all(lambda: broken(2))
