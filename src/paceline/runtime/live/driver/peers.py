"""The driver's side of a run without servers: views go to the peers, and they are let go when all are done.

A peer that has done its iterations stays a member until all are done, and its process stays too: as in virtual time
others still average what it has sent, and it answers them. Then a last view, without anybody, lets all go. If the
script gives peers unequal numbers of iterations, one may come to wait for what a peer that is done never sends; it says
so, and that peer leaves then. Slower ones may not have averaged all it had sent; that is lost to them, as when somebody
crashes: who waits would have to wait for all of them otherwise. Whoever crashes leaves at once.

Whoever joins gets parameters from a neighbour. If all who had some are gone, nobody can begin any more: then the run is
over, well if some had come to their end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from paceline.core.messages import View
from paceline.errors import RunFailed
from paceline.runtime.live.driver.key_registry import KeyRegistry
from paceline.runtime.live.driver.processes import Workers
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.runtime.live.storage.final_parameters import final_name

BEREFT_S = 2.0
"""How long a peer that has just got its parameters may take to say so, when all others are gone."""


@dataclass(eq=False)
class PeerPlaces:
    """For whom there is a place in the graph: nobody can be added to it."""

    state: RunState
    count: int

    def has(self, rank: int) -> bool:
        return not self.state.without_servers or rank < self.count

    @property
    def full(self) -> str:
        return f"the graph has places for {self.count} peers, and all are taken"


@dataclass(eq=False)
class PeerEndpoints:
    """Where each peer is, if the run crosses hosts. Whose key is whose the driver knows by itself."""

    multihost: bool
    described: Mapping[Process, wire.Describe]
    keys: KeyRegistry

    def of(self, view: View) -> tuple[Endpoint, ...]:
        """Returns where the members of a view are, in its order."""
        return tuple(self._endpoint(process) for process in view.members) if self.multihost else ()

    def _endpoint(self, process: Process) -> Endpoint:
        endpoint = self.described[process].endpoint or Endpoint(process[1])
        return structs.replace(endpoint, key=self.keys.known.get(process, ""))


@dataclass(eq=False)
class Peers:
    """Follows which peers have parameters, and which are done."""

    state: RunState
    roster: Roster
    workers: Workers
    endpoints: PeerEndpoints
    tell: Callable[[int, int, wire.ToWorker], None]
    announce_at_work: Callable[[View], None]
    """Gets the views without those who are done."""
    folder: Path
    holding: set[Process] = field(default_factory=set)
    """Members that have parameters."""
    done: set[Process] = field(default_factory=set)
    """Members that have done their iterations."""
    bereft_s: float | None = None
    """Since when no member has any."""

    def announce(self, view: View) -> None:
        self.announce_at_work(self.at_work(view))
        if not self.state.without_servers:
            return
        if view.number == 1:
            self.holding.update(view.members)
        self.holding.intersection_update(view.members)
        for process in {*view.members, *self.done}:
            self.tell(*process, wire.NewView(view, self.endpoints.of(view)))
        self.done.intersection_update(view.members)
        self._consider_ending()

    def at_work(self, view: View) -> View:
        """The view without those who are done: samples they hold are for others."""
        return View(view.number, tuple(process for process in view.members if process not in self.done))

    def take_done(self, leave: wire.Leave) -> None:
        """A peer has done its iterations, and stays."""
        process = (leave.rank, leave.incarnation)
        if not self.roster.has(*process):
            view = self.roster.view()
            self.tell(*process, wire.NewView(view, self.endpoints.of(view)))
            return
        self.done.add(process)
        self.announce_at_work(self.at_work(self.roster.renumber()))
        self.tell_done(*self.roster.members.items())
        self._consider_ending()

    def tell_done(self, *to: Process) -> None:
        """Tell these who is done."""
        if self.done:
            for process in to:
                self.tell(*process, wire.Done(tuple(sorted(self.done))))

    def go_without(self, said: wire.Without) -> None:
        if (said.rank, said.incarnation) in self.done:
            self.roster.remove(said.rank, said.incarnation)

    def _consider_ending(self) -> None:
        """If all that are left are done, let them go."""
        members = self.roster.members
        if members and self.done.issuperset(members.items()):
            self.roster.remove_all()

    def take_status(self, said: wire.PeerStatus) -> bool:
        """A peer has parameters. Returns whether it is a member."""
        process = (said.rank, said.incarnation)
        if self.roster.has(*process):
            self.holding.add(process)
            return True
        return False

    def tick(self) -> None:
        """See to it that nobody waits for parameters that nobody has."""
        state = self.state
        if not state.without_servers or not state.begun or self.holding or not self.roster.members:
            self.bereft_s = None
            return
        self.bereft_s = self.bereft_s or time.monotonic()
        if time.monotonic() - self.bereft_s < BEREFT_S:
            return
        if not any(self.folder.glob(final_name("*"))):
            raise RunFailed("every peer that had parameters was killed: those that joined have nobody to begin with")
        if not state.stopping:
            self.workers.stop("the others are done", state.ending)
