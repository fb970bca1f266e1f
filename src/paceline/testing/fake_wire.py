"""What all random runs have: a clock, links that are first in, first out, and machines that are told events."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Generic, TypeVar

from paceline.core.actions import Action
from paceline.core.events import Event
from paceline.core.machine import Machine
from paceline.core.messages import Message, Node
from paceline.core.trace import Header, Record
from paceline.testing.story import PolicyBroken, Story

Link = TypeVar("Link")


class FakeWire(Generic[Link]):
    """What is in flight between machines. Each link has its own pace, and so has whoever computes."""

    def __init__(self, header: Header) -> None:
        self.story = Story(header)
        self.random = Random(header.seed)
        self.now = 0.0
        self.order = count()
        self.flight: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.links: defaultdict[Link, deque[Message]] = defaultdict(deque)
        """What is on its way, by link."""
        self.slowness = self.random.choice((0.1, 0.5, 2.0))
        self.pace: defaultdict[Any, float] = defaultdict(lambda: self.random.choice((0.3, 1.0, 1.0, 8.0)))
        self.faults = False
        self.weighted = False
        """Whether gradients stand for unequal numbers of samples."""
        self.samples = Random(f"weights {header.seed}")
        """Draws weights apart, so that the rest of a run is the same with and without."""

    def run(self, troubles: Sequence[tuple[int, Callable[[], None]]], most: int) -> None:
        """Delivers until nothing is in flight. Each of the troubles comes after so many deliveries."""
        for done in count():
            for when, trouble in troubles:
                if when == done:
                    trouble()
            if not self.flight or done > most:
                break
            self.now, _, deliver, what = heappop(self.flight)
            deliver(*what)
        self.story.expect(not self.flight, "hang", "the run does not come to an end")

    def later(self, delay: float, deliver: Callable[..., None], *what: Any) -> None:
        heappush(self.flight, (self.now + delay, next(self.order), deliver, what))

    def delay(self) -> float:
        return self.random.expovariate(1 / self.slowness)

    def weigh(self) -> float:
        """Returns the weight of the next gradient."""
        return self.samples.choice((0.5, 8.0, 8.0, 32.0)) if self.weighted else 1.0

    def send(self, link: Link, message: Message) -> None:
        self.links[link].append(message)
        self.later(self.delay() * self.pace[link], self.deliver, link)

    def deliver(self, link: Link) -> None:
        """Delivers the oldest message of a link, unless it was cut off."""
        raise NotImplementedError

    def cut(self, link: Link) -> None:
        """Loses what was sent last on a link, a random part of what is on its way."""
        sent = self.links[link]
        for _ in range(self.random.randint(0, len(sent))):
            sent.pop()

    def tell(self, machine: Machine, node: Node, incarnation: int, event: Event, recorded: bool = True) -> list[Action]:
        """Tells a machine an event, and returns what it orders. Whatever it raises is rule *machine*."""
        self.story.counts["deliveries"] += 1
        records = self.story.trace.records
        try:
            actions = machine.handle(event)
        except Exception as error:
            records.append(Record(node, incarnation, event, ()))
            raise PolicyBroken("machine", f"{node}: {type(error).__name__}: {error}", self.story) from error
        if recorded:
            records.append(Record(node, incarnation, event, tuple(actions)))
        return actions
