"""What both runtimes share: one step of a machine, carried out, and the one authority on membership.

A `MachineRunner` tells a machine what happened, and has an executor do what the machine orders: the method named after
each action, in order. A runtime is an executor for each role, and a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from paceline.core.actions import Action
from paceline.core.events import Event
from paceline.core.machine import Machine, method_named_after
from paceline.core.messages import Handle, Message, Node, Offer, Reply, Update, View
from paceline.core.trace import Record

Recorder = Callable[[Record], None]

METHODS = {action: method_named_after(action) for action in get_args(Action)}
"""The method of an executor that carries an action out."""


class NoSuchAction(AssertionError):
    """A machine ordered something its role cannot do."""


class MachineRunner:
    """One machine of a runtime: `deliver` it what happened, and the executor carries out what it orders."""

    def __init__(
        self, node: Node, incarnation: int, machine: Machine, executor: object, record: Recorder | None
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.machine = machine
        self.executor = executor
        self.record = record

    def deliver(self, event: Event) -> None:
        """Has the machine handle an event. (It repeats `execute`, since simulations spend their time here.)"""
        actions = self.machine.handle(event)
        if self.record is not None:
            self.record(Record(self.node, self.incarnation, event, tuple(actions)))
        executor = self.executor
        for action in actions:
            getattr(executor, METHODS[type(action)])(action)

    def execute(self, event: Event, actions: list[Action]) -> None:
        """Records a step of the machine, and does what it ordered."""
        if self.record is not None:
            self.record(Record(self.node, self.incarnation, event, tuple(actions)))
        for action in actions:
            self.execute_one(action)

    def execute_one(self, action: Action) -> None:
        """Does something that the machine ordered before."""
        getattr(self.executor, METHODS[type(action)])(action)


class Membership:
    """The one authority on membership numbers the views: shards report, they never expel by themselves."""

    def __init__(self) -> None:
        self.number = 0
        self.members: dict[int, int] = {}
        self.finished: set[int] = set()
        """The ranks that have done their iterations, and have not joined again since."""
        self.incarnations: dict[int, int] = {}
        """The last incarnation each rank had."""

    def next_incarnation(self, rank: int) -> int:
        """Returns the incarnation that the next process of this rank is to have."""
        self.incarnations[rank] = self.incarnations.get(rank, -1) + 1
        return self.incarnations[rank]

    def admit(self, joining: dict[int, int]) -> View:
        """Makes the view with these (rank: incarnation) added."""
        self.members.update(joining)
        self.finished.difference_update(joining)
        return self._next_view()

    def finish(self, rank: int) -> View:
        """Makes the view without this worker, which has done its iterations and keeps its share of N."""
        self.finished.add(rank)
        return self.remove(rank)

    def remove(self, *ranks: int) -> View:
        """Makes the view without these lost ranks; without any, the same members under a new number."""
        for rank in ranks:
            self.members.pop(rank, None)
        return self._next_view()

    def view(self) -> View:
        """Returns the newest view."""
        return View(self.number, tuple(sorted(self.members.items())), tuple(sorted(self.finished)))

    def _next_view(self) -> View:
        self.number += 1
        return self.view()


def handle_of(message: Message) -> Handle | None:
    """Returns the handle of the parameters that travel with a message, if any do."""
    return message.handle if isinstance(message, Update | Offer | Reply) else None
