"""Another number of servers while a run goes on: the driver's side (docs/sharding.md, docs/decisions/0019).

    holding    every worker stops before its next push; those that others wait for are let go on, one iteration at a
               time, until nobody waits and no gradient is held on any shard
    giving     servers write what others are to have into the run's folder; nothing has changed yet
    taking     new servers are started, each takes its part; removed ones end; then the workers go on

A worker that dies at any point leaves the view, and everything goes on without it. If a server dies before
all have given, the change is given up, the server restarted as ever, and then it is begun again; if it dies
later it is restarted from the last checkpoint as one of the new servers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from paceline.core.events import ServersChanged
from paceline.core.messages import Members
from paceline.errors import ConfigError
from paceline.run import ServerChange
from paceline.runtime.live import wire
from paceline.runtime.live.server import moving
from paceline.tensors.assignment import Assignment, moved, reassign, size

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

Phase = Literal["", "holding", "giving", "taking"]


class Reslicing:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.phase: Phase = ""
        self.queue: list[wire.Want] = []
        """What was asked for, one after the other; the first is what is being done."""
        self.entries_done: set[int] = set()
        """Entries of the scenario that were asked for."""
        self.number = 0
        """Of this change."""
        self.began_s = self.still_s = 0.0
        self.held: dict[tuple[int, int], int] = {}
        """(rank, incarnation) of the workers that stand still, and the iteration they would push."""
        self.standing: dict[int, wire.Standing] = {}
        """How everybody stands on each shard."""
        self.given: set[int] = set()
        self.order: wire.Give | None = None
        self.last: ServersChanged | None = None
        """The newest change that was made, for workers that join."""
        self.new: set[int] = set()
        """Servers that are to start with what others gave, not from a checkpoint."""

    @property
    def under_way(self) -> bool:
        return self.phase != ""

    # What is asked for.

    def want(self, message: wire.Want) -> None:
        """Somebody asks; it is looked at when everything asked for before is done, and not before the run begins."""
        if message.entry is None or message.entry not in self.entries_done:
            self.queue.append(message)
        if message.entry is not None:
            self.entries_done.add(message.entry)

    def refusal(self, servers: int) -> str:
        """Why there cannot be so many servers in this run; "" if there can."""
        policy = self.driver.policy
        assert policy is not None
        if not self.driver.servers.count:
            return f"{policy.name} has no servers"
        if not policy.servers_may_change:
            return f"under {policy.name} a scheduler counts on the servers it began with: their number is fixed"
        if self.driver.lasting.how is not None:
            return "the logs of a durable run are those of the servers it began with: their number is fixed"
        hosts = self.driver.hosts
        if hosts is not None and hosts.meeting.spread and servers > hosts.places_for_servers:
            return f"the hosts of this run have places for {hosts.places_for_servers} servers"
        try:
            self._reassigned(servers)
            policy.validate(Members(self.driver.members.workers, servers))
        except ConfigError as error:
            return str(error)
        return ""

    def _reassigned(self, servers: int) -> Assignment:
        lead = self.driver.lead
        assert lead is not None
        assert lead.layout is not None
        return reassign(lead.layout, self.driver.servers.assignment, servers)

    # How it is done.

    def tick(self) -> None:
        driver = self.driver
        if self.phase in ("holding", "giving") and (driver.stopping or not driver.authority.members):
            self.give_up("the run is ending")
            self._answer("the run is ending", refused=True)
        if self.under_way:
            now = time.monotonic()  # whoever stands still because it was told to is not stuck
            driver.watchman.moved_s.update((rank, now) for rank, _ in self.held)
        self.consider()
        if self.phase == "taking" and driver.servers.all_configured:
            self._done()
        keeping = driver.keeper is not None and driver.keeper.under_way is not None
        ending = driver.asked_to_finish or driver.stopping or not driver.authority.members
        ready = driver.begun and driver.servers.all_configured and not keeping and not ending
        if self.queue and not self.under_way and ready:
            self._begin()

    def _begin(self) -> None:
        driver = self.driver
        wanted = self.queue[0].servers
        if refusal := self.refusal(wanted):
            driver.say(f"the number of servers stays {driver.servers.count}: {refusal}")
            self._answer(refusal, refused=True)
            return
        if wanted == driver.servers.count:
            self._answer(f"there are {driver.servers.count} servers already", refused=False)
            return
        self.phase = "holding"
        self.number += 1
        self.began_s = time.monotonic()
        self.held.clear()
        self.standing.clear()
        self.given.clear()
        driver.servers.tell_all(wire.Survey(self.number))
        for rank, incarnation in driver.authority.members.items():
            driver.tell_worker(rank, incarnation, wire.Hold(self.number, 0))

    def take_held(self, message: wire.Held) -> None:
        if message.change == self.number:
            self.held[message.rank, message.incarnation] = message.iteration

    def take_standing(self, message: wire.Standing) -> None:
        if message.change == self.number:
            self.standing[message.shard] = message

    def consider(self) -> None:
        """Everybody is to stand still: is anything under way, and who must go on? Asked whenever anything happened."""
        driver = self.driver
        members = driver.authority.members.items()
        if self.phase != "holding" or len(self.standing) < driver.servers.count or not members:
            return
        shards = self.standing.values()
        waiting = {worker for shard in shards for worker in shard.waiting}
        if driver.scheduling is not None:
            waiting |= driver.scheduling.waits.keys()
        if any(member not in self.held and member[0] not in waiting for member in members):
            return
        if any(shard.view != driver.authority.number for shard in shards):
            return  # a push of somebody who is gone may still count there
        still = all(member in self.held for member in members)
        seen = all(
            shard.next.get(rank, 0) >= self.held.get((rank, incarnation), 0)
            for shard in shards
            for rank, incarnation in members
        )
        if still and seen and not any(shard.waiting or shard.holds for shard in shards):
            self._order_to_give()
        elif still and not seen:
            return  # a shard has not told yet of what it has answered
        else:
            slowest = min((self.held[member] for member in members if member in self.held), default=None)
            if slowest is None:
                return  # all wait for what is on its way to them
            for member in members:
                if self.held.get(member) == slowest:
                    del self.held[member]
                    driver.tell_worker(*member, wire.Hold(self.number, slowest + 1))

    def _order_to_give(self) -> None:
        self.phase = "giving"
        self.still_s = time.monotonic()
        self.order = wire.Give(self.number, self.driver.servers.assignment, self._reassigned(self.queue[0].servers))
        self.driver.servers.tell_all(self.order)

    def take_gave(self, message: wire.Gave) -> None:
        if self.phase != "giving" or message.number != self.number:
            return
        if message.error:
            why = f"server {message.shard} cannot give its part away: {message.error}"
            self.give_up(why)
            self._answer(why, refused=True)
            return
        self.given.add(message.shard)
        if len(self.given) == self.driver.servers.count:
            self._switch()

    def _switch(self) -> None:
        """Everything that moves lies in the run's folder: from here on there are the new servers."""
        driver, order = self.driver, self.order
        assert order is not None
        self.phase = "taking"
        layout = driver.lead.layout if driver.lead is not None else None
        assert layout is not None
        shards = [self.standing[shard] for shard in sorted(self.standing)]
        least = {
            rank: min(shard.next[rank] for shard in shards if rank in shard.next)
            for rank in sorted({rank for shard in shards for rank in shard.next})
        }
        now = time.monotonic() - driver.epoch_s
        self.last = ServersChanged(
            now,
            now,
            tuple(size(part) * layout.itemsize for part in order.after),
            tuple(shard.version for shard in shards),
            driver.authority.view(),
            min(shard.V for shard in shards),
            tuple(least.items()),
        )
        hyper = shards[0].hyper
        if hyper is not None:
            driver.watchman.hyper = hyper
        if driver.scheduling is not None:
            driver.scheduling.change_servers(self.last)
        self.new = set(range(len(order.before), len(order.after)))
        driver.servers.change(order.after, wire.Reslice(order, self.last))

    def reslice_for(self, shard: int) -> wire.Reslice | None:
        """What a server that starts now is to start with, if it is a new one."""
        if shard not in self.new or self.order is None or self.last is None:
            return None
        return wire.Reslice(self.order, self.last)

    def _done(self) -> None:
        """All servers have their parts: the workers go on."""
        driver, order = self.driver, self.order
        assert order is not None
        assert self.last is not None
        resliced = wire.Resliced(order.after, driver.servers.doors_now, self.last)
        for rank, incarnation in driver.authority.members.items():
            driver.tell_worker(rank, incarnation, resliced)
        now = time.monotonic()
        self.phase = ""
        self.new.clear()
        moving.clear(driver.folder.path, self.number)
        total = sum(size(part) for part in order.after)
        share = moved(order.before, order.after) / max(total, 1)
        change = ServerChange(
            self.last.at, len(order.before), len(order.after), share, now - self.began_s, now - self.still_s
        )
        driver.changes.append(change)
        driver.say(str(change))
        self._answer(str(change), refused=False)
        driver.admission.admit_waiting()
        if driver.keeper is not None and not driver.asked_to_finish:
            driver.keeper.begin()

    def _answer(self, text: str, refused: bool) -> None:
        """What was being done is over: tell who asked for it."""
        peer = self.queue.pop(0).peer
        if peer:
            self.driver.listener.send(peer.encode(), wire.encode(wire.Outcome(text, refused)))

    def server_died(self, name: str) -> None:
        """Before all have given nothing has changed yet: go on as before, and begin again when it is back."""
        if self.phase in ("holding", "giving"):
            self.give_up(f"{name} died; it is begun again when that is back")

    def give_up(self, why: str) -> None:
        driver = self.driver
        self.phase = ""
        driver.say(f"the change to {self.queue[0].servers} servers is given up: {why}")
        moving.clear(driver.folder.path, self.number)
        driver.servers.tell_all(wire.Survey(None))
        for rank, incarnation in driver.authority.members.items():
            driver.tell_worker(rank, incarnation, wire.Hold(self.number, None))
        driver.admission.admit_waiting()
