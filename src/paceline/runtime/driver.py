"""What both runtimes share: one step of a machine, carried out, and the one authority on membership.

`Seat` is the place a machine sits at in a runtime: it is told events, the machine says what to do, the step
goes into the trace, and a `Carrier` does it, action by action, in order. A runtime is two carriers (one for
workers, one for servers; a third where a policy has a scheduler) and a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.core.actions import AbortCompute, Action, Answer, Apply, Compute, Drop, Park, Reduce, Send, SetTimer, Wait
from paceline.core.events import (
    AckArrived,
    Event,
    HelloArrived,
    OfferArrived,
    ReplyArrived,
    TokenArrived,
    UpdateArrived,
)
from paceline.core.machine import Machine
from paceline.core.messages import Ack, Handle, Hello, Message, Node, Offer, Reply, Token, Update, View
from paceline.core.trace import Record

Recorder = Callable[[Record], None]


ORDERS: dict[type, str] = {
    Send: "send",
    Answer: "answer",
    Apply: "apply",
    Compute: "compute",
    Drop: "drop",
    Park: "park",
    SetTimer: "set_timer",
    AbortCompute: "abort_compute",
    Reduce: "reduce",
    Wait: "wait",
}
"""The method of a carrier that carries an action out."""


class NoSuchAction(AssertionError):
    """A machine ordered something its role cannot do."""


class Carrier(Protocol):
    """Carries out a machine's actions."""

    def compute(self, action: Compute) -> None: ...

    def send(self, action: Send) -> None: ...

    def apply(self, action: Apply) -> None: ...

    def drop(self, action: Drop) -> None: ...

    def answer(self, action: Answer) -> None: ...

    def park(self, action: Park) -> None: ...

    def set_timer(self, action: SetTimer) -> None: ...

    def abort_compute(self, action: AbortCompute) -> None: ...


class PeerCarrier(Protocol):
    """Carries out a peer's actions: it computes, sends, averages and steps."""

    def compute(self, action: Compute) -> None: ...

    def send(self, action: Send) -> None: ...

    def apply(self, action: Apply) -> None: ...

    def reduce(self, action: Reduce) -> None: ...

    def drop(self, action: Drop) -> None: ...

    def wait(self, action: Wait) -> None: ...


class WorkerCarrier:
    """Base of those that carry out a worker's actions: what a worker's machine never orders."""

    def abort_compute(self, action: AbortCompute) -> None:
        raise NoSuchAction(f"this worker cannot {action}: it has no way to give up a computation")

    def apply(self, action: Apply) -> None:
        raise NoSuchAction(f"a worker cannot {action}")

    def drop(self, action: Drop) -> None:
        raise NoSuchAction(f"a worker cannot {action}")

    def answer(self, action: Answer) -> None:
        raise NoSuchAction(f"a worker cannot {action}")

    def park(self, action: Park) -> None:
        raise NoSuchAction(f"a worker cannot {action}")


class ServerCarrier:
    """Base of those that carry out a shard's actions: what a shard's machine never orders."""

    def send(self, action: Send) -> None:
        raise NoSuchAction(f"a server cannot {action}: there is no scheduler")

    def compute(self, action: Compute) -> None:
        raise NoSuchAction(f"a server cannot {action}")

    def abort_compute(self, action: AbortCompute) -> None:
        raise NoSuchAction(f"a server cannot {action}")


class SchedulerCarrier:
    """Base of those that carry out a scheduler's actions: it only sends, and waits for its timers."""

    def park(self, action: Park) -> None:
        """Nothing to do: the worker waits by itself."""

    def compute(self, action: Compute) -> None:
        raise NoSuchAction(f"a scheduler cannot {action}")

    def apply(self, action: Apply) -> None:
        raise NoSuchAction(f"a scheduler cannot {action}")

    def drop(self, action: Drop) -> None:
        raise NoSuchAction(f"a scheduler cannot {action}")

    def answer(self, action: Answer) -> None:
        raise NoSuchAction(f"a scheduler cannot {action}")

    def abort_compute(self, action: AbortCompute) -> None:
        raise NoSuchAction(f"a scheduler cannot {action}")


class Seat:
    """A machine in its place: `tell` it what happened, and what it orders is done."""

    def __init__(
        self,
        node: Node,
        incarnation: int,
        machine: Machine,
        carrier: Carrier | PeerCarrier,
        record: Recorder | None,
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.machine = machine
        self.carrier = carrier
        self.record = record

    def tell(self, event: Event) -> None:
        self.carry_out(event, self.machine.handle(event))

    def carry_out(self, event: Event, actions: list[Action]) -> None:
        if self.record is not None:
            self.record(Record(self.node, self.incarnation, event, tuple(actions)))
        carrier = self.carrier
        for action in actions:
            getattr(carrier, ORDERS[type(action)])(action)


class Authority:
    """Numbers the views. There is one in a run: shards report, they never expel by themselves."""

    def __init__(self) -> None:
        self.number = 0
        self.members: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}
        """The last incarnation each rank had."""

    def next_incarnation(self, rank: int) -> int:
        """The incarnation the next process of this rank is to have."""
        self.incarnations[rank] = self.incarnations.get(rank, -1) + 1
        return self.incarnations[rank]

    def admit(self, joining: dict[int, int]) -> View:
        """The view with these (rank: incarnation) added."""
        self.members.update(joining)
        return self._next_view()

    def remove(self, *ranks: int) -> View:
        """The view without these; without any, the same members under a number of its own."""
        for rank in ranks:
            self.members.pop(rank, None)
        return self._next_view()

    def view(self) -> View:
        """The newest."""
        return View(self.number, tuple(sorted(self.members.items())))

    def _next_view(self) -> View:
        self.number += 1
        return self.view()


def handle_of(message: Message) -> Handle | None:
    """The parameters that travel with a message, if any do."""
    return message.handle if isinstance(message, Update | Offer | Reply) else None


def event_of(message: Message, at: float) -> Event:
    match message:
        case Update():
            return UpdateArrived(at, message)
        case Token():
            return TokenArrived(at, message)
        case Ack():
            return AckArrived(at, message)
        case Hello():
            return HelloArrived(at, message)
        case Offer():
            return OfferArrived(at, message)
        case Reply():
            return ReplyArrived(at, message)
        case _:
            raise NoSuchAction(f"nobody sends a peer {message}")
