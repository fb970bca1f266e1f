"""How other hosts come into a run and leave it: who gets which workers, and what is given up with a host."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.messages import Members
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.peers import PeerPlaces
from paceline.runtime.live.driver.processes import Workers
from paceline.runtime.live.driver.remote_hosts import RemoteHost, RemoteHosts
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.protocol import agent_messages


@dataclass(eq=False)
class HostArrivals:
    """Fills the places that agents offer, and counts on no process of a host that is gone."""

    hosts: RemoteHosts
    state: RunState
    members: Members
    places: PeerPlaces
    workers: Workers
    ended: Callable[[Child], None]
    """Collects a process that is no more."""
    due: Callable[[], set[int]]
    """The workers that will be started again."""
    say: Callable[[str], None]
    lost: dict[bytes, float] = field(default_factory=dict)
    """Hosts with workers that were given up, and when."""

    def welcome(self, host: RemoteHost, arrive: agent_messages.Arrive) -> None:
        name, home = host.name, self.hosts.home
        self.lost.pop(name, None)
        self.hosts.hosts[name] = host
        host.shards = arrive.ranks if not arrive.workers else ()
        if self.state.stopping or self.state.finishing:
            host.say(agent_messages.Over("the run is ending", 0))
            return
        config = (self.hosts.folder / "config").read_bytes()
        host.say(agent_messages.Welcome(config, self.state.begun, time.monotonic()))
        before = [rank for rank, its in home.items() if its.name == name]
        # Who only has the run's key takes nobody's place.
        wanted = () if self.hosts.meeting.join else arrive.ranks
        for place in range(arrive.workers):
            rank = wanted[place] if place < len(wanted) else self._free_rank(before)
            if not self.places.has(rank):
                continue
            self._replace(rank)
            host.ranks.append(rank)
            home[rank] = host
            self.workers.start(rank)
        if arrive.workers and not host.ranks:
            host.say(agent_messages.Over(self.places.full, 1))
            return
        missing = 0 if self.state.begun else self.members.workers - len(home)
        rest = f" ({missing} still to come)" if missing > 0 else ""
        self.say(f"{host} is there: {', '.join(f'worker {rank}' for rank in host.ranks) or 'for servers'}{rest}")

    def _replace(self, rank: int) -> None:
        """Another agent is for this worker now: the one it had, of another name, is not counted on any more."""
        before = self.hosts.home.get(rank)
        if before is not None:
            if self.hosts.is_there(before):
                self.give_up(before, "has been replaced")
            self.lost.pop(before.name, None)

    def _free_rank(self, before: list[int]) -> int:
        """A rank that nobody has: one that this host had before, if it can be, or one of a host that is gone."""
        taken = {child.rank for child in self.workers.live()}
        taken.update(rank for rank, home in self.hosts.home.items() if self.hosts.is_there(home))
        free: int = next(rank for rank in (*before, *range(len(taken) + 1)) if rank not in taken)
        return free

    def consider_dismissing(self, host: RemoteHost) -> None:
        """A host that joined, and whose workers have all failed: it is told so, and others may have its places."""
        if self.hosts.meeting.join and host.last_code and not host.children and not self.due().intersection(host.ranks):
            host.say(agent_messages.Over("its workers have failed", 1))
            self.forget(host)

    def give_up(self, host: RemoteHost, why: str) -> None:
        """Count on none of its processes any more."""
        del self.hosts.hosts[host.name]
        if not host.children and not self.due().intersection(host.ranks):
            return
        self.say(f"{host} {why}: its processes are given up until it is back")
        if host.ranks:
            self.lost[host.name] = time.monotonic()
        self._lose(host)

    def _lose(self, host: RemoteHost) -> None:
        for child in list(host.children.values()):
            child.is_lost, child.code = True, -signal.SIGKILL
            self.ended(child)

    def forget(self, host: RemoteHost) -> None:
        """It is gone for good: its places are nobody's."""
        self.hosts.hosts.pop(host.name, None)
        for rank in [rank for rank, home in self.hosts.home.items() if home is host]:
            del self.hosts.home[rank]
        self._lose(host)

    def may_come_back(self, ended_well: bool) -> bool:
        """Nobody is there to train, but the first have not come, or somebody who was lost may come back."""
        if not self.state.begun:
            return True
        if self.state.stopping or ended_well or not self.lost:
            return False
        return time.monotonic() - max(self.lost.values()) < self.hosts.meeting.away_s
