"""Who takes part in a live run: who joins later, who is refused.

Worker 0's description of the model becomes the run's; everybody else's must have the same digest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.control.admission import (
    AdmissionEvent,
    Admitter,
    AdmitWorker,
    BeginningOrder,
    ChangeEnded,
    RefuseWorker,
    StopWorker,
    WorkerDescribed,
)
from paceline.runtime.live.driver.health import HealthMonitor
from paceline.runtime.live.driver.lr_scheduler_states import LRSchedulerStates
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.driver.peer_setup import PeerSetup
from paceline.runtime.live.driver.peers import PeerPlaces, Peers
from paceline.runtime.live.driver.processes import Workers
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.server_resizing import ServerResizing
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.protocol import wire


@dataclass(eq=False)
class Welcome:
    """Tells a member all that it needs to begin."""

    state: RunState
    roster: Roster
    messenger: Messenger
    servers: Servers
    resizing: ServerResizing
    peers: Peers
    peer_setup: PeerSetup
    health: HealthMonitor
    schedulers: LRSchedulerStates
    resumed: bool

    def tell(self, rank: int, incarnation: int) -> None:
        state, view = self.state, self.roster.view()
        endpoints = self.peers.endpoints.of(view) if state.without_servers else self.servers.current_endpoints
        begin = wire.Begin(
            view, str(state.model.policy), state.epoch_s, self.health.hyper, self.servers.assignment, endpoints,
            self.resizing.last, self.resumed, self.peer_setup.before, self.peer_setup.graph, self.schedulers.now,
        )  # fmt: skip
        self.messenger.to_worker(rank, incarnation, begin)
        self.peers.tell_done((rank, incarnation))


@dataclass(eq=False)
class Admission:
    """Tells the machine who comes, and takes in or refuses whom it says (`core/control/admission.py`)."""

    machine: Admitter
    state: RunState
    roster: Roster
    workers: Workers
    messenger: Messenger
    places: PeerPlaces
    resizing: ServerResizing
    welcome: Welcome
    described: dict[tuple[int, int], wire.Describe]
    begin: Callable[[BeginningOrder], None]
    """Does what the machine orders before the run has begun."""
    say: Callable[[str], None]

    def take(self, message: wire.Describe) -> None:
        """A worker has described its model."""
        self.described[message.rank, message.incarnation] = message
        stopping, changing = self.state.stopping, self.resizing.under_way
        self.deliver(WorkerDescribed(message.rank, message.incarnation, message.digest, stopping, changing))

    def admit_waiting(self) -> None:
        """Hear those who came while the servers were changing, if they are still there."""
        if self.machine.waiting:
            self.deliver(ChangeEnded(self.workers.processes(), self.state.stopping))

    def deliver(self, event: AdmissionEvent) -> None:
        for order in self.machine.handle(event):
            match order:
                case AdmitWorker(rank, incarnation):
                    self.roster.admit({rank: incarnation})
                    self.say(f"worker {rank} joined")
                    self.welcome.tell(rank, incarnation)
                case RefuseWorker(rank, incarnation, "full"):
                    self.turn_away(rank, incarnation, self.places.full)
                case RefuseWorker(rank, incarnation):
                    self.turn_away(
                        rank,
                        incarnation,
                        f"the model of worker {rank} differs from worker 0's (names, shapes, groups or dtype of the "
                        "parameters, kind of optimizer, policy): build the same on every worker",
                    )
                case StopWorker(rank, incarnation):
                    self.messenger.to_worker(rank, incarnation, wire.Stop("the run is ending"))
                case _:
                    self.begin(order)

    def turn_away(self, rank: int, incarnation: int, reason: str) -> None:
        """Refuse a worker that does not fit into the run; its script is told why."""
        self.described.pop((rank, incarnation), None)
        self.roster.remove(rank, incarnation)
        self.messenger.to_worker(rank, incarnation, wire.Refuse(reason))
