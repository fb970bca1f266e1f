"""Short hands for tests that talk to one machine: `shard.push(0, 3)` instead of four nested constructors."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from paceline.core.actions import Action, Answer, Apply, Compute, Drop, Park, Send
from paceline.core.events import (
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    PushRejected,
    ViewChanged,
)
from paceline.core.machine import Machine
from paceline.core.messages import Handle, Members, Parameters, Pull, Push, View
from paceline.core.policy import CentralPolicy
from paceline.core.shard import Shard
from paceline.core.worker import Worker


def seeds(first: int, count: int) -> pytest.MarkDecorator:
    """So many `seeds` for random runs, from `first` on: a third of them in `make test`, the rest in `make test-ci`."""
    third = first + count // 3
    rest = pytest.param(range(third, first + count), marks=pytest.mark.ci)
    return pytest.mark.parametrize("seeds", [range(first, third), rest], ids=["a third", "the rest"])


class ShardAlone:
    """One shard of a run whose workers are all there, and have got their first parameters."""

    def __init__(self, policy: CentralPolicy, workers: int, rank: int = 0, started: bool = True, seed: int = 0) -> None:
        self.machine = policy.machine("server", rank, Members(workers, rank + 1), seed)
        assert isinstance(self.machine, Shard)
        self.shard: Shard = self.machine
        self.shard.checks = True
        self.versions: dict[int, int] = {}
        self.number = 0
        self.view(*range(workers))
        if started:
            for worker in range(workers):
                self.pull(worker, 0)

    def view(self, *ranks: int) -> list[Action]:
        """The next view: these ranks in their first life."""
        self.number += 1
        members = tuple((rank, 0) for rank in ranks)
        return self.shard.handle(ViewChanged(0.0, View(self.number, members)))

    def push(self, worker: int, iteration: int) -> list[Action]:
        handle = Handle(worker, 0, iteration, self.versions.get(worker, 0), 8)
        return self.shard.handle(PushArrived(0.0, Push(handle)))

    def reject(self, worker: int, iteration: int, reason: str) -> list[Action]:
        handle = Handle(worker, 0, iteration, self.versions.get(worker, 0), 8)
        return self.shard.handle(PushRejected(0.0, Push(handle), reason))

    def pull(self, worker: int, iteration: int) -> list[Action]:
        return self.note(self.shard.handle(PullArrived(0.0, Pull(worker, 0, iteration))))

    def iterate(self, worker: int, iteration: int) -> list[Action]:
        """What a worker does at the end of an iteration: push it, pull the next."""
        return self.note(self.push(worker, iteration)) + self.pull(worker, iteration + 1)

    def note(self, actions: list[Action]) -> list[Action]:
        for parameters in answers(actions):
            self.versions[parameters.worker] = parameters.version
        return actions

    @property
    def V(self) -> int:
        return self.shard.progress.V


class WorkerAlone:
    """One worker that a view has named; the test plays the shards."""

    def __init__(self, policy: CentralPolicy, servers: int = 2, rank: int = 0) -> None:
        self.machine = policy.machine("worker", rank, Members(4, servers), 0)
        assert isinstance(self.machine, Worker)
        self.worker: Worker = self.machine
        self.worker.checks = True
        self.servers = servers
        self.rank = rank

    def start(self) -> list[Action]:
        return self.worker.handle(ViewChanged(0.0, View(1, ((self.rank, 0),))))

    def answer(self, shard: int, iteration: int, version: int = 0, dropped: bool = False) -> list[Action]:
        parameters = Parameters(shard, self.rank, 0, iteration, version, dropped)
        return self.worker.handle(ParametersArrived(0.0, parameters))

    def answer_all(self, iteration: int, version: int = 0) -> list[Action]:
        return [action for shard in range(self.servers) for action in self.answer(shard, iteration, version)]

    def finish(self, iteration: int) -> list[Action]:
        return self.worker.handle(GradientReady(0.0, iteration, 0, (8,) * self.servers))


def answers(actions: list[Action]) -> list[Parameters]:
    return [action.parameters for action in actions if isinstance(action, Answer)]


def answered(actions: list[Action]) -> list[tuple[int, int]]:
    """(worker, iteration) of each answer, in order."""
    return [(parameters.worker, parameters.iteration) for parameters in answers(actions)]


def parked(actions: list[Action]) -> list[Park]:
    return [action for action in actions if isinstance(action, Park)]


def applied(actions: list[Action]) -> list[Apply]:
    return [action for action in actions if isinstance(action, Apply)]


def dropped(actions: list[Action]) -> list[Drop]:
    return [action for action in actions if isinstance(action, Drop)]


def computed(actions: list[Action]) -> list[int]:
    return [action.iteration for action in actions if isinstance(action, Compute)]


def sent(actions: list[Action]) -> list[tuple[int, Push | Pull]]:
    """(shard, message) of each message, in order."""
    return [(action.to.rank, action.message) for action in actions if isinstance(action, Send)]


def sources(apply: Apply) -> list[tuple[int, int]]:
    """(worker, iteration) of the gradients in a step."""
    return [(handle.source, handle.iteration) for handle in apply.handles]


def state_of(machine: Machine) -> dict[str, Any]:
    """Everything a machine remembers, deeply copied; what it was last asked to do is not part of it."""
    state = {}
    for field, value in vars(machine).items():
        if field not in ("actions",):
            state[field] = copy.deepcopy(vars(value) if hasattr(value, "__dict__") else value)
    return state
