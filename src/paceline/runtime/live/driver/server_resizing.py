"""Another number of servers while a run goes on: does what the machine orders (`core/control/server_resizing.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

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
from paceline.core.events import ServersChanged
from paceline.core.messages import Members
from paceline.errors import ConfigError
from paceline.run import ServerChange
from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.coordinators import Coordinators
from paceline.runtime.live.driver.durability import Durability
from paceline.runtime.live.driver.health import HealthMonitor
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.driver.remote_hosts import RemoteHosts
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.protocol import resizing_messages
from paceline.runtime.live.server import shard_transfer
from paceline.tensors.assignment import Assignment, moved, reassign, size


@dataclass(eq=False)
class ResizeLimits:
    """Which numbers of servers there can be in this run."""

    state: RunState
    workers: int
    servers: Servers
    durability: Durability
    hosts: RemoteHosts | None

    def refusal(self, servers: int) -> str:
        """Why there cannot be so many servers in this run; "" if there can."""
        policy = self.state.model.policy
        if not self.servers.count:
            return f"{policy.name} has no servers"
        if not policy.servers_may_change:
            return f"under {policy.name} a scheduler counts on the servers it began with: their number is fixed"
        if self.durability.how is not None:
            return "the logs of a durable run are those of the servers it began with: their number is fixed"
        hosts = self.hosts
        if hosts is not None and hosts.meeting.spread and servers > hosts.places_for_servers:
            return f"the hosts of this run have places for {hosts.places_for_servers} servers"
        try:
            self.reassigned(servers)
            policy.validate(Members(self.workers, servers))
        except ConfigError as error:
            return str(error)
        return ""

    def reassigned(self, servers: int) -> Assignment:
        return reassign(self.state.model.layout, self.servers.assignment, servers)


@dataclass(eq=False)
class ServerResizing:
    """Tells the machine what happens, and servers and workers what it orders."""

    machine: ServerResizer
    state: RunState
    roster: Roster
    servers: Servers
    messenger: Messenger
    limits: ResizeLimits
    coordinators: Coordinators
    health: HealthMonitor
    checkpointer: Checkpointer | None
    folder: Path
    over: Callable[[], None]
    """Called when a change is made or given up."""
    say: Callable[[str], None]
    changes: list[ServerChange] = field(default_factory=list)
    began_s: float = 0.0
    still_s: float = 0.0
    order: resizing_messages.Give | None = None
    last: ServersChanged | None = None
    """The newest change that was made, for workers that join."""
    new: set[int] = field(default_factory=set)
    """Servers that are to start with what others gave, not from a checkpoint."""

    @property
    def under_way(self) -> bool:
        return self.machine.under_way

    @property
    def taking(self) -> bool:
        """Whether the new servers are there, and take their parts."""
        return self.machine.phase == "taking"

    # What happens.

    def want(self, message: resizing_messages.Want) -> None:
        self.deliver(ServersWanted(message.servers, message.requester, message.entry))

    def take_held(self, message: resizing_messages.Held) -> None:
        self.deliver(WorkerHeld(message.change, message.rank, message.incarnation, message.iteration))

    def take_standing(self, message: resizing_messages.Standing) -> None:
        if message.change == self.machine.change and not message.shard and message.hyper is not None:
            self.health.hyper = message.hyper  # new servers start with what schedulers have changed
        self.deliver(
            ShardStands(
                message.change, message.shard, message.view, message.V, message.version, message.next,
                message.waiting, message.holds,
            )
        )  # fmt: skip

    def take_gave(self, message: resizing_messages.Gave) -> None:
        self.deliver(PartsGiven(message.number, message.shard, message.error))

    def server_died(self, name: str) -> None:
        self.deliver(ServerDied(name))

    def tick(self) -> None:
        if self.under_way:
            self.health.excuse(rank for rank, _ in self.machine.held)
        if self.machine.idle:
            return
        checkpointing = self.checkpointer is not None and self.checkpointer.under_way is not None
        stopping = self.state.stopping or not self.roster.members
        held_back = frozenset(self.coordinators.waits)
        self.deliver(
            Situation(
                self.state.begun, stopping, self.state.finishing, checkpointing, self.servers.all_configured,
                self.roster.view(), held_back,
            )
        )  # fmt: skip

    def reslice_for(self, shard: int) -> resizing_messages.Reslice | None:
        """What a server that starts now is to start with, if it is a new one."""
        if shard not in self.new or self.order is None or self.last is None:
            return None
        return resizing_messages.Reslice(self.order, self.last)

    # What is ordered.

    def deliver(self, event: ResizeEvent) -> None:
        for order in self.machine.handle(event):
            self.execute(order)

    def execute(self, order: ResizeOrder) -> None:
        match order:
            case CheckChange(servers):
                refusal = self.limits.refusal(servers)
                if refusal:
                    self.say(f"the number of servers stays {self.servers.count}: {refusal}")
                self.deliver(ChangeChecked(refusal))
            case SurveyServers(change):
                self.began_s = time.monotonic() if change is not None else self.began_s
                self.servers.tell_all(resizing_messages.Survey(change))
            case HoldWorker(change, rank, incarnation, at):
                self.messenger.to_worker(rank, incarnation, resizing_messages.Hold(change, at))
            case GiveParts(change, servers):
                self.still_s = time.monotonic()
                self.order = resizing_messages.Give(change, self.servers.assignment, self.limits.reassigned(servers))
                self.servers.tell_all(self.order)
            case SwitchServers():
                self._switch(order)
            case ResumeWorkers(_, workers):
                self._resume(workers)
            case AbandonChange(change, servers, why):
                self.say(f"the change to {servers} servers is given up: {why}")
                shard_transfer.clear(self.folder, change)
                self.over()
            case AnswerWish(requester, servers, made, refusal):
                text = refusal or (str(self.changes[-1]) if made else f"there are {servers} servers already")
                if requester:
                    self.messenger.answer(requester, resizing_messages.Outcome(text, refused=bool(refusal)))
            case _:
                assert_never(order)

    def _switch(self, switch: SwitchServers) -> None:
        """Everything that moves lies in the run's folder: from here on there are the new servers."""
        order, itemsize, now = self.order, self.state.model.layout.itemsize, self.state.now()
        assert order is not None
        nbytes = tuple(size(part) * itemsize for part in order.after)
        self.last = ServersChanged(now, now, nbytes, switch.versions, self.roster.view(), switch.V, switch.next)
        self.coordinators.change_servers(self.last)
        self.new = set(range(len(order.before), len(order.after)))
        self.servers.change(order.after, resizing_messages.Reslice(order, self.last))

    def _resume(self, workers: tuple[tuple[int, int], ...]) -> None:
        """All servers have their parts: the workers go on."""
        order = self.order
        assert order is not None
        assert self.last is not None
        resliced = resizing_messages.Resliced(order.after, self.servers.current_endpoints, self.last)
        for rank, incarnation in workers:
            self.messenger.to_worker(rank, incarnation, resliced)
        now = time.monotonic()
        self.new.clear()
        shard_transfer.clear(self.folder, order.number)
        share = moved(order.before, order.after) / max(sum(size(part) for part in order.after), 1)
        change = ServerChange(
            self.last.at, len(order.before), len(order.after), share, now - self.began_s, now - self.still_s
        )
        self.changes.append(change)
        self.say(str(change))
        self.over()
        if self.checkpointer is not None and not self.state.finishing:
            self.checkpointer.begin()
