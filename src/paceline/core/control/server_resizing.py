"""Another number of servers while a run goes on: what has to happen in which order (docs/decisions/0019).

    holding    every worker stops before its next push; those that others wait for are let go on, one iteration at a
               time, until nobody waits and no gradient is held on any shard
    giving     servers write what others are to have; nothing has changed yet
    taking     there are the new servers, and each takes its part; then the workers go on

Wishes are looked at one after the other, and only while all servers are configured and no checkpoint is under way. A
worker that dies at any point leaves the view, and everything goes on without it. If a server dies before all have
given, the change is given up, and begun again when all are configured; if it dies later it is restarted as one of the
new servers, and the change is made when it is there.

What holds for the moment (`Situation`) is told again and again while there is something to do. Nothing is begun, given
or finished but on such news, since workers and servers may have gone since the last.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, assert_never

from msgspec import Struct

from paceline.core.control.machine import ControlMachine
from paceline.core.machine import require
from paceline.core.messages import View

Phase = Literal["", "checking", "holding", "giving", "taking"]
Process = tuple[int, int]
"""A worker's rank and its incarnation."""
ENDING = "the run is ending"


class ServersWanted(Struct, frozen=True):
    """Somebody wants so many servers: `requester` is to be told what came of it, `entry` is the scenario's."""

    servers: int
    requester: str = ""
    entry: int | None = None


class ChangeChecked(Struct, frozen=True):
    """The answer to `CheckChange`: why there cannot be so many, "" if there can."""

    refusal: str


class Situation(Struct, frozen=True):
    """What holds at this moment."""

    begun: bool
    stopping: bool
    """The workers are to end, or all are gone."""
    finishing: bool
    """The servers are to end."""
    checkpointing: bool
    configured: bool
    """All servers are."""
    view: View
    held_back: frozenset[int] = frozenset()
    """Workers that a scheduler makes wait."""

    @property
    def ready(self) -> bool:
        """Whether a change can be begun."""
        return self.begun and self.configured and not (self.checkpointing or self.stopping or self.finishing)


class WorkerHeld(Struct, frozen=True):
    """This worker stands still before its push of `iteration`."""

    change: int
    worker: int
    incarnation: int
    iteration: int


class ShardStands(Struct, frozen=True):
    """How all workers stand on a shard: which it makes wait, and whether gradients wait there for others."""

    change: int
    shard: int
    view: int
    V: int
    version: int
    next: dict[int, int]
    waiting: tuple[int, ...]
    holds: bool


class PartsGiven(Struct, frozen=True):
    """A server has written what others are to have, or could not."""

    change: int
    shard: int
    error: str


class ServerDied(Struct, frozen=True):
    name: str


class CheckChange(Struct, frozen=True):
    """Say at once whether there can be so many servers (`ChangeChecked`)."""

    servers: int


class SurveyServers(Struct, frozen=True):
    """Have all servers tell how everybody stands on them; None: no more."""

    change: int | None


class HoldWorker(Struct, frozen=True):
    """Have this worker stand still before it pushes `at` or anything later; None: it goes on."""

    change: int
    worker: int
    incarnation: int
    at: int | None


class GiveParts(Struct, frozen=True):
    """Have all servers write what others are to have."""

    change: int
    servers: int


class SwitchServers(Struct, frozen=True):
    """From here on there are the new servers. The rest says where the old ones have come to."""

    change: int
    servers: int
    versions: tuple[int, ...]
    V: int
    next: tuple[tuple[int, int], ...]
    """The least iteration that each worker has not done on some shard."""


class ResumeWorkers(Struct, frozen=True):
    """All servers have their parts: tell these workers to go on with them."""

    change: int
    workers: tuple[Process, ...]


class AbandonChange(Struct, frozen=True):
    """The change is given up; nothing has changed."""

    change: int
    servers: int
    why: str


class AnswerWish(Struct, frozen=True):
    """Tell who wanted so many servers that they are there (`made`), have been, or why they will not be."""

    requester: str
    servers: int
    made: bool
    refusal: str


ResizeEvent = ServersWanted | ChangeChecked | Situation | WorkerHeld | ShardStands | PartsGiven | ServerDied
ResizeOrder = (
    CheckChange | SurveyServers | HoldWorker | GiveParts | SwitchServers | ResumeWorkers | AbandonChange | AnswerWish
)


class ServerResizer(ControlMachine[ResizeEvent, ResizeOrder]):
    """Changes the number of servers, one wish after the other."""

    def __init__(self, servers: int) -> None:
        super().__init__()
        self.servers = servers
        self.phase: Phase = ""
        self.wishes: deque[ServersWanted] = deque()
        """The first is what is being done."""
        self.entries: set[int] = set()
        """Entries of the scenario that were wished for."""
        self.change = 0
        """The number of this change, so that what was said of one is not taken for another."""
        self.members: tuple[Process, ...] = ()
        self.held: dict[Process, int] = {}
        """The workers that stand still, and the iteration they would push."""
        self.standing: dict[int, ShardStands] = {}
        self.given: set[int] = set()

    @property
    def under_way(self) -> bool:
        return self.phase in ("holding", "giving", "taking")

    @property
    def idle(self) -> bool:
        """Whether the situation does not matter now."""
        return not self.wishes

    def take(self, event: ResizeEvent) -> None:
        match event:
            case ServersWanted():
                self.on_servers_wanted(event)
            case Situation():
                self.on_situation(event)
            case ChangeChecked():
                self.on_change_checked(event)
            case WorkerHeld():
                if event.change == self.change:
                    self.held[event.worker, event.incarnation] = event.iteration
            case ShardStands():
                if event.change == self.change:
                    self.standing[event.shard] = event
            case PartsGiven():
                self.on_parts_given(event)
            case ServerDied():
                if self.phase in ("holding", "giving"):
                    self.abandon(f"{event.name} died; it is begun again when that is back")
            case _:
                assert_never(event)

    def on_servers_wanted(self, event: ServersWanted) -> None:
        if event.entry is None or event.entry not in self.entries:
            self.wishes.append(event)
        if event.entry is not None:
            self.entries.add(event.entry)

    def on_situation(self, now: Situation) -> None:
        self.members = now.view.members
        if self.phase in ("holding", "giving") and now.stopping:
            self.abandon(ENDING)
            self.answer(refusal=ENDING)
        if self.phase == "holding":
            self.drain(now)
        elif self.phase == "taking" and now.configured:
            self.phase = ""
            self.orders.append(ResumeWorkers(self.change, self.members))
            self.answer(made=True)
        elif self.phase == "" and self.wishes and now.ready:
            self.phase = "checking"
            self.orders.append(CheckChange(self.wishes[0].servers))

    def on_change_checked(self, event: ChangeChecked) -> None:
        if self.phase != "checking":
            return
        self.phase = ""
        if event.refusal or self.wishes[0].servers == self.servers:
            self.answer(refusal=event.refusal)
            return
        self.phase = "holding"
        self.change += 1
        self.held.clear()
        self.standing.clear()
        self.given.clear()
        self.orders.append(SurveyServers(self.change))
        self.orders += [HoldWorker(self.change, *member, 0) for member in self.members]

    def drain(self, now: Situation) -> None:
        """Lets what is under way come to its end, and then has the servers give their parts.

        While somebody waits or a shard holds a gradient, the slowest of the held workers go on for one iteration.
        """
        members, shards = self.members, self.standing.values()
        if len(self.standing) < self.servers:
            return
        waiting = now.held_back.union(*(shard.waiting for shard in shards))
        if any(member not in self.held and member[0] not in waiting for member in members):
            return
        if any(shard.view != now.view.number for shard in shards):
            return  # a push of somebody who is gone may still count there
        still = all(member in self.held for member in members)
        seen = all(
            shard.next.get(rank, 0) >= self.held.get((rank, incarnation), 0)
            for shard in shards
            for rank, incarnation in members
        )
        if still and not seen:
            return  # a shard has not told yet of what it has answered
        if still and not any(shard.waiting or shard.holds for shard in shards):
            self.phase = "giving"
            self.orders.append(GiveParts(self.change, self.wishes[0].servers))
            return
        slowest = min((self.held[member] for member in members if member in self.held), default=None)
        for member in members:
            if slowest is not None and self.held.get(member) == slowest:
                del self.held[member]
                self.orders.append(HoldWorker(self.change, *member, slowest + 1))

    def on_parts_given(self, event: PartsGiven) -> None:
        if self.phase != "giving" or event.change != self.change:
            return
        if event.error:
            why = f"server {event.shard} cannot give its part away: {event.error}"
            self.abandon(why)
            self.answer(refusal=why)
            return
        self.given.add(event.shard)
        if len(self.given) < self.servers:
            return
        self.phase = "taking"
        self.servers = self.wishes[0].servers
        shards = [self.standing[shard] for shard in sorted(self.standing)]
        ranks = sorted({rank for shard in shards for rank in shard.next})
        least = tuple((rank, min(shard.next[rank] for shard in shards if rank in shard.next)) for rank in ranks)
        versions = tuple(shard.version for shard in shards)
        V = min(shard.V for shard in shards)
        self.orders.append(SwitchServers(self.change, self.servers, versions, V, least))

    def abandon(self, why: str) -> None:
        """Goes on as before, with what is wished for still to be done."""
        self.phase = ""
        self.orders.append(SurveyServers(None))
        self.orders += [HoldWorker(self.change, *member, None) for member in self.members]
        self.orders.append(AbandonChange(self.change, self.wishes[0].servers, why))

    def answer(self, made: bool = False, refusal: str = "") -> None:
        wish = self.wishes.popleft()
        self.orders.append(AnswerWish(wish.requester, wish.servers, made, refusal))

    def check(self) -> None:
        require(not self.phase or bool(self.wishes), f"{self.phase}, and nobody has wished for anything")
        require(self.given <= set(range(self.servers)) or self.phase != "giving", f"{self.given} have given")
